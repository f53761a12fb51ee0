"""Calibrating a model: the tables against the rows they are of, the command, its errors, and what an interrupt leaves."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from formats.calibration import read_calibration, to_bytes
from formats.errors import IncompatibleError
from formats.manifest import ModelInfo
from formats.tables import digest_of
from kvtool import calibrating
from kvtool.calibrating import calibrate, tables_of
from kvtool.calibrations import Calibration
from kvtool.cli import run
from kvtool.model import LoadedModel
from kvtool.moments import Moments, collect
from tests.library import ids, tiny
from tests.texts import text
from veloxquant_mlx.allocators.additive import build_additive, spectrum
from veloxquant_mlx.allocators.predictors import build_at, build_tcz, measure
from veloxquant_mlx.allocators.transforms import LayerRows, TcTables, build_tc

TOKENS = 160
KINDS = ("tc", "tcz-0.75", "tcz-1.25", "tcz-2", "additive-1", "additive-1.5", "additive-2", "additive-3")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTOOL_CALIBRATIONS", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture(scope="module")
def prose(tiny_a: LoadedModel) -> list[int]:
    return tiny_a.tokenizer.encode(text("prose"))[:TOKENS]


@pytest.fixture(scope="module")
def calibration(tiny_a: LoadedModel, prose: list[int]) -> Calibration:
    return calibrate(tiny_a, {"prose": prose}, rates=(1.0, 2.0), additive=(1.0, 2.0))


@pytest.fixture(scope="module")
def source(tiny_a: LoadedModel, prose: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "prose.txt"
    path.write_text(tiny_a.tokenizer.decode(prose), encoding="utf-8")
    return path


# --- library --------------------------------------------------------------------------------------------------------------------------


def test_tables_of_every_layer_and_kind(calibration: Calibration, tiny_a: LoadedModel) -> None:
    file = calibration.file
    kinds = ["tc", "tcz-1", "tcz-2", "additive-1", "additive-2"]
    assert list(file.tables) == kinds and all(calibration.layers(kind) == tuple("0123") for kind in file.tables)
    assert file.model == tiny_a.info and file.tokens == TOKENS and not file.skipped and list(file.texts) == ["prose"]
    about = {"metric": "fisher", "rows": TOKENS - 4, "gradients": TOKENS - 36, "length": 1024, "sink": 4, "recent": 32}
    assert file.options == dict.fromkeys(file.tables, about)
    assert calibration.digest == digest_of(to_bytes(file)) and calibration.path is None


def test_tables_are_of_the_models_rows(calibration: Calibration, tiny_a: LoadedModel, prose: list[int]) -> None:
    """Components of the rows before RoPE are uncorrelated with variance 1, in each layer its own, and the rates are met."""
    rows = collect(tiny_a, {"prose": prose}).layers
    for name, layer in rows.items():
        tables = calibration.tables("tc", name)
        y = np.einsum("nhd,hdi->hni", layer.k.astype(np.float64) - tables.k_mean, tables.forward())
        for head in y[:, :, :32]:
            # The costliest half: of 156 rows of 64 components, the covariance is drawn towards a multiple of I by 1 %.
            np.testing.assert_allclose(np.cov(head.T, bias=True), np.eye(32), atol=0.1)
        np.testing.assert_allclose(tables.v_mean, layer.v.astype(np.float64).mean(axis=0), atol=1e-5)
    pairs = [(layer.k, layer.v) for layer in rows.values()]
    for rate in (1.0, 2.0):
        tables = [calibration.tables(f"tcz-{rate:g}", name) for name in rows]
        assert [t.chained for t in tables] == [False, True, True, True]
        assert measure(tables, pairs, tables[0].step) == pytest.approx(rate, rel=0.06)


def test_stages_are_shared_over_layers(calibration: Calibration, tiny_a: LoadedModel, prose: list[int]) -> None:
    """A byte for each stage: bits D / 8 a head on average, and more where keys cost more; words are of this layer's rows."""
    rows = collect(tiny_a, {"prose": prose}).layers
    for bits in (1.0, 2.0):
        stages = np.array([calibration.tables(f"additive-{bits:g}", name).stages for name in rows])
        assert stages.mean() == bits * 64 / 8 and len(set(stages.sum(axis=1))) > 1
    for name, layer in rows.items():
        np.testing.assert_allclose(calibration.tables("additive-2", name).mean, layer.k.astype(np.float64).mean(axis=0), atol=1e-5)


def test_heads_too_small_for_a_rate_have_no_tables_of_it() -> None:
    rng = np.random.default_rng(0)
    own = LayerRows(*rng.standard_normal((2, 80, 2, 4)).astype(np.float32), np.eye(8), np.eye(8), 80)
    moments = Moments(ModelInfo("m", "m", "0" * 64, "0" * 64, "float32"), {"0": own}, {}, 80, {"a": "0" * 64}, 80, 0, 1)
    done: list[str] = []
    made = tables_of(moments, rates=(), additive=(1.0, 2.0), built=done.append)
    assert list(made.file.tables) == ["tc", "additive-2"] and done == ["tc", "additive", "additive"]


def test_the_same_texts_give_the_same_digest(calibration: Calibration, tiny_a: LoadedModel, prose: list[int]) -> None:
    steps: list[tuple[int, int]] = []
    again = calibrate(
        tiny_a, {"prose": prose}, rates=(1.0, 2.0), additive=(1.0, 2.0), progress=lambda done, total: steps.append((done, total))
    )
    assert again.digest == calibration.digest
    assert steps[0][0] == TOKENS and steps[-1][0] == steps[-1][1] and len(steps) == 6 and steps == sorted(steps)
    assert calibrate(tiny_a, {"prose": prose[1:]}, rates=(1.0, 2.0), additive=(1.0, 2.0)).digest != calibration.digest


def test_layers_that_cannot_be_calibrated_are_listed() -> None:
    """Every second layer recurrent: the tables of the others are chained past it."""
    model = tiny("qwen3_next")
    found = calibrate(model, {"a": ids(96)}, rates=(1.0,), additive=())
    layers, skipped = set(found.layers("tc")), found.file.skipped
    assert layers and skipped and not layers & set(skipped) and all("recurrent" in why for why in skipped.values())
    assert found.layers("tcz-1") == found.layers("tc")


@pytest.mark.parametrize(("family", "why"), [("mamba", "layer 0: recurrent state"), ("deepseek_v2", "as in latent attention")])
def test_a_model_without_such_layers_is_refused(family: str, why: str) -> None:
    with pytest.raises(IncompatibleError, match=f"has no layer that can be calibrated: .*{why}"):
        calibrate(tiny(family), {"a": ids(64)})


def test_a_layer_whose_tables_cannot_be_built_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the tables' own check of what they hold."""
    model, built = tiny("llama"), []

    def failing(layer: LayerRows) -> TcTables:
        built.append(layer)
        if len(built) == 2:
            raise ValueError("[build_tc] planted")
        return build_tc(layer)

    monkeypatch.setattr(calibrating, "build_tc", failing)
    found = calibrate(model, {"a": ids(64)}, rates=(1.0,), additive=())
    assert found.layers("tc") == found.layers("tcz-1") == ("0",) and found.file.skipped == {"1": "[build_tc] planted"}


@pytest.mark.parametrize(("gradients", "floors"), [(None, (1e-3, 0.02)), (36_000, (1e-3, 0.02)), (240, (0.15, 0.15)), (1, (1.0, 1.0))])
def test_metrics_of_few_gradients_have_their_small_eigenvalues_raised(gradients: int | None, floors: tuple[float, float]) -> None:
    """The basis is F = A U with U orthogonal, so that F F^T is the metric A^2 as it was taken."""
    rng = np.random.default_rng(0)
    turn, values = np.linalg.qr(rng.standard_normal((12, 12)))[0], np.geomspace(1e-5, 1, 12)
    rows = rng.standard_normal((2, 400, 2, 6)).astype(np.float32)
    metric = turn * values @ turn.T
    tables = build_at([LayerRows(*rows, metric, metric, gradients)], 0.1, 1.0)[0][0]
    for role, floor in zip((tables.k, tables.v), floors, strict=True):
        basis = role.basis.astype(np.float64) * role.basis_scale
        found = np.linalg.eigvalsh(basis @ basis.T)
        np.testing.assert_allclose(found, np.sort(np.maximum(values, floor * values.mean())), rtol=0.02)
    # Of additive words, in each head: the basis is lam^1/2 U^T A^-1, and the costs are the spectrum of A Cov A.
    halves = np.stack([metric[at, at] for at in (slice(6), slice(6, 12))])
    want = []
    for h, half in enumerate(halves):
        own, vectors = np.linalg.eigh(half)
        least = {None: 1e-3, 36_000: 1e-3, 240: 3 * 6 / 240, 1: 1.0}[gradients]
        floored = vectors * np.maximum(own, least * own.mean()) @ vectors.T
        x = rows[0][:, h].astype(np.float64)
        want.append(np.sort(np.linalg.eigvals(np.cov(x.T, bias=True) @ floored).real)[::-1])
    np.testing.assert_allclose(spectrum(rows[0], metric, gradients), want, rtol=1e-6)
    np.testing.assert_allclose(build_additive(rows[0], metric, 2.0, gradients=gradients).cost, want, rtol=1e-6)
    with pytest.raises(ValueError, match="gradients of layer 0 must be at least 1, but got 0"):
        build_tcz([LayerRows(*rows, metric, metric, 0)], 1.0)
    with pytest.raises(ValueError, match="gradients must be at least 1, but got 0"):
        spectrum(rows[0], metric, 0)


# --- command --------------------------------------------------------------------------------------------------------------------------


def test_to_the_store_and_used_from_there(source: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "--model", "tiny-a", "--text", str(source), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    path = Path(data["path"])
    assert path == folder / f"{data['digest']}.safetensors" and data["file_bytes"] == path.stat().st_size
    assert data["layers"] == list("0123") and data["skipped"] == {} and data["kinds"] == [*KINDS]
    assert list(data["texts"]) == ["prose.txt"] and data["metric"] == "fisher" and data["seconds"] > 0
    assert data["tokens"] == data["rows"] + 4 == data["gradients"] + 36
    assert (
        run(["export", "--model", "tiny-a", "--prompt-file", str(source), "--codec", "tc-2", "-o", str(tmp_path / "a.kv"), "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["calibration"] == data["digest"]
    (folder / f"{'0' * 64}.safetensors").write_bytes(path.read_bytes())
    (folder / f"{'1' * 64}.safetensors").write_bytes(path.read_bytes()[:1000])
    os.utime(path, (0, 0))
    assert run(["calibrations", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["folder"] == str(folder) and [a["digest"] for a in listed["calibrations"]][2] == data["digest"]
    own = listed["calibrations"][2]
    assert own["model"] == "tiny-a" and own["bytes"] == data["file_bytes"] and own["problem"] is None
    assert own["written"] == "1970-01-01T00:00:00+00:00"
    problems = {a["digest"][0]: a["problem"] for a in listed["calibrations"][:2]}
    assert problems["0"] == f"DigestError: has digest {data['digest']}" and problems["1"].startswith("TruncatedError: ")
    assert run(["calibrations"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{folder}: 3 calibrations" and lines[3].split()[0] == data["digest"][:12] and lines[3].endswith("bytes  tiny-a")


def test_to_a_file_and_how_to_use_it(source: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "a b.cal"
    assert run(["calibrate", "--model", "tiny-a", "--text", str(source), "--text", str(source), "-o", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    file, digest = read_calibration(target)
    assert lines[0].startswith(f"{target}: calibration of tiny-a, {target.stat().st_size:,} bytes") and lines[1] == f"  digest {digest}"
    use = f"  use: kvtool export --model tiny-a --prompt-file F --codec tc-2 --calibration '{target}' -o OUT.kv"
    assert lines[-1] == use and not folder.exists()
    assert list(file.texts) == ["prose.txt", "prose.txt (2)"] and len(set(file.texts.values())) == 1


def test_an_empty_store_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrations"]) == 0
    assert capsys.readouterr().out == f"{folder}: 0 calibrations\n"


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (b"Too short.", 2, r"texts['a.txt'] must have at least 64 tokens, but got "),
        (b"\xff\xfe", 2, "not UTF-8 text (byte 0)"),
        (None, 2, "No such file or directory"),
    ],
)
def test_bad_texts(content: bytes | None, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    assert run(["calibrate", "--model", "tiny-a", "--text", str(tmp_path / "a.txt"), "-o", str(tmp_path / "x.cal")]) == code
    assert said in capsys.readouterr().err and not (tmp_path / "x.cal").exists()


def test_a_model_that_cannot_be_calibrated_is_exit_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvtool.model.load_model", lambda name, **_: tiny("mamba"))
    assert run(["calibrate", "--model", "mamba", "-o", str(tmp_path / "x.cal")]) == 5
    err = capsys.readouterr().err
    assert "has no layer that can be calibrated: layer 0: recurrent state" in err and "hint: " in err
    assert not (tmp_path / "x.cal").exists()


def test_a_place_that_cannot_be_written_is_found_out_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["calibrate", "--model", "no-such-model", "-o", str(tmp_path / "missing" / "x.cal")]) == 2
    assert "missing" in capsys.readouterr().err


def test_an_interrupt_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    """SIGINT once the texts are being run: exit 130, no file in the store or beside the target."""
    code = (
        "import os, signal, sys, kvtool.moments as m\n"
        "from kvtool.cli import main\n"
        "run = m.run_backward\n"
        "def once(*a, **k):\n    os.kill(os.getpid(), signal.SIGINT)\n    return run(*a, **k)\n"
        "m.run_backward = once\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nmain()\n"
    )
    for out in ([], ["-o", str(tmp_path / "out" / "x.cal")]):
        (tmp_path / "out").mkdir(exist_ok=True)
        done = subprocess.run([sys.executable, "-c", code, "calibrate", "--model", "tiny-a", *out], capture_output=True, text=True)
        assert done.returncode == 130 and done.stderr.endswith("interrupted\n") and done.stdout == ""
        assert not list(folder.glob("*")) and not list((tmp_path / "out").glob("*"))
