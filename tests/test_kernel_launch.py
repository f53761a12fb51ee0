"""What a launch may be, whatever the kernel: sizes that a GPU takes, and what counts as compiling anew."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest

from veloxquant_mlx import metal
from veloxquant_mlx.metal._kernel import INT32_MAX, MAX_GROUPS, Kernel, Shapes, Size, Template, compiled, dims, using

KERNEL = Kernel(name="launch_limits", inputs=("x",), outputs=("out",), sources=(), metal="", cuda="")


def zeros(
    _: Kernel, arrays: Sequence[mx.array], template: Template, grid: Size, threadgroup: Size, shapes: Shapes, dtypes: Sequence[mx.Dtype]
) -> list[mx.array]:
    return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def launch(grid: Size, threadgroup: Size = (32, 1, 1), template: Template = ()) -> None:
    with using(zeros):
        KERNEL(
            [mx.ones((8,))],
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=[(8,)],
            output_dtypes=[mx.float32],
        )


@pytest.mark.parametrize("grid", ((INT32_MAX, 1, 1), (32, MAX_GROUPS, 1), (32, 1, MAX_GROUPS)))
def test_largest_grids(grid: Size) -> None:
    launch(grid)


@pytest.mark.parametrize(
    ("grid", "message"),
    (
        ((INT32_MAX + 1, 1, 1), "at most 2147483647 threads along an axis"),
        ((32, MAX_GROUPS + 1, 1), "at most 65535 groups along y and z"),
        ((32, 1, MAX_GROUPS + 1), "at most 65535 groups along y and z"),
    ),
)
def test_grids_that_cuda_refuses(grid: Size, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(grid)


def test_groups_are_counted_not_threads() -> None:
    launch((32, 4 * MAX_GROUPS, 1), (32, 4, 1))
    with pytest.raises(ValueError, match="at most 65535 groups"):
        launch((32, 4 * MAX_GROUPS + 1, 1), (32, 4, 1))


def test_sizes_beyond_int32_are_refused() -> None:
    assert dims(INT32_MAX, -INT32_MAX).tolist()[:2] == [INT32_MAX, -INT32_MAX]
    with pytest.raises(ValueError, match="must be at most 2147483647, but got 2147483648"):
        dims(1, INT32_MAX + 1)


LONG = 300_000  # tokens times heads: 32 768 tokens of 8 KV heads are 262 144, more than CUDA has groups along y


@pytest.mark.parametrize(
    "run",
    (
        lambda: metal.rabitq_encode(mx.zeros((LONG, 32), mx.float16), mx.ones((32,))),
        lambda: metal.rabitq_encode(mx.zeros((LONG, 8), mx.float16), mx.ones((8,))),
        lambda: metal.turboquant_hadamard_quantize(mx.zeros((LONG, 32), mx.float16), mx.ones((32,)), mx.zeros((4,)), 2),
        lambda: metal.turboquant_scalar_quantize(mx.zeros((LONG, 8), mx.float16), mx.zeros((4,)), 2),
        lambda: metal.rvq_quant_pack(mx.zeros((LONG, 32), mx.float16), mx.zeros((4,)), mx.zeros((3,)), mx.zeros((3,)), 2),
        lambda: metal.qjl_encode(mx.zeros((LONG, 8), mx.float16), mx.zeros((8, 8), mx.float16)),
        lambda: metal.qjl_inner_product(mx.zeros((1, 8)), mx.zeros((LONG, 1, 1), mx.uint8), mx.zeros((LONG, 1))),
        lambda: metal.rabitq_hamming_score(mx.zeros((1,), mx.uint8), mx.zeros((LONG, 1), mx.uint8), mx.zeros((LONG,)), mx.ones((1,))),
        lambda: metal.kivi_group_quant_dequant(mx.zeros((LONG, 8)), -1, 8, 3),
        lambda: metal.vecinfer_encode_decode_metal(mx.zeros((1, 1, LONG, 8)), mx.zeros((4, 4)), 4, mx.zeros((8, 8))),
        lambda: metal.qfilters_score(mx.zeros((1, LONG, 2)), mx.zeros((1, 2))),
        lambda: metal.flash_prefill_attend(*[mx.zeros((1, 1, LONG, 8), mx.float16)] * 3, mx.ones((1,))),
    ),
    ids=lambda run: run.__code__.co_names[1],
)
def test_a_long_context_can_be_launched(run: Callable[[], object]) -> None:
    with using(zeros):
        run()


def test_a_template_of_the_length_would_count_as_compiling_anew() -> None:
    launch((32, 1, 1), template=[("S", 5)])
    first = compiled()
    launch((64, 1, 1), template=[("S", 5)])
    assert compiled() == first
    launch((64, 1, 1), template=[("S", 6)])
    assert compiled() != first
