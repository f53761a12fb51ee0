"""A store of prompt caches: what is found is the longest beginning, and what it gives is what a prefill gives."""

import logging
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvtool
from formats.container import open_container
from formats.errors import IncompatibleError
from formats.tables import digest_of
from kvtool.archive import Restored
from kvtool.capturing import Snapshot
from kvtool.model import LoadedModel
from kvtool.store.finding import Match
from kvtool.store.resuming import resume
from kvtool.store.store import PutReport, Store
from tests.library import f64, ids, renamed, tiny, twin
from tests.tiny_random import WINDOW
from veloxquant_mlx.caches.coded import CodedKVCache

CHUNK = 8
LOSSY = "rvq-4,sink=2,recent=3"


def store_at(path: Path, **options: Any) -> Store:
    return Store(path / "store", **{"chunk": CHUNK, **options})


def put(store: Store, model: LoadedModel, tokens: list[int], codec: str = LOSSY, **options: Any) -> PutReport:
    return store.put(kvtool.capture(model, tokens), codec=codec, **options)


def found(store: Store, tokens: list[int], model: LoadedModel, **options: Any) -> Match:
    match = store.lookup(tokens, model, **options)
    assert match is not None
    return match


def alive(store: Store, tokens: list[int], model: LoadedModel, **options: Any) -> Restored:
    restored = store.load(tokens, model, **options)
    assert restored is not None
    return restored


def logits(model: LoadedModel, cache: list[Any], tokens: list[int]) -> np.ndarray:
    return f64(model.model(mx.array([tokens]), cache=cache)[:, -1])


def expected(prompts: list[list[int]], tokens: list[int], recent: int) -> int:
    """The longest beginning by the definition: whole chunks in common, or a whole prompt; never the last token."""
    best = 0
    for prompt in prompts:
        common = next((i for i, (a, b) in enumerate(zip(prompt, tokens, strict=False)) if a != b), min(len(prompt), len(tokens)))
        best = max(best, common if common == len(prompt) else common // CHUNK * CHUNK)
    return min(best, len(tokens) - 1)


PROMPT = st.lists(st.integers(1, 2), min_size=1, max_size=3 * CHUNK + 2).map(
    # Few different beginnings, so that prompts share them.
    lambda bits: [1 + bits[i // 5 * 5] for i in range(len(bits))]
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompts=st.lists(PROMPT, min_size=1, max_size=4), tokens=PROMPT, recent=st.integers(0, CHUNK))
def test_the_longest_beginning_is_found(tmp_path_factory: pytest.TempPathFactory, prompts: list, tokens: list, recent: int) -> None:
    model = tiny("qwen3")
    store = store_at(tmp_path_factory.mktemp("s"))
    for prompt in prompts:
        put(store, model, prompt, recent=recent)
    match = store.lookup(tokens, model)
    assert (0 if match is None else match.usable) == expected(prompts, tokens, recent)


@pytest.mark.parametrize("count", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 2])
@pytest.mark.parametrize("extra", [0, 1, CHUNK + 3])
@pytest.mark.parametrize("codec", ["raw", LOSSY])
def test_a_prefix_goes_on_as_a_prefill_does(tmp_path: Path, count: int, extra: int, codec: str) -> None:
    model, tokens, store = tiny("qwen3"), ids(count + extra), store_at(tmp_path)
    put(store, model, tokens[:count], codec)
    restored = store.load(tokens, model)
    if len(tokens) == 1:
        assert restored is None
        return
    assert restored is not None
    assert restored.usable == min(count, len(tokens) - 1) and restored.pending() == tokens[restored.usable :]
    got = logits(model, restored.cache, restored.pending())
    want = f64(model.model(mx.array([tokens]))[:, -1])
    # Codes of 4 bits of random rows: the logits of tiny random models move by some per cent.
    assert np.abs(got - want).max() < (1e-4 if codec == "raw" else 0.3 * np.abs(want).max())


def test_codes_are_those_of_a_file_of_the_same_rows(tmp_path: Path) -> None:
    """Chunks are coded as `kvtool.save` codes the same rows alone: each block's decoded rows are the oracle's."""
    model, tokens, store = tiny("qwen3"), ids(3 * CHUNK + 4), store_at(tmp_path)
    snapshot = kvtool.capture(model, tokens)
    store.put(snapshot, codec=LOSSY)
    cache = alive(store, [*tokens, 1], model).cache[0]
    assert isinstance(cache, CodedKVCache)
    keys, values = (f64(x)[0] for x in cache.keys_and_values())
    exact_k, exact_v = f64(snapshot.states[0].k), f64(snapshot.states[0].v)
    for first, last, exact in ((0, 2, True), (len(tokens) - 3, len(tokens), True), (2, len(tokens) - 3, False)):
        for got, want in ((keys, exact_k), (values, exact_v)):
            error = np.square(got[:, first:last] - want[:, first:last]).sum() / np.square(want[:, first:last]).sum()
            assert error < 1e-6 if exact else 1e-5 < error < 0.03
    assert cache.growth is not None and cache.growth.recent == 3


def test_a_prefix_without_its_end_keeps_newest_rows_exact(tmp_path: Path) -> None:
    model, tokens, store = tiny("qwen3"), ids(3 * CHUNK + 4), store_at(tmp_path)
    put(store, model, tokens)
    cache = alive(store, [*tokens[: 2 * CHUNK], 0, 0], model).cache[0]
    assert isinstance(cache, CodedKVCache) and cache.offset == 2 * CHUNK
    assert cache.growth is not None and cache.growth.recent == 32


def test_prompts_share_chunks_and_each_has_its_end(tmp_path: Path) -> None:
    model, store, common = tiny("qwen3"), store_at(tmp_path), ids(2 * CHUNK)
    first = put(store, model, [*common, 5, 6])
    second = put(store, model, [*common, 7, 8, 9])
    again = put(store, model, [*common, 5, 6])
    assert (first.chunks, first.new) == (2, 3) and (second.chunks, second.new) == (2, 1) and (again.new, again.bytes) == (0, 0)
    assert found(store, [*common, 5, 6, 1], model).usable == 2 * CHUNK + 2
    assert found(store, [*common, 5, 6, 1], model, ends=False).usable == 2 * CHUNK
    assert found(store, [*common, 7, 8, 9, 1], model).usable == 2 * CHUNK + 3
    assert found(store, [*common, 1, 1], model).usable == 2 * CHUNK
    assert store.lookup([3, *common], model) is None


def test_equal_rows_have_equal_bytes_whoever_puts_them(tmp_path: Path) -> None:
    model, common = tiny("qwen3"), ids(2 * CHUNK)
    listings = []
    for who, end in ((model, 1), (renamed(model, name="/another/path"), 2)):
        store = store_at(tmp_path / str(end))
        put(store, who, [*common, end])
        listings.append({entry.name: store.objects.read(entry.name) for entry in store.objects.names("chunks/")})
    assert listings[0] == listings[1] and len(listings[0]) == 2


def test_any_codec_and_dtype_of_the_model_is_found_and_the_better_one_taken(tmp_path: Path) -> None:
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(2 * CHUNK + 3)
    put(store, model, tokens[: CHUNK + 1], "raw")
    put(store, model, tokens, LOSSY)
    assert found(store, tokens, model).space.codec == "rvq-4,sink=2"
    assert found(store, tokens[: CHUNK + 1], model).space.codec == "raw"
    put(store, model, tokens, "raw")
    assert found(store, tokens, model).space.codec == "raw"
    half = tiny("qwen3", "float16")
    half = renamed(half, weights=model.info.weights)
    restored = alive(store, tokens, half)
    assert restored.usable == len(tokens) - 1 and any("converted from float32" in note for note in restored.notes)


def test_case_6_models_and_shards_in_one_folder_keep_apart(tmp_path: Path) -> None:
    """Two ranks used the same file name in one directory. Here what differs has another name, the weights of a shard among it."""
    models, tokens = [tiny("qwen3"), tiny("qwen3", seed=1), tiny("glm4")], ids(2 * CHUNK + 3)
    store = store_at(tmp_path)
    assert [put(store, model, tokens).new for model in models] == [3, 3, 3]
    for model in models:
        want = np.abs(f64(model.model(mx.array([[*tokens, 1]]))[:, -1])).max()
        restored = alive(store, [*tokens, 1], model)
        error = np.abs(logits(model, restored.cache, [1]) - f64(model.model(mx.array([[*tokens, 1]]))[:, -1])).max()
        assert restored.usable == len(tokens) and error < 0.3 * want


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(2 * CHUNK + 3)
    put(store, model, tokens)
    assert store.lookup(tokens, tiny("qwen3", seed=1)) is None
    assert store.lookup(tokens, renamed(model, tokenizer="0" * 64)) is None
    assert store.load(tokens, tiny("glm4")) is None and store.counts["misses"] == 1


@pytest.mark.parametrize("codec", ["raw", LOSSY, "affine-4,sink=2,recent=3"])
def test_the_same_weights_under_another_rope_get_turned_keys(tmp_path: Path, codec: str) -> None:
    model, other, store, tokens = tiny("qwen3"), twin("qwen3", rope_theta=5000.0), store_at(tmp_path), ids(2 * CHUNK + 3)
    other = renamed(other, weights=model.info.weights)
    put(store, model, tokens, codec)
    assert found(store, [*tokens, 1], other).recode
    restored = alive(store, [*tokens, 1], other)
    assert restored.usable == len(tokens) and "turned to the rotation" in restored.notes[0]
    kvtool.save(kvtool.capture(model, tokens), tmp_path / "a.kv", codec="raw")
    kvtool.recode(tmp_path / "a.kv", tmp_path / "b.kv", to_model=other)
    want = f64(kvtool.open(tmp_path / "b.kv").state(0).k)
    cache = restored.cache[0]
    got = f64(cache.keys_and_values()[0] if isinstance(cache, CodedKVCache) else cache.state[0])[0]
    assert np.square(got - want).sum() / np.square(want).sum() < (1e-9 if codec == "raw" else 0.03)
    # Its own, once it is there, is preferred.
    put(store, other, tokens, codec)
    assert not found(store, [*tokens, 1], other).recode


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_caches_that_cannot_be_cut_are_kept_whole(tmp_path: Path, family: str) -> None:
    model, store, tokens = tiny(family), store_at(tmp_path), ids(2 * WINDOW + 5)
    report = put(store, model, tokens)
    assert report.whole is not None and report.whole.startswith("layer ") and (report.chunks, report.new) == (0, 1)
    snapshot = kvtool.capture(model, tokens)
    assert found(store, [*tokens, 1, 2], model).usable == snapshot.length
    assert store.lookup(tokens[:-1], model) is None
    restored = alive(store, [*tokens, 1, 2], model, decode=True)
    assert restored.pending() == [*tokens, 1, 2][snapshot.length :]
    kvtool.save(snapshot, tmp_path / "a.kv", codec=LOSSY)
    want = kvtool.load(tmp_path / "a.kv", model, decode=True)
    assert np.array_equal(logits(model, restored.cache, [1]), logits(model, want.cache, [1]))


@pytest.mark.parametrize("codec", ["commvq-2", "vecinfer-2,sink=2,recent=3"])
def test_codecs_that_learn_from_the_prompt_keep_it_whole(tmp_path: Path, codec: str) -> None:
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(4 * CHUNK)
    report = put(store, model, tokens, codec, recent=3)
    assert report.whole is not None and "learns its tables" in report.whole
    assert found(store, [*tokens, 1], model).usable == len(tokens)
    assert alive(store, tokens, model).pending() == tokens[-1:]


@pytest.mark.parametrize("codec", ["tc-3,sink=2,recent=3", "tcz-1,sink=2,recent=3"])
def test_a_calibration_is_an_object_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, tiny_a: LoadedModel, calibration_a: bytes
) -> None:
    monkeypatch.setenv("KVTOOL_CALIBRATIONS", str(tmp_path / "none"))
    digest = digest_of(calibration_a)
    (tmp_path / "c.safetensors").write_bytes(calibration_a)
    tokens, store = tiny_a.tokenizer.encode("A sentence that is said once. " * 40)[:90], store_at(tmp_path, chunk=64)
    report = put(store, tiny_a, tokens[:80], codec, calibration=tmp_path / "c.safetensors")
    assert report.whole is None and report.chunks == 1
    assert [entry.name for entry in store.objects.names("calibrations/")] == [f"calibrations/{digest}.safetensors"]
    (tmp_path / "c.safetensors").unlink()
    assert alive(Store(tmp_path / "store"), tokens, tiny_a).usable == 80
    # Without it nothing of that space can be decoded.
    name = f"calibrations/{digest}.safetensors"
    store.objects.remove(name)
    assert store.load(tokens, tiny_a) is None
    # Nor with a damaged one, which ended each import with an error and was written anew by no put.
    store.objects.write(name, calibration_a[:-1] + bytes([calibration_a[-1] ^ 1]))
    assert resume(store, tokens, tiny_a).usable == 0 and store.objects.size(name) is None
    (tmp_path / "c.safetensors").write_bytes(calibration_a)
    put(store, tiny_a, tokens[:80], codec, calibration=tmp_path / "c.safetensors")
    (tmp_path / "c.safetensors").unlink()
    assert alive(Store(tmp_path / "store"), tokens, tiny_a).usable == 80


def test_case_4_a_source_changed_after_put_changes_nothing(tmp_path: Path) -> None:
    """Case 4: the source buffer was changed right after put had returned, and the stored bytes with it."""
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(2 * CHUNK + 3)
    snapshot = kvtool.capture(model, tokens)
    buffers = [np.array(state.k) for state in snapshot.states]
    states = tuple(replace(state, k=mx.array(buffer)) for state, buffer in zip(snapshot.states, buffers, strict=True))
    store.put(replace(snapshot, states=states), codec="raw")
    before = {entry.name: store.objects.read(entry.name) for entry in store.objects.names()}
    for buffer in buffers:
        buffer[:] = 7
    assert {entry.name: store.objects.read(entry.name) for entry in store.objects.names()} == before
    assert np.array_equal(f64(alive(store, [*tokens, 1], model).cache[0].state[0])[0], f64(snapshot.states[0].k))


@pytest.mark.parametrize("place", ["header", "manifest", "data", "end"])
def test_case_5_a_damaged_chunk_is_a_miss_and_written_anew(tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture) -> None:
    """Case 5: right length, wrong bytes, served as a hit."""
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(3 * CHUNK + 4)
    put(store, model, tokens)
    match = found(store, [*tokens, 1], model)
    path = store.objects.path(match.nodes[1].name)
    assert path is not None
    data = bytearray(path.read_bytes())
    with open_container(path) as reader:
        last = max(info.offset + info.stored // 2 for info in reader.tensors.values())
        first = min(info.offset for info in reader.tensors.values())
    data[{"header": 3, "manifest": 500, "data": first, "end": last}[place]] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        restored = alive(store, [*tokens, 1], model)
    assert restored.usable == CHUNK and "tokens 8 to 16 are damaged" in restored.notes[0] and "damaged" in caplog.text
    assert store.counts["broken"] == 1 and store.objects.size(match.nodes[1].name) is None
    assert put(store, model, tokens).new == 1
    assert alive(store, [*tokens, 1], model).usable == len(tokens)


def test_an_object_under_anothers_name_is_a_miss(tmp_path: Path) -> None:
    model, store = tiny("qwen3"), store_at(tmp_path)
    put(store, model, ids(CHUNK + 4))
    put(store, model, ids(CHUNK + 4, seed=5))
    a, b = (found(store, ids(CHUNK + 4, seed=seed), model, ends=False).nodes[0].name for seed in (1, 5))
    ours, theirs = store.objects.path(a), store.objects.path(b)
    assert ours is not None and theirs is not None
    os.replace(ours, theirs)
    restored = store.load(ids(CHUNK + 4, seed=5), model, ends=False)
    assert restored is None and store.counts["broken"] == 1


def test_case_7_a_chunk_that_goes_between_lookup_and_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 7: garbage collection while gets are under way."""
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(3 * CHUNK + 4)
    put(store, model, tokens)
    gone = found(store, [*tokens, 1], model).nodes[1:]
    real = store.objects.path

    def path(name: str) -> Path | None:
        for node in gone:
            store.objects.remove(node.name)
        return real(name)

    monkeypatch.setattr(store.objects, "path", path)
    restored = alive(store, [*tokens, 1], model)
    assert restored.usable == CHUNK and not any("damaged" in note or "readable" in note for note in restored.notes)


def test_case_8_what_is_open_outlives_its_removal(tmp_path: Path) -> None:
    """Case 8: a file removed, and another put in its place, under a cache that maps it."""
    model, store, tokens = tiny("qwen3"), store_at(tmp_path, chunk=256), ids(600)
    put(store, model, tokens)
    want = logits(model, alive(store, [*tokens, 1], model).cache, [1])
    restored = alive(store, [*tokens, 1], model)
    for entry in list(store.objects.names()):
        store.objects.remove(entry.name)
    put(store, model, ids(600, seed=4))
    assert np.array_equal(logits(model, restored.cache, [1]), want)


def test_a_snapshot_of_the_newest_rows_joins_what_is_there(tmp_path: Path) -> None:
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(3 * CHUNK + 4)
    snapshot = kvtool.capture(model, tokens)
    late = replace(
        snapshot,
        states=tuple(
            replace(s, k=s.k[:, CHUNK:], v=s.v[:, CHUNK:], positions=((CHUNK, len(tokens)),))  # type: ignore[index]
            for s in snapshot.states
        ),
    )
    with pytest.raises(ValueError, match="begins at 8 and the store lacks tokens 0 to 8"):
        store.put(late, codec=LOSSY)
    put(store, model, tokens[: CHUNK + 1])
    assert store.put(late, codec=LOSSY).new == 3
    other = store_at(tmp_path / "whole")
    other.put(snapshot, codec=LOSSY)
    names = [node.name for node in found(store, [*tokens, 1], model).nodes]
    assert [store.objects.read(name) for name in names[1:]] == [other.objects.read(name) for name in names[1:]]


def test_what_put_refuses(tmp_path: Path) -> None:
    model, store = tiny("qwen3"), store_at(tmp_path)
    snapshot = kvtool.capture(model, ids(9))
    with pytest.raises(ValueError, match="found by its tokens"):
        store.put(replace(snapshot, tokens=None))
    with pytest.raises(ValueError, match="recent must be at most a chunk of 8 tokens, but got 9"):
        store.put(snapshot, recent=9)
    with pytest.raises(ValueError, match="takes no calibration"):
        store.put(snapshot, codec=LOSSY, calibration="auto")
    with pytest.raises(IncompatibleError, match="no known weights"):
        store.put(replace(snapshot, model=replace(snapshot.model, weights=None)), codec=LOSSY)
    with pytest.raises(ValueError, match="quota must be"):
        Store(tmp_path, quota=0)
    assert list(store.objects.names()) == []


@pytest.mark.parametrize("wrong", [-1, 1 << 31])
def test_ids_that_no_model_has_are_refused(tmp_path: Path, wrong: int) -> None:
    for call in (store_at(tmp_path).lookup, store_at(tmp_path).load):
        with pytest.raises(ValueError, match="token ids must be in 0"):
            call([1, wrong], tiny("qwen3"))
        assert call([1, 10**6], tiny("qwen3")) is None


def test_a_store_without_local_files_works_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, store, tokens = tiny("qwen3"), store_at(tmp_path), ids(3 * CHUNK + 4)
    put(store, model, tokens)
    want = logits(model, alive(store, [*tokens, 1], model).cache, [1])
    monkeypatch.setattr(store.objects, "path", lambda name: None)
    assert np.array_equal(logits(model, alive(store, [*tokens, 1], model).cache, [1]), want)
    assert store.objects.unfinished() == 0


def test_cases_38_and_42(tmp_path: Path) -> None:
    """A restart finds everything: an index that lived in memory alone missed everything after it. Here there is no index."""
    model, tokens = tiny("qwen3"), ids(3 * CHUNK + 4)
    with store_at(tmp_path) as store:
        put(store, model, tokens)
    assert found(Store(tmp_path / "store"), [*tokens, 1], model).usable == len(tokens)


def test_snapshots_are_left_as_they_were(tmp_path: Path) -> None:
    snapshot: Snapshot = kvtool.capture(tiny("qwen3"), ids(2 * CHUNK))
    before = [f64(state.k) for state in snapshot.states]
    store_at(tmp_path).put(snapshot, codec=LOSSY)
    assert all(np.array_equal(f64(state.k), k) for state, k in zip(snapshot.states, before, strict=True))


def test_a_prompt_of_more_chunks_than_files_may_be_open(tmp_path: Path) -> None:
    """A mapped chunk keeps a file open; it was taken for one that is gone."""
    store, model, tokens = store_at(tmp_path), tiny("qwen3"), ids(120 * CHUNK)
    put(store, model, tokens)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 100, hard))
    try:
        assert len(alive(store, [*tokens, 1], model).pending()) == 1
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
