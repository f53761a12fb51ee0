"""Many processes on one store, some of them killed: a short run of `tests.store_kill`, and writers of one prompt at once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.store.store import Store
from tests.library import ids, tiny
from tests.store_kill import sound
from tests.test_memory import ROOT

PUT = """
import sys, kvtool
from kvtool.store.store import Store
from tests.library import ids, tiny
model, store = tiny("qwen3"), Store(sys.argv[1], chunk=8)
snapshot = kvtool.capture(model, ids(40))
print("ready", flush=True)
sys.stdin.readline()
print(store.put(snapshot, codec="rvq-4,sink=2,recent=3").new)
"""


def test_cases_3_and_7_writers_killed_under_readers(tmp_path: Path) -> None:
    """Cases 3 and 7, and kill -9: readers see the whole or nothing, and what was committed is found."""
    page = ROOT / "tests" / "results" / "store.md"
    before, out = page.read_bytes(), tmp_path / "store.md"
    command = [sys.executable, "-m", "tests.store_kill", "--kills", "8", "--json", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    found = json.loads(done.stdout)
    for one in found:
        # So few kills may come before the first put has returned; all else must hold.
        assert sound({**one, "hits": 1, "must be found": 1}), one
        assert sum(one["kills"].values()) == 4
    assert page.read_bytes() == before and "--kills 8 --seed 1 --out store.md" in out.read_text()


def test_case_2_writers_of_one_prompt(tmp_path: Path) -> None:
    """Two writers shared one staging name, and one truncated what the other published as success."""
    command = [sys.executable, "-c", PUT, str(tmp_path / "s")]
    writers = [subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    new = [int(writer.communicate("\n")[0]) for writer in writers]
    store = Store(tmp_path / "s", chunk=8)
    rows = [entry for entry in store.objects.names() if entry.name.startswith(("chunks/", "tails/"))]
    # Each object was written by exactly one of them.
    assert sum(new) == len(rows) == 6 and store.check().problems == () and store.objects.unfinished() == 0
    match = store.lookup([*ids(40), 1], tiny("qwen3"))
    assert match is not None and match.usable == 40


@pytest.mark.parametrize(
    "change",
    [
        {"wrong": 1},
        {"broken": 1},
        {"lost": 1},
        {"problems": 1},
        {"readers that failed": 1},
        {"left after gc, bytes": 1},
        {"bytes after gc": 11},
    ],
)
def test_a_run_that_found_something_is_not_sound(change: dict[str, int]) -> None:
    good = {"wrong": 0, "broken": 0, "lost": 0, "problems": 0, "readers that failed": 0, "left after gc, bytes": 0}
    good |= {"hits": 1, "must be found": 1, "quota": 10, "bytes after gc": 10}
    assert sound(good) and not sound(good | change)
