"""What a handler gets of the context that its call belongs to: `ctx.agent_context`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from trimcp.agent_tools.contexts.actor import ContextActor
from trimcp.agent_tools.contexts.limits import SERVER_MEMBERS
from trimcp.agent_tools.contexts.watching import WatchChannel
from trimcp.agent_tools.messages.errors import MalformedMessage
from trimcp.wire.jsonrpc import JSON, Unencodable, encode, parse_value


class ActorContext:
    """A context as its handlers get it (`ctx.agent_context`): what they read and write are copies."""

    __slots__ = ("_actor",)

    def __init__(self, actor: ContextActor) -> None:
        self._actor = actor

    @property
    def id(self) -> str:
        return self._actor.id

    @property
    def version(self) -> int:
        return self._actor.version

    def read(self) -> dict[str, Any]:
        state: dict[str, Any] = _copied(self._actor.snapshot())
        return state

    async def update(self, updates: Mapping[str, Any], version: int | None = None) -> int:
        try:
            copy: dict[str, Any] = _copied(dict(updates))
        except Unencodable as error:
            raise MalformedMessage(str(error)) from None
        for name in SERVER_MEMBERS[1:]:
            if name in copy:
                raise MalformedMessage(f"`{name}` is written by the service alone", {"member": name})
        permissions = copy.get(SERVER_MEMBERS[0])
        if permissions is not None and not (
            isinstance(permissions, list) and all(isinstance(each, str) for each in permissions)
        ):
            raise MalformedMessage("`permissions` is a list of texts: names of tools, and scopes")
        return (await self._actor.change(copy, version)).version

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[WatchChannel]:
        async with self._actor.watch() as watch:
            yield watch

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        self._actor.start_soon(function, *args)


def _copied(value: JSON) -> Any:
    return parse_value(encode(value))
