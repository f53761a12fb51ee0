"""Group-affine codes, `affine-B[:group=G]`: keys per channel over groups of tokens, values per token over groups of channels (KIVI).

    x^ = zero + step * code,   code = round((x - zero) / step) in 0 .. 2^B - 1

    zero = min of the group, rounded down to bfloat16
    step = (max of the group - zero) / (2^B - 1), rounded up to bfloat16

Outward rounding keeps the whole group within the codes, so that |x - x^| <= step / 2 whatever the group's offset; the codes are made
with the rounded zero and step. bfloat16 for float32's range, as in `_rotated`. The last group may be short.

Parts: codes (H, S, ceil(D B / 8)) U8, `lsb8`; scale (the step) and zero BF16: per channel (H, ceil(S / G), D), per token
(H, S, ceil(D / G)). With a batch axis in front they are the operands of `metal.scalar_fused_decode_attend` with packed="lsb8".
Scores per token: D B / 8 bytes of codes; step folds into the query once per group of G tokens, and <w, zero> is one number per group.

KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache (Liu et al. 2024).

Groups of 32 cost one bit a value. KL divergence and top-1 agreement on SmolLM2-135M in float32, a 512-token prefix coded, 256 tokens on
it, mean of code, prose and technical of tests/texts (`python -m tests.measure_codec_defaults`, sink=0,recent=0):

    bits a value                          affine-2  3.0     affine-4  5.0
    keys alone, pre-RoPE                  .0944  .824       .0032  .969     default
    keys alone, post-RoPE                 .1306  .807       .0035  .964
    values alone                          .0291  .915       .0009  .984
    both                                  .1437  .781       .0042  .962
    both, 4 first and 32 last exact       .0956  .842       .0018  .970
    beside them: both, `rvq-2`, `rvq-4`   .0661  .866       .0036  .975     2.25 and 4.25 bits

A rotation with Lloyd-Max points (`rvq-N`) is better with fewer bits; affine is for readers that cannot rotate.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, get_args

import mlx.core as mx

from formats.errors import ManifestError
from veloxquant_mlx import native
from veloxquant_mlx.codecs._base import (
    DTYPES,
    FLOAT16_MAX,
    SMALLEST,
    Codec,
    Frame,
    Given,
    Layout,
    RoleName,
    Shape,
    token_blocks,
)
from veloxquant_mlx.codecs._bits import lookup, pack, packed_bytes
from veloxquant_mlx.codecs._reading import RowReader, Tile
from veloxquant_mlx.metal import _encode_rows
from veloxquant_mlx.metal._coded_operand import CodedOperand
from veloxquant_mlx.native import converting, encoding

Per = Literal["channel", "token"]
DEFAULT_GROUP = 32
MAX_GROUP = 1024  # a group is coded at once


@dataclass(frozen=True)
class Affine(Codec):
    """Uniform codes between a group's smallest and largest value.

    Attributes:
        bits: of a code, 1 to 8.
        group: tokens (per channel) or channels (per token) that share a step and a zero.
        per: "channel" groups neighbouring tokens of one channel, "token" neighbouring channels of one token.
    """

    id: ClassVar[str] = "affine"
    maps: ClassVar[bool] = True
    bits: int
    group: int
    per: Per

    @classmethod
    def parse(cls, text: str, role: RoleName) -> "Affine | None":
        name, *options = text.split(":")
        if not name.startswith("affine"):
            return None
        match = re.fullmatch(r"affine-([1-8])", name)
        if not match:
            raise ValueError(f"[codec] {name!r}: write affine-N with N in 1..8 (affine-4).")
        group, per = DEFAULT_GROUP, _default_per(role)
        for word in options:
            if word in get_args(Per):
                per = word
            elif re.fullmatch(r"group=[0-9]{1,4}", word) and 1 <= int(word[6:]) <= MAX_GROUP:
                group = int(word[6:])
            else:
                raise ValueError(f"[codec] {text!r}: unknown option {word!r}; there are channel, token, group=N with N in 1..{MAX_GROUP}.")
        return cls(int(match[1]), group, per)

    def spec(self, role: RoleName | None = None) -> str:
        words = [f"affine-{self.bits}"]
        if role is None or self.per != _default_per(role):
            words.append(self.per)
        if self.group != DEFAULT_GROUP:
            words.append(f"group={self.group}")
        return ":".join(words)

    def to_params(self) -> dict:
        return {"bits": self.bits, "group": self.group, "per": self.per}

    @classmethod
    def from_params(cls, params: dict) -> Self:
        bits, group, per = (params.get(key) for key in ("bits", "group", "per"))
        if type(bits) is not int or not 1 <= bits <= 8:
            raise ManifestError(f"bits must be an integer in 1..8, but got {bits!r:.80}")
        if type(group) is not int or not 1 <= group <= MAX_GROUP:
            raise ManifestError(f"group must be an integer in 1..{MAX_GROUP}, but got {group!r:.80}")
        if per not in get_args(Per):
            raise ManifestError(f"per must be one of {get_args(Per)}, but got {per!r:.80}")
        return cls(bits, group, per)

    def default_frame(self, role: RoleName) -> Frame:
        return "pre" if role == "k" else "post"

    @property
    def tokens_together(self) -> int:
        return self.group if self.per == "channel" else 1

    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        heads, tokens, dim = shape
        side = (heads, -(-tokens // self.group), dim) if self.per == "channel" else (heads, tokens, -(-dim // self.group))
        return {
            "codes": ("U8", (heads, tokens, packed_bytes(dim, self.bits))),
            "scale": ("BF16", side),
            "zero": ("BF16", side),
        }

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        self._check_input(x)
        if x.size == 0:
            return {part: mx.zeros(shape, DTYPES[dtype]) for part, (dtype, shape) in self.layout(x.shape, x.dtype).items()}
        found = self.encode_measured(x, None)
        if found is not None:
            return found[0]
        self._check_finite(x)
        if _encode_rows.takes_affine(x, self.group, self.per == "token"):
            parts = dict(zip(("codes", "scale", "zero"), _encode_rows.affine(x, self.bits, self.group, self.per == "token"), strict=True))
            mx.eval(parts)
            return parts
        blocks = []
        for tokens in token_blocks(x.shape, self.tokens_together):
            blocks.append(self._encode_block(x[:, tokens].astype(mx.float32)))
            mx.eval(blocks[-1])
        parts = {part: mx.concatenate([block[part] for block in blocks], axis=1) for part in blocks[0]}
        mx.eval(parts)
        return parts

    def encode_measured(self, x: mx.array, undo: encoding.Undo | None) -> tuple[dict[str, mx.array], encoding.Loss] | None:
        found = encoding.affine(x, self.bits, self.group, self.per == "token", undo) if encoding.takes(x) else None
        return None if found is None else (dict(zip(("codes", "scale", "zero"), found[0], strict=True)), found[1])

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype) -> mx.array:
        if converting.in_use(shape[2]):
            return converting.decoded(self.row_reader(parts, shape).stored, 0, shape, dtype, parts=parts)
        parts = self._checked_parts(parts, self.layout(shape, dtype))
        out = mx.zeros(shape, dtype)
        for tokens in token_blocks(shape, self.tokens_together):
            sides = slice(tokens.start // self.tokens_together, -(-tokens.stop // self.tokens_together))
            cut = {part: x[:, tokens if part == "codes" else sides] for part, x in parts.items()}
            block = self._decode_block(cut, shape[2])
            out[:, tokens] = (mx.clip(block, -FLOAT16_MAX, FLOAT16_MAX) if dtype == mx.float16 else block).astype(dtype)
            mx.eval(out)
        return out

    def row_reader(self, parts: dict[str, mx.array], shape: Shape) -> RowReader:
        return _AffineReader(self, self._checked_parts(parts, self.layout(shape, mx.float32)), shape)

    def unfused(self, dim: int, rotated: bool) -> str | None:
        return None

    def _decode_block(self, parts: dict[str, mx.array], dim: int) -> mx.array:
        """Rows of whole groups (or to the end), float32."""
        x = lookup(parts["codes"], tuple(map(float, range(1 << self.bits))), dim)
        scale, zero = (parts[part].astype(mx.float32) for part in ("scale", "zero"))
        axis = 1 if self.per == "channel" else 2
        if x.shape[axis] % self.group:
            return x * self._spread(scale, x.shape) + self._spread(zero, x.shape)
        # Whole groups need no copy of the step at each of their values.
        grouped = mx.unflatten(x, axis, (-1, self.group))
        return (grouped * mx.expand_dims(scale, axis + 1) + mx.expand_dims(zero, axis + 1)).reshape(x.shape)

    def _encode_block(self, x: mx.array) -> dict[str, mx.array]:
        levels = (1 << self.bits) - 1
        lowest, highest = self._reduce(x, mx.min), self._reduce(x, mx.max)
        zero = _bfloat16_outward(lowest, up=False)
        scale = _bfloat16_outward((highest - zero.astype(mx.float32)) / levels, up=True)
        scale = mx.where(scale >= SMALLEST, scale, 0.0).astype(mx.bfloat16)
        step, origin = (self._spread(side.astype(mx.float32), x.shape) for side in (scale, zero))
        codes = mx.round((x - origin) / mx.where(step > 0, step, 1.0))
        codes = mx.where(step > 0, mx.clip(codes, 0, levels), 0.0).astype(mx.uint8)
        return {"codes": pack(codes, self.bits), "scale": scale, "zero": zero}

    def _reduce(self, x: mx.array, extreme) -> mx.array:
        """Extreme of each group: (H, groups, D) per channel, (H, S, groups) per token."""
        axis = 1 if self.per == "channel" else 2
        size = x.shape[axis]
        whole = size - size % self.group
        parts = []
        if whole:
            parts.append(extreme(mx.unflatten(mx.take(x, mx.arange(whole), axis=axis), axis, (-1, self.group)), axis=axis + 1))
        if whole < size:
            parts.append(extreme(mx.take(x, mx.arange(whole, size), axis=axis), axis=axis, keepdims=True))
        return mx.concatenate(parts, axis=axis)

    def _spread(self, side: mx.array, shape: tuple[int, ...]) -> mx.array:
        """A group's number at each of its values."""
        axis = 1 if self.per == "channel" else 2
        return mx.take(side, mx.arange(shape[axis]) // self.group, axis=axis)


class _AffineReader(RowReader):
    def tile(self, start: int, stop: int, given: Given | None = None, after: mx.array | None = None) -> Tile:
        together = self.codec.tokens_together
        first, last = start // together * together, min(-(-stop // together) * together, self.shape[1])
        return Tile(self.codec._decode_block(self.sliced(first, last, after), self.shape[2])[:, start - first : stop - first])

    @cached_property
    def stored(self) -> Any:
        if self.shape[2] > native.max_dim():
            return None
        rows, codec = native.stored(self.shape), self.codec
        rows.codes(native.packed(self.parts["codes"]), codec.bits, None)
        step, zero = (native.packed(self.parts[part]) for part in ("scale", "zero"))
        rows.affine(step, zero, codec.group, codec.per == "token")
        return rows

    @cached_property
    def operand(self) -> CodedOperand:
        codec, sides = self.codec, (self.parts[part].view(mx.uint16) for part in ("scale", "zero"))
        constants = (("BITS", codec.bits), ("GROUP", codec.group), ("TOKEN", codec.per == "token"))
        operand = CodedOperand("affine", self.shape, (self.parts["codes"], *sides), constants)
        mx.eval(*operand.arrays)
        return operand


def _default_per(role: RoleName) -> Per:
    return "channel" if role == "k" else "token"


def _bfloat16_outward(x: mx.array, up: bool) -> mx.array:
    """Nearest bfloat16 not below (up) or not above x, float32: its upper half, one further where what is cut off points that way."""
    bits = x.view(mx.uint32)
    further = mx.logical_and((bits & 0xFFFF) != 0, (bits >> 31) == (0 if up else 1))
    return ((bits >> 16) + further.astype(mx.uint32)).astype(mx.uint16).view(mx.bfloat16)
