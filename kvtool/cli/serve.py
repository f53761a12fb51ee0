"""`kvtool serve`: the store over HTTP."""

import ipaddress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import click

from formats.errors import BackendError
from kvtool.cli._common import note, quota_option


@click.command("serve")
@click.option(
    "--store", default="prompts", show_default=True, metavar="STORE", help="A folder, or an address of one of the other back ends."
)
@quota_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; others than this machine's own need --tenants.")
@click.option("--port", type=click.IntRange(0, 65535), default=8700, show_default=True, help="0: any that is free.")
@click.option(
    "--tenants", "tenants_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE", help="Who may use it."
)
@click.option("--no-tokens", is_flag=True, help="Whoever reaches it may read and write; on this machine's own addresses alone.")
@click.option("--tls-cert", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Certificate chain, PEM.")
@click.option("--tls-key", type=click.Path(exists=True, dir_okay=False), metavar="FILE", help="Its private key, PEM.")
@click.option(
    "--max-object",
    type=click.FloatRange(0, min_open=True),
    default=64.0,
    show_default=True,
    metavar="GB",
    help="Largest object that is taken.",
)
@click.option(
    "--grace",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    metavar="S",
    help="Seconds that requests under way may take to end once it is stopped.",
)
def command(
    store: str,
    quota: int | None,
    host: str,
    port: int,
    tenants_file: Path | None,
    no_tokens: bool,
    tls_cert: str | None,
    tls_key: str | None,
    max_object: float,
    grace: int,
) -> None:
    """Serve a store to other processes and machines until it is stopped. Any number of services may share one store.

    Without --tenants it makes a token for this run and prints it. Logs, one JSON object a request, go to stderr.

    \b
    Example:
      kvtool tenants add ana --file tenants.json
      kvtool serve --store prompts --tenants tenants.json
      KVTOOL_TOKEN=kvt_... kvtool import --store http://127.0.0.1:8700 --model M --prompt-file report.txt
    """
    lacking = [name for name in ("fastapi", "uvicorn", "httptools", "prometheus_client") if find_spec(name) is None]
    if lacking:
        raise BackendError(f"the service needs {' and '.join(lacking)}, not installed here", hint="pip install 'kvtool[serve]'")
    from kvtool.service.running import serve
    from kvtool.service.settings import Limits
    from kvtool.service.state import State
    from kvtool.service.tenants import ANYONE, RIGHTS, Tenants, made
    from kvtool.store.addresses import open_objects

    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    if no_tokens and tenants_file is not None:
        raise click.UsageError("--no-tokens and --tenants exclude each other")
    if not _loopback(host):
        if tenants_file is None:
            raise click.UsageError(
                f"{host} can be reached from other machines: give --tenants FILE (kvtool tenants add NAME --file FILE makes it)"
            )
        if tls_cert is None:
            note("without --tls-cert tokens and prompts cross the network in clear: put a proxy with TLS in front, or give a certificate")
    tenants: Tenants | None = None
    if tenants_file is not None:
        tenants = Tenants(file=tenants_file)
    elif not no_tokens:
        tenant, token = made("anyone", RIGHTS)
        # A token for this run, and the objects of every run before it.
        tenants = Tenants([replace(tenant, salt=ANYONE.salt)])
        note(f"the token of this run: {token}")
    limits = Limits(object_bytes=int(max_object * 1e9))
    state = State(open_objects(store), tenants, limits, quota)
    try:
        state.begin()
    except OSError as error:
        note(f"the store is out of reach for now: {error}")
    serve(state, host=host, port=port, tls_cert=tls_cert, tls_key=tls_key, grace=grace)


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
