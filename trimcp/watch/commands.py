"""Commands over HTTP for people who look: a POST of a JSON object, answered with lines of JSON as they come.

Whoever leaves cancels what runs for it, and so does the end of its authorization.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, Final, TypeAlias

import attrs
import orjson
import trio

from trimcp.errors import McpError
from trimcp.support.cleaning import log_crash
from trimcp.transports.http.endpoint.accept import is_json
from trimcp.transports.http.interfaces import Admitted, Handler, Head, HttpReply, HttpResponse

log: logging.Logger = logging.getLogger("trimcp.web")

Send: TypeAlias = Callable[[Any], Awaitable[None]]
"""Sends one value, and waits while it is not read."""

Command: TypeAlias = Callable[[Mapping[str, Any], Send], Awaitable[None]]
"""What may be asked for: it gets the members of the request."""

_LINES: Final = ("Content-Type", "application/x-ndjson")


@attrs.define(eq=False)
class RunningCommands:
    """What runs for those who look, in one nursery."""

    nursery: trio.Nursery
    headers: tuple[tuple[str, str], ...]
    """Of each response."""
    max_body: int
    most: int
    """Commands at a time."""
    running: int = attrs.field(init=False, default=0)

    def admit(self, head: Head, choose: Callable[[dict[str, Any]], Command]) -> Admitted:
        """Admit a request. `choose` returns its command by its members, or raises ValueError: there is none."""
        if head.method != "POST":
            return HttpResponse(405, (("Allow", "POST"), *self.headers))
        if not is_json(head.headers.get("content-type")):  # what a form of another page can send is none
            return HttpResponse(415, self.headers, b"a command is application/json")
        if self.running >= self.most:
            return HttpResponse(503, (("Retry-After", "1"), *self.headers))
        return _CommandRequest(self, choose, head.until)


@attrs.define(eq=False)
class _CommandRequest(Handler):
    """One command on its way."""

    commands: RunningCommands
    choose: Callable[[dict[str, Any]], Command]
    until: float
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)

    @property
    def max_body(self) -> int:
        return self.commands.max_body

    def start(self, body: bytes, reply: HttpReply) -> None:
        commands = self.commands
        try:
            members = orjson.loads(body)
            if not isinstance(members, dict):
                raise ValueError("a command is a JSON object")
            command = self.choose(members)
        except orjson.JSONDecodeError:
            reply.send(HttpResponse(400, commands.headers, b"a command is a JSON object"))
            return
        except ValueError as error:
            reply.send(HttpResponse(400, commands.headers, str(error).encode()))
            return
        reply.start(HttpResponse(200, (_LINES, *commands.headers)))
        commands.running += 1
        commands.nursery.start_soon(self._run, command, members, reply)

    def disconnected(self, slow: str | None = None) -> None:
        self.scope.cancel(reason="whoever looked has left")

    async def _run(self, command: Command, members: Mapping[str, Any], reply: HttpReply) -> None:
        async def send(value: Any) -> None:
            await reply.room()
            reply.write(orjson.dumps(value, default=plain) + b"\n")

        self.scope.deadline = trio.current_time() + self.until - time.time()
        try:
            with self.scope:
                try:
                    await command(members, send)
                except (McpError, ValueError) as error:
                    await send({"error": str(error), "code": getattr(error, "code", None)})
                except Exception as error:  # a bug here must not end what somebody else may have much in
                    log_crash(log, error, "a command of the page crashed")
                    await send({"error": "an internal error; the log says more"})
        finally:
            self.commands.running -= 1
            reply.finish()


def lacks_scope(head: Head, scope: str) -> HttpResponse | None:
    """Return the refusal of a request whose token does not name a scope, or None if it does.

    Who is not authenticated is refused, and so is a principal of whom no token says what it may do.
    """
    if head.principal is not None and scope in (head.principal.scopes or ()):
        return None
    challenge = f'Bearer error="insufficient_scope", scope="{scope}"'
    return HttpResponse(403, (("WWW-Authenticate", challenge),), f"this needs the scope {scope}".encode())


def plain(value: Any) -> Any:
    """Return what JSON has for a value: of a record its fields."""
    kind: Any = type(value)
    found = _fields_of(kind)
    return str(value) if found is None else dict(zip(found[0], found[1](value), strict=True))


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]] | None:
    """Return the names of a record's fields, which has two at least, and what reads them."""
    if not attrs.has(kind):
        return None
    names = tuple(field.name for field in attrs.fields(kind))
    return names, attrgetter(*names)
