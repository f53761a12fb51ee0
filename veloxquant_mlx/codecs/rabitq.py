"""RaBitQ: signs after a random rotation (`rabitq`, keys) or a uniform grid of B bits fitted to each row (`rabitq-B`, B 2 to 8).

    y = R (x - mean),   q = 2 u - (2^B - 1),   x^ = s R^T q + mean

Code u in 0 .. 2^B - 1: a sign and B - 1 bits on a grid of half-integers (q is twice that). Every row has a rescale t of its own, which
makes the cosine of y and q as large as the grid allows; u = floor(t y / 2 + 2^(B-1)), clipped. One bit needs none: bit = [y >= 0].

    ls        s = <y, q> / <q, q>      least squares
    unbiased  s = <y, y> / <y, q>      RaBitQ's estimator: <w, x^> = <w, q> |y|^2 / <q, y> averages to <w, x> over rotations
    norm      s = |y| / |q|            the row's own norm

The search for t is exhaustive in the paper (every breakpoint, a heap). Here: CANDIDATES values in a geometric row around the one that
puts the largest |y| on the last point, then one step of alternation (best step for the codes, best codes for the step), all rows at once
and the same for any blocking. 1 - cos^2 stays within 1 % of the exhaustive optimum up to 4 bits, 4 % at 6, 12 % at 8 (heads of 64).

Parts: codes (H, S, ceil(D B / 8)) U8, `lsb8`; scale (H, S) BF16; with centring mean (H, D) BF16: `_rotated` with the one table q.
Scores from codes alone: `rabitq_scores`. <w, x^> = |s| (2 <R w, u> - (2^B - 1) sum of R w) + <w, mean>, the mean only where the
scale's sign bit is 0; R w and <w, mean> once per query. Per token: D B / 8 bytes and a scale.
As a codec of values `rabitq` means four bits with one Lloyd-Max stage (`rvq-4`): one-bit values are too coarse to average.

Least squares is the default for 1-bit keys although it is biased: under a softmax the noise of 1-bit scores costs more than their
shrinkage. Measured as in `rvq`, keys alone, 4 first and 32 last rows exact, pre-RoPE, centred, 1 bit: ls KL .243, top-1 .815;
unbiased .466, .659. One bit per key is a coarse code for heads of 64: choose it for its size and speed, not for fidelity.

With more bits the row's own norm, between the two, was best for keys and the unbiased scale for values. The same measure, mean of three
texts not in tests/texts (a README, Python, a licence), one role coded, no row exact unless said, KL and top-1:

                                     ls             unbiased       norm
    keys, rabitq-2                   .0645  .879    .0520  .895    .0429  .905   default
    keys, rabitq-2, 4 + 32 exact     .0617  .892    .0328  .915    .0310  .924
    keys, rabitq-3                   .0100  .953    .0107  .951    .0095  .953
    keys, rabitq-4                   .0019  .975                   .0021  .975
    values, rabitq-2                 .0181  .926    .0127  .940    .0139  .938   default: unbiased

Both roles, defaults, mean of code, prose and technical of tests/texts (`python -m tests.measure_codec_defaults`, sink=0,recent=0),
beside `rvq` at the same bits:

    bits a value                     2.25           3.25           4.25
    rabitq-N                         .0466  .874    .0114  .953    .0024  .971
    rvq-N                            .0661  .866    .0140  .947    .0036  .975
    rabitq-N, 4 + 32 exact           .0249  .923                   .0017  .980
    rvq-N, 4 + 32 exact              .0425  .901                   .0017  .986

Gao and Long 2024 (1 bit); Gao et al., Practical and Asymptotically Optimal Quantization of High-Dimensional Vectors, 2024 (B bits).
"""

import re
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx
import numpy as np

from veloxquant_mlx.allocators.codebooks import MAX_BITS, Codebook
from veloxquant_mlx.codecs._base import Codec, Frame, RoleName
from veloxquant_mlx.codecs._rotated import RotatedCodec, parse_options
from veloxquant_mlx.codecs.rvq import Rvq

CANDIDATES = 16


@dataclass(frozen=True)
class Rabitq(RotatedCodec):
    """One point of a uniform grid per coordinate; with one bit, its sign."""

    id: ClassVar[str] = "rabitq"
    ties_up: ClassVar[bool] = True

    @classmethod
    def parse(cls, text: str, role: RoleName) -> Codec | None:
        name, *options = text.split(":")
        if not name.startswith(cls.id):
            return None
        match = re.fullmatch(r"rabitq(?:-([2-8]))?", name)
        if not match:
            raise ValueError(f"[codec] {name!r}: write rabitq, or rabitq-N with N in 2..{MAX_BITS} (rabitq-4).")
        if match[1] is None and role == "v":
            return Rvq.parse(":".join(["rvq-4", *options]), role)
        bits = int(match[1] or 1)
        return cls((grid(bits),), **cls.role_defaults(role, bits) | parse_options(text, options))

    @classmethod
    def role_defaults(cls, role: RoleName, bits: int) -> dict:
        return {"scale": "unbiased" if role == "v" else "ls" if bits == 1 else "norm", "center": True}

    @property
    def name(self) -> str:
        return self.id if self.bits == (1,) else f"{self.id}-{self.bits[0]}"

    def default_frame(self, role: RoleName) -> Frame:
        return "pre" if role == "k" else "post"

    def _grid_steps(self) -> tuple[float, ...]:
        levels = len(self.codebooks[0])
        return () if levels == 2 else tuple(map(float, _steps(levels)))

    def _nearest(self, y: mx.array, codebook: Codebook) -> mx.array:
        if len(codebook) == 2:
            return super()._nearest(y, codebook)
        return _codes(y, _rescale(y, len(codebook)), len(codebook)).astype(mx.uint8)

    def _correction(self, y: mx.array, q: mx.array) -> mx.array:
        if self.scale != "norm" or self.bits == (1,):
            return super()._correction(y, q)
        return mx.sqrt(mx.sum(mx.square(y), axis=-1) / mx.sum(mx.square(q), axis=-1))  # |q| >= sqrt(D): no point is 0


def grid(bits: int) -> Codebook:
    """The points 2 u - (2^bits - 1): odd numbers around 0."""
    return tuple(float(point) for point in range(1 - (1 << bits), 1 << bits, 2))


def _codes(y: mx.array, t: mx.array, levels: int) -> mx.array:
    """u of each value, float32: the nearest point to t y, upwards where two are."""
    return mx.clip(mx.floor(y * (t / 2) + levels / 2), 0, levels - 1)


def _rescale(y: mx.array, levels: int) -> mx.array:
    """t of each row, (..., 1) float32: the best of the candidates by cosine, improved once."""
    largest = mx.max(mx.abs(y), axis=-1, keepdims=True)
    fitting = (levels - 1) / mx.where(largest > 0, largest, 1.0)  # the largest value on the last point
    best, t = None, None
    for step in _steps(levels):
        candidate = fitting / float(step)
        cosine, _ = _cosine(y, candidate, levels)
        better = None if best is None else cosine > best
        t = candidate if better is None else mx.where(better, candidate, t)
        best = cosine if better is None else mx.where(better, cosine, best)
    _, slope = _cosine(y, t, levels)
    cosine, _ = _cosine(y, slope, levels)
    return mx.where(cosine > best, slope, t)


def _steps(levels: int) -> np.ndarray:
    """The step of the best grid, in steps of the fitting one: Gaussian rows want 0.5 to 0.6 at 2 bits, 0.8 to 1 at 8."""
    return np.geomspace(1.1, min(0.8, 0.15 + 0.1 * (levels.bit_length() - 1)), CANDIDATES)


def _cosine(y: mx.array, t: mx.array, levels: int) -> tuple[mx.array, mx.array]:
    """<y, q>^2 / <q, q> of each row's codes, and the t = <q, q> / <y, q> whose grid fits those codes best; (..., 1)."""
    q = 2 * _codes(y, t, levels) - (levels - 1)
    yq, qq = mx.sum(y * q, axis=-1, keepdims=True), mx.sum(mx.square(q), axis=-1, keepdims=True)
    return mx.square(yq) / qq, mx.where(yq > 0, qq / yq, t)
