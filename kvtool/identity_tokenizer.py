"""What decides the ids that a tokenizer gives, in digests.

vocabulary  blake3 over the sorted vocabulary and the ids of a fixed set of strings
state       blake3 over everything that decides ids: of a fast tokenizer its serialised state (normaliser, splitting, merges, scores, added
            tokens, special tokens around a text), of any other one the bytes of its vocabulary files, its merges, and ids of more strings
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

# Strings that exercise digits, spaces, case, punctuation, code, accents and scripts: an edit of merges or rules shows in their ids.
TOKENIZER_PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces\tand a tab\nnewline\r\n",
    "1234567890 3.14159 1e-6 0xFF",
    "def f(x: int) -> dict[str, float]: return {'a': x ** 2}",
    "naïve café — “quotes” … ½ €",
    "漢字 кириллица العربية 🙂",
)
WORDS = 4096  # entries of the vocabulary that a tokenizer without a serialised state is asked to encode


def tokenizer_digest(vocab: Mapping[str, int], probe_ids: list[list[int]]) -> str:
    """blake3 (hex) over a tokenizer's vocabulary and the ids it gives to `TOKENIZER_PROBES`."""
    body = {"vocab": sorted(vocab.items()), "probes": probe_ids}
    return blake3(json.dumps(body, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


def digest_of_tokenizer(tokenizer: Any) -> str:
    """`tokenizer_digest` of a live transformers or mlx-lm tokenizer."""
    probes = [list(tokenizer.encode(text, add_special_tokens=False)) for text in TOKENIZER_PROBES]
    return tokenizer_digest(tokenizer.get_vocab(), probes)


def state_digest(tokenizer: Any, folder: Path) -> str:
    """blake3 (hex) over all that decides the ids of a live tokenizer.

    Args:
        tokenizer: of transformers or mlx-lm.
        folder: where its files are.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    special = "".join(sorted(getattr(tokenizer, "all_special_tokens", ())))
    # Special tokens around a text and inside it: Python code above a serialised state has a say in both.
    asked = [*TOKENIZER_PROBES, f"a{special}b"]
    body = {
        "state": _other_state(tokenizer, folder) if backend is None else _fast_state(backend),
        "ids": [list(tokenizer.encode(text, add_special_tokens=True)) for text in asked],
    }
    return blake3(json.dumps(body, ensure_ascii=True, separators=(",", ":"), sort_keys=True).encode()).hexdigest()


def template_digest(tokenizer: Any) -> str | None:
    """blake3 (hex) of a tokenizer's chat template, None without one."""
    template = getattr(tokenizer, "chat_template", None)
    return None if template is None else blake3(json.dumps(template, sort_keys=True).encode()).hexdigest()


def _fast_state(backend: Any) -> Any:
    state = json.loads(backend.to_str())
    # How calls before this one truncated or padded, and the version of the format, decide no ids.
    for name in ("truncation", "padding", "version"):
        state.pop(name, None)
    return _set(state)


def _set(value: Any) -> Any:
    """A value without members that are null or false: a later library writes down more of what is not in use."""
    if isinstance(value, dict):
        return {name: _set(inner) for name, inner in value.items() if inner is not None and inner is not False}
    return [_set(inner) for inner in value] if isinstance(value, list) else value


def _other_state(tokenizer: Any, folder: Path) -> Any:
    vocab: dict[str, int] = tokenizer.get_vocab()
    names = sorted({str(name) for name in dict(getattr(tokenizer, "vocab_files_names", {})).values()})
    words = sorted(vocab, key=lambda word: (vocab[word], word))
    return {
        "vocab": sorted(vocab.items()),
        "files": {name: blake3((folder / name).read_bytes()).hexdigest() for name in names if (folder / name).is_file()},
        "merges": sorted((str(pair), rank) for pair, rank in dict(getattr(tokenizer, "bpe_ranks", {})).items()),
        "words": [list(tokenizer.encode(word, add_special_tokens=False)) for word in words[:: max(1, len(words) // WORDS)]],
    }
