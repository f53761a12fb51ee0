"""What a recode gives in every model file of mlx-lm that rotates keys, for tests/results/rope-families.md.

    python -m tests.rope_families

A tiny random model of each file runs 12 tokens; its twin, of the same weights, has another base, scaling or magnitude in every live rope
module. The twin's file is recoded to the model, in place and 1000 positions further on, and its first rotated rows are compared with
those that the model's own prefill caches there. Where a file takes a scaling from its config, each kind of mlx-lm is tried: the file of
the model with plain RoPE is recoded to the scaled one. A rope class that the recode overlooked leaves rows that differ, hence an error.
"""

import dataclasses
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, make_prompt_cache

import kvtool
from formats.errors import IncompatibleError
from kvtool.probe import CacheProbe, probe_model
from kvtool.states import CacheState
from tests.library import loaded
from tests.tiny_random import _TEXT_CONFIG, NOT_BUILT, _source, build_file, file_config, model_files, tokens
from veloxquant_mlx.caches import families
from veloxquant_mlx.transfer.rope_spec import RopeSpec

RESULT = Path(__file__).parent / "results" / "rope-families.md"
IDS = tokens(12, seed=1)[0].tolist()
SHIFT = 1000
LARGEST_ERROR = 1e-5  # of the largest entry; float32 through one rotation gives 5e-7, a wrong pair 1e-1
LEAST_DIFFERENCE = 0.05
Place = tuple[int, ...]
NOT_TAKEN = (
    AssertionError,
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
)  # what mlx-lm raises where a config asks for what a file lacks
PLAIN = {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4, "type": "default", "rope_type": "default"}}

_LENGTH = {"original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_LENGTH},
    "yarn": {"factor": 4.0, "beta_fast": 16, "beta_slow": 2, **_LENGTH},
    "longrope": {"factor": 64.0, **_LENGTH},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "mrope": {"mrope_section": [1, 1, 2]},
    "dynamic": {"factor": 2.0},
}


class Standing(KVCache):
    """Stands at an offset without rows before it and keeps the rows it is given: what the first rotated layer caches depends on none."""

    def __init__(self, offset: int) -> None:
        super().__init__()
        self.offset = self.start_position = offset  # start_position: of a ChunkedKVCache
        self.rows: dict[str, mx.array] = {}
        self.max_size = 1 << 30
        self.keep = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.rows = {"k": keys, "v": values}
        self.keys, self.values = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.rows["k"], self.rows["v"]

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        return None

    def maybe_trim_front(self) -> None:
        """Of a ChunkedKVCache."""


def prefill_rows(model: nn.Module, offset: int) -> dict[tuple[Place, str], np.ndarray]:
    """Rows that a forward of IDS from `offset` on caches, by place (layer, and place in a list of caches) and role."""

    def standing(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(standing, cache.caches))
        return cache if isinstance(cache, ArraysCache) else Standing(offset)

    def rows_of(cache: Any, place: Place) -> Iterator[tuple[tuple[Place, str], mx.array]]:
        if isinstance(cache, CacheList):
            for i, member in enumerate(cache.caches):
                yield from rows_of(member, (*place, i))
        elif isinstance(cache, Standing):
            yield from (((place, role), x[0]) for role, x in cache.rows.items() if x.size)

    caches = [standing(cache) for cache in make_prompt_cache(model)]
    model(mx.array(IDS)[None], cache=caches)
    return {where: np.array(x) for i, cache in enumerate(caches) for where, x in rows_of(cache, (i,))}


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference over the largest entry."""
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def first_rotated(
    model: nn.Module,
) -> tuple[tuple[Place, str] | None, dict[tuple[Place, str], np.ndarray], dict[tuple[Place, str], np.ndarray]]:
    """The first rows that turn with the position, found by running the model alone, and all rows at 0 and at SHIFT."""
    here, there = prefill_rows(model, 0), prefill_rows(model, SHIFT)
    return next((where for where in here if difference(here[where], there[where]) > 1e-3), None), here, there


def altered(model: nn.Module) -> nn.Module:
    """The model with another rotation in every rope module: base or periods, scale and magnitude, whichever it has."""
    for _, module in model.named_modules():
        if isinstance(module, nn.RoPE):
            module.base, module.scale = 7 * module.base, 0.5 * module.scale
        for name in ("_freqs", "_rope_freqs"):
            if isinstance(getattr(module, name, None), mx.array):
                periods = getattr(module, name)
                setattr(module, name, periods * mx.linspace(1.3, 2.0, periods.size))
        for name in ("mscale", "_scale"):
            if hasattr(module, "_freqs") and isinstance(getattr(module, name, None), float | int):
                setattr(module, name, 1.25 * getattr(module, name))
    return model


@dataclass(frozen=True)
class Row:
    """What a recode to a model gave.

    Attributes:
        status: "exact", "refused", "wrong", "none" (no rotation), "alike" (as with plain RoPE) or "unbuilt".
        kind: of the target's rotation.
        error: of rows in place and moved, at most.
        reason: why not.
    """

    status: str
    kind: str = ""
    error: float | None = None
    reason: str = ""


def kind_of(probes: Sequence[CacheProbe], place: Place, role: str) -> str:
    """The rotation of a slot in words."""
    slot = getattr(reduce(lambda probe, i: probe.caches[i], place[1:], probes[place[0]]), role)
    spec: RopeSpec = slot.rope
    words = [spec.kind, *(["interleaved"] if spec.pairing == "interleaved" else [])]
    if spec.dims < slot.dim:
        words.append(f"{'last' if spec.first else 'first'} {spec.dims} of {slot.dim}")
    if spec.magnitude != 1:
        words.append(f"times {spec.magnitude:.2f}")
    return ", ".join([*words, *(["in the value slot"] if role == "v" else [])])


def recoded(source: nn.Module, target: nn.Module) -> Row:
    """The file of `source` recoded to `target`, beside the target's own prefill."""
    try:
        probes = probe_model(target)
    except IncompatibleError as error:
        return Row("refused", reason=error.what)
    where, here, there = first_rotated(target)
    if where is None:
        return Row("none")
    place, role = where
    models = [loaded(model, name) for model, name in ((source, "source"), (target, "target"))]
    with tempfile.TemporaryDirectory() as folder:
        a = Path(folder, "a.kv")
        try:
            kvtool.save(kvtool.capture(models[0], IDS), a)
            for shift in (0, SHIFT):
                kvtool.recode(a, Path(folder, f"{shift}.kv"), to_model=models[1], shift=shift)
        except IncompatibleError as error:
            return Row("refused", reason=error.what)
        found = [rows_at(Path(folder, name), place, role) for name in ("a.kv", "0.kv", f"{SHIFT}.kv")]
    own = [rows[where][:, : found[0].shape[1]] for rows in (here, here, there)]
    moved, *errors = map(difference, found, own)
    kind = kind_of(probes, place, role)
    if moved < LEAST_DIFFERENCE:
        return Row("alike", kind, max(errors))
    return Row("exact" if max(errors) < LARGEST_ERROR else "wrong", kind, max(errors))


def rows_at(path: Path, place: Place, role: str) -> np.ndarray:
    """(H, S, D) of a file."""
    with kvtool.open(path) as archive:
        state: CacheState = archive.state(place[0])
        for i in place[1:]:
            state = state.caches[i]
        return np.array(getattr(state, role))


def measure(name: str) -> Row:
    """The row of a model file as it is built here."""
    if name in NOT_BUILT:
        return Row("unbuilt", reason=NOT_BUILT[name])
    if families.family(name)[0] == "refused":
        return Row("unbuilt", reason=f"mlx-lm's own file cannot run it: {families.family(name)[1]}")
    return recoded(altered(build_file(name)), build_file(name))


def scaled(name: str, kind: str, dims: int) -> dict[str, Any] | None:
    """Changes of a file's config that ask for a kind of scaling of `dims` rotated entries, or None where it has no place for one."""
    if name in _TEXT_CONFIG:  # the file of its text_config has a row of its own
        return None
    fields = {field.name for field in dataclasses.fields(_source(name).ModelArgs)}
    scaling = {"type": kind, "rope_type": kind, **SCALINGS[kind]}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * (dims // 2), "long_factor": [2.0 + i for i in range(dims // 2)]}
    if "rope_scaling" in fields:
        return {"rope_scaling": scaling}
    given = file_config(name).get("rope_parameters")
    if "rope_parameters" not in fields or (isinstance(given, dict) and any(isinstance(value, dict) for value in given.values())):
        return None
    return {"rope_parameters": {**PLAIN["rope_parameters"], **scaling}}


def scalings(name: str) -> dict[str, Row]:
    """What a file of the model with plain RoPE gives when recoded to each kind of scaling that the config can ask for."""
    changes = scaled(name, "linear", 2)
    if changes is None or measure(name).status != "exact":
        return {}
    try:
        source = build_file(name, **{key: PLAIN[key] for key in changes})
    except NOT_TAKEN:
        return {}  # it must have a scaling: that of the first column
    place, role = first_rotated(source)[0] or ((), "")
    rope = getattr(reduce(lambda probe, i: probe.caches[i], place[1:], probe_model(source)[place[0]]), role).rope
    return {kind: _scaling(source, name, scaled(name, kind, rope.dims) or {}) for kind in SCALINGS}


def _scaling(source: nn.Module, name: str, changes: dict[str, Any]) -> Row:
    try:
        target = build_file(name, **changes)
    except NOT_TAKEN as error:
        return Row("unbuilt", reason=f"{type(error).__name__}: {error}")
    return recoded(source, target)


# --- the table -------------------------------------------------------------------------------------------------------------------


def cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.error is None or row.status == "alike":
        return {"alike": "unused", "unbuilt": "-"}.get(row.status, row.status)
    return f"{row.error:.0e}" if row.status == "exact" else f"WRONG {row.error:.0e}"


def first_cells(name: str, row: Row) -> str:
    """The beginning of a file's line."""
    return f"| {name} | {row.kind or '-'} | {cell(row)} |"


def render(rows: dict[str, Row], by_kind: dict[str, dict[str, Row]]) -> str:
    """The result file."""
    refusals: dict[str, list[str]] = {}
    for name, row in rows.items():
        if row.reason:
            refusals.setdefault(row.reason, []).append(name)
    for name, kinds in by_kind.items():
        for kind, row in kinds.items():
            if row.status == "refused":
                refusals.setdefault(row.reason, []).append(f"{name} ({kind})")
    lines = [f"{first_cells(name, row)} {' | '.join(cell(by_kind[name].get(kind)) for kind in SCALINGS)} |" for name, row in rows.items()]
    counts = Counter(row.status for row in rows.values())
    return HEAD.format(
        version=mlx_lm.__version__,
        files=len(rows),
        exact=counts["exact"],
        none=counts["none"],
        refused=counts["refused"],
        unbuilt=counts["unbuilt"],
        kinds=" | ".join(SCALINGS),
        rules="|---" * len(SCALINGS),
        rows="\n".join(lines),
        reasons="\n".join(f"- {', '.join(names)}: {reason}" for reason, names in refusals.items()),
    )


HEAD = """# Recoding keys in every model file of mlx-lm

`python -m tests.rope_families`, mlx-lm {version}, float32, tiny random models of {files} files. An error is the largest difference to the
target's own prefill over the largest entry, of the first rows that are rotated.

Second column: the rotation as built. Third: from a twin with another base (or periods), scale and magnitude, in place and 1000 positions
further on. The rest: from the model with plain RoPE to each scaling that the config can ask for; unused: the first rotated layer turns as
without it; -: mlx-lm does not build it; empty: no place for it.

{exact} files exact, {none} without rotation, {refused} refused, {unbuilt} not run.

| file | rotation | changed | {kinds} |
|---|---|---{rules}|
{rows}

Refused or not run:

{reasons}
"""


def main() -> None:
    mx.disable_compile()
    rows = {name: measure(name) for name in model_files()}
    text = render(rows, {name: scalings(name) for name in rows})
    RESULT.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
