"""`coded_attend` on tensor cores: CUDA, rows of 128 channels, codes of a table of at most 16 entries, queries that see all rows."""

import math
from functools import lru_cache

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._coded_operand import CodedOperand
from veloxquant_mlx.metal._kernel import Kernel, kept_dims, unused

DIM = 128  # as in coded_tiles.cu, here and below
ROWS = 16
WARPS = 8
QUERIES = 4
OWN = 192  # floats of shared memory of a warp
TABLE_BYTES = 65536
BLOCKS = 132  # multiprocessors of an H100 or H200
ROWS_PER_SPLIT = 4 * ROWS
MAX_SPLITS = 256
LARGEST_KEY = 15  # exponent of the largest key that halves hold
KEY_BITS = ((1, 0), (2, 0), (2, 2), (4, 0))
VALUE_BITS = ((2, 0), (2, 2), (4, 0))
TABLED = ("table", "words")  # forms with a table of pairs or vectors in shared memory
ROTATED = ("table", "affine", "places")  # forms of keys that may be stored before RoPE

_INPUTS = ("q", "angles", "pair_signs", "units", "dims", *(f"{r}_{name}" for r in "kv" for name in ("a", "b", "c", "staged", "mean")))
_OWN = """__shared__ float4 own[8 * kvtool::TILE_OWN / 4];
float* head_mean = reinterpret_cast<float*>(own) + threadIdx.x / 32 * kvtool::TILE_OWN;
"""
_KEYS = {
    "table": "kvtool::TileTableKeys<KBITS, (KBITS2 > 0), ROPE, KMEAN> keys{{k_a, k_b, k_c, k_staged, k_mean, {own}}};",
    "affine": "kvtool::TileAffineKeys<KGROUP, ROPE> keys{{k_a, k_b, k_c, angles, units[0]}};",
    "plain": "kvtool::TilePlainKeys keys{{k_a}};",
    "words": "kvtool::TileWordKeys<KSUB> keys{{k_a, k_staged}};",
    "places": "kvtool::TilePlaceKeys<ROPE> keys{{k_a, k_b, angles}};",
    "scores": "kvtool::TileScoreKeys keys{{k_a, dims}};",
}
_VALUES = {
    "table": "kvtool::TileTableValues<VBITS, (VBITS2 > 0), VMEAN> values{v_a, v_b, v_c, v_staged, v_mean, units[1]};",
    "affine": "kvtool::TileAffineValues values{v_a, v_b, v_c, units[1]};",
    "plain": "kvtool::TilePlainValues values{v_a};",
    "words": "kvtool::TileWordValues<VSUB> values{v_a, v_staged};",
}
_SOURCES = ("attend", "coded", "coded_rows", "decode_parts", "coded_parts", "coded_tile_keys", "coded_tile_vectors", "coded_tile_values")


@lru_cache(maxsize=64)
def _kernel(k: str, v: str, rope: bool) -> Kernel:
    turn = rope and k == "table"
    own = f"angles, pair_signs, units[0], {'head_mean' if turn else 'nullptr'}"
    body = f"{_OWN if turn else ''}{_KEYS[k].format(own=own)}\n{_VALUES[v]}\nkvtool::coded_tiles<HB>(q, dims, out, lse, keys, values);"
    sources = (*_SOURCES, "coded_tiles", "one_block" if rope else "two_blocks")
    return Kernel(f"coded_tiles_{k}_{v}{'_rope' if rope else ''}", _INPUTS, ("out", "lse"), sources, "", body)


def takes(k: CodedOperand, v: CodedOperand, rotated: bool, masked: bool) -> bool:
    """Whether this kernel is the one for such rows."""
    if backend() != "cuda" or k.shape[2] != DIM or masked or (rotated and k.form not in ROTATED):
        return False
    of_k, of_v = k.sizes, v.sizes
    keys = {
        "table": (of_k.get("BITS"), of_k.get("BITS2")) in KEY_BITS and (not rotated or k.signs is not None),
        "affine": of_k.get("BITS") == 4 and not of_k.get("TOKEN") and of_k.get("GROUP", 1) % ROWS == 0,
        "plain": of_k.get("TYPE", mx.float32) == mx.float16,
        "words": of_k.get("BITS") == 8,
        "places": of_k.get("SUB") == 4,
        "scores": True,
    }
    values = {
        "table": (of_v.get("BITS"), of_v.get("BITS2")) in VALUE_BITS,
        "affine": of_v.get("BITS") == 4 and of_v.get("TOKEN") and of_v.get("GROUP") == 32,
        "plain": of_v.get("TYPE", mx.float32) == mx.float16,
        "words": of_v.get("BITS") == 8,
    }
    return bool(keys.get(k.form) and values.get(v.form))


def tiles(
    q: mx.array, k: CodedOperand, v: CodedOperand, rows: tuple[int, int, int], angles: mx.array | None, splits: int | None
) -> tuple[mx.array, mx.array, int]:
    """Parts of `coded_attend`, out (H R, splits, D) and lse (H R, splits), and how many; q is in the frame of the stored keys, in log2."""
    k_from, v_from, count = rows
    heads, queries, _ = q.shape
    together = math.gcd(heads, WARPS)
    groups = heads // together * -(-queries // QUERIES)
    each = WARPS // together  # splits of a block
    rope = angles is not None
    if splits is None:
        wanted = max(1, BLOCKS * (1 if rope else 2) // groups) * each  # no block more than run at once
        splits = min(wanted, count // ROWS_PER_SPLIT, MAX_SPLITS)
    splits = max(1, splits // each) * each
    nothing = unused()
    arrays, constants = [], []
    for role, operand in (("K", k), ("V", v)):
        mean = operand.stage_mean if rope and role == "K" else operand.mean
        found = dict(enumerate(operand.arrays))
        arrays += [*(found.get(i, nothing) for i in range(3)), *(nothing if x is None else x for x in (operand.staged, mean))]
        constants += [(role + name, value) for name, value in (*operand.constants, ("MEAN", mean is not None))]
    units = _units(
        _exponent(k.bound) - LARGEST_KEY if rope and k.form in ("table", "affine") else _exponent(k.largest_scale),
        _exponent(v.largest_scale),
    )
    out, lse = _kernel(k.form, v.form, rope)(
        [
            *(q, angles if rope else nothing, k.pair_signs if rope and k.form == "table" else nothing, units),
            kept_dims(queries, count, splits, k_from, k.shape[1], v_from, v.shape[1], 1),
            *arrays,
        ],
        template=[("HB", together), ("ROPE", rope), *constants],
        grid=(groups * WARPS * 32, splits // each, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(heads * queries, splits, DIM), (heads * queries, splits)],
        output_dtypes=[mx.float32, mx.float32],
        shared_memory=TABLE_BYTES if k.form in TABLED or v.form in TABLED else 0,
    )
    return out, lse, splits


def _exponent(size: float) -> int:
    """The smallest that makes a power of two as large, within what float32 inverts."""
    return min(max(math.frexp(size)[1], -100), 100)


@lru_cache(maxsize=1024)
def _units(*exponents: int) -> mx.array:
    made = mx.array([math.ldexp(1.0, x) for x in exponents], mx.float32)
    mx.eval(made)
    return made
