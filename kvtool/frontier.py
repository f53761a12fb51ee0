"""Rows of a sweep as CSV, and their frontier (KL against bits a value) as SVG or PNG.

The same rows give the same bytes.
"""

import csv
import importlib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.sax.saxutils import escape

from formats.atomic import atomic_write, target_of
from formats.errors import BackendError

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 480, 80, 150, 40, 60


def write_csv(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows of equal keys as CSV with a header, atomically; None is an empty field."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with atomic_write(path) as file:
        file.write(out.getvalue().encode())


def check_plot(path: str) -> None:
    """Find out before the work that a plot can be written there.

    Raises:
        ValueError: neither .svg nor .png.
        BackendError: a PNG without matplotlib.
        OSError: the folder is missing, or the path is a folder.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".svg", ".png"):
        raise ValueError(f"[plot] {path}: must end in .svg or .png.")
    target_of(path)
    if suffix == ".png":
        _matplotlib(path)


def write_plot(path: str, points: Sequence[tuple[str, float, float]], title: str) -> None:
    """Write the frontier, atomically.

    Args:
        path: .svg, or .png (needs matplotlib).
        points: (label, bits a value, KL in nats); a KL of 0 has no place on the logarithmic axis and is left out.
        title: above the plot.
    """
    shown = [p for p in points if p[2] > 0 and math.isfinite(p[2])]
    data = svg(shown, title).encode() if Path(path).suffix.lower() == ".svg" else _png(path, shown, title)
    with atomic_write(path) as file:
        file.write(data)


def frontier(points: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """The points that no other beats in both bits and KL, by bits."""
    best: list[tuple[str, float, float]] = []
    for point in sorted(points, key=lambda p: (p[1], p[2])):
        if not best or point[2] < best[-1][2]:
            best.append(point)
    return best


def svg(points: Sequence[tuple[str, float, float]], title: str) -> str:
    """The plot as SVG text: KL on a logarithmic axis, one decade a line."""
    right = max([math.ceil(p[1]) for p in points], default=1)
    low = min([math.floor(math.log10(p[2])) for p in points], default=-3)
    high = max([math.ceil(math.log10(p[2])) for p in points], default=0)
    high += high == low

    def x(bits: float) -> float:
        return LEFT + bits / right * (WIDTH - LEFT - RIGHT)

    def y(kl: float) -> float:
        return TOP + (high - math.log10(kl)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def text(at_x: float, at_y: float, words: str, more: str = "") -> str:
        return f'<text x="{at_x:.1f}" y="{at_y:.1f}"{more}>{escape(words)}</text>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 24, title, ' font-size="14"'),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, "bits a value of the coded rows", ' text-anchor="middle"'),
        text(20, HEIGHT / 2, "KL, nats", f' text-anchor="middle" transform="rotate(-90 20 {HEIGHT / 2:.1f})"'),
    ]
    for decade in range(low, high + 1):
        at = y(10.0**decade)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        out.append(text(LEFT - 8, at + 4, f"1e{decade}", ' text-anchor="end"'))
    for tick in range(0, right + 1, max(1, math.ceil(right / 10))):
        out.append(f'<line x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#ddd"/>')
        out.append(text(x(tick), HEIGHT - BOTTOM + 18, str(tick), ' text-anchor="middle"'))
    line = " ".join(f"{x(b):.1f},{y(k):.1f}" for _, b, k in frontier(points))
    out.append(f'<polyline points="{line}" fill="none" stroke="#36c"/>')
    for label, bits, kl in points:
        out.append(f'<circle cx="{x(bits):.1f}" cy="{y(kl):.1f}" r="4" fill="#36c"/>')
        out.append(text(x(bits) + 7, y(kl) - 5, label))
    return "\n".join([*out, "</svg>"]) + "\n"


def _matplotlib(path: str) -> ModuleType:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        what = "a PNG needs matplotlib, which is not installed"
        raise BackendError(what, path=path, hint="pip install 'kvtool[plot]', or plot to .svg") from error


def _png(path: str, points: Sequence[tuple[str, float, float]], title: str) -> bytes:
    figure = _matplotlib(path).Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel="bits a value of the coded rows", ylabel="KL, nats", yscale="log")
    axes.grid(True, alpha=0.3)
    best = frontier(points)
    axes.plot([p[1] for p in best], [p[2] for p in best])
    axes.scatter([p[1] for p in points], [p[2] for p in points])
    for label, bits, kl in points:
        axes.annotate(label, (bits, kl), xytext=(5, 4), textcoords="offset points", fontsize=8)
    out = io.BytesIO()
    # No version of the library in the file, so that the same table gives the same file.
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
