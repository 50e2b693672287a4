"""`trimcp ps` and `trimcp top`: what the servers of this user do, and what one may do about it; in a browser, too."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import click
import trio
from rich.console import Group
from rich.live import Live

from trimcp.cli.exits import NO_CONNECTION, TOP_EXIT_CODES, USAGE, Failure, say
from trimcp.cli.options import HeaderOptions, web_options, with_options
from trimcp.cli.screen import Screen
from trimcp.cli.text import as_json, theirs
from trimcp.cli.top.view import SORTS, RequestRow, Shown, rows_of, view, whole_view
from trimcp.errors import ConnectionLost, LocalError
from trimcp.run import signals as run_signals
from trimcp.support.nurseries import open_service_nursery
from trimcp.watch.admin import AdminClient, announced_sockets, connect_admin
from trimcp.watch.viewing import Sources, Watching, connected, reached

if TYPE_CHECKING:
    from trimcp.cli.top.network import NetworkServer
    from trimcp.watch.commands import Command

_REASON: Final = "cancelled in trimcp top"
_WIDEST: Final = 1_000  # columns where the output is no terminal
_STOPS: Final = (signal.SIGTERM, signal.SIGHUP)
_ON_A_ROW: Final = ("enter", "c", "x", "d")  # keys that mean the request which is selected, or else the first
_NONE: Final = "no server of this user can be looked at; start one with: trimcp run server.py --http --admin"


def sockets_of(target: str | None) -> list[Path]:
    """Return the sockets that a target means: a path, a process, or every server."""
    if target is not None and os.sep in target:
        return [Path(target)]
    found = announced_sockets()
    return found if target is None else [path for path in found if path.name.partition(".")[0] == target]


@attrs.frozen
class Sockets:
    """The servers of this user that a target means; the path of its socket names one."""

    target: str | None

    def names(self) -> list[str]:
        return list(map(str, sockets_of(self.target)))

    def connect(self, name: str, /) -> AbstractAsyncContextManager[AdminClient]:
        return connect_admin(name)

    def watching(self) -> AbstractAsyncContextManager[Sources]:
        """Look at them while a block runs."""
        return connected(self)

    async def act(self, source: str, do: str, **members: Any) -> Any:
        """Do something at one of them, as `AdminClient.ask` does. Raises LocalError if it is not there, too."""
        async with reached(self, source) as server:
            return await server.ask(do, **members)

    @property
    def commands(self) -> dict[str, Command]:
        """The commands of the page."""
        return Watching(self).commands


# At a terminal


@click.command(epilog=TOP_EXIT_CODES)
@click.option("--json", "as_json_text", is_flag=True, help="As JSON.")
def ps(as_json_text: bool) -> None:
    """List the servers of this user that run here and were started with --admin, a line each.

    \b
    Examples:
      trimcp ps
    """
    screen = Screen()
    pictures, _ = trio.run(_pictures_of, Sockets(None))
    with _readable():
        if as_json_text:
            screen.show(as_json([_summary(one) for one in pictures]))
            return
        screen.show(f"{'PID':>8}  {'SESSIONS':>8}  {'RUNNING':>7}  SERVER" if pictures else _NONE)
        for one in pictures:
            stats = one["statistics"]
            name = f"{theirs(one['server'], 60)} {theirs(one['version'], 30)}"
            screen.show(f"{one['pid']:>8}  {stats['sessions']:>8}  {stats['running']:>7}  {name}")


def _summary(picture: dict[str, Any]) -> dict[str, Any]:
    stats = picture["statistics"]
    return {name: picture[name] for name in ("pid", "server", "version")} | {
        name: stats[name] for name in ("sessions", "running", "waiting")
    }


@click.command(epilog=TOP_EXIT_CODES)
@click.argument("server", required=False)
@click.option("--once", is_flag=True, help="Print it once, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print all there is once, as JSON.")
@web_options
@with_options(HeaderOptions)
def top(server: str | None, once: bool, as_json: bool, web: bool, port: int, options: HeaderOptions) -> None:
    """See live what servers do that run with --admin: calls with their progress and the line where each waits.

    SERVER is a process (trimcp ps has its number), the path of its socket, or the URL of one that runs with
    --admin-http; without it all that run here are shown. Keys select a call, open it, cancel it with a reason, close
    its session, and drain its server.

    \b
    Examples:
      trimcp top
      trimcp top 4242 --once
      trimcp top --json /run/weather/admin.sock
      trimcp top --web
      trimcp top https://mcp.example/mcp --bearer MY_TOKEN
    """
    target = _target(server, options)
    try:
        sys.exit(_watch_in_browser(target, port) if web else _look(target, once=once, as_json_text=as_json))
    except (LocalError, ConnectionLost) as error:
        raise Failure(theirs(error, None), NO_CONNECTION) from None


def _target(server: str | None, options: HeaderOptions) -> Sockets | NetworkServer:
    """Return the servers that are meant. Raises Failure: there is no such one."""
    if server is not None and "://" in server:
        from trimcp.cli.targets import find_target, read_headers  # needed for no server of this user
        from trimcp.cli.top.network import NetworkServer
        from trimcp.transports.http.client.target import HttpServer

        found = find_target(server, headers=read_headers(options.headers, options.bearer))
        if not isinstance(found, HttpServer):
            raise Failure("a server is looked at over HTTP: name the http or https URL of its endpoint", USAGE)
        return NetworkServer(found)
    if options.headers or options.bearer:
        raise Failure("--header and --bearer are sent to a URL", USAGE)
    return Sockets(server)


def _look(target: Sockets | NetworkServer, *, once: bool, as_json_text: bool) -> int:
    """Show what servers do until the user ends it, or once; return the exit code."""
    screen = Screen()
    if isinstance(target, Sockets) and not target.names():
        named = target.target
        raise Failure(_NONE if named is None else f"no server {theirs(named, 100)} can be looked at: trimcp ps", USAGE)
    if once or as_json_text or not sys.stdout.isatty() or not sys.stdin.isatty():
        pictures, why = trio.run(_pictures_of, target)
        if not pictures:
            raise Failure(why, NO_CONNECTION)
        if as_json_text:
            screen.show(as_json(pictures))
        else:
            with _readable():
                lines = whole_view(pictures, screen.out.width if screen.out.is_terminal else _WIDEST)
            for line in lines:
                screen.show(line.plain, str(line.style))
        return 0
    return trio.run(_Top(target).run)


async def _pictures_of(target: Sockets | NetworkServer) -> tuple[list[dict[str, Any]], str]:
    """Return pictures, and what became of a server of which there is none."""
    async with target.watching() as sources:
        return await sources.pictures(), sources.why


@contextmanager
def _readable() -> Iterator[None]:
    """Say in a sentence that a picture has not what pictures have: it is from a stranger, or from another version."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        raise Failure("what the server says cannot be read: it may be of another version", NO_CONNECTION) from None


@attrs.define(eq=False)
class _Top:
    """The full screen."""

    target: Sockets | NetworkServer
    choice: Shown = attrs.field(init=False, factory=Shown)
    pictures: list[dict[str, Any]] = attrs.field(init=False, factory=list)
    screen: Screen = attrs.field(init=False, factory=Screen)
    live: Live = attrs.field(init=False)
    _then: Callable[[str], Any] | None = attrs.field(init=False, default=None)
    _quit: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)

    async def run(self) -> int:
        """Show pictures until the user or a signal ends it. The terminal is as before in every case."""
        self.live = Live(console=self.screen.out, screen=True, auto_refresh=False)
        async with self.target.watching() as sources:
            self.pictures = await sources.pictures()
            if not self.pictures:
                raise Failure(sources.why, NO_CONNECTION)
            heard = trio.open_signal_receiver(*_STOPS, signal.SIGTSTP)  # first: a signal must not find the screen taken
            with heard as signals, _keys_at_once() as again, self.live, self._quit:
                async with open_service_nursery() as nursery:
                    nursery.start_soon(self._hear_signals, signals, again)
                    nursery.start_soon(self._read_keys)
                    while self.pictures:
                        self._show()
                        await trio.sleep(sources.pause)
                        self.pictures = await sources.pictures()
                    nursery.cancel_scope.cancel()
        if not self.pictures:
            raise Failure("the server is gone", NO_CONNECTION)
        return 0

    def _show(self) -> None:
        size = self.screen.out.size
        with _readable():
            lines = view(self.pictures, (size.width, size.height), self.choice)
        self.live.update(Group(*lines), refresh=True)

    async def _hear_signals(self, signals: AsyncIterator[int], again: Callable[[], None]) -> None:
        async for number in signals:
            if number in _STOPS:
                self._quit.cancel()
                return
            self.live.stop()
            again()  # as before, for whoever has the terminal meanwhile
            os.kill(os.getpid(), signal.SIGSTOP)
            again()
            self.live.start(refresh=True)

    async def _read_keys(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(sys.stdin)
            for key in keys_of(os.read(sys.stdin.fileno(), 256)):
                await self._press(key)
            self._show()

    async def _press(self, key: str) -> None:
        choice = self.choice
        if choice.asked is not None:
            await self._type(key)
            return
        choice.said = ""
        rows = rows_of(self.pictures, choice)
        keys = [row.key for row in rows]
        at = keys.index(choice.selected) if choice.selected in keys else -1
        if at < 0 and rows and key in _ON_A_ROW:
            at = 0
            choice.selected = keys[at]
        row = rows[at] if at >= 0 else None
        if key == "q":
            self._quit.cancel()
        elif key in ("down", "j", "up", "k") and keys:
            at = at + 1 if key in ("down", "j") else at - 1
            choice.selected = keys[max(0, min(at, len(keys) - 1))]
        elif key == "enter" and row is not None:
            choice.opened = not choice.opened
        elif key == "escape":
            choice.opened, choice.filter = False, ""
        elif key == "s":
            choice.sort = SORTS[(SORTS.index(choice.sort) + 1) % len(SORTS)]
        elif key == "/":
            self._ask("show those with", lambda typed: setattr(choice, "filter", typed))
        elif key == "c" and row is not None:
            self._ask(f"cancel {row.tool} of {row.who}? Enter, or a reason:", lambda typed: self._cancel(row, typed))
        elif key == "x" and row is not None:
            self._ask(f"close the session of {row.who}? Enter, or a reason:", lambda typed: self._close(row, typed))
        elif key == "d" and row is not None:
            self._ask(f"drain {theirs(row.picture['server'], 40)}? yes:", lambda typed: self._drain(row, typed))
        elif key in "cxd":
            choice.said = "there is no request"

    def _ask(self, question: str, then: Callable[[str], Any]) -> None:
        self.choice.asked, self.choice.typed, self._then = question, "", then

    async def _type(self, key: str) -> None:
        choice = self.choice
        if key == "escape":
            choice.asked = None
        elif key == "enter":
            assert self._then is not None
            choice.asked = None
            try:
                done = self._then(choice.typed)
                if hasattr(done, "__await__"):
                    choice.said = await done
            except (LocalError, ConnectionLost) as error:
                choice.said = str(error)
        elif key == "backspace":
            choice.typed = choice.typed[:-1]
        elif len(key) == 1:
            choice.typed += key

    async def _act(self, row: RequestRow, do: str, **members: Any) -> None:
        await self.target.act(row.picture["source"], do, **members)

    async def _cancel(self, row: RequestRow, typed: str) -> str:
        await self._act(row, "cancel", request=row.request["key"], reason=typed or _REASON)
        return f"{row.tool} is being cancelled"

    async def _close(self, row: RequestRow, typed: str) -> str:
        await self._act(row, "close", session=row.session["key"], reason=typed or _REASON)
        return "the session is closed"

    async def _drain(self, row: RequestRow, typed: str) -> str:
        if typed != "yes":
            return "nothing was drained"
        await self._act(row, "drain", reason=_REASON)
        return "drained"


_NAMED: Final = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x1b": "escape",
}


def keys_of(data: bytes) -> Iterator[str]:
    """Yield the keys of what a terminal sent: characters, and names of others; unknown ones are left out."""
    text = data.decode("utf-8", "ignore")
    while text:
        size = next((size for size in (3, 1) if text[:size] in _NAMED), 1)
        if text.startswith("\x1b[") and size == 1:  # a key that we do not know
            end = next((at for at, sign in enumerate(text[2:], 3) if "@" <= sign <= "~"), len(text))
            text = text[end:]
            continue
        key = _NAMED.get(text[:size], text[:size])
        text = text[size:]
        if len(key) > 1 or key.isprintable():
            yield key


@contextmanager
def _keys_at_once() -> Iterator[Callable[[], None]]:
    """Get keys as they are pressed, unseen, while the block runs; yield what changes that back, and there again."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    at_once = True

    def change() -> None:
        nonlocal at_once
        at_once = not at_once
        if at_once:
            tty.setcbreak(terminal)
        else:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)

    try:
        yield change
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


# In a browser


def _watch_in_browser(target: Sockets | NetworkServer, port: int) -> int:
    """Serve the page until a signal ends it; return the exit code. Raises Failure: it cannot listen there."""

    from trimcp.cli.web.site import serving  # not needed at a terminal

    async def run() -> None:
        with run_signals() as stop:
            async with serving("top", target.commands, port) as url:
                say(f"open {url}")
                await stop.wait()

    try:
        trio.run(run)
    except LocalError as error:
        raise Failure(theirs(error, None)) from None
    return 0
