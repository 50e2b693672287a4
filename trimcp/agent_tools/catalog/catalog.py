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
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.entries import EntryMaker, Implemented, Provider, hidden
from trimcp.agent_tools.catalog.rules import Approval, RegistrationRules, Verdict
from trimcp.agent_tools.catalog.table import LONGEST_VERSION, Candidate, ToolTable
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


_Prepared: TypeAlias = tuple[Manifest, Manifest, ToolEntry | None]


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
        if version is None:
            entry = self.server.tools.get(name)
            if entry is not None and (by is None or not hidden(entry, by.principal)):
                return name, entry
            raise errors.UnknownTool(f"there is no tool named {harmless(name, 100)}")
        key = self._table.key_of(name, version)
        entry = None if key is None else self.server.tools.get(key)
        if key is None or entry is None or (by is not None and hidden(entry, by.principal)):
            raise errors.UnknownTool(f"there is no tool named {harmless(name, 100)} of version {harmless(version, 64)}")
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
        if name is None:
            entries = list(tools)
        else:
            found = tools.get(name)
            entries = [] if found is None else [found]
        manifests = [each for entry in entries for each in self._table.versions_of(entry, principal)]
        if version is None:
            return manifests
        wanted = version_key(version[:LONGEST_VERSION])
        return [each for each in manifests if version_key(each.version) == wanted]

    def pending(self) -> list[tuple[Manifest, AgentCaller]]:
        """Return the manifests that wait for approval, each with who sent it."""
        waiting = [place.waiting for place in self._table.places()]
        return [(each.manifest, each.caller) for each in waiting if each is not None]

    @property
    def registered(self) -> int:
        """The number of tools that are registered or wait for approval; each version counts."""
        return self._table.owned.total()

    def providers(self) -> Counter[Provider]:
        """Return who has brought tools over a connection that is open, each with how many it offers."""
        offered = (place.offered for place in self._table.places())
        return Counter(each.by for each in offered if each is not None and each.by is not None)

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

    async def adopt(self, raw: Any, caller: AgentCaller, by: Provider | None) -> None:
        """Offer a tool that another process has registered. Raises as `register`; nobody is asked for approval."""
        await self.register_all((raw,), caller, by, adopted=True)

    def offered(self, name: str | None = None) -> list[Candidate]:
        """Return what is offered: all of it, or the versions of one tool."""
        families = self._table.families
        found = families.values() if name is None else filter(None, (families.get(name),))
        return [place.offered for family in found for place in family.places if place.offered is not None]

    def drop(self, candidates: Collection[Candidate]) -> None:
        """Stop offering these."""
        if candidates:
            self._table.clear(lambda candidate: candidate in candidates)

    async def register_all(
        self, raws: Sequence[Any], caller: AgentCaller, by: Provider | None = None, *, adopted: bool = False
    ) -> list[Registered]:
        """Register several tools at the same moment, all of them or none; else as `register`."""
        raw: Any = None
        found: list[Registered | Candidate] = []
        turns = WorkTurns(self.server.budget, caller.account)
        self._registering[by] += 1
        try:
            if not adopted:
                self._approval.check(caller)
            self._table.check_number(len(raws))
            if self.shared is not None and by is not None and not adopted:
                await self.shared.make_room(caller)
            prepared: list[_Prepared] = []
            for raw in raws:
                one = await self._prepared(raw, caller, by, turns)
                prepared.append(one)
            if by not in self._registering:
                raise errors.ProviderGone("it was withdrawn before it was registered")
            # From here on nothing waits until all have their places.
            for at, (sent, manifest, entry) in enumerate(prepared):
                raw = raws[at]
                place = self._table.place(manifest, caller.owner)
                if any(isinstance(each, Candidate) and each.place is place for each in found):
                    raise errors.UnfitManifest(f"{manifest.name} {manifest.version} is here twice")
                status = self._table.status(place, manifest, by)
                if status is not None:
                    found.append(Registered(manifest, status))
                    continue
                self._table.check_memory(manifest, caller.owner)
                if entry is None:  # it was registered, and has been removed meanwhile
                    entry = self._maker.entry(sent, manifest, by)
                place.waiting = Candidate(sent, manifest, caller, by, place, entry)
                self._table.add(place)
                found.append(place.waiting)
            new = await self._decided([each for each in found if isinstance(each, Candidate)], adopted=adopted)
        except BaseException as error:  # whatever it was, cancelling too, no place stays taken
            for each in found:
                if isinstance(each, Candidate) and each.place.waiting is each:
                    each.place.waiting = None
                    self._table.tidy(each.place.family)
            if isinstance(error, errors.AgentToolsError):
                said = raw.get("name") if isinstance(raw, Mapping) else None
                name = said if isinstance(said, str) else None
                _tell(self.server, "tools/register", "refused", name, caller, error.message)
            raise
        finally:
            turns.close()
            if self._registering[by] <= 1:
                del self._registering[by]
            else:
                self._registering[by] -= 1
        return [each if isinstance(each, Registered) else new[each] for each in found]

    async def _prepared(self, raw: Any, caller: AgentCaller, by: Provider | None, turns: WorkTurns) -> _Prepared:
        """Return a manifest as sent and with its full name, and its entry unless it is registered already.

        Both take milliseconds where a schema has hundreds of members, so each waits for its turn.
        """
        async with turns:
            sent = Manifest.parse(raw, self.rules.bounds, strict=self.rules.strict)
        manifest = sent.named(self._maker.full_name(sent, caller, by))
        place = self._table.place(manifest, caller.owner)
        if self._table.status(place, manifest, by) is not None:
            return sent, manifest, None
        self._table.check_memory(manifest, caller.owner)
        async with turns:
            return sent, manifest, self._maker.entry(sent, manifest, by)

    async def _decided(self, waiting: Sequence[Candidate], *, adopted: bool) -> dict[Candidate, Registered]:
        """Have manifests that wait approved; offer those that are, once all have been decided on."""
        verdicts: list[Verdict] = []
        for each in waiting:
            if each.manifest.callback is not None:
                entry = await self._maker.resolved(each.sent, each.manifest)
                each.check_waits()
                each.entry = entry
            verdict = adopted or await self._approval.verdict(each.manifest, each.caller)
            if each.place.offered is not each:  # else somebody approved it meanwhile
                each.check_waits()
                if verdict is False:
                    raise errors.NotAllowed(f"{each.manifest.name} {each.manifest.version} was not approved")
            verdicts.append(verdict)
        approved = [each for each, verdict in zip(waiting, verdicts, strict=True) if verdict]
        shared = None if adopted or not approved else self.shared
        if shared is not None:
            await shared.add(approved)
        try:
            return self._offer_all(waiting, approved)
        except BaseException:  # whatever it was, the others do not go on offering what is not offered here
            if shared is not None:
                shared.remove_soon(approved)
            raise
        finally:
            if shared is not None:
                shared.added(approved)

    def _offer_all(self, waiting: Sequence[Candidate], approved: Sequence[Candidate]) -> dict[Candidate, Registered]:
        for each in waiting:
            if each.place.offered is not each:
                each.check_waits()
                if each in approved:
                    self._table.check_offer(each.place.family, each.manifest)
        registered: dict[Candidate, Registered] = {}
        with self.server.tools.together():
            for each in waiting:
                if each in approved and each.place.offered is not each:
                    self._offer(each)
                manifest, caller = each.manifest, each.caller
                pending = each.place.offered is not each
                if pending:
                    facts = {"version": manifest.version, "hash": manifest.hash}
                    _tell(self.server, "tools/register", "pending", manifest.name, caller, **facts)
                registered[each] = Registered(manifest, "pending" if pending else "registered")
        return registered

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
        family = self._table.families.get(name)
        place = None if family is None else family.find(version)
        candidate = None if place is None else place.waiting
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
        family = self._table.families.get(name)
        if family is None and name not in self.server.tools:
            raise errors.UnknownTool(f"there is no tool named {harmless(name, 100)}")
        if family is None or (caller is not None and caller.owner != family.owner):
            why = "it is the server's own" if family is None else "somebody else registered it"
            _tell(self.server, "tools/remove", "refused", name, caller, why, version=version)
            raise errors.NotAllowed(f"{harmless(name, 100)} is not removed: {why}")
        places = family.places if version is None else list(filter(None, (family.find(version),)))
        if not places:
            raise errors.UnknownTool(f"there is no version {harmless(version or '', 64)} of {name}")
        if self.shared is not None:
            await self.shared.remove([place.offered for place in places if place.offered is not None])
        for place in places:
            place.offered = place.waiting = None
        self._table.tidy(family)
        _tell(self.server, "tools/remove", "ok", name, caller, version=version)

    def withdraw(self, by: Provider) -> None:
        """Stop offering everything that a provider brought; its registrations under way fail.

        It does not wait, so it does its work also when cancelled.
        """
        self._registering.pop(by, None)
        if self.shared is not None:
            self.shared.forget(by)
        self._table.clear(lambda candidate: candidate.by is by)

    def close(self) -> None:
        """Stop offering all registered tools."""
        self._table.clear(lambda candidate: True)

    # Offering

    def _offer(self, candidate: Candidate) -> None:
        """Offer what waits. Raises NameTaken if the server has got a tool of its own by this name."""
        manifest, place = candidate.manifest, candidate.place
        self._table.check_offer(place.family, manifest)
        place.offered, place.waiting = candidate, None
        # What somebody unknown runs elsewhere may be another program the next time.
        if candidate.caller.principal is not None or (candidate.by is None and manifest.callback is None):
            self._approval.remember(manifest, candidate.caller)
        self._table.arrange(place.family)
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
