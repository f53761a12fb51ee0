"""The affine codec: its error bound, the kernel it feeds, and the groups that files cut rows into."""

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.errors import ManifestError
from kvtool.segment_work import decode_blocks
from tests import codec_oracles as oracle
from tests.library import ids, tiny
from tests.test_codecs import bits_of, numpy64, sample
from veloxquant_mlx.codecs import CODECS, _base, parse_codec
from veloxquant_mlx.codecs.affine import Affine
from veloxquant_mlx.metal import scalar_fused_decode_attend

SHAPES = ((2, 77, 80), (1, 1, 6), (2, 64, 64), (1, 33, 62))


def spread(side: np.ndarray, codec: Affine, shape: tuple[int, int, int]) -> np.ndarray:
    axis = 1 if codec.per == "channel" else 2
    return np.repeat(side, codec.group, axis=axis)[:, : shape[1], : shape[2]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("per", ("channel", "token"))
@pytest.mark.parametrize("group", (1, 7, 32, 128))
@pytest.mark.parametrize("bits", range(1, 9))
def test_error_is_at_most_half_a_step_and_the_step_is_the_groups_range(shape, per, group, bits) -> None:
    subject, array = Affine(bits, group, per), sample(shape, seed=bits)
    parts, x = subject.encode(array), numpy64(array)
    codes = oracle.unpack(np.array(parts["codes"]), bits, shape[2])
    scale, zero = (spread(numpy64(parts[part]), subject, shape) for part in ("scale", "zero"))
    decoded = numpy64(subject.decode(parts, shape, mx.float32))
    largest = np.abs(x).max()
    # float32: the product and the sum are each rounded once.
    np.testing.assert_allclose(decoded, scale * codes + zero, rtol=0, atol=3e-7 * largest)
    assert np.all(np.abs(decoded - x) <= scale / 2 + 3e-7 * largest)
    axis = 1 if per == "channel" else 2
    edges = range(0, shape[axis], group)
    low, high = (spread(f.reduceat(x, edges, axis=axis), subject, shape) for f in (np.minimum, np.maximum))
    assert np.all(zero <= low) and np.all(zero >= low - 2**-7 * np.abs(low))
    reach = (high - zero) / ((1 << bits) - 1)
    assert np.all(scale <= reach * (1 + 2**-7) + 1e-12) and np.all(scale >= reach * (1 - 1e-6))


def test_a_constant_group_is_as_exact_as_bfloat16_pairs() -> None:
    x = mx.full((1, 40, 64), 0.1)
    decoded = Affine(2, 32, "channel").decode(Affine(2, 32, "channel").encode(x), x.shape, mx.float32)
    # zero is 0.1 rounded down, step what is left of it, itself rounded to 8 bits.
    np.testing.assert_allclose(np.array(decoded), 0.1, rtol=2**-15)
    zeros = mx.zeros((1, 40, 64))
    assert not mx.any(Affine(4, 32, "token").decode(Affine(4, 32, "token").encode(zeros), zeros.shape, mx.float32)).item()


@pytest.mark.parametrize(("bits", "group", "tokens", "dim"), ((4, 32, 77, 80), (2, 32, 64, 64), (3, 64, 100, 96), (8, 16, 5, 128)))
def test_parts_are_the_operands_of_the_fused_kernel(bits: int, group: int, tokens: int, dim: int) -> None:
    plan = parse_codec(f"affine-{bits}:group={group}")
    keys, values = sample((2, tokens, dim), seed=1), sample((2, tokens, dim), seed=2)
    keys, values = mx.clip(keys, -3, 3), mx.clip(values, -3, 3)
    k, v = plan.k.encode(keys), plan.v.encode(values)
    q = mx.random.normal((1, 4, 1, dim), key=mx.random.key(3))
    operands = [part[None] for part in (k["codes"], k["scale"], k["zero"], v["codes"], v["scale"], v["zero"])]
    got = scalar_fused_decode_attend(q, *operands, group, dim**-0.5, packed="lsb8", k_bits=bits, v_bits=bits)
    decoded = [codec.decode(parts, keys.shape, mx.float32) for codec, parts in ((plan.k, k), (plan.v, v))]
    wanted = mx.fast.scaled_dot_product_attention(q, *(array[None] for array in decoded), scale=dim**-0.5)
    # The kernel's result is float16.
    np.testing.assert_allclose(np.array(got.astype(mx.float32)), np.array(wanted), atol=2**-10 * float(mx.max(mx.abs(wanted)).item()))


@pytest.mark.parametrize("spec", ("affine-3", "affine-3:group=7", "affine-3:token", "rvq-4", "raw"))
def test_a_file_read_in_blocks_is_the_file_read_at_once(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, x = parse_codec(f"k={spec},v=raw").k, sample((2, 100, 64))
    parts = subject.encode(x)
    whole = subject.decode(parts, x.shape, mx.float32)
    monkeypatch.setattr(_base, "BLOCK_VALUES", 2 * 64 * 40)
    blocks = list(decode_blocks(subject, parts, x.shape))
    assert len(blocks) > 1 and [start for start, _, _ in blocks] == [0, *(stop for _, stop, _ in blocks[:-1])]
    assert np.array_equal(bits_of(mx.concatenate([rows for _, _, rows in blocks], axis=1)), bits_of(whole))


@pytest.mark.parametrize("spec", ("affine-3", "k=affine-5:token,v=affine-2:channel:group=9"))
def test_files_hold_exactly_what_the_codec_gives(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan, count = tiny("llama"), parse_codec(spec), 80
    snapshot = kvtool.capture(model, ids(count))
    monkeypatch.setattr(_base, "BLOCK_VALUES", 1)  # every group is a block of its own
    kvtool.save(snapshot, tmp_path / "a.kv", codec=f"{spec},sink=4,recent=5,frame=post")
    restored = kvtool.load(tmp_path / "a.kv", model)
    for was, got in zip(snapshot.states, restored.cache, strict=True):
        for codec, rows, array in ((plan.k, was.k, got.keys), (plan.v, was.v, got.values)):
            middle = rows[:, 4 : count - 5]
            expected = codec.decode(codec.encode(middle), middle.shape, middle.dtype)
            assert np.array_equal(bits_of(array[0, :, 4 : count - 5]), bits_of(expected))


@pytest.mark.parametrize("per", ("channel", "token"))
def test_values_that_are_not_finite_are_refused_with_their_places(per: str) -> None:
    x = np.zeros((2, 5, 64), np.float32)
    x[1, 3, 17] = math.nan
    with pytest.raises(ValueError, match=r"1 of 640 values .*\(head 1, token 3, dim 17\).*--codec raw"):
        parse_codec(f"k=affine-4:{per},v=raw").k.encode(mx.array(x))


@pytest.mark.parametrize("spec", ("affine-4", "affine-2:group=64", "k=affine-4:token,v=affine-2:channel:group=128", "k=affine-1,v=rvq-4"))
def test_specs_round_trip(spec: str) -> None:
    plan = parse_codec(spec)
    assert plan.spec() == spec
    assert parse_codec(f"k={plan.k.spec()},v={plan.v.spec()}") == plan


def test_defaults_are_kivis() -> None:
    plan = parse_codec("affine-2")
    assert (plan.k, plan.v) == (Affine(2, 32, "channel"), Affine(2, 32, "token"))
    # 16 bits of step and 16 of zero per 32 values.
    assert plan.k.nbytes((2, 64, 64), mx.float16) == plan.v.nbytes((2, 64, 64), mx.float16) == 2 * 64 * 64 * 3 // 8


@pytest.mark.parametrize(
    "spec", ("affine", "affine-9", "affine-0", "affine-4:group=0", "affine-4:group=1025", "affine-4:ls", "affine-4:group=x")
)
def test_wrong_specs_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="affine"):
        parse_codec(spec)


@pytest.mark.parametrize(
    "change",
    (
        {"bits": 9},
        {"bits": 0},
        {"bits": True},
        {"bits": 4.0},
        {"bits": None},
        {"group": 0},
        {"group": 1 << 40},
        {"group": "32"},
        {"per": "head"},
        {"per": ["token"]},
        {"per": None},
    ),
)
def test_impossible_params_are_refused(change: dict) -> None:
    with pytest.raises(ManifestError, match=next(iter(change))):
        CODECS["affine"].from_params(Affine(4, 32, "token").to_params() | change)
