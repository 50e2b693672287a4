"""Many servers as one, as a file lists them: `trimcp gateway servers.json`.

Each is mounted with its name as prefix, through a proxy. The file is looked at while the gateway runs: what is new is
started, what is gone or changed is ended, and the rest is not touched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from trimcp.client.client import Connectable
from trimcp.client.hosts import ServerEntry, server_settings
from trimcp.compose.forwarding import EXTENSIONS
from trimcp.compose.proxy import proxy
from trimcp.errors import LocalError, McpError
from trimcp.server.mounting import Mounted, Mounts, nobody
from trimcp.server.registry import Change
from trimcp.server.running import Running
from trimcp.server.server import Server
from trimcp.session.limits import Quota
from trimcp.support.cleaning import log_crash, one_line
from trimcp.support.nurseries import open_service_nursery

log: logging.Logger = logging.getLogger("trimcp.compose")

_LOOK: Final = 1.0  # seconds between two looks at the file
_PATIENCE: Final = 10.0  # seconds for which the start waits for servers
_MOST_SERVERS: Final = 1_000

Prepare = Callable[[ServerEntry], Connectable]
"""Makes what is connected to of an entry of the file. It may block."""


@attrs.frozen
class GatewayMember:
    """One server of a gateway, as the file has it."""

    entry: ServerEntry
    scopes: frozenset[str] = frozenset()  # that a token needs to see it
    principals: frozenset[str] | None = None  # who may see it; None for everybody
    tools: tuple[str, ...] | None = None  # patterns of the names of its tools that are offered; None for all
    quota: Quota | None = None  # how many requests it gets at once, and per second
    shared: bool = False  # whether all clients share one connection


def read_members(source: Path) -> dict[str, GatewayMember]:
    """Return the servers that a file lists, by name.

    Raises LocalError: the file or an entry is not usable; the text says which and why.
    """
    members: dict[str, GatewayMember] = {}
    for name, (entry, raw) in server_settings(source).items():
        where = f"server {name!r}"
        bounds = raw.get("quota")
        if bounds is not None and not isinstance(bounds, Mapping):
            raise LocalError(f'{where}: "quota" must be an object such as {{"running": 4, "perSecond": 10}}')
        try:
            quota = None if bounds is None else Quota(**{_QUOTA[key]: value for key, value in bounds.items()})
        except (KeyError, TypeError, ValueError):
            raise LocalError(
                f'{where}: "quota" has "running", "perSecond", "burst" and "waiting", all numbers'
            ) from None
        if not isinstance(raw.get("shared", False), bool):
            raise LocalError(f'{where}: "shared" must be true or false')
        principals, tools = _texts(where, raw, "principals"), _texts(where, raw, "tools")
        members[name] = GatewayMember(
            entry,
            frozenset(_texts(where, raw, "scopes") or ()),
            None if principals is None else frozenset(principals),
            tools,
            quota,
            raw.get("shared", False),
        )
    if len(members) > _MOST_SERVERS:
        raise LocalError(f"{source} lists more than {_MOST_SERVERS} servers")
    return members


_QUOTA: Final = {"running": "running", "perSecond": "per_second", "burst": "burst", "waiting": "waiting"}


def _texts(where: str, raw: Mapping[str, Any], key: str) -> tuple[str, ...] | None:
    given = raw.get(key)
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise LocalError(f'{where}: "{key}" must be a list of strings')
    return tuple(given)


@attrs.define(eq=False, repr=False)
class Gateway:
    """The servers of a file, mounted in one. `gateway` makes it."""

    server: Server[Any]
    source: Path
    prepare: Prepare
    mounts: Mounts = attrs.field(init=False)
    _members: dict[str, GatewayMember] = attrs.field(init=False, factory=dict)
    _leaving: dict[str, tuple[trio.Event, trio.Event]] = attrs.field(init=False, factory=dict)
    _stamp: object = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.mounts = self.server.mounts = Mounts(self.server)
        for name in EXTENSIONS:
            self.server.foreign.setdefault(name, nobody)
        self.server.parts += [self.mounts.while_running, self.while_running]

    @asynccontextmanager
    async def while_running(self, running: Running) -> AsyncIterator[None]:
        """Keep the servers of the file while the block runs. Raises LocalError: the file cannot be used."""
        members = read_members(self.source)
        self._stamp = self._look()
        async with open_service_nursery() as nursery:
            await self._become(members, nursery)
            nursery.start_soon(self._watch, nursery)
            try:
                yield
            finally:
                for name in list(self._leaving):
                    await self._end(name)
                self._members = {}

    def _look(self) -> object:
        try:
            found = os.stat(self.source)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    async def _watch(self, nursery: trio.Nursery) -> None:
        while True:
            await trio.sleep(_LOOK)
            stamp = self._look()
            if stamp in (None, self._stamp):
                continue
            self._stamp = stamp
            try:
                members = read_members(self.source)
            except LocalError as error:
                log.error("%s cannot be used, nothing changes: %s", self.source, one_line(str(error)))
                continue
            await self._become(members, nursery)

    async def _become(self, members: Mapping[str, GatewayMember], nursery: trio.Nursery) -> None:
        """Have exactly these servers."""
        before, self._members = self._members, dict(members)
        gone = [name for name in before if members.get(name) != before[name]]
        new = [name for name in members if before.get(name) != members[name]]
        for name in gone:
            await self._end(name)
        started = [trio.Event() for _ in new]
        for name, opened in zip(new, started, strict=True):
            nursery.start_soon(self._keep, name, members[name], opened)
        with trio.move_on_after(_PATIENCE):  # one that starts slowly is there later
            for opened in started:
                await opened.wait()
        if before:
            log.info("the gateway has %d servers: %d new, %d gone", len(members), len(new), len(gone))
        if gone or new:
            for change in Change:
                self.server.changes.publish(change)

    async def _end(self, name: str) -> None:
        leave, ended = self._leaving.pop(name, (None, None))
        if leave is not None and ended is not None:
            leave.set()
            await ended.wait()

    async def _keep(self, name: str, member: GatewayMember, opened: trio.Event) -> None:
        """Keep one server mounted. A failure of one ends no other."""
        leave, ended = self._leaving[name] = trio.Event(), trio.Event()
        try:
            target = await trio.to_thread.run_sync(self.prepare, member.entry)
            made = proxy(target, name=name, shared=member.shared, required=False)
            made.relays.patient = False
            principals = member.principals
            visible = None if principals is None else lambda admission: admission.principal in principals
            mounted = Mounted(name, made, member.scopes, visible, member.tools, member.quota)
            self.mounts.check(mounted)
            async with self.mounts.entered(mounted):
                self.mounts.add(mounted)
                there = self.mounts.by_prefix
                self.mounts.by_prefix = {each: there[each] for each in self._members if each in there}
                opened.set()
                try:
                    await leave.wait()
                finally:
                    self.mounts.by_prefix.pop(name, None)
        except (McpError, OSError) as error:
            log.error("the server %r of the gateway cannot be used: %s", name, one_line(str(error)))
        except Exception as error:
            log_crash(log, error, "the server %r of the gateway failed", name)
        finally:
            opened.set()
            ended.set()


def gateway(source: str | os.PathLike[str], *, prepare: Prepare, **options: Any) -> Server[Any]:
    """Return a server that offers what the servers of a file offer, each with its name as prefix.

    Args:
        source: a file with `mcpServers`, as hosts have it.
        prepare: makes what is connected to of an entry; it runs in a thread.
        options: what else a `Server` takes.

    Raises:
        LocalError: the file cannot be read, or an entry is not usable; the text says which and why.
    """
    read_members(Path(source))  # to say what is wrong with it before anything is started
    server: Server[Any] = Server(options.pop("name", "gateway"), **options)
    Gateway(server, Path(source), prepare)
    return server
