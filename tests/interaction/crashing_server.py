"""The server of the interaction tests with handlers that raise whatever they are told to, of every kind.

`RAISED` has the rows of the table in docs/reference/errors.md.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn

import trio

from tests.interaction import everything_server
from tests.interaction.everything_server import Journal
from trimcp.errors import ErrorReply, ToolError
from trimcp.server.server import Server
from trimcp.session.context import Context

SECRET: Final = "the password is hunter2"


class Odd(BaseException):
    """No `Exception`, and nobody's."""


class Bare(Exception):
    """It has what a server answered, and finds nothing else there."""

    def __getattr__(self, name: str) -> Any:
        return {}[name]


class Whole(ExceptionGroup[Exception]):
    """Its author had another signature in mind."""

    def derive(self) -> Whole:
        return self


def _raise(error: BaseException) -> NoReturn:
    raise error


_LEFT_OPEN: Final[list[Any]] = []  # what is never collected is never closed


async def _leave_a_nursery_open(crash: bool = False) -> None:
    async def numbers() -> AsyncIterator[int]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            if crash:
                nursery.cancel_scope.cancel()
            yield 1

    _LEFT_OPEN.append(numbers())
    await _LEFT_OPEN[-1].__anext__()
    await trio.lowlevel.checkpoint()


async def _leave_a_scope_open() -> None:
    _LEFT_OPEN.append(trio.CancelScope())
    _LEFT_OPEN[-1].__enter__()


RAISED: Final[Mapping[str, Callable[[], Any]]] = {
    "ToolError": lambda: _raise(ToolError("there is no such city")),
    "ErrorReply": lambda: _raise(ErrorReply(4711, "the disk is full")),
    "trio.TooSlowError": lambda: _raise(trio.TooSlowError()),
    "any other Exception": lambda: _raise(ValueError(SECRET)),
    "SystemExit": lambda: sys.exit(SECRET),
    "GeneratorExit": lambda: _raise(GeneratorExit(SECRET)),
    "asyncio.CancelledError": lambda: _raise(asyncio.CancelledError(SECRET)),
    "any other BaseException": lambda: _raise(Odd(SECRET)),
    "a trio.Cancelled that was kept": lambda: _raise_kept(),
}
"""What each row raises, by its name."""

LEFT: Final[Mapping[str, Callable[[], Awaitable[None]]]] = {
    "a cancel scope left open": _leave_a_scope_open,
    "a nursery left open": _leave_a_nursery_open,
    "a cancelled nursery left open": lambda: _leave_a_nursery_open(True),
}

STRANGE: Final[Mapping[str, Callable[[], Any]]] = {
    "an exception without attributes": lambda: _raise(Bare(SECRET)),
    "a group that cannot be split": lambda: _raise(Whole(SECRET, [ValueError(SECRET), KeyError(SECRET)])),
}
"""What Python's own functions for exceptions fail with."""

CRASHES: Final[Mapping[str, Callable[[], Any]]] = {**RAISED, **STRANGE}

_KEPT: Final[list[trio.Cancelled]] = []


def _raise_kept() -> NoReturn:
    raise _KEPT[0]


async def keep_a_cancellation() -> None:
    """Be cancelled, and keep what was raised."""
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as error:
            _KEPT[:] = [error]
            raise


def exit_in_process() -> str:
    """Run in a process of its own."""
    sys.exit(SECRET)


async def _do(what: str) -> None:
    await keep_a_cancellation()
    if what in LEFT:
        await LEFT[what]()
    else:
        CRASHES[what]()


def make_server(journal: Journal) -> Server[Journal]:
    """A new server with everything on it, and what crashes."""
    server = everything_server.make_server(journal)
    server.add_tool(exit_in_process, run="process")

    @server.tool
    async def in_tool(what: str) -> str:
        await _do(what)
        return "done"

    @server.tool
    async def in_nursery(what: str) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await keep_a_cancellation()
            CRASHES[what]()
        return "done"

    @server.tool
    def in_thread_of_tool(what: str) -> str:
        trio.from_thread.run(keep_a_cancellation)
        CRASHES[what]()
        return "done"

    @server.tool
    async def in_work(what: str, ctx: Context[Journal]) -> str:
        ctx.request.start_soon(_do, what)
        await trio.sleep_forever()
        return "done"

    @server.tool
    async def in_task(what: str, of: str, ctx: Context[Journal]) -> str:
        owner: Any = ctx.session if of == "session" else ctx.server
        over = trio.Event()

        async def work() -> None:
            try:
                await _do(what)
            finally:
                over.set()

        owner.start_soon(work)
        await over.wait()  # a session may be over with its request
        return "done"

    @server.tool
    async def in_middleware(what: str) -> str:
        return "done"

    @server.middleware
    async def crashing(ctx: Any, params: Any, call_next: Any) -> Any:
        if getattr(params, "name", None) == "in_middleware":
            await _do(params.arguments["what"])
        return await call_next(ctx, params)

    @server.resource("crash://{what}")
    async def in_resource(what: str) -> str:
        await _do(what)
        return "done"

    @server.prompt
    async def in_prompt(what: str) -> str:
        await _do(what)
        return "done"

    @server.complete("in_prompt", "what")
    async def in_completer(value: str) -> list[str]:
        await _do(value)
        return ["done"]

    @server.notification("notifications/roots/list_changed")
    async def in_notification(params: Any) -> None:
        journal.write("notified")
        await _do("SystemExit")

    return server


if __name__ == "__main__":
    everything_server.serve(make_server)
