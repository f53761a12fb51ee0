"""What a live model computes with besides its tensors: the fields of its arguments, and which of its modules are quantised and how.

Arguments are the model's own dataclass, with its defaults, not the file they were read from. Two kinds of fields say nothing here: those
that no row depends on, and those of RoPE, which is compared as the live modules turn rows (`kvtool.probe`). Where a layer's rotation could
not be described, RoPE's fields are compared as well. Scales that come with RoPE but act on the attention (mscale) always are.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.nn as nn
from blake3 import blake3

LONGEST = 160  # characters of a value; a longer one (a list with an entry a layer) is kept as a digest
# fmt: off
# Compared elsewhere (architecture, quantisation, tokenizer), of training, or of how text is sampled and shown.
SILENT = frozenset({
    "model_type", "architectures", "quantization", "quantization_config", "vision_config", "transformers_version", "_name_or_path",
    "torch_dtype", "dtype", "use_cache", "attention_dropout", "hidden_dropout", "embedding_dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "initializer_range", "initializer_factor", "bos_token_id", "eos_token_id", "pad_token_id", "router_jitter_noise",
    "loop_loss_weights"
})
ROPE = frozenset({
    "rope_theta", "rope_traditional", "rope_interleave", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_dim",
    "rotary_pct", "rotary_emb_base", "rope_local_base_freq", "swa_rope_theta", "max_position_embeddings",
    "original_max_position_embeddings", "type", "rope_type", "factor", "base", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "short_factor", "long_factor"
})
# fmt: on


def config_of(model: nn.Module) -> dict[str, Any]:
    """Fields of a live model's arguments as plain JSON values, nested ones by dotted names; those that are None are left out."""
    found = [value for value in vars(model).values() if dataclasses.is_dataclass(value) and not isinstance(value, type)]
    return {} if not found else {name: _plain(value) for name, value in sorted(_fields("", found[0])) if value is not None}


def differences(file: Mapping[str, Any], model: Mapping[str, Any], *, rope: bool) -> list[str]:
    """Fields whose values differ, with both.

    Args:
        file, model: from `config_of`.
        rope: compare RoPE's fields as well.
    """
    found = []
    for name in sorted({*file, *model}):
        last = name.rpartition(".")[2]
        if (last not in ROPE or rope) and file.get(name) != model.get(name):
            found.append(f"{name}: file {_shown(file.get(name))}, model {_shown(model.get(name))}")
    return found


def config_digest(config: Mapping[str, Any], *, rope: bool = False) -> str:
    """blake3 (hex) of the fields, of RoPE's only where asked for."""
    kept = {name: value for name, value in config.items() if rope or name.rpartition(".")[2] not in ROPE}
    return blake3(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def quantisation_of(model: nn.Module) -> dict[str, str] | None:
    """Which modules of a live model are quantised and how: {"summary": text, "blake3": of every one}; None where none is."""
    entries = [(path, type(m).__name__, m.mode, m.bits, m.group_size) for path, m in quantised_modules(model)]
    if not entries:
        return None
    counts = Counter(entry[2:] for entry in entries)
    texts = [f"{mode} {bits} bits in groups of {size}: {n} modules" for (mode, bits, size), n in counts.most_common()]
    body = json.dumps(sorted(entries), separators=(",", ":")).encode()
    return {"summary": "; ".join(texts), "blake3": blake3(body).hexdigest()}


def quantised_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(path, module) of all quantised modules; those inside an adapter's go by its path."""
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if all(hasattr(module, name) for name in ("bits", "group_size", "mode")):
            parent = path.rpartition(".")[0]
            yield (parent if "lora_a" in modules.get(parent, {}) else path), module


def _fields(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, inner in value.items():
        if str(name) not in SILENT:
            yield from _fields(f"{prefix}.{name}" if prefix else str(name), inner)


def _plain(value: Any) -> Any:
    plain = _json(value)
    text = json.dumps(plain, sort_keys=True)
    return plain if len(text) <= LONGEST else f"blake3 {blake3(text.encode()).hexdigest()}"


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return sorted((_json(inner) for inner in value), key=str)
    if isinstance(value, bool | int | str | None):
        return value
    # JSON has no infinity.
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)[:60]
