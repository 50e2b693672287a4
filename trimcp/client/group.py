"""Several servers at once: each connection in a task of its own, all of them in one nursery.

Any task may open, use and close any member. A member that fails or dies takes no other with it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import attrs
import trio

from trimcp.client.client import Client
from trimcp.client.connect import Target
from trimcp.client.facade import ClientSession
from trimcp.errors import ConnectionLost, LocalError, McpError
from trimcp.session.calls import Call
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.revisions import Revision
from trimcp.wire.tools import CallToolResult, Tool

__all__ = ["Group"]

log: logging.Logger = logging.getLogger("trimcp.client")


@attrs.define(eq=False)
class _Member:
    """One connection, and the task that owns it."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    session: ClientSession | None = None
    error: Exception | None = None
    ready: trio.Event = attrs.field(factory=trio.Event)
    closing: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)


@attrs.define(eq=False)
class Group:
    """Several servers, used as one: `async with Group(client) as group: await group.open("git", target)`.

    What the body raises leaves as itself. Leaving the block closes all connections.

    Args:
        client: who connects; its handlers serve all members.
        separator: what stands between the name of a server and that of its tool in `list_tools` and `call_tool`.
    """

    client: Client
    separator: str = "__"
    _members: dict[str, _Member] = attrs.field(init=False, factory=dict)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    _alive: AbstractAsyncContextManager[None] | None = attrs.field(init=False, default=None)

    async def __aenter__(self) -> Self:
        self._alive = self._living()
        await self._alive.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._alive is not None
        return await self._alive.__aexit__(kind, error, traceback)

    @asynccontextmanager
    async def _living(self) -> AsyncIterator[None]:
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                try:
                    yield
                except BaseException as error:
                    failure = error
                finally:
                    self._nursery = None
                    for member in self._members.values():
                        member.closing.set()
                        if member.session is None:
                            member.scope.cancel(reason="the group was left")
        except trio.Cancelled:
            if failure is None:
                raise
        if failure is not None:
            raise failure

    # Members

    async def open(self, name: str, target: Target, *, revision: Revision | None = None) -> ClientSession:
        """Connect to a server and return its session, which lives until `close(name)` or the group's end.

        Cancelling it gives the connection up.

        Raises:
            LocalError: there is an open member of that name, or the group is not entered.
            McpError: the connection failed, as `Client.connect` says.
        """
        if self._nursery is None:
            raise LocalError("a group opens servers only inside its `async with` block")
        if self.separator in name:
            raise LocalError(f"the name {name!r} holds {self.separator!r}, which separates servers from tools")
        if name in self._members and not self._members[name].ended.is_set():
            raise LocalError(f"a server named {name!r} is open already")
        self._members.pop(name, None)
        member = self._members[name] = _Member()
        self._nursery.start_soon(self._own, member, target, revision, name=f"server {name}")
        try:
            await member.ready.wait()
        except trio.Cancelled:
            member.scope.cancel(reason="opening was given up")
            del self._members[name]
            raise
        if member.session is not None:
            return member.session
        del self._members[name]
        raise member.error or ConnectionLost(f"the group was left while {name!r} was being opened")

    async def _own(self, member: _Member, target: Target, revision: Revision | None) -> None:
        """Hold one connection until it is closed or lost."""
        try:
            with member.scope:
                async with self.client.connect(target, revision=revision) as session:
                    member.session = session
                    member.ready.set()
                    async with trio.open_nursery() as waiting:
                        waiting.start_soon(_first, member.closing.wait, waiting.cancel_scope)
                        waiting.start_soon(_first, session.wait_lost, waiting.cancel_scope)
        except Exception as error:  # one member's failure, whatever it is, takes no other with it
            if member.session is not None:
                log.exception("a connection of the group failed")
            member.error = error
        finally:
            member.ready.set()
            member.ended.set()

    async def close(self, name: str) -> None:
        """Close a member and wait until its connection, and its process if it has one, is gone.

        Cancelling it stops the waiting only.

        Raises:
            KeyError: there is no such member.
        """
        member = self._members[name]
        member.closing.set()
        await member.ended.wait()
        if self._members.get(name) is member:
            del self._members[name]

    def __getitem__(self, name: str) -> ClientSession:
        """Return the session of a member; one that died is still there until it is closed or opened again.

        Raises:
            KeyError: there is no such member, or it is still being opened.
        """
        session = self._members[name].session
        if session is None:
            raise KeyError(name)
        return session

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, member in self._members.items() if member.session is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))

    # All of them as one

    async def list_tools(self) -> list[Tool]:
        """Return the tools of all living members, named `server__tool`, in the order the members were opened.

        A member that cannot tell is left out, with a warning in the log.
        """
        found: dict[str, list[Tool]] = {}

        async def ask(name: str, session: ClientSession) -> None:
            try:
                tools = await session.list_tools()
            except (McpError, trio.TooSlowError) as error:
                log.warning("the server %r cannot list its tools: %s", name, error)
                return
            found[name] = [_renamed(tool, f"{name}{self.separator}{tool.name}") for tool in tools]

        names = [name for name in self if not self._members[name].ended.is_set()]
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(ask, name, self[name])
        return [tool for name in names for tool in found.get(name, ())]

    async def call_tool(
        self, name: str, arguments: Mapping[str, JSON] | None = None, *, meta: Mapping[str, JSON] | None = None
    ) -> CallToolResult:
        """Call a tool by the name `list_tools` gave it; see `ClientSession.call_tool`."""
        session, tool = self._find(name)
        return await session.call_tool(tool, arguments, meta=meta)

    def calling(
        self, name: str, arguments: Mapping[str, JSON] | None = None, *, meta: Mapping[str, JSON] | None = None
    ) -> AbstractAsyncContextManager[Call[CallToolResult]]:
        """Call a tool by the name `list_tools` gave it; see `ClientSession.calling`."""
        session, tool = self._find(name)
        return session.calling(tool, arguments, meta=meta)

    def _find(self, name: str) -> tuple[ClientSession, str]:
        server, separator, tool = name.partition(self.separator)
        if not separator or server not in self:
            raise LocalError(f"no open server offers {name!r}; the servers are {', '.join(self) or 'none'}")
        return self[server], tool


def _renamed(tool: Any, name: str) -> Tool:
    renamed: Tool = attrs.evolve(tool, name=name)
    return renamed


async def _first(wait: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    """Wait, then stop whoever waits beside."""
    await wait()
    scope.cancel()
