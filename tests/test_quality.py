"""--quality: the smallest rate of a ladder whose KL, measured on the prompt, stays below a limit; else nothing is written."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvtool
from formats.container import open_container
from formats.errors import QualityError
from kvtool import calibrations
from kvtool.arms import Arm, TextArms
from kvtool.calibrations import Calibration
from kvtool.cli import run
from kvtool.model import LoadedModel
from kvtool.quality import LADDERS, Quality, smallest_rate
from kvtool.roundtrip import Roundtrip, parse_roundtrip
from tests.texts import text
from veloxquant_mlx.codecs import CodecPlan, parse_codec

PLAN = parse_codec("raw,sink=4,recent=16")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CALIBRATIONS", str(tmp_path / "store"))


@pytest.fixture(scope="module")
def calibration(calibration_a: bytes, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    path = tmp_path_factory.mktemp("quality") / "a.cal"
    path.write_bytes(calibration_a)
    return calibrations.load(path)


@pytest.fixture(scope="module")
def snapshot(tiny_a: LoadedModel) -> kvtool.Snapshot:
    return kvtool.capture(tiny_a, tiny_a.tokenizer.encode(text("prose"))[:150])


@pytest.mark.parametrize("family", LADDERS)
@pytest.mark.parametrize("limit", [0.07, 0.3, 7.0])
def test_the_smallest_rate_below_the_limit(
    family: str, limit: float, snapshot: kvtool.Snapshot, tiny_a: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a made-up curve, KL = 4^(1 - rate): the rate that a walk along the ladder finds, in about log2 of its length."""

    def curve(self: TextArms, trip: Roundtrip) -> Arm:
        rate = float(trip.spec.partition("-")[2].partition(",")[0])
        arm = self.own
        return Arm(trip.spec, "prompt", arm.nll, (4 ** (1 - rate),), (True,), 0.0, 0.0, 0, 0, 0, 0, 0.0, False, ())

    monkeypatch.setattr(TextArms, "arm", curve)
    found = smallest_rate(tiny_a, snapshot, limit, family=family, plan=PLAN, calibration=Calibration.__new__(Calibration))
    want = next(rate for rate in LADDERS[family] if 4 ** (1 - float(rate)) <= limit)
    assert found.plan.full_spec() == f"{family}-{want},sink=4,recent=16" and found.kl == 4 ** (1 - float(want)) <= limit
    assert len(found.tried) <= 1 + len(LADDERS[family]).bit_length()
    with pytest.raises(QualityError, match="highest rate"):
        smallest_rate(tiny_a, snapshot, 4.0**-9, family=family, plan=PLAN, calibration=Calibration.__new__(Calibration))


def test_the_figure_is_a_streaming_sweeps(snapshot: kvtool.Snapshot, tiny_a: LoadedModel, calibration: Calibration) -> None:
    found: Quality = smallest_rate(tiny_a, snapshot, 0.05, family="tc", plan=PLAN, calibration=calibration)
    assert found.kl <= 0.05 and found.positions == 149 - 21
    base = TextArms(tiny_a, "p", list(snapshot.tokens or ()), "streaming", 21, 512, calibration)
    assert np.mean(base.arm(parse_roundtrip(found.plan.spec())).kl) == pytest.approx(found.kl, rel=1e-6)
    below = dict(found.tried)
    rates = LADDERS["tc"]
    at = rates.index(found.plan.spec().partition("-")[2].partition(",")[0])
    if at:
        assert below[f"tc-{rates[at - 1]},sink=4,recent=16"] > 0.05


def test_refusals(snapshot: kvtool.Snapshot, tiny_a: LoadedModel) -> None:
    for options, what in (
        ({"family": "rvq"}, "family must be"),
        ({"family": "tcz", "calibration": None}, "needs a calibration"),
        ({"family": "tc", "plan": parse_codec("raw,recent=140")}, "too short"),
    ):
        with pytest.raises(ValueError, match=what):
            smallest_rate(tiny_a, snapshot, 0.1, **{"plan": PLAN, "calibration": None, **options})  # type: ignore[arg-type]


def test_export(calibration: Calibration, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text(text("prose")[:450])
    made = tmp_path / "x.kv"
    export = ["export", "--model", "tiny-a", "--prompt-file", str(tmp_path / "p.txt"), "-o", str(made), "--sink", "4", "--recent", "16"]
    given = ["--calibration", str(calibration.path)]
    assert run([*export, *given, "--codec", "tc-2", "--quality", "kl=1e-9"]) == 7
    assert not made.exists() and "highest rate" in capsys.readouterr().err
    assert run([*export, *given, "--codec", "tc-2", "--quality", "kl=0.1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["quality"]["kl"] <= 0.1 == report["quality"]["kl_limit"] and report["codec"].startswith("tc-")
    with open_container(made) as reader:
        assert reader.manifest.quality[0]["kl"] == report["quality"]["kl"]
    assert run(["inspect", str(made)]) == 0
    assert "nats a token on the prompt" in capsys.readouterr().out
    for wrong in ("kl", "kl=x", "kl=-1", "ppl=1", "kl=inf"):
        assert run([*export, "--quality", wrong]) == 2
    assert run([*export, "--codec", "rvq-4", "--quality", "kl=1"]) == 2


@pytest.mark.parametrize(("options", "exact"), [([], (4, 32)), (["--codec", "tc-2,recent=0"], (4, 0)), (["--sink", "0"], (0, 32))])
def test_export_measures_with_the_exact_rows_of_a_lossy_codec(
    options: list[str], exact: tuple[int, int], calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a codec --quality means tcz, not the default raw, which keeps no row apart."""
    asked: list[tuple[str, int, int]] = []

    def note(*_: object, family: str, plan: CodecPlan, **__: object) -> None:
        asked.append((family, plan.sink, plan.recent))
        raise QualityError("noted")

    monkeypatch.setattr("kvtool.quality.smallest_rate", note)
    export = ["export", "--model", "tiny-a", "--prompt", "A prompt.", "-o", str(tmp_path / "x.kv"), "--quality", "kl=1"]
    assert run([*export, *options, "--calibration", str(calibration.path)]) == 7
    assert asked == [("tc" if "--codec" in options else "tcz", *exact)]
