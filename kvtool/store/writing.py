"""Cut a prompt's cache into chunks and write them, each from its own rows alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvtool.archive import write_archive
from kvtool.binding import bind, layer_sources, own_moments
from kvtool.calibrations import Calibration, is_calibrated
from kvtool.capturing import Snapshot
from kvtool.encoding import Encoder
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe
from kvtool.states import CacheState, Quantized
from veloxquant_mlx.codecs import Codec, CodecPlan
from veloxquant_mlx.codecs.raw import Raw


@dataclass(frozen=True)
class Piece:
    """Rows to be written as one object.

    Attributes:
        name: of the object.
        start, stop: the rows.
        recent: newest rows that stay exact; 0 of a chunk.
        parent: key of the chunk, or the space, that it follows.
        tail: whether it is the end of one prompt.
    """

    name: str
    start: int
    stop: int
    recent: int
    parent: str
    tail: bool = False


def whole_reason(snapshot: Snapshot, plan: CodecPlan, calibration: Calibration | None) -> str | None:
    """Why a prompt's cache is kept in one piece, found by exactly its own tokens; None where it can be cut."""
    for i, state in enumerate(snapshot.states):
        if len(state.positions) > 1:
            return f"layer {i} holds rows that do not follow one another"
    return uncut_reason(snapshot.probes, plan, calibration)


def uncut_reason(probes: Sequence[CacheProbe], plan: CodecPlan, calibration: Calibration | None) -> str | None:
    """Why no cache of a model can be cut, None where those of all its prompts can."""
    for i, probe in enumerate(probes):
        if probe.attention != "full" or probe.arrays or probe.caches:
            return f"layer {i} is a {probe.cls}, whose rows do not stand for their tokens alone"
    for codec in (plan.k, plan.v):
        if not _by_itself(codec, calibration):
            return f"{codec.spec()} learns its tables from the prompt"
    return None


def _by_itself(codec: Codec, calibration: Calibration | None) -> bool:
    """Whether a few rows can be coded without tables of their own."""
    if is_calibrated(codec):
        return calibration is not None and not getattr(codec, "carry", False)
    return isinstance(codec, Raw) or (codec.grows and not codec.eager)


def first_row(snapshot: Snapshot) -> int:
    """Position of the first row that a snapshot holds: 0, but for what joined a cache whose beginning is in the store already."""
    return min((state.positions[0][0] for state in snapshot.states if state.positions), default=0)


def write_piece(
    path: Path,
    snapshot: Snapshot,
    piece: Piece,
    plan: CodecPlan,
    calibration: Calibration | None,
    model: LoadedModel | None,
    extra: dict[str, Any],
    whole: bool,
) -> tuple[dict[str, Any], ...]:
    """Write rows of a snapshot as a container file whose bytes depend on nothing but these rows, the plan and the versions of the code.

    Args:
        plan: its `recent` is the piece's.
        calibration, model: as `kvtool.save` takes them.
        extra: what the file is to say of its place in the store.
        whole: the piece is the whole snapshot.
    Returns:
        The lossy steps that the file records.
    """
    assert snapshot.tokens is not None
    plan = replace(plan, recent=piece.recent)
    states = snapshot.states if whole else tuple(_rows(state, piece.start, piece.stop) for state in snapshot.states)
    ids = snapshot.tokens[piece.start : piece.stop]
    binding = None
    if is_calibrated(plan.k) or is_calibrated(plan.v):
        moments = None if model is None or not whole else partial(own_moments, model, snapshot.tokens, plan)
        binding = bind(plan, layer_sources(states, snapshot.probes), calibration, moments)
        plan = plan if binding is None or binding.plan is None else binding.plan
    encoder = Encoder(plan, bound={} if binding is None else binding.codecs)
    layers = tuple(encoder.layer(str(i), state, probe) for i, (state, probe) in enumerate(zip(states, snapshot.probes, strict=True)))
    # The same model has many names, and a chunk's bytes are the same under each.
    who = replace(snapshot.model, sketch=None, name=f"{snapshot.model.architecture} {str(snapshot.model.weights)[:12]}")
    length = piece.stop - piece.start
    report = write_archive(path, who, ids, length, layers, encoder, snapshot.history, extra=extra, binding=binding)
    return (*snapshot.history, *([report.quality] if report.quality else []))


def _rows(state: CacheState, start: int, stop: int) -> CacheState:
    """The rows at positions start to stop of a layer with full attention."""
    held = state.positions[0][0] if state.positions else 0
    k, v = (_plain(x) for x in (state.k, state.v))
    cut: dict[str, Any] = {name: None if x is None else x[:, start - held : stop - held] for name, x in (("k", k), ("v", v))}
    quantised = state.cls == "QuantizedKVCache"
    cls, params = ("KVCache", {}) if quantised else (state.cls, state.params)
    return replace(state, cls=cls, params=params, offset=stop, positions=((start, stop),), **cut)


def _plain(x: Any) -> Any:
    return x.dequantize() if isinstance(x, Quantized) else x
