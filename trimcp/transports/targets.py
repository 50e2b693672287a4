"""Shared by clients of network servers: URLs and headers, connecting, and error texts.

URLs have one form, without credentials. One parser decides and connects, so that two cannot see two hosts in one text.
"""

from __future__ import annotations

import base64
import os
import ssl
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from socket import gaierror
from typing import TYPE_CHECKING, ClassVar, Final
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit, urlunsplit

import attrs
import trio

from trimcp.channel import Link
from trimcp.errors import ConnectionLost, LocalError
from trimcp.support.addresses import PORTS, authority
from trimcp.support.bounds import check_texts, checked, is_token
from trimcp.support.nurseries import leaves

if TYPE_CHECKING:
    from trimcp.transports.trace import Write

_LONGEST: Final = 65_536
_PATH: Final = "/%:@!$&'()*+,;=~-._"
_QUERY: Final = _PATH + "?[]|"


def normal_url(url: str) -> str | None:
    """Return an http or https URL in one form, without credentials and fragment; None if it is no such URL.

    Credentials are removed because a server could use them to read them in its own logs.
    """
    if len(url) > _LONGEST or not url.isprintable():
        return None
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").encode("ascii" if parts.netloc.isascii() else "idna").decode()
    except ValueError:  # UnicodeError is one
        return None
    if parts.scheme not in PORTS or not host or port == 0 or any(each in host for each in ' "<>\\^`{|}'):
        return None
    place, path = authority(host, port, PORTS[parts.scheme]), quote(parts.path or "/", safe=_PATH)
    return urlunsplit((parts.scheme, place, path, quote(parts.query, safe=_QUERY), ""))


def credentials(url: str) -> tuple[str, str] | None:
    """Return the name and the password in a URL, or None."""
    parts = urlsplit(url)
    return (unquote(parts.username or ""), unquote(parts.password or "")) if "@" in parts.netloc else None


def basic_authorization(name: str, password: str) -> str:
    """Return the value of the header Authorization that says them (RFC 7617)."""
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def resolved(reference: str, base: str) -> str | None:
    """Return the URL that a server means by `reference` in a reply from `base`, or None if it is invalid."""
    if len(reference) > _LONGEST or not reference.isprintable():
        return None
    try:
        return normal_url(urljoin(base, reference))
    except ValueError:
        return None


def origin(url: str) -> str:
    """Return a URL's scheme, host and port, which contain no secret. The URL is one of `normal_url`."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def request_target(url: str) -> str:
    """Return what a request line has of a URL of `normal_url`: the path and the query."""
    return url[len(origin(url)) :]


_LONGEST_PART: Final = 16
# they say where a message ends, so only its sender may set them
_FRAMING: Final = ("content-length", "transfer-encoding")


def checked_url(url: str, schemes: Collection[str], needed: str) -> SplitResult:
    """Return the parts of a server's URL.

    Raises LocalError: it is no URL, has no host or has another scheme. `needed` is the text for the last two.
    """
    if not isinstance(url, str):
        raise LocalError(needed)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise LocalError(f"this is no URL of a server: {error}") from None
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        raise LocalError(needed)
    return parts


def socket_path(url: str, uds: str | None) -> str | None:
    """Return the path of the Unix socket that a URL like "http+unix://%2Fpath/" names; `uds` for other schemes."""
    parts = urlsplit(url)
    return unquote(parts.netloc.rpartition("@")[2]) if parts.scheme.endswith("+unix") else uds


def link_to(transport: str, socket: str | None) -> Link:
    """Return how a server is reached: over a Unix socket, or a network."""
    return Link(transport, None if socket is None else "unix")


def checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return headers by lower-case name.

    Raises LocalError: a name or value cannot be sent. Values may be secrets, so the text does not quote them.
    """
    checked: dict[str, str] = {}
    if headers is not None:
        check_texts("headers", headers, "such as {'X-Key': 'value'}")
    for name, value in (headers or {}).items():
        if not is_token(name):
            raise LocalError(f"{name!r:.60} cannot be the name of a header")
        if not (value.isascii() and value.isprintable()):
            raise LocalError(f"the value of the header {name} must be a string of printable ASCII characters")
        if name.lower() in _FRAMING:
            raise LocalError(f"the header {name} is set for each request and cannot be given")
        checked[name.lower()] = value
    return checked


def masked_url(url: str, *, path: bool = False) -> str:
    """Return a URL without the parts that may be secret: user, path, query and fragment.

    `path`: keep the path, so that a user can distinguish several URLs.
    """
    parts = urlsplit(url)
    place = f"{parts.scheme}://{authority(str(parts.hostname), parts.port, 0)}"
    return f"{place}{parts.path or '/'}{'?...' if parts.query else ''}" if path else f"{place}/..."


def shown_url(url: str) -> str:
    """Return a URL for an error text: without credentials and query, and with "..." for path segments that may be keys.

    A segment is shown if it has at most 16 characters, of which at most three are digits.
    """
    parts = urlsplit(url).path.split("/")
    harmless = [len(part) <= _LONGEST_PART and sum(map(str.isdigit, part)) <= 3 for part in parts]
    path = "/".join([part if shown else "..." for part, shown in zip(parts, harmless, strict=True)])
    return masked_url(url).removesuffix("/...") + path.encode("ascii", "backslashreplace").decode()


def status_text(status: int) -> str:
    """Return a status with its standard phrase. The phrase that the server sent is not quoted."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


async def dial(
    host: str, port: int, *, path: str | None, tls: ssl.SSLContext | None, timeout: float, trusting: str
) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
    """Open a stream to a server.

    Raises ConnectionLost: the connection failed; the text says why, without the address.

    Args:
        timeout: seconds for connecting, including the TLS handshake.
        trusting: the text that tells a user how to trust other certificates.
    """
    stream: trio.SocketStream | None = None
    try:
        with trio.fail_after(timeout):
            if path is None:
                stream = await trio.open_tcp_stream(host, port)
            else:
                stream = await trio.open_unix_socket(path)
            if tls is None:
                return stream
            secure = trio.SSLStream(stream, tls, server_hostname=host, https_compatible=True)
            await secure.do_handshake()
            return secure
    except BaseException as error:  # also if cancelled: the caller never gets the stream, so it must be closed here
        if stream is not None:
            stream.socket.close()
        if isinstance(error, trio.TooSlowError):
            raise ConnectionLost(f"no connection within {timeout:g} seconds") from None
        if isinstance(error, trio.BrokenResourceError | OSError):
            raise ConnectionLost(unreachable(error, trusting) or "the connection broke while TLS began") from error
        raise


@attrs.frozen(field_transformer=checked())
class StreamServer:
    """A server that is reached on a stream of bytes. A subclass says what is spoken on it, and explains the fields."""

    _ports: ClassVar[Mapping[str, int]]  # of each scheme
    _secure: ClassVar[str]  # the scheme with TLS

    url: str = attrs.field(validator=lambda self, _, url: self._check_url(url), repr=lambda url: repr(masked_url(url)))
    headers: Mapping[str, str] = attrs.field(
        default=None,
        converter=checked_headers,
        validator=lambda self, _, headers: self._check_headers(headers),
        repr=False,
    )
    uds: str | None = None
    ssl_context: ssl.SSLContext | None = attrs.field(default=None, repr=False)
    timeout: float = attrs.field(default=30.0, kw_only=True)
    trace: Write | None = attrs.field(default=None, kw_only=True, repr=False)

    def _check_url(self, url: str) -> None:
        """Raise LocalError if it is none of such a server."""

    def _check_headers(self, headers: Mapping[str, str]) -> None:
        """Raise LocalError if one cannot be set."""

    @property
    def key(self) -> object:
        """A key that is equal for the same server, under which its era is remembered."""
        return (self._secure, self.url, self.uds)

    @property
    def socket(self) -> str | None:
        """The path of the Unix socket to connect to, or None for TCP."""
        return socket_path(self.url, self.uds)

    async def dialed(self, protocols: Sequence[str] = ()) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
        """Connect. `protocols` are offered with TLS (ALPN). Raises ConnectionLost: the text says why and what to do."""
        parts = urlsplit(self.url)
        tls = (self.ssl_context or ssl.create_default_context()) if parts.scheme == self._secure else None
        if tls is not None and protocols:
            tls.set_alpn_protocols(protocols)
        host, port = str(parts.hostname), parts.port or self._ports[parts.scheme]
        trusting = "pass ssl_context= with what to trust"
        try:
            return await dial(host, port, path=self.socket, tls=tls, timeout=self.timeout, trusting=trusting)
        except ConnectionLost as error:
            raise ConnectionLost(f"cannot connect to {shown_url(self.url)}: {error}") from error.__cause__


def unreachable(error: BaseException, trusting: str) -> str | None:
    """Return why connecting failed and what to check, without the address; None if it was neither network nor TLS.

    The reason may be a cause of `error`, at any depth. `trusting`: see `dial`.
    """
    told: BaseException | None = error
    while told is not None:
        if isinstance(told, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({told.verify_message}); {trusting}"
        if isinstance(told, ssl.SSLError):
            return f"TLS failed ({told.reason}); does the server speak TLS on this port?"
        if isinstance(told, gaierror):
            return f"no address is known for this host ({told.strerror})"
        if isinstance(told, OSError):
            # Each address of the host was tried; usually all attempts failed for the same reason.
            reasons = sorted({_reason(each) for each in leaves(told.__cause__ or told)})
            return f"{'; '.join(reasons)}; is the server running, and is this its address?"
        told = told.__cause__ or told.__context__
    return None


def _reason(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else str(error)
