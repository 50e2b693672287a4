"""Asking for a class, in place and by re-running, from the loop, a thread and a declared parameter."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
from typing import Annotated, Any, Literal, TypedDict

import attrs
import pydantic
import pytest

import trimcp
import trimcp.testing
from trimcp.wire.revisions import REVISIONS, V2025_11_25

can_ask = pytest.mark.parametrize("revision", [r for r in REVISIONS if r >= V2025_11_25], ids=str)


class Seat(enum.Enum):
    WINDOW = "window"
    AISLE = "aisle"


@attrs.frozen
class Ours:
    seat: Seat
    bags: Annotated[int, pydantic.Field(ge=0, le=2)] = 0


@dataclasses.dataclass
class Plain:
    seat: Seat
    bags: Annotated[int, trimcp.Arg(ge=0, le=2)] = 0


class Dict(TypedDict):
    seat: Seat
    bags: int


class Model(pydantic.BaseModel):
    seat: Seat
    bags: int = pydantic.Field(default=0, ge=0, le=2, alias="howMany", description="to carry")
    other: Seat | None = None
    on: datetime.date | None


CONTENT: dict[str, Any] = {"seat": "aisle", "bags": 1}
MODEL: dict[str, Any] = {"seat": "aisle", "howMany": 1}
CASES = [
    (Ours, CONTENT, Ours(Seat.AISLE, 1)),
    (Plain, CONTENT, Plain(Seat.AISLE, 1)),
    (Dict, CONTENT, {"seat": Seat.AISLE, "bags": 1}),
    (Model, MODEL, Model(seat=Seat.AISLE, howMany=1, on=None)),
    (int, {"value": 3}, 3),
]


def host(content: Any, action: Any = "accept") -> trimcp.Client:
    """A client whose user fills in every form with this."""
    client = trimcp.Client("host")

    @client.elicitation
    async def user(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        return trimcp.ElicitResult(action=action, content=content)

    return client


@can_ask
@pytest.mark.parametrize(("cls", "content", "value"), CASES)
async def test_a_class_is_answered_with_one(
    cls: Any, content: Any, value: Any, revision: Any, autojump_clock: Any
) -> None:
    server = trimcp.Server("s")
    got: list[Any] = []

    @server.tool
    async def ask(*, ctx: trimcp.Context) -> None:
        got.append(await ctx.elicit("How?", cls))

    async with trimcp.testing.connected(server, host(content), revision=revision) as session:
        result = await session.call_tool("ask")
        assert result.is_error is False
    assert got == [trimcp.Answer("accept", value)]


@pytest.mark.parametrize(("cls", "content", "value"), CASES)
async def test_so_it_is_for_a_declared_question(cls: Any, content: Any, value: Any, autojump_clock: Any) -> None:
    server = trimcp.Server("s")
    got: list[Any] = []

    async def ask(answer: Any) -> None:
        got.append(answer)

    ask.__annotations__["answer"] = Annotated[cls, trimcp.Elicit("How?")]
    server.tool(ask)
    content = {"answer": 3} if cls is int else content
    async with trimcp.testing.connected(server, host(content)) as session:
        assert (await session.call_tool("ask")).is_error is False
    assert got == [value]


async def test_bounds_beside_a_declared_question_hold(autojump_clock: Any) -> None:
    server = trimcp.Server("s")

    @server.tool
    async def ask(bags: Annotated[int, trimcp.Elicit("How many?"), pydantic.Field(le=2)]) -> int:
        return bags

    async with trimcp.testing.connected(server, host({"bags": 3})) as session:
        result = await session.call_tool("ask")
    assert result.is_error is True
    assert result.content[0].text == "the answer to 'How many?' does not fit: must be at most 2 @ bags"


async def test_who_declines_gives_no_value(autojump_clock: Any) -> None:
    server = trimcp.Server("s")

    @server.tool
    async def ask(*, ctx: trimcp.Context) -> str:
        answer = await ctx.elicit("How?", Ours)
        assert answer.value is None
        return answer.action

    async with trimcp.testing.connected(server, host(None, "decline")) as session:
        assert (await session.call_tool("ask")).content[0].text == "decline"


async def test_a_thread_asks_for_a_class() -> None:
    server = trimcp.Server("s")

    @server.tool
    def ask(*, ctx: trimcp.ThreadContext) -> str:
        answer = ctx.elicit("How?", Ours)
        assert answer.value is not None
        return answer.value.seat.value

    async with trimcp.testing.connected(server, host(CONTENT)) as session:
        assert (await session.call_tool("ask")).content[0].text == "aisle"


@can_ask
async def test_an_answer_that_does_not_fit_is_told_to_the_model(revision: Any, autojump_clock: Any) -> None:
    server = trimcp.Server("s")

    @server.tool
    async def ask(*, ctx: trimcp.Context) -> None:
        await ctx.elicit("How?", Ours)

    async with trimcp.testing.connected(server, host({"seat": "aisle", "bags": 9}), revision=revision) as session:
        result = await session.call_tool("ask")
    assert result.is_error is True
    assert result.content[0].text == "the answer to 'How?' does not fit: must be at most 2 @ bags"


class Inner(pydantic.BaseModel):
    n: int


class Outer(pydantic.BaseModel):
    name: str
    inner: Inner


@attrs.frozen
class Nested:
    name: str
    places: list[Ours]


@attrs.frozen
class Odd:
    name: str
    what: functools.partial  # any class without a JSON form


@pytest.mark.parametrize(
    ("cls", "text"),
    [(Outer, "Outer .*'inner'"), (Nested, "Nested .*'places'"), (Odd, r"Odd .*Odd\.what: partial"), (dict, "dict")],
)
async def test_a_class_that_no_form_can_hold_is_refused_by_the_name_of_its_field(
    cls: Any, text: str, autojump_clock: Any
) -> None:
    server = trimcp.Server("s")

    @server.tool
    async def ask(*, ctx: trimcp.Context) -> None:
        with pytest.raises(trimcp.LocalError, match=text):
            await ctx.elicit("How?", cls)

    async with trimcp.testing.connected(server, host({})) as session:
        assert (await session.call_tool("ask")).is_error is False


def test_a_model_is_shown_as_a_form() -> None:
    assert trimcp.form(Model).schema == {
        "type": "object",
        "properties": {
            "seat": {"type": "string", "enum": ["window", "aisle"]},
            "howMany": {"type": "integer", "minimum": 0, "maximum": 2, "default": 0, "description": "to carry"},
            "other": {"type": "string", "enum": ["window", "aisle"]},
            "on": {"type": "string", "format": "date"},
        },
        "required": ["seat"],
    }


def test_forms_for_single_types_are_forms_too() -> None:
    assert trimcp.form(Literal["a", "b"]).load({"value": "a"}) == "a"
