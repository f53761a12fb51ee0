"""The C++ of the native back end without Python: NEON under an emulator, and the levels of x86 under the sanitizers."""

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests import native_coders, native_functions, native_rows
from tests.native_functions import Call
from tests.native_problems import Case, build, run, run_alone
from tests.test_native import SPECS, made, takes

X86 = platform.machine() in ("x86_64", "AMD64")
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
NATIVE_ARM = platform.machine() in ("aarch64", "arm64")
STRICT = "-fno-sanitize-recover=all"
# What is read before it is written is a pattern here and anything elsewhere: results that depend on it differ.
ADDRESSES = "-fsanitize=address,undefined", "-ftrivial-auto-var-init=pattern", STRICT
UNWRITTEN = "-fsanitize=memory,undefined", STRICT  # Clang alone has it

needs_arm = pytest.mark.skipif(
    not NATIVE_ARM and not (shutil.which(CROSS) and shutil.which(EMULATOR)),
    reason=f"no {CROSS} and {EMULATOR} (Debian: g++-aarch64-linux-gnu, qemu-user)",
)
needs_x86 = pytest.mark.skipif(not X86, reason="the levels of x86")


def compiler_of_this_machine() -> str | None:
    return next((name for name in ("g++", "clang++-19", "clang++", "c++") if shutil.which(name)), None)


def levels_of_x86() -> list[str]:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return ["baseline", *(["avx2"] if "avx2" in flags else []), *(["avx512"] if "avx512dq" in flags and "avx512vl" in flags else [])]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each compiler's objects: one compilation of a source serves every program."""
    return tmp_path_factory.mktemp("programs")


def for_arm(root: Path, name: str) -> list[str]:
    """A program for aarch64, as a command here."""
    compiler = (compiler_of_this_machine() or "c++") if NATIVE_ARM else CROSS
    program = build(root / "arm", compiler, "ARM64", ["neon", "baseline"], *([] if NATIVE_ARM else ["-static"]), name=name)
    return [str(program)] if NATIVE_ARM else [EMULATOR, str(program)]


def has_sanitizers(compiler: str) -> bool:
    resources = subprocess.run([compiler, "-print-resource-dir"], check=True, capture_output=True, text=True).stdout.strip()
    return any(Path(resources).glob("lib/*/libclang_rt.msan*"))


def sanitized(root: Path, name: str, compiler: str, options: tuple[str, ...] = ADDRESSES) -> list[str]:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    if compiler.startswith("clang") and not has_sanitizers(compiler):
        pytest.skip(f"no sanitizers of {compiler} (Debian: libclang-rt-19-dev)")
    folder = root / f"{compiler}{'' if options == ADDRESSES else '-unwritten'}"
    levels = levels_of_x86()
    others = [level for level in ("baseline", "avx2", "avx512") if level not in levels]
    return [str(build(folder, compiler, "X86", levels, *options, others=others, name=name))]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Every codec, head sizes with and without an odd factor, each kind of rotation and mask, blocks of 1, 2 and 4 queries."""
    dims, ropes = (64, 80, 96, 128), ("none", "half", "partial")
    sizes = [dims[i % 4] if takes(spec, dims[i % 4]) else 128 for i, spec in enumerate(SPECS)]
    plain = [Case(made(spec, sizes[i], ropes[i % 3], 90), (1, 3)[i % 2]) for i, spec in enumerate(SPECS)]
    masked = [Case(made(spec, 80, "half", 90), 3, seen) for seen in range(4) for spec in ("rvq-4", "tc-2")]
    return plain + masked + [Case(made("tc-3", 72, "partial", 1090), 1)]  # enough tokens for tables of components


@needs_arm
def test_neon(cases: list[Case], root: Path, tmp_path: Path) -> None:
    """NEON is right, and what its baseline gives but for rounding."""
    command = for_arm(root, "run_problems")
    neon, baseline = (run(tmp_path, cases, level, command) for level in ("neon", "baseline"))
    np.testing.assert_allclose(neon, baseline, rtol=0, atol=1e-5 * np.abs(baseline[np.isfinite(baseline)]).max())


@needs_x86
@pytest.mark.parametrize("compiler", ["g++", "clang++-19"])
def test_sanitizers(cases: list[Case], compiler: str, root: Path, tmp_path: Path) -> None:
    """No read beyond an array, no undefined behaviour, no warning."""
    command = sanitized(root, "run_problems", compiler)
    for level in levels_of_x86():
        run(tmp_path, cases, level, command)


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    """Of every function that does not attend."""
    return [call for module in (native_functions, native_coders, native_rows) for call in module.calls()]


@pytest.fixture(scope="module")
def bytes_of() -> dict[str, bytes]:
    """What the calls wrote, by where they ran."""
    return {}


def assert_calls(folder: Path, calls: list[Call], levels: list[str], command: list[str], where: str, bytes_of: dict[str, bytes]) -> None:
    """Right by NumPy, and the same bytes at every level, on every machine."""
    (folder / "calls").write_bytes(b"".join(call.written() for call in calls))
    for level in levels:
        run_alone([*command, level, str(folder / "calls"), str(folder / level)])
        written, at = (folder / level).read_bytes(), 0
        for i, call in enumerate(calls):
            found = []
            for result in call.results():
                count = int(np.prod(result.shape, dtype=np.int64))
                found.append(np.frombuffer(written, result.dtype, count, at).reshape(result.shape))
                at += found[-1].nbytes
            try:
                call.compare(found)
            except AssertionError as error:
                raise AssertionError(f"{call.name}, call {i} at {level} of {where}: {error}") from error
        assert at == len(written)
        bytes_of[f"{level} of {where}"] = written
    first = next(iter(bytes_of.values()))
    assert not [name for name, written in bytes_of.items() if written != first]


@needs_arm
def test_calls_on_neon(calls: list[Call], root: Path, bytes_of: dict[str, bytes], tmp_path: Path) -> None:
    assert_calls(tmp_path, calls, ["neon", "baseline"], for_arm(root, "run_calls"), "arm", bytes_of)


@needs_x86
@pytest.mark.parametrize(("compiler", "options"), [("g++", ADDRESSES), ("clang++-19", UNWRITTEN)], ids=["addresses", "unwritten"])
def test_calls_under_the_sanitizers(
    calls: list[Call], compiler: str, options: tuple[str, ...], root: Path, bytes_of: dict[str, bytes], tmp_path: Path
) -> None:
    assert_calls(tmp_path, calls, levels_of_x86(), sanitized(root, "run_calls", compiler, options), compiler, bytes_of)
