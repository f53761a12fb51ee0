"""What a file was measured to be worth, sealed in it, and the demands that an import may make of it."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from formats.container import TensorPlan, open_container, write_container
from formats.errors import QualityError, counted
from formats.manifest import Manifest, ModelInfo
from kvtool.compat import short
from kvtool.evaluation import ArmResult, EvalReport
from kvtool.identity_config import config_digest

STEP = "eval"
MEASURES = ("kl", "kl_p99", "nll_gap", "top1", "n")  # top1 and n are at least, the others at most, what is asked for
_LIMIT = re.compile(r"([a-z0-9_]+)=(\d+(?:\.\d+)?(?:e-?\d+)?)")


def seal(report: EvalReport, model: ModelInfo) -> dict[str, Any]:
    """Write a report into its file's quality record, atomically: tensors are copied as they are. Returns the entry.

    Args:
        report: of `evaluate`, with the arm "transferred".
        model: who scored.

    Raises:
        ValueError: no such arm.
        OSError: as the system gives it.
    """
    if all(arm.arm != "transferred" for arm in report.arms):
        raise ValueError("[seal] the arms must hold 'transferred', which is what the file is worth.")
    entry: dict[str, Any] = {
        "step": STEP,
        "model": model.name,
        "weights": model.effective_weights,
        **({} if model.config is None else {"config": config_digest(model.config)}),
        "text": report.text,
        "prefix": report.prefix,
        "n": report.n,
        "arms": {arm.arm: _figures(arm) for arm in report.arms},
        "seconds": seconds_of(report),
    }
    entry["note"] = _note(report, entry["seconds"])
    with open_container(report.path) as reader:
        manifest = reader.manifest
        plans = [
            TensorPlan(name, t.dtype, tuple(t.shape), partial(reader.array, name), compress=t.encoding != "none")
            for name, t in reader.tensors.items()
        ]
        # An older seal of the same model and text says nothing that this one does not.
        kept = tuple(step for step in manifest.quality if not _same(step, entry))
        write_container(report.path, replace(manifest, quality=(*kept, entry)), plans)
    return entry


def seconds_of(report: EvalReport) -> dict[str, float]:
    """Seconds to have the cache: `prefill` of the receiver's own, and `transfer`, with its parts.

    The parts are `load` of this file and, where it was handed over from another model, `recode`: what that took when it was written
    (opening file and map, mapping, recomputing), which its record says.
    """
    found = {"prefill": report.arm("own").seconds, "load": report.arm("transferred").seconds}
    handed = [step.get("seconds") for step in report.quality if step.get("step") == "transfer"]
    last = _object(handed[-1]) if handed else {}
    found["recode"] = sum(float(value) for value in last.values() if isinstance(value, int | float) and not isinstance(value, bool))
    found["transfer"] = found["load"] + found["recode"]
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def parse_limits(text: str) -> dict[str, float]:
    """From "kl=0.05,top1=0.9".

    Raises:
        ValueError: an unknown measure, or no number.
    """
    found: dict[str, float] = {}
    for word in text.split(","):
        match = _LIMIT.fullmatch(word.strip())
        if match is None or match[1] not in MEASURES or match[1] in found:
            raise ValueError(f"[require] must be some of {'=X, '.join(MEASURES)}=X, such as kl=0.05,top1=0.9, but got {text!r}.")
        found[match[1]] = float(match[2])
    return found


def require(path: str | os.PathLike[str], manifest: Manifest, model: ModelInfo, limits: Mapping[str, float]) -> dict[str, Any]:
    """The newest seal of a file for a model, if it is as good as is asked for.

    Args:
        limits: from `parse_limits`.

    Raises:
        QualityError: no seal of this model since the last change of the file, or one that is not good enough.
    """
    path = os.fspath(path)
    own = None if model.config is None else config_digest(model.config)
    seals = [
        step
        for step in _since_last_change(manifest.quality)
        if step.get("weights") == model.effective_weights and (own is None or step.get("config", own) == own)
    ]
    if not seals or model.weights is None:
        raise QualityError(
            f"nothing measured in it for {model.name} with weights {short(model.effective_weights)}",
            path=path,
            hint=f"kvtool eval {path} --model {model.name} --text F --seal",
        )
    figures = {**_object(_object(seals[-1].get("arms")).get("transferred")), "n": seals[-1].get("n")}
    missed = []
    for name, limit in limits.items():
        value = figures.get(name)
        if not isinstance(value, int | float):
            missed.append(f"{name} is not among what was measured")
        elif value < limit if name in ("top1", "n") else value > limit:
            missed.append(f"{name} {value:g}, asked for {'at least' if name in ('top1', 'n') else 'at most'} {limit:g}")
    if missed:
        raise QualityError("; ".join(missed), path=path, hint="recompute more of it, or use a codec of more bits, and seal again")
    return dict(seals[-1])


def _since_last_change(quality: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Seals after the last step that changed the rows: what was measured before it is no longer true."""
    last = max((i for i, step in enumerate(quality) if step.get("step") != STEP), default=-1)
    return list(quality[last + 1 :])


def _same(step: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return all(step.get(name) == entry[name] for name in ("step", "weights", "text", "n"))


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _figures(arm: ArmResult) -> dict[str, float]:
    figures = {"nll": arm.nll, "nll_gap": arm.nll_gap, "kl": arm.kl, "kl_p99": arm.kl_p99, "top1": arm.top1, "seconds": arm.seconds}
    return {name: float(f"{value:.5g}") for name, value in figures.items()}


def _note(report: EvalReport, seconds: Mapping[str, float]) -> str:
    words = [f"{arm.arm} KL {arm.kl:.4g}, top-1 {arm.top1:.3f}" for arm in report.arms if arm.arm != "own"]
    took = f"own prefill {seconds['prefill']:.3g} s, transfer {seconds['transfer']:.3g} s"
    return f"{counted(report.n, 'position')} in {report.model}: {'; '.join(words)}; {took}"
