"""Calibration files: deterministic bytes, strict reading, and a store whose writes are whole or absent."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load_file

from formats import atomic
from formats.calibration import CalibrationFile, from_bytes, read_calibration, read_model, to_bytes, write_calibration
from formats.errors import FormatError, IncompatibleError, KVError, LayoutError, ManifestError, NotKvtoolError, VersionError
from formats.manifest import ModelInfo
from formats.tables import digest_of
from kvtool import calibration_store as store
from kvtool.calibrations import AUTO, SELF, Calibration, resolve
from kvtool.cli import run


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
    with pytest.raises(ValueError, match="names must be of A-Z"):
        to_bytes(bad)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVTOOL_CALIBRATIONS", str(tmp_path / "store"))
    return tmp_path / "store"


def newest(weights: str | None) -> str | None:
    found = store.newest_for(weights)
    return None if found is None else found[1].stem


def test_store(folder: Path) -> None:
    assert list(store.kept()) == [] and store.newest_for("a" * 64) is None and store.get("0" * 64) is None
    old, new, other = (to_bytes(example(*args)) for args in (("a" * 64,), ("a" * 64, 2.0), ("d" * 64,)))
    for age, data in enumerate((new, old, other)):
        os.utime(store.put(data), ns=(0, 10**9 * (3 - age)))
    assert newest("a" * 64) == digest_of(new) and newest(None) is None and newest("e" * 64) is None
    assert [digest for digest, _ in store.kept()] == [digest_of(d) for d in (new, old, other)]
    found = store.get(digest_of(old))
    assert found is not None and found[1] == folder / f"{digest_of(old)}.safetensors"
    with pytest.raises(FormatError):
        store.put(b"not one")
    assert store.path_of("../" + "0" * 61) is None


def test_a_search_reads_headers_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But of the one it finds; that one's digest is verified, once."""
    read: list[str] = []

    def reading(path: Path) -> Any:
        read.append(path.stem)
        return read_calibration(path)

    monkeypatch.setattr(store, "read_calibration", reading)
    wanted, other = to_bytes(example()), to_bytes(example("d" * 64))
    for age, data in enumerate((wanted, other)):
        os.utime(store.put(data), ns=(0, 10**9 * (1 + age)))
    found = resolve(AUTO, "a" * 64)
    assert found is not None and read == [found.digest] == [digest_of(wanted)]
    assert read_model(str(found.path)) == found.model


def test_a_damaged_file_in_the_store(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By its digest it is refused; a search goes on to an older one, and says so."""
    old, data = to_bytes(example(scale=2.0)), to_bytes(example())
    os.utime(store.put(old), ns=(0, 0))
    path = store.put(data)
    for damaged, text in ((data[:-3] + b"abc", "its name says"), (b"short", "less than the 8"), (data[:500], "header needs")):
        path.write_bytes(damaged)
        with pytest.raises(KVError, match=text):
            store.get(digest_of(data))
        caplog.clear()
        assert newest("a" * 64) == digest_of(old)
        (record,) = caplog.records
        assert record.levelname == "WARNING" and f"{path} is passed over" in record.message and text in record.message


def test_a_folder_in_the_place_of_a_calibration(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, data = to_bytes(example(scale=2.0)), to_bytes(example())
    os.utime(store.put(old), ns=(0, 0))
    path = folder / f"{digest_of(data)}.safetensors"
    path.mkdir()
    (folder / f"{'e' * 64}.safetensors").symlink_to("nowhere")
    assert [digest for digest, _ in store.kept()] == [digest_of(data), digest_of(old)]
    (folder / f"{'e' * 64}.safetensors").unlink()
    assert newest("a" * 64) == digest_of(old) and "a folder, not a file" in caplog.text
    assert store.get(digest_of(data)) is None and store.path_of(digest_of(data)) is None
    with pytest.raises(IsADirectoryError) as caught:
        store.put(data)
    assert caught.value.filename == str(path) and {p.name for p in folder.iterdir()} == {path.name, f"{digest_of(old)}.safetensors"}
    assert run(["calibrations"]) == 0


def test_a_calibration_that_goes_during_a_search(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    old, data = to_bytes(example(scale=2.0)), to_bytes(example())
    os.utime(store.put(old), ns=(0, 0))
    path = store.put(data)

    def removing(at: Path) -> ModelInfo:
        path.unlink(missing_ok=True)
        return read_model(at)

    monkeypatch.setattr(store, "read_model", removing)
    assert newest("a" * 64) == digest_of(old) and caplog.text == ""


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written(
    error: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk is noticed while writing, the others when the file is made; what was there stays, and nothing else is left."""
    store.put(to_bytes(example(scale=2.0)))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    os_open = os.open

    def opening(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(error, os.strerror(error), path)
        return os_open(path, flags, *more)

    def writing(fd: int, data: memoryview) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(atomic.os, *(("write", writing) if error == errno.ENOSPC else ("open", opening)))
    with pytest.raises(OSError) as caught:
        store.put(to_bytes(example()))
    monkeypatch.undo()
    assert caught.value.errno == error and {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert caught.value.filename == str(folder / f"{digest_of(to_bytes(example()))}.safetensors")


def test_a_file_in_the_place_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place, error in (("file", FileExistsError), ("file/store", NotADirectoryError)):
        monkeypatch.setenv("KVTOOL_CALIBRATIONS", str(tmp_path / place))
        assert list(store.kept()) == [] and store.newest_for("a" * 64) is None
        with pytest.raises(error, match=str(tmp_path / place)):
            store.put(to_bytes(example()))


WRITER = """
import sys
from pathlib import Path
from kvtool import calibration_store as store
assert "mlx.core" not in sys.modules
files = [Path(p).read_bytes() for p in sys.argv[2:]]
for i in range(12):
    store.put(files[(int(sys.argv[1]) + i) % len(files)])
"""
READER = """
import sys
from pathlib import Path
from kvtool import calibration_store as store
stop, seen = Path(sys.argv[1]), 0
while not stop.exists():
    for digest, path in store.kept():
        assert store.get(digest) is not None
        seen += 1
    found = store.newest_for("a" * 64)
    assert found is None or found[0].model.weights == "a" * 64
print(seen)
"""


def test_many_processes_write_list_and_read(folder: Path, tmp_path: Path) -> None:
    """Eight put the same and different calibrations: whoever lists and reads meanwhile finds whole ones alone."""
    wanted = [to_bytes(example(*args)) for args in (("a" * 64,), ("a" * 64, 2.0), ("d" * 64,))]
    for i, data in enumerate(wanted):
        (tmp_path / f"{i}.cal").write_bytes(data)
    paths = [str(tmp_path / f"{i}.cal") for i in range(3)]
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, str(tmp_path / "stop")], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(i), *paths]) for i in range(8)]
    assert [child.wait() for child in writers] == [0] * 8
    (tmp_path / "stop").touch()
    seen = [int(child.communicate()[0]) for child in readers]
    assert [child.returncode for child in readers] == [0, 0] and sum(seen) > 0
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {f"{digest_of(data)}.safetensors": data for data in wanted}


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


def test_calibrate_finds_out_first_that_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KVTOOL_CALIBRATIONS", str(tmp_path / "file" / "store"))
    monkeypatch.setattr("kvtool.model.load_model", lambda *_, **__: pytest.fail("the work has begun"))
    assert run(["calibrate", "--model", "tiny-a"]) == 2
