"""Functions that the C++ extension has, within `mx.compile`: an error that says what to do, which then works."""

import mlx.core as mx
import pytest

from veloxquant_mlx import metal, native

CODES = mx.arange(64, dtype=mx.uint8) % 16
ROWS = mx.random.normal((1, 2, 8, 32), key=mx.random.key(0))
CALLS = {
    "pack": (lambda x: metal.turboquant_bit_pack(x, 4), CODES),
    "signs": (lambda x: metal.qjl_encode(x[0, 0], mx.eye(32))[0], ROWS),
    "attend": (lambda x: metal.flash_prefill_attend(x, x, x, mx.array([0.1])), ROWS),
    "recode": (lambda x: metal.crosskv_rope_recode(x[0], mx.arange(8), 1e4, 1e5), ROWS),
}


@pytest.mark.skipif(not native.available(), reason="the native back end is not here")
@pytest.mark.parametrize("name", CALLS)
def test_the_error_says_what_to_do(name: str) -> None:
    call, x = CALLS[name]
    with pytest.raises(ValueError, match=r"\[native\] arrays must be computed .* within mx\.compile.*native\.without\(\)"):
        mx.compile(call)(x)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "recode"])
def test_what_it_says_to_do_works(name: str) -> None:
    call, x = CALLS[name]
    want = call(x)
    with native.without():
        found = mx.compile(call)(x)
    assert mx.allclose(found, want, atol=1e-5).item()


def test_other_errors_of_an_evaluation_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: mx.array) -> None:
        raise ValueError("[x] no.")

    monkeypatch.setattr(mx, "eval", refuse)
    with pytest.raises(ValueError, match=r"^\[x\] no\.$"):
        native.evaluate(CODES)
