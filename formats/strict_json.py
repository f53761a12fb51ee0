"""JSON for files from strangers: no duplicate keys, no NaN, no bombs; and one canonical way of writing.

The text is scanned before it is parsed, so that depth, element count, integer length and the memory of what it describes are bounded by
the scan, and neither RecursionError nor the int-to-string limit's ValueError can arise inside the parser.
"""

import json
import math
import re
import sys
from functools import partial
from typing import Any

import numpy as np

from formats.errors import HeaderError

MAX_DEPTH = 32
MAX_ELEMENTS = 1 << 22
ALLOWANCE = 1 << 26  # bytes that reading may take whatever the input is: a sound file may be small beside its header
MAX_DIGITS = 20  # of 0.00012345678901234567: no float in its shortest form has more in a row
_BLOCK = 1 << 16
_PIECES = 1 << 13  # characters whose strings are taken out at a time: an object is made of each piece between quotes
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DIGITS_TO_ZERO = bytes(ord("0") if chr(i) in "0123456789" else ord(" ") for i in range(256))
_KEY = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"(\s*+:)?+', re.DOTALL)
# Bytes that CPython takes at most for each sign and what belongs to it, besides the characters of strings: measured, on 64 bits.
_TAKES = {b"[": 96, b"{": 224, b",": 72, b":": 24}
_KEY_TAKES, _WIDE_TAKES = 96, 32  # what a key that no other object has takes more, and each string where characters are wide
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


class Room:
    """Memory that reading one input may take: twice its bytes and ALLOWANCE. Pages of a mapped file are not counted.

    Args:
        size: bytes of the input, a whole file where its header is read.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = 2 * size + ALLOWANCE

    def take(self, need: int, what: str) -> None:
        """Set bytes aside. Raises HeaderError where they are not there."""
        if need > self.left:
            raise HeaderError(
                f"{what}: reading it may take {need} bytes of memory; {self.left} are left of the {2 * self.size + ALLOWANCE} "
                f"that {self.size} bytes of input may take"
            )
        self.left -= need


def loads(text: str, what: str, room: Room) -> Any:
    """Parse JSON strictly.

    Args:
        text: the whole document.
        what: what the document is, for messages ("header", "manifest").
        room: of the input that the text is from, which pays for the objects made here; the text is paid for.
    Raises:
        HeaderError: not JSON, a duplicate key, NaN or infinity, a number of more than MAX_DIGITS digits in a row, a lone surrogate,
            nested deeper than MAX_DEPTH, more than MAX_ELEMENTS elements, or more of them than there is room for.
    """
    expected, members = scan(text, what, room), 0

    def counted(found: dict[str, Any]) -> dict[str, Any]:
        nonlocal members
        members += len(found)
        return found

    def constant(name: str) -> float:
        raise HeaderError(f"{what}: {name} is not JSON")

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise HeaderError(f"{what}: number {digits[:40]} is out of range")
        return value

    try:
        value = json.loads(text, object_hook=counted, parse_constant=constant, parse_float=number)
        if members != expected:
            # Counting costs no memory, where pairs of each object would; here something is wrong, and its name is wanted.
            del value
            json.loads(text, object_pairs_hook=partial(_name_twice, what))
    except json.JSONDecodeError as error:
        raise HeaderError(f"{what}: not JSON: {error.msg} at character {error.pos}") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise HeaderError(f"{what}: a string holds half of a surrogate pair") from None
    return value


def _name_twice(what: str, items: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in items:
        if key in seen:
            raise HeaderError(f"{what}: duplicate key {key[:80]!r}")
        seen.add(key)


def scan(text: str, what: str, room: Room) -> int:
    """What `loads` checks before it parses. Returns how many members the objects have together. Errors as `loads`."""
    bare = _bare(text)
    elements = sum(bare.count(sign) for sign in (b",", b"[", b"{", b":"))
    if elements > MAX_ELEMENTS:
        raise HeaderError(f"{what}: {elements} elements, more than {MAX_ELEMENTS}")
    depth = deepest = 0
    for start in range(0, len(bare), _BLOCK):
        block = bare[start : start + _BLOCK + MAX_DIGITS]
        if b"0" * (MAX_DIGITS + 1) in block.translate(_DIGITS_TO_ZERO):
            raise HeaderError(f"{what}: a number of more than {MAX_DIGITS} digits in a row")
        signs = np.frombuffer(block[:_BLOCK].translate(None, _NOT_BRACKETS), np.uint8)
        depths = depth + np.where((signs == ord("[")) | (signs == ord("{")), np.int32(1), np.int32(-1)).cumsum(dtype=np.int32)
        depth, deepest = int(depths[-1]) if len(depths) else depth, max(deepest, int(depths.max(initial=0)))
    if deepest > MAX_DEPTH:
        raise HeaderError(f"{what}: nested {deepest} deep, more than {MAX_DEPTH}")
    room.take(_taken(text, bare, room.left), what)
    return bare.count(b":")


def _bare(text: str) -> bytearray:
    """A text without its strings, as far as a parser comes: to a backslash outside of them, or to a string without an end."""
    kept, before, within = bytearray(), "", 0
    for start in range(0, len(text), _PIECES):
        # Backslashes pair up from the left; one that is left over is about the next character, which may be the next block's.
        block = (before + text[start : start + _PIECES]).replace("\\\\", "")
        before = "\\" if block.endswith("\\") else ""
        pieces = block[: len(block) - len(before)].replace('\\"', "").split('"')
        kept += "".join(pieces[within::2]).encode("utf-8", "replace")
        within = (within + len(pieces) - 1) % 2
    return kept


def width_of(data: bytes, start: int) -> int:
    """Bytes that a character of a text takes, and of strings parsed from it, at most; the text is `data` from `start` on, in UTF-8."""
    most = int(np.frombuffer(data, np.uint8, offset=start).max(initial=0))
    return 4 if most >= 0xF0 or data.find(b"\\u", start) >= 0 else 2 if most >= 0xC4 else 1


def _taken(text: str, bare: bytearray, left: int) -> int:
    """At most so many bytes do the objects of a text take; of many keys a closer bound, where the first does not fit."""
    # Characters of one text are all as wide as its widest.
    width = 4 if "\\u" in text or sys.getsizeof(text) >= 4 * len(text) else 2 if sys.getsizeof(text) >= 2 * len(text) else 1
    members = bare.count(b":")
    fixed = sum(bare.count(sign) * size for sign, size in _TAKES.items()) + width * (len(text) - len(bare))
    if width > 1:
        fixed += _WIDE_TAKES * (members + bare.count(b",") + bare.count(b"["))
    if fixed + members * _KEY_TAKES <= left or fixed > left:
        return fixed + members * _KEY_TAKES
    keys = np.fromiter((hash(found[1]) for found in _KEY.finditer(text) if found[2]), np.int64)
    keys.sort()  # np.unique would bring megabytes of its own
    return fixed + (int(np.count_nonzero(keys[1:] != keys[:-1])) + 1) * _KEY_TAKES
