"""The versions of registered tools: what is offered and what waits to be, whose it is, and its name in the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, Literal

import attrs

from trimcp.agent_tools.callers import AgentCaller, Owner
from trimcp.agent_tools.catalog.entries import Provider, shown, version_of
from trimcp.agent_tools.catalog.rules import RegistrationRules
from trimcp.agent_tools.messages.errors import NameTaken, ProviderGone, TooMuch
from trimcp.agent_tools.messages.manifests import Manifest
from trimcp.principal import Principal
from trimcp.server.offering import Offering
from trimcp.server.tools import ToolEntry
from trimcp.wire.tool_versions import VersionKey, version_key

LONGEST_VERSION: Final = 64
"""Characters of a version that are looked at."""

_known_key: Final = lru_cache(maxsize=1_024)(version_key)  # of what callers write again and again


@attrs.define(eq=False)
class Candidate:
    """A manifest as sent and with its full name, whose it is, where it waits or is offered, and its entry."""

    sent: Manifest
    manifest: Manifest
    caller: AgentCaller
    by: Provider | None
    place: VersionPlace
    entry: ToolEntry | None  # None until its callback is resolved

    def check_waits(self) -> None:
        """Raise ProviderGone if it does not wait any more."""
        if self.place.waiting is not self:
            raise ProviderGone("it was withdrawn before it was approved")


@attrs.define(eq=False)
class VersionPlace:
    """One version of one tool: what is offered, and what waits to be."""

    family: ToolVersions
    version: VersionKey
    offered: Candidate | None = None
    waiting: Candidate | None = None


@attrs.define(eq=False)
class ToolVersions:
    """All versions of one tool, the newest first."""

    name: str
    owner: Owner
    places: list[VersionPlace] = attrs.field(factory=list)
    keys: dict[str, Candidate] = attrs.field(factory=dict)  # those that are offered, by their keys in `server.tools`

    def find(self, version: str) -> VersionPlace | None:
        wanted = _known_key(version[:LONGEST_VERSION])
        return next((place for place in self.places if place.version == wanted), None)

    @property
    def memory(self) -> int:
        """Bytes that its manifests take, as estimated."""
        return sum(each.manifest.memory for place in self.places for each in (place.offered, place.waiting) if each)

    def layout(self) -> dict[str, Candidate]:
        """Return what is offered by key: the newest version has the tool's name."""
        offered = [place.offered for place in self.places if place.offered is not None]
        return {f"{self.name}@{each.manifest.version}" if at else self.name: each for at, each in enumerate(offered)}


class ToolTable:
    """The registered tools of one server, and those that wait to be. The newest version has the tool's plain name."""

    def __init__(self, server: Offering, rules: RegistrationRules) -> None:
        self._server = server
        self._rules = rules
        self.families: dict[str, ToolVersions] = {}
        self.owned: Counter[Owner] = Counter()  # the tools of each owner; each version counts

    # Finding

    def places(self) -> list[VersionPlace]:
        """Return the places of all versions."""
        return [place for family in self.families.values() for place in family.places]

    def key_of(self, name: str, version: str) -> str | None:
        """Return the key of a version in `server.tools`, however it is written; also of the server's own tools."""
        family = self.families.get(name)
        if family is not None:
            place = family.find(version)
            offered = None if place is None else place.offered
            return next((key for key, each in family.keys.items() if each is offered), None)
        entry = self._server.tools.get(name)
        if entry is not None and _known_key(version_of(entry)) == _known_key(version[:LONGEST_VERSION]):
            return name
        older = f"{name}@{version}"
        return older if older in self._server.tools else None

    def versions_of(self, entry: ToolEntry, principal: Principal | None) -> Iterator[Manifest]:
        """Yield the manifests of a tool's versions that a principal sees, the newest first."""
        name = entry.listed.name
        family = self.families.get(name)
        if family is not None and any(each.entry is entry for each in family.keys.values()):
            for candidate in family.layout().values():
                if candidate.entry is not None and shown(candidate.entry, principal):
                    yield candidate.manifest
        elif shown(entry, principal):
            listed = entry.listed
            yield Manifest(name, listed.description or "", listed.input_schema, version_of(entry))

    # Places

    def check_number(self, tools: int) -> None:
        """Raise TooMuch for more tools than one owner may have: to read them takes memory that nobody counts."""
        if tools > (most := self._rules.max_per_owner):
            raise TooMuch(f"one owner may register {most} tools")

    def place(self, manifest: Manifest, owner: Owner) -> VersionPlace:
        """Return where a manifest belongs, perhaps a place that is not kept yet. Raises NameTaken, TooMuch."""
        name, rules = manifest.name, self._rules
        family = self.families.get(name) or ToolVersions(name, owner)
        if family.owner != owner:
            raise NameTaken(f"{name} was registered by somebody else")
        self.check_offer(family, manifest)
        place = family.find(manifest.version)
        if place is not None:
            return place
        self.check_number(self.owned[owner] + 1)
        total = self.owned.total()
        if total + sum(self.owned[each] for each in self.owned if each[0] == owner[0]) >= rules.max_tools:
            raise TooMuch(f"there are {total} registered tools of at most {rules.max_tools}; the rest is for others")
        if len(family.places) >= rules.max_versions:
            raise TooMuch(f"one tool may have {rules.max_versions} versions")
        return VersionPlace(family, version_key(manifest.version))

    def status(
        self, place: VersionPlace, manifest: Manifest, by: Provider | None
    ) -> Literal["registered", "pending"] | None:
        """Return what has become of an equal manifest before; None if there is none. Raises NameTaken for another."""
        known, waiting = place.offered, place.waiting
        if known is not None and known.by is by and known.manifest.hash == manifest.hash:
            return "registered"
        if waiting is not None and waiting.by is by and waiting.manifest.hash == manifest.hash:
            return "pending"
        if waiting is not None:
            raise NameTaken(f"another manifest of {manifest.name} {manifest.version} waits for approval")
        if known is not None and known.by is not by:
            raise NameTaken(f"{manifest.name} {manifest.version} is provided on another stream")
        if known is not None and self._rules.approve is None:
            raise NameTaken(
                f"{manifest.name} {manifest.version} has another manifest: remove it, or use another version"
            )
        return None

    def check_memory(self, manifest: Manifest, owner: Owner) -> None:
        """Raise TooMuch if there is no memory left for a manifest; principals share it as they share the number."""
        kept = [(family.owner, family.memory) for family in self.families.values()]
        own = manifest.memory + sum(taken for whose, taken in kept if whose == owner)
        shared = manifest.memory + sum(taken for whose, taken in kept if whose[0] == owner[0])
        if shared + sum(taken for _, taken in kept) > self._rules.max_memory or own > self._rules.max_memory_per_owner:
            raise TooMuch("the registered tools take too much memory")

    def check_offer(self, family: ToolVersions, manifest: Manifest) -> None:
        """Raise NameTaken if the server has a tool of its own under a key that a manifest may get."""
        for key in (manifest.name, f"{manifest.name}@{manifest.version}"):
            found, known = self._server.tools.get(key), family.keys.get(key)
            if found is not None and (known is None or found is not known.entry):
                raise NameTaken(f"{key} is a tool of the server's own")

    def add(self, place: VersionPlace) -> None:
        """Keep a place that `place` returned."""
        family = place.family
        if place not in family.places:
            self.families[family.name] = family
            family.places.append(place)
            family.places.sort(key=lambda each: each.version, reverse=True)
            self.owned[family.owner] += 1

    def tidy(self, family: ToolVersions) -> None:
        """Forget the places of a tool that hold nothing, and offer what is left."""
        left = [place for place in family.places if place.offered is not None or place.waiting is not None]
        self.owned[family.owner] -= len(family.places) - len(left)
        if self.owned[family.owner] <= 0:
            del self.owned[family.owner]
        family.places[:] = left
        self.arrange(family)
        if not left and self.families.get(family.name) is family:
            del self.families[family.name]

    def clear(self, fits: Callable[[Candidate], bool]) -> None:
        """Stop offering what fits, and forget what of it waits."""
        with self._server.tools.together():
            for family in list(self.families.values()):
                empty = not family.places
                for place in family.places:
                    if place.offered is not None and fits(place.offered):
                        place.offered, empty = None, True
                    if place.waiting is not None and fits(place.waiting):
                        place.waiting, empty = None, True
                if empty:
                    self.tidy(family)

    def arrange(self, family: ToolVersions) -> None:
        """Give the newest version the tool's name, and the others theirs. Clients are notified once."""
        server, tools = self._server, self._server.tools
        before, family.keys = family.keys, {}
        with tools.together():
            layout = family.layout()
            for key, old in before.items():
                if key not in layout and tools.get(key) is old.entry:  # the server's author may have removed it
                    server.remove_tool(key)
            for key, candidate in layout.items():
                found, new, known = tools.get(key), candidate.entry, before.get(key)
                if new is None or (found is not None and (known is None or found is not known.entry)):
                    continue  # the server's author has put another tool in its place
                if found is not new:
                    server.put_tool(key, new, listed=key == family.name)
                family.keys[key] = candidate
