"""A gRPC server as a target for clients: MCP through one call, on a connection of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar, Final
from urllib.parse import SplitResult, urlsplit

import attrs
import trio

from trimcp.channel import CLIENT_MAX_MESSAGE, MessageChannel, require_trio
from trimcp.errors import ConnectionLost, LocalError
from trimcp.framing.grpc import GrpcStatus
from trimcp.support.addresses import host_port
from trimcp.support.bounds import checked
from trimcp.transports.grpc.calls import WINDOW, CallFailed
from trimcp.transports.grpc.channel import EXCHANGE, GrpcChannel
from trimcp.transports.grpc.http2 import Http2Client, running_http2
from trimcp.transports.targets import StreamServer, checked_url, link_to, shown_url
from trimcp.transports.trace import traced
from trimcp.transports.websocket.frames import KEEP_ALIVE, KeepAlive

_UNIX: Final = "grpc+unix"
_PORTS: Final = {"grpc": 80, "grpcs": 443, _UNIX: 0}

_ADVICE: Final = {
    GrpcStatus.UNAUTHENTICATED: "it wants credentials that were not sent or are not valid; "
    "set headers={'authorization': ...}",
    GrpcStatus.PERMISSION_DENIED: "it knows who asks and does not allow it, or does not accept this address as its own",
    GrpcStatus.UNIMPLEMENTED: "there is no MCP behind this address; check the URL",
    GrpcStatus.RESOURCE_EXHAUSTED: "too many ask; try again later",
    GrpcStatus.UNAVAILABLE: "it has too much to do, is shutting down, or is no gRPC server",
}


def _authority(parts: SplitResult) -> str:
    if parts.scheme == _UNIX:
        return "localhost"
    return host_port(parts.hostname or "", parts.port or _PORTS[parts.scheme])


@attrs.frozen(field_transformer=checked())
class GrpcServer(StreamServer):
    """A server that is reached through gRPC, in any revision.

    Attributes:
        url: "grpc://host:port", with TLS "grpcs://...", on a Unix socket "grpc+unix://%2Frun%2Fserver.sock".
        headers: sent with each call as metadata, such as `{"authorization": "Bearer ..."}`. Never logged.
        uds: path of a Unix socket to connect to; the host of `url` is then sent but not connected to.
        ssl_context: for grpcs; None for one that trusts the system's certificates. Its protocols (ALPN) are set here.
        timeout: seconds that connecting and the server's first answer may take together.
        keep_alive: pings and time limits for a silent server. Servers of other make may want fewer pings.
        trace: called with a line for every message, secrets masked; None for no trace.
    """

    _ports: ClassVar[Mapping[str, int]] = _PORTS
    _secure: ClassVar[str] = "grpcs"

    keep_alive: KeepAlive = attrs.field(default=KEEP_ALIVE, kw_only=True)

    def _check_url(self, url: str) -> None:
        parts = checked_url(url, _PORTS, "a gRPC server's URL begins with grpc:// or grpcs:// and names a host")
        if "@" in parts.netloc and parts.scheme != _UNIX:
            raise LocalError("credentials in the URL are not sent; pass headers={'authorization': ...}")
        if parts.path not in ("", "/") or parts.query:
            raise LocalError("a gRPC server has no path: write grpc://host:port")

    def _check_headers(self, headers: Mapping[str, str]) -> None:
        for name in headers:
            if name.startswith("grpc-") or name in ("te", "host", "content-type", "user-agent", "connection"):
                raise LocalError(f"the header {name} belongs to gRPC and cannot be set")

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[MessageChannel]:
        """Connect and yield a channel; leaving closes the connection. The body's exception is raised without a group.

        Raises:
            ConnectionLost: connecting failed; the text says why and what to do.
        """
        require_trio()
        deadline = trio.current_time() + self.timeout
        async with self.open() as connection, connection.call(EXCHANGE, self.headers.items()) as call:
            try:
                with trio.fail_at(deadline):
                    await call.begun()
            except CallFailed as failure:
                raise ConnectionLost(self._why_refused(failure)) from failure
            except trio.TooSlowError:
                text = f"no answer of {shown_url(self.url)} within {self.timeout:g} seconds"
                raise ConnectionLost(text) from None
            async with GrpcChannel(call, CLIENT_MAX_MESSAGE, window=WINDOW) as channel:
                channel.link = link_to("gRPC", self.socket)
                yield channel if self.trace is None else traced(channel, self.trace)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Http2Client]:
        """Connect and yield the connection, for calls of any kind; leaving closes it.

        Raises:
            ConnectionLost: connecting failed; the text says why and what to do.
        """
        stream = await self.dialed(["h2"])
        secure = isinstance(stream, trio.SSLStream)
        if isinstance(stream, trio.SSLStream) and stream.selected_alpn_protocol() != "h2":
            await trio.aclose_forcefully(stream)
            raise ConnectionLost(f"{shown_url(self.url)} does not speak HTTP/2 on this port; check the URL")
        client = Http2Client(stream, _authority(urlsplit(self.url)), secure, self.keep_alive)
        async with running_http2(client):
            yield client

    def _why_refused(self, failure: CallFailed) -> str:
        advice = _ADVICE.get(failure.status, "check the URL")
        return f"no MCP at {shown_url(self.url)}: the server answered {failure} ({advice})"
