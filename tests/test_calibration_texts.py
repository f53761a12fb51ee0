"""The calibration corpus: twenty pieces of four kinds, long enough, and unlike one another and unlike what is held out."""

import json
from collections import Counter

import pytest
from tokenizers import Tokenizer

from kvtool import tiny
from kvtool.calibration_texts import KINDS, texts
from tests.smollm2.make import models_at
from tests.texts import ALL_TEXTS, text

RUN = 40


def runs(piece: str) -> set[str]:
    """Every run of 40 characters, with each run of blanks as one: indentation is no likeness."""
    piece = " ".join(piece.split())
    return {piece[i : i + RUN] for i in range(len(piece) - RUN + 1)}


def test_five_of_each_kind():
    assert Counter(KINDS.values()) == {"prose": 5, "code": 5, "technical": 5, "chat": 5}
    assert list(texts()) == list(KINDS)


def test_bytes():
    sizes = {name: len(piece.encode()) for name, piece in texts().items()}
    assert sum(sizes.values()) <= 120_000, sizes
    assert all("\r" not in piece and piece.endswith("\n") for piece in texts().values())


def test_no_two_pieces_share_a_run():
    seen: dict[str, str] = {}
    for name, piece in texts().items():
        for run in runs(piece):
            assert run not in seen, f"{name} and {seen[run]} both hold {run!r}"
        seen |= dict.fromkeys(runs(piece), name)


@pytest.mark.parametrize("held_out", [*ALL_TEXTS, "filler"])
def test_nothing_held_out_is_calibrated_on(held_out):
    other = runs(tiny.filler_text() if held_out == "filler" else text(held_out))
    for name, piece in texts().items():
        assert not (shared := runs(piece) & other), f"{name} and {held_out} both hold {min(shared)!r}"


def test_chats_are_well_formed():
    for name in (name for name, kind in KINDS.items() if kind == "chat"):
        turns = texts()[name].split("<|im_start|>")
        assert turns[0] == "" and all(turn.endswith("<|im_end|>\n") and turn.count("<|im_end|>") == 1 for turn in turns[1:]), name
        roles = [turn.split("\n", 1)[0] for turn in turns[1:]]
        assert set(roles) <= {"system", "user", "assistant", "tool"} and len(roles) >= 8, (name, roles)
        assert roles[0] in ("system", "user") and roles[-1] == "assistant", (name, roles)


def test_tool_calls_are_json():
    turns = texts()["tools"].removesuffix("<|im_end|>\n").split("<|im_end|>\n")
    calls = [turn.split("\n", 1)[1] for turn in turns if turn.startswith(("<|im_start|>tool", '<|im_start|>assistant\n{"tool"'))]
    assert len(calls) == 12 and all(isinstance(json.loads(call), dict) for call in calls)


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("least", "pieces"), [(1100, texts()), (1400, {name: text(name) for name in ALL_TEXTS})], ids=["calibration", "held out"]
)
def test_tokens(least, pieces):
    tokenizer = Tokenizer.from_file(str(models_at()["smollm2"] / "tokenizer.json"))
    counts = {name: len(tokenizer.encode(piece).ids) for name, piece in pieces.items()}
    assert min(counts.values()) >= least, counts
