"""Errors as answers: `{"error": {"what": ..., "hint": ...}}` with a status that says whose it is."""

import errno
import logging
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from formats.errors import KVError
from kvtool.service.transfer import Stalled, TooLarge, Unlike
from kvtool.store.objects import Missing

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)


class Refused(Exception):
    """A request that is answered with a status and a reason."""

    def __init__(
        self, status: int, what: str, *, hint: str | None = None, headers: Mapping[str, str] | None = None, cause: str | None = None
    ) -> None:
        super().__init__(what)
        self.status, self.what, self.hint, self.headers, self.cause = status, what, hint, headers, cause

    def answer(self) -> JSONResponse:
        """This as JSON; `cause` is for programs: "quota" where room is not the disk's affair."""
        return answer(self.status, self.what, self.hint, self.headers, {} if self.cause is None else {"cause": self.cause})


def answer(
    status: int,
    what: str,
    hint: str | None = None,
    headers: Mapping[str, str] | None = None,
    more: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error as JSON."""
    return JSONResponse({"error": {"what": what, "hint": hint, **(more or {})}}, status, headers)


def install(app: FastAPI) -> None:
    """Have the service answer its errors."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return error.answer()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        # A body of another type is a string to the parser, whose message would be no help.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        other = first["loc"] == ("body",) and kind != "application/json"
        hint = "send JSON, with Content-Type: application/json" if other else None
        return answer(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}", hint)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail), None, error.headers)

    @app.exception_handler(Missing)
    async def missing(request: Request, error: Missing) -> JSONResponse:
        return answer(404, str(error))

    @app.exception_handler(TooLarge)
    async def too_large(request: Request, error: TooLarge) -> JSONResponse:
        return answer(413, str(error), headers={"Connection": "close"})

    @app.exception_handler(Unlike)
    async def unlike(request: Request, error: Unlike) -> JSONResponse:
        return answer(400, str(error), "send it again")

    @app.exception_handler(Stalled)
    async def stalled(request: Request, error: Stalled) -> JSONResponse:
        return answer(408, str(error), headers={"Connection": "close"})

    @app.exception_handler(KVError)
    async def data(request: Request, error: KVError) -> JSONResponse:
        return answer(409, error.what, error.hint)  # whose path is this machine's affair

    @app.exception_handler(OSError)
    async def system(request: Request, error: OSError) -> JSONResponse:
        logger.error("%s %s: %s", request.method, request.url.path, error)
        if error.errno in FULL:
            return answer(507, "the store is full", "remove entries, or give it more room")
        # What the system says names paths: those are for the log.
        return answer(503, "the store's medium failed", "try again later; the service's log says more", {"Retry-After": "5"})
