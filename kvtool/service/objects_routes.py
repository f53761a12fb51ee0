"""Objects by name: put once, read whole or in part, list, remove."""

import contextlib
import os
from itertools import takewhile
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from kvtool.service.access import Its, Known, Reads, Writes
from kvtool.service.accounts import HINT
from kvtool.service.connections import SEND
from kvtool.service.errors import Refused
from kvtool.service.transfer import FileResponse, Pace, received, sent, span
from kvtool.store.catalogue import GRANTS, TENANTS
from kvtool.store.keys import node_of
from kvtool.store.objects import MAX_NAME, Missing, check_name

router = APIRouter(prefix="/v1", tags=["objects"])
ROOM = 64  # of a name, for the tenant's folder
Named = Annotated[str, Path(max_length=MAX_NAME, description="Parts of a-z 0-9 . _ - joined by slashes.")]
ERRORS: dict[int | str, dict[str, str]] = {
    401: {"description": "No known token"},
    403: {"description": "The token may not do this"},
    404: {"description": "No such object"},
    422: {"description": "A name or value of the wrong form"},
    503: {"description": "The store's medium failed"},
}


class Object(BaseModel):
    """An object: name, bytes, and when it was last written or used (seconds since 1970)."""

    name: str
    size: int
    used: float


class Listing(BaseModel):
    """Objects in order of their names; `next` is what `after` should be for those that follow, null where none does."""

    objects: list[Object]
    next: str | None


class Names(BaseModel):
    """Names of objects."""

    names: list[Annotated[str, Field(max_length=MAX_NAME)]] = Field(max_length=100_000)


class Asked(Names):
    """Names of objects whose bytes are asked for; `lookup`: of a prompt that is looked for, to be read."""

    lookup: bool = False


class Sizes(BaseModel):
    """The bytes of the named objects, null where there is none."""

    sizes: list[int | None]


class Clock(BaseModel):
    """Seconds since 1970 by the clock that objects' `used` is of."""

    now: float


def checked(name: str) -> str:
    """The name, if objects may have it.

    Raises:
        Refused: 422.
    """
    try:
        if len(name) > MAX_NAME - ROOM:
            raise ValueError(f"a name has at most {MAX_NAME - ROOM} characters here, and this one {len(name)}")
        return check_name(name)
    except ValueError as error:
        raise Refused(422, str(error)) from None


@router.get("/objects", responses=ERRORS)
async def listing(
    objects: Reads,
    state: Its,
    prefix: Annotated[str, Query(max_length=MAX_NAME)] = "",
    after: Annotated[str, Query(max_length=MAX_NAME)] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
) -> Listing:
    """Objects whose names begin with `prefix`."""
    if prefix:
        checked(prefix.rstrip("/") or prefix)
    most = min(limit, state.limits.page)
    found = await run_in_threadpool(objects.page, prefix, after, most + 1)
    part = [Object(name=e.name, size=e.size, used=e.used) for e in found[:most]]
    return Listing(objects=part, next=part[-1].name if len(found) > most else None)


@router.post("/objects/sizes", responses=ERRORS)
async def sizes(objects: Reads, tenant: Known, state: Its, names: Asked) -> Sizes:
    """The bytes of several objects. Of a look-up, the question that begins with a prompt's first chunk is counted."""
    asked = [checked(name) for name in names.names]
    found = await run_in_threadpool(objects.sizes, asked)
    nodes = [node_of(name) for name in asked] if names.lookup else []
    if nodes and nodes[0] is not None and nodes[0].start == 0:
        there = list(takewhile(lambda size: size is not None, found))
        tokens = [0 if node is None else node.tokens for node in nodes]
        state.asked(tenant, sum(tokens[: len(there)]), sum(tokens))
    return Sizes(sizes=found)


@router.post("/objects/used", status_code=204, responses=ERRORS)
async def used(objects: Reads, names: Names) -> Response:
    """Record that these objects were used now; what is not there is passed over."""
    asked = [checked(name) for name in names.names]
    await run_in_threadpool(objects.touch, *asked)
    return Response(status_code=204)


@router.head("/objects/{name:path}", responses=ERRORS)
async def head(objects: Reads, name: Named) -> Response:
    """The size of an object."""
    size = await run_in_threadpool(objects.size, checked(name))
    if size is None:
        return Response(status_code=404)
    return Response(headers={"Content-Length": str(size), **_fixed(name)}, media_type="application/octet-stream")


@router.get("/now", responses=ERRORS)
async def now(objects: Reads) -> Clock:
    """What the clock says that objects' `used` is of: ages are by it, and not by a client's."""
    return Clock(now=await run_in_threadpool(objects.now))


@router.get(
    "/objects/{name:path}",
    response_class=StreamingResponse,
    responses={
        **ERRORS,
        206: {"description": "The bytes asked for"},
        304: {"description": "As it was"},
        416: {"description": "No such bytes"},
    },
)
async def get(objects: Reads, state: Its, request: Request, name: Named) -> Response:
    """An object's bytes, all or one range; a kvtool file has its header first and then layer after layer."""
    size = await run_in_threadpool(objects.size, checked(name))
    if size is None:
        raise Missing(name)
    if request.headers.get("if-none-match") == _fixed(name)["ETag"]:
        return Response(status_code=304, headers=_fixed(name))
    try:
        part = span(request.headers.get("range"), size)
    except ValueError as error:
        raise Refused(416, str(error), headers={"Content-Range": f"bytes */{size}"}) from None
    begin, end = part or (0, size)
    headers = {"Content-Length": str(end - begin), **_fixed(name)}
    if part is not None:
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
    state.figures.sent.inc(end - begin)
    about = (206 if part is not None else 200, headers, "application/octet-stream")
    send = request.scope["state"].get(SEND)
    # Of what is elsewhere or encrypted a path would be that of a copy, fetched and checked whole as a kvtool file before the first byte.
    path = objects.path(name) if state.files else None
    if state.files and path is None:
        raise Missing(name)  # removed meanwhile: once an answer has begun it could only be broken off
    if send is None or path is None:
        return StreamingResponse(sent(objects, name, path, begin, end), *about)
    return FileResponse(send, path, begin, end, *about)


@router.put(
    "/objects/{name:path}",
    responses={
        **ERRORS,
        200: {"description": "It was there; that one stays"},
        201: {"description": "Kept"},
        400: {"description": "Not the bytes announced"},
        408: {"description": "The body stalled"},
        409: {"description": "The name begins those of other objects, or one of theirs begins it"},
        413: {"description": "Too large"},
        507: {"description": "Full: the quota, and what is left may not go, or the disk"},
    },
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}},
)
async def put(
    objects: Writes,
    tenant: Known,
    state: Its,
    request: Request,
    name: Named,
    x_content_blake3: Annotated[str | None, Header(pattern="^[0-9a-f]{64}$", description="Refuse a body of another digest.")] = None,
) -> Response:
    """Keep an object. One that is there stays as it is: names say what the bytes are."""
    if checked(name).startswith((TENANTS, GRANTS)):
        raise Refused(422, f"what is below {TENANTS} and {GRANTS} is the service's own: no quota would make room of it")
    limits = state.limits
    most = limits.object_bytes if state.quota is None else min(limits.object_bytes, state.quota)
    length = request.headers.get("content-length", "0")
    announced = int(length) if length.isdecimal() else 0
    if announced > most:
        raise Refused(413, f"{announced} bytes, at most {most} are taken", headers={"Connection": "close"})
    if await run_in_threadpool(objects.size, name) is not None:
        return JSONResponse({"made": False}, 200)
    if name.startswith("spaces/") and len(await run_in_threadpool(objects.page, "spaces/", "", limits.spaces)) == limits.spaces:
        raise Refused(507, f"{limits.spaces} spaces are there, and no more may be", hint=HINT, cause="quota")
    folder = await run_in_threadpool(lambda: objects.scratch)
    pace = Pace(limits.idle_seconds, limits.rate)
    async with state.reserved(tenant, name, announced) as room:
        path, size = await received(request, folder, most, pace, x_content_blake3, room.grow)
        try:
            # Who was removed while this came has no place any more.
            if not await run_in_threadpool(state.knows, tenant):
                raise Refused(401, "this token is not known any more")
            await room.renew()
            made = await run_in_threadpool(objects.write, name, path)
            if made:
                room.kept(size)
        except (IsADirectoryError, NotADirectoryError):
            raise Refused(409, f"{name} and a part of it cannot both be objects", hint="choose another name") from None
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    if made:
        state.figures.received.inc(size)
    return JSONResponse({"made": made}, 201 if made else 200)


@router.delete("/objects/{name:path}", status_code=204, responses=ERRORS)
async def delete(objects: Writes, state: Its, name: Named) -> Response:
    """Remove an object."""
    if not await run_in_threadpool(objects.remove, checked(name)):
        raise Missing(name)
    state.figures.removed.labels("request").inc()
    return Response(status_code=204)


def _fixed(name: str) -> dict[str, str]:
    """Headers of bytes that never change while they have this name."""
    return {"ETag": f'"{name}"', "Cache-Control": "private, no-transform", "Accept-Ranges": "bytes"}
