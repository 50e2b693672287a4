"""What people register besides plain functions: each is refused at once, or right at every call."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Annotated, Any, Optional, Union

import pytest

import trimcp
from trimcp.errors import RemoteError
from trimcp.server.handlers.media import Image
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.testing.connect import connected
from trimcp.wire.content import ImageContent, TextContent

PICTURE = Image(b"p", "image/png")
SHOWN = ImageContent("cA==", "image/png")


@dataclasses.dataclass
class Place:
    town: str
    since: datetime.date | None = None


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as people write it: a sync wrapper of any function."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Answers:
    def __init__(self) -> None:
        self.more = 1

    async def __call__(self, number: int) -> int:
        return number + self.more

    def bound(self, number: int) -> int:
        """Add."""
        return number + self.more


def later(number: int) -> Awaitable[int]:
    return Answers()(number)


async def result_of(function: Any, arguments: dict[str, Any], **options: Any) -> Any:
    server = Server("s")
    server.add_tool(function, name="it", **options)
    async with connected(server) as session:
        return await session.call_tool("it", arguments)


async def optional_1(number: int, ctx: trimcp.Context | None = None) -> int:
    assert isinstance(ctx, Context)
    return number + 1


async def optional_2(number: int, c: Optional[Context[Any]] = None) -> int:  # noqa: UP045 - people write it
    assert isinstance(c, Context)
    return number + 1


async def optional_3(number: int, c: Annotated[Union[None, Context[Any]], "the request"] = None) -> int:  # noqa: UP007, RUF036  # old spelling
    assert isinstance(c, Context)
    return number + 1


def in_thread(number: int, c: trimcp.ThreadContext | None = None) -> int:
    assert isinstance(c, trimcp.ThreadContext)
    return number + 1


@logged
async def wrapped(number: int, ctx: trimcp.Context | None = None) -> int:
    assert isinstance(ctx, Context)
    await ctx.report_progress(1)
    return number + 1


@logged
@logged
def wrapped_sync(number: int) -> int:
    return number + 1


def sync_of_async(number: int) -> Coroutine[Any, Any, int]:
    return Answers()(number)


@pytest.mark.parametrize(
    "function",
    [
        *(optional_1, optional_2, optional_3, in_thread, wrapped, wrapped_sync, sync_of_async, later),
        *(Answers(), Answers().bound, logged(Answers().bound), functools.partial(wrapped, ctx=None)),
    ][:-1],
)
@pytest.mark.parametrize("run", ["thread", "inline"])
async def test_every_kind_of_function_is_called(autojump_clock: Any, function: Any, run: str) -> None:
    result = await result_of(function, {"number": 1}, run=run)
    assert result.structured_content == {"result": 2}


def added(number: int) -> int:
    return number + 1


@functools.wraps(added)
async def async_of_sync(**arguments: int) -> int:
    return added(**arguments)


@pytest.mark.parametrize("function", [async_of_sync, sync_of_async, later, functools.partial(Answers(), number=1)])
async def test_what_a_function_returns_is_awaited_in_a_thread_too(function: Any) -> None:
    arguments = {} if isinstance(function, functools.partial) else {"number": 1}
    assert (await result_of(function, arguments)).structured_content == {"result": 2}


@functools.singledispatch
def chosen(number: int) -> int:
    return number + 1


def test_a_function_that_chooses_by_its_first_argument_is_refused() -> None:
    with pytest.raises(TypeError, match=r"chosen\(\) chooses by its first argument, .* wrap it in a function"):
        Server("s").add_tool(chosen)


def numbers(count: int) -> Iterator[int]:
    yield from range(count)


async def numbers_in_time(count: int) -> AsyncIterator[int]:
    yield count


@pytest.mark.parametrize("function", [numbers, numbers_in_time, logged(numbers), functools.partial(numbers, 3)])
@pytest.mark.parametrize("register", ["tool", "prompt"])
def test_generators_are_refused(function: Any, register: str) -> None:
    with pytest.raises(TypeError, match=r"yields, but a call has one result: return a list"):
        getattr(Server("s"), register)(function)


@pytest.mark.parametrize("register", [Server("s").tool, Server("s").prompt, Server("s").resource("a:///{number}")])
def test_a_method_without_its_object_is_refused(register: Any) -> None:
    with pytest.raises(TypeError, match=r"Own\.add\(\) is a method.* as by server\.add_tool\(Own\(\)\.add\)"):

        class Own:
            @register
            def add(self, number: int) -> int:
                return number


def test_what_tells_no_parameters_is_refused() -> None:
    with pytest.raises(TypeError, match=r"getattr\(\) does not tell its parameters: wrap it"):
        Server("s").add_tool(getattr)


async def test_static_methods_and_a_function_with_a_first_argument_of_this_name_are_taken(autojump_clock: Any) -> None:
    class Own:
        @staticmethod
        def add(number: int) -> int:
            return number + 1

    def of(self: int) -> int:
        return self + 1

    assert (await result_of(Own.add, {"number": 1})).structured_content == {"result": 2}
    assert (await result_of(of, {"self": 1})).structured_content == {"result": 2}


def untyped() -> list:
    return ["a", PICTURE, TextContent("b")]


def any_list() -> list[Any]:
    return [PICTURE, {"a": 1}]


def any_tuple() -> tuple:
    return ("a", PICTURE)


def maybe_list() -> list[Any] | None:
    return [PICTURE]


@pytest.mark.parametrize(
    ("function", "content"),
    [
        (untyped, [TextContent("a"), SHOWN, TextContent("b")]),
        (any_list, [SHOWN, TextContent('{\n  "a": 1\n}')]),
        (any_tuple, [TextContent("a"), SHOWN]),
        (maybe_list, [SHOWN]),
    ],
)
async def test_content_in_a_list_without_a_type_is_content(autojump_clock: Any, function: Any, content: Any) -> None:
    result = await result_of(function, {})
    assert (result.content, result.is_error) == (content, False)


async def test_a_list_without_a_type_and_without_content_is_structured(autojump_clock: Any) -> None:
    def plain() -> list[Any]:
        return ["a", 1]

    server = Server("s")
    server.add_tool(plain)
    async with connected(server) as session:
        (tool,) = await session.list_tools()
        assert not tool.output_schema  # it would promise what a list of pictures does not keep
        assert (await session.call_tool("plain")).structured_content == {"result": ["a", 1]}


class Shown:
    def __str__(self) -> str:
        return "as it is shown"


class Hidden:
    pass


async def test_an_object_that_shows_itself_is_its_text_and_any_other_is_refused(autojump_clock: Any) -> None:
    def shown() -> Shown:
        return Shown()

    def hidden() -> Hidden:
        return Hidden()

    assert (await result_of(shown, {})).text == "as it is shown"
    with pytest.raises(TypeError, match=r"hidden\(\): the result cannot be structured: Hidden has no JSON form"):
        await result_of(hidden, {})


async def test_a_result_with_keys_of_all_kinds_is_sent(autojump_clock: Any) -> None:
    def by_day() -> dict[datetime.date, int]:
        return {datetime.date(2026, 2, 28): 1}

    assert (await result_of(by_day, {})).structured_content == {"2026-02-28": 1}


async def test_arguments_of_prompts_and_templates_are_read_as_json_where_no_text_is_taken(autojump_clock: Any) -> None:
    server = Server("s")
    got: list[Any] = []

    @server.prompt
    async def plan(
        days: list[int],
        place: Place,
        other: Place | None = None,
        tags: set[str] = frozenset(),
        note: str = "",
        either: str | list[str] = "",
        sure: bool = False,
    ) -> str:
        """Plan.

        Args:
            days: which
        """
        got[:] = [days, place, other, tags, note, either, sure]
        return "done"

    @server.resource("days://{days}/{note}")
    async def read(days: list[int], note: str) -> str:
        return f"{days} {note}"

    day = datetime.date(2026, 2, 28)
    async with connected(server) as session:
        (prompt,) = await session.list_prompts()
        described = {argument.name: argument.description for argument in prompt.arguments or ()}
        assert described["days"] == 'which\n\nAs JSON that fits {"type":"array","items":{"type":"integer"}}'
        assert '"properties"' in str(described["other"])
        assert not described["note"]
        texts = {"days": "[1, 2.0]", "place": '{"town": "T", "since": "2026-02-28"}', "tags": '["a"]'}
        texts |= {"note": "[1]", "either": '["a"]', "sure": "true"}
        await session.get_prompt("plan", {**texts, "other": '{"town": "U"}'})
        assert got == [[1, 2], Place("T", day), Place("U"), {"a"}, "[1]", '["a"]', True]
        await session.get_prompt("plan", {**texts, "other": "null"})
        assert got[2] is None
        for wrong in ("1", "{", '["a"]', ""):
            with pytest.raises((RemoteError, ValueError)):
                await session.get_prompt("plan", {**texts, "days": wrong})
        found = await session.read_resource("days://%5B1%2C2%5D/a")
        assert found.contents[0].text == "[1, 2] a"
