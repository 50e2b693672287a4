from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trimcp.cli.asking import Asker, BadAnswer, InputEnded, Terminal, read_answer
from trimcp.cli.screen import Screen
from trimcp.wire.input_requests import (
    BooleanSchema,
    ElicitFormParams,
    ElicitResult,
    ElicitURLParams,
    EnumOption,
    FormSchema,
    LegacyTitledEnumSchema,
    NumberSchema,
    StringSchema,
    TitledItems,
    TitledMultiSelectEnumSchema,
    TitledSingleSelectEnumSchema,
    UntitledItems,
    UntitledMultiSelectEnumSchema,
    UntitledSingleSelectEnumSchema,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of POSIX systems")

SIZES = [EnumOption(const="s", title="Small"), EnumOption(const="l", title="Large")]


@pytest.fixture
async def person() -> AsyncIterator[tuple[int, Terminal]]:
    """A pseudo-terminal: what is written to the first is typed at the second."""
    keyboard, line = os.openpty()
    try:
        yield keyboard, Terminal(line)
    finally:
        os.close(keyboard)
        os.close(line)


def form(required: list[str] | None = None, **fields: Any) -> ElicitFormParams:
    return ElicitFormParams(message="Tell \x1b[5mme", requested_schema=FormSchema(fields, required=required or []))


async def typed(person: tuple[int, Terminal], params: Any, *lines: str, **options: Any) -> ElicitResult:
    keyboard, terminal = person
    os.write(keyboard, "".join(f"{line}\n" for line in lines).encode())
    with trio.fail_after(60):
        return await Asker(Screen(), terminal, **options).answer(params)


@pytest.mark.parametrize(
    ("field", "line", "value"),
    [
        (BooleanSchema(), "YES", True),
        (BooleanSchema(), "n", False),
        (NumberSchema(type="integer", minimum=1, maximum=9), "9", 9),
        (NumberSchema(), "2.5", 2.5),
        (StringSchema(min_length=2, max_length=3), "abc", "abc"),
        (StringSchema(format="email"), "a@b.c", "a@b.c"),
        (StringSchema(format="date"), "2026-02-28", "2026-02-28"),
        (StringSchema(format="date-time"), "2026-02-28T10:00:00Z", "2026-02-28T10:00:00Z"),
        (StringSchema(format="uri"), "https://x.example/", "https://x.example/"),
        (UntitledSingleSelectEnumSchema(enum=["a", "b"]), "2", "b"),
        (UntitledSingleSelectEnumSchema(enum=["10", "2"]), "2", "2"),
        (LegacyTitledEnumSchema(enum=["a", "b"], enum_names=["Anna"]), "Anna", "a"),
        (TitledSingleSelectEnumSchema(one_of=SIZES), "Large", "l"),
        (UntitledMultiSelectEnumSchema(items=UntitledItems(enum=["a", "b", "c"])), "c, 1,c", ["c", "a"]),
        (TitledMultiSelectEnumSchema(items=TitledItems(any_of=SIZES)), "Small,2", ["s", "l"]),
    ],
)
def test_what_is_typed_becomes_a_value(field: Any, line: str, value: Any) -> None:
    answer = read_answer(field, line)
    assert (type(answer), answer) == (type(value), value)


@pytest.mark.parametrize(
    ("field", "line", "told"),
    [
        (BooleanSchema(), "maybe", "Type yes or no."),
        (NumberSchema(type="integer"), "2.5", "Type a whole number."),
        (NumberSchema(), "x", "Type a number."),
        (NumberSchema(), "nan", "Type a number that is finite."),
        (NumberSchema(), "inf", "Type a number that is finite."),
        (NumberSchema(minimum=1, maximum=9), "10", "Type a number from 1 to 9."),
        (NumberSchema(minimum=1), "0", "Type a number at least 1."),
        (NumberSchema(minimum=1234567), "0", "Type a number at least 1234567."),
        (StringSchema(min_length=2), "a", "Type at least 2 characters."),
        (StringSchema(max_length=0), "a", "Type at most 0 characters."),
        (StringSchema(format="email"), "a", "Not a valid email; type one such as ada@example.org."),
        (StringSchema(format="date"), "2026-02-30", "Not a valid date; type one such as 1815-12-10."),
        (UntitledSingleSelectEnumSchema(enum=["a", "b"]), "3", "Type a number from 1 to 2, or one of the values."),
        (UntitledSingleSelectEnumSchema(enum=["a", "b"]), "0", "Type a number from 1 to 2, or one of the values."),
        (UntitledMultiSelectEnumSchema(items=UntitledItems(enum=["a"]), min_items=1), ",", "Choose at least 1."),
        (
            UntitledMultiSelectEnumSchema(items=UntitledItems(enum=["a", "b"]), max_items=1),
            "a,b",
            "Choose at most 1.",
        ),
    ],
)
def test_what_does_not_fit_is_explained(field: Any, line: str, told: str) -> None:
    with pytest.raises(BadAnswer) as caught:
        read_answer(field, line)
    assert str(caught.value) == told


async def test_a_form_is_asked_field_by_field(person: tuple[int, Terminal], capsys: pytest.CaptureFixture[str]) -> None:
    asked = form(
        ["name"],
        name=StringSchema(title="Your name", description="As in \x1b]0;x\x07 the passport"),
        age=NumberSchema(type="integer", minimum=0, default=30),
        size=TitledSingleSelectEnumSchema(one_of=SIZES, default="s"),
        mail=StringSchema(format="email"),
        news=BooleanSchema(default=False),
    )
    # A wrong age is asked again; the empty lines take defaults, and leave out what is optional.
    result = await typed(person, asked, "y", "Ada", "-1", "36", "", "", "")
    assert result == ElicitResult(action="accept", content={"name": "Ada", "age": 36, "size": "s", "news": False})
    said = capsys.readouterr().err
    assert "The server asks: Tell \\x1b[5mme" in said
    assert "As in \\x1b]0;x\\x07 the passport" in said
    assert "age (at least 0) [30]: " in said
    assert "1. Small (s)" in said
    assert "mail (email) (optional): " in said
    assert "\x1b" not in said


async def test_a_required_field_is_not_left_out(person: tuple[int, Terminal]) -> None:
    asked = form(["n", "text"], n=NumberSchema(), text=StringSchema())
    result = await typed(person, asked, "y", "", "", "7", "")
    # An empty text is a text.
    assert result.content == {"n": 7, "text": ""}


@pytest.mark.parametrize(("line", "action"), [("n", "decline"), ("c", "cancel"), ("what?\nno", "decline")])
async def test_a_form_need_not_be_answered(person: tuple[int, Terminal], line: str, action: str) -> None:
    assert await typed(person, form(name=StringSchema()), line) == ElicitResult(action=action)


async def test_the_end_of_the_input_cancels(person: tuple[int, Terminal]) -> None:
    assert await typed(person, form(name=StringSchema()), "y\n\x04") == ElicitResult(action="cancel")


async def test_an_address_is_shown_whole_and_never_opened(
    person: tuple[int, Terminal], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda *_: pytest.fail("a browser was opened"))
    url = "https://bank.example@evil.example/" + "x" * 500 + "?\u202etoken=1"
    assert await typed(person, ElicitURLParams(message="Pay", url=url), "y") == ElicitResult(action="accept")
    assert url.replace("\u202e", "\\u202e") in capsys.readouterr().err


async def test_nobody_is_asked_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    reader, writer = os.pipe()
    try:
        result = await Asker(Screen(), Terminal(reader)).answer(form(name=StringSchema()))
    finally:
        os.close(reader)
        os.close(writer)
    assert result == ElicitResult(action="decline")
    assert "Declined: standard input is no terminal" in capsys.readouterr().err


async def test_the_clock_stands_still_while_a_person_thinks(person: tuple[int, Terminal]) -> None:
    moments = []

    @contextmanager
    def standstill() -> Iterator[None]:
        moments.append("stopped")
        yield
        moments.append("goes on")

    await typed(person, form(), "y", standstill=standstill)
    assert moments == ["stopped", "goes on"]


async def test_a_question_that_is_cancelled_leaves_its_line(
    person: tuple[int, Terminal], capsys: pytest.CaptureFixture[str]
) -> None:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Asker(Screen(), person[1]).answer, form())
            await wait_all_tasks_blocked()
            asked = capsys.readouterr().err
            nursery.cancel_scope.cancel()
    assert not asked.endswith("\n")
    assert capsys.readouterr().err == "\n"


async def test_two_questions_are_asked_one_after_the_other(person: tuple[int, Terminal]) -> None:
    keyboard, terminal = person
    asker = Asker(Screen(), terminal)
    answers = []

    async def ask(name: str) -> None:
        answers.append((name, (await asker.answer(form())).action))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "first")
            await wait_all_tasks_blocked()
            nursery.start_soon(ask, "second")
            await wait_all_tasks_blocked()
            os.write(keyboard, b"y\nn\n")
    assert answers == [("first", "accept"), ("second", "decline")]


async def test_waiting_for_a_line_can_be_cancelled(person: tuple[int, Terminal]) -> None:
    keyboard, terminal = person
    with trio.move_on_after(0.01) as scope:
        await terminal.read_line()
    assert scope.cancelled_caught
    os.write(keyboard, b"later\n")
    assert await terminal.read_line() == "later"


async def test_a_line_without_end_is_not_kept() -> None:
    reader, writer = os.pipe()
    terminal = Terminal(reader)

    async def type_on() -> None:
        for _ in range(20):
            await trio.to_thread.run_sync(os.write, writer, b"x" * 4_096)

    try:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(type_on)
                failure = None
                try:
                    await terminal.read_line()
                except InputEnded as error:
                    failure = error
        assert failure is not None
        assert await typed_after(writer, terminal) == "next"
    finally:
        os.close(reader)
        os.close(writer)


async def typed_after(writer: int, terminal: Terminal) -> str:
    os.write(writer, b"\nnext\n")
    while (line := await terminal.read_line()) != "next":
        assert set(line) <= {"x"}
    return line
