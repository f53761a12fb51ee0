"""One way to store rows of a cache and get them back, with the bytes it takes: what `kvtool.sweep` compares.

Any codec of `parse_codec`, calibrated ones bound to a model's layers first; `mlx-N`, mlx-lm's QuantizedKVCache of N bits (affine, in
groups of 64 along the head, or 32 where 64 does not divide it); `fp8`, MLX's e4m3 without a scale, which saturates at 448. Scales and
biases of `mlx-N` are rounded to float16 where they fit, as a 16-bit cache has them.
"""

import re
import time
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from kvtool.binding import Binding
from kvtool.calibrations import is_calibrated
from kvtool.encoding import sources_of, takes_dim
from kvtool.probe import RoleProbe
from veloxquant_mlx.codecs import RECENT, SINK, Codec, CodecPlan, parse_codec
from veloxquant_mlx.codecs._base import FLOAT16_MAX
from veloxquant_mlx.codecs.commvq_additive import CommVqAdditive
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.codecs.tc import Tc
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import unrotated

MLX_BITS = (2, 3, 4, 6, 8)


@dataclass
class Roundtrip:
    """Encodes rows and decodes them at once, counting bytes, values and time; raw keeps rows as they are.

    Attributes:
        spec: as asked for, with the exact rows spelled out.
        plan: codecs of keys and values, exact rows and frame; of `mlx-N` and `fp8` only the exact rows.
        mlx_bits: N of `mlx-N`.
        fp8: whether this is `fp8`.
        coded_bytes, coded_values: of all encoded parts, side information included.
        exact_bytes, exact_values: of rows kept as they are, at most 16 bits a value as a file with a lossy codec has them.
        seconds: spent encoding and decoding.
        problems: why rows were kept though a codec was to take them; with `failed`, what the codec refused.
        failed: a codec refused its input, so that the scores are not its own.
        binding: codecs of each layer and role, where those of the plan are calibrated.
    """

    spec: str
    plan: CodecPlan
    mlx_bits: int | None = None
    fp8: bool = False
    coded_bytes: int = 0
    coded_values: int = 0
    exact_bytes: int = 0
    exact_values: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    failed: bool = False
    binding: Binding | None = None
    _decoded: dict[tuple[str, str], mx.array] = field(default_factory=dict)
    _tables: set[tuple[str, str]] = field(default_factory=set)

    @property
    def calibrated(self) -> bool:
        """Whether its codecs have to be bound to a model's layers first."""
        return is_calibrated(self.plan.k) or is_calibrated(self.plan.v)

    def bound(self, binding: Binding | None) -> "Roundtrip":
        """A fresh round trip with these codecs; what fell back is among its problems."""
        problems = [] if binding is None else [*binding.notes, *binding.fallbacks]
        return Roundtrip(self.spec, self.plan, self.mlx_bits, self.fp8, problems=problems, binding=binding)

    @property
    def lossless(self) -> bool:
        return self.mlx_bits is None and not self.fp8 and self.plan.lossless

    def rows(self, name: str, role: str, x: mx.array, positions: np.ndarray, probe: RoleProbe) -> mx.array:
        """The rows after encoding and decoding, in their dtype.

        Args:
            name: of the layer, for `problems`.
            role: "k" or "v".
            x: (H, S, D) as cached.
            positions: (S,) of the rows.
            probe: rotation of the rows as cached.
        """
        if not x.size:
            return x
        mx.eval(x)
        start = time.perf_counter()
        try:
            decoded, count = self._coded(name, role, x, positions, probe)
        except ValueError as error:
            # The other codecs of a sweep go on; the report says that this one refused.
            self.failed = True
            self._problem(f"{name}.{role}: {error}")
            decoded, count = x, None
        mx.eval(decoded)
        self.seconds += time.perf_counter() - start
        if count is None:
            self.exact(x.shape, x.dtype)
        else:
            self.coded_bytes += count
            self.coded_values += x.size
        return decoded

    def exact(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        """Count rows that stay as they are."""
        values = int(np.prod(shape))
        self.exact_values += values
        self.exact_bytes += values * (dtype.size if self.lossless else min(dtype.size, 2))

    def bits(self, *, exact: bool) -> float | None:
        """Bits a value of the coded rows, or with the exact ones too; None of no rows."""
        total = self.coded_bytes + (self.exact_bytes if exact else 0)
        values = self.coded_values + (self.exact_values if exact else 0)
        return 8 * total / values if values else None

    def _coded(self, name: str, role: str, x: mx.array, positions: np.ndarray, probe: RoleProbe) -> tuple[mx.array, int | None]:
        """Decoded rows and their encoded bytes; None where the codec does not take this head."""
        dim = x.shape[-1]
        if self.fp8:
            packed = mx.to_fp8(x)
            return mx.from_fp8(packed, x.dtype), packed.nbytes
        if self.mlx_bits is not None:
            group = next((g for g in (64, 32) if dim % g == 0), None)
            if group is None:
                self._problem(f"{name}.{role}: kept exact, no group divides head_dim {dim}")
                return x, None
            return affine(x, self.mlx_bits, group)
        codec: Codec = self.plan.k if role == "k" else self.plan.v
        if self.binding is not None:
            codec = self.binding.codecs.get((name, role), codec)
        elif is_calibrated(codec):
            raise ValueError(f"[codec] {codec.spec()} needs a calibration: it is bound to the layers of a model first.")
        if isinstance(codec, Raw):
            return x, sum(part.nbytes for part in codec.encode(x).values())
        if not takes_dim(codec, dim):
            self._problem(f"{name}.{role}: kept exact, head_dim {dim}")
            return x, None
        if probe.rope is not None:
            codec = codec.for_rotary(probe.rope.first, probe.rope.dims, dim)
        frame = self.plan.frame or codec.default_frame("k" if role == "k" else "v")
        if self.binding is not None and role == "k":
            frame = "pre"
        if frame == "pre" and probe.rope is None and probe.rope_problem is not None:
            self._problem(f"{name}.{role}: stored after RoPE, {probe.rope_problem}")
        rope = probe.rope if frame == "pre" else None
        rows = x if rope is None else rotate(x.astype(mx.float32), positions, rope, unrotated(rope))
        if self.binding is not None:
            # For the case that the codec refuses them.
            self._decoded[name, role] = rows.astype(mx.float32)
        given = {need: self._decoded[at] for need, at in sources_of(name, codec).items()} or None
        parts = codec.encode(rows) if given is None else codec.encode(rows, given)
        near = () if given is None else (given,)
        out = codec.decode(parts, (x.shape[0], x.shape[1], dim), mx.float32, *near)
        if self.binding is not None:
            # The next layer's rows of the same tokens come before this layer's next ones.
            self._decoded[name, role] = out
        if rope is not None:
            out = rotate(out, positions, unrotated(rope), rope)
        if x.dtype == mx.float16:
            out = mx.clip(out, -FLOAT16_MAX, FLOAT16_MAX)
        return out.astype(x.dtype), self._size(name, role, codec, parts, x.shape)

    def _size(self, name: str, role: str, codec: Codec, parts: dict[str, mx.array], shape: tuple[int, ...]) -> int:
        """Bytes of encoded parts; tables that are carried count once, not with every block of rows."""
        size = sum(part.nbytes for part in parts.values())
        if isinstance(codec, Tc | CommVqAdditive) and codec.carry:
            if (name, role) in self._tables:
                none = (shape[0], 0, shape[2])
                size -= codec.nbytes(none, mx.float32) - replace(codec, carry=False).nbytes(none, mx.float32)
            self._tables.add((name, role))
        return size

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)


def parse_roundtrip(spec: str, sink: int | None = None, recent: int | None = None) -> Roundtrip:
    """A fresh round trip of a spec.

    Args:
        spec: a spec of `parse_codec`, or `mlx-N` or `fp8`, both with sink= and recent= if wanted.
        sink, recent: exact rows where the spec does not say, None for those of `parse_codec`; a lossless codec gets none, since all of its
            rows are.

    Raises:
        ValueError: what is wrong with it, and what exists.
    """
    if min(sink or 0, recent or 0) < 0:
        raise ValueError(f"[codec] sink and recent must be at least 0, but got {sink} and {recent}.")
    head, _, rest = spec.partition(",")
    extra = re.fullmatch(r"mlx-(\d+)|fp8", head.strip())
    fields = {text.partition("=")[0].strip() for text in spec.split(",")}
    if extra is not None and fields & {"k", "v", "frame"}:
        raise ValueError(f"[codec] {spec!r}: {head} takes sink=N and recent=N alone.")
    plan = parse_codec(spec if extra is None else f"raw,{rest}" if rest else "raw")
    if extra is not None:
        # They stand in a plan of raw, whose own exact rows are none.
        sink, recent = SINK if sink is None else sink, RECENT if recent is None else recent
    if extra is not None or not plan.lossless:
        plan = replace(
            plan,
            sink=plan.sink if sink is None or "sink" in fields else sink,
            recent=plan.recent if recent is None or "recent" in fields else recent,
        )
    if extra is None:
        return Roundtrip(plan.full_spec(), plan)
    shown = f"{head.strip()},sink={plan.sink},recent={plan.recent}"
    if extra[1] is None:
        return Roundtrip(shown, plan, fp8=True)
    if int(extra[1]) not in MLX_BITS:
        raise ValueError(f"[codec] {spec!r}: mlx-N has N of {', '.join(map(str, MLX_BITS))}.")
    return Roundtrip(shown, plan, mlx_bits=int(extra[1]))


def without_exact_rows(spec: str) -> str:
    """A spec without its sink= and recent=."""
    return ",".join(field for field in spec.split(",") if field.partition("=")[0].strip() not in ("sink", "recent"))


def affine(x: mx.array, bits: int, group: int) -> tuple[mx.array, int]:
    """Rows through mlx's affine quantisation, and the bytes of weights, scales and biases."""
    weight, scales, biases = mx.quantize(x, group_size=group, bits=bits)
    if x.dtype == mx.float32:
        narrow = [part.astype(mx.float16) for part in (scales, biases)]
        if all(mx.all(mx.isfinite(part)).item() for part in narrow):
            scales, biases = narrow
    size = weight.nbytes + scales.nbytes + biases.nbytes
    return mx.dequantize(weight, scales.astype(x.dtype), biases.astype(x.dtype), group_size=group, bits=bits), size
