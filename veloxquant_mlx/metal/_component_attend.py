"""Attention of a few queries to keys and values coded in components of unlike widths, on a GPU: no decoded row in memory.

    k[j]   = basis^T y[j] + mean                                y: components of the keys, of each head
    v[j]   = size[j] z[j] matrix + mix^T y[j] + constant        z: of the values; y: those of the keys of all heads
    out[i] = sum_j softmax_j(q[i] . R_j k[j]) v[j],             lse[i] = log sum_j exp(q[i] . R_j k[j])

One kernel makes scores, a second one weighted sums of the components: of the values' own for the queries of their head, and of the keys'
for the queries of all heads. What is linear in the sums is done to them, once.
"""

import math

import mlx.core as mx

from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._checks import check_array, require
from veloxquant_mlx.metal._coded_attend import coded_attend
from veloxquant_mlx.metal._coded_operand import CodedOperand
from veloxquant_mlx.metal._component_operand import ComponentKeys, Components, ComponentValues
from veloxquant_mlx.metal._kernel import Kernel, Template, kept_dims, unused

BLOCK = 32  # tokens whose codes stand together, as in components.cu, here and below
WARPS = 8
ROWS = 8  # queries of a threadgroup
TILE_DIM = 128  # as in component_tiles.cu, here and below
TILE_ROWS = 32
TILE_POINTS = 4096
TILE_MEMORY = 4 * TILE_POINTS + 8 * TILE_DIM + 2 * 4 * WARPS * (8 * TILE_DIM + 4)
_OF_SCORES = 65536 + 4 * (TILE_ROWS * TILE_DIM + TILE_DIM + WARPS * TILE_ROWS + WARPS)
SCORES_MEMORY = TILE_MEMORY + _OF_SCORES
ROW_SCORES_MEMORY = 4 * TILE_DIM * 256 + 8 * TILE_DIM + _OF_SCORES
SUMS_MEMORY = TILE_MEMORY + 4 * TILE_ROWS * (TILE_DIM + 1)
BLOCKS = 132  # multiprocessors of an H100 or H200
GROUPS = 528  # threadgroups that fill a large GPU: four on each multiprocessor of an H200
MAX_SPLITS = 256
COLUMNS = 4  # most of 8 queries, of sums
NEAR_POINTS = 2048  # most that go to threadgroup memory, on Metal
NAME = "component_attend"


_SCORES_INPUTS = ("q", "angles", "mask", "dims", "first", "basis", "codes", "quantisers", "points")
_SCORES_OUTPUTS = ("scores", "tops")


def _scores_kernel(name: str, codes: str) -> Kernel:
    text = f"""__shared__ float y[D * kvtool::COMPONENT_TOKENS];
__shared__ float parts[kvtool::COMPONENT_WARPS * kvtool::COMPONENT_ROWS * kvtool::COMPONENT_TOKENS];
kvtool::component_scores<D, ROPE, MASKED>(
    q, angles, mask, dims, first, basis, scores, tops, kvtool::{codes}{{codes, quantisers, points}}, y, parts);"""
    return Kernel(name, _SCORES_INPUTS, _SCORES_OUTPUTS, ("attend", "coded", "components"), "", text)


SCORES, ROW_SCORES = _scores_kernel("component_scores", "ComponentCodes"), _scores_kernel("component_row_scores", "ComponentRows")
SUMS = Kernel(
    "component_sums",
    ("scores", "tops", "dims", "first", "codes", "quantisers", "points", "scales", "sizes"),
    ("sums", "totals"),
    ("attend", "coded", "components"),
    "",
    """__shared__ float weights[kvtool::COMPONENT_TOKENS * kvtool::COMPONENT_ROWS];
kvtool::component_sums<OWN>(scores, tops, dims, first, sums, totals, {codes, quantisers, points}, {scales, sizes}, weights);""",
)


_METAL_PLACE = "threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, simdgroup_index_in_threadgroup, thread_index_in_simdgroup"


def _on_metal(name: str, codes: str, near: bool, *, simds: str, points: int, call: str) -> Kernel:
    """A kernel's Metal text: codes, with their points in threadgroup memory where `near`; `points`: where `dims` has their number."""
    inputs, outputs = (SUMS.inputs, SUMS.outputs) if "sums" in name else (_SCORES_INPUTS, _SCORES_OUTPUTS)
    stage = f"""threadgroup float near_points[{NEAR_POINTS}];
kvtool::component_stage(points, near_points, dims[{points}], thread_index_in_threadgroup, {simds} * 32);
"""
    coded = f"const kvtool::{codes} coded{{codes, quantisers, {'near_points' if near else 'points'}}};\n"
    return Kernel(name, inputs, outputs, ("attend", "coded", "components"), (stage if near else "") + coded + call, "")


def _metal_scores(name: str, codes: str, near: bool = False) -> Kernel:
    call = f"""threadgroup float y[2048];
threadgroup float parts[2048];
kvtool::component_scores<D, ROPE, MASKED>(
    q, angles, mask, dims, first, basis, scores, tops, coded, y, parts, {_METAL_PLACE});"""
    return _on_metal(name, codes, near, simds=str(WARPS), points=8, call=call)


def _metal_sums(near: bool) -> Kernel:
    call = f"""threadgroup float weights[WEIGHTS];
const kvtool::ComponentSizes held{{scales, sizes}};
kvtool::component_sums<OWN, COLUMNS, NSG>(
    scores, tops, dims, first, sums, totals, coded, held, weights, {_METAL_PLACE});"""
    return _on_metal(SUMS.name, _metal_codes(near), near, simds="NSG", points=9, call=call)


def _metal_codes(near: bool) -> str:
    return f"ComponentCodes<{str(near).lower()}>"


_METAL = {near: (_metal_scores(SCORES.name, _metal_codes(near), near), _metal_sums(near)) for near in (False, True)}
_METAL_ROW_SCORES = _metal_scores(ROW_SCORES.name, "ComponentRows")

# The same on CUDA's tensor cores, for rows of 128 channels.
_TILE_SOURCES = ("attend", "coded", "coded_rows", "decode_parts", "coded_parts", "components", "component_tiles", "one_block")


def _tile_scores_kernel(name: str, codes: str, stage: str) -> Kernel:
    text = f"""kvtool::component_tile_scores<kvtool::{stage}, ROPE, MASKED>(
    q, angles, mask, dims, first, basis, scores, tops, kvtool::{codes}{{codes, quantisers, points}});"""
    return Kernel(name, _SCORES_INPUTS, _SCORES_OUTPUTS, _TILE_SOURCES, "", text)


TILE_SCORES = _tile_scores_kernel("component_tile_scores", "ComponentCodes", "ComponentStage")
TILE_ROW_SCORES = _tile_scores_kernel("component_tile_row_scores", "ComponentRows", "ComponentRowStage")
TILE_SUMS = Kernel(
    "component_tile_sums",
    SUMS.inputs,
    SUMS.outputs,
    _TILE_SOURCES,
    "",
    "kvtool::component_tile_sums<OWN, COLUMNS>(scores, tops, dims, first, sums, totals, {codes, quantisers, points}, {scales, sizes});",
)


def component_attend(
    q: mx.array,
    k: ComponentKeys,
    v: ComponentValues | CodedOperand,
    rows: tuple[int, int, int],
    angles: mx.array | None = None,
    mask: mx.array | None = None,
    splits: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Softmax attention of queries to stored rows: `coded_attend`, whose arguments and results it has, and by which values of other codes
    are read."""
    k_from, v_from, count = rows
    heads, stored, dim = k.components.shape
    of_v = v.shape if isinstance(v, CodedOperand) else v.components.shape
    require(of_v[::2] == (heads, dim), NAME, "v", f"rows of (H, D) = {(heads, dim)}", of_v)
    check_array(NAME, "q", q, (heads, "R", dim), (mx.float32,))
    fits = count > 0 and 0 <= k_from <= stored - count and 0 <= v_from <= of_v[1] - count
    require(fits, NAME, "rows", f"within {stored} keys and {of_v[1]} values, one or more", rows)
    queries = q.shape[1]
    if angles is not None:
        check_array(NAME, "angles", angles, (count, dim), (mx.float32,))
    if mask is not None:
        check_array(NAME, "mask", mask, (1 if mask.shape[0] == 1 else heads, queries, count), (mx.bool_, mx.float32))
    if not isinstance(v, CodedOperand):
        fits = v.mix.shape[1] == k.components.count and not k.components.by_row
        require(fits, NAME, "v.mix", f"of {k.components.count} components of keys in blocks", v.mix.shape)
    scores, tops = _scores(q * math.log2(math.e), k, k_from, count, angles, mask, splits)
    if isinstance(v, CodedOperand):
        there = CodedOperand("scores", (heads, count, dim), (scores,))
        return coded_attend(q, there, v, (0, v_from, count), splits=splits)
    shared, total = _sums(scores, tops, k.components, k_from, count, None, splits)
    own, _ = _sums(scores, tops, v.components, v_from, count, v, splits)
    norm = mx.where(total > 0, 1 / total, 0.0)[:, None]
    own, shared = ((x * norm).reshape(heads, queries, -1) for x in (own, shared))
    out = (
        mx.matmul(own, v.matrix) + mx.matmul(shared, v.mix) + mx.where(norm > 0, 1.0, 0.0).reshape(heads, queries, 1) * v.constant[:, None]
    )
    return out, (mx.max(tops, axis=1) * math.log(2) + mx.log(total)).reshape(heads, queries)


def _tiles(components: Components) -> bool:
    """Whether the kernels for tensor cores are those for such rows."""
    return (
        backend() == "cuda" and components.shape[2] == TILE_DIM and (components.by_row or components.quantisers.points.size <= TILE_POINTS)
    )


def _scores(
    q: mx.array, k: ComponentKeys, start: int, count: int, angles: mx.array | None, mask: mx.array | None, splits: int | None
) -> tuple[mx.array, mx.array]:
    """Scores in log2, (H R, count), and the largest of each split, (H R, splits)."""
    heads, queries, dim = q.shape
    components, of = k.components, k.components.quantisers
    fast = _tiles(components)
    groups = heads * -(-queries // (TILE_ROWS if fast else ROWS))
    splits = _splits(groups, start, count, splits, fast)
    sizes = (
        queries,
        count,
        splits,
        start,
        components.codes.shape[1],
        1 if mask is None else mask.shape[0],
        components.count,
        heads,
        of.points.size,
    )
    template: Template = [("ROPE", angles is not None), ("MASKED", mask is not None)]
    on_metal = backend() == "metal"
    if on_metal:
        kernel, memory = _METAL_ROW_SCORES if components.by_row else _METAL[of.points.size <= NEAR_POINTS][0], 0
    elif components.by_row:
        kernel, memory = (TILE_ROW_SCORES, ROW_SCORES_MEMORY) if fast else (ROW_SCORES, 0)
    else:
        kernel, memory = (TILE_SCORES, SCORES_MEMORY) if fast else (SCORES, 0)
    return kernel(
        [
            *(q, unused() if angles is None else angles, unused(mx.bool_) if mask is None else mask, kept_dims(*sizes)),
            *(of.first, k.padded if on_metal else k.basis, components.codes, of.places, of.points),
        ],
        template=template if fast else [("D", dim), *template],
        grid=(groups * WARPS * 32, splits, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(heads * queries, count), (heads * queries, splits)],
        output_dtypes=[mx.float32, mx.float32],
        shared_memory=memory,
    )


def _sums(
    scores: mx.array, tops: mx.array, components: Components, start: int, count: int, v: ComponentValues | None, splits: int | None
) -> tuple[mx.array, mx.array]:
    """Weighted sums of all components for all queries, (H R, n), or of values for those of their head, (H R, D); and of weights, (H R,)."""
    (heads, _, dim), of = components.shape, components.quantisers
    every = scores.shape[0]
    queries = every if v is None else every // heads
    fast = _tiles(components)
    on_metal = backend() == "metal"
    columns = min(-(-queries // ROWS), COLUMNS) if fast or on_metal else 1
    simds = -(-dim // 32) if on_metal else WARPS
    groups = heads * -(-queries // (ROWS * columns))
    splits = _splits(groups, start, count, splits, fast)
    sizes = (
        every // heads,
        count,
        splits,
        start,
        components.codes.shape[1],
        1,
        components.count,
        heads,
        tops.shape[1],
        of.points.size,
    )
    template: Template = [("OWN", v is not None)]
    kernel = SUMS
    if on_metal:
        kernel = _METAL[of.points.size <= NEAR_POINTS][1]
        template = [*template, ("COLUMNS", columns), ("NSG", simds), ("WEIGHTS", BLOCK * ROWS * columns)]
    elif fast:
        kernel, template = TILE_SUMS, [*template, ("COLUMNS", columns)]
    sums, totals = kernel(
        [
            *(scores, tops, kept_dims(*sizes), of.first, components.codes, of.places, of.points),
            *((unused(mx.uint32), unused()) if v is None else (v.scales, v.sizes)),
        ],
        template=template,
        grid=(groups * simds * 32, splits, 1),
        threadgroup=(simds * 32, 1, 1),
        output_shapes=[(splits, every, components.count if v is None else dim), (splits, every)],
        output_dtypes=[mx.float32, mx.float32],
        shared_memory=SUMS_MEMORY if fast else 0,
    )
    return (sums[0], totals[0]) if splits == 1 else (mx.sum(sums, axis=0), mx.sum(totals, axis=0))


def _splits(groups: int, start: int, count: int, given: int | None, fast: bool) -> int:
    blocks = (start + count - 1) // BLOCK + 1 - start // BLOCK
    wanted = min(BLOCKS // groups, -(-blocks // WARPS)) if fast else min(-(-GROUPS // groups), blocks)
    return given or max(1, min(wanted, MAX_SPLITS))
