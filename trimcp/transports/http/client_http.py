"""HTTP exchanges with one server over httpx2: bounded replies, one kind of failure, one origin, no secrets in logs.

Knows HTTP and nothing of messages. What a reply means is decided by whoever reads it.
"""

from __future__ import annotations

import contextvars
import logging
import math
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from ipaddress import ip_address
from typing import Any, Final
from urllib.request import getproxies

import attrs
import httpx2
import trio

from trimcp.security import security_event
from trimcp.transports.http.client import HttpServer, Timeouts
from trimcp.transports.http.client_cookies import FewCookies
from trimcp.transports.http.client_policy import refusal, status_text
from trimcp.transports.targets import unreachable

__all__ = ["EVENT_STREAM", "JSON_TEXT", "Cut", "Http", "Reply", "TooLarge", "opened_http", "origin"]

JSON_TEXT: Final = "application/json"
EVENT_STREAM: Final = "text/event-stream"

_MAX_REDIRECTS: Final = 3
_LONGEST: Final = 200
_TRUSTING: Final = "name what to trust in SSL_CERT_FILE, or pass an httpx2.AsyncClient of your own"
# Seconds a connection is kept for the next request: less than the five after which common servers close it, since a
# request that meets a closing connection may be lost.
_KEPT: Final = 4.0
_KEPT_CONNECTIONS: Final = 64
_PIECE: Final = 1024 * 1024
_READ_AHEAD: Final = 65_536  # bytes, and so the most pieces, that httpcore2 reads ahead

_log = logging.getLogger("trimcp.http")
_ours: contextvars.ContextVar[bool] = contextvars.ContextVar("trimcp_http", default=False)


class Cut(Exception):
    """An exchange failed below HTTP.

    Attributes:
        why: one line for a person.
        nothing_sent: not a byte of the request was sent.
    """

    def __init__(self, why: str, nothing_sent: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.nothing_sent = nothing_sent


class TooLarge(Exception):
    """A body is larger than its reader allows."""


@attrs.define(eq=False)
class Reply:
    """The reply to one request. Its body can be read while the block that opened it runs."""

    _response: httpx2.Response
    _http: Http

    @property
    def status(self) -> int:
        """The status."""
        return self._response.status_code

    @property
    def url(self) -> httpx2.URL:
        """Where it came from, after redirects."""
        return self._response.url

    @property
    def content_type(self) -> str:
        """The media type without parameters, in lower case; "" where there is none."""
        return self.header("content-type").partition(";")[0].strip().lower()

    @property
    def elsewhere(self) -> str | None:
        """The other origin a redirect points to, or None."""
        target = self._http.target(self._response)
        return None if target is None or origin(target) == origin(self._http.url) else origin(target)

    @property
    def socket(self) -> trio.socket.SocketType | None:
        """The socket it comes from, to ask the system about; None where there is none."""
        stream = self._response.extensions.get("network_stream")
        found = None if stream is None else stream.get_extra_info("socket")
        return found if isinstance(found, trio.socket.SocketType) else None

    def header(self, name: str) -> str:
        """Return a header's value, or "" where there is none."""
        value: str = self._response.headers.get(name, "")
        return value

    @asynccontextmanager
    async def chunks(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the body in pieces, decompressed, each of at most a megabyte. Leaving early cuts the connection.

        Raises:
            Cut: the connection broke, or what came is no HTTP or not what it says it is compressed with.
        """
        with self._http.cuts():
            raw = self._response.aiter_raw()
            try:
                yield _Pieces(raw, _unpacker(self.header("content-encoding")))
            finally:
                await _abandon(raw)

    async def body(self, limit: int) -> bytes:
        """Return the whole body.

        Raises:
            TooLarge: it has more than `limit` bytes, of which at most one piece more than that was kept.
            Cut: as `chunks`.
        """
        length = self.header("content-length")
        if length.isascii() and length.isdigit() and int(length[:18]) > limit:
            raise TooLarge
        pieces: list[bytes] = []
        size = 0
        async with self.chunks() as chunks:
            async for chunk in chunks:
                size += len(chunk)
                if size > limit:
                    raise TooLarge
                pieces.append(chunk)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@attrs.define(eq=False)
class Http:
    """Exchanges with one server.

    Attributes:
        url: where requests go unless they say otherwise.
        last_status: what the server last answered, or None before its first answer.
    """

    url: httpx2.URL
    last_status: str | None = attrs.field(init=False, default=None)
    _client: httpx2.AsyncClient
    _headers: Mapping[str, str] = attrs.field(repr=False)
    _timeout: httpx2.Timeout
    _auth: httpx2.BasicAuth | None = attrs.field(repr=False)
    _socket: str | None = None
    _warned: bool = attrs.field(init=False, default=False)
    _moved: dict[httpx2.URL, httpx2.URL] = attrs.field(init=False, factory=dict)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        headers: Mapping[str, str],
        content: bytes | None = None,
        *,
        url: httpx2.URL | None = None,
        written: Callable[[], object] | None = None,
    ) -> AsyncIterator[Reply]:
        """Send a request and yield the reply, as soon as its head is there; leaving closes what was not read.

        Redirects within the origin are followed where they keep the method. Cancelling it cuts the connection.

        Args:
            method: of the request.
            headers: of the request, beside those that all have.
            content: its body.
            url: where to, None for the endpoint.
            written: called when the last byte of the request was handed to the operating system.

        Raises:
            Cut: there is no reply.
        """
        token = _ours.set(True)
        try:
            with self.cuts():
                response = await self._send(method, {**self._headers, **headers}, content, url or self.url, written)
            try:
                self.last_status = status_text(response.status_code)
                self._note_version(response)
                yield Reply(response, self)
            finally:
                await response.aclose()
        finally:
            _ours.reset(token)

    async def _send(
        self,
        method: str,
        headers: Mapping[str, str],
        content: bytes | None,
        url: httpx2.URL,
        written: Callable[[], object] | None,
    ) -> httpx2.Response:
        url = self._moved.get(url, url)
        extensions = {} if written is None else {"trace": _tracer(written)}
        redirects = 0
        while True:
            request = self._client.build_request(
                method, url, headers=headers, content=content, timeout=self._timeout, extensions=extensions
            )
            auth = httpx2.USE_CLIENT_DEFAULT if self._auth is None else self._auth
            response = await self._client.send(request, stream=True, auth=auth, follow_redirects=False)
            target = self.target(response)
            if target is not None and origin(target) != origin(url):
                security_event("redirect_refused", server=origin(url), to=origin(target))
                return response
            if target is None or redirects == _MAX_REDIRECTS:
                return response
            if method != "GET" and response.status_code not in (301, 307, 308):
                return response  # it asks for a GET instead, or many believe it does
            await response.aclose()
            if response.status_code in (301, 308) and len(self._moved) < 8:
                self._moved[url] = target
            url = target
            redirects += 1

    def _note_version(self, response: httpx2.Response) -> None:
        if response.http_version == "HTTP/2" and not self._warned:
            self._warned = True
            _log.warning(
                "%s is reached over HTTP/2, where httpx2 does not say that a stream was given up: calls that are "
                "cancelled go on there. Make the client with http2=False.",
                origin(self.url),
            )

    def target(self, response: httpx2.Response) -> httpx2.URL | None:
        """Return where a redirect points to, without credentials that it may name; None for any other reply."""
        location = response.headers.get("location")
        if location is None or response.status_code not in (301, 302, 303, 307, 308):
            return None
        return self.resolve(location, response.url)

    def resolve(self, reference: str, base: httpx2.URL | None = None) -> httpx2.URL | None:
        """Return the URL that a server means by `reference`, or None if it is none.

        Credentials in it are not used: a server could put them there to read them in its own logs.
        """
        try:
            url = (base or self.url).join(reference).copy_with(userinfo=b"", fragment=None)
        except (httpx2.InvalidURL, ValueError, TypeError):
            return None
        return url if url.scheme in ("http", "https") and url.host else None

    @contextmanager
    def cuts(self) -> Iterator[None]:
        """Turn what httpx2 raises into `Cut`."""
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            where = origin(self.url) if self._socket is None else f"the socket {self._socket!r:.200}"
            why = unreachable(error, _TRUSTING) or _reason(error)
            raise Cut(f"cannot connect to {where}: {why}", nothing_sent=True) from error
        except httpx2.ReadTimeout as error:
            raise Cut(f"{origin(self.url)} was silent for too long") from error
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL) as error:
            raise Cut(f"the connection to {origin(self.url)} broke: {_reason(error)}") from error

    def refusal(self, reply: Reply) -> str:
        """Say what a reply's status means, see `client_policy.refusal`."""
        return refusal(reply.status, None, reply.elsewhere)


@asynccontextmanager
async def opened_http(server: HttpServer) -> AsyncIterator[Http]:
    """Yield exchanges with a server, over a client made for it or over the one it names."""
    url = httpx2.URL(server.address)
    auth = httpx2.BasicAuth(url.username, url.password) if url.userinfo else None
    headers = {"user-agent": "trimcp", "accept-encoding": "gzip", **server.headers}
    client = server.client or _client(server, url)
    try:
        yield Http(url.copy_with(userinfo=b""), client, headers, _timeout(server.timeouts), auth, server.socket)
    finally:
        if server.client is None:
            # It closes idle sockets and waits for nobody, so it may do so while everything is being cancelled.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + server.timeouts.close):
                await client.aclose()


def origin(url: httpx2.URL) -> str:
    """Return a URL's scheme, host and port, which are all of it that is no secret."""
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def _client(server: HttpServer, url: httpx2.URL) -> httpx2.AsyncClient:
    # Calls may ask to be answered, so each needs a connection: their number is bounded where they are sent.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=_KEPT_CONNECTIONS, keepalive_expiry=_KEPT)
    # Where no TLS is spoken no certificates are loaded, which would take longer than everything else here.
    verify = url.scheme == "https"
    if server.socket is None and not _is_this_machine(url.host) and getproxies():
        return httpx2.AsyncClient(verify=verify, limits=limits, cookies=FewCookies())
    transport = httpx2.AsyncHTTPTransport(
        verify=verify,
        limits=limits,
        uds=server.socket,
        socket_options=_KEEP_ALIVE if server.socket is None else None,
    )
    return httpx2.AsyncClient(transport=transport, cookies=FewCookies())


@attrs.define(eq=False)
class _Pieces:
    """A body as it was before it was compressed, piece by piece."""

    _raw: AsyncIterator[bytes]
    _unpacker: zlib._Decompress | None
    _tail: bytes = attrs.field(init=False, default=b"")

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> bytes:
        while True:
            packed = self._tail or await anext(self._raw)
            if self._unpacker is None:
                return packed
            try:
                piece = self._unpacker.decompress(packed, _PIECE)
            except zlib.error as error:
                raise Cut(f"what the server sent could not be decompressed: {error}") from error
            self._tail = self._unpacker.unconsumed_tail
            if piece:
                return piece


def _unpacker(coding: str) -> zlib._Decompress | None:
    """Return what undoes a Content-Encoding, None if there is none.

    httpx2 would do it, but for coding upon coding, in any number of which a few bytes can stand for a terabyte.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in ("gzip", "x-gzip"):
        raise Cut(f"the server compressed its reply with {coding!r:.100}, which was not asked for")
    return zlib.decompressobj(16 + zlib.MAX_WBITS)


async def _abandon(raw: AsyncIterator[bytes]) -> None:
    """Leave a body that may not have been read to its end.

    httpx2 does not close the innermost of its generators when the outer ones are closed, and Trio complains about that
    one. What unwinds all of them is a cancellation, which meets the next read, behind the little that was read ahead.
    """
    with trio.CancelScope() as scope, suppress(httpx2.HTTPError, httpx2.StreamError):
        scope.cancel(reason="the rest of the reply is of no interest")
        pieces = 0
        async for _ in raw:
            pieces += 1
            if pieces > _READ_AHEAD:
                break


def _keep_alive() -> list[tuple[int, int, int]]:
    """Let the system find out within two minutes that the other side of a silent connection is gone."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


_KEEP_ALIVE: Final = _keep_alive()


def _is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _timeout(timeouts: Timeouts) -> httpx2.Timeout:
    def seconds(value: float) -> float | None:
        return None if math.isinf(value) else value

    return httpx2.Timeout(
        connect=seconds(timeouts.connect), write=seconds(timeouts.write), read=seconds(timeouts.silence), pool=None
    )


def _tracer(written: Callable[[], object]) -> Callable[[str, Any], Awaitable[None]]:
    async def trace(name: str, info: Any) -> None:
        if name.endswith("send_request_body.complete"):
            written()

    return trace


def _reason(error: BaseException) -> str:
    """Say why an exchange failed. What the library quotes of the server's bytes is cut and escaped."""
    told: BaseException | None = error
    while told is not None and not str(told):
        told = told.__cause__ or told.__context__  # what TLS has to say is some levels down
    text = type(error).__name__ if told is None else str(told)
    return text[:_LONGEST].encode("ascii", "backslashreplace").decode().replace("\n", " ")


class _Hush(logging.Filter):
    """Holds back what httpx2 logs about requests of ours: whole URLs, and every header of a reply.

    Both carry session ids. Requests of other users of httpx2 in this process are logged as ever.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        told = record.name == "httpx2" or "receive_response_headers.complete" in str(record.msg)
        return not (told and _ours.get())


for _name in ("httpx2", "httpcore2.http11", "httpcore2.http2"):
    logging.getLogger(_name).addFilter(_Hush())
