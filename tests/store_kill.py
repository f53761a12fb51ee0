"""Kill writers of a store with SIGKILL at random points, under writers and readers, and look at what is left.

    python -m tests.store_kill                  200 kills; prints the figures
    python -m tests.store_kill --out FILE.md     writes the page of results as well
    python -m tests.store_kill --kills 8 --json prints the figures as JSON

Writers put prompts that share beginnings, pin some, and (under a quota) evict, remove and collect. Half of the writers kill themselves at a
random call of the operating system inside put, gc or remove, half are killed at a random time from outside. Readers look up and load all
the while and compare each row that they get with a store that nobody disturbs. What a put returned is committed; without a quota
all of it must be found afterwards, with one what was pinned.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import kvtool
from formats.errors import IncompatibleError
from kvtool.store.store import Store
from tests.library import f64, ids, tiny

CHUNK = 16
CODEC = "rvq-4,sink=2,recent=3"
FAMILIES, MEMBERS = 6, 4
WRITERS, READERS = 4, 4
CALLS = ("open", "write", "fsync", "link", "mkdir", "unlink", "close", "utime", "replace", "scandir", "ftruncate", "stat", "lstat", "rmdir")
QUOTA = 400_000
WRONG = 1e-3  # squared error over energy beyond which rows are others: of other rows it is about 1, of another order of sums 1e-5 at most


def prompts() -> list[list[int]]:
    """Families of prompts that share a beginning each."""
    common = [ids(3 * CHUNK, seed=family) for family in range(FAMILIES)]
    return [[*common[i % FAMILIES], *ids(5 + 7 * (i // FAMILIES), seed=100 + i)] for i in range(FAMILIES * MEMBERS)]


def pinned(index: int) -> bool:
    return index % 7 == 0


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it lives on")


def die_at(step: int) -> None:
    """Let this process kill itself right before or after its n-th call of the operating system from now on."""
    left = step

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                die()
            result = call(*arguments, **options)
            if left == 1 and step % 2:
                die()
            return result

        return wrapper

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def writer(root: Path, log: Path, seed: int, quota: int | None) -> NoReturn:
    """Put, pin, collect and remove until killed; each put that returned is a line of the log."""
    rng = random.Random(seed)
    model, all_prompts = tiny("qwen3"), prompts()
    snapshots: dict[int, Any] = {}
    store = Store(root, quota=quota, chunk=CHUNK)
    (log.parent / f"ready-{os.getpid()}").touch()
    if seed % 2:
        die_at(int(10 ** rng.uniform(0.5, 3.2)))
    while True:
        index = rng.randrange(len(all_prompts))
        if index not in snapshots:
            snapshots[index] = kvtool.capture(model, all_prompts[index])
        report = store.put(snapshots[index], codec=CODEC, model=model)
        if pinned(index):
            store.pin(report.id)
        with open(log, "a") as file:
            file.write(f"{index}\n")
        if quota is not None and rng.random() < 0.3:
            store.gc()
        if quota is not None and rng.random() < 0.1:
            free = [entry for entry in store.entries() if entry.kind == "tail" and not entry.pinned]
            if free:
                # Another writer may be faster, or pin it.
                with contextlib.suppress(IncompatibleError):
                    store.remove(rng.choice(free).id)


def reference(root: Path) -> list[list[np.ndarray]]:
    """Keys and values of the first layer of each prompt, as a store that nobody disturbs gives them."""
    model, rows = tiny("qwen3"), []
    for i, prompt in enumerate(prompts()):
        with Store(root / str(i), chunk=CHUNK) as store:
            store.put(kvtool.capture(model, prompt), codec=CODEC)
            restored = store.load([*prompt, 1], model)
        assert restored is not None and restored.usable == len(prompt)
        rows.append([f64(x)[0] for x in restored.cache[0].keys_and_values()])
    return rows


def reader(root: Path, log: Path, seed: int, want: Path) -> NoReturn:
    """Load and compare until told to stop; the counts, or what went wrong, go to the log."""
    rng = random.Random(seed)
    stop = [False]
    signal.signal(signal.SIGTERM, lambda *_: stop.__setitem__(0, True))
    model, all_prompts, counts = tiny("qwen3"), prompts(), {"loads": 0, "hits": 0, "tokens": 0, "wrong": 0}
    held = np.load(want)
    store = Store(root, chunk=CHUNK)
    while not stop[0]:
        index = rng.randrange(len(all_prompts))
        time.sleep(0.02)
        counts["loads"] += 1
        restored = store.load([*all_prompts[index], 1], model)
        if restored is None:
            continue
        counts["hits"], counts["tokens"] = counts["hits"] + 1, counts["tokens"] + restored.usable
        for role, got in zip("kv", restored.cache[0].keys_and_values(), strict=True):
            # The newest rows of a whole prompt are exact, the same rows inside a chunk of another are not.
            usable = restored.usable if restored.usable == len(all_prompts[index]) else max(restored.usable - 4, 2)
            exact = held[f"{index}{role}"][:, :usable]
            error = np.square(f64(got)[0][:, :usable] - exact).sum() / np.square(exact).sum()
            counts["wrong"] += bool(error > (WRONG if usable == restored.usable else 0.02))
    counts["broken"] = store.counts["broken"]
    log.write_text(json.dumps(counts))
    os._exit(0)


def spawn(task: Callable[..., NoReturn], *arguments: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        task(*arguments)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(1)


def phase(folder: Path, kills: int, quota: int | None, seed: int) -> dict[str, Any]:
    """One store under fire, then looked at."""
    folder.mkdir()
    root, rng = folder / "store", random.Random(seed)
    want = folder.parent / "want.npz"
    readers = {spawn(reader, root, folder / f"reader-{i}", seed + i, want): folder / f"reader-{i}" for i in range(READERS)}
    writers: dict[int, float] = {}
    done = by_step = by_time = started = 0
    begun = time.monotonic()
    while done < kills:
        while len(writers) < WRITERS:
            # Odd seeds kill themselves; these get some time for it.
            number = seed * 1000 + started
            pid = spawn(writer, root, folder / f"writer-{started}", number, quota)
            writers[pid] = 10.0 if number % 2 else 10 ** rng.uniform(-1.0, 0.8)
            started += 1
        time.sleep(0.01)
        for pid, life in list(writers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"a writer ended by itself: {status}"
                del writers[pid]
                done, by_step = done + 1, by_step + 1
                break
            ready = folder / f"ready-{pid}"
            if ready.exists() and time.time() - ready.stat().st_mtime > life:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del writers[pid]
                done, by_time = done + 1, by_time + 1
                break
    for pid in writers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for pid in readers:
        os.kill(pid, signal.SIGTERM)
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in readers)
    reads = [json.loads(path.read_text()) for path in readers.values() if path.exists()]
    result = spawn_inspect(folder, root, quota)
    counts = {name: sum(read.get(name, 0) for read in reads) for name in ("loads", "hits", "tokens", "wrong", "broken")}
    seconds = round(time.monotonic() - begun, 1)
    return {
        "quota": quota,
        "kills": {"inside a call": by_step, "at a time": by_time},
        **counts,
        "readers that failed": failed,
        **result,
        "seconds": seconds,
    }


def spawn_inspect(folder: Path, root: Path, quota: int | None) -> dict[str, Any]:
    """`inspect` in a process of its own, for this one must be able to fork."""
    pid = spawn(inspect, folder, root, quota)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
    found: dict[str, Any] = json.loads((folder / "found").read_text())
    return found


def inspect(folder: Path, root: Path, quota: int | None) -> NoReturn:
    """What is left: check, what was committed, and what gc leaves."""
    committed = {int(line) for log in folder.glob("writer-*") for line in log.read_text().splitlines()}
    model, all_prompts = tiny("qwen3"), prompts()
    store = Store(root, quota=quota, chunk=CHUNK)
    before = store.check()
    left = store.objects.unfinished()
    store.gc()
    after = store.check()
    must = committed if quota is None else {index for index in committed if pinned(index)}
    lost = []
    for index in sorted(must):
        restored = store.load([*all_prompts[index], 1], model)
        if restored is None or restored.usable != len(all_prompts[index]):
            lost.append(index)
    found = {
        "committed": len(committed),
        "must be found": len(must),
        "lost": len(lost),
        "objects": after.objects,
        "problems": len(before.problems) + len(after.problems),
        "left by killed writers, bytes": left,
        "left after gc, bytes": store.objects.unfinished(),
        "bytes after gc": store.stats()["bytes"],
    }
    (folder / "found").write_text(json.dumps(found))
    os._exit(0)


def save_reference(folder: Path, want: Path) -> NoReturn:
    rows = reference(folder)
    np.savez(want, **{f"{i}{role}": x for i, pair in enumerate(rows) for role, x in zip("kv", pair, strict=True)})
    os._exit(0)


def sound(found: dict[str, Any]) -> bool:
    """Whether a phase ended as it must."""
    clean = not (
        found["wrong"]
        or found["broken"]
        or found["lost"]
        or found["problems"]
        or found["readers that failed"]
        or found["left after gc, bytes"]
    )
    return (
        clean and found["hits"] > 0 and found["must be found"] > 0 and (found["quota"] is None or found["bytes after gc"] <= found["quota"])
    )


def run(kills: int, seed: int) -> list[dict[str, Any]]:
    """Half of the kills without a quota, half with one."""
    folder = Path(tempfile.mkdtemp(prefix="kvtool-kill-"))
    try:
        pid = spawn(save_reference, folder / "reference", folder / "want.npz")
        assert os.waitpid(pid, 0)[1] == 0
        return [phase(folder / str(quota), kills // 2, quota, seed + i) for i, quota in enumerate((None, QUOTA))]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def table(found: list[dict[str, Any]]) -> str:
    names = [name for name in found[0] if name not in ("quota", "kills")]
    lines = [
        "| | " + " | ".join("no quota" if one["quota"] is None else f"quota of {one['quota']:,} bytes" for one in found) + " |",
        "|---|---|---|",
    ]
    lines += [f"| kills {kind} | " + " | ".join(str(one["kills"][kind]) for one in found) + " |" for kind in found[0]["kills"]]
    lines += [f"| {name} | " + " | ".join(f"{one[name]:,}" for one in found) + " |" for name in names]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the page of results there")
    given = parser.parse_args()
    found = run(given.kills, given.seed)
    if given.json:
        print(json.dumps(found))
    else:
        print(table(found))
    if given.out is not None:
        command = f"python -m tests.store_kill --kills {given.kills} --seed {given.seed} --out {given.out.name}"
        head = f"Measured {datetime.now(UTC):%Y-%m-%d} by `{command}`"
        explanation = " ".join((__doc__ or "").split("\n\n")[-1].split())
        given.out.write_text(
            f"# Stores under kill -9\n\n{head}: {WRITERS} writers, {READERS} readers.\n\n{table(found)}\n\n{explanation}\n"
        )
    sys.exit(0 if all(map(sound, found)) else 1)


if __name__ == "__main__":
    main()
