"""Bytes to and from one address, as cheaply as Trio allows: plain sockets by hand, TLS through Trio's stream."""

from __future__ import annotations

import socket
import ssl
from typing import Final, Protocol

import attrs
import trio

from trimcp.errors import ConnectionLost
from trimcp.transports.targets import unreachable

__all__ = ["Address", "LoadLink"]

_READ: Final = 65_536
_TRUSTING: Final = "name what to trust in SSL_CERT_FILE"


class LoadLink(Protocol):
    """One connection. One task receives, one sends."""

    def send_nowait(self, data: bytes) -> int:
        """Send what the system takes now and return how many bytes that were. 0 also where it cannot be told.

        Raises:
            trio.BrokenResourceError: the connection broke.
        """
        ...

    async def send_all(self, data: bytes) -> None:
        """Send all of it. Cancelling may leave a part of it sent.

        Raises:
            trio.BrokenResourceError: the connection broke.
        """

    async def receive(self) -> bytes:
        """Wait for bytes and return them, b"" at the end. Cancelling it loses nothing.

        Raises:
            trio.BrokenResourceError: the connection broke.
        """
        ...

    def ended(self) -> bool:
        """Return whether the other side has closed it, or has sent what nobody asked for."""
        ...

    def close(self) -> None:
        """Close it at once."""


@attrs.define(eq=False)
class _SocketLink:
    """A socket of the standard library. It is read after a wait: what is asked for has seldom come before."""

    _socket: socket.socket

    def send_nowait(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise trio.BrokenResourceError(f"sending failed: {error}") from error

    async def send_all(self, data: bytes) -> None:
        sent = self.send_nowait(data)
        with memoryview(data) as view:
            while sent < len(data):
                await trio.lowlevel.wait_writable(self._socket)
                with view[sent:] as rest:
                    sent += self.send_nowait(rest)

    async def receive(self) -> bytes:
        while True:
            await trio.lowlevel.wait_readable(self._socket)
            try:
                return self._socket.recv(_READ)
            except BlockingIOError:
                continue
            except OSError as error:
                raise trio.BrokenResourceError(f"receiving failed: {error}") from error

    def ended(self) -> bool:
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()


@attrs.define(eq=False)
class _StreamLink:
    """Any Trio stream, TLS in practice; what waits beneath it is told to the stream only."""

    _stream: trio.SSLStream[trio.SocketStream]

    def send_nowait(self, data: bytes) -> int:
        return 0

    async def send_all(self, data: bytes) -> None:
        await self._stream.send_all(data)

    async def receive(self) -> bytes:
        return bytes(await self._stream.receive_some(_READ))

    def ended(self) -> bool:
        return False

    def close(self) -> None:
        self._stream.transport_stream.socket.close()


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
        """Connect.

        Args:
            patience: seconds it may take.
            context: whom to trust; None for whom this system trusts.

        Raises:
            ConnectionLost: there is no connection; the text says why.
        """
        stream: trio.SocketStream | None = None
        try:
            with trio.fail_after(patience):
                if self.path is not None:
                    stream = await trio.open_unix_socket(self.path)
                else:
                    stream = await trio.open_tcp_stream(self.host, self.port)
                if not self.tls:
                    return _SocketLink(_detached(stream))
                context = context or ssl.create_default_context()
                secure = trio.SSLStream(stream, context, server_hostname=self.host, https_compatible=True)
                await secure.do_handshake()
                return _StreamLink(secure)
        except BaseException as error:  # whatever it was, cancelled or refused, the socket must not stay
            if stream is not None:
                stream.socket.close()
            if isinstance(error, trio.TooSlowError):
                raise ConnectionLost(f"no connection within {patience:g} seconds") from None
            if isinstance(error, trio.BrokenResourceError | OSError):
                raise ConnectionLost(unreachable(error, _TRUSTING) or "the connection broke at once") from error
            raise


def _detached(stream: trio.SocketStream) -> socket.socket:
    """Return the socket of a stream, which is not to be used any more."""
    family, kind, protocol = stream.socket.family, stream.socket.type, stream.socket.proto
    plain = socket.socket(family, kind, protocol, fileno=stream.socket.detach())
    plain.setblocking(False)
    return plain
