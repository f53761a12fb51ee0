"""What share of a prefill's arithmetic a recomputation takes: multiplications and additions of the layers, and of attention.

Embedding, output head and norms are left out on both sides. A layer's weights count as used by every token, so in a mixture of experts the
share is that of a dense model.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from formats.errors import IncompatibleError
from formats.transfer_map import MapFile
from kvtool.model import LoadedModel
from kvtool.probe import probe_model


@dataclass(frozen=True)
class Work:
    """Arithmetic of one model's prefill.

    Args:
        model: the model.
    """

    model: LoadedModel

    @cached_property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(weights, query heads x head size) of each layer."""
        modules: list[Any] = list(getattr(self.model.model, "layers", []))
        probes = probe_model(self.model.model)
        if len(modules) != len(probes):
            raise IncompatibleError(f"{self.model.info.name}: {len(modules)} layers for {len(probes)} caches", hint="it cannot be counted")
        args = getattr(self.model.model, "args", None)
        found = []
        for module, probe in zip(modules, probes, strict=True):
            weights = _weights(module)
            heads = getattr(args, "num_attention_heads", None) or (0 if probe.k is None else probe.k.heads)
            found.append((weights, 0 if probe.k is None else heads * probe.k.dim))
        return tuple(found)

    def span(self, start: int, stop: int, first: int = 0, last: int | None = None) -> int:
        """Operations of tokens start to stop in layers first to last (excluded; None: to the end), each after all tokens before it."""
        tokens, seen = stop - start, (stop * (stop + 1) - start * (start + 1)) // 2
        return sum(2 * weights * tokens + 4 * width * seen for weights, width in self.layers[first:last])

    @cached_property
    def projections(self) -> tuple[int, ...]:
        """Weights of each layer that its keys and values come from; all of it where they are not told apart."""
        found = []
        for module, (weights, _) in zip(self.model.model.layers, self.layers, strict=True):
            own = [part for name, part in module.named_modules() if name.rpartition(".")[2] in ("k_proj", "v_proj")]
            found.append(sum(map(_weights, own)) if len(own) == 2 else weights)
        return tuple(found)

    def rows(self, tokens: int, layer: int) -> int:
        """Operations of the keys and values alone of so many tokens in one layer, from what enters it."""
        return 2 * self.projections[layer] * tokens

    def of_map(self, mapping: MapFile, tokens: int) -> int:
        """Operations of a map on so many tokens."""
        each = sum(own.left.size + (0 if own.right is None else own.right.size) for own in mapping.layers.values())
        return 2 * each * tokens

    def share(self, operations: int, tokens: int) -> float:
        """Operations over those of the whole prefill of so many tokens."""
        return operations / self.span(0, tokens) if tokens else 0.0


def _weights(module: Any) -> int:
    """Entries of a module's matrices; of quantised ones those that their codes stand for."""
    total = 0
    for _, part in module.named_modules():
        arrays = {name: x for name, x in part.items() if isinstance(x, mx.array) and not name.startswith("_")}
        if "scales" in arrays and hasattr(part, "group_size"):
            total += arrays.pop("scales").size * part.group_size
            arrays = {name: x for name, x in arrays.items() if name not in ("weight", "biases")}
        total += sum(x.size for x in arrays.values() if x.ndim > 1)
    return total
