"""The first generation of the official Python SDK's client drives our server. It runs where `mcp` 1 is installed.

    python tests/interop/official_client_1.py http|sse|ws ADDRESS LOSSY_ADDRESS SCENARIO...

Prints a line of JSON for each scenario: its name, and what went wrong in it, or nothing. An address is a server's
without path; the second leads through a relay that loses connections.
"""

import base64
import json
import sys
import traceback
import warnings
from contextlib import asynccontextmanager
from datetime import timedelta
from itertools import count
from typing import Any

import anyio
import httpx
import mcp.types as t
from mcp import ClientSession, McpError
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from pydantic import AnyUrl

warnings.simplefilter("ignore", DeprecationWarning)

OLDER = ["2025-06-18", "2025-03-26", "2024-11-05"]
names = count()


class Peer:
    """Opens sessions over one transport."""

    def __init__(self, transport: str, address: str, lossy: str) -> None:
        self.transport = transport
        self.address = address
        self.lossy = lossy

    @asynccontextmanager
    async def session(self, *, address: str | None = None, **callbacks: Any):
        """A session that has been initialized."""
        async with self.streams(address or self.address) as streams, ClientSession(*streams, **callbacks) as session:
            await session.initialize()
            yield session

    @asynccontextmanager
    async def streams(self, address: str):
        if self.transport == "http":
            async with streamable_http_client(f"{address}/mcp") as (read, write, _):
                yield read, write
        elif self.transport == "sse":
            async with sse_client(f"{address}/sse") as streams:
                yield streams
        else:
            from mcp.client.websocket import websocket_client

            async with websocket_client(f"{address.replace('http', 'ws', 1)}/ws") as streams:
                yield streams

    def name(self) -> str:
        """A name that nobody else gives."""
        return f"{self.transport}-{next(names)}"


def text_of(result: t.CallToolResult) -> str:
    """The text of a result that consists of text alone."""
    assert not result.isError, result
    (content,) = result.content
    assert isinstance(content, t.TextContent)
    return content.text


async def introduction(peer: Peer) -> None:
    async with peer.streams(peer.address) as streams, ClientSession(*streams) as session:
        hello = await session.initialize()
        assert hello.protocolVersion == "2025-11-25", hello.protocolVersion
        assert (hello.serverInfo.name, hello.serverInfo.version) == ("interop", "1.0")
        assert hello.instructions == "Ask for anything."
        await session.send_ping()


async def older_revisions(peer: Peer) -> None:
    newest = t.LATEST_PROTOCOL_VERSION
    try:
        for revision in OLDER:
            t.LATEST_PROTOCOL_VERSION = revision
            async with peer.streams(peer.address) as streams, ClientSession(*streams) as session:
                assert (await session.initialize()).protocolVersion == revision
                assert text_of(await session.call_tool("echo", {"text": revision})) == revision
                steps = []

                async def on_progress(progress: float, total: float | None, message: str | None, steps=steps) -> None:
                    steps.append(progress)

                assert text_of(await session.call_tool("count", {"to": 5}, progress_callback=on_progress)) == "done"
                assert steps == [1, 2, 3, 4, 5], steps
    finally:
        t.LATEST_PROTOCOL_VERSION = newest


async def tools(peer: Peer) -> None:
    async with peer.session() as session:
        tools = {tool.name: tool for tool in (await session.list_tools()).tools}
        assert tools["echo"].inputSchema["required"] == ["text"]
        assert tools["add"].outputSchema["properties"]["total"]["type"] == "integer"
        assert text_of(await session.call_tool("echo", {"text": "grüße 🎈\n"})) == "grüße 🎈\n"
        assert (await session.call_tool("add", {"a": 2, "b": 3})).structuredContent == {"total": 5}


async def errors(peer: Peer) -> None:
    async with peer.session() as session:
        failed = await session.call_tool("fail", {})
        assert failed.isError
        assert failed.content[0].text == "no luck today"
        wrong = await session.call_tool("add", {"a": 2, "b": "three"})
        assert wrong.isError
        assert "@ b" in wrong.content[0].text
        error = await error_of(session.call_tool("crash", {}))
        assert error.code == t.INTERNAL_ERROR
        assert "swordfish" not in error.model_dump_json()
        assert (await error_of(session.call_tool("no_such_tool", {}))).code == t.INVALID_PARAMS
        assert (await error_of(session.read_resource(AnyUrl("interop://nowhere")))).code == -32002
        assert text_of(await session.call_tool("echo", {"text": "still here"})) == "still here"


async def error_of(call: Any) -> t.ErrorData:
    """The error that a call ends with."""
    try:
        result = await call
    except McpError as error:
        return error.error
    raise AssertionError(f"no error but {result}")


async def progress(peer: Peer) -> None:
    seen = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))

    async with peer.session() as session:
        await session.call_tool("count", {"to": 50}, progress_callback=on_progress)
        assert seen == [(n, 50, f"now {n}") for n in range(1, 51)], seen


async def logging(peer: Peer) -> None:
    logs = []

    async def on_log(params: t.LoggingMessageNotificationParams) -> None:
        logs.append((params.level, params.data))

    async with peer.session(logging_callback=on_log) as session:
        await session.set_logging_level("error")
        await session.call_tool("warn", {"text": "too low"})
        await session.set_logging_level("warning")
        await session.call_tool("warn", {"text": "just right"})
        assert logs == [("warning", "just right")], logs


async def cancellation(peer: Peer) -> None:
    async with peer.session() as session:
        name = {"name": peer.name()}
        call_id = session._request_id  # the client has no other way to say which call it means
        waiting = anyio.Event()

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            waiting.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: session.call_tool("wait_for_ever", name, progress_callback=on_progress))
            await waiting.wait()
            params = t.CancelledNotificationParams(requestId=call_id, reason="given up")
            await session.send_notification(t.ClientNotification(t.CancelledNotification(params=params)))
            assert text_of(await session.call_tool("was_cancelled", name)) == "stopped"
            tasks.cancel_scope.cancel()


async def timeout(peer: Peer) -> None:
    """This client tells nobody when it stops waiting, so the server's work ends with the session."""
    name = {"name": peer.name()}
    async with peer.session() as session:
        call = session.call_tool("wait_for_ever", name, read_timeout_seconds=timedelta(seconds=1))
        assert (await error_of(call)).code == httpx.codes.REQUEST_TIMEOUT
        assert text_of(await session.call_tool("echo", {"text": "still here"})) == "still here"
    async with peer.session() as session:
        assert text_of(await session.call_tool("was_cancelled", name)) == "stopped"


async def questions(peer: Peer) -> None:
    async def elicit(context: Any, params: t.ElicitRequestParams) -> t.ElicitResult:
        content = {"name": "Ada"} if "name" in params.message else {"colour": "green"}
        return t.ElicitResult(action="accept", content=content)

    async def sample(context: Any, params: t.CreateMessageRequestParams) -> t.CreateMessageResult:
        assert params.maxTokens == 50
        content = t.TextContent(type="text", text="42")
        return t.CreateMessageResult(role="assistant", model="deep-thought", content=content)

    async def roots(context: Any) -> t.ListRootsResult:
        return t.ListRootsResult(roots=[t.Root(uri="file:///srv/data", name="data")])

    callbacks = {"elicitation_callback": elicit, "sampling_callback": sample, "list_roots_callback": roots}
    async with peer.session(**callbacks) as session:
        assert text_of(await session.call_tool("greet", {})) == "Ada likes green"
        thought = text_of(await session.call_tool("think", {"question": "the answer?"}))
        assert thought == "deep-thought says 42"
        assert "file:///srv/data" in (await session.call_tool("places", {})).model_dump_json()


async def questions_it_cannot_answer(peer: Peer) -> None:
    async with peer.session() as session:
        for tool, arguments in (("greet", {}), ("think", {"question": "?"}), ("places", {})):
            assert (await session.call_tool(tool, arguments)).isError


async def resources(peer: Peer) -> None:
    async with peer.session() as session:
        listed = {str(resource.uri) for resource in (await session.list_resources()).resources}
        assert listed == {"interop://greeting", "interop://bytes"}
        (template,) = (await session.list_resource_templates()).resourceTemplates
        assert template.uriTemplate == "interop://items/{name}"
        (text,) = (await session.read_resource(AnyUrl("interop://greeting"))).contents
        assert text.text == "hello"
        (blob,) = (await session.read_resource(AnyUrl("interop://bytes"))).contents
        assert base64.b64decode(blob.blob) == bytes(range(256))
        (item,) = (await session.read_resource(AnyUrl("interop://items/lamp"))).contents
        assert item.text == "item lamp"


async def prompts(peer: Peer) -> None:
    async with peer.session() as session:
        (prompt,) = (await session.list_prompts()).prompts
        assert [(argument.name, argument.required) for argument in prompt.arguments] == [("path", True)]
        (message,) = (await session.get_prompt("review", {"path": "setup.py"})).messages
        assert message.content.text == "Please review setup.py."
        reference = t.PromptReference(type="ref/prompt", name="review")
        found = await session.complete(reference, {"name": "path", "value": "set"})
        assert found.completion.values == ["setup.py", "setup.cfg"]


async def changes(peer: Peer) -> None:
    sender, receiver = anyio.create_memory_object_stream(10)

    async def on_message(message: Any) -> None:
        if isinstance(message, t.ServerNotification):
            await sender.send(message.root.method)

    with sender, receiver:
        async with peer.session(message_handler=on_message) as session:
            await session.subscribe_resource(AnyUrl("interop://greeting"))
            name = f"new-{peer.name()}"
            await session.call_tool("grow", {"name": name})
            heard = {await receiver.receive(), await receiver.receive()}
            assert heard == {"notifications/resources/updated", "notifications/tools/list_changed"}
            assert text_of(await session.call_tool(name, {})) == "new"
            await session.unsubscribe_resource(AnyUrl("interop://greeting"))
            await session.call_tool("grow", {"name": f"newer-{name}"})
            assert await receiver.receive() == "notifications/tools/list_changed"
            assert receiver.statistics().current_buffer_used == 0


async def large_result(peer: Peer) -> None:
    # The WebSocket client takes no more than 1 MiB, and has no setting for it.
    size = 1_000_000 if peer.transport == "ws" else 3_000_000
    async with peer.session() as session:
        assert text_of(await session.call_tool("large", {"size": size})) == "x" * size


async def fifty_calls_at_once(peer: Peer) -> None:
    answers = {}
    async with peer.session() as session:

        async def ask(number: int) -> None:
            answers[number] = text_of(await session.call_tool("echo", {"text": str(number)}))

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(ask, number)
    assert answers == {number: str(number) for number in range(50)}


async def five_sessions_at_once(peer: Peer) -> None:
    async def visit() -> None:
        async with peer.session() as session:
            for number in range(5):
                assert text_of(await session.call_tool("echo", {"text": str(number)})) == str(number)

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(visit)


async def polling(peer: Peer) -> None:
    assert await steps_of(peer, "poll", peer.address) == ["before", "after"]


async def lost_connection(peer: Peer) -> None:
    assert await steps_of(peer, "lose_connection", peer.lossy) == ["cut-here", "after"]


async def steps_of(peer: Peer, tool: str, address: str) -> list[str | None]:
    """The progress of a call, which has to end well."""
    steps = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        steps.append(message)

    async with peer.session(address=address) as session:
        assert text_of(await session.call_tool(tool, {}, progress_callback=on_progress)) == "done"
    return steps


async def lost_stream(peer: Peer) -> None:
    sender, receiver = anyio.create_memory_object_stream(10)

    async def on_message(message: Any) -> None:
        if isinstance(message, t.ServerNotification):
            await sender.send(str(message.root.params.uri))

    with sender, receiver:
        async with peer.session(address=peer.lossy, message_handler=on_message) as session:
            for name in ("cut-here", "lamp"):
                await session.subscribe_resource(AnyUrl(f"interop://items/{name}"))
            for name in ("cut-here", "lamp"):
                await session.call_tool("touch", {"name": name})
                assert await receiver.receive() == f"interop://items/{name}"


async def leaving(peer: Peer) -> None:
    async with httpx.AsyncClient() as http:

        async def ping() -> int:
            headers = {"mcp-session-id": session_id, "accept": "application/json, text/event-stream"}
            message = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            return (await http.post(f"{peer.address}/mcp", json=message, headers=headers)).status_code

        async with (
            streamable_http_client(f"{peer.address}/mcp") as (read, write, get_session_id),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            session_id = get_session_id()
            assert await ping() == 200
        assert await ping() == 404


def main() -> None:
    transport, address, lossy, *wanted = sys.argv[1:]
    peer = Peer(transport, address, lossy)
    for scenario in wanted:
        error = ""
        try:
            anyio.run(bounded, globals()[scenario], peer)
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps({"scenario": scenario, "error": error}), flush=True)


async def bounded(scenario: Any, peer: Peer) -> None:
    with anyio.fail_after(20):
        await scenario(peer)


if __name__ == "__main__":
    main()
