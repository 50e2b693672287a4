"""HTTP exchanges with one server over httpx2: bounded replies, one type of failure, one origin, no secrets in logs.

It knows HTTP and no messages.
"""

from __future__ import annotations

import contextvars
import logging
import socket
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from http.cookiejar import Cookie, CookieJar
from ipaddress import ip_address
from typing import Final, Protocol
from urllib.request import getproxies

import attrs
import httpx2
import trio

from trimcp.errors import AuthorizationError
from trimcp.framing.gathering import Gathered
from trimcp.security import security_event
from trimcp.transports.http.client.policy import Timeouts, refusal, seconds_to_wait
from trimcp.transports.targets import shown_url, status_text, unreachable
from trimcp.wire.jsonrpc import ErrorResponse

JSON_TEXT: Final = "application/json"
EVENT_STREAM: Final = "text/event-stream"

_MAX_REDIRECTS: Final = 3
_LONGEST: Final = 200
_TRUSTING: Final = "name what to trust in SSL_CERT_FILE, or pass an httpx2.AsyncClient of your own"
# Seconds an idle connection is kept: less than the five after which common servers close it, since a request that is
# sent while the server closes may be lost.
_KEPT: Final = 4.0
_KEPT_CONNECTIONS: Final = 64
_PIECE: Final = 64 * 1024
_PIECES: Final = 16  # pieces per turn of the event loop: one read can bring ten thousand chunks of one byte
_READ_AHEAD: Final = 65_536  # bytes that httpcore2 reads ahead, and so the largest number of pieces
_MAX_COOKIES: Final = 50
_MAX_COOKIE_BYTES: Final = 8 * 1024  # of all cookies: what many servers accept for a whole head

_log = logging.getLogger("trimcp.http")
_ours: contextvars.ContextVar[bool] = contextvars.ContextVar("trimcp_http", default=False)


class ExchangeBroken(Exception):
    """An exchange failed below HTTP; `why` is one line of text, `nothing_sent` means that no byte was sent."""

    def __init__(self, why: str, nothing_sent: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.nothing_sent = nothing_sent


class NotAuthorized(ExchangeBroken):
    """The server requires an access token that cannot be obtained; `code` is the authorization server's, or ""."""

    def __init__(self, why: str, code: str) -> None:
        super().__init__(why)
        self.code = code


class Authorizes(Protocol):
    """Provides authorization headers for one connection's requests, or raises `AuthorizationError`.

    Attributes:
        person: a context manager to enter while a user logs in.
    """

    person: Callable[[], AbstractContextManager[None]]

    async def headers(self, method: str, url: str, /) -> Mapping[str, str]:
        """Return the headers that a request needs."""
        ...

    def helps(self, status: int, headers: Mapping[str, str], /) -> bool:
        """Return whether `refused` can do something about a reply with this status and headers."""
        ...

    async def refused(self, status: int, headers: Mapping[str, str], sent: Mapping[str, str], tries: int, /) -> None:
        """Do what a 401 or 403 requires; afterwards the request is sent again."""
        ...


class ClientAuth(Protocol):
    """Obtains access tokens for a client; `trimcp.auth.OAuth` is one."""

    def connected(self, server: str, /) -> AbstractAsyncContextManager[Authorizes]:
        """Return a context manager that yields the authorization for one server, for one connection's lifetime."""
        ...


class TooLarge(Exception):
    """A body is larger than its reader allows."""


@attrs.define(eq=False)
class OpenReply:
    """The reply to one request. Its body can be read inside the block that opened it."""

    _response: httpx2.Response
    _http: Http
    _asked: httpx2.URL

    @property
    def status(self) -> int:
        """The status code."""
        return self._response.status_code

    @property
    def url(self) -> httpx2.URL:
        """The URL that sent the reply, after redirects."""
        return self._response.url

    @property
    def content_type(self) -> str:
        """The media type without parameters, in lower case; "" if there is none."""
        return self.header("content-type").partition(";")[0].strip().lower()

    @property
    def elsewhere(self) -> str | None:
        """The other origin a redirect points to, or None."""
        target = self._http.target(self._response)
        return None if target is None or origin(target) == origin(self._http.url) else origin(target)

    @property
    def socket(self) -> trio.socket.SocketType | None:
        """The socket of the reply, for the functions of `descriptors`; None if there is none."""
        stream = self._response.extensions.get("network_stream")
        found = None if stream is None else stream.get_extra_info("socket")
        return found if isinstance(found, trio.socket.SocketType) else None

    @property
    def headers(self) -> dict[str, str]:
        """All headers, by name in lower case; the values of a repeated header are joined with ", "."""
        return {name.lower(): value for name, value in self._response.headers.items()}

    def header(self, name: str) -> str:
        """Return a header's value, or "" if it is missing."""
        value: str = self._response.headers.get(name, "")
        return value

    def refusal(self, error: ErrorResponse | None = None) -> str:
        """Return what an error status means. `error` is the error in the body. See `policy.refusal`."""
        return refusal(self.status, error, self.elsewhere, shown_url(str(self._asked)))

    @property
    def retry_after(self) -> float | None:
        """Seconds that the server asks to wait before the next request, or None."""
        return seconds_to_wait(self.header("retry-after"), time.time)

    @asynccontextmanager
    async def chunks(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the body in pieces of at most 64 KiB, decompressed. Leaving early closes the connection.

        Raises:
            ExchangeBroken: the connection broke, the reply is not valid HTTP, or it cannot be decompressed.
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
            TooLarge: it has more than `limit` bytes; at most one piece beyond the limit was kept.
            ExchangeBroken: as for `chunks`.
        """
        length = self.header("content-length")
        if length.isascii() and length.isdigit() and int(length[:18]) > limit:
            raise TooLarge
        body = Gathered()
        async with self.chunks() as chunks:
            async for chunk in chunks:
                body.add(chunk)
                if body.size > limit:
                    raise TooLarge
        return body.take()

    async def small_body(self, limit: int) -> bytes:
        """Return the body, or b"" if it has more than `limit` bytes or ends early."""
        try:
            return await self.body(limit)
        except (TooLarge, ExchangeBroken):
            return b""


@attrs.define(eq=False)
class Http:
    """Exchanges with one server.

    Attributes:
        url: the default URL of requests.
        authorizer: provides authorization headers; None sends only `headers`.
        max_redirects: redirects that are followed, within the origin.
        last_status: the status of the last reply, or None before the first one.
    """

    url: httpx2.URL
    last_status: str | None = attrs.field(init=False, default=None)
    _client: httpx2.AsyncClient
    _headers: Mapping[str, str] = attrs.field(repr=False)
    _timeout: httpx2.Timeout
    _auth: httpx2.BasicAuth | None = attrs.field(repr=False)
    _socket: str | None = None
    authorizer: Authorizes | None = attrs.field(default=None, repr=False)
    max_redirects: int = _MAX_REDIRECTS
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
    ) -> AsyncIterator[OpenReply]:
        """Send a request and yield the reply once its head has arrived; leaving closes what was not read.

        Redirects within the origin are followed if they keep the method. Cancelling closes the connection.

        Args:
            method, headers, content: of the request; `headers` are added to the common ones.
            url: None for the endpoint.
            written: called when the last byte of the request was written.

        Raises:
            ExchangeBroken: no reply was received.
            NotAuthorized: the server requires a token that cannot be obtained.
        """
        token = _ours.set(True)
        try:
            with self.cuts():
                send = self._send if self.authorizer is None else partial(self._authorized, self.authorizer)
                response = await send(method, {**self._headers, **headers}, content, url or self.url, written)
            try:
                self.last_status = status_text(response.status_code)
                self._note_version(response)
                yield OpenReply(response, self, url or self.url)
            finally:
                await response.aclose()
        finally:
            _ours.reset(token)

    async def _authorized(
        self,
        authorizer: Authorizes,
        method: str,
        headers: Mapping[str, str],
        content: bytes | None,
        url: httpx2.URL,
        written: Callable[[], object] | None,
    ) -> httpx2.Response:
        """Send a request with authorization, and again if the server requires a different one."""
        tries = 0
        try:
            while True:
                sent = await authorizer.headers(method, str(url))
                response = await self._send(method, {**headers, **sent}, content, url, written)
                if response.status_code < 400:
                    return response
                said = {name.lower(): value for name, value in response.headers.items()}
                if not authorizer.helps(response.status_code, said):
                    return response
                await response.aclose()
                await authorizer.refused(response.status_code, said, sent, tries)
                tries += 1
        except AuthorizationError as error:
            raise NotAuthorized(str(error), error.code) from error

    async def _send(
        self,
        method: str,
        headers: Mapping[str, str],
        content: bytes | None,
        url: httpx2.URL,
        written: Callable[[], object] | None,
    ) -> httpx2.Response:
        async def trace(name: str, info: object) -> None:
            if written is not None and name.endswith("send_request_body.complete"):
                written()

        url = self._moved.get(url, url)
        extensions = {} if written is None else {"trace": trace}
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
            if target is None or redirects == self.max_redirects:
                return response
            if method != "GET" and response.status_code not in (301, 307, 308):
                return response  # these require a GET instead, or many servers use them so
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
        """Return the URL a redirect points to, without credentials in it; None for any other reply."""
        location = response.headers.get("location")
        if location is None or response.status_code not in (301, 302, 303, 307, 308):
            return None
        return self.resolve(location, response.url)

    def resolve(self, reference: str, base: httpx2.URL | None = None) -> httpx2.URL | None:
        """Return the URL that a server means by `reference`, or None if it is invalid.

        Credentials in it are removed: a server could use them to read them in its own logs.
        """
        try:
            url = (base or self.url).join(reference).copy_with(userinfo=b"", fragment=None)
        except (httpx2.InvalidURL, ValueError, TypeError):
            return None
        return url if url.scheme in ("http", "https") and url.host else None

    @contextmanager
    def cuts(self) -> Iterator[None]:
        """Convert exceptions of httpx2 into `ExchangeBroken`."""
        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            where = origin(self.url) if self._socket is None else f"the socket {self._socket!r:.200}"
            why = unreachable(error, _TRUSTING) or _reason(error)
            raise ExchangeBroken(f"cannot connect to {where}: {why}", nothing_sent=True) from error
        except httpx2.ReadTimeout as error:
            raise ExchangeBroken(f"{origin(self.url)} was silent for too long") from error
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL) as error:
            raise ExchangeBroken(f"the connection to {origin(self.url)} broke: {_reason(error)}") from error


@asynccontextmanager
async def opened_http(
    address: str,
    headers: Mapping[str, str],
    timeouts: Timeouts,
    uds: str | None = None,
    client: httpx2.AsyncClient | None = None,
    authorizer: Authorizes | None = None,
) -> AsyncIterator[Http]:
    """Yield exchanges with the server at `address`, all with `headers`.

    They use the user's own `client`, which is not closed, or a new one.
    """
    url = httpx2.URL(address)
    auth = httpx2.BasicAuth(url.username, url.password) if url.userinfo else None
    headers = {"user-agent": "trimcp", "accept-encoding": "gzip", **headers}
    timeout = httpx2.Timeout(connect=timeouts.connect, write=timeouts.write, read=timeouts.silence, pool=None)
    used = client or _client(url, uds)
    try:
        yield Http(url.copy_with(userinfo=b""), used, headers, timeout, auth, uds, authorizer)
    finally:
        if client is None:
            # Closing idle sockets does not wait, so it is also done when cancelled.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + timeouts.close):
                await used.aclose()


def origin(url: httpx2.URL) -> str:
    """Return a URL's scheme, host and port, which contain no secret."""
    return f"{url.scheme}://{url.netloc.decode('ascii')}"


def _client(url: httpx2.URL, uds: str | None) -> httpx2.AsyncClient:
    # Unbounded here: a call may need another request to be answered. The senders bound the number of requests.
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=_KEPT_CONNECTIONS, keepalive_expiry=_KEPT)
    # Without TLS no certificates are loaded: loading them takes longer than all other steps.
    verify = url.scheme == "https"
    if uds is None and not _is_this_machine(url.host) and getproxies():
        return httpx2.AsyncClient(verify=verify, limits=limits, cookies=BoundedCookieJar())
    options = _KEEP_ALIVE if uds is None else None
    transport = httpx2.AsyncHTTPTransport(verify=verify, limits=limits, uds=uds, socket_options=options)
    return httpx2.AsyncClient(transport=transport, cookies=BoundedCookieJar())


class BoundedCookieJar(CookieJar):
    """A cookie jar of at most 50 cookies and 8 KiB. A cookie beyond that is dropped; existing ones can be replaced.

    Load balancers use a cookie to find the server that has a session, so cookies are kept. But each is sent with every
    request, and a server may set any number in every response. (RFC 6265 section 6.1.)
    """

    def set_cookie(self, cookie: Cookie) -> None:
        """Keep a cookie if there is room for it."""
        key = _cookie_key(cookie)
        others = [kept for kept in self if _cookie_key(kept) != key]
        if len(others) < _MAX_COOKIES and sum(map(_cookie_size, others)) + _cookie_size(cookie) <= _MAX_COOKIE_BYTES:
            super().set_cookie(cookie)


def _cookie_key(cookie: Cookie) -> tuple[str, str, str]:
    return cookie.domain, cookie.path, cookie.name


def _cookie_size(cookie: Cookie) -> int:
    return len(cookie.name) + len(cookie.value or "") + len(cookie.path)


@attrs.define(eq=False)
class _Pieces:
    """A body, decompressed, piece by piece. Not a generator, because closing one costs more."""

    _raw: AsyncIterator[bytes]
    _unpacker: zlib._Decompress | None
    _tail: bytes = attrs.field(init=False, default=b"")
    _left: int = attrs.field(init=False, default=_PIECES)

    def __aiter__(self) -> _Pieces:
        return self

    async def __anext__(self) -> bytes:
        while True:
            self._left -= 1
            if not self._left:
                self._left = _PIECES
                await trio.lowlevel.checkpoint()  # httpx2 has no checkpoint between the chunks of one read
            packed = self._tail or await anext(self._raw)
            if self._unpacker is None:
                return packed
            try:
                piece = self._unpacker.decompress(packed, _PIECE)
            except zlib.error as error:
                raise ExchangeBroken(f"what the server sent could not be decompressed: {error}") from error
            self._tail = self._unpacker.unconsumed_tail
            if piece:
                return piece


def _unpacker(coding: str) -> zlib._Decompress | None:
    """Return the decompressor of a Content-Encoding, None if there is none.

    httpx2 would undo any number of nested codings, with which a few bytes can stand for a terabyte.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in ("gzip", "x-gzip"):
        raise ExchangeBroken(f"the server compressed its reply with {coding!r:.100}, which was not asked for")
    return zlib.decompressobj(16 + zlib.MAX_WBITS)


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


# The system detects within two minutes that the peer of a silent connection is gone.
_KEEP_ALIVE: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
        if hasattr(socket, name)
    ),
]


def _is_this_machine(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


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
