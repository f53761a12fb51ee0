"""Residual scalar quantisation: `rvq-A+B` with two Lloyd-Max stages, `rvq-N` with one, after a random rotation.

Formula and scale kinds: `_rotated`. Tables: `allocators.codebooks`, for N(0, 1) and for what the first stage leaves of it.

Parts: codes1, codes2 (or codes) (H, S, ceil(D b / 8)) U8, `lsb8`; scale (H, S) BF16; with centring mean (H, D) BF16.
A kernel that reads keys computes <w, x^> = |s| (<R w, c1[i1]> + <R w, c2[i2]>) + <w, mean>, with R w once per query; it reads per
token D (A + B) / 8 bytes of codes and 2 of scale (the mean only where the scale's sign bit is 0). Values: the sum of
p |s| (c1[i1] + c2[i2]), then R^T once per query, plus mean times the sum of p over the rows that have it.

Defaults, by KL divergence and top-1 agreement on SmolLM2-135M in float32, a 512-token prefix coded and 256 tokens teacher-forced on it,
mean of three texts (prose, a README, Python; not those in tests/texts), rvq-2+2, no row exact, only the named role coded:

    keys   ls  centred row by row  pre-RoPE    .0059  .977   default
    keys   unbiased  the same      pre         .0058  .973
    keys   ls  centred row by row  post-RoPE   .0063  .953
    keys   ls  no centring         post        .0125  .943
    keys   ls  no centring         pre         .0132  .944
    keys   ls  every row centred   pre         .0166  .943   the first token's key suffers
    values unbiased, row by row    -           .0018  .987   default
    values ls, row by row          -           .0020  .987
    values unbiased, no centring   -           .0019  .983
    values norm, no centring       -           .0039  .966

Both roles, defaults, on tests/texts (`python -m tests.measure_codec_defaults`, sink=0,recent=0; code, prose, technical, their mean):

    rvq-2+2                           .0103 .0048 .0051   .0067  .965
    rvq-2+2, 4 first, 32 last exact   .0088 .0022 .0029   .0046  .970
    rvq-4                             .0058 .0026 .0024   .0036  .975

One stage of A + B bits is the better use of them; two stages are for readers that want a coarse part first. Both roles, defaults, on
chat, code, prose, technical, and their mean:

    2 bits    rvq-2      .0467 .0925 .0522 .0536   .0613  .881      rvq-1+1    .0511 .1099 .0641 .0649   .0725  .861
    3 bits    rvq-3      .0115 .0169 .0134 .0118   .0134  .944      rvq-2+1    .0120 .0209 .0117 .0138   .0146  .933
    4 bits    rvq-4      .0025 .0058 .0026 .0024   .0033  .976      rvq-2+2    .0044 .0103 .0048 .0051   .0061  .965
"""

import re
from dataclasses import dataclass
from typing import ClassVar

from veloxquant_mlx.allocators.codebooks import MAX_BITS, gaussian_codebook, residual_codebook
from veloxquant_mlx.codecs._base import Frame, RoleName
from veloxquant_mlx.codecs._rotated import RotatedCodec, parse_options


@dataclass(frozen=True)
class Rvq(RotatedCodec):
    """One or two Lloyd-Max stages on a rotated, unit-variance row."""

    id: ClassVar[str] = "rvq"

    @classmethod
    def parse(cls, text: str, role: RoleName) -> "Rvq | None":
        name, *options = text.split(":")
        if not name.startswith("rvq"):
            return None
        match = re.fullmatch(r"rvq-([1-8])(?:\+([1-8]))?", name)
        bits = [int(stage) for stage in match.groups() if stage] if match else []
        if not bits or sum(bits) > MAX_BITS:
            raise ValueError(f"[codec] {name!r}: write rvq-N with N in 1..{MAX_BITS}, or rvq-A+B with A + B at most {MAX_BITS} (rvq-2+2).")
        return cls.design(*bits, **cls.role_defaults(role, sum(bits)) | parse_options(text, options))

    @classmethod
    def design(cls, first: int, second: int | None = None, **options) -> "Rvq":
        """The codec with this package's tables.

        Args:
            first: bits of the first stage.
            second: bits of the second, or None for a single stage.
            options: scale, center, seed.
        """
        stages = [gaussian_codebook(first)]
        if second is not None:
            stages.append(residual_codebook(second, stages[0]))
        return cls(tuple(stages), **options)

    @classmethod
    def role_defaults(cls, role: RoleName, bits: int) -> dict:
        return {"scale": "ls", "center": True} if role == "k" else {"scale": "unbiased", "center": True}

    @property
    def name(self) -> str:
        return "rvq-" + "+".join(str(bits) for bits in self.bits)

    def default_frame(self, role: RoleName) -> Frame:
        return "pre" if role == "k" else "post"
