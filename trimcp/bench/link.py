"""Bytes to and from a server, as cheaply as Trio allows: plain sockets by hand, TLS through Trio's stream."""

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

    Where the connection broke they get a `trio.BrokenResourceError`.
    """

    _socket: socket.socket

    def send_nowait(self, data: bytes | memoryview) -> int:
        """Send what the system takes now and return how many bytes that were."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise trio.BrokenResourceError(f"sending failed: {error}") from error

    async def send_all(self, data: bytes) -> None:
        """Send all of it. Cancelling may leave a part of it sent."""
        sent = self.send_nowait(data)
        with memoryview(data) as view:
            while sent < len(data):
                await trio.lowlevel.wait_writable(self._socket)
                with view[sent:] as rest:
                    sent += self.send_nowait(rest)

    async def receive(self) -> bytes:
        """Wait for bytes and return them, b"" at the end. Cancelling it loses nothing."""
        while True:  # after a wait: what is asked for has seldom come before
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(_READ)
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError(f"receiving failed: {error}") from error

    def ended(self) -> bool:
        """Return whether the other side has closed it, or has sent what nobody asked for."""
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
    """One connection with TLS, as `SocketLink` is one without: what waits beneath it is told to the stream only."""

    _stream: trio.SSLStream[trio.SocketStream]

    def send_nowait(self, data: bytes) -> int:
        """Send nothing: it cannot be told how much the system takes."""
        return 0

    async def send_all(self, data: bytes) -> None:
        """Send all of it."""
        await self._stream.send_all(data)

    async def receive(self) -> bytes:
        """Wait for bytes and return them, b"" at the end."""
        return bytes(await self._stream.receive_some(_READ))

    def ended(self) -> bool:
        """Return False: it cannot be told."""
        return False

    def close(self) -> None:
        """Close it at once."""
        self._stream.transport_stream.socket.close()


LoadLink: TypeAlias = SocketLink | TlsLink


def linked(stream: trio.SocketStream | trio.SSLStream[trio.SocketStream]) -> LoadLink:
    """Return the link over a stream, which is not to be used any more."""
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
        host, port: of its URL.
        tls: speak TLS.
        path: of the Unix socket to connect to in place of host and port, or None.
    """

    host: str
    port: int
    tls: bool = False
    path: str | None = None

    async def dial(self, patience: float, context: ssl.SSLContext | None = None) -> LoadLink:
        """Connect within so many seconds; `context` is what to trust, None for what this system trusts.

        Raises:
            ConnectionLost: there is no connection; the text says why.
        """
        tls = (context or ssl.create_default_context()) if self.tls else None
        stream = await dial(self.host, self.port, path=self.path, tls=tls, timeout=patience, trusting=_TRUSTING)
        return linked(stream)


@attrs.define(eq=False)
class Writer:
    """Sends what the system takes at once, and the rest as soon as it takes more, without making the reader wait.

    What waits in it is bounded by the calls that may be under way.

    Args:
        send_nowait: sends what the system takes now and returns how many bytes that were; None where that cannot be.
        send_all: sends everything.
        tally: where bytes are counted.
    """

    _send_nowait: Callable[[bytes], int] | None
    _send_all: Callable[[bytes], Awaitable[object]]
    _tally: Tally
    _waiting: list[bytes] = attrs.field(init=False, factory=list)
    _is_busy: bool = attrs.field(init=False, default=False)
    _more: trio.Event = attrs.field(init=False, factory=trio.Event)

    def write(self, data: bytes) -> None:
        """Send now what can be sent now. It does not raise: where the connection broke, `run` does."""
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
        """Send what `write` left over, until it is cancelled. Raises what `send_all` does."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                await self._send_all(b"".join(waiting))
            self._is_busy = False
