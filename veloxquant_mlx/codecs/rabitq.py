"""RaBitQ keys: one bit per coordinate, the sign after a random rotation, and one scale per token (Gao and Long 2024).

    y = R (x - mean),   bit = [y >= 0],   x^ = s R^T (2 bit - 1) + mean

`_rotated` with the one table (-1, +1), so that the scale kinds become

    ls        s = |y|_1 / D          least squares
    unbiased  s = |y|_2^2 / |y|_1    RaBitQ's estimator: <w, x^> averages to <w, x> over rotations

Parts: codes (H, S, ceil(D / 8)) U8, dimension 8 b + t in bit t of byte b; scale (H, S) BF16; with centring mean (H, D) BF16.
A kernel computes <w, x^> = |s| (2 sum of (R w)_i over the set bits - sum of all) + <w, mean>, the mean only where the scale's sign bit
is 0; per token it reads D / 8 bytes and a scale.
As a codec of values `rabitq` means four bits with one Lloyd-Max stage (`rvq-4`): one-bit values are too coarse to average.

Least squares is the default although it is biased: under a softmax the noise of 1-bit scores costs more than their shrinkage.
Measured as in `rvq`, keys alone, 4 first and 32 last rows exact, pre-RoPE, centred: ls KL .243, top-1 .815; unbiased .466, .659.
One bit per key is a coarse code for heads of 64: choose it for its size and speed, not for fidelity.
"""

from dataclasses import dataclass
from typing import ClassVar

from veloxquant_mlx.codecs._base import Codec, Frame, RoleName
from veloxquant_mlx.codecs._rotated import RotatedCodec, parse_options
from veloxquant_mlx.codecs.rvq import Rvq

SIGNS = ((-1.0, 1.0),)


@dataclass(frozen=True)
class Rabitq(RotatedCodec):
    """One sign bit per coordinate."""

    id: ClassVar[str] = "rabitq"
    ties_up: ClassVar[bool] = True

    @classmethod
    def parse(cls, text: str, role: RoleName) -> Codec | None:
        name, *options = text.split(":")
        if name != cls.id:
            return None
        if role == "v":
            return Rvq.parse(":".join(["rvq-4", *options]), role)
        return cls(SIGNS, **cls.role_defaults(role) | parse_options(text, options))

    @classmethod
    def role_defaults(cls, role: RoleName) -> dict:
        return {"scale": "ls", "center": True}

    @property
    def name(self) -> str:
        return self.id

    def default_frame(self, role: RoleName) -> Frame:
        return "pre" if role == "k" else "post"
