"""Rows as bars, SVG or PNG: median time a call on a logarithmic axis, with quartiles."""

import importlib
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from formats.atomic import atomic_write
from kvtool.bench.measuring import Row
from kvtool.frontier import COLOURS

WIDTH, LEFT, RIGHT, TOP, STEP, BOTTOM = 1060, 330, 210, 50, 20, 40


def write_plot(path: str, rows: Sequence[Row], title: str) -> None:
    """Write the rows that were timed, atomically.

    Args:
        path: .svg, or .png (needs matplotlib); see `kvtool.frontier.check_plot`.
    """
    timed = [row for row in rows if row.median is not None]
    data = svg(timed, title).encode() if Path(path).suffix.lower() == ".svg" else _png(timed, title)
    with atomic_write(path) as file:
        file.write(data)


def label(row: Row) -> str:
    """Rate and speed-up of a row, where it has them."""
    words = [duration(row.median)]
    words += [f"{row.rate:.3g} GB/s"] if row.rate is not None else []
    return ", ".join(words + ([f"x{row.speedup:.2f}"] if row.speedup is not None else []))


def duration(seconds: float | None) -> str:
    """Seconds with three digits in a unit that suits."""
    if seconds is None:
        return "-"
    unit, factor = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * factor:.3g} {unit}"


def colours(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for each family."""
    return dict(zip(dict.fromkeys(row.family for row in rows), COLOURS, strict=False))


def svg(rows: Sequence[Row], title: str) -> str:
    """The plot as SVG text."""
    low, high = _decades(rows)
    height = TOP + STEP * len(rows) + BOTTOM

    def x(seconds: float) -> float:
        return LEFT + (math.log10(seconds) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="24" font-size="14">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 8}" text-anchor="middle">time a call, median and quartiles</text>',
    ]
    for decade in range(low, high + 1):
        at = x(10.0**decade)
        out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - BOTTOM}" stroke="#ddd"/>')
        out.append(f'<text x="{at:.1f}" y="{height - BOTTOM + 14}" text-anchor="middle">{duration(10.0**decade)}</text>')
    colour = colours(rows)
    for i, row in enumerate(rows):
        assert row.median is not None and row.low is not None and row.high is not None
        y = TOP + STEP * i + STEP / 2
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(f"{row.family} {row.name}")}</text>')
        size = f'width="{x(row.median) - LEFT:.1f}" height="{STEP - 6}"'
        out.append(f'<rect class="bar" x="{LEFT}" y="{y - STEP / 2 + 3:.1f}" {size} fill="{colour[row.family]}" fill-opacity="0.7"/>')
        out.append(f'<line x1="{x(row.low):.1f}" x2="{x(row.high):.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="black" stroke-width="2"/>')
        out.append(f'<text x="{x(row.high) + 6:.1f}" y="{y + 4:.1f}">{escape(label(row))}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _decades(rows: Sequence[Row]) -> tuple[int, int]:
    low = min((math.floor(math.log10(row.low)) for row in rows if row.low), default=-3)
    high = max((math.ceil(math.log10(row.high)) for row in rows if row.high), default=0)
    return low, high + (high == low)


def _png(rows: Sequence[Row], title: str) -> bytes:
    figure: Any = importlib.import_module("matplotlib.figure").Figure(figsize=(10, 1.2 + 0.25 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel="time a call, s: median and quartiles", xscale="log")
    axes.invert_yaxis()
    axes.margins(y=0.01)
    colour = colours(rows)
    for i, row in enumerate(rows):
        assert row.median is not None and row.low is not None and row.high is not None
        axes.barh(i, row.median, xerr=[[row.median - row.low], [row.high - row.median]], color=colour[row.family], alpha=0.7)
        axes.annotate(label(row), (row.high, i), xytext=(4, -3), textcoords="offset points", fontsize=8)
    # Room for the labels, which stand behind the bars.
    first, last = axes.get_xlim()
    axes.set_xlim(first, last * (last / first) ** 0.3)
    axes.set_yticks(range(len(rows)), [f"{row.family} {row.name}" for row in rows], fontsize=8)
    out = io.BytesIO()
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
