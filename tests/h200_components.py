"""The kernels of tc and of commvq-N:additive on a CUDA machine: `python tests/h200_components.py check [WORD]|time|parts|one`.

check: the cases of tests/component_cases.py and the long ones (whose names have WORD), against float64.
time: medians of one query a head, 32 query heads, 8 KV heads, 128 channels, 2.05 bits, beside MLX's float16 attention and a copy: the
    kernels alone, then a block of a live cache by them and by the MLX operations that they stand in for.
parts: each kernel by itself, for numbers of components that have bits.
one: a single call of each, for a profiler.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mlx.core as mx
import numpy as np

from kvtool.bench.rows import Size
from kvtool.bench.rows import blocks as encoded_blocks
from tests.component_cases import CASES, LARGE, TILES, problem
from tests.h200_attend import median
from tests.h200_coded import DIM, HEADS, KV_HEADS, SHAPES, bandwidth, table
from veloxquant_mlx.caches import blocks
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.caches.visibility import Visibility
from veloxquant_mlx.metal import _component_attend
from veloxquant_mlx.metal._coded_operand import CodedOperand
from veloxquant_mlx.metal._component_attend import component_attend
from veloxquant_mlx.metal._component_operand import ComponentKeys, Components, ComponentValues, Quantisers

SETS = 3  # of inputs in turn: no call finds its own in the cache
USED = 70  # components of 128 that have bits at 2.05 bits a value, as in SmolLM2
ENCODED = 4096  # tokens of a block that are encoded; their codes repeat


def components(length: int, bits: np.ndarray) -> Components:
    """Random codes; (H, n) bits."""
    blocks_, every = -(-length // 32), bits.reshape(-1)
    codes = mx.random.randint(0, 256, (1, blocks_, 4 * int(every.sum())), mx.uint8)
    tables = {width: np.sort(np.random.default_rng(width).normal(size=1 << width)).astype(np.float32) for width in set(every.tolist())}
    first = np.arange(KV_HEADS + 1) * bits.shape[1]
    quantisers = Quantisers.of(first, every, [tables[width] for width in every.tolist()])
    return Components.of((KV_HEADS, length, DIM), codes, quantisers)


def additive(length: int) -> tuple:
    """Arguments of a call: keys of commvq-2:additive, values of rvq-4."""
    q, keys, _, rows, angles = make(length, 1)
    stages = DIM // 4
    place = np.arange(KV_HEADS)[:, None] * stages + np.arange(DIM) % stages
    points = np.random.default_rng(1).normal(size=(KV_HEADS, DIM, 256)) / 4
    codes = mx.random.randint(0, 256, (length, KV_HEADS * stages), mx.uint8)
    basis = mx.random.normal((KV_HEADS * (DIM + 1), DIM)) / math.sqrt(DIM)
    values = table(4)((KV_HEADS, length, DIM))
    keys = ComponentKeys(Components((KV_HEADS, length, DIM), codes, Quantisers.of_bytes(place, points)), basis)
    mx.eval(codes, basis, values.arrays, values.staged, values.mean, values.matrix)
    return q, keys, values, rows, angles


def size_of(given: tuple) -> int:
    """Bytes of codes and scales."""
    _, k, v, *_ = given
    of_v = v.arrays if isinstance(v, CodedOperand) else (v.components.codes, v.scales)
    return k.components.codes.nbytes + sum(x.nbytes for x in of_v)


def make(length: int, used: int = USED) -> tuple:
    """Arguments of a call: keys of 2.05 bits a value where 70 components have bits, values of 2.05."""
    bits = np.rint(np.linspace(6.5, 1, used)).astype(np.int64)
    k, v = components(length, np.tile(bits, (KV_HEADS, 1))), components(length, np.full((KV_HEADS, DIM), 2))
    basis = mx.random.normal((k.count + KV_HEADS, DIM)) / math.sqrt(used)
    sizes = mx.exp(-mx.arange(64) / 6)[None] * mx.ones((KV_HEADS, 1))
    scales = mx.random.randint(0, 1 << 30, (-(-length // 32), 6 * KV_HEADS)).astype(mx.uint32)
    matrix = mx.hadamard_transform(mx.eye(DIM))
    mix = mx.random.normal((KV_HEADS, k.count, DIM)) / math.sqrt(k.count)
    values = ComponentValues(v, scales, sizes, matrix, mix, mx.random.normal((KV_HEADS, DIM)))
    turn = mx.arange(length)[:, None] * mx.exp(-mx.arange(DIM // 2) * (math.log(1e4) / (DIM // 2)))
    angles = mx.concatenate([mx.cos(turn), mx.sin(turn)], axis=1)
    q = mx.random.normal((KV_HEADS, HEADS // KV_HEADS, DIM)) / math.sqrt(DIM)
    mx.eval(q, basis, angles, k.codes, v.codes, scales, sizes, matrix, mix, values.constant)
    return q, ComponentKeys(k, basis), values, (0, 0, length), angles


def block_of(length: int) -> tuple[Block, float]:
    """Codes of tc-2.05 as a cache has them, and the share of the keys' components that have bits."""
    (made,) = encoded_blocks("tc-2.05", Size(1, HEADS, KV_HEADS, DIM, ENCODED), mx.float16, 0)
    longer = []
    for coded in (made.k, made.v):
        by_token = {"codes", "scales"} & set(coded.parts)
        parts = {name: mx.tile(x, (1, length // ENCODED, 1)) if name in by_token else x for name, x in coded.parts.items()}
        mx.eval(parts)
        longer.append(replace(coded, parts=parts, shape=(KV_HEADS, length, DIM)))
    return Block(*longer, length, 0), float((made.k.codec.key_widths > 0).mean())


def measure() -> None:
    copy = bandwidth()
    for batch, length in SHAPES:
        kv = (batch, KV_HEADS, length, DIM)
        sets = [[mx.random.normal(shape).astype(mx.float16) for shape in ((batch, HEADS, 1, DIM), kv, kv)] for _ in range(2)]
        mx.eval(sets)
        base, _ = median(lambda i, sets=sets: mx.fast.scaled_dot_product_attention(*sets[i % 2], scale=DIM**-0.5), 48, 7)
        print(f"batch {batch}, {length} tokens\n  {'MLX, float16':28}{base * 1e6:9.1f} us {4 * math.prod(kv) / 1e6:8.1f} MB", flush=True)
        del sets
        for name, maker in (("tc-2.05", make), ("commvq-2:additive", additive)):
            given = [maker(length) for _ in range(max(SETS, batch))]
            seconds, handing = median(lambda i, given=given: component_attend(*given[i % len(given)]), 6 * batch, 5)
            size, seconds, handing = size_of(given[0]) * batch, seconds * batch, handing * batch  # a call for each sequence
            print(
                f"  {name:28}{seconds * 1e6:9.1f} us {size / 1e6:8.1f} MB {size / seconds / copy:5.0%}"
                f"  (CPU {handing * 1e6:.1f} us) {base / seconds:5.2f} x float16",
                flush=True,
            )
            del given
    length = SHAPES[0][1]
    block, share = block_of(length)
    q = mx.random.normal((KV_HEADS, HEADS // KV_HEADS, DIM)) / math.sqrt(DIM)
    seen = Visibility(1, HEADS // KV_HEADS, length)
    fused = blocks.FUSED_ROWS
    for name, rows in (("by the kernels", fused), ("by MLX's operations", 0)):
        blocks.FUSED_ROWS = rows
        seconds, _ = median(lambda i: block.attend_tiles(q, seen, 0, blocks.tile_tokens(KV_HEADS, DIM)), 2, 3)
        print(f"  block of tc-2.05, {share:.0%} of components have bits, {name:20}{seconds * 1e6:9.1f} us", flush=True)
    blocks.FUSED_ROWS = fused


def parts() -> None:
    """Where the time goes."""
    length = SHAPES[0][1]
    for used in (48, USED, 96, 128):
        given = [make(length, used) for _ in range(SETS)]
        made = [_component_attend._scores(q, k, 0, length, angles, None, None) for q, k, _, _, angles in given]
        mx.eval(made)
        whole, _ = median(lambda i, given=given: component_attend(*given[i % SETS]), 12, 5)
        print(f"{used} components of a head: {whole * 1e6:.1f} us together", flush=True)
        for name, call in (
            ("scores", lambda i, given=given: _component_attend._scores(given[i][0], given[i][1], 0, length, given[i][4], None, None)),
            ("as cached", lambda i, given=given: _component_attend._scores(given[i][0], given[i][1], 0, length, None, None, None)),
            ("shared", lambda i, g=given, made=made: _component_attend._sums(*made[i], g[i][1].components, 0, length, None, None)),
            ("own", lambda i, g=given, made=made: _component_attend._sums(*made[i], g[i][2].components, 0, length, g[i][2], None)),
        ):
            for many in (132, 264):
                _component_attend.BLOCKS = many
                seconds, _ = median(lambda i, call=call: call(i % SETS), 12, 5)
                print(f"  {name:12}{seconds * 1e6:9.1f} us in {many} blocks", flush=True)
        _component_attend.BLOCKS = 132
        del given, made
    given = [additive(length) for _ in range(SETS)]
    seconds, _ = median(
        lambda i: _component_attend._scores(given[i % SETS][0], given[i % SETS][1], 0, length, given[i % SETS][4], None, None), 12, 5
    )
    print(f"commvq-2:additive\n  scores      {seconds * 1e6:9.1f} us", flush=True)


def main(words: list[str]) -> int:
    if words[:1] == ["check"]:
        failures = 0
        for case in (case for case in (*TILES, *CASES, *LARGE) if all(word in case.name for word in words[1:])):
            found = problem(case)
            failures += found is not None
            print(f"{'FAILED' if found else 'ok':7}{case.name}{': ' + found if found else ''}", flush=True)
        print(f"check: {failures} failed", flush=True)
        return 1 if failures else 0
    if words == ["time"]:
        measure()
    elif words == ["parts"]:
        parts()
    elif words == ["one"]:
        mx.eval(component_attend(*make(131072)), component_attend(*additive(131072)))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
