"""Model directories made for tests: copies of tiny-a with something changed, quantised or cast, and adapters for it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load, quantize_model, save_config, save_model

from kvtool import tiny


def copied(target: Path) -> Path:
    """A copy of tiny-a."""
    return Path(shutil.copytree(tiny.path("tiny-a"), target))


def edited(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """A JSON file changed in place."""
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def quantised(source: Path, target: Path, bits: int, mode: str = "affine", group_size: int = 64) -> Path:
    """A model directory quantised by mlx-lm. The target may be there already, and then is quantised in place."""
    if source != target:
        shutil.copytree(source, target, dirs_exist_ok=True)
    model, _, config = load(str(source), return_config=True)
    model, config = quantize_model(model, config, group_size, bits, mode=mode)
    _written(target, model, config)
    return target


def cast(source: Path, target: Path, dtype: mx.Dtype, change: float = 0.0) -> Path:
    """A model directory in another dtype, every weight moved by a random share of itself."""
    shutil.copytree(source, target)
    model, _, config = load(str(source), return_config=True)
    if change:
        noise = [(name, w * (1 + change * mx.random.normal(w.shape, key=mx.random.key(i)))) for i, (name, w) in enumerate(_flat(model))]
        model.load_weights(noise)
    model.set_dtype(dtype)
    _written(target, model, config)
    return target


def _flat(model: Any) -> list[tuple[str, mx.array]]:
    return list(tree_flatten(model.parameters()))


def _written(target: Path, model: Any, config: dict[str, Any]) -> None:
    for path in target.glob("model*.safetensors"):
        path.unlink()
    save_model(target, model)
    save_config(config, target / "config.json")


def adapter(model: Path, target: Path, seed: int = 0, rank: int = 4, scale: float = 10.0, **extra: Any) -> Path:
    """An adapter for a model directory with random matrices, as mlx_lm.lora writes it."""
    live = load(str(model))[0]
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0}, **extra}
    linear_to_lora_layers(live, config["num_layers"], dict(config["lora_parameters"]))
    own = [(name, w) for name, w in _flat(live) if name.endswith(("lora_a", "lora_b"))]
    target.mkdir(parents=True)
    weights = {name: 0.05 * mx.random.normal(w.shape, key=mx.random.key(1000 * seed + i)) for i, (name, w) in enumerate(own)}
    mx.save_safetensors(str(target / "adapters.safetensors"), weights)
    (target / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return target
