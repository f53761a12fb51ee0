"""The kernel of live caches on a CUDA machine: `python tests/h200_coded.py check|tiles|time|shapes|one [NAME]`.

check: the cases of tests/coded_cases.py, against float64. tiles [SHARD OF]: those of tensor cores and the long ones, or a share of them.
time: medians of one query a head, 32 query heads, 8 KV heads, 128 channels, beside MLX's float16 attention and a copy.
shapes: the same for other numbers of blocks.
one: a single call of each, for a profiler.
"""

import math
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx

from tests.coded_cases import CASES, LARGE, TILES, CodedCase, problem
from tests.h200_attend import median
from veloxquant_mlx.metal import _coded_tiles
from veloxquant_mlx.metal._coded_attend import coded_attend
from veloxquant_mlx.metal._coded_operand import CodedOperand

HEADS, KV_HEADS, DIM = 32, 8, 128
SHAPES = ((1, 131072), (8, 32768))
SETS = 3  # of inputs in turn: no call finds its own in the cache
Maker = Callable[[tuple[int, int, int]], CodedOperand]


def codes(heads: int, rows: int, width: int) -> mx.array:
    return mx.random.randint(0, 256, (heads, rows, width), mx.uint8)


def sides(*shape: int) -> mx.array:
    """Numbers of about 1, as bits of bfloat16."""
    return mx.random.uniform(0.5, 1.5, shape).astype(mx.bfloat16).view(mx.uint16)


def table(bits: int, second: int = 0, mean: bool = True) -> Maker:
    def make(shape: tuple[int, int, int]) -> CodedOperand:
        heads, rows, dim = shape
        signs = mx.where(mx.random.uniform(shape=(dim,)) < 0.5, -1.0, 1.0)
        each = [mx.random.normal((1 << b,)) for b in (bits, second) if b]
        parts = [codes(heads, rows, dim // 8 * b) for b in (bits, second) if b]
        return CodedOperand(
            "table",
            shape,
            (parts[0], parts[-1], sides(heads, rows)),
            (("BITS", bits), ("BITS2", second)),
            staged=mx.concatenate(each),
            mean=mx.random.normal((heads, dim)) if mean else None,
            matrix=mx.hadamard_transform(mx.eye(dim)) * signs,
            signs=signs,
        )

    return make


def affine(bits: int, per_token: bool) -> Maker:
    def make(shape: tuple[int, int, int]) -> CodedOperand:
        heads, rows, dim = shape
        side = (heads, rows, dim // 32) if per_token else (heads, -(-rows // 32), dim)
        constants = (("BITS", bits), ("GROUP", 32), ("TOKEN", per_token))
        return CodedOperand("affine", shape, (codes(heads, rows, dim // 8 * bits), sides(*side), sides(*side)), constants)

    return make


def words(sub: int, smooth: bool) -> Maker:
    def make(shape: tuple[int, int, int]) -> CodedOperand:
        heads, rows, dim = shape
        more = {"matrix": mx.hadamard_transform(mx.eye(dim)), "smooth": mx.random.uniform(0.5, 1, (heads, dim))} if smooth else {}
        vectors = mx.random.normal((256 * sub,))
        return CodedOperand("words", shape, (codes(heads, rows, dim // sub),), (("SUB", sub), ("BITS", 8)), staged=vectors, **more)

    return make


def places(sub: int) -> Maker:
    def make(shape: tuple[int, int, int]) -> CodedOperand:
        heads, rows, dim = shape
        each = mx.random.normal((heads, dim // sub, 256, sub)).astype(mx.float16)
        return CodedOperand("places", shape, (codes(heads, rows, dim // sub), each), (("SUB", sub), ("BITS", 8)))

    return make


def plain(shape: tuple[int, int, int]) -> CodedOperand:
    return CodedOperand("plain", shape, (mx.random.normal(shape).astype(mx.float16),), (("TYPE", mx.float16),))


# name: (keys, values, whether keys are before RoPE)
ROWS: dict[str, tuple[Maker, Maker, bool]] = {
    "rvq-4": (table(4), table(4), True),
    "rvq-4, keys as cached": (table(4), table(4), False),
    "rvq-2": (table(2), table(2), True),
    "rvq-2+2": (table(2, 2), table(2, 2), True),
    "rabitq": (table(1), table(4), True),
    "affine-4": (affine(4, False), affine(4, True), True),
    "affine-4, keys as cached": (affine(4, False), affine(4, True), False),
    "vecinfer-2": (words(4, True), words(4, False), False),
    "vecinfer-1": (words(8, True), words(8, False), False),
    "commvq-2:product": (places(4), table(4), True),
    "float16 rows": (plain, plain, False),
}


def arrays(operand: CodedOperand) -> list[mx.array]:
    return [*operand.arrays, *(x for x in (operand.staged, operand.mean, operand.matrix, operand.signs, operand.smooth) if x is not None)]


def make(name: str, batch: int, length: int) -> tuple[mx.array, CodedOperand, CodedOperand, tuple[int, int, int], mx.array | None]:
    keys, values, rope = ROWS[name]
    shape = (batch * KV_HEADS, length, DIM)
    k, v = keys(shape), values(shape)
    turn = mx.arange(length)[:, None] * mx.exp(-mx.arange(DIM // 2) * (math.log(1e4) / (DIM // 2)))
    angles = mx.concatenate([mx.cos(turn), mx.sin(turn)], axis=1) if rope else None
    q = mx.random.normal((batch * KV_HEADS, HEADS // KV_HEADS, DIM)) / math.sqrt(DIM)
    mx.eval(q, arrays(k), arrays(v), [] if angles is None else angles)
    mx.eval([] if not rope or k.pair_signs is None else k.pair_signs)
    return q, k, v, (0, 0, length), angles


def check(cases: tuple[CodedCase, ...]) -> int:
    failures = 0
    for case in cases:
        found = problem(case)
        failures += found is not None
        print(f"{'FAILED' if found else 'ok':7}{case.name}{': ' + found if found else ''}", flush=True)
    print(f"check: {len(cases) - failures} passed, {failures} failed", flush=True)
    return failures


def bandwidth() -> float:
    x = mx.random.normal((1 << 29,)).astype(mx.float16)
    mx.eval(x)
    copy = 2 * x.nbytes / median(lambda i, x=x: x + 1, 4, 7)[0]
    print(f"copy of {x.nbytes >> 20} MiB: {copy / 1e12:.2f} TB/s")
    return copy


def measure(names: list[str]) -> None:
    copy = bandwidth()
    for batch, length in SHAPES:
        kv = (batch, KV_HEADS, length, DIM)
        sets = [[mx.random.normal(shape).astype(mx.float16) for shape in ((batch, HEADS, 1, DIM), kv, kv)] for _ in range(2)]
        mx.eval(sets)
        base, _ = median(lambda i, sets=sets: mx.fast.scaled_dot_product_attention(*sets[i % 2], scale=DIM**-0.5), 48, 7)
        size = 4 * math.prod(kv)
        print(f"batch {batch}, {length} tokens\n  {'MLX, float16':28}{base * 1e6:9.1f} us {size / 1e6:8.1f} MB {size / base / copy:5.0%}")
        del sets
        for name in names:
            given = [make(name, batch, length) for _ in range(SETS)]
            seconds, handing = median(lambda i, given=given: coded_attend(*given[i % SETS]), 48, 5)
            size = sum(x.nbytes for one in given[0][1:3] for x in one.arrays)
            turns = 0 if given[0][4] is None else given[0][4].nbytes
            print(
                f"  {name:28}{seconds * 1e6:9.1f} us {size / 1e6:8.1f} MB {size / seconds / copy:5.0%}  angles {turns / 1e6:5.1f} MB"
                f"  (CPU {handing * 1e6:.1f} us) {base / seconds:5.2f} x float16",
                flush=True,
            )
            del given


def shapes(names: list[str]) -> None:
    """Not for use: how many blocks there should be, for (keys before RoPE, other keys)."""
    for name, (batch, length) in product(names, (*SHAPES, (1, 4096))):
        given = [make(name, batch, length) for _ in range(SETS)]
        for blocks in (66, 132, 264, 528):
            _coded_tiles.BLOCKS = blocks
            seconds, _ = median(lambda i, given=given: coded_attend(*given[i % SETS]), 24, 5)
            print(f"  {name:28}{batch} x {length:6} tokens, {blocks} blocks: {seconds * 1e6:8.1f} us", flush=True)
        del given


def main(words_: list[str]) -> int:
    names = words_[1:] or list(ROWS)
    if words_[:1] == ["tiles"]:
        shard, of = map(int, words_[1:] or ("0", "1"))
        return 1 if check((*TILES, *LARGE)[shard::of]) else 0
    if words_[:1] not in (["check"], ["time"], ["shapes"], ["one"]) or not set(names) <= set(ROWS):
        print(__doc__, file=sys.stderr)
        return 2
    if words_[0] == "check":
        return 1 if check((*TILES, *CASES, *LARGE)) else 0
    if words_[0] == "time":
        measure(names)
    elif words_[0] == "shapes":
        shapes(names)
    else:
        for name in names:
            mx.eval(coded_attend(*make(name, 1, 131072)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
