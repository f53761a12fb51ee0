"""`coded_attend` on tensor cores: CUDA's text in the emulation of warps, against float64; the same cases run where there is a GPU."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from tests.coded_cases import TILES, CodedCase, make, problem
from tests.cuda_emulation.emulator import cuda
from tests.test_coded_kernel import dispatches
from tests.test_kernel_cuda import NVCC, compile_text, translation_unit
from veloxquant_mlx.metal import _coded_tiles
from veloxquant_mlx.metal._backend import forced


@pytest.fixture(name="cuda")
def on_cuda() -> Iterator[None]:
    with cuda():
        yield


@pytest.mark.parametrize("case", TILES, ids=lambda case: case.name)
def test_against_float64(case: CodedCase, cuda: None) -> None:
    _, k, v, _, angles, mask, _ = make(case).arguments
    assert _coded_tiles.takes(k, v, angles is not None, mask is not None)
    assert problem(case) is None


def test_what_it_does_not_take_goes_to_the_general_kernel() -> None:
    def kernels(case: CodedCase) -> set[str]:
        return {d.kernel.name.rpartition("_")[0] for d in dispatches([case], "cuda")}

    (first, *_) = TILES
    assert "coded_attend_table" not in kernels(first)
    for change in ({"dim": 64}, {"mask": "bool"}):
        assert "coded_attend_table" in kernels(CodedCase(**{**vars(first), **change}))
    as_cached = next(case for case in TILES if case.name == "tiles, halves")
    assert "coded_attend_plain" not in kernels(as_cached)
    assert "coded_attend_plain" in kernels(CodedCase(**{**vars(as_cached), "rope": True}))
    _, k, v, _, angles, _, _ = make(first).arguments
    with forced("metal"):
        assert not _coded_tiles.takes(k, v, angles is not None, False)
    assert mx.array_equal(k.arrays[0], k.arrays[1])


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")
def test_cuda_compiles() -> None:
    fault = compile_text(translation_unit(dispatches(TILES, "cuda")))
    if fault is not None:
        pytest.fail(fault, pytrace=False)
