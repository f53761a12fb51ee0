"""Gradients through functions of the C++ extension: an error that says what to do, which then works; what asks for none goes on."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from veloxquant_mlx import metal, native
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.native import attending, gradients
from veloxquant_mlx.native.attending import Sight, Tail

pytestmark = pytest.mark.skipif(not native.available() or mx.default_device() != mx.cpu, reason="the native back end is not here")

ROWS = mx.random.normal((1, 2, 8, 32), key=mx.random.key(0))
MATRIX = ROWS[0, 0]


def coded(spec: str) -> Callable[[mx.array], mx.array]:
    def there_and_back(x: mx.array) -> mx.array:
        codec = parse_codec(spec).k
        return codec.decode(codec.encode(x), x.shape, mx.float32)

    return there_and_back


def behind_a_tail(keys: mx.array) -> mx.array:
    """Attention as live caches have it, to rows of which nothing is coded yet."""
    return attending.attend(ROWS, 2, [], Tail(keys, ROWS, (0,)), Sight(8))[0]


# A function of floats by the arrays that it is differentiated by.
CALLS: dict[str, tuple[Callable[[mx.array], mx.array], mx.array]] = {
    "queries": (lambda x: metal.flash_prefill_attend(x, ROWS, ROWS, mx.array([0.1])), ROWS),
    "keys": (lambda x: metal.flash_prefill_attend(ROWS, x, ROWS, mx.array([0.1])), ROWS),
    "values": (lambda x: metal.flash_prefill_attend(ROWS, ROWS, x, mx.array([0.1])), ROWS),
    "round trip": (lambda x: metal.kivi_group_quant_dequant(x, -1, 8, 15), ROWS),
    "scores": (lambda x: metal.qjl_inner_product(x, mx.full((5, 8, 4), 77, mx.uint8), mx.ones((5, 8))), MATRIX),
    "live keys": (behind_a_tail, ROWS),
    "table": (lambda x: metal.vecinfer_dequant_metal(mx.zeros((2, 4), mx.uint8), x), MATRIX),
    "recode": (lambda x: metal.crosskv_rope_recode(x, mx.arange(8), 1e4, 1e5), ROWS[0]),
    "rotated rows": (coded("rvq-4"), ROWS[0]),
    "rows on a grid": (coded("affine-4"), ROWS[0]),
    "signs of rows": (coded("qjl"), ROWS[0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_is_refused(name: str) -> None:
    call, x = CALLS[name]

    def loss(x: mx.array) -> mx.array:
        return call(x).astype(mx.float32).sum()

    for transform in (lambda: mx.grad(loss)(x), lambda: mx.vjp(loss, [x], [mx.array(1.0)]), lambda: mx.jvp(loss, [x], [mx.ones_like(x)])):
        with pytest.raises(ValueError, match=r"\[native\] results must not be differentiated.*stop_gradient"):
            mx.eval(transform())


@pytest.mark.parametrize("name", CALLS)
def test_what_asks_for_none_goes_on(name: str) -> None:
    """A straight-through estimate, weights that are not traced, and the same numbers within a gradient as without."""
    call, x = CALLS[name]
    wanted = call(x).astype(mx.float32)

    def loss(y: mx.array) -> mx.array:
        found = mx.stop_gradient(call(y)).astype(mx.float32)
        assert mx.array_equal(found, wanted) and mx.array_equal(call(x).astype(mx.float32), wanted)
        return (y * y).sum() + found.sum()

    assert mx.allclose(mx.grad(loss)(x), 2 * x)


@pytest.mark.parametrize("name", ["queries", "keys", "values", "table"])
def test_what_it_says_to_do_works(name: str) -> None:
    call, x = CALLS[name]
    with native.without():
        assert mx.any(mx.grad(lambda x: call(x).astype(mx.float32).square().sum())(x) != 0)


def test_nothing_is_marked_where_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_marked", lambda *given: pytest.fail("marked"))
    for call, x in CALLS.values():
        mx.eval(call(x), call(x * 1))
