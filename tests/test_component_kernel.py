"""The kernels by which live caches attend to components on a GPU, against float64: their texts in the emulations, or on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests import test_commvq_additive as additive
from tests.component_cases import CASES, LARGE, TILES, ComponentCase, make, problem
from tests.cuda_emulation.emulator import EmulatedCuda, unavailable
from tests.metal_emulation import emulator as metal_emulation
from tests.metal_emulation.emulator import EmulatedMetal, MetalFault
from tests.tc_cases import bound, exact, layer
from tests.test_kernel_cuda import NVCC, compile_text, translation_unit
from veloxquant_mlx.caches import blocks
from veloxquant_mlx.caches.blocks import Block, CodedRows
from veloxquant_mlx.caches.visibility import Visibility
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.metal import _component_attend
from veloxquant_mlx.metal._backend import backend, forced
from veloxquant_mlx.metal._component_attend import component_attend
from veloxquant_mlx.metal._kernel import Kernel, using
from veloxquant_mlx.selftest.run import Dispatch
from veloxquant_mlx.transfer.rope_spec import RopeSpec


def dispatches(cases: Sequence[ComponentCase]) -> list[Dispatch]:
    """What the cases send to kernels; nothing runs."""
    found: dict[Dispatch, None] = {}

    def record(kernel: Kernel, arrays: Any, template: Any, grid: Any, threadgroup: Any, shapes: Any, dtypes: Any) -> list[mx.array]:
        found[Dispatch(kernel, tuple(a.dtype for a in arrays), tuple(template), tuple(dtypes))] = None
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    with using(record), forced("cuda"):
        for case in cases:
            component_attend(*make(case).arguments)
    return list(found)


@contextmanager
def emulated(name: str) -> Iterator[None]:
    """A back end, or the emulation of it."""
    if backend() == name:
        yield
        return
    reason = unavailable() if name == "cuda" else metal_emulation.unavailable()
    if backend() != "cpu" or reason:
        pytest.skip(reason or f"MLX has a GPU without {name}")
    with using(EmulatedCuda() if name == "cuda" else EmulatedMetal()), forced(name):
        yield


@pytest.mark.parametrize("name", ["cuda", "metal"])
@pytest.mark.parametrize("case", (*CASES, *TILES), ids=lambda case: case.name)
def test_against_float64(case: ComponentCase, name: str) -> None:
    with emulated(name):
        assert problem(case) is None


def test_points_beyond_threadgroup_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Metal they stay where they are."""
    monkeypatch.setattr(_component_attend, "NEAR_POINTS", 10)
    with emulated("metal"):
        assert problem(CASES[0]) is None


ROWS_CASE = next(case for case in CASES if case.stages)

# Name: (text of Metal, what becomes of it, case).
FAULTS = {
    "a bit of the second word lost": ("code |= words[1] << (32 - shift);\n    }\n    return points", "}\n    return points", CASES[0]),
    "components of another part": ("back + size_t(part + i) * D", "back + size_t(i) * D", TILES[0]),
    "halves not turned": ("metal::fma(cosine, a, -sine * b)", "metal::fma(cosine, a, sine * b)", CASES[0]),
    "angle of another token": ("(share + t) * 8 + column + e)", "(share + t) * 8 + e)", CASES[0]),
    "one share alone": ("w * SHARES + int(lane) / (8 * EACH)", "w * SHARES", CASES[0]),
    "no barrier before the parts are read": (
        "ulong2(0, 0), false);\n    }\n    threadgroup_barrier(mem_flags::mem_threadgroup);",
        "ulong2(0, 0), false);\n    }",
        CASES[0],
    ),
    "a pair beyond the last": ("if (pair0 + o * STRIDE < PAIRS)", "if (true)", CASES[1]),
    "stream out of step": ("have += 32 - bits", "have += 31 - bits", CASES[0]),
    "weights of another split": ("row * splits + i", "row * splits", CASES[8]),
    "size of another token": ("sizes.at(head, heads, block, int(lane))", "sizes.at(head, heads, block, 0)", CASES[0]),
    "byte of another row": ("codes[row * each + quantisers[4 * i]]", "codes[row * each]", ROWS_CASE),
    "score of another query": ("keys.scores[row * count + j]", "keys.scores[j]", ROWS_CASE),
    "rows beyond a column": ("r < rows && span.has(place)", "span.has(place)", CASES[0]),
}


@pytest.mark.skipif(backend() == "metal" or metal_emulation.unavailable() is not None, reason="runs in the emulation of Metal")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    old, new, case = FAULTS[fault]
    reached: list[str] = []
    with using(EmulatedMetal(mutate=lambda text: reached.append(text) or text.replace(old, new))), forced("metal"):
        try:
            found = problem(case)
        except MetalFault as error:
            found = str(error)
    assert any(old in text for text in reached)
    assert found is not None and "does not compile" not in found


@pytest.mark.skipif(backend() != "cuda", reason="MLX sees no CUDA GPU")
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_against_float64_on_a_gpu(case: ComponentCase) -> None:
    assert problem(case) is None


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v, rows, angles, *_ = make(CASES[0]).arguments
    for changed, message in (
        ((q[:, :, 1:], k, v, rows, angles), r"q must be \(2, R, 64\), but got \(2, 3, 63\)"),
        ((q, k, v, (0, 0, 100), angles), r"rows must be within 72 keys and 71 values, one or more, but got \(0, 0, 100\)"),
        ((q, k, v, rows, angles[1:]), r"angles must be \(70, 64\), but got \(69, 64\)"),
        ((q, k, replace(v, mix=v.mix[:, 1:]), rows, angles), "v.mix must be of"),
    ):
        with pytest.raises(ValueError, match=message):
            component_attend(*changed)


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")
def test_cuda_compiles() -> None:
    fault = compile_text(translation_unit(dispatches((*CASES, *TILES))))
    if fault is not None:
        pytest.fail(fault, pytrace=False)


# --- what tc gives them ------------------------------------------------------------------------------------------------------------

HEADS, GROUP, ROWS, FIRST = 2, 2, 90, 9


def attended(block: Block, keys: np.ndarray, values: np.ndarray, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's attention by the kernels against that to its rows, keys before RoPE, in float64."""
    rope, dim = block.k.rope, keys.shape[2]
    if rope is not None:
        angle = np.arange(block.first, block.stop)[:, None] * np.array(rope.frequencies)
        a, b = np.split(keys, 2, axis=-1)
        keys = np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)
        if rope.pairing == "interleaved":
            keys = keys.reshape(*keys.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(keys.shape)
    q = (np.random.default_rng(4).normal(size=(HEADS, GROUP * 2, dim)) / dim**0.5).astype(np.float32)
    seen = np.arange(block.count) <= np.array([block.count - 2, block.count - 1])[:, None]
    s = np.where(np.tile(seen, (GROUP, 1)), q.astype(np.float64) @ keys.swapaxes(1, 2), -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    want = p @ values / p.sum(axis=-1, keepdims=True)
    called: list[str] = []
    monkeypatch.setattr(blocks, "component_attend", lambda *given: called.append("kernel") or component_attend(*given))
    with emulated(name):
        assert block.unfused is None
        out, lse = block.attend_tiles(mx.array(q), Visibility.of("causal", HEADS * GROUP, HEADS, 2, block.count, 0), 0, 64)
        mx.eval(out, lse)
    assert called
    np.testing.assert_allclose(np.array(out), want, rtol=0, atol=4e-6 * np.abs(values).max())
    np.testing.assert_allclose(np.array(lse), np.log(p.sum(axis=-1)) + s.max(axis=-1), rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize(("spec", "dim", "pairing"), [("tc-2", 64, "half"), ("tc-3.5", 16, "interleaved"), ("tc-2:carry", 32, None)])
@pytest.mark.parametrize("name", ["cuda", "metal"])
def test_a_block_goes_to_the_kernels_as_tc_stores_it(
    spec: str, dim: int, pairing: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codecs, rows, shape = bound(spec, HEADS, dim, ROWS), layer(ROWS, 7, HEADS, dim), (HEADS, ROWS, dim)
    x, w = (mx.array(np.ascontiguousarray(a.swapaxes(0, 1)).astype(np.float32)) for a in (rows.k, rows.v))
    k_parts = codecs[0].encode(x)
    v_parts = codecs[1].encode(w, {"k": codecs[0].decode(k_parts, shape, mx.float32)})
    rope = None if pairing is None else RopeSpec("default", dim, pairing, base=1e4)
    block = Block(CodedRows(codecs[0], k_parts, shape, mx.float32, rope), CodedRows(codecs[1], v_parts, shape, mx.float32), ROWS, FIRST)
    keys, values = exact(codecs[0], k_parts, codecs[1], v_parts, shape)
    attended(block.kept(FIRST + 5, FIRST + ROWS - 2), keys[:, 5:-2], values[:, 5:-2], name, monkeypatch)


@pytest.mark.parametrize("spec", ["commvq-2:additive", "commvq-1.5:additive:carry"])
@pytest.mark.parametrize("name", ["cuda", "metal"])
def test_a_block_goes_to_the_kernels_as_additive_stores_it(spec: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, shape = additive.bound(spec), (HEADS, ROWS, 32)
    parts = codec.encode(additive.keys(ROWS))
    values = CodedRows.encoded(parse_codec("affine-8:token").v, additive.keys(ROWS), FIRST)
    block = Block(CodedRows(codec, parts, shape, mx.float32, RopeSpec("default", 32, base=1e4)), values, ROWS, FIRST)
    decoded = additive.f64(values.codec.decode(values.parts, shape, mx.float32))
    attended(block.kept(FIRST + 5, FIRST + ROWS), additive.oracle(codec, parts, shape)[:, 5:], decoded[:, 5:], name, monkeypatch)


def test_what_the_kernels_do_not_read_says_so() -> None:
    k, v = bound("tc-2", 2, 64)
    other = parse_codec("rvq-4").v
    with forced("cuda"):
        assert blocks.unfused(k, v, (64, 64), None) is None
        assert blocks.unfused(k, other, (64, 64), None) == "the kernel for tc attends to keys and values of tc together, not to tc and rvq"
        assert blocks.unfused(additive.bound("commvq-2:additive"), other, (32, 32), None) is None
