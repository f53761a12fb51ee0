"""What eviction costs tiny-a: `python -m tests.measure_evicting` prints the table of passkeys answered and of KL to the whole cache.

Prompts are prefilled 256 tokens at a time. A passkey is asked for on what the cache then holds; KL(own || evicting) is the mean over the
128 tokens that follow 1024 of a text, teacher-forced one by one. Filters are from 512 tokens of another text.
"""

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import kvtool
from kvtool.evaluation import log_softmax
from kvtool.fisher import run_forward
from kvtool.model import LoadedModel
from kvtool.passkeys import passkey_trials, question_of
from kvtool.probe import probe_model
from tests.texts import text
from veloxquant_mlx.caches.evicting import EvictingCache, H2OCache, KeyformerCache, QFiltersCache, query_filters

TRIALS, PROMPT, STEP = 9, 1024, 256
BEFORE, AFTER = 1024, 128
Make = Callable[[], list[Any]]


def arms(model: LoadedModel, budget: int) -> dict[str, Make]:
    """Name -> what makes the caches of all layers."""
    probes = probe_model(model.model)
    names = [str(i) for i in range(len(probes))]
    ids = model.tokenizer.encode(text("technical"), add_special_tokens=False)[:512]
    layers = run_forward(model.model, ids, names).layers
    filters = [query_filters(layers[name].queries[0], layers[name].keys.shape[0]) for name in names]

    def of(policy: str, **shared: Any) -> Make:
        def make() -> list[EvictingCache]:
            found: list[EvictingCache] = []
            for i, probe in enumerate(probes):
                options = shared | ({"rope": probe.k.rope} if probe.k is not None and shared.get("renumber") else {})
                if policy == "h2o":
                    found.append(H2OCache(budget, **options))
                elif policy == "keyformer":
                    found.append(KeyformerCache(budget, seed=i, **options))
                else:
                    found.append(QFiltersCache(budget, filters[i], **options))
            return found

        return make

    made: dict[str, Make] = {}
    for policy in ("h2o", "keyformer", "qfilters"):
        made[policy] = of(policy)
        made[f"{policy} renumber"] = of(policy, renumber=True)
        made[f"{policy} rvq-4"] = of(policy, codec="rvq-4")
    return made


def prefilled(model: LoadedModel, make: Make, ids: list[int]) -> list[Any]:
    caches = make()
    for start in range(0, len(ids), STEP):
        model.model(mx.array(ids[start : start + STEP])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def passkeys(model: LoadedModel, make: Make) -> int:
    """Trials answered, every digit of the answer the most likely one."""
    right = 0
    for trial in passkey_trials(model, TRIALS, PROMPT):
        question = question_of(model, trial)
        caches = prefilled(model, make, trial.prompt_ids[: len(trial.prompt_ids) - len(question)])
        logits = model.model(mx.array([question + trial.answer_ids[:-1]]), cache=caches)[0, -len(trial.answer_ids) :]
        right += mx.argmax(logits, axis=-1).tolist() == trial.answer_ids
    return right


def log_probs(model: LoadedModel, make: Make, ids: list[int]) -> tuple[np.ndarray, int]:
    """(AFTER, V) of the tokens after the prefill, one forward each, and the bytes that the caches then take."""
    caches = prefilled(model, make, ids[:BEFORE])
    rows = [np.array(model.model(mx.array([[token]]), cache=caches)[0, 0]) for token in ids[BEFORE : BEFORE + AFTER]]
    return log_softmax(np.stack(rows).astype(np.float64)), sum(cache.nbytes for cache in caches)


def main() -> None:
    model = kvtool.load_model("tiny-a")
    ids = model.tokenizer.encode(text("prose"), add_special_tokens=False)

    def whole() -> list[Any]:
        return make_prompt_cache(model.model)

    own, size = log_probs(model, whole, ids)
    print(f"| cache | rows | passkeys of {TRIALS} | KL, nats | MB |\n|---|---|---|---|---|")
    print(f"| whole | all | {passkeys(model, whole)} | 0 | {size / 1e6:.2f} |", flush=True)
    for budget in map(int, sys.argv[1:] or ["512", "256", "128"]):
        for name, make in arms(model, budget).items():
            found, size = log_probs(model, make, ids)
            kl = float((np.exp(own) * (own - found)).sum(axis=-1).mean())
            print(f"| {name} | {budget} | {passkeys(model, make)} | {kl:.4f} | {size / 1e6:.2f} |", flush=True)


if __name__ == "__main__":
    main()
