"""Asks the user at the terminal the questions of a server, field by field. It never opens a URL."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import date, datetime
from typing import Any, Final

import attrs
import trio

from trimcp.cli.screen import Screen
from trimcp.cli.text import range_text, theirs
from trimcp.wire import input_requests as forms

_YES_OR_NO: Final = {
    **dict.fromkeys(("y", "yes", "true", "1", "on"), True),
    **dict.fromkeys(("n", "no", "false", "0", "off"), False),
}
_LONGEST_ANSWER: Final = 64 * 1024
_SKIPPED: Final = object()
_EXAMPLES: Final = {
    "email": "ada@example.org",
    "uri": "https://example.org/",
    "date": "1815-12-10",
    "date-time": "1815-12-10T09:26:53Z",
}


class BadAnswer(ValueError):
    """The typed text does not fit the field; the error's text says what does."""


class InputEnded(Exception):
    """The user ended the input (Ctrl-D)."""


@attrs.define(eq=False)
class Terminal:
    """Lines from standard input. Waiting for one can be cancelled and needs no thread."""

    _fd: int = 0
    _kept: bytearray = attrs.field(init=False, factory=bytearray)

    @property
    def present(self) -> bool:
        """Whether a user can be asked."""
        try:
            return os.isatty(self._fd)
        except OSError:
            return False

    async def read_line(self) -> str:
        """Return the next line without its end. Raises InputEnded at the end of the input."""
        while b"\n" not in self._kept:
            chunk = await self._read()
            if not chunk or len(self._kept) > _LONGEST_ANSWER:
                self._kept.clear()
                raise InputEnded
            self._kept += chunk
        line, _, rest = bytes(self._kept).partition(b"\n")
        self._kept = bytearray(rest)
        return line.decode(errors="replace").rstrip("\r")

    async def _read(self) -> bytes:
        if sys.platform == "win32":
            return await trio.to_thread.run_sync(os.read, self._fd, 4096, abandon_on_cancel=True)
        await trio.lowlevel.wait_readable(self._fd)
        return os.read(self._fd, 4096)


@attrs.define(eq=False)
class Asker:
    """The elicitation handler."""

    screen: Screen
    terminal: Terminal = attrs.field(factory=Terminal)
    # a context manager entered while the user answers, for example to stop a timeout
    standstill: Callable[[], AbstractContextManager[Any]] = nullcontext
    _turn: trio.Lock = attrs.field(init=False, factory=trio.Lock)

    async def answer(self, params: forms.ElicitParams) -> forms.ElicitResult:
        """Ask for one field at a time, and return the user's response."""
        async with self._turn:
            if not self.terminal.present:
                asked = f"The server asks: {theirs(params.message, None)}"
                self.screen.note(f"{asked}\nDeclined: standard input is no terminal to ask at.", "yellow")
                return forms.ElicitResult(action="decline")
            self.screen.end_progress()
            with self.standstill():
                try:
                    if isinstance(params, forms.ElicitURLParams):
                        return await self._ask_url(params)
                    return await self._ask_form(params)
                except InputEnded:
                    self._say("\n(cancelled)")
                    return forms.ElicitResult(action="cancel")

    async def _ask_url(self, params: forms.ElicitURLParams) -> forms.ElicitResult:
        self._say(f"\nThe server asks you to open an address: {theirs(params.message, None)}\n")
        self._say(f"  {theirs(params.url, 2_000)}\n")
        self._say("Nothing is opened for you. If you trust where it leads, open it yourself.")
        return await self._consent("Do you agree?")

    async def _ask_form(self, params: forms.ElicitFormParams) -> forms.ElicitResult:
        schema = params.requested_schema
        self._say(f"\nThe server asks: {theirs(params.message, None)}")
        names = ", ".join(theirs(field.title or name, 40) for name, field in schema.properties.items())
        agreed = await self._consent(f"It wants to know: {names}. Answer?" if names else "Do you agree?")
        if agreed.action != "accept":
            return agreed
        required = set(schema.required or ())
        content: dict[str, forms.ElicitAnswer] = {}
        for name, field in schema.properties.items():
            value = await self._ask_field(name, field, name in required)
            if value is not _SKIPPED:
                content[name] = value
        return forms.ElicitResult(action="accept", content=content)

    async def _ask_field(self, name: str, field: forms.PrimitiveSchema, required: bool) -> Any:
        if field.description:
            self._say(f"  {theirs(field.description, None)}")
        for number, (value, title) in enumerate(field.choices, 1):
            self._say(f"    {number}. {theirs(title, 200)}" + (f" ({theirs(value, 200)})" if title != value else ""))
        default = f" [{_shown(field.default)}]" if field.default is not None else ""
        optional = "" if required or default else " (optional)"
        while True:
            typed = await self._prompt(f"  {theirs(field.title or name, 60)}{_hint(field)}{optional}{default}: ")
            if not typed:
                if field.default is not None:
                    return field.default
                if not required:
                    return _SKIPPED
                if not (isinstance(field, forms.StringSchema) and not field.min_length and not field.format):
                    self._say("  This one is required.")
                    continue
            try:
                return read_answer(field, typed)
            except BadAnswer as problem:
                self._say(f"  {problem}")

    async def _consent(self, question: str) -> forms.ElicitResult:
        while True:
            match (await self._prompt(f"{question} [y]es, [n]o, [c]ancel: ")).lower():
                case "y" | "yes":
                    return forms.ElicitResult(action="accept")
                case "n" | "no":
                    return forms.ElicitResult(action="decline")
                case "c" | "cancel":
                    return forms.ElicitResult(action="cancel")

    async def _prompt(self, text: str) -> str:
        self.screen.prompt(text)
        try:
            return (await self.terminal.read_line()).strip()
        except trio.Cancelled:
            self.screen.prompt("\n")  # what is said next does not stand behind the question
            raise

    def _say(self, text: str) -> None:
        self.screen.prompt(text + "\n")


def read_answer(field: forms.PrimitiveSchema, typed: str) -> forms.ElicitAnswer:
    """Convert the typed text to a value of the field. Raises BadAnswer: it does not fit."""
    match field:
        case forms.BooleanSchema():
            if typed.lower() not in _YES_OR_NO:
                raise BadAnswer("Type yes or no.")
            return _YES_OR_NO[typed.lower()]
        case forms.NumberSchema():
            return _number(field, typed)
        case forms.StringSchema():
            if not _fits(len(typed), field.bounds):
                raise BadAnswer(f"Type {_bounds_text(field.bounds)} characters.")
            if field.format:
                _check_format(field.format, typed)
            return typed
        case forms.UntitledMultiSelectEnumSchema() | forms.TitledMultiSelectEnumSchema():
            parts = filter(None, map(str.strip, typed.split(",")))
            values = list(dict.fromkeys(_choose(field.choices, part) for part in parts))
            if not _fits(len(values), field.bounds):
                raise BadAnswer(f"Choose {_bounds_text(field.bounds)}.")
            return values
    return _choose(field.choices, typed)


def _number(field: forms.NumberSchema, typed: str) -> int | float:
    try:
        value = int(typed) if field.type == "integer" else float(typed)
    except ValueError:
        raise BadAnswer("Type a whole number." if field.type == "integer" else "Type a number.") from None
    if not math.isfinite(value) or not _fits(value, field.bounds):
        raise BadAnswer(f"Type a number {_bounds_text(field.bounds) or 'that is finite'}.")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _fits(value: float, bounds: forms.Bounds) -> bool:
    return (bounds.least is None or value >= bounds.least) and (bounds.most is None or value <= bounds.most)


def _bounds_text(bounds: forms.Bounds) -> str:
    return range_text(*(None if each is None else f"{int(each) if each % 1 == 0 else each}" for each in bounds))


def _choose(choices: list[forms.Choice], typed: str) -> str:
    for value, title in choices:
        if typed in (value, title):
            return value
    if typed.isascii() and typed.isdigit() and 1 <= int(typed) <= len(choices):
        return choices[int(typed) - 1][0]
    raise BadAnswer(f"Type a number from 1 to {len(choices)}, or one of the values.")


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return theirs(", ".join(default) if isinstance(default, list) else str(default), 60)


def _hint(field: forms.PrimitiveSchema) -> str:
    if isinstance(field, forms.BooleanSchema):
        return " (yes or no)"
    if isinstance(field, forms.NumberSchema):
        text = _bounds_text(field.bounds)
        return f" ({text})" if text else ""
    if isinstance(field, forms.UntitledMultiSelectEnumSchema | forms.TitledMultiSelectEnumSchema):
        return " (several, with commas)"
    return f" ({field.format})" if isinstance(field, forms.StringSchema) and field.format else ""


def _check_format(format: str, text: str) -> None:
    try:
        match format:
            case "date":
                date.fromisoformat(text)
            case "date-time":
                datetime.fromisoformat(text)
            case "email" | "uri":
                inside = "@" in text[1:-1] if format == "email" else ":" in text[1:]
                if not inside or any(map(str.isspace, text)):
                    raise ValueError
    except ValueError:
        raise BadAnswer(f"Not a valid {format}; type one such as {_EXAMPLES[format]}.") from None
