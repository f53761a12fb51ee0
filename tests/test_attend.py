"""What the attend functions share: packings of one content, parts of one sequence, how the work is cut."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from formats.bitpack import pack
from tests.metal_emulation.emulator import EmulatedMetal, unavailable
from veloxquant_mlx import metal
from veloxquant_mlx.metal._attend import hadamard_matrix, merge_parts, packed_width, unpack_codes
from veloxquant_mlx.metal._attend_launch import GROUP_BYTES, MAX_POOL, MAX_REGISTERS, MAX_TABLES, Many, many_kernel, pool_floats, tile
from veloxquant_mlx.metal._backend import forced
from veloxquant_mlx.metal._kernel import using
from veloxquant_mlx.selftest.case import to_mlx
from veloxquant_mlx.selftest.cases import flash_prefill, fused_sdpa, rabitq_attend, rvq_attend, scalar_attend
from veloxquant_mlx.selftest.oracles.attend import rotation


@pytest.fixture(params=["definition", "metal"])
def back_end(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "definition":
        with forced("cpu"):
            yield
        return
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with using(EmulatedMetal()):
        yield


def bits_of(array: mx.array) -> np.ndarray:
    mx.eval(array)
    return np.array(array.view(mx.uint16))


def call(function: str, arguments: dict) -> mx.array:
    return getattr(metal, function)(**{key: to_mlx(value) for key, value in arguments.items()})


@pytest.mark.usefixtures("back_end")
def test_rabitq_packings_give_the_same_bits() -> None:
    given = rabitq_attend.arguments(np.random.default_rng(1), S=37)
    want = bits_of(call("rabitq_fused_attend", given))
    for layout, extras in (("nibble", {}), ("lsb8", {"packed": "lsb8"}), ("lsb32", {"packed": "lsb32"})):
        packed = given | {"v_idx": pack(given["v_idx"], 4, layout)} | extras
        assert (bits_of(call("rabitq_fused_attend", packed)) == want).all(), layout


@pytest.mark.usefixtures("back_end")
@pytest.mark.parametrize("layout", ["lsb8", "lsb32"])
def test_packed_codes_give_the_same_bits(layout: str) -> None:
    rng = np.random.default_rng(2)
    for function, given, change in (
        ("scalar_fused_decode_attend", scalar_attend.arguments(rng, S=21, levels=8), scalar_attend.packed(layout, 3, 5)),
        ("turboquant_fused_rvq_decode_attend", rvq_attend.arguments(rng, S=21, bits=(3, 1, 5)), rvq_attend.packed(layout)),
        ("metal_fused_sdpa", fused_sdpa.arguments(rng, S=21, dtype="float16"), fused_sdpa.packed(layout, 5)),
    ):
        assert (bits_of(call(function, given)) == bits_of(call(function, given | change(given, rng)))).all(), function


@pytest.mark.usefixtures("back_end")
def test_parts_of_a_sequence_merge_to_the_whole() -> None:
    given = rvq_attend.arguments(np.random.default_rng(3), B=2, group=2, S=40, out_dtype=mx.float32, lse=True)
    want, want_lse = call("turboquant_fused_rvq_decode_attend", given)
    outs, lses = [], []
    for part in (slice(0, 17), slice(17, 17), slice(17, 40)):
        codes = {key: given[key][:, :, part] for key in ("k_indices1", "k_indices2", "v_indices")}
        out, lse = call("turboquant_fused_rvq_decode_attend", given | codes)
        outs.append(out)
        lses.append(lse)
    got, got_lse = merge_parts(outs, lses)
    # float32 on both sides; the merge adds a handful of roundings of values of magnitude 1.
    assert mx.abs(got - want).max() < 4e-6
    assert mx.abs(got_lse - want_lse).max() < 4e-6


def test_parts_that_see_nothing_merge_to_nothing() -> None:
    out, lse = merge_parts([mx.zeros((1, 1, 1, 4))] * 2, [mx.full((1, 1, 1), -mx.inf)] * 2)
    assert (out == 0).all()
    assert (lse == -mx.inf).all()


def test_too_few_groups_are_spread_over_a_long_sequence() -> None:
    """A batch of one splits a long sequence by itself; the result is the definition's."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    given = rabitq_attend.arguments(np.random.default_rng(4), H=1, S=600, D=8, out_dtype=mx.float32)
    grids = []

    def recorded(kernel, arrays, template, grid, *rest):
        grids.append(grid)
        return EmulatedMetal()(kernel, arrays, template, grid, *rest)

    with using(recorded):
        got = call("rabitq_fused_attend", given)
        mx.eval(got)
    assert [grid[1] for grid in grids] == [2, 1]
    with forced("cpu"):
        want = call("rabitq_fused_attend", given)
    # float32 on both sides, 600 terms in another order.
    assert mx.abs(got - want).max() < 1e-6


@pytest.mark.parametrize("dim", range(1, 257))
def test_tile_covers_a_row_and_fits(dim: int) -> None:
    for heads in (1, 2, 3, 4, 5, 7, 8, 12, 16, 71):
        for multiple in (1, 8) if dim % 8 == 0 else (1,):
            elements, lanes, rows, nsg = tile(dim, heads, multiple)
            assert lanes in (4, 8, 16, 32)
            assert elements * lanes >= dim
            assert elements % multiple == 0
            assert 1 <= rows <= min(heads, 8)
            assert 4 * pool_floats(elements, lanes, rows, nsg) <= MAX_POOL
            assert lanes == 32 or elements * rows <= MAX_REGISTERS


def test_every_pinned_nsg_within_the_budget_fits_threadgroup_memory() -> None:
    for dim in (32, 80, 128, 250, 256):
        for heads in (1, 2, 3, 4, 8, 16):
            for nsg in range(1, 33):
                if nsg * heads * (64 * -(-dim // 32) + 8) <= 32768:
                    elements, lanes, rows, used = tile(dim, heads, 1, nsg)
                    assert used == nsg
                    assert 4 * pool_floats(elements, lanes, rows, nsg) + 4 <= 32768


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("layout", ["lsb8", "lsb32"])
def test_unpack_codes(bits: int, layout: str) -> None:
    rng = np.random.default_rng(bits)
    for count in (1, 7, 8, 21, 64):
        codes = rng.integers(0, 2**bits, (2, 3, count), dtype=np.uint8)
        packed = pack(codes, bits, layout)
        assert packed.shape[-1] == packed_width(count, layout, bits)
        assert (np.array(unpack_codes(mx.array(packed), count, layout, bits)) == codes).all()


@pytest.mark.parametrize("dim", [1, 2, 64, 256])
def test_hadamard_matrix(dim: int) -> None:
    want = rotation(np.ones(dim), np.float64)
    assert (np.array(hadamard_matrix(dim)) == want.astype(np.float32)).all()


@pytest.mark.parametrize("table", [fused_sdpa, rabitq_attend, rvq_attend, scalar_attend], ids=lambda table: table.FUNCTION)
@pytest.mark.parametrize(("queries", "group"), [(1, 1), (32, 1), (33, 1), (1, 64), (11, 3), (70, 2)])
def test_many_queries_take_matrices(table: Any, queries: int, group: int) -> None:
    """More than 32 query rows of a KV head, by more than one query: 64 rows of it a threadgroup."""
    calls = []

    def recorded(kernel, arrays, template, grid, threadgroup, shapes, dtypes):
        calls.append((kernel.name.endswith("_many"), grid, threadgroup))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    given = table.arguments(np.random.default_rng(5), B=3, H=2, Q=queries, group=group, S=70)
    with using(recorded):
        call(table.FUNCTION, given)
    many, grid, threadgroup = calls[0]
    rows = queries * group
    assert len(calls) == 1 and many == (queries > 1 and rows > 32)
    assert not many or (grid, threadgroup) == ((3 * 2 * -(-rows // 64) * 256, 1, 1), (256, 1, 1))


def test_a_long_prefill_of_few_queries_is_split() -> None:
    """Parts of the keys go to threadgroups of their own, and the second pass merges them; then the output is rotated."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    rotated = rotation(np.where(np.arange(8) % 3, 1.0, -1.0), np.float32)
    given = flash_prefill.arguments(np.random.default_rng(6), Q=3, S=600, D=8, group=2, out_dtype=mx.float32, out_rotation=rotated)
    grids = []

    def recorded(kernel, arrays, template, grid, *rest):
        grids.append(grid)
        return EmulatedMetal()(kernel, arrays, template, grid, *rest)

    with using(recorded):
        got = call("flash_prefill_attend", given)
        mx.eval(got)
    assert [grid[1] for grid in grids] == [2, 1]
    with forced("cpu"):
        want = call("flash_prefill_attend", given)
    # float32 on both sides, 600 terms in another order.
    assert mx.abs(got - want).max() < 1e-6


@pytest.mark.parametrize("dim", range(8, 129, 8))
def test_tiles_fit_in_threadgroup_memory(dim: int) -> None:
    kernel = many_kernel("sized", (), "key_rows")
    for types in ((mx.float32, mx.float32), (mx.float16, mx.float32), (mx.float16, mx.float16)):
        for tables in (1, 512, MAX_TABLES):
            keys = Many(kernel, *types).block(dim, tables)
            assert keys in (8, 16, 32)
            sizes = [*(keys * (dim + 8) * t.size for t in types), 12 * keys, 4 * 8, 4 * tables]
            assert sum(-(-size // 16) * 16 for size in sizes) <= GROUP_BYTES
