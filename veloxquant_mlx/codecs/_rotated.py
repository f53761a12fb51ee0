"""Core of the codecs that rotate, then code every coordinate with a fixed table: rvq and rabitq.

    x' = x - mean or x            with `center`: whichever is smaller; mean: per head over the tokens
    y  = R x' / s0                R: randomised rotation; s0 = |x'| / sqrt(D), so that y has unit variance
    q  = c1[i1] (+ c2[i2])        i1 the nearest codeword to y, i2 the nearest to y - c1[i1]
    x^ = s R^T q (+ mean)         s: one bfloat16 per (head, token); with `center` its sign bit says "without the mean"

The scale s corrects what the tables get wrong about this very row. With a = s / s0:

    norm      a = 1                  the row's own norm times the table's shrinkage (TurboQuant)
    ls        a = <y, q> / <q, q>    least squares: the smallest |x' - x^|
    unbiased  a = <y, y> / <y, q>    <x^, x'> = |x'|^2: averaged over rotations, <w, x^> = <w, x'> for every w (EDEN, RaBitQ)

bfloat16 has float32's range, so that norms of 1e-6 or 1e30 need no care, which float16 would (65504). Its relative error, at most
2**-8 = 0.4 %, is far below what the codes leave: 1.3 % of the norm for two stages of 4 bits, 14 % for 2+2.

Keys before RoPE are mostly a constant: the mean holds 78 % of their energy in SmolLM2-135M. But a sink (the first token) is not like
the others: its key lies far from the mean and its value near zero, and most heads look at it. Hence the choice row by row; with the mean
taken off every row, centring makes rvq-2+2 worse (`rvq`).
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, get_args

import mlx.core as mx
import numpy as np

from formats.errors import ManifestError
from veloxquant_mlx import native
from veloxquant_mlx.allocators.codebooks import MAX_BITS, Codebook, boundaries
from veloxquant_mlx.codecs._base import DTYPES, FLOAT16_MAX, LARGEST, SMALLEST, Codec, Given, Layout, RoleName, Shape, token_blocks
from veloxquant_mlx.codecs._bits import lookup, pack, packed_bytes
from veloxquant_mlx.codecs._reading import RowReader, Tile
from veloxquant_mlx.codecs._rotation import factors, matrix, native_factors, rotate, unrotate
from veloxquant_mlx.metal import _encode_rows
from veloxquant_mlx.metal._checks import power_of_two
from veloxquant_mlx.metal._coded_operand import CodedOperand
from veloxquant_mlx.native import converting, encoding

ScaleKind = Literal["norm", "ls", "unbiased"]

ROTATION = "hartley-sylvester"
DEFAULT_SEED = 1
SEEDS = 1 << 63  # an integer that any JSON reader of the format takes
_MEAN_TOKENS = 4096  # tokens per partial sum of the mean


@dataclass(frozen=True)
class RotatedCodec(Codec):
    """Rotation, one or two codebooks, one scale per (head, token).

    Attributes:
        codebooks: one tuple of 2**bits ascending codewords per stage.
        scale: kind of the per-token scale.
        center: subtract the per-head mean over the tokens.
        seed: of the rotation's signs.
    """

    codebooks: tuple[Codebook, ...]
    scale: ScaleKind
    center: bool
    seed: int = DEFAULT_SEED
    maps: ClassVar[bool] = True
    ties_up: ClassVar[bool] = False  # a value on a boundary belongs to the cell above it

    @classmethod
    @abstractmethod
    def role_defaults(cls, role: RoleName, bits: int) -> dict:
        """Default `scale` and `center` of a role, for so many bits in all stages together."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Spec string without options."""

    @cached_property
    def bits(self) -> tuple[int, ...]:
        return tuple(len(codebook).bit_length() - 1 for codebook in self.codebooks)

    @cached_property
    def code_parts(self) -> tuple[str, ...]:
        return ("codes",) if len(self.codebooks) == 1 else tuple(f"codes{i + 1}" for i in range(len(self.codebooks)))

    def spec(self, role: RoleName | None = None) -> str:
        default = {} if role is None else self.role_defaults(role, sum(self.bits))
        words = [self.name]
        if default.get("scale") != self.scale:
            words.append(self.scale)
        if default.get("center") != self.center:
            words.append("center" if self.center else "nocenter")
        if self.seed != DEFAULT_SEED:
            words.append(f"seed={self.seed}")
        return ":".join(words)

    def to_params(self) -> dict:
        return {
            "bits": list(self.bits),
            "codebooks": [list(codebook) for codebook in self.codebooks],
            "rotation": ROTATION,
            "seed": self.seed,
            "scale": self.scale,
            "center": self.center,
        }

    @classmethod
    def from_params(cls, params: dict) -> Self:
        rotation, seed, scale, center = (params.get(key) for key in ("rotation", "seed", "scale", "center"))
        if rotation != ROTATION:
            raise ManifestError(f"rotation must be {ROTATION!r}, but got {rotation!r}")
        if type(seed) is not int or not 0 <= seed < SEEDS:
            raise ManifestError(f"seed must be an integer in [0, 2**63), but got {seed!r}")
        if scale not in get_args(ScaleKind):
            raise ManifestError(f"scale must be one of {get_args(ScaleKind)}, but got {scale!r}")
        if type(center) is not bool:
            raise ManifestError(f"center must be a boolean, but got {center!r}")
        return cls(_codebooks(params), scale, center, seed)

    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        heads, tokens, dim = shape
        parts: Layout = {
            part: ("U8", (heads, tokens, packed_bytes(dim, bits))) for part, bits in zip(self.code_parts, self.bits, strict=True)
        }
        parts["scale"] = ("BF16", (heads, tokens))
        if self.center:
            parts["mean"] = ("BF16", (heads, dim))
        return parts

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        self._check_input(x)
        found = self.encode_measured(x, None)
        if found is not None:
            return found[0]
        if _encode_rows.takes_rotated(x) and not self._grid_steps():
            return self._encode_by_kernel(x)
        return encode_centred(self, x, self.center, self._encode_block)

    def _encode_by_kernel(self, x: mx.array) -> dict[str, mx.array]:
        self._check_finite(x)
        mean = _mean_over_tokens(x) if self.center else None
        stages = [(boundaries(codebook), codebook) for codebook in self.codebooks]
        codes, scale = _encode_rows.rotated(x, stages, self.ties_up, self.scale, mean, factors(x.shape[2], self.seed)[0])
        parts = dict(zip(self.code_parts, codes, strict=True)) | {"scale": scale} | ({} if mean is None else {"mean": mean})
        mx.eval(parts)
        return parts

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype) -> mx.array:
        if converting.in_use(shape[2]):
            return converting.decoded(self.row_reader(parts, shape).stored, 0, shape, dtype, parts=parts)
        parts = self._checked_parts(parts, self.layout(shape, dtype))
        out = mx.zeros(shape, dtype)
        for tokens in token_blocks(shape):
            block = self._decode_block(parts, tokens, shape[2])
            # float16 ends at 65504; the error of a value close to it must not turn it into Inf.
            out[:, tokens] = (mx.clip(block, -FLOAT16_MAX, FLOAT16_MAX) if dtype == mx.float16 else block).astype(dtype)
            mx.eval(out)
        return out

    def row_reader(self, parts: dict[str, mx.array], shape: Shape) -> RowReader:
        return _RotatedReader(self, self._checked_parts(parts, self.layout(shape, mx.float32)), shape)

    def unfused(self, dim: int, rotated: bool) -> str | None:
        if rotated and not power_of_two(dim):
            return f"a kernel undoes rotations of powers of two before RoPE, and head_dim is {dim}"
        return None

    def encode_measured(self, x: mx.array, undo: encoding.Undo | None) -> tuple[dict[str, mx.array], encoding.Loss] | None:
        if not encoding.takes(x):
            return None
        mean = encoding.mean_over_tokens(x, undo) if self.center else None
        stages = [(boundaries(codebook), codebook) for codebook in self.codebooks]
        turned = factors(x.shape[2], self.seed)
        found = encoding.rotated(x, stages, self.ties_up, self.scale, mean, turned, self._grid_steps(), undo)
        if found is None:
            return None
        codes, scale, loss = found
        parts = dict(zip(self.code_parts, codes, strict=True)) | {"scale": scale}
        return parts if mean is None else parts | {"mean": mean}, loss

    def _grid_steps(self) -> tuple[float, ...]:
        """Steps of the grids that are tried for each row; none where the table is used as it is."""
        return ()

    def _encode_block(self, x: mx.array, mean: mx.array | None) -> dict[str, mx.array]:
        dim = x.shape[-1]
        if mean is not None:
            centred = x - mean.astype(mx.float32)[:, None]
            nearer = mx.sum(mx.square(centred), axis=-1, keepdims=True) < mx.sum(mx.square(x), axis=-1, keepdims=True)
            x = mx.where(nearer, centred, x)
        largest = mx.max(mx.abs(x), axis=-1, keepdims=True)
        coded = largest >= SMALLEST
        # Divided by its largest value, a row's sum of squares lies in [1, D]: neither overflow nor underflow.
        x = x * mx.where(coded, 1 / largest, 0.0)
        unit = mx.sqrt(mx.sum(mx.square(x), axis=-1, keepdims=True) / dim)
        y = rotate(x, self.seed) * mx.where(coded, 1 / unit, 0.0)

        packed, q, residual = {}, None, y
        for part, codebook, bits in zip(self.code_parts, self.codebooks, self.bits, strict=True):
            packed[part] = pack(self._nearest(residual, codebook), bits)
            codewords = lookup(packed[part], codebook, dim)
            q = codewords if q is None else q + codewords
            residual = residual - codewords

        scale = (largest * unit)[..., 0] * self._correction(y, q)
        scale = mx.where(coded[..., 0], scale, 0.0)
        packed["scale"] = (scale if mean is None else mx.where(nearer[..., 0], scale, -scale)).astype(mx.bfloat16)
        return packed

    def _decode_block(self, parts: dict[str, mx.array], tokens: slice, dim: int) -> mx.array:
        tile = self._tile({part: parts[part][:, tokens] for part in (*self.code_parts, "scale")}, dim)
        assert tile.scale is not None
        x = unrotate(tile.points, self.seed) * tile.scale[..., None]
        return x if tile.centred is None else x + tile.centred[..., None] * parts["mean"].astype(mx.float32)[:, None]

    def _tile(self, parts: dict[str, mx.array], dim: int) -> Tile:
        q = None
        for part, codebook in zip(self.code_parts, self.codebooks, strict=True):
            codewords = lookup(parts[part], codebook, dim)
            q = codewords if q is None else q + codewords
        scale = parts["scale"]
        # By its bit: a zero has a sign too.
        centred = (scale.view(mx.uint16) < 0x8000).astype(mx.float32) if self.center else None
        return Tile(q, mx.abs(scale).astype(mx.float32), centred)

    def _nearest(self, y: mx.array, codebook: Codebook) -> mx.array:
        """Index of each value's cell, uint8: how many boundaries lie below it."""
        codes = None
        for boundary in boundaries(codebook):
            above = (y >= boundary if self.ties_up else y > boundary).astype(mx.uint8)
            codes = above if codes is None else codes + above
        return codes

    def _correction(self, y: mx.array, q: mx.array) -> mx.array:
        """s / s0 for each row; 1 where it is undefined (a row of zeros)."""
        if self.scale == "norm":
            return mx.ones(y.shape[:-1], mx.float32)
        yq = mx.sum(y * q, axis=-1)
        other = mx.sum(mx.square(q if self.scale == "ls" else y), axis=-1)
        over, under = (yq, other) if self.scale == "ls" else (other, yq)
        return mx.where(under > 0, over / under, 1.0)


class _RotatedReader(RowReader):
    """Points are codewords: the rotation is the query's, or the output's."""

    def __init__(self, codec: RotatedCodec, parts: dict[str, mx.array], shape: Shape) -> None:
        super().__init__(codec, parts, shape)
        self.seed = codec.seed

    @cached_property
    def mean(self) -> mx.array | None:  # type: ignore[override]
        if not self.codec.center:
            return None
        mean = self.parts["mean"].astype(mx.float32)
        mx.eval(mean)
        return mean

    def tile(self, start: int, stop: int, given: Given | None = None, after: mx.array | None = None) -> Tile:
        return self.codec._tile(self.sliced(start, stop, after), self.shape[2])

    @cached_property
    def stored(self) -> Any:
        dim = self.shape[2]
        if dim > native.max_dim():
            return None
        rows = native.stored(self.shape)
        for part, codebook, bits in zip(self.codec.code_parts, self.codec.codebooks, self.codec.bits, strict=True):
            rows.codes(native.packed(self.parts[part]), bits, list(codebook))
        rows.scale(native.packed(self.parts["scale"]))
        if self.codec.center:
            # bfloat16 is the upper half of float32.
            rows.mean((native.packed(self.parts["mean"]).astype(np.uint32) << 16).view(np.float32))
        rows.rotation(*native_factors(dim, self.codec.seed))
        return rows

    @cached_property
    def operand(self) -> CodedOperand:
        dim, seed = self.shape[2], self.codec.seed
        codes = [self.parts[part] for part in self.codec.code_parts]
        bits = self.codec.bits if len(codes) == 2 else (*self.codec.bits, 0)
        table = mx.array([point for codebook in self.codec.codebooks for point in codebook], mx.float32)
        operand = CodedOperand(
            "table",
            self.shape,
            (codes[0], codes[-1], self.parts["scale"].view(mx.uint16)),
            (("BITS", bits[0]), ("BITS2", bits[1])),
            staged=table,
            mean=None if self.mean is None else self.turned(self.mean),
            matrix=matrix(dim, seed),
            signs=factors(dim, seed)[0] if power_of_two(dim) else None,
        )
        mx.eval(*operand.arrays, operand.staged, [] if operand.mean is None else operand.mean)
        return operand

    def sides(self, start: int, stop: int) -> Tile:
        return self.tile(start, stop)  # lazy: nothing is looked up


def encode_centred(
    codec: Codec, x: mx.array, center: bool, encode_block: Callable[[mx.array, mx.array | None], dict[str, mx.array]]
) -> dict[str, mx.array]:
    """The parts of a codec whose rows are coded one by one, beside their mean where it centres them.

    Args:
        encode_block: codes float32 rows (H, n, D) given the mean (H, D), or None.
    """
    codec._check_input(x)
    if x.size == 0:
        return {part: mx.zeros(shape, DTYPES[dtype]) for part, (dtype, shape) in codec.layout(x.shape, x.dtype).items()}
    codec._check_finite(x)
    mean = _mean_over_tokens(x) if center else None
    blocks = []
    for tokens in token_blocks(x.shape):
        blocks.append(encode_block(x[:, tokens].astype(mx.float32), mean))
        mx.eval(blocks[-1])
    parts = {part: mx.concatenate([block[part] for block in blocks], axis=1) for part in blocks[0]}
    if mean is not None:
        parts["mean"] = mean
    mx.eval(parts)
    return parts


def _mean_over_tokens(x: mx.array) -> mx.array:
    """(H, D) bfloat16; zeros for no tokens. The same partial sums whatever the block size."""
    heads, tokens, dim = x.shape
    total = mx.zeros((heads, dim), mx.float32)
    for start in range(0, tokens, _MEAN_TOKENS):
        total = total + mx.sum(x[:, start : start + _MEAN_TOKENS].astype(mx.float32), axis=1) / tokens
        mx.eval(total)
    return total.astype(mx.bfloat16)


def _codebooks(params: dict) -> tuple[Codebook, ...]:
    codebooks = params.get("codebooks")
    if not isinstance(codebooks, list) or not 1 <= len(codebooks) <= 2:
        raise ManifestError(f"codebooks must be a list of one or two lists, but got {codebooks!r:.80}")
    for i, codebook in enumerate(codebooks):
        numbers = isinstance(codebook, list) and all(type(value) in (int, float) and abs(value) <= LARGEST for value in codebook)
        if not numbers or len(codebook) not in [2**bits for bits in range(1, MAX_BITS + 1)]:
            raise ManifestError(f"codebooks[{i}] must be 2**b finite numbers with b in 1..{MAX_BITS}")
        if any(b <= a for a, b in pairwise(codebook)):
            raise ManifestError(f"codebooks[{i}] must be strictly ascending")
    bits = [len(codebook).bit_length() - 1 for codebook in codebooks]
    if params.get("bits") != bits:
        raise ManifestError(f"bits must be {bits}, the sizes of the codebooks, but got {params.get('bits')!r}")
    return tuple(tuple(float(value) for value in codebook) for codebook in codebooks)


def parse_options(text: str, options: list[str]) -> dict:
    """`scale`, `center` and `seed` from the words after a codec's name.

    Raises:
        ValueError: a word is unknown.
    """
    found: dict = {}
    for word in options:
        if word in get_args(ScaleKind):
            found["scale"] = word
        elif word in ("center", "nocenter"):
            found["center"] = word == "center"
        elif word.startswith("seed=") and word[5:].isdecimal() and int(word[5:]) < SEEDS:
            found["seed"] = int(word[5:])
        else:
            raise ValueError(f"[codec] {text!r}: unknown option {word!r}; there are norm, ls, unbiased, center, nocenter, seed=N.")
    return found
