"""Measure the shipped models: passkey accuracy by depth and held-out loss, through mlx-lm.

Usage: ``python -m kvtool.tiny.measure --trials 400``

Weights are run in float32. On a Linux CPU, OpenBLAS is put in front of MLX's own BLAS where the system has it.
"""

import argparse
import math
import time
from typing import Any

from kvtool.blas import use_openblas
from kvtool.tiny import NAMES, filler_text, path
from kvtool.tiny.passkey import Generate, by_depth, hits, make_trials

use_openblas()  # Only works before MLX is loaded, so the imports below come after it.

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

WINDOW = 2048


def load_float32(name: str) -> tuple[Any, Any]:
    """The mlx-lm model (in float32) and tokenizer called ``name``."""
    model, tokenizer = load(str(path(name)))[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


def own_prefill(model: Any) -> Generate:
    """Greedy generation by ``model`` from a cache that it fills itself."""

    def generate(prompt_ids: list[int], n_tokens: int) -> list[int]:
        cache = make_prompt_cache(model)
        step = prompt_ids
        made: list[int] = []
        while len(made) < n_tokens:
            best: Any = mx.argmax(model(mx.array([step]), cache=cache)[0, -1])
            step = [best.item()]
            made += step
        return made

    return generate


def held_out_loss(model: Any, tokenizer: Any, windows: int | None = None) -> tuple[float, float]:
    """Loss on the filler as (nats a token, bits a byte), over its first ``windows`` whole windows of 2048 tokens (all by default)."""
    text = filler_text()
    ids = tokenizer.encode(text, add_special_tokens=False)
    starts = range(0, len(ids) - WINDOW, WINDOW)[:windows]
    total = 0.0
    for at in starts:
        window = mx.array([ids[at : at + WINDOW + 1]])
        loss: Any = nn.losses.cross_entropy(model(window[:, :-1]), window[:, 1:], reduction="sum")
        total += loss.item()
    nats = total / (len(starts) * WINDOW)
    return nats, nats / math.log(2) * len(ids) / len(text.encode())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtool.tiny.measure", description="Passkey accuracy and held-out loss of the tiny models."
    )
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    args = parser.parse_args()
    for name in args.models:
        model, tokenizer = load_float32(name)
        nats, bits = held_out_loss(model, tokenizer)
        print(f"{name}: held-out loss {nats:.4f} nats a token, {bits:.4f} bits a byte", flush=True)
        trials = make_trials(tokenizer, args.trials, prompt_tokens=args.prompt_tokens, seed=args.seed)
        begin = time.monotonic()
        right = hits(trials, own_prefill(model))
        took = time.monotonic() - begin
        print(f"{name}: {sum(right)} of {len(right)} passkeys right in prompts of {args.prompt_tokens} tokens ({took:.0f} s)")
        for row in by_depth(trials, right):
            print(f"  depth {row.low:.1f}-{row.high:.1f}: {row.correct} of {row.trials}", flush=True)


if __name__ == "__main__":
    main()
