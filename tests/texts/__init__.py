"""The held-out texts; see README.md beside this file."""

from pathlib import Path

TEXTS = ("prose", "technical", "code")


def text(name: str) -> str:
    """One of `TEXTS`."""
    return Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8")
