"""The admin sockets that `trimcp ps` and `trimcp top` read: which there are, their pictures, and acts."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs

from trimcp.errors import ConnectionLost, LocalError
from trimcp.watch.admin import AdminClient, announced_sockets, connect_admin


def sockets_of(target: str | None) -> list[Path]:
    """Return the sockets that a target means: a path, a process, or every server."""
    if target is not None and os.sep in target:
        return [Path(target)]
    found = announced_sockets()
    return found if target is None else [path for path in found if path.name.partition(".")[0] == target]


async def act(target: str | None, source: str, do: str, **members: Any) -> Any:
    """Do something at the server that is the `source` of a picture, over a connection of its own.

    `do` and `members` are those of `AdminClient.ask`. Raises LocalError if the server refused it or is not there, and
    ConnectionLost if it is gone.
    """
    if source not in map(str, sockets_of(target)):
        raise LocalError("this server is not there")
    async with connect_admin(source) as client:
        return await client.ask(do, **members)


@attrs.define(eq=False)
class Sources:
    """Connections to the servers that a target means. Open it with `connected`."""

    target: str | None
    _clients: dict[str, tuple[AdminClient, AsyncExitStack]] = attrs.field(init=False, factory=dict)

    async def pictures(self) -> list[dict[str, Any]]:
        """Return a picture of each server that is there now, with the path of its socket as `source`."""
        for path in map(str, sockets_of(self.target)):
            if path not in self._clients:
                await self._connect(path)
        pictures = []
        for path, (client, stack) in list(self._clients.items()):
            try:
                pictures.append({"source": path, **await client.ask("picture")})
            except ConnectionLost:
                del self._clients[path]
                await stack.aclose()
        return pictures

    async def _connect(self, path: str) -> None:
        async with AsyncExitStack() as stack:
            try:
                client = await stack.enter_async_context(connect_admin(path))
            except ConnectionLost:
                return  # it has ended meanwhile
            self._clients[path] = client, stack.pop_all()

    async def close(self) -> None:
        """End the connections."""
        async with AsyncExitStack() as every:
            for _, stack in self._clients.values():
                every.push_async_exit(stack)


@asynccontextmanager
async def connected(target: str | None) -> AsyncIterator[Sources]:
    """Keep connections to servers while the block runs."""
    sources = Sources(target)
    try:
        yield sources
    finally:
        await sources.close()
