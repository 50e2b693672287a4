"""HTTP exchanges with one server: bounded replies, one type of failure, one origin, no secrets in logs.

It knows HTTP and no messages. Two engines carry the requests; which one is decided when the client connects:
`h1` of our own, and httpx2 (`httpx_engine`) for proxies and for a client that the user made.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Container, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

import attrs
import trio

from trimcp.channel import HttpClientStatistics
from trimcp.errors import AuthorizationError, LocalError
from trimcp.framing.gathering import Gathered
from trimcp.security import security_event
from trimcp.support.addresses import is_loopback
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.descriptors import PIECE, AnySocket
from trimcp.transports.http.client.connection import dialing
from trimcp.transports.http.client.engine import TRUSTING, ClientRequest, ExchangeBroken, HttpEngine, RawReply
from trimcp.transports.http.client.h1 import H1Engine, request_head
from trimcp.transports.http.client.policy import Timeouts, refusal, seconds_to_wait
from trimcp.transports.http.client.pool import Pool
from trimcp.transports.http.h1.replies import media_type
from trimcp.transports.targets import (
    basic_authorization,
    credentials,
    normal_url,
    origin,
    resolved,
    shown_url,
    status_text,
)
from trimcp.wire.jsonrpc import ErrorResponse

if TYPE_CHECKING:
    import httpx2

JSON_TEXT: Final = "application/json"
EVENT_STREAM: Final = "text/event-stream"

_MAX_REDIRECTS: Final = 3
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_MOST_CONNECTIONS: Final = 1_024

_log = logging.getLogger("trimcp.http")


class NotAuthorized(ExchangeBroken):
    """The server requires an access token that cannot be obtained; `code` is the authorization server's, or ""."""

    def __init__(self, why: str, code: str) -> None:
        super().__init__(why)
        self.code = code


class Authorizes(Protocol):
    """Provides authorization headers for one connection's requests, or raises `AuthorizationError`."""

    person: Callable[[], AbstractContextManager[None]]  # a context manager to enter while a user logs in

    async def headers(self, method: str, url: str, /) -> Mapping[str, str]:
        """Return the headers that a request needs."""
        ...

    def helps(self, status: int, headers: Mapping[str, str], /) -> bool:
        """Return whether `refused` can do something about a reply with this status and headers."""
        ...

    def accepted(self, sent: Mapping[str, str], /) -> None:
        """Take note that the server has answered a request with these headers as it should."""
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

    _raw: RawReply
    url: str  # the URL that sent the reply, after redirects
    _http: Http
    _asked: str

    @property
    def status(self) -> int:
        """The status code."""
        return self._raw.status

    @property
    def content_type(self) -> str:
        """The media type without parameters, in lower case; "" if there is none."""
        return media_type(self.headers)

    @property
    def elsewhere(self) -> str | None:
        """The other origin a redirect points to, or None."""
        target = redirect_target(self._raw, self.url)
        return None if target is None or origin(target) == origin(self._http.url) else origin(target)

    @property
    def socket(self) -> AnySocket | None:
        """The socket of the reply, for the functions of `descriptors`; None if there is none."""
        return self._raw.socket

    @property
    def headers(self) -> Mapping[str, str]:
        """All headers, by name in lower case; the values of a repeated header are joined with ", "."""
        return self._raw.headers

    def header(self, name: str) -> str:
        """Return a header's value, or "" if it is missing."""
        return self.headers.get(name, "")

    def refusal(self, error: ErrorResponse | None = None, body: bytes = b"") -> str:
        """Return what an error status means, with the error in the body or its plain text. See `policy.refusal`."""
        plain = self.content_type in ("", "text/plain") and not body.lstrip().startswith((b"<", b"{", b"["))
        said = body.decode(errors="replace").strip() if plain else ""
        target = None if self.elsewhere is not None else redirect_target(self._raw, self.url)
        moved = None if target is None else shown_url(target)
        return refusal(self.status, error, self.elsewhere, shown_url(self._asked), said, moved)

    @property
    def retry_after(self) -> float | None:
        """Seconds that the server asks to wait before the next request, or None."""
        return seconds_to_wait(self.header("retry-after"), time.time)

    @asynccontextmanager
    async def chunks(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield the body in pieces of at most 64 KiB, decompressed. Leaving early closes the connection.

        Raises ExchangeBroken: the connection broke, the reply is not valid HTTP, or it cannot be decompressed.
        """
        unpacker = _unpacker(self.header("content-encoding"))
        try:
            pieces = self._raw.pieces()
            yield pieces if unpacker is None else _Unpacked(pieces, unpacker)
        finally:
            await self._raw.abandon()

    async def body(self, limit: int) -> bytes:
        """Return the whole body. Raises TooLarge, at most one piece beyond the limit, and what `chunks` raises."""
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
    """Exchanges with one server."""

    url: str  # the default URL of requests, in the form of `normal_url`
    engine: HttpEngine  # what carries the requests
    _headers: Mapping[str, str] = attrs.field(repr=False)
    # provides authorization headers; None sends only `headers`
    authorizer: Authorizes | None = attrs.field(default=None, repr=False)
    max_redirects: int = _MAX_REDIRECTS  # redirects that are followed, within the origin
    # the engine if it is our own, and requests need no more than their headers: then they can be pushed
    h1: H1Engine | None = attrs.field(init=False)
    last_code: int = attrs.field(init=False, default=0)  # the status code of the last reply, or 0 before the first one
    _warned: bool = attrs.field(init=False, default=False)
    _moved: dict[str, str] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.h1 = self.engine if isinstance(self.engine, H1Engine) and self.authorizer is None else None

    @property
    def place(self) -> str:
        """Where the endpoint is: `url`, unless it has moved for good."""
        return self._moved.get(self.url, self.url)

    @property
    def last_status(self) -> str | None:
        """The status of the last reply as text, or None before the first one."""
        return status_text(self.last_code) if self.last_code else None

    @asynccontextmanager
    async def open(
        self,
        method: str,
        headers: Mapping[str, str],
        content: bytes | None = None,
        *,
        url: str | None = None,
        written: Callable[[], object] | None = None,
        begun: RawReply | None = None,
    ) -> AsyncIterator[OpenReply]:
        """Send a request and yield the reply once its head has arrived; leaving closes what was not read.

        Redirects within the origin are followed if they keep the method. Cancelling closes the connection. `headers`
        are added to the common ones; `written` is called when the last byte of the request was written.

        `begun`: the reply to the request, if that was sent to `place` already. Raises ExchangeBroken: no reply was
        received; as `NotAuthorized`, the server requires a token that cannot be obtained.
        """
        asked = url or self.url
        request = ClientRequest(method, asked, {**self._headers, **headers}, content, written)
        if self.authorizer is None:
            raw, place = await self._send(request, begun)
        else:
            raw, place = await self._authorized(self.authorizer, request)
        try:
            self.last_code = raw.status
            self._note_version(raw)
            yield OpenReply(raw, place, self, asked)
        finally:
            await raw.abandon()

    async def _authorized(self, authorizer: Authorizes, request: ClientRequest) -> tuple[RawReply, str]:
        """Send a request with authorization, and again if the server requires a different one."""
        tries = 0
        try:
            while True:
                sent = await authorizer.headers(request.method, request.url)
                raw, place = await self._send(attrs.evolve(request, headers={**request.headers, **sent}))
                if raw.status < 400:
                    authorizer.accepted(sent)
                    return raw, place
                if not authorizer.helps(raw.status, raw.headers):
                    return raw, place
                await raw.abandon()
                await authorizer.refused(raw.status, raw.headers, sent, tries)
                tries += 1
        except AuthorizationError as error:
            raise NotAuthorized(str(error), error.code) from error

    async def _send(self, request: ClientRequest, begun: RawReply | None = None) -> tuple[RawReply, str]:
        """Send a request and return its reply, with the URL that sent it after redirects."""
        url = request.url = self._moved.get(request.url, request.url)
        redirects = 0
        while True:
            raw = begun or await self.engine.send(request)
            begun = None
            target = redirect_target(raw, url)
            if target is not None and origin(target) != origin(url):
                security_event("redirect_refused", server=origin(url), to=origin(target))
                return raw, url
            if target is None or redirects == self.max_redirects:
                return raw, url
            if request.method != "GET" and raw.status not in (301, 307, 308):
                return raw, url  # these require a GET instead, or many servers use them so
            await raw.abandon()
            if raw.status in (301, 308) and len(self._moved) < 8:
                self._moved[url] = target
            url = request.url = target
            redirects += 1

    def _note_version(self, raw: RawReply) -> None:
        if raw.http2 and not self._warned:
            self._warned = True
            _log.warning(
                "%s is reached over HTTP/2, where httpx2 does not say that a stream was given up: calls that are "
                "cancelled go on there. Make the client with http2=False.",
                origin(self.url),
            )

    def resolve(self, reference: str, base: str | None = None) -> str | None:
        """Return the URL that a server means by `reference`, or None if it is invalid."""
        return resolved(reference, base or self.url)

    def head(self, method: str, headers: Mapping[str, str], *, without: Container[str] = ()) -> bytes:
        """Return the head of a request to `place` with the common headers and these, but for its end.

        `without`: names of common headers to leave out.
        """
        common = {name: value for name, value in self._headers.items() if name not in without}
        return request_head(method, self.place, {**common, **headers})

    def cookie_line(self) -> bytes:
        """Return the header line with the cookies for `place`; b"" without any."""
        return b"" if self.h1 is None else self.h1.cookie_line(self.place)

    def statistics(self) -> HttpClientStatistics:
        """Return a snapshot of the connections."""
        return self.engine.statistics()


def redirect_target(raw: RawReply, url: str) -> str | None:
    """Return the URL that a redirect from `url` points to, without credentials in it; None for any other reply."""
    if raw.status not in _REDIRECTS:
        return None
    location = raw.headers.get("location")
    return None if location is None else resolved(location, url)


@asynccontextmanager
async def opened_http(
    address: str,
    headers: Mapping[str, str],
    timeouts: Timeouts,
    uds: str | None = None,
    client: httpx2.AsyncClient | None = None,
    authorizer: Authorizes | None = None,
    most: int = _MOST_CONNECTIONS,
) -> AsyncIterator[Http]:
    """Yield exchanges with the server at `address`, all with `headers`.

    They use the user's own `client`, which is not closed, or connections of their own.

    `most`: connections at a time that are kept idle, and as many more as subscriptions and streams may need. Raises
    LocalError: the address is no URL of a server.
    """
    url = normal_url(address)
    if url is None:
        raise LocalError("this is no URL of a server")
    auth = credentials(address)
    headers = {"user-agent": "trimcp", "accept-encoding": "gzip", **headers}
    if client is not None or (uds is None and _is_proxied(url)):
        async with _over_httpx2(url, timeouts, client, auth) as engine:
            yield Http(url, engine, headers, authorizer)
        return
    if auth is not None:
        headers["authorization"] = basic_authorization(*auth)
    place = origin(url) if uds is None else f"the socket {uds!r:.200}"
    dial = dialing(url, uds, timeouts.connect, TRUSTING)
    pool = Pool(dial, origin(url), place, timeouts, _MOST_CONNECTIONS + most, most)
    async with open_service_nursery() as nursery:
        await nursery.start(pool.run)
        try:
            yield Http(url, H1Engine(pool), headers, authorizer)
        finally:
            pool.close()


@asynccontextmanager
async def _over_httpx2(
    url: str, timeouts: Timeouts, client: httpx2.AsyncClient | None, auth: tuple[str, str] | None
) -> AsyncIterator[HttpEngine]:
    from trimcp.transports.http.client.httpx_engine import HttpxEngine, proxied_client  # imports httpx2

    used = client or proxied_client(url)
    try:
        yield HttpxEngine.of(used, timeouts, auth)
    finally:
        if client is None:
            # Closing idle sockets does not wait, so it is also done when cancelled.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + timeouts.close):
                await used.aclose()


def _is_proxied(url: str) -> bool:
    """Return whether the environment names a proxy for a URL. Which hosts need none, httpx2 knows."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname or ""):
        return False
    if sys.platform in ("win32", "darwin"):
        from urllib.request import getproxies  # which asks the system; elsewhere it reads the environment

        return bool(getproxies())
    names = (f"{parts.scheme}_proxy", "all_proxy")
    return any(value and name.lower() in names for name, value in os.environ.items())


@attrs.define(eq=False)
class _Unpacked:
    """A compressed body, decompressed piece by piece."""

    _packed: AsyncIterator[bytes]
    _unpacker: zlib._Decompress
    _tail: bytes = attrs.field(init=False, default=b"")

    def __aiter__(self) -> _Unpacked:
        return self

    async def __anext__(self) -> bytes:
        while True:
            if self._tail:
                await trio.lowlevel.checkpoint()  # a few bytes can stand for a thousand pieces
            packed = self._tail or await anext(self._packed)
            try:
                piece = self._unpacker.decompress(packed, PIECE)
            except zlib.error as error:
                raise ExchangeBroken(f"what the server sent could not be decompressed: {error}") from error
            self._tail = self._unpacker.unconsumed_tail
            if piece:
                return piece


def _unpacker(coding: str) -> zlib._Decompress | None:
    """Return the decompressor of a Content-Encoding, None if there is none.

    A library would undo any number of nested codings, with which a few bytes can stand for a terabyte.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in ("gzip", "x-gzip"):
        raise ExchangeBroken(f"the server compressed its reply with {coding!r:.100}, which was not asked for")
    return zlib.decompressobj(16 + zlib.MAX_WBITS)
