"""Several servers as one view: their pictures together, and what is done at one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Final, Protocol

import attrs
import trio

from trimcp.errors import ConnectionLost, LocalError
from trimcp.watch.commands import Command, Send

_PAUSE: Final = 0.5  # seconds between two pictures
_PACE: Final = 0.25  # seconds between two looks at what is said
_ACTS: Final = frozenset({"cancel", "close", "drain"})
_MEMBERS: Final = ("request", "session", "reason", "grace")


class Viewed(Protocol):
    """A server that is looked at; `AdminClient` is one."""

    async def ask(self, do: str, **members: Any) -> Any:
        """Send one request and return what was done. Raises LocalError, or ConnectionLost: the server is gone."""


class Reach(Protocol):
    """Where servers are that may be looked at."""

    def names(self) -> Sequence[str]:
        """Return those that are there now: the `source` of a picture names one."""
        ...

    def connect(self, name: str, /) -> AbstractAsyncContextManager[Viewed]:
        """Connect to one of them while a block runs. Raises ConnectionLost: it is gone."""
        ...


@asynccontextmanager
async def reached(reach: Reach, source: str) -> AsyncIterator[Viewed]:
    """Connect to the server that is the `source` of a picture while the block runs.

    Raises LocalError if it is not there, and ConnectionLost if it is gone.
    """
    if source not in reach.names():
        raise LocalError("this server is not there")
    async with reach.connect(source) as server:
        yield server


@attrs.define(eq=False)
class Sources:
    """Connections to all servers that there are. Open it with `connected`."""

    reach: Reach
    pause: float = _PAUSE  # between two pictures
    why: str = "the server is gone"  # or what else became of the last one that was lost
    clients: dict[str, tuple[Viewed, AsyncExitStack]] = attrs.field(init=False, factory=dict)

    async def pictures(self) -> list[dict[str, Any]]:
        """Return a picture of each server that is there now, with its name as `source`."""
        for name in self.reach.names():
            if name not in self.clients:
                await self._connect(name)
        pictures = []
        for name, (client, stack) in list(self.clients.items()):
            try:
                picture = await client.ask("picture")
                if not isinstance(picture, dict):
                    raise ConnectionLost("what the server says cannot be read")
                pictures.append({"source": name, **picture})
            except ConnectionLost as error:
                self.why = str(error)
                del self.clients[name]
                await stack.aclose()
        return pictures

    async def _connect(self, name: str) -> None:
        async with AsyncExitStack() as stack:
            try:
                client = await stack.enter_async_context(self.reach.connect(name))
            except ConnectionLost:
                return  # it has ended meanwhile
            self.clients[name] = client, stack.pop_all()


@asynccontextmanager
async def connected(reach: Reach) -> AsyncIterator[Sources]:
    """Keep connections to servers while the block runs."""
    sources = Sources(reach)
    try:
        yield sources
    finally:
        async with AsyncExitStack() as every:
            for _, stack in sources.clients.values():
                every.push_async_exit(stack)


@attrs.frozen
class Watching:
    """The commands of a page, and of whoever looks over a network."""

    reach: Reach

    @property
    def commands(self) -> dict[str, Command]:
        """All of them, by name."""
        return {"pictures": self.pictures, "act": self.act, "wire": self.wire}

    async def pictures(self, members: Mapping[str, Any], send: Send) -> None:
        """Send pictures of all servers, until whoever looks leaves. Who reads slowly gets fewer of them."""
        async with connected(self.reach) as sources:
            while True:
                await send(await sources.pictures())
                await trio.sleep(_PAUSE)

    async def wire(self, members: Mapping[str, Any], send: Send) -> None:
        """Send what is said in the `session` of a `source`, with what is in it if `text` says so, as it comes.

        It ends with the session.
        """
        seen = 0
        async with reached(self.reach, members.get("source", "")) as client:
            while True:
                asked = {"session": members.get("session"), "text": members.get("text") is True}
                told = await client.ask("wire", after=seen, **asked)
                seen = told["count"]
                await send(told)
                if told["ended"] is not None:
                    await trio.sleep_forever()  # until nobody looks
                await trio.sleep(_PACE)

    async def act(self, members: Mapping[str, Any], send: Send) -> None:
        """Cancel, close or drain at a `source`, as `Viewed.ask` does."""
        do = members.get("do")
        if do not in _ACTS:
            raise ValueError("`do` is one of cancel, close and drain")
        rest = {name: members[name] for name in _MEMBERS if name in members}
        async with reached(self.reach, members.get("source", "")) as client:
            await send({"done": await client.ask(do, **rest)})
