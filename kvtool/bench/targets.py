"""What a back end is held to, as limits on rows of `kvtool bench`: `--targets` measures just these rows and says which are reached.

A layer of a model of 8 billion parameters at 32768 tokens (131072 on a GPU), and for files 1 GB of float16 in such layers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvtool.bench.measuring import Row

Rows = Mapping[tuple[str, str], Row]
MODEL, MEGABYTES = "32x8x128", 1074.0


@dataclass(frozen=True)
class Target:
    """A figure of a row, and the least that it should be.

    Attributes:
        family, row: of `kvtool bench`.
        what: the figure in words.
        figure: of all rows and the copy bandwidth in GB/s; None where a row was not timed.
        least: of the figure.
    """

    family: str
    row: str
    what: str
    figure: Callable[[Rows, float], float | None]
    least: float


@dataclass(frozen=True)
class Judged:
    """A target, what was measured, and whether that reaches it."""

    family: str
    row: str
    what: str
    least: float
    measured: float | None
    reached: bool


def _of(family: str, row: str, what: str, field: str, least: float) -> Target:
    return Target(family, row, what, lambda rows, copy: getattr(rows[family, row], field), least)


def _output(family: str, row: str, size: int) -> Target:
    """Output bytes of `size` a value, beside what a copy writes in the same time."""

    def figure(rows: Rows, copy: float) -> float | None:
        rate = rows[family, row].values_rate
        return None if rate is None else 2 * size * rate / (copy * 1e9)

    return Target(family, row, "output / bytes copied a second", figure, 1 / 3)


def _beside(row: str, other: str, least: float) -> Target:
    def figure(rows: Rows, copy: float) -> float | None:
        own, known = rows["attend", row].median, rows["attend", other].median
        return None if own is None or known is None else known / own

    return Target("attend", row, f"times as fast as {other}", figure, least)


COPY, SDPA = "times as fast as copying float16 once", "times as fast as MLX's float16 attention"
FRAMES = ("", ",frame=post")  # keys before RoPE, as the codecs keep them unless told otherwise, and as cached
TIMES = {"rabitq": 1.5, "rvq-4": 1.0, "affine-4": 1.0}
LOAD = "times as fast as mlx-lm's load"
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes a value

CPU = (
    *(_of("attend", f"{spec}{frame}: codes", COPY, "to_copy", least) for frame in FRAMES for spec, least in TIMES.items()),
    *(_of("attend", f"{spec}{frame}: codes", SDPA, "speedup", 100.0) for frame in FRAMES for spec in TIMES),
    _beside("tc-2.05: codes", "rvq-4: codes", 0.5),
    *(_of("encode", spec, "values a second", "values_rate", 600e6) for spec in ("rvq-4", "rabitq")),
    *(_output("decode", spec, 4) for spec in ("rvq-4", "rabitq", "affine-4")),
    *(_output("recode", f"{way} {dtype}", size) for dtype, size in DTYPES.items() for way in ("crosskv_rope_recode", "rotate, mlx")),
    _of("files", "rvq-4: load, warm", LOAD, "speedup", 4.0),
    _of("files", "rvq-4: load, cold", LOAD, "speedup", 2.5),
    _of("files", "rvq-4: save", "times as fast as mlx-lm's save and fsync", "speedup", 1 / 1.2),
)
GPU = (
    _of("attend", "k=rabitq:nocenter,v=rvq-4:nocenter: rabitq_fused_attend", SDPA, "speedup", 3.0),
    _of("attend", "k=rvq-2+2:nocenter,v=rvq-4:nocenter: turboquant_fused_rvq_decode_attend", SDPA, "speedup", 2.0),
    _of("attend", "affine-4: scalar_fused_decode_attend", SDPA, "speedup", 2.0),
)


def targets(backend: str) -> tuple[Target, ...]:
    """Of a back end: "cpu", "metal" or "cuda"."""
    return CPU if backend == "cpu" else GPU


def options(backend: str) -> dict[str, Any]:
    """Options of `kvtool bench` for these rows."""
    shape = f"1,32,8,128,{32768 if backend == 'cpu' else 131072}"
    return {"shape": shape, "model_name": MODEL, "megabytes": MEGABYTES}


def judge(chosen: Sequence[Target], rows: Sequence[Row], copy: float) -> list[dict[str, Any]]:
    """Each target beside what was measured, as plain values."""
    known = {(row.family, row.name): row for row in rows}
    judged = []
    for target in chosen:
        measured = target.figure(known, copy)
        reached = measured is not None and measured >= target.least
        judged.append(asdict(Judged(target.family, target.row, target.what, target.least, measured, reached)))
    return judged


def as_text(judged: Sequence[dict[str, Any]]) -> list[str]:
    """A line a target, missed ones named so."""
    lines = ["", "targets"]
    for one in judged:
        measured = "not measured" if one["measured"] is None else f"{one['measured']:.3g}"
        verdict = "reached" if one["reached"] else "MISSED "
        lines.append(f"{verdict}  {one['family']} {one['row']}: {one['what']} {measured}, at least {one['least']:.3g}")
    return lines
