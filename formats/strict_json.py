"""JSON for files from strangers: no duplicate keys, no NaN, no bombs; and one canonical way of writing.

The text is scanned before it is parsed, so that depth, element count and integer length are bounded by the scan,
and neither RecursionError nor the int-to-string limit's ValueError can arise inside the parser.
"""

import json
import math
import re
from typing import Any

import numpy as np

from formats.errors import HeaderError

MAX_DEPTH = 32
MAX_ELEMENTS = 1 << 22
MAX_DIGITS = 20  # of 0.00012345678901234567: no float in its shortest form has more in a row
# Possessive: no backtracking, hence no stack of saved positions on a text of megabytes.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DIGITS_TO_ZERO = bytes(ord("0") if chr(i) in "0123456789" else ord(" ") for i in range(256))
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def dumps(value: Any) -> str:
    """Canonical JSON text: keys sorted, no spaces, UTF-8 unescaped, floats in the shortest form that reads back exactly.

    Raises:
        ValueError: NaN, infinity, or a lone surrogate.
        TypeError: a value JSON does not have.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text.encode("utf-8")
    return text


def loads(text: str, what: str) -> Any:
    """Parse JSON strictly.

    Args:
        text: the whole document.
        what: what the document is, for messages ("header", "manifest").
    Raises:
        HeaderError: not JSON, a duplicate key, NaN or infinity, a number of more than MAX_DIGITS digits in a row, a lone surrogate,
            nested deeper than MAX_DEPTH or more than MAX_ELEMENTS elements.
    """
    _scan(text, what)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise HeaderError(f"{what}: duplicate key {twice[:80]!r}")
        return result

    def constant(name: str) -> float:
        raise HeaderError(f"{what}: {name} is not JSON")

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise HeaderError(f"{what}: number {digits[:40]} is out of range")
        return value

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=number)
    except json.JSONDecodeError as error:
        raise HeaderError(f"{what}: not JSON: {error.msg} at character {error.pos}") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise HeaderError(f"{what}: a string holds half of a surrogate pair") from None
    return value


def _scan(text: str, what: str) -> None:
    bare = _STRING.sub("", text).encode("utf-8", "replace")
    if b"0" * (MAX_DIGITS + 1) in bare.translate(_DIGITS_TO_ZERO):
        raise HeaderError(f"{what}: a number of more than {MAX_DIGITS} digits in a row")
    elements = sum(bare.count(sign) for sign in (b",", b"[", b"{", b":"))
    if elements > MAX_ELEMENTS:
        raise HeaderError(f"{what}: {elements} elements, more than {MAX_ELEMENTS}")
    brackets = np.frombuffer(bare.translate(None, _NOT_BRACKETS), np.uint8)
    steps = np.where((brackets == ord("[")) | (brackets == ord("{")), np.int32(1), np.int32(-1))
    depth = int(steps.cumsum(dtype=np.int32).max(initial=0))
    if depth > MAX_DEPTH:
        raise HeaderError(f"{what}: nested {depth} deep, more than {MAX_DEPTH}")
