"""The commands that measure calibrations on SmolLM2, here on a tiny model: off-domain, another model's, self-calibration."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import kvtool
from formats.calibration import from_bytes
from kvtool import calibrations
from kvtool.calibrations import SELF
from kvtool.model import LoadedModel
from kvtool.moments import collect
from tests.library import calibration_of
from tests.smollm2 import foreign_calibration, off_domain, self_calibration
from tests.smollm2.frontier import LONG_CHUNK, REFERENCE
from tests.smollm2.self_calibration import Plan, Point, bits_at
from tests.texts import text


def ids(model: LoadedModel, name: str, count: int) -> Sequence[int]:
    return model.tokenizer.encode(text(name))[:count]


def test_statistics_are_kept(tiny_a: LoadedModel, tmp_path: Path) -> None:
    texts, said = {"a": ids(tiny_a, "chat", 120)}, []
    first = off_domain.collected(tiny_a, texts, tmp_path, said.append)
    again = off_domain.collected(tiny_a, texts, tmp_path, said.append)
    fresh = collect(tiny_a, texts)
    assert len(said) == 1 and len(list(tmp_path.iterdir())) == 1
    for moments in (first, again):
        assert vars(moments) | {"layers": list(moments.layers)} == vars(fresh) | {"layers": list(fresh.layers)}
        for name, layer in fresh.layers.items():
            for field in ("k", "v", "fisher_k", "fisher_v", "gradients"):
                assert np.array_equal(getattr(moments.layers[name], field), getattr(layer, field))


def test_off_domain(tiny_a: LoadedModel, tmp_path: Path) -> None:
    """In-domain tables have seen the kind, off-domain ones have not; a kind of its own costs more without them."""
    noise = np.random.default_rng(0).integers(0, 255, 120).tolist()
    corpus = {"chat": {"a": ids(tiny_a, "chat", 120)}, "code": {"b": ids(tiny_a, "code", 120)}, "noise": {"c": noise}}
    held = {kind: text(kind) for kind in ("chat", "code")} | {"noise": np.random.default_rng(1).integers(0, 255, 200).tolist()}
    found = list(off_domain.rows(tiny_a, corpus, held, {"tc-2": 1e-9, "tc-4": None}, tmp_path, print, tokens=64))
    assert [(row.kind, row.codec) for row in found] == [(kind, codec) for kind in corpus for codec in ("tc-2", "tc-4")]
    for row in found:
        assert row.positions == 64 and row.ratio == pytest.approx(row.off_kl / row.kl) and row.low <= row.ratio <= row.high
        assert row.reached == (row.limit is None)
    noisy = found[-2]
    assert noisy.off_kl > noisy.kl
    page = off_domain.markdown(found, "")
    assert page.count("MISSED") == 3 and page.count("| noise |") == 2
    off_domain.write("x", page, {"rows": []}, tmp_path / "out")
    assert (tmp_path / "out" / "x.md").read_text() == page and (tmp_path / "out" / "x.json").exists()


def test_foreign_calibration(tiny_b: LoadedModel, calibration_a: bytes, tmp_path: Path) -> None:
    """Rows are those of sweeps with either calibration, and the ratios of their KL."""
    foreign = calibrations.Calibration(from_bytes(calibration_a), "0" * 64)
    own = calibrations.Calibration(calibration_of(tiny_b, ids(tiny_b, "technical", 320)), "1" * 64)
    texts = {name: text(name)[:900] for name in ("prose", "code")}
    found = list(foreign_calibration.rows(tiny_b, texts, foreign, own, tmp_path, print, 64))
    codecs = foreign_calibration.CODECS
    assert [(row.text, row.codec) for row in found] == [(name, codec) for codec in codecs for name in (*texts, "all")]
    options = {"protocol": "streaming", "tokens": 64, "chunk": LONG_CHUNK, "relative_to": REFERENCE, "foreign_calibration": True}
    theirs, ours = (kvtool.sweep(tiny_b, texts, ["tc-3.05", REFERENCE], calibration=c, **options) for c in (foreign, own))
    spec = "tc-3.05,sink=4,recent=32"
    for row in found[3:6]:
        a, b = theirs.row(spec, row.text), ours.row(spec, row.text)
        assert (row.positions, row.bits, row.own_bits, row.kl, row.own_kl) == pytest.approx((a.n, a.bits, b.bits, a.kl, b.kl))
        assert row.ratio == pytest.approx((a.ratio, a.ratio_low, a.ratio_high)) and row.own_ratio[0] == pytest.approx(b.ratio)
    for row in found:
        assert row.cost[0] == pytest.approx(row.kl / row.own_kl) and row.kl != row.own_kl
    page = foreign_calibration.markdown(found, foreign, own, "make it")
    assert page.count("| all |") == 3 and page.count("| prose |") == 3


def test_bits_at() -> None:
    curve = [(3.0, 0.01), (1.0, 1.0), (2.0, 0.1)]
    assert bits_at(curve, 0.1) == (2.0, "") and bits_at(curve, 1.0) == (1.0, "")
    assert bits_at(curve, 10**-1.5) == (pytest.approx(2.5), "")
    assert bits_at(curve, 2.0) == (1.0, "<") and bits_at(curve, 0.001) == (3.0, ">")


def test_self_calibration(tiny_a: LoadedModel, calibration_a: bytes) -> None:
    """Points are those of a sweep with the same tables; verdicts say how far apart the curves are."""
    calibration = calibrations.Calibration(from_bytes(calibration_a), "0" * 64)
    prompt = ids(tiny_a, "code", 240 + 60 + 1)
    plan = Plan((("code",),), (2.0,), (2.0, 4.0), 0.5)
    points = self_calibration.measure(tiny_a, {"code": prompt}, 240, plan, calibration, print)
    assert [(p.learnt, p.rate) for p in points] == [(False, 2.0), (True, 2.0), (True, 4.0)]
    for point in points:
        given = SELF if point.learnt else calibration
        swept = kvtool.sweep(tiny_a, {"code": prompt}, [f"tc-{point.rate:g}"], prefix=240, tokens=60, calibration=given)
        row = swept.rows[-1]
        assert (point.bits, point.kl, point.p99) == pytest.approx((row.bits, row.kl, row.kl_p99))
    found = self_calibration.verdicts(points, {240: 0.5})
    assert [(v.length, v.rate, v.kl) for v in found] == [(240, 2.0, points[0].kl)]
    page = self_calibration.markdown(points, found, {240: "code"}, "make self-calibration")
    assert page.count("| own |") == 2 and page.count("| calibration |") == 1


def test_verdicts_of_self_calibration() -> None:
    def point(learnt: bool, rate: float, bits: float, kl: float) -> Point:
        return Point(64, learnt, rate, bits, kl, kl, 0)

    curve = [point(True, 2, 2.5, 0.04), point(True, 3, 3.5, 0.01)]
    calibrated = [point(False, 2, 2.0, 0.02), point(False, 1, 1.0, 0.08), point(False, 3, 3.0, 0.005)]
    found = self_calibration.verdicts(calibrated + curve, {64: 1.0})
    assert [(v.more, v.bound, v.reached) for v in found] == [(pytest.approx(1.0), "", True), (1.5, "<", False), (0.5, ">", False)]
