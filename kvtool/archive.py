"""Archives: save a snapshot as a container file, open it lazily, load it back into live caches."""

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from types import TracebackType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ConcatenateKVCache

from formats.container import Reader, manifest_bytes, open_container, write_container
from formats.errors import IncompatibleError, counted
from formats.manifest import ITEM_BYTES, CacheInfo, LayerInput, Manifest, Tokens
from formats.token_ids import TokenIds
from kvtool.binding import Binding, bind, layer_sources, own_moments
from kvtool.calibrations import Calibration, Shelf, is_calibrated, resolve, shelf_of
from kvtool.capturing import Snapshot, vocabulary
from kvtool.compat import OTHER_MODEL, check_identity, check_layers, check_ropes, check_rows, identity_problems, not_compared
from kvtool.decoding import Decoder
from kvtool.encoding import Encoder, codec_plan
from kvtool.identifying import check_live
from kvtool.live import Placement, coded_cache, placement_notes, placements, shareable
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe, probe_model
from kvtool.snapshot import build_caches
from kvtool.states import CacheState
from kvtool.version import __version__
from veloxquant_mlx.codecs import CodecPlan
from veloxquant_mlx.codecs.tc import CARRIED

Progress = Callable[[int, int], None]
# Room in the reserved header for the quality record, written once the data is out: two short numbers a layer and some text.
QUALITY_BYTES = 2048
QUALITY_BYTES_A_LAYER = 96


@dataclass(frozen=True)
class SaveReport:
    """What a save wrote, all sizes in bytes as measured.

    Attributes:
        path: the file.
        codec: the codec spec in full, exact rows spelled out.
        tokens: tokens in the cache.
        file_bytes: size of the file, header and side information included.
        cache_bytes: bytes of the live rows that were saved, in the dtype they ran in.
        fp16_bytes: what those values take at two bytes each.
        quality: the lossy step and its measured error, or None for a lossless file.
        kept_raw: what the codec could not take and was kept verbatim, with the reason.
        kept_post: what was encoded after RoPE although `pre` was asked for, with the reason.
        requantised: what mlx-lm had quantised already and the codec coded once more; `quality` counts from mlx-lm's values.
        calibration: digest of the calibration that the file needs to be decoded, or None.
        fallbacks: what a calibrated codec was to take and another one does, "layer.role: codec, reason".
        notes: what else a caller should know.
    """

    path: str
    codec: str
    tokens: int
    file_bytes: int
    cache_bytes: int
    fp16_bytes: int
    quality: dict[str, Any] | None
    kept_raw: tuple[str, ...]
    kept_post: tuple[str, ...]
    requantised: tuple[str, ...] = ()
    calibration: str | None = None
    fallbacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class Restored:
    """A cache alive again.

    Attributes:
        cache: live mlx-lm caches, one a layer, for `mlx_lm.generate(..., prompt_cache=cache)`.
        tokens: token ids the file stands for, or None.
        usable: tokens whose keys and values are in `cache`.
        notes: what a caller should know: casts of dtype, which layers attend to codes and which do not, and why.
        layers: where each layer lives.
        quality: the lossy steps behind the rows, with the errors that the file records of them.
    """

    cache: list[Any]
    tokens: tuple[int, ...] | None
    usable: int
    notes: tuple[str, ...]
    layers: tuple[Placement, ...] = ()
    quality: tuple[dict[str, Any], ...] = ()

    def fork(self, count: int) -> list["Restored"]:
        """Caches that go on from here each by itself, over one copy of what is there: `count` of them, besides this one.

        Rows on codes are shared, and so are those of plain layers whose attention can read them in blocks; what an agent adds is its own.
        Any other cache (sliding windows that are decoded, recurrent state) is copied.

        Raises:
            ValueError: count is less than 1.
        """
        if type(count) is not int or count < 1:
            raise ValueError(f"[fork] count must be an integer of at least 1, but got {count!r}.")
        self.cache = [shareable(c, placement) for c, placement in zip(self.cache, self.layers, strict=True)]
        mx.eval([c.state for c in self.cache])
        return [replace(self, cache=[copy.deepcopy(c) for c in self.cache]) for _ in range(count)]

    def pending(self) -> list[int]:
        """Token ids still to be run before the model can go on: those beyond `usable`, else the last one, taken back from the cache.

        Raises:
            IncompatibleError: the file knows no token ids or has none, or a cache cannot give its last token back.
        """
        if self.tokens is None:
            raise IncompatibleError("the file holds no token ids, so it cannot go on without a prompt", hint="give --prompt")
        now = next((c.offset for c in self.cache if isinstance(getattr(c, "offset", None), int)), self.usable)
        if now != self.usable:
            raise ValueError(
                f"[pending] the caches stand at {counted(now, 'token')}, not at the {self.usable} of the file: they have gone on since."
            )
        if len(self.tokens) > self.usable:
            return list(self.tokens[self.usable :])
        if not self.tokens:
            raise IncompatibleError("the file holds no token at all, so it cannot go on without a prompt", hint="give --prompt")
        if not all(c.is_trimmable() for c in self.cache):
            raise IncompatibleError(
                "a layer's cache cannot give its last token back, so it cannot go on without a prompt", hint="give --prompt"
            )
        for c in self.cache:
            _take_back(c)
        # Kept true, so that asking again takes nothing more back.
        self.usable -= 1
        return list(self.tokens[self.usable :])


def _take_back(cache: Any) -> None:
    """Drop the newest row of a trimmable cache."""
    if isinstance(cache, CacheList):
        for c in cache.caches:
            _take_back(c)
        return
    cache.trim(1)
    if isinstance(cache, ConcatenateKVCache):
        # Its trim moves the offset alone, and its next update would append after the row that was dropped.
        cache.state = tuple(x[..., : cache.offset, :] for x in cache.state)


def save(
    snapshot: Snapshot,
    path: str | os.PathLike[str],
    *,
    codec: str | CodecPlan = "raw",
    sink: int | None = None,
    recent: int | None = None,
    frame: str | None = None,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    model: LoadedModel | None = None,
    details: dict[str, Any] | None = None,
    compress: bool = True,
    progress: Progress | None = None,
) -> SaveReport:
    """Write a snapshot to a file, atomically: the path holds the old content or the whole new one, never a part.

    Args:
        snapshot: from `capture`.
        path: the file to write.
        codec: a spec such as "raw", "rvq-2+2", "k=rabitq,v=rvq-2+2,sink=0,recent=0".
        sink: keep this many first tokens exact, whatever the spec says; a lossy codec's default is 4.
        recent: keep this many newest tokens exact, whatever the spec says; a lossy codec's default is 32.
        frame: encode keys "post" (as cached) or "pre" (before RoPE); None is the codec's default.
        calibration: tables for a calibrated codec: a calibration, its file or digest, "auto" (the store's newest for the model) or "self"
            (learnt from this cache, with `model`, and carried in the file); None is "auto" where there is one, else "self".
        model: the model that computed the snapshot, for "self".
        details: what else was measured (`Quality.record`), for the file's quality record.
        compress: zstd each tensor where that saves bytes.
        progress: called with (bytes written, bytes in all).
    Returns:
        SaveReport
    Raises:
        ValueError: unknown codec, values it cannot take (not finite), a calibrated codec without anything to take tables from, or a
            calibration for a codec that takes none.
        IncompatibleError: a calibration of another model.
        OSError: the disk's own errors; nothing is visible then.
    """
    plan = codec_plan(codec, sink, recent, frame)
    binding = None
    if is_calibrated(plan.k) or is_calibrated(plan.v):
        moments = None if model is None else partial(own_moments, model, snapshot.tokens, plan)
        sources = layer_sources(snapshot.states, snapshot.probes)
        binding = bind(plan, sources, resolve(calibration, snapshot.model.effective_weights), moments)
        plan = plan if binding is None or binding.plan is None else binding.plan
    elif calibration is not None:
        raise ValueError(f"[save] {plan.spec()} takes no calibration: leave it out, or save with tc-N, tcz-R or commvq-N:additive.")
    encoder = Encoder(plan, bound={} if binding is None else binding.codecs)
    layers = tuple(
        encoder.layer(str(i), state, probe) for i, (state, probe) in enumerate(zip(snapshot.states, snapshot.probes, strict=True))
    )
    inputs = tuple(encoder.layer_input(layer, rows) for layer, rows in sorted(snapshot.inputs.items()))
    report = write_archive(
        path,
        snapshot.model,
        snapshot.tokens,
        snapshot.length,
        layers,
        encoder,
        snapshot.history,
        layer_inputs=inputs,
        details=details,
        binding=binding,
        compress=compress,
        progress=progress,
    )
    cache_bytes, values = live_sizes(layers)
    return replace(report, cache_bytes=cache_bytes, fp16_bytes=2 * values)


def write_archive(
    path: str | os.PathLike[str],
    model: Any,
    tokens: Sequence[int] | None,
    length: int,
    layers: tuple[CacheInfo, ...],
    encoder: Encoder,
    history: tuple[dict[str, Any], ...],
    *,
    layer_inputs: tuple[LayerInput, ...] = (),
    step: str = "encode",
    details: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
    binding: Binding | None = None,
    compress: bool = True,
    progress: Progress | None = None,
) -> SaveReport:
    """Write encoded layers as a container; the error of this step joins the quality record once the data is out."""
    ids, by = None if tokens is None else Tokens.of(tuple(tokens)), producer()
    if binding is not None:
        tables = {"calibration": binding.calibration or CARRIED} if binding.calibrated else {}
        details = {**(details or {}), **tables, "fallbacks": len(binding.fallbacks)}

    def manifest() -> Manifest:
        return Manifest(
            producer=by,
            requires=() if model.adapter is None else ("adapter",),
            model=model,
            tokens=ids,
            length=length,
            codecs=tuple(encoder.codecs),
            ropes=tuple(encoder.ropes),
            layers=layers,
            quality=(*history, *filter(None, (quality_record(encoder, step, details),))),
            extra=(extra or {}) | ({"rope_problems": encoder.rope_problems} if encoder.rope_problems else {}),
            layer_inputs=layer_inputs,
        )

    reserve = manifest_bytes(manifest()) + QUALITY_BYTES + QUALITY_BYTES_A_LAYER * len(layers)
    written = write_container(path, manifest, encoder.tensors, compress=compress, progress=progress, reserve=reserve)
    mx.clear_cache()
    notes = [] if binding is None else list(binding.notes)
    if not encoder.lossless and not encoder.tallies and 0 < length <= encoder.plan.sink + encoder.plan.recent:
        notes.append(f"{encoder.plan.full_spec()} keeps all {counted(length, 'token')} exact: none is coded")
    return SaveReport(
        path=str(path),
        codec=encoder.plan.full_spec(),
        tokens=length,
        file_bytes=written.file_bytes,
        cache_bytes=0,
        fp16_bytes=0,
        quality=quality_record(encoder, step, details),
        kept_raw=tuple(encoder.kept_raw),
        kept_post=tuple(encoder.kept_post),
        requantised=tuple(encoder.requantised),
        calibration=None if binding is None else binding.calibration,
        fallbacks=() if binding is None else tuple(binding.fallbacks),
        notes=tuple(notes),
    )


def quality_record(encoder: Encoder, step: str, details: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """One lossy step as the manifest keeps it: codec, and the squared error over the energy of K and V, whole and by layer."""
    if not encoder.tallies and not details:
        return None
    record: dict[str, Any] = {"step": step, "codec": encoder.plan.full_spec(), **(details or {})}
    if encoder.requantised:
        record["requantised"] = list(encoder.requantised)
    for role in ("k", "v"):
        tallies = {name: t for (name, r), t in encoder.tallies.items() if r == role}
        energy = sum(t.energy for t in tallies.values())
        if tallies:
            record[f"{role}_relative_error"] = float(f"{sum(t.error for t in tallies.values()) / energy if energy else 0.0:.4g}")
            record[f"{role}_by_layer"] = {name: float(f"{t.relative():.3g}") for name, t in tallies.items()}
    inputs = {name.removeprefix("input."): float(f"{t.relative():.3g}") for (name, r), t in encoder.tallies.items() if r == "x"}
    if inputs:
        record["layer_inputs"] = inputs
    return record


def producer() -> dict[str, str]:
    """Versions that wrote a file."""
    return {"kvtool": __version__, "mlx": version("mlx"), "mlx-lm": version("mlx-lm")}


def live_sizes(layers: Sequence[CacheInfo]) -> tuple[int, int]:
    """(bytes, values) of the live caches that a layer table describes: rows only, in the dtype they run in."""
    total_bytes = total_values = 0
    for layer in layers:
        for role in (layer.k, layer.v):
            if role is not None:
                values = role.heads * layer.rows * role.dim
                total_bytes, total_values = total_bytes + values * ITEM_BYTES[role.dtype], total_values + values
        for array in layer.arrays:
            if array is not None:
                values = math.prod(array.shape)
                total_bytes, total_values = total_bytes + values * ITEM_BYTES[array.dtype], total_values + values
        inner = live_sizes(layer.caches)
        total_bytes, total_values = total_bytes + inner[0], total_values + inner[1]
    return total_bytes, total_values


class Archive:
    """An open file: header read, tensors on demand. A context manager.

    Attributes:
        path: the file.
        manifest: what its header says.
        decoder: decodes its layers.
    """

    def __init__(self, reader: Reader, shelf: Shelf | None = None) -> None:
        self.reader = reader
        self.decoder = Decoder(reader, shelf)
        self.path = reader.path
        self.manifest = reader.manifest

    def __enter__(self) -> "Archive":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.reader.close()

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Token ids, or None where they are unknown."""
        return None if self.manifest.tokens is None else tuple(self.manifest.tokens.ids)

    @property
    def length(self) -> int:
        """Usable tokens."""
        return self.manifest.length

    def state(self, layer: int) -> CacheState:
        """One layer decoded."""
        return self.decoder.cache(str(layer))

    def check(self, model: LoadedModel, *, allow_mismatch: bool = False) -> tuple[CacheProbe, ...]:
        """Whether this file can live in `model`; returns the model's layer table.

        Raises:
            IncompatibleError: computed by another model (unless allow_mismatch), or not of this model's shape, RoPE or start; or the model
                is not the one any more that was loaded.
        """
        check_live(model.model, model.info)
        if not allow_mismatch:
            check_identity(self.path, self.manifest, model.info, model.arguments)
        self.check_tokens(model)
        probes = probe_model(model.model)
        check_layers(self.path, self.manifest.layers, probes)
        check_ropes(self.reader, probes, model.info, model.arguments)
        check_rows(self.path, self.manifest.layers, probes, self.length)
        return probes

    def check_tokens(self, model: LoadedModel) -> None:
        """Raise IncompatibleError where a token id lies outside the model's vocabulary."""
        tokens = self.manifest.tokens
        size, largest = vocabulary(model), 0 if tokens is None else int(TokenIds.of(tokens.ids).array.max(initial=0))
        if largest >= size:
            raise IncompatibleError(
                f"holds token id {largest}, but {model.info.name} has ids 0 to {size - 1}",
                path=self.path,
                hint=OTHER_MODEL,
            )

    def states(self, probes: Sequence[CacheProbe], casts: list[str]) -> Iterator[CacheState]:
        """Decoded layers one by one, in the dtypes of a model's layer table; what was cast for that joins `casts`."""
        for i, probe in enumerate(probes):
            yield fit_dtype(self.state(i), probe, casts)

    def load(
        self,
        model: LoadedModel,
        *,
        decode: bool = False,
        mapped: bool = True,
        allow_mismatch: bool = False,
        progress: Progress | None = None,
    ) -> Restored:
        """Live caches for `model`: codes stay codes, and attention reads them, in every layer where that can be (`kvtool.live`).

        Args:
            model: the model that will go on.
            decode: give every layer mlx-lm's own cache of decoded rows.
            mapped: on a CPU let codes stay in the mapped file, where all processes that load it share them (`formats.container` says
                what that asks of the file); False copies them.
            allow_mismatch: accept another model's weights or tokenizer; shapes and RoPE must fit all the same.
            progress: called with (layers done, layers in all).
        Raises:
            IncompatibleError: computed by another model, or not of this model's shape or RoPE.
            IntegrityError: bytes that do not match their digest.
        """
        probes = self.check(model, allow_mismatch=allow_mismatch)
        placed = placements(self.decoder, model.model, probes)
        if decode:
            placed = [replace(p, codes=False, reason="asked for", grows=None) if p.codes else p for p in placed]
        self.reader.verify_ahead([name for i, p in enumerate(placed) if p.codes for name in self.decoder.coded_tensors(str(i))])
        casts: list[str] = []
        cache: list[Any] = []
        for i, (probe, placement) in enumerate(zip(probes, placed, strict=True)):
            if placement.codes:
                cache.append(coded_cache(self.decoder, str(i), probe, mapped))
            else:
                cache += build_caches([fit_dtype(self.state(i), probe, casts)], first=i)
                mx.eval(cache[-1].state)
            if progress is not None:
                progress(len(cache), len(probes))
        # That a lossless file is decoded goes without saying.
        notes = placement_notes(placed) if any(p.codes or p.lossy for p in placed) else ()
        notes = (*self.identity_notes(model), *cast_note(casts), *notes)
        return Restored(cache, self.tokens, self.length, notes, tuple(placed), self.manifest.quality)

    def identity_notes(self, model: LoadedModel) -> tuple[str, ...]:
        """What was accepted although the model differs, and what could not be compared."""
        differ = identity_problems(self.manifest, model.info)
        accepted = (f"accepted from another model: {'; '.join(differ)}",) if differ else ()
        return (*accepted, *not_compared(self.manifest.model, model.info))


def fit_dtype(state: CacheState, probe: CacheProbe, casts: list[str]) -> CacheState:
    """The state in the dtype the model runs in; each cast is added to `casts`."""
    changes: dict[str, Any] = {}
    for role in ("k", "v"):
        value, live = getattr(state, role), getattr(probe, role)
        if isinstance(value, mx.array) and live is not None and value.dtype != live.dtype:
            changes[role] = value.astype(live.dtype)
            casts.append(" to ".join(str(dtype).removeprefix("mlx.core.") for dtype in (value.dtype, live.dtype)))
    caches = tuple(fit_dtype(s, p, casts) for s, p in zip(state.caches, probe.caches, strict=True))
    return replace(state, caches=caches, **changes)


def cast_note(casts: Sequence[str]) -> tuple[str, ...]:
    """Casts as remarks for the caller, equal ones counted."""
    notes = []
    for cast in dict.fromkeys(casts):
        arrays = "1 array" if casts.count(cast) == 1 else f"{casts.count(cast)} arrays"
        notes.append(f"converted from {cast}, the dtype that the model runs in: {arrays} of keys or values")
    return tuple(notes)


def open(path: str | os.PathLike[str], *, calibration: str | os.PathLike[str] | Calibration | None = None, ahead: bool = False) -> Archive:
    """Open a file; reads its header alone.

    Args:
        path: the file.
        calibration: a calibration, or the file of one, that its codecs may need; others are looked for in the store.
        ahead: begin to hash its tensors at once, in threads, for a load that follows.
    Raises:
        FormatError, IntegrityError: what is wrong with the file, by name.
    """
    return Archive(open_container(path, ahead=ahead), shelf_of(calibration))
