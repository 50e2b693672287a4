"""What is found out about a server before it is put under load."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import trio

import trimcp
from tests.bench.test_http import serving
from trimcp.bench.discovery import _check_tool, as_planned, discover, name_of
from trimcp.bench.engine import measure
from trimcp.bench.plan import MixEntry, Plan
from trimcp.errors import ConnectionLost, LocalError
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.stdio.child import StdioServer
from trimcp.wire.revisions import LATEST, LATEST_LEGACY
from trimcp.wire.tools import Tool


def test_a_server_is_named_without_user_and_query() -> None:
    assert name_of(StdioServer(("python", "my server.py"))) == "python 'my server.py'"
    assert name_of(HttpServer("https://u:p@a.example:1/mcp/one?key=x")) == "https://a.example:1/mcp/one?..."


async def test_everything_is_as_client_and_server_agree() -> None:
    async with serving() as url:
        found = await discover(HttpServer(url), Plan(MixEntry("tools/list")))
        assert (found.transport, found.revision, found.name, found.version) == ("http", LATEST, "right", "1.5")
        found = await discover(HttpServer(url), Plan(MixEntry("tools/list"), revision=LATEST_LEGACY.name))
        assert found.revision == LATEST_LEGACY
        found = await discover(HttpServer(url.removesuffix("/mcp") + "/sse"), Plan(MixEntry("tools/list")))
        assert (found.transport, found.revision) == ("sse", LATEST_LEGACY)


async def test_every_tool_of_a_mix_has_to_be_there() -> None:
    async with serving() as url:
        echo = MixEntry.tool("echo", {"text": ""})
        with pytest.raises(LocalError, match="no tool 'missing'; it has echo, slow, stream, fail"):
            await discover(HttpServer(url), Plan([echo, MixEntry.tool("missing")]))
        await discover(HttpServer(url), Plan([echo, MixEntry.tool("tool_{n}")]))  # which ones is not known yet


async def test_an_argument_the_tool_does_not_have_is_told_with_those_it_has() -> None:
    """Many servers ignore it, and then something else would be measured than was meant."""
    server = trimcp.Server("lenient")

    async def pick(color: str = "", *, size: int = 1) -> str:
        """Pick."""
        return ""

    server.add_tool(pick)
    async with serving(server) as url:
        with pytest.raises(LocalError, match="the tool 'pick' has no argument colour; it takes color, size"):
            await discover(HttpServer(url), Plan(MixEntry.tool("pick", {"colour": "red", "size": 2})))
        await discover(HttpServer(url), Plan(MixEntry.tool("pick", {"color": "red", "size": 2})))


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"type": "object", "properties": {"a": {}}}, True),
        ({"type": "object", "properties": {}}, True),
        ({"type": "object"}, False),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}}, False),
        ({"type": "object", "patternProperties": {"^x": {}}}, False),
        ({"type": "object", "anyOf": [{"properties": {"x": {}}}]}, False),
    ],
)
def test_what_else_a_tool_may_take_is_left_to_its_schema(schema: dict[str, Any], refused: bool) -> None:
    tools = {"t": Tool("t", schema)}
    with pytest.raises(LocalError, match="has no argument x") if refused else nullcontext():
        _check_tool(MixEntry.tool("t", {"x": 1}), tools)


async def test_of_many_tools_some_are_named() -> None:
    server = trimcp.Server("many")

    async def nothing() -> str:
        """Do nothing."""
        return ""

    for number in range(30):
        server.add_tool(nothing, name=f"t{number}")
    async with serving(server) as url:
        with pytest.raises(LocalError, match=r"it has t0, .*, t9 and 20 more$"):
            await discover(HttpServer(url), Plan(MixEntry.tool("x")))
    async with serving(trimcp.Server("none")) as url:
        with pytest.raises(LocalError, match=r"it has none$"):
            await discover(HttpServer(url), Plan(MixEntry.tool("x")))


async def never_answer(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def test_a_server_that_never_answers_is_not_waited_for_long() -> None:
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, never_answer, listeners)
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/mcp"
        with pytest.raises(
            ConnectionLost, match=r"not ready: the server did not answer initialize within 0\.5 seconds"
        ):
            await discover(HttpServer(url), Plan(MixEntry("ping"), opening=0.5, revision=LATEST_LEGACY.name))
        nursery.cancel_scope.cancel()


async def test_it_can_be_ended_before_anything_is_known() -> None:
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        reached = trio.Event()
        stop = trio.Event()

        async def serve(stream: trio.SocketStream) -> None:
            reached.set()
            await trio.sleep_forever()

        async def end() -> None:
            await reached.wait()
            stop.set()

        nursery.start_soon(trio.serve_listeners, serve, listeners)
        nursery.start_soon(end)
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/mcp"
        with trio.fail_after(60), pytest.raises(LocalError, match="ended before anything was measured"):
            await measure(HttpServer(url), Plan(MixEntry("ping")), stop=stop)
        nursery.cancel_scope.cancel()


def test_the_server_is_met_over_the_transport_that_is_meant() -> None:
    """By the measurement, and by the command that asks for a tool's schema before."""
    target, stdio = HttpServer("http://x.example/mcp"), StdioServer(("x",))
    modes = {name: getattr(as_planned(target, Plan(transport=name)), "mode", "") for name in ("auto", "http", "sse")}
    assert modes == {"auto": "auto", "http": "streamable", "sse": "sse"}
    assert as_planned(stdio, Plan(transport="sse")) is stdio
