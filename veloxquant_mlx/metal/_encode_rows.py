"""Rows of caches coded on CUDA in one pass: what `codecs._rotated` and `codecs.affine` have from some thirty operations of MLX.

Formulas: see those. Steps, zeros and codes of affine rows are theirs bit for bit, since each operation is rounded once in both. The sums
of a rotated row are added in another order, so that a code next to a boundary, or a scale's last bit, may differ.
"""

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._checks import power_of_two
from veloxquant_mlx.metal._kernel import INT32_MAX, Kernel, kept_dims, unused

THREADS = 256  # as in encode_rows.cu
MAX_D = 1024
MAX_TOKEN_GROUP = 64  # channels of a token in a thread's registers
SCALES = ("norm", "ls", "unbiased")
Stage = tuple[Sequence[float], Sequence[float]]  # boundaries and points

_ROTATED = Kernel(
    name="encode_rotated",
    inputs=("x", "mean", "signs", "tables", "dims"),
    outputs=("codes1", "codes2", "scales"),
    sources=("bits", "rotate", "encode_rows"),
    metal="",
    cuda="""__shared__ float shared[TABLE];
kvtool::encode_rotated<D, BITS1, BITS2, SCALE, CENTER, TIES_UP>(x, mean, signs, tables, dims, codes1, codes2, scales, shared);""",
)
_CHANNELS, _TOKENS = (
    Kernel(
        name=f"encode_affine_{each}",
        inputs=("x", "dims"),
        outputs=("codes", "steps", "zeros"),
        sources=("bits", "rotate", "encode_rows"),
        metal="",
        cuda=f"kvtool::encode_affine_{each}<D, BITS, GROUP>(x, dims, codes, steps, zeros);",
    )
    for each in ("channels", "tokens")
)


def takes_rotated(x: mx.array) -> bool:
    """Whether `rotated` is the one for rows (H, S, D)."""
    return _takes(x) and power_of_two(x.shape[2]) and 8 <= x.shape[2] <= MAX_D


def takes_affine(x: mx.array, group: int, per_token: bool) -> bool:
    """Whether `affine` is the one for rows (H, S, D)."""
    dim = x.shape[2]
    return _takes(x) and dim % 8 == 0 and not (per_token and (group % 8 or dim % group or group > MAX_TOKEN_GROUP))


def _takes(x: mx.array) -> bool:
    return backend() == "cuda" and 0 < x.size <= INT32_MAX


def rotated(
    x: mx.array, stages: Sequence[Stage], ties_up: bool, kind: str, mean: mx.array | None, signs: mx.array
) -> tuple[list[mx.array], mx.array]:
    """Codes and scales of rows that are rotated and coded by tables.

    Args:
        x: (H, S, D) float16, bfloat16 or float32, finite.
        stages: boundaries and points of one or two, of up to 256 points.
        ties_up: whether a value on a boundary belongs to the cell above it.
        kind: of the scale, one of SCALES.
        mean: (H, D), or None.
        signs: (D,) float32 of the rotation.

    Returns:
        Codes (H, S, D bits / 8) of each stage, and scales (H, S) bfloat16.
    """
    heads, rows, dim = x.shape
    bits = [len(points).bit_length() - 1 for _, points in stages]
    tables = _tables(tuple(tuple(map(float, numbers)) for stage in stages for numbers in stage))
    found = _ROTATED(
        [x, unused() if mean is None else mean.astype(mx.float32), signs, tables, kept_dims(heads * rows, rows)],
        template=[
            *(("T", x.dtype), ("D", dim), ("BITS1", bits[0]), ("BITS2", bits[1] if len(bits) == 2 else 0), ("SCALE", SCALES.index(kind))),
            *(("CENTER", mean is not None), ("TIES_UP", ties_up), ("TABLE", tables.size)),
        ],
        grid=(-(-heads * rows // (THREADS // 32 * max(1, 256 // dim))) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[*((heads, rows, dim // 8 * b) for b in bits), *([] if len(bits) == 2 else [(8,)]), (heads, rows)],
        output_dtypes=[mx.uint8, mx.uint8, mx.uint16],
    )
    return found[: len(bits)], found[2].view(mx.bfloat16)


def affine(x: mx.array, bits: int, group: int, per_token: bool) -> tuple[mx.array, mx.array, mx.array]:
    """Codes (H, S, D bits / 8) of rows (H, S, D), steps and zeros (bfloat16), one of each for `group` tokens or (per_token) channels."""
    heads, rows, dim = x.shape
    side = (heads, rows, dim // group) if per_token else (heads, -(-rows // group), dim)
    threads = heads * rows * (dim // group) if per_token else side[0] * side[1] * (dim // 8)
    codes, steps, zeros = (_TOKENS if per_token else _CHANNELS)(
        [x, kept_dims(heads * rows) if per_token else kept_dims(heads, rows)],
        template=[("T", x.dtype), ("D", dim), ("BITS", bits), ("GROUP", group)],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(heads, rows, dim // 8 * bits), side, side],
        output_dtypes=[mx.uint8, mx.uint16, mx.uint16],
    )
    return codes, steps.view(mx.bfloat16), zeros.view(mx.bfloat16)


@lru_cache(maxsize=64)
def _tables(numbers: tuple[tuple[float, ...], ...]) -> mx.array:
    made = mx.array([x for part in numbers for x in part], mx.float32)
    mx.eval(made)
    return made
