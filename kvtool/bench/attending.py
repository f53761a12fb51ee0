"""Rows of attention: to codes as generation reads them, by the kernel functions that take the same codes, and by others.

`codes` is `Fetched.attend` of the caches that generation uses, one sequence after another; all rows are codes. Kernel functions get the
codes as `functions` says. Others start from rows in the dtype that models run in here (float32 on a Linux CPU, else float16), or the one
in their name. Keys are as cached, unless a codec stores them before RoPE and turns them back itself. Rows of several queries are causal.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from kvtool.bench import oracle
from kvtool.bench.functions import FUNCTIONS, PREFILL_DIM, kernels, prefills_in_halves
from kvtool.bench.measuring import Case, Checked, Prepared
from kvtool.bench.rows import Size, blocks, head_rows, independently_decoded, parts_bytes, plan_of, rows
from kvtool.bench.timing import arrays
from veloxquant_mlx import metal
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.caches.coded import Fetched
from veloxquant_mlx.metal._backend import backend

FAMILY, REFERENCE = "attend", "sdpa float16"
CODECS = (
    *("rvq-4", "rvq-2", "affine-4", "rabitq", "tc-2.05"),
    *("rvq-4,frame=post", "affine-4,frame=post", "rabitq,frame=post"),  # keys as cached: no rotation at each look
    *("k=rvq-2+2:nocenter,v=rvq-4:nocenter", "k=rabitq:nocenter,v=rvq-4:nocenter"),  # without means, as kernel functions take them
    *("vecinfer-2", "commvq-2", "qjl"),  # codewords for several entries, signs of projections
)
WITH_GPU = ("vecinfer-1",)  # whose codes a kernel function takes; without a GPU that is a minute of MLX operations
MLX_BITS, TORCH = (8, 4), (2, 5)
GIVEN = "float64 attention to the rows given"
NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


def default_codecs() -> tuple[str, ...]:
    """What is measured where no codec is named."""
    return CODECS if backend() == "cpu" else (*CODECS, *WITH_GPU)


def cases(size: Size, codecs: tuple[str, ...], dtype: mx.Dtype, seed: int) -> Iterator[Case]:
    """Every row; those that cannot run say why."""
    yield _plain(REFERENCE, size, mx.float16, seed, None)
    yield _plain("sdpa float32", size, mx.float32, seed, REFERENCE)
    for bits in MLX_BITS:
        yield _mlx_lm(bits, size, dtype, seed)
    yield _torch(size, dtype, seed)
    if size.queries > 1:
        yield _flash(size, dtype, seed)
    for spec in codecs:
        plan = plan_of(spec, size, seed)
        yield Case(FAMILY, f"{spec}: codes", partial(_codes, spec, size, dtype, seed), REFERENCE, spec)
        yield Case(FAMILY, f"{spec}: decode, sdpa", partial(_decoding, spec, size, dtype, seed), REFERENCE, spec)
        for function in kernels(plan, size):
            yield Case(FAMILY, f"{spec}: {function}", partial(_kernel, function, spec, size, dtype, seed), REFERENCE, spec)


# --- codes


def _codes(spec: str, size: Size, dtype: mx.Dtype, seed: int) -> Prepared:
    made, q = blocks(spec, size, dtype, seed), rows(size, dtype, seed).q
    empty = mx.zeros((size.kv_heads, 0, size.dim), dtype)
    fetched = [Fetched((block,), empty, empty, 0) for block in made]
    mask = "causal" if size.queries > 1 else None
    for block in made:
        assert block.k.reader.shape == block.k.shape and block.v.reader.shape == block.v.shape  # made before the time starts

    def run() -> mx.array:
        outs = [one.attend(q[b : b + 1], size.scale, mask) for b, one in enumerate(fetched)]
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    return _attention(run, size, q, made, mx.float32)


def _decoding(spec: str, size: Size, dtype: mx.Dtype, seed: int) -> Prepared:
    made, q = blocks(spec, size, dtype, seed), rows(size, dtype, seed).q

    def run() -> mx.array:
        both = [block.rows() for block in made]
        k, v = (mx.stack([pair[i] for pair in both]).astype(dtype) for i in (0, 1))
        return _sdpa(q, k, v, size)

    return _attention(run, size, q, made, dtype, between=2 * size.values * dtype.size)


def _attention(
    run: Callable[..., mx.array],
    size: Size,
    q: mx.array,
    made: tuple[Block, ...],
    compute: mx.Dtype,
    query: Callable[[np.ndarray], np.ndarray] | None = None,
    between: int = 0,
    halves: str = "",
    weights: mx.Dtype = mx.float32,
) -> Prepared:
    """A row that attends to codes.

    Args:
        between: bytes that it writes and reads on the way.
        halves: roles, of "kv", whose tables it rounds to halves; weights: what it rounds weights to.
    """
    keys, values = head_rows(made, halves)
    against = oracle.INDEPENDENT if independently_decoded(made) else oracle.OWN
    stored = parts_bytes(made)
    check = _check(size, q, keys, values, compute, against, query, weights)
    return Prepared(run, check, stored + between + 2 * q.nbytes, size.values, 8 * stored / size.values)


def _check(
    size: Size,
    q: mx.array,
    keys: oracle.HeadRows,
    values: oracle.HeadRows,
    compute: mx.Dtype,
    against: str,
    query: Callable[[np.ndarray], np.ndarray] | None = None,
    weights: mx.Dtype = mx.float32,
) -> Callable[[Any], Checked]:
    """A check of attention to rows, whose oracle is computed once, when it is first needed.

    Args:
        compute: what scores are computed in.
        query: what a function makes of the queries before it scores them, or None.
        weights: what the weights are rounded to.
    """
    known: list[oracle.Attended] = []

    def check(out: Any) -> Checked:
        if not known:
            own = oracle.to_numpy(q) if query is None else query(oracle.to_numpy(q))
            known.append(oracle.attention(own * size.scale, keys, values, size.kv_heads, size.tokens))
        return oracle.attention_check(known[0], size.tokens, compute, against, weights)(out)

    return check


# --- kernel functions


def _kernel(function: str, spec: str, size: Size, dtype: mx.Dtype, seed: int) -> Prepared:
    made, q = blocks(spec, size, dtype, seed, "post"), rows(size, dtype, seed).q
    kernel = FUNCTIONS[function](plan_of(spec, size, seed), made, size, dtype)
    asked, run = (q, lambda q, own: kernel.run(kernel.ask(q), own)) if backend() == "cpu" else (kernel.ask(q), kernel.run)
    mx.eval(asked)
    prepared = _attention(run, size, q, made, mx.float32, kernel.query, halves=kernel.halves, weights=kernel.weights)
    moved = sum(array.nbytes for array in arrays((asked, kernel.operands))) + q.nbytes
    return replace(prepared, given=(asked, kernel.operands), moved=moved)


# --- others


def _sdpa(q: mx.array, k: mx.array, v: mx.array, size: Size) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=size.scale, mask="causal" if size.queries > 1 else None)


def _given(
    run: Callable[..., Any], size: Size, qkv: tuple[mx.array, mx.array, mx.array], compute: mx.Dtype, weights: mx.Dtype = mx.float32
) -> Prepared:
    """A row that attends to rows as they are; `weights` is what it rounds weights to."""
    q, k, v = qkv
    heads = [lambda b, h, x=x: partial(oracle.to_numpy, oracle.held(x[b, h])) for x in (k, v)]
    check = _check(size, q, heads[0], heads[1], compute, GIVEN, weights=weights)
    return Prepared(run, check, k.nbytes + v.nbytes + 2 * q.nbytes, size.values, 8.0 * k.dtype.size, given=qkv)


def _in_dtype(size: Size, dtype: mx.Dtype, seed: int) -> tuple[mx.array, mx.array, mx.array]:
    """q, k, v of the run in a dtype."""
    made = rows(size, dtype, seed)
    return made.q, made.k, made.v


def _plain(name: str, size: Size, dtype: mx.Dtype, seed: int, reference: str | None) -> Case:
    def prepare() -> Prepared:
        return _given(lambda q, k, v: _sdpa(q, k, v, size), size, _in_dtype(size, dtype, seed), dtype)

    return Case(FAMILY, name, prepare, reference)


def _flash(size: Size, dtype: mx.Dtype, seed: int) -> Case:
    def prepare() -> Prepared:
        scale, weights = mx.array([size.scale], mx.float32), dtype if prefills_in_halves(size, dtype) else mx.float32

        def run(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            return metal.flash_prefill_attend(q, k, v, scale, out_dtype=dtype)

        return _given(run, size, _in_dtype(size, dtype, seed), mx.float32, weights)

    fits = size.dim % 8 == 0 and size.dim <= PREFILL_DIM
    needs = None if fits else f"D must be a multiple of 8 and at most {PREFILL_DIM}, and is {size.dim}"
    return Case(FAMILY, f"flash_prefill_attend {NAMES[dtype]}", prepare, REFERENCE, needs=needs)


def _mlx_lm(bits: int, size: Size, dtype: mx.Dtype, seed: int) -> Case:
    group = next((group for group in (64, 32) if size.dim % group == 0), 0)

    def prepare() -> Prepared:
        q, k, v = _in_dtype(size, dtype, seed)
        keys, values = (mx.quantize(x, group_size=group, bits=bits) for x in (k, v))
        mx.eval(keys, values)
        mask: Any = "causal" if size.queries > 1 else None

        def run(q: mx.array, keys: Any, values: Any) -> mx.array:
            own = mx.stop_gradient(q)  # it multiplies its queries in place
            return quantized_scaled_dot_product_attention(own, keys, values, size.scale, mask, group_size=group, bits=bits)

        heads = [lambda b, h, x=x: oracle.mlx_decoder(x, bits, group, (b, h)) for x in (keys, values)]
        check = _check(size, q, heads[0], heads[1], dtype, oracle.INDEPENDENT)
        stored = sum(part.nbytes for triplet in (keys, values) for part in triplet)
        return Prepared(run, check, stored + 2 * q.nbytes, size.values, 8 * stored / size.values, given=(q, keys, values))

    needs = None if group else f"mlx quantises groups of 32 or 64, and D is {size.dim}"
    return Case(FAMILY, f"mlx-lm {bits} bits", prepare, REFERENCE, needs=needs)


def _torch(size: Size, dtype: mx.Dtype, seed: int) -> Case:
    """PyTorch's attention on its fastest device, where it is installed."""
    name = f"torch sdpa {NAMES[dtype]}"
    if importlib.util.find_spec("torch") is None:
        return Case(FAMILY, name, _unprepared, REFERENCE, needs="torch is not installed")
    torch: Any = import_module("torch")
    if (found := tuple(map(int, torch.__version__.split(".")[:2]))) < TORCH:
        return Case(FAMILY, name, _unprepared, REFERENCE, needs=f"torch must be {TORCH} or later for grouped queries, and is {found}")
    place = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.cuda.get_device_name() if place == "cuda" else None
    finish = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize, "cpu": lambda: None}[place]

    def prepare() -> Prepared:
        q, k, v = _in_dtype(size, dtype, seed)
        tq, tk, tv = (torch.from_numpy(np.array(x)).to(place) for x in (q, k, v))
        # It stands a causal mask at the upper left, mlx at the lower right.
        every = torch.ones(size.queries, size.tokens, dtype=torch.bool, device=place)
        mask = None if size.queries == 1 else every.tril(size.tokens - size.queries)

        def run() -> Any:
            with torch.no_grad():
                out = torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, attn_mask=mask, scale=size.scale, enable_gqa=True)
            finish()
            return out

        prepared = _given(run, size, (q, k, v), dtype)
        return replace(prepared, check=lambda out: prepared.check(out.cpu().numpy()), given=())

    return Case(FAMILY, name, prepare, REFERENCE, backend=f"torch {place}", device=device)


def _unprepared() -> Prepared:
    raise RuntimeError("[bench] a row that cannot run was run.")
