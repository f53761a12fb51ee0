"""What a codec costs on a real model: KL divergence and top-1 agreement after a coded prefix.

    python -m tests.measure_codec_defaults MODEL_DIR SPEC [SPEC ...]

For each text in tests/texts: 512 tokens are prefilled, their keys and values encoded and decoded, 256 further tokens are teacher-forced
on them in one call, and the next-token distributions compared with those on the uncoded cache. Exact rows are kept in float16; a SPEC
with sink=0,recent=0 has none, as all in the codecs' docstrings that do not say otherwise. Run in float32; needs a model with plain
KVCaches and one RoPE per layer (SmolLM2: tests/smollm2/make.py).
"""

import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load

from veloxquant_mlx.codecs import Codec, CodecPlan, parse_codec
from veloxquant_mlx.transfer.rope import rotate
from veloxquant_mlx.transfer.rope_spec import RopeSpec, describe_rope

TEXTS = sorted((Path(__file__).parent / "texts").glob("*.txt"))
PREFIX, SUFFIX = 512, 256


def coded(x: mx.array, codec: Codec, plan: CodecPlan, rope: RopeSpec | None) -> mx.array:
    """x (H, S, D) after encoding and decoding, rotated back before coding where a rope is given."""
    first, last = plan.sink, x.shape[1] - plan.recent
    positions = np.arange(first, last)
    rows = x[:, first:last]
    rows = rotate(rows, positions, rope, None) if rope else rows
    rows = codec.decode(codec.encode(rows), rows.shape, mx.float32)
    rows = rotate(rows, positions, None, rope) if rope else rows
    exact = x.astype(mx.float16).astype(mx.float32)
    return mx.concatenate([exact[:, :first], rows, exact[:, last:]], axis=1)


def log_probabilities(model, ids: list[int], layers: list[tuple[mx.array, mx.array]]) -> mx.array:
    """Next-token log-probabilities (len(ids), vocabulary) after a cache with these keys and values."""
    caches = [KVCache() for _ in layers]
    for cache, (keys, values) in zip(caches, layers, strict=True):
        cache.update_and_fetch(keys[None], values[None])
    logits = model(mx.array([ids]), cache=caches)[0].astype(mx.float32)
    result = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(result)
    return result


def main(folder: str, specs: list[str]) -> None:
    model, tokenizer = load(folder)
    ropes = [describe_rope(layer.self_attn.rope) for layer in model.layers]
    scores: dict[str, list[tuple[float, float]]] = {spec: [] for spec in specs}
    for text in TEXTS:
        ids = tokenizer.encode(text.read_text(encoding="utf-8"))[: PREFIX + SUFFIX]
        if len(ids) < PREFIX + SUFFIX:
            raise ValueError(f"{text}: {len(ids)} tokens, but {PREFIX + SUFFIX} are needed.")
        caches = [KVCache() for _ in model.layers]
        mx.eval(model(mx.array([ids[:PREFIX]]), cache=caches))
        layers = [(cache.keys[0, :, :PREFIX], cache.values[0, :, :PREFIX]) for cache in caches]
        own = log_probabilities(model, ids[PREFIX:], layers)
        for spec in specs:
            plan = parse_codec(spec)
            before = (plan.frame or plan.k.default_frame("k")) == "pre"
            arm = [
                (coded(keys, plan.k, plan, rope if before else None), coded(values, plan.v, plan, None))
                for (keys, values), rope in zip(layers, ropes, strict=True)
            ]
            other = log_probabilities(model, ids[PREFIX:], arm)
            divergence = mx.mean(mx.sum(mx.exp(own) * (own - other), axis=-1)).item()
            agreement = mx.mean((mx.argmax(own, axis=-1) == mx.argmax(other, axis=-1)).astype(mx.float32)).item()
            scores[spec].append((divergence, agreement))
            print(f"{text.stem:12} {spec:40} KL {divergence:.4f}  top-1 {agreement:.3f}", flush=True)
    for spec, pairs in scores.items():
        print(f"{'mean':12} {spec:40} KL {np.mean([kl for kl, _ in pairs]):.4f}  top-1 {np.mean([top for _, top in pairs]):.3f}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
