"""The commands that measure calibrations on SmolLM2, here on a tiny model: off-domain and self-calibration."""

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
from tests.smollm2 import off_domain, self_calibration
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
