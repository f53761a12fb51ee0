"""A sweep: several codecs in one table, by both protocols, with bits from real bytes; CSV, JSON, ratios and passkeys."""

import csv
import functools
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

import kvtool
from formats.errors import IncompatibleError
from kvtool.arms import OWN, Arm, TextArms
from kvtool.bootstrap import paired_ratio
from kvtool.cli import run
from kvtool.cli.eval import split_specs
from kvtool.evaluation import log_softmax
from kvtool.model import LoadedModel
from kvtool.passkeys import ask, passkey_trials, question_of
from kvtool.probe import CacheProbe, RoleProbe
from kvtool.roundtrip import MLX_BITS, Roundtrip, parse_roundtrip
from kvtool.streaming_cache import StreamingCache, streaming_caches
from kvtool.sweeping import SweepReport, SweepRow, rows_of, specs_of
from kvtool.tiny.measure import own_prefill
from kvtool.tiny.passkey import accuracy
from tests.library import f64, fill, tiny
from tests.library import run as run_model
from tests.texts import text
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.codecs.rvq import Rvq
from veloxquant_mlx.transfer.rope_spec import RopeSpec

PREFIX, N, SINK, RECENT = 100, 120, 4, 16
SPECS = ("raw", "rvq-2", "rvq-3", "rvq-4", "rabitq", "affine-4", "k=rvq-4,v=rvq-2,frame=post", "mlx-4", "mlx-8", "fp8")


@functools.cache
def model() -> LoadedModel:
    return kvtool.load_model("tiny-a")


@functools.cache
def token_ids() -> tuple[int, ...]:
    return tuple(model().tokenizer.encode(text("prose"))[: PREFIX + N + 1])


@functools.cache
def report(protocol: str) -> SweepReport:
    return kvtool.sweep(
        model(),
        {"prose": token_ids()},
        SPECS,
        protocol=protocol,
        prefix=PREFIX,
        tokens=N,
        sink=SINK,
        recent=RECENT,  # type: ignore[arg-type]
    )


def row(protocol: str, spec: str) -> SweepRow:
    return report(protocol).row(spec if spec == "raw" else parse_roundtrip(spec, SINK, RECENT).spec)


@pytest.mark.parametrize("protocol", ["prefix", "streaming"])
def test_raw_is_the_own_cache(protocol: str) -> None:
    own, raw = report(protocol).row(OWN), row(protocol, "raw")
    assert (own.kl, own.top1, own.ppl_delta, own.attention_error, own.n, own.bits) == (0.0, 1.0, 0.0, 0.0, N, 32.0)
    # The streaming cache holds the same rows in another order: sums in float32 differ by rounding.
    limit = 0.0 if protocol == "prefix" else 1e-9
    assert raw.kl is not None and raw.attention_error is not None
    assert abs(raw.kl) <= limit and raw.top1 == 1.0 and raw.attention_error <= limit and raw.bits == 32.0 == raw.bits_all


@pytest.mark.parametrize("protocol", ["prefix", "streaming"])
def test_more_bits_are_closer(protocol: str) -> None:
    for group in (("rvq-2", "rvq-3", "rvq-4"), ("mlx-4", "mlx-8")):
        rows = [row(protocol, spec) for spec in group]
        for column in ("kl", "attention_error"):
            values = [getattr(r, column) for r in rows]
            assert values == sorted(values, reverse=True) and values[-1] > 0
        assert [r.bits for r in rows] == sorted(r.bits or 0 for r in rows)


def test_streaming_is_harder_than_prefix() -> None:
    """The same positions are scored, but streaming codes what follows the prefix too, and its errors propagate."""
    for spec in SPECS[1:]:
        for column in ("kl", "attention_error"):
            assert getattr(row("streaming", spec), column) > getattr(row("prefix", spec), column), spec


def test_bits_are_real_bytes() -> None:
    """Against the codec's own layout, by hand; tiny-a has 4 layers of 2 KV heads of 64."""
    coded, exact = PREFIX - SINK - RECENT, SINK + RECENT
    for spec in ("rvq-4", "rabitq", "rvq-2"):
        plan = parse_codec(spec)
        size = sum(codec.nbytes((2, coded, 64), mx.float32) for codec in (plan.k, plan.v))
        assert row("prefix", spec).bits == pytest.approx(8 * size / (2 * 2 * coded * 64), rel=1e-12)
        whole = size + 2 * 2 * exact * 64 * 2
        assert row("prefix", spec).bits_all == pytest.approx(8 * whole / (2 * 2 * PREFIX * 64), rel=1e-12)
    for protocol in ("prefix", "streaming"):
        assert row(protocol, "mlx-4").bits == 4.5 and row(protocol, "fp8").bits == 8.0
    # The forward's 220 tokens come as 128 and 92: the window keeps 16 at the end, and each block has side information of its own.
    sizes = [
        parse_codec("rvq-4").k.nbytes((2, n, 64), mx.float32) + parse_codec("rvq-4").v.nbytes((2, n, 64), mx.float32) for n in (108, 92)
    ]
    assert row("streaming", "rvq-4").bits == pytest.approx(8 * sum(sizes) / (2 * 2 * 200 * 64), rel=1e-12)
    whole = sum(sizes) + 2 * 2 * exact * 64 * 2
    assert row("streaming", "rvq-4").bits_all == pytest.approx(8 * whole / (2 * 2 * 220 * 64), rel=1e-12)


def test_prefix_is_what_a_file_gives(tmp_path: Path) -> None:
    ids = list(token_ids())
    kvtool.save(kvtool.capture(model(), ids[:PREFIX]), tmp_path / "a.kv", codec="rvq-3", sink=SINK, recent=RECENT)
    arm = kvtool.evaluate(tmp_path / "a.kv", model(), ids[PREFIX:], tokens=N).arm("transferred")
    # A file has its exact rows in float16.
    assert row("prefix", "rvq-3").kl == pytest.approx(arm.kl, rel=0.02) and row("prefix", "rvq-3").n == N


def logits(plan: list[int], spec: str) -> np.ndarray:
    probes = kvtool.capture(model(), [1, 2, 3]).probes
    caches = streaming_caches(probes, parse_roundtrip(spec))
    return np.concatenate([f64(x)[0] for x in run_model(model(), caches, token_ids(), plan)])


@pytest.mark.parametrize(
    "spec", ["mlx-4,sink=3,recent=8", "rvq-3:nocenter,sink=4,recent=16", "fp8", "mlx-2,recent=1", "mlx-4,sink=200,recent=5"]
)
def test_streaming_does_not_depend_on_the_step(spec: str) -> None:
    """One token at a time needs no mask, so that it is plain what is coded; longer forwards give the same."""
    single = logits([1] * 60, spec)
    for plan in ([60], [7, 1, 30, 22]):
        # Sums in another order may turn a value over a code's edge: more than rounding, far less than the codec's error.
        assert np.abs(logits(plan, spec) - single).mean() < 0.02 * np.abs(single - logits([60], "raw")).mean() + 1e-5


def test_streaming_one_token_by_hand() -> None:
    """Keys after 5 tokens with a sink and a window of 2: decoded 1, 2, 3 (4 - 2 >= j >= 1), exact 0, 3, 4."""
    probe = CacheProbe("KVCache", "full", k=RoleProbe(1, 64, mx.float32, None), v=RoleProbe(1, 64, mx.float32, None))
    trip = parse_roundtrip("fp8,sink=1,recent=2")
    cache = StreamingCache("0", probe, trip)
    rows = mx.random.normal((1, 1, 5, 64), key=mx.random.key(1))
    decoded = mx.from_fp8(mx.to_fp8(rows), mx.float32)
    for i in range(5):
        mask = cache.make_mask(1)
        k, v = cache.update_and_fetch(rows[:, :, i : i + 1], 2 * rows[:, :, i : i + 1])
    seen = [j for j in range(mask.shape[1]) if mask[0, j].item()]
    expected = mx.concatenate([decoded[0, 0, 1:3], rows[0, 0, :1], rows[0, 0, 3:]])
    assert mx.array_equal(k[0, 0, mx.array(seen)], expected) and v.shape == k.shape
    cache.count_exact()
    assert (trip.coded_values, trip.coded_bytes, trip.exact_values) == (2 * 2 * 64, 2 * 2 * 64, 2 * 3 * 64)


def test_scores_are_those_of_the_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every column by hand from the logits and attention outputs of one forward: what precedes the first scored token does not count."""
    before, n, spec = 20, 40, "rvq-2,sink=0,recent=8"
    ids = list(token_ids()[: before + n + 1])
    places: list[list[int]] = []
    rows = Roundtrip.rows

    def noting(self: Roundtrip, name: str, role: str, x: mx.array, positions: np.ndarray, probe: RoleProbe) -> mx.array:
        places.append(positions.tolist())
        return rows(self, name, role, x, positions, probe)

    monkeypatch.setattr(Roundtrip, "rows", noting)
    found = kvtool.sweep(model(), {"t": ids}, [spec], protocol="streaming", prefix=before, tokens=n).row(spec)
    assert places == [list(range(before + n - 8))] * 8
    outputs: list[np.ndarray] = []
    attention = type(model().model.layers[0].self_attn)
    call = attention.__call__

    def keeping(self: nn.Module, *args: object, **options: object) -> mx.array:
        output = call(self, *args, **options)
        outputs.append(f64(output)[0, before:])
        return output

    monkeypatch.setattr(attention, "__call__", keeping)
    caches = streaming_caches(kvtool.capture(model(), [1, 2]).probes, parse_roundtrip(spec))
    outputs.clear()
    own, other = (log_softmax(f64(run_model(model(), c, ids, [before + n])[0])[0])[before:] for c in (fill(model(), [], []), caches))
    kl = (np.exp(own) * (own - other)).sum(-1)
    assert found.kl == pytest.approx(kl.mean(), rel=1e-9) and found.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-9)
    nll = [-x[np.arange(n), ids[before + 1 :]].mean() for x in (own, other)]
    assert found.ppl_delta == pytest.approx(100 * (np.exp(nll[1]) / np.exp(nll[0]) - 1), rel=1e-6)
    assert found.top1 == np.mean(own.argmax(-1) == other.argmax(-1))
    error = sum(np.square(a - b).sum() for a, b in zip(outputs[:4], outputs[4:], strict=True))
    # The sweep sums squares in float32.
    assert found.attention_error == pytest.approx(error / sum(np.square(a).sum() for a in outputs[:4]), rel=1e-4)


HOSTILE = {
    "identical": lambda s, key: mx.broadcast_to(mx.random.normal((2, 1, 64), key=key), (2, s, 64)),
    "zeros": lambda s, key: mx.zeros((2, s, 64)),
    "channel": lambda s, key: mx.random.normal((2, s, 64), key=key) * mx.where(mx.arange(64) == 5, 1000.0, 1.0),
    "range": lambda s, key: (mx.random.normal((2, s, 64), key=key) * 1e37).astype(mx.bfloat16),
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("spec", [*SPECS, "rvq-2+2", *(f"mlx-{n}" for n in MLX_BITS)])
def test_hostile_rows_do_not_stop_it(case: str, spec: str) -> None:
    """Each is coded to finite values of the same energy, or the row says that the codec refused it."""
    rope = RopeSpec("default", 64, base=10000.0)
    probe = RoleProbe(2, 64, mx.float32, rope)
    for rows in (1, 16, 300):
        x = HOSTILE[case](rows, mx.random.key(rows))
        trip = parse_roundtrip(spec)
        for role in ("k", "v"):
            out = trip.rows("0", role, x, np.arange(rows), probe)
            assert out.shape == x.shape and out.dtype == x.dtype
            # bfloat16 ends at 3.4e38: nothing but a codec that says so may leave the range.
            assert trip.failed or mx.all(mx.isfinite(out.astype(mx.float32))).item()
            if case == "zeros":
                assert not trip.failed and not mx.any(out).item()
        assert trip.failed == bool(trip.problems)
        assert trip.failed or (trip.coded_values, trip.exact_values) == (2 * x.size, 0)


@pytest.mark.parametrize("protocol", ["prefix", "streaming"])
@pytest.mark.parametrize("before", [1, 16])
def test_short_caches(protocol: str, before: int) -> None:
    for recent in (0, 8):
        found = kvtool.sweep(
            model(), {"t": token_ids()}, ["rvq-2", "fp8", "mlx-4"], protocol=protocol, prefix=before, tokens=3, sink=0, recent=recent
        )  # type: ignore[arg-type]
        for r in found.rows:
            assert r.n == 3 and r.kl is not None and np.isfinite(r.kl) and not r.note
        assert (found.rows[1].bits is None) == (recent > before + 3 or (protocol == "prefix" and recent > before))


def test_a_codec_that_refuses_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Rvq, x: mx.array) -> dict[str, mx.array]:
        raise ValueError("[rvq] 3 values are not finite.")

    monkeypatch.setattr(Rvq, "encode", refuse)
    for protocol in ("prefix", "streaming"):
        found = kvtool.sweep(model(), {"t": token_ids()}, ["rvq-2", "fp8"], protocol=protocol, prefix=20, tokens=3, window="off")  # type: ignore[arg-type]
        refused = found.row("rvq-2,sink=0,recent=0")
        assert refused.kl is None is refused.bits is refused.attention_error and "0.k: [rvq] 3 values" in refused.note
        assert (found.row("fp8,sink=0,recent=0").kl or 0) > 0 and not found.row("fp8,sink=0,recent=0").note


def test_texts_are_joined_and_runs_repeat() -> None:
    ids = list(token_ids())
    texts = {"a": ids[:60], "b": ids[60:140]}
    first, second = (
        kvtool.sweep(model(), texts, ["rvq-2"], protocol="streaming", prefix=20, tokens=50, sink=0, recent=4) for _ in range(2)
    )
    assert [asdict(r) | {"seconds": 0} for r in first.rows] == [asdict(r) | {"seconds": 0} for r in second.rows]
    a, b, both = (first.row("rvq-2,sink=0,recent=4", name) for name in ("a", "b", "all"))
    assert [r.text for r in first.rows] == ["a", "b", "all"] * 2 and first.row("rvq-2,sink=0,recent=4") == both
    assert (a.n, b.n, both.n) == (39, 50, 89)
    # Each text weighs the same, though b is longer.
    for column in ("kl", "top1"):
        assert getattr(both, column) == pytest.approx((getattr(a, column) + getattr(b, column)) / 2, rel=1e-12)
    assert min(a.bits or 0, b.bits or 0) <= (both.bits or 0) <= max(a.bits or 0, b.bits or 0)


def test_the_model_is_left_as_it_was() -> None:
    llama = tiny("llama")
    kinds = [type(m) for _, m in llama.model.named_modules()]
    before = [f64(x) for x in run_model(llama, fill(llama, [], []), [1, 2, 3], [3])]
    kvtool.sweep(llama, {"t": list(range(1, 40))}, ["fp8"], prefix=10, window="off")
    assert [type(m) for _, m in llama.model.named_modules()] == kinds
    assert np.array_equal(before[0], f64(run_model(llama, fill(llama, [], []), [1, 2, 3], [3])[0]))


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next", "lfm2"])
def test_models_with_other_layers(family: str) -> None:
    """Sliding windows and recurrent states go by the prefix protocol alone."""
    other = tiny(family)
    ids = list(range(1, 60))
    found = kvtool.sweep(other, {"t": ids}, ["raw", "rvq-2"], prefix=30, window="off")
    assert found.row("raw").kl == 0.0 < (found.row("rvq-2,sink=0,recent=0").kl or 0)
    with pytest.raises(IncompatibleError, match="full attention"):
        kvtool.sweep(other, {"t": ids}, ["rvq-2"], protocol="streaming", prefix=30)


@pytest.mark.parametrize(
    ("codecs", "options", "message"),
    [
        (["nope"], {}, "no codec 'nope'"),
        (["mlx-5"], {}, "2, 3, 4, 6, 8"),
        (["mlx-4,frame=pre"], {}, "sink=N and recent=N alone"),
        (["fp8,k=raw"], {}, "sink=N and recent=N alone"),
        (["fp8", "fp8,sink=4"], {}, "twice"),
        ([], {}, "at least one codec"),
        (["fp8"], {"window": "half"}, "on, off, both"),
        (["fp8", "mlx-4"], {"relative_to": "mlx-8"}, "one of the codecs .fp8, mlx-4."),
        (["fp8", "raw"], {"relative_to": "raw"}, "lossy"),
        (["fp8"], {"passkeys": -1}, "at least 0"),
        (["fp8"], {"chunk": 0}, "at least 1"),
        (["raw"], {"protocol": "other"}, "prefix, streaming"),
        (["raw"], {"prefix": 0}, "at least 1"),
        (["raw"], {"sink": -1}, "at least 0"),
        (["raw"], {"prefix": 5000}, "5002 are needed"),
    ],
)
def test_wrong_arguments(codecs: list[str], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvtool.sweep(model(), {"t": token_ids()}, codecs, **{"prefix": 8, **options})


@pytest.mark.parametrize("n", MLX_BITS)
def test_mlx_is_what_mlx_lm_keeps(n: int) -> None:
    x = mx.random.normal((2, 50, 64), key=mx.random.key(n))
    cache = KVCache()
    cache.update_and_fetch(x[None], x[None])
    kept = cache.to_quantized(group_size=64, bits=n)
    want = mx.dequantize(*kept.keys, group_size=64, bits=n)[0, :, :50]
    trip = parse_roundtrip(f"mlx-{n}")
    got = trip.rows("0", "k", x, np.arange(50), RoleProbe(2, 64, mx.float32, None))
    # Scale and bias round to float16, by 2^-11 at most: of code * scale, up to twice the largest value, and of the bias, up to once.
    assert mx.max(mx.abs(got - want)).item() <= 3 * 2**-11 * mx.max(mx.abs(x)).item()
    assert trip.bits(exact=False) == n + 2 * 16 / 64


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_models(dtype: str) -> None:
    """The exact rows are the live ones; own and raw take 16 bits."""
    for protocol in ("prefix", "streaming"):
        found = kvtool.sweep(
            tiny("llama", dtype), {"t": list(range(1, 60))}, ["raw", "rvq-2", "fp8"], protocol=protocol, prefix=30, window="off"
        )  # type: ignore[arg-type]
        kl = [found.row(spec).kl or 0.0 for spec in ("raw", "fp8,sink=0,recent=0", "rvq-2,sink=0,recent=0")]
        assert found.row("raw").bits == 16 == found.row(OWN).bits and kl == sorted(kl) and kl[0] < 0.01 * kl[2]


def test_spec_says_what_the_options_do_not() -> None:
    for spec, options, full in (
        ("rvq-4", (), "rvq-4,sink=4,recent=32"),
        ("mlx-4", (), "mlx-4,sink=4,recent=32"),
        ("fp8,recent=1", (), "fp8,sink=4,recent=1"),
        ("fp8,recent=1", (2, 3), "fp8,sink=2,recent=1"),
        ("rvq-2+2,sink=0", (2, 3), "rvq-2+2,sink=0,recent=3"),
        ("mlx-4", (0, 0), "mlx-4,sink=0,recent=0"),
        ("rvq-4", (0, None), "rvq-4,sink=0,recent=32"),
        ("raw", (2, 3), "raw"),
    ):
        trip = parse_roundtrip(spec, *options)
        assert trip.spec == full and (again := parse_roundtrip(full)).spec == full and again.plan == trip.plan
    with pytest.raises(KeyError, match="own, raw"):
        report("prefix").row("rvq-9")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text(text("prose")[:900], encoding="utf-8")
    base = ["eval", "--model", "tiny-a", "--text", str(tmp_path / "a.txt"), "--codec", "k=rvq-4,v=rvq-2,sink=2", "--codec", "mlx-4"]
    files = ["--csv", str(tmp_path / "t.csv"), "--plot", str(tmp_path / "t.svg")]
    assert run([*base, "--protocol", "streaming", "--prefix", "40", "--n", "20", "--recent", "8", "--json", *files]) == 0
    data = json.loads(capsys.readouterr().out)
    columns = [f.name for f in fields(SweepRow)]
    assert set(data) == {f.name for f in fields(SweepReport)} and [list(r) for r in data["rows"]] == [columns] * 3
    specs = ["own", "k=rvq-4,v=rvq-2,sink=2,recent=8", "mlx-4,sink=4,recent=8"]
    assert [r["codec"] for r in data["rows"]] == specs
    with open(tmp_path / "t.csv", newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert [list(r) for r in table] == [columns] * 3
    assert [[float(r[c]) for c in ("n", "kl", "bits", "seconds")] for r in table] == [
        [r[c] for c in ("n", "kl", "bits", "seconds")] for r in data["rows"]
    ]
    # The window stands in the title where all rows share it.
    words = [e.text for e in ElementTree.parse(tmp_path / "t.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert set(specs[1:]) <= set(words) and "own" not in words
    assert run([*base, "--prefix", "40", "--n", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["own", "k=rvq-4,v=rvq-2,sink=2,recent=32", "mlx-4,sink=4,recent=32"]
    assert "ratio" not in lines[1] and "passkey" not in lines[1]
    assert run([*base, "--prefix", "40", "--n", "70", "--window", "both", "--relative-to", "mlx-4", "--passkeys", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[4:]] == ["k=rvq-4,v=rvq-2,sink=0,recent=0", "mlx-4,sink=4,recent=32", "mlx-4,sink=0,recent=0"]
    assert all("1.000 [1.000, 1.000]" in line for line in lines[-2:]) and "1 passkeys" in lines[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give IN.kv or --codec"),
        (["IN", "--codec", "raw"], "not both"),
        (["IN", "--protocol", "streaming"], "--protocol goes with --codec"),
        (["IN", "--csv", "a.csv"], "--csv goes with --codec"),
        (["IN", "--text", "TEXT"], "one --text"),
        (["--codec", "raw", "--arms", "own"], "--arms goes with IN.kv"),
        (["--codec", "raw", "--text", "TEXT"], "twice"),
        (["--codec", "raw", "--plot", "a.gif"], "must end in .svg or .png"),
        (["--codec", "raw", "--csv", "none/a.csv"], "none"),
        (["IN", "--window", "both"], "--window goes with --codec"),
        (["IN", "--robustness"], "--robustness goes with --codec"),
        (["--codec", "fp8", "--robustness"], "--model goes with a sweep"),
        (["--codec", "fp8", "--relative-to", "rvq-4"], "relative_to must be one of the codecs"),
    ],
)
def test_wrong_options(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("IN", "TEXT"):
        (tmp_path / name).write_text("some words")
    assert run(["eval", "--model", "tiny-a", "--text", "TEXT", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("rvq-4,mlx-4", ["rvq-4", "mlx-4"]),
        ("rvq-4,sink=4,recent=8,mlx-4,sink=2", ["rvq-4,sink=4,recent=8", "mlx-4,sink=2"]),
        ("k=rvq-4,v=rvq-2,frame=post,fp8", ["k=rvq-4,v=rvq-2,frame=post", "fp8"]),
        ("rvq-4:norm:seed=3,v=rvq-2,k=rabitq,v=rvq-4", ["rvq-4:norm:seed=3,v=rvq-2,k=rabitq", "v=rvq-4"]),
        ("fp8", ["fp8"]),
        ("fp8,", ["fp8", ""]),
    ],
)
def test_lists_of_codecs(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs


def known(series: Sequence[float], name: str = "t") -> Arm:
    n = len(series)
    return Arm("c", name, (1.0,) * n, tuple(series), (True,) * n, 1.0, 2.0, 0, 0, 0, 0, 0.0, False, ())


def test_ratio_of_a_codec_to_itself_and_to_others() -> None:
    found = kvtool.sweep(
        model(),
        {"a": token_ids(), "b": token_ids()[20:140]},
        ["rvq-2", "mlx-4", "raw"],
        protocol="streaming",
        prefix=20,
        recent=8,
        relative_to="mlx-4",
        window="both",
    )
    assert found.relative_to == "mlx-4"
    assert [r.codec for r in found.rows[::3]] == [
        OWN,
        *(f"{codec},{rows}" for codec in ("rvq-2", "mlx-4") for rows in ("sink=4,recent=8", "sink=0,recent=0")),
        "raw",
    ]
    for name in ("a", "b", "all"):
        for window in (",sink=4,recent=8", ",sink=0,recent=0"):
            reference, other = (found.row(spec + window, name) for spec in ("mlx-4", "rvq-2"))
            assert (reference.ratio, reference.ratio_low, reference.ratio_high) == (1.0, 1.0, 1.0)
            assert other.ratio == pytest.approx((other.kl or 0) / (reference.kl or 1), rel=1e-12)
            assert (other.ratio_low or 9) < (other.ratio or 0) < (other.ratio_high or 0)
    assert found.row(OWN).ratio == 0.0
    alone = kvtool.sweep(model(), {"a": token_ids()}, ["fp8"], prefix=40, tokens=20, relative_to="fp8").row("fp8,sink=4,recent=32")
    # One block of positions has no interval.
    assert (alone.ratio, alone.ratio_low, alone.ratio_high) == (1.0, None, None)


@pytest.mark.parametrize(("shape", "n", "least"), [(4.0, 900, 0.9), (0.5, 256, 0.86)])
def test_interval_covers_a_known_ratio(shape: float, n: int, least: float) -> None:
    """Paired series of alike neighbours with means 3 and 1, also heavy-tailed and short: about as many intervals as promised cover 3."""
    draw = np.random.default_rng(5)
    covered, widths, trials = 0, [], 200
    for _ in range(trials):
        slow = np.repeat(draw.gamma(2.0, 0.5, n // 13 + 1), 13)[:n]
        pair = [mean * slow * draw.gamma(shape, 1 / shape, n) for mean in (3.0, 1.0)]
        ratio, low, high = paired_ratio(pair[:1], pair[1:])
        assert ratio == pair[0].mean() / pair[1].mean() and low is not None and high is not None and low < ratio < high
        covered += low <= 3.0 <= high
        widths.append(high - low)
    assert least * trials <= covered <= trials - 1
    # Pairs share what is slow; blocks drawn apart for the two would give an interval several times as wide.
    assert shape < 4 or np.mean(widths) < 0.6
    assert paired_ratio(pair[:1], pair[1:]) == paired_ratio(pair[:1], pair[1:])


def test_interval_of_texts_and_what_has_none() -> None:
    a, b = np.arange(1.0, 101.0), np.ones(64)
    ratio, low, high = paired_ratio([a, b], [b[:1].repeat(100), b])
    # Each text weighs the same: (50.5 + 1) / 2.
    assert ratio == 25.75 and low is not None and high is not None and 1 < low < ratio < high < 50.5
    # By hand: two blocks a text, of 32 and 8 positions, drawn as one of four pairs.
    x = np.concatenate([np.full(32, 2.0), np.full(8, 6.0)])
    assert paired_ratio([x], [np.ones(40)]) == (2.8, 2.0, 6.0)
    # Constant texts of unequal lengths have no spread: (3 + 1) / (1 + 1).
    assert paired_ratio([3 * b, np.ones(320)], [b, np.ones(320)]) == (2.0, 2.0, 2.0)
    assert paired_ratio([b], [0 * b]) == (None, None, None)
    assert paired_ratio([b], [np.repeat([0.0, 2.0], 32)]) == (1.0, None, None)
    assert paired_ratio([b[:32]], [b[:32]]) == (1.0, None, None)


def test_passkeys() -> None:
    """The own cache answers what the model answers by itself; 2 bits without a window answer less than raw."""
    options: dict = {"prefix": 8, "tokens": 2, "window": "off"}
    found = kvtool.sweep(model(), {"t": token_ids()}, ["raw", "rvq-1:norm:nocenter"], passkeys=2, **options)
    trials = passkey_trials(model(), 2)
    own = accuracy(trials, own_prefill(model().model))
    assert found.row(OWN).passkey == found.row("raw").passkey == own == 1.0 and found.passkeys == 2
    assert (found.row("rvq-1:norm:nocenter,sink=0,recent=0").passkey or 0) < own
    for trial in trials:
        assert model().tokenizer.decode(question_of(model(), trial)).endswith(" is ")
    assert kvtool.sweep(model(), {"t": token_ids()}, ["raw"], **options).row("raw").passkey is None
    with pytest.raises(ValueError, match="no passkey task; tiny-a and tiny-b"):
        kvtool.sweep(tiny("llama"), {"t": list(range(1, 40))}, ["raw"], passkeys=1, **options)


def test_passkeys_are_asked_of_all_that_precedes_the_question() -> None:
    trips: list[Roundtrip] = []

    def make() -> Roundtrip:
        trips.append(parse_roundtrip("rvq-4"))
        return trips[-1]

    trials = passkey_trials(model(), 2, prompt_tokens=200)
    (found,) = ask(model(), [make], trials)
    for trip, trial in zip(trips, trials, strict=True):
        rows = 200 - len(question_of(model(), trial))
        # 4 layers, keys and values, 2 heads of 64.
        assert (trip.exact_values, trip.coded_values) == (4 * 2 * 2 * 64 * 36, 4 * 2 * 2 * 64 * (rows - 36))
    for name in ("coded_bytes", "coded_values", "exact_bytes", "exact_values"):
        assert getattr(found, name) == sum(getattr(trip, name) for trip in trips)


def test_a_refused_codec_answers_no_passkeys(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Rvq, x: mx.array) -> dict[str, mx.array]:
        raise ValueError("[rvq] 3 values are not finite.")

    monkeypatch.setattr(Rvq, "encode", refuse)
    trips = [functools.partial(parse_roundtrip, spec) for spec in ("rvq-2", "raw")]
    refused, raw = ask(model(), trips, passkey_trials(model(), 1, prompt_tokens=200))
    assert refused.share is None and "not finite" in str(refused.refused) and raw.refused is None and raw.share is not None


def test_the_answer_in_one_forward_is_the_greedy_one() -> None:
    """Also where the model errs: one digit of the answer that is asked for is another one, each in turn."""
    (trial,) = passkey_trials(model(), 1, prompt_tokens=300)
    made = own_prefill(model().model)(trial.prompt_ids, 5)
    for at in (None, *range(5)):
        wanted = [*made] if at is None else [*made[:at], made[at] + 1, *made[at + 1 :]]
        (found,) = ask(model(), [functools.partial(parse_roundtrip, "raw")], [replace(trial, answer_ids=wanted)])
        assert (found.asked, found.right) == (1, int(at is None))


def test_chunks_change_nothing_but_rounding() -> None:
    """A codec without side information a block gives the same in forwards of any length; what differs is codes at an edge."""
    spec = "rvq-4:norm:nocenter,sink=4,recent=16"
    by_chunk = [
        kvtool.sweep(model(), {"t": token_ids()}, [spec], protocol="streaming", prefix=20, tokens=150, chunk=chunk).row(spec)
        for chunk in (17, 64, 300)
    ]
    for column in ("kl", "attention_error", "bits", "bits_all"):
        values = [getattr(r, column) for r in by_chunk]
        assert values == pytest.approx([values[0]] * 3, rel=0.05)


def test_arms_round_trip_as_json() -> None:
    text = TextArms(model(), "t", token_ids()[:60], "streaming", 20)
    arm = text.arm(parse_roundtrip("rvq-2,recent=4"))
    assert Arm.from_json(json.loads(json.dumps(arm.to_json()))) == arm and len(arm.kl) == 39
    assert rows_of({OWN: [text.own], arm.codec: [arm]}, {}, {})[1].kl == np.mean(arm.kl)


def test_all_is_the_mean_of_the_texts() -> None:
    """As of pooled positions where lengths are equal; 1 and 3 of 30 and 90 positions are 2, not 2.5."""
    own = [known([0.0] * n, name) for n, name in ((30, "a"), (90, "b"))]
    short, long = known([1.0] * 30, "a"), replace(known([3.0] * 90, "b"), error=9.0, energy=27.0)
    found = rows_of({OWN: own, "c": [short, long]}, {}, {})[-1]
    assert (found.text, found.n, found.kl, found.kl_p99) == ("all", 120, 2.0, 3.0)
    assert found.attention_error == pytest.approx((1 / 30 + 9 / 90) / (2 / 30 + 27 / 90))


def test_lossless_codecs_have_no_window() -> None:
    specs = specs_of(["raw", "rvq-4,sink=0,recent=0", "fp8"], None, None, "both", "fp8")
    assert specs == {
        "raw": "fp8,sink=4,recent=32",
        "rvq-4,sink=0,recent=0": "fp8,sink=4,recent=32",
        "fp8,sink=4,recent=32": "fp8,sink=4,recent=32",
        "fp8,sink=0,recent=0": "fp8,sink=0,recent=0",
    }
