"""A folder of objects: whole or absent, never overwritten, whatever ends its writer."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtool.store.folder import Folder
from kvtool.store.objects import Entry, Missing, Objects, check_name

NAMES = ("a", "chunks/ab/abcd", "prompts/0.kv", "_x-1")
ODD_NAMES = (
    "",
    "/a",
    "a/",
    "a//b",
    "..",
    "../a",
    "a/../b",
    "./a",
    ".hidden",
    "a/.b",
    "A",
    "a b",
    "a\\b",
    "a\0b",
    "a\n",
    "é",
    "a" * 241,
    None,
    3,
)


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    objects: Objects = Folder(tmp_path / "s")
    assert objects.size(name) is None and objects.path(name) is None and list(objects.names()) == [] and not objects.remove(name)
    data = os.urandom(3000)
    assert objects.write(name, data)
    assert objects.read(name) == data
    assert objects.read(name, 100, 7) == data[100:107] and objects.read(name, 2990, 100) == data[2990:] and objects.read(name, 5000) == b""
    path = objects.path(name)
    assert path is not None and path.read_bytes() == data and objects.size(name) == 3000
    assert [(entry.name, entry.size) for entry in objects.names()] == [(name, 3000)]
    assert objects.remove(name) and not objects.remove(name)
    with pytest.raises(Missing, match="no object"):
        objects.read(name)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_refused(tmp_path: Path, name: str) -> None:
    objects = Folder(tmp_path)
    for call in (objects.read, objects.path, objects.size, objects.remove, objects.touch, lambda n: objects.write(n, b"x")):
        with pytest.raises(ValueError, match=r"\[store\] an object's name must be"):
            call(name)
    assert everything(tmp_path) == []


def test_a_pipe_where_an_object_should_be_is_an_error(tmp_path: Path) -> None:
    """It is not read as one, so that a write must not pass for done."""
    objects = Folder(tmp_path)
    (tmp_path / "objects").mkdir()
    os.mkfifo(tmp_path / "objects" / "a")
    with pytest.raises(OSError, match="a pipe or device, which no object is"):
        objects.write("a", b"1")
    assert objects.size("a") is None and objects.unfinished() == 0


def test_a_folder_of_objects_is_none_itself(tmp_path: Path) -> None:
    objects = Folder(tmp_path / "s")
    assert objects.write("a/b", b"1")
    assert objects.size("a") is None and objects.path("a") is None and not objects.remove("a")
    with pytest.raises(Missing):
        objects.read("a")
    for name in ("a", "a/b/c"):
        with pytest.raises((IsADirectoryError, NotADirectoryError)):
            objects.write(name, b"2")
    assert objects.read("a/b") == b"1" and objects.unfinished() == 0


def test_names_below_a_prefix(tmp_path: Path) -> None:
    objects = Folder(tmp_path)
    for name in ("a/b/1", "a/b/2", "a/c/1", "ab/1", "b"):
        objects.write(name, name.encode())

    def names(prefix: str) -> list[str]:
        return sorted(entry.name for entry in objects.names(prefix))

    assert names("") == ["a/b/1", "a/b/2", "a/c/1", "ab/1", "b"]
    assert names("a/") == ["a/b/1", "a/b/2", "a/c/1"] and names("a") == ["a/b/1", "a/b/2", "a/c/1", "ab/1"]
    assert names("a/b/1") == ["a/b/1"] and names("z/") == []


def test_the_first_writer_wins(tmp_path: Path) -> None:
    objects = Folder(tmp_path)
    assert objects.write("a", b"first") and not objects.write("a", b"second") and objects.read("a") == b"first"
    other = objects.scratch / "x"
    other.write_bytes(b"third")
    assert not objects.write("a", other) and not other.exists() and objects.read("a") == b"first"


def test_a_file_in_scratch_is_taken_over_and_another_is_copied(tmp_path: Path) -> None:
    objects = Folder(tmp_path / "s")
    own, other = objects.scratch / "own", tmp_path / "other"
    own.write_bytes(b"own")
    other.write_bytes(b"other")
    inode = own.stat().st_ino
    assert objects.unfinished() == 3
    assert objects.write("own", own) and objects.write("other", other)
    path = objects.path("own")
    assert path is not None and path.stat().st_ino == inode and path.stat().st_nlink == 1 and not own.exists()
    other.write_bytes(b"OTHER")
    assert objects.read("other") == b"other" and objects.unfinished() == 0


def test_use_is_recorded(tmp_path: Path) -> None:
    objects = Folder(tmp_path)
    objects.write("a", b"x")
    path = objects.path("a")
    assert path is not None
    os.utime(path, (1000, 1000))
    assert list(objects.names()) == [Entry("a", 1, 1000.0)]
    objects.touch("a")
    assert next(iter(objects.names())).used > 1e9
    objects.touch("gone")
    assert everything(tmp_path / "objects") == ["a"]


def test_a_removed_object_lives_on_for_its_reader(tmp_path: Path) -> None:
    objects = Folder(tmp_path)
    objects.write("a", b"old")
    path = objects.path("a")
    assert path is not None
    with open(path, "rb") as file:
        objects.remove("a")
        objects.write("a", b"new")
        assert file.read() == b"old"


def test_what_dead_writers_left_is_swept_and_what_living_ones_hold_is_not(tmp_path: Path) -> None:
    program = (
        f"from kvtool.store.folder import Folder; import os; f = Folder({str(tmp_path)!r}); (f.scratch / 'x').write_bytes(b'x' * 1000)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    living = Folder(tmp_path)
    (living.scratch / "y").write_bytes(b"y" * 10)
    assert living.unfinished() == 1010
    assert Folder(tmp_path).sweep() == 1000 and living.unfinished() == 10
    assert living.write("y", living.scratch / "y")
    living.close()
    assert everything(tmp_path) == ["objects/y"] and list((tmp_path / "writing").iterdir()) == []


def test_a_forked_child_writes_in_a_scratch_of_its_own(tmp_path: Path) -> None:
    objects = Folder(tmp_path)
    mine = objects.scratch
    child = os.fork()
    if child == 0:
        os._exit(0 if objects.scratch != mine and objects.write("a", b"x") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert objects.scratch == mine and mine.is_dir() and objects.read("a") == b"x"
    objects.sweep()
    assert mine.is_dir()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync", "link", "mkdir"])
def test_a_failed_write_is_no_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    objects = Folder(tmp_path)
    objects.write("b/other", b"other")
    assert objects.scratch.is_dir()

    def fails(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(OSError, match=os.strerror(code)):
            objects.write("a/object", b"x" * 100)
    assert objects.size("a/object") is None and objects.unfinished() == 0 and objects.read("b/other") == b"other"
    assert objects.write("a/object", b"y")


@pytest.mark.parametrize("own", [True, False])
def test_bytes_reach_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    objects = Folder(tmp_path)
    objects.write("a/other", b"other")
    source = objects.scratch / "own"
    source.write_bytes(b"x" * 100)
    done: list[str] = []
    fsync, link = os.fsync, os.link

    def synced(fd: int) -> None:
        done.append("folder" if os.path.isdir(f"/dev/fd/{fd}") else "file")
        fsync(fd)

    def linked(*arguments: str) -> None:
        done.append("link")
        link(*arguments)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", linked)
    assert objects.write("a/object", source if own else b"x" * 100)
    assert done == ["file", "link", "folder"]


def test_without_hard_links_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(OSError, match="has no hard links"):
        Folder(tmp_path).write("a", b"x")


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        Folder(tmp_path / "f")


def killed_at(step: int) -> Callable[[str], str]:
    """A program that ends without a goodbye at its n-th call of the operating system's write, fsync, link or unlink."""
    return lambda path: (
        f"""
import os
from kvtool.store.folder import Folder
left = {step}
def counted(call):
    def wrapper(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return call(*arguments, **options)
    return wrapper
for name in ("open", "write", "fsync", "link", "mkdir", "unlink", "close"):
    setattr(os, name, counted(getattr(os, name)))
Folder({path!r}).write("a/object", b"new" * 1000)
os._exit(0)
"""
    )


def test_a_writer_killed_at_any_step_leaves_the_object_whole_or_absent(tmp_path: Path) -> None:
    seen = set()
    for step in range(40):
        root = tmp_path / str(step)
        done = subprocess.run([sys.executable, "-c", killed_at(step)(str(root))], check=False).returncode == 0
        objects = Folder(root)
        size = objects.size("a/object")
        assert size in (None, 3000)
        if size is not None:
            assert objects.read("a/object") == b"new" * 1000
        assert size is not None or not done
        seen.add(size)
        objects.sweep()
        assert objects.unfinished() == 0 and everything(root) == (["objects/a/object"] if size else [])
        assert objects.write("a/object", b"other") is (size is None)
        if done:
            break
    else:
        raise AssertionError("the writer never came to its end")
    assert seen == {None, 3000}


def test_many_writers_of_one_name(tmp_path: Path) -> None:
    program = (
        "import sys; from kvtool.store.folder import Folder; f = Folder(sys.argv[1])\n"
        "print(sum(f.write(f'a/{i}', bytes([int(sys.argv[2])]) * 20000) for i in range(50)))"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(i)], stdout=subprocess.PIPE, text=True) for i in range(4)
    ]
    assert sum(int(writer.communicate()[0]) for writer in writers) == 50
    objects = Folder(tmp_path)
    for i in range(50):
        data = objects.read(f"a/{i}")
        assert len(data) == 20000 and len(set(data)) == 1


def test_a_name_is_checked_for_all_back_ends() -> None:
    assert check_name("a/b.c-d_e") == "a/b.c-d_e"


def test_links_that_somebody_planted_lead_nowhere(tmp_path: Path) -> None:
    """Neither as an object nor as a folder on the way to one: nothing outside is read, listed, written, marked or removed."""
    secret = tmp_path / "outside"
    (secret / "aa").mkdir(parents=True)
    (secret / "aa" / "x").write_bytes(b"secret")
    before = (secret / "aa" / "x").stat().st_mtime_ns
    folder = Folder(tmp_path / "store")
    folder.write("chunks/bb/y", b"mine")
    (tmp_path / "store" / "objects" / "chunks" / "aa").symlink_to(secret / "aa")
    (tmp_path / "store" / "objects" / "chunks" / "bb" / "x").symlink_to(secret / "aa" / "x")
    (tmp_path / "store" / "objects" / "chunks" / "bb" / "dangling").symlink_to(secret / "new")
    (tmp_path / "store" / "objects" / "tenants").symlink_to(secret)
    for name in ("chunks/aa/x", "tenants/aa/x"):
        for call in (folder.read, folder.size, folder.path, folder.remove, folder.touch, lambda n: folder.write(n, b"new")):
            with pytest.raises(OSError, match="no symbolic links"):
                call(name)
    assert folder.size("chunks/bb/x") is None and folder.path("chunks/bb/x") is None
    folder.touch("chunks/bb/x")
    with pytest.raises(OSError, match="symbolic links"):
        folder.read("chunks/bb/x")
    for name in ("x", "dangling"):
        with pytest.raises(OSError, match="which no object is"):
            folder.write(f"chunks/bb/{name}", b"new")
        assert folder.remove(f"chunks/bb/{name}")  # the link, not what it leads to
    assert [entry.name for entry in folder.names()] == [entry.name for entry in folder.page("", "", 9)] == ["chunks/bb/y"]
    assert (secret / "aa" / "x").read_bytes() == b"secret" and (secret / "aa" / "x").stat().st_mtime_ns == before
    assert not (secret / "new").exists() and folder.unfinished() == 0


def test_folders_go_with_their_last_object(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "store")
    folder.write("a/b/c/d", b"1")
    folder.write("a/e", b"2")
    assert folder.remove("a/b/c/d") and not (tmp_path / "store" / "objects" / "a" / "b").exists()
    assert folder.remove("a/e") and list((tmp_path / "store" / "objects").iterdir()) == []


def test_writers_and_removers_of_one_folder(tmp_path: Path) -> None:
    """A folder that goes between its making and the link into it is made again."""
    folder, stop = Folder(tmp_path / "store"), threading.Event()

    def churn() -> None:
        while not stop.is_set():
            folder.write("a/b/x", b"")
            folder.remove("a/b/x")

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for one in threads:
        one.start()
    for i in range(150):
        assert folder.write(f"a/b/{i}", b"1")
        assert folder.remove(f"a/b/{i}")
    stop.set()
    for one in threads:
        one.join()
    assert folder.unfinished() == 0


def test_pages_are_the_sorted_listing(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "store")
    names = ["a-b", "a.b", "a/b", "a/b-c/d", "a/b.c", "a/c", "a0", "b/a/a", "b/a-a", "b/a.a", "c", "b1/x"]
    for name in names:
        folder.write(name, name.encode())
    for prefix in ("", "a", "a/", "a/b", "b/a", "b/a/", "c", "d", "b"):
        whole = sorted(entry.name for entry in folder.names(prefix))
        assert whole == sorted(name for name in names if name.startswith(prefix))
        for count in (1, 2, 5, 20):
            got, after = [], ""
            while page := folder.page(prefix, after, count):
                assert len(page) <= count
                got += [entry.name for entry in page]
                after = got[-1]
            assert got == whole, (prefix, count)
        for after in ("a", "a/b-", "a/b/", "a/zz", "b", "zz"):
            assert [entry.name for entry in folder.page(prefix, after, 99)] == [name for name in whole if name > after]


def test_a_page_reads_only_the_folders_that_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing page by page is linear in what it lists."""
    folder = Folder(tmp_path / "store")
    for i in range(40):
        folder.write(f"chunks/{i:02x}/x{i}", b"")
    seen: list[str] = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: seen.append(str(path)) or real(path))
    after, pages = "", 0
    while page := folder.page("", after, 10):
        after, pages = page[-1].name, pages + 1
    # Of each page the way down, its ten folders, and the folder where it began.
    assert pages == 4 and len(seen) <= 5 * (3 + 10)
