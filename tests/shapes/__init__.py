"""Two small models of other shapes than the shipped ones, tiny-c and tiny-d, and how they were made (README.md)."""

from pathlib import Path


def path(name: str) -> Path:
    """The folder of "tiny-c" or "tiny-d"."""
    return Path(__file__).parent / name
