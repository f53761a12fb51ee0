"""Kernel functions that attend to codes: what they take of a codec's parts, and what they round.

A function gets the very parts of a codec, and queries as it takes them: rotated in float32, in the dtype that models run in. That is in its
time on a CPU; on a GPU it comes before, for the small operations that rotate a query cost MLX more to hand over than the function takes.
To rotate the output back is in its time. The oracle has the queries rounded alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvtool.bench import oracle
from kvtool.bench.rows import Size
from veloxquant_mlx import metal
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.codecs import CodecPlan
from veloxquant_mlx.codecs._rotation import matrix
from veloxquant_mlx.codecs.affine import Affine
from veloxquant_mlx.codecs.rabitq import Rabitq
from veloxquant_mlx.codecs.rvq import Rvq
from veloxquant_mlx.codecs.vecinfer import VecInfer
from veloxquant_mlx.metal import _rabitq_attend, _rvq_attend
from veloxquant_mlx.metal._attend import hadamard_matrix
from veloxquant_mlx.metal._attend_launch import DECODE_DIM
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal._prefill_tiles import DIMS as TILED_DIMS
from veloxquant_mlx.metal._prefill_tiles import HALVES
from veloxquant_mlx.metal.fused_sdpa import supports_shape

PREFILL_DIM = 128  # largest D of the prefill kernels


@dataclass(frozen=True, eq=False)
class Kernel:
    """A function over the codes of a run.

    Attributes:
        ask: what it takes in place of queries (B, H_q, Q, D).
        run: of what `ask` gives and `operands`; evaluates nothing on a GPU.
        operands: arrays that it reads, or lists of them.
        query: what it makes of queries before it scores them, back in the keys' frame, or None.
        halves: roles, of "kv", whose tables' entries it rounds to halves here.
        weights: what it rounds weights to here.
    """

    ask: Callable[[mx.array], list[mx.array]]
    run: Callable[[list[mx.array], Any], mx.array]
    operands: Any
    query: Callable[[np.ndarray], np.ndarray] | None = None
    halves: str = ""
    weights: mx.Dtype = mx.float32


def kernels(plan: CodecPlan, size: Size) -> list[str]:
    """The kernel functions that take the codes of these codecs as they are: they know no means, and keys as cached alone."""
    k: Any = plan.k
    v: Any = plan.v
    dim = size.dim
    plain_values = isinstance(v, Rvq) and len(v.codebooks) == 1 and not v.center
    if isinstance(k, Affine) and isinstance(v, Affine) and (k.per, v.per) == ("channel", "token") and k.group == v.group and dim <= 256:
        return ["scalar_fused_decode_attend"]
    if isinstance(k, Rvq) and len(k.codebooks) == 2 and not k.center and dim <= 256:
        return ["turboquant_fused_rvq_decode_attend"] if plain_values else []
    if isinstance(k, Rabitq) and k.bits == (1,) and not k.center and plain_values and v.bits[0] <= 4 and dim % 8 == 0:
        exact = ["rabitq_prefill_attend"] if dim <= PREFILL_DIM and v.bits == (4,) else []
        return ([] if size.queries > 1 else ["rabitq_fused_attend"]) + exact
    if isinstance(k, VecInfer) and isinstance(v, VecInfer) and dim % 32 == 0 and supports_shape(1 << k.bits, dim // k.sub, dim):
        return ["metal_fused_sdpa"] if (k.bits, k.sub) == (v.bits, v.sub) else []
    return []


def decodes_in_halves(size: Size, dtype: mx.Dtype) -> bool:
    """Whether a function of `_attend_launch.Decode` takes, for codes that it is for, its kernel on tensor cores, with tables of halves."""
    return backend() == "cuda" and size.queries == 1 and size.dim == DECODE_DIM and dtype in HALVES


def prefills_in_halves(size: Size, dtype: mx.Dtype) -> bool:
    """Whether a function of `_prefill_tiles.Tiled` takes its kernel on tensor cores, which rounds weights to the values' 16 bits."""
    return backend() == "cuda" and size.dim in TILED_DIMS and dtype in HALVES


# --- one after another


def _joined(made: tuple[Block, ...], role: str, part: str) -> mx.array:
    """A part of all sequences, with the batch axis in front."""
    whole = mx.stack([getattr(block, role).parts[part] for block in made])
    mx.eval(whole)
    return whole


def _scalar(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> Kernel:
    parts = [_joined(made, role, part) for role in "kv" for part in ("codes", "scale", "zero")]
    more: Any = {"packed": "lsb8", "k_bits": plan.k.bits, "v_bits": plan.v.bits, "causal": size.queries > 1, "out_dtype": dtype}
    return Kernel(lambda q: [q], lambda asked, own: metal.scalar_fused_decode_attend(*asked, *own, plan.k.group, size.scale, **more), parts)


def _turned(q: mx.array, plan: Any) -> mx.array:
    """Queries in the frame of the keys' codes, float32."""
    return mx.matmul(q.astype(mx.float32), matrix(q.shape[-1], plan.k.seed).swapaxes(0, 1))


def _rounding(plan: Any, size: Size, dtype: mx.Dtype) -> Callable[[np.ndarray], np.ndarray]:
    """Queries rounded in the frame of the keys' codes, back in the keys' own."""
    rotation = oracle.rotation(size.dim, plan.k.seed)
    return lambda q: oracle.rounded(q @ rotation.T, dtype) @ rotation


def _two_stage(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> Kernel:
    parts = [_joined(made, *part) for part in (("k", "codes1"), ("k", "codes2"), ("v", "codes"), ("k", "scale"), ("v", "scale"))]
    tables = [mx.array(table) for table in plan.k.codebooks]
    words = mx.array(plan.v.codebooks[0])[:, None]
    more: Any = {"out_rotation": matrix(size.dim, plan.v.seed), "packed": "lsb8", "causal": size.queries > 1, "out_dtype": dtype}
    bits = (*plan.k.bits, *plan.v.bits)

    def run(asked: list[mx.array], own: Any) -> mx.array:
        first, second, codes, norm, scale = own
        keys = (*asked, first, second, *tables)
        return metal.turboquant_fused_rvq_decode_attend(*keys, codes, words, *bits, k_norm=norm, v_scale=scale, **more)

    halves = bits == _rvq_attend.DECODE_BITS and decodes_in_halves(size, dtype)
    return Kernel(lambda q: [_turned(q, plan).astype(q.dtype)], run, parts, _rounding(plan, size, dtype), "kv" if halves else "")


def _signs(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> tuple[list[mx.array], mx.array, dict[str, Any]]:
    """What both functions for 1-bit keys take: bits, magnitudes, additions, values' codes and scales; the values' table; options."""
    bits, magnitude = (_joined(made, "k", part) for part in ("codes", "scale"))
    codes, scale = (_joined(made, "v", part) for part in ("codes", "scale"))
    added = mx.zeros(magnitude.shape, magnitude.dtype)
    table = mx.array(plan.v.codebooks[0])
    mx.eval(added, table)
    more = {"out_rotation": matrix(size.dim, plan.v.seed), "packed": "lsb8", "causal": size.queries > 1, "out_dtype": dtype}
    return [bits, magnitude, added, codes, scale], table, more


def _hamming(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> Kernel:
    """Scores the signs of a query: z ~ mean |z| sign z. The oracle's query is that one, back in the keys' frame."""
    parts, table, more = _signs(plan, made, size, dtype)
    rotation = oracle.rotation(size.dim, plan.k.seed)

    def ask(q: mx.array) -> list[mx.array]:
        z = _turned(q, plan)
        return [z.astype(q.dtype), mx.mean(mx.abs(z), axis=-1) * size.scale]

    def run(asked: list[mx.array], own: Any) -> mx.array:
        *keys, codes, scale = own
        return metal.rabitq_fused_attend(*asked, *keys, codes, table, v_scale=scale, **more)

    def query(q: np.ndarray) -> np.ndarray:
        z = q @ rotation.T
        return np.where(z >= 0, 1.0, -1.0) * np.abs(z).mean(axis=-1, keepdims=True) @ rotation

    halves = plan.v.bits == (_rabitq_attend.DECODE_BITS,) and decodes_in_halves(size, dtype)
    return Kernel(ask, run, parts, query, "v" if halves else "")


def _prefill(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> Kernel:
    parts, table, more = _signs(plan, made, size, dtype)
    scale = mx.array([size.scale], mx.float32)

    def ask(q: mx.array) -> list[mx.array]:
        return [_turned(q, plan).astype(q.dtype)]

    def run(asked: list[mx.array], own: Any) -> mx.array:
        *keys, codes, factor = own
        return metal.rabitq_prefill_attend(*asked, scale, *keys, codes, table, v_scale=factor, **more)

    halves, weights = ("v", mx.float16) if prefills_in_halves(size, dtype) else ("", mx.float32)
    return Kernel(ask, run, parts, _rounding(plan, size, dtype), halves, weights)


def _words(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> Kernel:
    """One table for all heads of a sequence, and one set of tables for a call: a batch has as many calls."""
    names = (("k", "codes"), ("k", "words"), ("v", "codes"), ("v", "words"))
    parts = [[getattr(block, role).parts[part][None if part == "codes" else ...] for role, part in names] for block in made]
    turn, smooth = hadamard_matrix(size.dim), [_smoothing(block, size) for block in made] if plan.k.smooth else []
    more: Any = {"causal": size.queries > 1, "packed": "lsb8", "out_dtype": dtype}

    def ask(q: mx.array) -> list[mx.array]:
        each = [q[b : b + 1] for b in range(size.batch)]
        return [mx.matmul(z.astype(mx.float32) * by, turn).astype(q.dtype) for z, by in zip(each, smooth, strict=True)] if smooth else each

    def run(asked: list[mx.array], own: Any) -> mx.array:
        outs = [metal.metal_fused_sdpa(z, *sequence, size.scale, **more) for z, sequence in zip(asked, own, strict=True)]
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    def query(q: np.ndarray) -> np.ndarray:
        by, rotation = np.concatenate([oracle.to_numpy(one) for one in smooth]), oracle.to_numpy(turn)
        return oracle.rounded(q * by @ rotation, dtype) @ rotation.T / by

    return Kernel(ask, run, parts, query if smooth else None)


def _smoothing(block: Block, size: Size) -> mx.array:
    """What queries are multiplied by, (1, H_q, 1, D)."""
    return mx.repeat(block.k.parts["smooth"].astype(mx.float32), size.groups, axis=0)[None, :, None]


FUNCTIONS: dict[str, Callable[[Any, tuple[Block, ...], Size, mx.Dtype], Kernel]] = {
    "scalar_fused_decode_attend": _scalar,
    "turboquant_fused_rvq_decode_attend": _two_stage,
    "rabitq_fused_attend": _hamming,
    "rabitq_prefill_attend": _prefill,
    "metal_fused_sdpa": _words,
}
