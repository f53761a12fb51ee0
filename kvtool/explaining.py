"""Why a file fits a model or not: each field of its identity beside the model's, and what bridges the difference.

    identical     import takes the file as it is
    calibration   it would, were the calibration here that the file was coded with
    recode        the same weights; keys rotated otherwise, or at other positions: kvtool recode
    precision     the same weights in another precision, as far as a sample of them tells: the rows as they are
    fine-tune     other weights, adapter or config in the same architecture and shapes, same tokenizer: a fitted map, or rows as they are
    other weights the same for another architecture
    map           other shapes, same tokenizer: a fitted map
    alignment     another tokenizer: a fitted map over tokens that end at the same places of the text
    impossible    a tokenizer that cannot be aligned, or layers that can be neither rotated nor mapped

The checks are those of import, recode and fit themselves.
"""

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from formats.errors import IncompatibleError
from formats.manifest import CacheInfo
from kvtool import tiny
from kvtool.archive import Archive
from kvtool.archive import open as open_archive
from kvtool.bridges.alignment import OVERLAP, token_bytes
from kvtool.bridges.pairs import check_layers_of
from kvtool.bridges.transferring import source_of
from kvtool.calibrations import KINDS, Calibration
from kvtool.compat import check_rows, computing_problems, identity_layers, layer_problems, not_compared, rope_problems, told_apart
from kvtool.hidden import check_stream
from kvtool.identity_sketch import SAMPLES, likeness
from kvtool.model import LoadedModel
from kvtool.probe import probe_model
from kvtool.recoding import check_recode
from veloxquant_mlx.codecs.tc import CARRIED

RECOMPUTE = "first=4,newest=14%"
UNMEASURED = "what other weights lose is not known before kvtool eval measures it; --seal writes it into the file, for import --require"
SUMMARIES = {
    "identical": "import takes the file as it is",
    "calibration": "import takes the file once the calibration is here that it was coded with",
    "recode": "the same weights, but keys rotated otherwise or at other positions: a recode rotates them",
    "precision": "the same weights in another precision, as far as a sample of them tells: the rows carry over with a loss",
    "fine-tune": "other weights, adapter or config in the same architecture and shapes, same tokenizer: the rows carry over with a loss",
    "other weights": "other weights and architecture in the same shapes, same tokenizer: the rows carry over with a loss",
    "map": "other shapes, same tokenizer: a fitted map carries the rows over with a loss",
    "alignment": "another tokenizer: a map fitted over tokens that end at the same places of the text carries the rows over with a loss",
    "impossible": "nothing carries this cache over: run the prompt again",
}


@dataclass(frozen=True)
class Field:
    """One field of a file's identity beside the model's.

    Attributes:
        name: of a layer of the identity (`kvtool.compat`), or dtype, token ids, layers, RoPE, positions or calibration.
        same: whether it fits; None where that could not be compared.
        blocks: whether import refuses a file over it.
        differences: what differs, with both values.
    """

    name: str
    same: bool | None
    blocks: bool
    differences: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """How a file stands to a model.

    Attributes:
        path: the file.
        computed_by, model: names.
        verdict: a key of `SUMMARIES`, whose text is `summary`.
        accepted: whether import takes the file as it is.
        fields: each field of the identity.
        reasons: why a bridge is not open.
        history: lossy steps that the rows have behind them, oldest first, as the file records them.
        commands: what to run, one after the other, for the best bridge.
        instead: other ways, each complete.
        notes: what to know of them.
        arrays: how many arrays of keys, values and token ids were compared with their digests; None where they were not read.
    """

    path: str
    computed_by: str
    model: str
    verdict: str
    summary: str
    accepted: bool
    fields: tuple[Field, ...]
    history: tuple[dict[str, Any], ...] = ()
    reasons: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    arrays: int | None = None


def explain(
    source: str | os.PathLike[str],
    model: LoadedModel,
    *,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    check: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Explanation:
    """How a file stands to a model, and what bridges the difference. Reads the file's header alone, unless asked for more.

    Args:
        source: a kvtool file.
        model: the model that would go on.
        calibration: as in `load`.
        check: compare every array with its digest first.
        progress: called with (stored bytes compared, in all).
    Raises:
        FormatError, IntegrityError: what is wrong with the file, by name.
    """
    with open_archive(source, calibration=calibration) as archive:
        if check and (damaged := archive.reader.verify(progress)):
            raise damaged[0].error
        found = _Explainer(archive, model).explain()
        return replace(found, arrays=len(archive.reader.tensors)) if check else found


class _Explainer:
    def __init__(self, archive: Archive, model: LoadedModel) -> None:
        self.archive, self.model = archive, model
        self.probes = probe_model(model.model)
        self.theirs, self.ours = archive.manifest.model, model.info
        self.alike = likeness(self.theirs.sketch, self.ours.sketch)
        self.shift = 0

    def explain(self) -> Explanation:
        fields = self._fields()
        refused = _refusal(lambda: self.archive.check(self.model))
        verdict, reasons = self._verdict(fields, refused)
        commands, instead, notes = self._ways(verdict, reasons)
        path, names = self.archive.path, (self.theirs.name, self.ours.name)
        if computing_problems(self.theirs, self.ours):
            names = told_apart(self.theirs, self.ours)
        accepted = verdict == "identical"
        history = tuple(self.archive.manifest.quality)
        return Explanation(path, *names, verdict, SUMMARIES[verdict], accepted, fields, history, tuple(reasons), commands, instead, notes)

    def _fields(self) -> tuple[Field, ...]:
        archive, manifest = self.archive, self.archive.manifest
        fields = [
            Field(layer.name, layer.same, layer.blocks, layer.differences)
            for layer in identity_layers(manifest.model, self.ours, rope=bool(manifest.extra.get("rope_problems")))
        ]
        same_dtype = self.theirs.dtype == self.ours.dtype
        dtypes = () if same_dtype else (f"file {self.theirs.dtype or 'as stored'}, model {self.ours.dtype or 'as stored'}; rows are cast",)
        fields.append(Field("dtype", same_dtype, False, dtypes))
        fields.append(_field("token ids", _texts(_refusal(lambda: archive.check_tokens(self.model)))))
        layers = layer_problems(manifest.layers, self.probes)
        fields.append(_field("layers", layers))
        if layers:
            fields += [Field(name, None, True, ("not compared: the layers do not fit",)) for name in ("RoPE", "positions")]
        else:
            fields.append(_field("RoPE", list(rope_problems(archive.reader, self.probes, self.ours))))
            moved = _refusal(lambda: check_rows(archive.path, manifest.layers, self.probes, archive.length))
            self.shift = 0 if moved is None else _shift(manifest.layers, archive.length)
            fields.append(_field("positions", _texts(moved)))
        fields.append(_field("calibration", [text for text in map(self._absent, self._calibrations()) if text is not None]))
        return tuple(fields)

    def _calibrations(self) -> list[str]:
        named = [codec.params.get("tables") for codec in self.archive.manifest.codecs if codec.id in KINDS]
        return [digest for digest in dict.fromkeys(named) if isinstance(digest, str) and digest != CARRIED]

    def _absent(self, digest: str) -> str | None:
        return _refusal(lambda: self.archive.decoder.shelf.get(digest, self.theirs.name))

    def _verdict(self, fields: tuple[Field, ...], refused: str | None) -> tuple[str, list[str]]:
        """The verdict, and why bridges before it are not open."""
        differ = {field.name for field in fields if field.same is False}
        if refused is None:
            return ("calibration" if "calibration" in differ else "identical"), []
        if "tokenizer" in differ or "token ids" in differ:
            reasons = ["recode: its tokens are not those of the model's tokenizer"]
            unaligned = self._alignment_refusal(differ)
            return ("alignment", reasons) if unaligned is None else ("impossible", [*reasons, f"map: {unaligned}"])
        recode = _refusal(lambda: check_recode(self.archive, self.model))
        mapped = self._map_refusal()
        if recode is None and not computing_problems(self.theirs, self.ours):
            return "recode", []
        reasons = [f"{label}: {text}" for label, text in (("recode", recode), ("map", mapped)) if text is not None]
        if recode is None and "architecture" in differ:
            return "other weights", reasons
        if recode is None:
            return ("precision" if self._same_in_another_precision(differ) else "fine-tune"), reasons
        other = differ & {"weights", "adapter", "quantisation", "config", "layers"}
        return ("map" if mapped is None and other else "impossible"), reasons

    def _same_in_another_precision(self, differ: set[str]) -> bool:
        """Whether only how weights are stored differs of who computes, and the sampled ones are the same but for that."""
        if "weights" not in differ or differ & {"adapter", "config"} or self.theirs.sketch is None or self.ours.sketch is None:
            return False
        otherwise = "quantisation" in differ or self.theirs.sketch["dtype"] != self.ours.sketch["dtype"]
        return otherwise and self.alike is not None and self.alike.same

    def _alignment_refusal(self, differ: set[str]) -> str | None:
        """Why no map over aligned tokens can be made, or None. What the file's tokenizer is like is not known here."""
        if "tokenizer" not in differ or self.theirs.tokenizer is None or self.ours.tokenizer is None:
            return "its tokens are not those of a known tokenizer"
        if not computing_problems(self.theirs, self.ours):
            return "the same weights have one tokenizer"
        return self._map_refusal() or _refusal(lambda: token_bytes(self.model, ()))

    def _map_refusal(self) -> str | None:
        return _refusal(lambda: source_of(self.archive)) or _refusal(lambda: check_layers_of(self.model))

    def _ways(self, verdict: str, reasons: list[str]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Commands, other ways, and what to know of them."""
        path, name, own = self.archive.path, self.model.argument, self.model.arguments
        recode = ["kvtool", "recode", path, "-o", "OUT.kv", "--to-model", *own]
        if self.shift:
            recode += ["--shift", str(-self.shift)]
        measure = shlex.join(["kvtool", "eval", "OUT.kv", "--model", *own, "--text", "rest.txt", "--seal"])
        notes = [f"{text}: recode and eval take it as --calibration FILE" for text in map(self._absent, self._calibrations()) if text]
        notes += not_compared(self.theirs, self.ours)
        if verdict == "identical":
            return (shlex.join(["kvtool", "import", path, "--model", *own]),), (), tuple(notes)
        if verdict == "calibration":
            return (f"{shlex.join(['kvtool', 'import', path, '--model', *own])} --calibration FILE",), (), tuple(notes)
        if verdict == "impossible":
            return (), (), ()
        if verdict == "recode":
            notes.insert(0, "keys are rotated exactly; what else another rotation would have changed in the rows, kvtool eval measures")
            return (shlex.join(recode), measure), (), tuple(notes)
        notes = [UNMEASURED, *notes]
        if self.alike is not None:
            notes.append(
                f"of {SAMPLES} sampled weights {self.alike.within:.1%} are as near as their precisions account for, the farthest at "
                f"{self.alike.farthest:.2g} times that; correlation {self.alike.correlation:.5f}"
            )
        if verdict == "precision":
            return (shlex.join(recode), measure), (), tuple(notes)
        blocked = {text.partition(":")[0] for text in reasons}
        if "map" in blocked:
            return (shlex.join(recode), measure), (), tuple(notes)
        adapters = ["--adapter-a", "ADAPTER"] if self.theirs.adapter is not None else []
        adapters += [] if self.model.adapter is None else ["--adapter-b", str(self.model.adapter)]
        aligned = verdict == "alignment"
        fit = shlex.join(
            ["kvtool", "fit", self.theirs.name, name, *adapters, *(["--overlap", str(OVERLAP)] if aligned else []), "-o", "MAP.safetensors"]
        )
        by = ["--from-model", self.theirs.name] if aligned else []
        # A token of another tokenizer says in its first layer's rows which it is, and these cost next to nothing.
        plan = f"layers=0-1,{RECOMPUTE}" if aligned and _refusal(lambda: check_stream(self.model)) is None else RECOMPUTE
        across = shlex.join([*recode, "--map", "MAP.safetensors", *by, "--recompute", plan])
        shipped = "the model that ships with kvtool: if the file's is another, give its folder or repository"
        other = "the file names it: give the folder or repository of that model"
        notes.insert(0, f"kvtool fit takes {self.theirs.name!r} as {shipped if self.theirs.name in tiny.NAMES else other}")
        return (fit, across, measure), (() if "recode" in blocked else (shlex.join(recode),)), tuple(notes)


def _field(name: str, differences: list[str]) -> Field:
    return Field(name, not differences, True, tuple(differences))


def _texts(problem: str | None) -> list[str]:
    return [] if problem is None else [problem]


def _refusal(check: Callable[[], object]) -> str | None:
    """Why a check refuses, or None."""
    try:
        check()
    except IncompatibleError as error:
        return error.what
    return None


def _shift(layers: tuple[CacheInfo, ...], length: int) -> int:
    """How far the rows stand from where a live cache would have them."""
    for info in layers:
        if info.positions:
            return info.offset - length
        inner = _shift(info.caches, length)
        if inner:
            return inner
    return 0
