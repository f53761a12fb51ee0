"""Models of a given shape: `LxHxD` is L layers of H key and value heads of D entries, in float16; all else is small and random.

Files depend on nothing else of a model, so that the cache of a large one can be saved and loaded without its weights.
"""

import re
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import llama

from formats.manifest import ModelInfo
from kvtool.model import LoadedModel, load_model

SHAPE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})x([1-9]\d{0,3})")
HIDDEN, VOCABULARY = 64, 1024
_NAMELESS = "0" * 64


def model_of(name: str) -> LoadedModel:
    """The model of a shape such as "32x8x128", or the one that `--model` names.

    Raises:
        ValueError: an odd head size.
        IncompatibleError: as `load_model`.
    """
    found = SHAPE.fullmatch(name)
    if found is None or Path(name).exists():
        return load_model(name)
    layers, heads, dim = map(int, found.groups())
    if dim % 2:
        raise ValueError(f"[bench] model must have an even head size, which RoPE turns in pairs, but got {name!r}.")
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        intermediate_size=HIDDEN,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=dim,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
        rope_theta=500000.0,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=True,
    )
    mx.random.seed(0)
    model = llama.Model(arguments)
    model.set_dtype(mx.float16)
    mx.eval(model.parameters())
    # Its tokenizer is never asked for more than the size of its vocabulary.
    tokenizer = load_model("tiny-a").tokenizer
    return LoadedModel(model, tokenizer, ModelInfo(name, "llama", _NAMELESS, _NAMELESS, "float16"), Path())
