"""Keys coded before RoPE in one pass, which undoes it and counts what the codes lost: against the three passes, and float64."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from formats.container import open_container
from kvtool.archive import save
from kvtool.bench.filing import synthetic
from kvtool.model import LoadedModel
from kvtool.probe import probe_model
from kvtool.segment_work import stripped
from veloxquant_mlx import native
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.codecs._base import Codec
from veloxquant_mlx.native.encoding import Undo
from veloxquant_mlx.transfer.rope_angles import PAGE, undoing
from veloxquant_mlx.transfer.rope_spec import RopeSpec

pytestmark = pytest.mark.skipif(not native.built(), reason="the native back end was not built")

SPECS = ("rvq-4", "rvq-2+2:nocenter", "rvq-5", "rabitq", "rabitq-4", "affine-4", "affine-3:token:group=7")
ROPES = (
    RopeSpec("a", 64, base=1e4),
    RopeSpec("a", 64, "interleaved", base=1e6, magnitude=1.25),
    RopeSpec("a", 20, base=1e4, first=6),
    RopeSpec("a", 48, "interleaved", base=1e4, first=16),
    RopeSpec("a", 32, base=1e4, first=16),
)


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.level()
    native.set_level(request.param)
    yield request.param
    native.set_level(before)


def rows(count: int, size: float = 1.0, dim: int = 64) -> mx.array:
    rng = np.random.default_rng(count)
    return mx.array((size * (rng.standard_normal((2, count, dim)) + 2 * rng.standard_normal((2, 1, dim)))).astype(np.float32))


def f64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def assert_one_pass(codec: Codec, x: mx.array, at: np.ndarray, rope: RopeSpec | None) -> None:
    """Parts are those of rows before RoPE, bit for bit, and the loss is that of their decoded rows."""
    undo = undoing(rope, at)
    found = codec.encode_measured(x, undo)
    assert found is not None
    before = x.astype(mx.float32) if rope is None else stripped(x, at, rope)
    wanted = codec.encode(before)
    assert found[0].keys() == wanted.keys()
    assert all(mx.array_equal(found[0][name], part).item() for name, part in wanted.items())
    decoded = f64(codec.decode(wanted, x.shape, mx.float32))
    energy, error = (np.square(f64(before)).sum(), np.square(f64(before) - decoded).sum())
    # Float32 through the rotation, 2e-7 of a row: of no account beside an error of 1e-3 or more of it.
    assert np.isclose(found[1].energy, energy, rtol=1e-5) and np.isclose(found[1].error, error, rtol=1e-3)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("spec", SPECS)
def test_one_pass_is_three(level: str, spec: str, dtype: mx.Dtype) -> None:
    for i, rope in enumerate((None, *ROPES)):
        assert_one_pass(parse_codec(spec).k, rows(40 + i).astype(dtype), np.arange(40 + i) + PAGE - 20, rope)


@pytest.mark.parametrize("spec", SPECS)
def test_positions_in_any_order_and_rows_where_they_lie(spec: str) -> None:
    at = np.random.default_rng(0).permutation(3 * PAGE)[:90]
    assert_one_pass(parse_codec(spec).k, rows(180).astype(mx.float16)[:, 30:120], at, ROPES[0])
    assert_one_pass(parse_codec(spec).k, rows(180).astype(mx.float16)[:, ::2], at - PAGE, ROPES[1])


@pytest.mark.parametrize("size", [1e-30, 1e-15, 1e20, 1e35])
@pytest.mark.parametrize("spec", SPECS)
def test_losses_beyond_float32(spec: str, size: float) -> None:
    """Squares that float32 has no number for."""
    codec, x = parse_codec(spec).k, rows(40, size)
    parts, loss = codec.encode_measured(x, None) or ({}, None)
    assert loss is not None
    decoded = f64(codec.decode(parts, x.shape, mx.float32))
    wanted = (np.square(f64(x) - decoded).sum(), np.square(f64(x)).sum())
    # In float32 the squares of affine's tiny rows vanish, as they did.
    least = 1e-38 if codec.id == "affine" or size < 1e-20 else 0.0
    assert np.allclose(loss, wanted, rtol=1e-3, atol=least)


def test_nothing_is_lost_of_zeros_and_of_a_mean_alone() -> None:
    for spec in SPECS:
        parts, loss = parse_codec(spec).k.encode_measured(mx.zeros((2, 9, 64)), None) or ({}, None)
        assert parts and loss == (0.0, 0.0)
    _, loss = parse_codec("rvq-4").k.encode_measured(mx.ones((2, 9, 64)), None) or ({}, None)
    assert loss is not None and loss.error <= 1e-6 * loss.energy and loss.energy == 2 * 9 * 64


@pytest.mark.parametrize("value", [np.nan, np.inf, 2e36])
def test_what_no_code_can_hold_is_left_to_the_other_path(value: float) -> None:
    x = np.array(rows(40))
    x[1, 7, 3] = value
    assert parse_codec("rvq-4").k.encode_measured(mx.array(x), undoing(ROPES[0], np.arange(40))) is None


@pytest.mark.parametrize("fault", ["ratio", "position", "entries"])
def test_faults_are_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = undoing

    def wrong(rope: RopeSpec, at: np.ndarray) -> Undo:
        undo = right(rope, at + (fault == "position"))
        assert undo is not None
        return undo._replace(ratio=undo.ratio * (1.001 if fault == "ratio" else 1), paired=undo.paired ^ (fault == "entries"))

    monkeypatch.setattr(f"{__name__}.undoing", wrong)
    with pytest.raises(AssertionError):
        assert_one_pass(parse_codec("rvq-4").k, rows(40), np.arange(40) + 1, ROPES[1])


@pytest.mark.parametrize("codec", ["rvq-4", "k=rabitq-4,v=affine-4"])
def test_files_are_those_of_three_passes(codec: str, tiny_a: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot, files = synthetic(tiny_a, probe_model(tiny_a.model), 300, 3), (tmp_path / "a.kv", tmp_path / "b.kv")
    save(snapshot, files[0], codec=codec)
    monkeypatch.setattr("kvtool.segment_work.converting", SimpleNamespace(in_use=lambda dim: False))
    save(snapshot, files[1], codec=codec)
    digests, quality = [], []
    for path in files:
        with open_container(path) as reader:
            digests.append({name: info.blake3 for name, info in reader.tensors.items()})
            quality.append(json.dumps(reader.manifest.quality, default=str))
    assert digests[0] == digests[1] and quality[0] == quality[1]
