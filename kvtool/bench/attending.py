"""Rows of attention: to codes as generation reads them, by the kernel functions that take the same codes, and by others.

`codes` is `Fetched.attend` of the caches that generation uses, one sequence after another; all rows are codes. A kernel function gets the
very parts of a codec; what it does to a query (rotating it) and to its output is in its time. Others start from rows in the dtype that
models run in here (float32 on a Linux CPU, else float16), or the one in their name. Keys are as cached, unless a codec stores them before
RoPE and turns them back itself. Rows of several queries are causal.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from kvtool.bench import oracle
from kvtool.bench.measuring import Case, Checked, Prepared
from kvtool.bench.rows import Size, blocks, head_rows, independently_decoded, parts_bytes, plan_of, rows
from veloxquant_mlx import metal
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.caches.coded import Fetched
from veloxquant_mlx.codecs import CodecPlan
from veloxquant_mlx.codecs._rotation import matrix
from veloxquant_mlx.codecs.affine import Affine
from veloxquant_mlx.codecs.rabitq import Rabitq
from veloxquant_mlx.codecs.rvq import Rvq
from veloxquant_mlx.codecs.vecinfer import VecInfer
from veloxquant_mlx.metal._attend import hadamard_matrix
from veloxquant_mlx.metal._backend import backend
from veloxquant_mlx.metal.fused_sdpa import supports_shape

FAMILY, REFERENCE = "attend", "sdpa float16"
CODECS = (
    *("rvq-4", "rvq-2", "affine-4", "rabitq", "tc-2.05"),
    *("rvq-4,frame=post", "affine-4,frame=post", "rabitq,frame=post"),  # keys as cached: no rotation at each look
    *("k=rvq-2+2:nocenter,v=rvq-4:nocenter", "k=rabitq:nocenter,v=rvq-4:nocenter"),  # without means, as kernel functions take them
    *("vecinfer-2", "commvq-2", "qjl"),  # codewords for several entries, signs of projections
)
WITH_GPU = ("vecinfer-1",)  # whose codes a kernel function takes; without a GPU that is a minute of MLX operations
MLX_BITS, TORCH = (8, 4), (2, 5)
PREFILL_DIM = 128  # largest D of the prefill kernels
GIVEN = "float64 attention to the rows given"
NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}

# Of a call, from its codes: (run, what it makes of queries or None)
Kernel = tuple[Callable[[mx.array], mx.array], Callable[[np.ndarray], np.ndarray] | None]


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
    run: Callable[[], mx.array],
    size: Size,
    q: mx.array,
    made: tuple[Block, ...],
    compute: mx.Dtype,
    query: Callable[[np.ndarray], np.ndarray] | None = None,
    between: int = 0,
) -> Prepared:
    """A row that attends to codes; `between` are bytes that it writes and reads on the way."""
    keys, values = head_rows(made)
    against = oracle.INDEPENDENT if independently_decoded(made) else oracle.OWN
    stored = parts_bytes(made)
    check = _check(size, q, keys, values, compute, against, query)
    return Prepared(run, check, stored + between + 2 * q.nbytes, size.values, 8 * stored / size.values)


def _check(
    size: Size,
    q: mx.array,
    keys: oracle.HeadRows,
    values: oracle.HeadRows,
    compute: mx.Dtype,
    against: str,
    query: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Callable[[Any], Checked]:
    """A check of attention to rows, whose oracle is computed once, when it is first needed."""
    known: list[tuple[np.ndarray, float]] = []

    def check(out: Any) -> Checked:
        if not known:
            known.append(oracle.attention(oracle.to_numpy(q) * size.scale, keys, values, size.kv_heads, query))
        return oracle.attention_check(*known[0], size.tokens, compute, against)(out)

    return check


# --- kernel functions


def _kernel(function: str, spec: str, size: Size, dtype: mx.Dtype, seed: int) -> Prepared:
    made, q = blocks(spec, size, dtype, seed, "post"), rows(size, dtype, seed).q
    run, query = _KERNELS[function](plan_of(spec, size, seed), made, size, dtype)
    return _attention(lambda: run(q), size, q, made, mx.float32, query)


def _joined(made: tuple[Block, ...], role: str, part: str) -> mx.array:
    """A part of all sequences, with the batch axis in front."""
    whole = mx.stack([getattr(block, role).parts[part] for block in made])
    mx.eval(whole)
    return whole


def _scalar(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> Kernel:
    parts = [_joined(made, role, part) for role in "kv" for part in ("codes", "scale", "zero")]
    bits = {"packed": "lsb8", "k_bits": plan.k.bits, "v_bits": plan.v.bits}
    causal = size.queries > 1
    return lambda q: metal.scalar_fused_decode_attend(q, *parts, plan.k.group, size.scale, causal=causal, out_dtype=dtype, **bits), None


def _two_stage(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> Kernel:
    first, second, norm = (_joined(made, "k", part) for part in ("codes1", "codes2", "scale"))
    codes, scale = (_joined(made, "v", part) for part in ("codes", "scale"))
    tables = [mx.array(table) for table in plan.k.codebooks]
    words = mx.array(plan.v.codebooks[0])[:, None]
    turn, back = matrix(size.dim, plan.k.seed).swapaxes(0, 1), matrix(size.dim, plan.v.seed)
    more = {"k_norm": norm, "v_scale": scale, "out_rotation": back, "packed": "lsb8", "causal": size.queries > 1, "out_dtype": dtype}
    b1, b2 = plan.k.bits

    def run(q: mx.array) -> mx.array:
        turned = mx.matmul(q.astype(mx.float32), turn)
        return metal.turboquant_fused_rvq_decode_attend(turned, first, second, *tables, codes, words, b1, b2, plan.v.bits[0], **more)

    return run, None


def _signs(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> tuple[Any, ...]:
    """What both functions for 1-bit keys take."""
    bits, magnitude = (_joined(made, "k", part) for part in ("codes", "scale"))
    codes, scale = (_joined(made, "v", part) for part in ("codes", "scale"))
    operands = (bits, magnitude.astype(mx.float32), mx.zeros(magnitude.shape), codes, mx.array(plan.v.codebooks[0]))
    mx.eval(operands)
    turn, back = matrix(size.dim, plan.k.seed).swapaxes(0, 1), matrix(size.dim, plan.v.seed)
    return operands, turn, {"v_scale": scale, "out_rotation": back, "packed": "lsb8", "causal": size.queries > 1, "out_dtype": dtype}


def _hamming(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> Kernel:
    """Scores the signs of a query: z ~ mean |z| sign z. The oracle's query is that one, back in the keys' frame."""
    operands, turn, more = _signs(plan, made, size, dtype)
    rotation = oracle.rotation(size.dim, plan.k.seed)

    def run(q: mx.array) -> mx.array:
        z = mx.matmul(q.astype(mx.float32), turn)
        return metal.rabitq_fused_attend(z, mx.mean(mx.abs(z), axis=-1) * size.scale, *operands, **more)

    def query(q: np.ndarray) -> np.ndarray:
        z = q @ rotation.T
        return np.where(z >= 0, 1.0, -1.0) * np.abs(z).mean(axis=-1, keepdims=True) @ rotation

    return run, query


def _prefill(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> Kernel:
    operands, turn, more = _signs(plan, made, size, dtype)
    scale = mx.array([size.scale], mx.float32)
    return lambda q: metal.rabitq_prefill_attend(mx.matmul(q.astype(mx.float32), turn), scale, *operands, **more), None


def _words(plan: Any, made: tuple[Block, ...], size: Size, dtype: mx.Dtype) -> Kernel:
    """One table for all heads of a sequence, and one set of tables for a call: a batch has as many calls."""
    names = (("k", "codes"), ("k", "words"), ("v", "codes"), ("v", "words"))
    operands = [[getattr(block, role).parts[part][None if part == "codes" else ...] for role, part in names] for block in made]
    turn, smooth = hadamard_matrix(size.dim), [_smoothing(block, size) if plan.k.smooth else None for block in made]

    def run(q: mx.array) -> mx.array:
        outs = []
        for b, (own, by) in enumerate(zip(operands, smooth, strict=True)):
            z = q[b : b + 1].astype(mx.float32)
            z = z if by is None else mx.matmul(z * by, turn)
            outs.append(metal.metal_fused_sdpa(z, *own, size.scale, causal=size.queries > 1, packed="lsb8", out_dtype=dtype))
        return outs[0] if len(outs) == 1 else mx.concatenate(outs)

    return run, None


def _smoothing(block: Block, size: Size) -> mx.array:
    """What queries are multiplied by, (1, H_q, 1, D)."""
    return mx.repeat(block.k.parts["smooth"].astype(mx.float32), size.groups, axis=0)[None, :, None]


_KERNELS: dict[str, Callable[[Any, tuple[Block, ...], Size, mx.Dtype], Kernel]] = {
    "scalar_fused_decode_attend": _scalar,
    "turboquant_fused_rvq_decode_attend": _two_stage,
    "rabitq_fused_attend": _hamming,
    "rabitq_prefill_attend": _prefill,
    "metal_fused_sdpa": _words,
}


# --- others


def _sdpa(q: mx.array, k: mx.array, v: mx.array, size: Size) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=size.scale, mask="causal" if size.queries > 1 else None)


def _given(run: Callable[[], Any], size: Size, q: mx.array, k: mx.array, v: mx.array, compute: mx.Dtype) -> Prepared:
    """A row that attends to rows as they are."""
    heads = [lambda b, h, x=x: oracle.to_numpy(x[b, h]) for x in (k, v)]
    check = _check(size, q, heads[0], heads[1], compute, GIVEN)
    return Prepared(run, check, k.nbytes + v.nbytes + 2 * q.nbytes, size.values, 8.0 * k.dtype.size)


def _in_dtype(size: Size, dtype: mx.Dtype, seed: int) -> list[mx.array]:
    """q, k, v of the run in a dtype; rounded from float32."""
    made = rows(size, mx.float32, seed)
    cast = [x.astype(dtype) for x in (made.q, made.k, made.v)]
    mx.eval(cast)
    return cast


def _plain(name: str, size: Size, dtype: mx.Dtype, seed: int, reference: str | None) -> Case:
    def prepare() -> Prepared:
        q, k, v = _in_dtype(size, dtype, seed)
        return _given(lambda: _sdpa(q, k, v, size), size, q, k, v, dtype)

    return Case(FAMILY, name, prepare, reference)


def _flash(size: Size, dtype: mx.Dtype, seed: int) -> Case:
    def prepare() -> Prepared:
        q, k, v = _in_dtype(size, dtype, seed)
        scale = mx.array([size.scale], mx.float32)
        return _given(lambda: metal.flash_prefill_attend(q, k, v, scale, out_dtype=dtype), size, q, k, v, mx.float32)

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

        def run() -> mx.array:
            own = mx.stop_gradient(q)  # it multiplies its queries in place
            return quantized_scaled_dot_product_attention(own, keys, values, size.scale, mask, group_size=group, bits=bits)

        heads = [lambda b, h, x=x: oracle.mlx_decoded(x, bits, group, (b, h)) for x in (keys, values)]
        check = _check(size, q, heads[0], heads[1], dtype, oracle.INDEPENDENT)
        stored = sum(part.nbytes for triplet in (keys, values) for part in triplet)
        return Prepared(run, check, stored + 2 * q.nbytes, size.values, 8 * stored / size.values)

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

        prepared = _given(run, size, q, k, v, dtype)
        return Prepared(run, lambda out: prepared.check(out.cpu().numpy()), prepared.moved, prepared.values, prepared.bits)

    return Case(FAMILY, name, prepare, REFERENCE, backend=f"torch {place}", device=device)


def _unprepared() -> Prepared:
    raise RuntimeError("[bench] a row that cannot run was run.")
