"""Files of calibrated codecs: bound to every layer, decoded with the calibration they name, and what happens where it is not there."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.calibration import from_bytes, to_bytes
from formats.container import open_container
from formats.errors import DigestError, IncompatibleError, ManifestError
from formats.tables import digest_of
from kvtool import binding, calibrations
from kvtool import calibration_store as store
from kvtool.archive import write_archive
from kvtool.binding import bind, layer_sources, metric_of
from kvtool.calibrations import Calibration
from kvtool.capturing import Snapshot
from kvtool.cli import run
from kvtool.encoding import Encoder
from kvtool.model import LoadedModel
from kvtool.segment_work import stripped
from kvtool.states import CacheState
from tests.library import calibration_of, digests, f64, ids, rewrite, tiny
from tests.texts import text
from veloxquant_mlx import codecs
from veloxquant_mlx.allocators.carried_tables import mix_widths
from veloxquant_mlx.allocators.transforms import TcTables
from veloxquant_mlx.codecs import parse_codec, tc
from veloxquant_mlx.codecs._base import Codec, Frame, Given, Layout, RoleName, Shape

WINDOW = ",sink=4,recent=16"
TOKENS = 200


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTOOL_CALIBRATIONS", str(tmp_path / "store"))
    return tmp_path / "store"


@pytest.fixture(scope="module")
def snapshot(tiny_a: LoadedModel) -> Snapshot:
    return kvtool.capture(tiny_a, tiny_a.tokenizer.encode(text("prose"))[:TOKENS])


@pytest.fixture
def calibration(calibration_a: bytes, tmp_path: Path) -> Calibration:
    (tmp_path / "a.cal").write_bytes(calibration_a)
    return calibrations.load(tmp_path / "a.cal")


def states_of(path: Path, **options: Any) -> list[CacheState]:
    with kvtool.open(path, **options) as archive:
        return [archive.state(i) for i in range(len(archive.manifest.layers))]


def error_of(a: Any, b: Any) -> float:
    return float(np.square(f64(a) - f64(b)).sum() / np.square(f64(a)).sum())


@pytest.mark.parametrize("spec", ["tc-2", "tc-3", "tcz-1", "tcz-2.5"])
def test_a_file_decodes_to_what_its_quality_says(
    spec: str, snapshot: Snapshot, calibration: Calibration, tiny_a: LoadedModel, tmp_path: Path
) -> None:
    path = tmp_path / "x.kv"
    report = kvtool.save(snapshot, path, codec=spec + WINDOW, calibration=calibration)
    assert report.calibration == calibration.digest and report.quality is not None and report.quality["calibration"] == calibration.digest
    with open_container(path) as reader:
        assert {c.id for c in reader.manifest.codecs} - {"raw", "rvq"} == {spec.partition("-")[0]}
    restored = kvtool.load(path, tiny_a, calibration=calibration)
    assert restored.usable == TOKENS
    for state, exact in zip(states_of(path, calibration=calibration), snapshot.states, strict=True):
        for role in ("k", "v"):
            ours, theirs = getattr(state, role), getattr(exact, role)
            # The window and the sinks are exact in float16.
            assert np.allclose(f64(ours[:, :4]), f64(theirs[:, :4]), rtol=1e-3, atol=1e-3)
            assert np.allclose(f64(ours[:, -16:]), f64(theirs[:, -16:]), rtol=1e-3, atol=1e-3)
    with kvtool.open(path, calibration=calibration) as archive:
        for role in ("k", "v"):
            whole = [0.0, 0.0]
            for i, exact in enumerate(snapshot.states):
                coded = slice(4, TOKENS - 16)
                a, b = (f64(getattr(s, role))[:, coded] for s in (exact, archive.state(i)))
                whole = [whole[0] + np.square(a - b).sum(), whole[1] + np.square(a).sum()]
            assert whole[0] / whole[1] == pytest.approx(report.quality[f"{role}_relative_error"], rel=0.02)


def test_layers_decode_alike_in_any_order(chained: tuple[Path, Calibration]) -> None:
    path, calibration = chained
    forward = states_of(path, calibration=calibration)
    with kvtool.open(path, calibration=calibration) as archive:
        for i in reversed(range(len(forward))):
            state = archive.state(i)
            assert mx.array_equal(state.k, forward[i].k).item() and mx.array_equal(state.v, forward[i].v).item()
            assert len(archive.decoder._kept) <= 4  # one layer and the one before it


def test_without_its_calibration(snapshot: Snapshot, calibration: Calibration, tiny_a: LoadedModel, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "x.kv"
    kvtool.save(snapshot, path, codec="tc-2" + WINDOW, calibration=calibration)
    with pytest.raises(IncompatibleError, match=calibration.digest) as caught:
        kvtool.load(path, tiny_a)
    assert "--calibration" in str(caught.value.hint) and "tiny-a" in str(caught.value) and caught.value.path == str(path)
    # Another calibration of the same model is not the one.
    other = from_bytes(to_bytes(replace(calibration.file, tokens=1)))
    wrong = Calibration(other, "f" * 64)
    with pytest.raises(IncompatibleError, match="given: ffffffffffff"):
        kvtool.load(path, tiny_a, calibration=wrong)
    assert run(["check", str(path)]) == 0
    assert run(["import", str(path), "--model", "tiny-a", "--max-tokens", "1"]) == 5
    assert calibration.digest in capsys.readouterr().err


def test_the_store(snapshot: Snapshot, calibration_a: bytes, tiny_a: LoadedModel, tmp_path: Path) -> None:
    kept = store.put(calibration_a)
    report = kvtool.save(snapshot, tmp_path / "x.kv", codec="tcz-1" + WINDOW)  # the store's newest
    assert report.calibration == kept.stem
    kvtool.load(tmp_path / "x.kv", tiny_a)
    kept.write_bytes(calibration_a[:-1] + bytes([calibration_a[-1] ^ 1]))
    with pytest.raises(DigestError):
        kvtool.load(tmp_path / "x.kv", tiny_a)
    kept.unlink()  # as if deleted between export and import
    with pytest.raises(IncompatibleError, match="not here"):
        kvtool.load(tmp_path / "x.kv", tiny_a)


def test_self_calibrated(snapshot: Snapshot, tiny_a: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"calibration=.*model="):
        kvtool.save(snapshot, tmp_path / "x.kv", codec="tc-3" + WINDOW)
    report = kvtool.save(snapshot, tmp_path / "x.kv", codec="tcz-1" + WINDOW, model=tiny_a)
    assert report.calibration is None and report.notes and "tc-1.25" in report.notes[0]
    assert report.quality is not None and report.codec == report.quality["codec"] == "tc-1.25" + WINDOW
    assert report.quality["calibration"] == "carried"
    restored = kvtool.load(tmp_path / "x.kv", tiny_a)
    assert restored.usable == TOKENS
    short = kvtool.capture(tiny_a, list(snapshot.tokens or ())[:50])
    with pytest.raises(ValueError, match="64 tokens at least"):
        kvtool.save(short, tmp_path / "x.kv", codec="tc-3" + WINDOW, model=tiny_a)


@pytest.mark.parametrize("most", (1 << 13, 150))
def test_own_tables_are_sized_for_the_rows_they_code(most: int, snapshot: Snapshot, tiny_a: LoadedModel, monkeypatch: Any) -> None:
    """Tables learnt from all rows that they code need no caution; from some of them, they do."""
    monkeypatch.setattr(binding, "OWN_ROWS", most)
    plan, sources = parse_codec("tc-3" + WINDOW), layer_sources(snapshot.states, snapshot.probes)
    moments = binding.own_moments(tiny_a, snapshot.tokens, plan)
    asked = []

    def sized(tables: TcTables, widths: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        asked.append(tokens)
        return mix_widths(tables, widths, tokens)

    monkeypatch.setattr(tc, "mix_widths", sized)
    found = bind(plan, sources, None, lambda: moments, compare=False)
    assert found is not None
    coded = TOKENS - 20
    assert asked == [coded] * len(snapshot.states)
    for codec in found.codecs.values():
        assert isinstance(codec, tc.Tc) and codec.tables is not None
        assert codec.tables.own == (most > coded) and codec.tables.rows == min(most, coded)


def test_roles_go_together(snapshot: Snapshot, calibration: Calibration, tmp_path: Path) -> None:
    for spec, what in (("k=tc-2,v=rvq-4", "one for both"), ("tc-2,frame=post", "before RoPE"), ("k=tc-2,v=tc-3", "one for both")):
        with pytest.raises(ValueError, match=what):
            kvtool.save(snapshot, tmp_path / "x.kv", codec=spec, calibration=calibration)
    assert not (tmp_path / "x.kv").exists()


def bound(snapshot: Snapshot, spec: str, calibration: Calibration) -> Any:
    return bind(parse_codec(spec), layer_sources(snapshot.states, snapshot.probes), calibration, None)


def test_a_calibration_for_a_codec_that_takes_none(snapshot: Snapshot, calibration: Calibration, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rvq-4 takes no calibration"):
        kvtool.save(snapshot, tmp_path / "x.kv", codec="rvq-4", calibration=calibration)
    assert not (tmp_path / "x.kv").exists()


def test_layers_without_tables_fall_back(snapshot: Snapshot, calibration: Calibration, tiny_a: LoadedModel, tmp_path: Path) -> None:
    file = calibration.file
    tables = {kind: {n: a for n, a in layers.items() if n != "1"} for kind, layers in file.tables.items()}
    part = Calibration(replace(file, tables=tables, skipped={"1": "sliding window"}), "e" * 64)
    report = kvtool.save(snapshot, tmp_path / "x.kv", codec="tc-3.5" + WINDOW, calibration=part)
    assert [f for f in report.fallbacks if f.startswith("1.")] == ["1.k: rvq-4, sliding window", "1.v: rvq-4, sliding window"]
    kvtool.load(tmp_path / "x.kv", tiny_a, calibration=part)


def test_a_chain_that_is_broken(snapshot: Snapshot, calibration: Calibration, tiny_a: LoadedModel, tmp_path: Path) -> None:
    """What is predicted from a layer that is not coded with the calibration is not either, and so on up the chain."""
    probe = snapshot.probes[1]
    assert probe.k is not None
    unknown = replace(probe, k=replace(probe.k, rope=None, rope_problem="unknown rotation"))
    other = replace(snapshot, probes=(snapshot.probes[0], unknown, *snapshot.probes[2:]))
    report = kvtool.save(other, tmp_path / "x.kv", codec="tcz-2" + WINDOW, calibration=calibration)
    reasons = {text.partition(":")[0]: text for text in report.fallbacks}
    assert "unknown rotation" in reasons["1.k"] and "layer 1, which it is predicted from" in reasons["2.v"] and "layer 2" in reasons["3.k"]
    assert not {"0.k", "0.v"} & set(reasons) and report.kept_post == ("1.k: unknown rotation",)
    states_of(tmp_path / "x.kv", calibration=calibration)


def test_a_calibration_whose_layers_are_in_another_order(snapshot: Snapshot, calibration: Calibration) -> None:
    """A layer cannot be predicted from one that is coded after it."""
    tables = {kind: {n: layers[n] for n in ("0", "2", "1", "3")} for kind, layers in calibration.file.tables.items()}
    found = bound(snapshot, "tcz-2" + WINDOW, Calibration(replace(calibration.file, tables=tables), "d" * 64))
    reasons = {text.partition(":")[0]: text for text in found.fallbacks}
    assert "layer 2, which it is predicted from, comes after it" in reasons["1.k"] and "layer 1" in reasons["3.k"]


def test_a_calibration_that_does_not_fit_is_no_worse_than_none(snapshot: Snapshot, calibration: Calibration) -> None:
    """Tables of other rows: means far away, so that components overflow their points."""
    tc = {n: dict(a) | {"k_mean": a["k_mean"] + 50, "v_mean": a["v_mean"] - 50} for n, a in calibration.file.tables["tc"].items()}
    wrong = Calibration(replace(calibration.file, tables={"tc": tc}), "d" * 64)
    found = bound(snapshot, "tc-3" + WINDOW, wrong)
    assert {codec.id for codec in found.codecs.values()} == {"rvq"} and len(found.fallbacks) == 2 * len(snapshot.states)
    assert found.calibration is None
    assert all("times less costly" in f for f in found.fallbacks)
    assert not bound(snapshot, "tc-3" + WINDOW, calibration).fallbacks
    with pytest.raises(IncompatibleError, match="no tables for tcz"):
        bound(snapshot, "tcz-2" + WINDOW, wrong)


def test_another_models_calibration_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(IncompatibleError, match="whose weights"):
        kvtool.save(kvtool.capture(model, ids(80)), tmp_path / "x.kv", codec="tc-2", calibration=calibration)


def test_the_metric_is_the_tables(calibration: Calibration) -> None:
    """e -> |e M|^2 gives each component's cost for an error of one unit of that component."""
    tables = calibration.tables("tc", "0")
    metric = metric_of(tables, "k")
    for h, i in ((0, 0), (tables.heads - 1, 5)):
        error = np.zeros((tables.heads, tables.dim))
        error[h] = tables.back[h, i]
        assert np.square(error.reshape(-1) @ metric).sum() == pytest.approx(tables.k_cost[h, i], rel=1e-3)


@pytest.fixture(scope="module")
def chained(snapshot: Snapshot, calibration_a: bytes, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Calibration]:
    folder = tmp_path_factory.mktemp("chained")
    (folder / "a.cal").write_bytes(calibration_a)
    calibration = calibrations.load(folder / "a.cal")
    kvtool.save(snapshot, folder / "x.kv", codec="tcz-1" + WINDOW, calibration=calibration)
    return folder / "x.kv", calibration


@pytest.mark.parametrize("edit", ["layer", "after itself", "after nothing", "after later", "frame"])
def test_hostile_manifests(edit: str, chained: tuple[Path, Calibration], tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        if edit == "frame":
            manifest["layers"][1]["k"]["segments"][1]["frame"] = "post"
        for params in (c["params"] for c in manifest["codecs"] if c["id"] == "tcz" and c["params"]["layer"] == "2"):
            if edit == "layer":
                params["layer"] = "99"
            elif edit != "frame":
                params["after"] = {"after itself": "2", "after nothing": "7", "after later": "3"}[edit]

    rewrite(chained[0], tmp_path / "y.kv", change)
    with pytest.raises((ManifestError, IncompatibleError)):
        states_of(tmp_path / "y.kv", calibration=chained[1])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1", "deepseek_v2", "mamba"])
def test_families(family: str, tmp_path: Path) -> None:
    """What has no keys and values, or other ones than the layer before, falls back; the rest is coded with the calibration."""
    model = tiny(family)
    captured = kvtool.capture(model, ids(100))
    own = kvtool.save(captured, tmp_path / "x.kv", codec="tc-4,sink=4,recent=8", model=model, calibration="self")
    assert kvtool.load(tmp_path / "x.kv", model).usable >= 99
    skipped = {text.partition(",")[2] for text in own.fallbacks if "less costly" not in text}
    assert bool(skipped) == (family in ("deepseek_v2",)), skipped
    if family in ("deepseek_v2", "mamba"):
        return
    made = calibration_of(model, ids(100, 3), recent=8)
    calibration = Calibration(made, digest_of(to_bytes(made)))
    report = kvtool.save(captured, tmp_path / "x.kv", codec="tcz-2,sink=4,recent=8", calibration=calibration)
    kvtool.load(tmp_path / "x.kv", model, calibration=calibration)
    with kvtool.open(tmp_path / "x.kv") as archive:
        assert any(codec.id == "tcz" for codec in archive.manifest.codecs)
    # Windows and the whole cache hold other rows, so that one is not predicted from the other.
    assert any("not at the positions" in text for text in report.fallbacks) == (family in ("gemma3_text", "gpt_oss"))


# --- a codec made to test the contract -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offset:
    """Tables of `Checked`: a number to add."""

    offset: float

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray]) -> Self:
        return cls(float(arrays["offset"]))


@dataclass(frozen=True)
class Checked(Codec):
    """Stores x less what it was given less its tables' offset, and a copy of what it was given, which decoding compares bit for bit."""

    role: RoleName = "k"
    before: str | None = None
    digest: str | None = None
    layer: str = "0"
    tables: Offset | None = field(default=None, compare=False)
    id: ClassVar[str] = "checked"

    @property
    def needs(self) -> tuple[str, ...]:
        past = () if self.before is None else ("k-", "v-")
        return (*past, *(("k",) if self.role == "v" else ()))

    @property
    def after(self) -> str | None:
        return self.before

    @property
    def eager(self) -> bool:
        return self.role == "v"

    @property
    def calibration(self) -> str | None:
        return self.digest if self.tables is None else None

    def with_tables(self, tables: Any) -> "Checked":
        return replace(self, tables=tables)

    @classmethod
    def parse(cls, text: str, role: RoleName) -> Codec | None:
        return None

    def spec(self, role: RoleName | None = None) -> str:
        return self.id

    def to_params(self) -> dict:
        return {"role": self.role, "before": self.before, "digest": self.digest, "layer": self.layer}

    @classmethod
    def from_params(cls, params: dict) -> Self:
        return cls(**params)

    def default_frame(self, role: RoleName) -> Frame:
        return "pre"

    def layout(self, shape: Shape, dtype: mx.Dtype) -> Layout:
        heads, tokens, dim = shape
        parts: Layout = {"rest": ("F32", (heads, -1 if self.eager else tokens, dim))}
        return parts | ({"given": ("F32", (len(self.needs), -1 if self.eager else tokens, heads * dim))} if self.needs else {})

    def encode(self, x: mx.array, given: Given | None = None) -> dict[str, mx.array]:
        assert self.tables is not None
        rows = self._checked_given(given, tuple(x.shape))  # type: ignore[arg-type]
        parts = {"rest": x - self.tables.offset - sum(rows.values(), start=mx.zeros(x.shape))}
        return parts | ({"given": self._copy(rows)} if rows else {})

    def decode(self, parts: dict[str, mx.array], shape: Shape, dtype: mx.Dtype, given: Given | None = None) -> mx.array:
        assert self.tables is not None
        parts = self._checked_parts(parts, self.layout(shape, dtype))
        rows = self._checked_given(given, shape)
        assert not rows or mx.array_equal(parts["given"], self._copy(rows)).item()
        return (parts["rest"] + self.tables.offset + sum(rows.values(), start=mx.zeros(shape))).astype(dtype)

    def _copy(self, rows: dict[str, mx.array]) -> mx.array:
        return mx.stack([rows[need].transpose(1, 0, 2).reshape(rows[need].shape[1], -1) for need in self.needs])


def test_the_contract(snapshot: Snapshot, calibration: Calibration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decoding gives a codec is what encoding gave it, whatever the order, in blocks or whole; tables come from the calibration."""
    monkeypatch.setitem(codecs.CODECS, "checked", Checked)
    monkeypatch.setitem(calibrations.KINDS, "checked", Offset)
    monkeypatch.setattr(codecs._base, "BLOCK_VALUES", 1 << 12)
    names = [str(i) for i in range(len(snapshot.states))]
    tables = {name: {"offset": np.array(float(name) + 1)} for name in names}
    file = replace(calibration.file, tables={"checked": tables})
    own = Calibration(file, "c" * 64)
    bound = {
        (name, role): Checked(role, None if i == 0 else names[i - 1], own.digest, name, Offset(float(name) + 1))
        for i, name in enumerate(names)
        for role in ("k", "v")
    }
    encoder = Encoder(parse_codec("rvq-4" + WINDOW), bound=bound)
    layers = tuple(encoder.layer(name, s, p) for name, s, p in zip(names, snapshot.states, snapshot.probes, strict=True))
    write_archive(tmp_path / "x.kv", snapshot.model, snapshot.tokens, snapshot.length, layers, encoder, ())
    assert not encoder.predictors.kept and not encoder.predictors.works
    for state, exact in zip(states_of(tmp_path / "x.kv", calibration=own), snapshot.states, strict=True):
        # Rotated there and back in float32, and three sums of rows as large as these.
        assert error_of(exact.k[:, 4:-16], state.k[:, 4:-16]) < 1e-8 and error_of(exact.v[:, 4:-16], state.v[:, 4:-16]) < 1e-8
    with kvtool.open(tmp_path / "x.kv", calibration=own) as archive:
        for i in (3, 1, 2, 0):
            archive.state(i)
    with pytest.raises(IncompatibleError, match="not here"):
        states_of(tmp_path / "x.kv")


def test_the_same_again_gives_the_same_bytes(chained: tuple[Path, Calibration], snapshot: Snapshot, tmp_path: Path) -> None:
    kvtool.save(snapshot, tmp_path / "y.kv", codec="tcz-1" + WINDOW, calibration=chained[1])
    assert digests(chained[0]) == digests(tmp_path / "y.kv")


def test_stripped_rows_are_before_rope(snapshot: Snapshot) -> None:
    """Rows of equal tokens at other positions are the same before RoPE, in the first layer."""
    rows, probe = snapshot.states[0].k, snapshot.probes[0].k
    assert isinstance(rows, mx.array) and probe is not None
    bare = f64(stripped(rows, np.arange(TOKENS), probe.rope))
    tokens = np.array(snapshot.tokens)
    value = np.bincount(tokens).argmax()
    same = bare[:, tokens == value]
    assert same.shape[1] > 2 and np.abs(same - same[:, :1]).max() < 1e-3 * np.abs(same).max()


# --- recode ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"rope_theta": 5e5}, {"shift": 37}])
def test_recode_edits_the_header_alone(how: dict[str, Any], chained: tuple[Path, Calibration], snapshot: Snapshot, tmp_path: Path) -> None:
    """No coded tensor changes, without the calibration even; what is decoded is what was decoded, turned as float64 turns it."""
    source, calibration = chained
    report = kvtool.recode(source, tmp_path / "y.kv", **how)
    # Keys in the window and the sinks are stored as cached.
    assert report.quality is not None and report.quality["partly"] == report.quality["reencoded"] == [f"{i}.k" for i in range(4)]
    assert "k_relative_error" not in report.quality
    with open_container(source) as a, open_container(tmp_path / "y.kv") as b:
        coded = [n for n in a.tensors if not n.endswith(".data")]
        assert coded and all(a.tensors[n].blake3 == b.tensors[n].blake3 for n in coded)
    before, after = states_of(source, calibration=calibration), states_of(tmp_path / "y.kv", calibration=calibration)
    rope = snapshot.probes[0].k
    assert rope is not None and rope.rope is not None and rope.rope.pairing == "half"
    old = rope.rope.frequencies
    new = replace(rope.rope, base=how["rope_theta"]).frequencies if "rope_theta" in how else old
    at = np.arange(TOKENS)[4:-16, None]
    turn = (at + how.get("shift", 0)) * new - at * old
    for x, y in zip(before, after, strict=True):
        assert np.array_equal(f64(x.v[:, 4:-16]), f64(y.v[:, 4:-16]))
        a, b = np.split(f64(x.k[:, 4:-16]), 2, axis=-1)
        want = np.concatenate([a * np.cos(turn) - b * np.sin(turn), a * np.sin(turn) + b * np.cos(turn)], axis=-1)
        # Angles as the live model has them, in float32: 240 at most, so wrong by 240 x 2^-24.
        assert np.abs(want - f64(y.k[:, 4:-16])).max() < 2e-5 * np.abs(want).max()


def test_transcoding(chained: tuple[Path, Calibration], tiny_a: LoadedModel, tmp_path: Path) -> None:
    source, calibration = chained
    first = states_of(source, calibration=calibration)
    with pytest.raises(ValueError, match=r"calibration="):
        kvtool.recode(source, tmp_path / "y.kv", codec="tc-3")
    plain = kvtool.recode(source, tmp_path / "rvq.kv", codec="rvq-8", calibration=calibration)
    assert plain.calibration is None
    for x, y in zip(first, states_of(tmp_path / "rvq.kv"), strict=True):
        assert error_of(x.k, y.k) < 3e-4 and error_of(x.v, y.v) < 3e-4  # 8 bits: 5e-5 of the energy without the mean
    again = kvtool.recode(tmp_path / "rvq.kv", tmp_path / "tc.kv", codec="tc-5" + WINDOW, calibration=calibration)
    assert again.calibration == calibration.digest and again.quality is not None and again.quality["k_relative_error"] < 0.02
    for x, y in zip(first, states_of(tmp_path / "tc.kv", calibration=calibration), strict=True):
        assert error_of(x.k, y.k) < 0.06  # the worst layer
    own = kvtool.recode(tmp_path / "rvq.kv", tmp_path / "own.kv", codec="tc-5" + WINDOW, to_model=tiny_a, calibration="self")
    assert own.calibration is None
    kvtool.load(tmp_path / "own.kv", tiny_a)
    with open_container(tmp_path / "own.kv") as reader:
        assert [step["step"] for step in reader.manifest.quality] == ["encode", "recode", "recode"]


# --- the command line -----------------------------------------------------------------------------------------------------------------


def test_commands(calibration_a: bytes, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.cal").write_bytes(calibration_a)
    (tmp_path / "p.txt").write_text(text("prose")[:900])
    made, cal = str(tmp_path / "x.kv"), str(tmp_path / "a.cal")
    export = ["export", "--model", "tiny-a", "--prompt-file", str(tmp_path / "p.txt"), "-o", made, "--sink", "4", "--recent", "16"]
    assert run([*export, "--codec", "tcz-1", "--calibration", cal, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    digest = report["calibration"]
    assert digest and len(report["fallbacks"]) < 4  # of 8, with tables from 320 tokens
    assert run(["inspect", made, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibrations"] == [{"digest": digest, "here": False}]
    assert run(["inspect", made]) == 0
    assert f"calibration {digest}, not in the store" in capsys.readouterr().out
    go_on = ["import", made, "--model", "tiny-a", "--max-tokens", "4"]
    assert run(go_on) == 5
    assert "hint: give --calibration FILE" in capsys.readouterr().err
    assert run([*go_on, "--calibration", str(tmp_path / "none.cal")]) == 2
    assert run([*go_on, "--calibration", made]) == 3
    assert run([*go_on, "--calibration", cal]) == 0
    assert run(["recode", made, "-o", str(tmp_path / "y.kv"), "--shift", "8"]) == 0
    assert run(["recode", made, "-o", str(tmp_path / "y.kv"), "--codec", "rvq-4", "--calibration", cal]) == 0
    store.put(calibration_a)
    assert run(go_on) == 0
    capsys.readouterr()
    assert run(["inspect", made]) == 0
    assert "in the store" in capsys.readouterr().out
    # Carried: nothing else is needed.
    assert run([*export, "--codec", "tc-3", "--carry", "--json"]) == 0
    carried = json.loads(capsys.readouterr().out)
    assert carried["calibration"] is None
    for path in folder.iterdir():
        path.unlink()
    assert run(go_on) == 0
    assert run([*export, "--codec", "rvq-4", "--carry"]) == 2
    assert run([*export, "--codec", "tc-3", "--calibration", "auto"]) == 5
    assert run([*export, "--codec", "tc-3", "--calibration", "0123456789"]) == 5
