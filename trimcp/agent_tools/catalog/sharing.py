"""Registered tools of several processes: each knows those of all, and carries out what its own providers brought.

The store has one record for each tool, with all its versions, so that its owner is decided in one step. Each process
offers what stands there. A tool whose provider is connected to another process is called there, by letters.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, TypeAlias

import attrs
import trio

from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.entries import Provider
from trimcp.agent_tools.catalog.forwarding import ForwardedCalls, RemoteProvider
from trimcp.agent_tools.catalog.table import Candidate, ToolTable
from trimcp.agent_tools.messages import errors
from trimcp.agent_tools.messages.manifests import Manifest
from trimcp.principal import Principal
from trimcp.store.letters import PostBox
from trimcp.store.shared import RecordChange
from trimcp.support.cleaning import log_crash
from trimcp.support.nurseries import open_service_nursery
from trimcp.wire.jsonrpc import encode, parse_value

log: logging.Logger = logging.getLogger("trimcp.server")

_KIND: Final = "tools"
_FORM: Final = 1  # of a record; a later one is read by a later release only
_KEPT: Final = 7 * 86_400.0  # seconds after which a tool is forgotten that no process has kept since
_AGAIN: Final = 3_600.0  # seconds after which all tools are kept again
_ATTEMPTS: Final = 20  # to change a record that others change too

_Key: TypeAlias = tuple[str, str, str | None, str | None]
"""A version: its text, the hash of its manifest, the process of its provider, and the provider's id there."""


@attrs.define(eq=False)
class SharedTools:
    """The registered tools of one process, as part of those of all."""

    table: ToolTable
    adopt: Callable[[Sequence[Any], AgentCaller, Provider | None], Awaitable[object]]  # offers what others registered
    letters: PostBox
    _records: dict[str, bytes] = attrs.field(init=False, factory=dict)  # as they were offered last
    _touched: set[str] = attrs.field(init=False, factory=set)  # names that were changed here since
    _ids: dict[Provider, str] = attrs.field(init=False, factory=dict)  # of providers that are connected here
    _remote: dict[tuple[str, str], RemoteProvider] = attrs.field(init=False, factory=dict)
    _adding: set[Candidate] = attrs.field(init=False, factory=set)
    _calls: ForwardedCalls = attrs.field(init=False)
    _one_reader: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _reads: int = attrs.field(init=False, default=0)  # how often the records were read
    _stale: trio.Event = attrs.field(init=False, factory=trio.Event)
    _nursery: trio.Nursery | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._calls = ForwardedCalls(self.letters, self._find)
        self.letters.readers["tools"] = lambda sender, said, data: self._stale.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep up with the other processes, under the store's present name, until cancelled."""
        kept, started = trio.current_time(), False
        try:
            async with open_service_nursery() as nursery:
                self._nursery = self._calls.nursery = nursery
                while True:
                    self._stale = trio.Event()
                    try:
                        await self.refresh()
                        if not started or trio.current_time() - kept > _AGAIN:
                            kept = trio.current_time()
                            await self._add_again()
                        await self._find_lost()
                    except (OSError, errors.AgentToolsError) as error:
                        log.warning("tools of other processes were not read: %s", error)
                    if not started:
                        started = True
                        task_status.started()
                    with trio.move_on_after(self.letters.store.lease / 4):
                        await self._stale.wait()
        finally:
            self._nursery = self._calls.nursery = None

    # What others register

    async def refresh(self) -> None:
        """Offer what all processes have registered so far. Raises OSError."""
        asked = self._reads
        async with self._one_reader:
            if self._reads > asked + 1:  # read since this was asked for
                return
            self._reads += 1
            touched, self._touched = self._touched, set()
            try:
                records = await self.letters.store.records(_KIND)
            except BaseException:  # whatever it was, cancelling too, the next one to read looks at them
                self._touched |= touched
                raise
            for name in {*records, *self._records, *touched}:
                if name in touched or records.get(name) != self._records.get(name):
                    try:
                        await self._offer(name, _versions(records.get(name)))
                    except Exception as error:  # a record of another version; it must not hide the others
                        log_crash(log, error, "a tool that another process has registered cannot be offered")
            self._records = dict(records)

    async def _offer(self, name: str, versions: Iterable[Mapping[str, Any]]) -> None:
        wanted = {_key(each): each for each in versions}
        here = {self._key_of(each): each for each in self.table.offered(name)}
        gone = [each for key, each in here.items() if key not in wanted and each not in self._adding]
        self.table.drop(gone)
        for key, each in wanted.items():
            if key in here or each["holder"] == self.letters.store.name:
                continue
            principal = None if (facts := each["principal"]) is None else Principal(**facts)
            caller = AgentCaller(principal, each["agent"], each["address"], each["loopback"])
            by: RemoteProvider | None = None
            if key[2] is not None and key[3] is not None:
                new = RemoteProvider(self._calls, key[2], key[3], caller.agent)
                by = self._remote.setdefault((key[2], key[3]), new)
            await self.adopt((each["sent"],), caller, by)

    async def _find_lost(self) -> None:
        """Forget the tools of providers whose processes are gone, and fail the calls to them and from them."""
        for name in {holder for holder, _ in self._remote} | self._calls.processes():
            if await self.letters.store.gone(name):
                self._calls.lose(name)
                lost = [self._remote.pop(key) for key in list(self._remote) if key[0] == name]
                offered = [each for each in self.table.offered() if each.by in lost]
                self.remove_soon(offered)
                self.table.drop(offered)

    async def make_room(self, caller: AgentCaller) -> None:
        """Forget what an agent has provided to processes that are gone, before it provides that here."""
        owners = {each.caller.owner for each in self.table.offered() if isinstance(each.by, RemoteProvider)}
        if caller.owner in owners:
            with suppress(OSError):
                await self._find_lost()

    # What is registered here

    def _key_of(self, candidate: Candidate) -> _Key:
        manifest, by = candidate.manifest, candidate.by
        if by is None:
            return manifest.version, manifest.hash, None, None
        if isinstance(by, RemoteProvider):
            return manifest.version, manifest.hash, by.holder, by.id
        return manifest.version, manifest.hash, self.letters.store.name, self._ids.get(by)

    def _written(self, candidate: Candidate) -> dict[str, Any]:
        version, hash, holder, provider = self._key_of(candidate)
        caller, principal = candidate.caller, candidate.caller.principal
        return {
            "version": version,
            "hash": hash,
            "holder": holder,
            "provider": provider,
            "sent": candidate.sent.facts(),
            "principal": None if principal is None else dict(principal.facts()),
            "agent": caller.agent,
            "address": caller.address,
            "loopback": caller.loopback,
        }

    @asynccontextmanager
    async def adding(self, candidates: Collection[Candidate]) -> AsyncIterator[None]:
        """Tell all processes of tools before the body offers them here. If it raises, they are told again.

        Raises NameTaken if another process was first, AgentToolsError if that cannot be found out.
        """
        for each in candidates:
            if each.by is not None and not isinstance(each.by, RemoteProvider):
                self._ids.setdefault(each.by, secrets.token_hex(8))

        async def change(name: str, versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
            for each in candidates:
                if each.manifest.name == name:
                    versions = [*await self._others(each, versions), self._written(each)]
            return versions

        self._adding.update(candidates)
        try:
            await self._change({each.manifest.name for each in candidates}, change)
            try:
                yield
            except BaseException:  # whatever it was, the others do not go on offering what is not offered here
                self.remove_soon(candidates)
                raise
        finally:
            self._adding.difference_update(candidates)

    async def _others(self, candidate: Candidate, versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the versions beside a new one. Raises NameTaken."""
        key, left = self._key_of(candidate), list[dict[str, Any]]()
        for each in versions:
            other, owner = _key(each), ((each["principal"] or {"id": ""})["id"], each["agent"])
            if other[2] not in (None, self.letters.store.name) and await self.letters.store.gone(str(other[2])):
                continue
            if owner != candidate.caller.owner:
                raise errors.NameTaken(f"{candidate.manifest.name} was registered by somebody else")
            if other[0] != key[0]:
                left.append(each)
            elif other[2:] != key[2:]:
                raise errors.NameTaken(f"{candidate.manifest.name} {key[0]} is provided on another stream")
        return left

    async def remove(self, candidates: Collection[Candidate]) -> None:
        """Tell all processes that tools are offered no more. Raises AgentToolsError: the store failed."""
        await self._removal(candidates)()

    def remove_soon(self, candidates: Collection[Candidate]) -> None:
        """Do what `remove` does beside what goes on. What is not removed ends with this process."""

        async def remove(removal: Callable[[], Awaitable[None]]) -> None:
            try:
                await removal()
            except errors.AgentToolsError as error:
                log.warning("tools that are gone were not removed for other processes: %s", error)

        if self._nursery is not None and candidates:
            self._nursery.start_soon(remove, self._removal(candidates))

    def _removal(self, candidates: Collection[Candidate]) -> Callable[[], Awaitable[None]]:
        """Return what removes them, by the ids that their providers have now."""
        keys = {(each.manifest.name, self._key_of(each)) for each in candidates}

        async def change(name: str, versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [each for each in versions if (name, _key(each)) not in keys]

        return partial(self._change, {name for name, _ in keys}, change)

    def add_soon(self, candidate: Candidate) -> None:
        """Tell all processes, beside what goes on, of a tool that is offered here already."""

        async def add() -> None:
            try:
                async with self.adding([candidate]):
                    pass
            except errors.AgentToolsError as error:
                log.warning("a tool that was approved is not offered: %s", error)
                self.table.drop([candidate])

        self._adding.add(candidate)
        if self._nursery is not None:
            self._nursery.start_soon(add)

    async def _add_again(self) -> None:
        """Keep what is offered here for longer, under the present name of this process."""
        offered = [each for each in self.table.offered() if not isinstance(each.by, RemoteProvider)]
        if offered:
            async with self.adding(offered):
                pass

    async def _change(self, names: Iterable[str], change: Callable[[str, list[dict[str, Any]]], Any]) -> None:
        """Change records, and tell the others; again if they were changed meanwhile."""
        store = self.letters.store
        try:
            for _ in range(_ATTEMPTS):
                records, changes = await store.records(_KIND), list[RecordChange]()
                for name in names:
                    known = records.get(name)
                    versions = await change(name, _versions(known))
                    data = encode({"form": _FORM, "versions": versions}) if versions else None
                    changes.append(RecordChange(name, known, data))
                if await store.change_records(_KIND, changes, _KEPT):
                    self._touched.update(change.name for change in changes)
                    self.letters.say(None, "tools")
                    return
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("the store of registered tools failed: %s", error)
            raise errors.AgentToolsError("the service could not keep the tools; try again later") from None
        raise errors.TooMuch("many register at this moment; try again later", retry_after=1.0)

    def _find(self, id: str, name: str, version: str) -> tuple[Provider, Manifest] | None:
        """Return a provider that is connected here, and its tool as it sent it."""
        for each in self.table.offered():
            by, sent = each.by, each.sent
            if by is not None and self._ids.get(by) == id and (sent.name, sent.version) == (name, version):
                return by, sent
        return None

    def forget(self, provider: Provider) -> None:
        """Note that a provider has disconnected: its tools are offered nowhere any more."""
        self.remove_soon([each for each in self.table.offered() if each.by is provider])
        self._ids.pop(provider, None)


def _versions(data: bytes | None) -> list[dict[str, Any]]:
    """Return the versions of a tool in a record. Raises ValueError, TypeError, KeyError: it is none of ours."""
    if data is None:
        return []
    record = parse_value(data)
    if record["form"] != _FORM:
        raise ValueError("a registered tool of a form that this release does not know")
    return list(record["versions"])


def _key(version: Mapping[str, Any]) -> _Key:
    return version["version"], version["hash"], version["holder"], version["provider"]
