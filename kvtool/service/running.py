"""Running the service until it is stopped."""

import logging
import signal
import ssl
import sys
from types import FrameType

import uvicorn

from kvtool.service.app import make_app
from kvtool.service.connections import guarded
from kvtool.service.keeping import Keeping
from kvtool.service.state import State


def serve(
    state: State,
    *,
    host: str = "127.0.0.1",
    port: int = 8700,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    grace: int = 30,
) -> None:
    """Listen until SIGTERM or SIGINT; requests under way then end first.

    Args:
        state: what is served, and to whom; its objects are closed at the end.
        tls_cert, tls_key: files, PEM.
        grace: seconds that requests under way may take to end.
    Raises:
        ValueError: a certificate or key that is none.
        OSError: it cannot listen there.
    """
    app = make_app(state)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access = logging.getLogger("kvtool.service")
    handlers, access.handlers, access.propagate = access.handlers, [handler], False
    access.setLevel(logging.INFO)
    config = uvicorn.Config(
        app,
        http=guarded(state.limits),
        ws="none",
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        limit_concurrency=state.limits.connections,
        timeout_graceful_shutdown=grace,
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )
    server = Announcing(config, "https" if tls_cert else "http")

    def stop(number: int, frame: FrameType | None) -> None:
        """uvicorn raises the signal that stopped it once more at the end; one that comes before it listens for signals ends it then."""
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with Keeping(state):
            server.run()
    except ssl.SSLError as error:
        files = f"{tls_cert} and {tls_key}"
        raise ValueError(f"[serve] tls_cert and tls_key must be a certificate and its key, PEM, but got {files} ({error}).") from None
    except SystemExit:
        raise OSError(f"cannot listen at {host}:{port}, as said above; another --port or --host may do") from None
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
        access.handlers = handlers
        state.objects.close()


class Announcing(uvicorn.Server):
    """Says where it listens once it does: of port 0 nobody else knows."""

    def __init__(self, config: uvicorn.Config, scheme: str) -> None:
        super().__init__(config)
        self._scheme = scheme

    async def startup(self, sockets: object = None) -> None:
        await super().startup(sockets)  # type: ignore[arg-type]
        for server in self.servers:
            for socket in server.sockets:
                address, port = socket.getsockname()[:2]
                place = f"[{address}]" if ":" in address else address
                print(f"listening at {self._scheme}://{place}:{port}", file=sys.stderr, flush=True)
