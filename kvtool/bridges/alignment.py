"""Tokens of two tokenizers over one text: which row of one model's cache stands for which token of the other's.

A target token takes the row of the source token that covers its last byte: that row has seen what the token's own would have, and up to
the rest of the source token more. Where both tokens end at the same byte it has seen just that; the share of target tokens of which this
is so is the overlap. Positions are the target's own. Bytes are those of the tokens themselves, so both tokenizers must be byte-level.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from formats.errors import IncompatibleError
from formats.manifest import ModelInfo
from kvtool.compat import tokenizer_difference
from kvtool.model import LoadedModel

OVERLAP = 0.5  # at least so many target tokens must end where a source token does


@dataclass(frozen=True, eq=False)
class Alignment:
    """How a text's tokens in one tokenizer stand to those in another.

    Attributes:
        source, target: ids of the text.
        rows: (len(target),) the source token that covers each target token's last byte.
        overlap: share of target tokens that end where a source token does.
    """

    source: tuple[int, ...]
    target: tuple[int, ...]
    rows: np.ndarray
    overlap: float

    @classmethod
    def same(cls, ids: Sequence[int]) -> "Alignment":
        """Of one tokenizer with itself."""
        return cls(tuple(ids), tuple(ids), np.arange(len(ids)), 1.0)


def check_tokenizers(source: ModelInfo, target: ModelInfo) -> None:
    """Raise IncompatibleError where two models have unlike tokenizers, saying what goes between them."""
    problem = tokenizer_difference(source, target)
    if problem is not None:
        raise IncompatibleError(
            f"the tokenizer of {source.name} is not that of {target.name}: {problem}",
            hint="kvtool fit --overlap makes a map between tokenizers; recode, import and eval take it with --map MAP --from-model A, "
            "where A computed the rows",
        )


def check_overlap(overlap: float, least: float, source: ModelInfo, target: ModelInfo) -> None:
    """Raise IncompatibleError where the tokens of two models overlap too little."""
    if overlap < least:
        raise IncompatibleError(
            f"{overlap:.0%} of the tokens of {target.name} end where one of {source.name} does, of which {least:.0%} are asked for",
            hint="run the prompt again, or ask for less with --overlap and measure the result with kvtool eval",
        )


def align(source: LoadedModel, target: LoadedModel, ids: Sequence[int]) -> Alignment:
    """The text of the source's ids in the target's tokens.

    Args:
        source: its tokenizer made the ids.
        target: its tokenizer reads the text.
        ids: of a text from its beginning.

    Raises:
        IncompatibleError: a tokenizer that is not byte-level, a special token that only one has, or bytes that do not come back.
    """
    pieces = token_bytes(source, ids)
    data = b"".join(pieces)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise IncompatibleError(
            f"the {len(ids)} tokens of {source.info.name} are no whole text: byte {error.start} of {len(data)} does not decode",
            hint="cut the cache at the end of a character: kvtool join IN.kv --tokens :N",
        ) from error
    own = list(target.tokenizer.encode(text, add_special_tokens=False))
    parts = token_bytes(target, own)
    if b"".join(parts) != data:
        raise IncompatibleError(
            f"the tokenizer of {target.info.name} does not give the text back: {len(data)} bytes became {sum(map(len, parts))}",
            hint="it normalises text, so its tokens cannot be placed; run the prompt again",
        )
    _check_special(source, target, ids)
    ends, wanted = (np.cumsum([len(piece) for piece in each]) for each in (pieces, parts))
    return Alignment(tuple(ids), tuple(own), np.searchsorted(ends, wanted), float(np.isin(wanted, ends).mean()) if len(own) else 1.0)


def align_text(source: LoadedModel, target: LoadedModel, text: str) -> Alignment:
    """A text in both tokenizers, without tokens that only mark its beginning; errors as `align`."""
    return align(source, target, list(source.tokenizer.encode(text, add_special_tokens=False)))


def token_bytes(model: LoadedModel, ids: Sequence[int]) -> list[bytes]:
    """The bytes of each token, special ones as they are written.

    Raises:
        IncompatibleError: the tokenizer is not byte-level.
    """
    table = _bytes_of(model.tokenizer, model.info.name)
    return [table[i] for i in ids]


@lru_cache(maxsize=8)
def _bytes_of(tokenizer: Any, name: str) -> dict[int, bytes]:
    """Id -> bytes of a tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = {} if backend is None else json.loads(backend.to_str())
    decoder = described.get("decoder") or {}
    if "ByteLevel" not in [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", ()))] or described.get("normalizer"):
        raise IncompatibleError(
            f"the tokenizer of {name} is not byte-level, or changes texts before it splits them", hint="run the prompt again"
        )
    added = {entry["id"]: entry["content"].encode() for entry in described.get("added_tokens", ())}
    by_character = _characters()
    plain = {i: token for token, i in backend.get_vocab(with_added_tokens=False).items() if i not in added}  # type: ignore[union-attr]
    return {i: bytes(by_character[c] for c in token) for i, token in plain.items() if set(token) <= set(by_character)} | added


@lru_cache(maxsize=1)
def _characters() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte -> the byte: its own where that is printable, else one from 256 on."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _check_special(source: LoadedModel, target: LoadedModel, ids: Sequence[int]) -> None:
    """Refuse special tokens that the target would read as plain text."""
    special = set(source.tokenizer.all_special_ids) & set(ids)
    names = {source.tokenizer.convert_ids_to_tokens(i) for i in special}
    known = set(target.tokenizer.all_special_tokens)
    if missing := sorted(names - known):
        raise IncompatibleError(
            f"the file has the special token {missing[0]!r:.40}, which {target.info.name} does not have",
            hint="formats of chats do not carry over; run the prompt again in the other model's",
        )
