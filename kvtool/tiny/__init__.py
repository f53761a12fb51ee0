"""Two small trained llama-type language models and held-out text to measure them on.

``tiny-b`` is ``tiny-a`` trained on with another RoPE base, so the two are related but different models. Both fit
mlx-lm's ``load``. Importing this package loads no MLX.
"""

from pathlib import Path

NAMES: tuple[str, ...] = ("tiny-a", "tiny-b")
_HERE = Path(__file__).resolve().parent


def path(name: str) -> Path:
    """The model directory of ``"tiny-a"`` or ``"tiny-b"``, loadable with ``mlx_lm.load``."""
    if name not in NAMES:
        raise ValueError(f"unknown tiny model {name!r}; known: {', '.join(NAMES)}")
    return _HERE / name


def filler_text() -> str:
    """English prose in the public domain that neither model was trained on (about 270 kB of UTF-8)."""
    return (_HERE / "filler.txt").read_text("utf-8")
