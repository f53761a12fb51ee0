"""Load an mlx-lm model together with its identity."""

import json
import logging
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, hf_repo_to_path, load

from formats.errors import IncompatibleError
from formats.manifest import ModelInfo
from kvtool import tiny
from kvtool.blas import loaded_openblas
from kvtool.identifying import ModelFiles, identify

logger = logging.getLogger(__name__)

REPO_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# What a config, a tokenizer or weights that are not as mlx-lm expects them raise inside it; RuntimeError is MLX's own.
UNLOADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, ImportError, RuntimeError, OSError)
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with who it is.

    Attributes:
        model: the mlx-lm module.
        tokenizer: mlx-lm's tokenizer wrapper.
        info: who it is (`kvtool.identity`), and the dtype it runs in.
        folder: where its files are. adapter: where its adapter's are, or None.
    """

    model: Any
    tokenizer: Any
    info: ModelInfo
    folder: Path
    adapter: Path | None = None

    @property
    def argument(self) -> str:
        """What to give `--model` for it: a shipped name or repository id as it was given, else the folder."""
        shipped = self.info.name in tiny.NAMES and self.folder == tiny.path(self.info.name)
        return self.info.name if shipped or "/" in self.info.name else str(self.folder)

    @property
    def arguments(self) -> list[str]:
        """The same with `--adapter` and its folder, where it has one."""
        return [self.argument, *([] if self.adapter is None else ["--adapter", str(self.adapter)])]


def default_dtype() -> str | None:
    """The dtype to run models in: float32 on MLX's Linux CPU build (16-bit products are 30 times slower there), else None: as stored."""
    return "float32" if sys.platform.startswith("linux") and mx.default_device().type == mx.cpu else None


def load_model(source: str | Path, *, dtype: str = "auto", adapter: str | Path | None = None) -> LoadedModel:
    """Load a model and compute its identity.

    Args:
        source: a model directory, a Hugging Face repository id, or `tiny-a` / `tiny-b` (shipped with kvtool).
        dtype: "auto" (float32 on a Linux CPU, as stored elsewhere), "stored", "float32", "float16" or "bfloat16".
        adapter: a folder of mlx_lm.lora with an adapter to put on top of the weights.
    Returns:
        LoadedModel
    Raises:
        IncompatibleError: there is no such model or adapter, mlx-lm cannot load it, or its files changed meanwhile.
        ValueError: unknown dtype, or an empty name.
    """
    if dtype not in ("auto", "stored", *DTYPES):
        raise ValueError(f"[load_model] dtype must be one of auto, stored, {', '.join(DTYPES)}, but got {dtype!r}.")
    if not str(source):
        raise ValueError("[load_model] model must be a directory, a repository id or tiny-a, but got ''.")
    folder = _folder(source)
    config = _config(folder, "correct it, or copy it again" if Path(source).is_dir() else "download the model again")
    files = ModelFiles.of(folder, None if adapter is None else Path(adapter))
    try:
        model, tokenizer = load(str(folder), adapter_path=None if adapter is None else str(adapter))[:2]
        mx.eval(model.parameters())  # an adapter is read when it is needed, and then it must be what is digested
    except Exception as error:
        # A tokenizer.json that is JSON and no tokenizer raises the bare class.
        if not isinstance(error, UNLOADABLE) and type(error) is not Exception:
            raise
        what, where, hint = "this model", folder, "check the path, and that mlx-lm supports its model_type"
        if adapter is not None:
            what, where, hint = "this model with this adapter", Path(adapter), "give the folder that mlx_lm.lora wrote for this model"
        raise IncompatibleError(f"mlx-lm cannot load {what}: {error}", path=str(where), hint=hint) from error
    name = str(source) if not Path(str(source)).exists() else folder.resolve().name
    info = identify(name, str(config.get("model_type", "unknown")), model, tokenizer, files)
    if default_dtype() and loaded_openblas() is None:
        logger.warning(
            "MLX runs on its reference BLAS, about 15 times slower than OpenBLAS; see `kvtool doctor`, and kvtool.use_openblas()"
        )
    chosen = default_dtype() if dtype == "auto" else None if dtype == "stored" else dtype
    if chosen is not None:
        model.set_dtype(DTYPES[chosen])
        mx.eval(model.parameters())
        logger.info("%s runs in %s", source, chosen)
    return LoadedModel(model, tokenizer, replace(info, dtype=chosen), folder, files.adapter)


def _folder(source: str | Path) -> Path:
    if str(source) in tiny.NAMES and not Path(source).exists():
        return tiny.path(str(source))
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise IncompatibleError(
            "not a model directory", path=str(folder), hint="give the directory that holds config.json and model*.safetensors"
        )
    if not REPO_ID.fullmatch(str(source)):
        raise IncompatibleError(
            "no such directory", path=str(folder), hint="give a model directory, a repository id such as org/name, or tiny-a"
        )
    try:
        return hf_repo_to_path(str(source))
    except LocalEntryNotFoundError:
        logger.info("downloading %s", source)
    except HFValidationError as error:
        raise IncompatibleError(
            "no such directory", path=str(folder), hint="give a model directory, a repository id such as org/name, or tiny-a"
        ) from error
    try:
        return Path(snapshot_download(str(source), allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise IncompatibleError(
            f"neither a local directory nor a repository that can be reached ({type(error).__name__})",
            path=str(source),
            hint="give a local model directory, or download the repository first",
        ) from error


def _config(folder: Path, hint: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise IncompatibleError("no config.json", path=str(folder), hint="give the directory that mlx-lm can load") from error
    except json.JSONDecodeError as error:
        raise IncompatibleError(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}", path=str(path), hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise IncompatibleError(f"not JSON ({error})", path=str(path), hint=hint) from error
    if not isinstance(config, dict):
        raise IncompatibleError(f"holds a {type(config).__name__}, not an object", path=str(path), hint=hint)
    return config
