"""Connections that do not get as far as a request: headers that come too slowly, or never end."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvtool.service.settings import Limits


def guarded(limits: Limits) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with limits on the time and size of what comes before a body; it has none of its own."""

    class Guarded(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _head = 0
        _in_body = False

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


REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large"}
