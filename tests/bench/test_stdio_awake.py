"""A server that is started: its process is awake before anything is measured."""

from __future__ import annotations

import sys

import pytest

from tests.bench.support import a_load
from trimcp.bench.caller import Caller
from trimcp.bench.stdio import stdio_opener
from trimcp.errors import ConnectionLost
from trimcp.transports.child import StdioServer
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, Revision

ANSWERING = """
import json
request = json.loads(input())
print("no JSON")
print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "hello"}}))
print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": request["method"]}}))
print(json.dumps({"asked": request}), flush=True)
input()
"""


async def first_words(program: str, revision: Revision, patience: float = 10.0) -> bytes:
    """Open a session with such a program and return the last thing it says."""
    load = a_load(revision, patience=patience)
    server = StdioServer((sys.executable, "-c", program))
    async with stdio_opener(server)(load, Caller(load.supply, 1)) as road:
        assert len(load.pids) == 1
        return (await road.receive())[-1]


async def test_a_modern_server_has_answered_before_it_is_called() -> None:
    program = ANSWERING.replace('print(json.dumps({"asked"', 'input(); print(json.dumps({"asked"')
    load = a_load(LATEST)
    async with stdio_opener(StdioServer((sys.executable, "-c", program)))(load, Caller(load.supply, 1)) as road:
        # It has read one line; only the next one makes it say which.
        road.send([b"{}"])
        said = (await road.receive())[-1]
    assert b'"method": "server/discover"' in said
    assert LATEST.name.encode() in said


async def test_a_legacy_server_is_left_to_its_handshake() -> None:
    assert await first_words("print('unasked', flush=True); input()", LATEST_LEGACY) == b"unasked"


@pytest.mark.parametrize(
    ("program", "told"),
    [("import sys; sys.exit('my last words')", "my last words"), ("input(); input()", "not ready within 0.2 seconds")],
)
async def test_a_server_that_does_not_wake_up_is_no_connection(program: str, told: str) -> None:
    with pytest.raises(ConnectionLost, match=told):
        await first_words(program, LATEST, patience=0.2 if "ready" in told else 10.0)
