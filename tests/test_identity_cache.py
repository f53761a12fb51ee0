"""The remembered digest of weights: never that of other bytes, whatever happens to the files, the clock or the store."""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtool import identity, identity_cache, tiny
from kvtool.identity import weights_digest
from kvtool.identity_cache import Sight, keep, recall, remembered, stats

LATER_NS = 10_000_000_000
TICK_S = 0.02  # more than a tick of this machine's file systems, so that a change moves ctime


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of its own, and nothing said yet."""
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(identity_cache, "_said", [])
    return tmp_path / "cache" / "weights"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny.path("tiny-a"), tmp_path / "model"))


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files written just now count as old: as if the digest were taken ten seconds later."""
    monkeypatch.setattr(identity_cache, "time_ns", lambda: time.time_ns() + LATER_NS)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The weight files that were read."""
    seen: list[Path] = []
    plain = identity._tensor_digests

    def tensor_digests(path: Path) -> list[tuple[str, str, list[int], str]]:
        seen.append(path)
        return plain(path)

    monkeypatch.setattr(identity, "_tensor_digests", tensor_digests)
    yield seen


def spans(path: Path) -> dict[str, tuple[int, int]]:
    """Tensor name -> its bytes in the file."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    return {name: tuple(start + at for at in t["data_offsets"]) for name, t in header.items() if name != "__metadata__"}  # type: ignore[misc]


def flip(path: Path, at: int) -> None:
    """One bit of one byte, in place, with size and mtime as they were."""
    before = os.stat(path)
    with path.open("r+b") as out:
        out.seek(at)
        (byte,) = out.read(1)
        out.seek(at)
        out.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(path)
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


def test_unchanged_files_are_not_read_again(model: Path, later: None, reads: list[Path], store: Path) -> None:
    first = weights_digest(model)
    assert len(reads) == 1 and len(list(store.iterdir())) == 1
    assert weights_digest(model) == first and len(reads) == 1
    # By another path, and through links, they are the same files.
    link = model.parent / "link"
    link.mkdir()
    (link / "model.safetensors").symlink_to(model / "model.safetensors")
    assert weights_digest(link) == first and len(reads) == 1
    # A copy is other files with the same digest.
    assert weights_digest(Path(shutil.copytree(model, model.parent / "copy"))) == first and len(reads) == 2


def test_a_byte_of_any_tensor_is_seen_with_size_and_mtime_put_back(model: Path, later: None) -> None:
    whole, path = weights_digest(model), model / "model.safetensors"
    seen = {whole}
    for begin, end in spans(path).values():
        at = (begin + end) // 2
        time.sleep(TICK_S)
        flip(path, at)
        seen.add(weights_digest(model))
        time.sleep(TICK_S)
        flip(path, at)
        assert weights_digest(model) == whole
    assert len(seen) == 1 + len(spans(path))


def test_files_replaced_added_and_taken_away(model: Path, later: None) -> None:
    whole, path = weights_digest(model), model / "model.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    other = model / "new"
    other.write_bytes(changed)
    before = os.stat(path)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)
    replaced = weights_digest(model)
    path.rename(model / "model-00001-of-00002.safetensors")
    assert weights_digest(model) == replaced != whole
    header = b'{"more":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    (model / "model-00002-of-00002.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1")
    assert weights_digest(model) not in (whole, replaced)
    (model / "model-00002-of-00002.safetensors").unlink()
    assert weights_digest(model) == replaced


def test_a_file_changed_within_a_tick_is_not_trusted(model: Path, reads: list[Path], store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model / "model.safetensors"
    changed = os.stat(path).st_ctime_ns
    for age, trusted in ((0, False), (identity_cache.TICK_NS, False), (identity_cache.TICK_NS + 1, True)):
        shutil.rmtree(store, ignore_errors=True)
        reads.clear()
        monkeypatch.setattr(identity_cache, "time_ns", lambda age=age: changed + age)
        assert weights_digest(model) == weights_digest(model)
        assert store.exists() == trusted and len(reads) == (1 if trusted else 2)
    # An mtime that lies ahead says nothing about when the file changes next.
    shutil.rmtree(store)
    os.utime(path, ns=(changed, changed + (1 << 50)))
    monkeypatch.setattr(identity_cache, "time_ns", lambda: changed + (1 << 40))
    weights_digest(model)
    assert not store.exists()


def test_the_second_write_of_a_tick_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The file system's clock stands still: both writes have one ctime, and stat cannot tell them apart.
    path, frozen = model / "model.safetensors", time.time_ns()
    plain = identity_cache.stats
    monkeypatch.setattr(identity_cache, "stats", lambda files: [(*s[:3], frozen, frozen) for s in plain(files)])
    monkeypatch.setattr(identity_cache, "time_ns", lambda: frozen + 1_000_000)
    whole = weights_digest(model)
    flip(path, next(iter(spans(path).values()))[0])
    assert weights_digest(model) != whole


def test_a_file_changed_while_it_is_read_is_not_remembered(model: Path, later: None, store: Path) -> None:
    path = model / "model.safetensors"

    def compute() -> str:
        time.sleep(TICK_S)
        flip(path, path.stat().st_size - 1)
        return "ab" * 32

    assert remembered("weights", Sight.of([path]), compute) == "ab" * 32
    assert not store.exists() and remembered("weights", Sight.of([path]), lambda: "cd" * 32) == "cd" * 32


def test_a_damaged_entry_is_a_miss(model: Path, later: None, store: Path) -> None:
    files = [model / "model.safetensors"]
    whole, now = weights_digest(model), stats(files)
    (entry,) = store.iterdir()
    sound = entry.read_bytes()
    assert recall("weights", now) == whole
    damaged = [sound[:cut] for cut in range(len(sound))] + [sound[:i] + bytes([b ^ 1]) + sound[i + 1 :] for i, b in enumerate(sound)]
    for data in [*damaged, b"\xff" * 99, b"[]\n", b"{}", sound + sound]:
        entry.write_bytes(data)
        assert recall("weights", now) is None
    assert weights_digest(model) == whole and entry.read_bytes() == sound
    # A folder in its place is a miss as well, and cannot be written.
    entry.unlink()
    entry.mkdir()
    assert weights_digest(model) == whole


def test_an_entry_of_another_rule_or_of_other_files_is_a_miss(
    model: Path, later: None, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights_digest(model)
    now = stats([model / "model.safetensors"])
    for i in range(2, 5):
        other = [tuple(value + (i == j) for j, value in enumerate(now[0]))]
        assert recall("weights", other) is None  # type: ignore[arg-type]
    monkeypatch.setattr(identity_cache, "VERSION", identity_cache.VERSION + 1)
    assert recall("weights", now) is None


def test_a_store_that_cannot_be_written_is_said_once(
    model: Path, later: None, store: Path, reads: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    store.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "kvtool"):
        assert weights_digest(model) == weights_digest(model)
        weights_digest(Path(shutil.copytree(model, model.parent / "copy")))
    assert len(reads) == 3 and len(caplog.records) == 1 and "not remembered" in caplog.text and str(store.parent) in caplog.text


def test_no_home_directory(model: Path, later: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KVTOOL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert len(weights_digest(model)) == 64 and "home directory" in caplog.text


def test_many_at_once(model: Path) -> None:
    files = stats([model / "model.safetensors"])
    digests = ["ab" * 32, "cd" * 32]
    keep("weights", files, digests[0])
    found: set[str | None] = set()

    def work(own: str) -> None:
        for _ in range(40):
            keep("weights", files, own)
            found.add(recall("weights", files))

    threads = [threading.Thread(target=work, args=(digest,)) for digest in digests * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found <= set(digests) and recall("weights", files) in digests
    assert [path.name for path in (model.parent / "cache" / "weights").iterdir()] == [identity_cache.entry_of("weights", files).name]
