"""Encrypted objects: what the back end holds tells nothing, and no change of it is taken for the object."""

import base64
import contextlib
import errno
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

import kvtool
from formats.errors import BackendError, IncompatibleError, IntegrityError
from kvtool.cli import run
from kvtool.service.partition import Partition
from kvtool.store import addresses
from kvtool.store.addresses import open_objects
from kvtool.store.folder import Folder
from kvtool.store.key_files import make_key, read_key
from kvtool.store.local_copy import LocalCopy
from kvtool.store.scratch import Scratch
from kvtool.store.store import Store
from tests import store_servers
from tests.library import ids, tiny
from tests.test_store_objects import KEY, content

aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead", reason="cryptography is not installed")
hashes = pytest.importorskip("cryptography.hazmat.primitives.hashes")
hkdf = pytest.importorskip("cryptography.hazmat.primitives.kdf.hkdf")
sealed = pytest.importorskip("kvtool.store.sealed")
Sealed = sealed.Sealed

SIZE = (2 << 20) + 1000
WHOLE = (1 << 20) + 16


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "store")


@pytest.fixture
def objects(folder: Folder):
    made = Sealed(folder, KEY)
    made.write("a", content(SIZE))
    return made


def raw(folder: Folder, name: str = "a") -> bytearray:
    return bytearray(folder.read(name))


def put(folder: Folder, data: bytes, name: str = "a") -> None:
    folder.remove(name)
    assert folder.write(name, bytes(data))


def refused(folder: Folder, *, name: str = "a", error: type[Exception] = IntegrityError) -> None:
    """A whole read fails, by a reader that saw the object before too, and so does that of the part that was changed."""
    fresh = Sealed(folder, KEY)
    with pytest.raises(error):
        fresh.read(name)
    # It has no wrong memory either.
    with pytest.raises(error):
        fresh.read(name)


def test_the_bytes_are_those_of_the_description(folder: Folder, objects: Sealed) -> None:
    """Decrypted as the module's docstring says, by hand."""
    data = bytes(raw(folder))
    assert data[:16] == b"kvtool sealed 1\n" and len(data) == 64 + SIZE + 3 * 16
    key_id = hkdf.HKDF(hashes.SHA256(), 16, None, b"kvtool key id").derive(KEY)
    assert data[16:32] == key_id
    key = hkdf.HKDF(hashes.SHA256(), 32, data[32:64], b"kvtool object" + data[:32] + b"a").derive(KEY)
    cipher = aead.ChaCha20Poly1305(key)
    plain = b"".join(
        cipher.decrypt(i.to_bytes(11, "big") + (b"\1" if i == 2 else b"\0"), data[64 + i * WHOLE : 64 + (i + 1) * WHOLE], None)
        for i in range(3)
    )
    assert plain == content(SIZE) == objects.read("a")


def test_equal_objects_look_different(folder: Folder) -> None:
    objects = Sealed(folder, KEY)
    for name in ("a", "b"):
        objects.write(name, bytes(5000))
    first, second = raw(folder, "a"), raw(folder, "b")
    assert first[:32] == second[:32] and first[32:] != second[32:] and bytes(100) not in first
    put(folder, b"", "a")
    folder.remove("a")
    objects.write("a", bytes(5000))
    assert raw(folder, "a")[32:] != first[32:]


@pytest.mark.parametrize(
    "at", [0, 15, 16, 31, 32, 63, 64, 1000, 64 + WHOLE - 1, 64 + WHOLE, 64 + 2 * WHOLE, 64 + SIZE + 47], ids=lambda at: f"byte-{at}"
)
def test_a_changed_byte_is_refused(folder: Folder, objects: Sealed, at: int) -> None:
    data = raw(folder)
    data[at] ^= 1
    put(folder, data)
    refused(folder, error=IncompatibleError if 16 <= at < 32 else IntegrityError)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 79, 80, 100, 64 + WHOLE - 1, 64 + WHOLE, 64 + WHOLE + 16, 64 + 2 * WHOLE, 64 + SIZE + 47])
def test_a_cut_object_is_refused(folder: Folder, objects: Sealed, size: int) -> None:
    put(folder, raw(folder)[:size])
    refused(folder)


def test_segments_in_another_order_left_out_or_added(folder: Folder, objects: Sealed) -> None:
    data = raw(folder)
    first, second, last = data[64 : 64 + WHOLE], data[64 + WHOLE : 64 + 2 * WHOLE], data[64 + 2 * WHOLE :]
    for body in (second + first + last, first + last, first + first + last, first + second + last + last, first + second + second + last):
        put(folder, data[:64] + body)
        refused(folder)
    put(folder, data)
    assert Sealed(folder, KEY).read("a") == content(SIZE)


def test_an_object_under_another_name_is_refused(folder: Folder, objects: Sealed) -> None:
    put(folder, raw(folder), "b")
    refused(folder, name="b")
    # Nor a segment of another object, even under the same name.
    old = raw(folder)
    folder.remove("a")
    objects.write("a", content(SIZE))
    new = raw(folder)
    put(folder, new[:64] + old[64 : 64 + WHOLE] + new[64 + WHOLE :])
    refused(folder)


def test_only_the_segments_of_a_range_are_read(folder: Folder, objects: Sealed) -> None:
    data = raw(folder)
    data[64 + WHOLE + 5] ^= 1
    put(folder, data)
    fresh = Sealed(folder, KEY)
    assert fresh.read("a", 0, 1 << 20) == content(SIZE)[: 1 << 20]
    assert fresh.read("a", 2 << 20) == content(SIZE)[2 << 20 :]
    for start, length in (((1 << 20) - 1, 2), (1 << 20, 1), ((2 << 20) - 1, 2)):
        with pytest.raises(IntegrityError, match="segment 1 of 3"):
            fresh.read("a", start, length)


def test_an_object_that_was_written_anew_is_read_anew(folder: Folder, objects: Sealed) -> None:
    assert objects.read("a", 0, 5) == content(SIZE)[:5]
    folder.remove("a")
    Sealed(folder, KEY).write("a", b"another one")
    assert objects.read("a") == b"another one"


def test_another_key(folder: Folder, objects: Sealed) -> None:
    other = Sealed(folder, bytes(32))
    with pytest.raises(IncompatibleError, match=r"encrypted with key [0-9a-f]{8}, the key given is [0-9a-f]{8}") as caught:
        other.read("a")
    assert caught.value.exit_code == 5
    assert other.name_key != objects.name_key and KEY not in (objects.name_key, other.name_key)


def test_a_store_without_encryption(folder: Folder) -> None:
    folder.write("plain", bytes(1000))
    with pytest.raises(IntegrityError, match="not an encrypted object") as caught:
        Sealed(folder, KEY).read("plain")
    assert caught.value.exit_code == 4


def test_no_plain_bytes_reach_the_back_end(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = b"a secret sentence " * 200_000
    objects = Sealed(folder, KEY)
    source = objects.scratch / "own"
    source.write_bytes(secret)
    assert folder.root not in source.parents
    seen: list[bytes] = []
    write = folder.write
    monkeypatch.setattr(folder, "write", lambda name, data: (seen.append(Path(data).read_bytes()), write(name, data))[1])
    assert objects.write("a", source) and not source.exists()
    assert objects.write("b", secret)
    assert len(seen) == 2 and all(b"sentence" not in data and len(data) > len(secret) for data in seen)
    assert folder.unfinished() == 0


# --- keys and addresses ----------------------------------------------------------------------------------------------------------


def test_keygen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    assert run(["store", "keygen", str(path)]) == 0
    assert f"KVTOOL_STORE_KEY={path}" in capsys.readouterr().out
    key = read_key(path)
    assert run(["store", "keygen", str(path)]) == 2 and read_key(path) == key


def test_a_key_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file would be taken for the key, and be in the way of the next attempt."""
    path = tmp_path / "key"

    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("kvtool.store.key_files.os.fsync", fail)
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            make_key(path)
    assert not path.exists()
    make_key(path)


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600 and len(read_key(path)) == 32
    with pytest.raises(FileExistsError):
        make_key(path)
    again = tmp_path / "again"
    make_key(again)
    assert read_key(again) != read_key(path)


@pytest.mark.parametrize("data", [KEY, base64.b64encode(KEY), base64.b64encode(KEY) + b"\n", b" " + base64.b64encode(KEY) + b"\r\n"])
def test_forms_of_a_key(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    path.chmod(0o400)
    assert read_key(path) == KEY


@pytest.mark.parametrize(
    "data", [b"", KEY[:31], KEY + b"!", base64.b64encode(KEY[:31]), base64.b64encode(KEY)[:-1], b"x" * 44, secrets.token_bytes(5000)]
)
def test_no_keys(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=f"32 bytes.*has {len(data)} of another form") as caught:
        read_key(path)
    assert not data or data.decode("latin1") not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_key_that_others_can_read(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    make_key(path)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"has mode {mode:04o}; run: chmod 600 {path}"):
        read_key(path)


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVTOOL_STORE_KEY", raising=False)
    assert isinstance(open_objects(tmp_path / "s"), Folder)
    key = tmp_path / "key"
    make_key(key)
    monkeypatch.setenv("KVTOOL_STORE_KEY", str(key))
    opened = open_objects(tmp_path / "s")
    assert isinstance(opened, LocalCopy) and isinstance(opened.remote, Sealed) and isinstance(opened.remote.inner, Folder)
    # Plain copies of encrypted objects are nowhere that others look, and gone afterwards.
    assert opened.local.root.stat().st_mode & 0o077 == 0 and tmp_path not in opened.local.root.parents
    root = opened.local.root
    assert opened.write("a", b"x") and opened.scratch.is_relative_to(root)
    opened.close()
    assert not root.exists()
    assert opened.scratch.is_relative_to(opened.local.root) and opened.local.root.stat().st_mode & 0o077 == 0
    opened.close()
    for scheme in ("ftp", "file"):
        with pytest.raises(ValueError, match=f"s3://.*but got {scheme}://"):
            open_objects(f"{scheme}://x/y")


@pytest.mark.parametrize(("where", "package"), [("s3://b/p", "obstore"), ("valkey://h", "redis"), ("folder", "cryptography")])
def test_a_package_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, package: str) -> None:
    key = tmp_path / "key"
    make_key(key)
    find = addresses.importlib.util.find_spec
    monkeypatch.setattr(addresses.importlib.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(BackendError, match=f"needs {package}") as caught:
        open_objects(where, key_file=key)
    assert caught.value.exit_code == 6 and caught.value.hint is not None and "pip install 'kvtool[" in caught.value.hint


HOLDER = """
import sys, time
from kvtool.store.scratch import Scratch
scratch = Scratch()
(scratch.folder() / "in-clear").write_bytes(b"x")
print(scratch.folder(), flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_left_in_clear_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of one that lives, nor what is not of this kind."""
    (tmp_path / "kvtool-copies-file").touch()
    (tmp_path / "kvtool-copies-link").symlink_to(tmp_path)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with contextlib.ExitStack() as stack:
        folders = []
        for _ in range(2):
            process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env=environment)
            stack.enter_context(store_servers.ended(process))
            assert process.stdout is not None
            folders.append(Path(stack.enter_context(process.stdout).readline().strip()))
        process.kill()
        process.wait()
        assert all((folder / "in-clear").exists() for folder in folders)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        own = Scratch()
        assert own.folder().stat().st_mode & 0o077 == 0 and (folders[0] / "in-clear").exists() and not folders[1].exists()
        assert len(list(tmp_path.iterdir())) == 4
        own.close()
    assert (tmp_path / "kvtool-copies-file").exists() and (tmp_path / "kvtool-copies-link").exists()


@pytest.mark.parametrize("where", ["", "http://[::1", "s3://[::1", "redis://u:secret@[::1"])
def test_what_is_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str) -> None:
    """Nothing at all, of a variable that is not set, is not the folder where one is; no password is repeated."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\[store\] ") as caught:
        open_objects(where)
    assert "secret" not in str(caught.value)
    assert run(["store", "gc", where]) == 2 and run(["tenants", "rm", "ana", "--file", "t.json", "--store", where]) == 2
    assert "[store]" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_objects(tmp_path, key_file=tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="regular file"):
        read_key(tmp_path / "pipe")


def test_a_key_for_a_store_without_one_is_refused(tmp_path: Path) -> None:
    """It was only warned of; what was put then could be read by nobody who went on as before."""
    model = tiny("qwen3")
    with Store(tmp_path / "s", chunk=64) as plain:
        plain.put(kvtool.capture(model, ids(70)), codec="raw")
        names = {entry.name for entry in plain.objects.names()}
    for where in (Folder(tmp_path / "s"), Partition(Folder(tmp_path / "s"), "tenants/a", bytes(32))):
        if isinstance(where, Partition):
            Store(where, chunk=64).put(kvtool.capture(model, ids(70)), codec="raw")
            locked = Store(Partition(Sealed(Folder(tmp_path / "s"), KEY), "tenants/a", bytes(32)), chunk=64)
        else:
            locked = Store(Sealed(where, KEY), chunk=64)
        for do in (
            lambda s=locked: s.put(kvtool.capture(model, ids(80)), codec="raw"),
            lambda s=locked: s.lookup(ids(80), model),
            locked.gc,
        ):
            with pytest.raises(IncompatibleError, match="the store is not encrypted"):
                do()
    assert names <= {entry.name for entry in Folder(tmp_path / "s").names()}
