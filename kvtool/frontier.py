"""Rows of a sweep as CSV, and their frontier (KL against bits a value) as SVG or PNG.

The same rows give the same bytes.
"""

import csv
import importlib
import io
import math
import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.sax.saxutils import escape

from formats.atomic import atomic_write, target_of
from formats.errors import BackendError

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 1000, 640, 80, 150, 40, 60
FLOOR = 1e-9  # nats: below it a KL is rounding, as of a raw cache whose rows stand in another order
COLOURS = ("#36c", "#c33", "#293", "#a3a", "#d80", "#088", "#777", "#850", "#e5a", "#46f", "#690", "#b08")
Point = tuple[str, float, float]  # label, bits a value, KL in nats


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


def write_plot(path: str, points: Sequence[Point], title: str) -> None:
    """Write the frontier, atomically.

    Args:
        path: .svg, or .png (needs matplotlib).
        points: (label, bits a value, KL in nats); a KL below FLOOR has no place on the logarithmic axis and is left out.
        title: above the plot.
    """
    shown = [p for p in points if p[2] >= FLOOR and math.isfinite(p[2])]
    data = svg(shown, title).encode() if Path(path).suffix.lower() == ".svg" else _png(path, shown, title)
    with atomic_write(path) as file:
        file.write(data)


def frontier(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both bits and KL, by bits."""
    best: list[Point] = []
    for point in sorted(points, key=lambda p: (p[1], p[2])):
        if not best or point[2] < best[-1][2]:
            best.append(point)
    return best


def families(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points whose labels differ in numbers alone (rvq-2, rvq-3), each family by bits."""
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(re.sub(r"[\d.]+", "", point[0]), []).append(point)
    return {name: sorted(members, key=lambda p: p[1]) for name, members in found.items()}


def without_window(labels: Sequence[str]) -> tuple[list[str], str]:
    """Labels without the exact rows that all of them end with, and those; nothing is taken off where they differ."""
    ends = {"".join(re.findall(r",(?:sink|recent)=\d+", label)) for label in labels}
    end = ends.pop() if len(ends) == 1 else ""
    return [label.removesuffix(end) for label in labels], end.replace(",", ", ").removeprefix(", ")


def svg(points: Sequence[Point], title: str) -> str:
    """The plot as SVG text: KL on a logarithmic axis, one decade a line; a colour and a line a family, the frontier dashed."""
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

    def line(along: Sequence[Point], more: str) -> str:
        places = " ".join(f"{x(b):.1f},{y(k):.1f}" for _, b, k in along)
        return f'<polyline points="{places}" fill="none" {more}/>'

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
    out.append(line(frontier(points), 'stroke="#999" stroke-dasharray="4 4"'))
    labels: list[tuple[float, float, int]] = []
    for colour, members in zip(cycle(COLOURS), families(points).values(), strict=False):
        out.append(line(members, f'stroke="{colour}"'))
        for label, bits, kl in members:
            out.append(f'<circle cx="{x(bits):.1f}" cy="{y(kl):.1f}" r="4" fill="{colour}"/>')
            at_x, at_y = x(bits) + 7, y(kl) - 5
            # A label that would lie on another moves down below it.
            while any(abs(at_y - b) < 12 and at_x < a + 7 * n and a < at_x + 7 * len(label) for a, b, n in labels):
                at_y += 3
            labels.append((at_x, at_y, len(label)))
            out.append(text(at_x, at_y, label, f' fill="{colour}"'))
    return "\n".join([*out, "</svg>"]) + "\n"


def _matplotlib(path: str) -> ModuleType:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        what = "a PNG needs matplotlib, which is not installed"
        raise BackendError(what, path=path, hint="pip install 'kvtool[plot]', or plot to .svg") from error


def _png(path: str, points: Sequence[Point], title: str) -> bytes:
    figure = _matplotlib(path).Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel="bits a value of the coded rows", ylabel="KL, nats", yscale="log")
    axes.grid(True, alpha=0.3)
    axes.plot([p[1] for p in frontier(points)], [p[2] for p in frontier(points)], linestyle="--", color="#999")
    for colour, members in zip(cycle(COLOURS), families(points).values(), strict=False):
        axes.plot([p[1] for p in members], [p[2] for p in members], marker="o", color=colour)
        for label, bits, kl in members:
            axes.annotate(label, (bits, kl), xytext=(5, 4), textcoords="offset points", fontsize=8, color=colour)
    out = io.BytesIO()
    # No version of the library in the file, so that the same table gives the same file.
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
