"""Our client against servers made with other people's Python SDKs, in both eras and over every transport they have.

Those are the official SDK, its first generation, and FastMCP, the latter two in environments of their own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest
import trio

import trimcp
from tests.interop.peers import HERE, Served, relay, serving
from trimcp.wire.revisions import V2024_11_05, V2025_03_26, V2025_06_18

OFFICIAL_1 = Path(os.environ["TRIMCP_OFFICIAL_SDK_1"])
FASTMCP = Path(os.environ["TRIMCP_FASTMCP"])
COMMANDS: dict[str, list[str | Path]] = {
    "official": [sys.executable, HERE / "official_server.py", "http"],
    "official json": [sys.executable, HERE / "official_server.py", "json"],
    "official stateless": [sys.executable, HERE / "official_server.py", "stateless"],
    "official 1": [OFFICIAL_1, HERE / "official_server_1.py"],
    "fastmcp": [FASTMCP, HERE / "fastmcp_server.py", "http"],
    "fastmcp sse": [FASTMCP, HERE / "fastmcp_server.py", "sse"],
}
LEGACY, MODERN = trimcp.LATEST_LEGACY, trimcp.LATEST


@attrs.frozen
class Link:
    """How our client reaches a server.

    Attributes:
        server: which, a key of `COMMANDS`.
        transport: "stdio", "http", "sse" or "ws".
        revision: to speak.
    """

    server: str
    transport: str
    revision: trimcp.Revision

    def __str__(self) -> str:
        return f"{self.server.replace(' ', '_')}-{self.transport}-{self.revision.name}"


OFFICIAL = [
    *(Link("official", transport, era) for transport in ("stdio", "http") for era in (LEGACY, MODERN)),
    Link("official", "sse", LEGACY),
    *(Link("official json", "http", era) for era in (LEGACY, MODERN)),
]
OFFICIAL_ONE = [Link("official 1", transport, LEGACY) for transport in ("http", "sse", "ws")]
FAST = [
    *(Link("fastmcp", "http", era) for era in (LEGACY, MODERN)),
    Link("fastmcp sse", "sse", LEGACY),
]
LINKS = [*OFFICIAL, Link("official stateless", "http", LEGACY), *OFFICIAL_ONE, *FAST]


def links(chosen: list[Link]) -> pytest.MarkDecorator:
    """Run the test over these links."""
    return pytest.mark.parametrize("peer", chosen, indirect=True, ids=str)


every_link = links(LINKS)
# A server that answers with JSON alone has nowhere to say anything else, and one without sessions cannot be answered.
STREAMS = [link for link in LINKS if link.server not in ("official json", "official stateless")]
every_stream = links(STREAMS)


@attrs.frozen
class Peer:
    """A server that runs (over stdio: that will), and how to reach it."""

    link: Link
    served: Served | None

    def connect(self, client: trimcp.Client | None = None) -> Any:
        """Connect a client to it, in the revision of the link."""
        if client is None:
            client = trimcp.Client("interop", version="1.0")
        return client.connect(self.target(), revision=self.link.revision)

    def target(self, served: Served | None = None) -> Any:
        """Where it is."""
        served = served or self.served
        if served is None:
            return trimcp.stdio(sys.executable, str(HERE / "official_server.py"), "stdio")
        if self.link.transport == "ws":
            return trimcp.websocket(served.ws)
        if self.link.transport == "sse":
            return trimcp.http(served.sse, mode="sse")
        return trimcp.http(served.http, mode="streamable")

    @property
    def name(self) -> str:
        """A name that nobody gives but the test of this link."""
        return str(self.link).replace(".", "-")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Served]]:
    """Starts servers when they are first asked for, and ends them with the module."""
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:

        @cache
        def serve(name: str) -> Served:
            return stack.enter_context(serving(COMMANDS[name], folder / f"{name}.log"))

        yield serve


@pytest.fixture
def peer(request: pytest.FixtureRequest, servers: Callable[[str], Served]) -> Peer:
    """The server and link that the test is parametrized with."""
    link: Link = request.param
    return Peer(link, None if link.transport == "stdio" else servers(link.server))


def text_of(result: trimcp.CallToolResult) -> str:
    """The text of a result that consists of text alone."""
    assert not result.is_error, result
    return "\n".join(content.text for content in result.content if isinstance(content, trimcp.Text))


def answering(asked: list[str]) -> trimcp.Client:
    """A client that answers every question, and writes down which came."""
    client = trimcp.Client("interop", version="1.0", roots=["file:///srv/data"])

    @client.elicitation
    async def answer(params: trimcp.wire.ElicitFormParams) -> trimcp.ElicitResult:
        asked.append(params.message)
        answers = {"name": "Ada", "colour": "green"}
        return trimcp.ElicitResult("accept", {name: answers[name] for name in params.requested_schema.properties})

    @client.sampling
    async def sample(params: trimcp.CreateMessageParams) -> trimcp.CreateMessageResult:
        asked.append("model")
        assert params.max_tokens == 50
        return trimcp.CreateMessageResult(role="assistant", model="deep-thought", content=trimcp.Text("42"))

    return client


@every_link
async def test_tools_and_errors(peer: Peer) -> None:
    with trio.fail_after(30):
        async with peer.connect() as session:
            assert session.revision == peer.link.revision
            assert session.instructions == "Ask for anything."
            assert {"add", "count", "fail"} <= {tool.name for tool in await session.list_tools()}
            assert (await session.call_tool("add", {"a": 2, "b": 3})).structured_content == {"total": 5}
            failed = await session.call_tool("fail", {})
            assert failed.is_error
            assert "no luck today" in failed.content[0].text
            assert (await session.call_tool("add", {"a": 2, "b": "three"})).is_error
            # The specification calls for an error of the protocol, but none of them sends one.
            assert (await session.call_tool("no_such_tool", {})).is_error
            assert text_of(await session.call_tool("large", {"size": 3_000_000})) == "x" * 3_000_000


@every_stream
async def test_one_question_after_the_other(peer: Peer) -> None:
    asked: list[str] = []
    with trio.fail_after(30):
        async with peer.connect(answering(asked)) as session:
            assert text_of(await session.call_tool("greet", {})) == "Ada likes green"
    assert asked == ["Your name?", "Your colour, Ada?"]


@links([link for link in STREAMS if link.server == "official"])
async def test_three_questions_of_three_kinds(peer: Peer) -> None:
    asked: list[str] = []
    with trio.fail_after(30):
        async with (
            peer.connect(answering(asked)) as session,
            session.calling("everything_at_once", {}) as call,
        ):
            assert text_of(await call.result()) == "Ada, 42, file:///srv/data"
    assert sorted(asked) == ["Your name?", "model"]


@links(OFFICIAL_ONE)
async def test_our_model_and_our_roots(peer: Peer) -> None:
    asked: list[str] = []
    with trio.fail_after(30):
        async with peer.connect(answering(asked)) as session:
            assert text_of(await session.call_tool("think", {"question": "six by nine?"})) == "42"
            assert text_of(await session.call_tool("places", {})) == "file:///srv/data"


@every_stream
async def test_a_declined_question(peer: Peer) -> None:
    client = trimcp.Client("interop", version="1.0")

    @client.elicitation
    async def decline(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        return trimcp.ElicitResult("decline")

    with trio.fail_after(30):
        async with peer.connect(client) as session:
            if peer.link.server == "official":
                assert text_of(await session.call_tool("outcome", {})) == "decline"
                assert (await session.call_tool("greet", {})).is_error
            else:
                assert text_of(await session.call_tool("greet", {})) == "decline"


@links(OFFICIAL)
async def test_a_question_to_a_client_that_cannot_answer(peer: Peer) -> None:
    with trio.fail_after(30):
        async with peer.connect() as session:
            with pytest.raises(trimcp.RemoteError) as refused:
                await session.call_tool("greet", {})
            # Where it can say nothing beside the answer, that is what it complains of.
            nowhere = peer.link.server == "official json" and peer.link.revision == LEGACY
            assert refused.value.code == (-32600 if nowhere else -32021)
            assert (await session.call_tool("add", {"a": 2, "b": 3})).structured_content == {"total": 5}


@every_stream
async def test_progress_in_order_and_whole(peer: Peer) -> None:
    with trio.fail_after(30):
        async with peer.connect() as session, session.calling("count", {"to": 50}) as call:
            seen = [(step.progress, step.total, step.message) async for step in call.progress]
            assert text_of(await call.result()) == "done"
    assert seen == [(n, 50, f"now {n}") for n in range(1, 51)]


@every_stream
async def test_a_call_given_up_stops_there(peer: Peer) -> None:
    name = {"name": peer.name}
    with trio.fail_after(30):
        async with peer.connect() as session:
            async with session.calling("wait_for_ever", name) as call:
                async for _ in call.progress:
                    break
            assert text_of(await session.call_tool("was_cancelled", name)) == "stopped"


@every_stream
async def test_log_messages(peer: Peer) -> None:
    client = trimcp.Client("interop", version="1.0")
    logs: list[tuple[str, object]] = []

    @client.logging
    def log(params: trimcp.wire.LoggingMessageParams) -> None:
        logs.append((params.level, params.data))

    with trio.fail_after(30):
        async with peer.connect(client) as session:
            await session.call_tool("warn", {"text": "mind the gap"})
    data = {"msg": "mind the gap", "extra": None} if "fastmcp" in peer.link.server else "mind the gap"
    assert logs == [("warning", data)]


@every_link
async def test_resources_prompts_and_completion(peer: Peer) -> None:
    with trio.fail_after(30):
        async with peer.connect() as session:
            assert session.server_info is not None
            assert [resource.uri for resource in await session.list_resources()] == ["peer://greeting"]
            (template,) = await session.list_resource_templates()
            assert template.uri_template == "peer://items/{name}"
            (contents,) = (await session.read_resource("peer://items/lamp")).contents
            assert isinstance(contents, trimcp.wire.TextResourceContents)
            assert contents.text == "item lamp"
            with pytest.raises(trimcp.RemoteError):
                await session.read_resource("peer://nowhere")
            (message,) = (await session.get_prompt("review", {"path": "setup.py"})).messages
            assert message.content == trimcp.Text("Please review setup.py.")
            completion = await session.complete_prompt("review", "path", "setup.c")
            assert completion.values == ["setup.cfg"]
            await session.ping()


@every_link
async def test_fifty_calls_at_once(peer: Peer) -> None:
    totals: dict[int, object] = {}
    with trio.fail_after(30):
        async with peer.connect() as session:

            async def ask(number: int) -> None:
                totals[number] = (await session.call_tool("add", {"a": number, "b": 1})).structured_content

            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(ask, number)
    assert totals == {number: {"total": number + 1} for number in range(50)}


@links([link for link in STREAMS if link.revision == MODERN and link.server == "official"])
async def test_changes_we_listen_to(peer: Peer) -> None:
    uri = "peer://greeting"
    with trio.fail_after(30):
        async with peer.connect() as session:
            async with session.listen(tools=True, resources=[uri]) as changes:
                assert changes.acknowledged.tools_list_changed
                assert changes.acknowledged.resource_subscriptions == [uri]
                assert text_of(await session.call_tool("grow", {"name": peer.name})) == "grown"
                heard = {await changes.receive(), await changes.receive()}
            assert heard == {trimcp.ToolsChanged(), trimcp.ResourceUpdated(uri)}
            assert text_of(await session.call_tool(peer.name, {})) == "new"


@links([link for link in STREAMS if link.revision == LEGACY])
async def test_changes_that_come_unasked(peer: Peer) -> None:
    with trio.fail_after(30):
        async with peer.connect() as session:
            async with session.listen(tools=True) as changes:
                assert text_of(await session.call_tool("grow", {"name": peer.name})) == "grown"
                assert await changes.receive() == trimcp.ToolsChanged()
            assert text_of(await session.call_tool(peer.name, {})) == "new"
            # None of them declares that resources can be watched, in these revisions.
            with pytest.raises(trimcp.LocalError):
                async with session.listen(resources=["peer://greeting"]):
                    pass


# Over HTTP alone


async def steps_of(session: trimcp.ClientSession, tool: str) -> list[str | None]:
    """The progress of a call that ends well."""
    async with session.calling(tool, {}) as call:
        steps = [step.message async for step in call.progress]
        assert text_of(await call.result()) == "done"
    return steps


resumable = links([link for link in STREAMS if link.transport == "http" and link.revision == LEGACY])


@resumable
async def test_we_come_back_for_the_rest_when_the_server_lets_go(peer: Peer) -> None:
    assert peer.served is not None
    returns: list[str] = []

    async def note(request: httpx2.Request) -> None:
        returns.extend(request.headers.get_list("last-event-id"))

    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(30):
        async with httpx2.AsyncClient(event_hooks={"request": [note]}) as http:
            target = trimcp.http(peer.served.http, client=http)
            async with client.connect(target, revision=peer.link.revision) as session:
                assert await steps_of(session, "poll") == ["before", "after"]
    assert len(returns) == 1


@resumable
async def test_we_come_back_for_what_was_lost_with_the_connection(peer: Peer) -> None:
    assert peer.served is not None
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(30), relay(peer.served.port) as between:
        target = peer.target(peer.served.through(between))
        async with client.connect(target, revision=peer.link.revision) as session:
            assert await steps_of(session, "lose_connection") == ["cut-here", "after"]
        assert between.cuts == 1


@links([link for link in STREAMS if link.transport == "http" and link.revision == MODERN])
async def test_since_2026_what_was_lost_is_an_error(peer: Peer) -> None:
    assert peer.served is not None
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(30), relay(peer.served.port) as between:
        target = peer.target(peer.served.through(between))
        async with client.connect(target, revision=peer.link.revision) as session:
            with pytest.raises(trimcp.ConnectionLost):
                await steps_of(session, "lose_connection")
            assert (await session.call_tool("add", {"a": 2, "b": 3})).structured_content == {"total": 5}


@links(
    [
        Link(server, transport, revision)
        for server, transport in (
            *(("official", transport) for transport in ("http", "sse")),
            *(("official 1", transport) for transport in ("http", "sse", "ws")),
            *(("fastmcp", "http"), ("fastmcp sse", "sse")),
        )
        for revision in (V2025_06_18, V2025_03_26, V2024_11_05)
    ]
)
async def test_older_revisions(peer: Peer) -> None:
    with trio.fail_after(30):
        async with peer.connect() as session:
            assert session.revision == peer.link.revision
            assert text_of(await session.call_tool("count", {"to": 3})) == "done"


@pytest.mark.parametrize(
    ("server", "revision"),
    [("official", MODERN), ("official json", MODERN), ("official 1", LEGACY), ("fastmcp", MODERN)],
)
async def test_we_find_out_what_a_server_speaks(
    server: str, revision: trimcp.Revision, servers: Callable[[str], Served]
) -> None:
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(30):
        async with client.connect(trimcp.http(servers(server).http)) as session:
            assert session.revision == revision
            assert (await session.call_tool("add", {"a": 2, "b": 3})).structured_content == {"total": 5}


@pytest.mark.parametrize("server", ["official", "official 1", "fastmcp sse"])
async def test_we_turn_to_http_sse_where_there_is_nothing_else(server: str, servers: Callable[[str], Served]) -> None:
    client = trimcp.Client("interop", version="1.0")
    with trio.fail_after(30):
        async with client.connect(trimcp.http(servers(server).sse)) as session:
            assert (await session.call_tool("add", {"a": 2, "b": 3})).structured_content == {"total": 5}
