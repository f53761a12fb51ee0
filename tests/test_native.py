"""The native back end at every SIMD level that this machine has, against float64 attention to the rows that the codes decode to."""

import multiprocessing
import threading
from collections.abc import Iterator
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from tests import tc_cases
from tests.test_coded import GROUPS, assert_close, attention, bias_of, queries, rows_of_block, sample, stacked
from veloxquant_mlx import native
from veloxquant_mlx.allocators.additive import build_additive
from veloxquant_mlx.caches.blocks import Block, CodedRows, native_parts
from veloxquant_mlx.caches.coded import Growth
from veloxquant_mlx.caches.visibility import Visibility
from veloxquant_mlx.codecs import CODECS, parse_codec, tc_reading
from veloxquant_mlx.codecs.commvq_additive import CommVqAdditive
from veloxquant_mlx.codecs.qjl import Qjl
from veloxquant_mlx.codecs.raw import Raw
from veloxquant_mlx.codecs.tc import Tc
from veloxquant_mlx.native import attending
from veloxquant_mlx.transfer.rope_spec import RopeSpec

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")

# Every way of reading: one and two stages of each width, signs, grids, both groupings (whole vectors or not), floats, components.
SPECS = (
    *(f"rvq-{bits}" for bits in range(1, 9)),
    *("rvq-2+2", "rvq-3+5", "rvq-4:nocenter", "rabitq", "rabitq-4", "rabitq-8", "affine-1", "affine-4", "affine-8"),
    *("k=affine-3:channel:group=7,v=affine-5:token:group=7", "k=affine-2:token,v=affine-4:channel", "raw", "k=rvq-2+2,v=raw"),
    *("tc-1.25", "tc-2", "tc-3.5", "tc-6", "tc-2:carry", "k=tc-3,v=rvq-4"),
    *("commvq-2", "commvq-3.5", "commvq-1:product", "commvq-2:product", "commvq-1.5:additive", "commvq-2:additive:carry"),
    *("vecinfer-2", "k=vecinfer-1.25:nosmooth,v=vecinfer-1:nosmooth", "k=vecinfer-1.75:smooth,v=vecinfer-1.5:smooth"),
    *("qjl", "qjl-3:nocenter", "k=qjl-4,v=qjl-2"),
)
DIMS = (16, 64, 72, 80, 96, 128)  # 72 = 9 x 8, 80 = 5 x 16, 96 = 3 x 32


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.level()
    native.set_level(request.param)
    yield request.param
    native.set_level(before)


def roped(dim: int) -> dict[str, RopeSpec | None]:
    part = dim // 4 * 2
    return {
        "none": None,
        "half": RopeSpec("default", dim, base=1e4),
        "partial": RopeSpec("yarn", part, "interleaved", base=1e4, first=4, magnitude=1.3),
    }


@cache
def made(spec: str, dim: int, rope: str, count: int = 150, heads: int = 2) -> Block:
    """Rows 7 on; every third key is far from the mean of the others, so that codecs that centre row by row leave it as it is."""
    keys, values = sample(count, dim, heads, dim)
    mean = mx.mean(keys, axis=1, keepdims=True)
    keys = mx.where((mx.arange(count) % 3 == 1)[:, None], keys - mean, keys)
    return growth(spec, dim, None if rope == "none" else roped(dim)[rope], heads).encoded(keys, values, 7)


def growth(spec: str, dim: int, rope: RopeSpec | None = None, heads: int = 2) -> Growth:
    """The codecs of a spec, bound where they are calibrated."""
    plan = parse_codec(spec)
    k, v = plan.k, plan.v
    if isinstance(k, CommVqAdditive):
        own = tc_cases.layer(600, 7, heads, dim)
        k = k.bind(build_additive(own.k, own.fisher_k, k.bits), "0", tc_cases.DIGEST if not k.carry else None)
    if isinstance(k, Tc):
        bound = tc_cases.bound(spec.removeprefix("k=").partition(",")[0], heads, dim)
        k, v = bound[0], bound[1] if isinstance(v, Tc) else v
    if spec.endswith("v=qjl-2"):
        v = Qjl(2)  # a spec of values means `rvq-2`
    return Growth(k if rope is None else k.for_rotary(rope.first, rope.dims, dim), v, rope)


def takes(spec: str, dim: int) -> bool:
    plan = parse_codec(spec)
    return plan.k.takes(dim) and plan.v.takes(dim) and (dim >= 8 or not isinstance(plan.k, CommVqAdditive))


@pytest.mark.parametrize("spec", SPECS)
def test_is_attention_to_the_decoded_rows(level: str, spec: str) -> None:
    """Every head size and rotation; whole, and cut at odd places; masks; as many queries as a KV head may have, and one."""
    for i, dim in enumerate(DIMS):
        if not takes(spec, dim):
            continue
        rope = ("none", "half", "partial")[(i + SPECS.index(spec)) % 3] if dim not in (64, 128) else ("half", "none")[dim == 64]
        whole = made(spec, dim, rope)
        for block, count, kind, window in (
            (whole, 1, "none", 0),
            (whole.kept(7 + 34, 7 + 131), 5, "causal", 0),
            (whole.kept(8, 7 + 150), 2, "causal", 40),
            (whole.kept(7, 8), 3, "none", 50),
        ):
            reference = [x[:, block.first - 7 : block.stop - 7] for x in rows_of_block(whole)]
            q = queries(count, dim=dim)
            mask, bias = bias_of(kind, count, block.count + 3, window)
            seen = Visibility.of(mask, 6, 2, count, block.count + 3, window)
            assert block.part is not None  # so that `attend` is by it
            out, lse = block.attend(stacked(q, 2), seen, 3, 64)
            with native.without():
                plain = [np.array(x) for x in block.rows()]
            shape = (6, count)
            assert_close(out.reshape(*shape, -1), lse.reshape(shape), q, reference, plain, bias[..., 3 : 3 + block.count])


@pytest.mark.parametrize(("spec", "dim", "rope"), [("tc-4", 128, "half"), ("tc-3", 72, "partial"), ("tc-1.25:carry", 64, "half")])
def test_components_of_many_tokens(level: str, spec: str, dim: int, rope: str) -> None:
    """Enough that codes are looked up in tables of sums; whole, and from within a block on, to its last tokens; 16, 32 and 48 lanes."""
    whole = made(spec, dim, rope, 1100)
    for block, count in ((whole, 1), (whole.kept(7 + 45, 7 + 1100), 5), (whole, 7)):
        q = queries(count, dim=dim)
        out, lse = block.attend(stacked(q, 2), Visibility.of("causal", 6, 2, count, block.count), 0, 64)
        with native.without():
            plain = [np.array(x) for x in block.rows()]
        _, bias = bias_of("causal", count, block.count, 0)
        reference = [x[:, block.first - 7 : block.stop - 7] for x in rows_of_block(whole)]
        assert_close(out.reshape(6, count, -1), lse.reshape(6, count), q, reference, plain, bias)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 64])
@pytest.mark.parametrize("rope", ["half", "none"])
@pytest.mark.parametrize("spec", ["rvq-4", "affine-4"])
def test_any_number_of_queries(level: str, spec: str, rope: str, rows: int) -> None:
    """Blocks of queries are 1, 2 and 4 wide, and filled up."""
    block = made(spec, 64, rope, 70)
    q = mx.array(np.random.default_rng(rows).standard_normal((2, rows, 64)).astype(np.float32) / 8)
    out, lse = block.attend(q, Visibility(1, rows, 70), 0, 64)
    flat = q.reshape(2 * rows, 1, 64)
    plain = [np.array(x) for x in block.rows()]
    assert_close(out.reshape(2 * rows, 1, -1), lse.reshape(-1, 1), flat, rows_of_block(block), plain, np.zeros((2 * rows, 1, 70)))


@pytest.mark.parametrize("rope", ["none", "partial"])
def test_prompts_after_coded_rows(level: str, rope: str) -> None:
    """More queries than one call takes, the last call's no multiple of four; each sees other rows."""
    count = 2 * attending.most_rows() // GROUPS + 11
    block = made("k=rvq-4,v=rvq-3", 64, rope, 150)
    q = queries(count, dim=64)
    for kind, columns, window in (("causal", 100 + count, 0), ("causal", 150 + count, 120), ("none", 150 + count, 0)):
        mask, bias = bias_of(kind, count, columns, window)
        seen = Visibility.of(mask, 6, 2, count, columns, window)
        out, lse = block.attend(stacked(q, 2), seen, 0, 64)
        plain = [np.array(x) for x in block.rows()]
        shape = (6, count)
        assert_close(out.reshape(*shape, -1), lse.reshape(shape), q, rows_of_block(block), plain, bias[..., :150])


def test_many_queries_take_longer_chunks(level: str) -> None:
    """2048 tokens for 256 queries, so that the second call and the second chunk are cut short."""
    count, rows = 100, 2100
    block = made("rvq-4", 64, "half", rows)
    q = queries(count, dim=64)
    mask, bias = bias_of("causal", count, rows)
    out, lse = block.attend(stacked(q, 2), Visibility.of(mask, 6, 2, count, rows), 0, 64)
    plain = [np.array(x) for x in block.rows()]
    shape = (6, count)
    assert_close(out.reshape(*shape, -1), lse.reshape(shape), q, rows_of_block(block), plain, bias)


def test_long_rows_in_chunks_by_several_threads(level: str) -> None:
    """Chunks merge, whoever took them; and the numbers do not depend on who did."""
    block = made("k=rvq-4,v=rvq-3", 64, "none", 1700)
    q = queries(1, dim=64)
    seen = Visibility(1, GROUPS, 1700)
    before, results = native.threads(), []
    try:
        for count in (1, 2, 5):
            native.set_threads(count)
            results += [[np.array(x) for x in block.attend(stacked(q, 2), seen, 0, 64)] for _ in range(5)]
    finally:
        native.set_threads(before)
    for out, lse in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(lse, results[0][1])
    plain = [np.array(x) for x in block.rows()]
    out, lse = results[0]
    assert_close(mx.array(out).reshape(6, 1, -1), mx.array(lse).reshape(6, 1), q, rows_of_block(block), plain, np.zeros((6, 1, 1700)))


def test_callers_in_several_threads() -> None:
    block, q, seen = made("rvq-4", 64, "half", 600), queries(1, dim=64), Visibility(1, GROUPS, 600)
    mx.eval(q)
    wanted = np.array(block.attend(stacked(q, 2), seen, 0, 64)[0])
    found: list[bool] = []

    def many() -> None:
        for _ in range(20):
            found.append(np.array_equal(np.array(block.attend(stacked(q, 2), seen, 0, 64)[0]), wanted))

    callers = [threading.Thread(target=many) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 60


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_floats_where_they_lie(level: str, dtype: mx.Dtype) -> None:
    """Every bit pattern of 16 bits that is finite, in rows of a larger buffer; nothing is copied."""
    if dtype == mx.float32:
        bits = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    else:
        bits = np.arange(1 << 16, dtype=np.uint16)
        ends = 0x7C00 if dtype == mx.float16 else 0x7F80
        bits[(bits & ends) == ends] = 0
    buffer = (mx.array(bits) if dtype == mx.float32 else mx.array(bits).view(dtype)).reshape(2, 512, 64)
    view = buffer[:, 3:500]
    stored = CodedRows(Raw(), {"data": view}, tuple(view.shape), dtype).reader.stored
    found = native._native.decode(stored, 0, 497)
    assert np.array_equal(found.view(np.uint32), np.array(view.astype(mx.float32)).view(np.uint32))
    assert not np.shares_memory(found, native.shared(view)) and np.shares_memory(native.shared(buffer), native.shared(view))


@pytest.mark.parametrize("spec", SPECS)
def test_decoded_rows(level: str, spec: str) -> None:
    for dim in (1, 2, 3, 7, *DIMS, 256):
        if not takes(spec, dim):
            continue
        block = made(spec, dim, "none", 37)
        for coded in (block.k, block.v):
            if coded.codec.needs:  # decoded beside keys alone
                continue
            with native.without():
                wanted = np.array(coded.codec.decode(coded.parts, coded.shape, mx.float32))
            found = native._native.decode(coded.reader.stored, 0, 37)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())


def test_nan_and_infinity(level: str) -> None:
    """A row of queries with a NaN among its visible scores is NaN; hidden keys have no influence."""
    k, v = (np.array(x) for x in sample(40, 1, 2, 16))
    k[0, 5, 3], k[1, 39, 0] = np.nan, np.inf
    block = Block.exact(mx.array(k), mx.array(v), 0)
    q = queries(2, dim=16)
    seen = Visibility.of("causal", 6, 2, 2, 40)
    out, lse = (np.array(x).reshape(2, GROUPS, 2, -1) for x in block.attend(stacked(q, 2), seen, 0, 64))
    assert np.isnan(out[0]).all() and np.isnan(lse[0]).all()
    assert np.isfinite(out[1, :, 0]).all() and np.isfinite(lse[1, :, 0]).all()  # does not see the last key
    bias = np.zeros((6, 2, 40))
    bias[:, 0, 39] = -np.inf
    q64 = np.array(q).astype(np.float64)[3:, :1]
    wanted, _ = attention(q64, k[1:, :39].astype(np.float64), v[1:, :39].astype(np.float64), bias[3:, :1, :39])
    np.testing.assert_allclose(out[1, :, 0], wanted[:, 0], atol=1e-5)


def test_what_it_leaves_to_mlx() -> None:
    wide = native.max_dim() + 8
    block, other, q = made("rvq-4", 16, "none", 40), Block.exact(*sample(64, dim=wide), 0), stacked(queries(1, dim=16), 2)
    assert native_parts([block, other]) == ([block.part], [other]) and other.part is None
    with native.without():
        assert native_parts([block]) == ([], [block])
        before = native.calls()
        block.attend(q, Visibility(1, GROUPS, 40), 0, 64)
        assert native.calls() == before
    block.attend(q, Visibility(1, GROUPS, 40, mask=mx.ones((1, 1, 1, 40), mx.bool_)), 0, 64)
    assert native.calls() > before


def test_which_codecs_it_reads() -> None:
    """All whose rows are read tile by tile; `SPECS` has each of them."""
    specs = [parse_codec(spec) for spec in SPECS]
    read = {type(codec) for plan in specs for codec in (plan.k, plan.v)}
    assert {codec for codec in CODECS.values() if codec.read_natively} == read
    for spec in SPECS:
        block = made(spec, 128, "none", 37)
        assert block.k.reader.stored is not None and block.v.reader.stored_beside(block.k.reader) is not None


@pytest.mark.parametrize("wild", [64.0, 0.5])
def test_values_predicted_from_keys_of_another_mean(level: str, wild: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the prediction takes the keys' mean for may differ from it; where a component could reach its limit, MLX attends."""
    block = made("tc-2:carry", 64, "half")
    parts = block.v.parts | {
        "k_mean": block.v.parts["k_mean"] + mx.array(0.1 * np.random.default_rng(4).standard_normal((2, 64)).astype(np.float32))
    }
    block = Block(block.k, CodedRows(block.v.codec, parts, block.v.shape, block.v.dtype), block.count, block.first)
    monkeypatch.setattr(tc_reading, "WILD", wild)
    q, seen = queries(3, dim=64), Visibility.of("causal", 6, 2, 3, 150)
    assert (block.part is not None) == (wild == 64)
    out, lse = block.attend(stacked(q, 2), seen, 0, 64)
    with native.without():
        plain = [np.array(x) for x in block.rows()]
    assert_close(out.reshape(6, 3, -1), lse.reshape(6, 3), q, rows_of_block(block), plain, bias_of("causal", 3, 150)[1])


def test_refuses_what_does_not_fit() -> None:
    rows = native.stored((2, 5, 16))

    def components(first: list[int], bits: list[int], points: int, size: int = 32) -> None:
        lists = np.array(first, np.int32), np.array(bits, np.uint16), np.zeros(points, np.float32)
        native.stored((2, 5, 16)).components(np.zeros((1, 1, size), np.uint8), native.quantisers(*lists))

    for call, message in (
        (lambda: native.stored((2, 5, 513)), r"shape must be \(H, S, D\) with D at most 512, but got \(2, 5, 513\)"),
        (lambda: rows.codes(np.zeros((2, 5, 7), np.uint8), 4, None), r"codes must be \(2, 5, 8\), but got \(2, 5, 7\)"),
        (lambda: rows.codes(np.zeros((2, 5, 18), np.uint8), 9, None), "bits must be 1 to 8, but got 9"),
        (lambda: rows.codes(np.zeros((2, 5, 8), np.uint8), 4, [0.0] * 15), "table must be 16 values, but got 15"),
        (lambda: rows.codes(np.zeros((2, 5, 16), np.uint8)[..., ::2], 4, None), "contiguous along the last axis"),
        (lambda: rows.scale(np.zeros((2, 4), np.uint16)), r"scale must be \(2, 5\), but got \(2, 4\)"),
        (lambda: rows.mean(np.zeros((2, 15), np.float32)), r"mean must be \(2, 16\), but got \(2, 15\)"),
        (lambda: rows.floats(np.zeros((2, 5, 16)), False), "data must be float16 or float32"),
        (lambda: rows.rotation(np.ones(16, np.float32), np.ones((3, 3), np.float32)), r"hartley must be \(m, m\) with D = m 2\^k"),
        (lambda: rows.affine(*[np.zeros((2, 1, 15), np.uint16)] * 2, 32, False), r"step must be \(2, 1, 16\), but got \(2, 1, 15\)"),
        (lambda: rows.mix(np.zeros((3, 2, 16), np.float32)), "mix must be that of components, but got none"),
        (lambda: components([0, 3, 2], [4] * 2, 32), "first must be ascending from 0, but got 3"),
        (lambda: components([0, 1, 2], [4, 9], 32), "bits must be 1 to 8, but got 9"),
        (lambda: components([0, 1, 2], [4, 4], 31), "points must be 2.bits for each component, but got 31"),
        (lambda: components([0, 1, 2], [4, 4], 32, 33), r"components must be \(1, 1, 32\), but got \(1, 1, 33\)"),
        (lambda: native._native.decode(rows, 0, 5), "rows must be given their codes or floats, but got none"),
        (lambda: native.set_level("sse9"), "KVTOOL_SIMD must be one of .*baseline, but got sse9"),
        (lambda: native.set_threads(0), "KVTOOL_THREADS must be 1 to 1024, but got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    block, q = made("rvq-4", 16, "half", 40), mx.zeros((1, 6, 1, 16))
    k, v = block.k.reader.stored, block.v.reader.stored
    for how, message in (
        (((1, 0, 40), 0), "keys must be rows within 40, but got 1 to 41"),
        (((0, -1, 40), 0), "values must be rows within 40"),
        (((0, 0, 40), 0, ([np.zeros((39, 16), np.float32)], 0)), "angles must be rows within 39, but got 0 to 40"),
        (((0, 0, 40), 0, ([np.zeros((40, 16), np.float32)], 0), 2), "angles must be of entries within D = 16, but got 2 to 18"),
    ):
        with pytest.raises(ValueError, match=message):
            attending.part(k, v, *how)
    shared, tail, sight = attending.Shared((0,), (0,), (attending.part(k, v, (0, 0, 40), 0),)), mx.zeros((1, 2, 3, 16)), attending.Sight(40)
    for given, message in (
        ((q[..., :8], 2, [shared], None, sight), r"parts must be of \(H, D, D_v\) = \(2, 8, 16\), but got \(2, 16, 16\)"),
        ((q, 4, [shared], None, sight), r"q must be \(B, H_q, Q, D\) with H_q a multiple of 4"),
        ((q, 3, [shared], None, sight), r"parts must be of \(H, D, D_v\) = \(3, 16, 16\)"),
        ((q, 2, [], None, sight), "parts must be one or more, but got none"),
        ((q, 2, [shared._replace(columns=(1,))], None, sight), "parts must be at columns 0 to 40, but got 1 to 41"),
        ((q, 2, [shared._replace(columns=(-1,))], None, sight), "parts must be at columns 0 to 40, but got -1 to 39"),
        ((q, 2, [shared._replace(owners=(1,))], None, sight), "owners must be ascending, below 1, but got 1"),
        ((q, 2, [shared._replace(columns=())], None, sight), "owners must be one or more, each with its column"),
        ((q, 2, [shared], attending.Tail(tail, tail[:, :, :2], (0,)), sight), r"tail must be keys and values \(1, H, T, D\)"),
        ((q, 2, [shared], attending.Tail(tail, tail, (4,)), sight), "starts must be 0 to 3, but got 4"),
        ((q, 2, [shared], None, sight._replace(window=-1)), "window must be at least 0, but got -1"),
        ((q, 2, [shared], None, sight._replace(mask=mx.zeros((1, 2, 1, 40)))), r"mask must be \(1, 6, 1, 40\), but got \(1, 2, 1, 40\)"),
        ((q, 2, [shared], None, sight._replace(mask=mx.zeros((1, 1, 1, 40), mx.int32))), "mask must be uint8 of bool, float32"),
        ((q, 2, [shared], None, sight, mx.zeros(5)), r"sinks must be \(6\), but got \(5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            attending.attend(*given)


def _in_child(queue: "multiprocessing.Queue[bool]", stored: object, wanted: np.ndarray) -> None:
    native.set_threads(2)
    queue.put(np.array_equal(native._native.decode(stored, 0, 600), wanted))


def test_a_forked_child_makes_threads_of_its_own() -> None:
    stored = made("rvq-4", 64, "none", 600).k.reader.stored
    before = native.threads()
    native.set_threads(2)
    try:
        wanted = native._native.decode(stored, 0, 600)
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        child = context.Process(target=_in_child, args=(queue, stored, wanted))
        child.start()
        assert queue.get(timeout=30)
        child.join(30)
        assert child.exitcode == 0
    finally:
        native.set_threads(before)
