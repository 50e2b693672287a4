"""Declared questions: what they ask, what the body gets, what a refusal becomes, in every revision that can ask."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal

import attrs
import pytest
import trio
import trio.testing

from trimcp.client.client import Client
from trimcp.errors import RemoteError
from trimcp.server.handlers.needs import Elicit
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.testing.connect import connected
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.revisions import REVISIONS, V2025_06_18, Revision

can_ask = pytest.mark.parametrize("revision", [r for r in REVISIONS if r >= V2025_06_18], ids=str)


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


@attrs.frozen
class Address:
    street: str
    number: int = 1


SCHEMA = {"type": "object", "properties": {"own": {"type": "string"}}}


async def test_a_context_may_be_annotated(autojump_clock: Any) -> None:
    server = Server("s")

    @server.tool
    async def tool(ctx: Annotated[Context, "who asks"]) -> str:
        return ctx.method

    async with connected(server) as session:
        assert (await session.list_tools())[0].input_schema["properties"] == {}
        assert (await session.call_tool("tool")).content[0].text == "tools/call"


def answering(*answers: Any) -> tuple[Client, list[Any]]:
    """A client whose user answers by message, and what it was asked."""
    client = Client("c")
    asked: list[Any] = []
    by_message = dict(answers)

    @client.elicitation
    async def user(params: Any) -> ElicitResult:
        asked.append(params)
        answer = by_message[params.message]
        return answer if isinstance(answer, ElicitResult) else ElicitResult(action="accept", content=answer)

    return client, asked


def make_server(ran: list[Any]) -> Server[Any]:
    server = Server("s")

    @server.tool
    async def order(
        what: str,
        size: Annotated[Size, Elicit("How large?")],
        where: Annotated[Address, Elicit("Where to?")],
        ctx: Context[Any],
        gift: Annotated[bool | None, Elicit("A gift?", key="gift")] = None,
    ) -> str:
        ran.append(ctx.method)
        return f"{what} {size.name} {where.street} {where.number} {gift}"

    @server.tool
    async def whole(answer: Annotated[ElicitResult, Elicit("Any?", SCHEMA)]) -> str:
        return f"{answer.action} {answer.content}"

    @server.tool
    def in_a_thread(size: Annotated[Literal["s", "l"], Elicit("How large?")]) -> str:
        return size

    return server


ALL = (("How large?", {"size": "l"}), ("Where to?", {"street": "Elm"}), ("A gift?", {"gift": True}))


@can_ask
@pytest.mark.parametrize("force_rerun", [False, True], ids=["", "rerun"])
async def test_the_body_runs_once_with_the_answers(revision: Revision, force_rerun: bool) -> None:
    client, asked = answering(*ALL)
    ran: list[Any] = []
    async with connected(make_server(ran), client, revision=revision, force_rerun=force_rerun) as session:
        tools = {tool.name: tool for tool in await session.list_tools()}
        assert list(tools["order"].input_schema["properties"]) == ["what"], "nobody but the user fills them"
        result = await session.call_tool("order", {"what": "tea"})
        assert result.content[0].text == "tea LARGE Elm 1 True"
        assert ran == ["tools/call"]
        assert sorted(params.message for params in asked) == ["A gift?", "How large?", "Where to?"]
        forms = {params.message: params.requested_schema for params in asked}
        assert forms["How large?"].properties["size"].enum == ["s", "l"]
        assert forms["Where to?"].required == ["street"]
        result = await session.call_tool("in_a_thread")
        assert result.content[0].text == "l"


@can_ask
async def test_all_are_asked_at_once(revision: Revision, autojump_clock: trio.testing.MockClock) -> None:
    client = Client("c")
    answers = dict(ALL)

    @client.elicitation
    async def slow(params: Any) -> ElicitResult:
        await trio.sleep(10)
        return ElicitResult(action="accept", content=answers[params.message])

    async with connected(make_server([]), client, revision=revision) as session:
        started = trio.current_time()
        await session.call_tool("order", {"what": "tea"})
        assert trio.current_time() - started == pytest.approx(10, abs=0.01)


@can_ask
@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_refusal_is_told_to_the_model(revision: Revision, action: Any) -> None:
    client, _ = answering(*ALL[:2], ("A gift?", ElicitResult(action=action)), ("Any?", ElicitResult(action=action)))
    ran: list[Any] = []
    async with connected(make_server(ran), client, revision=revision) as session:
        result = await session.call_tool("order", {"what": "tea"})
        assert result.is_error is True
        assert result.content[0].text == f"the user did not answer 'A gift?' ({action})"
        assert ran == []
        result = await session.call_tool("whole")
        assert result.content[0].text == f"{action} {None}", "who asks for the whole answer gets it"


@can_ask
@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_what_comes_with_a_refusal_is_no_answer(revision: Revision, action: Any) -> None:
    client, _ = answering(("How large?", ElicitResult(action=action, content={"size": "l"})))
    async with connected(make_server([]), client, revision=revision) as session:
        result = await session.call_tool("in_a_thread")
    assert result.is_error is True
    assert action in result.content[0].text


@can_ask
@pytest.mark.parametrize("wrong", [{"size": "huge"}, {}, {"size": 5}], ids=repr)
async def test_an_answer_that_does_not_fit_is_no_answer(revision: Revision, wrong: Any) -> None:
    client, _ = answering(("How large?", wrong), *ALL[1:])
    ran: list[Any] = []
    async with connected(make_server(ran), client, revision=revision) as session:
        result = await session.call_tool("order", {"what": "tea"})
        assert result.is_error is True
        assert result.content[0].text.startswith("the answer to 'How large?' does not fit")
    assert ran == []


async def test_the_clients_arguments_cannot_answer_for_the_user() -> None:
    client, _ = answering(*ALL)
    ran: list[Any] = []
    async with connected(make_server(ran), client) as session:
        result = await session.call_tool("order", {"what": "tea", "size": "s"})
        assert result.is_error is True
    assert ran == []


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
async def test_a_client_without_a_user_runs_no_body(revision: Revision, caplog: Any) -> None:
    ran: list[Any] = []
    async with connected(make_server(ran), revision=revision) as session:
        if revision.modern:
            with pytest.raises(RemoteError):
                await session.call_tool("order", {"what": "tea"})
        else:
            assert (await session.call_tool("order", {"what": "tea"})).is_error is True
    assert (ran, caplog.records) == ([], [])


@pytest.mark.parametrize("hint", [dict[str, int], list[int], Annotated[Any, "any"], ElicitResult], ids=str)
def test_what_no_form_can_hold_is_refused_when_it_is_added(hint: Any) -> None:
    async def tool(value: Any) -> str:
        return str(value)

    tool.__annotations__["value"] = Annotated[hint, Elicit("What?")]
    with pytest.raises(TypeError):
        Server("s").add_tool(tool)


async def test_prompts_may_declare_questions_too() -> None:
    client, _ = answering(("Whose?", {"name": "Ada"}))
    server = Server("s")

    @server.prompt
    async def letter(topic: str, name: Annotated[str, Elicit("Whose?")]) -> str:
        return f"{name} on {topic}"

    async with connected(server, client) as session:
        [prompt] = await session.list_prompts()
        assert [argument.name for argument in prompt.arguments] == ["topic"]
        result = await session.get_prompt("letter", {"topic": "trio"})
        assert result.messages[0].content.text == "Ada on trio"
