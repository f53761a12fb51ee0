"""Who computed a cache, as a manifest, a calibration or a map has it. SPEC.md, "Model", has every field."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:
    from formats.manifest import Node

JSON = Any
# 1: weights, tokenizer (its vocabulary and some ids) and dtype alone. 2: the rest as well, where None means that there is none of it.
IDENTITY = 2


@dataclass(frozen=True)
class ModelInfo:
    """The model that a cache belongs to, in layers that are compared one by one. Digests are blake3 in hex, None where unknown.

    Attributes:
        name, architecture: what it is called, and its model_type.
        weights: digest of all tensors of its weight files.
        tokenizer: digest of the vocabulary and of the ids of a few texts.
        dtype: it runs in; None as stored.
        identity: which fields are known: below 2 none of those that follow.
        adapter: digest of the adapter on top of the weights, None where there is none.
        quantisation: {"summary", "blake3"} of the modules that are quantised and how, None where none is.
        tokenizer_state: digest of all that decides the tokenizer's ids.
        chat_template: digest of the template; None without one.
        config: fields of the live model's arguments that may change its arithmetic, nested ones by dotted names.
        sketch: a few hundred of the weights ("values", base64) of tensors named by a digest ("of"), stored as "dtype".
    """

    name: str
    architecture: str
    weights: str | None = None
    tokenizer: str | None = None
    dtype: str | None = None
    identity: int = 1
    adapter: str | None = None
    quantisation: dict[str, str] | None = None
    tokenizer_state: str | None = None
    chat_template: str | None = None
    config: dict[str, JSON] | None = None
    sketch: dict[str, str] | None = None

    @property
    def effective_weights(self) -> str | None:
        """Digest of the weights as they run: of the files' own without an adapter, else of both."""
        if self.adapter is None or self.weights is None:
            return self.weights
        return blake3(f"{self.weights}\n{self.adapter}".encode()).hexdigest()


def model_json(model: ModelInfo) -> dict[str, JSON]:
    """A model as plain JSON values; what its version of the identity does not have is left out."""
    first = ("name", "architecture", "weights", "tokenizer", "dtype")
    return {name: value for name, value in vars(model).items() if model.identity > 1 or name in first}


def model_of(node: "Node") -> ModelInfo:
    """A model object of a manifest.

    Raises:
        ManifestError: a field is missing or malformed.
    """
    members = node.members()
    known = ModelInfo(
        name=node.key("name").text(),
        architecture=node.key("architecture").text(),
        weights=node.key("weights").optional(lambda n: n.digest()),
        tokenizer=node.key("tokenizer").optional(lambda n: n.digest()),
        dtype=node.key("dtype").optional(lambda n: n.text()),
    )
    identity = node.key("identity").integer(1) if "identity" in members else 1
    if identity < 2:
        return known
    return replace(
        known,
        identity=identity,
        adapter=node.key("adapter").optional(lambda n: n.digest()),
        quantisation=node.key("quantisation").optional(_quantisation),
        tokenizer_state=node.key("tokenizer_state").optional(lambda n: n.digest()),
        chat_template=node.key("chat_template").optional(lambda n: n.digest()),
        config=node.key("config").optional(lambda n: n.members()),
        sketch=node.key("sketch").optional(_sketch),
    )


def _quantisation(node: "Node") -> dict[str, str]:
    return {"summary": node.key("summary").text(), "blake3": node.key("blake3").digest()}


def _sketch(node: "Node") -> dict[str, str]:
    return {"of": node.key("of").digest(), "dtype": node.key("dtype").text(), "values": node.key("values").text()}
