"""Byte connections to a server with as little overhead as Trio allows: plain sockets directly, TLS by Trio's stream."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeAlias

import attrs
import trio

from trimcp.bench.tally import Tally
from trimcp.transports.targets import dial

_READ: Final = 65_536
_TRUSTING: Final = "name what to trust in SSL_CERT_FILE"


@attrs.define(eq=False)
class SocketLink:
    """One connection over a socket of the standard library: one task receives, one sends.

    If the connection breaks, both raise `trio.BrokenResourceError`.
    """

    _socket: socket.socket

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Send without waiting, and return how many bytes the system took."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise trio.BrokenResourceError(f"sending failed: {error}") from error

    async def send_all(self, data: bytes) -> None:
        """Send all the data. If cancelled, a part of it may have been sent."""
        sent = self.send_nowait(data)
        with memoryview(data) as view:
            while sent < len(data):
                await trio.lowlevel.wait_writable(self._socket)
                with view[sent:] as rest:
                    sent += self.send_nowait(rest)

    async def receive(self) -> bytes:
        """Wait for bytes and return them, b"" at the end. Cancelling it loses nothing."""
        while True:  # wait first: data has seldom arrived already
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(_READ)
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError(f"receiving failed: {error}") from error

    def ended(self) -> bool:
        """Return whether the server has closed it, or has sent unexpected data."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        """Close it at once."""
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


@attrs.define(eq=False)
class TlsLink:
    """One connection with TLS; otherwise as `SocketLink`. Only Trio's stream knows whether the socket is ready."""

    _stream: trio.SSLStream[trio.SocketStream]

    def send_nowait(self, data: bytes) -> int:
        """Send nothing: it is unknown how much the system would take."""
        return 0

    async def send_all(self, data: bytes) -> None:
        """Send all the data."""
        await self._stream.send_all(data)

    async def receive(self) -> bytes:
        """Wait for bytes and return them, b"" at the end."""
        return bytes(await self._stream.receive_some(_READ))

    def ended(self) -> bool:
        """Return False: it is unknown."""
        return False

    def close(self) -> None:
        """Close it at once."""
        self._stream.transport_stream.socket.close()


LoadLink: TypeAlias = SocketLink | TlsLink


def linked(stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> LoadLink:
    """Return a link over a stream; do not use the stream afterwards."""
    if isinstance(stream, trio.SSLStream):
        return TlsLink(stream)
    family, kind, protocol = stream.socket.family, stream.socket.type, stream.socket.proto
    plain = socket.socket(family, kind, protocol, fileno=stream.socket.detach())
    plain.setblocking(False)
    return SocketLink(plain)


@attrs.frozen
class Address:
    """Where a server listens.

    Attributes:
        host, port: from its URL.
        tls: use TLS.
        path: the path of a Unix socket to connect to instead of host and port, or None.
    """

    host: str
    port: int
    tls: bool = False
    path: str | None = None

    async def dial(self, patience: float, context: ssl.SSLContext | None = None) -> LoadLink:
        """Connect within `patience` seconds; `context` has the certificates to trust, None for the system's.

        Raises:
            ConnectionLost: connecting failed; the text has the reason.
        """
        tls = (context or ssl.create_default_context()) if self.tls else None
        stream = await dial(self.host, self.port, path=self.path, tls=tls, timeout=patience, trusting=_TRUSTING)
        return linked(stream)


@attrs.define(eq=False)
class Writer:
    """Sends without waiting as much as the system takes, and the rest in `run`, so that the reader never waits.

    Its buffer is bounded by the number of concurrent calls.

    Args:
        send_nowait: sends without waiting and returns how many bytes the system took; None if not supported.
        send_all: sends everything.
        tally: counts the bytes.
    """

    _send_nowait: Callable[[bytes], int] | None
    _send_all: Callable[[bytes], Awaitable[object]]
    _tally: Tally
    _waiting: list[bytes] = attrs.field(init=False, factory=list)
    _is_busy: bool = attrs.field(init=False, default=False)
    _more: trio.Event = attrs.field(init=False, factory=trio.Event)

    def write(self, data: bytes) -> None:
        """Send without waiting, and buffer the rest. Does not raise: if the connection broke, `run` does."""
        self._tally.bytes_out += len(data)
        if not self._is_busy and self._send_nowait is not None:
            sent = 0
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                sent = self._send_nowait(data)
            if sent == len(data):
                return
            data = data[sent:]
        self._is_busy = True
        self._waiting.append(data)
        self._more.set()

    async def run(self) -> None:
        """Send what `write` has buffered, until cancelled. Raises as `send_all` does."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                await self._send_all(b"".join(waiting))
            self._is_busy = False
