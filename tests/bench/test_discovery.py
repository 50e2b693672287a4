"""What is found out about a server before it is put under load."""

from __future__ import annotations

import pytest
import trio

import trimcp
from tests.bench.test_http import serving
from trimcp.bench.discovery import discover, name_of
from trimcp.bench.engine import measure
from trimcp.bench.plan import Plan, Request
from trimcp.errors import ConnectionLost, LocalError
from trimcp.transports.child import StdioServer
from trimcp.transports.http.client import HttpServer
from trimcp.wire.revisions import LATEST, LATEST_LEGACY


def test_a_server_is_named_without_its_secrets() -> None:
    assert name_of(StdioServer(("python", "my server.py"))) == "python 'my server.py'"
    assert name_of(HttpServer("https://u:p@a.example:1/secret?key=x")) == "https://a.example:1/..."


async def test_everything_is_as_client_and_server_agree() -> None:
    async with serving() as url:
        found = await discover(HttpServer(url), Plan(Request("tools/list")))
        assert (found.transport, found.revision, found.name, found.version) == ("http", LATEST, "right", "1.5")
        found = await discover(HttpServer(url), Plan(Request("tools/list"), revision=LATEST_LEGACY.name))
        assert found.revision == LATEST_LEGACY
        found = await discover(HttpServer(url.removesuffix("/mcp") + "/sse"), Plan(Request("tools/list")))
        assert (found.transport, found.revision) == ("sse", LATEST_LEGACY)


async def test_every_tool_of_a_mix_has_to_be_there() -> None:
    async with serving() as url:
        echo = Request.tool("echo", {"text": ""})
        with pytest.raises(LocalError, match="no tool 'missing'; it has echo, slow, stream, fail"):
            await discover(HttpServer(url), Plan([echo, Request.tool("missing")]))
        await discover(HttpServer(url), Plan([echo, Request.tool("tool_{n}")]))  # which ones is not known yet


async def test_of_many_tools_some_are_named() -> None:
    server = trimcp.Server("many")

    async def nothing() -> str:
        """Do nothing."""
        return ""

    for number in range(30):
        server.add_tool(nothing, name=f"t{number}")
    async with serving(server) as url:
        with pytest.raises(LocalError, match=r"it has t0, .*, t9 and 20 more$"):
            await discover(HttpServer(url), Plan(Request.tool("x")))
    async with serving(trimcp.Server("none")) as url:
        with pytest.raises(LocalError, match=r"it has none$"):
            await discover(HttpServer(url), Plan(Request.tool("x")))


async def never_answer(stream: trio.SocketStream) -> None:
    await trio.sleep_forever()


async def test_a_server_that_never_answers_is_not_waited_for_long() -> None:
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, never_answer, listeners)
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/mcp"
        with pytest.raises(
            ConnectionLost, match=r"not ready: the server did not answer initialize within 0\.2 seconds"
        ):
            await discover(HttpServer(url), Plan(Request("ping"), opening=0.2, revision=LATEST_LEGACY.name))
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
        with trio.fail_after(10), pytest.raises(LocalError, match="ended before anything was measured"):
            await measure(HttpServer(url), Plan(Request("ping")), stop=stop)
        nursery.cancel_scope.cancel()
