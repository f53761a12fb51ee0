"""The default calibration corpus: twenty unlike texts of at least 1100 tokens each; origins and licences are in README.md.

Importing this package loads no MLX.
"""

from pathlib import Path

KINDS: dict[str, str] = {
    "austen": "prose",
    "factbook": "prose",
    "newton": "prose",
    "shakespeare": "prose",
    "twain": "prose",
    "python": "code",
    "shell": "code",
    "sql": "code",
    "sqlite": "code",
    "typescript": "code",
    "api": "technical",
    "incident": "technical",
    "physics": "technical",
    "protocol": "technical",
    "readme": "technical",
    "coding": "chat",
    "languages": "chat",
    "planning": "chat",
    "tools": "chat",
    "tutoring": "chat",
}
"""Name of a text -> prose, code, technical or chat."""


def texts() -> dict[str, str]:
    """Every text by its name, in the order of `KINDS`."""
    folder = Path(__file__).resolve().parent
    return {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in KINDS}
