"""Profiles: what recomputing which part is worth, measured on the shipped pair; the file; and the choice by share or divergence."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtool
from formats.errors import FormatError, IncompatibleError, ManifestError, NotKvtoolError, QualityError, VersionError
from formats.manifest import ModelInfo
from formats.profile import KIND, Profile, Row, read_profile, to_bytes, write_profile
from kvtool import tiny
from kvtool.bridges import profiling
from kvtool.bridges.bridging import planned
from kvtool.bridges.profiling import choose, profile
from kvtool.bridges.recompute import Recompute
from kvtool.bridges.transferring import source_of_snapshot, transfer
from kvtool.bridges.work import Work
from kvtool.capturing import capture
from kvtool.cli import run
from kvtool.evaluation import score_caches
from kvtool.model import LoadedModel, load_model
from kvtool.snapshot import build_caches
from tests.library import tiny as random_model

PREFIX, SCORED = 96, 64


@cache
def texts() -> dict[str, tuple[int, ...]]:
    ids = load_model("tiny-b").tokenizer.encode(tiny.filler_text())
    return {"one": tuple(ids[: PREFIX + SCORED + 1]), "two": tuple(ids[200 : 200 + PREFIX + SCORED + 1])}


@cache
def found() -> Profile:
    return profile(load_model("tiny-a"), load_model("tiny-b"), texts(), prefix=PREFIX, scored=SCORED)


def row_of(plan: str, profile: Profile | None = None) -> Row:
    return next(row for row in (profile or found()).rows if row.plan == plan)


@pytest.mark.parametrize("plan", ["", "first=4,newest=10%", "layers=3-4", "deviating=20%"])
def test_a_row_is_what_the_transfer_gives(plan: str, tiny_a: LoadedModel, tiny_b: LoadedModel) -> None:
    """Scored again by the code of `kvtool eval`, from caches that `transfer` made."""
    kl, hit, shares = [], [], []
    part = Recompute.parse(plan, PREFIX) if plan else Recompute()
    for ids in texts().values():
        source = source_of_snapshot(capture(tiny_a, ids[:PREFIX], layer_inputs=[3]))
        moved = transfer(source, tiny_b, recompute=part)
        caches = {"own": build_caches(capture(tiny_b, ids[:PREFIX]).states), "arm": build_caches(moved.states)}
        scores = score_caches(tiny_b, caches, ids[PREFIX:], SCORED, None)["arm"]
        kl.append(scores["kl"].mean())
        hit.append(scores["hit"].mean())
        shares.append(moved.history[-1]["recomputed_share"])
    row = row_of(plan)
    assert row.kl == pytest.approx(np.mean(kl), rel=1e-3) and row.top1 == pytest.approx(np.mean(hit))
    assert row.share == pytest.approx(np.mean(shares), abs=1e-4)
    assert row.ratio is None if not plan else row.ratio == pytest.approx(row.kl / row_of("").kl)


def test_blocks_tokens_and_both_are_tried() -> None:
    plans = [row.plan for row in found().rows]
    assert {"layers=0-1", "layers=2-4", "first=4", "first=4,newest=30%", "deviating=10%"} <= set(plans) and len(set(plans)) == len(plans)
    both = [plan for plan in plans if plan.startswith("layers=") and "newest" in plan]
    # With the best block: no other takes more divergence away for its share.
    blocks = [row for row in found().rows if row.plan.startswith("layers=") and "," not in row.plan]
    best = max(blocks, key=lambda row: (row_of("").kl - row.kl) / row.share)
    assert both and all(plan.startswith(f"{best.plan},first=4,newest=") for plan in both)
    assert found().left_out == () and set(found().texts) == {"one", "two"}


def test_the_grid_and_the_search_around_the_best(monkeypatch: pytest.MonkeyPatch, tiny_a: LoadedModel, tiny_b: LoadedModel) -> None:
    assert list(profiling._grid(7, 3)) == [(0, 3), (3, 6), (6, 7)]
    assert list(profiling._grid(4, 2)) == [(0, 2), (2, 4)]
    assert list(profiling._grid(1, 1)) == [(0, 1)]
    monkeypatch.setattr(profiling, "_token_plans", lambda deviating: iter(()))
    coarse = profile(tiny_a, tiny_b, texts(), prefix=PREFIX, scored=SCORED, step=2)
    blocks = {row.plan for row in coarse.rows if "," not in row.plan}
    assert {"layers=0-2", "layers=2-4"} < blocks  # and neighbours of the better one, a layer more or less
    assert blocks - {"", "layers=0-2", "layers=2-4"} <= {"layers=1-2", "layers=0-1", "layers=0-3", "layers=1-4", "layers=3-4", "layers=2-3"}
    assert "layers=3-4" in blocks or "layers=0-1" in blocks


def test_what_a_family_cannot_do_is_left_out_by_name() -> None:
    source, target = (random_model("gemma2", seed=seed) for seed in (0, 1))
    report = profile(source, target, {"text": list(range(1, 60))}, prefix=32, scored=16)
    assert len(report.left_out) == 1 and report.left_out[0].startswith("deviating tokens: ") and "softmax" in report.left_out[0]
    assert not any("deviating" in row.plan for row in report.rows) and any("layers" in row.plan for row in report.rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"texts": {}}, "there must be a text"),
        ({"step": 0}, "step of at least 1"),
        ({"digest": "a" * 64}, "a map's digest with the map"),
        ({"prefix": 400}, r"texts\['one'\] must have at least 465 tokens, but got 161"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], words: str, tiny_a: LoadedModel, tiny_b: LoadedModel) -> None:
    given = {"texts": texts(), "prefix": PREFIX, "scored": SCORED, **changes}
    with pytest.raises(ValueError, match=words):
        profile(tiny_a, tiny_b, given.pop("texts"), **given)


def test_unlike_shapes_are_refused(tiny_b: LoadedModel) -> None:
    with pytest.raises(IncompatibleError, match=r"has 2 layers of .*, tiny-b 4 of"):
        profile(random_model("llama"), tiny_b, texts())


# --- the file


def made(*rows: tuple[str, float, float], mapping: str | None = None) -> Profile:
    a, b = (ModelInfo(name, "x", digit * 64, "c" * 64, None) for name, digit in (("a", "1"), ("b", "2")))
    all_rows = tuple(Row(plan, mapping is not None, share, kl, None, None, None, 0.5) for plan, share, kl in rows)
    return Profile(a, b, mapping, {"t": "d" * 64}, 64, 32, all_rows, ("a reason",), {"kvtool": "x"})


def test_a_file_comes_back(tmp_path: Path) -> None:
    digest = write_profile(tmp_path / "p", found())
    again, same = read_profile(tmp_path / "p")
    assert again == found() and digest == same


@pytest.mark.parametrize(
    "value", [0.00012345678901234567, 0.0009999999999999998, 5e-324, 1.7976931348623157e308, 1234567890123456.8, 0.1 + 0.2]
)
def test_figures_of_any_size_come_back(value: float, tmp_path: Path) -> None:
    write_profile(tmp_path / "p", made(("", 0.00012345678901234567, value)))
    assert read_profile(tmp_path / "p")[0].rows[0].kl == value


def test_the_front_is_what_nothing_beats() -> None:
    profile = made(("", 0.0, 1.0), ("first=4", 0.1, 0.5), ("newest=5", 0.1, 0.6), ("newest=9", 0.2, 0.5), ("newest=12", 0.3, 0.4))
    assert profile.front() == (True, True, False, False, True)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((("", 0.1, 1.0), ("first=4", 0.0, 1.0)), "ascend by share"),
        ((("", -0.1, 1.0),), "share and kl must be at least 0"),
        ((("", 0.1, -1.0),), "share and kl must be at least 0"),
    ],
)
def test_rows_that_make_no_sense_are_refused(rows: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        to_bytes(made(*rows))


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = to_bytes(made(("", 0.0, 1.0)))
    for content, error in (
        (b"", FormatError),
        (data[:-3], FormatError),
        (data.replace(b"kvtool-profile", b"kvtool-profilx"), NotKvtoolError),
    ):
        (tmp_path / "p").write_bytes(content)
        with pytest.raises(error):
            read_profile(tmp_path / "p")
    monkeypatch.setattr(KIND, "version", 2)
    newer = to_bytes(made(("", 0.0, 1.0)))
    monkeypatch.setattr(KIND, "version", 1)
    (tmp_path / "p").write_bytes(newer)
    with pytest.raises(VersionError, match="2 is newer than 1"):
        read_profile(tmp_path / "p")
    (tmp_path / "p").write_bytes(KIND._stored({"source": 1}, {}))
    with pytest.raises(ManifestError, match="rows"):
        read_profile(tmp_path / "p")


# --- the choice


def test_the_choice_is_the_best_within_the_limit(tiny_a: LoadedModel, tiny_b: LoadedModel) -> None:
    source = source_of_snapshot(capture(tiny_a, texts()["one"][:PREFIX], layer_inputs=[3]))
    rows = {row.plan: row for row in found().rows}
    for share in (0.0, 0.07, 0.2, 0.3, 0.6):
        row, part = choose(found(), source, tiny_b, mapping=None, share=share)
        assert part <= share
        assert row.kl == min(other.kl for other in rows.values() if _share(other, tiny_b) <= share and _open(other, {3}))
    for kl in (rows[""].kl, rows["first=4,newest=10%"].kl):
        row, part = choose(found(), source, tiny_b, mapping=None, kl=kl)
        assert row.kl <= kl and part == min(_share(other, tiny_b) for other in rows.values() if other.kl <= kl and _open(other, {3}))


def _share(row: Row, model: LoadedModel) -> float:
    return (Recompute.parse(row.plan, PREFIX) if row.plan else Recompute()).share(Work(model), PREFIX)


def _open(row: Row, inputs: set[int]) -> bool:
    plan = Recompute.parse(row.plan, PREFIX) if row.plan else Recompute()
    return plan.needs_input is None or plan.needs_input in inputs


def test_plans_without_their_layer_input_are_passed_over(tiny_a: LoadedModel, tiny_b: LoadedModel) -> None:
    source = source_of_snapshot(capture(tiny_a, texts()["one"][:PREFIX]))
    row, _ = choose(found(), source, tiny_b, mapping=None, share=0.5)
    assert _open(row, set())
    cheap = replace(found(), rows=tuple(replace(row, kl=0.0) if row.plan == "layers=3-4" else row for row in found().rows))
    assert choose(cheap, source, tiny_b, mapping=None, share=0.5)[0].plan == row.plan
    given = replace(source, inputs={3: lambda: None})  # type: ignore[dict-item]
    assert choose(cheap, given, tiny_b, mapping=None, share=0.5)[0].plan == "layers=3-4"


def test_a_choice_that_cannot_be_made(tiny_a: LoadedModel, tiny_b: LoadedModel) -> None:
    source = source_of_snapshot(capture(tiny_a, texts()["one"][:PREFIX]))
    with pytest.raises(QualityError, match=r"KL of at most 1e-06: the least is 0\.0"):
        choose(found(), source, tiny_b, mapping=None, kl=1e-6)
    with pytest.raises(QualityError, match=r"a share of at most 0.0%: the least is \d\.\d%"):
        choose(replace(found(), rows=found().rows[1:]), source, tiny_b, mapping=None, share=0.0)
    for limits in ({}, {"share": 0.1, "kl": 0.1}):
        with pytest.raises(ValueError, match="one of them"):
            choose(found(), source, tiny_b, mapping=None, **limits)
    with pytest.raises(IncompatibleError, match="the profile's target is tiny-b"):
        choose(found(), source, tiny_a, mapping=None, share=0.5)
    with pytest.raises(IncompatibleError, match="measured with no map, not with map ffff"):
        choose(found(), source, tiny_b, digest="f" * 64, share=0.5)


def test_a_plan_that_a_layer_input_would_allow_is_named(tmp_path: Path, tiny_a: LoadedModel, tiny_b: LoadedModel) -> None:
    cheap = replace(found(), rows=tuple(replace(row, kl=0.0) if row.plan == "layers=3-4" else row for row in found().rows))
    (tmp_path / "p").write_bytes(to_bytes(cheap))
    for inputs in ([], [3]):
        kvtool.save(capture(tiny_a, texts()["one"][:PREFIX], layer_inputs=inputs), tmp_path / "a.kv")
        row, _, better = planned(tmp_path / "a.kv", tiny_b, tmp_path / "p", share=0.5)
        assert (row.plan == "layers=3-4") == (better is None) == bool(inputs)
        assert better is None or "kvtool export --layer-input 3 would allow layers=3-4: " in better
        assert planned(tmp_path / "a.kv", tiny_b, tmp_path / "p", share=0.0)[2] is None


def test_by_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "t.txt"
    text.write_text(tiny.filler_text())
    name = str(tmp_path / "ab.profile")
    assert run(["profile", "tiny-a", "tiny-b", "--text", str(text), "--prefix", "48", "--n", "64", "-o", name, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["plan"] for row in report["rows"]} >= {"", "first=4", "layers=0-1"} and report["rows"][0]["front"] is True
    kvtool.save(capture(load_model("tiny-a"), texts()["one"][:PREFIX]), tmp_path / "a.kv")
    how = ["recode", str(tmp_path / "a.kv"), "-o", str(tmp_path / "b.kv"), "--to-model", "tiny-b", "--profile", name]
    assert run([*how, "--share", "25%"]) == 0
    said = capsys.readouterr().err
    with kvtool.open(tmp_path / "b.kv") as archive:
        step = next(step for step in archive.manifest.quality if step["step"] == "transfer")
        assert 0 < step["recomputed_share"] <= 0.25 and set(step["seconds"]) == {"load", "map", "recompute"}
    assert "of a prefill; the profile's texts gave KL" in said
    assert run([*how, "--kl", "1000"]) == 0  # the plain recode is good enough
    assert "nothing recomputed: 0.0% of a prefill" in capsys.readouterr().err
    assert run([*how, "--kl", "0.0000001"]) == 7


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--to-model", "tiny-b", "--profile", "{here}"], "goes with --share or --kl"),
        (["--to-model", "tiny-b", "--share", "20%"], "goes with --share or --kl"),
        (["--to-model", "tiny-b", "--profile", "{here}", "--share", "20%", "--kl", "1"], "one of them"),
        (["--to-model", "tiny-b", "--profile", "{here}", "--share", "0.2"], "such as 20%"),
        (["--to-model", "tiny-b", "--profile", "{here}", "--share", "120%"], "such as 20%"),
        (["--to-model", "tiny-b", "--profile", "{here}", "--share", "20%", "--recompute", "first=4"], "one of --profile and --recompute"),
        (["--profile", "{here}", "--share", "20%"], "need --to-model"),
    ],
)
def test_wrong_usage(more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kvtool.save(capture(load_model("tiny-a"), [1, 2, 3]), tmp_path / "a.kv")
    assert run(["recode", str(tmp_path / "a.kv"), "-o", str(tmp_path / "b.kv"), *(word.format(here=__file__) for word in more)]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "b.kv").exists()
