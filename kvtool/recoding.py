"""Recode: re-rotate the keys of a file for another RoPE, position or model, and change its codec, one (layer, role) in memory at a time.

Keys stored before RoPE need no touch: their rotation stands in the header, so a recode edits that alone and adds no error. Keys stored as
cached are decoded, rotated once by p_t w_t - p_s w_s, and encoded again; the error that adds is measured and recorded.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx

from formats.container import TensorPlan
from formats.errors import IncompatibleError, ManifestError
from formats.manifest import CacheInfo, LayerInput, Manifest, ModelInfo, Role, Segment
from kvtool.archive import Archive, SaveReport, live_sizes, write_archive
from kvtool.archive import open as open_archive
from kvtool.binding import Binding, LayerSource, bind, own_moments
from kvtool.calibrations import KINDS, Calibration, is_calibrated, resolve
from kvtool.compat import check_layers, computing_problems, tokenizer_difference
from kvtool.decoding import FLOATS, check_role, codec_of, part_dtypes, rope_of
from kvtool.encoding import MLX_AFFINE, Encoder, Positions, RoleSource, codec_plan
from kvtool.hidden import inputs_left_out
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe, RoleProbe, probe_model
from kvtool.rope_limits import MAX_BASE
from kvtool.segment_work import SegmentWork
from kvtool.states import Quantized
from veloxquant_mlx.codecs import Codec, CodecPlan
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec

# mx.fast.rope counts positions in int32.
MAX_POSITION = 1 << 31


def recode(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to_model: LoadedModel | None = None,
    rope_theta: float | None = None,
    shift: int = 0,
    codec: str | CodecPlan | None = None,
    sink: int | None = None,
    recent: int | None = None,
    frame: str | None = None,
    calibration: str | os.PathLike[str] | Calibration | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SaveReport:
    """Write `source` again with keys rotated for another RoPE base, model or position, or with another codec.

    Args:
        source: a kvtool file. It may be the target as well.
        target: the file to write, atomically.
        to_model: rotate for this model's live RoPE and make the file its own (same layers, KV heads, head dims and tokenizer needed).
        rope_theta: rotate to this base instead (plain or linearly scaled RoPE).
        shift: move every position by this many.
        codec: encode again with this codec, a lossy one with exact rows as in `save`; None keeps each tensor's own.
        sink, recent, frame: as in `save`, with `codec`.
        calibration: as in `save`, for a calibrated codec ("self" needs `to_model`); a file of one also serves what `source` is coded with.
        progress: called with (bytes written, bytes in all).
    Returns:
        SaveReport; its `quality` is the error this step added, None where it added none.
    Raises:
        ValueError: nothing to do, or to_model and rope_theta both given.
        IncompatibleError: other shapes, another tokenizer, a RoPE that cannot be described, a position below 0.
    """
    if to_model is not None and rope_theta is not None:
        raise ValueError("[recode] give to_model or rope_theta, not both.")
    if rope_theta is not None and not 0 < rope_theta <= MAX_BASE:
        raise ValueError(f"[recode] rope_theta must be positive and at most {MAX_BASE:g}, but got {rope_theta}.")
    if codec is None and (sink, recent, frame) != (None, None, None):
        raise ValueError("[recode] sink, recent and frame go with a codec.")
    if to_model is None and rope_theta is None and shift == 0 and codec is None:
        raise ValueError("[recode] nothing to do: give to_model, rope_theta, shift or codec.")
    with open_archive(source, calibration=calibration) as archive:
        manifest = archive.manifest
        probes = None if to_model is None else _fit(archive, to_model)
        plan = None if codec is None else codec_plan(codec, sink, recent, frame)
        if rope_theta is not None:
            _check_one_base(archive)
        job = _Recoder(archive, plan, rope_theta, shift, None if to_model is None else to_model.info)
        if plan is not None and (is_calibrated(plan.k) or is_calibrated(plan.v)):
            weights = [manifest.model.effective_weights, None if to_model is None else to_model.info.effective_weights]
            moments = None if to_model is None else partial(own_moments, to_model, archive.tokens, plan)
            table = probes or [None] * len(manifest.layers)
            sources = [s for i, info in enumerate(manifest.layers) for s in job.sources(str(i), info, table[i])]
            job.bind(bind(plan, sources, resolve(calibration, *weights), moments))
        layers = tuple(job.cache(str(i), info, None if probes is None else probes[i]) for i, info in enumerate(manifest.layers))
        # Of another model they would not be what enters its layers.
        inputs = tuple(map(job.layer_input, manifest.layer_inputs)) if to_model is None else ()
        model = manifest.model if to_model is None else to_model.info
        details: dict[str, Any] = {"header_only": sorted(job.untouched - job.touched), "reencoded": sorted(job.touched)}
        if job.untouched & job.touched:
            # Exact rows were rotated, the coded ones beside them copied.
            details["partly"] = sorted(job.untouched & job.touched)
        if to_model is not None:
            details |= {"from": manifest.model.name, "to": model.name, **_other_rows(manifest.model, model)}
        if rope_theta is not None:
            details["rope_theta"] = rope_theta
        if shift:
            details["shift"] = shift
        if plan is None:
            details["codec"] = "as stored"
        report = write_archive(
            target,
            model,
            archive.tokens,
            manifest.length,
            layers,
            job.encoder,
            manifest.quality,
            layer_inputs=inputs,
            step="recode",
            details=details,
            extra=origin(manifest, model),
            binding=job.binding,
            progress=progress,
        )
        cache_bytes, values = live_sizes(manifest.layers)
        notes = report.notes
        if len(inputs) < len(manifest.layer_inputs):
            layers_of = [given.layer for given in manifest.layer_inputs]
            notes = (*notes, inputs_left_out(layers_of, manifest.model.name, f"it is not {model.name}'s"))
        spec = "as stored" if plan is None else report.codec
        return replace(report, codec=spec, cache_bytes=cache_bytes, fp16_bytes=2 * values, notes=notes)


def _other_rows(file: ModelInfo, model: ModelInfo) -> dict[str, Any]:
    """What a recode's record says of a target that would have computed other rows: they are carried over as they were."""
    differ = computing_problems(file, model)
    if not differ:
        return {"same_weights": True}
    note = f"rows of another model as they were, what that costs not measured here (kvtool eval): {'; '.join(differ)}"
    return {"same_weights": file.effective_weights == model.effective_weights, "note": note[:400]}


def check_recode(archive: Archive, model: LoadedModel) -> None:
    """Raise IncompatibleError where `recode` of this file to a model would, before anything is read."""
    job = _Recoder(archive, None, None, 0, model.info)
    for i, (info, probe) in enumerate(zip(archive.manifest.layers, _fit(archive, model), strict=True)):
        job.sources(str(i), info, probe)


def _fit(archive: Archive, model: LoadedModel) -> tuple[CacheProbe, ...]:
    """The target's layer table, after checking that the file's layers and tokenizer fit it."""
    problem = tokenizer_difference(archive.manifest.model, model.info)
    if problem is not None:
        raise IncompatibleError(
            f"the tokenizer of {archive.manifest.model.name} is not that of {model.info.name}: {problem}",
            path=archive.path,
            hint="keys alone move only between models that share a tokenizer; else kvtool fit --overlap makes a map, which recode takes "
            "with --map MAP --from-model A, where A computed the file",
        )
    probes = probe_model(model.model)
    check_layers(archive.path, archive.manifest.layers, probes)
    return probes


def _check_one_base(archive: Archive) -> None:
    """Raise IncompatibleError where layers have different bases (sliding and full ones): one new base cannot stand for both."""
    bases = sorted({r["base"] for r in archive.manifest.ropes if r["base"] is not None})
    if len(bases) > 1:
        raise IncompatibleError(
            f"its layers have {len(bases)} RoPE bases ({', '.join(f'{b:g}' for b in bases)}), so one base does not say the target",
            path=archive.path,
            hint="use --to-model",
        )


def origin(manifest: Manifest, model: ModelInfo) -> dict[str, Any]:
    """`extra` of a recoded file: what it carried, and the model that computed the keys and values at first."""
    first = {"name": manifest.model.name, "weights": manifest.model.weights}
    first |= {} if manifest.model.adapter is None else {"adapter": manifest.model.adapter}
    return {**manifest.extra, "origin": manifest.extra.get("origin", first)} if model != manifest.model else dict(manifest.extra)


class _Recoder:
    """Builds the new file's layers; `untouched` and `touched` name the roles whose tensors are copied and encoded again."""

    def __init__(self, archive: Archive, plan: CodecPlan | None, rope_theta: float | None, shift: int, model: ModelInfo | None) -> None:
        self.reader = archive.reader
        self.same_weights = model is not None and model.weights is not None and model.weights == archive.manifest.model.weights
        self.decoder = archive.decoder
        self.plan = plan
        self.rope_theta = rope_theta
        self.shift = shift
        self.binding: Binding | None = None
        self.encoder = Encoder(plan or CodecPlan(k=Raw(), v=Raw(), sink=0, recent=0, frame=None))
        self.untouched: set[str] = set()
        self.touched: set[str] = set()

    def cache(self, name: str, info: CacheInfo, probe: CacheProbe | None) -> CacheInfo:
        if info.positions and info.positions[0][0] + self.shift < 0:
            start = info.positions[0][0]
            raise IncompatibleError(
                f"layer {name} begins at position {start}, so a shift by {self.shift} ends below 0", path=self.reader.path
            )
        if max(info.offset, *(stop for _, stop in info.positions), 0) + self.shift >= MAX_POSITION:
            raise IncompatibleError(f"layer {name} would end at position {info.offset + self.shift}, 2**31 or more", path=self.reader.path)
        caches = tuple(self.cache(f"{name}.{i}", c, None if probe is None else probe.caches[i]) for i, c in enumerate(info.caches))
        positions = tuple((a + self.shift, b + self.shift) for a, b in info.positions)
        arrays = tuple(
            None if a is None else replace(a, tensor=self._copy(a.tensor, f"{name}.state.{i}")) for i, a in enumerate(info.arrays)
        )
        if arrays and not self.encoder.lossless:
            self.encoder.kept_raw.append(f"{name}: recurrent state")
        self._check_state(name, info, probe)
        new = replace(
            info,
            arrays=arrays,
            positions=positions,
            offset=info.offset + self.shift if info.positions else info.offset,
            k=self._role(f"{name}.k", "k", info, info.k, positions, None if probe is None else probe.k),
            v=self._role(f"{name}.v", "v", info, info.v, positions, None if probe is None else probe.v),
            caches=caches,
        )
        return self.encoder.live_class(new)

    def layer_input(self, given: LayerInput) -> LayerInput:
        """What entered a layer, as it is."""
        segments = []
        for i, segment in enumerate(given.rows.segments):
            tensors = {part: self._copy(tensor, f"input.{given.layer}.x.{i}.{part}") for part, tensor in segment.tensors.items()}
            codec = self.encoder.codec(self.reader.manifest.codecs[segment.codec])
            segments.append(replace(segment, codec=codec, tensors=tensors))
        return replace(given, rows=replace(given.rows, segments=tuple(segments)))

    def bind(self, binding: Binding | None) -> None:
        """Encode with these codecs instead of the plan's."""
        self.binding = binding
        if binding is not None:
            self.encoder = replace(self.encoder, plan=binding.plan or self.encoder.plan, bound=binding.codecs)

    def sources(self, name: str, info: CacheInfo, probe: CacheProbe | None) -> list[LayerSource]:
        """A cache and those in it as they are to be encoded again."""
        self._check_state(name, info, probe)
        positions = tuple((a + self.shift, b + self.shift) for a, b in info.positions)
        found: dict[str, RoleSource | None] = {"k": None, "v": None}
        for role in found:
            old, live = getattr(info, role), None if probe is None else getattr(probe, role)
            if old is not None:
                check_role(self.reader.path, old)
                rope = rope_of(self.reader, old.rope)
                target = self._target(f"{name}.{role}", rope, live)
                found[role] = self._source(f"{name}.{role}", old, Positions(info.positions), Positions(positions), rope, target)
        inner = [s for i, c in enumerate(info.caches) for s in self.sources(f"{name}.{i}", c, None if probe is None else probe.caches[i])]
        return [LayerSource(name, found["k"], found["v"], positions), *inner]

    def _check_state(self, name: str, info: CacheInfo, probe: CacheProbe | None) -> None:
        """Raise where a recurrent state would have to be turned; a recode of the codec alone hands the reason on."""
        problem = self._problem(f"{name}.state") or (None if probe is None or not info.arrays else probe.state_problem)
        if problem is None:
            return
        if probe is not None or self.rope_theta is not None or self.shift:
            raise IncompatibleError(f"{name}: its recurrent state is {problem}", path=self.reader.path, hint="run the prompt again")
        self.encoder.rope_problems[f"{name}.state"] = problem

    def _problem(self, name: str) -> str | None:
        """Why a role's rotation was not known when the file was written, or None."""
        problems = self.reader.manifest.extra.get("rope_problems", {})
        if not isinstance(problems, dict):
            raise ManifestError("$.extra.rope_problems: must be an object", path=self.reader.path)
        return str(problems[name]) if name in problems else None

    def _role(
        self, name: str, role: str, info: CacheInfo, old: Role | None, positions: tuple[tuple[int, int], ...], probe: RoleProbe | None
    ) -> Role | None:
        if old is None:
            return None
        check_role(self.reader.path, old)
        source = rope_of(self.reader, old.rope)
        if source is not None and source.first + source.dims > old.dim:
            what = f"{name}: RoPE on entries {source.first} to {source.first + source.dims} of head_dim {old.dim}"
            raise ManifestError(what, path=self.reader.path)
        target = self._target(name, source, probe)
        before, after = Positions(info.positions), Positions(positions)
        if self.plan is not None:
            return self._transcode(name, role, old, before, after, source, target)
        index = None if target is None else self.encoder.rope(target)
        segments = tuple(self._segment(name, i, old, s, before, after, source, target) for i, s in enumerate(old.segments))
        return replace(old, rope=index, segments=segments)

    def _target(self, name: str, source: RopeSpec | None, probe: RoleProbe | None) -> RopeSpec | None:
        """The rotation a role's rows are to have, refused by name where either side's is not known."""
        problem = self._problem(name)
        if problem is None and probe is not None:
            problem = probe.rope_problem
        moves = probe is not None or self.rope_theta is not None or self.shift != 0
        if problem is not None and moves:
            raise IncompatibleError(f"{name}: keys cannot be rotated: {problem}", path=self.reader.path)
        if probe is not None:
            if source is not None and probe.rope is not None and (source.first, source.dims) != (probe.rope.first, probe.rope.dims):
                raise IncompatibleError(
                    f"{name}: entries {source.first} to {source.first + source.dims} are rotated, but the model rotates "
                    f"{probe.rope.first} to {probe.rope.first + probe.rope.dims}",
                    path=self.reader.path,
                    hint="caches move only between models that rotate the same entries",
                )
            if self.same_weights and source is not None and probe.rope is not None and source.pairing != probe.rope.pairing:
                # Entries change places between models whose projections have them in another order; the same ones cannot be right for both.
                raise IncompatibleError(
                    f"{name}: pairs are {source.pairing}, the model's {probe.rope.pairing}, yet the weights are the same: one of the two "
                    "reads them wrongly",
                    path=self.reader.path,
                    hint="correct rope_traditional in the config of the model that does",
                )
            return probe.rope
        if self.rope_theta is None or source is None:
            return source
        if source.base is None:
            raise IncompatibleError(
                f"{name}: RoPE of kind {source.kind} is given by its periods, so a base alone does not say the target",
                path=self.reader.path,
                hint="use --to-model",
            )
        return replace(source, base=float(self.rope_theta))

    def _transcode(
        self,
        name: str,
        role: str,
        old: Role,
        before: Positions,
        after: Positions,
        source: RopeSpec | None,
        target: RopeSpec | None,
    ) -> Role | None:
        self.touched.add(name)
        if any(self.reader.manifest.codecs[s.codec].id == MLX_AFFINE for s in old.segments):
            self.encoder.requantised.append(name)
        return self.encoder.role(name, role, self._source(name, old, before, after, source, target), after.ranges)

    def _source(
        self, name: str, old: Role, before: Positions, after: Positions, source: RopeSpec | None, target: RopeSpec | None
    ) -> RoleSource:
        """A role's rows, decoded and rotated."""
        rows, (layer, role) = old.segments[-1].rows[1], name.rsplit(".", 1)

        def fetch() -> mx.array:
            value = self.decoder.role(layer, role)
            assert value is not None
            array = value.dequantize() if isinstance(value, Quantized) else value
            return self._rotated(array, before, after, (0, rows), source, target)

        return RoleSource((old.heads, rows, old.dim), FLOATS[old.dtype], target, self._problem(name), fetch)

    def _segment(
        self,
        name: str,
        index: int,
        role: Role,
        segment: Segment,
        before: Positions,
        after: Positions,
        source: RopeSpec | None,
        target: RopeSpec | None,
    ) -> Segment:
        """One segment of the new file: copied where its bytes stay valid, else decoded, rotated and encoded again."""
        codec_info = self.reader.manifest.codecs[segment.codec]
        still = source == target and (self.shift == 0 or source is None)
        if still or (segment.frame == "pre" and source is not None and target is not None):
            self.untouched.add(name)
            tensors = {part: self._copy(tensor, f"{name}.{index}.{part}") for part, tensor in segment.tensors.items()}
            return replace(segment, codec=self.encoder.codec(codec_info), tensors=tensors)
        self.touched.add(name)
        start, stop = segment.rows
        shape = (role.heads, stop - start, role.dim)
        if codec_info.id == MLX_AFFINE:
            # Rotated rows no longer are what mlx quantised: they are kept in the cache's own precision rather than quantised twice.
            codec: Codec = Raw()
            dtype = FLOATS[role.dtype]
        else:
            if codec_info.id in KINDS:
                what = f"{name}: its rows are stored after RoPE by {codec_info.id}, which cannot code them again without its tables"
                raise IncompatibleError(what, path=self.reader.path, hint="give --codec")
            codec = codec_of(self.reader.path, codec_info)
            dtypes = part_dtypes(self.reader, segment, codec, shape)
            dtype = FLOATS[dtypes["data"] if isinstance(codec, Raw) else role.dtype]

        def fetch() -> mx.array:
            layer, which = name.rsplit(".", 1)
            rows = self.decoder.segment(layer, which, segment, before)
            return self._rotated(rows, before, after, segment.rows, source, target)

        work = SegmentWork(
            fetch=fetch,
            shape=shape,
            positions=partial(after.of, start, stop),
            rope=target,
            codec=codec,
            frame=segment.frame if target is not None else "post",
            dtype=dtype,
        )
        return self.encoder.segment(f"{name}.{index}", segment.rows, work)

    def _copy(self, tensor: str, name: str) -> str:
        """Plan the copy of a tensor under a name."""
        stored = self.reader.tensors[tensor]
        # What was stored as it is stays so: a reader has it as a view of the mapped file.
        zstd = stored.encoding != "none"
        self.encoder.tensors.append(TensorPlan(name, stored.dtype, tuple(stored.shape), lambda: self.reader.array(tensor), compress=zstd))
        return name

    def _rotated(
        self,
        rows: mx.array,
        before: Positions,
        after: Positions,
        span: tuple[int, int],
        source: RopeSpec | None,
        target: RopeSpec | None,
    ) -> mx.array:
        if source == target and (self.shift == 0 or source is None):
            return rows
        return rotate(rows, before.of(*span), source, target, target_positions=after.of(*span))
