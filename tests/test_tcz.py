"""tcz: decoded rows against float64 from the tables, tables that predict and save, files that lie, a frozen file."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from formats.errors import ManifestError
from tests.tcz_cases import DIGEST, DIM, HEADS, ROLES, array, built, codecs, layers
from veloxquant_mlx.allocators import symbol_models
from veloxquant_mlx.allocators.predictors import TczTables, build_at, build_tcz, measure, step_for
from veloxquant_mlx.allocators.transforms import LayerRows
from veloxquant_mlx.codecs import parse_codec
from veloxquant_mlx.codecs.tcz import Tcz

TOKENS = 600
WIDTH = HEADS * DIM
GOLDEN = Path(__file__).parent / "golden" / "tcz" / "v1"


def coded(rows: list[LayerRows], step: float | None = None) -> list[tuple[Tcz, dict, dict, mx.array, mx.array]]:
    """(codec, parts, given, x, decoded) of every layer and role in the order of decoding."""
    done, before = [], {}
    for bound, layer in zip(codecs(step), rows, strict=True):
        given = {f"{role}-": before[role] for role in before}
        own: dict[str, mx.array] = {}
        for role in ROLES:
            x, codec = array(getattr(layer, role)), bound[role]
            used = {name: (given | own)[name] for name in codec.needs}
            parts = codec.encode(x, used)
            own[role] = codec.decode(parts, x.shape, mx.float32, used)
            done.append((codec, parts, used, x, own[role]))
        before = own
    return done


def f64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def wide(x: mx.array) -> np.ndarray:
    return f64(x).swapaxes(0, 1).reshape(x.shape[1], -1)


def nbytes(parts: dict[str, mx.array]) -> int:
    return sum(part.nbytes for part in parts.values())


# --- decoding and encoding


def cell_means(family: int, t: int, reach: int) -> tuple[np.ndarray, float]:
    """Mean of |y| in the cells 0 .. reach of a class, and E[y y^] / E[y^2], from sums over each cell of the density."""
    s, y = 2.0 ** (t / 2), np.arange(reach + 1)[:, None] + (np.arange(1000) + 0.5) / 1000 - 0.5
    power = math.sqrt(2) * np.abs(y) / s if family == 0 else 0.5 * (y / s) ** 2
    density = np.exp(power.min(axis=1, keepdims=True) - power)
    means = (density * y).sum(axis=1) / density.sum(axis=1)
    mass = np.exp(-power).mean(axis=1) / (s * math.sqrt(2) if family == 0 else s * math.sqrt(2 * math.pi))
    return np.where(np.arange(reach + 1) > 0, means, 0.0), float(2 * (mass * means**2)[1:].sum() / s**2)


def test_decoded_rows_are_the_specifications() -> None:
    """x^ = p + step c(q) F^-1 in float64: q from x itself, c from densities; classes alone are the library's choice."""
    bank, checked = symbol_models.bank(), 0
    for codec, _, given, x, decoded in coded(layers(TOKENS)):
        t = getattr(codec.tables, codec.role)
        inputs = [wide(given[name]) for name in codec.needs]
        p = (np.concatenate(inputs, axis=1) @ (t.predictor * t.predictor_scale.astype(np.float64)) if inputs else 0) + t.bias
        forward = t.basis.astype(np.float64) * t.basis_scale
        y, got = ((wide(rows) - p) @ forward / codec.step for rows in (x, decoded))
        q = np.rint(y).astype(np.int32)
        atol = 1e-4 + 1e-6 * float((np.abs(wide(x)) @ np.abs(forward)).max()) / codec.step  # float32 sums, in steps
        sure = np.abs(np.abs(y - np.floor(y)) - 0.5) > 1e-3  # float32 may round the others either way
        for start in range(0, TOKENS, symbol_models.CHUNK):
            chunk = slice(start, start + symbol_models.CHUNK)
            classes, _ = symbol_models.choose(q[chunk], codec.tables.expected(codec.role, codec.step))
            for i, c in enumerate(classes.tolist()):
                if c >= len(bank.reach):
                    continue
                means, gain = cell_means(int(bank.family[c]), int(bank.t[c]), int(bank.reach[c]))
                inside = sure[chunk, i] & (np.abs(q[chunk, i]) <= bank.reach[c])
                checked += int(inside.sum())
                wanted = np.sign(q[chunk, i][inside]) * means[np.abs(q[chunk, i][inside])]
                wanted /= max(0.45, gain) if codec.role == "v" else 1.0
                np.testing.assert_allclose(got[chunk, i][inside], wanted, rtol=1e-4, atol=atol)
    assert checked > 0.95 * 6 * TOKENS * WIDTH


def test_every_component_stays_in_its_cell() -> None:
    """Keys: the decoded component is in the cell of the exact one, so within a step, whatever the predictions."""
    for codec, _, _, x, decoded in coded(layers(TOKENS), step=built()[0].step / 32):
        if codec.role == "k":
            error = (wide(decoded) - wide(x)) @ codec.tables.k.forward.astype(np.float64) / codec.step
            assert np.abs(error).max() < 1.001


def test_values_are_unbiased_and_keys_are_means() -> None:
    """Regression of exact on decoded residuals, and the reverse, in the coded components; chunks of 256 tokens, so within 5 %."""
    for codec, _, given, x, decoded in coded(layers(TOKENS * 4, seed=5)):
        t = getattr(codec.tables, codec.role)
        inputs = [wide(given[name]) for name in codec.needs]
        p = t.predict(np.concatenate(inputs, axis=1).astype(np.float32) if inputs else None).astype(np.float64)
        y, got = ((wide(rows) - p) @ t.forward for rows in (x, decoded))
        reference = (y * y).sum() if codec.role == "v" else (got * got).sum()
        assert (got * y).sum() == pytest.approx(reference, rel=0.08)


@pytest.mark.parametrize("dtype", (mx.float32, mx.float16, mx.bfloat16))
@pytest.mark.parametrize("tokens", (0, 1, 255, 256, 257, 600))
def test_any_length_and_dtype(tokens: int, dtype: mx.Dtype) -> None:
    keys = codecs()[0]["k"]
    x = array(layers(600)[0].k)[:, :tokens].astype(dtype)
    parts = keys.encode(x)
    assert set(parts) == {"stream", "index"}
    decoded = keys.decode(parts, x.shape, dtype)
    assert decoded.shape == x.shape and decoded.dtype == dtype
    for name, (kind, shape) in keys.layout(x.shape, dtype).items():
        assert kind == "U32" and parts[name].dtype == mx.uint32
        assert all(want in (-1, size) for size, want in zip(parts[name].shape, shape, strict=True))
    if tokens == 600:
        # Chunks are independent: the first 256 tokens alone give the same words.
        first = keys.encode(x[:, :256])
        assert np.array_equal(np.array(first["stream"])[0], np.array(parts["stream"])[0, : first["stream"].size])


def test_bits_are_those_measured_and_the_step_meets_the_rate() -> None:
    rows = layers(TOKENS)
    pairs = [(layer.k, layer.v) for layer in rows]
    for rate in (0.8, 1.5, 3.0):
        step = step_for(rate, built(), pairs)
        assert measure(built(), pairs, step) == pytest.approx(rate, rel=0.006)
        done = coded(rows, step)
        # real bytes: 64 bits a chunk besides the symbols are assumed
        assert 8 * sum(nbytes(parts) for _, parts, *_ in done) / sum(x.size for *_, x, _ in done) == pytest.approx(rate, rel=0.02)


# --- tables


def test_predictors_save_bits_and_quantised_rows_fit_better() -> None:
    rows, fresh = layers(), layers(TOKENS, seed=3)
    alone = [build_at([layer], built()[0].step, 1.5)[0][0] for layer in rows]
    pairs = [(layer.k, layer.v) for layer in fresh]
    step = built()[0].step
    assert measure(built(), pairs, step) < 0.9 * measure(alone, pairs, step)


def test_components_are_uncorrelated_and_their_unit_is_the_metrics() -> None:
    rows, tables = layers()[0], built()[0]
    for role in ROLES:
        t = getattr(tables, role)
        # F F^T = metric where eigenvalues are not floored (float16 basis)
        metric = np.asarray(getattr(rows, f"fisher_{role}"))
        values, vectors = np.linalg.eigh(metric)
        values = np.maximum(values, {"k": 1e-3, "v": 0.02}[role] * values.mean())
        np.testing.assert_allclose(t.forward @ t.forward.T, (vectors * values) @ vectors.T, atol=2e-3 * np.abs(metric).max())
        np.testing.assert_allclose(t.backward @ t.forward, np.eye(WIDTH), atol=1e-4)
    y = (rows.k.reshape(-1, WIDTH) - tables.k.bias) @ tables.k.forward
    correlation = np.corrcoef(y.T)
    assert np.abs(correlation - np.eye(WIDTH)).max() < 0.02


def test_a_quarter_of_the_step_expects_four_times_the_deviation() -> None:
    t, bank = built()[1], symbol_models.bank()
    classes = t.v.classes.astype(int)
    inner = (bank.t[classes] + 4 <= 10) & (bank.t[classes] > -5)
    assert inner.sum() > 4 and np.array_equal(t.expected("v", t.step), classes)
    assert np.array_equal(bank.t[t.expected("v", t.step / 4)][inner], bank.t[classes][inner] + 4)


def test_arrays_round_trip_and_liars_are_refused() -> None:
    for tables in built():
        arrays = tables.to_arrays()
        again = TczTables.from_arrays(arrays)
        assert all(np.array_equal(a, again.to_arrays()[name]) for name, a in arrays.items())
        for name, a in arrays.items():
            lies = [None, a[..., :-1], a.astype(np.int64), a.reshape(1, *a.shape)]
            if a.dtype.kind == "f" and a.size:
                lies.append(np.full_like(a, np.nan))
            if name.endswith("classes"):
                lies.append(np.full_like(a, 255))
            if name == "shape":
                lies += [np.array([0, 8, 0], np.int32), np.array([2, 8, 7], np.int32), np.array([-2, -8, 0], np.int32)]
            for lie in lies:
                bad = {key: value for key, value in (arrays | {name: lie}).items() if value is not None}
                with pytest.raises(ValueError, match=r"\[TczTables\]"):
                    TczTables.from_arrays(bad)


def test_a_basis_without_an_inverse_is_refused() -> None:
    codec, parts, given, x, _ = coded(layers(TOKENS))[0]
    for basis in (np.zeros_like(codec.tables.k.basis), np.ones_like(codec.tables.k.basis)):
        lying = replace(codec, tables=replace(codec.tables, k=replace(codec.tables.k, basis=basis)))
        with pytest.raises(ManifestError, match="basis must be invertible"):
            lying.decode(parts, x.shape, mx.float32, given)


def hard(case: str) -> list[LayerRows]:
    rows = layers(16 if case == "few rows" else 400, count=2)
    if case == "constant component":
        return [replace(r, k=np.where(np.arange(DIM) == 3, 5.0, r.k), v=np.zeros_like(r.v)) for r in rows]
    if case == "zero metric":
        return [replace(r, fisher_k=np.zeros((WIDTH, WIDTH)), fisher_v=np.zeros((WIDTH, WIDTH))) for r in rows]
    if case == "one channel x 1000":
        return [replace(r, k=np.where(np.arange(DIM) == 3, 1000.0, 1.0) * r.k) for r in rows]
    if case == "equal rows":
        return [replace(r, k=np.repeat(r.k[:1], 400, axis=0), v=np.repeat(r.v[:1], 400, axis=0)) for r in rows]
    if case == "another shape":
        return [rows[0], *layers(400, count=1, heads=1, dim=6), rows[1]]
    return rows


@pytest.mark.parametrize("case", ("few rows", "constant component", "zero metric", "one channel x 1000", "equal rows", "another shape"))
def test_hard_rows(case: str) -> None:
    rows = hard(case)
    tables = build_tcz(rows, 1.0)
    assert [t.chained for t in tables] == ([False] * 3 if case == "another shape" else [False, True])
    TczTables.from_arrays(tables[-1].to_arrays())
    codec = Tcz(1.0, "k").bind("k", tables[0], tables[0].step, "0", None, DIGEST)
    x = array(rows[0].k)
    decoded = codec.decode(codec.encode(x), x.shape, mx.float32)
    assert np.isfinite(f64(decoded)).all()
    if case != "zero metric":
        error = wide(decoded) - wide(x)
        metric = np.asarray(rows[0].fisher_k)
        spent = np.einsum("nd,de,ne->n", error, metric, error).mean()
        centred = wide(x) - wide(x).mean(axis=0)
        assert spent <= 0.8 * np.einsum("nd,de,ne->n", centred, metric, centred).mean() + 1e-6


@pytest.mark.parametrize("field", ("k", "v", "fisher_k", "fisher_v"))
def test_impossible_rows_are_refused(field: str) -> None:
    rows = layers(50, count=1)[0]
    bad = getattr(rows, field).copy()
    bad.flat[3] = np.nan
    for value, message in ((bad, "finite"), (getattr(rows, field)[:-1], r"\(N, H, D\)|must be \(16, 16\)")):
        with pytest.raises(ValueError, match=message):
            build_tcz([replace(rows, **{field: value})], 1.0)
    with pytest.raises(ValueError, match="rate must be positive"):
        build_tcz([rows], 0.0)


# --- spec, params, binding


def test_specs_and_unbound_codecs() -> None:
    for spec in ("tcz-1.1", "tcz-0.75,sink=0,recent=16"):
        plan = parse_codec(spec)
        assert plan.spec() == spec and plan.k.default_frame("k") == "pre" and plan.k.eager and plan.k.tokens_together == 256
    for spec in ("tcz", "tcz-", "tcz-0.4", "tcz-3.1", "tcz-nan", "tcz-1e0", "tcz-1:x"):
        with pytest.raises(ValueError, match="tcz-R has R from"):
            parse_codec(spec)
    unbound = parse_codec("tcz-1").k
    for use in (lambda: unbound.encode(mx.zeros((2, 3, 8))), unbound.to_params, lambda: unbound.decode({}, (2, 3, 8), mx.float32)):
        with pytest.raises(ValueError, match="needs a calibration"):
            use()
    with pytest.raises(ValueError, match="known only once"):
        unbound.nbytes((2, 3, 8), mx.float32)


def test_params_round_trip_and_tables_complete() -> None:
    for bound in codecs():
        for role, codec in bound.items():
            assert codec.calibration is None
            read = Tcz.from_params(json.loads(json.dumps(codec.to_params())))
            assert read == codec and read.calibration == DIGEST and read.needs == codec.needs and read.after == codec.after
            with pytest.raises(ValueError, match="needs the tables of calibration 5e"):
                read.decode({}, (HEADS, 5, DIM), mx.float32)
            whole = read.with_tables(codec.tables)
            assert whole.calibration is None
            with pytest.raises(ValueError, match="tables must be of design"):
                read.with_tables(built()[0 if codec.tables.chained else 1])
            with pytest.raises(ValueError, match=r"must be \(2, S, 8\)"):
                whole.encode(mx.zeros((1, 4, DIM)))
            past = ("k-", "v-") if codec.tables.chained else ()
            assert codec.needs == (past if role == "k" else ("k", *past))
    with pytest.raises(ValueError, match="after must be None"):
        Tcz(1.0, "k").bind("k", built()[0], 1.0, "0", "x", DIGEST)
    with pytest.raises(ValueError, match="step must be 1e-12 to"):
        Tcz(1.0, "k").bind("k", built()[0], math.nan, "0", None, DIGEST)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just([]), st.just({}), st.just("x" * 65))


@settings(max_examples=150, deadline=None)
@drawn(name=st.sampled_from(["role", "rate", "step", "tables", "design", "layer", "after", "other"]), value=SCALARS, drop=st.booleans())
def test_hostile_params_are_refused_or_sound(name: str, value: object, drop: bool) -> None:
    params = codecs()[1]["v"].to_params() | {name: value}
    if drop:
        params.pop(name if name != "other" else "step")
    try:
        codec = Tcz.from_params(params)
    except ManifestError:
        return
    assert not drop and name != "other" and codec.role in ROLES and 0.5 <= codec.rate <= 3 and math.isfinite(codec.step) and codec.step > 0


@pytest.mark.parametrize("params", (None, [], 3, "x", {}))
def test_params_that_are_no_object_are_refused(params: object) -> None:
    with pytest.raises(ManifestError):
        Tcz.from_params(params)


def test_rows_that_are_missing_or_not_finite_are_refused() -> None:
    values = codecs()[1]["v"]
    x = array(layers(40)[1].v)
    with pytest.raises(ValueError, match="needs the decoded rows 'k'"):
        values.encode(x)
    with pytest.raises(ValueError, match=r"given 'v-'"):
        values.encode(x, {"k": x, "k-": x, "v-": x[:, :3]})
    with pytest.raises(ValueError, match=r"given 'v-'"):
        values.encode(x, {"k": x, "k-": x, "v-": x[:1]})
    keys, bad = codecs()[0]["k"], np.zeros((HEADS, 5, DIM), np.float32)
    for value, message in ((np.nan, "1 of 80 values are NaN"), (1e30, r"beyond 2\^30 steps")):
        bad[1, 3, 2] = value
        with pytest.raises(ValueError, match=message):
            keys.encode(mx.array(bad))


# --- hostile streams


def test_lying_parts_are_refused() -> None:
    codec, parts, given, x, _ = coded(layers(TOKENS))[2]
    stream, index = (np.array(parts[name]) for name in ("stream", "index"))
    lies = [
        {"stream": stream[:, :-1], "index": index},
        {"stream": np.append(stream, [[1]], axis=1).astype(np.uint32), "index": index},
        {"stream": stream, "index": index[:, ::-1]},
        {"stream": stream, "index": np.full_like(index, 2**32 - 1)},
        {"stream": stream[:, :0], "index": np.zeros_like(index)},
        {"stream": np.ones((1, 10**6), np.uint32), "index": np.array([[10**6, 0, 0]], np.uint32)},
    ]
    for lie in lies:
        with pytest.raises(ManifestError, match=r"\[tcz\] part 'stream'"):
            codec.decode({name: mx.array(np.ascontiguousarray(a)) for name, a in lie.items()}, x.shape, mx.float32, given)
    for bad in ({"stream": parts["stream"]}, parts | {"index": parts["index"][:, :-1]}, parts | {"stream": parts["stream"].view(mx.uint8)}):
        with pytest.raises(ValueError, match=r"\[tcz\] part"):
            codec.decode(bad, x.shape, mx.float32, given)


@settings(max_examples=40, deadline=None)
@drawn(where=st.integers(0, 10**6), bit=st.integers(0, 31))
def test_a_flipped_bit_is_refused(where: int, bit: int) -> None:
    codec, parts, given, x, _ = _second()
    stream = np.array(parts["stream"])
    stream[0, where % stream.size] ^= np.uint32(1 << bit)
    # One in 65536 passes the coder; 40 fixed examples do not. In a file, a digest stands before it.
    with pytest.raises(ManifestError):
        codec.decode(parts | {"stream": mx.array(stream)}, x.shape, mx.float32, given)


@cache
def _second() -> tuple[Tcz, dict, dict, mx.array, mx.array]:
    return coded(layers(300))[3]


# --- a frozen file: the same words for ever, whatever the version of the entropy coder


def frozen_case() -> dict[str, np.ndarray]:
    """Arrays of a golden file: two layers with an escape, a shift class and all four kinds of prediction."""
    rows = layers(300, count=2, seed=9)
    tables, _ = build_at(rows, 0.8, 1.0)
    arrays = {f"t{i}.{name}": a for i, t in enumerate(tables) for name, a in t.to_arrays().items()}
    before: dict[str, mx.array] = {}
    for i, (layer, t) in enumerate(zip(rows, tables, strict=True)):
        own: dict[str, mx.array] = {}
        for role in ROLES:
            x = getattr(layer, role).copy()
            x[7, 0, 1] += 4e6
            x[:, 1, 2] *= 1e3
            codec = Tcz(1.0, role).bind(role, t, 0.5, str(i), str(i - 1) if i else None, DIGEST)
            given = {name: (own | before)[name] for name in codec.needs}
            parts = codec.encode(array(x), given)
            own[role] = codec.decode(parts, tuple(array(x).shape), mx.float32, given)
            arrays |= {f"{i}{role}.{name}": np.array(a) for name, a in parts.items()}
            arrays |= {f"{i}{role}.x": np.array(array(x)), f"{i}{role}.decoded": np.array(own[role])}
            arrays[f"{i}{role}.params"] = np.array(json.dumps(codec.to_params(), sort_keys=True))
        before = {f"{role}-": own[role] for role in ROLES}
    return arrays


def test_golden() -> None:
    with np.load(GOLDEN / "chain-f32-d8.npz") as stored:
        file = dict(stored)
    before: dict[str, mx.array] = {}
    for i in range(2):
        tables = TczTables.from_arrays({name.removeprefix(f"t{i}."): a for name, a in file.items() if name.startswith(f"t{i}.")})
        own: dict[str, mx.array] = {}
        for role in ROLES:
            at = f"{i}{role}"
            codec = Tcz.from_params(json.loads(str(file[f"{at}.params"]))).with_tables(tables)
            # The frozen decoded rows, not our own: what was written is what it was predicted from.
            given = {name: (own | before)[name] for name in codec.needs}
            x, parts = file[f"{at}.x"], {name: mx.array(file[f"{at}.{name}"]) for name in ("stream", "index")}
            got, frozen = f64(codec.decode(parts, x.shape, mx.float32, given)), file[f"{at}.decoded"].astype(np.float64)
            # Another BLAS or device may sum in another order.
            np.testing.assert_allclose(got, frozen, rtol=2e-5, atol=1e-6 * np.abs(frozen).max())
            for name, part in codec.encode(mx.array(x), given).items():
                assert np.array_equal(np.array(part), file[f"{at}.{name}"]), name
            own[role] = mx.array(file[f"{at}.decoded"])
        before = {f"{role}-": own[role] for role in ROLES}
