"""Scores of a file's cache beside the model's own prefill, recomputed in float64 from the logits."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import kvtool
from formats.errors import IncompatibleError
from kvtool.evaluation import ARMS, CHUNK, continuation, log_softmax
from kvtool.model import LoadedModel
from tests.library import ByteTokenizer, f64, fill, ids, renamed, run, saved, tiny, twin

PREFIX, TEXT = 40, 30


def logp(model: LoadedModel, cache: list, tokens: list[int]) -> np.ndarray:
    """log p of the next token at each position, float64."""
    logits = f64(run(model, cache, tokens, [len(tokens)])[0][0])
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_raw_file_scores_as_the_own_prefill(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    report = kvtool.evaluate(saved(model, tmp_path / "a.kv", PREFIX), model, ids(TEXT, 3))
    own, transferred, none = (report.arm(name) for name in ("own", "transferred", "none"))
    assert (own.kl, own.kl_p99, own.top1) == (0.0, 0.0, 1.0)
    assert (transferred.kl, transferred.kl_p99, transferred.top1, transferred.nll) == (0.0, 0.0, 1.0, own.nll)
    assert none.kl > 0.01 and none.top1 < 1.0
    assert report.n == TEXT - 1 and report.prefix == (PREFIX if family == "llama" else PREFIX - 1)


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_scores_are_those_of_the_logits(family: str, tmp_path: Path) -> None:
    model, text = tiny(family), ids(TEXT, 3)
    path = saved(model, tmp_path / "a.kv", PREFIX, codec="rvq-2,sink=0,recent=0")
    report = kvtool.evaluate(path, model, text)
    usable = report.prefix
    fed, targets = text[:-1], np.array(text[1:])
    own = logp(model, fill(model, ids(PREFIX)[:usable], [usable - 1, 1]), fed)
    transferred = logp(model, kvtool.load(path, model, decode=True).cache, fed)
    arms = {"own": own, "transferred": transferred, "none": logp(model, fill(model, [], []), fed)}
    for name, other in arms.items():
        kl = (np.exp(own) * (own - other)).sum(-1)
        result = report.arm(name)
        # The same float32 logits, sums in float64.
        assert result.kl == pytest.approx(kl.mean(), rel=1e-9, abs=1e-12)
        assert result.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-9, abs=1e-12)
        assert result.nll == pytest.approx(-other[np.arange(TEXT - 1), targets].mean(), rel=1e-9)
        assert result.top1 == np.mean(other.argmax(-1) == own.argmax(-1))
        assert result.seconds >= 0
    assert 0 < report.arm("transferred").kl < report.arm("none").kl
    assert report.codecs == ("rvq",) and report.model == model.info.name and report.path == str(path)


def test_more_bits_are_closer(tmp_path: Path) -> None:
    model = tiny("qwen3")
    kls = [
        kvtool.evaluate(saved(model, tmp_path / "a.kv", PREFIX, codec=codec), model, ids(TEXT, 3), arms=("transferred",))
        .arm("transferred")
        .kl
        for codec in ("rvq-2,recent=0", "rvq-4,recent=0", "rvq-4+4,recent=0", "raw")
    ]
    assert kls == sorted(kls, reverse=True) and kls[-1] == 0.0 < kls[-2]


def test_long_texts_are_scored_in_chunks_that_change_nothing(tmp_path: Path) -> None:
    model = tiny("llama")
    text = ids(2 * CHUNK + 10, 3)
    path = saved(model, tmp_path / "a.kv", PREFIX, codec="rvq-2,sink=0,recent=0")
    seen: list[tuple[int, int]] = []
    report = kvtool.evaluate(path, model, text, tokens=10_000, progress=lambda *a: seen.append(a))
    assert report.n == len(text) - 1 and seen == [(CHUNK, report.n), (2 * CHUNK, report.n), (report.n, report.n)]
    own = logp(model, fill(model, ids(PREFIX)), text[:-1])
    other = logp(model, kvtool.load(path, model, decode=True).cache, text[:-1])
    # Other chunks: the same sums in another order, float32.
    assert report.arm("transferred").kl == pytest.approx((np.exp(own) * (own - other)).sum(-1).mean(), rel=1e-3)
    assert kvtool.evaluate(path, model, text, tokens=7).n == 7


def test_text_that_begins_with_the_prefix(tmp_path: Path) -> None:
    model = tiny("llama")
    prefix, more = ids(PREFIX), ids(TEXT, 3)
    path = saved(model, tmp_path / "a.kv", PREFIX)
    whole, rest = (kvtool.evaluate(path, model, t) for t in (prefix + more, more))
    assert (whole.n, whole.arm("own").nll) == (rest.n, rest.arm("own").nll) == (TEXT - 1, rest.arm("transferred").nll)
    assert continuation(model, prefix[:-1] + more, prefix) == prefix[:-1] + more
    assert continuation(model, prefix, prefix) == []
    text = "the same in letters"
    kvtool.save(kvtool.capture(model, text), path)
    assert kvtool.evaluate(path, model, text + " and on").n == kvtool.evaluate(path, model, " and on").n == 6


def test_no_beginning_of_text_in_the_middle(tmp_path: Path) -> None:
    class Begins(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1] * add_special_tokens + super().encode(text)

    model = replace(tiny("llama"), tokenizer=Begins())
    kvtool.save(kvtool.capture(model, "a prompt"), tmp_path / "a.kv")
    with kvtool.open(tmp_path / "a.kv") as archive:
        assert archive.tokens is not None and archive.tokens[0] == 1
        assert continuation(model, " goes on", archive.tokens) == continuation(model, "a prompt goes on", archive.tokens)
        assert 1 not in continuation(model, " goes on", archive.tokens)


@pytest.mark.parametrize("text", [[], [5], "", "x"])
def test_too_short_a_text(text: list[int] | str, tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="at least 2"):
        kvtool.evaluate(saved(model, tmp_path / "a.kv", 8), model, text)


def test_arms(tmp_path: Path) -> None:
    model, path = tiny("llama"), tmp_path / "a.kv"
    saved(model, path, 8)
    for arms, expected in (
        (ARMS, ["own", "transferred", "wrong", "none"]),
        (("none", "transferred", "own"), ["own", "transferred", "none"]),
        (("none",), ["own", "none"]),
        ((), ["own"]),
    ):
        report = kvtool.evaluate(path, model, ids(9, 3), arms=arms)
        assert [a.arm for a in report.arms] == expected == [a["arm"] for a in report.to_json()["arms"]]
    with pytest.raises(ValueError, match="worse"):
        kvtool.evaluate(path, model, ids(9, 3), arms=("own", "worse"))
    with pytest.raises(ValueError, match="ids 0 to 96"):
        kvtool.evaluate(path, model, [3, 97, 4])


def test_a_file_of_another_model_is_not_scored(tmp_path: Path) -> None:
    model, other = tiny("llama"), tiny("llama", seed=1)
    path = saved(model, tmp_path / "a.kv", PREFIX)
    with pytest.raises(IncompatibleError, match="computed by"):
        kvtool.evaluate(path, other, ids(TEXT, 3))
    report = kvtool.evaluate(path, other, ids(TEXT, 3), allow_mismatch=True)
    assert report.arm("transferred").kl > 0.01 and report.arm("own").kl == 0.0
    with pytest.raises(IncompatibleError, match="pairing"):
        kvtool.evaluate(path, renamed(twin("llama", rope_traditional=True), weights=model.info.weights), ids(TEXT, 3), allow_mismatch=True)


def test_an_open_archive_stays_open(tmp_path: Path) -> None:
    model = tiny("llama")
    with kvtool.open(saved(model, tmp_path / "a.kv", PREFIX)) as archive:
        first = kvtool.evaluate(archive, model, ids(TEXT, 3))
        second = kvtool.evaluate(archive, model, ids(TEXT, 3))
        assert [(a.nll, a.kl) for a in first.arms] == [(a.nll, a.kl) for a in second.arms]
        assert archive.state(0).rows == PREFIX


def test_log_softmax_holds_for_any_logits() -> None:
    logits = np.array([[1e4, -1e4, 0.0], [1e30, 1e30, -1e30], [-50.0, -50.0, -50.0]], np.float32)
    out = log_softmax(logits)
    assert out.dtype == np.float64 and np.allclose(np.exp(out).sum(-1), 1.0)
    assert out[0].tolist() == [0.0, -2e4, -1e4] and np.allclose(out[2], -np.log(3))
    assert mx.array(out).shape == (3, 3)
