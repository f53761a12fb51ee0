"""The native back end's surroundings: its environment variables, the threads it takes, and what ends a process that uses it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from veloxquant_mlx import native

built = pytest.mark.skipif(not native.built(), reason="the native back end was not built")
DOCTOR = [sys.executable, "-m", "kvtool", "doctor"]


def doctor(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DOCTOR, *args], capture_output=True, text=True, env={**os.environ, **variables})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        pytest.param("KVTOOL_SIMD", "sse9", "KVTOOL_SIMD must be one of ", marks=built),
        pytest.param("KVTOOL_THREADS", "0", "KVTOOL_THREADS must be 1 to 1024, but got 0.", marks=built),
        ("KVTOOL_THREADS", "many", "KVTOOL_THREADS must be 1 to 1024, but got many."),
        ("KVTOOL_THREADS", "-2", "KVTOOL_THREADS must be 1 to 1024, but got -2."),
        ("KVTOOL_THREADS", "99999999999", "KVTOOL_THREADS must be 1 to 1024, but got 99999999999."),
    ],
)
def test_wrong_settings_are_usage_errors(variable: str, value: str, message: str) -> None:
    done = doctor(**{variable: value})
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


@built
def test_doctor_says_what_is_in_use() -> None:
    done = doctor("--json", KVTOOL_SIMD="baseline", KVTOOL_THREADS="3")
    found = json.loads(done.stdout)["native"]
    assert found["built"] and found["level"] == "baseline" and found["threads"] == 3 and found["levels"] == native.levels()
    off = json.loads(doctor("--json", KVTOOL_SIMD="none").stdout)
    assert not off["native"]["in_use"] and [text for text in off["advice"] if text.startswith("KVTOOL_SIMD=none switches")]
    assert not [text for text in json.loads(done.stdout)["advice"] if "KVTOOL_SIMD" in text]
    assert "built, switched off by KVTOOL_SIMD=none (" in doctor(KVTOOL_SIMD="none").stdout


@pytest.mark.parametrize(
    ("files", "groups", "wanted"),
    [
        ({"cpu.max": "100000 100000"}, "0::/", 1.0),
        ({"cpu.max": "250000 100000"}, "0::/", 2.5),
        ({"cpu.max": "20000 100000"}, "0::/", 1.0),
        ({"cpu.max": "max 100000"}, "0::/", float("inf")),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 3.0),
        ({"cpu.max": "200000 100000"}, "0::/../host/name", 2.0),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu,cpuacct:/\n0::/", 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/", float("inf")),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, "4:memory:/", float("inf")),
        ({}, "0::/", float("inf")),
    ],
)
def test_quota_of_control_groups(files: dict[str, str], groups: str, wanted: float, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text + "\n")
    (tmp_path / "groups").write_text(groups + "\n")
    assert native.quota(tmp_path / "root", tmp_path / "groups") == wanted


USES = """
import atexit, sys, threading
atexit.register(lambda: use())  # comes after the extension's own
import numpy as np
from veloxquant_mlx import native
rows = native.stored((4, 2048, 64))
rows.floats(np.ones((4, 2048, 64), np.float32), False)
def use(): native._native.decode(rows, 0, 2048)
use()
"""


@built
@pytest.mark.parametrize("threads", ["1", "2", "16"])
def test_exit_while_threads_spin(threads: str) -> None:
    """Right after a job its threads still spin; daemons that call it are cut off."""
    script = USES + "threading.Thread(target=lambda: [use() for _ in range(100000)], daemon=True).start(); use()"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "KVTOOL_THREADS": threads}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


@built
def test_interrupt_between_calls() -> None:
    # Where the tests run in the background, a child would inherit that the signal is ignored.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script = f"{heard}{USES}print('ready', flush=True)\nwhile True: use()"
    environment = {**os.environ, "KVTOOL_THREADS": "3"}
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    try:
        _, said = child.communicate(timeout=30)
    finally:
        child.kill()
    assert b"KeyboardInterrupt" in said and child.returncode in (-signal.SIGINT, 130, 1)
