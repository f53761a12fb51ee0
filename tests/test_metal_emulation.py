"""The Metal emulation finds what it claims to find, and computes what Metal computes."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from tests.metal_emulation.emulator import EmulatedMetal, MetalFault, unavailable
from veloxquant_mlx.metal._kernel import Kernel, using

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

N = 64


def run(
    body: str,
    inputs: Sequence[mx.array] = (),
    *,
    out: mx.Dtype = mx.float32,
    size: int = N,
    grid: tuple[int, int, int] = (N, 1, 1),
    threadgroup: tuple[int, int, int] = (N, 1, 1),
    seed: int = 0,
) -> np.ndarray:
    """`body` with inputs x, y, ... and l = the thread's index in the grid."""
    kernel = Kernel("probe", tuple("xyz"[: len(inputs)]), ("out",), (), f"const uint l = thread_position_in_grid.x;\n{body}", "")
    with using(EmulatedMetal(seed)):
        result = kernel(inputs, grid=grid, threadgroup=threadgroup, output_shapes=[(size,)], output_dtypes=[out])[0]
    return np.array(result.astype(mx.float32) if out == mx.bfloat16 else result)


X = mx.arange(N).astype(mx.float32)
REVERSE = "threadgroup float tile[64];\ntile[l] = x[l];\n{barrier}\nout[l] = tile[63 - l];"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

# name: (body, what the report says)
FAULTS = {
    "dropped-barrier": (REVERSE.format(barrier=""), "uninitialised: reads byte|race: reads byte"),
    "barrier-without-memory": (REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_none);"), "race: reads byte"),
    "barrier-of-the-wrong-memory": (REVERSE.format(barrier="threadgroup_barrier(mem_flags::mem_device);"), "race: reads byte"),
    "simdgroup-barrier-across-simdgroups": (
        REVERSE.format(barrier="simdgroup_barrier(mem_flags::mem_threadgroup);"),
        "uninitialised|race: reads byte",
    ),
    "write-after-read": (
        f"threadgroup float tile[64];\ntile[l] = x[l];\n{BARRIER}\nconst float v = tile[63 - l];\ntile[l] = 0.0f;\nout[l] = v;",
        "race: (writes|reads) byte",
    ),
    "within-a-simdgroup": (
        "threadgroup float tile[64];\ntile[l] = x[l];\nconst float v = tile[l ^ 1];\nout[l] = v;",
        "uninitialised|race: reads byte",
    ),
    "shuffle-is-no-barrier": (
        "threadgroup float tile[64];\ntile[l] = x[l];\nconst float s = simd_sum(1.0f);\nout[l] = tile[l ^ 1] + s;",
        "race: reads byte",
    ),
    "two-writers": ("threadgroup float total;\ntotal = 1.0f;\nout[l] = x[l];", "race: writes byte"),
    "two-writers-of-an-output": ("out[l] = x[l];\nout[l / 2] = x[l];", r"race: writes out\["),
    "uninitialised-threadgroup-memory": ("threadgroup float tile[64];\nout[l] = tile[l];", "uninitialised: reads byte"),
    "reads-an-output-first": ("out[l] = out[l] + x[l];", r"uninitialised: reads out\[\d+\] before it is written"),
    "divergent-barrier": (
        f"if (l < 32) {{\n{BARRIER}\n}}\nout[l] = x[l];",
        r"divergent: threads 0-31 at threadgroup_barrier.*threads 32-63 returned",
    ),
    "barrier-after-return": (f"out[l] = x[l];\nif (l == 5) return;\n{BARRIER}", "divergent: .*thread 5 returned"),
    "different-barriers": (
        f"if (l < 7) {{\n{BARRIER}\n}} else {{\n{BARRIER}\n}}\nout[l] = x[l];",
        r"divergent: at threadgroup_barrier \(line",
    ),
    "divergent-simd": (
        "float s = 0.0f;\nif (l % 32 < 16)\ns = simd_sum(x[l]);\nelse\ns = simd_max(x[l]);\nout[l] = s;",
        "divergent: at simd_",
    ),
    "simd-against-barrier": (
        f"float s = 0.0f;\nif (l < 16) s = simd_sum(x[l]);\n{BARRIER}\nout[l] = s;",
        "divergent: threads 0-15 at simd_sum",
    ),
    "lane-above-31": ("out[l] = simd_shuffle(x[l], ushort(l % 32 + 1));", "a shuffle reads a lane above 31"),
    "inactive-lane": ("if (l % 32 == 3) { out[l] = 0.0f; return; }\nout[l] = simd_shuffle_xor(x[l], 1);", "a lane that is inactive"),
    "read-after-the-end": ("out[l] = x[l + 1];", r"out of bounds: reads x\[64\] \(4 bytes\), but x has 64 elements"),
    "read-before-the-start": ("out[l] = x[int(l) - 1];", r"out of bounds: reads x\[-1\]"),
    "read-far-off": ("out[l] = x[l + 100000000];", r"out of bounds: reads x\[1000000\d\d\]"),
    "write-after-the-end": ("out[l + 1] = x[l];", r"out of bounds: writes out\[64\]"),
    "vector-over-the-end": ("out[l] = ((const device packed_float4*)x)[l / 4 + 1].x;", r"out of bounds: reads x\[64\] \(16 bytes\)"),
    "wider-load-than-the-element": ("const float2 v = ((const device float2*)x)[l / 2];\nout[l] = v.x;", "misaligned"),
    "wider-load-of-threadgroup-memory": (
        f"threadgroup half a[64];\na[l] = half(x[l]);\n{BARRIER}\n"
        "const half2 v = ((threadgroup const half2*)a)[l / 2];\nout[l] = float(v.x);",
        "misaligned",
    ),
    "lambda": ("auto f = [&](uint i) { return x[i]; };\nout[l] = f(l);", "no lambda"),
    "long-long": ("long long i = l;\nout[l] = float(i);", "Metal has no `long long`"),
    "static": ("static float s = 0.0f;\nout[l] = s;", "static variable must be constant"),
    "bool-shuffle": ("out[l] = simd_shuffle(x[l] > 0.0f, ushort(0)) ? 1.0f : 0.0f;", "does not compile(.|\n)*8 to 32 bits"),
    "long-sum": ("out[l] = float(simd_sum(ulong(l)));", "does not compile(.|\n)*8 to 32 bits"),
    "double-literal": ("out[l] = 0.1 * x[l];", "does not compile(.|\n)*implicit conversion"),
    "float-to-half-by-itself": ("const half h = x[l];\nout[l] = float(h);", "does not compile(.|\n)*implicit conversion"),
    "float-to-bfloat-by-itself": ("const bfloat h = x[l];\nout[l] = float(h);", "does not compile(.|\n)*implicit conversion"),
    "over-a-threadgroup-array": (
        "threadgroup float a[64];\nthreadgroup float b[64];\nb[l] = 1.0f;\nthreadgroup float* p = a;\np[l + 64] = x[l];\nout[l] = b[l];",
        "out of bounds: writes threadgroup memory",
    ),
    "index-of-a-threadgroup-array": (
        "threadgroup float a[64];\na[l + 1] = x[l];\nout[l] = x[l];",
        "out of bounds: an index outside its array|threadgroup",
    ),
    "index-of-a-local-array": ("float a[4] = {0};\na[l % 5] = x[l];\nout[l] = a[0];", "out of bounds: an index outside its array"),
    "writes-an-input": ("device float* p = (device float*)x;\np[l] = 1.0f;\nout[l] = x[l];", r"writes x\[\d+\], an input"),
    "leaves-an-element": ("if (l != 40) out[l] = x[l];", r"unwritten: no thread writes out\[40\], of 64"),
    "too-much-threadgroup-memory": (
        "threadgroup float a[8192];\nthreadgroup float b[4];\na[l] = x[l];\nb[l % 4] = x[l];\nout[l] = a[l];",
        "threadgroup memory: 32784 bytes",
    ),
    "wide-shift": ("out[l] = float(1u << (l % 33));", "undefined: shift"),
    "division-by-zero": ("out[l] = float(64 / int(l));", "undefined: integer division by zero"),
    "nan-to-integer": ("out[l] = float(int(x[l] / 0.0f - x[l] / 0.0f));", "undefined: NaN"),
    "endless": ("uint i = 0;\nwhile (x[i % 64] >= 0.0f) i++;\nout[l] = float(i);", "runs away"),
    "space-device-as-threadgroup": (
        "threadgroup const float* p = x;\nout[l] = p[l];",
        "does not compile(.|\n)*threadgroup float const.*device float const",
    ),
    "space-threadgroup-as-device": (
        "threadgroup float tile[64];\ndevice float* p = tile;\np[l] = 1.0f;\nout[l] = x[l];",
        "does not compile",
    ),
    "space-constant-as-device": ("constant float* p = x;\nout[l] = p[l];", "does not compile"),
    "space-dropped": ("thread const float* p = x;\nout[l] = p[l];", "does not compile"),
    "no-space": ("const float* p = x;\nout[l] = p[l];", "a pointer or reference needs an address space"),
    "writes-const": ("x[l] = 1.0f;\nout[l] = x[l];", "does not compile"),
    "double": ("double d = x[l];\nout[l] = float(d);", "Metal has no `double`"),
    "nested-threadgroup-variable": ("{\nthreadgroup float tile[64];\ntile[l] = x[l];\n}\nout[l] = x[l];", "nested scope"),
    "c++17": ("if constexpr (true) out[l] = x[l];", "does not compile"),
    "vector-cast": ("out[l] = static_cast<float4>(float4(x[l])).x;", "convert vectors by construction"),
    "shape-of-an-input": ("out[l] = float(x_shape[0]);", "x_shape"),
    "uninitialised-variable": ("float s;\nif (l > 64) s = 1.0f;\nout[l] = s;", "does not compile(.|\n)*uninitialized"),
}


@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.metal_emulation.emulator.ACCESS_LIMIT", 1_000_000)
    body, report = FAULTS[fault]
    with pytest.raises(MetalFault, match=report):
        run(body, [X], seed=seed)


# Rules for device functions: (header, what the report says)
HEADERS = {
    "reference-without-space": ("inline float f(float (&v)[2]) { return v[0]; }", "address space"),
    "pointer-without-space": ("template <typename T>\ninline float f(const T* v) {\n  return float(v[0]);\n}", "address space"),
    "global": ("namespace kvtool {\nconstexpr int WIDTH = 4;\n}", "outside functions must be constant"),
    "global-array": ("const float TABLE[2] = {1.0f, 2.0f};", "outside functions must be constant"),
    "threadgroup-variable": ("inline float f() {\n  threadgroup float t[4];\n  return 0.0f;\n}", "only there"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_rules_of_device_functions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    header, report = HEADERS[name]
    monkeypatch.setattr(Kernel, "header", lambda self, language: header + "\n")
    kernel = Kernel(f"rule_{name.replace('-', '_')}", (), ("out",), (), "out[thread_position_in_grid.x] = 0.0f;", "")
    with using(EmulatedMetal()), pytest.raises(MetalFault, match=report):
        kernel([], grid=(8, 1, 1), threadgroup=(8, 1, 1), output_shapes=[(8,)], output_dtypes=[mx.float32])


def test_more_than_1024_threads() -> None:
    with pytest.raises(ValueError, match="threadgroup must have 1 to 1024 threads"):
        run("out[l] = 0.0f;", grid=(2048, 1, 1), threadgroup=(2048, 1, 1), size=2048)


def test_report_names_the_line_and_the_thread() -> None:
    with pytest.raises(MetalFault, match=r"(?s)probe: out of bounds.*thread \(63, 0, 0\).*kernel.metal:\d+: out\[l\] = x\[l \+ 1\];"):
        run("out[l] = x[l + 1];", [X])


@pytest.mark.parametrize("seed", range(3))
def test_barriers_order_memory(seed: int) -> None:
    np.testing.assert_array_equal(run(REVERSE.format(barrier=BARRIER), [X], seed=seed), np.arange(N)[::-1])


def test_simdgroup_barrier_orders_a_simdgroup() -> None:
    body = "threadgroup float tile[64];\ntile[l] = x[l];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nout[l] = tile[l ^ 1];"
    np.testing.assert_array_equal(run(body, [X]), np.arange(N) ^ 1)


def test_threadgroup_memory_is_fresh_in_each_threadgroup() -> None:
    """The second threadgroup must not see what the first wrote."""
    body = "threadgroup float tile[32];\nif (threadgroup_position_in_grid.x == 0) tile[l % 32] = 1.0f;\nout[l] = tile[l % 32];"
    with pytest.raises(MetalFault, match="uninitialised"):
        run(body, threadgroup=(32, 1, 1))


SIMD = {
    "simd_sum(x[l])": lambda x: np.repeat(x.sum(1), 32),
    "simd_max(x[l])": lambda x: np.repeat(x.max(1), 32),
    "simd_min(x[l])": lambda x: np.repeat(x.min(1), 32),
    "simd_prefix_inclusive_sum(x[l])": lambda x: x.cumsum(1),
    "simd_prefix_exclusive_sum(x[l])": lambda x: x.cumsum(1) - x,
    "simd_shuffle(x[l], ushort(31 - l % 32))": lambda x: x[:, ::-1],
    "simd_shuffle_xor(x[l], 5)": lambda x: x[:, np.arange(32) ^ 5],
    "simd_shuffle_down(x[l], 4)": lambda x: np.concatenate([x[:, 4:], x[:, 28:]], axis=1),
    "simd_shuffle_up(x[l], 4)": lambda x: np.concatenate([x[:, :4], x[:, :28]], axis=1),
    "simd_shuffle_rotate_down(x[l], 4)": lambda x: np.roll(x, -4, axis=1),
    "simd_shuffle_rotate_up(x[l], 4)": lambda x: np.roll(x, 4, axis=1),
    "simd_broadcast(x[l], 7)": lambda x: np.repeat(x[:, 7], 32),
    "simd_broadcast_first(x[l])": lambda x: np.repeat(x[:, 0], 32),
    "float(uint(simd_vote::vote_t(simd_ballot(l % 3 == 0))) & 0xffff)": lambda x: np.repeat([0x9249, 0x2492], 32),
    "float(simd_all(x[l] < 32.0f))": lambda x: np.repeat([1, 0], 32),
    "float(simd_any(x[l] == 40.0f))": lambda x: np.repeat([0, 1], 32),
    "float(simd_xor(l))": lambda x: np.repeat(np.bitwise_xor.reduce(x.astype(int), axis=1), 32),
}


@pytest.mark.parametrize("expression", SIMD)
def test_simd(expression: str) -> None:
    want = SIMD[expression](np.arange(N, dtype=np.float64).reshape(2, 32))
    np.testing.assert_array_equal(run(f"out[l] = {expression};", [X]), np.ravel(want))


def test_inactive_lanes_do_not_count() -> None:
    """The last threadgroup has 6 threads; a lane that returned is out as well."""
    body = "if (l == 33) { out[l] = -1.0f; return; }\nout[l] = simd_sum(1.0f);"
    want = np.array([32.0] * 32 + [5.0, -1.0] + [5.0] * 4)
    np.testing.assert_array_equal(run(body, grid=(38, 1, 1), threadgroup=(32, 1, 1), size=38), want)


def test_positions() -> None:
    """A 3-D grid with partial threadgroups."""
    grid, group = (5, 3, 2), (4, 2, 2)
    body = """
    const uint3 p = thread_position_in_grid, g = threadgroup_position_in_grid, t = thread_position_in_threadgroup;
    const uint3 size = threads_per_threadgroup;
    const uint index = t.x + size.x * (t.y + size.y * t.z);
    const bool fine = all(p == g * dispatch_threads_per_threadgroup + t) && thread_index_in_threadgroup == index
        && all(threadgroups_per_grid == uint3(2, 2, 1)) && all(threads_per_grid == uint3(5, 3, 2)) && size.x == (g.x ? 1 : 4)
        && thread_index_in_simdgroup == index && simdgroups_per_threadgroup == 1 && simdgroup_index_in_threadgroup == 0;
    out[p.x + 5 * (p.y + 3 * p.z)] = fine ? 1.0f : 0.0f;
    """
    assert run(body, grid=grid, threadgroup=group, size=30).all()


MATRIX = """
const uint lane = thread_index_in_simdgroup;
threadgroup T tile[64];
simdgroup_matrix<T, 8, 8> a, b;
simdgroup_matrix<float, 8, 8> c = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
simdgroup_load(a, x, 8);
tile[lane] = y[lane];
tile[lane + 32] = y[lane + 32];
simdgroup_barrier(mem_flags::mem_threadgroup);
simdgroup_load(b, tile, 8, 0, true);
simdgroup_multiply_accumulate(c, a, b, c);
simdgroup_store(c, out, 8);
"""


@pytest.mark.parametrize(("name", "dtype"), (("float", mx.float32), ("half", mx.float16), ("bfloat", mx.bfloat16)))
def test_simdgroup_matrix(name: str, dtype: mx.Dtype) -> None:
    a, b = (np.random.default_rng(i).integers(-4, 5, (8, 8)).astype(np.float32) for i in range(2))
    body = MATRIX.replace("<T", f"<{name}").replace(" T ", f" {name} ")
    got = run(body, [mx.array(a).astype(dtype), mx.array(b).astype(dtype)], grid=(32, 1, 1), threadgroup=(32, 1, 1))
    np.testing.assert_array_equal(got.reshape(8, 8), a @ b.T + 0.5)


def test_thread_elements() -> None:
    """Lane l holds two neighbours of a row, in the layout of Apple GPUs."""
    body = """
    simdgroup_matrix<float, 8, 8> m;
    simdgroup_load(m, x, 8);
    const uint lane = thread_index_in_simdgroup, quad = lane / 4;
    const uint row = (quad & 4) + (lane / 2) % 4, column = (quad & 2) * 2 + (lane % 2) * 2;
    out[row * 8 + column] = m.thread_elements()[0];
    out[row * 8 + column + 1] = m.thread_elements()[1];
    """
    np.testing.assert_array_equal(run(body, [X], grid=(32, 1, 1), threadgroup=(32, 1, 1)), np.arange(N))


def test_matrix_needs_every_lane() -> None:
    body = """
    simdgroup_matrix<float, 8, 8> m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    simdgroup_multiply_accumulate(m, m, m, m);
    out[l] = m.thread_elements()[0];
    """
    with pytest.raises(MetalFault, match="simdgroup_multiply_accumulate needs all 32 lanes"):
        run(body, grid=(20, 1, 1), threadgroup=(20, 1, 1), size=20)


def test_atomics() -> None:
    body = f"""
    threadgroup atomic_uint counts[4];
    if (l < 4) atomic_store_explicit(&counts[l], 0u, memory_order_relaxed);
    {BARRIER}
    atomic_fetch_add_explicit(&counts[l % 4], 1u, memory_order_relaxed);
    {BARRIER}
    out[l] = float(atomic_load_explicit(&counts[l % 4], memory_order_relaxed));
    """
    np.testing.assert_array_equal(run(body), np.full(N, 16))


@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16))
def test_halves_round_after_every_operation(dtype: mx.Dtype) -> None:
    name = "half" if dtype == mx.float16 else "bfloat"
    a, b, c = ((np.random.default_rng(i).standard_normal(N)).astype(np.float32) for i in range(3))
    a, b, c = (mx.array(v).astype(dtype) for v in (a, b, c))
    got = run(f"const {name} p = x[l] * y[l];\nconst {name} q = p / z[l];\nout[l] = q - x[l];", [a, b, c], out=dtype)
    want = np.array((((a * b) / c) - a).astype(mx.float32))
    np.testing.assert_array_equal(got.astype(np.float32), want)


def test_products_and_sums_may_fuse_unless_forbidden() -> None:
    """x * x - round(x * x) is the rounding error where the sum is fused, else zero."""
    x = mx.array(np.random.default_rng(0).standard_normal(N).astype(np.float32))
    body = "out[l] = x[l] * x[l] - y[l];"
    assert run(body, [x, x * x]).any()
    assert not run("{\n#pragma METAL fp contract(off)\n" + body + "\n}", [x, x * x]).any()


def test_vectors() -> None:
    body = """
    float4 v = float4(x[l], 1.0f, 2.0f, 3.0f);
    v.yz = float2(half2(0.5h, 4.0h)) + v.wx;
    const uchar4 c = uchar4(1, 2, 3, 4);
    const float4 w = select(v, float4(0.0f), v > float4(100.0f));
    out[l] = dot(w, float4(c)) + float(popcount(0xf0u)) + as_type<float>(as_type<uint>(1.0f)) + fma(2.0f, 3.0f, clamp(5.0f, 0.0f, 1.0f));
    """
    x = np.arange(N)
    np.testing.assert_array_equal(run(body, [X]), x + 2 * 3.5 + 3 * (4 + x) + 4 * 3 + 4 + 1 + 7)


def test_denormals_are_flushed_in_single_but_not_in_half_precision() -> None:
    body = "out[l] = x[l] * 1e-30f == 0.0f && float(half(y[l]) * 0.5h) != 0.0f ? 1.0f : 0.0f;"
    assert run(body, [mx.full((N,), 1e-10), mx.full((N,), 1e-7)]).all()


def test_special_values() -> None:
    x = mx.array(np.array([np.nan, np.inf, -np.inf, -0.0] * 16, np.float32))
    body = "out[l] = float(isnan(x[l])) + 2.0f * float(isinf(x[l])) + 4.0f * float(signbit(x[l])) + 8.0f * float(x[l] >= 0.0f);"
    np.testing.assert_array_equal(run(body, [x])[1:4], [10, 6, 12])
    assert run(body, [x])[0] % 4 == 1


def test_templates_of_every_kind() -> None:
    kernel = Kernel(
        "templates", ("x",), ("out",), (), "out[thread_position_in_grid.x] = FLAG ? T(x[thread_position_in_grid.x]) + T(N) : T(0);", ""
    )
    with using(EmulatedMetal()):
        out = kernel(
            [mx.ones((8,))],
            template=[("T", mx.bfloat16), ("N", 7), ("FLAG", True)],
            grid=(8, 1, 1),
            threadgroup=(8, 1, 1),
            output_shapes=[(8,)],
            output_dtypes=[mx.bfloat16],
        )[0]
    assert out.tolist() == [8.0] * 8


def test_small_inputs_stay_in_device_memory() -> None:
    """MLX passes fewer than 8 elements in the constant address space; Kernel pads them."""
    body = "const device float* p = x;\nout[l] = p[0] + float(y[0]);"
    np.testing.assert_array_equal(run(body, [mx.array([2.0]), mx.array(3, dtype=mx.int32)]), np.full(N, 5))
