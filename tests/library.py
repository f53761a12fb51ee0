"""Loaded models around tiny random ones, and files whose manifest was changed by hand: what the tests of the library share."""

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from blake3 import blake3
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import kvtool
from formats.calibration import CalibrationFile
from formats.container import TensorPlan, open_container, write_container
from formats.manifest import ModelInfo, parse, to_json
from formats.model_info import IDENTITY
from kvtool.identity_config import config_of, quantisation_of
from kvtool.model import LoadedModel
from kvtool.moments import collect
from tests import tiny_random
from veloxquant_mlx.allocators.predictors import build_at
from veloxquant_mlx.allocators.transforms import build_tc

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class ByteTokenizer:
    """One token a character: its code point modulo the vocabulary. No special tokens."""

    has_chat_template = False
    eos_token_ids = frozenset({0})

    def __init__(self, size: int = tiny_random.VOCAB) -> None:
        self.size = size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) % self.size for c in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(i) for i in ids)

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(self.size)}


def weights_of(model: nn.Module) -> str:
    """A digest of a live model's weights, so that hand-made identities tell models apart as real ones do."""
    total = blake3()
    for name, weight in sorted(tree_flatten(model.parameters())):
        total.update(name.encode())
        total.update(np.array(weight.astype(mx.float32)).tobytes())
    return total.hexdigest()


def loaded(model: nn.Module, name: str = "tiny", dtype: str = "float32", tokenizer: str = "ab" * 32) -> LoadedModel:
    """A LoadedModel around a live model, with an identity of its own weights."""
    known: dict[str, Any] = {"identity": IDENTITY, "quantisation": quantisation_of(model), "config": config_of(model)}
    info = ModelInfo(name, "tiny", weights_of(model), tokenizer, dtype, tokenizer_state=tokenizer, **known)
    return LoadedModel(model, ByteTokenizer(), info, Path())


@functools.cache
def tiny(family: str, dtype: str = "float32", seed: int = 0) -> LoadedModel:
    """A tiny random model of a family of `tiny_random`, built once."""
    model = tiny_random.build(family, seed)
    if dtype != "float32":
        model.set_dtype(DTYPES[dtype])
        mx.eval(model.parameters())
    return loaded(model, f"{family}-{dtype}-{seed}", dtype)


def twin(family: str, name: str = "twin", seed: int = 0, **overrides: Any) -> LoadedModel:
    """The same weights under another config: other theta, pairing, window ..."""
    return loaded(tiny_random.build(family, seed, **overrides), name)


def ids(count: int, seed: int = 1) -> list[int]:
    return tiny_random.tokens(count, seed)[0].tolist()


def run(model: LoadedModel, cache: Sequence[Any], tokens: Sequence[int], plan: Iterable[int]) -> list[mx.array]:
    """Logits of each chunk of `plan`, one after the other."""
    logits, start = [], 0
    for count in plan:
        logits.append(model.model(mx.array(list(tokens[start : start + count]))[None], cache=list(cache)))
        mx.eval(logits[-1])
        start += count
    return logits


def fill(model: LoadedModel, tokens: Sequence[int], plan: Iterable[int] | None = None) -> list[Any]:
    """Fresh caches with these tokens in them, in chunks of `plan`."""
    cache = make_prompt_cache(model.model)
    run(model, cache, tokens, [len(tokens)] if plan is None else plan)
    return cache


def equal(a: Sequence[mx.array], b: Sequence[mx.array]) -> bool:
    return len(a) == len(b) > 0 and all(mx.array_equal(x, y).item() for x, y in zip(a, b, strict=True))


def f64(value: mx.array) -> np.ndarray:
    return np.array(value.astype(mx.float32)).astype(np.float64)


def saved(model: LoadedModel, path: Path, count: int = 24, **options: Any) -> Path:
    """A file of `count` random tokens run through a model."""
    kvtool.save(kvtool.capture(model, ids(count)), path, **options)
    return path


def rewrite(source: Path, target: Path, edit: Callable[[dict[str, Any]], None], tensors: dict[str, Any] | None = None) -> Path:
    """The file with its manifest's JSON edited and sealed again by the container's own writer; `tensors` replaces (dtype, array)s."""
    with open_container(source) as reader:
        manifest = json.loads(json.dumps(to_json(reader.manifest)))
        edit(manifest)
        held = {name: (info.dtype, reader.array(name)) for name, info in reader.tensors.items()} | (tensors or {})
        plans = [TensorPlan(name, dtype, array.shape, lambda a=array: a) for name, (dtype, array) in held.items()]
        write_container(target, parse(manifest), plans, compress=False)
    return target


def renamed(model: LoadedModel, **changes: Any) -> LoadedModel:
    """The same live model under another identity."""
    return replace(model, info=replace(model.info, **changes))


def digests(path: Path) -> dict[str, str]:
    """Tensor name -> digest of what is stored."""
    with open_container(path) as reader:
        return {name: info.blake3 for name, info in reader.tensors.items()}


def calibration_of(model: LoadedModel, tokens: Sequence[int], step: float = 0.02, recent: int = 32) -> CalibrationFile:
    """A calibration of a model from one text: tables for `tc`, and for `tcz` at one design step, without the search for a rate's."""
    moments = collect(model, {"text": list(tokens)}, length=len(tokens), recent=recent)
    chained = build_at(list(moments.layers.values()), step, 1.0)[0]
    tables = {
        "tc": {name: build_tc(rows).to_arrays() for name, rows in moments.layers.items()},
        "tcz-1": {name: own.to_arrays() for name, own in zip(moments.layers, chained, strict=True)},
    }
    return CalibrationFile(model.info, moments.texts, moments.tokens, tables, skipped=moments.skipped)
