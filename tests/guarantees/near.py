"""Servers in this process, on real sockets, for tests that give them hooks or look at what they log."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import trimcp
from tests.hostile.server_for_attack import make_server
from tests.peers.http1 import http_request, post
from tests.peers.messages import modern_request
from tests.peers.serving import HTTP2, ServedHere, served
from tests.peers.websockets import handshake

__all__ = ["BINDS", "doors", "near"]

BINDS: dict[str, dict[str, Any]] = {
    "127.0.0.1": {"host": "127.0.0.1"},
    "localhost": {"host": "localhost"},
    "0.0.0.0": {"host": "0.0.0.0"},
    "every address": {"host": None},
    "a Unix socket": {"uds": "mcp.sock"},
}


def near(
    host: str,
    server: trimcp.Server[Any] | None = None,
    *,
    bind: str = "127.0.0.1",
    folder: Path | None = None,
    **options: Any,
) -> AbstractAsyncContextManager[ServedHere]:
    """Serve, by default the server under attack, on one of ON_EACH; options are those of `served`."""
    place = dict(BINDS[bind])
    if "uds" in place:
        assert folder is not None
        place["uds"] = folder / place["uds"]
    transport = {"hypercorn": "http on hypercorn", HTTP2: "http/2"}.get(host, "http")
    return served(server or make_server(), transport, **{"grace": 0.1, **place, **options})


def doors(*lines: str, host: str = "localhost") -> list[bytes]:
    """One request to each way in, with these headers."""
    message = modern_request(1, "tools/call", name="echo", arguments={})
    return [
        post(message, *lines).replace(b"Host: localhost", b"Host: %b" % host.encode()),
        http_request("GET", "/sse", "Accept: text/event-stream", *lines, host=host),
        handshake(*lines, host=host),
    ]
