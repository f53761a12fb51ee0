"""Connections: headers that come too slowly, or never end; bodies that are received where they are wanted, and sent from a file."""

import asyncio
import os
import select
import time
from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvtool.service.settings import Limits

REST = "rest"  # in a request's state: gives the rest of its body as a `Rest`, or None
SEND = "send"  # in a request's state where a file may be sent without its bytes passing through here: see `Guarded._send`
TURN = 0.1  # seconds that a thread sends for at a time
SOON = 0.005  # seconds that it waits for its reader meanwhile: longer than that the loop does, for any number of readers


def guarded(limits: Limits) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with limits on the time and size of what comes before a body; it has none of its own."""

    class Guarded(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _head = 0
        _in_body = False
        _left = 0  # of the body

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._wait()

        def connection_lost(self, error: Exception | None) -> None:
            self._unwait()
            super().connection_lost(error)

        def data_received(self, data: bytes) -> None:
            in_body = self._in_body
            super().data_received(data)
            # What still came of a body that was answered early is no head.
            if self._timer is not None and not in_body and not self._in_body:
                self._head += len(data)
                if self._head > limits.head_bytes:
                    self._refuse(431, f"headers of more than {limits.head_bytes} bytes")

        def on_headers_complete(self) -> None:
            self._unwait()
            self._in_body = True
            super().on_headers_complete()
            # The parser has made sure that there is one length, or none.
            self._left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
            self.scope["state"][REST] = partial(self._rest, self.cycle)
            if hasattr(os, "sendfile") and self.transport.get_extra_info("sslcontext") is None:
                self.scope["state"][SEND] = partial(self._send, self.cycle)

        def on_body(self, body: bytes) -> None:
            self._left -= len(body)
            super().on_body(body)

        def _rest(self, cycle: RequestResponseCycle) -> "Rest | None":
            """What has not come yet of a body of known length; the parser sees nothing of it."""
            if cycle is not self.cycle or self._left <= 0 or cycle.body or cycle.disconnected or self.parser.should_upgrade():
                return None
            return Rest(self, self._left)

        async def _send(self, cycle: RequestResponseCycle, fd: int, begin: int, end: int) -> int:
            """Send bytes [begin, end) of a file as the body of an answer whose head is under way; how many there were.

            Raises:
                ClientDisconnect: the other side went away.
                TimeoutError: it took nothing for as long as a connection may stand idle.
                OSError: the file cannot be read.
            """
            own = -1  # of this connection whatever else becomes of it: another one's must not get these bytes
            try:
                async with asyncio.timeout(limits.idle_seconds):
                    await asyncio.sleep(0)  # the loop's next turn sends the head, unless the reader leaves earlier bytes
                    while self.transport.get_write_buffer_size() and not cycle.disconnected:
                        await asyncio.sleep(SOON)
                if cycle.disconnected or self.transport.is_closing():
                    raise ClientDisconnect
                own, position = os.dup(self.transport.get_extra_info("socket").fileno()), begin
                while position < end:
                    count, ended = await run_in_threadpool(sent_now, own, fd, position, end)
                    position += count
                    if ended:
                        break
                    if position < end:
                        await self._writable(own)
            except ConnectionError:
                raise ClientDisconnect from None
            finally:
                if own >= 0:
                    os.close(own)
            cycle.expected_content_length -= position - begin
            return position - begin

        async def _writable(self, fd: int) -> None:
            ready = asyncio.Event()
            self.loop.add_writer(fd, ready.set)
            try:
                async with asyncio.timeout(limits.idle_seconds):
                    await ready.wait()
            finally:
                self.loop.remove_writer(fd)

        def on_message_complete(self) -> None:
            self._in_body = False
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # Also where the rest of a body that was answered early keeps coming.
            if not self.pipeline:
                self._wait()

        def _wait(self) -> None:
            self._unwait()
            self._timer = self.loop.call_later(limits.head_seconds, self._late)

        def _unwait(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._head = None, 0

        def _late(self) -> None:
            if self._head and not self._in_body:
                self._refuse(408, f"headers took more than {limits.head_seconds:g} s")
            else:
                self.transport.close()

        def _refuse(self, status: int, what: str) -> None:
            self._unwait()
            if not self.transport.is_closing():
                head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: text/plain\r\nContent-Length: {len(what)}\r\n"
                self.transport.write(f"{head}Connection: close\r\n\r\n{what}".encode())
                self.transport.close()

    return Guarded


def sent_now(sock: int, fd: int, begin: int, end: int) -> tuple[int, bool]:
    """What a socket takes of bytes [begin, end) of a file without a long wait, and whether the file ended before them."""
    position, poll, until = begin, select.poll(), time.monotonic() + TURN
    poll.register(sock, select.POLLOUT)
    while position < end and time.monotonic() < until:
        try:
            count = os.sendfile(sock, fd, position, end - position)
        except BlockingIOError:
            if not poll.poll(1000 * SOON):
                break
            continue
        if not count:
            return position - begin, True
        position += count
    return position - begin, False


class Rest(asyncio.BufferedProtocol):
    """The rest of a request's body, received into the memory of who reads it: the parser would copy each byte three times.

    It stands in for the connection's protocol until the body has ended; of a body that nobody reads to its end the bytes are dropped.

    Args:
        outer: the connection's protocol.
        left: bytes that have not come.
    """

    def __init__(self, outer: HttpToolsProtocol, left: int) -> None:
        self._outer, self._cycle, self._left = outer, outer.cycle, left
        self._view: memoryview | None = None
        self._waiter: asyncio.Future[int] | None = None
        self._become(self)

    def _become(self, protocol: asyncio.BaseProtocol) -> None:
        # Which kind of protocol it reads for a transport asks when reading begins.
        self._outer.flow.pause_reading()
        self._outer.transport.set_protocol(protocol)

    async def into(self, view: memoryview) -> int:
        """Fill the beginning of `view`; the bytes, 0 at the end of the body.

        Raises:
            ClientDisconnect: the other side went away before that.
        """
        if not self._left:
            return 0
        if self._cycle.disconnected:
            raise ClientDisconnect
        self._view, self._waiter = view[: self._left], self._outer.loop.create_future()
        self._outer.flow.resume_reading()
        try:
            return await self._waiter
        finally:
            self._view = self._waiter = None

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view or memoryview(bytearray(min(self._left, 1 << 16) or 1 << 16))

    def buffer_updated(self, nbytes: int) -> None:
        if not self._left:
            return
        self._left -= nbytes
        if self._waiter is not None and not self._waiter.done():
            self._outer.flow.pause_reading()
            self._view = None
            self._waiter.set_result(nbytes)
        if not self._left:
            self._end()

    def _end(self) -> None:
        # What follows the last request of a connection is still dropped.
        if self._cycle.keep_alive:
            # The one so far waits for a body. This one is made as uvicorn makes it.
            self._outer.parser = type(self._outer.parser)(self._outer)
            self._outer.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._become(self._outer)
            self._outer.flow.resume_reading()
        self._outer.on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._outer.connection_lost(exc)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ClientDisconnect())

    def eof_received(self) -> None:
        self._outer.eof_received()

    def pause_writing(self) -> None:
        self._outer.pause_writing()

    def resume_writing(self) -> None:
        self._outer.resume_writing()


REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large"}
