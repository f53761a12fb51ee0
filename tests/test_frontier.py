"""The frontier: a plot of KL against bits, and the command that measures every codec on SmolLM2 (here on a tiny model)."""

import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path

import pytest

import kvtool
from formats.calibration import from_bytes
from formats.errors import BackendError
from formats.tables import digest_of
from kvtool import calibrations
from kvtool.arms import CHUNK, Arm, TextArms
from kvtool.calibrations import Calibration
from kvtool.cli import run
from kvtool.frontier import FLOOR, families, frontier, svg, without_window, write_csv, write_plot
from kvtool.model import LoadedModel
from kvtool.roundtrip import Roundtrip
from kvtool.sweeping import SweepReport, SweepRow, specs_of
from tests.smollm2 import frontier as smollm2
from tests.texts import text


def test_frontier_and_plot(tmp_path: Path) -> None:
    points = [("a", 2.0, 0.1), ("b", 3.0, 0.2), ("c <&>", 4.0, 0.001), ("own", 32.0, 0.0), ("d", 2.0, 0.3)]
    assert frontier(points[:3] + points[4:]) == [points[0], points[2]]
    for shown in (points, points[:1], []):
        write_plot(str(tmp_path / "p.svg"), shown, "t <t>")
        root = ElementTree.parse(tmp_path / "p.svg").getroot()
        circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
        assert len(circles) == sum(kl > 0 for _, _, kl in shown)
    assert families([("rvq-4", 4.0, 1.0), ("fp8", 8.0, 0.1), ("rvq-2", 2.0, 2.0), ("rvq-2+2", 4.0, 1.0)]) == {
        "rvq-": [("rvq-2", 2.0, 2.0), ("rvq-4", 4.0, 1.0)],
        "fp": [("fp8", 8.0, 0.1)],
        "rvq-+": [("rvq-2+2", 4.0, 1.0)],
    }
    assert without_window(["a,sink=4,recent=8", "b,sink=4,recent=8"]) == (["a", "b"], "sink=4, recent=8")
    assert without_window(["a,sink=4", "b"]) == (["a,sink=4", "b"], "") and without_window([]) == ([], "")
    ys = [float(c.get("cy") or 0) for c in ElementTree.fromstring(svg(points[:3], "")).iter("{http://www.w3.org/2000/svg}circle")]
    # Lower KL, lower in the picture (a larger y); a decade is as far anywhere.
    assert ys[2] > ys[0] > ys[1]
    write_csv(str(tmp_path / "c.csv"), [{"a": 1, "b": None}, {"a": "x,y", "b": 0.5}])
    assert (tmp_path / "c.csv").read_text() == 'a,b\n1,\n"x,y",0.5\n'


def test_the_frontier_command_goes_on_where_it_was(tiny_a: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished arms are read back, others run; changed sources run all anew; the table is a sweep's."""
    ran: list[str] = []
    arm = TextArms.arm

    def counting(self: TextArms, trip: Roundtrip) -> Arm:
        if trip.spec in ran and "stop" in ran:
            raise KeyboardInterrupt
        ran.append(trip.spec)
        return arm(self, trip)

    monkeypatch.setattr(TextArms, "arm", counting)
    texts = {"prose": text("prose")[:900], "code": text("code")[:900]}
    codecs = ["raw", "mlx-4", smollm2.REFERENCE]
    said: list[str] = []

    def run_it() -> tuple[SweepReport, dict[str, str]]:
        return smollm2.table(tiny_a, texts, codecs, 50, tmp_path / "cache", said.append)

    ran.append("stop")
    with pytest.raises(KeyboardInterrupt):
        run_it()
    specs = list(specs_of(codecs, 4, 32, "on", None))
    assert ran == ["stop", *specs]
    ran.clear()
    found, asked = run_it()
    assert ran == specs and len(said) == 5 + 8 and asked == dict(zip(specs, codecs, strict=True))
    ran.clear()
    assert run_it()[0] == found and not ran
    swept = kvtool.sweep(tiny_a, texts, codecs, protocol="streaming", tokens=50, relative_to=smollm2.REFERENCE)
    assert [asdict(r) | {"seconds": 0} for r in swept.rows] == [asdict(r) | {"seconds": 0} for r in found.rows]
    page = smollm2.markdown(found, asked, "make frontier")
    smollm2.write(found, asked, page, tmp_path / "out")
    assert {p.suffix for p in (tmp_path / "out").iterdir()} == {".md", ".csv", ".json", ".svg"}
    assert page.count("| `mlx-4` |") == 2 and "1.000 [1.000, 1.000]" in page
    before = smollm2.sources_digest()
    monkeypatch.setattr(smollm2, "sources_digest", lambda: "other sources")
    ran.clear()
    run_it()
    assert ran == specs * 2 and before != "other sources"


def test_calibrated_arms_are_those_of_a_sweep_and_kept_by_calibration(
    tiny_a: LoadedModel, calibration_a: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another calibration measures calibrated codecs anew and no others."""
    (tmp_path / "a.cal").write_bytes(calibration_a)
    calibration = calibrations.load(tmp_path / "a.cal")
    texts, codecs = {"prose": text("prose")[:900]}, ["rvq-2", "tc-2.05", "tcz-1.1"]
    said: list[str] = []

    def run_it(given: Calibration) -> SweepReport:
        return smollm2.table(tiny_a, texts, codecs, 50, tmp_path / "cache", said.append, given)[0]

    found = run_it(calibration)
    for codec, chunk in (("rvq-2", CHUNK), ("tc-2.05", CHUNK), ("tcz-1.1", smollm2.LONG_CHUNK)):
        swept = kvtool.sweep(tiny_a, texts, [codec], protocol="streaming", tokens=50, chunk=chunk, calibration=calibration)
        want = swept.rows[-1]
        got = found.row(want.codec)
        # Perplexity is relative to the own cache with 128 tokens a forward; floats are summed otherwise with 512.
        assert asdict(got) | {"seconds": 0, "ppl_delta": 0} == asdict(want) | {"seconds": 0, "ppl_delta": 0}
        assert got.ppl_delta == pytest.approx(want.ppl_delta, abs=1e-3)
    ran: list[str] = []
    arm = TextArms.arm
    monkeypatch.setattr(TextArms, "arm", lambda self, trip: ran.append(trip.spec) or arm(self, trip))
    assert run_it(calibration) == found and not ran
    other = run_it(Calibration(calibration.file, "0" * 64))
    assert [spec.split(",")[0] for spec in ran] == ["tc-2.05", "tcz-1.1"] and other.calibration == "0" * 64


def test_the_calibration_is_made_once(tiny_a: LoadedModel, calibration_a: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Calibration(from_bytes(calibration_a), digest_of(calibration_a))
    asked: list[LoadedModel] = []
    monkeypatch.setattr(smollm2, "calibrate", lambda model, progress: asked.append(model) or progress(1, 2) or made)
    said: list[str] = []
    for _ in range(2):
        assert smollm2.calibration_of(tiny_a, tmp_path, said.append).digest == made.digest
    assert asked == [tiny_a] and "ten minutes" in said[0] and "50 %" in said[1] and len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(smollm2, "sources_digest", lambda *_: "other sources")
    smollm2.calibration_of(tiny_a, tmp_path, said.append)
    assert len(asked) == 2


def test_targets() -> None:
    """Reached, aimed at, missed by ratio, by bits, and by a codec that refused; rows that were not measured say nothing."""

    def report(**kl: tuple[float | None, float]) -> tuple[SweepReport, dict[str, str]]:
        names = {name.replace("_", "-").replace("x", "."): pair for name, pair in kl.items()} | {smollm2.REFERENCE: (0.01, 4.25)}
        empty = dict.fromkeys(field.name for field in fields(SweepRow))
        rows = tuple(SweepRow(**empty | {"codec": c, "text": "all", "n": 9, "kl": x, "bits": b}) for c, (x, b) in names.items())
        return SweepReport("m", "streaming", 128, None, 0, rows), {name: name for name in names}

    found = smollm2.verdicts(
        *report(tc_2x05=(0.014, 2.06), tc_1x55=(0.05, 1.55), tcz_1x1=(0.01, 1.13), tc_4x05=(0.004, 4.06), tc_2x3=(None, 2.3))
    )
    assert {v.target.codec: v.reached for v in found} == {
        "tc-1.55": False,  # its ratio is 5, above 4
        "tc-2.05": True,
        "tc-2.3": False,
        "tc-4.05": True,  # above the aim, which nothing requires
        "tcz-1.1": False,  # 1.13 bits are more than 1.1 and .02
    }
    lines = smollm2.target_lines(found)
    ends = {line.split("`")[1]: line.split("|")[-2].strip() for line in lines if line.startswith("| `")}
    assert ends == {
        "tc-1.55": "MISSED",
        "tc-2.05": "reached, aim reached",
        "tc-2.3": "MISSED",
        "tc-4.05": "aim missed",
        "tcz-1.1": "MISSED",
    }
    assert smollm2.target_lines([]) == []
    assert all(t.codec in smollm2.CODECS and t.below in smollm2.CODECS for t in smollm2.TARGETS)


def test_labels_do_not_lie_on_each_other() -> None:
    points = [(f"rvq-{n}:norm", 4.0, 0.01 * 1.01**n) for n in range(5)]
    shown = ElementTree.fromstring(svg(points, "")).iter("{http://www.w3.org/2000/svg}text")
    places = sorted(float(e.get("y") or 0) for e in shown if (e.text or "").startswith("rvq"))
    assert len(places) == 5 and all(b - a >= 12 for a, b in pairwise(places))


def test_a_kl_of_rounding_has_no_place(tmp_path: Path) -> None:
    write_plot(str(tmp_path / "p.svg"), [("raw", 32.0, FLOOR / 10), ("raw", 32.0, -1e-12), ("fp8", 8.0, 1e-3)], "t")
    words = {e.text for e in ElementTree.parse(tmp_path / "p.svg").iter("{http://www.w3.org/2000/svg}text")}
    assert "fp8" in words and "raw" not in words and "1e-3" in words and "1e-9" not in words


def test_the_frontier_digest_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = smollm2.sources_digest()
    assert first == smollm2.sources_digest()
    read = Path.read_bytes
    for name, counts in (("rvq.py", True), ("streaming_cache.py", True), ("frontier.py", False), ("eval.py", False)):
        monkeypatch.setattr(Path, "read_bytes", lambda path, name=name: read(path) + b"#" * (path.name == name))
        assert (smollm2.sources_digest() != first) == counts, name


def test_every_codec_of_the_frontier_exists() -> None:
    assert list(specs_of(list(smollm2.CODECS), 4, 32, "on", smollm2.REFERENCE))


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="a PNG needs matplotlib (the extra `plot`)")
    data = []
    for name in ("a.png", "b.png"):
        write_plot(str(tmp_path / name), [("a", 2.0, 0.1), ("b", 4.0, 0.001)], "t")
        data.append((tmp_path / name).read_bytes())
    assert data[0] == data[1] and data[0].startswith(b"\x89PNG")


def test_png_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendError, match="matplotlib"):
        write_plot(str(tmp_path / "p.png"), [("a", 2.0, 0.1)], "t")
    (tmp_path / "a.txt").write_text("a")
    args = ["eval", "--model", "tiny-a", "--text", str(tmp_path / "a.txt"), "--codec", "raw", "--plot", str(tmp_path / "p.png")]
    assert run(args) == BackendError.exit_code and "kvtool[plot]" in capsys.readouterr().err
