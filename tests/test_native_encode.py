"""Encoding by the native back end at every SIMD level that this machine has, against float64 and against MLX's path."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import codec_oracles as oracle
from veloxquant_mlx import native
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.codecs._base import Codec
from veloxquant_mlx.native import encoding

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")

DTYPES = (mx.float16, mx.bfloat16, mx.float32)
ROTATED = (
    *("rvq-1", "rvq-3", "rvq-4", "rvq-5", "rvq-8", "rvq-2+2", "rvq-4:nocenter", "rvq-4:ls", "rvq-4:unbiased:center"),
    *("rabitq", "rabitq:norm", "rabitq:nocenter"),
)
GRIDS = ("rabitq-2", "rabitq-4", "rabitq-4:unbiased", "rabitq-8")
AFFINE = ("affine-1:channel", "affine-4:channel", "affine-4:token", "affine-8:token:group=7", "affine-3:channel:group=7")
# Float32 through a rotation of 512 entries of size 1: 8 roundings of 6e-8 each, and the division by the row's norm.
CLOSE = 2e-5


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.level()
    native.set_level(request.param)
    yield request.param
    native.set_level(before)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def codec_of(spec: str, role: str = "k") -> Codec:
    return getattr(parse_codec(spec), role)


def rows(heads: int, tokens: int, dim: int, seed: int = 0) -> np.ndarray:
    """Rows about a mean, a few of them special: zeros, tiny, large, one outlier, the mean itself nowhere near."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((heads, tokens, dim)) + 2 * rng.standard_normal((heads, 1, dim))
    for at, row in enumerate((0.0, 1e-6, 1e3, -1.0)):
        if tokens > 2 * at:
            x[:, 2 * at] = row * rng.standard_normal(dim)
    if tokens > 9:
        x[:, 9, 0] = 4e4
    return x


def numbers(parts: dict[str, mx.array]) -> dict[str, np.ndarray]:
    return {name: np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x) for name, x in parts.items()}


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    x, y = numbers(a), numbers(b)
    return x.keys() == y.keys() and all(np.array_equal(x[name], y[name]) for name in x)


def encoded(codec: Codec, x: mx.array) -> dict[str, mx.array]:
    """By the native back end and nothing else."""
    assert encoding.takes(x)
    calls = []
    kept = type(codec)._encode_block  # type: ignore[attr-defined]
    type(codec)._encode_block = lambda *given: calls.append(given)  # type: ignore[attr-defined]
    try:
        return codec.encode(x)
    finally:
        type(codec)._encode_block = kept  # type: ignore[attr-defined]
        assert not calls


def assert_rotated(codec: Any, x: mx.array, parts: dict[str, mx.array]) -> None:
    """Codes are the oracle's but where a value lies on a boundary within float32's error, and scales go with the codes."""
    given_rows = np.array(x.astype(mx.float32)).astype(np.float64)
    mean = np.array(parts["mean"].astype(mx.float32)).astype(np.float64) if codec.center else None
    if mean is not None:
        whole = given_rows.mean(1)
        assert np.all(np.abs(mean - whole) <= 2**-8 * np.abs(whole) + 1e-6 * np.abs(given_rows).max())
    wanted = oracle.encode(given_rows, [list(c) for c in codec.codebooks], codec.scale, mean, codec.seed)
    stored = np.array(parts["scale"].view(mx.uint16))
    if codec.center:
        clear = wanted.doubt > 1e-5
        assert np.array_equal((stored < 0x8000)[clear], wanted.centred[clear])
    sure = np.ones(given_rows.shape[:2], bool) if mean is None else wanted.doubt > 1e-5
    for part, bits, code, margin in zip(codec.code_parts, codec.bits, wanted.codes, wanted.margins, strict=True):
        found = oracle.unpack(np.array(parts[part]), bits, x.shape[2])
        doubtful = ~sure[..., None] | (margin < CLOSE * np.maximum(1, np.abs(given_rows).max(-1) / 1e9 + 1)[..., None])
        assert np.array_equal(found[~doubtful], code[~doubtful]), part
        assert np.abs(found.astype(int) - code)[sure].max(initial=0) <= 1 or len(codec.bits) == 2
        sure &= (found == code).all(-1)  # what follows goes by these codes
    scale = np.abs(np.array(parts["scale"].astype(mx.float32)).astype(np.float64))
    assert np.allclose(scale[sure], wanted.scale[sure], rtol=2**-8 + 1e-4, atol=1e-35)
    assert sure.mean() > 0.9


@pytest.mark.parametrize("spec", ROTATED)
def test_rotated_rows_are_coded_as_the_oracle_codes_them(level: str, spec: str) -> None:
    for i, dim in enumerate((1, 6, 64, 72, 80, 128, 512)):
        x = mx.array(rows(2, 33, dim, i)).astype(DTYPES[i % 3])
        codec = codec_of(spec)
        assert_rotated(codec, x, encoded(codec, x))


@pytest.mark.parametrize("spec", (*ROTATED, *GRIDS, *AFFINE))
def test_parts_are_those_of_the_other_path(level: str, spec: str) -> None:
    """MLX sums in another order: a code may differ by one where a value lies on a boundary, a scale by its last bit."""
    for i, dim in enumerate((16, 80, 128)):
        x = mx.array(rows(3, 300, dim, i)).astype(DTYPES[i])
        codec = codec_of(spec)
        with native.without():
            wanted = numbers(codec.encode(x))
        found = numbers(encoded(codec, x))
        assert wanted.keys() == found.keys()
        for name, ours in found.items():
            assert ours.dtype == wanted[name].dtype and ours.shape == wanted[name].shape
            if spec in AFFINE:
                # The least of zeros of both signs is either.
                assert ((ours == wanted[name]) | ((ours | wanted[name]) == 0x8000)).all(), name
            elif spec not in GRIDS and name.startswith("codes"):
                assert (ours != wanted[name]).any(-1).mean() < 0.005, name
            elif spec not in GRIDS or name == "mean":
                assert np.abs(ours.astype(int) - wanted[name]).max() <= 1 or (ours != wanted[name]).mean() < 5e-3, name


@pytest.mark.parametrize("spec", GRIDS)
def test_grids_fit_every_row_as_well(level: str, spec: str) -> None:
    """Two grids may fit a row alike within float32, and all of its codes are then the other grid's: neither leaves more of the row."""
    for i, dim in enumerate((16, 80, 128)):
        x = mx.array(rows(3, 300, dim, i)).astype(mx.float32)
        codec = codec_of(spec)
        found = codec.decode(encoded(codec, x), x.shape, mx.float32)
        with native.without():
            wanted = codec.decode(codec.encode(x), x.shape, mx.float32)
        ours, theirs = (np.sum((np.array(y) - np.array(x)).astype(np.float64) ** 2, axis=-1) for y in (found, wanted))
        energy = np.sum(np.array(x).astype(np.float64) ** 2, axis=-1)
        # The scale's last bit, 2**-8 of the row at most.
        assert np.all(np.abs(ours - theirs) <= 0.02 * theirs + 2**-14 * energy + 1e-30)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("spec", ("rvq-1", "rvq-2", "rvq-3:nocenter", "rvq-4", "rvq-2+2", "rvq-1+3", "rabitq", *GRIDS, *AFFINE))
def test_codes_do_not_depend_on_the_machine(spec: str, dim: int) -> None:
    """The same bytes and losses at every level and with any number of threads; rows beside it do not change a row's codes."""
    codec, before, threads = codec_of(spec), native.level(), native.threads()
    x = mx.array(rows(2, 703, dim)).astype(mx.float16)
    try:
        made, lost = [], []
        for level in native.levels():
            for count in (1, 3):
                native.set_level(level)
                native.set_threads(count)
                found = codec.encode_measured(x, None)
                assert found is not None
                made.append(found[0])
                lost.append(found[1])
        assert all(same(made[0], other) for other in made[1:])
        assert all(lost[0] == other for other in lost[1:])
    finally:
        native.set_level(before)
        native.set_threads(threads)
    if not getattr(codec, "center", False):
        first = numbers(codec.encode(x[:, : 320 // codec.tokens_together * codec.tokens_together]))
        assert all(np.array_equal(part, numbers(made[0])[name][:, : part.shape[1]]) for name, part in first.items())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    spec=st.sampled_from(("rvq-4", "rvq-3:nocenter", "rabitq", "affine-5:token:group=3", "affine-2:channel:group=5")),
    heads=st.integers(1, 3),
    tokens=st.integers(0, 40),
    dim=st.integers(1, 130),
    dtype=st.sampled_from(DTYPES),
)
def test_any_shape(spec: str, heads: int, tokens: int, dim: int, dtype: mx.Dtype) -> None:
    codec = codec_of(spec)
    x = mx.array(rows(heads, tokens, dim, dim)).astype(dtype)
    parts = codec.encode(x)
    for name, (kind, shape) in codec.layout(x.shape, dtype).items():
        assert parts[name].shape == shape and (kind == "BF16") == (parts[name].dtype == mx.bfloat16)
    error = np.array(codec.decode(parts, x.shape, mx.float32)) - np.array(x.astype(mx.float32))
    with native.without():
        other = np.array(codec.decode(codec.encode(x), x.shape, mx.float32)) - np.array(x.astype(mx.float32))
    assert np.sum(error**2) <= 1.02 * np.sum(other**2) + 1e-9 * np.sum(np.array(x.astype(mx.float32)) ** 2) + 1e-30


@pytest.mark.parametrize("spec", ["rvq-4", "affine-4:channel"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_read_where_they_lie(level: str, spec: str, dtype: mx.Dtype) -> None:
    """As a cache has them: cut from a longer buffer, or with tokens before heads."""
    codec = codec_of(spec)
    whole = mx.array(rows(2, 90, 64)).astype(dtype)
    wide = mx.concatenate([whole, whole], axis=2)
    by_token = mx.contiguous(mx.swapaxes(whole, 0, 1))
    mx.eval(whole, wide, by_token)
    wanted = codec.encode(mx.contiguous(whole[:, 10:60]))
    for view in (whole[:, 10:60], wide[:, 10:60, :64], wide[:, 10:60, 64:], mx.swapaxes(by_token, 0, 1)[:, 10:60]):
        assert same(codec.encode(view), wanted)


@pytest.mark.parametrize("spec", ["rvq-4", "rabitq-4", "affine-4:token", "affine-4:channel"])
@pytest.mark.parametrize(("value", "token"), [(np.nan, 17), (np.inf, 5), (-np.inf, 8), (2e36, 15)])
def test_what_no_code_can_hold_is_refused(level: str, spec: str, value: float, token: int) -> None:
    x = rows(2, 20, 64)
    x[1, token, 63] = value
    with pytest.raises(ValueError, match=rf"1 of 2560 values are NaN, infinite or beyond 1e\+36: \(head 1, token {token}, dim 63\)"):
        codec_of(spec).encode(mx.array(x.astype(np.float32)))


@pytest.mark.parametrize("spec", ["rvq-4", "rvq-4:nocenter", "rabitq", "rabitq-4"])
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-37, 1e-30, 1e20, 9e35])
def test_sizes_at_the_ends_of_float32(level: str, spec: str, size: float) -> None:
    x = mx.array((size * np.random.default_rng(0).uniform(-1, 1, (1, 13, 64))).astype(np.float32))
    codec = codec_of(spec)
    decoded = np.array(codec.decode(encoded(codec, x), x.shape, mx.float32)).astype(np.float64)
    given_rows = np.array(x).astype(np.float64)
    if size < 2.0**-120:
        assert not decoded.any()
    else:
        share = np.sum((decoded - given_rows) ** 2) / np.sum(given_rows**2)
        assert share < (0.6 if spec == "rabitq" else 0.05)


def test_wide_rows_are_left_to_mlx() -> None:
    x = mx.array(rows(1, 5, native.max_dim() + 16))
    assert not encoding.takes(x)
    parts = codec_of("rvq-4").encode(x)
    assert parts["codes"].shape == (1, 5, (native.max_dim() + 16) // 2)


def test_bad_arguments_do_not_reach_the_pointers() -> None:
    x = native.shared(mx.zeros((2, 3, 8)))
    signs, hartley = np.ones(8, np.float32), np.ones((1, 1), np.float32)
    good: dict[str, Any] = {
        "x": x, "bfloat": False, "stages": [([0.0], [-1.0, 1.0])], "ties_up": False, "kind": 0, "mean": None, "signs": signs,
        "hartley": hartley, "steps": [], "undo": None, "codes": [np.zeros((2, 3, 1), np.uint8)], "scale": np.zeros((2, 3), np.uint16),
    }  # fmt: skip
    assert native.extension().encode_rotated(**good) is not None
    for change, words in (
        ({"signs": signs[:7].copy()}, r"signs must be \(8\)"),
        ({"hartley": np.ones((3, 3), np.float32)}, "with D = m 2"),
        ({"mean": np.zeros((2, 7), np.uint16)}, r"mean must be \(2, 8\)"),
        ({"stages": []}, "stages must be 1 or 2"),
        ({"stages": [([0.0], [-1.0, 0.0, 1.0])]}, "codewords with a boundary between"),
        ({"kind": 3}, "kind must be 0, 1 or 2"),
        ({"bfloat": True}, "uint16 of bfloat16"),
        ({"codes": []}, "codes must be of each stage, but got 0"),
        ({"codes": [np.zeros((2, 3, 2), np.uint8)]}, r"codes must be \(2, 3, 1\)"),
        ({"scale": np.zeros((2, 2), np.uint16)}, r"scale must be \(2, 3\)"),
        ({"undo": (([np.ones((2, 8), np.float32)], 0), 0, False, 1.0)}, "angles must be rows within 2, but got 0 to 3"),
        ({"undo": (([np.ones((3, 8), np.float32)], 0), 1, False, 1.0)}, "angles must be of entries within D = 8, but got 1 to 9"),
    ):
        with pytest.raises(ValueError, match=words):
            native.extension().encode_rotated(**(good | change))
    for bits, group in ((0, 32), (9, 32), (4, 0)):
        with pytest.raises(ValueError, match=r"\[native\]"):
            native.extension().encode_affine(x, False, bits, group, True, None, *(np.zeros((2, 3, 4), t) for t in ("u1", "u2", "u2")))
