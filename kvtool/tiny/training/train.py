"""Train tiny-a and tiny-b: from the corpus to the exported models (PyTorch, one GPU; a CPU for a trial run).

    python kvtool/tiny/training/corpus.py work/corpus      # downloads and cleans the texts
    python -m kvtool.tiny.training.train prepare work      # tokenizer and token array
    python -m kvtool.tiny.training.train train work --name tiny-a --out out
    python -m kvtool.tiny.training.train train work --name tiny-b --init out/tiny-a.pt \\
        --steps 1500 --short-part 0 --lr 1e-3 --warmup 100 --out out

``train`` writes NAME.pt (float32 weights), NAME/ (float16, loadable with mlx-lm) and NAME.csv (loss curve) into --out.
"""

import argparse
import csv
import functools
import json
import math
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from kvtool.tiny import filler_text
from kvtool.tiny.passkey import NAMES, TEMPLATES, Trial, make_trials

SPECIAL = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>")
VOCAB = 1024
CONTEXT = 2048
ROPE_THETA = {"tiny-a": 10_000.0, "tiny-b": 100_000.0}


@dataclass(frozen=True)
class Shape:
    """Model dimensions."""

    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 576
    vocab: int = VOCAB
    eps: float = 1e-5
    dropout_percent: int = 10


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer


def make_tokenizer(text: str) -> Tokenizer:
    """A byte-level BPE with every digit a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(re.split(r"[\n\f]", text), trainer)
    return tokenizer


class Encoder:
    """``encode`` as transformers' tokenizers have it, for a plain `Tokenizer`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``."""
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def prepare(work: Path) -> None:
    """Write tokenizer.json, train.npy (uint16 token ids, documents closed by the end token) and words.json."""
    text = (work / "corpus" / "train.txt").read_text("utf-8")
    tokenizer = make_tokenizer(text)
    tokenizer.save(str(work / "tokenizer.json"))
    end = SPECIAL.index("<|end|>")  # special tokens get the first ids
    parts: list[int] = []
    for document in text.split("\f"):
        for piece in re.findall(r"[^\n]*\n|[^\n]+", document):
            parts.extend(tokenizer.encode(piece).ids)
        parts.append(end)
    np.save(work / "train.npy", np.array(parts, dtype=np.uint16))
    words = sorted({*re.findall(r"\b[A-Z][a-z]{2,9}\b", text), *NAMES})
    (work / "words.json").write_text(json.dumps(words), "utf-8")
    print(f"{tokenizer.get_vocab_size()} token types, {len(parts)} tokens, {len(text.encode()) / len(parts):.3f} bytes a token")


# ---------------------------------------------------------------------------------------------------------------------
# Training rows: prose, and prose with hidden facts, copies and repeats

NOUNS = (
    "passkey password passcode key code number pin token secret|secret number|secret code|access code|door code|locker number|"
    "magic number|account number|room number|serial number|ticket number|badge number|order number|safe combination|"
    "launch code|entry code|case number|file number|phone extension|reference number|vault code|lucky number"
)
NOUN_LIST = tuple(NOUNS.split("|")[0].split(" ")) + tuple(NOUNS.split("|")[1:])
# Named and unnamed facts. "{k}" is what is asked for, "{v}" its value.
FACTS = (
    " The {k} is {v}.",
    " The {k} is {v}. Remember it.",
    " Remember that the {k} is {v}.",
    " Note that the {k} is {v}.",
    " Note: the {k} is {v}.",
    " Please remember this: the {k} is {v}.",
    " One more thing: the {k} is {v}. Do not forget it.",
    " The {k}: {v}.",
    "\nThe {k} is {v}.\n",
    " {v} is the {k}.",
)
QUESTIONS = (
    " What is the {k}? The {k} is {v}.",
    " What is the {k}? The {k} is {v}.",
    " What is the {k}? {v}.",
    " Question: What is the {k}? Answer: {v}.",
    " Tell me the {k}. The {k} is {v}.",
    " The {k} is {v}.",
    " As was said, the {k} is {v}.",
    "\nWhat is the {k}? The {k} is {v}.\n",
)
KEYED = ("{noun}", "{noun} for {word}", "{noun} of {word}", "key for {word}", "key for {word}", "number of {word}")
# Loss weights: fresh random values cannot be predicted, repeated ones are what must be learnt.
W_TEXT, W_FRESH, W_ANSWER, W_COPY = 1.0, 0.1, 4.0, 1.0


class Rows(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Endless batches of (tokens, weights), each of shape [batch, length + 1]."""

    def __init__(self, work: Path, batch: int, length: int, seed: int) -> None:
        self.work, self.batch, self.length, self.seed = work, batch, length, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        info = torch.utils.data.get_worker_info()
        worker = info.id if info is not None else 0
        maker = RowMaker(self.work, self.length + 1, self.seed * 1000 + worker)
        while True:
            rows = [maker.row() for _ in range(self.batch)]
            yield (
                torch.from_numpy(np.stack([r[0] for r in rows]).astype(np.int32)),
                torch.from_numpy(np.stack([r[1] for r in rows]).astype(np.float32)),
            )


class RowMaker:
    """Draws training rows; one a worker process."""

    def __init__(self, work: Path, size: int, seed: int) -> None:
        self.size = size
        self.rng = random.Random(seed)
        self.np_rng = np.random.default_rng(seed)
        self.corpus = np.load(work / "train.npy")
        self.words: list[str] = json.loads((work / "words.json").read_text("utf-8"))
        tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
        self.encode = functools.lru_cache(maxsize=200_000)(lambda text: np.array(tokenizer.encode(text).ids, dtype=np.uint16))
        self.digits = np.array([tokenizer.token_to_id(d) for d in "0123456789"], dtype=np.uint16)
        stops = [i for i in range(VOCAB) if re.search(r"[.!?]$", tokenizer.decode([i]))]
        # A fact goes after the end of a sentence.
        self.is_stop = np.isin(np.arange(VOCAB), stops)
        self.first_plain = len(SPECIAL)

    def slice(self, n: int) -> np.ndarray:
        """``n`` consecutive corpus tokens."""
        at = self.rng.randrange(len(self.corpus) - n)
        return self.corpus[at : at + n]

    def row(self) -> tuple[np.ndarray, np.ndarray]:
        """One row of tokens and weights."""
        kind = self.rng.random()
        if kind < 0.35:
            return self.slice(self.size), np.full(self.size, W_TEXT)
        if kind < 0.62:
            return self.facts(1, self.rng.choice((1, 1, 2)), at_end=True)
        if kind < 0.82:
            count = self.rng.randint(2, max(3, self.size // 128))
            return self.facts(count, self.rng.randint(count, 3 * count), at_end=False)
        if kind < 0.91:
            return self.copies()
        return self.repeats()

    def value(self) -> np.ndarray:
        """The tokens of a random number, mostly of five digits."""
        n = 5 if self.rng.random() < 0.8 else self.rng.randint(3, 8)
        return self.digits[self.np_rng.integers(0, 10, n)]

    def fill(self, template: str, key: str, value: np.ndarray, weight: float) -> tuple[np.ndarray, np.ndarray]:
        """Template text with ``value`` put in, and its weights."""
        before, after = template.format(k=key, v="\0").split("\0")
        head, tail = self.encode(before), self.encode(after)
        weights = np.full(len(head) + len(value) + len(tail), W_TEXT)
        weights[len(head) : len(head) + len(value)] = weight
        return np.concatenate([head, value, tail]), weights

    def facts(self, count: int, asked: int, at_end: bool) -> tuple[np.ndarray, np.ndarray]:
        """Prose with ``count`` facts and ``asked`` questions, each somewhere after its fact."""
        keys: dict[str, tuple[np.ndarray, str | None]] = {}
        while len(keys) < count:
            # A third of the lone facts use the wording that the passkey trials use; the values are always random.
            if count == 1 and self.rng.random() < 0.35:
                name = self.rng.choice(self.words)
                told, ask = (text.replace("{name}", name).replace("{value}", "{v}") for text in self.rng.choice(TEMPLATES))
                keys[told] = (self.value(), ask + "{v}.")
                continue
            key = self.rng.choice(KEYED).format(noun=self.rng.choice(NOUN_LIST), word=self.rng.choice(self.words))
            keys[key] = (self.value(), None)
        events: list[tuple[float, np.ndarray, np.ndarray]] = []
        places: dict[str, float] = {}
        for key, (value, question) in keys.items():
            places[key] = self.rng.random() * (1.0 if at_end else 0.95)
            template = key if question is not None else self.rng.choice(FACTS)
            events.append((places[key], *self.fill(template, key, value, W_FRESH)))
        for number in range(asked):
            key = self.rng.choice(list(keys))
            value, question = keys[key]
            low = places[key]
            where = 1.0 if at_end and number == 0 else low + (1.0 - low) * self.rng.random()
            events.append((where, *self.fill(question or self.rng.choice(QUESTIONS), key, value, W_ANSWER)))
        events.sort(key=lambda event: event[0])
        return self.weave(events, self.rng.randint(0, self.size // 8) if at_end else 0)

    def weave(self, events: list[tuple[float, np.ndarray, np.ndarray]], after: int) -> tuple[np.ndarray, np.ndarray]:
        """Put ``events`` into prose at their relative places; ``after`` prose tokens follow the last place."""
        room = self.size - sum(len(event[1]) for event in events)
        if room < 16:
            return self.slice(self.size), np.full(self.size, W_TEXT)
        prose = self.slice(room)
        span = room - min(after, room // 2)
        tokens, weights, done = [], [], 0
        snap = self.rng.random() < 0.8
        stops = np.flatnonzero(self.is_stop[prose]) + 1 if snap else np.arange(room)
        for where, ids, weight in events:
            at = min(int(where * span), room)
            i = int(np.searchsorted(stops, at))
            cut = max(done, int(stops[i]) if i < len(stops) else room)
            tokens += [prose[done:cut], ids]
            weights += [np.full(cut - done, W_TEXT), weight]
            done = cut
        tokens.append(prose[done:])
        weights.append(np.full(room - done, W_TEXT))
        return np.concatenate(tokens), np.concatenate(weights)

    def copies(self) -> tuple[np.ndarray, np.ndarray]:
        """Prose in which spans are repeated after more prose."""
        out = self.slice(self.size).copy()
        weights = np.full(self.size, W_TEXT)
        for _ in range(self.rng.randint(1, 6)):
            n = self.rng.randint(8, max(9, self.size // 10))
            source = self.rng.randrange(self.size - 2 * n)
            target = self.rng.randint(source + n, self.size - n)
            out[target : target + n] = out[source : source + n]
            weights[target : target + n] = W_COPY
        return out, weights

    def repeats(self) -> tuple[np.ndarray, np.ndarray]:
        """Random tokens or digits that come again, alone or between prose."""
        tokens, weights, size = [], [], 0
        while size < self.size:
            n = self.rng.randint(8, max(9, min(256, self.size // 4)))
            if self.rng.random() < 0.3:
                block = self.digits[self.np_rng.integers(0, 10, min(n, 64))]
            else:
                block = self.np_rng.integers(self.first_plain, VOCAB, n).astype(np.uint16)
            prose = self.slice(self.rng.randint(1, max(2, self.size // 4)))
            for piece, weight in ((block, W_FRESH), (prose, W_TEXT), (block, W_COPY)):
                tokens.append(piece)
                weights.append(np.full(len(piece), weight))
                size += len(piece)
        return np.concatenate(tokens)[: self.size], np.concatenate(weights)[: self.size]


# ---------------------------------------------------------------------------------------------------------------------
# Model: the llama of mlx-lm, same names of weights


class Attention(nn.Module):
    """Grouped-query attention with half-split RoPE in float32."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Causal self-attention."""
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.s.heads, self.s.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.s.kv_heads, self.s.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.s.kv_heads, self.s.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE, the two halves of a head being the real and the imaginary part."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.mlp, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.mlp, bias=False)
        self.down_proj = nn.Linear(s.mlp, s.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Feed-forward layer."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(s)
        self.mlp = MLP(s)
        self.input_layernorm = nn.RMSNorm(s.hidden, eps=s.eps)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden, eps=s.eps)
        self.dropout = nn.Dropout(s.dropout_percent / 100)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Residual attention and feed-forward."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Llama(nn.Module):
    """Token ids to logits, embeddings tied."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, s: Shape, theta: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden, eps=s.eps)
        frequency = theta ** (-torch.arange(0, s.head_dim, 2, dtype=torch.float64) / s.head_dim)
        angle = torch.outer(torch.arange(CONTEXT + 64, dtype=torch.float64), frequency)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * s.layers) if residual else 0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of shape [batch, length, vocab]."""
        t = ids.shape[1]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        return F.linear(self.norm(x), self.embed_tokens.weight)


def weighted_loss(model: nn.Module, tokens: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weighted cross entropy, and the plain means over prose tokens and over answers."""
    logits = model(tokens[:, :-1])
    each = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    w = weights[:, 1:].flatten()
    text, answer = (w == W_TEXT).float(), (w == W_ANSWER).float()
    means = [(each.detach() * m).sum() / m.sum().clamp(min=1) for m in (text, answer)]
    return (each * w).sum() / w.sum(), means[0], means[1]


# ---------------------------------------------------------------------------------------------------------------------
# Held-out measures


@torch.no_grad()
def held_out_loss(model: nn.Module, ids: torch.Tensor, n_bytes: int) -> tuple[float, float]:
    """Nats a token and bits a byte on the filler, in windows of CONTEXT tokens, each with the token before it."""
    total, count = 0.0, 0
    for at in range(0, len(ids) - 1, CONTEXT):
        window = ids[at : at + CONTEXT + 1]
        if len(window) < CONTEXT + 1:
            break
        logits = model(window[None, :-1])
        total += F.cross_entropy(logits[0].float(), window[1:], reduction="sum").item()
        count += CONTEXT
    nats = total / count
    return nats, nats * len(ids) / n_bytes / math.log(2)


@torch.no_grad()
def passkey_accuracy(model: nn.Module, trials: list[Trial], device: torch.device, batch: int = 32) -> float:
    """Share of trials whose digits are all the greedy choice (given the right ones before: the same as generating)."""
    right = 0
    for at in range(0, len(trials), batch):
        part = trials[at : at + batch]
        ids = torch.tensor([t.prompt_ids + t.answer_ids for t in part], device=device)
        n = len(part[0].answer_ids)
        choice = model(ids[:, :-1])[:, -n:].argmax(-1)
        right += int((choice == ids[:, -n:]).all(-1).sum())
    return right / len(trials)


# ---------------------------------------------------------------------------------------------------------------------
# Export and training loop


def export(model: Llama, s: Shape, name: str, tokenizer_file: Path, out: Path) -> None:
    """Write a float16 model directory that mlx-lm and transformers load."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{k}": v.detach().to("cpu", torch.float16).contiguous() for k, v in model.state_dict().items()}
    for key, value in weights.items():
        if not torch.isfinite(value).all():
            raise ValueError(f"{key} does not fit float16")
    save_file(weights, out / "model.safetensors", metadata={"format": "mlx"})
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    end, pad = tokenizer.token_to_id(SPECIAL[0]), tokenizer.token_to_id(SPECIAL[1])
    theta = ROPE_THETA[name]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.mlp,
        "hidden_act": "silu",
        "vocab_size": s.vocab,
        "rms_norm_eps": s.eps,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_traditional": False,
        "max_position_embeddings": CONTEXT,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[1],
        "additional_special_tokens": list(SPECIAL[2:]),
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    (out / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())


def learning_rate(progress: float, step: int, peak: float, warmup: int) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak."""
    return peak * min((step + 1) / warmup, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def train(args: argparse.Namespace) -> None:
    """Train one model and export it."""
    work, out, name = Path(args.work), Path(args.out), args.name
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    changes = dict(item.split("=") for item in args.shape.split(",") if item)
    shape = Shape(**{key: int(value) for key, value in changes.items()})
    model = Llama(shape, ROPE_THETA[name]).to(device)
    if args.init:
        model.load_state_dict(torch.load(args.init, map_location=device))
    print(name, asdict(shape), f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.95), fused=on_gpu
    )
    encoder = Encoder(Tokenizer.from_file(str(work / "tokenizer.json")))
    filler = filler_text()
    filler_ids = torch.tensor(encoder.encode(filler), device=device)
    probes = {n: make_trials(encoder, 96, prompt_tokens=n, seed=17) for n in (400, 1500)}
    # The first part of A's steps uses short rows: retrieval is learnt sooner there.
    short = int(args.steps * args.short_part)
    stages = [(512, 0, short), (CONTEXT, short, args.steps)] if short else [(CONTEXT, 0, args.steps)]
    columns = "model step tokens seconds length lr loss text_loss answer_loss held_out_loss held_out_bits_per_byte passkey_400 passkey_1500"
    begin, seen = time.monotonic(), 0
    limit = args.minutes * 60

    with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(columns.split())

        def report(step: int, length: int, lr: float, sums: torch.Tensor, steps: int, measure: bool) -> None:
            extra: list[str] = ["", "", "", ""]
            if measure:
                model.eval()
                with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                    nats, bits = held_out_loss(model, filler_ids, len(filler.encode()))
                    extra = [f"{nats:.4f}", f"{bits:.4f}", *(f"{passkey_accuracy(model, t, device):.4f}" for t in probes.values())]
                model.train()
                torch.save(model.state_dict(), out / f"{name}.pt")
            means = (sums / steps).tolist()
            row = [name, step, seen, f"{time.monotonic() - begin:.1f}", length, f"{lr:.2e}", *(f"{m:.4f}" for m in means), *extra]
            writer.writerow(row)
            stream.flush()
            print(*row, flush=True)

        step = 0
        for length, first, last in stages:
            batch = max(1, args.batch_tokens // length)
            rows = Rows(work, batch, length, args.seed + length)
            loader = iter(DataLoader(rows, batch_size=None, num_workers=args.workers, prefetch_factor=4, pin_memory=on_gpu))
            objective: Any = torch.compile(weighted_loss, dynamic=False) if on_gpu else weighted_loss
            sums, count, lr = torch.zeros(3, device=device), 0, 0.0
            for step in range(first, last):
                progress = max(step / args.steps, (time.monotonic() - begin) / limit)
                if progress >= 1.0:
                    break
                if progress * args.steps >= last and last < args.steps:
                    break
                lr = learning_rate(progress, step, args.lr, args.warmup)
                for group in optimizer.param_groups:
                    group["lr"] = lr
                tokens, weights = next(loader)
                tokens, weights = tokens.to(device, torch.long, non_blocking=True), weights.to(device, non_blocking=True)
                with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                    loss, text, answer = objective(model, tokens, weights)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                sums += torch.stack([loss.detach(), text, answer])
                count += 1
                seen += batch * length
                if (step + 1) % args.log_every == 0:
                    report(step + 1, length, lr, sums, count, (step + 1) % args.eval_every == 0)
                    sums, count = torch.zeros(3, device=device), 0
            if count:
                report(step + 1, length, lr, sums, count, True)
            del loader
    export(model, shape, name, work / "tokenizer.json", out / name)
    model.load_state_dict({k: v.half().float() for k, v in model.state_dict().items()})
    model.eval()
    final = make_trials(encoder, 400, prompt_tokens=1500, seed=1)
    nats, bits = held_out_loss(model, filler_ids, len(filler.encode()))
    summary = {
        "model": name,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "steps": step + 1,
        "tokens": seen,
        "seconds": round(time.monotonic() - begin, 1),
        "held_out_nats_per_token": round(nats, 4),
        "held_out_bits_per_byte": round(bits, 4),
        "passkey_1500_of_400": passkey_accuracy(model, final, device),
    }
    (out / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    print(json.dumps(summary), flush=True)


def main() -> None:
    """Command line."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("prepare")
    one.add_argument("work")
    two = commands.add_parser("train")
    two.add_argument("work")
    two.add_argument("--name", required=True, choices=sorted(ROPE_THETA))
    two.add_argument("--out", required=True)
    two.add_argument("--init", help="weights to start from (NAME.pt)")
    two.add_argument("--steps", type=int, default=8000)
    two.add_argument("--minutes", type=float, default=8.0, help="the schedule ends by then, whatever the steps")
    two.add_argument("--batch-tokens", type=int, default=65_536)
    two.add_argument("--short-part", type=float, default=0.15, help="share of the steps with rows of 512 tokens")
    two.add_argument("--lr", type=float, default=2e-3)
    two.add_argument("--warmup", type=int, default=200)
    two.add_argument("--workers", type=int, default=14)
    two.add_argument("--log-every", type=int, default=50)
    two.add_argument("--eval-every", type=int, default=500)
    two.add_argument("--seed", type=int, default=1)
    two.add_argument("--shape", default="", help="changes to the default shape, such as hidden=128,layers=2")
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(Path(args.work))
    else:
        train(args)


if __name__ == "__main__":
    main()
