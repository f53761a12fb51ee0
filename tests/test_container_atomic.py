"""Writing is atomic: after any failure, kill or race the path shows the old whole file or a new whole file."""

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from formats import atomic
from formats.atomic import atomic_write, is_leftover
from formats.check import check
from formats.container import open_container, write_container
from tests.container_cases import plans, small_arrays, small_manifest, tiny_manifest, tiny_plans

CALLS = ("open", "write", "fsync", "lseek", "ftruncate", "close", "replace", "pread")


class Fault:
    """Makes the n-th of the patched os calls raise, before or after it took effect; counts them all."""

    def __init__(self, monkeypatch, fail_at: int, error: BaseException, after: bool):
        self.count, self.fail_at, self.error, self.after = 0, fail_at, error, after
        self.failed, self.leaked = "", -1
        for name in CALLS:
            monkeypatch.setattr(os, name, self.wrap(name, getattr(os, name)))

    def wrap(self, name, real):
        def call(*args, **kwargs):
            self.count += 1
            now = self.count == self.fail_at
            if now:
                self.failed = name
            if now and not self.after:
                if name == "close":
                    real(*args)  # a failing close still releases the descriptor
                raise self.error
            result = real(*args, **kwargs)
            if now:
                if name == "open":
                    self.leaked = result
                raise self.error
            return result

        return call


def written(path) -> None:
    # No reserve, so that moving the tensors is among the calls that fail.
    write_container(path, small_manifest, plans(small_arrays()))


def number_of_calls(tmp_path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        fault = Fault(patch, 0, OSError(), False)
        written(tmp_path / "counted")
    os.unlink(tmp_path / "counted")
    return fault.count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken"), KeyboardInterrupt()], ids=["full", "io", "ctrl-c"]
)
def test_any_call_failing_leaves_old_or_new(tmp_path, error, after):
    path = tmp_path / "a.kv"
    write_container(path, tiny_manifest(), tiny_plans())
    old = path.read_bytes()
    written(tmp_path / "new.kv")
    new = (tmp_path / "new.kv").read_bytes()
    total = number_of_calls(tmp_path)
    assert total > 30
    failed = set()
    for n in range(1, total + 1):
        path.write_bytes(old)
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, n, error, after)
            with pytest.raises(type(error)) as caught:
                written(path)
        assert caught.value is error
        if fault.leaked >= 0:
            os.close(fault.leaked)
        failed.add(fault.failed)
        now = path.read_bytes()
        # Only once the new file has its name may a failure leave it: in replace itself, or in syncing the folder.
        assert now == old or (now == new and n > total - 4 and (after or n > total - 3)), (n, fault.failed)
        assert sorted(os.listdir(tmp_path)) == ["a.kv", "new.kv"], fault.failed
    assert failed == set(CALLS)


def test_order_of_the_last_calls(tmp_path, monkeypatch):
    calls = []
    for name in CALLS:
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real, **kwargs: calls.append((name, args[0])) or real(*args, **kwargs))
    written(tmp_path / "a.kv")
    monkeypatch.undo()
    names = [name for name, _ in calls]
    assert names[-6:] == ["fsync", "close", "replace", "open", "fsync", "close"] and names[-8:-6] == ["write", "ftruncate"]
    assert names.count("replace") == 1 and calls[-3][1] == str(tmp_path)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_error_of_a_sync_on_the_way_is_not_lost(tmp_path, monkeypatch, at):
    """The system tells it once: the syncs that follow succeed."""
    path = tmp_path / "a.kv"
    write_container(path, tiny_manifest(), tiny_plans())
    old, write, calls = path.read_bytes(), os.write, []

    def fsync(fd):
        calls.append(threading.current_thread().name)
        if len(calls) == at:
            raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(atomic, "SYNC_EACH", 64)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "write", lambda fd, data: time.sleep(0.002) or write(fd, data))
    with pytest.raises(OSError, match="broken"):
        written(path)
    assert all(name.startswith("kvtool-sync") for name in calls[:at])
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["a.kv"]


def test_the_last_sync_comes_when_no_other_is_under_way(tmp_path, monkeypatch):
    write, under_way, seen = os.write, [], []

    def fsync(fd):
        seen.append((threading.current_thread() is threading.main_thread(), len(under_way)))
        under_way.append(fd)
        time.sleep(0.005)
        under_way.remove(fd)

    monkeypatch.setattr(atomic, "SYNC_EACH", 64)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "write", lambda fd, data: time.sleep(0.002) or write(fd, data))
    written(tmp_path / "a.kv")
    # On the way in a thread, then the file and its folder, never two at a time.
    assert len(seen) > 3 and seen[-2:] == [(True, 0)] * 2 and set(seen[:-2]) == {(False, 0)}
    assert check(tmp_path / "a.kv") == []


def test_exception_while_producing(tmp_path):
    path = tmp_path / "a.kv"
    write_container(path, tiny_manifest(), tiny_plans())
    old = path.read_bytes()
    for error in (RuntimeError("model died"), KeyboardInterrupt(), MemoryError()):

        def produce(error=error):
            raise error

        broken = plans(small_arrays())
        object.__setattr__(broken[3], "produce", produce)
        with pytest.raises(type(error)):
            write_container(path, small_manifest(), broken)
        assert path.read_bytes() == old and os.listdir(tmp_path) == ["a.kv"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:7]))
    written(tmp_path / "a.kv")
    monkeypatch.undo()
    assert check(tmp_path / "a.kv") == []


WRITER = """if True:
    import sys
    from tests.container_cases import plans, small_arrays, small_manifest, tiny_manifest, tiny_plans
    from formats.container import write_container
    print("ready", flush=True)
    i = 0
    while i != int(sys.argv[2]):
        if i % 2:
            write_container(sys.argv[1], tiny_manifest(), tiny_plans())
        else:
            write_container(sys.argv[1], small_manifest, plans(small_arrays()))
        i += 1
"""


def start_writer(path, rounds: int) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), *sys.path])}
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(rounds)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout.readline() == b"ready\n"
    return process


def whole(tmp_path) -> set[bytes]:
    folder = tmp_path / "whole"
    folder.mkdir()
    written(folder / "small")
    write_container(folder / "tiny", tiny_manifest(), tiny_plans())
    return {(folder / name).read_bytes() for name in ("small", "tiny")}


KILLED_AT_EVERY_CALL = """if True:
    import os, signal, sys
    from tests.container_cases import plans, small_arrays, small_manifest
    from formats.atomic import is_leftover
    from formats.container import write_container

    path = sys.argv[1]
    folder = os.path.dirname(path)
    old = open(path, "rb").read()
    seen, leftovers, n = [], 0, 0
    while True:
        n += 1
        pid = os.fork()
        if pid == 0:
            count = 0
            def patch(name):
                real = getattr(os, name)
                def call(*args, **kwargs):
                    global count
                    count += 1
                    if count == n:
                        if name == "write":
                            real(args[0], bytes(args[1])[: len(args[1]) // 2])
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **kwargs)
                setattr(os, name, call)
            for name in ("open", "write", "fsync", "lseek", "ftruncate", "close", "replace", "pread"):
                patch(name)
            write_container(path, small_manifest, plans(small_arrays()))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        seen.append(open(path, "rb").read())
        others = [name for name in os.listdir(folder) if name != os.path.basename(path)]
        assert all(map(is_leftover, others)) and len(others) <= 1, others
        leftovers += len(others)
        for name in others:
            os.unlink(os.path.join(folder, name))
        if status == 0:
            break
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        if seen[-1] != old:
            open(path, "wb").write(old)
    new = seen[-1]
    assert n > 30 and leftovers > 30 and set(seen) == {old, new}
    # Old until replace has been called, new from then on: only the three calls that sync the folder come later.
    assert seen.index(new) == len(seen) - 4, (seen.index(new), len(seen))
"""


def test_killed_at_every_call(tmp_path):
    write_container(tmp_path / "a.kv", tiny_manifest(), tiny_plans())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(os.path.dirname(__file__)), *sys.path])}
    subprocess.run([sys.executable, "-c", KILLED_AT_EVERY_CALL, str(tmp_path / "a.kv")], env=environment, check=True)


def test_killed_at_random_points(tmp_path):
    valid = whole(tmp_path)
    folder = tmp_path / "files"
    folder.mkdir()
    path = folder / "a.kv"
    write_container(path, tiny_manifest(), tiny_plans())
    rng = random.Random(1)
    for _ in range(4):
        process = start_writer(path, -1)
        time.sleep(rng.uniform(0.005, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert path.read_bytes() in valid
        assert check(path) == []
        others = [name for name in os.listdir(folder) if name != "a.kv"]
        assert all(is_leftover(name) for name in others), others
    # What a kill leaves does not disturb the next write.
    write_container(path, tiny_manifest(), tiny_plans())
    assert check(path) == []


def test_processes_writing_one_path(tmp_path):
    valid = whole(tmp_path)
    folder = tmp_path / "files"
    folder.mkdir()
    path = folder / "a.kv"
    write_container(path, tiny_manifest(), tiny_plans())
    writers = [start_writer(path, 30) for _ in range(4)]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        with open_container(path) as reader:
            assert reader.verify() == []
        reads += 1
    for writer in writers:
        assert writer.returncode == 0
        writer.stdout.close()
    assert reads > 10
    assert path.read_bytes() in valid and os.listdir(folder) == ["a.kv"]


def test_mode_links_and_odd_targets(tmp_path):
    previous = os.umask(0o027)
    try:
        write_container(tmp_path / "a.kv", tiny_manifest(), tiny_plans())
    finally:
        os.umask(previous)
    assert stat.S_IMODE(os.stat(tmp_path / "a.kv").st_mode) == 0o640
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.kv").symlink_to("folder/target.kv")
    write_container(tmp_path / "link.kv", tiny_manifest(), tiny_plans())
    assert (tmp_path / "link.kv").is_symlink() and check(tmp_path / "folder" / "target.kv") == []
    with pytest.raises(IsADirectoryError):
        write_container(tmp_path / "folder", tiny_manifest(), tiny_plans())
    with pytest.raises(FileNotFoundError):
        write_container(tmp_path / "absent" / "a.kv", tiny_manifest(), tiny_plans())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        write_container(tmp_path / "pipe", tiny_manifest(), tiny_plans())
    assert sorted(os.listdir(tmp_path)) == ["a.kv", "folder", "link.kv", "pipe"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444, 0o666])
def test_mode_of_a_replaced_file_stays(tmp_path, mode):
    """A prompt kept private stays so, whatever the umask; the temporary file is never wider either."""
    target = tmp_path / "a.json"
    target.write_bytes(b"old")
    target.chmod(mode)
    (tmp_path / "link").symlink_to("a.json")
    previous = os.umask(0o022)
    try:
        with atomic_write(tmp_path / "link") as out:
            out.write(b"new")
            (temp,) = (name for name in os.listdir(tmp_path) if is_leftover(name))
            assert stat.S_IMODE(os.stat(tmp_path / temp).st_mode) == mode
    finally:
        os.umask(previous)
    assert target.read_bytes() == b"new" and stat.S_IMODE(os.stat(target).st_mode) == mode


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="/proc takes no file, not even of root")
def test_an_error_names_the_target_and_not_the_temporary_file():
    with pytest.raises(OSError, match=r"'/proc/kvtool\.kv'$"), atomic_write("/proc/kvtool.kv"):
        raise AssertionError("nothing can be written there")


def test_atomic_write_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with atomic_write("a.json") as out:
        out.write(b"one")
        temps = os.listdir(tmp_path)
        assert len(temps) == 1 and is_leftover(temps[0])
    assert (tmp_path / "a.json").read_bytes() == b"one" and os.listdir(tmp_path) == ["a.json"]
    assert not is_leftover("a.json") and not is_leftover(".kvtool-1-abc.tmp") and not is_leftover(".kvtool-1-0123456789abcdef.tmp.kv")


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts descriptors in /proc/self/fd")
def test_descriptor_is_closed_on_failure(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(RuntimeError), atomic_write(tmp_path / "a"):
            raise RuntimeError
        write_container(tmp_path / "b", tiny_manifest(), tiny_plans())
        with open_container(tmp_path / "b"):
            pass
        check(tmp_path / "b")
    assert len(os.listdir("/proc/self/fd")) == before
