"""QJL, quantised Johnson-Lindenstrauss: of a key, the signs of m = N D random projections and its norm (Zandieh et al. 2024).

    x' = x - mean or x            with `center`: whichever is smaller; mean: per head over the tokens
    signs = [S x' >= 0]
    <w, x'> ~ sqrt(pi / 2) / m |x'| <S w, 2 signs - 1> = <w, x^>,    x^ = sqrt(pi / 2) / m |x'| S^T (2 signs - 1)

S is N blocks of D orthogonal rows of length sqrt(D): two randomised rotations (`_rotation`) one after the other, for after a single one a
row with one large entry has projections of equal size, and the estimate is sqrt(pi / 2) times the inner product. Over seeds the estimate
averages to the inner product, but for a share 1 / (4 D); its variance is (pi / 2 - 1) |w|^2 |x'|^2 / m, where independent Gaussian
projections have pi / 2 in place of pi / 2 - 1.

Parts: codes (H, S, ceil(N D / 8)) U8, `lsb8`; norm (H, S) BF16; with centring mean (H, D) BF16, and the norm's sign bit says "without the
mean". `Qjl.scores` hands codes and norms to `metal.qjl_inner_product` as they are: per token N D / 8 bytes and a norm, and a sum of N D
signed numbers of S w, made once per query; <w, mean> is one number per query. As a codec of values `qjl` means `rvq-2`: a softmax's
average needs less noise than a score. `Qjl` takes values all the same.

Measured as in `rvq`, KL and top-1, mean of all tests/texts (`python -m tests.measure_codec_defaults`, sink=0,recent=0):

    bits a value of keys, 512 tokens           1.28           2.28           4.28
    keys alone, qjl-N                          .3382  .711    .1472  .795    .0440  .888     default: pre-RoPE, centred
    keys alone, qjl-N, 4 + 32 exact            .2430  .758                   .0254  .912
    keys alone, qjl-4:nocenter, post-RoPE                                    .1809  .770     the paper's, all channels alike
    keys alone, rabitq, rabitq-2               .2700  .742    .0324  .905
    qjl-N with rvq-2 values                    .3689  .695    .1706  .790    .0606  .868

More signs of the same row are a poor use of bits: the error falls as 1 / N, a finer grid's (`rabitq-N`) as 4^-N.
The paper keeps outlier channels apart and the newest tokens exact; `sink` and `recent` do the latter.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np

from formats.errors import ManifestError
from veloxquant_mlx import native
from veloxquant_mlx.codecs._base import FLOAT16_MAX, SMALLEST, Codec, Frame, Layout, Parts, RoleName, Shape, reciprocal, token_blocks
from veloxquant_mlx.codecs._bits import pack, packed_bytes, unpack
from veloxquant_mlx.codecs._codewords import NativeReader, float32
from veloxquant_mlx.codecs._rotated import DEFAULT_SEED, ROTATION, SEEDS, encode_centred
from veloxquant_mlx.codecs._rotation import factors, rotate, unrotate
from veloxquant_mlx.codecs.rvq import Rvq
from veloxquant_mlx.metal._qjl import qjl_inner_product
from veloxquant_mlx.native import converting, encoding

MAX_BLOCKS = 4


@dataclass(frozen=True)
class Qjl(Codec):
    """Signs of orthogonal projections, and norms.

    Attributes:
        blocks: N, projections per entry of a row, 1 to 4.
        center: subtract the per-head mean over the tokens.
        seed: of the first rotation's signs; block i has seed + 2 i and seed + 2 i + 1.
    """

    blocks: int = 1
    center: bool = True
    seed: int = DEFAULT_SEED
    id: ClassVar[str] = "qjl"
    maps: ClassVar[bool] = True

    @classmethod
    def parse(cls, text: str, role: RoleName) -> Codec | None:
        name, *options = text.split(":")
        if not name.startswith("qjl"):
            return None
        match = re.fullmatch(rf"qjl(?:-([1-{MAX_BLOCKS}]))?", name)
        if not match:
            raise ValueError(f"[codec] {name!r}: write qjl, or qjl-N with N in 1..{MAX_BLOCKS}.")
        center, seed = True, DEFAULT_SEED
        for word in options:
            if word in ("center", "nocenter"):
                center = word == "center"
            elif re.fullmatch(r"seed=\d{1,19}", word) and int(word[5:]) < SEEDS:
                seed = int(word[5:])
            else:
                raise ValueError(f"[codec] {text!r}: unknown option {word!r}; there are center, nocenter, seed=N.")
        return Rvq.parse("rvq-2", role) if role == "v" else cls(int(match[1] or 1), center, seed)

    def spec(self, role: RoleName | None = None) -> str:
        words = ["qjl" if self.blocks == 1 else f"qjl-{self.blocks}"]
        if role is None or not self.center:
            words.append("center" if self.center else "nocenter")
        if self.seed != DEFAULT_SEED:
            words.append(f"seed={self.seed}")
        return ":".join(words)

    def to_params(self) -> dict:
        return {"blocks": self.blocks, "rotation": ROTATION, "seed": self.seed, "center": self.center}

    @classmethod
    def from_params(cls, params: dict) -> Self:
        blocks, rotation, seed, center = (params.get(key) for key in ("blocks", "rotation", "seed", "center"))
        if type(blocks) is not int or not 1 <= blocks <= MAX_BLOCKS:
            raise ManifestError(f"blocks must be an integer in 1..{MAX_BLOCKS}, but got {blocks!r:.40}")
        if rotation != ROTATION:
            raise ManifestError(f"rotation must be {ROTATION!r}, but got {rotation!r:.40}")
        if type(seed) is not int or not 0 <= seed < SEEDS:
            raise ManifestError(f"seed must be an integer in [0, 2**63), but got {seed!r:.40}")
        if type(center) is not bool:
            raise ManifestError(f"center must be a boolean, but got {center!r:.40}")
        return cls(blocks, center, seed)

    def default_frame(self, role: RoleName) -> Frame:
        return "pre" if role == "k" else "post"

    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        heads, tokens, dim = shape
        parts: Layout = {"codes": ("U8", (heads, tokens, packed_bytes(self.blocks * dim, 1))), "norm": ("BF16", (heads, tokens))}
        if self.center:
            parts["mean"] = ("BF16", (heads, dim))
        return parts

    def project(self, x: mx.array) -> mx.array:
        """S x: (..., D) float -> (..., N D) float32."""
        x = x.astype(mx.float32)
        turned = [rotate(rotate(x, first), second) for first, second in self._seeds()]
        return mx.concatenate(turned, axis=-1) * math.sqrt(x.shape[-1])

    def encode(self, x: mx.array) -> dict[str, mx.array]:
        self._check_input(x)
        if encoding.takes(x):
            mean = encoding.mean_over_tokens(x) if self.center else None
            found = encoding.signs(x, self._turns(x.shape[2]), factors(x.shape[2], self.seed)[1], mean)
            if found is not None:
                parts = dict(zip(("codes", "norm"), found, strict=True))
                return parts if mean is None else parts | {"mean": mean}
        return encode_centred(self, x, self.center, self._encode_block)

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype) -> mx.array:
        if converting.in_use(shape[2]):
            return converting.decoded(self.row_reader(parts, shape).stored, 0, shape, dtype, parts=parts)
        parts = self._checked_parts(parts, self.layout(shape, dtype))
        dim = shape[2]
        out = mx.zeros(shape, dtype)
        for tokens in token_blocks(shape):
            signs = unpack(parts["codes"][:, tokens], 1, self.blocks * dim).astype(mx.float32) * 2 - 1
            norm, block = parts["norm"][:, tokens, None], mx.zeros((*signs.shape[:2], dim))
            for i, (first, second) in enumerate(self._seeds()):
                block = block + unrotate(unrotate(signs[..., i * dim : (i + 1) * dim], second), first)
            # S is sqrt(D) times rotations: sqrt(pi / 2) / (N D) sqrt(D).
            block = block * (math.sqrt(math.pi / 2 / dim) / self.blocks) * mx.abs(norm).astype(mx.float32)
            if self.center:
                block = block + _centred(norm) * parts["mean"].astype(mx.float32)[:, None]
            out[:, tokens] = (mx.clip(block, -FLOAT16_MAX, FLOAT16_MAX) if dtype == mx.float16 else block).astype(dtype)
            mx.eval(out)
        return out

    def row_reader(self, parts: Parts, shape: Shape) -> NativeReader:
        return NativeReader(self, self._checked_parts(parts, self.layout(shape, mx.float32)), shape)

    def native_rows(self, parts: Parts, shape: Shape) -> Any:
        """The rows as the native back end reads them."""
        dim, rows = shape[2], native.stored(shape)
        rows.signs(native.packed(parts["codes"]), self._turns(dim), native.shared(factors(dim, self.seed)[1]))
        rows.scale(native.packed(parts["norm"]))
        if self.center:
            rows.mean(float32(parts["mean"]))
        return rows

    def scores(self, parts: dict[str, mx.array], shape: Shape, queries: mx.array) -> mx.array:
        """<query, x^> of every token from its bits, by the kernel `qjl_inner_product`.

        Args:
            parts: what `encode` returned.
            shape: (H, S, D) of the keys; N D a multiple of 8.
            queries: (H, G, D) float in the keys' frame, G query heads of each KV head.

        Returns:
            (H, G, S) float32, not scaled by 1 / sqrt(D).

        Raises:
            ValueError: shapes that do not fit.
        """
        heads, _, dim = shape
        parts = self._checked_parts(parts, self.layout(shape, mx.float32))
        if queries.ndim != 3 or (queries.shape[0], queries.shape[2]) != (heads, dim):
            raise ValueError(f"[{self.id}] queries must be ({heads}, G, {dim}), but got {tuple(queries.shape)}.")
        signs, norms = parts["codes"].swapaxes(0, 1), mx.abs(parts["norm"]).T
        projected = self.project(queries)
        rows = [qjl_inner_product(projected[:, g], signs, norms, out_dtype=mx.float32) for g in range(queries.shape[1])]
        scores = mx.stack(rows, axis=1) if rows else mx.zeros((heads, 0, shape[1]))
        if not self.center:
            return scores
        means = mx.sum(queries.astype(mx.float32) * parts["mean"].astype(mx.float32)[:, None], axis=-1, keepdims=True)
        return scores + means * _centred(parts["norm"])[:, None]

    def _turns(self, dim: int) -> np.ndarray:
        """Signs of both rotations of each block, (N, 2, D) float32."""
        return np.stack([np.stack([native.shared(factors(dim, seed)[0]) for seed in pair]) for pair in self._seeds()])

    def _seeds(self) -> list[tuple[int, int]]:
        return [(self.seed + 2 * i, self.seed + 2 * i + 1) for i in range(self.blocks)]

    def _encode_block(self, x: mx.array, mean: mx.array | None) -> dict[str, mx.array]:
        # Divided by its largest value, a row's sum of squares lies in [1, D]: neither overflow nor underflow.
        unit = mx.max(mx.abs(x), axis=-1, keepdims=True)
        x = x * reciprocal(unit)
        if mean is not None:
            centred = x - mean.astype(mx.float32)[:, None] * reciprocal(unit)
            nearer = mx.sum(mx.square(centred), axis=-1, keepdims=True) < mx.sum(mx.square(x), axis=-1, keepdims=True)
            x = mx.where(nearer, centred, x)
        norm = unit * mx.sqrt(mx.sum(mx.square(x), axis=-1, keepdims=True))
        codes = pack((self.project(x) >= 0).astype(mx.uint8), 1)
        norm = mx.where(norm >= SMALLEST, norm, 0.0)
        norm = norm if mean is None else mx.where(nearer, norm, -norm)
        # Contiguous: packed bytes are a view of words eight times their size, which would stay until all blocks are joined.
        return {"codes": mx.contiguous(codes), "norm": norm[..., 0].astype(mx.bfloat16)}


def _centred(norm: mx.array) -> mx.array:
    """1 where a row was coded without the mean, 0 where as it is: by the sign bit, for a zero has one too."""
    return (norm.view(mx.uint16) < 0x8000).astype(mx.float32)
