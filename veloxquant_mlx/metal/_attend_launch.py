"""Dispatch of the attend kernels: how the work is cut, and the second pass that merges splits and rotates back.

Grid: one threadgroup per (batch, KV head, block of query rows) along x and per split of the sequence along y. The shape of a threadgroup
comes from D and the heads per KV head alone; the number of splits, from the sizes of the call, is passed at run time.

On CUDA, one query a head over codes of the sizes that a `Decode` is made for takes that kernel instead: the same grid, inputs and
outputs, tensor cores for both products.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx

from veloxquant_mlx.metal._attend import PACKED, Options, nothing
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._kernel import Kernel, Template, dims

COMMON = ("q", "q_scale", "dims", "start", "k_norm", "k_bias", "v_scale")
FIRST_OWN_SIZE = 9  # where a family's own sizes start in `dims`
MAX_ROWS = 8  # query rows of a threadgroup
MAX_ELEMENTS = 16  # of a row, in a lane
MAX_REGISTERS = 32  # query elements in a lane, over its rows; as many hold the output
MAX_POOL = 20 * 1024  # bytes of threadgroup memory for the merge
MAX_CUDA_NSG = 16  # a CUDA thread has at most 65536 / threads registers
BUSY_GROUPS = 512  # threadgroups that fill a large GPU
KEYS_PER_SPLIT = 256  # fewer are not worth a second pass
MAX_AUTO_SPLITS = 64

DECODE_DIM = 128  # as in decode_parts.cu, here and below
DECODE_ROWS = 4
DECODE_WARPS = 8
DECODE_TABLE_BYTES = 65536
DECODE_CODE_BYTES = 2048  # of a warp's step
DECODE_QUERY_BYTES = 4 * DECODE_ROWS * (144 + 1)
DECODE_BLOCKS = 264  # two on each multiprocessor of an H100 or H200

_METAL_MEMORY = "threadgroup float pool[POOL];\nthreadgroup float tables[TABLES];\n"
_METAL_PLACE = "threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
_CUDA_MEMORY = """__shared__ float pool[POOL];
__shared__ float tables[TABLES];
const unsigned thread_index_in_threadgroup = threadIdx.x;
"""
_CUDA_PLACE = "blockIdx.x, blockIdx.y, threadIdx.x / 32, threadIdx.x % 32"
_ATTEND = """
kvtool::attend<decltype(keys), decltype(values), D, E, LANES, RB, NSG, NORM, BIAS, VSCALE>(
    q, q_scale, dims, start, k_norm, k_bias, v_scale, out, lse, keys, values, pool, {place});
"""


def attend_kernel(name: str, inputs: tuple[str, ...], readers: str, metal_readers: str | None = None) -> Kernel:
    """The kernel of a family.

    Args:
        inputs: names of the arrays that the readers use.
        readers: text that defines `keys` and `values`; `tables` is threadgroup memory for them.
        metal_readers: the same for Metal; None where it is the same text.
    """
    metal = _METAL_MEMORY + (metal_readers or readers) + _ATTEND.format(place=_METAL_PLACE)
    cuda = _CUDA_MEMORY + readers + _ATTEND.format(place=_CUDA_PLACE)
    return Kernel(name, (*COMMON, *inputs), ("out", "lse"), ("bits", "attend", "attend_readers"), metal, cuda)


@dataclass(frozen=True)
class Decode:
    """A family's kernel for one query a head, 128 channels and the family's own codes of 4 bits.

    Fields:
        memory: bytes of shared memory, of the table of pairs or of the warps, before the queries'.
    """

    kernel: Kernel
    memory: int


def decode_kernel(general: Kernel, fast: str, *, zeros: bool, warps: str = "0") -> Kernel:
    """The CUDA kernel of a family for one query a head; what `decode` refuses goes through the general text, with the same threads.

    Args:
        fast: defines `fast_keys` and `fast_values`.
        zeros: whether values have zeros of their own.
        warps: bytes of shared memory before that of the values.
    """
    body = f"""
char* memory = kvtool::decode_memory();
{fast}
if (kvtool::decode<RB, NORM, BIAS, {str(zeros).lower()}>(
        q, q_scale, dims, start, k_norm, k_bias, out, lse, fast_keys, fast_values, memory, memory + {warps}, memory + MEMORY)) {{
  return;
}}
float* pool = reinterpret_cast<float*>(memory);
float* tables = pool + POOL;
const unsigned thread_index_in_threadgroup = threadIdx.x;
"""
    rest = general.cuda.removeprefix(_CUDA_MEMORY)
    sources = (*general.sources, "decode_parts", "decode_keys", "decode_values", "decode")
    return Kernel(f"{general.name}_decode", general.inputs, general.outputs, sources, "", body + rest)


FINISH = Kernel(
    name="attend_finish",
    inputs=("parts", "part_lse", "rotation", "dims"),
    outputs=("out", "lse"),
    sources=("attend",),
    metal="""threadgroup float merged[D];
kvtool::attend_finish<D>(
    parts, part_lse, rotation, dims, out, lse, merged, threadgroup_position_in_grid.x, thread_index_in_threadgroup);""",
    cuda="""__shared__ float merged[D];
__shared__ float weights[kvtool::ATTEND_MAX_SPLITS];
kvtool::attend_finish<D>(parts, part_lse, rotation, dims, out, lse, merged, weights, blockIdx.x, threadIdx.x);""",
)


def layout(packed: str | None) -> int:
    """A packing as the readers number it."""
    return PACKED.index(packed)


def launch(
    kernel: Kernel,
    q: mx.array,
    scale: float | mx.array,
    arrays: Sequence[mx.array],
    options: Options,
    *,
    template: Template,
    sizes: tuple[int, ...] = (),
    tables: int = 1,
    k_norm: mx.array | None = None,
    k_bias: mx.array | None = None,
    multiple: int = 1,
    nsg: int | None = None,
    decode: Decode | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Run an attend kernel.

    Args:
        q: (B, H_q, S_q, D).
        scale: of the scores, or (B, H_q, S_q) for one per query.
        arrays: the family's own inputs.
        template: the family's own compile-time constants.
        sizes: the family's own run-time sizes, in `dims` from FIRST_OWN_SIZE on.
        tables: floats of threadgroup memory that the readers use.
        k_norm: per-token factor of the scores, in place of `options.k_norm`.
        k_bias: (B, H_kv, S_kv), added to the scores.
        multiple: of elements that a lane must hold.
        nsg: SIMD-groups in a threadgroup; None to choose.
        decode: the family's kernel for one query a head, where the codes fit it.
    """
    if options.empty:
        return nothing(options)
    fast = decode is not None and backend() == "cuda" and options.queries == 1 and options.dim == DECODE_DIM and nsg is None
    shared_memory = 0
    if fast:
        kernel, shared_memory = decode.kernel, decode.memory + DECODE_QUERY_BYTES
        elements, lanes, nsg = 8, 16, DECODE_WARPS
        rows = math.ceil(options.heads_per_kv / math.ceil(options.heads_per_kv / DECODE_ROWS))
        template = [*template, ("MEMORY", decode.memory)]
    else:
        elements, lanes, rows, nsg = tile(options.dim, options.heads_per_kv, multiple, nsg)
    blocks = -(-options.heads_per_kv * options.queries // rows)
    groups = options.batch * options.kv_heads * blocks
    splits = options.splits or choose_splits(groups, options, DECODE_BLOCKS if fast else 0)
    two_passes = splits > 1 or options.rotation is not None
    per_row = isinstance(scale, mx.array)
    k_norm = options.k_norm if k_norm is None else k_norm
    unused = _zeros(mx.float32)
    query_rows = options.batch * options.heads * options.queries
    out, lse = kernel(
        [
            q,
            scale.astype(mx.float32) if per_row else _factor(scale),
            _dims(
                *(options.kv_heads, options.heads_per_kv, options.queries, options.length, splits),
                *(int(options.causal), options.window, int(options.start is not None), int(per_row)),
                *sizes,
            ),
            _zeros(mx.int32) if options.start is None else options.start,
            unused if k_norm is None else k_norm,
            unused if k_bias is None else k_bias,
            unused if options.v_scale is None else options.v_scale,
            *arrays,
        ],
        template=[
            *(("D", options.dim), ("E", elements), ("LANES", lanes), ("RB", rows), ("NSG", nsg)),
            *(("POOL", max(1, pool_floats(elements, lanes, rows, nsg))), ("TABLES", tables)),
            *(("NORM", k_norm is not None), ("BIAS", k_bias is not None), ("VSCALE", options.v_scale is not None)),
            *template,
        ],
        grid=(groups * nsg * 32, splits, 1),
        threadgroup=(nsg * 32, 1, 1),
        output_shapes=[(query_rows, splits, options.dim), (query_rows, splits)],
        output_dtypes=[mx.float32 if two_passes else options.out_dtype, mx.float32],
        shared_memory=shared_memory,
    )
    if two_passes:
        out, lse = FINISH(
            [out, lse, unused if options.rotation is None else options.rotation, _dims(splits, int(options.rotation is not None))],
            template=[("D", options.dim)],
            grid=(query_rows * options.dim, 1, 1),
            threadgroup=(options.dim, 1, 1),
            output_shapes=[(query_rows, options.dim), (query_rows,)],
            output_dtypes=[options.out_dtype, mx.float32],
        )
    out = out.reshape(options.out_shape)
    return (out, lse.reshape(options.out_shape[:3])) if options.lse else out


def tile(dim: int, heads_per_kv: int, multiple: int = 1, nsg: int | None = None) -> tuple[int, int, int, int]:
    """(elements of a row in a lane, lanes of a row, query rows of a threadgroup, SIMD-groups of it)."""
    rows = math.ceil(heads_per_kv / math.ceil(heads_per_kv / MAX_ROWS))
    for lanes in (4, 8, 16, 32):
        elements = -(-dim // (lanes * multiple)) * multiple
        small = elements <= MAX_ELEMENTS and elements * rows <= MAX_REGISTERS
        if lanes == 32 or (small and (nsg is None or nsg <= 8)):
            break
    if nsg is None:
        nsg = 8
        while 4 * pool_floats(elements, lanes, rows, nsg) > MAX_POOL:
            nsg //= 2
    return elements, lanes, rows, min(nsg, MAX_CUDA_NSG) if backend() == "cuda" else nsg


def pool_floats(elements: int, lanes: int, rows: int, nsg: int) -> int:
    return nsg // 2 * rows * (lanes * elements + 2)


def choose_splits(groups: int, options: Options, resident: int = 0) -> int:
    """As many splits as it takes to fill a GPU, of a useful length each; with `resident` blocks at once, no more than those."""
    seen = min(options.length, options.window + options.queries) if options.window and options.causal else options.length
    wanted = resident // groups if resident else -(-BUSY_GROUPS // groups)
    return max(1, min(wanted, seen // KEYS_PER_SPLIT, MAX_AUTO_SPLITS))


# Small inputs stay on the GPU: a new array each call is a copy or a fill each call.
@lru_cache(maxsize=256)
def _dims(*sizes: int) -> mx.array:
    return dims(*sizes)


@lru_cache(maxsize=256)
def _factor(scale: float) -> mx.array:
    return mx.array([scale] * 8, mx.float32)


@lru_cache(maxsize=4)
def _zeros(dtype: mx.Dtype) -> mx.array:
    return mx.array([0] * 8, dtype)
