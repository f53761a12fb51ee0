"""Every model file of mlx-lm: its row in the table of families is what a run of it gives, and a live model's layers get it."""

import copy
import functools
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.models import base, llama
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from tests import families as measured
from tests.tiny_random import NOT_BUILT, VOCAB, build, build_file, file_config, model_files, tokens
from veloxquant_mlx.caches import families, hook
from veloxquant_mlx.caches.blocks import Block, CodedRows
from veloxquant_mlx.caches.coded import CodedKVCache
from veloxquant_mlx.caches.families import CODES, DECODED, PARTS, REFUSED, SINKS, family, layers, named_modules, sink_files
from veloxquant_mlx.codecs import parse_codec

FILES = model_files()
BUILT = [name for name in FILES if name not in NOT_BUILT]
row = functools.cache(measured.measure)


def test_every_file_is_listed_once() -> None:
    assert sorted([*CODES, *DECODED, *REFUSED]) == FILES
    assert SINKS <= CODES
    assert set(hook.SINKS) == SINKS
    folder = Path(str(base.__file__)).parent
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} - set(FILES) == PARTS
    assert all({**DECODED, **REFUSED}.values())


@pytest.mark.parametrize("name", FILES)
def test_row(name: str) -> None:
    assert family(name) == (row(name).attention, row(name).reason), row(name).evidence
    assert (name in SINKS) == row(name).sinks


@pytest.mark.skipif(mlx_lm.__version__ != families.MLX_LM, reason=f"lines are those of mlx-lm {families.MLX_LM}")
def test_the_table_is_as_written() -> None:
    text = Path(families.__file__).read_text(encoding="utf-8")
    assert measured.written(text) == measured.render({name: row(name) for name in FILES}), "python -m tests.families --write"


@pytest.mark.parametrize("name", BUILT)
def test_layers_of_a_live_model(name: str) -> None:
    """Layers get the row of the file that they come from, which for a wrapper is another one than the model's."""
    model = build_file(name)
    caches = make_prompt_cache(model)
    assert len(layers(model)) == len(caches)
    for layer, cache in zip(layers(model), caches, strict=True):
        if isinstance(cache, KVCache | RotatingKVCache):
            assert (layer.attention, layer.reason) == family(name), layer.files
        else:
            assert layer.attention == "decoded" and layer.reason
    assert sink_files(model) == SINKS & {name}
    assert sorted((path, id(module)) for path, module in named_modules(model)) == sorted((p, id(m)) for p, m in model.named_modules())


def coded_and_decoded(cache: KVCache | RotatingKVCache) -> CodedKVCache:
    """The codes of a cache's rows, the first four exact; the rows themselves become the decoded ones."""
    rows = [mx.contiguous(x[0, :, : cache.offset]) for x in (cache.keys, cache.values)]
    plan = parse_codec("k=rvq-4,v=affine-4")
    exact = Block.exact(*(x[:, :4] for x in rows), 0)
    codes = [CodedRows.encoded(codec, x[:, 4:], 4) for codec, x in zip((plan.k, plan.v), rows, strict=True)]
    blocks = [exact, Block(*codes, cache.offset - 4, 4)]
    decoded = [mx.concatenate(pieces, axis=1)[None] for pieces in zip(*(block.rows() for block in blocks), strict=True)]
    cache.keys, cache.values = decoded
    return CodedKVCache(blocks, window=getattr(cache, "max_size", 0))


@pytest.mark.parametrize("name", sorted(CODES))
def test_codes_give_the_logits_of_decoded_rows(name: str) -> None:
    """A prefill of 24 tokens is coded; then 14 tokens at once, over the window, and two single ones."""
    ids = tokens(40)
    with measured.uncompiled():
        model = build_file(name)
        decoded = make_prompt_cache(model)
        mx.eval(model(ids[:, :24], cache=decoded))
        coded = copy.deepcopy(decoded)
        for i, cache in enumerate(decoded):
            if type(cache) in (KVCache, RotatingKVCache) and cache.offset:  # hunyuan's layers without KV have none
                coded[i] = coded_and_decoded(cache)
        assert any(isinstance(cache, CodedKVCache) for cache in coded)
        logits = [
            mx.concatenate([model(ids[:, start:stop], cache=caches)[..., :VOCAB] for start, stop in ((24, 38), (38, 39), (39, 40))], axis=1)
            for caches in (decoded, coded)
        ]
    # The same values, summed in another order in float32: at most 6e-6 of the logits' spread was measured, one row unseen makes 1e-1.
    assert mx.max(mx.abs(logits[0] - logits[1])).item() < 5e-5 * mx.std(logits[0]).item()


@pytest.mark.parametrize(
    ("name", "plain"), [("gear", {"attn_logit_softcapping": None}), ("gemma4_text", {"num_kv_shared_layers": 0})], ids=lambda x: str(x)
)
def test_a_model_without_what_its_row_is_for(name: str, plain: dict[str, object]) -> None:
    assert row(name).attention == "decoded"
    assert measured.measure(name, **plain) == measured.Row("codes")
    assert {layer.attention for layer in layers(build_file(name, **plain))} == {"codes"}


def test_a_wrapper_of_such_a_model() -> None:
    text = {**file_config("gemma4_text"), "num_kv_shared_layers": 0}
    assert measured.measure("gemma4", text_config=text) == measured.Row("codes")
    assert {layer.attention for layer in layers(build_file("gemma4", text_config=text))} == {"codes"}


def test_adapters_and_quantized_weights_change_nothing() -> None:
    model = build("llama", hidden_size=64)
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    assert {layer.attention for layer in layers(model)} == {"codes"}
    nn.quantize(
        model, group_size=32, bits=4, class_predicate=lambda _, module: type(module) is nn.Linear and module.weight.shape[1] % 32 == 0
    )
    assert {layer.attention for layer in layers(model)} == {"codes"}


def test_an_unknown_file_keeps_its_own_caches() -> None:
    class Attention(llama.Attention):
        """Of a file that mlx-lm does not have."""

    model = build("llama")
    model.layers[1].self_attn = Attention(model.args)
    first, second = layers(model)
    assert (first.attention, second.attention) == ("codes", "decoded")
    assert second.reason == f"not known: {__name__}"


def test_other_caches_keep_their_layers() -> None:
    got = layers(build("llama"), [KVCache(), QuantizedKVCache()])
    assert [(layer.attention, layer.reason) for layer in got] == [("codes", ""), ("decoded", "caches in QuantizedKVCache")]


def test_other_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = measured.attend
    monkeypatch.setattr(measured, "attend", lambda *rows, **options: attend(*rows, **options) * (1 + 2**-20))
    assert measured.measure("llama").evidence == "other logits"


def test_a_mask_that_is_ignored_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = measured.attend
    monkeypatch.setattr(measured, "attend", lambda *rows, **options: attend(*rows, **{**options, "mask": None}))
    assert measured.measure("qwen3").evidence == "other logits"


def test_opaque_rows_are_nothing_but_that() -> None:
    rows = measured.Opaque(mx.zeros((1, 2, 3, 4)))
    for name in ("shape", "dtype", "ndim", "astype", "swapaxes", "transpose", "__getitem__", "__matmul__", "__array__"):
        assert not hasattr(rows, name)
