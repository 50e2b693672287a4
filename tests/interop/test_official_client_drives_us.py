"""The official Python SDK's client against our server, in both eras: over a pipe, HTTP and HTTP+SSE, on both our hosts.

It runs on asyncio, as it does for the people who use it; only our side is Trio.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import attrs
import mcp_types as t
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.subscriptions import ResourceUpdated, ToolsListChanged

from tests.interop.peers import HERE, Served

Body = Callable[[Client], Awaitable[None]]

# The client warns of what the modern era lacks, also where it speaks the legacy one.
deprecated = pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")
NEGOTIATED = {"legacy": "2025-11-25", "auto": "2026-07-28"}


@attrs.frozen
class Way:
    """How the client reaches our server.

    Attributes:
        transport: "stdio", "http" or "sse".
        mode: of the client: "legacy", "auto", or a revision.
        host: what our server runs on, where there is a choice.
    """

    transport: str
    mode: str
    host: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.transport, self.host, self.mode)))


HOSTS = ("own", "hypercorn")
WAYS = [
    *(Way("stdio", mode) for mode in ("legacy", "auto")),
    *(Way("http", mode, host) for host in HOSTS for mode in ("legacy", "auto")),
    *(Way("sse", mode, host) for host in HOSTS for mode in ("legacy", "auto")),
]


def ways(*modes: str) -> pytest.MarkDecorator:
    """Run the test on each way the client may have, in these modes."""
    return pytest.mark.parametrize("peer", [way for way in WAYS if way.mode in modes], indirect=True, ids=str)


both_eras = ways("legacy", "auto")


@attrs.frozen
class Peer:
    """The client on one way to our server."""

    way: Way
    served: Served | None

    @property
    def mode(self) -> str:
        """Of the client."""
        return self.way.mode

    def converse(self, body: Body, **callbacks: Any) -> float:
        """Run `body` with a client connected to our server; return how many seconds leaving took."""
        failures: list[Exception] = []
        left = 0.0

        async def main() -> None:
            nonlocal left
            with anyio.fail_after(30):
                async with Client(self._target(), mode=self.mode, **callbacks) as client:
                    # Kept aside, because the client's task groups would wrap it in three groups.
                    try:
                        await body(client)
                    except Exception as failure:
                        failures.append(failure)
                    left = time.monotonic()

        anyio.run(main)
        if failures:
            raise failures[0]
        return time.monotonic() - left

    def _target(self) -> Any:
        if self.served is None:
            return StdioServerParameters(command=sys.executable, args=[str(HERE / "server_for_peers.py")])
        return self.served.http if self.way.transport == "http" else sse_client(self.served.sse)


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Peer:
    """The official client on the way that the test is parametrized with."""
    way: Way = request.param
    return Peer(way, request.getfixturevalue(way.host) if way.host else None)


@both_eras
def test_it_agrees_on_the_newest_revision_of_its_era(peer: Peer) -> None:
    async def body(client: Client) -> None:
        assert client.protocol_version == NEGOTIATED[peer.mode]
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == ("interop", "1.0")
        assert client.instructions == "Ask for anything."
        capabilities = client.server_capabilities
        assert capabilities.tools is not None
        assert capabilities.resources is not None
        assert capabilities.prompts is not None
        assert capabilities.completions is not None
        assert capabilities.tasks is None

    peer.converse(body)


@pytest.mark.parametrize(
    "peer", [Way("stdio", "2026-07-28"), *(Way("http", "2026-07-28", host) for host in HOSTS)], indirect=True, ids=str
)
def test_it_adopts_the_modern_revision_without_asking(peer: Peer) -> None:
    async def body(client: Client) -> None:
        result = await client.call_tool("echo", {"text": "hi"})
        assert result.content == [t.TextContent(type="text", text="hi")]

    peer.converse(body)


@both_eras
def test_it_is_gone_soon(peer: Peer) -> None:
    async def body(client: Client) -> None:
        await client.list_tools()

    # Over a pipe the SDK kills after two seconds, and promises of ours end at one.
    assert peer.converse(body) < 1.5


@both_eras
def test_tools_are_listed_with_their_schemas(peer: Peer) -> None:
    async def body(client: Client) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert {"echo", "add", "count", "fail", "crash", "greet", "think", "places"} <= set(tools)
        echo = tools["echo"]
        assert echo.description == "Return the text as it came."
        assert echo.input_schema["required"] == ["text"]
        assert echo.input_schema["properties"]["text"]["type"] == "string"
        assert echo.input_schema["properties"]["text"]["description"] == "whatever you like."
        assert tools["add"].output_schema is not None
        assert tools["add"].output_schema["properties"]["total"]["type"] == "integer"
        assert "ctx" not in tools["count"].input_schema["properties"]

    peer.converse(body)


@both_eras
def test_tools_answer_and_fail_as_the_specification_says(peer: Peer) -> None:
    async def body(client: Client) -> None:
        result = await client.call_tool("echo", {"text": "grüße 🎈\n"})
        assert result.content == [t.TextContent(type="text", text="grüße 🎈\n")]
        assert not result.is_error
        assert (await client.call_tool("add", {"a": 2, "b": 3})).structured_content == {"total": 5}

        failed = await client.call_tool("fail", {})
        assert failed.is_error
        assert failed.content == [t.TextContent(type="text", text="no luck today")]
        with pytest.raises(MCPError) as crashed:
            await client.call_tool("crash", {})
        assert crashed.value.error.code == t.INTERNAL_ERROR
        assert "swordfish" not in crashed.value.error.model_dump_json()
        wrong = await client.call_tool("add", {"a": 2, "b": "three"})
        assert wrong.is_error
        assert isinstance(wrong.content[0], t.TextContent)
        assert "@ b" in wrong.content[0].text
        with pytest.raises(MCPError) as unknown:
            await client.call_tool("no_such_tool", {})
        assert unknown.value.error.code == t.INVALID_PARAMS

    peer.converse(body)


@both_eras
def test_progress_arrives_in_order_and_whole(peer: Peer) -> None:
    seen: list[tuple[float, float | None, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))

    async def body(client: Client) -> None:
        await client.call_tool("count", {"to": 50}, progress_callback=on_progress)
        assert seen == [(n, 50, f"now {n}") for n in range(1, 51)]

    peer.converse(body)


@both_eras
def test_a_call_it_gives_up_stops_here(peer: Peer) -> None:
    async def body(client: Client) -> None:
        with anyio.CancelScope() as scope:

            async def give_up(progress: float, total: float | None, message: str | None) -> None:
                scope.cancel()

            await client.call_tool("wait_for_ever", {"name": f"given up {peer.way}"}, progress_callback=give_up)
        assert scope.cancelled_caught
        result = await client.call_tool("was_cancelled", {"name": f"given up {peer.way}"})
        assert result.content == [t.TextContent(type="text", text="stopped")]

    peer.converse(body)


@both_eras
def test_a_call_that_takes_it_too_long_stops_here(peer: Peer) -> None:
    async def body(client: Client) -> None:
        name = {"name": f"timed out {peer.way}"}
        with pytest.raises(MCPError) as timeout:
            await client.call_tool("wait_for_ever", name, read_timeout_seconds=1)
        assert timeout.value.error.code == t.REQUEST_TIMEOUT
        result = await client.call_tool("was_cancelled", name)
        assert result.content == [t.TextContent(type="text", text="stopped")]

    peer.converse(body)


@both_eras
def test_many_calls_at_once_each_get_their_own_answer(peer: Peer) -> None:
    answers: dict[int, str] = {}

    async def body(client: Client) -> None:
        async def ask(number: int) -> None:
            (content,) = (await client.call_tool("echo", {"text": str(number)})).content
            assert isinstance(content, t.TextContent)
            answers[number] = content.text

        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(ask, number)
        assert answers == {number: str(number) for number in range(200)}

    peer.converse(body)


@both_eras
def test_a_large_result_arrives(peer: Peer) -> None:
    # This client takes no event of more than 1 MiB, and over HTTP+SSE it has no setting for it.
    size = 1_000_000 if peer.way.transport == "sse" else 3_000_000

    async def body(client: Client) -> None:
        (content,) = (await client.call_tool("large", {"size": size})).content
        assert isinstance(content, t.TextContent)
        assert content.text == "x" * size

    peer.converse(body)


@both_eras
def test_resources_and_templates_are_listed_and_read(peer: Peer) -> None:
    async def body(client: Client) -> None:
        listed = {resource.uri: resource for resource in (await client.list_resources()).resources}
        assert set(listed) == {"interop://greeting", "interop://bytes"}
        assert listed["interop://greeting"].mime_type == "text/plain"
        (template,) = (await client.list_resource_templates()).resource_templates
        assert template.uri_template == "interop://items/{name}"

        (text,) = (await client.read_resource("interop://greeting")).contents
        assert isinstance(text, t.TextResourceContents)
        assert text.text == "hello"
        (blob,) = (await client.read_resource("interop://bytes")).contents
        assert isinstance(blob, t.BlobResourceContents)
        assert base64.b64decode(blob.blob) == bytes(range(256))
        (found,) = (await client.read_resource("interop://items/lamp")).contents
        assert isinstance(found, t.TextResourceContents)
        assert (found.uri, found.text) == ("interop://items/lamp", "item lamp")
        with pytest.raises(MCPError) as missing:
            await client.read_resource("interop://nowhere")
        assert missing.value.error.code == {"legacy": -32002, "auto": t.INVALID_PARAMS}[peer.mode]

    peer.converse(body)


@both_eras
def test_prompts_and_completion(peer: Peer) -> None:
    async def body(client: Client) -> None:
        (prompt,) = (await client.list_prompts()).prompts
        assert prompt.name == "review"
        assert prompt.arguments is not None
        assert [(argument.name, argument.required) for argument in prompt.arguments] == [("path", True)]
        (message,) = (await client.get_prompt("review", {"path": "setup.py"})).messages
        assert message.role == "user"
        assert message.content == t.TextContent(type="text", text="Please review setup.py.")

        reference = t.PromptReference(type="ref/prompt", name="review")
        found = await client.complete(reference, {"name": "path", "value": "set"})
        assert found.completion.values == ["setup.py", "setup.cfg"]

    peer.converse(body)


@both_eras
def test_a_log_message_arrives_before_the_answer(peer: Peer) -> None:
    logs: list[tuple[str, Any]] = []

    async def on_log(params: t.LoggingMessageNotificationParams) -> None:
        logs.append((params.level, params.data))

    async def body(client: Client) -> None:
        await client.call_tool("warn", {"text": "mind the gap"})
        assert logs == [("warning", "mind the gap")]

    peer.converse(body, logging_callback=on_log, log_level="info")


@both_eras
def test_two_questions_in_a_row_are_put_to_the_user(peer: Peer) -> None:
    asked: list[str] = []

    async def answer(context: Any, params: t.ElicitRequestParams) -> t.ElicitResult:
        asked.append(params.message)
        content: dict[str, Any] = {"name": "Ada"} if "name" in params.message else {"colour": "green"}
        return t.ElicitResult(action="accept", content=content)

    async def body(client: Client) -> None:
        result = await client.call_tool("greet", {})
        assert result.content == [t.TextContent(type="text", text="Ada likes green")]
        assert asked == ["Your name?", "Your colour?"]

    peer.converse(body, elicitation_callback=answer)


@both_eras
def test_a_question_declined(peer: Peer) -> None:
    async def decline(context: Any, params: t.ElicitRequestParams) -> t.ElicitResult:
        return t.ElicitResult(action="decline")

    async def body(client: Client) -> None:
        result = await client.call_tool("greet", {})
        assert result.content == [t.TextContent(type="text", text="nobody")]

    peer.converse(body, elicitation_callback=decline)


@both_eras
def test_its_model_is_sampled_and_its_roots_are_listed(peer: Peer) -> None:
    async def sample(context: Any, params: t.CreateMessageRequestParams) -> t.CreateMessageResult:
        assert params.max_tokens == 50
        content = t.TextContent(type="text", text="42")
        return t.CreateMessageResult(role="assistant", model="deep-thought", content=content)

    async def roots(context: Any) -> t.ListRootsResult:
        return t.ListRootsResult(roots=[t.Root(uri="file:///srv/data", name="data")])

    async def body(client: Client) -> None:
        thought = await client.call_tool("think", {"question": "the answer?"})
        assert thought.content == [t.TextContent(type="text", text="deep-thought says 42")]
        listed = await client.call_tool("places", {})
        assert not listed.is_error
        assert "file:///srv/data" in listed.model_dump_json()

    peer.converse(body, sampling_callback=sample, list_roots_callback=roots)


@both_eras
def test_a_question_to_a_client_that_cannot_answer_fails_at_once(peer: Peer) -> None:
    async def body(client: Client) -> None:
        if peer.mode == "legacy":
            assert (await client.call_tool("greet", {})).is_error
            return
        with pytest.raises(MCPError) as refused:
            await client.call_tool("greet", {})
        assert refused.value.error.code == -32021

    peer.converse(body)


@ways("auto")
def test_it_listens_to_changes_and_stops(peer: Peer) -> None:
    async def body(client: Client) -> None:
        uri = "interop://greeting"
        name = f"new-{peer.way}"
        async with client.listen(tools_list_changed=True, resource_subscriptions=[uri]) as subscription:
            assert subscription.honored.tools_list_changed
            assert subscription.honored.resource_subscriptions == [uri]
            await client.call_tool("grow", {"name": name})
            heard = {await anext(subscription), await anext(subscription)}
        assert heard == {ToolsListChanged(), ResourceUpdated(uri=uri)}
        assert name in {tool.name for tool in (await client.list_tools()).tools}
        assert (await client.call_tool(name, {})).content == [t.TextContent(type="text", text="new")]

    peer.converse(body)


@deprecated
@ways("legacy")
def test_changes_come_unasked_in_the_legacy_era(peer: Peer) -> None:
    sender, changes = anyio.create_memory_object_stream[str](10)

    async def on_message(message: Any) -> None:
        await sender.send(message.method)

    async def body(client: Client) -> None:
        await client.subscribe_resource("interop://greeting")
        await client.call_tool("grow", {"name": f"new-{peer.way}"})
        heard = {await changes.receive(), await changes.receive()}
        assert heard == {"notifications/resources/updated", "notifications/tools/list_changed"}
        await client.unsubscribe_resource("interop://greeting")
        await client.call_tool("grow", {"name": f"newer-{peer.way}"})
        assert await changes.receive() == "notifications/tools/list_changed"
        assert changes.statistics().current_buffer_used == 0

    with sender, changes:
        peer.converse(body, message_handler=on_message)


@deprecated
@ways("legacy")
def test_the_log_level_can_be_set_in_the_legacy_era(peer: Peer) -> None:
    logs: list[Any] = []

    async def on_log(params: t.LoggingMessageNotificationParams) -> None:
        logs.append(params.data)

    async def body(client: Client) -> None:
        await client.set_logging_level("error")
        await client.call_tool("warn", {"text": "too low"})
        await client.set_logging_level("warning")
        await client.call_tool("warn", {"text": "just right"})
        assert logs == ["just right"]

    peer.converse(body, logging_callback=on_log)


@deprecated
@both_eras
def test_pings(peer: Peer) -> None:
    async def body(client: Client) -> None:
        if peer.mode == "legacy":
            await client.send_ping()
            return
        # 2026-07-28 has no such method.
        with pytest.raises(MCPError) as refused:
            await client.send_ping()
        assert refused.value.error.code == t.METHOD_NOT_FOUND

    peer.converse(body)
