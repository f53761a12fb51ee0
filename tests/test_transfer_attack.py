"""Hostile maps and profiles: shapes that lie, numbers that are none, other models' files, plans that cannot be; each a named error.

All are sealed anew, so that nothing but what they say is wrong with them.
"""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.errors import IncompatibleError, ManifestError, QualityError
from formats.profile import KIND as PROFILES
from formats.profile import Profile, Row, to_bytes, write_profile
from formats.transfer_map import KIND as MAPS
from formats.transfer_map import LayerMap, MapFile, write_map
from kvtool.bridges.profiling import choose
from kvtool.bridges.recompute import Recompute
from kvtool.bridges.transferring import source_of_snapshot, transfer
from kvtool.bridges.work import Work
from kvtool.capturing import Snapshot, capture
from kvtool.cli import run
from kvtool.model import LoadedModel, load_model
from tests.shapes import path

WIDTH = 2 * (64 + 64)  # entries of a row of tiny-a, of tiny-b and of tiny-c


@cache
def computed() -> Snapshot:
    return capture(load_model("tiny-a"), list(range(40, 72)))


def layer(**change: Any) -> LayerMap:
    """A map that gives the rows back."""
    zeros = np.zeros(WIDTH, np.float32)
    own = LayerMap(("0",), False, 2, 64, 64, 0.1, zeros, zeros, np.eye(WIDTH, dtype=np.float32))
    return replace(own, **change)


def mapping(target: str = "tiny-b", layers: int = 4, **change: Any) -> MapFile:
    one, two = (load_model(name).info for name in ("tiny-a", target))
    return MapFile(one, two, {"text": "d" * 64}, 100, {str(i): layer(**change) for i in range(layers)})


def stored(tmp_path: Path, found: MapFile) -> Path:
    """Written without asking whether it could be read."""
    (tmp_path / "map").write_bytes(MAPS._stored(*MAPS._described(found)))
    return tmp_path / "map"


def recode(tmp_path: Path, *how: str, to: str = "tiny-b") -> int:
    kvtool.save(computed(), tmp_path / "a.kv")
    code = run(["recode", str(tmp_path / "a.kv"), "-o", str(tmp_path / "b.kv"), "--to-model", to, *how])
    assert (tmp_path / "b.kv").exists() == (code == 0)
    return code


def test_the_sound_map_is_taken(tmp_path: Path) -> None:
    assert recode(tmp_path, "--map", str(stored(tmp_path, mapping()))) == 0


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"sources": ("\u00b2",)}, 5, "is from layer '\u00b2', the rows have 0 to 3"),
        ({"sources": ("-1",)}, 5, "is from layer '-1'"),
        ({"sources": ("9" * 5000,)}, 5, "is from layer '9999"),
        ({"sources": ("00",)}, 5, "is from layer '00'"),
        ({"sources": ("0", "0")}, 5, "takes 256 entries, but the rows have 512"),
        ({"sources": ()}, 3, "sources must name at least one layer"),
        ({"heads": 4, "k_dim": 32, "v_dim": 32}, 5, r"gives (KV heads, key size, value size) (4, 32, 32), the model has (2, 64, 64)"),
        ({"heads": 1 << 62}, 3, "target_mean must be"),
        ({"k_dim": 0}, 3, "must be in 1"),
        ({"unexplained": -1.0}, 3, "unexplained must be at least 0"),
        ({"left": np.full((WIDTH, WIDTH), np.nan, np.float32)}, 3, "NaN or infinity"),
        ({"left": np.full((WIDTH, WIDTH), 3e38, np.float32)}, 5, "layer 0: rows and map give values that tiny-b cannot keep"),
        ({"left": np.zeros((WIDTH, 1 << 16), np.float16)}, 3, "left must be (256, 256), but got (256, 65536)"),
        ({"left": np.zeros((WIDTH, 3), np.float16), "right": np.zeros((4, WIDTH), np.float16)}, 3, "left must be (256, 4)"),
        ({"source_mean": np.zeros(WIDTH - 1, np.float32)}, 3, "left must be (255, 256)"),
        ({"target_mean": np.zeros((WIDTH, 1), np.float32)}, 3, "target_mean must be (256,), but got (256, 1)"),
    ],
)
def test_maps_that_lie(change: dict[str, Any], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recode(tmp_path, "--map", str(stored(tmp_path, mapping(**change)))) == code
    told = capsys.readouterr().err
    assert words in told and "hint: " in told and "Traceback" not in told


def test_a_map_that_adds_to_rows_of_another_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """tiny-c has as many entries a row in other heads, so a third layer's worth is taken away."""
    one, two = load_model("tiny-a").info, load_model(str(path("tiny-c"))).info
    wide = LayerMap(
        ("0", "1"),
        True,
        4,
        32,
        32,
        0.1,
        np.zeros(2 * WIDTH, np.float32),
        np.zeros(WIDTH, np.float32),
        np.zeros((2 * WIDTH, WIDTH), np.float16),
    )
    good = MapFile(one, two, {}, 1, {str(i): wide for i in range(3)})
    assert recode(tmp_path, "--map", str(stored(tmp_path, good)), to=str(path("tiny-c"))) == 0
    source = source_of_snapshot(computed())
    narrow = replace(source, shapes=((1, 64, 64), *source.shapes[1:]), rows=lambda i: source.rows(i)[:, : 128 if i == 0 else WIDTH])
    lean = replace(wide, source_mean=np.zeros(WIDTH + 128, np.float32), left=np.zeros((WIDTH + 128, WIDTH), np.float16))
    with pytest.raises(IncompatibleError, match="layer 0 adds to the 128 entries of layer 0, but the model has 256"):
        transfer(narrow, load_model(str(path("tiny-c"))), mapping=replace(good, layers={str(i): lean for i in range(3)}))


def test_rows_that_are_no_numbers(tiny_a: LoadedModel) -> None:
    first = computed().states[2]
    assert isinstance(first.k, mx.array)
    states = [*computed().states]
    states[2] = replace(first, k=mx.where(mx.arange(32)[None, :, None] == 5, mx.array(float("nan")), first.k))
    with pytest.raises(IncompatibleError, match=r"layer 2: the rows hold values that tiny-b cannot keep as mlx\.core\.float32: NaN"):
        transfer(source_of_snapshot(replace(computed(), states=tuple(states))), load_model("tiny-b"))


@pytest.mark.parametrize("change", [{"weights": "f" * 64}, {"weights": None}, {"adapter": "f" * 64}])
@pytest.mark.parametrize("side", ["source", "target"])
def test_maps_of_other_models(side: str, change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = mapping()
    other = replace(found, **{side: replace(getattr(found, side), **change)})
    assert recode(tmp_path, "--map", str(stored(tmp_path, other))) == 5
    told = capsys.readouterr().err
    assert f"the map's {side} is " in told and "kvtool fit makes one for these two" in told


def test_files_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = stored(tmp_path, mapping())
    kvtool.save(computed(), tmp_path / "a.kv")
    write_profile(tmp_path / "p", profile())
    for option, files, hint in (
        ("--map", ("a.kv", "p"), "give a file of kvtool fit"),
        ("--profile", ("a.kv", "map"), "give a file of kvtool profile"),
    ):
        for file in files:
            more = ["--share", "50%"] if option == "--profile" else []
            assert recode(tmp_path, option, str(tmp_path / file), *more) == 3
            assert f"hint: {hint}" in capsys.readouterr().err
    for file in (good, tmp_path / "p"):
        assert run(["import", str(file), "--model", "tiny-a"]) == 3
        assert "hint: give a file of kvtool export" in capsys.readouterr().err
    data = bytearray(good.read_bytes())
    data[-1] ^= 1
    good.write_bytes(data)
    assert recode(tmp_path, "--map", str(good)) == 4
    assert "hint: copy it again, or make it again with kvtool fit" in capsys.readouterr().err


def profile(*rows: tuple[str, float, float], mapped: bool = False, digest: str | None = None) -> Profile:
    one, two = (load_model(name).info for name in ("tiny-a", "tiny-b"))
    found = sorted((Row(plan, mapped, share, kl, None, None, None, 0.5) for plan, share, kl in rows), key=lambda row: row.share)
    return Profile(one, two, digest, {"t": "d" * 64}, 64, 32, tuple(found))


@pytest.mark.parametrize(
    "plan",
    ["first=65", "first=4,first=4", "layers=0-5", "layers=9-3", "newest=102%", "lots", "first=" + "9" * 400, "first=\uff14", "newest=1e9"],
)
def test_plans_that_cannot_be(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(tmp_path / "p", profile((plan, 0.1, 0.1)))
    assert recode(tmp_path, "--profile", str(tmp_path / "p"), "--share", "50%") == 3
    told = capsys.readouterr().err
    assert f"{tmp_path / 'p'}: $.rows: no plan of 64 tokens and 4 layers" in told and "profile the two models anew" in told


@pytest.mark.parametrize("plan", ["first=" + "9" * 400, "newest=" + "9" * 400 + "%", f"layers=0-{'9' * 5000}"])
def test_numbers_of_any_length(plan: str) -> None:
    with pytest.raises(ValueError, match="must be such as first=4"):
        Recompute.parse(plan, 10)


def test_a_share_that_lies_is_counted_anew(tiny_b: LoadedModel) -> None:
    source, plan = source_of_snapshot(computed()), "first=4,newest=10%"
    row, part = choose(profile((plan, 0.0, 0.1), ("", 0.9, 0.5)), source, tiny_b, share=1.0)
    assert row.plan == plan and part == Recompute.parse(plan, 32).share(Work(tiny_b), 32) > 0.1
    used = mapping()
    found = profile((plan, 0.0, 0.1), mapped=True, digest="a" * 64)
    row, part = choose(found, source, tiny_b, mapping=used, digest="a" * 64, share=1.0)
    work = Work(tiny_b)
    assert part == Recompute.parse(plan, 32).share(work, 32) + work.share(work.of_map(used, 32), 32)


def test_plans_for_longer_caches_are_passed_over(tiny_b: LoadedModel) -> None:
    source = source_of_snapshot(computed())
    row, _ = choose(profile(("first=40", 0.1, 0.1), ("first=4", 0.1, 0.5)), source, tiny_b, kl=1.0)
    assert row.plan == "first=4"
    for rows in ((("first=40", 0.1, 0.1),), (("layers=1-2", 0.1, 0.1),), ()):
        with pytest.raises(
            QualityError, match=rf"none of the profile's {len(rows)} plans is for 32 tokens with the inputs of these layers: none"
        ):
            choose(profile(*rows), source, tiny_b, share=1.0)


def test_a_mapped_row_without_a_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="one is mapped, but"):
        to_bytes(profile(("", 0.1, 0.1), mapped=True))
    (tmp_path / "p").write_bytes(PROFILES._stored(*PROFILES._described(profile(("", 0.1, 0.1), mapped=True))))
    with pytest.raises(ManifestError, match="one is mapped"):
        PROFILES.read(tmp_path / "p")


def test_names_cannot_draw_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = mapping()
    evil = replace(found, source=replace(found.source, name="\x1b[2J\nerror: none", weights="f" * 64))
    assert recode(tmp_path, "--map", str(stored(tmp_path, evil))) == 5
    told = capsys.readouterr().err
    assert "\x1b" not in told and told.count("\nerror") == 0


def test_runs_at_once(tmp_path: Path) -> None:
    """Several processes write one file by one map: each ends well, and the file is whole."""
    write_map(tmp_path / "map", mapping())
    kvtool.save(computed(), tmp_path / "a.kv")
    words = ["recode", str(tmp_path / "a.kv"), "-o", str(tmp_path / "b.kv"), "--to-model", "tiny-b", "--map", str(tmp_path / "map")]
    ran = [subprocess.Popen([sys.executable, "-m", "kvtool", *words, "--json"], stdout=subprocess.PIPE) for _ in range(3)]
    told = [json.loads(one.communicate()[0]) for one in ran]
    assert [one.returncode for one in ran] == [0, 0, 0] and len({report["file_bytes"] for report in told}) == 1
    assert run(["check", str(tmp_path / "b.kv")]) == 0 and sorted(p.name for p in tmp_path.iterdir()) == ["a.kv", "b.kv", "map"]
