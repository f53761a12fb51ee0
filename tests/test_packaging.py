"""What `pip` makes of the source tree: with a compiler, without one, and from an sdist. Slow: each build is isolated and compiles."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
BROKEN = {"CC": "/bin/false", "CXX": "/bin/false"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files alone: no build folder of this checkout, no extension beside its package."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, listed)):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def wheel(source: Path, folder: Path, **environment: str) -> tuple[list[str], str]:
    """Names in the wheel, and what pip said."""
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-cache-dir", "-w", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        return archive.namelist(), done.stdout + done.stderr


def native(names: list[str]) -> set[str]:
    return {Path(name).name.partition(".")[0] for name in names if name.startswith("veloxquant_mlx/native/")}


def test_wheel_has_the_extension_and_no_source_of_it(source: Path, tmp_path: Path) -> None:
    names, _ = wheel(source, tmp_path)
    assert {"__init__", "_native"} <= native(names)
    assert not [name for name in names if name.endswith((".cpp", ".hpp")) and "/native/" in name]
    assert {"kvtool/cli/doctor.py", "formats/check.py"} <= set(names)


def test_without_a_compiler_it_installs_all_the_same_and_says_so(source: Path, tmp_path: Path) -> None:
    """A compiler that fails is one that is not there; the wheel is the pure one, and the reason is in pip's -v output."""
    names, said = wheel(source, tmp_path, **BROKEN)
    assert "_native" not in native(names) and "__init__" in native(names)
    assert "retrying due to override" in said and "/bin/false" in said
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(next(tmp_path.glob("*.whl"))), str(tmp_path / "site")], check=True)
    # An editable install of this checkout would be found before any path.
    alone = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]"
    script = f"{alone}; import kvtool.cli as c; c.main()"
    command = [sys.executable, "-c", script, "doctor"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "not built" in done.stdout and "C++17 compiler" in done.stdout


def test_an_error_in_the_source_is_no_reason_to_fail_either(source: Path, tmp_path: Path) -> None:
    """Where the compiler runs and the build breaks half-way."""
    broken = tmp_path / "broken"
    subprocess.run(["cp", "-r", str(source), str(broken)], check=True)
    (broken / "veloxquant_mlx" / "native" / "src" / "pool.cpp").write_text("#error not for this compiler\n")
    names, said = wheel(broken, tmp_path)
    assert "_native" not in native(names) and "not for this compiler" in said


def test_sdist_has_what_a_build_needs(source: Path, tmp_path: Path) -> None:
    script = "import scikit_build_core.build as b, sys; print(b.build_sdist(sys.argv[1]))"
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "scikit-build-core>=0.11"], check=True)
    subprocess.run([python, "-c", script, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (made,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (inside,) = (tmp_path / "sdist").iterdir()
    wanted = {path.name for path in (source / "veloxquant_mlx" / "native" / "src").iterdir()}
    assert {path.name for path in (inside / "veloxquant_mlx" / "native" / "src").iterdir()} == wanted
    names, _ = wheel(inside, tmp_path)
    assert "_native" in native(names)
