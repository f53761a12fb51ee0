"""Files loaded onto their codes: the logits, tokens and files of the decoded rows, in every kind of layer, through mlx-lm's own loops."""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import generate, stream_generate
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

import kvtool
from formats.manifest import CacheInfo
from kvtool.calibrating import tables_of
from kvtool.calibrations import Calibration
from kvtool.capturing import Snapshot
from kvtool.encoding import Encoder
from kvtool.live import placement_notes, placements
from kvtool.model import LoadedModel
from kvtool.moments import collect
from tests.library import f64, ids, run, saved, tiny
from tests.texts import text
from tests.tiny_random import WINDOW
from veloxquant_mlx import native
from veloxquant_mlx.caches import families
from veloxquant_mlx.caches.blocks import Block
from veloxquant_mlx.caches.coded import CodedKVCache
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.metal._backend import forced

TOKENS = 420
# Sums of float32 in another order; logits of up to 20.
CLOSE = {"rtol": 1e-4, "atol": 3e-4}
EVERY = (
    *("rvq-4", "rvq-2+2", "rabitq", "rabitq-4", "affine-4", "affine-2:token", "commvq-2", "commvq-2:product", "vecinfer-2", "qjl"),
    *("k=raw,v=rvq-3", "tc-2", "tc-3:carry", "commvq-2:additive", "k=rvq-4,v=affine-4,frame=pre", "rvq-4,sink=0,recent=0"),
)


@pytest.fixture(scope="module")
def snapshot(tiny_a: LoadedModel) -> Snapshot:
    return kvtool.capture(tiny_a, tiny_a.tokenizer.encode(text("prose"))[:TOKENS])


@pytest.fixture(scope="module")
def calibration(tiny_a: LoadedModel) -> Calibration:
    tokens = tiny_a.tokenizer.encode(text("technical"))[:320]
    return tables_of(collect(tiny_a, {"technical": tokens}), rates=(), additive=(2.0,))


@pytest.fixture
def file(snapshot: Snapshot, calibration: Calibration, tmp_path: Path) -> Callable[[str], Path]:
    def write(spec: str) -> Path:
        calibrated = spec.startswith("tc") or "additive" in spec
        kvtool.save(snapshot, tmp_path / "a.kv", codec=spec, calibration=calibration if calibrated else None)
        return tmp_path / "a.kv"

    return write


def both(path: Path, model: LoadedModel, **more: Any) -> tuple[kvtool.Restored, kvtool.Restored]:
    """On codes, and decoded."""
    return kvtool.load(path, model, **more), kvtool.load(path, model, decode=True, **more)


def assert_goes_on_alike(model: LoadedModel, codes: Sequence[Any], rows: Sequence[Any], plan: Sequence[int], seed: int = 3) -> None:
    tokens = ids(sum(plan), seed)
    for i, (got, want) in enumerate(zip(run(model, codes, tokens, plan), run(model, rows, tokens, plan), strict=True)):
        np.testing.assert_allclose(f64(got), f64(want), **CLOSE, err_msg=f"chunk {i} of {plan}")


def kinds(restored: kvtool.Restored) -> list[str]:
    return [type(c).__name__ for c in restored.cache]


# --- codecs ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", EVERY)
def test_every_codec_gives_the_logits_of_its_decoded_rows(spec: str, tiny_a: LoadedModel, file: Callable, calibration: Calibration) -> None:
    path = file(spec)
    codes, rows = both(path, tiny_a, calibration=calibration if spec.startswith(("tc", "commvq-2:additive")) else None)
    assert kinds(codes) == ["CodedKVCache"] * 4 and kinds(rows) == ["KVCache"] * 4
    assert codes.usable == rows.usable == TOKENS == codes.cache[0].offset and codes.tokens == rows.tokens
    assert all("attend to codes; later rows join as k=" in note for note in codes.notes)
    assert len(codes.notes) == 1 or spec == "tc-3:carry"  # a layer whose tables would outweigh the rows falls back
    assert rows.notes == ("layers 0-3 are decoded: asked for",)
    (fork,) = codes.fork(1)
    held = sum(c.nbytes for c in codes.cache)
    assert held < sum(c.nbytes for c in rows.cache) * (0.75 if "raw" in spec else 0.65 if "carry" in spec else 0.45)
    assert_goes_on_alike(tiny_a, codes.cache, rows.cache, [5, 1, 1])
    assert_goes_on_alike(tiny_a, fork.cache, kvtool.load(path, tiny_a, decode=True, calibration=calibration).cache, [1, 9])


UNFUSED = {
    **dict.fromkeys(("rvq-4", "rabitq,frame=pre", "affine-4", "commvq-2:product", "vecinfer-2", "k=raw,v=rvq-3", "tc-2"), ""),
    "qjl": "there is no kernel for the codes of qjl",
}


@pytest.mark.parametrize(("spec", "reason"), UNFUSED.items())
def test_on_a_gpu_a_note_says_which_layers_have_no_kernel(
    spec: str, reason: str, tiny_a: LoadedModel, file: Callable, calibration: Calibration
) -> None:
    path = file(spec)
    with kvtool.open(path, calibration=calibration if "tc-2" in spec else None) as archive:
        probes = archive.check(tiny_a)
        here = placements(archive.decoder, tiny_a.model, probes)
        with forced("cuda"):
            there = placements(archive.decoder, tiny_a.model, probes)
    assert {p.unfused for p in here} == {native.without_because(64)} and {p.unfused for p in there} == {reason}
    (note,) = placement_notes(there)
    assert note.startswith(f"layers 0-3 attend to codes by MLX's operations ({reason});" if reason else "layers 0-3 attend to codes;")


@pytest.mark.skipif(not native.built(), reason="the native back end was not built")
@pytest.mark.parametrize("spec", ["rvq-4", "commvq-2:product", "qjl"])
def test_on_a_cpu_a_note_says_what_reads_the_codes(spec: str, tiny_a: LoadedModel, file: Callable) -> None:
    (note,) = kvtool.load(file(spec), tiny_a).notes
    with native.without():
        (other,) = kvtool.load(file(spec), tiny_a).notes
    assert note.startswith("layers 0-3 attend to codes;")
    assert other.startswith("layers 0-3 attend to codes by MLX's operations (the native back end is switched off);")
    assert native.without_because(512) == "" and "up to 512" in native.without_because(513)


GROWS = {
    "rvq-2+2": "k=rvq-2+2,v=rvq-2+2",
    "rvq-4,frame=pre": "k=rvq-4,v=rvq-4",
    "rvq-4,frame=post": "k=rvq-4,v=rvq-4",
    "commvq-2": "k=rvq-2,v=rvq-4",
    "tc-2": "k=tc-2,v=tc-2",
}


@pytest.mark.parametrize(("spec", "grows"), GROWS.items())
def test_later_rows_join_as_the_note_says(spec: str, grows: str, tiny_a: LoadedModel, file: Callable, calibration: Calibration) -> None:
    codes = kvtool.load(file(spec), tiny_a, calibration=calibration)
    assert codes.notes[0].endswith(f"later rows join as {grows}") and codes.layers[0].grows == grows
    before = len(codes.cache[0].blocks)
    framed = codes.cache[0].blocks[1].k.rope
    assert (framed is None) == spec.endswith("frame=post")
    run(tiny_a, codes.cache, ids(300), [300])
    run(tiny_a, codes.cache, ids(1), [1])
    new = codes.cache[0].blocks[before:]
    assert [(b.first, b.count) for b in new] == [(TOKENS, 256)] and new[0].k.rope == framed
    assert f"k={new[0].k.codec.spec('k')},v={new[0].v.codec.spec('v')}" == grows and codes.cache[0].growth.recent == 32


def test_a_lossless_file_loads_as_mlx_lms_caches_until_it_is_forked(tiny_a: LoadedModel, file: Callable) -> None:
    codes, rows = both(file("raw"), tiny_a)
    assert kinds(codes) == ["KVCache"] * 4 and codes.notes == ()
    forks = codes.fork(2)
    assert kinds(codes) == kinds(forks[0]) == ["CodedKVCache"] * 4
    shared = {id(part) for fork in (codes, *forks) for c in fork.cache for b in c.blocks for part in b.k.parts.values()}
    assert len(shared) == 4  # one array of keys a layer, for all three
    for fork in (forks[1], codes, forks[0]):
        assert_goes_on_alike(tiny_a, fork.cache, copy.deepcopy(rows.cache), [7, 1])
    for bad in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match=r"\[fork\] count must be an integer of at least 1"):
            codes.fork(bad)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_models_of_16_bits(dtype: str, tmp_path: Path) -> None:
    model = tiny("qwen3", dtype)
    codes, rows = both(saved(model, tmp_path / "a.kv", 60, codec="rvq-8,sink=2,recent=3"), model)
    assert kinds(codes) == ["CodedKVCache"] * 2
    for got, want in zip(run(model, codes.cache, ids(9), [7, 1, 1]), run(model, rows.cache, ids(9), [7, 1, 1]), strict=True):
        assert got.dtype == want.dtype
        # Decoded rows are rounded to the model's dtype, codes are not: a rounding of the hidden state or two.
        step = 2.0**-10 if dtype == "float16" else 2.0**-7
        assert np.abs(f64(got) - f64(want)).max() < 8 * step * np.abs(f64(want)).max()
    states = kvtool.capture(model, cache=codes.cache, tokens=ids(69)).states
    assert {str(s.k.dtype) for s in states} == {f"mlx.core.{dtype}"}


def test_a_float32_file_in_a_float16_twin(tmp_path: Path) -> None:
    path, half = saved(tiny("qwen3"), tmp_path / "a.kv", 60, codec="rvq-8,sink=2,recent=3"), tiny("qwen3", "float16")
    codes, rows = both(path, half, allow_mismatch=True)
    assert kinds(codes) == ["CodedKVCache"] * 2 and any("converted from float32 to float16" in note for note in rows.notes)
    for got, want in zip(run(half, codes.cache, ids(8), [7, 1]), run(half, rows.cache, ids(8), [7, 1]), strict=True):
        assert got.dtype == mx.float16
        assert np.abs(f64(got) - f64(want)).max() < 8 * 2.0**-10 * np.abs(f64(want)).max()


def test_a_captured_coded_cache_is_its_decoded_rows(tiny_a: LoadedModel, snapshot: Snapshot, file: Callable, tmp_path: Path) -> None:
    """Saved again, raw, it is the file that the decoded cache gives, bit for bit; saved lossy, it loads onto codes again."""
    codes, rows = both(file("rvq-2+2"), tiny_a)
    tokens = [*snapshot.tokens, *ids(6)]
    for restored in (codes, rows):
        run(tiny_a, restored.cache, ids(6), [5, 1])
    mine, theirs = (kvtool.capture(tiny_a, cache=r.cache, tokens=tokens) for r in (codes, rows))
    for a, b in zip(mine.states, theirs.states, strict=True):
        assert (a.cls, a.offset, a.positions) == (b.cls, b.offset, b.positions) == ("KVCache", TOKENS + 6, ((0, TOKENS + 6),))
        assert all(mx.array_equal(x[:, :TOKENS], y[:, :TOKENS]).item() for x, y in ((a.k, b.k), (a.v, b.v)))
    kvtool.save(mine, tmp_path / "b.kv", codec="rvq-4")
    again, decoded = both(tmp_path / "b.kv", tiny_a)
    assert kinds(again) == ["CodedKVCache"] * 4
    assert_goes_on_alike(tiny_a, again.cache, decoded.cache, [3, 1])


def test_a_recoded_file_is_read_with_the_other_models_rotation(
    tiny_a: LoadedModel, tiny_b: LoadedModel, file: Callable, tmp_path: Path
) -> None:
    for spec in ("k=rvq-4,v=rvq-4,frame=pre", "rvq-4,frame=post"):
        kvtool.recode(file(spec), tmp_path / "b.kv", to_model=tiny_b)
        codes, rows = both(tmp_path / "b.kv", tiny_b)
        assert kinds(codes) == ["CodedKVCache"] * 4
        assert_goes_on_alike(tiny_b, codes.cache, rows.cache, [4, 1])


def test_pending_takes_the_last_token_back(tiny_a: LoadedModel, snapshot: Snapshot, file: Callable) -> None:
    codes, rows = both(file("rvq-4,sink=0,recent=0"), tiny_a)
    assert codes.pending() == rows.pending() == [snapshot.tokens[-1]] and codes.cache[0].offset == TOKENS - 1
    assert_goes_on_alike(tiny_a, codes.cache, rows.cache, [1, 1])


# --- layers ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
@pytest.mark.parametrize("family", ["llama-sliding", "gemma3_text", "cohere2", "gpt_oss"])
def test_sliding_windows(family: str, length: int, tmp_path: Path) -> None:
    """Whatever the length is to the window, in single steps and in chunks, over the window and back at once."""
    model = tiny(family)
    path = saved(model, tmp_path / "a.kv", length, codec="rvq-8,sink=2,recent=3")
    for plan in ([1] * 5, [4, 1, WINDOW - 1, 1], [2 * WINDOW + 1, 1, 1], [1, WINDOW, WINDOW + 1, 2]):
        codes, rows = both(path, model)
        assert set(kinds(codes)) == {"CodedKVCache"}
        assert_goes_on_alike(model, codes.cache, rows.cache, plan)
        assert [c.offset for c in codes.cache] == [c.offset for c in rows.cache]


def test_blocks_leave_with_the_window_and_trims_are_refused_then(tmp_path: Path) -> None:
    model = tiny("llama-sliding")
    codes = kvtool.load(saved(model, tmp_path / "a.kv", WINDOW - 4, codec="rvq-8,sink=2,recent=3"), model)
    sliding, full = codes.cache[0], codes.cache[1]
    assert (sliding.window, full.window) == (WINDOW, 0) and can_trim_prompt_cache(codes.cache)
    assert [b.count for b in sliding.blocks] == [2, WINDOW - 9, 3]
    run(model, codes.cache, ids(6), [1] * 6)
    assert [b.count for b in sliding.blocks] == [WINDOW - 9, 3] and len(full.blocks) == 3
    assert not can_trim_prompt_cache(codes.cache) and trim_prompt_cache(codes.cache, 1) == 0
    with pytest.raises(ValueError, match=rf"n must be 0 once rows have left the window of {WINDOW} \(16 of 18 rows are here\), but got 1"):
        sliding.trim(1)
    run(model, codes.cache, ids(WINDOW), [1] * WINDOW)
    assert sliding.blocks == () and sliding.columns == WINDOW + 6
    # Far beyond: what the tail's oldest rows are encoded to goes at once.
    run(model, codes.cache, ids(900), [300, 300, 300])
    run(model, codes.cache, ids(2), [1, 1])
    assert sliding.columns < WINDOW + 256 + 300 + 4 and full.columns == sliding.offset == 2 * WINDOW - 4 + 6 + 902


def test_a_window_that_is_full_is_captured_and_saved_again(tmp_path: Path) -> None:
    model = tiny("gemma3_text")
    codes, rows = both(saved(model, tmp_path / "a.kv", 3 * WINDOW, codec="rvq-8,sink=2,recent=3"), model)
    for plan in ([1], [5, 1]):
        for restored in (codes, rows):
            run(model, restored.cache, ids(sum(plan)), plan)
        mine, theirs = (kvtool.capture(model, cache=r.cache, tokens=ids(codes.cache[1].offset)) for r in (codes, rows))
        for a, b in zip(mine.states, theirs.states, strict=True):
            assert (a.cls, a.positions, a.params.get("max_size")) == (b.cls, b.positions, b.params.get("max_size"))
            np.testing.assert_allclose(f64(a.k), f64(b.k), atol=1e-4)
    kvtool.save(mine, tmp_path / "b.kv", codec="raw")
    back = kvtool.load(tmp_path / "b.kv", model)
    assert kinds(back) == ["RotatingKVCache", "KVCache"] * 2
    assert_goes_on_alike(model, codes.cache, back.cache, [1, 6, 1])


@pytest.mark.parametrize(
    ("family", "codec", "expected", "note"),
    [
        ("qwen3_next", "rvq-4", ["ArraysCache"] * 3 + ["CodedKVCache"], "layers 0-2 are decoded: caches in ArraysCache"),
        ("gemma2", "rvq-4", ["KVCache"] * 2, "layers 0-1 are decoded: its own softmax, over capped scores"),
        ("deepseek_v3", "rvq-4", ["KVCache"] * 2, "layers 0-1 are decoded: latent attention"),
        ("deepseek_v2", "rvq-4", ["CodedKVCache"] * 2, "layers 0-1 attend to codes"),
        ("falcon_h1", "rvq-4", ["CacheList"] * 2, "layers 0-1 are decoded: caches in CacheList"),
        ("llama4", "rvq-4", ["ChunkedKVCache"] * 3 + ["CodedKVCache"], "layers 0-2 are decoded: caches in ChunkedKVCache"),
        ("lfm2", "k=rvq-4,v=raw", ["ArraysCache", "CodedKVCache", "ArraysCache"], "layers 1 attend to codes"),
        ("glm4", "rvq-4", ["CodedKVCache"] * 2, "layers 0-1 attend to codes"),
        ("phi3", "rvq-4,frame=pre", ["CodedKVCache"] * 2, "layers 0-1 attend to codes"),
        ("llama-traditional", "rvq-4,frame=pre", ["CodedKVCache"] * 2, "layers 0-1 attend to codes"),
    ],
)
def test_mixed_models(family: str, codec: str, expected: list[str], note: str, tmp_path: Path) -> None:
    model = tiny(family)
    codes, rows = both(saved(model, tmp_path / "a.kv", 40, codec=f"{codec},sink=2,recent=3"), model)
    assert kinds(codes) == expected
    assert any(remark.startswith(note) for remark in codes.notes), codes.notes
    assert_goes_on_alike(model, codes.cache, rows.cache, [5, 1, 1])


def test_a_model_file_that_the_table_does_not_name_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    path = saved(model, tmp_path / "a.kv", 40, codec="rvq-4,sink=2,recent=3")
    monkeypatch.setattr(families, "CODES", families.CODES - {"llama"})
    restored = kvtool.load(path, model)
    assert kinds(restored) == ["KVCache"] * 2 and restored.notes == ("layers 0-1 are decoded: not known: llama",)


def test_layers_of_one_file_that_are_exact(tiny_a: LoadedModel, file: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are mlx-lm's own until a fork shares them; the others are on codes."""
    encode = Encoder.layer

    def layer(self: Encoder, name: str, *of: Any) -> CacheInfo:
        plan = self.plan
        self.plan = parse_codec("raw") if name == "2" else plan
        info = encode(self, name, *of)
        self.plan = plan
        return info

    monkeypatch.setattr(Encoder, "layer", layer)
    codes, rows = both(file("rvq-4"), tiny_a)
    assert kinds(codes) == ["CodedKVCache", "CodedKVCache", "KVCache", "CodedKVCache"]
    assert codes.notes[0].startswith("layers 0-1, 3 attend to codes") and codes.notes[1:] == ("layers 2 are decoded: it is stored exactly",)
    (fork,) = codes.fork(1)
    assert kinds(fork) == ["CodedKVCache"] * 4
    for restored in (codes, fork):
        assert_goes_on_alike(tiny_a, restored.cache, copy.deepcopy(rows.cache), [5, 1, 1])


def test_three_segments_and_short_ones(tiny_a: LoadedModel, tmp_path: Path) -> None:
    """Exact rows at both ends; files of one row, and of fewer rows than are kept exact."""
    tokens = tiny_a.tokenizer.encode(text("prose"))
    for count, spec, blocks in ((100, "rvq-4", [4, 64, 32]), (37, "rvq-4", [4, 1, 32]), (1, "rvq-4,sink=0,recent=0", [1])):
        kvtool.save(kvtool.capture(tiny_a, tokens[:count]), tmp_path / "a.kv", codec=spec)
        codes, rows = both(tmp_path / "a.kv", tiny_a)
        assert [b.count for b in codes.cache[0].blocks] == blocks
        assert_goes_on_alike(tiny_a, codes.cache, rows.cache, [1, 3])
    kvtool.save(kvtool.capture(tiny_a, tokens[:36]), tmp_path / "a.kv", codec="rvq-4")
    assert kinds(kvtool.load(tmp_path / "a.kv", tiny_a)) == ["KVCache"] * 4  # every row is exact


# --- mlx-lm's loops --------------------------------------------------------------------------------------------------------------


PROMPT = " In short, the committee found that " * 12


def greedy(model: LoadedModel, cache: Sequence[Any], count: int, prompt: str = PROMPT, **how: Any) -> list[int]:
    ids_ = mx.array(model.tokenizer.encode(prompt, add_special_tokens=False))
    return [int(token) for token, _ in generate_step(ids_, model.model, max_tokens=count, prompt_cache=cache, **how)]


def test_generate_step_in_chunks(tiny_a: LoadedModel, file: Callable) -> None:
    codes, rows = both(file("rvq-4"), tiny_a)
    want = greedy(tiny_a, rows.cache, 24, prefill_step_size=32)
    assert greedy(tiny_a, codes.fork(1)[0].cache, 24, prefill_step_size=32) == want
    assert greedy(tiny_a, codes.cache, 24) == want and codes.cache[0].offset == rows.cache[0].offset


def test_generate_and_stream(tiny_a: LoadedModel, file: Callable) -> None:
    codes, rows = both(file("rvq-2+2"), tiny_a)
    forks, how = codes.fork(1), {"max_tokens": 10}
    prompt = tiny_a.tokenizer.encode(PROMPT)[:40]
    want = generate(tiny_a.model, tiny_a.tokenizer, prompt, prompt_cache=rows.cache, **how)
    assert generate(tiny_a.model, tiny_a.tokenizer, prompt, prompt_cache=codes.cache, **how) == want
    pieces = stream_generate(tiny_a.model, tiny_a.tokenizer, prompt, prompt_cache=forks[0].cache, prefill_step_size=16, **how)
    assert "".join(piece.text for piece in pieces) == want
    # The cache is used again, as a chat does: more turns on what the last one left.
    for turn in (" And then?", " Why was that?"):
        more = [generate(tiny_a.model, tiny_a.tokenizer, tiny_a.tokenizer.encode(turn), prompt_cache=r.cache, **how) for r in (codes, rows)]
        assert more[0] == more[1]


def test_a_draft_model_and_what_it_takes_back(tiny_a: LoadedModel, tiny_b: LoadedModel, file: Callable) -> None:
    """Rejected drafts are trimmed from both models' caches; the draft's own are coded too."""
    codes, rows = both(file("rvq-4,sink=0,recent=0"), tiny_a)
    prompt = mx.array(tiny_a.tokenizer.encode(PROMPT)[:50])
    results = []
    for cache in (rows.cache, codes.cache):
        caches = [*cache, *make_prompt_cache(tiny_b.model)]
        steps = speculative_generate_step(prompt, tiny_a.model, tiny_b.model, prompt_cache=caches, max_tokens=24, num_draft_tokens=3)
        taken = [(int(token), bool(drafted)) for token, _, drafted in steps]
        results.append(taken)
    assert results[0] == results[1]
    assert 0 < sum(drafted for _, drafted in results[0]) < 24 * 3 / 4  # some were rejected


def test_kv_bits_leave_codes_alone(tiny_a: LoadedModel, file: Callable) -> None:
    codes = kvtool.load(file("rvq-4"), tiny_a)
    plain = codes.fork(1)[0].cache
    want = greedy(tiny_a, plain, 8)
    assert greedy(tiny_a, codes.cache, 8, kv_bits=4, quantized_kv_start=0) == want
    assert kinds(codes) == ["CodedKVCache"] * 4


@pytest.mark.parametrize("spec", ["rvq-4", "affine-4", "commvq-2", "tc-2"])
def test_no_loop_decodes_a_cache(spec: str, tiny_a: LoadedModel, file: Callable, calibration: Calibration, monkeypatch: Any) -> None:
    """Loading, forking, prefill, decoding over a boundary, drafts with trims, and the state of all that: no call for decoded rows."""
    path = file(spec)

    def decoded(*_: Any) -> None:
        raise AssertionError("all rows were decoded")

    monkeypatch.setattr(Block, "rows", decoded)
    monkeypatch.setattr(CodedKVCache, "keys_and_values", decoded)
    codes = kvtool.load(path, tiny_a, calibration=calibration)
    (fork,) = codes.fork(1)
    greedy(tiny_a, codes.cache, 3, text("chat")[:1200], prefill_step_size=128)
    prompt, caches = mx.array(ids(4)), [*fork.cache, *make_prompt_cache(tiny_a.model)]
    list(speculative_generate_step(prompt, tiny_a.model, tiny_a.model, prompt_cache=caches, max_tokens=6, num_draft_tokens=2))
    mx.eval([c.state for c in (*codes.cache, *fork.cache)])
    assert len(codes.cache[0].blocks) > len(fork.cache[0].blocks)
    with pytest.raises(AssertionError, match="all rows were decoded"):
        kvtool.capture(tiny_a, cache=fork.cache, tokens=ids(fork.cache[0].offset))


@pytest.mark.parametrize("spec", ["rvq-4", "tc-2", "vecinfer-2", "raw"])
def test_four_agents_in_four_threads(spec: str, tiny_a: LoadedModel, file: Callable, calibration: Calibration) -> None:
    path, prompts = file(spec), [PROMPT[: 40 + 30 * i] for i in range(4)]

    def answer(cache: Sequence[Any], prompt: str) -> list[int]:
        tokens, out = list(tiny_a.tokenizer.encode(prompt)), []
        for _ in range(5):
            logits = tiny_a.model(mx.array([tokens]), cache=cache)
            tokens = [int(mx.argmax(logits[0, -1]).item())]
            out += tokens
        return out

    load = kvtool.load(path, tiny_a, calibration=calibration)
    serial = [answer(fork.cache, prompt) for fork, prompt in zip(load.fork(4), prompts, strict=True)]
    forks, together = kvtool.load(path, tiny_a, calibration=calibration).fork(4), threading.Barrier(4)

    def work(i: int) -> list[int]:
        together.wait()
        return answer(forks[i].cache, prompts[i])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == serial
