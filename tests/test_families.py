"""Every model file of mlx-lm: its row in the table of families is what a run of it gives, and a live model's layers get it."""

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
from tests.tiny_random import NOT_BUILT, build, build_file, file_config, model_files
from veloxquant_mlx.caches import families
from veloxquant_mlx.caches.families import CODES, DECODED, PARTS, REFUSED, SINKS, family, layers, sink_files

FILES = model_files()
BUILT = [name for name in FILES if name not in NOT_BUILT]
row = functools.cache(measured.measure)


def test_every_file_is_listed_once() -> None:
    assert sorted([*CODES, *DECODED, *REFUSED]) == FILES
    assert SINKS <= CODES
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
