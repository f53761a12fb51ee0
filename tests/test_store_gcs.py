"""`gs://` against the tests' own server of its XML interface: what is asked of it, under which conditions, and with which credentials."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvtool
from kvtool.store.store import Store
from tests.library import ids, tiny

buckets = pytest.importorskip("kvtool.store.buckets", reason="obstore is not installed")
gcs = pytest.importorskip("tests.gcs_server", reason="cryptography is not installed")
rsa = gcs.rsa

URL = "gs://bucket/some/prefix"


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.Google]:
    with gcs.gcs_server("bucket", page=3) as running:
        for name, value in running.environment(tmp_path).items():
            monkeypatch.setenv(name, value)
        yield running


def test_every_write_of_an_object_is_under_the_condition_that_its_name_is_free(google: gcs.Google) -> None:
    objects = buckets.Buckets(URL)
    assert objects.write("small", b"x") and objects.write("large", bytes((64 << 20) + 1))
    written = [(path, headers) for method, path, headers in google.asked if method == "PUT" and "%2Fobjects%2F" in path]
    assert [path.rpartition("%2F")[2] for path, _ in written] == ["small", "large"]
    assert all(headers["x-goog-if-generation-match"] == "0" for _, headers in written)
    assert "x-goog-copy-source" in written[1][1]  # of what went up in parts
    assert set(google.objects) == {"some/prefix/objects/small", "some/prefix/objects/large"} and not google.uploads


@pytest.mark.parametrize("size", [5, (64 << 20) + 1])
def test_a_writer_that_comes_second_leaves_the_first_ones_bytes(google: gcs.Google, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one's object comes between the question whether the name is free and the write."""
    objects = buckets.Buckets(URL)
    real = objects._size

    def late(key: str) -> int | None:
        found = real(key)
        if found is None:
            google.put(f"some/prefix/{key}", b"the first one's", None)
        return found

    monkeypatch.setattr(objects, "_size", late)
    assert objects.write("raced", bytes(size)) is False
    assert objects.read("raced") == b"the first one's" and objects.unfinished() == 0


def test_listings_of_many_pages(google: gcs.Google) -> None:
    objects = buckets.Buckets(URL)
    names = [f"a/{i:02}" for i in range(10)]
    for name in [*names, "b/x"]:
        objects.write(name, b"x")
    google.put("some/prefix-of-another/objects/a/99", b"x", None)
    google.asked.clear()
    assert sorted(entry.name for entry in objects.names("a/")) == names
    asked = [path for method, path, _ in google.asked if method == "GET" and "%2Fobjects%2Fa%2F" in path]
    assert len(asked) == 4 and sum("continuation-token=" in path for path in asked) == 3
    assert [entry.name for entry in objects.page("", "a/07", 3)] == ["a/08", "a/09", "b/x"]


def test_credentials(google: gcs.Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests carry a token that the service account's key has signed; where that is not the server's, the refusal is an error."""
    objects = buckets.Buckets(URL)
    objects.write("x", b"x")
    assert all(google.knows(headers["authorization"]) for _, _, headers in google.asked)
    google.account(tmp_path, rsa.generate_private_key(65537, 2048))
    stranger = buckets.Buckets(URL)
    for act in (lambda: stranger.read("x"), lambda: stranger.size("x"), lambda: stranger.write("y", b"y"), lambda: list(stranger.names())):
        with pytest.raises(PermissionError, match="credentials come from the environment"):
            act()
    assert set(google.objects) == {"some/prefix/objects/x"}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "none.json"))
    with pytest.raises(OSError, match=r"none\.json"):
        buckets.Buckets(URL)


def test_plain_http_is_asked_for(google: gcs.Google, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_ALLOW_HTTP")
    with pytest.raises(OSError):
        buckets.Buckets(URL).size("x")
    assert not google.asked


@pytest.mark.parametrize("url", ["gs://", "gs:///x", "gs://user:pw@bucket", "gs://bucket/a b", "gs://bucket/x?y", "gs://bucket/../x"])
def test_addresses(url: str) -> None:
    with pytest.raises(ValueError, match=r"^\[store\]") as caught:
        buckets.Buckets(url)
    assert "pw" not in str(caught.value)


def test_a_prompt_is_put_and_found(google: gcs.Google, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "cache"))
    model = tiny("qwen3")
    with Store("gs://bucket/store", chunk=8) as store:
        store.put(kvtool.capture(model, ids(29)), codec="rvq-4,sink=2,recent=3")
        restored = store.load(ids(29), model)
        assert restored is not None and restored.usable == 28 and not store.check().problems
    assert {key.split("/")[0] for key in google.objects} == {"store"}


@pytest.mark.parametrize("days", [-2, 0, 2])
def test_ages_are_by_the_servers_clock(google: gcs.Google, tmp_path: Path, days: int) -> None:
    """A server whose clock is two days behind or ahead: what is on its way stays, what was given up goes, and so do descriptions."""
    google.ahead = days * 86400.0
    objects, hour = buckets.Buckets(URL), 3600.0
    for name, age in (("given-up", 25 * hour), ("on-its-way", 23 * hour), ("new", 0.0)):
        google.put(f"some/prefix/unfinished/{name}", name.encode(), None)
        google.objects[f"some/prefix/unfinished/{name}"].date -= age
    assert objects.sweep() == len("given-up")
    assert {key.rpartition("/")[2] for key in google.objects} == {"on-its-way", "new"}
    google.objects.clear()
    for name, age in (("old", 70.0), ("new", 0.0)):
        objects.write(f"models/{name}.json", b"{}")
        google.objects[f"some/prefix/objects/models/{name}.json"].date -= age
    # A put may be about to write what it describes.
    assert Store(objects).room.collect() == 2
    assert {entry.name for entry in objects.names()} == {"models/new.json"}
