"""An HTTP server as a target for clients. What HTTP needs is imported when the first client connects."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import attrs
import trio

from trimcp.channel import MessageChannel, require_trio
from trimcp.errors import LocalError
from trimcp.support.bounds import checked
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.client.policy import Backoff, Mode, Timeouts
from trimcp.transports.targets import checked_headers, checked_url, link_to, masked_url, socket_path
from trimcp.transports.trace import Write, traced

if TYPE_CHECKING:
    import httpx2

    from trimcp.transports.http.client.exchanges import ClientAuth, Http

_UNIX: Final = "http+unix"


def _check_url(instance: object, attribute: Any, url: str) -> None:
    checked_url(url, ("http", "https", _UNIX), "a server's URL begins with http:// or https:// and names a host")


def _check_mode(instance: object, attribute: Any, mode: str) -> None:
    if mode not in ("auto", "streamable", "sse"):
        raise LocalError(f'mode is "auto", "streamable" or "sse", not {mode!r:.60}')


@attrs.frozen(field_transformer=checked(zero=("retries",)))
class HttpServer:
    """A server that is reached over HTTP: Streamable HTTP in every revision, or the HTTP+SSE of 2024-11-05.

    Nothing is sent to another origin than that of `url`: neither redirects nor URLs sent by the server are followed
    there.

    Attributes:
        url: the endpoint, "http://...", "https://..." or "http+unix://%2Frun%2Fserver.sock/mcp".
        headers: sent with every request, such as `{"Authorization": "Bearer ..."}`. Never logged.
        uds: path of a Unix socket to connect to; the host of `url` is then sent but not connected to.
        mode: which of the two transports to use. "auto" begins with Streamable HTTP and falls back to HTTP+SSE when the
            server supports neither it nor the handshake.
        auth: obtains an access token if the server requires one, such as `trimcp.auth.OAuth()`; None sends only
            `headers`.
        client: an `httpx2.AsyncClient` of your own, with its proxies, certificates and authentication; it is not
            closed. Its limits must allow a connection for each call in progress, and its timeouts are not used. It
            should use HTTP/1.1: over HTTP/2 httpx2 does not tell the server that a call was cancelled.
        retries: how often a request is sent again. Only safe ones are: no byte was sent, or the method only reads
            (lists, `resources/read`, `prompts/get`, `completion/complete`, `server/discover`, `ping`).
        retry_calls: send `tools/call` again, too, although it may then be carried out twice.
        max_posts: requests in progress at a time; more wait. Subscriptions do not count.
        timeouts: how long the steps of an exchange may take.
        trace: called with a line for every message, secrets masked; None for no trace.
        random: varies the pauses between attempts.
    """

    url: str = attrs.field(validator=_check_url, repr=lambda url: repr(masked_url(url)))
    headers: Mapping[str, str] = attrs.field(default=None, converter=checked_headers, repr=False)
    uds: str | None = None
    mode: Mode = attrs.field(default="auto", validator=_check_mode)
    client: httpx2.AsyncClient | None = attrs.field(default=None, repr=False)
    auth: ClientAuth | None = attrs.field(default=None, repr=False, kw_only=True)
    retries: int = attrs.field(default=3, kw_only=True)
    retry_calls: bool = attrs.field(default=False, kw_only=True)
    max_posts: int = attrs.field(default=256, kw_only=True)
    timeouts: Timeouts = attrs.field(factory=Timeouts, kw_only=True)
    trace: Write | None = attrs.field(default=None, kw_only=True, repr=False)
    random: random.Random = attrs.field(factory=random.Random, kw_only=True, repr=False)

    @property
    def key(self) -> object:
        """A key that is equal for the same server, under which its era is remembered."""
        return ("http", self.url, self.uds, self.mode)

    @property
    def socket(self) -> str | None:
        """The path of the Unix socket to connect to, or None for TCP."""
        return socket_path(self.url, self.uds)

    @property
    def address(self) -> str:
        """The URL to send requests to; for a Unix socket its host is this machine."""
        parts = urlsplit(self.url)
        if parts.scheme == _UNIX:
            parts = parts._replace(scheme="http", netloc="localhost")
        return parts._replace(path=parts.path or "/", fragment="").geturl()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[MessageChannel]:
        """Yield a channel to the server; nothing is sent before its first message (with `mode` "sse", its GET is).

        Leaving cancels requests in progress and ends the session, within `timeouts.close`. The body's exception is
        raised without a group.
        """
        require_trio()
        from trimcp.transports.http.client.channel import HttpChannel

        async def run(task_status: trio.TaskStatus[HttpChannel]) -> None:
            # The channel ends its tasks when it is closed, so the closing task must not be one of them.
            async with trio.open_nursery() as own:
                backoff = Backoff(self.retries, self.random)
                channel = HttpChannel(http, own, self.mode, self.timeouts, backoff, self.retry_calls, self.max_posts)
                channel.link = link_to("HTTP+SSE" if self.mode == "sse" else "HTTP", self.socket)
                task_status.started(channel)
                try:
                    await trio.sleep_forever()
                finally:
                    channel.end()

        async with self.exchanges() as http, open_service_nursery() as nursery:
            channel: HttpChannel = await nursery.start(run)
            try:
                async with channel:
                    yield channel if self.trace is None else traced(channel, self.trace)
            finally:
                channel.let_go()

    @asynccontextmanager
    async def exchanges(self) -> AsyncIterator[Http]:
        """Yield HTTP exchanges with the server, without a channel."""
        from trimcp.transports.http.client.exchanges import opened_http

        authorized = nullcontext() if self.auth is None else self.auth.connected(self.address)
        async with (
            authorized as authorizer,
            opened_http(
                self.address, self.headers, self.timeouts, self.socket, self.client, authorizer, self.max_posts
            ) as http,
        ):
            yield http
