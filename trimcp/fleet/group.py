"""Several servers at once: each connection in its own task, all of them in one nursery.

Any task may open, use and close any member. A member that fails or is lost ends no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import attrs
import trio

from trimcp.channel import require_trio
from trimcp.client.client import Client, Target
from trimcp.client.session import ClientSession
from trimcp.errors import ConnectionLost, LocalError, McpError
from trimcp.fleet.combinators import first_of
from trimcp.fleet.supervisor import UpstreamState
from trimcp.fleet.upstream import Supervising, Upstream, supervise
from trimcp.session.facts import Beside
from trimcp.session.outgoing.calls import Call
from trimcp.support.cleaning import log_crash, one_line
from trimcp.support.nurseries import closing_with, open_service_nursery
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.revisions import Revision
from trimcp.wire.tools import CallToolResult, Tool

if TYPE_CHECKING:
    from typing_extensions import Unpack

log: logging.Logger = logging.getLogger("trimcp.client")

_UP: Final = (UpstreamState.UP, UpstreamState.CONNECTING)


@attrs.define(eq=False)
class _Member:
    """One connection, or a supervised upstream, and the state of its task."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)  # the cancel scope of its task
    usable: ClientSession | Upstream | None = None  # the session or upstream for calls; None before it is opened
    error: Exception | None = None  # why it could not be opened, or how it failed
    ready: trio.Event = attrs.field(factory=trio.Event)  # set once it can be used, or could not be opened
    closing: trio.Event = attrs.field(factory=trio.Event)  # set once its task is to close it
    ended: trio.Event = attrs.field(factory=trio.Event)  # set once its task has closed it

    @property
    def living(self) -> ClientSession | Upstream | None:
        """The session or upstream for calls, or None if there is no connection and none is being opened."""
        down = isinstance(self.usable, Upstream) and self.usable.state not in _UP
        return None if down or self.ended.is_set() else self.usable


@attrs.define(eq=False)
class Group:
    """Several servers, used as one: `async with Group(client) as group: await group.open("git", target)`.

    The body's exceptions are raised unchanged. Leaving the block closes all connections.

    Args:
        client: the client that connects; its handlers serve all members.
        separator: separates the server's name from the tool's in `list_tools` and `call_tool`.
    """

    client: Client
    separator: str = "__"
    _members: dict[str, _Member] = attrs.field(init=False, factory=dict)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    _around: AsyncExitStack = attrs.field(init=False)

    async def __aenter__(self) -> Self:
        require_trio()
        async with AsyncExitStack() as stack:
            self._nursery = await stack.enter_async_context(open_service_nursery())
            await stack.enter_async_context(closing_with(self._close_all))
            self._around = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._around.__aexit__(kind, error, traceback)

    async def _close_all(self) -> None:
        self._nursery = None
        members = list(self._members.values())
        for member in members:
            member.closing.set()
            if not member.ready.is_set():
                member.scope.cancel(reason="the group was left")
        for member in members:
            await member.ended.wait()

    # Members

    async def open(self, name: str, target: Target, *, revision: Revision | None = None) -> ClientSession:
        """Connect to a server and return its session, which is open until `close(name)` or the group's end.

        Cancelling this cancels the connection attempt.

        Raises:
            LocalError: there is an open member of that name, or the group is not entered.
            McpError: the connection failed, as for `Client.connect`.
        """
        session = await self._open(name, lambda: self.client.connect(target, revision=revision))
        assert isinstance(session, ClientSession)
        return session

    async def supervise(self, name: str, target: Target, **options: Unpack[Supervising]) -> Upstream:
        """Add a server that is reconnected when it is lost, until `close(name)` or the group's end.

        Returns at once, even if the server cannot be reached. If cancelled, the server is not added.

        Args:
            name: the prefix of its tools, and its name in logs and errors.
            target: a target that can be connected to repeatedly.
            options: as for `trimcp.supervise`.

        Raises:
            LocalError: as `open`, and as `trimcp.supervise`.
        """
        upstream = await self._open(name, lambda: supervise(self.client, target, name=name, **options))
        assert isinstance(upstream, Upstream)
        return upstream

    async def _open(
        self, name: str, connect: Callable[[], AbstractAsyncContextManager[ClientSession | Upstream]]
    ) -> ClientSession | Upstream:
        """Start the task that owns a member, and return what it opens, once it can be used."""
        if self._nursery is None:
            raise LocalError("a group opens servers only inside its `async with` block")
        if self.separator in name:
            raise LocalError(f"the name {name!r} holds {self.separator!r}, which separates servers from tools")
        if name in self._members and not self._members[name].ended.is_set():
            raise LocalError(f"a server named {name!r} is open already")
        self._members.pop(name, None)
        member = self._members[name] = _Member()
        self._nursery.start_soon(self._own, member, connect, name=f"server {name}")
        try:
            await member.ready.wait()
        except trio.Cancelled:
            member.scope.cancel(reason="opening was given up")
            self._forget(name, member)
            raise
        if member.usable is not None:
            return member.usable
        self._forget(name, member)
        raise member.error or ConnectionLost(f"the group was left while {name!r} was being opened")

    async def _own(
        self, member: _Member, connect: Callable[[], AbstractAsyncContextManager[ClientSession | Upstream]]
    ) -> None:
        """Keep one member open until it is closed; a plain connection also until it is lost."""
        try:
            with member.scope:
                async with connect() as member.usable:
                    member.ready.set()
                    if isinstance(member.usable, ClientSession):
                        await first_of(member.closing.wait, member.usable.wait_lost)
                    else:
                        await member.closing.wait()
        except Exception as error:  # any failure of one member ends no other
            if member.usable is not None:
                log_crash(log, error, "a connection of the group failed")
            member.error = error
        finally:
            member.ready.set()
            member.ended.set()

    async def close(self, name: str) -> None:
        """Close a member and wait until its connection, and its process if it has one, is gone.

        Cancelling this only stops the waiting.

        Raises:
            KeyError: there is no such member.
        """
        member = self._members[name]
        member.closing.set()
        await member.ended.wait()
        self._forget(name, member)

    def _forget(self, name: str, member: _Member) -> None:
        """Remove a member, unless the name already belongs to a newer one: the waiting task may run late."""
        if self._members.get(name) is member:
            del self._members[name]

    def __getitem__(self, name: str) -> ClientSession:
        """Return the session of a member; a lost one is kept until it is closed or opened again.

        Raises:
            KeyError: there is no such member, it is still being opened, or it is supervised: see `upstream`.
        """
        session = self._members[name].usable
        if not isinstance(session, ClientSession):
            raise KeyError(name)
        return session

    def upstream(self, name: str) -> Upstream:
        """Return a supervised member.

        Raises:
            KeyError: there is no such member.
        """
        upstream = self._members[name].usable
        if not isinstance(upstream, Upstream):
            raise KeyError(name)
        return upstream

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, member in self._members.items() if member.usable is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def beside(self) -> Iterator[Beside]:
        """Say how each member is, for who looks at a server of which they are upstreams: `server.beside`."""
        for name, member in self._members.items():
            if isinstance(member.usable, Upstream):
                stats = member.usable.statistics()
                told = f"{stats.state.value}, {stats.losses} lost"
                told += f": {stats.last_reason}" if stats.last_reason else ""
                yield Beside("upstream", name, told, trio.current_time() - stats.since)
            else:
                state = "being opened" if member.usable is None else "up" if member.living is not None else "lost"
                yield Beside("upstream", name, state)

    # All members together

    async def list_tools(self) -> list[Tool]:
        """Return the tools of all connected members, named `server__tool`, in the order the members were opened.

        A supervised member that is connecting is waited for; one that is down is left out. So is a member that fails to
        list its tools, with a warning in the log.
        """
        found: dict[str, list[Tool]] = {}

        async def ask(name: str, member: ClientSession | Upstream) -> None:
            try:
                tools: list[Any] = await member.list_tools()
            except (McpError, trio.TooSlowError) as error:
                log.warning("the server %r cannot list its tools: %s", name, one_line(str(error)))
                return
            found[name] = [attrs.evolve(tool, name=f"{name}{self.separator}{tool.name}") for tool in tools]

        async with trio.open_nursery() as nursery:
            for name, member in self._members.items():
                if (living := member.living) is not None:
                    nursery.start_soon(ask, name, living)
        return [tool for name in self._members for tool in found.get(name, ())]

    async def call_tool(
        self, name: str, arguments: Mapping[str, JSON] | None = None, *, meta: Mapping[str, JSON] | None = None
    ) -> CallToolResult:
        """Call a tool by the name `list_tools` gave it; see `ClientSession.call_tool`."""
        member, tool = self._find(name)
        return await member.call_tool(tool, arguments, meta=meta)

    def calling(
        self, name: str, arguments: Mapping[str, JSON] | None = None, *, meta: Mapping[str, JSON] | None = None
    ) -> AbstractAsyncContextManager[Call[CallToolResult]]:
        """Call a tool by the name `list_tools` gave it; see `ClientSession.calling`."""
        member, tool = self._find(name)
        return member.calling(tool, arguments, meta=meta)

    def _find(self, name: str) -> tuple[ClientSession | Upstream, str]:
        server, separator, tool = name.partition(self.separator)
        member = self._members[server].usable if separator and server in self else None
        if member is None:
            raise LocalError(f"no open server offers {name!r}; the servers are {', '.join(self) or 'none'}")
        return member, tool
