"""A loaded model's identity, in layers that are compared one by one (`kvtool.compat`).

weights, adapter    what the files hold (`kvtool.identity`)
quantisation        which live modules are quantised and how (`kvtool.identity_config`)
tokenizer           vocabulary and ids, and all that decides ids (`kvtool.identity_tokenizer`)
config              fields of the live model's arguments that may change its arithmetic (`kvtool.identity_config`)
sketch              a few hundred weights, which no check goes by (`kvtool.identity_sketch`)

What is read from files is remembered while they do not change (`kvtool.identity_cache`).
"""

import functools
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.nn as nn

from formats.errors import IncompatibleError
from formats.model_info import IDENTITY, ModelInfo
from kvtool.identity import ADAPTER_CONFIG, ADAPTER_WEIGHTS, digest_of_adapter, digest_of_weights, weight_files
from kvtool.identity_cache import Sight, remembered
from kvtool.identity_config import config_of, quantisation_of
from kvtool.identity_sketch import sketch_of
from kvtool.identity_tokenizer import digest_of_tokenizer, state_digest, template_digest
from veloxquant_mlx.caches.families import named_modules

BULKY = (".safetensors", ".gguf", ".bin", ".kv")  # no tokenizer's file


@dataclass(frozen=True)
class ModelFiles:
    """Files of a model and its adapter as they were before anything read them."""

    folder: Path
    adapter: Path | None
    weights: Sight
    others: Sight
    adapters: Sight

    @classmethod
    def of(cls, folder: Path, adapter: Path | None = None) -> "ModelFiles":
        """The files as they are now.

        Args:
            folder: a model directory. adapter: an adapter's directory.
        Raises:
            IncompatibleError: no weight file, or no adapter in there.
        """
        others = sorted(path for path in folder.iterdir() if path.suffix not in BULKY and path.is_file())
        parts = [] if adapter is None else [adapter / ADAPTER_CONFIG, adapter / ADAPTER_WEIGHTS]
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            raise IncompatibleError(
                f"no {' and no '.join(missing)}, so this is no adapter", path=str(adapter), hint="give the folder that mlx_lm.lora wrote"
            )
        return cls(folder, adapter, Sight.of(weight_files(folder)), Sight.of(others), Sight.of(parts))

    def check_unchanged(self) -> None:
        """Raise IncompatibleError where a file is not what it was: digest and live model might be of two states."""
        for where, seen in ((self.folder, self.weights), (self.folder, self.others), (self.adapter, self.adapters)):
            if not seen.unchanged:
                raise IncompatibleError("files changed while the model was loaded", path=str(where), hint="load it again")


def identify(name: str, architecture: str, model: nn.Module, tokenizer: Any, files: ModelFiles) -> ModelInfo:
    """The identity of a live model that was loaded from these files, before any cast.

    Raises:
        IncompatibleError: weight files that cannot be read, or files that have changed since `files` were looked at.
    """
    libraries = _libraries()
    vocabulary, state = remembered(
        "tokenizer", files.others, lambda: [digest_of_tokenizer(tokenizer), state_digest(tokenizer, files.folder)], libraries
    )
    both = Sight(
        (*files.weights.files, *files.others.files),
        tuple(sorted((*files.weights.stats, *files.others.stats))),
        min(files.weights.at, files.others.at),
    )
    info = ModelInfo(
        name=name,
        architecture=architecture,
        weights=remembered("weights", files.weights, lambda: digest_of_weights(files.weights.files)),
        tokenizer=vocabulary,
        identity=IDENTITY,
        adapter=None if files.adapter is None else remembered("adapter", files.adapters, lambda: digest_of_adapter(files.adapters.files)),
        quantisation=quantisation_of(model),
        tokenizer_state=state,
        chat_template=template_digest(tokenizer),
        config=config_of(model),
        # With an adapter the live weights are not those of the files.
        sketch=None if files.adapter is not None else remembered("sketch", both, lambda: sketch_of(model), libraries),
    )
    files.check_unchanged()
    return info


def check_live(model: nn.Module, info: ModelInfo) -> None:
    """Raise IncompatibleError where a live model has been quantised, or an adapter put on it, since its identity was taken."""
    if info.identity < 2:
        return
    quantisation = quantisation_of(model)
    if quantisation != info.quantisation:
        before, now = ("none" if q is None else q["summary"] for q in (info.quantisation, quantisation))
        raise IncompatibleError(f"{info.name} was loaded with quantisation {before}, and has {now} now", hint="save it, and load that")
    if info.adapter is None and any("lora_a" in module for _, module in named_modules(model)):
        raise IncompatibleError(f"{info.name} was loaded without an adapter, and has one now", hint="load it with adapter=")


@functools.cache
def _libraries() -> str:
    """Versions of what makes tokenizers and live models of files."""
    return " ".join(f"{library} {version(library)}" for library in ("mlx-lm", "transformers", "tokenizers"))
