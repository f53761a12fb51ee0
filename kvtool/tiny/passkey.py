"""Passkey retrieval trials on the held-out filler text, and how to score them.

A trial hides one sentence with five random digits in a long stretch of prose, asks for them at the end, and counts
as right only if all five generated tokens are the five digits. Scoring takes any ``generate(prompt_ids, n_tokens)``,
so a model's own prefill and an imported cache are measured with the same trials.
"""

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from kvtool.tiny import filler_text

DIGITS = 5
NAMES: tuple[str, ...] = ("Ada", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ivy", "Jack", "Karen", "Louis")
# (sentence hidden in the filler, question at the end of the prompt); each starts with a blank, the question also ends
# with one, so that the tokens that follow are the digits alone.
TEMPLATES: tuple[tuple[str, str], ...] = (
    (" The passkey is {value}. Remember it.", " What is the passkey? The passkey is "),
    (" The key for {name} is {value}.", " What is the key for {name}? The key for {name} is "),
    (" Remember that the access code is {value}.", " What is the access code? The access code is "),
)


class Encoder(Protocol):
    """The part of a tokenizer that is needed here (transformers' and mlx-lm's tokenizers have it)."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of ``text``."""
        ...


Generate = Callable[[list[int], int], Sequence[int]]


@dataclass(frozen=True)
class Trial:
    """One retrieval question; ``depth`` is the share of the filler that stands before the hidden sentence."""

    prompt_ids: list[int]
    answer: str
    answer_ids: list[int]
    depth: float


@dataclass(frozen=True)
class DepthScore:
    """Trials with ``low <= depth < high`` (the last range includes its upper end) and how many were right."""

    low: float
    high: float
    trials: int
    correct: int


def make_trials(tokenizer: Encoder, n: int, *, prompt_tokens: int = 1500, seed: int) -> list[Trial]:
    """Build ``n`` trials with prompts of exactly ``prompt_tokens`` tokens, the same ones for the same arguments.

    Trial depths are drawn one from each of ``n`` equal ranges of [0, 1] and then moved to the nearest end of a
    sentence; their order is random. The prompt's first word may be cut, since the filler's length is made exact there.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    rng = random.Random(seed)
    sentences = [tokenizer.encode(part, add_special_tokens=False) for part in re.split(r"(?<=[.!?])(?=\s)", filler_text())]
    filler = [token for sentence in sentences for token in sentence]
    ends = list(accumulate(len(sentence) for sentence in sentences))
    strata = list(range(n))
    rng.shuffle(strata)
    trials = []
    for number, stratum in enumerate(strata):
        hidden, question = TEMPLATES[number % len(TEMPLATES)]
        name, answer = rng.choice(NAMES), "".join(rng.choices("0123456789", k=DIGITS))
        needle_ids = tokenizer.encode(hidden.format(name=name, value=answer), add_special_tokens=False)
        question_ids = tokenizer.encode(question.format(name=name), add_special_tokens=False)
        answer_ids = tokenizer.encode(answer, add_special_tokens=False)
        if len(answer_ids) != DIGITS:
            raise ValueError(f"the tokenizer makes {len(answer_ids)} tokens of {DIGITS} digits; it must make one of each")
        length = prompt_tokens - len(needle_ids) - len(question_ids)
        if length < 1 or length > len(filler):
            raise ValueError(f"prompt_tokens={prompt_tokens} leaves {length} filler tokens; there are {len(filler)}")
        end = rng.choice(ends[bisect_left(ends, length) :])
        start = end - length
        target = start + round((stratum + rng.random()) / n * length)
        cuts = [start, *(cut for cut in ends if start < cut < end), end]
        cut = min(cuts, key=lambda at: abs(at - target))
        prompt = filler[start:cut] + needle_ids + filler[cut:end] + question_ids
        trials.append(Trial(prompt, answer, answer_ids, (cut - start) / length))
    return trials


def hits(trials: Sequence[Trial], generate: Generate) -> list[bool]:
    """Whether each trial's generated tokens are exactly its answer's."""
    return [list(generate(trial.prompt_ids, len(trial.answer_ids))) == trial.answer_ids for trial in trials]


def accuracy(trials: Sequence[Trial], generate: Generate) -> float:
    """The share of ``trials`` that ``generate`` answers exactly."""
    return sum(hits(trials, generate)) / len(trials)


def by_depth(trials: Sequence[Trial], right: Sequence[bool], ranges: int = 10) -> list[DepthScore]:
    """Group the outcome of `hits` into ``ranges`` equal ranges of depth."""
    if len(trials) != len(right):
        raise ValueError(f"{len(trials)} trials, but {len(right)} outcomes")
    total, correct = [0] * ranges, [0] * ranges
    for trial, ok in zip(trials, right, strict=True):
        where = min(int(trial.depth * ranges), ranges - 1)
        total[where] += 1
        correct[where] += ok
    return [DepthScore(i / ranges, (i + 1) / ranges, total[i], correct[i]) for i in range(ranges)]
