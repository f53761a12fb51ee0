"""Back ends behind servers and networks that fail: a read gives the whole object or an error, a write is there whole or not at all."""

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from formats.container import write_container
from formats.errors import DigestError, KVError
from kvtool.store.local_copy import LocalCopy
from kvtool.store.objects import Entry, Missing, Objects
from tests import store_servers
from tests.container_cases import plans, small_arrays, small_manifest
from tests.store_servers import Proxy
from tests.test_store_objects import content

SIZE = 3 << 20
TIMEOUT = 5.0  # of a loaded machine


class Served:
    """One back end seen directly, and through a proxy."""

    def __init__(self, direct: Objects, proxied: Objects, proxy: Proxy) -> None:
        self.direct, self.proxied, self.proxy = direct, proxied, proxy


@pytest.fixture(params=["s3", "redis"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    kind = request.param
    port = request.getfixturevalue(f"{kind}_port")
    own = f"faults-{tmp_path.name}".lower()
    with Proxy(port) as proxy:
        made = [_objects(kind, one, own, monkeypatch) for one in (port, proxy.port)]
        yield Served(made[0], made[1], proxy)
        for each in made:
            each.close()


def _objects(kind: str, port: int, own: str, monkeypatch: pytest.MonkeyPatch, timeout: float = TIMEOUT) -> Objects:
    if kind == "redis":
        valkey = pytest.importorskip("kvtool.store.valkey")
        return valkey.Valkey(f"redis://127.0.0.1:{port}/0?prefix={own}", timeout=timeout)
    buckets = pytest.importorskip("kvtool.store.buckets")
    for name, value in (*store_servers.S3_ENVIRONMENT.items(), ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")):
        monkeypatch.setenv(name, value)
    return buckets.Buckets(f"s3://{store_servers.BUCKET}/{own}", timeout=timeout)


@pytest.mark.parametrize("cut", [0, 1, 40, 1000, 1 << 20, SIZE - 1])
def test_an_answer_that_is_cut_is_whole_after_all_or_an_error(served: Served, cut: int) -> None:
    served.direct.write("cut", content(SIZE))
    served.proxy.answer_bytes = cut
    for start, length in ((0, None), (5, SIZE - 5)):
        try:
            # A client may ask for the rest, at most RETRIES times.
            assert served.proxied.read("cut", start, length) == content(SIZE)[start:] and cut >= 1 << 20
        except OSError as error:
            assert not isinstance(error, FileNotFoundError) and "cut" in str(error)
    served.proxy.answer_bytes = None
    served.proxy.cut()
    assert served.proxied.read("cut") == content(SIZE)


@pytest.mark.parametrize("cut", [0, 1, 200, 1 << 20, SIZE])
def test_a_request_that_is_cut_writes_nothing(served: Served, cut: int) -> None:
    served.proxy.request_bytes = cut
    with pytest.raises(OSError, match="request"):
        served.proxied.write("request", content(SIZE))
    assert served.direct.size("request") is None and not list(served.direct.names())
    served.proxy.request_bytes = None
    assert served.proxied.write("request", content(SIZE, 1)) and served.direct.read("request") == content(SIZE, 1)


def test_a_connection_that_is_reset_is_made_anew(served: Served) -> None:
    served.proxied.write("reset", content(1000))
    for _ in range(3):
        served.proxy.cut()
        assert served.proxied.read("reset") == content(1000) and served.proxied.size("reset") == 1000


@pytest.mark.parametrize("kind", ["s3", "redis"])
def test_a_server_that_is_silent_is_given_up(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(request.getfixturevalue(f"{kind}_port")) as proxy:
        proxy.silent = True
        silent = _objects(kind, proxy.port, "silent", monkeypatch, 0.2)
        for act in (lambda: silent.read("x"), lambda: silent.write("x", b"y"), lambda: list(silent.names())):
            start = time.monotonic()
            with pytest.raises(OSError) as caught:
                act()
            assert not isinstance(caught.value, FileNotFoundError | PermissionError)
            # Four times 0.2 s, and the pauses between.
            assert time.monotonic() - start < 10
        silent.close()


def test_no_server_is_an_error_that_names_it(served: Served) -> None:
    served.proxy.__exit__()
    with pytest.raises(OSError, match=f"127.0.0.1:{served.proxy.port}"):
        served.proxied.size("x")


def test_writers_that_race_through_cut_connections(served: Served) -> None:
    """Connections reset at random: of what was told to be written every byte is there."""
    told: list[tuple[str, int]] = []
    stop = threading.Event()

    def write(seed: int) -> None:
        for i in range(6):
            try:
                if served.proxied.write(f"raced/{i}", content(200_000, seed)):
                    told.append((f"raced/{i}", seed))
            except OSError:
                continue

    def cut() -> None:
        while not stop.wait(0.03):
            served.proxy.cut()

    threads = [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)]
    cutter = threading.Thread(target=cut)
    for thread in (*threads, cutter):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    cutter.join()
    assert len({name for name, _ in told}) == len(told)
    for name, seed in told:
        assert served.direct.read(name) == content(200_000, seed)
    for entry in served.direct.names():
        assert served.direct.read(entry.name) in (content(200_000, 1), content(200_000, 2))


# --- S3 alone --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Objects:
    return _objects("s3", s3_port, f"parts-{tmp_path.name}".lower(), monkeypatch)


def test_big_objects_go_up_in_parts(bucket: Objects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvtool.store.buckets._SINGLE", 1 << 20)
    monkeypatch.setattr("kvtool.store.buckets._PART", 5 << 20)
    source = tmp_path / "big"
    source.write_bytes(content(12 << 20))
    assert bucket.write("big", source) and not bucket.write("big", source)
    assert bucket.read("big") == content(12 << 20) and bucket.unfinished() == 0
    # Both see that there is none and send all; the later copy is refused. One after the other: moto's check and copy are two steps.
    monkeypatch.setattr(type(bucket), "_size", _absent_until_written(type(bucket)._size))
    won: list[tuple[int, bool]] = []

    def write(seed: int) -> None:
        won.append((seed, bucket.write("raced", content(2 << 20, seed))))

    for thread in [threading.Thread(target=write, args=(seed,)) for seed in (1, 2)]:
        thread.start()
        thread.join()
    assert sorted(flag for _, flag in won) == [False, True]
    assert bucket.read("raced") == content(2 << 20, next(seed for seed, flag in won if flag))
    assert bucket.unfinished() == 0


def _absent_until_written(size):
    """`_size` whose first answer in each thread is that there is no such object."""
    asked = threading.local()

    def first_absent(self, key):
        if not getattr(asked, "yes", False):
            asked.yes = True
            return None
        return size(self, key)

    return first_absent


def test_what_a_dead_writer_left_is_counted_and_swept(bucket: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket._store.put("unfinished/0123", b"x" * 700)
    assert bucket.unfinished() == 700 and bucket.sweep() == 0 and not list(bucket.names())
    monkeypatch.setattr("kvtool.store.buckets._ABANDONED", -5.0)
    assert bucket.sweep() == 700 and bucket.unfinished() == 0


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "s3://bucket/x?secret=1", "s3://bucket/x#secret", "s3://", "s3://bucket/../x"])
def test_addresses_of_object_stores(url: str) -> None:
    buckets = pytest.importorskip("kvtool.store.buckets")
    with pytest.raises(ValueError, match=r"\[store\]") as caught:
        buckets.Buckets(url)
    assert "secret" not in str(caught.value)


def test_a_bucket_that_is_not_there(bucket: Objects, s3_port: int) -> None:
    buckets = pytest.importorskip("kvtool.store.buckets")
    absent = buckets.Buckets("s3://no-such-bucket/x", timeout=TIMEOUT)
    assert absent.size("x") is None
    with pytest.raises(OSError, match="no-such-bucket"):
        absent.write("x", b"y")


# --- Redis alone -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def valkey(redis_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Objects]:
    made = _objects("redis", redis_port, f"parts-{tmp_path.name}".lower(), monkeypatch)
    yield made
    made.close()


def test_an_evicted_part_makes_the_object_missing(valkey: Objects) -> None:
    valkey.write("evicted", content(20 << 20))
    parts = sorted(valkey._client.scan_iter(match="*evicted}:*"))
    assert len(parts) == 3
    valkey._client.delete(parts[1])
    assert valkey.read("evicted", 0, 8 << 20) == content(20 << 20)[: 8 << 20]
    with pytest.raises(Missing):
        valkey.read("evicted")
    assert valkey.size("evicted") is None and not list(valkey._client.scan_iter(match="*evicted}*"))
    assert valkey.write("evicted", b"anew") and valkey.read("evicted") == b"anew"


def test_an_evicted_hash_leaves_nothing(valkey: Objects) -> None:
    for name in ("lost", "kept"):
        valkey.write(name, content(9 << 20))
    valkey._client.delete(valkey._key("lost"))
    with pytest.raises(Missing):
        valkey.read("lost")
    assert valkey.unfinished() == 0 and valkey.sweep() == 9 << 20 and valkey.sweep() == 0
    assert valkey.read("kept") == content(9 << 20)


def test_parts_without_a_commit_expire(valkey: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a writer that is killed before its commit.
    monkeypatch.setattr(valkey._client, "eval", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(valkey, "_unlink", lambda keys: None)
    with pytest.raises(KeyboardInterrupt):
        valkey.write("dead", content(9 << 20))
    monkeypatch.undo()
    left = [valkey._client.ttl(key) for key in valkey._client.scan_iter(match="*dead}*")]
    assert len(left) == 2 and all(0 < seconds <= 3600 for seconds in left)
    assert valkey.unfinished() == 9 << 20 and valkey.sweep() == 0
    assert valkey.size("dead") is None and not list(valkey.names())


def test_a_part_that_expires_before_the_commit(valkey: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtool.store.valkey._EXPIRY", 1)
    send = valkey._client.eval
    monkeypatch.setattr(valkey._client, "eval", lambda *words: (time.sleep(1.3), send(*words))[1])
    with pytest.raises(OSError, match="gone before all were sent"):
        valkey.write("slow", content(9 << 20))
    assert valkey.size("slow") is None


def test_a_full_server(tmp_path: Path) -> None:
    if not store_servers.HAVE_REDIS:
        pytest.skip("redis-server or the package redis is not installed")
    module = pytest.importorskip("kvtool.store.valkey")
    with store_servers.redis_server(tmp_path, "--maxmemory", "12mb", "--maxmemory-policy", "noeviction") as port:
        full = module.Valkey(f"redis://127.0.0.1:{port}")
        with pytest.raises(OSError, match="full") as caught:
            full.write("big", content(30 << 20))
        assert caught.value.errno == errno.ENOSPC and full.size("big") is None and full.unfinished() == 0
        full.close()


def test_passwords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not store_servers.HAVE_REDIS:
        pytest.skip("redis-server or the package redis is not installed")
    module = pytest.importorskip("kvtool.store.valkey")
    with store_servers.redis_server(tmp_path, "--requirepass", "open-sesame") as port:
        for user in ("", ":wrong-one@"):
            refused = module.Valkey(f"redis://{user}127.0.0.1:{port}")
            with pytest.raises(PermissionError) as caught:
                refused.size("x")
            assert "wrong-one" not in f"{caught.value}{refused!r}" and "REDISCLI_AUTH" in str(caught.value)
            refused.close()
        monkeypatch.setenv("REDISCLI_AUTH", "open-sesame")
        allowed = module.Valkey(f"valkey://127.0.0.1:{port}")
        assert allowed.write("x", b"y") and allowed.read("x") == b"y"
        allowed.close()


@pytest.mark.parametrize("url", ["redis://", "redis://h/no-number", "redis://h?prefix={x}", "redis://h?cluster=2", "redis://h/1?cluster=1"])
def test_addresses_of_redis(url: str) -> None:
    module = pytest.importorskip("kvtool.store.valkey")
    with pytest.raises(ValueError, match=r"\[store\]"):
        module.Valkey(url)


# --- local copies ----------------------------------------------------------------------------------------------------------------


class Lying:
    """A back end in memory whose reads can be made to go wrong."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.reads: list[str] = []
        self.flip: list[int] = []
        self.short = False

    def size(self, name: str) -> int | None:
        return len(self.held[name]) if name in self.held else None

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        self.reads.append(name)
        if name not in self.held:
            raise Missing(name)
        data = bytearray(self.held[name][start : None if length is None else start + length])
        if self.flip:
            data[self.flip.pop()] ^= 1
        return bytes(data[: len(data) - self.short])

    def names(self, prefix: str = "") -> Iterator[Entry]:
        return iter(())


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a small kvtool file."""
    path = tmp_path_factory.mktemp("container") / "a.kv"
    write_container(path, small_manifest(), plans(small_arrays()))
    return path.read_bytes()


def test_a_copy_is_checked_before_it_is_kept(tmp_path: Path, container: bytes) -> None:
    remote = Lying()
    remote.held["a"] = container
    copied = LocalCopy(remote, tmp_path / "copies")  # type: ignore[arg-type]
    remote.flip = [len(container) - 200] * 2
    with pytest.raises(KVError):
        copied.path("a")
    assert not list(copied.local.names()) and copied.local.unfinished() == 0
    # Once wrong, then right: fetched a second time.
    remote.flip = [len(container) - 200]
    path = copied.path("a")
    assert path is not None and path.read_bytes() == container
    reads = len(remote.reads)
    assert copied.path("a") == path and len(remote.reads) == reads
    assert copied.read("a", 3, 10) == container[3:13] and len(remote.reads) == reads
    assert copied.path("absent") is None


def test_a_short_answer_is_not_kept(tmp_path: Path, container: bytes) -> None:
    remote = Lying()
    remote.held["a"] = container
    remote.short = True
    copied = LocalCopy(remote, tmp_path / "copies")  # type: ignore[arg-type]
    with pytest.raises(KVError, match="were promised"):
        copied.path("a")
    assert not list(copied.local.names())


def test_copies_stay_within_their_quota(tmp_path: Path) -> None:
    remote = Lying()
    remote.held = {f"o{i}": content(1000, i) for i in range(6)}
    copied = LocalCopy(remote, tmp_path / "copies", quota=3500, check=lambda path: None)  # type: ignore[arg-type]
    for i in range(4):
        copied.path(f"o{i}")
        time.sleep(0.02)
        copied.path("o0")
    assert {entry.name for entry in copied.local.names()} == {"o0", "o2", "o3"}
    path = copied.path("o0")
    assert path is not None
    with path.open("rb") as mapped:
        for i in (4, 5, 1):
            copied.path(f"o{i}")
        assert "o0" not in {entry.name for entry in copied.local.names()} and mapped.read() == remote.held["o0"]
    remote.held["big"] = bytes(4000)
    with pytest.raises(OSError, match="4000 bytes, the local copies may take 3500"):
        copied.path("big")


def test_a_wrong_digest_is_the_error(tmp_path: Path, container: bytes) -> None:
    remote = Lying()
    broken = bytearray(container)
    broken[-200] ^= 1
    remote.held["a"] = bytes(broken)
    with pytest.raises(DigestError):
        LocalCopy(remote, tmp_path / "copies").path("a")  # type: ignore[arg-type]
