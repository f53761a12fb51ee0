"""`kvtool tenants`: who may use a service."""

from pathlib import Path

import click

from formats.errors import KVError
from kvtool.cli._common import emit, json_option
from kvtool.service.tenants import RIGHTS, made, read, write

file_option = click.option(
    "--file", "path", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="The file of tenants."
)


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
    known = read(path) if path.exists() else []
    if any(tenant.name == name for tenant in known):
        raise KVError(f"there is a tenant {name!r}", path=str(path), hint=f"kvtool tenants rm {name} --file {path} takes its token away")
    tenant, token = made(name, rights or ("read", "write"))
    write(path, [*known, tenant])
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
@json_option
def rm(name: str, path: Path, as_json: bool) -> None:
    """Remove a tenant; its token is refused from the next request on, its objects stay in the store.

    \b
    Example:
      kvtool tenants rm ana --file tenants.json
    """
    known = read(path)
    gone = next((tenant for tenant in known if tenant.name == name), None)
    if gone is None:
        raise KVError(f"there is no tenant {name!r}, only {', '.join(t.name for t in known) or 'none at all'}", path=str(path))
    write(path, [tenant for tenant in known if tenant is not gone])
    emit(as_json, {"name": name, "folder": gone.folder}, f"removed; its objects are below {gone.folder}")
