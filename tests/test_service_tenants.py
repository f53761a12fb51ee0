"""Tenants of the service: their file, who changes it at once, and what becomes of what they leave."""

import json
import multiprocessing
import stat
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from formats.errors import FormatError
from kvtool.cli import run
from kvtool.service import tenants as tenants_file
from kvtool.service.partition import Partition
from kvtool.service.tenants import ANYONE, Tenant, Tenants, made
from kvtool.store.folder import Folder

ANA, ANAS = made("ana")
BOB, BOBS = made("bob", ["read", "operate"])


def test_a_file_of_tenants_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "tenants.json"
    tenants_file.write(file, [ANA])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and ANAS not in file.read_text()
    known = Tenants(file=file)
    assert known.of(ANAS) == ANA and known.of(BOBS) is None
    tenants_file.write(file, [BOB])
    assert known.of(ANAS) is None and known.of(BOBS) == BOB


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        '{"version": 2, "tenants": []}',
        '{"version": 1}',
        '{"version": 1, "tenants": [{"name": "a", "token": "00", "salt": "00", "rights": ["read"]}]}',
        json.dumps({"version": 1, "tenants": [{"name": "a", "token": "0" * 64, "salt": "0" * 64, "rights": ["rule"]}]}),
        json.dumps({"version": 1, "tenants": [{"name": "a", "token": "0" * 64, "salt": "0" * 64, "rights": ["read"]}] * 2}),
    ],
)
def test_what_is_no_file_of_tenants(tmp_path: Path, body: str) -> None:
    file = tmp_path / "tenants.json"
    file.write_text(body)
    with pytest.raises(FormatError, match="not a file of tenants"):
        tenants_file.read(file)


def test_tenants_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "tenants.json")
    assert run(["tenants", "add", "ana", "--file", file]) == 0
    token = capsys.readouterr().out.strip()
    assert token.startswith("kvt_") and Tenants(file=Path(file)).of(token)
    assert run(["tenants", "add", "ana", "--file", file]) == 1
    assert run(["tenants", "add", "no/name", "--file", file]) != 0
    assert run(["tenants", "add", "op", "--may", "operate", "--file", file, "--json"]) == 0
    capsys.readouterr()
    assert run(["tenants", "ls", "--file", file]) == 0
    assert "ana  read write" in (listed := capsys.readouterr().out) and "op  operate" in listed and token not in listed
    assert run(["tenants", "rm", "ana", "--file", file]) == 2  # what becomes of the objects has to be said
    assert run(["tenants", "rm", "ana", "--file", file, "--keep"]) == 0
    assert Tenants(file=Path(file)).of(token) is None
    assert run(["tenants", "rm", "ana", "--file", file, "--keep"]) == 1


def _add(file: Path, name: str) -> None:
    with tenants_file.changing(file) as known:
        known.append(made(name)[0])


def test_of_many_that_add_at_once_none_is_lost(tmp_path: Path) -> None:
    file, names = tmp_path / "tenants.json", [f"t{i}" for i in range(12)]
    (tmp_path / "link.json").symlink_to(file)
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_add, args=(tmp_path / ("link.json" if i % 2 else "tenants.json"), name)) for i, name in enumerate(names)
    ]
    for one in writers:
        one.start()
    for one in writers:
        one.join(60)
    assert sorted(tenant.name for tenant in tenants_file.read(file)) == sorted(names)


def part(folder: Path, tenant: Tenant) -> Partition:
    return Partition(Folder(folder), tenant.folder, bytes.fromhex(tenant.salt))


def test_a_tenant_that_is_removed_takes_its_objects_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "tenants.json", tmp_path / "store"
    tenants_file.write(file, [ANA, BOB])
    for tenant in (ANA, BOB):
        part(store, tenant).write("chunks/aa/a", tenant.name.encode())
    command = ["tenants", "rm", "ana", "--file", str(file), "--json"]
    assert run([*command, "--store", str(tmp_path / "nowhere")]) == 2 and len(tenants_file.read(file)) == 2
    capsys.readouterr()
    assert run([*command, "--store", str(store)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["objects"], said["freed_bytes"], said["kept"]) == (1, 3, False)
    assert [path.name for path in (store / "objects" / "tenants").iterdir()] == [BOB.folder.split("/")[1]]
    assert part(store, BOB).read("chunks/aa/a") == b"bob"


def test_what_is_kept_is_an_orphan_that_gc_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, store = tmp_path / "tenants.json", tmp_path / "store"
    tenants_file.write(file, [ANA, BOB])
    for tenant in (ANA, BOB, ANYONE):
        part(store, tenant).write("chunks/aa/a", b"123")
    assert run(["tenants", "rm", "ana", "--file", str(file), "--keep"]) == 0
    assert ANA.folder in capsys.readouterr().out
    assert run(["store", "gc", str(store)]) == 0 and part(store, ANA).size("chunks/aa/a") == 3
    capsys.readouterr()
    assert run(["store", "gc", str(store), "--tenants", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["orphans"] == [ANA.folder] and said["freed_bytes"] == 3
    assert [part(store, tenant).size("chunks/aa/a") for tenant in (ANA, BOB, ANYONE)] == [None, 3, 3]
