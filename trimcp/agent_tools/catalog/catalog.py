"""The tools that agents register with a server, beside those that it has: whose they are, and in which versions.

Registered tools are entries of `server.tools` like any other, so quotas, rights, filters and the audit apply to them,
and clients of the Model Context Protocol see and call them. The newest version of a tool has its plain name. Older ones
are found as `NAME@VERSION` and not listed.

A tool is carried out by a function that the server declares (*by reference*), by a provider on its stream, or at a
callback URL. A name belongs to whoever registered it first, in all its versions; names of tools that live elsewhere
begin with a prefix, and nothing is ever registered over a tool of the server's own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import attrs

from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.entries import EntryMaker, Implemented, Provider, hidden
from trimcp.agent_tools.catalog.rules import Approval, RegistrationRules
from trimcp.agent_tools.catalog.table import Candidate, ToolTable, asked_version
from trimcp.agent_tools.messages import errors
from trimcp.agent_tools.messages.manifests import Manifest
from trimcp.budget import WorkTurns
from trimcp.principal import Principal
from trimcp.security import security_event
from trimcp.server.offering import Offering
from trimcp.server.tools import ToolEntry
from trimcp.support.cleaning import harmless
from trimcp.wire.tool_versions import version_key

if TYPE_CHECKING:
    from trimcp.agent_tools.catalog.sharing import SharedTools
    from trimcp.store.letters import PostBox

log: logging.Logger = logging.getLogger("trimcp.server")


@attrs.frozen(eq=False)
class Registered:
    """What became of a manifest.

    Attributes:
        manifest: as it is known now, with the prefix of its name.
        status: "registered", or "pending" until somebody approves it.
    """

    manifest: Manifest
    status: Literal["registered", "pending"]

    def to_json(self) -> dict[str, Any]:
        """Return what a message says of it."""
        manifest = self.manifest
        return {"name": manifest.name, "version": manifest.version, "hash": manifest.hash, "status": self.status}


class Catalog:
    """The registered tools of one server.

    It has more than 300 lines because what registers, approves, offers and removes a tool keeps one promise together:
    all of a message's tools, or none.

    Args:
        server: gets the tools.
        implementations: the functions that manifests may name, plain or `Implemented`.
        rules: who may register tools, and how many.

    Raises:
        TypeError, ValueError: an implementation or its options cannot be a tool, as for `Server.tool`.
    """

    def __init__(
        self,
        server: Offering,
        implementations: Mapping[str, Callable[..., Any] | Implemented] | None = None,
        rules: RegistrationRules | None = None,
    ) -> None:
        self.server: Offering = server
        self.rules: RegistrationRules = rules or RegistrationRules()
        self._maker = EntryMaker(server, implementations or {}, self.rules)
        self._approval = Approval(self.rules)
        self._table = ToolTable(server, self.rules)
        self.shared: SharedTools | None = None  # with other processes
        self._registering: Counter[Provider | None] = Counter()  # registrations under way, of who was not withdrawn
        server.expect_tools()
        if self.rules.anonymous_on_loopback:
            log.warning(
                "ANYBODY ON THIS MACHINE may register tools without a token (anonymous_on_loopback=True): "
                "use it for trying things out only"
            )

    # Finding

    def find(self, name: str, version: str | None = None, by: AgentCaller | None = None) -> tuple[str, ToolEntry]:
        """Return a tool's key in `server.tools`, and its entry; without a version the newest.

        Raises UnknownTool if there is none, or none that `by` sees.
        """
        key = name if version is None else self._table.key_of(name, version)
        entry = None if key is None else self.server.tools.get(key)
        if key is None or entry is None or (by is not None and hidden(entry, by.principal)):
            raise errors.unknown_tool(name, version)
        return key, entry

    def manifests(
        self, name: str | None = None, version: str | None = None, principal: Principal | None = None
    ) -> list[Manifest]:
        """Return the manifests of all tools, those of the server's own too.

        Args:
            name: only those of this name, the newest version first.
            version: only those of this version.
            principal: leave out tools for which it lacks scopes; None leaves out none.
        """
        tools = self.server.tools
        entries = tools if name is None else filter(None, (tools.get(name),))
        manifests = [each for entry in entries for each in self._table.versions_of(entry, principal)]
        if version is None:
            return manifests
        wanted = asked_version(version)
        return [each for each in manifests if version_key(each.version) == wanted]

    def pending(self) -> list[tuple[Manifest, AgentCaller]]:
        """Return the manifests that wait for approval, each with who sent it."""
        return [(each.manifest, each.caller) for each in self._table.candidates() if each.waits]

    @property
    def registered(self) -> int:
        """The number of tools that are registered or wait for approval; each version counts."""
        return self._table.owned[None]

    def providers(self) -> Counter[Provider]:
        """Return who has brought tools over a connection that is open, each with how many it offers."""
        return Counter(each.by for each in self._table.offered() if each.by is not None)

    # Registering

    async def register(self, raw: Any, caller: AgentCaller, by: Provider | None = None) -> Registered:
        """Register a tool for a caller, and say what became of it. Repeating it changes nothing.

        Args:
            raw: the manifest as it was sent.
            caller: whose tool it becomes.
            by: carries it out; None for a tool by reference or at a callback URL, as its manifest says.

        Raises:
            NotAllowed: the caller may not register tools, or not this one.
            UnfitManifest: the manifest has problems, or names an implementation that the server does not have.
            NameTaken: the name is the server's own or somebody else's, or the version has another manifest.
            TooMuch: there are too many tools, or too many of this owner.
            ProviderGone: it was withdrawn meanwhile.
        """
        (registered,) = await self.register_all((raw,), caller, by)
        return registered

    def may_wait(self, raws: Sequence[Any]) -> bool:
        """Return whether registering these may take long: somebody approves them, or a host has to be resolved."""
        return self.rules.approve is not None or any("callback" in raw for raw in raws if type(raw) is dict)

    def share(self, letters: PostBox) -> SharedTools:
        """Register for all processes from now on, and offer what they do; the caller runs what is returned."""
        from trimcp.agent_tools.catalog.sharing import SharedTools  # loaded where processes share sessions

        self.shared = SharedTools(self._table, partial(self.register_all, adopted=True), letters)
        return self.shared

    async def register_all(
        self, raws: Sequence[Any], caller: AgentCaller, by: Provider | None = None, *, adopted: bool = False
    ) -> list[Registered]:
        """Register several tools at the same moment, all of them or none; else as `register`.

        What is `adopted` was registered with another process: nobody is asked for approval.
        """
        name: str | None = None
        new: dict[Candidate, None] = {}  # those that are not registered yet, in order
        turns = WorkTurns(self.server.budget, caller.account)
        self._registering[by] += 1
        try:
            if not adopted:
                self._approval.check(caller)
            self._table.check_number(len(raws))
            if self.shared is not None and by is not None and not adopted:
                await self.shared.make_room(caller)
            prepared: list[Candidate] = []
            for raw in raws:
                said = raw.get("name") if isinstance(raw, Mapping) else None
                name = said if isinstance(said, str) else None
                candidate = await self._prepared(raw, caller, by, turns)
                prepared.append(candidate)
            if by not in self._registering:
                raise errors.ProviderGone("it was withdrawn before it was registered")
            # From here on nothing waits until all have their places.
            found: list[Candidate] = []
            for candidate in prepared:
                name = candidate.sent.name
                found.append(self._placed(candidate, new))
            await self._decide(new, adopted=adopted)
        except BaseException as error:  # whatever it was, cancelling too, no place stays taken
            self._table.drop([each for each in new if each.waits])
            if isinstance(error, errors.AgentToolsError):
                _tell(self.server, "tools/register", "refused", name, caller, error.message)
            raise
        finally:
            turns.close()
            self._registering -= Counter((by,))
        return [Registered(each.manifest, "registered" if each.is_offered else "pending") for each in found]

    async def _prepared(self, raw: Any, caller: AgentCaller, by: Provider | None, turns: WorkTurns) -> Candidate:
        """Return a manifest with its full name, and with its entry unless it is registered already.

        Both take milliseconds where a schema has hundreds of members, so each waits for its turn.
        """
        async with turns:
            sent = Manifest.parse(raw, self.rules.bounds, strict=self.rules.strict)
        manifest = sent.named(self._maker.full_name(sent, caller, by))
        found = Candidate(sent, manifest, caller, by, self._table.tool_of(manifest, caller.owner))
        if self._table.equal_to(found) is None:
            self._table.check_memory(manifest, caller.owner)
            async with turns:
                found.entry = self._maker.entry(sent, manifest, by)
        return found

    def _placed(self, candidate: Candidate, new: dict[Candidate, None]) -> Candidate:
        """Let a manifest wait, and add it to the `new` ones; or return the equal one that waits or is offered."""
        manifest, owner = candidate.manifest, candidate.caller.owner
        tool = candidate.tool = self._table.tool_of(manifest, owner)
        if tool.waiting.get(candidate.version) in new:
            raise errors.UnfitManifest(f"{manifest.name} {manifest.version} is here twice")
        known = self._table.equal_to(candidate)
        if known is not None:
            return known
        self._table.check_memory(manifest, owner)
        if candidate.entry is None:  # it was registered, and has been removed meanwhile; or it is a callback
            candidate.entry = self._maker.entry(candidate.sent, manifest, candidate.by)
        self._table.add(candidate)
        new[candidate] = None
        return candidate

    async def _decide(self, waiting: Collection[Candidate], *, adopted: bool) -> None:
        """Have manifests that wait approved; offer those that are, once all have been decided on."""
        approved: dict[Candidate, None] = {}
        for each in waiting:
            if each.manifest.callback is not None:
                entry = await self._maker.resolved(each.sent, each.manifest)
                each.check_waits()
                each.entry = entry
            verdict = adopted or await self._approval.verdict(each.manifest, each.caller)
            if not each.is_offered:  # else somebody approved it meanwhile
                each.check_waits()
                if verdict is False:
                    raise errors.NotAllowed(f"{each.manifest.name} {each.manifest.version} was not approved")
            if verdict:
                approved[each] = None
        telling = nullcontext() if adopted or not approved or self.shared is None else self.shared.adding(approved)
        async with telling:
            self._offer_all(waiting, approved)

    def _offer_all(self, waiting: Collection[Candidate], approved: Collection[Candidate]) -> None:
        left = [each for each in waiting if not each.is_offered]
        for each in left:
            each.check_waits()
            if each in approved:
                self._table.check_offer(each.tool, each.manifest)
        with self.server.tools.together():
            for each in left:
                if each in approved:
                    self._offer(each)
                else:
                    facts = {"version": each.manifest.version, "hash": each.manifest.hash}
                    _tell(self.server, "tools/register", "pending", each.manifest.name, each.caller, **facts)

    def approve(self, name: str, version: str, hash: str) -> Registered:
        """Offer a tool that waits for approval.

        Args:
            name, version: of the tool, as `pending` has them.
            hash: of the manifest that was looked at.

        Raises:
            UnknownTool: nothing of this name and version waits.
            VersionConflict: what waits has another hash.
            NameTaken: the server has a tool of its own by this name now.
        """
        tool = self._table.families.get(name)
        candidate = None if tool is None else tool.waiting.get(asked_version(version))
        if candidate is None or candidate.entry is None:
            raise errors.UnknownTool(f"nothing named {harmless(name, 100)} of version {harmless(version, 64)} waits")
        manifest = candidate.manifest
        if manifest.hash != hash:
            raise errors.VersionConflict(
                "another manifest waits than the one that was looked at", {"hash": manifest.hash}
            )
        self._offer(candidate)
        if self.shared is not None:
            self.shared.add_soon(candidate)
        return Registered(manifest, "registered")

    async def remove(self, name: str, caller: AgentCaller | None, version: str | None = None) -> None:
        """Stop offering a registered tool; running calls continue.

        Args:
            name: its whole name.
            caller: has to own it; None is the server itself.
            version: only this version.

        Raises:
            UnknownTool: there is no such tool, or no such version.
            NotAllowed: it is not the caller's.
        """
        if caller is not None:
            self._approval.check(caller)
        tool = self._table.families.get(name)
        if tool is None and name not in self.server.tools:
            raise errors.unknown_tool(name)
        if tool is None or (caller is not None and caller.owner != tool.owner):
            why = "it is the server's own" if tool is None else "somebody else registered it"
            _tell(self.server, "tools/remove", "refused", name, caller, why, version=version)
            raise errors.NotAllowed(f"{harmless(name, 100)} is not removed: {why}")
        gone = [each for each in tool.candidates() if version is None or each.version == asked_version(version)]
        if not gone:
            raise errors.UnknownTool(f"there is no version {harmless(version or '', 64)} of {name}")
        if self.shared is not None:
            await self.shared.remove([each for each in gone if each.is_offered])
        self._table.drop(gone)
        _tell(self.server, "tools/remove", "ok", name, caller, version=version)

    def withdraw(self, by: Provider) -> None:
        """Stop offering everything that a provider brought; its registrations under way fail.

        It does not wait, so it does its work also when cancelled.
        """
        self._registering.pop(by, None)
        if self.shared is not None:
            self.shared.forget(by)
        self._table.drop([each for each in self._table.candidates() if each.by is by])

    def close(self) -> None:
        """Stop offering all registered tools."""
        self._table.drop(self._table.candidates())

    # Offering

    def _offer(self, candidate: Candidate) -> None:
        """Offer what waits. Raises NameTaken if the server has got a tool of its own by this name."""
        manifest = candidate.manifest
        self._table.check_offer(candidate.tool, manifest)
        # What somebody unknown runs elsewhere may be another program the next time.
        if candidate.caller.principal is not None or (candidate.by is None and manifest.callback is None):
            self._approval.remember(manifest, candidate.caller)
        self._table.offer(candidate)
        by = None if candidate.by is None else candidate.by.name
        facts = {"version": manifest.version, "hash": manifest.hash, "provider": by}
        _tell(self.server, "tools/register", "ok", manifest.name, candidate.caller, **facts)


def _tell(
    server: Offering,
    method: str,
    outcome: str,
    name: str | None,
    caller: AgentCaller | None,
    why: str | None = None,
    **facts: Any,
) -> None:
    """Note in the security log, and in the audit if there is one, what became of a tool."""
    who = {} if caller is None else {"principal": caller.principal, "agent": caller.agent}
    address, status = None if caller is None else caller.address, "pending" if outcome == "pending" else None
    told: dict[str, Any] = {"tool": name, **who, "peer": address, "why": why, "status": status, **facts}
    if outcome == "refused":
        security_event("registration_refused", **told)
    elif method == "tools/register":
        security_event("tool_registered", **told)
    else:
        security_event("tool_removed", **told)
    if (audit := server.audit) is not None:
        audit.note(method, outcome, target=name, **who, address=address, detail=why, **facts)
