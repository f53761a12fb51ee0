"""Measure what each model file of mlx-lm does with the keys and values that its cache returns, for veloxquant_mlx/caches/families.py.

    python -m tests.families            # print the rows
    python -m tests.families --write    # and write them

A tiny random model of each file runs on caches that return opaque objects. What its attention may do with them is what it may do with
handles on codes: pass them on to the replaced function. Anything else raises, and the line that did is the row's evidence.
"""

import json
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from textwrap import wrap
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from tests.tiny_random import NOT_BUILT, VOCAB, build_file, model_files, tokens
from veloxquant_mlx.caches import families

# A prefill longer than the window, several tokens onto what is there, and two of one token.
EXPECTED = (TypeError, AttributeError, ValueError)
CUTS = (0, 24, 38, 39, 40)
TARGET = Path(families.__file__)
OPEN, CLOSE = "# <rows>\n", "# </rows>\n"

# Why a file's attention is not for codes: what the line that failed means.
REASONS = {
    **dict.fromkeys(
        ("bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "glm4_moe_lite", "kimi_k25", "kimi_k3", "kimi_linear", "kimi_vl", "mistral4"),
        "latent attention: multiplies the cached latent rows and rotated keys itself",
    ),
    "afm7": "later layers attend to keys and values read from another layer's cache",
    "gear": "its own softmax, over capped scores",
    "gemma2": "its own softmax, over capped scores",
    "gemma3n": "later layers attend to keys and values read from another layer's cache",
    "gemma4": "later layers attend to another layer's keys and values without its cache",
    "gemma4_text": "later layers attend to another layer's keys and values without its cache",
    "olmo": "adds the mask, the word causal, to its scores: it cannot take two tokens",
    "phi": "gives its output the dtype of the cached values",
    "phi3small": "its own block-sparse attention",
    "phixtral": "gives its output the dtype of the cached values",
    "plamo": "repeats keys and values for the heads that share them",
    "plamo2": "calls mx.fast.scaled_dot_product_attention itself",
    "plamo3": "prefills with masks that see one row more than its sliding layers keep",
    "stablelm": "turns keys into float32",
}


class Opaque:
    """An array that only `held` gives back."""

    __slots__ = ("held",)

    def __init__(self, held: mx.array) -> None:
        self.held = held


class OpaqueCache:
    """A KVCache or a RotatingKVCache that looks to mlx-lm's attention like one of codes; its rows leave by `update_and_fetch` alone."""

    bits = 8
    group_size = 64

    def __init__(self, inner: KVCache | RotatingKVCache) -> None:
        self.inner = inner

    @property
    def offset(self) -> int:
        return self.inner.offset

    def make_mask(self, count: int, *, return_array: bool = False, window_size: int | None = None) -> Any:
        # A cache of codes applies the window of its layer itself, so masks must not mean another one.
        if isinstance(self.inner, RotatingKVCache) and window_size not in (None, self.inner.max_size):
            raise ValueError(f"the mask's window is {window_size}, the cache's {self.inner.max_size}")
        return self.inner.make_mask(count, return_array=return_array, window_size=window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Opaque, Opaque]:
        keys, values = self.inner.update_and_fetch(keys, values)
        return Opaque(keys), Opaque(values)


@dataclass(frozen=True)
class Row:
    """What a file's attention gets, why, and the line of it that says so; `sinks`: only its own name for base's function takes sinks."""

    attention: families.Attention
    reason: str = ""
    evidence: str = ""
    sinks: bool = False


def opaque(caches: Sequence[Any]) -> list[Any]:
    """Opaque caches in place of every KVCache and RotatingKVCache."""
    return [OpaqueCache(cache) if type(cache) in (KVCache, RotatingKVCache) else cache for cache in caches]


def attend(queries: mx.array, keys: Opaque, values: Opaque, scale: float, mask: Any, group_size: int, bits: int) -> mx.array:
    """In place of base.quantized_scaled_dot_product_attention: the attention of the arrays themselves, hence the plain model's logits."""
    return mx.fast.scaled_dot_product_attention(queries, keys.held, values.held, scale=scale, mask=mask)


def attend_with_sinks(queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> mx.array:
    """In place of a file's own scaled_dot_product_attention."""
    if isinstance(keys, Opaque):
        keys, values = keys.held, values.held
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def run(model: nn.Module, caches: Sequence[Any]) -> list[mx.array]:
    """Logits of each forward of two rows; the first VOCAB, as phi3small has -inf further on."""
    ids = mx.concatenate([tokens(CUTS[-1], seed) for seed in (0, 1)])
    logits = [model(ids[:, start:end], cache=caches)[..., :VOCAB] for start, end in pairwise(CUTS)]
    mx.eval(logits)
    return logits


def measure(name: str, **overrides: Any) -> Row:
    """The row of a model file, from runs of a tiny model (`overrides` of its config) on its own caches and on opaque ones."""
    if name in NOT_BUILT:
        return Row("decoded", f"not measured: {NOT_BUILT[name]}")
    with uncompiled():
        model = build_file(name, **overrides)
        try:
            plain = run(model, make_prompt_cache(model))
        except EXPECTED as error:
            return Row("refused", REASONS.get(name, ""), failed_at(error))
        caches = opaque(make_prompt_cache(model))
        if not any(hasattr(cache, "bits") for cache in caches):
            return Row("decoded", f"caches in {' and '.join(sorted({type(cache).__name__ for cache in caches}))}")
        with patch.object(base, "quantized_scaled_dot_product_attention", attend):
            try:
                coded = run(model, caches)
            except EXPECTED as error:
                if "attention sinks" not in str(error):
                    return Row("decoded", REASONS.get(name, ""), failed_at(error))
            else:
                return row_of(name, plain, coded)
            # Base's function refuses sinks before it looks further, so the file's own name for it is replaced.
            with patch.object(sys.modules[f"mlx_lm.models.{name}"], "scaled_dot_product_attention", attend_with_sinks):
                return row_of(name, plain, run(model, opaque(make_prompt_cache(model))), sinks=True)


def row_of(name: str, plain: list[mx.array], coded: list[mx.array], sinks: bool = False) -> Row:
    """The same operation on the same arrays, so no bit may differ."""
    if all(mx.array_equal(a, b).item() for a, b in zip(plain, coded, strict=True)):
        return Row("codes", sinks=sinks)
    return Row("decoded", REASONS.get(name, ""), "other logits")


def failed_at(error: Exception) -> str:
    """The last line of a model file that an exception came through, and its class."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent.name == "models"]
    frame = [frame for frame in frames if Path(frame.filename).stem not in families.PARTS][-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line} -> {type(error).__name__}"


@contextmanager
def uncompiled() -> Iterator[None]:
    """Without mx.compile: building its kernels takes seconds a model, running these models takes milliseconds."""
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def render(rows: dict[str, Row]) -> str:
    """The rows as the Python that stands in veloxquant_mlx/caches/families.py."""

    def names(chosen: Iterable[str]) -> str:
        lines = wrap(", ".join(json.dumps(name) for name in chosen), 128, break_on_hyphens=False, break_long_words=False)
        return "frozenset([\n" + "".join(f"    {line}\n" for line in lines) + "])\n"

    def reasons(kind: str) -> str:
        lines = []
        for name, row in rows.items():
            if row.attention == kind:
                lines += [f"    # {row.evidence}\n"] if row.evidence else []
                lines.append(f"    {json.dumps(name)}: {json.dumps(row.reason)},\n")
        return "{\n" + "".join(lines) + "}\n"

    return (
        f"# Written by `python -m tests.families --write` from tiny models of {len(rows) - len(NOT_BUILT)} files.\n"
        "# A comment is the line that failed.\n"
        "# fmt: off\n"
        f"MLX_LM = {json.dumps(mlx_lm.__version__)}\n"
        f"CODES = {names(name for name, row in rows.items() if row.attention == 'codes')}"
        f"SINKS = {names(name for name, row in rows.items() if row.sinks)}"
        f"DECODED = {reasons('decoded')}"
        f"REFUSED = {reasons('refused')}"
        "# fmt: on\n"
    )


def written(text: str) -> str:
    """What stands between the two marks of veloxquant_mlx/caches/families.py."""
    return text[text.index(OPEN) + len(OPEN) : text.index(CLOSE)]


def main() -> None:
    rows = {name: measure(name) for name in model_files()}
    if "--write" in sys.argv[1:]:
        text = TARGET.read_text(encoding="utf-8")
        TARGET.write_text(text.replace(written(text), render(rows)), encoding="utf-8")
    else:
        sys.stdout.write(render(rows))


if __name__ == "__main__":
    main()
