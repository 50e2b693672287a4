"""One connection of HTTP/1.1 to a server: how it is opened, and one request and its reply after another.

Whoever has a connection reads it: a pool in a task of the connection's own, `trimcp bench` in the task that calls.
"""

from __future__ import annotations

import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ClassVar, Final, TypeAlias
from urllib.parse import urlsplit

import attrs
import trio

from trimcp.support.addresses import PORTS
from trimcp.transports.descriptors import READ_SIZE, AnySocket, socket_under
from trimcp.transports.http.h1.replies import ReplyParser, portions
from trimcp.transports.http.h1.wires import Wire, wire_over
from trimcp.transports.targets import dial

# The system detects within two minutes that the peer of a silent connection is gone.
_KEEP_ALIVE: Final = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))

Dial: TypeAlias = Callable[[], Awaitable[trio.abc.Stream]]
"""Opens a byte stream to a server within its time limit, or raises `ConnectionLost`."""


@attrs.define(eq=False)
class ClientConnection:
    """One connection, for one request at a time. One task opens, reads and closes it."""

    # whether a read of many tiny chunks is parsed in several turns of the event loop; see `portions`
    in_turns: ClassVar[bool] = True
    # the reply to the last request, as far as it was received
    reply: ReplyParser = attrs.field(init=False, factory=ReplyParser)
    _wire: Wire | None = attrs.field(init=False, default=None)
    _parts: list[bytes] | None = attrs.field(init=False, default=None)  # of the last read, not yet parsed, last first

    async def open(self, dial: Dial) -> None:
        """Connect, also again after `close`. Raises ConnectionLost: connecting failed."""
        self._wire = wire_over(await dial())
        self.reply, self._parts = ReplyParser(), None

    @property
    def socket(self) -> AnySocket | None:
        """Its socket, for the functions of `descriptors`; None without one."""
        return None if self._wire is None else self._wire.socket

    def is_quiet(self) -> bool:
        """Return whether nothing has arrived that is not read, as far as that is known."""
        return self._wire is not None and not self._parts and self._wire.is_quiet()

    @property
    def at_once(self) -> bool:
        """Whether it can write a request at once, and knows then of all that has arrived."""
        return self._wire is not None and self._wire.at_once

    async def receive(self) -> int:
        """Wait for bytes, parse them, and return how many; 0 when the server has closed. Cancelling loses nothing.

        Raises UnreadableReply: they are no HTTP/1.1, or too many.
        """
        if self._parts:
            await trio.lowlevel.checkpoint()
            return self._feed_next(self._parts)
        assert self._wire is not None
        while (data := await self._wire.read(READ_SIZE)) is None:
            pass
        if not data:
            self.reply.end()
            return 0
        if self.in_turns and (parts := portions(data)) is not None:
            self._parts = list(parts)[::-1]
            return self._feed_next(self._parts)
        self.reply.feed(data)
        return len(data)

    def _feed_next(self, parts: list[bytes]) -> int:
        """Parse the next part of a read; the last one in the list."""
        data = parts.pop()
        self.reply.feed(data)
        if parts and self.reply.complete:
            parts.clear()
            self.reply.keeps = False  # the reply is whole; what follows was asked by nobody
        return len(data)

    async def close(self) -> None:
        """Close it, if it is open, within a second. No task may read or write any more."""
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.close()


def dialing(url: str, uds: str | None, timeout: float, trusting: str, tls: ssl.SSLContext | None = None) -> Dial:
    """Return what opens streams to a server, whose URL has the form of `normal_url`; see `dial`.

    `tls`: what to trust at an https URL; None for what the system does.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
    # Without TLS no certificates are loaded: loading them takes longer than all other steps.
    context = (tls or tls_context()) if parts.scheme == "https" else None

    async def open() -> trio.abc.Stream:
        stream = await dial(host, port, path=uds, tls=context, timeout=timeout, trusting=trusting)
        keep_alive(stream)
        return stream

    return open


def tls_context() -> ssl.SSLContext:
    """Return a context that trusts what httpx2 does: the system's certificates, or those that SSL_CERT_FILE names."""
    paths = ssl.get_default_verify_paths()
    if sys.platform in ("win32", "darwin") or not (paths.cafile or paths.capath):
        import httpx2  # which knows the stores of other systems

        context: ssl.SSLContext = httpx2.create_ssl_context()
    else:
        context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def keep_alive(stream: trio.abc.Stream) -> None:
    """Let the system notice that the peer of a connection is gone."""
    sock = socket_under(stream)
    if sock is not None:
        with suppress(OSError):  # a Unix socket, or closed
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE:
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
