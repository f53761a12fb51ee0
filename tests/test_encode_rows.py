"""Rows coded by a kernel on CUDA, in the emulation of warps where there is no GPU, against float64 and against MLX's operations."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest

from tests.cuda_emulation.emulator import cuda
from tests.test_kernel_cuda import NVCC, compile_text, translation_unit
from tests.test_native_encode import assert_rotated, codec_of, numbers, rows
from veloxquant_mlx import native
from veloxquant_mlx.codecs._base import Codec
from veloxquant_mlx.metal import _encode_rows
from veloxquant_mlx.metal._backend import forced
from veloxquant_mlx.metal._kernel import Kernel, using
from veloxquant_mlx.selftest.run import Dispatch

DTYPES = (mx.float16, mx.bfloat16, mx.float32)
ROTATED = (("rvq-4", "k"), ("rvq-3:ls", "k"), ("rvq-2+2:unbiased", "v"), ("rvq-1:nocenter", "k"), ("rvq-8", "v"), ("rabitq", "k"))
AFFINE = ("affine-4:channel", "affine-4:token", "affine-8:token:group=64", "affine-3:channel:group=7", "affine-1:token:group=8")
OTHERS = (("rabitq-4", 64), ("rvq-4", 80), ("affine-4:token:group=24", 64), ("affine-4:channel", 12))


@pytest.fixture(name="cuda")
def on_cuda() -> Iterator[None]:
    with cuda(), native.without():
        yield


def by_kernel(codec: Codec, x: mx.array, monkeypatch: pytest.MonkeyPatch) -> dict[str, mx.array]:
    """By a kernel and nothing else."""
    with monkeypatch.context() as patch:
        patch.setattr(type(codec), "_encode_block", lambda *_: pytest.fail("MLX's operations coded"))
        return codec.encode(x)


@pytest.mark.parametrize(("spec", "role"), ROTATED)
def test_rotated_rows_are_coded_as_the_oracle_codes_them(spec: str, role: str, cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_of(spec, role)
    for i, dim in enumerate((16, 128, 512)):
        x = mx.array(rows(2, 33, dim, i)).astype(DTYPES[i])
        assert_rotated(codec, x, by_kernel(codec, x, monkeypatch))


@pytest.mark.parametrize("spec", AFFINE)
def test_affine_parts_are_those_of_mlx(spec: str, cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_of(spec)
    for i, dim in enumerate((64, 128, 64)):
        x = mx.array(rows(2, 70, dim, i)).astype(DTYPES[i])
        found = numbers(by_kernel(codec, x, monkeypatch))
        with forced("cpu"):
            wanted = numbers(codec.encode(x))
        assert found.keys() == wanted.keys()
        for name, ours in found.items():
            assert ours.dtype == wanted[name].dtype and ours.shape == wanted[name].shape
            # The least of zeros of both signs is either.
            assert ((ours == wanted[name]) | ((ours | wanted[name]) == 0x8000)).all(), name


@pytest.mark.parametrize(("spec", "dim"), OTHERS)
def test_other_rows_are_coded_by_mlx(spec: str, dim: int) -> None:
    codec, x = codec_of(spec), mx.array(rows(1, 40, dim)).astype(mx.float16)
    wanted = {}
    with native.without():
        wanted = numbers(codec.encode(x))
        with using(_refuse), forced("cuda"):
            found = numbers(codec.encode(x))
    assert all(np.array_equal(found[name], part) for name, part in wanted.items())


def _refuse(kernel: Kernel, *_: object) -> list[mx.array]:
    raise AssertionError(kernel.name)


def test_values_that_codes_cannot_hold_are_refused(cuda: None) -> None:
    for spec in ("rvq-4", "affine-4:token"):
        with pytest.raises(ValueError, match=r"1 of 640 values are NaN"):
            codec_of(spec).encode(mx.where(mx.arange(640).reshape(1, 10, 64) == 70, mx.nan, 1.0))


@pytest.mark.skipif(NVCC is None, reason="nvcc is not on the PATH")
def test_cuda_compiles() -> None:
    found: list[Dispatch] = []

    def note(kernel, arrays, template, grid, threadgroup, shapes, dtypes) -> list[mx.array]:  # type: ignore[no-untyped-def]
        found.append(Dispatch(kernel, tuple(a.dtype for a in arrays), tuple(template), tuple(dtypes)))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    with using(note), forced("cuda"), native.without():
        for dtype in DTYPES:
            x = mx.zeros((1, 40, 128), dtype)
            for spec in (*(spec for spec, _ in ROTATED), *AFFINE):
                codec_of(spec).encode(x)
    assert {d.kernel for d in found} == {_encode_rows._ROTATED, _encode_rows._CHANNELS, _encode_rows._TOKENS}
    fault = compile_text(translation_unit(found))
    if fault is not None:
        pytest.fail(fault, pytrace=False)
