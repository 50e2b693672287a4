"""What the others notice of a client that asks for much and reads nothing, and what a server keeps for it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlsplit

from cells import LEGACY, Cell
from environments import Peer
from servers import Failed, ask, serving

__all__ = ["measure", "session"]

REPORTS = 200_000
ACCEPT = "application/json, text/event-stream"
# As little as there is on the client's side, so that it is the server who has to decide what to do with the rest.
RECEIVE_BUFFER = 16 << 10


def measure(python: str, peer: Peer, cell: Cell, *, seconds: float, warm_up: float) -> dict[str, tuple[str, float]]:
    """Return unit and value of each figure of one turn.

    Raises:
        Failed: the others were not answered, or the slow one was not let in.
    """
    with serving(peer, cell) as server:
        # The first request that a server has ever seen is slow everywhere, hence the warm-up.
        alone = ask(python, peer, cell, server, seconds=seconds, warm_up=f"{3 * warm_up:g}")
        before = server.resident
        with session(server.url) as (connection, headers), _not_reading(connection, headers):
            beside = ask(python, peer, cell, server, seconds=seconds, warm_up=f"{warm_up:g}")
            after = server.resident
    return {
        "p99-alone": ("ms", alone["latency_ms"]["p99"]),
        "p99": ("ms", beside["latency_ms"]["p99"]),
        "held": ("MiB", max(after - before, 0) / 2**20),
        "generator": ("share of a core", beside["generator"]["busy"]),
    }


@contextmanager
def session(url: str) -> Iterator[tuple[HTTPConnection, dict[str, str]]]:
    """Open a session of 2025-11-25, and close its connection with the block.

    Raises:
        Failed: the server did not open one.
    """
    place = urlsplit(url)
    assert place.hostname is not None
    connection = HTTPConnection(place.hostname, place.port, timeout=10)
    headers = {"Content-Type": "application/json", "Accept": ACCEPT}
    client = {"name": "bench", "version": "1.0"}
    params = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": client}
    try:
        connection.request("POST", place.path, _body("initialize", params, id=1), headers)
        response = connection.getresponse()
        response.read()
        if response.status != 200:
            raise Failed(f"initialize: {response.status}")
        headers["MCP-Protocol-Version"] = LEGACY
        if (name := response.getheader("Mcp-Session-Id")) is not None:
            headers["Mcp-Session-Id"] = name
        connection.request("POST", place.path, _body("notifications/initialized"), headers)
        response = connection.getresponse()
        response.read()
        if response.status != 202:
            raise Failed(f"initialized: {response.status}")
        yield connection, headers
    except OSError as error:
        raise Failed(f"no session: {error}") from None
    finally:
        connection.close()


@contextmanager
def _not_reading(connection: HTTPConnection, headers: dict[str, str]) -> Iterator[None]:
    """Ask for a great many notifications, and read none."""
    params = {"name": "stream", "arguments": {"n": REPORTS}, "_meta": {"progressToken": "slow"}}
    body = _body("tools/call", params, id=2)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        slow.settimeout(10)
        slow.connect((connection.host, connection.port))
        head = f"POST /mcp HTTP/1.1\r\nHost: {connection.host}:{connection.port}\r\nContent-Length: {len(body)}\r\n"
        slow.sendall(f"{head}{lines}\r\n".encode() + body)
        # Its beginning, to be sure that the stream has begun.
        if b" 200 " not in (answer := slow.recv(64)):
            raise Failed(f"the slow reader's call: {answer!r}")
        yield


def _body(method: str, params: dict[str, object] | None = None, *, id: int | None = None) -> bytes:
    message: dict[str, object] = {"jsonrpc": "2.0", "method": method}
    if params is not None:
        message["params"] = params
    if id is not None:
        message["id"] = id
    return json.dumps(message).encode()
