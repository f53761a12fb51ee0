"""The held-out texts; see README.md beside this file."""

from pathlib import Path

TEXTS = ("prose", "technical", "code")
"""What the figures of `tests/smollm2/reach.py` are means of."""
ALL_TEXTS = (*TEXTS, "chat")


def text(name: str) -> str:
    """One of `ALL_TEXTS`."""
    return Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8")
