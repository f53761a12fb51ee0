"""Passkeys: how many retrieval trials of the shipped models a codec's cache still answers.

The prompt with the passkey in it is in the cache, encoded and decoded once (the prefix protocol); the question is asked on it. Trials are
those of `kvtool.tiny.passkey`.
"""

from collections.abc import Callable, Sequence
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


def check_passkeys(model: LoadedModel) -> None:
    """Raise ValueError where a model was not trained on passkeys."""
    if model.info.name not in tiny.NAMES:
        raise ValueError(
            f"[sweep] passkeys must be 0 for {model.info.name}, which has no passkey task; {' and '.join(tiny.NAMES)} have one."
        )


def passkey_shares(
    model: LoadedModel,
    trips: Sequence[Callable[[], Roundtrip]],
    n: int,
    *,
    prompt_tokens: int = PROMPT,
    calibration: Calibration | None = None,
    progress: Callable[[], None] | None = None,
) -> list[float | None]:
    """The share of n trials that each codec's cache answers with all five digits; None where the codec refused its input.

    Args:
        model: one of the shipped models.
        trips: makes a fresh round trip of each codec.
        n: trials, the same ones for every codec.
        prompt_tokens: of each trial, question included.
        calibration: tables for calibrated codecs, or None to learn them from each trial's cache.
        progress: called after each trial.
    """
    check_passkeys(model)
    probes = probe_model(model.model)
    right, failed = [0] * len(trips), [False] * len(trips)
    for trial in make_trials(model.tokenizer, n, prompt_tokens=prompt_tokens, seed=SEED):
        question = question_of(model, trial)
        told = len(trial.prompt_ids) - len(question)
        states = take_states(prefill(model, trial.prompt_ids[:told]), length=told)
        for i, make in enumerate(trips):
            trip = make()
            trip = bound_trip(trip, states, probes, calibration, partial(own_moments, model, trial.prompt_ids[:told], trip.plan))
            caches = build_caches(coded_states(states, probes, trip))
            right[i] += _greedy(model, caches, question, len(trial.answer_ids)) == trial.answer_ids
            failed[i] |= trip.failed
        if progress is not None:
            progress()
    return [None if bad else count / n for count, bad in zip(right, failed, strict=True)]


def question_of(model: LoadedModel, trial: Trial) -> list[int]:
    """The tokens of a trial's question, with which its prompt ends."""
    asked = (model.tokenizer.encode(question.format(name=name), add_special_tokens=False) for _, question in TEMPLATES for name in NAMES)
    return list(next(ids for ids in asked if trial.prompt_ids[-len(ids) :] == ids))


def _greedy(model: LoadedModel, caches: list[Any], ids: list[int], n: int) -> list[int]:
    made: list[int] = []
    step = ids
    while len(made) < n:
        best: Any = mx.argmax(model.model(mx.array([step]), cache=caches)[0, -1])
        step = [best.item()]
        made += step
    return made
