"""Decode attention on tensor cores: CUDA's text in the emulation of warps, against float64; the same rows run where there is a GPU."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from tests import h200_attend
from tests.cuda_attend_cases import DECODE_CASES
from tests.cuda_emulation.emulator import EmulatedCuda, unavailable
from veloxquant_mlx.metal._backend import forced
from veloxquant_mlx.metal._kernel import compiled, using
from veloxquant_mlx.selftest.case import Case
from veloxquant_mlx.selftest.run import check

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with using(EmulatedCuda()), forced("cuda"):
        yield


@pytest.mark.parametrize("case", DECODE_CASES, ids=lambda case: case.id)
def test_against_float64(case: Case) -> None:
    assert check(case) is None
    assert f"{case.function}_decode" in {name for name, _ in compiled()}


@pytest.mark.parametrize("seed", range(2))
def test_sums_keep_the_bits_of_small_weights(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h200_attend, "HEADS", 4)
    monkeypatch.setattr(h200_attend, "KV_HEADS", 1)
    mx.random.seed(seed)
    assert max(h200_attend.sums(320)) < h200_attend.SUMS
