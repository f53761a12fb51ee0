"""What a back end is held to, as limits on rows of `kvtool bench`: `--targets` measures just these rows and says which are reached.

A layer of a model of 8 billion parameters at 32768 tokens, and for files 1 GB of float16 in such layers. On a GPU at 131072 tokens, at
32768 of 8 sequences, and 2048 queries at the end of 8192 tokens (measured on an H200: tests/results/h200-attend.md).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
class Setting:
    """Options of `kvtool bench` for one measurement, and what its rows are held to."""

    options: Mapping[str, Any]
    targets: tuple[Target, ...]


@dataclass(frozen=True)
class Judged:
    """A target, the options that it is measured with, what was measured, and whether that reaches it."""

    shape: str
    queries: int
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
LOAD, SHARE = "times as fast as mlx-lm's load", "bytes a second / a copy's"
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes a value

CPU_TARGETS = (
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
SIGNS, PREFILL = "k=rabitq:nocenter,v=rvq-4:nocenter", {"shape": "1,32,8,128,8192", "queries": 2048}
DECODERS = {  # times as fast as MLX
    f"{SIGNS}: rabitq_fused_attend": 3.0,
    "k=rvq-2+2:nocenter,v=rvq-4:nocenter: turboquant_fused_rvq_decode_attend": 2.0,
    "affine-4: scalar_fused_decode_attend": 2.0,
}


def _decoders(share: float) -> Iterator[Target]:
    for row, least in DECODERS.items():
        yield _of("attend", row, SDPA, "speedup", least)
        yield _of("attend", row, SHARE, "of_copy", share)


CPU = (Setting({"shape": "1,32,8,128,32768", "model_name": MODEL, "megabytes": MEGABYTES}, CPU_TARGETS),)
GPU = (
    Setting(
        {"shape": "1,32,8,128,131072"},
        (
            *_decoders(0.6),
            _of("encode", "rabitq_encode", SHARE, "of_copy", 0.5),
            _of("encode", "rvq_quant_pack, 4 bits", SHARE, "of_copy", 0.4),
        ),
    ),
    Setting({"shape": "8,32,8,128,32768"}, tuple(_decoders(0.6))),
    Setting(
        PREFILL,
        (
            _of("attend", "flash_prefill_attend float16", SDPA, "speedup", 0.6),
            _of("attend", f"{SIGNS}: rabitq_prefill_attend", SDPA, "speedup", 0.5),
        ),
    ),
)

# Of CUDA alone, for it is a figure of a large GPU: 1 TB/s of float16.
INPUT = tuple(_of("encode", row, "values a second", "values_rate", 0.5e12) for row in ("rabitq_encode", "rvq_quant_pack, 4 bits"))
CUDA = (replace(GPU[0], targets=(*GPU[0].targets, *INPUT)), *GPU[1:])


def settings(backend: str) -> tuple[Setting, ...]:
    """Of a back end: "cpu", "metal" or "cuda"."""
    return {"cpu": CPU, "cuda": CUDA}.get(backend, GPU)


def judge(setting: Setting, rows: Sequence[Row], copy: float) -> list[dict[str, Any]]:
    """Each target beside what was measured, as plain values."""
    known = {(row.family, row.name): row for row in rows}
    judged = []
    for target in setting.targets:
        measured = target.figure(known, copy)
        reached = measured is not None and measured >= target.least
        of = (setting.options["shape"], setting.options.get("queries", 1), target.family, target.row, target.what)
        judged.append(asdict(Judged(*of, target.least, measured, reached)))
    return judged


def as_text(judged: Sequence[dict[str, Any]]) -> list[str]:
    """A line a target, missed ones named so."""
    lines = ["", "targets"]
    for one in judged:
        measured = "not measured" if one["measured"] is None else f"{one['measured']:.3g}"
        verdict = "reached" if one["reached"] else "MISSED "
        at = one["shape"] + (f", {one['queries']} queries" if one["queries"] > 1 else "")
        lines.append(f"{verdict}  {one['family']} {one['row']} ({at}): {one['what']} {measured}, at least {one['least']:.3g}")
    return lines
