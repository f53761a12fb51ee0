"""Who computed a cache: digests of a model's weights and of an adapter that do not depend on paths, sharding or file order.

weights    blake3 over the sorted list of (tensor name, dtype, shape, blake3 of the bytes) of all `model*.safetensors`
adapter    the same over adapters.safetensors, with what mlx-lm reads of adapter_config.json

The other layers: `kvtool.identity_tokenizer`, `kvtool.identity_config`, `kvtool.identity_sketch`; all together: `kvtool.identifying`.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from formats.errors import IncompatibleError
from kvtool.identity_cache import Sight, remembered

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapters.safetensors", "adapter_config.json"
# Besides these nothing of adapter_config.json is read: the rest says how the adapter was trained. Dropout acts in training alone.
ADAPTER_FIELDS = ("fine_tune_type", "num_layers", "lora_parameters")


def weights_digest(folder: Path) -> str:
    """blake3 (hex) over every tensor of a model directory's weight files, remembered while none of them changes.

    Raises:
        IncompatibleError: no weight file, or one that is not safetensors.
    """
    files = weight_files(folder)
    digest: str = remembered("weights", Sight.of(files), lambda: digest_of_weights(files))
    return digest


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model directory, of which there must be one."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise IncompatibleError(
            "no model*.safetensors, so the model has no identity", path=str(folder), hint="give a directory that mlx-lm can load"
        )
    return files


def digest_of_adapter(files: Sequence[Path]) -> str:
    """blake3 (hex) over an adapter.

    Args:
        files: its config and its weights.
    Raises:
        IncompatibleError: one cannot be read.
    """
    config, weights = files
    try:
        read = json.loads(config.read_bytes())
        kept = {name: read[name] for name in ADAPTER_FIELDS if name in read}
        lora = {name: value for name, value in dict(kept.get("lora_parameters") or {}).items() if name != "dropout"}
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise IncompatibleError(f"not an adapter's config ({error})", path=str(config), hint="train or download it again") from error
    body = json.dumps({**kept, "lora_parameters": lora}, sort_keys=True)
    return blake3(f"{digest_of_weights([weights])}\n{body}".encode()).hexdigest()


def digest_of_weights(files: Sequence[Path]) -> str:
    """blake3 (hex) over every tensor of safetensors files."""
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
