"""The service: objects of a store over HTTP, by tenant.

GET  /                       a page about what is stored
GET  /health                 200 while it answers
GET  /metrics                for Prometheus; tokens with the right `operate`
GET  /openapi.json           every route below
GET  /v1/tenant              who the token belongs to, and the salt of its prompts' keys
/v1/objects/..., /v1/now     objects by name, and the clock that dates them: objects_routes
/v1/lookup, explain, entries, stats     prompts: prompts_routes
"""

import asyncio
import json
import logging
import secrets
import time
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtool.service import errors, objects_routes, prompts_routes
from kvtool.service.access import Its, Known, Operates, known
from kvtool.service.state import State
from kvtool.service.transfer import BESIDE, BrokenOff, Pace, Stalled
from kvtool.version import __version__

logger = logging.getLogger("kvtool.service")

OPEN = ("/", "/health", "/openapi.json")  # what is answered without a token; bodies of such requests are never read
FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")  # what a proxy adds
MOST_NESTED = 100  # lists and objects in a body of JSON
CLOSE = {"Connection": "close"}
LOOPBACK = ["localhost", "127.0.0.1", "[::1]", "::1"]
# The page runs its own script and talks to its own service, whatever a name of a model may hold.
GUARDS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class Own(BaseModel):
    """A tenant, as it sees itself."""

    name: str
    salt: str
    rights: list[str]


class Health(BaseModel):
    """That it answers, and with which version."""

    status: str
    version: str


def make_app(state: State) -> FastAPI:
    """The service as an ASGI application."""
    app = FastAPI(title="kvtool", version=__version__, summary="A store of prompt caches", docs_url=None, redoc_url=None)
    app.state.kvtool = state
    errors.install(app)
    app.include_router(objects_routes.router)
    app.include_router(prompts_routes.router)
    page = files("kvtool.service").joinpath("page.html").read_bytes()

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        """The page, which holds nothing of anybody: it asks for a token and shows what that may see."""
        return Response(page, media_type="text/html; charset=utf-8", headers=GUARDS)

    @app.get("/health", tags=["service"])
    async def health() -> Health:
        """Whether the service answers."""
        return Health(status="ok", version=__version__)

    @app.get("/metrics", tags=["service"], response_class=Response)
    async def metrics(tenant: Operates, its: Its) -> Response:
        """Figures in Prometheus' text format."""
        return Response(its.figures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/tenant", tags=["service"])
    async def tenant(tenant: Known) -> Own:
        """Who the token belongs to."""
        return Own(name=tenant.name, salt=tenant.salt, rights=list(tenant.rights))

    app.add_middleware(Watched, state=state)
    if state.tenants is None:
        # Without tokens a web page could otherwise reach it, through a name of its own that leads to this machine.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)
    return app


class Watched:
    """Asks for the token before anything of a body is read, limits bodies, counts and logs each request as one JSON object; no token
    and no token id is ever logged."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        figures, start, request_id = self._state.figures, time.perf_counter(), secrets.token_hex(8)
        status, sent = 0, 0
        scope.setdefault("state", {})

        async def sending(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", []), (b"x-request-id", request_id.encode())]}
            sent += len(message.get("body", b"")) + message.get(BESIDE, 0)
            try:
                async with asyncio.timeout(self._state.limits.idle_seconds):
                    await send(message)
            except TimeoutError:
                raise BrokenOff("nothing of the answer was taken") from None

        figures.running.inc()
        try:
            if self._state.tenants is None and any(name in FORWARDED for name, _ in scope["headers"]):
                raise errors.Refused(403, "a proxy stands before a service without tokens", hint="give it --tenants FILE", headers=CLOSE)
            if scope["path"] in OPEN:
                body: Receive | None = _nothing
            else:
                scope["state"]["known"] = await run_in_threadpool(known, self._state, _authorization(scope))
                body = receive if scope["method"] == "PUT" else await self._small(receive)
            if body is None:
                refusal = errors.answer(413, f"more than {self._state.limits.json_bytes} bytes", headers=CLOSE)
                await refusal(scope, receive, sending)
            else:
                await self._app(scope, body, sending)
        except errors.Refused as error:
            await error.answer()(scope, receive, sending)
        except Stalled as error:
            await errors.answer(408, str(error), headers=CLOSE)(scope, receive, sending)
        except ClientDisconnect:
            pass  # nobody is there to be answered; the request is logged with status 0
        except BrokenOff as error:
            # The connection is closed before the length that was announced: its reader knows.
            logger.error("%s %s broke off: %s", scope["method"], json.dumps(scope["path"]), error)
        finally:
            figures.running.dec()
            taken = time.perf_counter() - start
            route = getattr(scope.get("route"), "path", "none")
            figures.requests.labels(route, scope["method"] if route != "none" else "other", str(status)).inc()
            figures.seconds.labels(route).observe(taken)
            if logger.isEnabledFor(logging.INFO):
                about: dict[str, Any] = {
                    "id": request_id,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "ms": round(1000 * taken, 2),
                    "bytes": sent,
                    "tenant": scope["state"].get("tenant"),
                    "client": (scope.get("client") or ("",))[0],
                }
                logger.info("%s", json.dumps(about))

    async def _small(self, receive: Receive) -> Receive | None:
        """A whole body that is within its limit, to be read again; None beyond it. Bodies of objects (PUT) have a limit of their own."""
        parts: list[Message] = []
        size = 0
        pace = Pace(self._state.limits.idle_seconds, self._state.limits.rate)
        while not parts or parts[-1].get("more_body", False):
            message = await pace.next(receive(), size)
            parts.append(message)
            size += len(message.get("body", b""))
            if size > self._state.limits.json_bytes:
                return None
        # Empty lists and objects take over twenty times their bytes in Python's memory; no body that is meant has more than a few.
        if sum(part.get("body", b"").count(mark) for part in parts for mark in (b"[", b"{")) > MOST_NESTED:
            raise errors.Refused(413, f"more than {MOST_NESTED} lists and objects in a body")
        left = iter(parts)

        async def again() -> Message:
            return next(left, None) or await receive()

        return again


async def _nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


def _authorization(scope: Scope) -> str:
    """The Authorization header, nothing where there is none or more than one."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    return given[0].decode("latin-1") if len(given) == 1 else ""
