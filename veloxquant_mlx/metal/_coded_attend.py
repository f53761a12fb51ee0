"""Attention of a few queries to rows as live caches hold them, on a GPU: no decoded row in memory.

    s[i, j] = q[i] . k^[j]   (+ mask[i, j]),    out[i] = sum_j softmax_j(s[i, j]) v^[j],    lse[i] = log sum_j exp(s[i, j])

Keys and values are `CodedOperand`s, what a codec stored and how it is to be read; keys stored before RoPE are rotated in the kernel. A
rotation that a codec has put before its codes is the query's and the output's, but for keys before RoPE, where it is undone in the kernel.
"""

import math
from functools import lru_cache

import mlx.core as mx

from veloxquant_mlx.metal import _coded_tiles
from veloxquant_mlx.metal._attend_launch import merged
from veloxquant_mlx.metal._checks import check_array, power_of_two, require
from veloxquant_mlx.metal._coded_operand import CodedOperand
from veloxquant_mlx.metal._kernel import Kernel, Template, kept_dims, unused

MULTIPLE, MAX_DIM = 16, 256  # of head sizes
MAX_ROWS = 4  # query rows of a threadgroup
WARPS = 4
GROUPS = 528  # threadgroups that fill a large GPU: four on each multiprocessor of an H200
KEYS_PER_SPLIT = 128  # a chunk for each warp
MAX_SPLITS = 256
ELEMENTS = 16  # of a row, in a lane
NAME = "coded_attend"

# form: reader, by role r (k or v, R its constants' prefix). `staged` goes to threadgroup memory, and of centred keys a head's mean.
_ROWS = {
    "table": "kvtool::CodedTable<D, {R}BITS, {R}BITS2, {R}MEAN> {r}{{{r}_a, {r}_b, {r}_c, {r}_table, k_head, {r}_mean{aligned}}};",
    "affine": "kvtool::CodedAffine<D, {R}BITS, {R}GROUP, {R}TOKEN> {r}{{{r}_a, {r}_b, {r}_c{aligned}}};",
    "plain": "kvtool::CodedPlain<D, {R}TYPE> {r}{{{r}_a{aligned}}};",
    "words": "kvtool::CodedVectors<D, {R}SUB, {R}BITS, false> {r}{{{r}_a, {r}_table, nullptr}};",
    "places": "kvtool::CodedVectors<D, {R}SUB, {R}BITS, true> {r}{{{r}_a, nullptr, {r}_b}};",
    "scores": "kvtool::CodedScores {r}{{{r}_a}};",
}
_STAGE = "kvtool::coded_stage({r}_staged, {r}_table, {R}STAGED, {thread}, NSG * 32);\n"
_STAGE_MEAN = "if (KMEAN) {{\n  kvtool::coded_stage(k_mean + {group} / (({rows} + RB - 1) / RB) * D, k_head, D, {thread}, NSG * 32);\n}}\n"
_MEMORY = "{space} float pool[POOL];\n{space} float k_table[KTABLE];\n{space} float v_table[VTABLE];\n{space} float k_head[KHEAD];\n"
_CALL = """kvtool::coded_attend<D, LANES, RB, NSG, TURN, ROPE, MASKED>(
    q, angles, pair_signs, mask, dims, out, lse, k, v, pool, {place});"""
_INPUTS = ("q", "angles", "pair_signs", "mask", "dims", *(f"{r}_{name}" for r in "kv" for name in ("a", "b", "c", "staged", "mean")))


def takes_dim(dim: int) -> bool:
    """Whether rows of D = dim fit the kernel's lanes."""
    return dim % MULTIPLE == 0 and MULTIPLE <= dim <= MAX_DIM


def takes_rotated(operand_turned: bool, smoothed: bool, dim: int) -> bool:
    """Whether keys before RoPE can be rotated in the kernel: whatever precedes their codes must be a transform that it has."""
    return not smoothed and (not operand_turned or power_of_two(dim))


def coded_attend(
    q: mx.array,
    k: CodedOperand,
    v: CodedOperand,
    rows: tuple[int, int, int],
    angles: mx.array | None = None,
    mask: mx.array | None = None,
    splits: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Softmax attention of queries to stored rows.

    Args:
        q: (H, R, D) float32, times the scale; R query rows of each KV head.
        k, v: stored rows of one (H, D).
        rows: first row of the keys, first of the values, and how many.
        angles: (count, D) float32, cosines and sines of the keys' positions, for keys before a RoPE of all channels; q is half-split.
        mask: (H or 1, R, count), bool or float32 to be added; None to see all.
        splits: threadgroups that share a sequence; None to choose.

    Returns:
        (out, lse): (H, R, D) and (H, R) float32; 0 and -inf for a query that sees none.

    Raises:
        ValueError: a shape does not fit.
        TypeError: another dtype.
    """
    k_from, v_from, count = rows
    heads, _, dim = k.shape
    require(takes_dim(dim), NAME, "k", f"(H, S, D) with D a multiple of {MULTIPLE}, {MAX_DIM} at most", k.shape)
    require((v.shape[0], v.shape[2]) == (heads, dim), NAME, "v", f"rows of (H, D) = {(heads, dim)}", v.shape)
    check_array(NAME, "q", q, (heads, "R", dim), (mx.float32,))
    queries = q.shape[1]
    fits = count > 0 and 0 <= k_from <= k.shape[1] - count and 0 <= v_from <= v.shape[1] - count
    require(fits, NAME, "rows", f"within {k.shape[1]} keys and {v.shape[1]} values, one or more", rows)
    if angles is not None:
        check_array(NAME, "angles", angles, (count, dim), (mx.float32,))
        require(takes_rotated(k.matrix is not None, k.smooth is not None, dim), NAME, "k", "rows that the kernel can rotate", k.form)
    if mask is not None:
        check_array(NAME, "mask", mask, (1 if mask.shape[0] == 1 else heads, queries, count), (mx.bool_, mx.float32))
    turn = angles is not None and k.signs is not None
    q = _query(q, k, turn)
    shape = (heads, queries, dim)
    if _coded_tiles.takes(k, v, angles is not None, mask is not None):
        out, lse = merged(*_coded_tiles.tiles(q, k, v, rows, angles, splits), v.matrix, mx.float32, shape)
    else:
        out, lse = _parts(q, k, v, rows, angles, mask, splits)
        if out.shape[1] > 1 or v.matrix is not None:
            out, lse = merged(out, lse, v.matrix, mx.float32, shape)
    out, lse = out.reshape(shape), lse.reshape(shape[:2])
    return (out if v.smooth is None else out * v.smooth[:, None]), lse


def _parts(
    q: mx.array,
    k: CodedOperand,
    v: CodedOperand,
    rows: tuple[int, int, int],
    angles: mx.array | None,
    mask: mx.array | None,
    splits: int | None,
) -> tuple[mx.array, mx.array]:
    """The same by the general kernel, see `_coded_tiles.tiles`."""
    k_from, v_from, count = rows
    heads, queries, dim = q.shape
    turn = angles is not None and k.signs is not None
    lanes = 1 << max(0, (dim // ELEMENTS - 1).bit_length())
    block = math.ceil(queries / math.ceil(queries / MAX_ROWS))
    groups = heads * -(-queries // block)
    splits = splits or max(1, min(-(-GROUPS // groups), count // KEYS_PER_SPLIT, MAX_SPLITS))
    arrays, constants = [], []
    for role, operand, mean in (("k", k, 1), ("v", v, 2)):
        found = dict(enumerate(operand.arrays))
        arrays += [*(found.get(i, unused(mx.uint8)) for i in range(3)), _given(operand.staged), _given(operand.mean)]
        sizes = [*operand.constants, ("MEAN", 0 if operand.mean is None else mean), ("TABLE", 1)]
        if operand.staged is not None:
            sizes = [*sizes[:-1], ("TABLE", operand.staged.size), ("STAGED", operand.staged.size)]
        constants += [(role.upper() + name, value) for name, value in sizes]
    template: Template = [
        *(("D", dim), ("LANES", lanes), ("RB", block), ("NSG", WARPS), ("POOL", WARPS // 2 * block * (lanes * ELEMENTS + 3))),
        *(("TURN", turn), ("ROPE", angles is not None), ("MASKED", mask is not None), ("KHEAD", 1 if k.mean is None else dim)),
        *constants,
    ]
    out, lse = _kernel(k.form, v.form)(
        [
            *(q, _given(angles), _given(k.pair_signs) if turn else unused(), unused(mx.bool_) if mask is None else mask),
            kept_dims(queries, count, splits, k_from, k.shape[1], v_from, v.shape[1], 1 if mask is None else mask.shape[0]),
            *arrays,
        ],
        template=template,
        grid=(groups * WARPS * 32, splits, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(heads * queries, splits, dim), (heads * queries, splits)],
        output_dtypes=[mx.float32, mx.float32],
    )
    return out, lse


def _query(q: mx.array, k: CodedOperand, turn: bool) -> mx.array:
    """Queries in the frame of the stored keys, for scores in log2."""
    if turn:
        return q * k.query_signs
    q = q if k.smooth is None else q * k.smooth[:, None]
    return q * math.log2(math.e) if k.matrix is None else mx.matmul(q, k.query_matrix)


@lru_cache(maxsize=64)
def _kernel(k: str, v: str) -> Kernel:
    texts = {}
    for language, space, thread, group, place in (
        ("metal", "threadgroup", "thread_index_in_threadgroup", "threadgroup_position_in_grid.x", _METAL_PLACE),
        ("cuda", "__shared__", "threadIdx.x", "blockIdx.x", _CUDA_PLACE),
    ):
        lines = [_MEMORY.format(space=space)]
        for role, form in (("k", k), ("v", v)):
            if form in ("table", "words"):
                lines.append(_STAGE.format(r=role, R=role.upper(), thread=thread))
        if k == "table":
            lines.append(_STAGE_MEAN.format(group=group, rows="dims[0]", thread=thread))
        for role, form in (("k", k), ("v", v)):
            aligned = f", kvtool::coded_aligned({role}_a)" if language == "cuda" else ""
            lines.append(_ROWS[form].format(r=role, R=role.upper(), aligned=aligned) + "\n")
        texts[language] = "".join(lines) + _CALL.format(place=place)
    return Kernel(f"{NAME}_{k}_{v}", _INPUTS, ("out", "lse"), ("attend", "coded", "coded_rows"), texts["metal"], texts["cuda"])


_METAL_PLACE = "threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
_CUDA_PLACE = "blockIdx.x, blockIdx.y, threadIdx.x / 32, threadIdx.x % 32"


def _given(array: mx.array | None) -> mx.array:
    return unused() if array is None else array
