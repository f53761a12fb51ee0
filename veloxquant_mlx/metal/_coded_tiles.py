"""`coded_attend` on tensor cores: CUDA, rows of 128 channels, codes of a table of at most 16 entries, queries that see all rows."""

import math
from functools import lru_cache

import mlx.core as mx

from veloxquant_mlx.metal._attend_launch import MAX_SPLITS
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._coded_operand import CodedOperand
from veloxquant_mlx.metal._kernel import Kernel, kept_dims, unused

DIM = 128  # as in coded_tiles.cu, here and below
ROWS = 16
WARPS = (16, 8, 4)  # of a block, the most whose memory there is
HEADS = 8  # of a block, at most
QUERIES = 4
# Bytes of shared memory: of a block at most; before the tables (at a multiple of 64 KiB, and the first KiB is not the block's); of a
# table; of a split's angles (of two tiles, and as they are in memory; of one tile where a warp is alone) ; of a warp's own.
MOST_MEMORY = 227 * 1024
BEFORE_TABLES = 63 * 1024
TABLE = 64 * 1024
TURNS, LONE_TURNS = 4 * ROWS * (DIM + 2 * 144), 4 * ROWS * 144
OWN, ZEROS = {"table": 4 * DIM, "affine": 4 * 288, "places": 0}, 4 * DIM
BLOCKS = 132  # multiprocessors of an H100 or H200
ROWS_PER_SPLIT = 4 * ROWS
LARGEST_KEY = 15  # exponent of the largest key that halves hold
KEY_BITS = ((1, 0), (2, 0), (2, 2), (4, 0))
VALUE_BITS = ((2, 0), (2, 2), (4, 0))
TABLED = ("table", "words")  # forms with a table of pairs or vectors in shared memory

_INPUTS = ("q", "angles", "pair_signs", "units", "dims", *(f"{r}_{name}" for r in "kv" for name in ("a", "b", "c", "staged", "mean")))
# Angles come first, then what is a warp's own; tables begin at a multiple of 64 KiB.
_MEMORY = """if (TABLES > 0 && kvtool::tile_tables() - kvtool::decode_memory() < TURNS + WARPS * OWN + 4 * kvtool::TILE_ZEROS) {
  __trap();
}
float* zeros = reinterpret_cast<float*>(kvtool::decode_memory() + TURNS);
float* mine = zeros + kvtool::TILE_ZEROS + threadIdx.x / 32 * (OWN / 4);
if (threadIdx.x < kvtool::TILE_ZEROS) {
  zeros[threadIdx.x] = 0;
}
"""
_KEYS = {
    "table": "kvtool::TileTableKeys<KBITS, (KBITS2 > 0), KMEAN> keys{k_a, k_b, k_c, k_staged, k_mean};",
    "affine": "kvtool::TileAffineKeys<KGROUP> keys{k_a, k_b, k_c, units[0]};",
    "plain": "kvtool::TilePlainKeys keys{k_a};",
    "words": "kvtool::TileWordKeys<KSUB> keys{k_a, k_staged};",
    "places": "kvtool::TilePlaceKeys<false> keys{k_a, k_b};",
    "scores": "kvtool::TileScoreKeys keys{k_a, dims};",
}
_TURNED_KEYS = {
    "table": "kvtool::TileTurnedTableKeys<KBITS, (KBITS2 > 0), KMEAN> keys{k_a, k_b, k_c, k_staged, k_mean, units[0], mine, zeros};",
    "affine": "kvtool::TileTurnedAffineKeys<KGROUP> keys{k_a, k_b, k_c, units[0], mine, zeros};",
    "places": "kvtool::TilePlaceKeys<true> keys{k_a, k_b};",
}
_TURNS = """
kvtool::TileTurns<HB, WARPS, decltype(keys)::ORDER, decltype(keys)::TURN> turns(angles, pair_signs, kvtool::decode_memory());
"""
_VALUES = {
    "table": "kvtool::TileTableValues<VTABLE, VBITS, (VBITS2 > 0), VMEAN> values{v_a, v_b, v_c, v_staged, v_mean, units[1]};",
    "affine": "kvtool::TileAffineValues values{v_a, v_b, v_c, units[1]};",
    "plain": "kvtool::TilePlainValues values{v_a};",
    "words": "kvtool::TileWordValues<VTABLE, VSUB> values{v_a, v_staged};",
}
_SOURCES = ("attend", "coded", "coded_rows", "decode_parts", "coded_parts", "coded_tile_keys", "coded_tile_vectors")
_SOURCES += ("coded_tile_turns", "coded_tile_turned", "coded_tile_values")


@lru_cache(maxsize=64)
def _kernel(k: str, v: str, rope: bool) -> Kernel:
    if rope:
        body = f"{_MEMORY}{_TURNED_KEYS[k]}{_TURNS}"
    else:
        body = f"{_KEYS[k]}\nkvtool::TileNoTurns turns;\n"
    body = f"{body}{_VALUES[v]}\nkvtool::coded_tiles<HB, WARPS>(q, dims, out, lse, keys, values, turns);"
    sources = (*_SOURCES, "coded_tiles", "one_large_block")
    return Kernel(f"coded_tiles_{k}_{v}{'_rope' if rope else ''}", _INPUTS, ("out", "lse"), sources, "", body)


def takes(k: CodedOperand, v: CodedOperand, rotated: bool, masked: bool) -> bool:
    """Whether this kernel is the one for such rows."""
    if backend() != "cuda" or k.shape[2] != DIM or masked or (rotated and k.form not in _TURNED_KEYS):
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
) -> tuple[mx.array, mx.array]:
    """Parts of `coded_attend`, out (H R, splits, D) and lse (H R, splits); q is in the frame of the stored keys, in log2."""
    k_from, v_from, count = rows
    heads, queries, _ = q.shape
    together = math.gcd(heads, HEADS)
    groups = heads // together * -(-queries // QUERIES)
    rope = angles is not None
    k_table = k.form == "words" or (k.form == "table" and not (rope and k.sizes["BITS"] == 1))  # before RoPE one bit is a sign
    tables = k_table + (v.form in TABLED)
    of_split = (TURNS if together > 1 else LONE_TURNS) if rope else 0
    own = OWN[k.form] if rope else 0
    most = (BEFORE_TABLES if tables else MOST_MEMORY) - ZEROS
    warps = next(n for n in WARPS if n // together * of_split + n * own <= most)
    each = warps // together  # splits of a block
    if splits is None:
        wanted = max(1, BLOCKS // groups) * each  # no block more than run at once
        splits = min(wanted, count // ROWS_PER_SPLIT, MAX_SPLITS)
    splits = max(1, splits // each) * each
    memory: list[tuple[str, int]] = [("TABLES", tables), ("TURNS", each * of_split), ("OWN", own)] if rope else []
    memory += [("VTABLE", k_table * TABLE)] if v.form in TABLED else []
    nothing = unused()
    arrays, constants = [], []
    for role, operand in (("K", k), ("V", v)):
        mean = operand.stage_mean if rope and role == "K" else operand.mean
        found = dict(enumerate(operand.arrays))
        arrays += [*(found.get(i, nothing) for i in range(3)), *(nothing if x is None else x for x in (operand.staged, mean))]
        constants += [(role + name, value) for name, value in (*operand.constants, ("MEAN", mean is not None))]
    units = _units(_key_unit(k) if rope else _exponent(k.largest_scale), _exponent(v.largest_scale))
    out, lse = _kernel(k.form, v.form, rope)(
        [
            *(q, angles if rope else nothing, k.pair_signs if rope and k.form == "table" else nothing, units),
            kept_dims(queries, count, splits, k_from, k.shape[1], v_from, v.shape[1], 1),
            *arrays,
        ],
        template=[("HB", together), ("WARPS", warps), *memory, *constants],
        grid=(groups * warps * 32, splits // each, 1),
        threadgroup=(warps * 32, 1, 1),
        output_shapes=[(heads * queries, splits, DIM), (heads * queries, splits)],
        output_dtypes=[mx.float32, mx.float32],
        shared_memory=BEFORE_TABLES + tables * TABLE if tables else each * of_split + warps * own + ZEROS,
    )
    return out, lse


def _key_unit(k: CodedOperand) -> int:
    """Exponent of the unit in which keys before RoPE fit halves; affine ones are made of halves too, of scales over 2^18 and zeros."""
    if k.form == "affine":
        return max(_exponent(k.largest_scale) + 18 - LARGEST_KEY, _exponent(k.largest_zero) - LARGEST_KEY)
    return _exponent(k.bound) - LARGEST_KEY if k.form == "table" else 0


def _exponent(size: float) -> int:
    """The smallest that makes a power of two as large, within what float32 inverts."""
    return min(max(math.frexp(size)[1], -100), 100)


@lru_cache(maxsize=1024)
def _units(*exponents: int) -> mx.array:
    made = mx.array([math.ldexp(1.0, x) for x in exponents], mx.float32)
    mx.eval(made)
    return made
