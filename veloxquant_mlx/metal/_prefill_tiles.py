"""Prefill on tensor cores: the CUDA kernels for heads of 64 or 128, 16-bit queries and 16-bit results.

Grid: one block per 128 rows of a KV head, its query heads position by position. What does not fit takes the general kernel of `_prefill`.
"""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant_mlx.metal._attend import Options
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._kernel import Kernel

DIMS = (64, 128)
HALVES = (mx.float16, mx.bfloat16)
ROWS = 128  # as in prefill_parts.cu, here and below
KEYS = 64
THREADS = 128
OTHER_BYTES = 2 * 3 * KEYS * 4 + ROWS * 8 + 64  # factors of keys, ranges of rows


@dataclass(frozen=True)
class Tiled:
    """A family's kernel.

    Fields:
        code_bits: of an element of the keys and of the values, stored twice; what has less than 16 also has a decoded tile.
        table: bytes of the values' table.
    """

    kernel: Kernel
    code_bits: tuple[int, int]
    table: int = 0

    def memory(self, dim: int) -> int:
        """Bytes of shared memory."""
        tiles = sum(2 * bits + (16 if bits < 16 else 0) for bits in self.code_bits) * KEYS * dim // 8
        return ROWS * dim * 2 + tiles + self.table + OTHER_BYTES


def tiled(general: Kernel, readers: str, code_bits: tuple[int, int], table: int = 0) -> Tiled:
    """The tensor-core kernel of a family.

    Args:
        general: of `_prefill.tile_kernel`.
        readers: text that defines `keys` and `values`, of prefill_parts.cu.
    """
    body = f"""
  {readers}
  static_assert(kvtool::TilePlan<D, decltype(keys), decltype(values)>::BYTES == MEMORY, "as Python computes it");
  kvtool::prefill_tiles<D, NORM, BIAS, VSCALE, TURN>(
      q, scale, dims, start, k_norm, k_bias, v_scale, rotation, out, lse, keys, values);
"""
    sources = ("prefill", "prefill_parts", "prefill_group", "prefill_turn", "prefill_tiles")
    inputs = (*general.inputs, "rotation")
    return Tiled(Kernel(f"{general.name}_tiles", inputs, general.outputs, sources, "", body), code_bits, table)


def fits(q: mx.array, options: Options) -> bool:
    """Whether queries and results are what a `Tiled` takes, on a back end that has it."""
    return backend() == "cuda" and options.dim in DIMS and q.dtype in HALVES and options.out_dtype in HALVES


def blocks(options: Options) -> int:
    return -(-options.queries * options.heads_per_kv // ROWS) * options.batch * options.kv_heads
