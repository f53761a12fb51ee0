"""Files of additive words: keys bound to tables of their layer and rate, values of another codec, recodes of the header alone."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.calibration import to_bytes, write_calibration
from formats.container import open_container
from formats.errors import IncompatibleError, ManifestError
from formats.tables import digest_of
from kvtool.arms import bound_trip
from kvtool.binding import bind, layer_sources, metric_of
from kvtool.calibrating import tables_of
from kvtool.calibrations import Calibration
from kvtool.capturing import Snapshot
from kvtool.cli import run
from kvtool.model import LoadedModel
from kvtool.moments import collect
from kvtool.roundtrip import parse_roundtrip
from kvtool.states import CacheState
from tests.library import f64, ids, rewrite, tiny
from tests.texts import text
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.codecs.commvq_additive import CommVqAdditive

WINDOW = ",sink=4,recent=16"
TOKENS = 200
CODED = slice(4, TOKENS - 16)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTOOL_CALIBRATIONS", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture(scope="module")
def snapshot(tiny_a: LoadedModel) -> Snapshot:
    return kvtool.capture(tiny_a, tiny_a.tokenizer.encode(text("prose"))[:TOKENS])


@pytest.fixture(scope="module")
def calibration(tiny_a: LoadedModel) -> Calibration:
    tokens = tiny_a.tokenizer.encode(text("technical"))[:320]
    return tables_of(collect(tiny_a, {"technical": tokens}), rates=(), additive=(1.0, 2.0))


@pytest.fixture(scope="module")
def source(snapshot: Snapshot, calibration: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("additive") / "x.kv"
    report = kvtool.save(snapshot, path, codec="commvq-2:additive" + WINDOW, calibration=calibration)
    assert report.calibration == calibration.digest and report.fallbacks == ()
    return path


def states_of(path: Path, **options: Any) -> list[CacheState]:
    with kvtool.open(path, **options) as archive:
        return [archive.state(i) for i in range(len(archive.manifest.layers))]


def turned(keys: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Keys (H, S, D) of half-split pairs turned by angles (S, D / 2), float64."""
    a, b = np.split(keys, 2, axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=-1)


def frequencies(snapshot: Snapshot, **changes: Any) -> np.ndarray:
    probe = snapshot.probes[0].k
    assert probe is not None and probe.rope is not None and probe.rope.pairing == "half"
    return replace(probe.rope, **changes).frequencies


def test_keys_are_the_words_of_their_layer_and_rate(source: Path, snapshot: Snapshot, calibration: Calibration) -> None:
    """From the file's bytes and the calibration's arrays in float64: the sum of words, then RoPE. Bytes of a row are those shared out."""
    at, stages = np.arange(TOKENS)[CODED, None] * frequencies(snapshot), 0
    with open_container(source) as reader:
        assert {c.id for c in reader.manifest.codecs} == {"additive", "rvq", "raw"}
        assert [c.params["bits"] for c in reader.manifest.codecs if c.id == "rvq"] == [[4]]
        for i, state in enumerate(states_of(source, calibration=calibration)):
            role, table = reader.manifest.layers[i].k, calibration.file.tables["additive-2"][str(i)]
            assert role is not None and role.segments[1].frame == "pre"
            codes, column, rows = reader.array(role.segments[1].tensors["codes"])[0], 0, []
            back = table["back"].astype(np.float64) * table["back_size"][..., None]
            for h, stage in enumerate(table["stage"]):
                own = codes[:, column + stage]
                y = table["words"][h].astype(np.float64)[np.arange(len(stage)), own]
                rows.append(y @ back[h] + table["mean"][h])
                column += int(stage.max()) + 1
            want = turned(np.stack(rows), at)
            assert column == codes.shape[1] and np.abs(want - f64(state.k[:, CODED])).max() < 2e-5 * np.abs(want).max()
            stages += column
    assert stages == 4 * 2 * 64 * 2 / 8


def test_what_is_restored_is_what_its_quality_says(source: Path, snapshot: Snapshot, calibration: Calibration, tiny_a: LoadedModel) -> None:
    assert kvtool.load(source, tiny_a, calibration=calibration).usable == TOKENS
    with open_container(source) as reader:
        quality = reader.manifest.quality[-1]
    assert quality["calibration"] == calibration.digest
    states = states_of(source, calibration=calibration)
    for role in ("k", "v"):
        pairs = [(f64(getattr(a, role))[:, CODED], f64(getattr(b, role))[:, CODED]) for a, b in zip(states, snapshot.states, strict=True)]
        error = sum(np.square(a - b).sum() for a, b in pairs) / sum(np.square(b).sum() for _, b in pairs)
        assert error == pytest.approx(quality[f"{role}_relative_error"], rel=0.02) and error < 0.1


@pytest.mark.parametrize("how", [{"rope_theta": 5e5}, {"shift": 37}])
def test_recode_edits_the_header_alone(
    how: dict[str, Any], source: Path, snapshot: Snapshot, calibration: Calibration, tmp_path: Path
) -> None:
    """Coded tensors are copied byte for byte, without the calibration; what is decoded is turned as float64 turns it."""
    report = kvtool.recode(source, tmp_path / "y.kv", **how)
    assert report.quality is not None and report.quality["partly"] == [f"{i}.k" for i in range(4)]  # the exact rows beside them
    with open_container(source) as a, open_container(tmp_path / "y.kv") as b:
        coded = [name for name in a.tensors if not name.endswith(".data")]
        assert len(coded) >= 8 and all(a.array(name).tobytes() == b.array(name).tobytes() for name in coded)
    new = frequencies(snapshot, base=how["rope_theta"]) if "rope_theta" in how else frequencies(snapshot)
    at = np.arange(TOKENS)[CODED, None]
    angles = (at + how.get("shift", 0)) * new - at * frequencies(snapshot)
    before, after = states_of(source, calibration=calibration), states_of(tmp_path / "y.kv", calibration=calibration)
    for x, y in zip(before, after, strict=True):
        want = turned(f64(x.k[:, CODED]), angles)
        # Angles as the live model has them, in float32: 240 at most, so wrong by 240 x 2^-24.
        assert np.abs(want - f64(y.k[:, CODED])).max() < 2e-5 * np.abs(want).max()
        assert np.array_equal(f64(x.v[:, CODED]), f64(y.v[:, CODED]))


def test_a_rate_without_tables_names_those_there(snapshot: Snapshot, calibration: Calibration, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"has no tables for commvq-3:additive, but for N of 1, 2$"):
        kvtool.save(snapshot, tmp_path / "x.kv", codec="commvq-3:additive", calibration=calibration)
    bare = Calibration(replace(calibration.file, tables={"tc": calibration.file.tables["tc"]}), "f" * 64)
    with pytest.raises(IncompatibleError, match="has no tables for commvq-2:additive, but for tc"):
        kvtool.save(snapshot, tmp_path / "x.kv", codec="commvq-2:additive", calibration=bare)
    for spec, what in (("k=commvq-2:additive,v=tc-2", "each is one for both"), ("commvq-2:additive,frame=post", "before RoPE")):
        with pytest.raises(ValueError, match=what):
            kvtool.save(snapshot, tmp_path / "x.kv", codec=spec, calibration=calibration)
    with pytest.raises(ValueError, match=r"calibration=.*model="):
        kvtool.save(snapshot, tmp_path / "x.kv", codec="commvq-2:additive")
    assert not (tmp_path / "x.kv").exists()


def test_without_its_calibration(source: Path, calibration: Calibration, tiny_a: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(IncompatibleError, match=calibration.digest):
        kvtool.load(source, tiny_a)
    assert run(["inspect", str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibrations"] == [{"digest": calibration.digest, "here": False}]


def bound(snapshot: Snapshot, calibration: Calibration, spec: str = "commvq-2:additive") -> Any:
    return bind(parse_codec(spec + WINDOW), layer_sources(snapshot.states, snapshot.probes), calibration, None)


def test_fallbacks(snapshot: Snapshot, calibration: Calibration, tiny_a: LoadedModel, tmp_path: Path) -> None:
    """Layers without tables, and tables of other rows: no worse than the training-free codec of as many bytes; values are as planned."""
    file = calibration.file
    tables = {kind: {n: a for n, a in layers.items() if n != "1"} for kind, layers in file.tables.items()}
    part = Calibration(replace(file, tables=tables, skipped={"1": "sliding window"}), "e" * 64)
    report = kvtool.save(snapshot, tmp_path / "x.kv", codec="commvq-2:additive" + WINDOW, calibration=part)
    assert report.fallbacks == ("1.k: rvq-2, sliding window",)
    kvtool.load(tmp_path / "x.kv", tiny_a, calibration=part)
    far = {n: dict(a) | {"mean": a["mean"] + 50} for n, a in file.tables["additive-2"].items()}
    found = bound(snapshot, Calibration(replace(file, tables={"additive-2": far}), "d" * 64))
    assert {codec.id for codec in found.codecs.values()} == {"rvq"} and len(found.fallbacks) == 4
    assert all("times less costly" in text for text in found.fallbacks)
    kept = bound(snapshot, calibration)
    assert sorted(kept.codecs) == [(str(i), "k") for i in range(4)] and not kept.fallbacks


def test_the_metric_is_the_tables(calibration: Calibration) -> None:
    tables = calibration.tables("additive-2", "0")
    for h, i in ((0, 0), (1, 5)):
        error = np.zeros((tables.heads, tables.dim))
        error[h] = tables.back[h, i]
        assert np.square(error.reshape(-1) @ metric_of(tables, "k")).sum() == pytest.approx(tables.cost[h, i], rel=1e-3)


def test_carried(snapshot: Snapshot, calibration: Calibration, tiny_a: LoadedModel, tmp_path: Path) -> None:
    """Tables learnt from the cache go along, 8 bits an entry, and nothing else is needed; of few rows those of a calibration do not pay."""
    codec = "commvq-2:additive" + WINDOW
    report = kvtool.save(snapshot, tmp_path / "y.kv", codec=codec, model=tiny_a, calibration="self")
    assert report.calibration is None and report.quality is not None and report.quality["calibration"] == "carried"
    kvtool.load(tmp_path / "y.kv", tiny_a)
    with open_container(tmp_path / "y.kv") as reader:
        assert not report.fallbacks and sum(name.endswith(".k.1.words") for name in reader.tensors) == 4
        words = reader.tensors["0.k.1.words"]
        assert words.dtype == "I8" and tuple(words.shape) == (2, 64, 256)
    # 180 rows, fewer than words: each is its own word, rounded to 8 bits.
    for state, exact in zip(states_of(tmp_path / "y.kv"), snapshot.states, strict=True):
        assert np.square(f64(state.k) - f64(exact.k)).sum() < 1e-3 * np.square(f64(exact.k)).sum()
    lent = kvtool.save(snapshot, tmp_path / "y.kv", codec="commvq-2:additive:carry" + WINDOW, calibration=calibration)
    assert lent.calibration is None and len(lent.fallbacks) == 4 and all("at no more bytes" in text for text in lent.fallbacks)
    kvtool.load(tmp_path / "y.kv", tiny_a)


def test_carried_tables_count_once(snapshot: Snapshot, calibration: Calibration) -> None:
    trip = parse_roundtrip("commvq-2:additive:carry" + WINDOW)
    assert trip.calibrated
    found = bound(snapshot, calibration, "commvq-2:additive:carry")
    codec = bound(snapshot, calibration).codecs["0", "k"]
    assert isinstance(codec, CommVqAdditive)
    carried = codec.bind(codec.tables, "0", None)  # type: ignore[arg-type]
    trip = trip.bound(replace(found, codecs={("0", "k"): carried}))
    probe, rows = snapshot.probes[0].k, snapshot.states[0].k
    assert probe is not None and isinstance(rows, mx.array)
    for start in (4, 84):
        trip.rows("0", "k", rows[:, start : start + 80], np.arange(start, start + 80), probe)
    heads, dim, stages = 2, 64, sum(codec.stages or ())
    tables = heads * dim * (4 + (dim + 4) + (256 + 4) + 1)
    assert not trip.failed and trip.coded_bytes == 160 * stages + tables


def test_round_trips_are_what_files_hold(snapshot: Snapshot, calibration: Calibration, source: Path) -> None:
    trip = bound_trip(parse_roundtrip("commvq-2:additive" + WINDOW), snapshot.states, snapshot.probes, calibration, None)  # type: ignore[arg-type]
    for i, (live, stored) in enumerate(zip(snapshot.states, states_of(source, calibration=calibration), strict=True)):
        for role in ("k", "v"):
            rows, probe = getattr(live, role)[:, CODED], getattr(snapshot.probes[i], role)
            back = trip.rows(str(i), role, rows, np.arange(TOKENS)[CODED], probe)
            assert np.abs(f64(back) - f64(getattr(stored, role)[:, CODED])).max() < 1e-4 * np.abs(f64(back)).max()
    assert not trip.failed and not trip.problems
    assert trip.coded_bytes / trip.coded_values * 8 == pytest.approx((2 + 4.25 + 16 / 180) / 2)  # the mean of values


def test_transcoding(source: Path, calibration: Calibration, tmp_path: Path) -> None:
    kvtool.recode(source, tmp_path / "rvq.kv", codec="rvq-8", calibration=calibration)
    report = kvtool.recode(tmp_path / "rvq.kv", tmp_path / "y.kv", codec="commvq-1:additive" + WINDOW, calibration=calibration)
    assert report.calibration == calibration.digest
    first, again = states_of(source, calibration=calibration), states_of(tmp_path / "y.kv", calibration=calibration)
    for x, y in zip(first, again, strict=True):
        assert np.square(f64(x.k) - f64(y.k)).sum() < 0.3 * np.square(f64(x.k)).sum()


def test_hostile_manifests(source: Path, calibration: Calibration, tmp_path: Path) -> None:
    def edited(change: dict[str, Any]) -> Path:
        def edit(manifest: dict[str, Any]) -> None:
            next(c["params"] for c in manifest["codecs"] if c["id"] == "additive").update(change)

        return rewrite(source, tmp_path / "y.kv", edit)

    for change, kind, what in (
        ({"layer": "99"}, IncompatibleError, "no additive-2 tables of layer 99"),
        ({"bits": 3.0}, IncompatibleError, "no additive-3 tables"),
        ({"bits": 1.0}, ManifestError, "does not fit calibration"),
        ({"stages": [1, 1]}, ManifestError, "does not fit calibration"),
    ):
        with pytest.raises(kind, match=what):
            states_of(edited(change), calibration=calibration)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "deepseek_v2", "mamba"])
def test_families(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    captured = kvtool.capture(model, ids(100))
    codec = "commvq-2:additive,sink=4,recent=8"
    report = kvtool.save(captured, tmp_path / "x.kv", codec=codec, model=model, calibration="self")
    assert kvtool.load(tmp_path / "x.kv", model).usable >= 99
    assert any("and values of" in text for text in report.fallbacks) == (family == "deepseek_v2")


def test_commands(calibration: Calibration, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_calibration(tmp_path / "a.cal", calibration.file)
    assert digest_of(to_bytes(calibration.file)) == calibration.digest
    (tmp_path / "p.txt").write_text(text("prose")[:600])
    made, cal = str(tmp_path / "x.kv"), str(tmp_path / "a.cal")
    export = ["export", "--model", "tiny-a", "--prompt-file", str(tmp_path / "p.txt"), "-o", made, "--codec", "commvq-2:additive", "--json"]
    assert run([*export, "--calibration", cal]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"] == calibration.digest
    go_on = ["import", made, "--model", "tiny-a", "--max-tokens", "2"]
    assert run(go_on) == 5 and run([*go_on, "--calibration", cal]) == 0
    capsys.readouterr()
    assert run([*export, "--calibration", cal, "--carry"]) == 0
    assert json.loads(capsys.readouterr().out)["calibration"] is None
    assert run(go_on) == 0
