"""Rows of encoding and decoding by codec, of packing, and of moving keys to another RoPE.

`encode` is what a cache does with rows that leave its tail: keys back before RoPE where the codec stores them so, then both roles.
`decode` rebuilds both roles in the dtype that models run in, keys in the frame they are stored in.

Codes may lose |x - x^|^2 of at most c 2^(-2 bits) + 2^-12 of the rows' energy about their means, with bits without side information and
c = 4, or 8 in two stages: Gaussian rows lose 2^(-2 bits) at best and 2.7 times that with a scalar table. `affine` may lose
4 / (2^bits - 1)^2, as it spreads its points between extremes, `qjl` 1 / bits. Decoding is compared with NumPy's where that knows the codec.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
import numpy as np

from kvtool.bench import oracle
from kvtool.bench.attending import NAMES
from kvtool.bench.measuring import Case, Checked, Prepared
from kvtool.bench.rows import BASE, Rows, Size, blocks, head_rows, independently_decoded, parts_bytes, plan_of, rope_of, rows
from kvtool.bench.threads import in_threads
from veloxquant_mlx import metal
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.caches.coded import Growth
from veloxquant_mlx.codecs import Codec
from veloxquant_mlx.codecs._base import DTYPES, Shape
from veloxquant_mlx.codecs._rotated import RotatedCodec
from veloxquant_mlx.codecs._rotation import signs
from veloxquant_mlx.codecs.affine import Affine
from veloxquant_mlx.codecs.qjl import Qjl
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec

CODECS = ("rvq-4", "rvq-2", "affine-4", "rabitq", "rabitq-4", "tc-2.05")
PACKED_BITS = (1, 2, 4)
TARGET = 10000.0  # base that keys move to
SPARE = 2.0**-12


def encoding(size: Size, codecs: tuple[str, ...], dtype: mx.Dtype, seed: int) -> Iterator[Case]:
    """Rows of `encode`."""
    for bits in PACKED_BITS:
        yield Case("encode", f"pack {bits} bits", partial(_packing, bits, size, seed))
    fits = size.dim & (size.dim - 1) == 0 and 8 <= size.dim <= 1024
    needs = None if fits else f"D must be a power of two from 8 to 1024, and is {size.dim}"
    yield Case("encode", "rabitq_encode", partial(_sign_encoding, size, dtype, seed), needs=needs)
    yield Case("encode", "rvq_quant_pack, 4 bits", partial(_two_stage_packing, size, dtype, seed), needs=needs)
    for spec in codecs:
        plan_of(spec, size, seed)
        yield Case("encode", spec, partial(_encoding, spec, size, dtype, seed), spec=spec)


def decoding(size: Size, codecs: tuple[str, ...], dtype: mx.Dtype, seed: int) -> Iterator[Case]:
    """Rows of `decode`."""
    for bits in PACKED_BITS:
        yield Case("decode", f"unpack {bits} bits", partial(_unpacking, bits, size, seed))
    for spec in codecs:
        plan_of(spec, size, seed)
        yield Case("decode", spec, partial(_decoding, spec, size, dtype, seed), spec=spec)


def recoding(size: Size, dtype: mx.Dtype, seed: int) -> Iterator[Case]:
    """Rows of `recode`: keys from base BASE to TARGET, of the dtype that models run in here, and of caches in 16 bits."""
    # `mlx` has the float32 angles of the models themselves, off by 2e-8 a token of position from either base.
    ways = (
        ("crosskv_rope_recode", _by_kernel, 0.0),
        ("rotate, exact", _by_rotate("exact"), 0.0),
        ("rotate, mlx", _by_rotate("mlx"), 4e-8 * size.tokens),
    )
    for kind in dict.fromkeys((dtype, mx.float16, mx.bfloat16)):
        for name, recode, angle in ways:
            yield Case("recode", f"{name} {NAMES[kind]}", partial(_recoding, recode, angle, size, kind, seed))


# --- bits


def _codes(bits: int, size: Size, seed: int) -> mx.array:
    """As many codes as there are values, one a byte."""
    codes = mx.array(np.random.default_rng([seed, 4]).integers(0, 1 << bits, size.values // 8 * 8, np.uint8))
    mx.eval(codes)
    return codes


def _packing(bits: int, size: Size, seed: int) -> Prepared:
    codes = _codes(bits, size, seed)

    def check(out: mx.array) -> Checked:
        got = oracle.unpacked(out, bits, codes.size)
        return Checked("the codes, unpacked by NumPy", float((got != np.array(codes)).sum()), 0.0)

    moved = codes.size + codes.size * bits // 8
    return Prepared(lambda x: metal.turboquant_bit_pack(x, bits), check, moved, codes.size, float(bits), given=(codes,))


def _unpacking(bits: int, size: Size, seed: int) -> Prepared:
    codes = _codes(bits, size, seed)
    planes = (np.array(codes)[:, None] >> np.arange(bits)) & 1
    packed = mx.array(np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little"))

    def check(out: mx.array) -> Checked:
        return Checked("the codes, packed by NumPy", float((np.array(out) != np.array(codes)).sum()), 0.0)

    moved = codes.size + packed.nbytes
    return Prepared(lambda x: metal.turboquant_bit_unpack(x, codes.size, bits), check, moved, codes.size, float(bits), given=(packed,))


def _key_rows(size: Size, dtype: mx.Dtype, seed: int) -> mx.array:
    """(B H S, D)."""
    keys = rows(size, dtype, seed).k.reshape(-1, size.dim)
    mx.eval(keys)
    return keys


def _in_rows(arrays: tuple[mx.array, ...], size: Size) -> Iterator[tuple[np.ndarray, ...]]:
    """Arrays of rows, for each head of a sequence."""
    for at in range(0, arrays[0].shape[0], size.tokens):
        yield tuple(oracle.held(array[at : at + size.tokens]) for array in arrays)


def _sign_encoding(size: Size, dtype: mx.Dtype, seed: int) -> Prepared:
    keys, diag = _key_rows(size, dtype, seed), mx.array(signs(size.dim, seed)).astype(mx.float32)
    turn = oracle.rotation(size.dim, seed).T

    def check(out: tuple[mx.array, mx.array]) -> Checked:
        """How far a coordinate with another sign is from 0, and a magnitude from its own, beside the row's own magnitude."""

        def worst(x: np.ndarray, codes: np.ndarray, magnitude: np.ndarray) -> float:
            y = oracle.to_numpy(x) @ turn
            size_of = np.abs(y).mean(axis=1)
            off = np.where((oracle.unpacked(codes, 1, size.dim) == 1) != (y >= 0), np.abs(y), 0.0).max(axis=1)
            return float((np.maximum(off, np.abs(oracle.to_numpy(magnitude) - size_of)) / size_of).max())

        found = in_threads(worst, _in_rows((keys, *out), size), 48 * size.tokens * size.dim)
        return Checked("float64 rotation", max(found), 64 * oracle.EPS[mx.float32])

    stored = keys.shape[0] * (size.dim // 8 + 4)
    moved, bits = keys.nbytes + stored, 8 * stored / keys.size
    return Prepared(lambda x: metal.rabitq_encode(x, diag), check, moved, keys.size, bits, given=(keys,))


def _two_stage_packing(size: Size, dtype: mx.Dtype, seed: int) -> Prepared:
    keys, table = _key_rows(size, dtype, seed), np.linspace(-2, 2, 16, dtype=np.float32)
    edges = (table[1:] + table[:-1]) / 2
    tables = [mx.array(x) for x in (table, edges, edges / 4)]

    def check(out: tuple[mx.array, mx.array]) -> Checked:
        def wrong(x: np.ndarray, *stages: np.ndarray) -> int:
            first = np.searchsorted(edges, x)
            want = (first, np.searchsorted(edges / 4, x - table[first]))
            got = (oracle.unpacked(stage.view(np.uint8), 4, size.dim) for stage in stages)
            return sum(int((a != b).sum()) for a, b in zip(got, want, strict=True))

        found = in_threads(wrong, _in_rows((keys, *out), size), 64 * size.tokens * size.dim)
        return Checked("codes of both stages in NumPy", float(sum(found)), 0.0)

    moved = keys.nbytes + keys.size
    return Prepared(lambda x: metal.rvq_quant_pack(x, *tables, 4), check, moved, keys.size, 8.0, given=(keys,))


# --- codecs


def _encoding(spec: str, size: Size, dtype: mx.Dtype, seed: int) -> Prepared:
    plan, given = plan_of(spec, size, seed), rows(size, dtype, seed)
    growth = Growth(plan.k, plan.v, rope_of(plan, size.dim))
    known = blocks(spec, size, dtype, seed)
    sequences = [(given.k[b], given.v[b]) for b in range(size.batch)]
    mx.eval(sequences)

    def run() -> tuple[Block, ...]:
        return tuple(growth.encoded(k, v, 0) for k, v in sequences)

    stored = parts_bytes(known)
    moved = stored + given.k.nbytes + given.v.nbytes
    against = f"the rows, decoded {'in NumPy' if independently_decoded(known) else 'by the codec itself'}"

    def check(made: tuple[Block, ...]) -> Checked:
        return lost(dict(zip("kv", head_rows(made), strict=True)), made, given, against)

    return Prepared(run, check, moved, size.values, 8 * stored / size.values)


def lost(read: dict[str, oracle.HeadRows], made: tuple[Block, ...], given: Rows, against: str) -> Checked:
    """What codes have lost of the energy of the rows about their means, over its limit: the larger of both roles.

    Args:
        read: rows of a (sequence, head), keys as cached.
        made: the codes that they come from.
        given: the rows that were encoded.
    """
    worst = 0.0
    for role, x in (("k", given.k), ("v", given.v)):
        coded = getattr(made[0], role)
        error = energy = 0.0
        for b in range(x.shape[0]):
            for h in range(x.shape[1]):
                own = oracle.to_numpy(x[b, h])
                error += float(np.square(read[role](b, h)() - own).sum())
                energy += float(np.square(own - own.mean(axis=0)).sum())
        worst = max(worst, error / energy / allowed(coded.codec, coded.shape))
    return Checked(f"{against}: lost energy over its limit", worst, 1.0)


def allowed(codec: Codec, shape: Shape) -> float:
    """Share of the rows' energy about their means that codes of rows of that shape may lose."""
    layout = codec.layout(shape, mx.float32)
    codes = [DTYPES[dtype].size * math.prod(size) for name, (dtype, size) in layout.items() if name.startswith("codes")]
    if isinstance(codec, Raw) or not codes:
        return SPARE
    bits = 8 * sum(codes) / math.prod(shape)
    if isinstance(codec, Qjl):
        return 1 / bits
    if isinstance(codec, Affine):
        return 4 / (2**codec.bits - 1) ** 2 + SPARE
    return (8 if isinstance(codec, RotatedCodec) and len(codec.codebooks) == 2 else 4) * 2.0 ** (-2 * bits) + SPARE


def _decoding(spec: str, size: Size, dtype: mx.Dtype, seed: int) -> Prepared:
    made = blocks(spec, size, dtype, seed)

    def run() -> list[list[mx.array]]:
        return [_decoded(block, dtype) for block in made]

    stored = parts_bytes(made)
    moved = stored + size.values * dtype.size
    return Prepared(run, lambda outs: _same(outs, made, dtype, size, seed), moved, size.values, 8 * stored / size.values)


def _decoded(block: Block, dtype: mx.Dtype) -> list[mx.array]:
    k = block.k.codec.decode(block.k.parts, block.k.shape, mx.float32 if block.v.codec.needs else dtype)
    near = ({"k": k},) if block.v.codec.needs else ()
    return [k.astype(dtype), block.v.codec.decode(block.v.parts, block.v.shape, dtype, *near)]


def _same(outs: list[list[mx.array]], made: tuple[Block, ...], dtype: mx.Dtype, size: Size, seed: int) -> Checked:
    """Decoded rows against NumPy's; of codecs that NumPy does not know, against the rows that were encoded."""
    if not independently_decoded(made):
        keys = [_as_cached(block, out[0]) for block, out in zip(made, outs, strict=True)]
        read: dict[str, oracle.HeadRows] = {
            "k": lambda b, h: partial(oracle.to_numpy, oracle.held(keys[b][h])),
            "v": lambda b, h: partial(oracle.to_numpy, oracle.held(outs[b][1][h])),
        }
        return lost(read, made, rows(size, dtype, seed), "the rows that were encoded")
    error = 0.0
    for block, out in zip(made, outs, strict=True):
        for role, got in zip("kv", out, strict=True):
            coded = getattr(block, role)
            for h in range(coded.shape[0]):
                want = oracle.decoder(coded.codec, coded.parts, coded.shape, h)()
                error = max(error, oracle.relative(oracle.to_numpy(got[h]), want))
    return Checked("rows decoded in NumPy", error, oracle.EPS[dtype] + 16 * oracle.EPS[mx.float32])


def _as_cached(block: Block, k: mx.array) -> mx.array:
    return k if block.k.rope is None else rotate(k, np.arange(block.count), None, block.k.rope)


# --- RoPE


def _by_kernel(keys: mx.array, positions: mx.array) -> mx.array:
    return metal.crosskv_rope_recode(keys, positions, BASE, TARGET)


def _by_rotate(method: str) -> Callable[[mx.array, mx.array], mx.array]:
    def run(keys: mx.array, positions: mx.array) -> mx.array:
        source, target = (RopeSpec("default", keys.shape[-1], base=base) for base in (BASE, TARGET))
        return rotate(keys, positions, source, target, method=method)

    return run


def _recoding(recode: Callable[[mx.array, mx.array], mx.array], angle: float, size: Size, dtype: mx.Dtype, seed: int) -> Prepared:
    k = rows(size, dtype, seed).k
    keys, positions = k.reshape(-1, size.tokens, size.dim), mx.arange(size.tokens)
    mx.eval(keys, positions)
    at = np.arange(size.tokens)[:, None] * (_frequencies(size.dim, TARGET) - _frequencies(size.dim, BASE))
    turn = np.cos(at), np.sin(at)

    def check(out: mx.array) -> Checked:
        error = max(oracle.relative(oracle.to_numpy(out[i]), oracle.turned(oracle.to_numpy(keys[i]), turn)) for i in range(keys.shape[0]))
        return Checked("float64 rotation", error, oracle.EPS[dtype] + 4 * oracle.EPS[mx.float32] + angle)

    # Either makes tables in NumPy as it is called, which belongs to the time.
    return Prepared(lambda: recode(keys, positions), check, 2 * keys.nbytes, keys.size)


def _frequencies(dim: int, base: float) -> np.ndarray:
    return base ** (-np.arange(dim // 2) * 2.0 / dim)
