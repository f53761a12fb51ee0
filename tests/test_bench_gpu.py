"""`kvtool bench` as a GPU runs it: dtypes, kernels, calls evaluated together, limits that count tables of halves. No GPU is asked for."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvtool.bench import attending, coding, functions, measuring, oracle, timing
from kvtool.bench.measuring import Case, Checked, Prepared, Row, measure
from kvtool.bench.rows import Size, blocks, head_rows, plan_of, rows
from kvtool.bench.targets import DECODERS, GPU, SIGNS, Setting, judge, settings
from kvtool.bench.timing import arrays, copy_bandwidth, timed_together
from kvtool.cli import run
from tests import h200_attend, h200_encode, h200_prefill
from tests.cuda_emulation.emulator import EmulatedCuda, unavailable
from veloxquant_mlx import metal
from veloxquant_mlx.metal._backend import forced
from veloxquant_mlx.metal._kernel import Kernel, compiled, using

SIZE = Size(1, 8, 2, 128, 96)
HALF = mx.float16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COPY_BYTES", 1 << 20), ("SAMPLE", 0.0), ("TOGETHER", 0.0), ("COPIED", 0)):
        monkeypatch.setattr(timing, name, value)


@contextmanager
def on_cuda(seen: list[tuple[str, dict[str, mx.Dtype]]]) -> Iterator[None]:
    """Kernels are noted and give zeros, which nothing evaluates."""

    def launch(kernel: Kernel, given: Sequence[mx.array], template: Any, grid: Any, group: Any, shapes: Any, dtypes: Any) -> list[mx.array]:
        seen.append((kernel.name, {name: x.dtype for name, x in zip(kernel.inputs, given, strict=True)}))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    with using(launch), forced("cuda"):
        yield


def attend_rows(size: Size) -> dict[str, Case]:
    """The targets' rows of a GPU, and their peer, with codes that are encoded before CUDA is asked for."""
    specs = (SIGNS, "k=rvq-2+2:nocenter,v=rvq-4:nocenter", "affine-4")
    return {case.name: case for case in attending.cases(size, specs, HALF, 1)}


def prepared(case: Case, spec: str | None, size: Size) -> Prepared:
    if spec is not None:
        blocks(spec, size, HALF, 1, "post")
    with forced("cuda"):
        return case.prepare()


@pytest.mark.parametrize("row", [*DECODERS, f"{SIGNS}: rabitq_prefill_attend", "flash_prefill_attend float16"])
def test_the_kernels_and_dtypes_that_the_scripts_for_an_h200_time(row: str) -> None:
    """The same kernels first, queries and outputs of 16 bits; and no call evaluates anything, so that all its work is in the time."""
    function, size = row.rpartition(": ")[2].split()[0], replace(SIZE, queries=5) if "prefill" in row else SIZE
    case = attend_rows(size)[row]
    ready = prepared(case, case.spec, size)
    ours: list[tuple[str, dict[str, mx.Dtype]]] = []
    with on_cuda(ours):
        out = mx.compile(ready.run)(*ready.given)
    theirs: list[tuple[str, dict[str, mx.Dtype]]] = []
    with on_cuda(theirs):
        if "prefill" in row:
            given = h200_prefill.MAKERS[function](1, 5, 96, 128, HALF)
        else:
            given = h200_attend.MAKERS[function](1, 96)
        getattr(metal, function)(**given)
    assert ours[0][0] == theirs[0][0] == f"{function}_{'tiles' if 'prefill' in row else 'decode'}"
    assert ours[0][1]["q"] == theirs[0][1]["q"] == out.dtype == HALF
    wide = {name for name, dtype in ours[0][1].items() if dtype == mx.float32}
    assert not wide & {"k_mag", "k_norm", "k_bias", "v_scale", "k_scale", "v_token_scale", "k", "v"} - {
        name for name, dtype in theirs[0][1].items() if dtype == mx.float32
    }


@pytest.mark.parametrize("row", [row for row in DECODERS if row.startswith("k=")])
def test_queries_are_rotated_before_the_time_on_a_gpu_alone(row: str) -> None:
    case = attend_rows(SIZE)[row]
    q = rows(SIZE, HALF, 1).q
    here = case.prepare().given[0]
    there = prepared(case, case.spec, SIZE).given[0]
    assert mx.array_equal(here, q).item() and there[0].dtype == HALF and there[0].shape == q.shape
    wanted = oracle.to_numpy(q) @ oracle.rotation(SIZE.dim, plan_of(str(case.spec), SIZE, 1).k.seed).T
    assert oracle.relative(oracle.to_numpy(there[0]), wanted) < 2.0**-11


@pytest.mark.parametrize("row", ["rabitq_encode", "rvq_quant_pack, 4 bits"])
def test_encoders_get_halves(row: str) -> None:
    case = next(one for one in coding.encoding(SIZE, (), HALF, 1) if one.name == row)
    ours: list[tuple[str, dict[str, mx.Dtype]]] = []
    theirs: list[tuple[str, dict[str, mx.Dtype]]] = []
    ready = prepared(case, None, SIZE)
    with on_cuda(ours):
        mx.compile(ready.run)(*ready.given)
    with on_cuda(theirs):
        h200_encode.FUNCTIONS[row](h200_encode.inputs(HALF, 2, 96, 128))
    assert ours[0][0] == theirs[0][0] and HALF in ours[0][1].values()


def test_a_call_that_evaluates_would_be_found() -> None:
    def run(x: mx.array) -> mx.array:
        mx.eval(x)
        return x + 1

    with pytest.raises(ValueError, match="transformations"):
        mx.compile(run)(mx.zeros((4,)))


def test_calls_are_built_first_and_evaluated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of inputs come in turn, large arrays in memory of their own; as many calls as take TOGETHER, as far as memory reaches."""
    events: list[Any] = []
    evaluated = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda graphs: (events.append(("eval", len(graphs))), evaluated(graphs)))
    x, table = mx.arange(256, dtype=mx.float32), mx.arange(4, dtype=mx.float32)
    monkeypatch.setattr(timing, "COPIED", 1024)

    def run(x: mx.array, tables: list[mx.array]) -> mx.array:
        events.append((id(x), id(tables[0])))
        return x + tables[0][1]

    times, last = timed_together(run, (x, [table]), 0.0)
    assert mx.array_equal(last, x + 1).item() and times.runs == timing.LEAST_RUNS and times.sets == timing.SETS
    assert times.alone is not None and times.alone > 0 and times.calls == timing.SETS
    batches = [i for i, event in enumerate(events) if event[0] == "eval"]
    start = len(events) - timing.LEAST_RUNS * (timing.SETS + 1)
    measured = events[start:]
    for i in range(0, len(measured), timing.SETS + 1):
        *calls, end = measured[i : i + timing.SETS + 1]
        assert end == ("eval", timing.SETS) and len({call[0] for call in calls}) == timing.SETS and len({call[1] for call in calls}) == 1
    assert len(batches) >= timing.LEAST_RUNS
    monkeypatch.setattr(timing, "TOGETHER", 1e9)
    monkeypatch.setattr(timing, "device_memory", lambda: 7 * 1024 * timing.HELD)
    assert timed_together(run, (x, [table]), 0.0)[0].calls == 7  # results of a KiB each
    monkeypatch.setattr(timing, "device_memory", lambda: 1 << 40)
    monkeypatch.setattr(timing, "MOST_TOGETHER", 11)
    assert timed_together(run, (x, [table]), 0.0)[0].calls == 11


def test_building_a_graph_is_not_in_the_time_but_in_that_of_a_call_alone() -> None:
    def run(x: mx.array) -> mx.array:
        time.sleep(0.02)
        return x + 1

    times, _ = timed_together(run, (mx.zeros((4,)),), 0.0)
    assert times.alone is not None and times.low < 0.01 < 0.02 <= times.alone


def test_the_time_of_a_call_is_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the device is in the time, divided by the calls that it was for."""
    monkeypatch.setattr(mx, "synchronize", lambda: time.sleep(0.06))
    times, _ = timed_together(lambda x: x + 1, (mx.zeros((4,)),), 0.0)
    assert 0.06 / timing.SETS <= times.low < 0.06


def test_copies_are_equal_and_apart() -> None:
    given = (mx.arange(5), [mx.arange(6.0).reshape(2, 3)], {"a": mx.zeros((0, 2))}, 3)
    made = timing._copied(given)
    assert [np.array(a).tolist() for a in arrays(made)] == [np.array(a).tolist() for a in arrays(given)] and made[3] == 3
    assert all(a is not b and a.shape == b.shape for a, b in zip(arrays(made), arrays(given), strict=True))


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with forced("cuda"):
        assert run(["bench", *words]) == 0
    return capsys.readouterr().out


def test_rows_say_how_many_calls_went_together(capsys: pytest.CaptureFixture[str]) -> None:
    """MLX's own attention and the copy are timed as the kernels are; what is timed one by one is compared with a call alone."""
    words = ("attend", "--shape", "1,4,2,32,64", "--codec", "rvq-4", "--seconds", "0")
    only = ("--only", "sdpa float32", "--only", "rvq-4: decode, sdpa")
    found = {row["name"]: row for row in json.loads(bench(capsys, *words, *only, "--json"))["rows"]}
    for name in ("sdpa float16", "sdpa float32"):
        assert (found[name]["calls"], found[name]["sets"]) == (timing.SETS, timing.SETS) and found[name]["alone"] > 0
    decoding = found["rvq-4: decode, sdpa"]
    assert (decoding["sets"], decoding["alone"]) == (1, None)
    assert decoding["speedup"] == pytest.approx(found["sdpa float16"]["alone"] / decoding["median"])
    assert found["sdpa float32"]["speedup"] == pytest.approx(found["sdpa float16"]["median"] / found["sdpa float32"]["median"])
    text = bench(capsys, *words, *only)
    assert " calls    alone " in text and "one by one" in text
    assert run(["bench", *words, *only]) == 0
    assert " alone " not in capsys.readouterr().out  # on a CPU


def test_the_copy_is_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(timing, "timed_together", lambda *given: calls.append(1) or timed_together(*given))
    with forced("cuda"):
        assert copy_bandwidth(0.0) > 0
    assert calls == [1] and copy_bandwidth(0.0) > 0 and calls == [1]


def test_rows_without_arrays_are_timed_one_by_one() -> None:
    """What evaluates as it is called, or what other libraries run."""
    done = Prepared(lambda: mx.zeros((3,)), lambda _: Checked("0", 0.0, 0.0), 1, 1)
    with forced("cuda"):
        row = measure(Case("attend", "x", lambda: done), "", 0.0, 1.0)
    assert row.median is not None and row.alone is None and row.sets == 1


def test_speed_of_what_is_not_here_is_not_there() -> None:
    known = [Row("attend", "a", "cuda", "x", "", median=2.0, alone=8.0), Row("attend", "b", "cuda", "x", "", median=4.0, reference="a")]
    known += [replace(known[1], name="c", alone=5.0), replace(known[1], name="d", median=None), replace(known[1], name="e", reference="z")]
    assert [row.speedup for row in measuring._compared(known)] == [None, 2.0, 0.5, None, None]


# --- limits


@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
@pytest.mark.parametrize("row", DECODERS)
def test_decode_kernels_are_within_limits_that_count_halves(row: str) -> None:
    """The text of the kernels, emulated: against tables of halves they err less than against the codec's own, where they round them."""
    case = attend_rows(SIZE)[row]
    ready, spec = prepared(case, case.spec, SIZE), str(case.spec)
    with using(EmulatedCuda()), forced("cuda"):
        out = ready.run(*ready.given)
        mx.eval(out)
    found = ready.check(out)
    assert found.problem is None and f"{row.rpartition(': ')[2]}_decode" in {name for name, _ in compiled()}
    kernel = functions.FUNCTIONS[row.rpartition(": ")[2]]
    with forced("cuda"):
        made = blocks(spec, SIZE, HALF, 1, "post")
        own = kernel(plan_of(spec, SIZE, 1), made, SIZE, HALF)
    assert own.halves == {"r": "v", "t": "kv", "s": ""}[row.rpartition(": ")[2][0]]
    q = oracle.to_numpy(rows(SIZE, HALF, 1).q)
    q = (q if own.query is None else own.query(q)) * SIZE.scale
    exact = oracle.attention(q, *head_rows(made), SIZE.kv_heads, SIZE.tokens)
    error = oracle.attention_check(exact, SIZE.tokens, mx.float32, "")(out).error
    assert error > 1.1 * found.error if own.halves else error == found.error


def test_tables_of_halves_are_what_numpy_rounds() -> None:
    """Sums of both stages, rounded once; entries of a table, rounded; rows of other codecs stay."""
    spec = "k=rvq-2+2:nocenter,v=rvq-4:nocenter"
    made = blocks(spec, SIZE, HALF, 1, "post")[0]
    k, v = (read(0, 1)() for read in head_rows((made,), "kv"))
    for coded, got, parts in ((made.k, k, ("codes1", "codes2")), (made.v, v, ("codes",))):
        codec: Any = coded.codec
        sums = sum(
            np.array(table)[oracle.unpacked(coded.parts[part][1], bits, 128)]
            for table, part, bits in zip(codec.codebooks, parts, codec.bits, strict=True)
        )
        y = sums.astype(np.float16).astype(np.float64) * oracle.to_numpy(coded.parts["scale"][1])[:, None]
        np.testing.assert_allclose(got, y @ oracle.rotation(128, codec.seed), atol=1e-12)
    plain, _ = (read(0, 1)() for read in head_rows((made,), "v"))
    assert 1e-5 < oracle.relative(k, plain) < 2.0**-11


def test_weights_of_16_bits_widen_the_limit_by_what_they_may_move() -> None:
    """Any weights within half a unit keep within it, and twice that does not, for values that cancel."""
    draw = np.random.default_rng(3)
    weights, v = draw.random(64), draw.standard_normal((64, 16))
    weights /= weights.sum()
    want = weights @ v
    spread = float(weights @ np.linalg.norm(v, axis=1) / np.linalg.norm(want))
    attended = oracle.Attended(want[None, None, None], 0.0, spread)
    narrow, wide = (
        oracle.attention_check(attended, 64, mx.float32, "", dtype)(want[None, None, None]).limit for dtype in (mx.float32, HALF)
    )
    assert wide - narrow == pytest.approx(2.0**-11 * (1 + spread))
    for _ in range(50):
        moved = weights * (1 + 2.0**-11 * draw.choice([-1, 1], 64))
        assert oracle.relative(moved @ v / moved.sum(), want) <= wide - narrow


def test_targets_of_a_gpu_are_rows_that_go_together() -> None:
    """Every row that a GPU is held to names the arrays that it reads."""
    for setting in GPU:
        size = Size(1, 8, 2, 128, 96, min(5, int(setting.options.get("queries", 1))))
        for target in setting.targets:
            known = attend_rows(size) if target.family == "attend" else {case.name: case for case in coding.encoding(size, (), HALF, 1)}
            case = known[target.row]
            assert prepared(case, case.spec, size).given


def test_cuda_is_held_to_a_rate_of_input() -> None:
    """A terabyte a second of float16 is 5e11 values."""
    added = [target for target in settings("cuda")[0].targets if target not in settings("metal")[0].targets]
    assert [target.row for target in added] == ["rabitq_encode", "rvq_quant_pack, 4 bits"] and settings("cuda")[1:] == settings("metal")[1:]
    row = Row("encode", "rabitq_encode", "cuda", "x", "", values_rate=4.9e11)
    reached = [
        judge(Setting(settings("cuda")[0].options, (added[0],)), [replace(row, values_rate=rate)], 1.0)[0]["reached"]
        for rate in (4.9e11, 5e11)
    ]
    assert reached == [False, True]
