"""Passkeys: how many retrieval trials of the shipped models a codec's cache still answers.

The prompt with the passkey in it is in the cache, encoded and decoded once (the prefix protocol); the question is asked on it. Trials are
those of `kvtool.tiny.passkey`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from kvtool import tiny
from kvtool.arms import bound_trip, coded_states
from kvtool.binding import own_moments
from kvtool.calibrations import Calibration
from kvtool.capturing import prefill
from kvtool.model import LoadedModel
from kvtool.probe import probe_model
from kvtool.roundtrip import Roundtrip
from kvtool.snapshot import build_caches, take_states
from kvtool.tiny.passkey import NAMES, TEMPLATES, Trial, make_trials

SEED, PROMPT = 1, 1500


@dataclass
class Answers:
    """What one codec's caches answered.

    Attributes:
        asked, right: trials, and those answered with all five digits.
        coded_bytes, coded_values, exact_bytes, exact_values: of all trials' caches, as in `Roundtrip`.
        refused: what the codec refused of its input; None where it took all.
    """

    asked: int = 0
    right: int = 0
    coded_bytes: int = 0
    coded_values: int = 0
    exact_bytes: int = 0
    exact_values: int = 0
    refused: str | None = None

    @property
    def share(self) -> float | None:
        """Of the trials that were answered; None where the codec refused its input."""
        return None if self.refused is not None else self.right / self.asked

    def add(self, trip: Roundtrip, right: bool) -> None:
        """Count one trial."""
        self.asked += 1
        self.right += right
        for name in ("coded_bytes", "coded_values", "exact_bytes", "exact_values"):
            setattr(self, name, getattr(self, name) + getattr(trip, name))
        if trip.failed and self.refused is None:
            self.refused = trip.problems[-1]


def check_passkeys(model: LoadedModel) -> None:
    """Raise ValueError where a model was not trained on passkeys."""
    if model.info.name not in tiny.NAMES:
        raise ValueError(
            f"[sweep] passkeys must be 0 for {model.info.name}, which has no passkey task; {' and '.join(tiny.NAMES)} have one."
        )


def passkey_trials(model: LoadedModel, n: int, prompt_tokens: int = PROMPT) -> list[Trial]:
    """The n trials that every codec is asked; prompts of so many tokens, question included."""
    check_passkeys(model)
    return make_trials(model.tokenizer, n, prompt_tokens=prompt_tokens, seed=SEED)


def ask(
    model: LoadedModel,
    trips: Sequence[Callable[[], Roundtrip]],
    trials: Sequence[Trial],
    *,
    calibration: Calibration | None = None,
    progress: Callable[[], None] | None = None,
) -> list[Answers]:
    """What each codec's cache answers to the same trials.

    Args:
        model: one of the shipped models.
        trips: makes a fresh round trip of each codec.
        trials: of `passkey_trials`.
        calibration: tables for calibrated codecs, or None to learn them from each trial's cache.
        progress: called after each trial.
    """
    probes, found = probe_model(model.model), [Answers() for _ in trips]
    for trial in trials:
        question = question_of(model, trial)
        told = len(trial.prompt_ids) - len(question)
        states = take_states(prefill(model, trial.prompt_ids[:told]), length=told)
        for make, answers in zip(trips, found, strict=True):
            trip = make()
            trip = bound_trip(trip, states, probes, calibration, partial(own_moments, model, trial.prompt_ids[:told], trip.plan))
            caches = build_caches(coded_states(states, probes, trip))
            answers.add(trip, _answers(model, caches, question, trial.answer_ids))
        if progress is not None:
            progress()
    return found


def question_of(model: LoadedModel, trial: Trial) -> list[int]:
    """The tokens of a trial's question, with which its prompt ends."""
    asked = (model.tokenizer.encode(question.format(name=name), add_special_tokens=False) for _, question in TEMPLATES for name in NAMES)
    return list(next(ids for ids in asked if trial.prompt_ids[-len(ids) :] == ids))


def _answers(model: LoadedModel, caches: list[Any], question: list[int], answer: list[int]) -> bool:
    """Whether greedy generation gives the answer: each of its tokens is the most likely one after those before it."""
    logits = model.model(mx.array([question + answer[:-1]]), cache=caches)[0, -len(answer) :]
    return mx.argmax(logits, axis=-1).tolist() == answer
