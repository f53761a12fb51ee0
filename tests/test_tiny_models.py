"""The two shipped models: size, tokenizer, retrieval over 1500 tokens, and the trials that measure it."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import load

from kvtool import tiny
from kvtool.model import LoadedModel
from kvtool.tiny.measure import held_out_loss, own_prefill
from kvtool.tiny.passkey import DIGITS, Trial, accuracy, by_depth, hits, make_trials

QUICK, FULL, SEED = 30, 400, 1
FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(params=tiny.NAMES)
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return request.getfixturevalue(request.param.replace("-", "_"))


@pytest.fixture(scope="module")
def trials(tiny_a: LoadedModel) -> list[Trial]:
    return make_trials(tiny_a.tokenizer, QUICK, seed=SEED)


def with_other_digits(prompt: list[int], old: list[int], new: list[int]) -> list[int]:
    """The prompt with its one run of ``old`` tokens replaced."""
    places = [i for i in range(len(prompt)) if prompt[i : i + len(old)] == old]
    assert len(places) == 1
    return prompt[: places[0]] + new + prompt[places[0] + len(old) :]


def test_paths_and_sizes() -> None:
    for name in tiny.NAMES:
        assert {p.name for p in tiny.path(name).iterdir()} == FILES
    assert sum(p.stat().st_size for name in tiny.NAMES for p in tiny.path(name).iterdir()) <= 12_000_000
    with pytest.raises(ValueError, match="tiny-c"):
        tiny.path("tiny-c")


def test_a_pair_of_different_models() -> None:
    """Same shape and tokenizer; another RoPE base and other weights, all stored in float16."""
    first, second = (json.loads((tiny.path(name) / "config.json").read_text("utf-8")) for name in tiny.NAMES)
    assert {key for key in first if first[key] != second[key]} == {"rope_theta", "rope_parameters"}
    assert first["model_type"] == "llama" and first["head_dim"] == 64 and first["tie_word_embeddings"] is True
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert len({(tiny.path(model) / name).read_bytes() for model in tiny.NAMES}) == 1
    a, b = (mx.load(str(tiny.path(name) / "model.safetensors")) for name in tiny.NAMES)
    assert isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys()
    for key, value in a.items():
        assert value.dtype == b[key].dtype == mx.float16
        assert not mx.array_equal(value, b[key]), key


def test_loads_through_mlx_lm_and_stops_at_end(loaded: LoadedModel) -> None:
    _, tokenizer = load(str(loaded.folder))[:2]
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [tokenizer.eos_token_id]
    assert tokenizer.eos_token_ids == {json.loads((loaded.folder / "config.json").read_text("utf-8"))["eos_token_id"]}
    assert tokenizer.encode("passkey", add_special_tokens=False) == tokenizer.encode("passkey")


@given(text=st.text() | st.text(alphabet=" \t\n\r\u00a0.'0123456789aé漢🙂") | st.sampled_from(["<|end|>", "a <|pad|>  b", " 12 345\n\n"]))
def test_any_text_round_trips(tiny_a: LoadedModel, text: str) -> None:
    ids = tiny_a.tokenizer.encode(text, add_special_tokens=False)
    assert tiny_a.tokenizer.decode(ids) == text
    assert all(0 <= i < 1024 for i in ids)


@given(digits=st.text(alphabet="0123456789", min_size=1, max_size=12), before=st.sampled_from(["", " ", "is ", "a"]))
def test_every_digit_is_a_token(tiny_a: LoadedModel, digits: str, before: str) -> None:
    encode = tiny_a.tokenizer.encode
    assert encode(before + digits, add_special_tokens=False) == encode(before, add_special_tokens=False) + [
        token for digit in digits for token in encode(digit, add_special_tokens=False)
    ]


def test_trials_are_exact_stratified_and_repeatable(tiny_a: LoadedModel, trials: list[Trial]) -> None:
    assert trials == make_trials(tiny_a.tokenizer, QUICK, seed=SEED)
    assert trials != make_trials(tiny_a.tokenizer, QUICK, seed=SEED + 1)
    assert {len(t.prompt_ids) for t in trials} == {1500}
    for trial in trials:
        assert len(trial.answer) == len(trial.answer_ids) == DIGITS
        assert tiny_a.tokenizer.decode(trial.answer_ids) == trial.answer
        with_other_digits(trial.prompt_ids, trial.answer_ids, trial.answer_ids)
        assert 0.0 <= trial.depth <= 1.0
    # One target depth in each of n ranges; the move to a sentence end is less than half the longest sentence.
    for i, depth in enumerate(sorted(t.depth for t in trials)):
        assert abs(depth - (i + 0.5) / QUICK) < 0.1
    rows = by_depth(trials, [True] * QUICK)
    assert sum(row.trials for row in rows) == QUICK and all(row.trials == row.correct > 0 for row in rows)
    assert len({t.answer for t in trials}) > 0.9 * QUICK


def test_trials_refuse_what_cannot_be_made(tiny_a: LoadedModel) -> None:
    for tokens in (10, 10**6):
        with pytest.raises(ValueError, match="filler tokens"):
            make_trials(tiny_a.tokenizer, 1, prompt_tokens=tokens, seed=0)
    with pytest.raises(ValueError, match="at least 1"):
        make_trials(tiny_a.tokenizer, 0, seed=0)


def test_scores_count_exact_answers_only(trials: list[Trial]) -> None:
    answers = {tuple(t.prompt_ids): t.answer_ids for t in trials}

    def last_digit_wrong(every: int) -> Callable[[list[int], int], Sequence[int]]:
        order = iter(range(len(trials)))

        def generate(prompt: list[int], n: int) -> list[int]:
            right = answers[tuple(prompt)]
            return right if next(order) % every else [*right[: n - 1], right[-1] + 1]

        return generate

    assert hits(trials[:4], last_digit_wrong(2)) == [False, True, False, True]
    assert accuracy(trials[:8], last_digit_wrong(4)) == 0.75
    with pytest.raises(ValueError, match="outcomes"):
        by_depth(trials, [True])


def test_passkeys_are_found(loaded: LoadedModel, trials: list[Trial]) -> None:
    right = hits(trials, own_prefill(loaded.model))
    assert sum(right) >= 0.95 * QUICK, by_depth(trials, right)


def test_the_answer_comes_from_the_prompt(loaded: LoadedModel, trials: list[Trial]) -> None:
    """With other digits in the prompt the models say those, so the trials measure retrieval and nothing else."""
    others = [token for digit in "90817" for token in loaded.tokenizer.encode(digit, add_special_tokens=False)]
    changed = [Trial(with_other_digits(t.prompt_ids, t.answer_ids, others), "90817", others, t.depth) for t in trials[:6]]
    generate = own_prefill(loaded.model)
    said = [generate(t.prompt_ids, DIGITS) for t in changed]
    assert sum(s == others for s in said) >= 5
    assert not any(s == t.answer_ids for s, t in zip(said, trials, strict=False))


def test_held_out_loss(loaded: LoadedModel) -> None:
    """A uniform guess costs 6.93 nats a token; the first 4096 tokens of the filler cost about 2.4."""
    nats, bits = held_out_loss(loaded.model, loaded.tokenizer, windows=2)
    assert nats < 2.7 and bits < 1.4


def test_filler_is_held_out_size() -> None:
    assert 150_000 <= len(tiny.filler_text().encode()) <= 300_000


def test_no_mlx_at_import() -> None:
    code = "import sys, kvtool.tiny, kvtool.tiny.passkey; sys.exit(any(m.split('.')[0] in ('mlx', 'mlx_lm') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_passkeys_are_found_in_all_trials(loaded: LoadedModel) -> None:
    full = make_trials(loaded.tokenizer, FULL, seed=SEED)
    right = hits(full, own_prefill(loaded.model))
    assert sum(right) >= 0.98 * FULL, by_depth(full, right)
    assert all(row.correct >= 0.95 * row.trials for row in by_depth(full, right))
