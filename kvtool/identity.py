"""Who made a cache: digests of a model's weights and tokenizer that do not depend on paths, sharding or file order.

weights    blake3 over the sorted list of (tensor name, dtype, shape, blake3 of the bytes) of all `model*.safetensors`
tokenizer  blake3 over the sorted vocabulary and the ids it gives to a fixed set of strings
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from formats.errors import IncompatibleError
from kvtool.identity_cache import remembered

# Strings that exercise digits, spaces, case, punctuation, code, accents and scripts: an edit of merges or rules shows in their ids.
TOKENIZER_PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two  spaces\tand a tab\nnewline\r\n",
    "1234567890 3.14159 1e-6 0xFF",
    "def f(x: int) -> dict[str, float]: return {'a': x ** 2}",
    "naïve café — “quotes” … ½ €",
    "漢字 кириллица العربية 🙂",
)


def weights_digest(folder: Path) -> str:
    """blake3 (hex) over every tensor of the model's weight files, remembered while none of them changes (`kvtool.identity_cache`).

    Args:
        folder: a model directory with `model*.safetensors`.
    Raises:
        IncompatibleError: no weight file, or one that is not safetensors.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise IncompatibleError(
            "no model*.safetensors, so the model has no identity", path=str(folder), hint="give a directory that mlx-lm can load"
        )
    return remembered(files, lambda: _digest(files))


def _digest(files: Sequence[Path]) -> str:
    entries = sorted(entry for path in files for entry in _tensor_digests(path))
    total = blake3()
    for name, dtype, shape, digest in entries:
        total.update(json.dumps([name, dtype, shape, digest], ensure_ascii=False).encode())
    return total.hexdigest()


def _tensor_digests(path: Path) -> list[tuple[str, str, list[int], str]]:
    size = path.stat().st_size
    data = np.memmap(path, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)
    if size < 8:
        raise IncompatibleError(f"{data.size} bytes, too short for a safetensors file", path=str(path), hint="download the model again")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > data.size - 8:
        raise IncompatibleError(f"header of {length} bytes in a file of {data.size}", path=str(path), hint="download the model again")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
        spans = [(n, t["dtype"], list(t["shape"]), *_span(t["data_offsets"])) for n, t in header.items() if n != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise IncompatibleError(f"not a safetensors header ({error!r})", path=str(path), hint="download the model again") from error
    start = 8 + length
    found = []
    for name, dtype, shape, begin, end in spans:
        if not 0 <= begin <= end <= data.size - start:
            raise IncompatibleError(
                f"tensor {name} at {begin}..{end} lies outside the file", path=str(path), hint="download the model again"
            )
        digest = blake3(max_threads=blake3.AUTO).update(data[start + begin : start + end].data).hexdigest()
        found.append((name, dtype, shape, digest))
    return found


def _span(offsets: list[int]) -> tuple[int, int]:
    begin, end = offsets
    return int(begin), int(end)


def tokenizer_digest(vocab: Mapping[str, int], probe_ids: list[list[int]]) -> str:
    """blake3 (hex) over a tokenizer's vocabulary and the ids it gives to `TOKENIZER_PROBES`."""
    body = {"vocab": sorted(vocab.items()), "probes": probe_ids}
    return blake3(json.dumps(body, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


def digest_of_tokenizer(tokenizer: Any) -> str:
    """`tokenizer_digest` of a live transformers or mlx-lm tokenizer."""
    probes = [list(tokenizer.encode(text, add_special_tokens=False)) for text in TOKENIZER_PROBES]
    return tokenizer_digest(tokenizer.get_vocab(), probes)
