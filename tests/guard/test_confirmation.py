"""Confirmation: the body of a destructive tool does not begin before its user agreed to exactly this call."""

from __future__ import annotations

from typing import Annotated, Any

import attrs
import pytest
import trio
import trio.testing

import trimcp
from tests.peers.serving import NETWORK
from tests.peers.serving import connected as connected_over
from trimcp.guard.permission import Confirmation
from trimcp.testing.connect import connected
from trimcp.wire.input_requests import ElicitFormParams
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, V2025_06_18, Revision
from trimcp.wire.tools import CallToolParams

can_ask = pytest.mark.parametrize("revision", [r for r in REVISIONS if r >= V2025_06_18], ids=str)
YES = {"confirm": True}
DESTROYS = trimcp.ToolAnnotations(destructive_hint=True)


@attrs.define
class World:
    """A server with tools of both kinds, what they did, and what its user was asked."""

    server: trimcp.Server[Any]
    ran: list[Any] = attrs.field(factory=list)
    asked: list[ElicitFormParams] = attrs.field(factory=list)

    def client(self, action: Any = "accept", content: Any = None) -> trimcp.Client:
        client = trimcp.Client("c")

        @client.elicitation
        async def user(params: Any) -> trimcp.ElicitResult:
            self.asked.append(params)
            if isinstance(action, Exception):
                raise action
            if action == "accept":
                return trimcp.ElicitResult(action="accept", content=YES if content is None else content)
            return trimcp.ElicitResult(action=action)

        return client


def make_world(**options: Any) -> World:
    world = World(trimcp.Server("s", **{"confirm": "destructive", **options}))
    server, ran = world.server, world.ran

    @server.tool(annotations=DESTROYS)
    async def delete(path: str) -> str:
        ran.append(path)
        return f"deleted {path}"

    @server.tool(annotations=DESTROYS, title="Remove it")
    def delete_in_a_thread(path: str) -> str:
        ran.append(path)
        return "deleted"

    @server.tool(confirm=True)
    async def pay(amount: int) -> str:
        ran.append(amount)
        return "paid"

    @server.tool(annotations=DESTROYS, confirm=False)
    async def clear_cache() -> str:
        ran.append("cache")
        return "cleared"

    @server.tool
    async def look() -> str:
        ran.append("look")
        return "seen"

    @server.tool(confirm=True)
    async def rename(old: str, new: Annotated[str, trimcp.Elicit("New name?", key="new")]) -> str:
        ran.append((old, new))
        return "renamed"

    return world


@can_ask
@pytest.mark.parametrize("tool", ["delete", "delete_in_a_thread"])
async def test_a_destructive_tool_runs_once_its_user_agreed(
    tool: str, revision: Revision, autojump_clock: trio.testing.MockClock
) -> None:
    world = make_world()
    async with connected(world.server, world.client(), revision=revision) as session:
        result = await session.call_tool(tool, {"path": "/tmp/x"})
    assert not result.is_error
    assert world.ran == ["/tmp/x"]
    (question,) = world.asked
    assert question.message.startswith(tool)
    assert 'path: "/tmp/x"' in question.message
    assert "may destroy something" in question.message


@can_ask
async def test_one_chosen_by_hand_is_confirmed_too_and_others_are_not(
    revision: Revision, autojump_clock: trio.testing.MockClock
) -> None:
    world = make_world(confirm=None)
    async with connected(world.server, world.client(), revision=revision) as session:
        for tool, arguments in (("pay", {"amount": 5}), ("delete", {"path": "x"}), ("clear_cache", {}), ("look", {})):
            await session.call_tool(tool, arguments)
    assert len(world.asked) == 1
    assert world.asked[0].message == "pay is about to be called.\n- amount: 5"
    assert world.ran == [5, "x", "cache", "look"]


async def test_a_tools_own_word_comes_first(autojump_clock: trio.testing.MockClock) -> None:
    world = make_world()
    async with connected(world.server, world.client()) as session:
        await session.call_tool("clear_cache")
        await session.call_tool("look")
    assert world.asked == []


@can_ask
@pytest.mark.parametrize(
    ("action", "content", "why"),
    [
        ("decline", None, "the user declined it"),
        ("cancel", None, "the user cancelled it"),
        ("accept", {"confirm": False}, "the user did not confirm it"),
        ("accept", {"another": "x"}, "the user did not confirm it"),
        ("accept", {"confirm": "true"}, "the user did not confirm it"),
        (trimcp.ErrorReply(-1, "no"), None, "was not answered"),
    ],
)
async def test_without_agreement_nothing_is_done(
    action: Any, content: Any, why: str, revision: Revision, autojump_clock: trio.testing.MockClock
) -> None:
    world = make_world()
    async with connected(world.server, world.client(action, content), revision=revision) as session:
        try:
            result = await session.call_tool("delete", {"path": "x"})
        except trimcp.McpError:
            assert isinstance(action, Exception)  # a modern client that cannot answer gives the call up itself
            assert revision.modern
        else:
            assert result.is_error is True
            assert result.content[0].text.startswith("delete was not called: ")
            assert why in result.content[0].text
    assert world.ran == []


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
async def test_a_client_that_cannot_ask_is_refused(revision: Revision, autojump_clock: trio.testing.MockClock) -> None:
    world = make_world()
    async with connected(world.server, revision=revision) as session:
        if revision.server_may_call:
            result = await session.call_tool("delete", {"path": "x"})
            assert result.is_error is True
            text = result.content[0].text
        else:
            with pytest.raises(trimcp.RemoteError) as caught:
                await session.call_tool("delete", {"path": "x"})
            text = caught.value.message
            assert caught.value.code == -32021
            assert caught.value.data == {"requiredCapabilities": {"elicitation": {"form": {}}}}
        assert text == "delete runs only after its user has confirmed it, and this client cannot ask"
        assert not (await session.call_tool("look")).is_error
    assert world.ran == ["look"]


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
async def test_the_fallback_allows_it(revision: Revision, autojump_clock: trio.testing.MockClock) -> None:
    world = make_world(confirm_fallback="allow")
    async with connected(world.server, revision=revision) as session:
        assert not (await session.call_tool("delete", {"path": "x"})).is_error
    assert world.ran == ["x"]


async def test_the_fallback_is_not_for_a_client_that_can_ask(autojump_clock: trio.testing.MockClock) -> None:
    world = make_world(confirm_fallback="allow")
    async with connected(world.server, world.client("decline")) as session:
        assert (await session.call_tool("delete", {"path": "x"})).is_error is True
    assert world.ran == []


@can_ask
async def test_questions_of_the_tools_own_come_after(
    revision: Revision, autojump_clock: trio.testing.MockClock
) -> None:
    world = make_world()
    client = trimcp.Client("c")

    @client.elicitation
    async def user(params: Any) -> trimcp.ElicitResult:
        world.asked.append(params)
        new = "new" in params.requested_schema.properties
        return trimcp.ElicitResult(action="accept", content={"new": "b"} if new else YES)

    async with connected(world.server, client, revision=revision) as session:
        assert not (await session.call_tool("rename", {"old": "a"})).is_error
    assert [question.message.partition(" ")[0] for question in world.asked] == ["rename", "New"]
    assert world.ran == [("a", "b")]


async def test_it_bears_running_again_in_every_revision(autojump_clock: trio.testing.MockClock) -> None:
    world = make_world()
    async with connected(world.server, world.client(), revision=LATEST_LEGACY, force_rerun=True) as session:
        assert not (await session.call_tool("delete", {"path": "x"})).is_error
    assert world.ran == ["x"]
    assert len(world.asked) == 1


# What a client sends by hand


async def raw(session: Any, path: str, **more: Any) -> Any:
    """One round of a call, without the client's own loop."""
    params = {"name": "delete", "arguments": {"path": path}, **more}
    renamed = {"input_responses": params.pop("inputResponses", None), "request_state": params.pop("requestState", None)}
    given = {name: value for name, value in renamed.items() if value is not None}
    return await session.session.call("tools/call", CallToolParams(**params, **given))


def agreed(question: Any) -> dict[str, Any]:
    return {key: {"action": "accept", "content": YES} for key in question.input_requests}


async def test_an_agreement_is_for_these_arguments_alone(autojump_clock: trio.testing.MockClock) -> None:
    world = make_world()
    async with connected(world.server, world.client()) as session:
        first = await raw(session, "a")
        (key,) = first.input_requests
        with pytest.raises(trimcp.RemoteError, match="not valid for this request"):
            await raw(session, "b", inputResponses=agreed(first), requestState=first.request_state)
        # Without its state the answer is to a question of another name: it is asked anew.
        second = await raw(session, "b", inputResponses=agreed(first))
        assert set(second.input_requests) != {key}
        assert world.ran == []
        await raw(session, "a", inputResponses=agreed(first), requestState=first.request_state)
    assert world.ran == ["a"]


async def test_an_answer_nobody_asked_for_counts_for_nothing(autojump_clock: trio.testing.MockClock) -> None:
    world = make_world()
    async with connected(world.server, world.client()) as session:
        first = await raw(session, "a")
        again = await raw(session, "a", inputResponses=agreed(first))
        assert set(again.input_requests) == set(first.input_requests)
    assert world.ran == []


async def test_arguments_that_look_alike_shortened_are_not_alike(autojump_clock: trio.testing.MockClock) -> None:
    world = make_world()
    one, other = ("x" * 100 + middle + "x" * 100 for middle in "ab")
    async with connected(world.server, world.client()) as session:
        first, second = await raw(session, one), await raw(session, other)
        questions = [next(iter(each.input_requests.values())) for each in (first, second)]
        assert questions[0].params.message == questions[1].params.message
        assert set(first.input_requests) != set(second.input_requests)


# What the user sees


def message(arguments: dict[str, Any], **listing: Any) -> str:
    tool = trimcp.Tool(**{"name": "t", "input_schema": {"type": "object"}, **listing})
    return Confirmation(tool)._message(arguments)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"text": "x" * 500}, '- text: "' + "x" * 39 + " ... "),
        ({"text": "pay\u202eme\x1b[2J"}, '- text: "pay<U+202E>me\\u001b[2J"'),
        ({"text": "a\n- forged: 1"}, '- text: "a\\n- forged: 1"'),
        ({"a\u200bb": 1}, "- a<U+200B>b: 1"),
        ({"password": "hunter2"}, '- password: "***"'),
        ({"deep": {"token": "hunter2"}}, '- deep: {"token": "***"}'),
        ({"name": "日本"}, '- name: "日本"'),
    ],
)
def test_arguments_are_shown_short_and_whole_of_nothing_hidden(arguments: dict[str, Any], shown: str) -> None:
    text = message(arguments)
    assert shown in text
    assert "hunter2" not in text
    assert text.count("\n") == 1
    assert len(text) < 300


def test_many_arguments_are_counted() -> None:
    lines = message({f"a{n}": n for n in range(1_000)}).splitlines()
    assert len(lines) == 14
    assert lines[-1] == "- and 988 more"


def test_titles_are_shown_beside_names() -> None:
    assert message({}, title="Wipe").startswith("t (Wipe) is about")
    assert message({}, annotations=trimcp.ToolAnnotations(title="Wipe")).startswith("t (Wipe) is about")


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match="confirm"):
        trimcp.Server("s", confirm="all")
    with pytest.raises(ValueError, match="confirm_fallback"):
        trimcp.Server("s", confirm_fallback="ask")


async def test_the_users_time_is_not_the_tools(autojump_clock: trio.testing.MockClock) -> None:
    world = make_world()

    @world.server.tool(confirm=True, timeout=1)
    async def quick() -> str:
        world.ran.append("quick")
        return "done"

    client = trimcp.Client("c")

    @client.elicitation
    async def slow_user(params: Any) -> trimcp.ElicitResult:
        await trio.sleep(30)
        return trimcp.ElicitResult(action="accept", content=YES)

    async with connected(world.server, client, revision=LATEST_LEGACY) as session:
        assert not (await session.call_tool("quick")).is_error
    assert world.ran == ["quick"]


async def test_a_client_that_leaves_meanwhile_leaves_nothing(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    client = trimcp.Client("c")

    @client.elicitation
    async def never(params: Any) -> trimcp.ElicitResult:
        await trio.sleep_forever()
        raise AssertionError

    async with connected(world.server, client, revision=LATEST_LEGACY) as session:
        with trio.move_on_after(5):
            await session.call_tool("delete", {"path": "x"})
    assert world.ran == []
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
@pytest.mark.parametrize("road", [road for road in NETWORK if road != "http+sse"])
async def test_over_a_network(road: str, revision: Revision) -> None:
    for action, done in (("accept", ["x"]), ("decline", [])):
        world = make_world()
        async with connected_over(world.server, road, world.client(action), revision=revision) as session:
            await session.call_tool("delete", {"path": "x"})
        assert len(world.asked) == 1
        assert world.ran == done
