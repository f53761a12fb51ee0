"""What is counted of a text before it is parsed, against a walk from character to character."""

import json
import random

import pytest

from formats import strict_json
from formats.errors import HeaderError
from formats.strict_json import Room, loads, scan

BLOCKS = (1, 2, 3, 7, 1 << 13)


def outside(text: str) -> str | None:
    """A text without its strings, quotes included; None where no parser comes to its end."""
    kept, at = "", 0
    while at < len(text):
        if text[at] == "\\":
            return None
        if text[at] != '"':
            kept += text[at]
            at += 1
            continue
        at += 1
        while at < len(text) and text[at] != '"':
            at += 2 if text[at] == "\\" else 1
        if at >= len(text):
            return None
        at += 1
    return kept


@pytest.mark.parametrize("block", BLOCKS)
def test_strings_are_taken_out(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of backslashes and quotes cut at every place, and texts that a parser leaves midway: it has then met no more than is counted."""
    monkeypatch.setattr(strict_json, "_PIECES", block)
    draw, whole = random.Random(0), 0
    for _ in range(4000):
        text = "".join(draw.choice('\\\\\\""",[é€\U0001f600') for _ in range(draw.randrange(24)))
        found = strict_json._bare(text).decode()
        if outside(text) is not None:
            whole += 1
            assert found == outside(text), text
        else:
            before = max((kept for i in range(len(text)) if (kept := outside(text[:i])) is not None), key=len)
            assert found.startswith(before), text
    assert whole > 500


@pytest.mark.parametrize("block", BLOCKS)
def test_members_of_documents(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "_PIECES", block)
    names = ['"', "\\", '\\"', "a:b", "{", "\\\\", "\n", "é", '"\\']
    value = {name: [dict.fromkeys(names, name), name + "\\"] for name in names}
    text = json.dumps(value, ensure_ascii=False)
    assert loads(text, "header", Room(1 << 20)) == value
    assert scan(text, "header", Room(1 << 20)) == 9 + 81


@pytest.mark.parametrize("text", ['\\"' + "[" * 100, '"a' + "[" * 100, '["\\"' + "[" * 100])
def test_what_no_parser_reads_is_no_json(text: str) -> None:
    """Refused by the count, or by the parser, which stops before all those brackets: no recursion."""
    with pytest.raises(HeaderError, match=r"not JSON|nested 100 deep"):
        loads(text, "header", Room(1 << 20))


def test_depth_behind_strings_of_quotes() -> None:
    with pytest.raises(HeaderError, match="nested 33 deep"):
        loads('["\\\\","\\"",' + "[" * 32 + "]" * 33, "header", Room(1 << 20))
