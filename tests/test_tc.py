"""tc: codes, rows and scales against float64 versions written from formats/SPEC.md; laws; statistics; bytes and params that lie."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import ManifestError
from tests import codec_oracles
from tests.golden import make_tc as golden
from tests.tc_cases import DIGEST, bound, layer, tables
from veloxquant_mlx.allocators.carried_tables import carried_values, mix_widths, rounded_keys
from veloxquant_mlx.allocators.shapes import SHAPES
from veloxquant_mlx.allocators.transforms import LayerRows, TcTables, ValueTables, build_tc, key_tables, value_tables, widths_for
from veloxquant_mlx.codecs import CODECS, _base, parse_codec
from veloxquant_mlx.codecs._components import BLOCK, Components
from veloxquant_mlx.codecs.tc import STEPS, Tc, scale_codes
from veloxquant_mlx.codecs.tc_tables import ZERO

SPECS = ("tc-1.25", "tc-2", "tc-3.7:seed=9223372036854775807", "tc-6", "tc-2:carry")
SIZES = ((2, 64), (3, 6), (1, 36))
DTYPES = (mx.float16, mx.bfloat16, mx.float32)


def rows(tokens: int, heads: int = 2, dim: int = 64, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Keys and values like the calibration's; where there are enough, an outlier, zeros, and a row that is the prediction's mean."""
    own = layer(max(tokens, 1), 7, heads, dim)
    k, v = (np.ascontiguousarray(a[:tokens].swapaxes(0, 1)).astype(np.float32) for a in (own.k, own.v))
    if tokens > 5:
        k[0, 1], v[0, 2], v[:, 3], k[:, 4] = 1000 * k[0, 1], 1000 * v[0, 2], 0.0, 0.0
    return mx.array(k).astype(dtype), mx.array(v).astype(dtype)


def coded(k: Tc, v: Tc, x: mx.array, w: mx.array) -> tuple[dict, mx.array, dict, mx.array]:
    key_parts = k.encode(x)
    keys = k.decode(key_parts, x.shape, mx.float32)
    value_parts = v.encode(w, {"k": keys})
    return key_parts, keys, value_parts, v.decode(value_parts, w.shape, mx.float32, {"k": keys})


def f64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def same(a: dict[str, mx.array], b: dict[str, mx.array]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and np.array_equal(np.array(a[n]), np.array(b[n])) for n in a)


# --- the specification, again


@cache
def lloyd(beta: float, bits: int) -> tuple[np.ndarray, float]:
    """Points and their error, from sums over a fine grid of the density: Lloyd's iteration, then Newton's with differences."""
    t = (np.arange(400_000) + 0.5) * (7.5 / 400_000)
    x, weight = t**3, np.exp(-((t**3) ** beta)) * t**2
    x, weight = x / math.sqrt((weight * x * x).sum() / weight.sum()), weight / weight.sum()
    edge = np.concatenate([[0], (x[1:] + x[:-1]) / 2, [x[-1]]])
    sums = [np.concatenate([[0], np.cumsum(values)]) for values in (weight, weight * x)]
    density = np.cumsum(np.cbrt(np.exp(-((t**3) ** beta))) * t**2)
    c = np.interp((np.arange(1 << bits - 1) + 0.5) / (1 << bits - 1), density / density[-1], x)

    def means(c: np.ndarray) -> np.ndarray:
        at = np.concatenate([[0], (c[1:] + c[:-1]) / 2, [edge[-1]]])
        mass, moment = (np.diff(np.interp(at, edge, s)) for s in sums)
        return moment / mass

    for _ in range(40):
        c = means(c)
    for _ in range(6):
        slopes = np.stack([(means(c + h) - means(c - h)) / (2e-5 * c[0]) for h in np.eye(len(c)) * 1e-5 * c[0]], axis=1)
        c = c - np.linalg.solve(np.eye(len(c)) - slopes, c - means(c))
    assert np.abs(c - means(c)).max() < 1e-8
    at = np.concatenate([[0], (c[1:] + c[:-1]) / 2, [edge[-1]]])
    return np.concatenate([-c[::-1], c]), float(1 - (np.diff(np.interp(at, edge, sums[0])) * c * c).sum())


def widths_of(params: dict) -> np.ndarray:
    return np.array([[int(digit) for digit in head] for head in params["keys"]])


def bit_codes(part: np.ndarray, widths: list[int]) -> np.ndarray:
    """Codes (n, tokens) of blocks of bytes."""
    blocks = []
    for block in part:
        stream, at, own = np.unpackbits(block, bitorder="little"), 0, []
        for width in widths:
            bits = stream[at : at + 32 * width].reshape(32, width).astype(np.int64)
            own.append((bits << np.arange(width)).sum(axis=1))
            at += 32 * width
        assert at == len(stream)
        blocks.append(np.stack(own))
    return np.concatenate(blocks, axis=1)


def spec_tables(params: dict, parts: dict) -> dict[str, np.ndarray]:
    """mean, back, shapes (keys) or k_mean, v_mean, forward, mix (values), from parts or from the calibration's arrays."""
    stored = {name: np.array(part) for name, part in parts.items()}
    if params["tables"] == "carried":
        found = {name: stored[name].astype(np.float64) for name in ("mean", "k_mean", "v_mean", "shapes") if name in stored}
        if params["role"] == "k":
            return found | {"back": stored["back"].astype(np.float64) * stored["back_step"][:, None]}
        return found | carried_rows(params, stored)
    widths = widths_of(params)
    used = np.flatnonzero(widths.reshape(-1))
    arrays = {name: array.astype(np.float64) for name, array in tables(*widths.shape).to_arrays().items()}
    back = arrays["back"] * arrays["back_size"][..., None]
    shapes = np.array([arrays["shapes"][w - 1].reshape(-1)[i] for i, w in enumerate(widths.reshape(-1)) if w], int)
    c_yy = arrays["c_yy"] * np.outer(arrays["c_yy_size"], arrays["c_yy_size"])
    error = np.array([lloyd(SHAPES[s], w)[1] for s, w in zip(shapes, widths.reshape(-1)[used], strict=True)])
    gram = c_yy[np.ix_(used, used)] + np.diag(error / (1 - error) + max(0.003, 6 * len(used) / arrays["rows"][0]))
    forward = np.linalg.inv(back).swapaxes(1, 2).reshape(-1, back.shape[2])
    return {
        "mean": arrays["k_mean"],
        "k_mean": arrays["k_mean"],
        "v_mean": arrays["v_mean"],
        "back": back.reshape(-1, back.shape[2])[used],
        "forward": forward[used],
        "shapes": shapes,
        "mix": np.linalg.solve(gram, (arrays["c_yv"] * arrays["c_yv_size"])[used]),
    }


def carried_rows(params: dict, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """forward (m, D) and mix (m, H D) of the codes that carry them."""
    heads, dim = widths_of(params).shape
    homes = np.nonzero(widths_of(params))[0]
    tables = {}
    for name, size in (("forward", dim), ("mix", dim), ("cross", (heads - 1) * dim)):
        bits = [4] * len(homes) if name == "forward" else [int(digit) for digit in params[name]]
        codes = bit_codes(stored[name][0], bits)[:, :size] if size else np.zeros((len(homes), 0), int)
        rows = [lloyd(2, b)[0][own] if b else np.zeros(size) for b, own in zip(bits, codes, strict=True)]
        tables[name] = np.reshape(rows, (len(homes), size)) * stored[f"{name}_step"][:, None]
    mix = np.zeros((len(homes), heads, dim))
    for i, home in enumerate(homes):
        mix[i, home] = tables["mix"][i]
        mix[i, np.arange(heads) != home] = tables["cross"][i].reshape(heads - 1, dim)
    return {"forward": tables["forward"], "mix": mix.reshape(len(homes), heads * dim)}


def spec_decode(params: dict, parts: dict, tokens: int, keys: np.ndarray | None) -> np.ndarray:
    table, widths = spec_tables(params, parts), widths_of(params)
    heads, dim = widths.shape
    if params["role"] == "k":
        codes = bit_codes(np.array(parts["codes"])[0], widths.reshape(-1).tolist())
        out, at = np.repeat(table["mean"][:, None], tokens, axis=1), 0
        for i, w in enumerate(widths.reshape(-1)):
            if w:
                points, error = lloyd(SHAPES[int(table["shapes"][at])], w)
                out[i // dim] += np.outer(points[codes[i, :tokens]] / (1 - error), table["back"][at])
                at += 1
        return out
    head_of = np.flatnonzero(widths.reshape(-1)) // dim
    c = np.stack([(keys[h] - table["k_mean"][h]) @ table["forward"][i] for i, h in enumerate(head_of)], axis=1).clip(-64, 64)
    predicted = (c @ table["mix"]).reshape(tokens, heads, dim).swapaxes(0, 1) + table["v_mean"][:, None]
    every = np.repeat([int(w) for w in params["widths"]], dim)
    codes = bit_codes(np.array(parts["codes"])[0], every.tolist())[:, :tokens]
    q = np.stack([lloyd(2, w)[0][code] for w, code in zip(every, codes, strict=True)]).reshape(heads, dim, tokens).swapaxes(1, 2)
    t = bit_codes(np.array(parts["scales"])[0], [6] * heads)[:, :tokens]
    limits = f64(parts["range"])
    u = np.where(t == 63, 0, 2.0 ** (limits[:, :1] - limits[:, 1:] * t))
    return predicted + u[..., None] * (q @ codec_oracles.rotation(dim, params["seed"]))


@pytest.mark.parametrize("spec", SPECS[:3] + SPECS[4:])
@pytest.mark.parametrize(("heads", "dim"), SIZES)
def test_rows_are_the_specifications(spec: str, heads: int, dim: int) -> None:
    k, v = bound(spec, heads, dim)
    x, w = rows(70, heads, dim)
    key_parts, keys, value_parts, values = coded(k, v, x, w)
    wanted = spec_decode(json.loads(json.dumps(k.to_params())), key_parts, 70, None)
    # The oracle's grid gives points to some 1e-4; the rest is float32.
    np.testing.assert_allclose(f64(keys), wanted, atol=1e-4 * np.abs(wanted).max())
    wanted = spec_decode(json.loads(json.dumps(v.to_params())), value_parts, 70, f64(keys))
    np.testing.assert_allclose(f64(values), wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("spec", ("tc-2", "tc-2:carry"))
def test_codes_are_the_nearest_points_and_scales_unbiased(spec: str) -> None:
    k, v = bound(spec)
    x, w = rows(200)
    key_parts, keys, value_parts, _ = coded(k, v, x, w)
    table, widths = spec_tables(k.to_params(), key_parts), widths_of(k.to_params())
    codes = bit_codes(np.array(key_parts["codes"])[0], widths.reshape(-1).tolist())
    assert not codes[:, 200:].any()
    metric = tables(2, 64)
    at = 0
    for h in range(2):
        count = int((widths[h] > 0).sum())
        back = table["back"][at : at + count]
        # Least squares on the rows of `back` in the metric of the costs; the inverse where nothing was rounded.
        f = metric.forward()[h]
        m = f * metric.k_cost[h] @ f.T
        y = (f64(x)[h] - table["mean"][h]) @ m @ back.T @ np.linalg.inv(back @ m @ back.T)
        for i in range(count):
            width = widths[h][widths[h] > 0][i]
            points = lloyd(SHAPES[int(table["shapes"][at + i])], width)[0]
            edges = (points[1:] + points[:-1]) / 2
            sure = np.abs(y[:, i, None] - edges).min(axis=1) > 2e-3  # the oracle's points, and float32 on rows 1000 times too large
            code = codes[h * 64 + np.flatnonzero(widths[h])[i], :200]
            assert np.array_equal(code[sure], np.searchsorted(edges, y[sure, i])) and sure.mean() > 0.9
        at += count
    table, params = spec_tables(v.to_params(), value_parts), v.to_params()
    c = np.concatenate(
        [(f64(keys)[h] - table["k_mean"][h]) @ table["forward"][np.flatnonzero(widths) // 64 == h].T for h in range(2)], axis=1
    )
    left = f64(w) - (c.clip(-64, 64) @ table["mix"]).reshape(200, 2, 64).swapaxes(0, 1) - table["v_mean"][:, None]
    y = left @ codec_oracles.rotation(64, params["seed"]).T
    t, limits = bit_codes(np.array(value_parts["scales"])[0], [6, 6])[:, :200], f64(value_parts["range"])
    codes = bit_codes(np.array(value_parts["codes"])[0], np.repeat([int(b) for b in params["widths"]], 64).tolist())[:, :200]
    for h in range(2):
        points = lloyd(2, int(params["widths"][h]))[0]
        unit = y[h] / np.sqrt((y[h] ** 2).mean(axis=1, keepdims=True))
        edges = (points[1:] + points[:-1]) / 2
        q = points[np.searchsorted(edges, unit)]
        sure = np.abs(unit[..., None] - edges).min(axis=-1) > 1e-3
        own = codes[h * 64 : (h + 1) * 64].T
        assert np.array_equal(own[sure], np.searchsorted(edges, unit)[sure])
        scale = (y[h] ** 2).sum(axis=1) / (y[h] * q).sum(axis=1)
        coded_scale = 2.0 ** (limits[h, 0] - limits[h, 1] * t[h])
        in_range = (t[h] < ZERO - 1) & (scale < 0.999 * coded_scale.max())
        assert in_range.mean() > 0.9
        assert np.abs(np.log2(coded_scale / scale))[in_range].max() < limits[h, 1] / 2 + 1e-3


# --- laws


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tokens", (0, 1, 32, 45))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encode_returns_the_layout_and_decode_the_shape(spec: str, tokens: int, dtype: mx.Dtype) -> None:
    k, v = bound(spec, 3, 6)
    x, w = rows(tokens, 3, 6, dtype)
    keys = mx.zeros(x.shape)
    for codec, array, others in ((k, x, None), (v, w, {"k": keys})):
        parts = codec.encode(array, others)
        wanted = {part: (_base.DTYPES[name], size) for part, (name, size) in codec.layout(array.shape, dtype).items()}
        assert wanted == {part: (a.dtype, a.shape) for part, a in parts.items()}
        assert codec.nbytes(array.shape, dtype) == sum(a.nbytes for a in parts.values())
        decoded = codec.decode(parts, array.shape, dtype, others)
        assert (decoded.shape, decoded.dtype) == (array.shape, dtype)
        assert tokens == 0 or bool(mx.all(mx.isfinite(decoded)).item())
    assert (k.needs, v.needs, k.tokens_together, k.eager, v.after) == ((), ("k",), BLOCK, False, None)
    assert (k.default_frame("k"), v.default_frame("v")) == ("pre", "post")


@pytest.mark.parametrize("spec", SPECS)
def test_params_survive_json_and_decode_alike(spec: str) -> None:
    k, v = bound(spec)
    x, w = rows(45)
    key_parts, keys, value_parts, values = coded(k, v, x, w)
    for codec, parts, others, decoded in ((k, key_parts, None, keys), (v, value_parts, {"k": keys}, values)):
        again = CODECS["tc"].from_params(json.loads(json.dumps(codec.to_params())))
        assert again == codec and hash(again) == hash(codec) and again.to_params() == codec.to_params()
        assert codec.calibration is None and again.calibration == (None if ":carry" in spec else DIGEST)
        if again.calibration is not None:
            with pytest.raises(ValueError, match=f"needs the calibration {DIGEST}"):
                again.decode(parts, x.shape, mx.float32, others)
            again = again.with_tables(tables(2, 64))
            assert again.calibration is None
        assert np.array_equal(np.array(again.decode(parts, x.shape, mx.float32, others)), np.array(decoded))


def test_blind_to_blocks_strides_and_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    k, v = bound("tc-2")
    x, w = rows(150)
    key_parts, keys, value_parts, values = coded(k, v, x, w)
    strided = [mx.array(np.ascontiguousarray(np.array(a).transpose(1, 2, 0))).transpose(2, 0, 1) for a in (x, w)]
    monkeypatch.setattr(_base, "BLOCK_VALUES", 2 * 64 * 40)
    again = coded(k, v, *strided)
    assert same(key_parts, again[0]) and same(value_parts, again[2])
    assert np.array_equal(np.array(keys), np.array(again[1])) and np.array_equal(np.array(values), np.array(again[3]))
    # A piece of whole blocks decodes alone; a head of the rows has the codes of the whole.
    piece = k.decode({"codes": key_parts["codes"][:, 2:4]}, (2, 64, 64), mx.float32)
    assert np.array_equal(np.array(piece), np.array(keys[:, 64:128]))
    parts = {name: part[:, 2:4] if name != "range" else part for name, part in value_parts.items()}
    assert np.array_equal(np.array(v.decode(parts, (2, 64, 64), mx.float32, {"k": piece})), np.array(values[:, 64:128]))
    assert np.array_equal(np.array(k.encode(x[:, :64])["codes"]), np.array(key_parts["codes"][:, :2]))


@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16), ids=str)
def test_half_precision_codes_as_its_float32_values(dtype: mx.Dtype) -> None:
    k, v = bound("tc-2")
    x, w = rows(40, dtype=dtype)
    key_parts, keys, value_parts, values = coded(k, v, x, w)
    wide = coded(k, v, x.astype(mx.float32), w.astype(mx.float32))
    assert same(key_parts, wide[0]) and same(value_parts, wide[2])
    half = v.decode(value_parts, w.shape, dtype, {"k": keys})
    assert np.array_equal(f64(half), f64((mx.clip(values, -65504, 65504) if dtype == mx.float16 else values).astype(dtype)))


def test_wrong_parts_and_inputs_are_refused() -> None:
    for spec in ("tc-2", "tc-2:carry"):
        k, v = bound(spec)
        x, w = rows(45)
        key_parts, keys, value_parts, _ = coded(k, v, x, w)
        for codec, parts in ((k, key_parts), (v, value_parts)):
            for part in parts:
                with pytest.raises(ValueError, match=f"part '{part}' is missing"):
                    codec.decode({name: a for name, a in parts.items() if name != part}, x.shape, mx.float32, {"k": keys})
                with pytest.raises(ValueError, match=f"part '{part}' must be"):
                    codec.decode(parts | {part: parts[part][..., :-1]}, x.shape, mx.float32, {"k": keys})
    with pytest.raises(ValueError, match="needs the decoded rows 'k'"):
        v.encode(w)
    with pytest.raises(ValueError, match=r"given 'k' must be float32 \(H, 45, D\)"):
        v.encode(w, {"k": keys[:, :-1]})
    with pytest.raises(ValueError, match=r"given 'k' must be float32 \(2, 45, 64\)"):
        v.encode(w, {"k": keys[:, :, :-1]})
    with pytest.raises(ValueError, match=r"\(H, D\) = \(2, 64\), but got \(3, 64\)"):
        k.encode(mx.zeros((3, 4, 64)))
    with pytest.raises(TypeError, match="int32"):
        k.encode(mx.zeros((2, 3, 64), mx.int32))
    bad = mx.array(np.where(np.arange(2 * 45 * 64).reshape(2, 45, 64) == 70, np.nan, 1.0).astype(np.float32))
    for codec in (k, v):
        with pytest.raises(ValueError, match=r"1 of 5760 values .*\(head 0, token 1, dim 6\)"):
            codec.encode(bad, {"k": keys})


def test_without_tables_it_says_what_it_needs() -> None:
    plan = parse_codec("tc-2")
    for codec in (plan.k, plan.v):
        for call in (lambda c: c.encode(mx.zeros((2, 3, 64))), lambda c: c.layout((2, 3, 64), mx.float32), lambda c: c.to_params()):
            with pytest.raises(ValueError, match="tc-2 needs a calibration"):
                call(codec)
    carried = Tc.from_params(bound("tc-2:carry")[0].to_params())
    with pytest.raises(ValueError, match="layer '0' needs a calibration to be encoded"):
        carried.encode(mx.zeros((2, 3, 64)))
    with pytest.raises(ValueError, match=r"must be TcTables of \(H, D\) = \(2, 64\), but got \(3, 6\)"):
        bound("tc-2")[0].with_tables(tables(3, 6))
    with pytest.raises(ValueError, match="but got dict"):
        bound("tc-2")[0].with_tables({})


@pytest.mark.parametrize("spec", ("tc-2", "tc-1.25:carry", "tc-2.05:seed=7", "k=tc-3,v=raw", "tc-2,sink=0,recent=16"))
def test_spec_strings_round_trip(spec: str) -> None:
    assert parse_codec(spec).spec() == spec


@pytest.mark.parametrize("spec", ("tc", "tc-1", "tc-7", "tc-1.2", "tc-2.005", "tc-2:fast", "tc-2:seed=-1", "tc-2:seed=9223372036854775808"))
def test_wrong_specs(spec: str) -> None:
    with pytest.raises(ValueError, match=r"write tc-N with N in 1.25..6|there are carry, seed=N"):
        parse_codec(spec)


# --- what it is for


def test_points_are_unbiased_and_errors_cost_little() -> None:
    """On rows like the calibration's: E[y y^] = E[y^2], values' errors are not correlated with the values, more bits cost less."""
    own = layer(8000, 7, 2, 64)
    x, w = (mx.array(np.ascontiguousarray(a.swapaxes(0, 1)).astype(np.float32)) for a in (own.k, own.v))
    costs = []
    for spec in ("tc-1.5", "tc-2", "tc-3", "tc-4"):
        k, v = bound(spec)
        _, keys, _, values = coded(k, v, x, w)
        moved = f64(x) - tables(2, 64).k_mean[:, None]
        y = moved @ tables(2, 64).forward()
        y_hat = (f64(keys) - tables(2, 64).k_mean[:, None]) @ tables(2, 64).forward()
        gain = (y * y_hat).mean(axis=1) / (y * y).mean(axis=1)
        # One of five shapes fits a component to a few per cent, and its variance is that of 600 rows.
        coded_gain = np.abs(gain[k.key_widths > 0] - 1)
        assert coded_gain.max() < 0.2 and coded_gain.mean() < 0.02 and np.all(np.abs(gain[k.key_widths == 0]) < 0.05)
        error = f64(values) - f64(w)
        slope = (error * (f64(w) - f64(w).mean(axis=1, keepdims=True))).sum() / ((f64(w) - f64(w).mean(axis=1, keepdims=True)) ** 2).sum()
        assert abs(slope) < 0.01
        flat = [e.swapaxes(0, 1).reshape(8000, -1) for e in (f64(keys) - f64(x), error)]
        costs.append(sum(float(np.einsum("ni,ij,nj->", e, f, e)) for e, f in zip(flat, (own.fisher_k, own.fisher_v), strict=True)))
    assert costs[0] > 1.5 * costs[1] > 1.5 * 2.5 * costs[2] > 1.5 * 2.5 * 2.5 * costs[3]


def test_carried_tables_cost_little() -> None:
    x, w = rows(600)
    errors = []
    for spec in ("tc-2.5", "tc-2.5:carry"):
        _, keys, _, values = coded(*bound(spec, tokens=100_000), x, w)
        errors.append([float(mx.mean(mx.square(a[:, 6:] - b[:, 6:])).item()) for a, b in ((keys, x), (values, w))])
    np.testing.assert_allclose(errors[1], errors[0], rtol=0.15)


def left_of(own: TcTables, widths: np.ndarray, back: np.ndarray, columns: np.ndarray, found: ValueTables) -> tuple[np.ndarray, np.ndarray]:
    """(H,), mean of |v - prediction|^2 by the moments: components (k - mean) columns and their noise, through `back`, `forward` and W.

    The second is the variance of what W takes.
    """
    homes, heads = np.nonzero(widths)[0], own.heads
    project, through = np.zeros((heads * own.dim, len(homes))), np.zeros((len(homes),) * 2)
    for h in range(heads):
        at = homes == h
        project[h * own.dim : (h + 1) * own.dim, at] = own.back[h].astype(np.float64) @ columns[at].T
        through[np.ix_(at, at)] = back[at].astype(np.float64) @ found.forward[at].T
    w = through @ found.mix.astype(np.float64)
    gram = project.T @ own.c_yy @ project + np.diag(own.noise(widths)[widths > 0])
    explained = (2 * w * (project.T @ own.c_yv) - w * (gram @ w)).sum(axis=0).reshape(heads, own.dim).sum(axis=1)
    return own.v_power - explained, np.diagonal(through.T @ gram @ through)


@pytest.mark.parametrize(("heads", "dim"), SIZES)
def test_carried_map_of_few_bits_predicts_as_the_exact_one(heads: int, dim: int) -> None:
    """W makes up for a `forward` of 4 bits: what 8 bits of `back` and W leave to be told apart is little."""
    own = replace(tables(heads, dim), own=True)
    widths = widths_for({"0": own}, 3.0)["0"].keys()
    every = np.full((widths > 0).sum(), 8)
    exact, keys = key_tables(own, widths), rounded_keys(own, widths)
    best, _ = left_of(own, widths, exact.back, exact.forward, value_tables(own, widths))
    ours, variance = left_of(own, widths, keys.back, keys.forward, carried_values(own, widths, every, every).tables())
    np.testing.assert_allclose(variance, 1.0, rtol=1e-3)
    np.testing.assert_allclose(ours, best, rtol=0.02, atol=2e-3 * own.v_power.max())


def test_rows_of_the_prediction_pay_for_themselves() -> None:
    own = tables(2, 64)
    widths, keys = widths_for({"0": own}, 2.0)["0"].keys(), rounded_keys(own, widths_for({"0": own}, 2.0)["0"].keys())
    bits = {tokens: mix_widths(own, widths, tokens) for tokens in (0, 60, 600, 6000, 600_000)}
    assert not bits[0][0].any() and not bits[0][1].any()
    means = [float(np.mean(np.concatenate(found))) for found in bits.values()]
    assert means == sorted(means) and means[1] < 1.5 and means[-1] > 4

    def total(mix: np.ndarray, cross: np.ndarray, tokens: int) -> float:
        """Bits of the rows, and those that the values of these tokens need for one error."""
        left = left_of(own, widths, keys.back, keys.forward, carried_values(own, widths, mix, cross).tables())[0]
        return float(tokens * 32 * np.log2(left).sum() + 64 * (mix.sum() + cross.sum()))

    for tokens in (600, 6000):
        mix, cross = bits[tokens]
        chosen = total(mix, cross, tokens)
        for other in (bits[60], bits[600_000], (mix, 0 * cross), (0 * mix, cross), (mix, (cross - 1).clip(0)), ((mix - 1).clip(0), cross)):
            assert total(*other, tokens) > 1.001 * chosen
        # Real rows are not Gaussian, so that the choice is not the very best.
        assert min(total(mix + 1, cross, tokens), total(mix, cross + 1, tokens)) > 0.998 * chosen


def test_wide_rows_are_predicted_from_their_own_heads() -> None:
    """W of all heads grows with the square of their number: with few tokens it is not worth its size."""
    own = layer(400, 3, 8, 16)
    table = replace(build_tc(own), own=True)
    widths = widths_for({"0": table}, 2.0)["0"].keys()
    mix, cross = mix_widths(table, widths, 100)
    assert mix.any() and not cross.any()
    assert mix_widths(table, widths, 100_000)[1].any()
    # W is then the best of that form, not the best of all with a part left out.
    keys, most = rounded_keys(table, widths), np.full(len(mix), 8)
    alone, joint = (carried_values(table, widths, most, bits).tables() for bits in (0 * most, most))
    own = np.arange(128) // 16 == np.nonzero(widths)[0][:, None]
    assert not alone.mix[~own].any()
    left = [left_of(table, widths, keys.back, keys.forward, f)[0] for f in (alone, replace(joint, mix=np.where(own, joint.mix, 0)))]
    assert np.all(left[0] < left[1])


def test_an_outlier_leaves_the_other_scales_alone() -> None:
    sizes = np.exp(np.random.default_rng(0).standard_normal((2, 300)))
    sizes[0, 5], sizes[1, 7], sizes[1, 8] = 1e6, 1e-30, 0.0
    codes, limits = scale_codes(sizes)
    decoded = np.where(codes == ZERO, 0, 2.0 ** (limits[:, :1] - limits[:, 1:] * codes))
    assert limits[0, 1] == 0.5 and limits[1, 1] == 0.125 and decoded[1, 7] == decoded[1, 8] == 0
    seen = sizes > np.median(sizes, axis=1, keepdims=True) / 8
    error = np.abs(np.log2(np.where(seen, decoded, 1) / np.where(seen, sizes, 1)))
    assert np.all(np.isin(limits[:, 1], STEPS)) and np.all(error <= limits[:, 1:] / 2 + 1e-9)
    assert scale_codes(np.zeros((1, 3)))[0].tolist() == [[ZERO] * 3]


def test_rows_that_are_predicted_exactly_have_no_scale() -> None:
    """Values that never move: the prediction is their mean, and what is left of a row that equals it is zero."""
    own = layer(200)
    table = build_tc(LayerRows(own.k, np.ones_like(own.v), own.fisher_k, own.fisher_v))
    v = Tc(2.0, "v").bind("v", table, replace(widths_for({"0": table}, 2.0)["0"], v=("3", "2")), "0", DIGEST)
    w = np.ones((2, 40, 8), np.float32)
    w[1, 3, 2] = 1.5
    parts = v.encode(mx.array(w), {"k": mx.zeros(w.shape)})
    scales = bit_codes(np.array(parts["scales"])[0], [6, 6])[:, :40]
    assert np.argwhere(scales != ZERO).tolist() == [[1, 3]]
    codes = bit_codes(np.array(parts["codes"])[0], np.repeat([int(b) for b in v.to_params()["widths"]], 8).tolist())
    assert np.unique(np.argwhere(codes)[:, 1]).tolist() == [3]
    decoded = np.array(v.decode(parts, w.shape, mx.float32, {"k": mx.zeros(w.shape)}))
    w[1, 3] = decoded[1, 3]
    assert np.array_equal(decoded, w) and abs(decoded[1, 3, 2] - 1.5) < 0.25


@pytest.mark.parametrize("size", (1e-30, 1e-6, 1e6, 1e30))
def test_value_errors_are_relative_at_any_size(size: float) -> None:
    _, v = bound("tc-2")
    w = mx.random.normal((2, 64, 64), key=mx.random.key(1)) * size
    mean = mx.broadcast_to(mx.array(tables(2, 64).k_mean)[:, None], w.shape)
    decoded = v.decode(v.encode(w, {"k": mean}), w.shape, mx.float32, {"k": mean})
    gone = mx.array(tables(2, 64).v_mean)[:, None]
    target = f64(w)
    error = np.linalg.norm(f64(decoded) - target) / max(np.linalg.norm(target - f64(gone)), 1e-300)
    assert error < 0.5


def test_rows_far_from_all_calibration_decode_to_finite_rows() -> None:
    k, v = bound("tc-2")
    x = mx.array(np.where(np.random.default_rng(0).random((2, 40, 64)) < 0.5, 1e36, -1e36).astype(np.float32))
    _, keys, _, values = coded(k, v, x, x)
    assert bool(mx.all(mx.isfinite(keys)).item()) and bool(mx.all(mx.isfinite(values)).item())
    exact = v.encode(x, {"k": x})  # predicted from keys that were never coded
    assert bool(mx.all(mx.isfinite(v.decode(exact, x.shape, mx.float16, {"k": x}))).item())


# --- bytes that lie


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_components_round_trip(data: st.DataObject) -> None:
    widths = np.array(data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=12)))
    shapes = np.array(data.draw(st.lists(st.integers(0, 4), min_size=len(widths), max_size=len(widths))))
    blocks = data.draw(st.integers(0, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    quantisers = Components(widths, shapes, unbiased=data.draw(st.booleans()))
    codes = (rng.integers(0, 256, (len(widths), 32 * blocks)) & ((1 << widths) - 1)[:, None]).astype(np.uint8)
    packed = quantisers.pack(codes)
    assert packed.shape == (1, blocks, 4 * widths.sum()) and packed.dtype == mx.uint8
    if blocks:
        assert np.array_equal(bit_codes(np.array(packed)[0], widths.tolist()), codes)
    points = np.array(quantisers.unpack(packed[0]))
    flat = points.swapaxes(0, 1).reshape(codes.shape)
    assert np.array_equal(flat, quantisers.values(codes))
    if not quantisers.unbiased:
        assert np.array_equal(quantisers.codes(flat), codes)  # a point is in its own cell


@given(st.integers(0, 1 << 30))
@settings(max_examples=25, deadline=None)
def test_any_bytes_decode(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for spec in ("tc-2", "tc-2:carry"):
        k, v = bound(spec, 3, 6)
        for codec in (k, v):
            parts = {}
            for name, (dtype, shape) in codec.layout((3, 45, 6), mx.float32).items():
                size = _base.DTYPES[dtype].size
                raw = rng.integers(0, 256, (*shape[:-1], shape[-1] * size), dtype=np.uint8)
                parts[name] = mx.array(raw).view(_base.DTYPES[dtype])
            try:
                decoded = codec.decode(parts, (3, 45, 6), mx.float32, {"k": mx.zeros((3, 45, 6))})
            except ManifestError as error:
                assert "part '" in str(error)
            else:
                assert decoded.shape == (3, 45, 6)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    (
        ("range", np.nan, "part 'range' must be within 128"),
        ("range", 1e4, "part 'range' must be within 128"),
        ("shapes", 5, "part 'shapes' must be below 5, but got 5"),
        ("mean", np.inf, "part 'mean' must be finite"),
        ("back_step", np.nan, "part 'back_step' must be finite"),
        ("cross_step", np.inf, "part 'cross_step' must be finite"),
        ("mix_step", np.inf, "part 'mix_step' must be finite"),
        ("forward_step", np.nan, "part 'forward_step' must be finite"),
        ("v_mean", np.nan, "part 'v_mean' must be finite"),
    ),
)
def test_impossible_parts_are_refused(part: str, value: float, message: str) -> None:
    x, w = rows(45)
    k, v = bound("tc-2:carry")
    key_parts, keys, value_parts, _ = coded(k, v, x, w)
    codec, parts = (k, key_parts) if part in key_parts else (v, value_parts)
    array = np.array(parts[part])
    array.reshape(-1)[0] = value
    with pytest.raises(ManifestError, match=message):
        codec.decode(parts | {part: mx.array(array)}, x.shape, mx.float32, {"k": keys})


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"role": "q"}, "role must be"),
        ({"bits": 7}, "bits must be"),
        ({"bits": True}, "bits must be"),
        ({"bits": math.nan}, "bits must be"),
        ({"keys": []}, "keys must be"),
        ({"keys": "12"}, "keys must be"),
        ({"keys": ["19", "00"]}, "keys must be"),
        ({"keys": ["1\n", "00"]}, "keys must be"),
        ({"keys": ["\u0661", "0"]}, "keys must be"),
        ({"keys": ["123", "12"]}, "one length"),
        ({"keys": ["0" * 1025] * 2}, "keys must be"),
        ({"keys": ["0"] * 1025}, "keys must be"),
        ({"keys": ["0" * 128] * 65}, "8192 digits together at most, but got 65 x 128"),
        ({"keys": [None, "0"]}, "keys must be"),
        ({"widths": ["3"]}, "widths must be"),
        ({"widths": ["3", "0"]}, "widths must be"),
        ({"widths": ["3", "7"]}, "widths must be"),
        ({"widths": ["3", "33"]}, "widths must be"),
        ({"widths": None}, "widths must be"),
        ({"rotation": "qr"}, "rotation must be"),
        ({"seed": 1 << 63}, "seed must be"),
        ({"seed": True}, "seed must be"),
        ({"tables": "carry"}, "tables must be"),
        ({"tables": "AB" * 32}, "tables must be"),
        ({"tables": None}, "tables must be"),
        ({"layer": ""}, "layer must be"),
        ({"layer": "x" * 65}, "layer must be"),
        ({"layer": 3}, "layer must be"),
    ),
)
def test_impossible_params_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        Tc.from_params(bound("tc-2")[1].to_params() | change)


@pytest.mark.parametrize("name", ("mix", "cross"))
def test_impossible_widths_of_carried_rows_are_refused(name: str) -> None:
    params = bound("tc-2:carry")[1].to_params()
    good = params[name]
    for digits in (None, "", good[1:], good + "1", "9" + good[1:], "\u0661" + good[1:], good[1:] + "\n", list(good), int(good or 0)):
        with pytest.raises(ManifestError, match=f"{name} must be {len(good)} digits 0..8"):
            Tc.from_params(params | {name: digits})


# --- golden files


@pytest.mark.parametrize("name", golden.CASES)
def test_golden(name: str) -> None:
    file = golden.read(Path(golden.__file__).parent / "tc" / f"{name}.npz")
    k, v = (Tc.from_params(params) for params in file.params)
    if k.calibration:
        k, v = (codec.with_tables(file.tables) for codec in (k, v))
    keys = k.decode(file.key_parts, file.shape, mx.float32)
    np.testing.assert_allclose(np.array(keys), file.keys, atol=2e-6 * np.abs(file.keys).max())  # float32 sums in another order
    values = v.decode(file.value_parts, file.shape, mx.float32, {"k": mx.array(file.keys)})
    np.testing.assert_allclose(np.array(values), file.values, atol=2e-6 * np.abs(file.values).max())
    again = golden.encoded(name, file.tables)
    assert np.array_equal(np.array(again[2]["codes"]), np.array(file.key_parts["codes"]))
    assert all(np.array_equal(np.array(again[3][part]), np.array(file.value_parts[part])) for part in ("codes", "scales", "range"))
    assert again[0].to_params() == k.to_params() and again[1].to_params() == v.to_params()
