"""`kvtool bench`: a planted fault is found before anything is timed, figures agree, commands and errors are as documented."""

import contextlib
import csv
import io
import json
import os
import platform
import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvtool.bench import attending, coding, filing, machine, measuring, oracle, shaped, sharing, targets, timing
from kvtool.bench.machine import native_line
from kvtool.bench.measuring import Case, Checked, Prepared, Row, measure
from kvtool.bench.rows import BASE, Size, _drawn, blocks, head_rows, plan_of, rows
from kvtool.bench.timing import copy_bandwidth, timed
from kvtool.cli import run
from kvtool.cli.bench import FAMILIES
from kvtool.frontier import COLOURS
from kvtool.probe import probe_model
from tests import oracles
from tests.metal_emulation.emulator import EmulatedMetal, unavailable
from veloxquant_mlx import metal, native
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.codecs.affine import Affine
from veloxquant_mlx.codecs.rvq import Rvq
from veloxquant_mlx.metal._backend import forced
from veloxquant_mlx.metal._kernel import using

SHAPE = "2,4,2,32,96"
KERNEL_SPECS = "k=rvq-2+2:nocenter,v=rvq-4:nocenter,k=rabitq:nocenter,v=rvq-4:nocenter,affine-4,vecinfer-1"
FAST = ("--seconds", "0", "--json")


@pytest.fixture(autouse=True)
def small_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a megabyte, and codes that no other test has made."""
    for name, value in (("COPY_BYTES", 1 << 20), ("SAMPLE", 0.0), ("TOGETHER", 0.0), ("COPIED", 0)):
        monkeypatch.setattr(timing, name, value)
    blocks.cache_clear()


def bench(*args: str) -> tuple[int, str]:
    """Exit code and stdout."""
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="utf-8") as out, contextlib.redirect_stdout(out):
        code = run(["bench", *args])
        out.flush()
        return code, raw.getvalue().decode()


def report(*args: str, code: int = 0) -> dict[str, Any]:
    got, text = bench(*args, *FAST)
    data = json.loads(text)
    assert got == code, [(row["name"], row["problem"]) for row in data["rows"] if row["problem"]]
    return data


def by_name(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in data["rows"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """One run of all families but the slow codecs, its CSV and its plot."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "COPY_BYTES", 1 << 20)
        small = ("--shape", SHAPE, "--mb", "0.1", "--tokens", "24", "--codec", "rvq-4,affine-4")
        files = ("--csv", str(folder / "b.csv"), "--plot", str(folder / "b.svg"), "--folder", str(folder))
        return report(*small, *files), folder


# --- what is right, and what is wrong


def test_every_family_is_sound(whole: tuple[dict[str, Any], Path]) -> None:
    data, folder = whole
    assert data["failed"] == 0 and {row["family"] for row in data["rows"]} == set(FAMILIES)
    for row in data["rows"]:
        assert row["skipped"] or row["error"] <= row["limit"]
        assert row["backend"] and row["device"]
    assert sorted(path.name for path in folder.iterdir()) == ["b.csv", "b.svg"]  # no file is left


@pytest.mark.parametrize("queries", [1, 5])
def test_kernel_functions_and_calibrated_codes(queries: int) -> None:
    data = report("attend", "--shape", SHAPE, "--queries", str(queries), "--codec", f"{KERNEL_SPECS},tc-2.05")
    found = {name.rpartition(": ")[2] for name in by_name(data)}
    kernels = {"scalar_fused_decode_attend", "turboquant_fused_rvq_decode_attend", "rabitq_prefill_attend", "metal_fused_sdpa"}
    assert kernels | ({"rabitq_fused_attend"} if queries == 1 else {"flash_prefill_attend float32"}) <= found
    assert by_name(data)["tc-2.05: codes"]["checked"] == oracle.OWN
    assert by_name(data)["affine-4: codes"]["checked"] == oracle.INDEPENDENT


@pytest.mark.parametrize("spec", ["commvq-2:additive", "commvq-1.5:additive:carry"])
def test_additive_codes_of_tables_of_their_own(spec: str) -> None:
    """Twice the average rate halves what is lost at least, and attention, encoding and decoding are within their limits."""
    data = report("attend", "encode", "decode", "--shape", SHAPE, "--codec", spec)
    found = {(row["family"], row["name"]): row for row in data["rows"]}
    stored = found["attend", f"{spec}: codes"]
    assert stored["checked"] == oracle.OWN and found["encode", spec]["error"] > 0
    size = Size.parse(SHAPE)
    lost = {}
    for bits in (1, 2):
        made, own = blocks(f"commvq-{bits}:additive", size, mx.float32, 1), rows(size, mx.float32, 1)
        read, _ = head_rows(made)
        assert made[0].k.parts["codes"].shape == (1, size.tokens, bits * size.kv_heads * size.dim // 8)
        want = np.array(own.k[0]).astype(np.float64)
        lost[bits] = sum(np.square(read(0, h)() - want[h]).sum() for h in range(size.kv_heads))
    assert lost[2] < lost[1] / 2


def scaled(function: Callable[..., Any], by: float) -> Callable[..., Any]:
    return lambda *args, **more: function(*args, **more) * by


@pytest.mark.parametrize(
    ("family", "row", "place", "name"),
    [
        ("attend", "rvq-4: codes", attending.Fetched, "attend"),
        ("attend", "affine-4: scalar_fused_decode_attend", metal, "scalar_fused_decode_attend"),
        ("attend", "sdpa float32", attending, "_sdpa"),
        ("attend", "mlx-lm 4 bits", attending, "quantized_scaled_dot_product_attention"),
        ("decode", "rvq-4", Rvq, "decode"),
        ("decode", "affine-4", Affine, "decode"),
        ("recode", "crosskv_rope_recode float32", metal, "crosskv_rope_recode"),
    ],
)
def test_a_fault_is_found_before_it_is_timed(monkeypatch: pytest.MonkeyPatch, family: str, row: str, place: Any, name: str) -> None:
    """A result that is off by a few thousandths fails; the row has no times, and the rows beside it do."""
    monkeypatch.setattr(place, name, scaled(getattr(place, name), 1.003))
    calls: list[int] = []
    monkeypatch.setattr(measuring, "timed", lambda call, *more: calls.append(1) or timed(call, *more))
    words = () if family == "recode" else ("--codec", "rvq-4,affine-4")
    data = report(family, "--shape", SHAPE, *words, code=1)
    found = by_name(data)[row]
    assert "error" in found["problem"] and found["error"] > found["limit"]
    assert found["median"] is None and found["runs"] == 0 and found["rate"] is None
    timed_rows = [r for r in data["rows"] if r["median"] is not None]
    assert timed_rows and len(calls) == len(timed_rows)
    assert data["failed"] == sum(r["problem"] is not None for r in data["rows"])


@pytest.mark.parametrize(
    ("family", "row", "place", "name", "fault"),
    [
        ("encode", "affine-4", Affine, "encode", lambda parts: parts | {"codes": parts["codes"] ^ 0x80}),
        ("encode", "rvq-4", Rvq, "encode", lambda parts: parts | {"scale": parts["scale"] * 1.5}),
        ("encode", "pack 2 bits", metal, "turboquant_bit_pack", lambda out: mx.where(mx.arange(out.size) == 7, out ^ 1, out)),
        ("decode", "unpack 4 bits", metal, "turboquant_bit_unpack", lambda out: mx.where(mx.arange(out.size) == 7, out ^ 1, out)),
        ("files", "raw: load, warm", filing, "_restored", lambda checked: Checked("x", float("nan"), 0.0)),
    ],
)
def test_faults_of_codes(monkeypatch: pytest.MonkeyPatch, family: str, row: str, place: Any, name: str, fault: Callable) -> None:
    whole = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args, **more: fault(whole(*args, **more)))
    if name == "encode":
        # In one pass, where the native back end has one.
        at_once = place.encode_measured
        monkeypatch.setattr(place, "encode_measured", lambda *a: None if (found := at_once(*a)) is None else (fault(found[0]), found[1]))
    words = ("--codec", "raw", "--mb", "0.1") if family == "files" else ("--shape", SHAPE, "--codec", "rvq-4,affine-4")
    found = by_name(report(family, *words, code=1))[row]
    assert found["problem"] is not None and found["median"] is None


def test_a_cache_read_back_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed:
        def __init__(self, path: Any, model: Any) -> None:
            self.cache = loaded(path, model).cache
            self.cache[1].keys = self.cache[1].keys.at[0, 0, 0, 0].add(2.0**-10)

    loaded = filing.load
    monkeypatch.setattr(filing, "load", Changed)
    found = by_name(report("files", "--mb", "0.1", "--codec", "raw", code=1))
    assert found["raw: load, warm"]["error"] == 1 and found["raw: save"]["problem"] and found["mlx-lm: load, warm"]["problem"] is None


def test_a_first_token_of_another_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are off by far less than a codec's error show in the logits of a lossless file."""
    prefilled = filing.capture
    monkeypatch.setattr(filing, "capture", lambda model, ids: prefilled(model, [ids[0] ^ 1, *ids[1:]]))
    found = by_name(report("first-token", "--tokens", "12", "--codec", "raw", code=1))
    assert found["raw: load"]["problem"] and found["prefill"]["problem"] is None


def test_results_that_change_with_the_runs_are_found() -> None:
    """The check before the time passes, the one after it does not; an error of the function is the row's."""
    results = iter(range(100))
    drifting = Prepared(lambda: next(results), lambda got: Checked("0", float(got > 2), 0.0), 1, 1)
    row = measure(Case("attend", "drifts", lambda: drifting), "", 0.0, 1.0)
    assert row.problem is not None and "after 3 timed runs" in row.problem and row.median is None

    def refuse() -> Prepared:
        raise ValueError("[x] no.")

    assert measure(Case("attend", "refuses", refuse), "", 0.0, 1.0).problem == "ValueError: [x] no."
    assert measure(Case("attend", "absent", refuse, needs="it is not here"), "", 0.0, 1.0).skipped == "it is not here"
    nan = Prepared(lambda: 0, lambda _: Checked("0", float("nan"), 1.0), 1, 1)
    assert measure(Case("attend", "nan", lambda: nan), "", 0.0, 1.0).problem is not None


def test_the_oracle_against_another() -> None:
    """Attention, rotation and decoded codes of `kvtool.bench.oracle` agree with the tests' own and with hand-made ones."""
    size = Size(1, 4, 2, 8, 11, 3)
    draw = np.random.default_rng(0)
    q, k, v = draw.standard_normal((1, 4, 3, 8)), draw.standard_normal((1, 2, 11, 8)), draw.standard_normal((1, 2, 11, 5))
    attended = oracle.attention(q, lambda b, h: lambda: k[b, h], lambda b, h: lambda: v[b, h], 2, 11)
    for h in range(4):
        for i in range(3):
            s = k[0, h // 2, : 11 - 2 + i] @ q[0, h, i]
            p = np.exp(s) / np.exp(s).sum()
            np.testing.assert_allclose(attended.out[0, h, i], p @ v[0, h // 2, : 11 - 2 + i], rtol=1e-12)
            assert attended.largest >= np.abs(s).max()
            spread = p @ np.linalg.norm(v[0, h // 2, : 11 - 2 + i], axis=1) / np.linalg.norm(attended.out[0, h, i])
            assert attended.spread >= spread * (1 - 1e-12) and spread >= 1
    given = rows(Size(1, 2, 2, 8, 40), mx.float32, 3)
    turn = oracle.mlx_angles(40, 8, BASE)
    want = oracles.rotated(np.array(given.k[0, 0]).astype(np.float64), np.arange(40), BASE ** (-np.arange(4) / 4.0))
    np.testing.assert_allclose(oracle.turned(np.array(given.k[0, 0]).astype(np.float64), turn), want, atol=1e-3)
    for bits, group in ((4, 32), (8, 64)):
        x = mx.random.normal((2, 3, 64), key=mx.random.key(bits))
        triplet = mx.quantize(x, group_size=group, bits=bits)
        near = np.array(mx.dequantize(*triplet, group_size=group, bits=bits))
        np.testing.assert_allclose(oracle.mlx_decoder(triplet, bits, group, (1,))(), near[1], atol=1e-6)
    assert size.groups == 2


@pytest.mark.parametrize("spec", ["raw", "rvq-3", "rvq-2+1:nocenter", "rabitq", "rabitq-3", "affine-3", "affine-2:token:group=7"])
def test_decoded_rows_of_the_oracle(spec: str) -> None:
    """Heads of 24 have an odd part of 3, groups of 7 a short end."""
    size = Size(1, 2, 2, 24, 33)
    made = blocks(spec, size, mx.float32, 5, "post")
    for role, read in zip("kv", head_rows(made), strict=True):
        coded = getattr(made[0], role)
        want = np.array(coded.codec.decode(coded.parts, coded.shape, mx.float32))
        for h in range(2):
            np.testing.assert_allclose(read(0, h)(), want[h], atol=1e-5 * np.abs(want).max())


def test_rows_are_like_keys_and_seeded() -> None:
    """A mean that most of the energy is in, a few large channels, scores with a spread; the same for the same seed alone."""
    size = Size(1, 4, 2, 64, 2000)
    made = rows(size, mx.float32, 7)
    cos, sin = oracle.mlx_angles(2000, 64, BASE)
    pre = oracle.turned(np.array(made.k[0, 0]).astype(np.float64), (cos, -sin))
    spread = pre.std(axis=0)
    assert np.sum(spread > 4) == 4 and np.square(pre.mean(axis=0)).sum() > 0.3 * np.square(pre).sum(axis=1).mean()
    scores = np.array(made.q[0, 0, 0]).astype(np.float64) @ np.array(made.k[0, 0]).T.astype(np.float64) * size.scale
    assert 0.5 < scores.std() < 8
    again, other = _drawn.__wrapped__(size, 7), _drawn.__wrapped__(size, 8)
    assert mx.array_equal(again.k, made.k) and not mx.array_equal(other.k, made.k)


# --- figures


def test_figures_agree(whole: tuple[dict[str, Any], Path]) -> None:
    data, _ = whole
    medians = {(row["family"], row["name"]): row["median"] for row in data["rows"]}
    for row in data["rows"]:
        if row["skipped"]:
            continue
        assert row["low"] <= row["median"] <= row["high"] and row["runs"] >= timing.LEAST_RUNS
        assert row["values_rate"] == pytest.approx(row["values"] / row["median"])
        if row["moved"] is not None:
            assert row["rate"] == pytest.approx(row["moved"] / row["median"] / 1e9)
        on_disk = row["family"] in ("files", "first-token")
        assert (row["of_copy"] is None) == on_disk
        assert on_disk or row["of_copy"] == pytest.approx(row["rate"] / data["copy"])
        assert (row["to_copy"] is None) == (row["family"] != "attend")
        if row["to_copy"] is not None:
            assert row["to_copy"] == pytest.approx(4 * row["values"] / data["copy"] / 1e9 / row["median"])
        if row["reference"] is not None:
            assert row["speedup"] == pytest.approx(medians[row["family"], row["reference"]] / row["median"])


def test_bytes_are_those_of_the_arrays(whole: tuple[dict[str, Any], Path]) -> None:
    found = {(row["family"], row["name"]): row for row in whole[0]["rows"]}
    shape, values, q = (2, 96, 32), 2 * 2 * 2 * 96 * 32, 2 * 4 * 32 * 4
    for spec in ("rvq-4", "affine-4"):
        plan = parse_codec(spec)
        stored = 2 * sum(codec.nbytes(shape, mx.float32) for codec in (plan.k, plan.v))
        codes = found["attend", f"{spec}: codes"]
        assert codes["moved"] == stored + 2 * q and codes["bits"] == pytest.approx(8 * stored / values)
        assert found["attend", f"{spec}: decode, sdpa"]["moved"] == stored + 2 * q + 2 * 4 * values
        assert found["encode", spec]["moved"] == found["decode", spec]["moved"] == stored + 4 * values
        assert codes["values"] == values
    assert found["attend", "sdpa float16"]["moved"] == 2 * values + q  # queries and outputs are halves too
    assert found["attend", "sdpa float32"]["moved"] == 4 * values + 2 * q
    assert found["attend", "mlx-lm 4 bits"]["moved"] == values // 2 + 2 * 4 * values // 32 + 2 * q
    assert found["recode", "crosskv_rope_recode float32"]["moved"] == 4 * values


def test_times() -> None:
    """Warm-up apart, at least LEAST_RUNS samples; what goes before a call is not in its time."""
    calls: list[str] = []
    times, last = timed(lambda: calls.append("call") or len(calls), 0.0, lambda: calls.append("before"))
    assert calls == ["before", "call"] * (1 + timing.LEAST_RUNS) and (times.runs, times.calls, last) == (3, 1, 8)
    with forced("cuda"):
        assert copy_bandwidth(0.0) > 0
    assert copy_bandwidth(0.0) > 0


# --- interface


def test_json_csv_and_plot(whole: tuple[dict[str, Any], Path]) -> None:
    data, folder = whole
    assert set(data) == {"machine", "settings", "copy", "rows", "load_after", "failed"}
    known = {"date", "system", "device", "device_architecture", "memory", "backend", "cores", "load", "blas", "versions"}
    assert known <= set(data["machine"])
    assert {"kvtool", "mlx", "mlx-lm", "numpy", "python"} <= set(data["machine"]["versions"])
    names = [field.name for field in fields(Row)]
    assert all(list(row) == names for row in data["rows"])
    with (folder / "b.csv").open() as file:
        table = list(csv.DictReader(file))
    assert list(table[0]) == names and [row["name"] for row in table] == [row["name"] for row in data["rows"]]
    root = ElementTree.parse(folder / "b.svg").getroot()
    bars = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("class") == "bar"]
    assert len(bars) == sum(row["median"] is not None for row in data["rows"])
    assert all(float(bar.get("width") or 0) > 0 for bar in bars)


def test_plot_as_png(tmp_path: Path) -> None:
    """A picture with more than its white ground: a bar of the family's colour among it."""
    image = pytest.importorskip("matplotlib.image", reason="a PNG needs matplotlib (the extra `plot`)")
    path = tmp_path / "b.png"
    assert bench("recode", "--shape", "1,2,2,8,64", "--seconds", "0", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    pixels = image.imread(path)[..., :3].reshape(-1, 3)
    bar = np.array([int(digit, 16) / 15 for digit in COLOURS[0][1:]])
    bar = 0.7 * bar + 0.3  # on white
    assert np.mean(np.abs(pixels - bar).max(axis=1) < 0.01) > 0.01


def words_of(row: dict[str, Any]) -> list[str]:
    """Of a row's command, without the environment and `kvtool`."""
    return shlex.split(row["command"].removeprefix(" ".join([*machine.environment(), ""])))[1:]


def test_commands_make_their_rows_alone(whole: tuple[dict[str, Any], Path]) -> None:
    """Every command parses; those of some rows run and give the row, its reference, and the same bytes."""
    data, _ = whole
    for row in data["rows"]:
        words = words_of(row)
        assert words[:2] == ["bench", row["family"]] and words[-2:] == ["--only", row["name"]]
    for name in ("rvq-4: codes", "affine-4: scalar_fused_decode_attend", "pack 2 bits", "rotate, exact float32", "raw: load"):
        row = by_name(data).get(name)
        if row is None:
            continue
        alone = report(*words_of(row)[1:])
        assert [r["name"] for r in alone["rows"]] == [n for n in (row["reference"], name) if n is not None]
        for key in ("moved", "values", "error", "bits", "command"):
            assert by_name(alone)[name][key] == row[key]


def test_rows_are_said_as_they_are_made(capsys: pytest.CaptureFixture[str]) -> None:
    """On stderr where that is no terminal, a line each; nothing beside JSON."""
    row = ("recode", "--shape", "1,2,2,8,64", "--seconds", "0", "--only", "rotate, mlx float32")
    assert run(["bench", *row]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"\d\d:\d\d:\d\d  1 of 1  recode rotate, mlx float32: [\d.]+ (us|ms|s)\n", err) and "rotate, mlx float32" in out
    assert run(["bench", *row, "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_text_says_what_it_ran_on() -> None:
    code, text = bench("recode", "--shape", "1,2,2,8,64", "--seconds", "0", "--repro")
    assert code == 0
    for part in (
        "back end cpu",
        f"native back end: {native_line()}",
        "load average",
        "BLAS",
        "mlx-lm",
        "copy of a large array",
        "quartiles",
        "crosskv_rope_recode float32",
    ):
        assert part in text
    assert text.count("kvtool bench recode --shape 1,2,2,8,64 --seconds 0 --seed 1 --only") == 9


def test_commands_say_what_of_the_environment_they_ran_under(monkeypatch: pytest.MonkeyPatch) -> None:
    """What times depend on, as a shell takes it; never a secret."""
    for name in [name for name in os.environ if name in machine.SETTINGS or name.startswith("MLX_")]:
        monkeypatch.delenv(name)
    row = ("recode", "--shape", "1,2,2,8,64", "--seconds", "0", "--only", "rotate, mlx float32", "--repro")
    assert "\nkvtool bench recode" in bench(*row)[1]
    given = {"KVTOOL_SIMD": "avx2", "KVTOOL_THREADS": "1", "LD_PRELOAD": "/lib/my blas.so", "MLX_X": "1"}
    for name, value in (given | {"KVTOOL_TOKEN": "secret", "KVTOOL_STORE_KEY": "secret"}).items():
        monkeypatch.setenv(name, value)
    text = bench(*row)[1]
    assert "\nKVTOOL_SIMD=avx2 KVTOOL_THREADS=1 LD_PRELOAD='/lib/my blas.so' MLX_X=1 kvtool bench recode" in text and "secret" not in text


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("queries", [1, 40])
def test_what_a_mac_would_send(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    """System, chip, memory, versions, and rows of every kernel, whose Metal text the emulation runs."""
    device = {"device_name": "Apple M2 Max", "architecture": "applegpu_g14s"}
    system = {"system": lambda: "Darwin", "mac_ver": lambda: ("15.5", ("", "", ""), "arm64"), "machine": lambda: "arm64"}
    monkeypatch.setattr(machine, "platform", SimpleNamespace(**system, python_version=platform.python_version))
    monkeypatch.setattr(machine, "subprocess", SimpleNamespace(run=lambda *_, **__: SimpleNamespace(stdout="Apple M2 Max\n")))
    monkeypatch.setattr(machine, "mx", SimpleNamespace(device_info=lambda: device))
    monkeypatch.setattr(timing, "SETS", 1)  # an emulated call takes long
    with using(EmulatedMetal()):
        data = report("attend", "--shape", "1,4,2,32,40", "--queries", str(queries), "--codec", KERNEL_SPECS)
    about = data["machine"]
    wanted = {"system": "macOS 15.5", "architecture": "arm64", "processor": "Apple M2 Max", "device": "Apple M2 Max"}
    wanted |= {"device_architecture": "applegpu_g14s", "backend": "metal", "blas": "not used"}
    assert {key: about[key] for key in wanted} == wanted
    assert about["memory"] > 0 and {"kvtool", "mlx", "mlx-lm", "python"} <= set(about["versions"])
    timed_rows = [row for row in data["rows"] if row["skipped"] is None]
    assert all(row["median"] > 0 and row["error"] <= row["limit"] for row in timed_rows)
    found = {row["name"].rpartition(": ")[2] for row in timed_rows if (row["backend"], row["device"]) == ("metal", "Apple M2 Max")}
    kernels = {"codes", "scalar_fused_decode_attend", "turboquant_fused_rvq_decode_attend", "rabitq_prefill_attend", "metal_fused_sdpa"}
    assert kernels | ({"rabitq_fused_attend"} if queries == 1 else {"flash_prefill_attend float32"}) <= found


@pytest.mark.skipif(not native.available(), reason="the native back end is not here")
def test_rows_say_whether_the_native_back_end_took_part() -> None:
    args = ("attend", "encode", "--shape", SHAPE, "--codec", "rvq-4")
    here = f"native {native.level()}"
    assert native_line() == f"{native.level()}, {native.threads()} threads"
    on = {row["name"]: row["backend"] for row in report(*args)["rows"] if row["skipped"] is None}
    assert (on["rvq-4: codes"], on["rvq-4"], on["sdpa float32"], on["pack 2 bits"]) == (here, here, "cpu", here)
    blocks.cache_clear()
    with native.without():
        assert native_line() == "switched off"
        assert {row["backend"] for row in report(*args)["rows"] if row["skipped"] is None} == {"cpu"}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["attention"], "'attention' is not one of"),
        (["attend", "--codec", "zip-4"], "no codec 'zip-4'"),
        (["attend", "--codec", "tcz-1.1"], "decoded when it is loaded"),
        (["encode", "--codec", "commvq-1:additive", "--shape", "1,2,2,4,64"], "does not take D = 4"),
        (["files", "--codec", "commvq-2:additive"], "takes tables of the model"),
        (["attend", "--codec", "k=tc-2,v=rvq-4"], "tc for one role alone"),
        (["files", "--codec", "tc-2"], "takes tables of the model"),
        (["attend", "--shape", "1,32,8,128"], "five positive integers B,Hq,Hkv,D,S"),
        (["attend", "--shape", "1,3,2,8,64"], "Hq a multiple of Hkv, but got 3 and 2"),
        (["encode", "--shape", "1,2,2,7,64"], "an even D"),
        (["attend", "--shape", "1,2,2,8,4", "--queries", "5"], "queries must be 1 to S = 4"),
        (["recode", "--mb", "2"], "--mb goes with files"),
        (["recode", "--codec", "rvq-4"], "--codec goes with attend"),
        (["recode", "--shape", "1,2,2,8,64", "--only", "rotate"], "only must name rows of this run, but got 'rotate'"),
        (["--targets", "--quick"], "--targets measures rows of its own, and goes without quick"),
        (["encode", "--targets"], "goes without families"),
        (["recode", "--plot", "x.pdf"], "must end in .svg or .png"),
        (["recode", "--csv", "missing/x.csv"], "missing"),
        (["first-token", "--tokens", "1"], "1 is not in the range"),
        (["encode", "--shape", "1,2,2,8,64", "--codec", "vecinfer-2:smooth,rabitq-9"], "rabitq-9"),
    ],
)
def test_bad_arguments(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", *args]) == 2
    assert said in capsys.readouterr().err


def test_rows_that_cannot_run_say_why() -> None:
    found = by_name(report("attend", "--shape", "1,2,2,24,64", "--codec", "rvq-4", "--queries", "2"))
    assert found["mlx-lm 4 bits"]["skipped"] == "mlx quantises groups of 32 or 64, and D is 24"
    found = by_name(report("attend", "--shape", "1,1,1,144,64", "--codec", "rvq-4", "--queries", "2"))
    assert found["flash_prefill_attend float32"]["skipped"] == "D must be a multiple of 8 and at most 128, and is 144"


@pytest.mark.skipif(not sharing.SMAPS.exists(), reason="reads /proc")
def test_processes_share_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model of a given shape; processes that compute something else than this one are found."""
    words = ("files", "--model", "2x2x64", "--mb", "4", "--codec", "rvq-4", "--processes", "2", "--only", "rvq-4: 2 processes")
    row = by_name(report(*words))["rvq-4: 2 processes"]
    assert row["error"] == 0 and row["moved"] > 0.2 * 4e6 and "--processes 2" in row["command"]
    monkeypatch.setattr(sharing, "attended", lambda cache: "something else")
    assert by_name(report(*words, code=1))["rvq-4: 2 processes"]["error"] == 2


def test_models_of_a_shape() -> None:
    found = probe_model(shaped.model_of("3x2x32").model)
    assert [(probe.k.heads, probe.k.dim, probe.k.dtype) for probe in found if probe.k] == [(2, 32, mx.float16)] * 3
    with pytest.raises(ValueError, match="even head size"):
        shaped.model_of("3x2x31")


def test_cold_loads_are_cold(tmp_path: Path) -> None:
    """Pages are gone after a drop where that can be shown; else the rows say that they cannot run."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 22))
    why = filing.undroppable(tmp_path)
    if why is not None:
        assert "pages" in why
        return
    path.read_bytes()
    assert filing.cached(path) == 1
    filing.drop(path)
    assert filing.cached(path) == 0


def test_pages_that_stay_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filing, "drop", lambda path: None)
    monkeypatch.setattr(filing, "cached", lambda path: 0.25)
    assert filing.undroppable(tmp_path) == "25% of a file's pages stay in memory when they are dropped"
    assert not list(tmp_path.iterdir())


def test_codes_may_lose_what_their_codec_does() -> None:
    """Each kind of codec is below its limit, and not by much: half the bits would be above it."""
    size = Size(1, 2, 2, 32, 320)
    data = by_name(report("encode", "--shape", str(size), "--codec", "rvq-2+2,rvq-1,affine-1,affine-4,qjl-4,rabitq-8,tc-2.05"))
    for name in ("rvq-2+2", "rvq-1", "affine-1", "affine-4", "qjl-4", "tc-2.05"):
        assert 0.25 < data[name]["error"] <= 1, name
    assert coding.allowed(parse_codec("rvq-2").k, (2, 320, 32)) > 10 * coding.allowed(parse_codec("rvq-4").k, (2, 320, 32))
    made = blocks("tc-2.05", size, mx.float32, 1)[0]
    assert 8 * (made.k.nbytes + made.v.nbytes) / size.values == pytest.approx(2.05, abs=0.02)
    assert plan_of("tc-2.05", size, 1).k.calibration is None


# --- targets


def test_targets_measure_their_rows_and_judge_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit has its row; a limit out of reach is missed and makes the exit code."""
    small = {"shape": SHAPE, "model_name": "1x2x16", "megabytes": 0.1}
    easy = tuple(replace(target, least=0.0) for target in targets.CPU[0].targets)
    monkeypatch.setattr(targets, "CPU", (targets.Setting(small, easy),))
    data = report("--targets")
    assert [one["reached"] for one in data["targets"]] == [True] * len(easy)
    rows = by_name(data)
    assert data["targets"][0]["measured"] == pytest.approx(rows["rabitq: codes"]["to_copy"])
    monkeypatch.setattr(targets, "CPU", (targets.Setting(small, (replace(easy[0], least=1e9),)),))
    missed = report("--targets", code=1)["targets"]
    assert [one["reached"] for one in missed] == [False] and missed[0]["least"] == 1e9


def test_targets_of_a_gpu_have_their_rows_at_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """All settings of a GPU on this machine, at small sizes in float16, as models run there; what was missed in one is said at its size."""
    sizes = (SHAPE, "4,4,2,32,64", "1,4,2,32,80")
    assert [one.options["shape"] for one in targets.GPU] == ["1,32,8,128,131072", "8,32,8,128,32768", "1,32,8,128,8192"]
    small = tuple(
        targets.Setting({**one.options, "shape": shape} | ({"queries": 5} if "queries" in one.options else {}), one.targets)
        for one, shape in zip(targets.GPU, sizes, strict=True)
    )
    easy = [replace(one, targets=tuple(replace(target, least=0.0) for target in one.targets)) for one in small]
    easy[1] = replace(easy[1], targets=(*easy[1].targets[:-1], replace(easy[1].targets[-1], least=1e9)))
    monkeypatch.setattr(targets, "CPU", tuple(easy))
    monkeypatch.setattr("kvtool.model.default_dtype", lambda: None)
    data = report("--targets", code=1)
    assert data["failed"] == 0 and len(data["targets"]) == sum(len(one.targets) for one in easy)
    assert [one["shape"] for one in data["targets"] if not one["reached"]] == [sizes[1]]
    assert {(one["shape"], one["queries"]) for one in data["targets"]} == {(sizes[0], 1), (sizes[1], 1), (sizes[2], 5)}
    assert all(one["measured"] > 0 for one in data["targets"])
    for shape, one in zip(sizes, easy, strict=True):
        here = [row for row in data["rows"] if f"--shape {shape} " in row["command"]]
        assert {target.row for target in one.targets} <= {row["name"] for row in here}


@pytest.mark.parametrize("name", ["rabitq_encode", "rvq_quant_pack"])
def test_a_fault_of_an_encoder_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One flipped bit of a code."""
    sound = getattr(metal, name)

    def flipped(*args: Any) -> tuple[mx.array, mx.array]:
        codes, other = sound(*args)
        return mx.where(mx.arange(codes.size).reshape(codes.shape) == 7, codes ^ 1, codes), other

    monkeypatch.setattr(metal, name, flipped, raising=False)
    found = by_name(report("encode", "--shape", SHAPE, "--codec", "raw", code=1))
    wrong = [row for row, one in found.items() if one["problem"]]
    assert len(wrong) == 1 and wrong[0].startswith(name)


def test_targets_of_rows_that_were_not_timed_are_missed() -> None:
    row = Row("encode", "rvq-4", "cpu", "here", "")
    (whole,) = targets.CPU

    def judged(target: targets.Target, own: Row, copy: float) -> dict[str, Any]:
        return targets.judge(replace(whole, targets=(target,)), [own], copy)[0]

    target = next(one for one in whole.targets if (one.family, one.row) == ("encode", "rvq-4"))
    found = judged(target, row, 10.0)
    assert found["measured"] is None and not found["reached"]
    assert judged(target, replace(row, values_rate=6e8), 10.0)["reached"]
    output = next(one for one in whole.targets if one.what.startswith("output") and one.family == "decode")
    found = judged(output, replace(row, family="decode", values_rate=1e9), 12.0)
    assert found["measured"] == pytest.approx(8 / 12) and found["reached"]
