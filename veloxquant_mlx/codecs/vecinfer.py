"""VecInfer: product vector quantization, of keys after smoothing and a Hadamard rotation, of values as they are.

    y = (x / lambda) H      keys; lambda_i = sqrt(max over the tokens |x_i| / u) per head, u: the largest |x|, rounded up to a power of two
    y = x                   values
    y^ = words[code]        each `sub` neighbouring entries of y by their nearest word of 2^b
    x^ = (y^ H) lambda      keys; values x^ = y^

H is the orthonormal Walsh-Hadamard matrix, hence D a power of two for keys. lambda takes outlier channels out, H spreads what is left.
"""

import math
import re
from dataclasses import dataclass
from typing import ClassVar, Self

import mlx.core as mx
import numpy as np

from formats.errors import ManifestError
from veloxquant_mlx.allocators.vecinfer import calibrate_smooth_factors, dequantize_vq, train_codebook
from veloxquant_mlx.codecs._base import DTYPES, FLOAT16_MAX, SMALLEST, Codec, Frame, Layout, RoleName, Shape, token_blocks
from veloxquant_mlx.codecs._bits import pack, packed_bytes, unpack
from veloxquant_mlx.metal._vecinfer import vecinfer_quantize_metal

SUBS = (4, 8)
SMALLEST_PEAK = 2.0**-40  # of a channel, relative to u: lambda is at least 2^-20
_SAMPLE_ROWS = 1024  # rows that words are learnt from
_SAMPLE_POINTS = 1 << 13  # sub-vectors of them
_SEED = 1


@dataclass(frozen=True)
class VecInfer(Codec):
    """Words for runs of neighbouring entries.

    Attributes:
        sub: entries of a word, 4 or 8.
        bits: of a code, `sub` (one bit a value) to 8.
        smooth: whether rows are smoothed and rotated first.
    """

    sub: int
    bits: int
    smooth: bool
    id: ClassVar[str] = "vecinfer"

    @classmethod
    def parse(cls, text: str, role: RoleName) -> "VecInfer | None":
        name, *options = text.split(":")
        if not name.startswith("vecinfer"):
            return None
        if name not in ("vecinfer-1", "vecinfer-1.25", "vecinfer-1.5", "vecinfer-1.75", "vecinfer-2"):
            raise ValueError(f"[codec] {name!r}: write vecinfer-N with N in 1, 1.25, 1.5, 1.75, 2 (vecinfer-2).")
        rate = float(name[9:])
        sub, smooth = _default_sub(rate), role == "k"
        for word in options:
            if word in ("smooth", "nosmooth"):
                smooth = word == "smooth"
            elif re.fullmatch(r"sub=[48]", word) and int(word[4:]) * rate <= 8:
                sub = int(word[4:])
            else:
                raise ValueError(f"[codec] {text!r}: unknown option {word!r}; there are smooth, nosmooth, sub=4, and sub=8 for vecinfer-1.")
        return cls(sub, int(rate * sub), smooth)

    def spec(self, role: RoleName | None = None) -> str:
        rate = self.bits / self.sub
        words = [f"vecinfer-{rate:g}"]
        if self.sub != _default_sub(rate):
            words.append(f"sub={self.sub}")
        if role is None or self.smooth != (role == "k"):
            words.append("smooth" if self.smooth else "nosmooth")
        return ":".join(words)

    def to_params(self) -> dict:
        return {"sub": self.sub, "bits": self.bits, "smooth": self.smooth}

    @classmethod
    def from_params(cls, params: dict) -> Self:
        sub, bits, smooth = (params.get(key) for key in ("sub", "bits", "smooth"))
        if type(sub) is not int or sub not in SUBS:
            raise ManifestError(f"sub must be 4 or 8, but got {sub!r:.40}")
        if type(bits) is not int or not sub <= bits <= 8:
            raise ManifestError(f"bits must be an integer in {sub}..8 for sub {sub}, but got {bits!r:.40}")
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
        self._check_finite(x)
        peaks = _peaks(x)
        # Rows are coded in units of u: no square leaves float32's range, and words times u lose nothing.
        largest = float(mx.max(peaks).item())
        unit = 2.0 ** math.ceil(math.log2(largest)) if largest >= SMALLEST else math.inf
        smooth = None
        if self.smooth:
            smooth = calibrate_smooth_factors((peaks / unit)[None], eps=SMALLEST_PEAK).astype(mx.bfloat16)
        words = self._learn(x, unit, smooth)
        blocks = []
        # Without a GPU every sub-vector takes 2^bits distances: fewer tokens in a block.
        for tokens in token_blocks((x.shape[0], x.shape[1], x.shape[2] << self.bits - 4)):
            codes = vecinfer_quantize_metal(_transformed(x[:, tokens], unit, smooth), words, self.sub)
            # Contiguous: packed bytes are a view of words eight times their size, which would stay until all blocks are joined.
            blocks.append(mx.contiguous(pack(codes.astype(mx.uint8), self.bits)))
            mx.eval(blocks[-1])
        scale = unit if math.isfinite(unit) else 1.0
        parts = {"codes": mx.concatenate(blocks, axis=1), "words": (words.astype(mx.float32) * scale).astype(mx.bfloat16)}
        if smooth is not None:
            parts["smooth"] = smooth
        mx.eval(parts)
        return parts

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype) -> mx.array:
        self._check_dim(shape[2])
        parts = self._checked_parts(parts, self.layout(shape, dtype))
        words = parts["words"].astype(mx.float32)
        out = mx.zeros(shape, dtype)
        for tokens in token_blocks(shape):
            codes = unpack(parts["codes"][:, tokens], self.bits, shape[2] // self.sub)
            if self.smooth:
                # Divided before the sums, so that those of values up to LARGEST stay finite.
                block = mx.hadamard_transform(dequantize_vq(codes, words / math.sqrt(shape[2])), scale=1.0)
                block = block * parts["smooth"].astype(mx.float32)[:, None]
            else:
                block = dequantize_vq(codes, words)
            out[:, tokens] = (mx.clip(block, -FLOAT16_MAX, FLOAT16_MAX) if dtype == mx.float16 else block).astype(dtype)
            mx.eval(out)
        return out

    def _learn(self, x: mx.array, unit: float, smooth: mx.array | None) -> mx.array:
        """(2^bits, sub) bfloat16 words, in units of u."""
        tokens = x.shape[1]
        picked = np.unique(np.linspace(0, tokens - 1, min(tokens, _SAMPLE_ROWS)).round().astype(np.uint32))
        points = np.array(_transformed(x[:, mx.array(picked)], unit, smooth)).reshape(-1, self.sub)
        if len(points) > _SAMPLE_POINTS:
            points = points[np.random.default_rng(_SEED).choice(len(points), _SAMPLE_POINTS, replace=False)]
        # With no more distinct points than words, k-means would start from copies of some and miss others.
        distinct = np.unique(points, axis=0)
        return train_codebook(mx.array(distinct if len(distinct) <= 1 << self.bits else points), 1 << self.bits, self.sub).astype(
            mx.bfloat16
        )

    def _check_dim(self, dim: int) -> None:
        if not self.takes(dim):
            wanted = "a power of two, at least" if self.smooth else "a multiple of"
            raise ValueError(f"[{self.id}] head_dim must be {wanted} {self.sub}, but got {dim}.")


def _default_sub(rate: float) -> int:
    return 8 if rate == 1 else 4


def _peaks(x: mx.array) -> mx.array:
    """Largest |x| of each channel, (H, D) float32."""
    peaks = mx.zeros((x.shape[0], x.shape[2]))
    for tokens in token_blocks(x.shape):
        peaks = mx.maximum(peaks, mx.max(mx.abs(x[:, tokens]), axis=1).astype(mx.float32))
        mx.eval(peaks)
    return peaks


def _transformed(x: mx.array, unit: float, smooth: mx.array | None) -> mx.array:
    """y of rows (H, S, D) in units of u, float32. A transform treats a row alike whatever stands beside it; a matrix product may not."""
    y = x.astype(mx.float32) * (1 / unit)
    return y if smooth is None else mx.hadamard_transform(y / smooth.astype(mx.float32)[:, None])
