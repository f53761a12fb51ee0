"""Calibrated codecs in a sweep: bound to every layer, by both protocols, with tables from a file or from the text's own cache."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.errors import IncompatibleError
from kvtool import calibrations
from kvtool.arms import TextArms, bound_trip
from kvtool.binding import own_moments
from kvtool.calibrations import Calibration
from kvtool.cli import run
from kvtool.model import LoadedModel
from kvtool.roundtrip import parse_roundtrip
from tests.texts import text
from veloxquant_mlx.codecs import Codec
from veloxquant_mlx.codecs.tc import Tc

PREFIX, N, WINDOW = 120, 100, ",sink=4,recent=16"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CALIBRATIONS", str(tmp_path / "store"))


@pytest.fixture(scope="module")
def calibration(calibration_a: bytes, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    path = tmp_path_factory.mktemp("sweep") / "a.cal"
    path.write_bytes(calibration_a)
    return calibrations.load(path)


def ids(model: LoadedModel) -> tuple[int, ...]:
    return tuple(model.tokenizer.encode(text("prose"))[: PREFIX + N + 1])


@pytest.mark.parametrize("protocol", ["prefix", "streaming"])
def test_a_sweep_with_a_calibration(protocol: str, tiny_a: LoadedModel, calibration: Calibration) -> None:
    codecs = ["rvq-2", "tc-2", "tc-4", "tcz-1", "raw"]
    options = {"protocol": protocol, "prefix": PREFIX, "tokens": N, "sink": 4, "recent": 16}
    report = kvtool.sweep(tiny_a, {"prose": list(ids(tiny_a))}, codecs, calibration=calibration, **options)  # type: ignore[arg-type]
    assert report.calibration == calibration.digest
    kl, bits = ({row.codec.split(",")[0]: getattr(row, name) for row in report.rows} for name in ("kl", "bits"))
    assert all(row.kl is not None and np.isfinite(row.kl) for row in report.rows)
    assert 0 < kl["tc-4"] < kl["tc-2"] and abs(kl["raw"]) < 1e-9 and kl["tc-4"] < kl["rvq-2"]
    # Blocks of 32 tokens are padded, and 2^7 tokens a forward are few for them and for the chunks of tcz.
    assert 1.95 < bits["tc-2"] < 2.6 and 3.9 < bits["tc-4"] < 5.2 and 0.8 < bits["tcz-1"] < 2.5
    raw = next(row for row in report.rows if row.codec.startswith("raw"))
    assert raw.codec == "raw"  # a lossless codec gets no window


def test_a_file_decodes_as_the_prefix_arm_saw_it(tiny_a: LoadedModel, calibration: Calibration, tmp_path: Path) -> None:
    """The sweep's coded rows are those of a file with the same codec: one KL, to rounding of the exact rows to 16 bits."""
    for spec in ("tc-3", "tcz-1"):
        base = TextArms(tiny_a, "prose", list(ids(tiny_a)), "prefix", PREFIX, calibration=calibration)
        arm = base.arm(parse_roundtrip(spec + WINDOW))
        kvtool.save(kvtool.capture(tiny_a, list(ids(tiny_a))[:PREFIX]), tmp_path / "x.kv", codec=spec + WINDOW, calibration=calibration)
        report = kvtool.evaluate(tmp_path / "x.kv", tiny_a, list(ids(tiny_a))[PREFIX:], tokens=N, calibration=calibration)
        assert report.arm("transferred").kl == pytest.approx(np.mean(arm.kl), rel=0.03)


@pytest.mark.parametrize("protocol", ["prefix", "streaming"])
def test_tables_of_the_texts_own_cache_are_counted_once(protocol: str, tiny_a: LoadedModel) -> None:
    base = TextArms(tiny_a, "prose", list(ids(tiny_a)), protocol, PREFIX, chunk=64)
    trip = parse_roundtrip("tc-4" + WINDOW)
    arm = base.arm(trip)
    assert trip.binding is None and not arm.failed
    bound = base.arm(parse_roundtrip("tc-4" + WINDOW))
    assert bound.coded_bytes == arm.coded_bytes
    carried = 0
    for codec in _codecs(base, "tc-4" + WINDOW):
        if isinstance(codec, Tc) and codec.keys is not None:
            carried += codec.nbytes((len(codec.keys), 0, len(codec.keys[0])), mx.float32)
    assert carried < arm.coded_bytes
    # Codes of 4 bits in blocks of 32 tokens, and rvq where tables do not pay: under 6 bits a value, and the tables.
    assert (arm.coded_bytes - carried) * 8 < 6.6 * arm.coded_values


def _codecs(base: TextArms, spec: str) -> list[Codec]:
    trip = parse_roundtrip(spec)
    trip = bound_trip(trip, base.states, base.probes, None, lambda: own_moments(base.model, base.told, trip.plan))
    assert trip.binding is not None
    return list(trip.binding.codecs.values())


def test_unbound_is_refused(tiny_a: LoadedModel, calibration: Calibration) -> None:
    with pytest.raises(IncompatibleError, match="whose weights"):
        other = kvtool.load_model("tiny-b")
        kvtool.sweep(other, {"p": list(ids(tiny_a))}, ["tc-2"], prefix=PREFIX, tokens=8, calibration=calibration)
    report = kvtool.robustness(["tc-2"])
    assert all("needs a calibration" in row.note for row in report.rows if row.refused) and any(row.refused for row in report.rows)


def test_the_command(tiny_a: LoadedModel, calibration: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text(text("prose")[:700])
    command = ["eval", "--model", "tiny-a", "--text", str(tmp_path / "t.txt"), "--prefix", "100", "--n", "40", "--codec", "tc-3,rvq-3"]
    assert run([*command, "--calibration", str(calibration.path), "--protocol", "streaming", "--chunk", "512", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["calibration"] == calibration.digest and {r["codec"].split(",")[0] for r in data["rows"]} == {"own", "tc-3", "rvq-3"}
    assert run([*command, "--calibration", "auto"]) == 5
