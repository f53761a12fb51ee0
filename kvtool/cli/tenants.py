"""`kvtool tenants`: who may use a service."""

from pathlib import Path

import click

from formats.errors import KVError, counted
from kvtool.cli._common import OutputFile, check_store, emit, json_option
from kvtool.service.leaving import clear
from kvtool.service.tenants import RIGHTS, changing, made, read
from kvtool.store.addresses import open_objects

file_option = click.option("--file", "path", required=True, type=OutputFile(Path), metavar="FILE", help="The file of tenants.")


@click.group("tenants")
def command() -> None:
    """Add, list and remove the tenants of `kvtool serve`. A running service follows its file.

    \b
    Example:
      kvtool tenants add ana --file tenants.json
      kvtool serve --store prompts --tenants tenants.json
    """


@command.command("add")
@click.argument("name")
@file_option
@click.option(
    "--may",
    "rights",
    multiple=True,
    type=click.Choice(RIGHTS),
    help="read, write: its own objects, and given by default; operate: the service's figures.",
)
@json_option
def add(name: str, path: Path, rights: tuple[str, ...], as_json: bool) -> None:
    """Add a tenant and print its token, which is shown this once and kept nowhere.

    \b
    Example:
      kvtool tenants add ana --file tenants.json
    """
    tenant, token = made(name, rights or ("read", "write"))
    with changing(path) as known:
        if any(one.name == name for one in known):
            raise KVError(
                f"there is a tenant {name!r}", path=str(path), hint=f"kvtool tenants rm {name} --file {path} takes its token away"
            )
        known.append(tenant)
    emit(as_json, {"name": name, "rights": list(tenant.rights), "token": token}, token)


@command.command("ls")
@file_option
@json_option
def ls(path: Path, as_json: bool) -> None:
    """List tenants and what they may do.

    \b
    Example:
      kvtool tenants ls --file tenants.json
    """
    tenants = [{"name": t.name, "rights": list(t.rights), "folder": t.folder} for t in read(path)]
    emit(as_json, {"tenants": tenants}, "\n".join(f"{t['name']}  {' '.join(t['rights'])}  {t['folder']}" for t in tenants))


@command.command("rm")
@click.argument("name")
@file_option
@click.option("--store", metavar="STORE", help="Where the tenant's objects are: they are removed.")
@click.option("--keep", is_flag=True, help="Leave the objects where they are; kvtool store gc STORE --tenants FILE removes them later.")
@json_option
def rm(name: str, path: Path, store: str | None, keep: bool, as_json: bool) -> None:
    """Remove a tenant, and its objects from a store: its token is refused from the next request on, and uploads under way are dropped.

    \b
    Example:
      kvtool tenants rm ana --file tenants.json --store prompts
    """
    if (store is None) == (not keep):
        raise click.UsageError("say what becomes of the tenant's objects: --store STORE removes them, --keep leaves them")
    read(path)
    if store is not None:
        check_store(store)
    with changing(path) as known:
        gone = next((tenant for tenant in known if tenant.name == name), None)
        if gone is None:
            raise KVError(f"there is no tenant {name!r}, only {', '.join(t.name for t in known) or 'none at all'}", path=str(path))
        known.remove(gone)
    # After the token is gone, so that nothing comes after it.
    count = freed = 0
    if store is not None:
        objects = open_objects(store)
        count, freed = clear(objects, gone.folder)
        objects.close()
    told = f"its objects are below {gone.folder}" if keep else f"{counted(count, 'object')}, {freed:,} bytes freed"
    emit(as_json, {"name": name, "folder": gone.folder, "kept": keep, "objects": count, "freed_bytes": freed}, f"removed; {told}")
