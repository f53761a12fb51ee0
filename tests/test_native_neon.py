"""The C++ of the native back end without Python: NEON under an emulator, and the levels of x86 under the sanitizers."""

import itertools
import platform
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.native_problems import Case, build, numbers, run, run_alone
from tests.test_native import SPECS, made, takes

X86 = platform.machine() in ("x86_64", "AMD64")
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
NATIVE_ARM = platform.machine() in ("aarch64", "arm64")

needs_arm = pytest.mark.skipif(
    not NATIVE_ARM and not (shutil.which(CROSS) and shutil.which(EMULATOR)),
    reason=f"no {CROSS} and {EMULATOR} (Debian: g++-aarch64-linux-gnu, qemu-user)",
)


def compiler_of_this_machine() -> str | None:
    return next((name for name in ("g++", "clang++-19", "clang++", "c++") if shutil.which(name)), None)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Every codec, head sizes with and without an odd factor, each kind of rotation and mask, blocks of 1, 2 and 4 queries."""
    dims, ropes = (64, 80, 96, 128), ("none", "half", "partial")
    sizes = [dims[i % 4] if takes(spec, dims[i % 4]) else 128 for i, spec in enumerate(SPECS)]
    plain = [Case(made(spec, sizes[i], ropes[i % 3], 90), (1, 3)[i % 2]) for i, spec in enumerate(SPECS)]
    masked = [Case(made(spec, 80, "half", 90), 3, seen) for seen in range(4) for spec in ("rvq-4", "tc-2")]
    return plain + masked + [Case(made("tc-3", 72, "partial", 1090), 1)]  # enough tokens for tables of components


def for_arm(folder: Path, *options: str, **what: str) -> list[str]:
    """A program for aarch64, as a command here."""
    compiler = (compiler_of_this_machine() or "c++") if NATIVE_ARM else CROSS
    program = str(build(folder, compiler, "ARM64", ["neon", "baseline"], *options, *([] if NATIVE_ARM else ["-static"]), **what))
    return [program] if NATIVE_ARM else [EMULATOR, program]


def levels_of_x86() -> list[str]:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return ["baseline", *(["avx2"] if "avx2" in flags else []), *(["avx512"] if "avx512dq" in flags and "avx512vl" in flags else [])]


@needs_arm
def test_neon(cases: list[Case], tmp_path: Path) -> None:
    """NEON is right, and what its baseline gives but for rounding."""
    command = for_arm(tmp_path)
    neon, baseline = (run(tmp_path, cases, level, command) for level in ("neon", "baseline"))
    np.testing.assert_allclose(neon, baseline, rtol=0, atol=1e-5 * np.abs(baseline[np.isfinite(baseline)]).max())


@pytest.mark.skipif(not X86, reason="the levels of x86")
@pytest.mark.parametrize("compiler", ["g++", "clang++-19"])
def test_sanitizers(cases: list[Case], compiler: str, tmp_path: Path) -> None:
    """No read beyond an array, no undefined behaviour, no warning."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    program = build(tmp_path, compiler, "X86", ["baseline", "avx2", "avx512"], "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    for level in levels_of_x86():
        run(tmp_path, cases, level, [str(program)])


def assert_streams(folder: Path, level: str, command: list[str]) -> None:
    """Every number of bits, as one stream and in words, of counts around whole groups and more codes than are taken at once."""
    rng, given, wanted = np.random.default_rng(0), [], []
    for bits, words, count in itertools.product(range(1, 9), (False, True), (1, 7, 8, 31, 64, 2048, 4101)):
        codes, per = rng.integers(0, 256, count).astype(np.uint8), 32 // bits
        low = codes & (1 << bits) - 1
        planes = (low[:, None] >> np.arange(bits) & 1).astype(np.uint8)
        if words:
            filled = np.zeros((-(-count // per) * per, bits), np.uint8)
            filled[:count] = planes
            planes = np.pad(filled.reshape(-1, per * bits), [(0, 0), (0, 32 - per * bits)])
        packed = np.packbits(planes.reshape(-1), bitorder="little")
        given.append(numbers(bits, words, count, len(packed)) + codes.tobytes())
        wanted.append(packed.tobytes() + low.tobytes())
    (folder / "codes").write_bytes(b"".join(given))
    run_alone([*command, level, str(folder / "codes"), str(folder / f"streams-{level}")])
    assert (folder / f"streams-{level}").read_bytes() == b"".join(wanted)


@needs_arm
def test_streams_on_neon(tmp_path: Path) -> None:
    command = for_arm(tmp_path, name="run_streams", sources="streams")
    for level in ("neon", "baseline"):
        assert_streams(tmp_path, level, command)


@pytest.mark.skipif(not X86 or shutil.which("g++") is None, reason="the levels of x86, and no g++")
def test_streams_under_the_sanitizers(tmp_path: Path) -> None:
    sanitizers = "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    program = build(tmp_path, "g++", "X86", ["baseline", "avx2", "avx512"], *sanitizers, name="run_streams", sources="streams")
    for level in levels_of_x86():
        assert_streams(tmp_path, level, [str(program)])


TURNS = {"name": "run_turns", "sources": "convert"}
EXACT = "-ffp-contract=off"  # as CMakeLists.txt has it for this source
TYPES = ("float32", "float16", "bfloat16")


def narrowed(x: np.ndarray, kind: str) -> np.ndarray:
    """float32 in the memory of a type, rounded to nearest even."""
    if kind != "bfloat16":
        return x.astype(kind)
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(x: np.ndarray, kind: str) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if kind == "bfloat16" else x.astype(np.float32)


def assert_turns(folder: Path, level: str, command: list[str]) -> None:
    """Every type, rows that fill vectors and tiles and that do not, pairs of both kinds, one rotation and two: the bits of NumPy."""
    rng, given, wanted = np.random.default_rng(0), [], []
    shapes = ((2, 33, 128, 0, 64), (3, 5, 80, 8, 35), (1, 64, 24, 0, 12), (2, 7, 6, 2, 1))
    for kind, shape, paired, both in itertools.product(TYPES, shapes, itertools.product((False, True), repeat=2), (False, True)):
        heads, count, dim, first, half = shape
        x = narrowed(rng.standard_normal((heads, count, dim)).astype(np.float32) * np.float32(3), kind)
        angles = rng.standard_normal((1 + both, count, half))
        tables = np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
        given.append(numbers(TYPES.index(kind), *shape, *paired, both) + tables.tobytes() + x.tobytes())
        cos, sin = tables[0, :, :half], -tables[0, :, half:]
        if both:
            c, s, back = tables[1, :, :half], tables[1, :, half:], -sin
            cos, sin = c * cos + s * back, s * cos - c * back
        index = [[first + np.arange(half) * (2 if pairs else 1) + i * (1 if pairs else half) for i in (0, 1)] for pairs in paired]
        u, v = (widened(x[..., at], kind) for at in index[0])
        out = x.copy()
        out[..., index[1][0]], out[..., index[1][1]] = narrowed(u * cos - v * sin, kind), narrowed(u * sin + v * cos, kind)
        wanted.append(out.tobytes())
    (folder / "rows").write_bytes(b"".join(given))
    run_alone([*command, level, str(folder / "rows"), str(folder / f"turns-{level}")])
    assert (folder / f"turns-{level}").read_bytes() == b"".join(wanted)


@needs_arm
def test_turns_on_neon(tmp_path: Path) -> None:
    command = for_arm(tmp_path, EXACT, **TURNS)
    for level in ("neon", "baseline"):
        assert_turns(tmp_path, level, command)


@pytest.mark.skipif(not X86 or shutil.which("g++") is None, reason="the levels of x86, and no g++")
def test_turns_under_the_sanitizers(tmp_path: Path) -> None:
    sanitizers = "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    program = build(tmp_path, "g++", "X86", ["baseline", "avx2", "avx512"], EXACT, *sanitizers, **TURNS)
    for level in levels_of_x86():
        assert_turns(tmp_path, level, [str(program)])
