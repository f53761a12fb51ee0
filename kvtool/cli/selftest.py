"""`kvtool selftest`: do the kernels give the right numbers on this machine?"""

import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import click

from kvtool.cli._common import emit, json_option


@click.command("selftest")
@click.option("--function", "functions", multiple=True, metavar="NAME", help="Test this kernel function alone; may be given several times.")
@json_option
@click.pass_context
def command(ctx: click.Context, functions: tuple[str, ...], as_json: bool) -> None:
    """Run every kernel's cases on this machine's back end, against float64 results and the CPU path.

    Send the output with a bug report. Exits with 1 where a case fails, or where fewer ran than must.

    \b
    Example:
      kvtool selftest
      kvtool selftest --function rabitq_encode
    """
    from veloxquant_mlx.metal import FUNCTIONS

    unknown = sorted(set(functions) - set(FUNCTIONS))
    if unknown:
        raise click.UsageError(f"no kernel function {unknown[0]!r}; there are {', '.join(FUNCTIONS)}")
    # On stderr and at once, so that the name of a kernel that takes the process down is there to be sent.
    report = run(functions or tuple(FUNCTIONS), lambda name: click.echo(f"testing {name}", err=True))
    emit(as_json, report, as_text(report))
    ctx.exit(0 if report["passed"] == report["expected"] and not report["failures"] else 1)


def run(functions: tuple[str, ...], announce: Callable[[str], None]) -> dict[str, Any]:
    """What `kvtool selftest` reports, as one object; `announce` gets the name of each function before its cases run."""
    import mlx.core as mx

    from veloxquant_mlx import metal, native
    from veloxquant_mlx.metal._backend import backend, forced
    from veloxquant_mlx.selftest import expected_counts
    from veloxquant_mlx.selftest.cases import CASES
    from veloxquant_mlx.selftest.run import attempt

    here = backend()
    counts = expected_counts()
    rows: dict[str, dict[str, Any]] = {
        name: {"function": name, "runs_on": metal.runs_on(name), "native": 0, "passed": 0, "expected": counts[name], "seconds": 0.0}
        for name in functions
    }
    failures = []
    announced: set[str] = set()
    for case in (case for name in functions for case in CASES if case.function == name):
        row = rows[case.function]
        if case.function not in announced:
            announce(case.function)
            announced.add(case.function)
        start, calls = time.perf_counter(), native.calls()
        problem = attempt(case)
        row["native"] += native.calls() > calls
        if problem is None:
            row["passed"] += 1
        else:
            # Whether the definition is right on this machine tells a kernel's fault from a case's.
            with forced("cpu"):
                on_cpu = attempt(case) if row["runs_on"] != "cpu" else problem
            failures.append({"case": case.id, "problem": problem, "cpu_path": on_cpu or "right"})
        row["seconds"] += time.perf_counter() - start
    return {
        "machine": f"{_system()} {platform.machine()}",
        "device": str(mx.device_info().get("device_name", "unknown")),
        "backend": here,
        "versions": {name: version(name) for name in ("kvtool", "mlx")} | {"python": platform.python_version()},
        "functions": [{**row, "seconds": round(row["seconds"], 3)} for row in rows.values()],
        "passed": sum(row["passed"] for row in rows.values()),
        "expected": sum(row["expected"] for row in rows.values()),
        "failures": failures,
    }


def _system() -> str:
    return f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else f"{platform.system()} {platform.release()}"


def as_text(report: dict[str, Any]) -> str:
    """The report as text."""
    versions = ", ".join(f"{name} {found}" for name, found in report["versions"].items())
    lines = [f"{report['machine']}, {report['device']}, back end {report['backend']}, {versions}"]
    lines.append(f"{'function':38}{'runs on':24}{'native':>7}{'passed':>8}{'of':>6}{'seconds':>9}")
    lines += [
        f"{row['function']:38}{row['runs_on']:24}{row['native']:7}{row['passed']:8}{row['expected']:6}{row['seconds']:9.2f}"
        for row in report["functions"]
    ]
    for failure in report["failures"]:
        lines.append(f"FAILED {failure['case']}: {failure['problem']} (CPU path: {failure['cpu_path']})")
    lines.append(f"{report['passed']} of {report['expected']} cases passed")
    return "\n".join(lines)
