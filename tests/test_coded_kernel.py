"""The kernel by which live caches attend to codes on a GPU: Metal's text in the emulation, CUDA's through nvcc, both on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.coded_cases import CASES, LARGE, CodedCase, make, problem
from tests.metal_emulation.emulator import EmulatedMetal, compile_all, generated, unavailable
from tests.test_kernel_cuda import NVCC, compile_text, translation_unit
from veloxquant_mlx.caches import blocks
from veloxquant_mlx.caches.blocks import Block, CodedRows
from veloxquant_mlx.caches.visibility import Visibility
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.metal._backend import backend, forced
from veloxquant_mlx.metal._coded_attend import coded_attend
from veloxquant_mlx.metal._kernel import Kernel, using
from veloxquant_mlx.selftest.run import Dispatch
from veloxquant_mlx.transfer.rope_spec import RopeSpec


def dispatches(cases: Sequence[CodedCase], name: Any = "metal") -> list[Dispatch]:
    """What the cases send to a kernel; nothing runs."""
    found: dict[Dispatch, None] = {}

    def record(kernel: Kernel, arrays: Any, template: Any, grid: Any, threadgroup: Any, shapes: Any, dtypes: Any) -> list[mx.array]:
        found[Dispatch(kernel, tuple(a.dtype for a in arrays), tuple(template), tuple(dtypes))] = None
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    with using(record), forced(name):
        for case in cases:
            coded_attend(*make(case).arguments)
    return list(found)


@pytest.fixture(scope="module")
def gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """A GPU, or the emulation of one."""
    if backend() != "cpu":
        yield
        return
    if unavailable():
        pytest.skip(str(unavailable()))
    selected = {item.name for item in request.session.items}
    chosen = [case for case in CASES if f"test_against_float64[{case.name}]" in selected]
    compile_all([generated(d.kernel, d.inputs, d.template, d.outputs) for d in dispatches(chosen)])
    with using(EmulatedMetal()):
        yield


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_against_float64(case: CodedCase, gpu: None) -> None:
    assert problem(case) is None


@pytest.mark.skipif(backend() == "cpu", reason="MLX sees no GPU")
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_against_float64_on_a_gpu(case: CodedCase) -> None:
    assert problem(case) is None


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")
def test_cuda_compiles() -> None:
    fault = compile_text(translation_unit(dispatches(CASES, "cuda")))
    if fault is not None:
        pytest.fail(fault, pytrace=False)


# --- what codecs give it -----------------------------------------------------------------------------------------------------------

DIM, ROWS, FIRST = 16, 70, 9
ROPE = RopeSpec("yarn", DIM, "interleaved", base=1e4, magnitude=1.3)
# name: a codec of keys and one of values, and whether keys are stored before RoPE.
CODECS = {
    "rvq-4 before RoPE": ("rvq-4", "rvq-2+2", True),
    "rabitq": ("rabitq", "rabitq-4", False),
    "rvq-3, not centred, and exact": ("rvq-3:norm:nocenter", "raw", True),
    "affine before RoPE": ("affine-4", "affine-2:token", True),
    "vecinfer": ("vecinfer-2", "vecinfer-1.25", False),
    "commvq, product": ("commvq-2:product", "affine-3:channel:group=7", True),
}


@pytest.mark.parametrize(("k", "v", "rotated"), CODECS.values(), ids=CODECS)
def test_a_block_goes_to_the_kernel_as_its_codecs_store_it(k: str, v: str, rotated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend() == "cpu" and unavailable():
        pytest.skip(str(unavailable()))
    rng = np.random.default_rng(4)
    keys, values = (mx.array(rng.normal(1.0, 1.0, (2, ROWS, DIM)).astype(np.float32)) for _ in range(2))
    coded = CodedRows.encoded(parse_codec(k).k, keys, FIRST, ROPE if rotated else None), CodedRows.encoded(parse_codec(v).v, values, FIRST)
    block = Block(*coded, ROWS, FIRST).kept(FIRST + 5, FIRST + ROWS - 2)
    q = mx.array(rng.normal(size=(2, 3 * 2, DIM)).astype(np.float32)) / DIM**0.5
    seen = Visibility.of("causal", 6, 2, 2, block.count, 0)
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "FUSED_ROWS", 0)
        want = block.attend_tiles(q, seen, 0, 64)
        mx.eval(want)
    called: list[str] = []
    with using(EmulatedMetal()) if backend() == "cpu" else nullcontext():
        assert block.unfused is None
        monkeypatch.setattr(blocks, "coded_attend", lambda *given: called.append("kernel") or coded_attend(*given))
        got = block.attend_tiles(q, seen, 0, 64)
        mx.eval(got)
    assert called
    for mine, tiled in zip(got, want, strict=True):
        np.testing.assert_allclose(np.array(mine), np.array(tiled), rtol=0, atol=2e-5)
