"""Going on from a store: what is there is not run, what was run is there the next time, and nothing is coded twice."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.container import open_container
from kvtool.store.finding import matches
from kvtool.store.resuming import Resumed, put_prompt, resume
from kvtool.store.store import Store
from tests.library import f64, ids, renamed, tiny, twin
from tests.tiny_random import WINDOW
from veloxquant_mlx.caches.coded import CodedKVCache

CHUNK = 64
LOSSY = "rvq-4,sink=2,recent=32"


def store_at(path: Path) -> Store:
    return Store(path / "store", chunk=CHUNK)


def next_logits(resumed: Resumed, model: Any) -> np.ndarray:
    return f64(model.model(mx.array([[resumed.last]]), cache=resumed.cache)[:, -1])


@pytest.mark.parametrize("codec", ["raw", LOSSY])
def test_a_prompt_that_grows(tmp_path: Path, codec: str) -> None:
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(5 * CHUNK)
    usable = []
    for count in (CHUNK // 2, 2 * CHUNK + 10, 2 * CHUNK + 10, 3 * CHUNK, 5 * CHUNK):
        resumed = resume(store, tokens[:count], model, codec=codec)
        usable.append(resumed.usable)
        assert resumed.usable + resumed.ran == count - 1 and resumed.last == tokens[count - 1]
        assert all(cache.offset == count - 1 for cache in resumed.cache)
        want = f64(model.model(mx.array([tokens[:count]]))[:, -1])
        tolerance = 1e-4 if codec == "raw" else 0.3 * np.abs(want).max()
        assert np.abs(next_logits(resumed, model) - want).max() < tolerance
        assert (resumed.put is None) == (len(usable) == 3) and all(
            c.growth is not None for c in resumed.cache if isinstance(c, CodedKVCache)
        )
    # What joins begins at a chunk; what was there whole is taken whole.
    recent = 0 if codec == "raw" else 32
    assert usable == [0, 0, 2 * CHUNK + 9, (3 * CHUNK - 1 - recent) // CHUNK * CHUNK, (3 * CHUNK - 1) // CHUNK * CHUNK]
    assert not store.check().problems


def test_rows_that_join_are_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not decoded ones coded again, though more join than a cache keeps exact: against a run over the same codes that keeps every row."""
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(8 * CHUNK)
    store.put(kvtool.capture(model, tokens[: CHUNK + 1]), codec="k=affine-8,v=affine-8,sink=0,recent=0")
    before = store.load(tokens[: CHUNK + 1], model, ends=False, space=store.known.spaces()[0].key)
    assert before is not None and before.usable == CHUNK
    for cache in before.cache:
        cache.growth = None
    model.model(mx.array([tokens[CHUNK:-1]]), cache=before.cache)
    # More forwards than one: older rows become codes between two of them.
    monkeypatch.setattr("kvtool.store.resuming.PREFILL_STEP", 100)
    resumed = resume(store, tokens, model)
    assert (resumed.usable, resumed.ran) == (CHUNK, 7 * CHUNK - 1) and resumed.put is not None
    match = store.lookup(tokens, model, ends=False)
    assert match is not None and match.usable == 7 * CHUNK
    restored = store.load(tokens, model, ends=False)
    assert restored is not None
    for cache, exact in zip(restored.cache, before.cache, strict=True):
        got, want = (f64(one.keys_and_values()[0])[0, :, CHUNK : 7 * CHUNK] for one in (cache, exact))
        # 8 bits of 32 tokens a group: one coding's error, and no second one's.
        assert np.square(got - want).sum() / np.square(want).sum() < 3e-5
    path = store.objects.path(match.nodes[-1].name)
    assert path is not None
    with open_container(path) as reader:
        assert [step["step"] for step in reader.manifest.quality] == ["prefill", "encode"]


def test_it_goes_on_with_the_codec_that_is_there(tmp_path: Path) -> None:
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(3 * CHUNK)
    store.put(kvtool.capture(model, tokens[:CHUNK]), codec="rvq-3,frame=post,sink=1")
    put = resume(store, tokens, model).put
    assert put is not None and "rvq-3" in put.codec and len(store.known.spaces()) == 1
    # Another one, asked for, does not go on from these.
    other = resume(store, tokens, model, codec="rvq-2")
    assert other.usable == 0 and other.put is not None and len(store.known.spaces()) == 2


def test_without_put_nothing_is_written(tmp_path: Path) -> None:
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(2 * CHUNK)
    assert resume(store, tokens, model, put=False).put is None
    assert list(store.objects.names()) == [] and not (tmp_path / "store").exists()
    store.put(kvtool.capture(model, tokens[: CHUNK + 5]), codec=LOSSY)
    assert resume(store, tokens, model, put=False).usable == CHUNK + 5
    assert resume(store, tokens[:1], model).ran == 0


def test_turned_and_uncut_caches_are_gone_on_from_but_not_put(tmp_path: Path) -> None:
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(3 * CHUNK)
    store.put(kvtool.capture(model, tokens[:CHUNK]), codec=LOSSY)
    other = renamed(twin("qwen3", rope_theta=5000.0), weights=model.info.weights)
    resumed = resume(store, tokens, other)
    assert resumed.usable == CHUNK and resumed.put is None and "not put into the store" in resumed.notes[0]


def test_a_model_whose_cache_cannot_be_cut(tmp_path: Path) -> None:
    model, store, tokens = tiny("gemma3_text"), store_at(tmp_path), ids(3 * WINDOW)
    first = resume(store, tokens, model, codec="raw")
    assert first.usable == 0 and first.put is not None and first.put.whole is not None
    again = resume(store, tokens, model)
    assert (again.usable, again.ran, again.put) == (3 * WINDOW - 1, 0, None)
    want = f64(model.model(mx.array([tokens]))[:, -1])
    assert np.abs(next_logits(first, model) - want).max() < 1e-4 and np.abs(next_logits(again, model) - want).max() < 1e-4
    # What is exact is gone on from and put; codes would be coded once more.
    longer = resume(store, [*tokens, 1, 2, 3], model)
    assert longer.usable == 3 * WINDOW - 1 and longer.put is not None and resume(store, [*tokens, 1, 2, 3], model).ran == 0
    coded = store_at(tmp_path / "coded")
    assert resume(coded, tokens, model, codec=LOSSY).put is not None
    longer = resume(coded, [*tokens, 1, 2, 3], model)
    assert longer.usable == 3 * WINDOW - 1 and longer.put is None and "not put" in longer.notes[0]


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("codec", ["raw", LOSSY])
def test_snapshots_on_the_way_serve_prompts_that_begin_alike(tmp_path: Path, family: str, codec: str) -> None:
    model, store, tokens = tiny(family), store_at(tmp_path), ids(3 * WINDOW)
    assert resume(store, tokens, model, codec=codec, every=WINDOW).ran == 3 * WINDOW - 1
    assert len([entry for entry in store.entries() if entry.kind == "tail"]) == 3
    other = [*tokens[: 2 * WINDOW + 3], *(96 - token for token in tokens[:9])]
    resumed = resume(store, other, model, codec=codec)
    assert resumed.usable == 2 * WINDOW and resumed.ran == len(other) - 1 - 2 * WINDOW
    want = f64(model.model(mx.array([other]))[:, -1])
    assert np.abs(next_logits(resumed, model) - want).max() < (1e-4 if codec == "raw" else 0.3 * np.abs(want).max())
    with pytest.raises(ValueError, match="every must be"):
        resume(store, other, model, every=0)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_a_prompt_is_put_with_snapshots_on_the_way(tmp_path: Path, family: str) -> None:
    """Each is found by exactly its tokens, and is the cache of these; a cache that is cut into chunks has none."""
    model, store, tokens = tiny(family), store_at(tmp_path), ids(3 * WINDOW)
    told: list[tuple[int, int]] = []
    report = put_prompt(store, tokens, model, codec="raw", every=WINDOW, progress=lambda *done: told.append(done))
    assert (report.tokens, report.new) == (3 * WINDOW - 1, 3) and told[-1] == (3 * WINDOW - 1, 3 * WINDOW - 1) and len(told) == 3
    assert sorted(entry.tokens for entry in store.entries()) == [WINDOW, 2 * WINDOW, 3 * WINDOW - 1]
    for other, usable in ((tokens, 3 * WINDOW - 1), ([*tokens[: 2 * WINDOW], 5, 6, 7], 2 * WINDOW)):
        resumed = resume(store, other, model, put=False)
        want = f64(model.model(mx.array([other]))[:, -1])
        assert resumed.usable == usable and np.abs(next_logits(resumed, model) - want).max() < 1e-4
    cut = Store(tmp_path / "cut", chunk=CHUNK)
    assert put_prompt(cut, ids(2 * CHUNK + 5), tiny("qwen3"), codec="raw", every=8).chunks == 2 and len(cut.entries()) == 3
    for wrong, every in ((tokens, 0), ([], 4)):
        with pytest.raises(ValueError, match=r"every must be|more than the one"):
            put_prompt(store, wrong, model, codec="raw", every=every)


@pytest.mark.parametrize(("family", "damaged"), [("qwen3", 0), ("qwen3", 1), ("gemma3_text", 0)])
def test_what_is_damaged_is_run_and_put_anew_at_once(tmp_path: Path, family: str, damaged: int) -> None:
    """The lookup finds the prompt whole: loading it decides. Afterwards it is whole again, in the codec that it had."""
    model, store, tokens = tiny(family), store_at(tmp_path), ids(3 * CHUNK)
    made = resume(store, tokens, model, codec="rvq-3,sink=1").put
    match = store.lookup(tokens, model)
    assert made is not None and match is not None and match.usable == 3 * CHUNK - 1
    path = store.objects.path(match.nodes[damaged].name)
    assert path is not None
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    resumed = resume(store, tokens, model)
    assert resumed.usable == damaged * CHUNK and resumed.usable + resumed.ran == 3 * CHUNK - 1
    assert resumed.put is not None and resumed.put.new and sum("damaged" in note for note in resumed.notes) == 1
    want = f64(model.model(mx.array([tokens]))[:, -1])
    assert np.abs(next_logits(resumed, model) - want).max() < 0.3 * np.abs(want).max()
    assert not store.check().problems and resume(store, tokens, model).ran == 0
    assert family != "qwen3" or resumed.put.codec == made.codec


def test_a_prompt_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is nothing of it, a beginning, all of it; what is gone when it is opened is looked up again."""
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(4 * CHUNK)
    asked: list[int] = []

    def counted(objects: Any, known: Any, ids: list[int], *more: Any, **only: Any) -> Any:
        asked.append(len(ids))
        return matches(objects, known, ids, *more, **only)

    monkeypatch.setattr("kvtool.store.store.matches", counted)
    for count, usable in ((2 * CHUNK + 10, 0), (4 * CHUNK, 2 * CHUNK), (4 * CHUNK, 4 * CHUNK - 1), (3 * CHUNK, 3 * CHUNK - 1)):
        asked.clear()
        assert resume(store, tokens[:count], model, codec=LOSSY).usable == usable
        assert asked == [count]
    assert [store.counts[name] for name in ("hits", "misses")] == [3, 1]
    # A chunk goes between the lookup and its opening.
    last = store.lookup(tokens, model, ends=False)
    assert last is not None and len(last.nodes) == 3

    def goes(*arguments: Any, **only: Any) -> Any:
        found = counted(*arguments, **only)
        store.objects.remove(last.nodes[1].name)
        return found

    monkeypatch.setattr("kvtool.store.store.matches", goes)
    asked.clear()
    resumed = resume(store, [*tokens[: 3 * CHUNK + 5], 1, 2], model, codec=LOSSY)
    assert resumed.usable == CHUNK and len(asked) == 2
    want = f64(model.model(mx.array([[*tokens[: 3 * CHUNK + 5], 1, 2]]))[:, -1])
    assert np.abs(next_logits(resumed, model) - want).max() < 0.3 * np.abs(want).max()


def test_chunks_of_another_size_are_gone_on_from(tmp_path: Path) -> None:
    model, tokens = tiny("qwen3"), ids(4 * CHUNK)
    Store(tmp_path / "store", chunk=48).put(kvtool.capture(model, tokens[:100]), codec=LOSSY)
    resumed = resume(store_at(tmp_path), tokens, model)
    assert resumed.usable == 96 and resumed.put is not None and len(store_at(tmp_path).known.spaces()) == 1


def test_no_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tokens"):
        resume(store_at(tmp_path), [], tiny("qwen3"))
    with pytest.raises(ValueError, match="has ids 0 to"):
        resume(store_at(tmp_path), [1, 10**6], tiny("qwen3"))


@pytest.mark.parametrize("rope_theta", [None, 5000.0])
def test_get_writes_one_file_of_the_codes_as_they_are(tmp_path: Path, rope_theta: float | None) -> None:
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(2 * CHUNK + 40)
    store.put(kvtool.capture(model, tokens), codec=LOSSY)
    who = model if rope_theta is None else renamed(twin("qwen3", rope_theta=rope_theta), weights=model.info.weights)
    match = store.get(tokens, who, tmp_path / "a.kv")
    assert match is not None and match.usable == len(tokens) and match.recode == (rope_theta is not None)
    restored, want = kvtool.load(tmp_path / "a.kv", who), store.load([*tokens, 1], who)
    assert want is not None and restored.tokens == tuple(tokens) and restored.usable == len(tokens)
    for a, b in zip(restored.cache, want.cache, strict=True):
        assert np.array_equal(f64(a.keys_and_values()[0]), f64(b.keys_and_values()[0]))
    assert store.get(ids(20, seed=9), model, tmp_path / "b.kv") is None and not (tmp_path / "b.kv").exists()


def test_a_store_without_room_costs_the_caller_nothing(tmp_path: Path) -> None:
    model, tokens = tiny("qwen3"), ids(2 * CHUNK)
    with Store(tmp_path / "store", quota=100, chunk=CHUNK) as store:
        resumed = resume(store, tokens, model)
    assert resumed.put is None and "is not in the store" in resumed.notes[-1] and "quota of 100" in resumed.notes[-1]
    want = f64(model.model(mx.array([tokens]))[:, -1])
    assert np.abs(next_logits(resumed, model) - want).max() < 1e-4
