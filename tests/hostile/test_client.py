"""Our client connected to servers that mean harm."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest
import trio
import trio.testing

import trimcp
from tests.guarantees.report import figure
from tests.hostile.peers import MIB, forget_peak, grown, memory_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

_SERVER = """
import json, os, random, sys
out = sys.stdout.buffer

def say(message):
    out.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\\n")
    out.flush()

def tell(method, **params):
    say({"method": method, "params": params})

OFFERS = {"tools": {}, "logging": {}}
for line in sys.stdin.buffer:
    message = json.loads(line)
    id, params = message.get("id"), message.get("params") or {}
    if message.get("method") == "initialize":
        hello = {"protocolVersion": "2025-11-25", "capabilities": OFFERS, "serverInfo": {"name": "h", "version": "1"}}
        say({"id": id, "result": hello})
    elif message.get("method") == "server/discover":
        say({"id": id, "error": {"code": -32601, "message": "no"}})
    elif "method" in message and id is not None:
        token = params.get("_meta", {}).get("progressToken")
        last = {"id": id, "result": {"content": []}}
"""

PROGRESS = """
        for n in range(200_000):
            line = {"jsonrpc": "2.0", "method": "notifications/progress",
                    "params": {"progressToken": token, "progress": n, "message": "m"}}
            out.write(json.dumps(line).encode() + b"\\n")
        say(last)
"""
LARGE_PROGRESS = """
        for n in range(100):
            tell("notifications/progress", progressToken=token, progress=n, message="x" * 2_000_000)
        say(last)
"""
LARGE_LOGS = """
        for n in range(100):
            tell("notifications/message", level="info", data="x" * 2_000_000)
        say(last)
"""
GARBAGE = """
        for n in range(2_000):
            out.write(b"Listening... \\xff\\xfe {[\\n")
        out.write(b"x" * (70 * 1024 * 1024) + b"\\n")
        say(last)
"""
TOO_LARGE = """
        out.write(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"' % id)
        out.write(b"x" * (70 * 1024 * 1024) + b'"}]}}\\n')
        out.flush()
        tell("notifications/message", level="info", data="still here")
"""
MUTATIONS = """
        rng = random.Random(20_000)
        seeds = [
            {"id": id, "result": {"content": [{"type": "text", "text": "x"}]}},
            {"id": "q", "method": "roots/list"},
            {"id": 10**6, "error": {"code": -32600, "message": "x", "data": {}}},
            {"method": "notifications/progress", "params": {"progressToken": token, "progress": 1}},
            {"method": "notifications/message", "params": {"level": "info", "data": {"a": [1]}}},
            {"method": "notifications/tools/list_changed"},
            {"method": "notifications/cancelled", "params": {"requestId": "q"}},
        ]
        for n in range(20_000):
            data = bytearray(json.dumps({"jsonrpc": "2.0", **rng.choice(seeds[1:])}).encode())
            for _ in range(rng.randrange(1, 4)):
                place = rng.randrange(len(data))
                if rng.random() < 0.5:
                    data[place] = rng.randrange(256)
                else:
                    data[place : place + rng.randrange(1, 8)] = rng.choice([b"", b"null", b"[]", b"1e999", b"\\xff"])
            out.write(bytes(data).replace(b"\\n", b" ") + b"\\n")
            out.flush()
        say(last)
"""


def hostile(tail: str) -> trimcp.StdioServer:
    return trimcp.stdio(sys.executable, "-c", textwrap.dedent(_SERVER) + tail)


async def test_endless_progress_is_kept_up_to_a_number() -> None:
    async with trimcp.Client("c").connect(hostile(PROGRESS)) as session:
        base = forget_peak()
        async with session.calling("x") as call:
            await call.result()
            assert len([each async for each in call.progress]) == 1_024
        assert grown(base) <= 4 * MIB
        assert session.statistics().dropped == 200_000 - 1_024


async def test_large_progress_is_kept_up_to_a_weight() -> None:
    async with trimcp.Client("c").connect(hostile(LARGE_PROGRESS)) as session:
        base = forget_peak()
        async with session.calling("x") as call:
            await call.result()
            assert [each.progress async for each in call.progress] == [98, 99]
        assert grown(base) <= 32 * MIB


async def test_large_logs_are_kept_up_to_a_weight_while_their_handler_is_slow() -> None:
    client = trimcp.Client("c")

    @client.logging
    async def handle(params: trimcp.LoggingMessageParams) -> None:
        await trio.sleep_forever()

    async with client.connect(hostile(LARGE_LOGS)) as session:
        base = forget_peak()
        await session.call_tool("x")
        assert grown(base) <= 32 * MIB
        assert session.statistics().dropped >= 97


async def test_garbage_and_a_line_without_measure_are_survived() -> None:
    async with trimcp.Client("c").connect(hostile(GARBAGE)) as session:
        base = forget_peak()
        await session.call_tool("x")
        assert grown(base) <= 100 * MIB
        await session.call_tool("x")


async def test_an_answer_that_is_too_large_fails_its_call_only() -> None:
    async with trimcp.Client("c").connect(hostile(TOO_LARGE)) as session:
        with pytest.raises(trimcp.InvalidReply, match="larger than 67,108,864 bytes"):
            await session.call_tool("x")
        assert session.session.lost is None


@pytest.mark.parametrize("roots", [False, True])
async def test_twenty_thousand_mutations_from_a_server_do_no_harm(roots: bool) -> None:
    client = trimcp.Client("c")
    if roots:
        client.set_roots(["file:///a"])
    async with client.connect(hostile(MUTATIONS)) as session:
        with trio.fail_after(60):
            await session.call_tool("x")
            base = memory_of(os.getpid())
            before = trio.lowlevel.current_statistics().tasks_living, len(os.listdir("/proc/self/fd"))
            await session.call_tool("x")
        kept = memory_of(os.getpid()) - base
        on = "stdio, client with roots" if roots else "stdio, client"
        figure(12, "kept after 20,000 mutations", round(kept / MIB, 3), 2, "MiB", on)
        assert kept <= 2 * MIB
        await trio.testing.wait_all_tasks_blocked(0.1)
        assert (trio.lowlevel.current_statistics().tasks_living, len(os.listdir("/proc/self/fd"))) == before
