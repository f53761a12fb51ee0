"""VecInfer: product vector quantization, of keys after smoothing and a Hadamard rotation, of values as they are.

    y = (x / lambda) H      keys; lambda_i = sqrt(max over the tokens |x_i| / u) per head, u: the largest |x|, rounded up to a power of two
    y = x                   values
    y^ = words[code]        each `sub` neighbouring entries of y by their nearest word of 2^b
    x^ = (y^ H) lambda      keys; values x^ = y^

H is the orthonormal Walsh-Hadamard matrix, hence D a power of two for keys. lambda takes outlier channels out, H spreads what is left
(Yao et al. 2025, arXiv 2510.06175; `allocators.vecinfer`). The factor 1 / u, which the paper's lambda lacks, goes into the words and keeps
lambda within (0, 1]. Words come from k-means on a sample of the rows being coded, the same for the same rows.

Parts: codes (H, S, ceil(D / sub b / 8)) U8, `lsb8`; words (2^b, sub) BF16; for keys smooth (H, D) BF16: lambda. No number per token.
With a batch axis in front of the codes they are the operands of `metal.fused_sdpa.metal_fused_sdpa` with packed="lsb8", which takes one
table for all heads (so are the words shared: a table per head would take 256 sub 16 bits a head) and D / sub up to 16: heads of 64 for
words of 4 entries, of 128 for words of 8. A query becomes (q lambda) H once; a score is then a sum of D / sub entries of a table of
<q's part, word> (`compute_query_lut`). Per token D N / 8 bytes are read of keys, and as many of values.

    vecinfer-2     4 entries, 8 bits     2.20 bits a value of keys with all parts, 3 heads of 64 and 512 tokens
    vecinfer-1.5   4 entries, 6 bits     1.57    (1.25 and 1.75: 5 and 7 bits)
    vecinfer-1     8 entries, 8 bits     1.36

Measured as in `rvq`, KL and top-1, on tests/texts/chat.txt alone (the first text of `python -m tests.measure_codec_defaults`):

    no row exact        keys alone       values alone     both
    vecinfer-2          .1254  .836      .0773  .836      .2094  .773
    rvq-2               .0303  .934      .0128  .973      .0467  .926
    4 first and 32 last exact, both:
    vecinfer-2          .0563  .863      vecinfer-1.5     .1032  .812      vecinfer-1       .1100  .836
    rvq-2               .0232  .930                                        rvq-1            .0776  .887

Without a scale per token the words serve the many rows: a sink, whose rows are unlike the others and looked at by most heads, must be
kept exact (`sink=4`). Keys are coded after RoPE, as the kernel reads them. Every array coded takes a k-means on the host.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np

from formats.errors import ManifestError
from veloxquant_mlx.allocators.vecinfer import calibrate_smooth_factors, dequantize_vq, train_codebook, worth_learning
from veloxquant_mlx.codecs._base import (
    DTYPES,
    FLOAT16_MAX,
    LARGEST,
    SMALLEST,
    Codec,
    Frame,
    Layout,
    Parts,
    RoleName,
    Shape,
    peaks_of,
    token_blocks,
)
from veloxquant_mlx.codecs._bits import pack, packed_bytes, unpack
from veloxquant_mlx.codecs._codewords import NativeReader, codewords, float32
from veloxquant_mlx.metal._attend import hadamard_matrix
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._coded_operand import CodedOperand
from veloxquant_mlx.metal._vecinfer import vecinfer_quantize_metal
from veloxquant_mlx.native import converting, searching

RATES = {"1": (8, 8), "1.25": (4, 5), "1.5": (4, 6), "1.75": (4, 7), "2": (4, 8)}  # bits a value: entries of a word, bits of a code
SMALLEST_PEAK = 2.0**-40  # of a channel, relative to u: lambda is at least 2^-20
_SAMPLE_ROWS = 1024  # rows that words are learnt from
_SAMPLE_POINTS = 1 << 13  # sub-vectors of them
_SEED = 1


@dataclass(frozen=True)
class VecInfer(Codec):
    """Words for runs of neighbouring entries.

    Attributes:
        sub, bits: entries of a word and bits of a code, a pair of `RATES`.
        smooth: whether rows are smoothed and rotated first.
    """

    sub: int
    bits: int
    smooth: bool
    id: ClassVar[str] = "vecinfer"
    maps: ClassVar[bool] = True

    @property
    def grows(self) -> bool:
        return False

    @classmethod
    def parse(cls, text: str, role: RoleName) -> "VecInfer | None":
        name, *options = text.split(":")
        if not name.startswith("vecinfer"):
            return None
        if name.removeprefix("vecinfer-") not in RATES:
            raise ValueError(f"[codec] {name!r}: write vecinfer-N with N in {', '.join(RATES)} (vecinfer-2).")
        smooth = role == "k"
        for word in options:
            if word not in ("smooth", "nosmooth"):
                raise ValueError(f"[codec] {text!r}: unknown option {word!r}; there are smooth, nosmooth.")
            smooth = word == "smooth"
        return cls(*RATES[name.removeprefix("vecinfer-")], smooth)

    def spec(self, role: RoleName | None = None) -> str:
        word = "" if role is not None and self.smooth == (role == "k") else ":smooth" if self.smooth else ":nosmooth"
        return f"vecinfer-{self.bits / self.sub:g}{word}"

    def to_params(self) -> dict:
        return {"sub": self.sub, "bits": self.bits, "smooth": self.smooth}

    @classmethod
    def from_params(cls, params: dict) -> Self:
        sub, bits, smooth = (params.get(key) for key in ("sub", "bits", "smooth"))
        if type(sub) is not int or type(bits) is not int or (sub, bits) not in RATES.values():
            raise ManifestError(f"sub and bits must be 4 and 5 to 8, or 8 and 8, but got {sub!r:.40} and {bits!r:.40}")
        if type(smooth) is not bool:
            raise ManifestError(f"smooth must be a boolean, but got {smooth!r:.40}")
        return cls(sub, bits, smooth)

    def takes(self, dim: int) -> bool:
        return dim > 0 and dim % self.sub == 0 and not (self.smooth and dim & (dim - 1))

    def default_frame(self, role: RoleName) -> Frame:
        return "post"

    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        heads, tokens, dim = shape
        parts: Layout = {
            "codes": ("U8", (heads, tokens, packed_bytes(dim // self.sub, self.bits))),
            "words": ("BF16", (1 << self.bits, self.sub)),
        }
        if self.smooth:
            parts["smooth"] = ("BF16", (heads, dim))
        return parts

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        self._check_input(x)
        self._check_dim(x.shape[2])
        if x.size == 0:
            return {part: mx.zeros(shape, DTYPES[dtype]) for part, (dtype, shape) in self.layout(x.shape, x.dtype).items()}
        peaks = self._peaks(x)
        # Rows are coded in units of u: no square leaves float32's range, and words times u lose nothing.
        largest = float(mx.max(peaks).item())
        unit = 2.0 ** math.ceil(math.log2(largest)) if largest >= SMALLEST else math.inf
        smooth = None
        if self.smooth:
            smooth = calibrate_smooth_factors((peaks / unit)[None], eps=SMALLEST_PEAK).astype(mx.bfloat16)
        words = self._learn(x, unit, smooth)
        if searching.takes(x):
            first, divisor = np.zeros((x.shape[0], x.shape[2] // self.sub)), None if smooth is None else smooth.astype(mx.float32)
            codes = searching.coded_runs(x, self.bits, float32(words), first, 1 / unit, divisor)
        else:
            codes = self._searched(x, unit, smooth, words)
        scale = unit if math.isfinite(unit) else 1.0
        parts = {"codes": codes, "words": (words.astype(mx.float32) * scale).astype(mx.bfloat16)}
        if smooth is not None:
            parts["smooth"] = smooth
        mx.eval(parts)
        return parts

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype) -> mx.array:
        self._check_dim(shape[2])
        if converting.in_use(shape[2]):
            return converting.decoded(self.row_reader(parts, shape).stored, 0, shape, dtype, parts=parts)
        parts = self._checked_parts(parts, self.layout(shape, dtype))
        words = parts["words"].astype(mx.float32)
        out = mx.zeros(shape, dtype)
        for tokens in token_blocks(shape):
            codes = unpack(parts["codes"][:, tokens], self.bits, shape[2] // self.sub)
            block = dequantize_vq(codes, words)
            if self.smooth:
                block = mx.hadamard_transform(block) * parts["smooth"].astype(mx.float32)[:, None]
            out[:, tokens] = (mx.clip(block, -FLOAT16_MAX, FLOAT16_MAX) if dtype == mx.float16 else block).astype(dtype)
            mx.eval(out)
        return out

    def unfused(self, dim: int, rotated: bool) -> str | None:
        return "keys smoothed before RoPE are turned in their tile" if rotated and self.smooth else None

    def row_reader(self, parts: Parts, shape: Shape) -> NativeReader:
        return _WordReader(self, self._checked_parts(parts, self.layout(shape, mx.float32)), shape)

    def native_rows(self, parts: Parts, shape: Shape) -> Any:
        """The rows as the native back end reads them."""
        place = np.arange(shape[2] // self.sub) * self.bits
        rows = codewords(shape, "runs", parts["codes"], self.sub, place, self.bits, np.zeros(1), float32(parts["words"]))
        if self.smooth:
            rows.smooth(float32(parts["smooth"]))
        return rows

    def _searched(self, x: mx.array, unit: float, smooth: mx.array | None, words: mx.array) -> mx.array:
        """The part `codes`, by the kernel."""
        blocks = []
        # Without a GPU every sub-vector takes 2^bits distances: fewer tokens in a block.
        for tokens in token_blocks((x.shape[0], x.shape[1], x.shape[2] << self.bits - 4)):
            codes = vecinfer_quantize_metal(_transformed(x[:, tokens], unit, smooth), words, self.sub)
            # Contiguous: packed bytes are a view of words eight times their size, which would stay until all blocks are joined.
            blocks.append(mx.contiguous(pack(codes.astype(mx.uint8), self.bits)))
            mx.eval(blocks[-1])
        return mx.concatenate(blocks, axis=1)

    def _peaks(self, x: mx.array) -> mx.array:
        """Largest |x| of each channel, (H, D) float32; raises where a value is not finite, or too large."""
        if backend() != "cpu":
            self._check_finite(x)
            peaks = mx.zeros((x.shape[0], x.shape[2]))
            for tokens in token_blocks(x.shape):
                peaks = mx.maximum(peaks, mx.max(mx.abs(x[:, tokens]), axis=1).astype(mx.float32))
                mx.eval(peaks)
            return peaks
        found = peaks_of(x)
        if not (found <= LARGEST).all():
            self._check_finite(x)
        return mx.array(found)

    def _learn(self, x: mx.array, unit: float, smooth: mx.array | None) -> mx.array:
        """(2^bits, sub) bfloat16 words, in units of u."""
        tokens = x.shape[1]
        picked = np.unique(np.linspace(0, tokens - 1, min(tokens, _SAMPLE_ROWS)).round().astype(np.uint32))
        points = np.array(_transformed(x[:, mx.array(picked)], unit, smooth)).reshape(-1, self.sub)
        if len(points) > _SAMPLE_POINTS:
            points = points[np.random.default_rng(_SEED).choice(len(points), _SAMPLE_POINTS, replace=False)]
        return train_codebook(mx.array(worth_learning(points, 1 << self.bits)), 1 << self.bits, self.sub).astype(mx.bfloat16)

    def _check_dim(self, dim: int) -> None:
        if not self.takes(dim):
            wanted = "a power of two, at least" if self.smooth else "a multiple of"
            raise ValueError(f"[{self.id}] head_dim must be {wanted} {self.sub}, but got {dim}.")


class _WordReader(NativeReader):
    @cached_property
    def operand(self) -> CodedOperand:
        codec, dim = self.codec, self.shape[2]
        words = self.parts["words"].astype(mx.float32).reshape(-1)
        smooth = self.parts["smooth"].astype(mx.float32) if codec.smooth else None
        matrix = hadamard_matrix(dim) if codec.smooth else None
        constants = (("SUB", codec.sub), ("BITS", codec.bits))
        mx.eval(words, self.parts["codes"], [] if smooth is None else smooth)
        return CodedOperand("words", self.shape, (self.parts["codes"],), constants, staged=words, matrix=matrix, smooth=smooth)


def _transformed(x: mx.array, unit: float, smooth: mx.array | None) -> mx.array:
    """y of rows (H, S, D) in units of u, float32. A transform treats a row alike whatever stands beside it; a matrix product may not."""
    y = x.astype(mx.float32) * (1 / unit)
    return y if smooth is None else mx.hadamard_transform(y / smooth.astype(mx.float32)[:, None])
