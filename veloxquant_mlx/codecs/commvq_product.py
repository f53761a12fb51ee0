"""commvq-N:product: keys before RoPE as one word for each part of a row, the operands of `metal.comm_vq_decode_metal`.

    y    = the row with the planes of RoPE as entries (i, i + D / 2): the row itself where all of it is rotary
    y^_j = words[h, j, code_j]        each run j of `sub` neighbouring entries of y by its nearest word of 256, of this head and run

Words are k-means of the rows being coded (a sample of 2048 of them), the same for the same rows. A mean is in the words, and there is no
number per token. Unlike the words of `commvq`, these do not commute with RoPE: codes stay as they are when a position, a base or a scaling
changes, but a key must be decoded before it is rotated or scored.

Parts: codes (H, S, D / sub) U8; words (H, D / sub, 256, sub) F16: `indices` and `codebook` of a head as the kernel takes them, with
cb_size = 256, positions of the live keys and inv_freq = (frequencies of the planes, then 0 for those that do not turn)
(`CommVqProduct.rotated_keys`). It reads keys under any RoPE that is one frequency a plane: default, linear, llama3, proportional ... as
they are; partial or at the end of the row, once entries are back in their own order (the kernel's are in that of y); interleaved, whose
rows before RoPE are half-split in a file, so that queries must be too; yarn and longrope with their magnitude in the words, as float32.

    commvq-2:product    sub 4        commvq-1:product    sub 8        values: rvq-4

Tables take 4096 / S bits a value for S coded tokens: 8.6 at 476, 1 at 4096, 1/8 at 32768; below 293 tokens sub 4 takes more than 16.
float16 words hold entries up to 65504 (larger ones are refused) to 11 bits, and nothing below 2^-25.

SmolLM2, `python -m tests.measure_codec_defaults MODEL SPEC ...`: KL on chat, code, prose, technical, their mean, and top-1. The first 4 and
last 32 rows are exact; bits of the 476 others with all parts.

    k=commvq-2:product,v=raw    10.61 bits   .0074 .0203 .0028 .0045   .0087  .973
    k=commvq-1:product,v=raw     9.61        .0134 .0341 .0053 .0104   .0158  .944
    k=commvq-2,v=raw             2.15        .0138 .0262 .0102 .0127   .0158  .952
    k=rvq-2,v=raw                2.28        .0206 .0622 .0196 .0320   .0336  .912
    k=rvq-3,v=raw                3.28        .0027 .0086 .0040 .0049   .0051  .966
    k=vecinfer-2,v=raw           2.21        .0510 .0855 .0272 .0325   .0491  .901
    values rvq-4: commvq-2:product .0089 .965, commvq-1:product .0161 .943

So it saves no room on a prompt of some hundred tokens: rvq-3 is nearer at a third of the bits, commvq-2 as near as sub 8 at a quarter. It
is for keys that `comm_vq_decode_metal` reads from a file as they are, of prompts long enough for their tables. Sink rows must be exact:
with sink=0,recent=0 the KL on chat is .0765 and .3636. Every run of every head and layer takes a k-means on the host.
"""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np

from formats.errors import ManifestError
from veloxquant_mlx import native
from veloxquant_mlx.allocators.vecinfer import trained, worth_learning
from veloxquant_mlx.codecs._base import DTYPES, FLOAT16_MAX, Codec, Frame, Layout, Parts, RoleName, Shape, token_blocks, within
from veloxquant_mlx.codecs._codewords import NativeReader, codewords, float32
from veloxquant_mlx.codecs.commvq import check_rotary
from veloxquant_mlx.codecs.rvq import Rvq
from veloxquant_mlx.metal._coded_operand import CodedOperand
from veloxquant_mlx.metal._comm_vq import comm_vq_decode_metal
from veloxquant_mlx.metal._vecinfer import vecinfer_quantize_metal
from veloxquant_mlx.native import converting, searching
from veloxquant_mlx.transfer.rope_spec import RopeSpec

SUBS = {"1": 8, "2": 4}  # bits a value: entries of a word
WORDS = 256  # a code is a byte
MAX_POSITION = 1 << 24
_SAMPLE_ROWS = 2048  # rows that words are learnt from


@dataclass(frozen=True)
class CommVqProduct(Codec):
    """Words for runs of neighbouring entries, learnt for each run of each head.

    Attributes:
        sub: entries of a word, 4 or 8.
        first, dims: the rotary entries; dims None is the whole row.
    """

    sub: int
    first: int = 0
    dims: int | None = None
    id: ClassVar[str] = "commvq-product"
    maps: ClassVar[bool] = True

    @property
    def grows(self) -> bool:
        return False

    @classmethod
    def parse(cls, text: str, role: RoleName) -> Codec | None:
        name, *options = text.split(":")
        if not name.startswith("commvq") or "product" not in options:
            return None
        if name.removeprefix("commvq-") not in SUBS:
            raise ValueError(f"[codec] {text!r}: write commvq-N:product with N one of {', '.join(SUBS)}.")
        options.remove("product")
        found = {}
        for word in options:
            if not re.fullmatch(r"(first|dims)=\d{1,6}", word) or word.partition("=")[0] in found:
                raise ValueError(f"[codec] {text!r}: unknown option {word!r}; with product there are first=N, dims=N, each once.")
            found[word.partition("=")[0]] = int(word.partition("=")[2])
        if found.get("dims", 2) % 2 or not found.get("dims", 2) or ("first" in found and "dims" not in found):
            raise ValueError(f"[codec] {text!r}: dims must be even and positive, and first goes with it.")
        return Rvq.parse("rvq-4", role) if role == "v" else cls(SUBS[name.removeprefix("commvq-")], **found)

    def spec(self, role: RoleName | None = None) -> str:
        rotary = "" if self.dims is None else f":first={self.first}:dims={self.dims}"
        return f"commvq-{8 // self.sub}:product{rotary}"

    def to_params(self) -> dict:
        return {"sub": self.sub, "first": self.first, "dims": self.dims}

    @classmethod
    def from_params(cls, params: dict) -> Self:
        sub, first, dims = (params.get(key) for key in ("sub", "first", "dims"))
        if type(sub) is not int or sub not in SUBS.values():
            raise ManifestError(f"sub must be 4 or 8, but got {sub!r:.40}")
        check_rotary(first, dims)
        return cls(sub, first, dims)

    def takes(self, dim: int) -> bool:
        return dim > 0 and dim % self.sub == 0 and self.first + (self.dims or 2) <= dim

    def for_rotary(self, first: int, dims: int, dim: int) -> Self:
        return self if (first, dims) == (0, dim) else replace(self, first=first, dims=dims)

    def default_frame(self, role: RoleName) -> Frame:
        return "pre"

    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        heads, tokens, dim = shape
        self._check_dim(dim)
        return {
            "codes": ("U8", (heads, tokens, dim // self.sub)),
            "words": ("F16", (heads, dim // self.sub, WORDS, self.sub)),
        }

    def order(self, dim: int) -> np.ndarray:
        """Which entry of a row each entry of its words is, (D,): i and i + D / 2 are what RoPE turns together, the rotary pairs first."""
        self._check_dim(dim)
        dims = dim if self.dims is None else self.dims
        rotary = np.arange(self.first, self.first + dims)
        others = np.setdiff1d(np.arange(dim), rotary)
        return np.concatenate([rotary.reshape(2, -1), others.reshape(2, -1)], axis=1).reshape(-1)

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        self._check_input(x)
        layout = self.layout(x.shape, x.dtype)
        if x.size == 0:
            return {part: mx.zeros(shape, DTYPES[dtype]) for part, (dtype, shape) in layout.items()}
        self._check_finite(x)
        self._check_range(x)
        heads, tokens, dim = x.shape
        words = self._learn(x)
        if searching.takes(x):
            return {"codes": self._searched(x, float32(words)), "words": words}
        blocks = []
        # Every part takes a distance to each word: no more tokens in a block than leave room for those.
        for block in token_blocks((1, tokens, max(heads * dim, WORDS))):
            parts = self._parts(x[:, block])
            codes = []
            for h, i in np.ndindex(heads, dim // self.sub):
                codes.append(vecinfer_quantize_metal(parts[h, i], words[h, i], self.sub).astype(mx.uint8))
                mx.eval(codes[-1])  # the distances of one table at a time
            blocks.append(mx.contiguous(mx.concatenate(codes, axis=-1).reshape(-1, heads, dim // self.sub).swapaxes(0, 1)))
            mx.eval(blocks[-1])
        parts = {"codes": mx.concatenate(blocks, axis=1), "words": words}
        mx.eval(parts)
        return parts

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype) -> mx.array:
        if converting.in_use(shape[2]):
            return converting.decoded(self.row_reader(parts, shape).stored, 0, shape, dtype, parts=parts)
        parts = self._checked_parts(parts, self.layout(shape, dtype))
        back = mx.array(np.argsort(self.order(shape[2])).astype(np.uint32))
        heads, _, dim = shape
        table = parts["words"][...].reshape(-1, self.sub)
        starts = (mx.arange(heads * dim // self.sub, dtype=mx.uint32) * WORDS).reshape(heads, 1, -1)
        out = mx.zeros(shape, dtype)
        for tokens in token_blocks(shape):
            rows = table[starts + parts["codes"][:, tokens].astype(mx.uint32)]
            out[:, tokens] = mx.take(rows.reshape(heads, -1, dim), back, axis=-1).astype(dtype)
            mx.eval(out)
        return out

    def unfused(self, dim: int, rotated: bool) -> str | None:
        return None if self.dims is None or (self.first, self.dims) == (0, dim) else "words of partly rotary rows are put in order first"

    def row_reader(self, parts: Parts, shape: Shape) -> NativeReader:
        return _PlaceReader(self, self._checked_parts(parts, self.layout(shape, mx.float32)), shape)

    def native_rows(self, parts: Parts, shape: Shape) -> Any:
        """The rows as the native back end reads them."""
        heads, _, dim = shape
        runs = dim // self.sub
        table = np.arange(heads * runs).reshape(heads, runs) * WORDS * self.sub
        words = native.packed(parts["words"])  # half as large as in float32, and what a file maps is read where it is
        return codewords(shape, "runs", parts["codes"], self.sub, 8 * np.arange(runs), 8, table, words, self.order(dim))

    def rotated_keys(self, parts: dict[str, mx.array], shape: Shape, positions: np.ndarray, rope: RopeSpec | None) -> mx.array:
        """The keys as a half-split model caches them, a head's parts going to `comm_vq_decode_metal` as they are.

        Args:
            parts: of keys coded before RoPE.
            shape: (H, S, D) of them.
            positions: (S,) int, of the keys, less than 2^24 from 0.
            rope: rotation of the live keys, or None; its pairing is of no account.

        Returns:
            (H, S, D) float16, rotary entries in half-split order.

        Raises:
            ValueError: shapes or positions that do not fit, or a rope on other entries than the codec's.

        Error: that of the kernel, whose frequencies are float32: an angle is off by up to 2^-24 of itself.
        """
        _, tokens, dim = shape
        parts = self._checked_parts(parts, self.layout(shape, mx.float16))
        order, rotary = self.order(dim), (self.first, dim if self.dims is None else self.dims)
        if rope is not None and (rope.first, rope.dims) != rotary:
            raise ValueError(f"[{self.id}] words' pairs are on entries (first, dims) {rotary}, but RoPE is on {(rope.first, rope.dims)}.")
        at = np.asarray(positions)
        if at.shape != (tokens,) or at.dtype.kind != "i" or np.abs(at).max(initial=0) >= MAX_POSITION:
            got = f"{at.dtype} {at.shape} up to {np.abs(at).max(initial=0)}"
            raise ValueError(f"[{self.id}] positions must be ({tokens},) integers below {MAX_POSITION}, but got {got}.")
        frequencies, words = np.zeros(dim // 2, np.float32), parts["words"]
        if rope is not None:
            frequencies[: rope.dims // 2] = rope.frequencies
        if rope is not None and rope.magnitude != 1:
            size = np.where((order >= rope.first) & (order < rope.first + rope.dims), rope.magnitude, 1.0).astype(np.float32)
            words = words.astype(mx.float32) * mx.array(size.reshape(-1, 1, self.sub))
        operands = mx.array(at.astype(np.int32)), mx.array(frequencies), dim // self.sub, self.sub, WORDS
        keys = [comm_vq_decode_metal(codes, book, *operands) for codes, book in zip(parts["codes"], words, strict=True)]
        return mx.take(mx.stack(keys), mx.array(np.argsort(order).astype(np.uint32)), axis=-1)

    def _learn(self, x: mx.array) -> mx.array:
        """The part `words`."""
        heads, tokens, dim = x.shape
        picked = mx.array(np.unique(np.linspace(0, tokens - 1, min(tokens, _SAMPLE_ROWS)).round().astype(np.uint32)))
        words = np.zeros((heads, dim // self.sub, WORDS, self.sub), np.float16)
        for h in range(heads):
            points = np.array(self._parts(x[h : h + 1, picked])[0])
            runs = list(points)
            own = [worth_learning(run, WORDS) for run in runs]
            together = [i for i, run in enumerate(runs) if own[i] is run]
            if together:
                words[h, together] = trained(points[together], WORDS)
            for i in set(range(len(runs))) - set(together):
                words[h, i] = trained(own[i][None], WORDS)[0]
        return mx.array(words)

    def _searched(self, x: mx.array, words: np.ndarray) -> mx.array:
        """The part `codes`, by the native back end."""
        heads, _, dim = x.shape
        first, order = np.arange(heads * dim // self.sub).reshape(heads, -1) * WORDS, self.order(dim)
        plain = np.array_equal(order, np.arange(dim))
        return searching.coded_runs(x, 8, words.reshape(-1, self.sub), first, order=None if plain else order)

    def _parts(self, x: mx.array) -> mx.array:
        """Rows (H, S, D) as (H, D / sub, S, sub) float32, entries in `order`."""
        heads, tokens, dim = x.shape
        rows = mx.take(x.astype(mx.float32), mx.array(self.order(dim).astype(np.uint32)), axis=-1)
        return rows.reshape(heads, tokens, -1, self.sub).swapaxes(1, 2)

    def _check_range(self, x: mx.array) -> None:
        if x.dtype == mx.float16:
            return
        blocks = [x[:, tokens] for tokens in token_blocks(x.shape)]
        if all(within(block, FLOAT16_MAX) for block in blocks):
            return
        largest = max(mx.max(mx.abs(block)).item() for block in blocks)
        if largest > FLOAT16_MAX:
            raise ValueError(
                f"[{self.id}] values must be within {FLOAT16_MAX:g}, which float16 words hold, but the largest is {largest:g}; "
                "--codec rvq-4 stores them."
            )

    def _check_dim(self, dim: int) -> None:
        if not self.takes(dim):
            last = self.first + (self.dims or 2)
            raise ValueError(f"[{self.id}] head_dim must be a multiple of {self.sub} and at least {last}, but got {dim}.")


class _PlaceReader(NativeReader):
    @cached_property
    def operand(self) -> CodedOperand:
        arrays = (self.parts["codes"], self.parts["words"])
        mx.eval(*arrays)
        return CodedOperand("places", self.shape, arrays, (("SUB", self.codec.sub), ("BITS", 8)))
