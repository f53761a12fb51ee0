"""Bytes of objects between a connection and a back end, without holding an object in memory."""

import asyncio
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from formats.atomic import AtomicFile
from formats.errors import KVError
from kvtool.service.connections import REST, Rest
from kvtool.store.objects import Missing, Objects

PART = 1 << 20  # as large as pays on loopback; a connection holds two of them
GATHERED = 4 << 20  # of a body: one is received while another is written
BESIDE = "beside"  # in a message of a body: bytes that went to the connection another way
T = TypeVar("T")
_RANGE = re.compile(r"bytes=(\d{0,1000})-(\d{0,1000})")  # Python refuses numbers of over 4300 digits


class TooLarge(ValueError):
    """A body beyond its limit."""


class Unlike(ValueError):
    """A body that is not what was announced."""


class BrokenOff(Exception):
    """An answer that cannot go on once it has begun."""


class Stalled(OSError):
    """Nothing moved for too long."""


class Pace:
    """How long a body may take to come: `idle` seconds for any byte, and for all of it `idle` and a second for every `rate` bytes."""

    def __init__(self, idle: float, rate: float) -> None:
        self._idle, self._rate, self._start = idle, rate, time.monotonic()

    async def next(self, part: Awaitable[T], size: int) -> T:
        """The next part of a body of which `size` bytes have come.

        Raises:
            Stalled: it does not come in time.
        """
        taken = time.monotonic() - self._start
        left = self._idle + size / self._rate - taken
        try:
            async with asyncio.timeout(min(self._idle, left)):
                return await part
        except TimeoutError:
            if left < self._idle:
                raise Stalled(f"{size} bytes in {taken + left:.0f} s are less than {self._rate:g} a second") from None
            raise Stalled(f"nothing was received for {self._idle:g} s") from None


class Incoming:
    """A request's body, piece by piece into the memory of whoever reads it."""

    def __init__(self, request: Request) -> None:
        self._stream = request.stream()
        self._take: Callable[[], Rest | None] | None = request.scope.get("state", {}).get(REST)
        self._rest: Rest | None = None
        self._piece = memoryview(b"")

    async def into(self, view: memoryview) -> int:
        """Fill the beginning of `view`; the bytes, 0 at the end of the body."""
        if not self._piece and self._rest is not None:
            return await self._rest.into(view)
        if not self._piece:
            self._piece = memoryview(await anext(self._stream, b""))
            # Now that the server has asked for it, and the parser has seen where it begins, the rest may come without either.
            if self._take is not None:
                self._rest, self._take = self._take(), None
        count = min(len(view), len(self._piece))
        view[:count], self._piece = self._piece[:count], self._piece[count:]
        return count


async def received(
    request: Request, folder: Path, limit: int, pace: Pace, digest: str | None, room: Callable[[int], Awaitable[None]]
) -> tuple[Path, int]:
    """Write a request's body to a file; a part is written, and what was written reaches the disk, while the next is received.

    Args:
        folder: where the file is made.
        limit: most bytes that are taken.
        pace: how long it may take.
        digest: blake3 of the body, hex, or None where none was announced.
        room: called with the bytes there are so far before they are written.
    Returns:
        The file, which is the caller's to use or to remove, and its size.
    Raises:
        TooLarge, Unlike, Stalled, OSError: nothing is left behind.
    """
    path = folder / f"{secrets.token_hex(8)}.part"
    fd = await run_in_threadpool(os.open, path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    out = AtomicFile(fd, str(path))
    hashed = blake3()
    writing: asyncio.Task[None] | None = None

    def put(part: memoryview) -> None:
        out.write(part)
        if digest is not None:
            hashed.update(part)

    try:
        body, size, filled = Incoming(request), 0, 0
        announced = request.headers.get("content-length")
        length = min(GATHERED, limit, GATHERED if announced is None else int(announced)) or 1
        buffer, other = (memoryview(bytearray(length)) for _ in range(2))
        while True:
            count = await pace.next(body.into(buffer[filled:]), size)
            size, filled = size + count, filled + count
            if size > limit:
                raise TooLarge(f"more than {limit} bytes")
            if filled and (not count or filled == len(buffer)):
                await room(size)
                if writing is not None:
                    await writing
                writing = asyncio.ensure_future(run_in_threadpool(put, buffer[:filled]))
                buffer, other, filled = other, buffer, 0
            if not count:
                break
        if writing is not None:
            await writing
        if announced is not None and int(announced) != size:
            raise Unlike(f"{size} bytes where {announced} were announced")
        if digest is not None and hashed.hexdigest() != digest:
            raise Unlike(f"blake3 {hashed.hexdigest()} where {digest} was announced")
        await run_in_threadpool(out.settle)
        return path, size
    except BaseException:
        if writing is not None:
            await asyncio.wait([writing])
        os.unlink(path)
        raise
    finally:
        out.release()
        os.close(fd)


async def sent(objects: Objects, name: str, path: Path | None, begin: int, end: int) -> AsyncIterator[bytes]:
    """Bytes [begin, end) of an object.

    Args:
        path: of its file, where it is one.
    Raises:
        BrokenOff: the object went away or is not what was written, or the medium failed.
    """
    fd = -1
    try:
        if path is not None:
            fd = await run_in_threadpool(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        position = begin
        while position < end:
            length = min(PART, end - position)
            if fd >= 0:
                part = await run_in_threadpool(os.pread, fd, length, position)
            else:
                part = await run_in_threadpool(objects.read, name, position, length)
            if not part:
                raise BrokenOff(f"{name} ends at {position} of {end} bytes")
            yield part
            position += len(part)
    except (Missing, KVError, OSError) as error:
        raise BrokenOff(f"{name}: {error}") from error
    finally:
        if fd >= 0:
            os.close(fd)


class FileResponse(Response):
    """Bytes [begin, end) of a file, which go from it to the connection without passing through this process.

    Args:
        send: of the request's state.
        path: of the file; where it is gone, `Missing` is raised before anything is sent.
    """

    def __init__(self, send: Callable[[int, int, int], Awaitable[int]], path: Path, begin: int, end: int, *args: Any) -> None:
        super().__init__(None, *args)
        self._send, self._path, self._begin, self._end = send, path, begin, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            fd = await run_in_threadpool(os.open, self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise Missing(self._path.name) from None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            count = await self._send(fd, self._begin, self._end)
        except TimeoutError:
            raise BrokenOff("nothing of the answer was taken") from None
        except OSError as error:
            raise BrokenOff(str(error)) from error
        finally:
            os.close(fd)
        if count < self._end - self._begin:
            raise BrokenOff(f"the file ends at {self._begin + count} of {self._end} bytes")
        await send({"type": "http.response.body", "body": b"", BESIDE: count})


def span(header: str | None, size: int) -> tuple[int, int] | None:
    """[begin, end) that a Range header asks for, None for all; a header of any other form than one range of bytes is as none.

    Raises:
        ValueError: it asks for nothing that is there.
    """
    match = _RANGE.fullmatch(header.strip()) if header is not None else None
    if match is None or match[1] == match[2] == "":
        return None
    if match[1] == "":
        begin, end = max(0, size - int(match[2])), size
    else:
        begin, end = int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)
    if match[2] and match[1] and int(match[2]) < int(match[1]):
        return None
    if begin >= end:
        raise ValueError(f"range {match[0]} of {size} bytes")
    return begin, end
