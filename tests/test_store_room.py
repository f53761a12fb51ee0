"""A store within its quota: what goes first, what stays, and what a full or failing disk does."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

import kvtool
from formats.errors import IncompatibleError
from kvtool.model import LoadedModel
from kvtool.store import tending
from kvtool.store.catalogue import Catalogue
from kvtool.store.folder import Folder
from kvtool.store.keys import chunk_name
from kvtool.store.objects import Entry, StoreFullError
from kvtool.store.store import PutReport, Store
from tests.library import ids, tiny

CHUNK = 8
LOSSY = "rvq-4,sink=2,recent=3"
DAY = 24 * 3600.0
SPACE = "f" * 64


def store_at(path: Path, **options: Any) -> Store:
    return Store(path / "store", **{"chunk": CHUNK, **options})


def put(store: Store, tokens: list[int], model: LoadedModel | None = None) -> PutReport:
    model = tiny("qwen3") if model is None else model
    return store.put(kvtool.capture(model, tokens), codec=LOSSY, model=model)


def usable(store: Store, tokens: list[int]) -> int:
    match = store.lookup([*tokens, 1], tiny("qwen3"))
    return 0 if match is None else match.usable


def taken(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def age(store: Store, seconds: float) -> None:
    """Let everything be last used some time ago."""
    for entry in list(store.objects.names()):
        path = store.objects.path(entry.name)
        assert path is not None
        os.utime(path, (entry.used - seconds, entry.used - seconds))


def entry_of(key: int, parent: int | None, start: int, used: float = 0.0, size: int = 100) -> Entry:
    name = chunk_name(f"{key:064x}"[::-1], SPACE if parent is None else f"{parent:064x}"[::-1], start, CHUNK)
    return Entry(name, size, used)


def flat(root: str | None, start: int, tokens: int) -> float:
    return float(tokens)


@given(st.lists(st.tuples(st.integers(0, 7), st.floats(0, 10 * DAY), st.integers(1, 1000)), min_size=1, max_size=8), st.data())
def test_nothing_goes_before_what_follows_it(nodes: list[tuple[int, float, int]], data: st.DataObject) -> None:
    """A random tree: each node's parent is an earlier one, or the space; some are pinned."""
    entries, starts = [Entry(f"spaces/{SPACE}.json", 10, 0.0)], [0]
    parents: dict[int, int | None] = {}
    for i, (choice, used, size) in enumerate(nodes, 1):
        parent = choice % i or None
        parents[i] = parent
        starts.append(0 if parent is None else starts[parent] + CHUNK)
        entries.append(entry_of(i, parent, starts[i], used, size))
    pinned = data.draw(st.sets(st.sampled_from(sorted(parents)), max_size=2))
    entries += [Entry(f"pins/{f'{i:064x}'[::-1]}", 5, 0.0) for i in pinned]
    stays = set()
    for i in pinned:
        at: int | None = i
        while at is not None:
            stays.add(at)
            at = parents[at]
    order = [int(held.node.id[::-1], 16) for held in Catalogue(entries).going(10 * DAY, flat)]
    assert sorted(order) == sorted(set(parents) - stays)
    for i in order:
        assert all(order.index(child) < order.index(i) for child, parent in parents.items() if parent == i)
    # Of two leaves of equal size the one used longer ago goes first.
    leaves = [i for i in order if i not in parents.values()]
    for a in leaves:
        for b in leaves:
            if nodes[a - 1][2] == nodes[b - 1][2] and nodes[a - 1][1] < nodes[b - 1][1] - 1:
                assert order.index(a) < order.index(b)


def test_worth_is_the_prefill_saved_a_byte_halved_each_day() -> None:
    space = Entry(f"spaces/{SPACE}.json", 10, 0.0)
    cases: list[tuple[Entry, Entry]] = [
        (entry_of(1, None, 0, size=200), entry_of(2, None, 0, size=100)),  # more bytes for the same tokens
        (entry_of(1, None, 0, used=0.0), entry_of(2, None, 0, used=DAY)),
        (entry_of(1, None, 0, used=0.0, size=100), entry_of(2, None, 0, used=DAY, size=199)),
        (entry_of(1, None, 0, used=DAY, size=201), entry_of(2, None, 0, used=0.0, size=100)),
    ]
    for first, second in cases:
        assert [held.node.name for held in Catalogue([space, second, first]).going(DAY, flat)] == [first.name, second.name]


def test_what_has_lost_its_beginning_goes_first_unless_it_is_new() -> None:
    entries = [Entry(f"spaces/{SPACE}.json", 10, 0.0), entry_of(1, None, 0, used=0.0), entry_of(3, 2, CHUNK, used=DAY - 100.0)]
    assert [held.node.start for held in Catalogue(entries).going(DAY, flat)] == [CHUNK, 0]
    assert [held.node.start for held in Catalogue([*entries[:2], entry_of(3, 2, CHUNK, used=DAY - 10.0)]).going(DAY, flat)] == [0, CHUNK]


def test_case_40_shared_beginnings_stay(tmp_path: Path) -> None:
    """Eviction took short shared prefixes, and everything behind them was out of reach; or only the newest prompt was kept."""
    common, store = ids(2 * CHUNK), store_at(tmp_path)
    prompts = [[*common, *ids(CHUNK + 2, seed=seed)] for seed in range(2, 8)]
    for prompt in prompts[:3]:
        put(store, prompt)
    quota = taken(tmp_path / "store")
    limited = store_at(tmp_path, quota=quota)
    for prompt in prompts[3:]:
        age(limited, 3 * DAY)
        put(limited, prompt)
        assert taken(tmp_path / "store") <= quota
    assert usable(limited, common) == len(common) and limited.room.evicted > 0
    kept = [prompt for prompt in prompts if usable(limited, prompt) == len(prompt)]
    assert kept == prompts[-len(kept) :] and len(kept) >= 2


def test_what_is_used_stays_longer(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    prompts = [ids(CHUNK + 2, seed=seed) for seed in range(3)]
    for prompt in prompts[:2]:
        put(store, prompt)
    age(store, 3600.0)
    assert store.load([*prompts[0], 1], tiny("qwen3")) is not None
    limited = store_at(tmp_path, quota=taken(tmp_path / "store"))
    put(limited, prompts[2])
    assert [usable(limited, prompt) == len(prompt) for prompt in prompts] == [True, False, True]


def test_pins_stay_with_all_that_they_follow(tmp_path: Path) -> None:
    store, prompts = store_at(tmp_path), [ids(2 * CHUNK + 2, seed=seed) for seed in range(4)]
    pinned = put(store, prompts[0])
    store.pin(pinned.id[:10])
    put(store, prompts[1])
    quota = taken(tmp_path / "store")
    age(store, 100 * DAY)
    limited = store_at(tmp_path, quota=quota)
    for prompt in prompts[2:]:
        put(limited, prompt)
    assert usable(limited, prompts[0]) == len(prompts[0]) and usable(limited, prompts[1]) == 0
    with pytest.raises(IncompatibleError, match="is pinned"):
        limited.remove(pinned.id)
    # A pin takes room itself, so all are made before there is a limit.
    for entry in store.entries():
        if entry.leaf and not entry.pinned:
            store.pin(entry.id)
    tight = store_at(tmp_path, quota=taken(tmp_path / "store") + 4000)
    with pytest.raises(StoreFullError, match="pinned"):
        put(tight, ids(2 * CHUNK + 2, seed=9))
    assert tight.objects.unfinished() == 0
    tight.unpin(pinned.id[:10])
    put(tight, ids(CHUNK, seed=9))
    assert usable(tight, prompts[0]) < len(prompts[0])


def test_the_quota_counts_files_on_their_way(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    put(store, ids(CHUNK + 2))
    age(store, 3600.0)
    other = Folder(tmp_path / "store")
    (other.scratch / "on-its-way").write_bytes(bytes(100_000))
    limited = store_at(tmp_path, quota=taken(tmp_path / "store"))
    put(limited, ids(CHUNK + 2, seed=2))
    assert taken(tmp_path / "store") <= limited.room.quota and usable(limited, ids(CHUNK + 2)) == 0  # type: ignore[operator]


def test_what_is_larger_than_the_quota_is_refused(tmp_path: Path) -> None:
    store = store_at(tmp_path, quota=2000)
    with pytest.raises(StoreFullError, match="more than the quota of 2000"):
        put(store, ids(CHUNK + 2))
    assert store.objects.unfinished() == 0 and taken(tmp_path / "store") <= 2000


def test_a_prompt_larger_than_the_quota_lets_others_stay(tmp_path: Path) -> None:
    """It would otherwise be refused at its last chunk, when all others had gone for it."""
    store = store_at(tmp_path)
    others = [ids(CHUNK + 2, seed=seed) for seed in range(6)]
    for prompt in others:
        put(store, prompt)
    age(store, 3600.0)
    limited = store_at(tmp_path, quota=taken(tmp_path / "store"))
    with pytest.raises(StoreFullError, match="this prompt takes about"):
        put(limited, ids(40 * CHUNK, seed=9))
    assert sum(usable(limited, prompt) == len(prompt) for prompt in others) >= len(others) - 2
    assert taken(tmp_path / "store") <= limited.room.quota  # type: ignore[operator]


def test_a_prompt_that_fits_is_not_refused_for_its_exact_rows(tmp_path: Path) -> None:
    """The first chunk is exact, and several times as large as those that follow."""
    model, prompt, how = tiny("qwen3"), ids(8 * 256), {"codec": "rvq-1,sink=256,recent=0", "chunk": 256}
    snapshot = kvtool.capture(model, prompt)
    Store(tmp_path / "free").put(snapshot, **how, model=model)
    quota = taken(tmp_path / "free") + 100
    assert Store(tmp_path / "store", quota=quota).put(snapshot, **how, model=model).chunks == 8


def test_what_is_written_again_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process evicts a chunk while the last one is written."""
    prompt = ids(6 * CHUNK + 2)
    put(store_at(tmp_path / "free"), prompt)
    store = store_at(tmp_path, quota=taken(tmp_path / "free") + 100)
    write, gone = store.room.write, []

    def evicted(name: str, *given: Any) -> int:
        written = write(name, *given)
        if name.startswith("tails/") and not gone:
            gone.append(next(entry.name for entry in store.entries() if entry.kind == "chunk" and entry.start == 4 * CHUNK))
            store.objects.remove(gone[0])
        return written

    monkeypatch.setattr(store.room, "write", evicted)
    assert put(store, prompt).chunks == 6 and gone and usable(store, prompt) == len(prompt)


def failing(call: Callable[..., Any], code: int, times: int, when: Callable[..., bool] = lambda *a: True) -> Callable[..., Any]:
    left = [times]

    def wrapper(*arguments: Any, **options: Any) -> Any:
        if left[0] and when(*arguments):
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return call(*arguments, **options)

    return wrapper


@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_case_39_no_space_left_evicts_and_tries_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = store_at(tmp_path)
    put(store, ids(2 * CHUNK + 2))
    age(store, 3600.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(getattr(os, call), errno.ENOSPC, 1))
        put(store, ids(2 * CHUNK + 2, seed=2))
    assert usable(store, ids(2 * CHUNK + 2, seed=2)) == 2 * CHUNK + 2 and store.room.evicted > 0
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(getattr(os, call), errno.ENOSPC, 1000))
        with pytest.raises(OSError, match=r"No space left on device: no space left for .*\.kv, although \d+ bytes") as caught:
            put(store, ids(2 * CHUNK + 2, seed=3))
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "store")
    assert store.objects.unfinished() == 0 and not store.check().problems


@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_case_1_a_disk_error_in_a_write_is_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A disk error in the middle of a write left the key visible; the next hit was garbage."""
    store, tokens = store_at(tmp_path), ids(3 * CHUNK + 2)
    for after in range(12):
        calls = [0]

        def late(*arguments: Any, calls: list[int] = calls, after: int = after) -> bool:
            calls[0] += 1
            return calls[0] > after

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(getattr(os, call), errno.EIO, 1, late))
            try:
                put(store, tokens)
            except OSError as error:
                assert error.errno == errno.EIO
        assert store.objects.unfinished() == 0 and not store.check().problems
        assert usable(store, tokens) in (0, CHUNK, 2 * CHUNK, 3 * CHUNK, len(tokens))
    put(store, tokens)
    assert usable(store, tokens) == len(tokens)


def test_a_read_error_is_a_miss_that_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(3 * CHUNK + 2)
    put(store, tokens)
    match = store.lookup([*tokens, 1], model)
    assert match is not None
    bad = str(store.objects.path(match.nodes[2].name))
    real = open

    def opening(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path) == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), bad)
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", opening)
        restored = store.load([*tokens, 1], model)
        assert restored is not None and restored.usable == 3 * CHUNK and "tokens 16 to 26 are not readable" in restored.notes[0]
    # The disk may give it the next time: it is not removed.
    again = store.load([*tokens, 1], model)
    assert again is not None and again.usable == len(tokens)


def test_remove_takes_what_nothing_else_needs(tmp_path: Path) -> None:
    store, common = store_at(tmp_path), ids(2 * CHUNK)
    first, second = put(store, [*common, 5, 6]), put(store, [*common, *ids(CHUNK, seed=3), 7])
    before = taken(tmp_path / "store")
    freed = store.remove(second.id)
    assert freed == before - taken(tmp_path / "store")
    # The end of the first prompt holds its rows from 8 on itself.
    assert usable(store, [*common, 5, 6]) == 2 * CHUNK + 2 and usable(store, [*common, *ids(CHUNK, seed=3), 7]) == CHUNK
    store.remove(first.id)
    assert not any(entry.name.startswith(("chunks/", "tails/")) for entry in store.objects.names())
    put(store, [*common, 5, 6])
    chunk = next(entry for entry in store.entries() if entry.start == 0)
    store.remove(chunk.id)
    assert store.entries() == []
    for wrong in ("", "0" * 64):
        with pytest.raises(IncompatibleError, match="0 objects"):
            store.remove(wrong)
        with pytest.raises(IncompatibleError, match="0 pins"):
            store.unpin(wrong)


def test_gc_removes_what_nothing_needs_and_nothing_else(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    put(store, ids(2 * CHUNK + 2))
    gone = put(store, ids(2 * CHUNK + 2, seed=2), tiny("qwen3", seed=1))
    assert store.gc() == 0
    first = next(entry for entry in store.entries() if entry.id != gone.id and entry.model == "qwen3-float32-1" and entry.start == 0)
    path = next(entry.name for entry in store.objects.names() if first.id in entry.name)
    store.objects.remove(path)
    assert store.gc() == 0 and len(store.check().lost) == 2
    age(store, 3600.0)
    assert store.gc() > 0 and store.check().lost == ()
    assert {entry.model for entry in store.entries()} == {"qwen3-float32-0"}
    assert len(list(store.objects.names("spaces/"))) == len(list(store.objects.names("models/"))) == 1
    assert usable(store, ids(2 * CHUNK + 2)) == 2 * CHUNK + 2


def test_check_names_what_is_wrong(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    report = put(store, ids(2 * CHUNK + 2))
    store.pin(report.id)
    sound = store.check()
    assert sound.problems == () and sound.lost == () and sound.unfinished == 0 and sound.bytes == taken(tmp_path / "store")
    names = sorted(entry.name for entry in store.objects.names())
    kinds = {}
    for name in names:
        path = store.objects.path(name)
        assert path is not None
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if not name.startswith("models/") else b"[]")
        kinds[name.partition("/")[0]] = [(problem.name, problem.kind) for problem in store.check().problems]
        path.write_bytes(data)
    assert {kind: len(found) for kind, found in kinds.items()} == dict.fromkeys(("chunks", "tails", "spaces", "models", "pins"), 1)
    chunks = [name for name in names if name.startswith("chunks/")]
    swapped = [store.objects.path(name) for name in chunks]
    assert swapped[0] is not None and swapped[1] is not None
    first, second = (path.read_bytes() for path in swapped if path is not None)
    swapped[0].write_bytes(second)
    swapped[1].write_bytes(first)
    assert [problem.name for problem in store.check().problems] == chunks
    store.objects.write("else/where", b"x")
    assert "is no object of a store" in [problem.what for problem in store.check().problems]


def test_stats_and_entries_count_everything(tmp_path: Path) -> None:
    store = store_at(tmp_path, quota=10**9)
    report = put(store, ids(2 * CHUNK + 2))
    store.load([*ids(2 * CHUNK + 2), 1], tiny("qwen3"))
    stats = store.stats()
    assert stats["bytes"] == taken(tmp_path / "store") and stats["quota"] == 10**9 and (stats["hits"], stats["misses"]) == (1, 0)
    assert {kind: about["objects"] for kind, about in stats["kinds"].items()} == {"chunks": 2, "tails": 1, "spaces": 1, "models": 1}
    entries = store.entries()
    listed = sorted((entry.kind, entry.start, entry.tokens, entry.leaf) for entry in entries)
    assert listed == [("chunk", 0, CHUNK, False), ("chunk", CHUNK, CHUNK, True), ("tail", CHUNK, CHUNK + 2, True)]
    assert any(entry.id == report.id for entry in entries) and {entry.codec for entry in entries} == {"rvq-4,sink=2"}
    assert all(abs(entry.used - time.time()) < 600 for entry in entries)


def test_a_cost_grows_with_the_model_and_the_position(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    put(store, ids(2 * CHUNK + 2))
    root = store.known.spaces()[0].key[:16]
    costs = [store.known.cost(root, start, CHUNK) for start in (0, 1000)]
    assert np.all(np.diff(costs) > 0) and costs[0] > 2 * CHUNK * 10_000 and store.known.cost(None, 0, CHUNK) < costs[0]


def test_what_another_version_wrote_is_left_alone(tmp_path: Path) -> None:
    """An older version took spaces that it could not read for unneeded: with them went all that they hold."""
    store = store_at(tmp_path)
    put(store, ids(2 * CHUNK + 2))
    (space,) = store.known.spaces()
    newer = space.data.replace(b'"schema":1', b'"schema":2')
    key = blake3(newer).hexdigest()
    names = [f"spaces/{key}.json", chunk_name("a" * 64, key, 0, CHUNK), "models/" + "b" * 64 + ".json", "kinds-to-come/x"]
    for name, data in zip(names, (newer, b"rows", b'{"name": "newer"}', b"what it is"), strict=True):
        store.objects.write(name, data)
    age(store, 3600.0)
    assert store.gc() == 0 and all(store.objects.size(name) for name in names)
    assert usable(store, ids(2 * CHUNK + 2)) == 2 * CHUNK + 2
    # Where room is needed, what no version here knows goes first, then rows by what they save.
    store.room.quota = store.stats()["bytes"] - 1
    store.gc()
    assert store.objects.size(names[3]) is None and all(store.objects.size(name) for name in names[:3])


def test_a_clock_that_jumps_takes_nothing_that_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day ahead in the middle of a put, and back: what is there stays whole, what is put is found."""
    store, real, tokens = store_at(tmp_path), time.time, ids(4 * CHUNK + 2)
    put(store, tokens)
    for jump in (DAY, -DAY, 400 * DAY, -400 * DAY):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda jump=jump: real() + jump)
            other = store_at(tmp_path)
            put(other, ids(3 * CHUNK, seed=int(jump) & 0xFF))
            assert other.gc() == 0 and usable(other, ids(3 * CHUNK, seed=int(jump) & 0xFF)) == 3 * CHUNK
            tight = store_at(tmp_path, quota=taken(tmp_path / "store"))
            put(tight, ids(2 * CHUNK, seed=3))
            assert taken(tmp_path / "store") <= tight.room.quota and not tight.check().problems and not tight.check().lost  # type: ignore[operator]


def test_what_a_new_object_follows_stays_for_it(tmp_path: Path) -> None:
    """The end of a prompt comes when its beginning is what has been used the longest ago."""
    store = store_at(tmp_path)
    put(store, ids(CHUNK))
    beginning = next(entry for entry in store.entries() if entry.kind == "chunk")
    age(store, 3 * DAY)
    put(store, ids(CHUNK, seed=2))
    for entry in store.entries():
        if entry.kind == "tail":
            store.objects.remove(entry.name)
    child = chunk_name("a" * 64, beginning.id, CHUNK, CHUNK)
    assert store.room.free(1, child) > 0
    assert [entry.name for entry in store.entries()] == [beginning.name]
    # Without it the beginning would have gone; and where it alone is left, nothing goes.
    assert store.room.free(1, child) == 0 and store.room.free(1, chunk_name("a" * 64, "b" * 64, CHUNK, CHUNK)) > 0


def test_what_is_damaged_can_be_removed(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    report = put(store, ids(2 * CHUNK + 2))
    path = next((tmp_path / "store" / "objects").glob("tails/*/*/*.kv"))
    path.write_bytes(b"x" * 100)
    assert store.remove(report.id) > 0 and not path.exists()
    report = put(store, ids(2 * CHUNK + 2, seed=2))
    path = next((tmp_path / "store" / "objects").glob("tails/*/*/*.kv"))
    opened = tending.opened

    def gone(objects: Any, name: str) -> Any:
        path.unlink()
        return opened(objects, name)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(IncompatibleError, match="removed meanwhile"):
        patch.setattr(tending, "opened", gone)
        store.remove(report.id)
