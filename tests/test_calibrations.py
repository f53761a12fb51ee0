"""Calibration files: deterministic bytes, strict reading, and a store whose writes are whole or absent."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load_file

from formats import atomic
from formats.calibration import CalibrationFile, digest_of, from_bytes, read_calibration, to_bytes, write_calibration
from formats.errors import DigestError, FormatError, IncompatibleError, LayoutError, ManifestError, NotKvtoolError, VersionError
from formats.manifest import ModelInfo
from kvtool import calibration_store as store
from kvtool.calibrations import AUTO, SELF, Calibration, resolve


def example(weights: str = "a" * 64, scale: float = 1.0) -> CalibrationFile:
    arrays = {
        "mean": np.arange(6, dtype=np.float32).reshape(2, 3) + scale,
        "codes": np.arange(5, dtype=np.uint8),
        "exact": np.array([1 / 3]),
        "empty": np.zeros((0, 3), np.float16),
    }
    return CalibrationFile(
        model=ModelInfo("tiny", "llama", weights, "b" * 64, "float32"),
        texts={"prose": "c" * 64},
        tokens=128,
        tables={"tc": {"0": arrays, "3.1": {"mean": np.ones(2, np.float32)}}, "tcz-0.75": {"0": {"step": np.array([2], "<i4")}}},
        options={"tcz-0.75": {"step": 0.25}},
        skipped={"1": "recurrent"},
        producer={"kvtool": "0"},
    )


def edited(edit: Callable[[dict[str, Any], dict[str, Any]], None], data: bytes | None = None) -> bytes:
    """A file whose header and metadata JSON were changed by hand."""
    data = to_bytes(example()) if data is None else data
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    body = json.loads(header["__metadata__"]["calibration"])
    edit(header, body)
    if "calibration" in header.get("__metadata__", {}):
        header["__metadata__"]["calibration"] = json.dumps(body)
    raw = json.dumps(header).encode()
    raw = raw.ljust(-(-(8 + len(raw)) // 64) * 64 - 8, b" ")
    return len(raw).to_bytes(8, "little") + raw + data[size:]


def test_round_trip(tmp_path: Path) -> None:
    digest = write_calibration(tmp_path / "c", example())
    found, read_digest = read_calibration(tmp_path / "c")
    assert digest == read_digest == blake3((tmp_path / "c").read_bytes()).hexdigest()
    ours = example()
    for name in ("model", "texts", "tokens", "skipped", "producer"):
        assert getattr(found, name) == getattr(ours, name)
    assert found.options == {"tc": {}, "tcz-0.75": {"step": 0.25}}
    for kind, layers in ours.tables.items():
        assert list(found.tables[kind]) == list(layers)
        for layer, arrays in layers.items():
            assert set(found.tables[kind][layer]) == set(arrays)
            for name, array in arrays.items():
                read = found.tables[kind][layer][name]
                assert read.dtype == array.dtype and np.array_equal(read, array) and not read.flags.writeable
    other = load_file(tmp_path / "c")
    assert np.array_equal(other["tc:0:mean"], ours.tables["tc"]["0"]["mean"])


def test_equal_content_gives_equal_bytes() -> None:
    assert to_bytes(example()) == to_bytes(from_bytes(to_bytes(example()))) != to_bytes(example(scale=2.0))


HOSTILE: dict[str, tuple[type[FormatError], str, Callable[[dict[str, Any], dict[str, Any]], None]]] = {
    "no format": (NotKvtoolError, "without its metadata", lambda h, b: h.pop("__metadata__")),
    "a kvtool file": (NotKvtoolError, "a kvtool file", lambda h, b: h["__metadata__"].update(format="kvtool")),
    "newer": (VersionError, "newer", lambda h, b: b.update(version=2)),
    "no version": (ManifestError, "version", lambda h, b: b.pop("version")),
    "float version": (ManifestError, "integer", lambda h, b: b.update(version=1.0)),
    "unlisted layer": (ManifestError, "metadata lists", lambda h, b: b["kinds"]["tc"]["layers"].remove("3.1")),
    "layer without arrays": (ManifestError, "no arrays", lambda h, b: b["kinds"]["tc"]["layers"].append("9")),
    "nameless tensor": (ManifestError, "metadata lists", lambda h, b: h.update({"tc:0": h.pop("tc:0:codes")})),
    "bfloat16": (LayoutError, "does not occur", lambda h, b: h["tc:0:empty"].update(dtype="BF16")),
    "overlap": (LayoutError, "begin", lambda h, b: h["tc:0:mean"].update(data_offsets=[0, 24])),
    "shape": (LayoutError, "needs", lambda h, b: h["tc:0:mean"].update(shape=[2, 4])),
    "digest": (ManifestError, "malformed", lambda h, b: b["texts"].update(prose="x")),
    "kinds a list": (ManifestError, "an object", lambda h, b: b.update(kinds=[])),
    "skipped": (ManifestError, "a string", lambda h, b: b["skipped"].update({"1": 3})),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(name: str) -> None:
    kind, text, edit = HOSTILE[name]
    with pytest.raises(kind, match=text):
        from_bytes(edited(edit))


def test_every_cut_and_addition_is_refused(tmp_path: Path) -> None:
    data = to_bytes(example())
    for size in [*range(0, len(data), 7), len(data) - 1]:
        with pytest.raises(FormatError):
            from_bytes(data[:size])
    with pytest.raises(FormatError):
        from_bytes(data + b"\0")
    (tmp_path / "c").write_bytes(b"")
    with pytest.raises(NotKvtoolError):
        read_calibration(tmp_path / "c")


def test_nan_is_refused_by_reader_and_writer() -> None:
    data = to_bytes(example())
    at = data.index(np.array([1 / 3]).tobytes())
    with pytest.raises(ManifestError, match="NaN"):
        from_bytes(data[:at] + np.array([np.nan]).tobytes() + data[at + 8 :])
    with pytest.raises(ValueError, match="NaN"):
        to_bytes(example(scale=np.inf))


@pytest.mark.parametrize("layer", ["", "a/b", "a:b", "é"])
def test_names_a_file_cannot_have(layer: str) -> None:
    bad = example()
    bad.tables["tc"][layer] = {"mean": np.zeros(1)}  # type: ignore[index]
    with pytest.raises(ValueError, match="kind, layer and array"):
        to_bytes(bad)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTOOL_CALIBRATIONS", str(tmp_path / "store"))
    return tmp_path / "store"


def test_store(folder: Path) -> None:
    assert list(store.kept()) == [] and store.newest_for("a" * 64) is None and store.get("0" * 64) is None
    old, new, other = (to_bytes(example(*args)) for args in (("a" * 64,), ("a" * 64, 2.0), ("d" * 64,)))
    for age, data in enumerate((new, old, other)):
        os.utime(store.put(data), ns=(0, 10**9 * (3 - age)))
    assert store.newest_for("a" * 64) == digest_of(new) and store.newest_for(None) is None and store.newest_for("e" * 64) is None
    assert [digest for digest, _ in store.kept()] == [digest_of(d) for d in (new, old, other)]
    found = store.get(digest_of(old))
    assert found is not None and found[1] == folder / f"{digest_of(old)}.safetensors"
    with pytest.raises(FormatError):
        store.put(b"not one")
    assert store.path_of("../" + "0" * 61) is None


def test_a_damaged_file_in_the_store(folder: Path) -> None:
    data = to_bytes(example())
    path = store.put(data)
    path.write_bytes(data[:-3] + b"abc")
    with pytest.raises(DigestError, match="its name says"):
        store.get(digest_of(data))
    assert store.newest_for("a" * 64) is None
    path.write_bytes(b"short")
    assert store.newest_for("a" * 64) is None
    with pytest.raises(FormatError):
        store.get(digest_of(data))


def test_an_interrupted_write_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic.AtomicFile, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put(to_bytes(example()))
    assert list(store.kept()) == [] and list(folder.iterdir()) == []


def test_resolve(folder: Path, tmp_path: Path) -> None:
    assert resolve(None, "a" * 64) is None and resolve(SELF, "a" * 64) is None
    with pytest.raises(IncompatibleError, match="no calibration of this model"):
        resolve(AUTO, "a" * 64)
    digest = write_calibration(tmp_path / "c", example())
    found = resolve(tmp_path / "c", "f" * 64, "a" * 64)
    assert found is not None and found.digest == digest and found.path == tmp_path / "c"
    with pytest.raises(IncompatibleError, match="whose weights"):
        resolve(found, "f" * 64)
    with pytest.raises(IncompatibleError, match="0 calibrations whose digest"):
        resolve(digest, "a" * 64)
    store.put((tmp_path / "c").read_bytes())
    for spec in (None, AUTO, digest, digest[:8]):
        again = resolve(spec, "a" * 64)
        assert again is not None and again.digest == digest
    with pytest.raises(FileNotFoundError):
        resolve(str(tmp_path / "none"), "a" * 64)


def test_tables_that_are_none(tmp_path: Path) -> None:
    """Arrays of the right kind and layer that are no tables, and layers and kinds that are not there."""
    found = Calibration(example(), "0" * 64)
    for kind, layer in (("tc", "9"), ("rvq", "0"), ("fake", "0")):
        with pytest.raises(IncompatibleError, match="has no"):
            found.tables(kind, layer)
    with pytest.raises(ManifestError, match="tc:0"):
        found.tables("tc", "0")
    with pytest.raises(ManifestError, match=r"tcz-0\.75:0"):
        found.tables("tcz-0.75", "0")
