"""A part of a prefill run alone: blocks of layers, chosen tokens, and the plans that name them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from formats.errors import IncompatibleError
from kvtool.bridges import recompute, running
from kvtool.bridges.pairs import check_layers_of
from kvtool.bridges.recompute import Recompute, deviation, recomputed
from kvtool.bridges.running import full_state, run_chosen, run_span
from kvtool.bridges.transferring import source_of_snapshot, transfer
from kvtool.bridges.work import Work
from kvtool.capturing import capture, prefill
from kvtool.hidden import check_stream, inputs_taken, layers_replaced
from kvtool.model import LoadedModel
from kvtool.snapshot import build_caches, take_states
from kvtool.states import CacheState
from tests import tiny_random
from tests.library import ids, loaded, tiny
from veloxquant_mlx.caches.families import family

LENGTH = 40
FAMILIES = ("llama", "llama-traditional", "llama-llama3", "qwen3", "glm4")


def prefilled(model: LoadedModel, length: int = LENGTH) -> tuple[list[CacheState], dict[int, mx.array]]:
    """The model's own states, and what enters each layer."""
    with inputs_taken(model, range(len(model.model.layers))) as taken:
        states = take_states(prefill(model, ids(length)), length=length)
    return list(states), {layer: mx.concatenate(parts) for layer, parts in taken.items()}


def noisy(states: Sequence[CacheState], where: Sequence[int], seed: int = 0) -> list[CacheState]:
    """The states with rows of these tokens changed, in every layer."""
    random, found = np.random.default_rng(seed), []
    for state in states:
        rows = []
        for x in (np.array(state.k), np.array(state.v)):
            x[:, list(where)] += random.normal(size=x[:, list(where)].shape).astype(np.float32)
            rows.append(mx.array(x))
        found.append(full_state(*rows))
    return found


def assert_same(ours: Sequence[CacheState], theirs: Sequence[CacheState], layers: Sequence[int] | None = None) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if layers is None or i in layers:
            for x, y in ((a.k, b.k), (a.v, b.v)):
                assert np.allclose(np.array(x), np.array(y), atol=2e-5 * np.abs(np.array(y)).max()), i


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("step", [2048, 16])
def test_a_block_on_the_models_own_inputs_is_its_prefill(name: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "PREFILL_STEP", step)
    model = tiny(name)
    own, inputs = prefilled(model)
    other = noisy(own, range(LENGTH))
    for first, last in ((0, 1), (1, 2)):
        found, left = run_span(model, ids(LENGTH), [own[0], *other[1:]] if first else other, 0, LENGTH, (first, last), inputs[first])
        assert_same(found, own, range(first, last))
        kept = [i for i in range(len(own)) if not first <= i < last]
        assert all(found[i] is (own[0] if first else other[i]) for i in kept)  # other layers are handed on
        assert left is not None and left.shape == inputs[first].shape
        if last in inputs:
            assert np.allclose(np.array(left), np.array(inputs[last]), atol=1e-5)
    assert type(model.model.layers[0]).__name__ == "TransformerBlock" or name == "glm4"


def test_what_leaves_a_block_is_given_where_it_is_asked_for() -> None:
    model = tiny("llama")
    own, inputs = prefilled(model)
    states, left = run_span(model, ids(LENGTH), noisy(own, [3]), 0, LENGTH, (1, 2), inputs[1], leaves=False)
    assert left is None
    assert_same(states, own, [1])
    _, left = run_span(model, ids(LENGTH), noisy(own, [3]), 0, LENGTH, (0, 1))
    assert left is not None and np.allclose(np.array(left), np.array(inputs[1]), atol=1e-5)


def test_what_enters_the_first_layer_is_the_embedding() -> None:
    model = tiny("llama")
    _, inputs = prefilled(model)
    assert np.array_equal(np.array(inputs[0]), np.array(model.model.model.embed_tokens(mx.array(ids(LENGTH)))))


def test_layers_are_themselves_again_whatever_happens() -> None:
    model = tiny("llama")
    kinds = [type(layer) for layer in model.model.layers]
    with pytest.raises(KeyError), layers_replaced(model.model, lambda layer, run, x: run(x)):
        assert [type(layer) for layer in model.model.layers] != kinds
        raise KeyError
    assert [type(layer) for layer in model.model.layers] == kinds


def one_by_one(model: LoadedModel, states: Sequence[CacheState], chosen: Sequence[int]) -> list[CacheState]:
    """Chosen tokens as mlx-lm computes them: each alone on a cache of the rows before it, in ascending order."""
    found = list(states)
    for at in sorted(chosen):
        caches: list[Any] = build_caches([full_state(s.k[:, :at], s.v[:, :at]) for s in found])  # type: ignore[index]
        model.model(mx.array([[ids(LENGTH)[at]]]), cache=caches)
        for i, cache in enumerate(caches):
            new = [np.array(x) for x in (found[i].k, found[i].v)]
            for x, y in zip(new, cache.state[:2] if not isinstance(cache.state[0], tuple) else cache.state[0], strict=True):
                x[:, at] = np.array(y)[0, :, at]
            found[i] = full_state(*map(mx.array, new))
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("batch", [256, 3])
def test_chosen_tokens_are_computed_as_one_by_one(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "BATCH", batch)
    model = tiny(name)
    handed = noisy(prefilled(model)[0], range(LENGTH))
    chosen = [0, 2, 3, 17, 18, 30, LENGTH - 1]
    assert_same(run_chosen(model, ids(LENGTH), handed, chosen), one_by_one(model, handed, chosen))


def test_chosen_tokens_go_on_from_a_layer() -> None:
    model = tiny("qwen3")
    own, inputs = prefilled(model)
    chosen = [1, 5, 20]
    found = run_chosen(model, ids(LENGTH), [own[0], *noisy(own, chosen)[1:]], chosen, 1, inputs[1][mx.array(chosen)])
    assert_same(found, own)


def test_chosen_tokens_attend_as_the_definition_says() -> None:
    """Softmax in float64 over the rows up to each token's position, grouped queries."""
    random = np.random.default_rng(3)
    k, v, q = (random.normal(size=shape).astype(np.float32) for shape in ((2, 12, 8), (2, 12, 8), (3, 4, 1, 8)))
    at = [2, 7, 11]
    found = running._Scattered(mx.array(k), mx.array(v), mx.array(at)).attend(mx.array(q), 0.3, None)
    for n, position in enumerate(at):
        for head in range(4):
            keys, values = (x[head // 2, : position + 1].astype(np.float64) for x in (k, v))
            weights = np.exp(0.3 * keys @ q[n, head, 0].astype(np.float64))
            assert np.allclose(np.array(found)[n, head, 0], weights @ values / weights.sum(), atol=1e-5)


def test_families_that_cannot_run_tokens_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gemma2")
    with pytest.raises(IncompatibleError, match="softmax"):
        run_chosen(model, ids(8), take_states(prefill(model, ids(8)), length=8), [1])
    model = tiny("llama")
    states = list(take_states(prefill(model, ids(8)), length=8))
    monkeypatch.setattr(running.ScatteredCache, "offset", property(lambda self: mx.array([0, 0]), lambda self, value: None), raising=False)
    with pytest.raises(IncompatibleError, match="apart from their neighbours differ by"):
        run_chosen(model, ids(8), states, [1, 3])


def test_models_without_a_plain_stream_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    inner = model.model.model
    kind = type(inner)

    def skewed(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        for layer, own in zip(self.layers, cache, strict=True):
            h = layer(h, "causal", own) * 1.0
        return self.norm(h)

    def twice(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        for layer, own in [*zip(self.layers, cache, strict=True), (self.layers[0], None)]:
            h = layer(h, "causal", own)
        return self.norm(h)

    def by_name(self: Any, inputs: mx.array, cache: Any = None, input_embeddings: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        for layer, own in zip(self.layers, cache, strict=True):
            h = layer(x=h, cache=own)
        return self.norm(h)

    check_stream(model)
    for forward, words in (
        (skewed, "input of layer 1 is not the output of layer 0"),
        (twice, "not each called once"),
        (by_name, "not called with its hidden states first"),
    ):
        monkeypatch.setattr(kind, "__call__", forward)
        with pytest.raises(IncompatibleError, match=words):
            check_stream(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_random.model_files())
def test_every_model_file_runs_parts_rightly_or_says_why_not(name: str) -> None:
    """Of all files of mlx-lm with full-attention layers: a block and chosen tokens as in the prefill, or refused by name."""
    if name == "muse_spark" or family(name)[0] == "refused":
        pytest.skip("mlx-lm cannot run it here")
    model = loaded(tiny_random.build_file(name), name)
    try:
        check_layers_of(model)
    except IncompatibleError as refusal:
        pytest.skip(str(refusal))
    own = list(take_states(prefill(model, ids(12)), length=12))
    refused = []
    try:
        inputs = prefilled(model, 12)[1]
        found, _ = run_span(model, ids(12), [own[0], *noisy(own[1:], range(12))], 0, 12, (1, len(own)), inputs[1])
        assert_same(found, own)
    except IncompatibleError as refusal:
        refused.append(refusal)
    try:
        chosen = [1, 4, 5, 11]
        assert_same(run_chosen(model, ids(12), noisy(own, chosen), chosen), own)
    except IncompatibleError as refusal:
        refused.append(refusal)
    assert all(str(refusal) and refusal.hint for refusal in refused)


def test_no_such_layer() -> None:
    with pytest.raises(ValueError, match="must be 0 to 1"), inputs_taken(tiny("llama"), [2]):
        pass


# --- plans


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layers=3", "such as first=4"),
        ("layers=3-3", "a < b"),
        ("layers=4-2", "a < b"),
        ("layers=0-1,layers=1-2", "such as"),
        ("deviating=60%,newest=50%", "at most the 100 tokens"),
        ("deviating=1.5", "whole number of tokens"),
        ("deviating=-1", "such as"),
    ],
)
def test_plans_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Recompute.parse(text, 100)


def test_plans() -> None:
    plan = Recompute.parse("first=4, newest=10%, deviating=5%, layers=2-4", 100)
    assert plan == Recompute(4, 10, 5, (2, 4)) and plan.needs_input == 2 and plan.goes_on_from == 0
    assert Recompute.parse("deviating=5", 100).block == recompute.LOOK and Recompute.parse("layers=0-3", 9).goes_on_from == 0
    assert [Recompute.parse(f"layers=0-{n},first=1", 9).goes_on_from for n in (1, 2, 3)] == [0, 2, 3]
    assert plan.words() == ["4 first tokens", "10 newest tokens", "5 deviating tokens", "layers 2 to 3"]
    assert Recompute.parse("layers=0-1", 9).words() == ["layer 0"]


def test_shares_of_blocks_and_chosen_tokens(tiny_b: LoadedModel) -> None:
    work = Work(tiny_b)
    # Of the last layer of a block nothing but keys and values is wanted.
    args = tiny_b.model.args
    rows = 2 * 64 * 2 * args.hidden_size * args.num_key_value_heads * 64 / work.span(0, 64)
    assert work.rows(64, 1) / work.span(0, 64) == pytest.approx(rows) and 0 < rows < 0.04
    assert Recompute(layers=(0, 1)).share(work, 64) == Recompute(layers=(1, 2)).share(work, 64) == pytest.approx(rows)
    assert Recompute(layers=(0, 4)).share(work, 64) == pytest.approx(3 / 4 + rows)
    # From a longer block at layer 0 tokens go on; else they run through all layers.
    assert Recompute(newest=64, layers=(0, 2)).share(work, 64) == pytest.approx(1)
    assert Recompute(newest=64, layers=(0, 1)).share(work, 64) == pytest.approx(1 + rows)
    assert Recompute(newest=64, layers=(1, 2)).share(work, 64) == pytest.approx(1 + rows)
    one = Recompute(deviating=1, layers=(0, 2))
    weights, width = work.layers[0]
    assert one.share(work, 64, [9]) == pytest.approx(0.5 + 2 * (2 * weights + 4 * width * 10) / work.span(0, 64))
    assert one.share(work, 64, [9]) < one.share(work, 64, [60])


def test_a_plan_beyond_the_model_is_refused(tiny_b: LoadedModel) -> None:
    source = source_of_snapshot(capture(tiny_b, list(range(1, 20))))
    with pytest.raises(ValueError, match="must end at 4 at most, but got 2-5"):
        transfer(source, tiny_b, recompute=Recompute(layers=(2, 5)))


def test_deviating_tokens_are_those_that_differ() -> None:
    model = tiny("qwen3")
    own, _ = prefilled(model)
    handed = noisy(own, [7, 21, 33])
    states, chosen = recomputed(handed, ids(LENGTH), model, Recompute(deviating=3), lambda layer: mx.zeros(()))
    assert chosen == [7, 21, 33]
    assert_same(states, own)
    apart = deviation(handed[1], own[1])
    assert apart[7] > 0 and not apart[8]


def test_tokens_and_layers_together() -> None:
    """Whatever runs, all of it is the model's own where everything it sees is."""
    model = tiny("llama-llama3")
    own, inputs = prefilled(model)
    tokens = ids(LENGTH)
    for plan in (
        Recompute(first=2, newest=5, deviating=2, layers=(0, 1)),
        Recompute(first=2, newest=5, layers=(0, 1)),
        Recompute(first=2, newest=5, layers=(0, 2)),
        Recompute(first=2, newest=5, deviating=1, layers=(1, 2)),
    ):
        handed = noisy(own, [0, 1, 11, 13, *range(LENGTH - 5, LENGTH)]) if plan.deviating == 2 else noisy(own, [0, 1, LENGTH - 1])
        states, _ = recomputed(handed, tokens, model, plan, lambda layer: inputs[layer])
        assert_same(states, own)


def test_a_block_needs_what_enters_it(tiny_a: LoadedModel, tiny_b: LoadedModel) -> None:
    tokens = list(tiny_b.tokenizer.encode("what enters a layer of the model, and what leaves it " * 3))
    source = source_of_snapshot(capture(tiny_a, tokens))
    with pytest.raises(IncompatibleError, match=r"entered layer 2 of tiny-a was not kept \(kept: none\)") as refused:
        transfer(source, tiny_b, recompute=Recompute(layers=(2, 4)))
    assert "--layer-input 2" in str(refused.value.hint)
    own = capture(tiny_b, tokens, layer_inputs=[2])
    given = replace(source, inputs=source_of_snapshot(own).inputs)
    found = transfer(given, tiny_b, recompute=Recompute(layers=(2, 4)))
    assert_same(found.states, own.states, range(2, 4))
    step = found.history[-1]
    assert step["layers"] == [2, 4] and "layers 2 to 3 recomputed" in step["note"] and set(step["seconds"]) == {"map", "recompute"}
