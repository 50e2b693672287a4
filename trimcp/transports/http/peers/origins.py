"""Protection from pages in browsers: Origin, Host and CORS.

Any page can make a browser send requests to a server on the user's own machine. By rebinding its own host name it can
even read the responses. Both are visible in the head of the request: a foreign Origin, and a Host that is not ours.
(Specification, "Transports", "Security Warning"; RFC 6454; Fetch, "CORS protocol".) Values are parsed and compared as a
whole, never by prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import IPv6Address
from typing import Final, TypeAlias

import attrs

from trimcp.support.addresses import PORTS, is_loopback
from trimcp.support.bounds import is_token
from trimcp.support.cleaning import in_quotes
from trimcp.transports.http.interfaces import Head, HttpResponse

_ANY: Final = "*"
_MAX_AGE: Final = 7_200
"""Seconds a browser may cache a preflight: the maximum of Chromium."""

_ORIGIN: Final = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#@\\\s]+)", re.IGNORECASE | re.ASCII)
_AUTHORITY: Final = re.compile(r"([a-z0-9._-]{1,255}|\[[0-9a-f:.]{2,45}\])(?::([0-9]{0,5}))?", re.IGNORECASE | re.ASCII)
_LONGEST: Final = 262  # characters that _AUTHORITY can match
_LONGEST_PARAMETER: Final = 128

_METHODS: Final = "GET, POST, PATCH, DELETE"
_HEADERS: Final = (
    *("Accept", "Authorization", "Content-Type", "Last-Event-ID"),
    *("MCP-Protocol-Version", "Mcp-Session-Id", "Mcp-Method", "Mcp-Name"),
    *("If-Match", "Agent-Id"),  # of agent tools, as is PATCH
)
_PARAMETER: Final = "mcp-param-"
_MAX_PARAMETERS: Final = 64
_EXPOSED: Final = "ETag, Mcp-Session-Id, MCP-Protocol-Version, Retry-After, WWW-Authenticate"

_Place: TypeAlias = tuple[str, int | None]
"""A host in normalized spelling, and the port given with it."""


def _as_tuple(entries: str | Iterable[str]) -> tuple[str, ...]:
    return (entries,) if isinstance(entries, str) else tuple(entries)


@attrs.frozen
class Origins:
    """The pages and host names that may reach a server.

    A request without Origin is no cross-origin request of a browser and is admitted. With an Origin, it is admitted if
    the page was loaded from this server, or from one of `allow_origins`.

    The Host is checked where an untrusted page could have rebound its name to us. On a loopback address, "localhost"
    and loopback addresses are admitted with any port. Once `allowed_hosts` is set, the Host is checked everywhere. Over
    a Unix socket, which no browser reaches, any Host is admitted unless `allowed_hosts` is set.

    **Behind a proxy**, name the public host in `allowed_hosts`. The Host is then known to be ours. A page of the same
    host that was loaded over https counts as this server's, although the proxy uses plain http to us.

    Args:
        allow_origins: pages of other origins that may call, as a browser writes them ("https://app.example",
            "http://localhost:6274"), or "*" for all. Any of them turns CORS on.
        allowed_hosts: "mcp.example" (with any port), "mcp.example:8443" (with this one), "*.example" (all names below
            it, not itself), or "*" for all, which turns the protection off.
        allow_headers: names of headers that such pages may send beside those of the protocols: "X-API-Key",
            "traceparent".

    Raises:
        ValueError: an entry is none of these; the text says what to write.
    """

    allow_origins: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)
    allowed_hosts: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)
    allow_headers: tuple[str, ...] = attrs.field(default=(), converter=_as_tuple)
    _origins: frozenset[tuple[str, str, int | None]] = attrs.field(
        init=False, repr=False, eq=False, default=attrs.Factory(lambda self: self._read_origins(), takes_self=True)
    )
    _hosts: frozenset[_Place] = attrs.field(
        init=False, repr=False, eq=False, default=attrs.Factory(lambda self: self._read_hosts(), takes_self=True)
    )
    _suffixes: tuple[_Place, ...] = attrs.field(
        init=False, repr=False, eq=False, default=attrs.Factory(lambda self: self._read_suffixes(), takes_self=True)
    )

    def __attrs_post_init__(self) -> None:
        for name in self.allow_headers:
            if not is_token(name) or name == _ANY:
                raise ValueError(f"{name!r} is no name of a header: write each one, as in 'X-API-Key'")

    def _read_origins(self) -> frozenset[tuple[str, str, int | None]]:
        found = set()
        for entry in self.allow_origins:
            if entry == _ANY:
                continue
            origin = _parse_origin(entry)
            if origin is None:
                raise ValueError(
                    f"{entry!r} is no origin: write scheme, host and perhaps port, as in "
                    "'https://app.example:8443', without a path and in ASCII (xn--), or '*'"
                )
            found.add(origin)
        return frozenset(found)

    def _read_hosts(self) -> frozenset[_Place]:
        return frozenset(_named(entry) for entry in self.allowed_hosts if not entry.startswith(_ANY))

    def _read_suffixes(self) -> tuple[_Place, ...]:
        found = []
        for entry in self.allowed_hosts:
            if entry.startswith(_ANY) and entry != _ANY:
                if not entry.startswith("*."):
                    raise ValueError(f"{entry!r} is no host: '*' stands alone or before a dot, as in '*.example'")
                host, port = _named(entry[2:])
                found.append((f".{host}", port))
        return tuple(found)

    def refuse(self, head: Head) -> str | None:
        """Return why a request must be refused (403), or None. The text is safe for logs and for the peer."""
        host = head.headers.get("host")
        if (head.loopback or self.allowed_hosts) and not self._knows(host, head):
            return f"the Host {in_quotes(host)} is not allowed here" if host else "there is no Host"
        return self.refuse_origin(head)

    def refuse_origin(self, head: Head) -> str | None:
        """Return why a request's Origin is refused (403), or None. The Host is not checked."""
        origin = head.headers.get("origin")
        if origin is None or self._allows(origin) or self._is_ours(origin, head):
            return None
        return f"the Origin {in_quotes(origin)} is not allowed here"

    def cors(self, head: Head) -> tuple[tuple[str, str], ...]:
        """Return the headers that let a page of an allowed origin read the response to this request."""
        if not self.allow_origins:
            return ()
        vary = () if _ANY in self.allow_origins else (("Vary", "Origin"),)
        allowed = self._allowed(head)
        if allowed is None:
            return vary
        return (("Access-Control-Allow-Origin", allowed), ("Access-Control-Expose-Headers", _EXPOSED), *vary)

    def preflight(self, head: Head) -> HttpResponse | None:
        """Return the response to a CORS preflight, or None if this request is none."""
        if head.method != "OPTIONS" or "access-control-request-method" not in head.headers:
            return None
        allowed = self._allowed(head)
        if allowed is None:
            return None
        requested = head.headers.get("access-control-request-headers", "")
        headers = (
            ("Access-Control-Allow-Origin", allowed),
            ("Access-Control-Allow-Methods", _METHODS),
            ("Access-Control-Allow-Headers", ", ".join((*_HEADERS, *self.allow_headers, *_parameters(requested)))),
            ("Access-Control-Max-Age", str(_MAX_AGE)),
            ("Vary", "Origin, Access-Control-Request-Headers"),
        )
        return HttpResponse(204, headers)

    def _allowed(self, head: Head) -> str | None:
        origin = head.headers.get("origin")
        if origin is None or not self._allows(origin):
            return None
        return _ANY if _ANY in self.allow_origins else origin

    def _allows(self, origin: str) -> bool:
        if not self.allow_origins:
            return False
        if origin == "null":  # a page in a sandbox or from a file has no origin, so only "*" allows it
            return _ANY in self.allow_origins
        parsed = _parse_origin(origin)
        return parsed is not None and (_ANY in self.allow_origins or parsed in self._origins)

    def _is_ours(self, origin: str, head: Head) -> bool:
        """Whether the page was loaded from this server."""
        parsed = _parse_origin(origin)
        place = _parse_authority(head.headers.get("host", ""))
        if parsed is None or place is None or parsed[0] not in PORTS:
            return False
        scheme, host, port = parsed
        reached = "https" if head.secure else "http"
        # A proxy may have removed TLS, but never added it.
        unwrapped = (scheme, reached) == ("https", "http") and bool(self.allowed_hosts)
        if scheme != reached and not unwrapped:
            return False
        return (host, port) == (place[0], PORTS[scheme] if place[1] is None else place[1])

    def _knows(self, host: str | None, head: Head) -> bool:
        if head.peer == "unix" and not self.allowed_hosts:
            return True
        place = _parse_authority(host) if host else None
        if place is None:
            return False
        if head.loopback and is_loopback(place[0]):  # no name server can change the address of these names
            return True
        name, port = place
        return (
            _ANY in self.allowed_hosts
            or (name, None) in self._hosts
            or place in self._hosts
            or any(name.endswith(suffix) and wanted in (None, port) for suffix, wanted in self._suffixes)
        )


def _named(entry: str) -> _Place:
    place = _parse_authority(entry)
    if place is None:
        raise ValueError(
            f"{entry!r} is no host: write a name or an address and perhaps a port, as in 'mcp.example:8443', without a "
            "scheme and in ASCII (xn--)"
        )
    return place


def _parse_origin(text: str) -> tuple[str, str, int | None] | None:
    """Return scheme, host and port of an origin, or None if it is invalid. The default port is the scheme's."""
    match = _ORIGIN.fullmatch(text)
    if match is None:
        return None
    place = _parse_authority(match[2])
    if place is None:
        return None
    scheme = match[1].lower()
    return scheme, place[0], PORTS.get(scheme) if place[1] is None else place[1]


def _parse_authority(text: str) -> _Place | None:
    """Return a host in normalized spelling, with its port if given, or None if it is invalid."""
    return _read_authority(text) if len(text) <= _LONGEST else None


@lru_cache(256)  # clients send the same host with each request
def _read_authority(text: str) -> _Place | None:
    match = _AUTHORITY.fullmatch(text)
    if match is None:
        return None
    host = _parse_host(match[1].lower())
    port = int(match[2]) if match[2] else None
    return None if host is None or (port is not None and port > 65_535) else (host, port)


def _parse_host(host: str) -> str | None:
    if not host.startswith("["):
        return host
    try:
        return f"[{IPv6Address(host[1:-1])}]"
    except ValueError:
        return None


def _parameters(requested: str) -> Iterator[str]:
    """Yield the headers with tool arguments among the requested ones: each tool has its own."""
    names = [name.strip(" \t") for name in requested.split(",")]
    wanted = (
        name
        for name in names
        if name.lower().startswith(_PARAMETER) and is_token(name) and len(name) <= _LONGEST_PARAMETER
    )
    for _, name in zip(range(_MAX_PARAMETERS), wanted, strict=False):
        yield name
