"""The versions of registered tools: what is offered and what waits to be, whose it is, and its name in the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Final

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

_LONGEST: Final = 64  # characters of a version that are looked at

_known_key: Final = lru_cache(maxsize=1_024)(version_key)  # of what callers write again and again


def asked_version(version: str) -> VersionKey:
    """Return the version that a caller means, however it is written."""
    return _known_key(version[:_LONGEST])


@attrs.define(eq=False)
class Candidate:
    """A manifest as sent and with its full name, whose it is, the tool that it is a version of, and its entry."""

    sent: Manifest
    manifest: Manifest
    caller: AgentCaller
    by: Provider | None
    tool: ToolVersions
    entry: ToolEntry | None = None  # None until it is made, or its callback is resolved
    version: VersionKey = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.version = version_key(self.manifest.version)

    @property
    def is_offered(self) -> bool:
        return self.tool.offered.get(self.version) is self

    @property
    def waits(self) -> bool:
        return self.tool.waiting.get(self.version) is self

    def check_waits(self) -> None:
        """Raise ProviderGone if it does not wait any more."""
        if not self.waits:
            raise ProviderGone("it was withdrawn before it was approved")


@attrs.define(eq=False)
class ToolVersions:
    """All versions of one tool: what is offered, and what waits to be."""

    name: str
    owner: Owner
    offered: dict[VersionKey, Candidate] = attrs.field(factory=dict)
    waiting: dict[VersionKey, Candidate] = attrs.field(factory=dict)
    keys: dict[str, Candidate] = attrs.field(factory=dict)  # those that are offered, by their keys in `server.tools`

    @property
    def versions(self) -> set[VersionKey]:
        return self.offered.keys() | self.waiting.keys()

    def candidates(self) -> list[Candidate]:
        return [*self.offered.values(), *self.waiting.values()]

    def layout(self) -> dict[str, Candidate]:
        """Return what is offered by key: the newest version has the tool's name."""
        newest_first = [self.offered[version] for version in sorted(self.offered, reverse=True)]
        return {
            f"{self.name}@{each.manifest.version}" if at else self.name: each for at, each in enumerate(newest_first)
        }


class ToolTable:
    """The registered tools of one server, and those that wait to be. The newest version has the tool's plain name."""

    def __init__(self, server: Offering, rules: RegistrationRules) -> None:
        self._server = server
        self._rules = rules
        self.families: dict[str, ToolVersions] = {}
        # What each owner has, each principal, and (None) everybody, as `_count` keeps it.
        self.owned: Counter[Owner | str | None] = Counter()  # each version counts
        self.memory: Counter[Owner | str | None] = Counter()  # bytes that the manifests take, as estimated

    # Finding

    def candidates(self, name: str | None = None) -> list[Candidate]:
        """Return what is offered or waits: all of it, or the versions of one tool."""
        tools = self.families.values() if name is None else filter(None, (self.families.get(name),))
        return [each for tool in tools for each in tool.candidates()]

    def offered(self, name: str | None = None) -> list[Candidate]:
        """Return what is offered."""
        return [each for each in self.candidates(name) if each.is_offered]

    def key_of(self, name: str, version: str) -> str | None:
        """Return the key of a version in `server.tools`, however it is written; also of the server's own tools."""
        tool = self.families.get(name)
        if tool is not None:
            offered = tool.offered.get(asked_version(version))
            return next((key for key, each in tool.keys.items() if each is offered), None)
        entry = self._server.tools.get(name)
        if entry is not None and _known_key(version_of(entry)) == asked_version(version):
            return name
        older = f"{name}@{version}"
        return older if older in self._server.tools else None

    def versions_of(self, entry: ToolEntry, principal: Principal | None) -> Iterator[Manifest]:
        """Yield the manifests of a tool's versions that a principal sees, the newest first."""
        name = entry.listed.name
        tool = self.families.get(name)
        if tool is not None and any(each.entry is entry for each in tool.keys.values()):
            for candidate in tool.layout().values():
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

    def tool_of(self, manifest: Manifest, owner: Owner) -> ToolVersions:
        """Return the tool of a manifest, perhaps one that is not kept yet. Raises NameTaken, TooMuch."""
        name, rules = manifest.name, self._rules
        tool = self.families.get(name) or ToolVersions(name, owner)
        if tool.owner != owner:
            raise NameTaken(f"{name} was registered by somebody else")
        self.check_offer(tool, manifest)
        if version_key(manifest.version) in tool.versions:
            return tool
        total = self.owned[None]
        self.check_number(self.owned[owner] + 1)
        if total + self.owned[owner[0]] >= rules.max_tools:
            raise TooMuch(f"there are {total} registered tools of at most {rules.max_tools}; the rest is for others")
        if len(tool.versions) >= rules.max_versions:
            raise TooMuch(f"one tool may have {rules.max_versions} versions")
        return tool

    def equal_to(self, candidate: Candidate) -> Candidate | None:
        """Return the equal manifest that is offered or waits; None if there is none. Raises NameTaken for another."""
        manifest, by, tool = candidate.manifest, candidate.by, candidate.tool
        known, waiting = tool.offered.get(candidate.version), tool.waiting.get(candidate.version)
        for each in (known, waiting):
            if each is not None and each.by is by and each.manifest.hash == manifest.hash:
                return each
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
        rules, kept, more = self._rules, self.memory, manifest.memory
        if more + kept[owner[0]] + kept[None] > rules.max_memory or more + kept[owner] > rules.max_memory_per_owner:
            raise TooMuch("the registered tools take too much memory")

    def check_offer(self, tool: ToolVersions, manifest: Manifest) -> None:
        """Raise NameTaken if the server has a tool of its own under a key that a manifest may get."""
        for key in (manifest.name, f"{manifest.name}@{manifest.version}"):
            found, known = self._server.tools.get(key), tool.keys.get(key)
            if found is not None and (known is None or found is not known.entry):
                raise NameTaken(f"{key} is a tool of the server's own")

    def add(self, candidate: Candidate) -> None:
        """Let a manifest wait to be offered."""
        tool = candidate.tool
        self.families[tool.name] = tool
        self._count(tool.owner, candidate.version not in tool.versions, candidate.manifest.memory)
        tool.waiting[candidate.version] = candidate

    def offer(self, candidate: Candidate) -> None:
        """Offer a manifest that waits, in the place of the one that its version had."""
        tool, version = candidate.tool, candidate.version
        if (replaced := tool.offered.get(version)) is not None:
            self._count(tool.owner, 0, -replaced.manifest.memory)
        tool.offered[version] = tool.waiting.pop(version)
        self.arrange(tool)

    def drop(self, candidates: Collection[Candidate]) -> None:
        """Stop offering these, and forget what of them waits."""
        with self._server.tools.together():
            for each in candidates:
                tool = each.tool
                for kept in (tool.offered, tool.waiting):
                    if kept.get(each.version) is each:
                        del kept[each.version]
                        self._count(tool.owner, -(each.version not in tool.versions), -each.manifest.memory)
            for tool in {each.tool for each in candidates}:
                self.arrange(tool)
                if not tool.versions and self.families.get(tool.name) is tool:
                    del self.families[tool.name]

    def _count(self, owner: Owner, tools: int, memory: int) -> None:
        """Count tools, and the memory of manifests, that have come or, below 0, gone."""
        for whose in (owner, owner[0], None):
            self.owned[whose] += tools
            self.memory[whose] += memory
            if not self.owned[whose]:
                del self.owned[whose], self.memory[whose]

    def arrange(self, tool: ToolVersions) -> None:
        """Give the newest version the tool's name, and the others theirs. Clients are notified once."""
        server, tools = self._server, self._server.tools
        before, tool.keys = tool.keys, {}
        with tools.together():
            layout = tool.layout()
            for key, old in before.items():
                if key not in layout and tools.get(key) is old.entry:  # the server's author may have removed it
                    server.remove_tool(key)
            for key, candidate in layout.items():
                found, new, known = tools.get(key), candidate.entry, before.get(key)
                if new is None or (found is not None and (known is None or found is not known.entry)):
                    continue  # the server's author has put another tool in its place
                if found is not new:
                    server.put_tool(key, new, listed=key == tool.name)
                tool.keys[key] = candidate
