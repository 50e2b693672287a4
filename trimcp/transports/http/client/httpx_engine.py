"""The engine over httpx2: for proxies, and for a client that the user made, with all that it can do."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

import attrs
import httpx2
import trio

from trimcp.channel import HttpClientStatistics
from trimcp.transports.descriptors import AnySocket
from trimcp.transports.http.client.cookies import BoundedCookieJar
from trimcp.transports.http.client.engine import TRUSTING, ClientRequest, ExchangeBroken
from trimcp.transports.http.client.policy import Timeouts
from trimcp.transports.targets import origin, unreachable

_LONGEST: Final = 200
_KEPT: Final = 4.0  # as for connections of our own
_KEPT_CONNECTIONS: Final = 64
_PIECES: Final = 16  # pieces per turn of the event loop: one read can bring ten thousand chunks of one byte
_READ_AHEAD: Final = 65_536  # bytes that httpcore2 reads ahead, and so the largest number of pieces

_ours: contextvars.ContextVar[bool] = contextvars.ContextVar("trimcp_http", default=False)


def proxied_client(url: str) -> httpx2.AsyncClient:
    """Return a client that uses the proxies of the environment."""
    # Unbounded here: a call may need another request to be answered. The senders bound the number of requests.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=_KEPT_CONNECTIONS, keepalive_expiry=_KEPT)
    # Without TLS no certificates are loaded: loading them takes longer than all other steps.
    return httpx2.AsyncClient(verify=url.startswith("https:"), limits=limits, cookies=BoundedCookieJar())


@attrs.define(eq=False)
class HttpxEngine:
    """An `HttpEngine` over an `httpx2.AsyncClient`, which the caller closes."""

    _client: httpx2.AsyncClient
    _timeout: httpx2.Timeout
    # name and password of the URL, or None: then the client's own authentication is used
    _auth: tuple[str, str] | None = attrs.field(default=None, repr=False)
    _in_use: int = attrs.field(init=False, default=0)

    @staticmethod
    def of(client: httpx2.AsyncClient, timeouts: Timeouts, auth: tuple[str, str] | None) -> HttpxEngine:
        """Return an engine with these timeouts."""
        timeout = httpx2.Timeout(connect=timeouts.connect, write=timeouts.write, read=timeouts.silence, pool=None)
        return HttpxEngine(client, timeout, auth)

    async def send(self, request: ClientRequest) -> HttpxReply:
        url, written = request.url, request.written

        async def trace(name: str, info: object) -> None:
            if written is not None and name.endswith("send_request_body.complete"):
                written()

        self._in_use += 1
        begun = False
        try:
            with quiet_logs(), converted(url):
                built = self._client.build_request(
                    request.method,
                    url,
                    headers=request.headers,
                    content=request.content,
                    timeout=self._timeout,
                    extensions={} if written is None else {"trace": trace},
                )
                auth = httpx2.USE_CLIENT_DEFAULT if self._auth is None else httpx2.BasicAuth(*self._auth)
                response = await self._client.send(built, stream=True, auth=auth, follow_redirects=False)
            begun = True
            return HttpxReply(response, url, self._over)
        finally:
            if not begun:
                self._over()

    def statistics(self) -> HttpClientStatistics:
        """See `HttpEngine.statistics`. How many connections there are, only the client knows."""
        return HttpClientStatistics("httpx2", None, None, self._in_use)

    def _over(self) -> None:
        self._in_use -= 1


@attrs.define(eq=False)
class HttpxReply:
    """A `RawReply` of httpx2."""

    _response: httpx2.Response
    _url: str
    _over: Callable[[], None]
    status: int = attrs.field(init=False)
    headers: Mapping[str, str] = attrs.field(init=False)
    http2: bool = attrs.field(init=False)
    _pieces: _Pieces | None = attrs.field(init=False, default=None)
    _abandoned: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        response = self._response
        self.status, self.http2 = response.status_code, response.http_version == "HTTP/2"
        self.headers = {name.lower(): value for name, value in response.headers.items()}

    @property
    def socket(self) -> AnySocket | None:
        stream = self._response.extensions.get("network_stream")
        found = None if stream is None else stream.get_extra_info("socket")
        return found if isinstance(found, trio.socket.SocketType) else None

    def pieces(self) -> AsyncIterator[bytes]:
        if self._pieces is None:
            self._pieces = _Pieces(self._response.aiter_raw(), self._url)
        return self._pieces

    async def abandon(self) -> None:
        if not self._abandoned:
            self._abandoned = True
            self._over()
            with quiet_logs():
                if self._pieces is not None:
                    await _abandon(self._pieces.raw)
                await self._response.aclose()


@attrs.define(eq=False)
class _Pieces:
    """A body, piece by piece. Not a generator, because closing one costs more."""

    raw: AsyncIterator[bytes]
    _url: str
    _left: int = attrs.field(init=False, default=_PIECES)

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> bytes:
        self._left -= 1
        if not self._left:
            self._left = _PIECES
            await trio.lowlevel.checkpoint()  # httpx2 has none between the chunks of one read
        with quiet_logs(), converted(self._url):
            return await anext(self.raw)


async def _abandon(raw: AsyncIterator[bytes]) -> None:
    """Close a body that may not have been read to its end.

    httpx2 does not close its innermost generator when the outer ones are closed, and Trio warns of that. A cancellation
    closes all of them at the next read that waits, after the few bytes that were read ahead.
    """
    with trio.CancelScope() as scope, suppress(httpx2.HTTPError, httpx2.StreamError):
        scope.cancel(reason="the rest of the reply is of no interest")
        pieces = 0
        async for _ in raw:
            pieces += 1
            if pieces > _READ_AHEAD:
                break
            if not pieces % _PIECES:
                await trio.lowlevel.cancel_shielded_checkpoint()


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Log nothing of ours that httpx2 says of requests and replies, which contain session ids."""
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)


@contextmanager
def converted(url: str) -> Iterator[None]:
    """Convert exceptions of httpx2 into `ExchangeBroken`."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
        why = unreachable(error, TRUSTING) or _reason(error)
        raise ExchangeBroken(f"cannot connect to {origin(url)}: {why}", nothing_sent=True) from error
    except httpx2.ReadTimeout as error:
        raise ExchangeBroken(f"{origin(url)} was silent for too long") from error
    except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL) as error:
        raise ExchangeBroken(f"the connection to {origin(url)} broke: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return why an exchange failed. Bytes of the server that the library quotes are cut and escaped."""
    told: BaseException | None = error
    while told is not None and not str(told):
        told = told.__cause__ or told.__context__  # the error of TLS is some causes down
    text = type(error).__name__ if told is None else str(told)
    return text[:_LONGEST].encode("ascii", "backslashreplace").decode().replace("\n", " ")


class _OwnRequestsFilter(logging.Filter):
    """Drops what httpx2 logs about our own requests: URLs and headers, which contain session ids.

    Requests of other users of httpx2 in this process are logged as before.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        told = record.name == "httpx2" or "receive_response_headers.complete" in str(record.msg)
        return not (told and _ours.get())


for _name in ("httpx2", "httpcore2.http11", "httpcore2.http2"):
    logging.getLogger(_name).addFilter(_OwnRequestsFilter())
