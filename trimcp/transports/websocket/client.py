"""A WebSocket server as a target for clients. trio-websocket is imported when the first client connects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar, Final
from urllib.parse import SplitResult, urlsplit

import attrs
import trio

from trimcp.channel import CLIENT_MAX_MESSAGE, MessageChannel, require_trio
from trimcp.errors import ConnectionLost, LocalError
from trimcp.support.addresses import authority
from trimcp.support.bounds import checked
from trimcp.transports.targets import StreamServer, checked_url, link_to, shown_url, status_text
from trimcp.transports.trace import traced
from trimcp.transports.websocket.frames import KEEP_ALIVE, KeepAlive
from trimcp.transports.websocket.handshake import SUBPROTOCOL, HandshakeFailed, open_websocket
from trimcp.wire.jsonrpc import ErrorResponse, parse

_UNIX: Final = "ws+unix"
_PORTS: Final = {"ws": 80, "wss": 443, _UNIX: 0}
_LONGEST: Final = 200

_CHECK: Final = "check the URL (servers made with trimcp have their WebSocket at /ws)"
_ADVICE: Final = {
    400: f"what is at this path, or a proxy in between, knows no WebSocket; {_CHECK}",
    401: "it wants credentials that were not sent or are not valid; set headers={'Authorization': ...}",
    403: "it knows who asks and does not allow it, or does not accept this address as its own",
    404: f"there is nothing at this path; {_CHECK}",
    405: f"what is at this path is no WebSocket; {_CHECK}",
    426: "it wants to speak something else; check the URL",
    429: "too many ask; try again later",
    503: "it has too much to do, or is shutting down; try again later",
}


def _host(parts: SplitResult) -> str:
    """Return the value of the header Host."""
    if parts.scheme == _UNIX:
        return "localhost"
    return authority(parts.hostname or "", parts.port, _PORTS[parts.scheme])


@attrs.frozen(field_transformer=checked())
class WebSocketServer(StreamServer):
    """A server that is reached over WebSocket, in any revision.

    Attributes:
        url: "ws://host:port/path", with TLS "wss://...", on a Unix socket "ws+unix://%2Frun%2Fserver.sock/path".
        headers: sent with the handshake, such as `{"Authorization": "Bearer ..."}`. Never logged.
        uds: path of a Unix socket to connect to; the host of `url` is then sent but not connected to.
        ssl_context: for wss; None for one that trusts the system's certificates.
        timeout: seconds that connecting and the handshake may take together.
        keep_alive: pings and time limits for a silent server.
        trace: called with a line for every message, secrets masked; None for no trace.
    """

    _ports: ClassVar[Mapping[str, int]] = _PORTS
    _secure: ClassVar[str] = "wss"

    keep_alive: KeepAlive = attrs.field(default=KEEP_ALIVE, kw_only=True)

    def _check_url(self, url: str) -> None:
        parts = checked_url(url, _PORTS, "a WebSocket server's URL begins with ws:// or wss:// and names a host")
        if not (url.isascii() and url.isprintable() and " " not in url):
            raise LocalError("a URL has ASCII characters only; write others as %XX")
        if "@" in parts.netloc:
            raise LocalError("credentials in the URL are not sent; pass headers={'Authorization': ...}")

    def _check_headers(self, headers: Mapping[str, str]) -> None:
        for name in headers:
            if name == "host" or name.startswith("sec-websocket-"):
                raise LocalError(f"the header {name} belongs to the handshake and cannot be set")

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[MessageChannel]:
        """Connect and yield a channel; leaving closes the connection. The body's exception is raised without a group.

        Raises:
            ConnectionLost: connecting failed; the text says why and what to do.
        """
        require_trio()
        from trimcp.transports.websocket.channel import WebSocketChannel, running

        stream, early = await self.open()
        channel = WebSocketChannel(stream, CLIENT_MAX_MESSAGE, client=True, keep_alive=self.keep_alive, early=early)
        channel.link = link_to("WebSocket", self.socket)
        async with running(channel):
            yield channel if self.trace is None else traced(channel, self.trace)

    async def open(
        self, subprotocol: str = SUBPROTOCOL
    ) -> tuple[trio.SocketStream | trio.SSLStream[trio.SocketStream], bytes]:
        """Connect and do the handshake; return the stream and the bytes that arrived after the handshake.

        Args:
            subprotocol: the one to offer.

        Raises:
            ConnectionLost: connecting failed; the text says why and what to do.
        """
        parts = urlsplit(self.url)
        resource = parts._replace(scheme="", netloc="", path=parts.path or "/", fragment="").geturl()
        deadline = trio.current_time() + self.timeout
        stream = await self.dialed()
        try:
            with trio.move_on_at(deadline):
                return stream, await open_websocket(stream, _host(parts), resource, self.headers, subprotocol)
            raise HandshakeFailed(f"the handshake took more than {self.timeout:g} seconds")
        # also if cancelled: the caller never gets the stream, so it must be closed here
        except BaseException as failure:
            await trio.aclose_forcefully(stream)
            if isinstance(failure, HandshakeFailed):
                raise ConnectionLost(self._why_refused(failure)) from failure
            raise

    def _why_refused(self, failure: HandshakeFailed) -> str:
        """Return what the server's answer to the handshake means, and what to do about it."""
        head, _, body = failure.answer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = first.split(" ")[1] if first.startswith("HTTP/") and " " in first else ""
        text = f"no WebSocket at {shown_url(self.url)}: "
        if not (status.isascii() and status.isdigit() and len(status) == 3) or status == "101":
            return f"{text}{failure}"
        text += f"the server answered {status_text(int(status))}"
        error = parse(body) if body else None
        if isinstance(error, ErrorResponse):
            text += f" ({error.message[:_LONGEST]!r})"
        if status.startswith("3"):
            places = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("location:")]
            return f"{text} and points to {places[0] if places else 'nowhere'!r:.200}; connect to that if you trust it"
        return f"{text}; {_ADVICE.get(int(status), 'check the URL')}"
