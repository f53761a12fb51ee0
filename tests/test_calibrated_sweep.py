"""Calibrated codecs in a sweep: bound to every layer, by both protocols, with tables from a file or from the text's own cache."""

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.errors import IncompatibleError
from kvtool import calibrations
from kvtool.arms import TextArms
from kvtool.binding import Binding, bind, layer_sources
from kvtool.calibrations import Calibration
from kvtool.cli import run
from kvtool.model import LoadedModel
from kvtool.roundtrip import parse_roundtrip
from tests.texts import text
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
def test_tables_of_the_texts_own_cache(protocol: str, tiny_a: LoadedModel) -> None:
    base = TextArms(tiny_a, "prose", list(ids(tiny_a)), protocol, PREFIX)
    arm = base.arm(parse_roundtrip("tc-4" + WINDOW))
    assert not arm.failed and arm.coded_bytes == base.arm(parse_roundtrip("tc-4" + WINDOW)).coded_bytes
    assert any("at no more bytes" in text for text in arm.problems)  # at 200 tokens tables do not pay everywhere


def test_carried_tables_count_once(tiny_a: LoadedModel, calibration: Calibration) -> None:
    snapshot = kvtool.capture(tiny_a, list(ids(tiny_a)))
    trip = parse_roundtrip("tc-3")
    binding = bind(trip.plan, layer_sources(snapshot.states, snapshot.probes), calibration, None)
    assert binding is not None
    sources = layer_sources(snapshot.states, snapshot.probes)
    carrying = bind(parse_roundtrip("tc-3:carry").plan, sources, calibration, None, compare=False)
    assert carrying is not None
    carried = {key: c for key, c in carrying.codecs.items() if isinstance(c, Tc)}
    assert len(carried) == 2 * len(snapshot.states)
    counts = []
    for codecs in (binding.codecs, carried):
        trip = parse_roundtrip("tc-3").bound(Binding(codecs=dict(codecs)))
        for start in (0, 64, 128):
            for name, (state, probe) in enumerate(zip(snapshot.states, snapshot.probes, strict=True)):
                for role, rows, about in (("k", state.k, probe.k), ("v", state.v, probe.v)):
                    assert isinstance(rows, mx.array) and about is not None
                    trip.rows(str(name), role, rows[:, start : start + 64], np.arange(start, start + 64), about)
        assert not trip.failed
        counts.append(trip.coded_bytes)
    heads, dim = tiny_a.model.args.num_key_value_heads, 64
    tables = sum(c.nbytes((heads, 0, dim), mx.float32) - 2 * heads * 2 * (c.role == "v") for c in carried.values())  # range: per block
    assert counts[1] - counts[0] == tables > counts[0] / 10


def test_unbound_is_refused(tiny_a: LoadedModel, calibration: Calibration) -> None:
    with pytest.raises(IncompatibleError, match="whose weights"):
        other = kvtool.load_model("tiny-b")
        kvtool.sweep(other, {"p": list(ids(tiny_a))}, ["tc-2"], prefix=PREFIX, tokens=8, calibration=calibration)


def test_a_calibration_of_another_model(tiny_a: LoadedModel, tiny_b: LoadedModel, calibration: Calibration) -> None:
    """Taken where that is asked for, with what the model's own weights would give; by file or digest alone."""
    options = {"prefix": PREFIX, "tokens": 20, "foreign_calibration": True}
    found = kvtool.sweep(tiny_b, {"p": list(ids(tiny_a))}, ["tc-3"], calibration=calibration.path, **options)  # type: ignore[arg-type]
    assert (found.model, found.calibration_of, found.calibration) == ("tiny-b", "tiny-a", calibration.digest)
    same = Calibration(replace(calibration.file, model=tiny_b.info), calibration.digest)
    own = kvtool.sweep(tiny_b, {"p": list(ids(tiny_a))}, ["tc-3"], prefix=PREFIX, tokens=20, calibration=same)
    assert own.calibration_of is None and own.rows[-1].kl == found.rows[-1].kl is not None
    for spec in (None, "auto", "self"):
        with pytest.raises(ValueError, match=r"\[calibration\] a foreign one must be a file or a digest, but got"):
            kvtool.sweep(tiny_b, {"p": list(ids(tiny_a))}, ["tc-3"], calibration=spec, **options)  # type: ignore[arg-type]


def test_a_calibration_of_other_shapes(tiny_a: LoadedModel, calibration: Calibration) -> None:
    shapes = dict.fromkeys(calibration.layers("tc"), (2, 64))
    assert calibrations.resolve_foreign(calibration, shapes) is calibration
    for wrong, said in (
        (shapes | {"1": (3, 64)}, "tables of layer 1 for 2 heads of 64, this model has 3 of 64"),
        (shapes | {"1": (2, 32)}, "for 2 heads of 64, this model has 2 of 32"),
        ({"0": (2, 64)}, "this model has no such keys and values"),
        (shapes | {"9": (2, 64)}, "no tables of layer 9, which this model has"),
    ):
        with pytest.raises(IncompatibleError, match=said):
            calibrations.resolve_foreign(calibration, wrong)
    skipping = Calibration(replace(calibration.file, skipped={"9": "recurrent"}), calibration.digest)
    assert calibrations.resolve_foreign(skipping, shapes | {"9": (2, 64)}) is skipping


def test_the_command(tiny_a: LoadedModel, calibration: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text(text("prose")[:700])
    command = ["eval", "--model", "tiny-a", "--text", str(tmp_path / "t.txt"), "--prefix", "100", "--n", "40", "--codec", "tc-3,rvq-3"]
    assert run([*command, "--calibration", str(calibration.path), "--protocol", "streaming", "--chunk", "512", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["calibration"] == calibration.digest and {r["codec"].split(",")[0] for r in data["rows"]} == {"own", "tc-3", "rvq-3"}
    assert run([*command, "--calibration", "auto"]) == 5
    command[command.index("tiny-a")] = "tiny-b"
    assert run([*command, "--calibration", str(calibration.path)]) == 5
    assert "whose weights" in capsys.readouterr().err
    assert run([*command, "--calibration", str(calibration.path), "--foreign-calibration"]) == 0
    out, err = capsys.readouterr()
    assert "tables calibrated on tiny-a" in out and f"{calibration.digest[:12]}, which is of tiny-a, not of tiny-b" in err
    assert run(["eval", str(tmp_path / "t.txt"), "--foreign-calibration", "--model", "tiny-b"]) == 2
    assert "--foreign-calibration goes with --codec" in capsys.readouterr().err
