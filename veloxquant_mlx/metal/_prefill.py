"""What the prefill functions share: checks, the definition over plain keys and values, and the grids.

Options, mask and log-sum-exp: `_attend`. On Metal, `_attend_launch.Many`; on CUDA, tensor cores where `_prefill_tiles` fits, else a block
for 32 queries of one head; keys stream by in tiles.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from veloxquant_mlx.metal import _attend, _native_attend
from veloxquant_mlx.metal._attend import Extras, Options
from veloxquant_mlx.metal._backend import natively
from veloxquant_mlx.metal._checks import FLOATS, check_array, require
from veloxquant_mlx.metal._kernel import Kernel, Template, dims
from veloxquant_mlx.metal._prefill_tiles import THREADS as TILED_THREADS
from veloxquant_mlx.metal._prefill_tiles import Tiled, blocks, fits

MAX_DIM = 128
ROWS = 32  # queries of a tile
THREADS = 128
COMMON = ("q", "scale", "dims", "start", "k_norm", "k_bias", "v_scale")


def tile_kernel(name: str, inputs: tuple[str, ...], readers: str) -> Kernel:
    """The CUDA kernel of a family, for what the tensor cores of `_prefill_tiles` do not take.

    Args:
        inputs: arrays that the readers use.
        readers: text that defines the readers `keys` and `values`.
    """
    cuda = f"""
  {readers}
  __shared__ float4 q_tile[32 * D / 4];
  __shared__ float4 kv_tile[32 * (D + 4) / 4];
  kvtool::prefill<D, NORM, BIAS, VSCALE>(
      q, scale, dims, start, k_norm, k_bias, v_scale, out, lse, keys, values, (float*)q_tile, (float*)kv_tile);
"""
    return Kernel(name, (*COMMON, *inputs), ("out", "lse"), ("prefill",), "", cuda)


def check_plain(function: str, q: Any, k: Any, v: Any, scale: Any, multiple: int) -> None:
    """q (B, H_q, S_q, D), k and v (B, H_kv, S_kv, D), scale (1,); D a multiple of `multiple`."""
    check_heads(function, q, multiple)
    batch, dim = q.shape[0], q.shape[3]
    check_array(function, "k", k, (batch, "H_kv", "S_kv", dim), FLOATS)
    check_array(function, "v", v, tuple(k.shape), FLOATS)
    check_array(function, "scale", scale, (1,), (mx.float32,))


def check_heads(function: str, q: Any, multiple: int) -> None:
    _attend.check_queries(function, "q", q, max_dim=MAX_DIM)
    require(q.shape[3] % multiple == 0, function, "q", f"(B, H_q, S_q, D) with D a multiple of {multiple}", q)


def check_causal(function: str, q: mx.array, kv_heads: int, length: int, extras: Extras) -> Options:
    """The options of a function that is always causal."""
    if "causal" in extras:
        raise TypeError(f"[{function}] got an unexpected keyword argument 'causal'.")
    require(q.shape[2] <= length, function, "q", f"(B, H_q, S_q, D) with S_q at most S_kv = {length}", q)
    return _attend.check_options(function, q, kv_heads, length, {**extras, "causal": True}, refused=("splits",))


def plain_ops(q: mx.array, k: mx.array, v: mx.array, scale: mx.array, options: Options) -> mx.array | tuple[mx.array, mx.array]:
    """The definition over keys and values as they are, by the extension where it is in use."""
    if natively():
        rows = [_native_attend.Rows((), None, factor, plain=x) for x, factor in ((k, options.k_norm), (v, options.v_scale))]
        found = _native_attend.attend(q.astype(mx.float32) * scale, rows[0], rows[1], options)
        if found is not None:
            return found
    s = _attend.products(q, k.astype(mx.float32), options) * scale
    if options.k_norm is not None:
        s = s * options.k_norm.astype(mx.float32)[:, :, None, None]
    return _attend.attention(s, v.astype(mx.float32), options)


def launch(
    kernel: Kernel,
    q: mx.array,
    scale: mx.array,
    arrays: Sequence[mx.array],
    options: Options,
    *,
    template: Template,
    groups: int,
    k_norm: mx.array | None = None,
    k_bias: mx.array | None = None,
    sizes: tuple[int, ...] = (),
    tiled: Tiled | None = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Run a prefill kernel.

    Args:
        arrays: the family's own inputs.
        template: the family's own compile-time constants.
        groups: threadgroups for one head.
        k_norm: factor of the scores of each key, in place of `options.k_norm`.
        k_bias: (B, H_kv, S_kv), added to the scores.
        sizes: the family's own, in `dims` from 7 on.
        tiled: the family's kernel on tensor cores, where the keys and values fit it.
    """
    threads, grid, memory = THREADS, (THREADS * groups, options.batch * options.heads, 1), 0
    rotates = tiled is not None and fits(q, options)
    k_norm = options.k_norm if k_norm is None else k_norm
    unused = mx.zeros((8,), mx.float32)
    if tiled is not None and rotates:
        kernel, memory = tiled.kernel, tiled.memory(options.dim)
        threads, grid = TILED_THREADS, (TILED_THREADS * blocks(options), 1, 1)
        template = [*template, ("MEMORY", memory), ("TURN", options.rotation is not None)]
        arrays = [*arrays, unused if options.rotation is None else options.rotation]
    out, lse = kernel(
        [
            q,
            scale,
            dims(
                *(options.heads, options.heads_per_kv, options.queries, options.length),
                *(int(options.causal), options.window, int(options.start is not None)),
                *sizes,
            ),
            mx.zeros((8,), mx.int32) if options.start is None else options.start,
            unused if k_norm is None else k_norm,
            unused if k_bias is None else k_bias,
            unused if options.v_scale is None else options.v_scale,
            *arrays,
        ],
        template=[
            ("D", options.dim),
            *(("NORM", k_norm is not None), ("BIAS", k_bias is not None), ("VSCALE", options.v_scale is not None)),
            *template,
        ],
        grid=grid,
        threadgroup=(threads, 1, 1),
        output_shapes=[options.out_shape, options.out_shape[:3]],
        output_dtypes=[options.out_dtype if rotates or options.rotation is None else mx.float32, mx.float32],
        shared_memory=memory,
    )
    if not rotates:
        return _attend.finish(out, lse, options)
    return (out, lse) if options.lse else out


def tiles(options: Options) -> int:
    """Tiles of queries in one head."""
    return -(-options.queries // ROWS)
