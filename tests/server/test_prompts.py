"""Prompts and completion: what a function may return, how arguments are checked, what is suggested."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

from trimcp.errors import ErrorReply, LocalError, RemoteError
from trimcp.schema.hints import Arg
from trimcp.server.handlers.media import Image
from trimcp.server.prompts import suggestions
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.testing.connect import connected, every_revision
from trimcp.wire.codes import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND
from trimcp.wire.content import ImageContent, TextContent
from trimcp.wire.prompts import CompleteResult, Completion, GetPromptResult, PromptMessage
from trimcp.wire.revisions import V2025_06_18, Revision

ASSISTANT = PromptMessage("assistant", TextContent("yes"))


def user(text: str) -> PromptMessage:
    return PromptMessage("user", TextContent(text))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", [user("text")]),
        (ASSISTANT, [ASSISTANT]),
        (["a", ASSISTANT, ("b", "c")], [user("a"), ASSISTANT, user("b"), user("c")]),
        ([], []),
        (None, []),
        ({"a": 1}, [user('{\n  "a": 1\n}')]),
        (TextContent("t"), [user("t")]),
        (Image(b"p", "image/png"), [PromptMessage("user", ImageContent("cA==", "image/png"))]),
    ],
    ids=repr,
)
async def test_whatever_a_function_returns_becomes_messages(value: Any, expected: Any) -> None:
    server = Server("s")

    @server.prompt
    async def prompt() -> Any:
        """About."""
        return value

    async with connected(server) as session:
        result = await session.get_prompt("prompt")
        assert (result.messages, result.description) == (expected, "About.")


async def test_a_whole_result_is_left_alone() -> None:
    server = Server("s")

    @server.prompt(description="listed")
    def prompt() -> GetPromptResult:
        return GetPromptResult(messages=[ASSISTANT], description="own")

    async with connected(server) as session:
        assert (await session.get_prompt("prompt")).description == "own"


@every_revision
async def test_the_listing_follows_from_the_function(revision: Revision) -> None:
    server = Server("s")

    @server.prompt(name="named", title="Title", meta={"example/a": 1})
    def prompt(
        path: Annotated[str, Arg("Which file", title="File")], style: Literal["a", "b"] = "a", *, ctx: Context
    ) -> str:
        """Review it."""
        return f"{path} {style} {ctx.method}"

    async with connected(server, revision=revision) as session:
        [listed] = await session.list_prompts()
        assert (listed.name, listed.description) == ("named", "Review it.")
        first, second = listed.arguments
        assert (first.name, first.description, first.required) == ("path", "Which file", True)
        assert (second.name, second.required) == ("style", False)
        assert first.title == ("File" if revision >= V2025_06_18 else None)
        result = await session.get_prompt("named", {"path": "x", "style": "b"})
        assert result.messages == [user("x b prompts/get")]


async def test_arguments_are_text_and_become_what_the_function_wants() -> None:
    server = Server("s")

    @server.prompt
    def repeat(times: int, loud: bool = False, share: float | None = None) -> str:
        return ("ha" * times).upper() if loud else "ha" * times + str(share or "")

    async with connected(server) as session:
        result = await session.get_prompt("repeat", {"times": "3", "loud": "true"})
        assert result.messages == [user("HAHAHA")]
        for share in ("2", "2.0"):
            result = await session.get_prompt("repeat", {"times": "1", "share": share})
            assert result.messages == [user("ha2.0")]
        for wrong in ({"times": "three"}, {"times": "1.5"}, {"times": ""}, {"times": "3", "loud": "maybe"}):
            with pytest.raises(RemoteError) as refused:
                await session.get_prompt("repeat", wrong)
            assert refused.value.code == INVALID_PARAMS


async def test_what_is_wrong_with_the_arguments_is_said_and_bounded() -> None:
    server = Server("s")
    reached: list[str] = []

    @server.prompt
    def prompt(a: str, b: Literal["x", "y"] = "x") -> str:
        reached.append(a)
        return a

    async with connected(server) as session:
        with pytest.raises(RemoteError) as refused:
            await session.get_prompt("prompt", {"b": "z", "c": "", "d" * 10_000: ""})
        assert refused.value.code == INVALID_PARAMS
        assert len(refused.value.message) <= 500
        problems = sorted(refused.value.data["problems"])
        assert problems[0].startswith("has unknown properties: 'c', 'ddd")
        assert problems[1:] == ["lacks the required property 'a'", "must be one of 'x', 'y' @ b"]
        assert max(map(len, problems)) < 100
    assert reached == []


async def test_crashes_and_errors(caplog: Any) -> None:
    server = Server("s")

    @server.prompt
    def crash() -> str:
        raise ValueError("secret")

    @server.prompt
    def own() -> str:
        raise ErrorReply(5, "own")

    async with connected(server) as session:
        with pytest.raises(RemoteError) as crashed:
            await session.get_prompt("crash")
        assert crashed.value.code == INTERNAL_ERROR
        assert "secret" not in str(crashed.value)
        with pytest.raises(RemoteError, match="own"):
            await session.get_prompt("own")
    assert len(caplog.records) == 1
    with pytest.raises(LocalError, match="already"):
        server.add_prompt(crash)
    with pytest.raises(KeyError):
        server.remove_prompt("nothing")
    server.remove_prompt("crash")
    assert "crash" not in server.prompts


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ([], 0, False)),
        ([], ([], 0, False)),
        (["a", 5], (["a", "5"], 2, False)),
        ("one", (["one"], 1, False)),
        ((str(n) for n in range(100)), ([str(n) for n in range(100)], 100, False)),
        ([str(n) for n in range(101)], ([str(n) for n in range(100)], 101, True)),
    ],
    ids=["none", "empty", "mixed", "text", "hundred", "more"],
)
def test_suggestions_are_cut_to_what_the_specification_allows(value: Any, expected: Any) -> None:
    completion = suggestions(value).completion
    assert (completion.values, completion.total, completion.has_more) == expected


def test_a_whole_completion_is_left_alone() -> None:
    completion = Completion(values=["a"], total=7, has_more=True)
    assert suggestions(completion).completion is completion
    result = CompleteResult(completion=completion)
    assert suggestions(result) is result


@every_revision
async def test_completion_is_offered_only_where_something_completes(revision: Revision) -> None:
    server = Server("s")

    @server.prompt
    def plain(path: str) -> str:
        return path

    async with connected(server, revision=revision) as session:
        with pytest.raises(RemoteError) as refused:
            await session.complete_prompt("plain", "path", "")
        assert refused.value.code == METHOD_NOT_FOUND
        assert session.server_capabilities.completions is None

    @server.complete(plain, "path")
    def paths(value: str, ctx: Context) -> list[str]:
        return [value + "!", ctx.method]

    async with connected(server, revision=revision) as session:
        found = await session.complete_prompt("plain", "path", "a")
        assert found.values == ["a!", "completion/complete"]
        assert (await session.complete_prompt("plain", "other", "a")).values == []


async def test_choices_complete_themselves_whatever_their_case() -> None:
    server = Server("s")

    @server.prompt
    def prompt(style: Literal["Short", "shy", "long"]) -> str:
        return style

    async with connected(server) as session:
        assert (await session.complete_prompt("prompt", "style", "SH")).values == ["Short", "shy"]
        assert (await session.complete_prompt("prompt", "style", "")).values == ["Short", "shy", "long"]
        assert (await session.complete_prompt("prompt", "nothing", "")).values == []


async def test_a_completer_that_crashes_ends_only_its_request(caplog: Any) -> None:
    server = Server("s")

    @server.complete("a://{b}", "b")
    async def values(value: str, context: dict[str, str]) -> list[str]:
        return [context["missing"]]

    @server.resource("a://{b}")
    def read(b: str) -> str:
        return b

    async with connected(server) as session:
        with pytest.raises(RemoteError) as crashed:
            await session.complete_resource("a://{b}", "b", "x")
        assert crashed.value.code == INTERNAL_ERROR
        assert (await session.complete_resource("a://{b}", "b", "x", {"missing": "found"})).values == ["found"]
    assert len(caplog.records) == 1
