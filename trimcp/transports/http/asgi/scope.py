"""What an ASGI scope says about a request, as a `Head`. (ASGI specification, "HTTP & WebSocket ASGI Message Format".)

It knows the scope's quirks: prefixes that servers and routers tell in different ways, headers as pairs of bytes. It
calls nobody.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import attrs

from trimcp.transports.http.seams import Head, HttpResponse

__all__ = ["HUNG_UP", "MESSAGES", "AsgiEvent", "Receive", "Scope", "Send", "plain", "read_head"]

Scope: TypeAlias = MutableMapping[str, Any]
"""What the server knows when it calls the application."""

AsgiEvent: TypeAlias = MutableMapping[str, Any]
"""What server and application tell each other during a call."""

Receive: TypeAlias = Callable[[], Awaitable[AsgiEvent]]
Send: TypeAlias = Callable[[AsgiEvent], Awaitable[None]]

HUNG_UP: Final = "trimcp.hung_up"
"""The extension of a `websocket` scope that waits until the peer is gone, whatever of it was not received yet."""

MESSAGES: Final = "trimcp.messages"
"""The extension of a `websocket` scope that is told, before the first message, how large one may be, and what counts
the beginning of one (a `Holding`)."""


def plain(status: int, text: str, *headers: tuple[str, str]) -> HttpResponse:
    """Return a response of one line of text: a host's own words, before any face was asked."""
    return HttpResponse(status, (("Content-Type", "text/plain; charset=utf-8"), *headers), f"{text}\n".encode())


def read_head(scope: Scope, root: str = "") -> Head | HttpResponse:
    """Return the head of the request that an `http` or `websocket` scope describes, or its refusal.

    `root` is the prefix under which the face is mounted, where the scope's `root_path` does not tell.
    """
    headers = _headers(scope["headers"])
    authority = headers.pop(":authority", None)
    hosts = headers.pop("host", None) or authority or []
    # Two are how a request is smuggled past a check of one of them; a server may have joined them already.
    if len(hosts) != 1 or not hosts[0] or "," in hosts[0]:
        return plain(400, "a request needs exactly one Host")
    if "transfer-encoding" in headers and "content-length" in headers:
        # Whoever stands before the server may have taken the other one, and what follows for a part of this body.
        refusal = plain(400, "the body is delimited in no way that everybody reads alike")
        return attrs.evolve(refusal, headers=(*refusal.headers, ("Connection", "close")))
    joined = {name: ", ".join(values) for name, values in headers.items() if name[:1] != ":"}
    joined["host"] = hosts[0]
    root = (scope.get("root_path") or root).rstrip("/")
    return Head(
        method=scope.get("method", "GET"),
        path=_below(root, scope),
        query=scope.get("query_string", b"").decode("latin-1"),
        headers=joined,
        peer=_peer(scope.get("client")),
        loopback=_is_loopback(scope.get("server")),
        secure=scope.get("scheme") in ("https", "wss"),
        root=root,
        websocket=scope["type"] == "websocket",
    )


def _headers(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in pairs:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip(" \t"))
    return found


def _below(root: str, scope: Scope) -> str:
    """Return the path below the prefix: some routers cut it off, others leave it and only tell `root_path`."""
    path: str = scope["path"]
    if not root or not (path == root or path.startswith(f"{root}/")):
        return path or "/"
    raw = scope.get("raw_path")
    if raw and unquote(raw.decode("latin-1").partition("?")[0]) == root + path:
        return path  # what is cut off already may look as if it were not: /mcp below /mcp
    return path[len(root) :] or "/"


def _peer(client: tuple[str, int | None] | None) -> str:
    if client is None or client[1] is None:
        return "unix"
    host, port = client
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(server: tuple[str, int | None] | None) -> bool:
    """Tell whether a request came in over loopback; when in doubt it did, because that is checked more strictly."""
    if server is None or server[1] is None:
        return True
    try:
        address = ipaddress.ip_address(server[0])
    except ValueError:
        return True
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
