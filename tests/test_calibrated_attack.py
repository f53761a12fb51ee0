"""Hostile rows, calibrations and files against the calibrated codecs: a clear error, or what a training-free codec would have kept."""

import contextlib
import struct
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.calibration import CalibrationFile, from_bytes, to_bytes
from formats.errors import FormatError, ManifestError
from kvtool.binding import LayerSource, bind
from kvtool.calibrations import Calibration
from kvtool.capturing import Snapshot
from kvtool.encoding import RoleSource
from kvtool.model import LoadedModel
from tests.tcz_cases import layers
from tests.texts import text
from veloxquant_mlx.allocators.predictors import STEPS, TczTables, build_at, step_for
from veloxquant_mlx.codecs import parse_codec

TOKENS = 96


@pytest.fixture(scope="module")
def snapshot(tiny_a: LoadedModel) -> Snapshot:
    return kvtool.capture(tiny_a, tiny_a.tokenizer.encode(text("prose"))[:TOKENS])


@pytest.fixture(scope="module")
def file(calibration_a: bytes) -> CalibrationFile:
    return from_bytes(calibration_a)


def binding_of(calibration: CalibrationFile, spec: str, k: np.ndarray, v: np.ndarray) -> Any:
    """Codecs of one layer, "0", for rows (H, S, D)."""
    sources = [RoleSource(x.shape, mx.float32, None, None, lambda x=x: mx.array(x.astype(np.float32))) for x in (k, v)]
    plan = parse_codec(f"{spec},sink=0,recent=0")
    return bind(plan, [LayerSource("0", *sources, [(0, k.shape[1])])], Calibration(calibration, "a" * 64), None)


def rows_for(file: CalibrationFile, scale: float, tokens: int = 40) -> np.ndarray:
    heads, dim = file.tables["tc"]["0"]["k_mean"].shape
    return scale * np.random.default_rng(3).standard_normal((heads, tokens, dim))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e20, 1e35])
@pytest.mark.parametrize("spec", ["tc-1.25", "tcz-1"])
def test_rows_of_any_size_are_kept(spec: str, scale: float, file: CalibrationFile) -> None:
    """What the tables cannot hold goes to a codec that can: even where no codec of so few bits is left, and where tcz refuses."""
    x = rows_for(file, scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = binding_of(file, spec, x, x[:, ::-1])
    if scale < 1 or (spec, scale) == ("tcz-1", 1e35):  # else they are clipped, or coded with the largest step
        assert found.codecs["0", "k"].id == "rvq" and any(f.startswith("0.k: rvq-1, ") for f in found.fallbacks)
    for codec in found.codecs.values():
        type(codec).from_params(codec.to_params())  # a file of them can be read


def test_a_nan_is_refused_by_the_codec_that_is_left(file: CalibrationFile) -> None:
    x = rows_for(file, 1.0)
    x[0, 3, 1] = np.nan
    for spec in ("tc-2", "tcz-1"):
        with pytest.raises(ValueError, match=r"token 3, dim 1.*nan"):
            binding_of(file, spec, x, x)


def test_errors_that_are_not_finite_cost_most(file: CalibrationFile) -> None:
    """A basis near float32's end decodes to infinity, which times zero of a metric is NaN: less than nothing."""
    arrays = dict(file.tables["tc"]["0"])
    arrays["back_size"] = np.full_like(arrays["back_size"], np.finfo(np.float32).max)
    huge = replace(file, tables={"tc": {"0": arrays}})
    x = rows_for(file, 1.0)
    found = binding_of(huge, "tc-3", x, x)
    assert found.codecs["0", "k"].id == "rvq"


def test_steps_stay_within_what_a_file_takes() -> None:
    """Rows that never move take no bits at any step, rows beyond float32 more than any."""
    rows = layers(300, 1)
    tables = build_at(rows, 0.05, 1.0)[0]
    still = np.zeros_like(rows[0].k)
    assert step_for(1.0, tables, [(still + 1e-9, still)]) >= STEPS[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        far = np.where(np.arange(len(still))[:, None, None] % 2, 1e36, -1e36) + still
        assert step_for(1.0, tables, [(far, far)]) > 0.99 * STEPS[1]


def _edit(name: str, value: float) -> Any:
    return lambda arrays: arrays | {name: np.full_like(arrays[name], value)}


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (_edit("k.basis", 0), "basis must be invertible"),
        (_edit("v.basis", 1), "basis must be invertible"),
        (_edit("k.basis_scale", 3e38), "k.basis must be within float32"),
        (_edit("v.predictor_scale", 3e38), "v.predictor must be within float32"),
        (_edit("design", 1e300), "rate in"),
        (_edit("design", 1e-15), "rate in"),
        (_edit("shape", 0), "shape must be positive"),
        (_edit("k.classes", 255), "classes"),
    ],
)
def test_tables_that_are_none(edit: Any, what: str, file: CalibrationFile) -> None:
    arrays = edit(dict(file.tables["tcz-1"]["0"]))
    if what.startswith(("k.basis", "v.pred")):
        name = what.split()[0]
        arrays[name] = np.full_like(arrays[name], 4) if arrays[name].dtype == np.float16 else arrays[name]
    with pytest.raises(ValueError, match=what):
        TczTables.from_arrays(arrays)
    broken = Calibration(replace(file, tables={"tcz-1": {"0": arrays}}), "a" * 64)
    with pytest.raises(ManifestError, match=what):
        broken.tables("tcz-1", "0")


def test_covariances_beyond_float32(file: CalibrationFile) -> None:
    arrays = dict(file.tables["tc"]["0"])
    arrays["c_yy_size"] = np.full_like(arrays["c_yy_size"], 1e30)
    with pytest.raises(ManifestError, match="within float32"):
        Calibration(replace(file, tables={"tc": {"0": arrays}}), "a" * 64).tables("tc", "0")


@pytest.mark.parametrize("kind", ["tcz", "tcz-", "tcz-abc", "tcz-0", "tcz-nan", "tcz--1", "tcz-1e400", "tcz-01", "tc-2", "additive"])
def test_kinds_that_no_codec_has(kind: str, file: CalibrationFile) -> None:
    with pytest.raises(ManifestError, match="of this codec"):
        Calibration(replace(file, tables={kind: file.tables["tcz-1"]}), "a" * 64)


def test_a_kind_with_tables_of_another(file: CalibrationFile) -> None:
    with pytest.raises(ManifestError, match="of that design, but got rate 1"):
        Calibration(replace(file, tables={"tcz-3": file.tables["tcz-1"]}), "a" * 64).tables("tcz-3", "0")
    assert Calibration(replace(file, tables={"later-7": file.tables["tc"]}), "a" * 64).kinds("tc") == ()


def test_cut_and_flipped_calibrations(calibration_a: bytes, tmp_path: Path) -> None:
    """Whatever is left of a header is refused by name, and no declared size is believed."""
    draw, size = np.random.default_rng(0), struct.unpack("<Q", calibration_a[:8])[0]
    for cut in draw.integers(0, len(calibration_a), 20):
        with pytest.raises(FormatError):
            from_bytes(calibration_a[:cut])
    for declared in (10**9, 2**63, 0, size - 1, size + 1):
        with pytest.raises(FormatError):
            from_bytes(struct.pack("<Q", declared) + calibration_a[8:])
    for at in draw.integers(8, 8 + size, 40):
        flipped = bytearray(calibration_a)
        flipped[at] ^= 1 << int(draw.integers(8))
        with contextlib.suppress(FormatError):  # a digit of a name or count may be another one
            from_bytes(bytes(flipped))


def test_calibrations_of_extreme_tables_write_files_that_can_be_read(file: CalibrationFile, snapshot: Snapshot, tmp_path: Path) -> None:
    """Means and scales at float32's end: layer 0 falls back, the rest is coded, and the file decodes to finite rows."""
    for kind, spec, names in (("tc", "tc-2", ("k_mean", "v_mean")), ("tcz-1", "tcz-1", ("k.bias", "v.bias"))):
        arrays = dict(file.tables[kind]["0"])
        for name in names:
            arrays[name] = np.full_like(arrays[name], np.finfo(np.float32).max)
        changed = replace(file, tables={kind: dict(file.tables[kind]) | {"0": arrays}})
        calibration = Calibration(from_bytes(to_bytes(changed)), "b" * 64)
        report = kvtool.save(snapshot, tmp_path / "x.kv", codec=f"{spec},sink=4,recent=16", calibration=calibration)
        assert {f[:3] for f in report.fallbacks} >= {"0.k", "0.v"}
        with kvtool.open(tmp_path / "x.kv", calibration=calibration) as archive:
            for i, exact in enumerate(snapshot.states):
                state = archive.state(i)
                for role in ("k", "v"):
                    ours, theirs = (np.array(getattr(s, role).astype(mx.float32)) for s in (state, exact))
                    # A step is for all layers: the others of tcz suffer, but less than twice what their mean alone would cost.
                    assert (
                        np.isfinite(ours).all()
                        and np.square(ours - theirs).sum() < (1.0 if kind == "tc" else 2.0) * np.square(theirs).sum()
                    )
