"""Pages of entries: one listing for many pages, made anew when an object comes or goes."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from kvtool.service import listings
from kvtool.service.state import State
from kvtool.service.tenants import ANYONE
from kvtool.store.folder import Folder
from kvtool.store.keys import chunk_name, tail_name


class Counting(Folder):
    """A folder that counts how often all objects were listed."""

    listed = 0

    def names(self, prefix=""):
        if not prefix.endswith("spaces/"):
            self.listed += 1
        return super().names(prefix)


@pytest.fixture
def state(tmp_path: Path) -> State:
    found = State(Counting(tmp_path / "s"), None)
    objects = found.partition(ANYONE)
    for i in range(9):
        objects.write(chunk_name(f"{i}" * 64, "a" * 64, 0, 256), b"rows")
    return found


def page(state: State, q: str = "", skip: int = 0, limit: int = 4, *, chunks: bool = True) -> tuple[list[str], int]:
    shown, total = state.listings.page(ANYONE.folder, state.partition(ANYONE), q, chunks, skip, limit)
    return [one.id for one in shown], total


def test_pages_and_searches_share_a_listing(state: State) -> None:
    ids = [id for skip in (0, 4, 8) for id in page(state, skip=skip)[0]]
    assert sorted(ids) == [f"{i}" * 64 for i in range(9)] and page(state, skip=9) == ([], 9)
    assert page(state, q="7" * 64) == (["7" * 64], 1) and page(state, q="no such") == ([], 0) == page(state, chunks=False)
    assert state.objects.listed == 1


def test_what_this_service_writes_and_removes_shows_at_once(state: State) -> None:
    assert page(state)[1] == 9
    name = chunk_name("f" * 64, "a" * 64, 0, 256)
    state.partition(ANYONE).write(name, b"rows")
    state.partition(ANYONE).write(tail_name("f" * 64, [1, 2], 256, 2, b"k" * 32), b"rows")
    assert page(state)[1] == 11 and page(state, chunks=False)[1] == 1
    state.partition(ANYONE).remove(name)
    assert page(state)[1] == 10


def test_what_others_do_shows_in_a_while(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page(state)[1] == 9
    state.objects.write(f"{ANYONE.folder}/{chunk_name('f' * 64, 'a' * 64, 0, 256)}", b"rows")
    assert page(state)[1] == 9
    monkeypatch.setattr(listings, "KEPT", 0.0)
    assert page(state)[1] == 10


def test_kept_listings_are_bounded(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "MOST", 8)
    assert page(state)[1] == page(state)[1] == 9 and state.objects.listed == 2


def test_lossy_steps_are_read_once(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    steps = [{"step": "encode"}]
    monkeypatch.setattr(listings, "measured", lambda objects, name: read.append(name) or (steps if "0" * 64 in name else None))
    monkeypatch.setattr(listings, "MOST_STEPS", 1)
    objects = state.partition(ANYONE)
    shown, _ = state.listings.page(ANYONE.folder, objects, "", True, 0, 9)
    (one,), other = [each for each in shown if each.id == "0" * 64], next(each for each in shown if each.id == "1" * 64)
    for _ in range(2):
        assert (
            state.listings.quality(ANYONE.folder, objects, one) == steps and state.listings.quality(ANYONE.folder, objects, other) is None
        )
    assert read == [one.name, other.name, other.name]
    assert state.listings.quality("tenants/other", objects, one) == steps and len(read) == 4  # and the first one's place is taken
    assert state.listings.quality(ANYONE.folder, objects, one) == steps and len(read) == 5


def test_lossy_steps_take_no_more_than_their_text(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three characters of a file, an object without members, are sixty bytes in memory."""
    monkeypatch.setattr(listings, "measured", lambda objects, name: [{} for _ in range(3000)])
    objects = state.partition(ANYONE)
    one = state.listings.page(ANYONE.folder, objects, "", True, 0, 1)[0][0]
    tracemalloc.start()
    try:
        for i in range(40):
            assert len(state.listings.quality(ANYONE.folder, objects, replace(one, name=f"{one.name}{i}")) or ()) == 3000
        assert tracemalloc.get_traced_memory()[0] < 40 * 15_000
    finally:
        tracemalloc.stop()
