"""What codecs make of hostile rows: the table, its errors against float64 by hand, and the command."""

import csv
import functools
import json
from dataclasses import fields
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from kvtool.cli import run
from kvtool.hostile_rows import CASES, CORRELATED, DIM, DIMS, TOKENS, RobustnessReport, RobustnessRow, _row, relative_error
from kvtool.roundtrip import Roundtrip
from veloxquant_mlx.codecs.affine import Affine

CODECS = ("raw", "rvq-4", "rvq-4:norm:nocenter", "rabitq", "rabitq-3", "affine-4", "commvq-2", "mlx-4", "fp8")
OURS = CODECS[1:7]


@functools.cache
def report() -> RobustnessReport:
    return kvtool.robustness(CODECS)


def test_every_codec_meets_every_case() -> None:
    per = [(r.case, r.tokens, r.head_dim) for r in report().rows if r.codec == "rvq-4"]
    assert len(set(per)) == len(per) == len(CASES) * len(TOKENS) + 2 * len(DIMS) and len(report().rows) == len(per) * len(CODECS)
    assert {d for _, _, d in per} == {64, 80, 96, 128, 256} and {n for _, n, _ in per} == {1, 16, 300}


def test_the_same_twice_and_under_every_name() -> None:
    assert kvtool.robustness(["rvq-4", "commvq-2"]).rows == tuple(r for r in report().rows if r.codec in ("rvq-4", "commvq-2"))
    # The function is not hidden by a module of its name once that is imported.
    assert callable(kvtool.robustness)


@pytest.mark.parametrize("codec", OURS)
def test_our_codecs_hold_or_refuse(codec: str) -> None:
    """Decoded values are finite, zeros stay zeros, no row loses its energy, and a NaN is refused by name."""
    for r in report().rows:
        if r.codec != codec:
            continue
        if r.case == "one NaN":
            assert r.refused and "NaN" in r.note and r.k_error is r.v_error is r.finite is r.bits is None
            continue
        assert r.finite and not r.refused and not r.note and r.bits is not None and r.bits > 0
        for error in (r.k_error, r.v_error):
            assert error is not None and (error == 0.0 if r.case == "zeros" else error < 0.5), r


@pytest.mark.parametrize("codec", ["tc-2", "tcz-1"])
def test_calibrated_codecs_hold_refuse_or_fall_back(codec: str) -> None:
    """Rows of the calibration's law are coded well and stay; what the tables lose or refuse, a file keeps otherwise."""
    fits, tiny, wide, nan = (_row(codec, case, 16, DIM) for case in (CORRELATED, "x 1e-30, bfloat16", "x 1e30, bfloat16", "one NaN"))
    assert fits.file == f"k={codec},v={codec}" and "falls back" not in fits.note
    assert fits.k_error == fits.file_k_error and fits.v_error == fits.file_v_error and max(fits.k_error or 1, fits.v_error or 1) < 0.15
    assert tiny.k_error is not None and tiny.k_error > 1e50  # decoded to rows of the usual size
    assert wide.refused == (codec == "tcz-1")
    for r in (tiny, wide):
        assert r.file is not None and r.file.startswith("k=rvq") and "falls back" in r.note
        assert r.file_k_error is not None and r.file_v_error is not None and max(r.file_k_error, r.file_v_error) < 0.6
    assert nan.refused and "NaN" in nan.note and nan.k_error is nan.finite is nan.file is nan.file_k_error is None


def test_only_calibrated_codecs_fall_back() -> None:
    assert all(r.file is r.file_k_error is r.file_v_error is None for r in report().rows)


def test_what_others_lose() -> None:
    """MLX's own quantisation flushes tiny groups to zero and, as fp8 does, gives numbers for a NaN; fp8 saturates."""
    assert report().row("mlx-4", "x 1e-30, bfloat16").v_error == 1.0 == report().row("fp8", "x 1e30, bfloat16").v_error
    for codec in ("mlx-4", "fp8"):
        r = report().row(codec, "one NaN")
        assert r.finite and not r.refused and "finite values for NaN" in r.note
    kept = report().row("mlx-4", "ordinary", 300, 80)
    assert kept.bits is None and "kept exact" in kept.note and kept.k_error == 0.0
    raw = report().row("raw", "one NaN")
    assert raw.finite is False and raw.v_error == 0.0 and not raw.note and raw.bits == 32.0
    with pytest.raises(KeyError, match="rvq-9"):
        report().row("rvq-9", "zeros")


def test_figures_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors in float64 from what the codec was given and gave back, bits from its own layout."""
    pairs = []
    rows = Roundtrip.rows

    def noting(self: Roundtrip, name: str, role: str, x: mx.array, *rest: object) -> mx.array:
        out = rows(self, name, role, x, *rest)  # type: ignore[arg-type]
        pairs.append((x, out))
        return out

    monkeypatch.setattr(Roundtrip, "rows", noting)
    found = kvtool.robustness(["affine-4"])
    for r, k, v in zip(found.rows, pairs[::2], pairs[1::2], strict=True):
        assert k[0].shape == v[0].shape == (2, r.tokens, r.head_dim)
        if r.refused or r.case == "zeros":
            continue
        for error, (x, out) in ((r.k_error, k), (r.v_error, v)):
            a, b = (np.array(y.astype(mx.float32)).astype(np.float64) for y in (x, out))
            assert error == pytest.approx(np.square(a - b).sum() / np.square(a).sum(), rel=1e-9)
        k_codec, v_codec = (Affine.parse("affine-4", role) for role in ("k", "v"))  # type: ignore[arg-type]
        assert k_codec is not None and v_codec is not None
        size = sum(codec.nbytes(k[0].shape, k[0].dtype) for codec in (k_codec, v_codec))
        assert r.bits == pytest.approx(8 * size / (2 * k[0].size), rel=1e-12)
    # The cases are what their names say.
    shown = {(r.case, r.tokens, r.head_dim): np.array(pairs[2 * i + 1][0].astype(mx.float32)) for i, r in enumerate(found.rows)}
    same, channel, row = (shown[case, 300, DIM] for case in ("identical", "one channel x 1000", "one row x 1000"))
    assert np.ptp(same, axis=1).max() == 0 and np.ptp(same) > 0
    assert np.abs(channel).mean((0, 1)).argmax() == 5 and np.abs(row).mean((0, 2)).argmax() == 0
    assert np.abs(shown["x 1e30, bfloat16", 300, DIM]).max() > 1e30 and 0 < np.abs(shown["x 1e-30, bfloat16", 300, DIM]).max() < 1e-29
    assert np.isnan(shown["one NaN", 300, DIM]).sum() == 1 and not shown["zeros", 300, DIM].any()
    assert np.abs(shown["heavy tails", 300, DIM]).max() > 20 > 6 > np.abs(shown["ordinary", 300, DIM]).max()


def test_relative_error() -> None:
    a = np.array([3.0, 4.0, np.nan])
    assert relative_error(a, np.array([3.0, 3.0, 0.0])) == pytest.approx(1 / 25)
    assert relative_error(1e300 * a, 1e300 * np.array([3.0, 3.0, 0.0])) == pytest.approx(1 / 25)
    assert relative_error(np.zeros(3), np.zeros(3)) == 0.0
    assert relative_error(np.zeros(3), np.ones(3)) is None is relative_error(a, np.full(3, np.inf))


@pytest.mark.parametrize(
    ("codecs", "message"),
    [
        ([], "at least one"),
        (["nope"], "no codec"),
        (["fp8", "fp8"], "twice"),
        (["rvq-4", "rvq-4,sink=0"], "rvq-4 is given twice"),
        (["mlx-5"], "2, 3, 4, 6, 8"),
    ],
)
def test_wrong_arguments(codecs: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvtool.robustness(codecs)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.csv"
    assert run(["eval", "--robustness", "--codec", "rvq-4,mlx-4", "--codec", "fp8", "--json", "--csv", str(path)]) == 0
    data = json.loads(capsys.readouterr().out)
    columns = [f.name for f in fields(RobustnessRow)]
    assert [list(r) for r in data["rows"]] == [columns] * len(data["rows"])
    with open(path, newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [r["k_error"] for r in table] == ["" if r["k_error"] is None else str(r["k_error"]) for r in data["rows"]]
    assert run(["eval", "--robustness", "--codec", "rvq-4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(data["rows"]) // 3 and sum("refused: " in line for line in lines) == len(TOKENS)
