"""Make tiny-c and tiny-d, small models of other shapes than tiny-a: on a CPU, with MLX, on the texts of kvtool/tiny/training.

tiny-c is tiny-a cut down (a layer, half of the head size, most of the neurons; a KV head for each query head) and taught by tiny-a's
predictions to make up for it, as small members of model families are made. tiny-d is tiny-c trained on with another tokenizer.

    python kvtool/tiny/training/corpus.py WORK                    # downloads and cleans the texts
    python -m tests.shapes.train WORK tiny-c                      # tiny-a's tokenizer
    python -m tests.shapes.train WORK tiny-d                      # a tokenizer of half as many tokens, tiny-c trained on

Each writes its folder beside this file. README.md there has the figures of the shipped run.
"""

import argparse
import json
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvtool import tiny
from kvtool.blas import use_openblas

use_openblas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import mlx_lm  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402
from mlx_lm.models.llama import Model, ModelArgs  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

HERE = Path(__file__).resolve().parent
SPECIAL = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>")
CONTEXT = 256
COPIES = 0.3  # share of rows in which spans are repeated: how a model learns to look back


@dataclass(frozen=True)
class Run:
    """How one model is made.

    Attributes:
        vocab: tokens; tiny-a's tokenizer has 1024.
        init: the model whose layers it starts from.
        steps, batch: of `batch` rows of CONTEXT tokens.
        muon, adam: peak learning rates of the layers' matrices, and of embeddings and norms.
    """

    vocab: int
    init: str | None
    steps: int
    batch: int = 8
    muon: float = 0.02
    adam: float = 4e-3


RUNS = {"tiny-c": Run(1024, "tiny-a", 1000, muon=0.002, adam=5e-4), "tiny-d": Run(512, "tiny-c", 600, muon=0.002, adam=1e-3)}
LAYERS = (0, 1, 3)  # of tiny-a; zeroing layer 2 costs it least
GROUP, BITS = 64, 8  # of the stored weights
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


def tokenizer_of(vocab: int, text: str) -> Tokenizer:
    """tiny-a's tokenizer, or one of the same kind with other merges, learnt from the text."""
    own = Tokenizer.from_file(str(tiny.path("tiny-a") / "tokenizer.json"))
    if own.get_vocab_size() == vocab:
        return own
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    found.train_from_iterator(re.split(r"[\n\f]", text), trainer)
    return found


def token_array(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """uint16 ids of all documents, each closed by the end token."""
    parts: list[np.ndarray] = []
    for document in text.split("\f"):
        lines = re.findall(r"[^\n]*\n|[^\n]+", document)
        parts += [np.array(line.ids, np.uint16) for line in tokenizer.encode_batch(lines)]
        parts.append(np.zeros(1, np.uint16))
    return np.concatenate(parts)


def rows(ids: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, CONTEXT + 1) consecutive tokens; in some rows spans are repeated further on."""
    starts = rng.integers(0, len(ids) - CONTEXT - 1, count)
    found = np.stack([ids[s : s + CONTEXT + 1] for s in starts]).astype(np.int32)
    for row in found[: int(COPIES * count)]:
        for _ in range(rng.integers(1, 4)):
            size = int(rng.integers(8, 48))
            source = int(rng.integers(0, CONTEXT - 2 * size))
            at = int(rng.integers(source + size, CONTEXT - size))
            row[at : at + size] = row[source : source + size].copy()
    return found


def loss_of(model: Model, tokens: mx.array) -> mx.array:
    """Nats a token."""
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")


def taught(model: Model, tokens: mx.array, teacher: Model) -> mx.array:
    """Nats a token of the teacher's own predictions."""
    wanted = mx.softmax(mx.stop_gradient(teacher(tokens[:, :-1])), axis=-1)
    logits = model(tokens[:, :-1])
    return (mx.logsumexp(logits, axis=-1) - (wanted * logits).sum(axis=-1)).mean()


def cut_down(teacher: Model, tokens: mx.array) -> dict[str, mx.array]:
    """Weights of tiny-c from tiny-a's.

    Keys and queries keep every other RoPE pair, which are the pairs of half the head size. Values and outputs of each query head are the
    best of half the rank. Of the neurons those stay whose outputs are largest on `tokens` (B, S).
    """
    given = dict(tree_flatten(teacher.parameters()))
    heads, dim, kept = 4, 64, CONFIG["intermediate_size"]
    pairs = np.concatenate([np.arange(0, dim // 2, 2), np.arange(dim // 2, dim, 2)])
    found = {name: given[name] for name in ("model.embed_tokens.weight", "model.norm.weight")}
    energies = _neurons(teacher, tokens)
    for new, old in enumerate(LAYERS):
        own = {name: np.array(given[f"model.layers.{old}.{name}.weight"]) for name in PARTS}
        q, k, v = (own[f"self_attn.{name}_proj"].reshape(-1, dim, own["self_attn.q_proj"].shape[1]) for name in "qkv")
        o = own["self_attn.o_proj"].reshape(-1, heads, dim)
        k, v = np.repeat(k, heads // len(k), axis=0), np.repeat(v, heads // len(v), axis=0)
        outs, ins = [], []
        for head in range(heads):
            left, size, right = np.linalg.svd(o[:, head] @ v[head], full_matrices=False)
            half = np.sqrt(size[: dim // 2])
            outs.append(left[:, : dim // 2] * half)
            ins.append(half[:, None] * right[: dim // 2])
        strongest = np.sort(np.argsort(-energies[old])[:kept])
        weights = {
            "self_attn.q_proj": np.concatenate(list(q[:, pairs])) * np.sqrt(2.0),
            "self_attn.k_proj": np.concatenate(list(k[:, pairs])),
            "self_attn.v_proj": np.concatenate(ins),
            "self_attn.o_proj": np.concatenate(outs, axis=1),
            "mlp.gate_proj": own["mlp.gate_proj"][strongest],
            "mlp.up_proj": own["mlp.up_proj"][strongest],
            "mlp.down_proj": own["mlp.down_proj"][:, strongest],
            "input_layernorm": own["input_layernorm"],
            "post_attention_layernorm": own["post_attention_layernorm"],
        }
        found |= {f"model.layers.{new}.{name}.weight": mx.array(np.ascontiguousarray(w, np.float32)) for name, w in weights.items()}
    return found


PARTS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)


def _neurons(teacher: Model, tokens: mx.array) -> list[np.ndarray]:
    """Layer by layer, mean square of what each neuron adds to the residual stream."""
    x, found = teacher.model.embed_tokens(tokens), []
    for layer in teacher.model.layers:
        x = x + layer.self_attn(layer.input_layernorm(x), "causal")
        y = layer.post_attention_layernorm(x)
        inner = nn.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y)
        found.append(np.array((inner**2).mean(axis=(0, 1)) * (layer.mlp.down_proj.weight**2).sum(axis=0)))
        x = x + layer.mlp.down_proj(inner)
    return found


def held_out_loss(model: Model, ids: list[int]) -> float:
    """Nats a token on the held-out text in windows of CONTEXT tokens."""
    count = (len(ids) - 1) // CONTEXT
    windows = mx.array([ids[i * CONTEXT : i * CONTEXT + CONTEXT + 1] for i in range(count)])
    return float(np.mean([loss_of(model, windows[i : i + 16]).item() for i in range(0, count - count % 16, 16)]))


def schedule(run: Run, peak: float) -> Any:
    """Linear warm-up over 3 %, level, then down to 2 % of the peak over the last 60 %."""
    warm, level = run.steps * 3 // 100, run.steps * 37 // 100
    parts = [
        optim.linear_schedule(peak / 20, peak, warm),
        lambda _: mx.array(peak),
        optim.linear_schedule(peak, peak / 50, run.steps * 6 // 10),
    ]
    return optim.join_schedules(parts, [warm, warm + level])


def train(name: str, work: Path) -> dict[str, Any]:
    """Train one model and write its folder; returns what is said of it in README.md."""
    run, begin = RUNS[name], time.process_time()
    text = (work / "train.txt").read_text("utf-8")
    tokenizer = tokenizer_of(run.vocab, text)
    array = work / f"{name}.npy"
    if not array.exists():
        np.save(array, token_array(tokenizer, text))
    ids = np.load(array)
    rng = np.random.default_rng(1)
    model = Model(ModelArgs.from_dict({**CONFIG, "vocab_size": run.vocab}))
    teacher, forward = None, nn.value_and_grad(model, loss_of)
    given = mlx_lm.load(str(tiny.path("tiny-a") if run.init == "tiny-a" else HERE / run.init))[0]
    if run.init == "tiny-a":
        teacher = given
        teacher.update(tree_map(lambda w: w.astype(mx.float32), teacher.parameters()))
        model.load_weights(list(cut_down(teacher, mx.array(rows(ids, 16, rng))).items()))
        forward = nn.value_and_grad(model, partial(taught, teacher=teacher))
    else:
        weights = dict(tree_flatten(whole(given).parameters()))
        weights["model.embed_tokens.weight"] = _embedded(weights["model.embed_tokens.weight"], tokenizer, RUNS[run.init].vocab)
        model.load_weights(list(weights.items()))
    in_layers = lambda path, weight: weight.ndim == 2 and "embed" not in path  # noqa: E731
    optimizer = optim.MultiOptimizer(
        [
            optim.Muon(schedule(run, run.muon), momentum=0.95, weight_decay=0.01),
            optim.AdamW(schedule(run, run.adam), betas=[0.9, 0.95], weight_decay=0.0),
        ],
        [in_layers],
    )
    state = [model.state, optimizer.state]

    def step(tokens: mx.array) -> mx.array:
        loss, grads = forward(model, tokens)
        optimizer.update(model, optim.clip_grad_norm(grads, 1.0)[0])
        return loss

    held = tokenizer.encode(tiny.filler_text(), add_special_tokens=False).ids
    for i in range(run.steps):
        loss = step(mx.array(rows(ids, run.batch, rng)))
        mx.eval(state, loss)
        if (i + 1) % 50 == 0:
            print(f"{name} {i + 1} {loss.item():.3f} {time.process_time() - begin:.0f} s of CPU", file=sys.stderr, flush=True)
    nn.quantize(model, GROUP, BITS)
    model.update(tree_map(lambda w: w.astype(mx.float16) if w.dtype == mx.float32 else w, model.parameters()))
    out = HERE / name
    out.mkdir(exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), dict(tree_flatten(model.parameters())), metadata={"format": "mlx"})
    nats = held_out_loss(whole(model), held)
    (out / "config.json").write_text(
        json.dumps({**CONFIG, "vocab_size": run.vocab, "quantization": {"group_size": GROUP, "bits": BITS}}, indent=2) + "\n", "utf-8"
    )
    tokenizer.save(str(out / "tokenizer.json"))
    shutil.copy(tiny.path("tiny-a") / "tokenizer_config.json", out / "tokenizer_config.json")
    bits = nats * len(held) / len(tiny.filler_text().encode()) / np.log(2)
    size = sum(w.size for _, w in tree_flatten(model.parameters()))
    return {
        "model": name,
        **asdict(run),
        "parameters": size,
        "tokens": run.steps * run.batch * CONTEXT,
        "cpu_seconds": round(time.process_time() - begin),
        "held_out_nats_per_token": round(nats, 4),
        "held_out_bits_per_byte": round(float(bits), 4),
    }


def whole(model: nn.Module) -> nn.Module:
    """A model's float32 twin, without quantised weights."""
    found = Model(ModelArgs.from_dict({**CONFIG, "vocab_size": model.args.vocab_size}))
    weights = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            weights[f"{path}.weight"] = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
        elif isinstance(module, nn.RMSNorm):
            weights[f"{path}.weight"] = module.weight
    found.load_weights([(name, w.astype(mx.float32)) for name, w in weights.items()])
    return found


def _embedded(given: mx.array, tokenizer: Tokenizer, vocab: int) -> mx.array:
    """Embeddings of a tokenizer from another's: the same token's, or the mean over the tokens that its text has there."""
    other = tokenizer_of(vocab, "")
    known = other.get_vocab()
    found = np.zeros((tokenizer.get_vocab_size(), given.shape[1]), np.float32)
    theirs = np.array(given.astype(mx.float32))
    for token, i in tokenizer.get_vocab().items():
        found[i] = theirs[known[token]] if token in known else theirs[other.encode(tokenizer.decode([i])).ids].mean(0)
    return mx.array(found)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("name", choices=sorted(RUNS))
    args = parser.parse_args()
    print(json.dumps(train(args.name, args.work)))


if __name__ == "__main__":
    main()
