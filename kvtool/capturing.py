"""Capture: a prompt run through a model once, and its KV cache as a plain value."""

import logging
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from jinja2.exceptions import TemplateError
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, CacheList, RotatingKVCache, make_prompt_cache

from formats.errors import IncompatibleError, counted
from formats.manifest import ModelInfo
from kvtool.hidden import inputs_taken
from kvtool.identifying import check_live
from kvtool.model import LoadedModel
from kvtool.probe import CacheProbe, probe_model
from kvtool.snapshot import take_states, unlimited
from kvtool.states import CacheState, check_against, length_of
from veloxquant_mlx.caches.coded import CodedKVCache

logger = logging.getLogger(__name__)

# mlx-lm's own prefill step: with the same chunks a captured cache equals mlx_lm.generate's bit for bit.
PREFILL_STEP = 2048


@dataclass(frozen=True)
class Snapshot:
    """One sequence's cache and where it came from.

    Attributes:
        model: identity of the model that computed it.
        tokens: the token ids it stands for, or None where they are unknown. May be one longer than `length`:
            the last token is then still to be run (caches that cannot be trimmed leave it so).
        length: tokens in the cache.
        states: one entry a layer, live rows only.
        probes: what the model's layers are (heads, dims, windows, live RoPE), one entry a layer.
        history: lossy steps that the rows have behind them, for the file's quality record.
        inputs: layer -> what entered it, (length, E), where that was asked for.
    """

    model: ModelInfo
    tokens: tuple[int, ...] | None
    length: int
    states: tuple[CacheState, ...]
    probes: tuple[CacheProbe, ...]
    history: tuple[dict[str, Any], ...] = ()
    inputs: Mapping[int, mx.array] = field(default_factory=dict)


def encode_prompt(model: LoadedModel, prompt: str, *, chat: bool = False) -> list[int]:
    """Token ids of a prompt.

    Args:
        model: gives the tokenizer.
        prompt: text.
        chat: wrap it as a user's message in the model's chat template, ready for the assistant's answer.
    Raises:
        ValueError: chat asked of a tokenizer without a template, or of one whose template refuses the message.
    """
    if not chat:
        return list(model.tokenizer.encode(prompt))
    if not model.tokenizer.has_chat_template:
        raise ValueError(f"[encode_prompt] {model.info.name} has no chat template; leave chat out.")
    messages = [{"role": "user", "content": prompt}]
    try:
        return list(model.tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    except TemplateError as error:
        raise ValueError(f"[encode_prompt] the chat template of {model.info.name} fails: {error}") from error


def capture(
    model: LoadedModel,
    prompt: str | Sequence[int] | None = None,
    *,
    cache: Sequence[Any] | None = None,
    tokens: Sequence[int] | None = None,
    row: int | None = None,
    chat: bool = False,
    layer_inputs: Collection[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Snapshot:
    """Run a prompt and keep its KV cache, or take over a cache that mlx-lm has already filled.

    Args:
        model: the model to run (or the one that filled `cache`).
        prompt: text or token ids to run. Leave out when `cache` is given.
        cache: live mlx-lm caches, one a layer (they are read, never changed), or the states of a prompt-cache file.
        tokens: with `cache`, the token ids it stands for (None where they are unknown).
        row: with `cache`, which sequence of a batch to take.
        chat: wrap a text prompt in the model's chat template.
        layer_inputs: with a prompt, layers whose inputs to keep too: what a model of the same shapes needs to run layers from there on.
        progress: called with (tokens done, tokens in all) during prefill.
    Returns:
        Snapshot
    Raises:
        ValueError: neither or both of prompt and cache, an empty prompt, ids outside the vocabulary, layer inputs that cannot be had.
        TypeError: ids that are not integers.
        IncompatibleError: the cache is not of this model's shape, has dropped rows that the model keeps, or does not fit the tokens.
    """
    if not isinstance(model, LoadedModel):
        raise TypeError(f"[capture] model must come from kvtool.load_model, but got {type(model).__name__}.")
    if (prompt is None) == (cache is None):
        raise ValueError("[capture] give either a prompt or a cache.")
    check_live(model.model, model.info)
    if cache is not None and layer_inputs:
        raise ValueError("[capture] layer_inputs go with a prompt: a cache does not hold what entered its layers.")
    probes = probe_model(model.model)
    history: tuple[dict[str, Any], ...] = ()
    inputs: dict[int, mx.array] = {}
    if cache is not None:
        history = _coded_before(cache)
        known = None if tokens is None else tuple(token_ids(tokens))
        check_ids(model, known or ())
        cache = unlimited(cache, probes)
        if all(isinstance(c, CacheState) for c in cache):
            states = tuple(cache)
        else:
            states = tuple(unlimited(take_states(cache, row=row, length=_recurrent_length(cache, known)), probes))
    else:
        assert prompt is not None
        ids = encode_prompt(model, prompt, chat=chat) if isinstance(prompt, str) else token_ids(prompt)
        if not ids:
            raise ValueError("[capture] the prompt has no tokens.")
        check_ids(model, ids)
        known = tuple(ids)
        part = cached_part(model, len(ids))
        with inputs_taken(model, layer_inputs) as taken:
            states = take_states(prefill(model, ids[:part], progress=progress), length=part)
        inputs = {layer: mx.concatenate(parts) for layer, parts in taken.items()}
        mx.eval(inputs)
    check_against(states, probes)
    length = length_of(states)
    if known is not None and len(known) not in (length, length + 1):
        raise IncompatibleError(
            f"{model.info.name}: the cache holds {counted(length, 'token')}, but {len(known)} token ids were given",
            hint="give the ids of exactly the tokens in the cache",
        )
    return Snapshot(model.info, known, length, states, probes, history, inputs)


def _coded_before(cache: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    """The lossy step behind rows that live as codes, with the layers that have them; what it cost is no longer known."""
    coded = {i: c.specs() for i, c in enumerate(cache) if isinstance(c, CodedKVCache) and c.specs()}
    if not coded:
        return ()
    specs = sorted(set().union(*coded.values()))
    return (
        {"step": "live", "codec": "; ".join(specs), "layers": list(coded), "note": "later steps count their error from the decoded rows"},
    )


def token_ids(ids: Any) -> list[int]:
    """Token ids as plain integers, from a sequence or an array.

    Raises:
        TypeError: one is not an integer (nothing is rounded), or the array has more than one axis.
    """
    if isinstance(ids, bytes | bytearray) or (isinstance(ids, mx.array | np.ndarray) and ids.ndim != 1):
        raise TypeError(f"[capture] token ids must be a sequence of integers, but got {type(ids).__name__} {getattr(ids, 'shape', '')}.")
    if isinstance(ids, list | tuple) and set(map(type, ids)) <= {int}:
        return list(ids)
    plain: list[Any] = [t.item() if isinstance(t, mx.array) and t.ndim == 0 else t for t in ids]
    wrong = [t for t in plain if isinstance(t, bool | np.bool_) or not isinstance(t, int | np.integer)]
    if wrong:
        raise TypeError(f"[capture] token ids must be integers, but one is {wrong[0]!r:.80}.")
    return [int(t) for t in plain]


# Tokenizer -> how many tokens it had, and its largest id and one.
_IDS: "weakref.WeakKeyDictionary[Any, tuple[int, int]]" = weakref.WeakKeyDictionary()


def vocabulary(model: LoadedModel) -> int:
    """Number of token ids that the tokenizer knows and the model can embed: an index past its table would read foreign memory."""
    known = _ids_of(model.tokenizer)
    rows = getattr(getattr(model.model, "args", None), "vocab_size", None)
    return min(known, rows) if isinstance(rows, int) else known


def _ids_of(tokenizer: Any) -> int:
    """The largest id and one, as a vocabulary may have gaps. Kept while the tokenizer has as many tokens, where it says how many: its
    dictionary is made anew whenever it is asked for, of a hundred thousand tokens in a tenth of a second."""
    keeps = isinstance(tokenizer, Sized) and isinstance(tokenizer, Hashable) and hasattr(tokenizer, "__weakref__")
    count = len(tokenizer) if keeps else 0
    if keeps and (kept := _IDS.get(tokenizer, (-1, 0)))[0] == count:
        return kept[1]
    ids = max(tokenizer.get_vocab().values(), default=-1) + 1
    if keeps:
        _IDS[tokenizer] = count, ids
    return ids


def check_ids(model: LoadedModel, ids: Sequence[int]) -> None:
    """Raise ValueError where a token id lies outside the model's vocabulary."""
    size = vocabulary(model)
    if not ids or (min(ids) >= 0 and max(ids) < size):
        return
    wrong = next(((i, t) for i, t in enumerate(ids) if not 0 <= t < size), None)
    if wrong is not None:
        raise ValueError(f"[capture] token {wrong[0]} is {wrong[1]}, but {model.info.name} has ids 0 to {size - 1}.")


def prefill(model: LoadedModel, ids: Sequence[int], *, progress: Callable[[int, int], None] | None = None) -> list[Any]:
    """Fresh mlx-lm caches with all of `ids` in them, filled in mlx-lm's own chunks.

    Args:
        model: the model to run.
        ids: token ids; none leaves the caches empty.
        progress: called with (tokens done, tokens in all).
    """
    cache = make_prompt_cache(model.model)
    if ids:
        prompt = mx.array(list(ids))
        steps = generate_step(
            prompt, model.model, max_tokens=0, prompt_cache=cache, prefill_step_size=PREFILL_STEP, prompt_progress_callback=progress
        )
        for _ in steps:
            pass
    mx.eval([c.state for c in cache])
    mx.clear_cache()
    return cache


def cached_part(model: LoadedModel, length: int) -> int:
    """How many of `length` tokens to put in the cache: all, or all but the last where a cache could not give the last one back.

    A continuation without a new prompt has to run the last token again to get its logits.
    """
    return length if all(_trimmable(c, length) for c in make_prompt_cache(model.model)) else length - 1


def _recurrent_length(cache: Sequence[Any], tokens: tuple[int, ...] | None) -> int | None:
    """Tokens seen by caches that do not count them (recurrent layers alone), where the ids tell."""
    return len(tokens) if tokens is not None and all(isinstance(c, ArraysCache) for c in cache) else None


def _trimmable(cache: Any, length: int) -> bool:
    """Whether one token can be taken back from this cache once it holds `length`."""
    if isinstance(cache, CacheList):
        return all(_trimmable(c, length) for c in cache.caches)
    if isinstance(cache, RotatingKVCache):
        return length < cache.max_size
    return not isinstance(cache, ArraysCache) and cache.is_trimmable()
