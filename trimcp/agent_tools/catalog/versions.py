"""A registered tool in its versions: what is offered of each, what waits to be, and who carries it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias

import attrs

from trimcp.agent_tools.callers import AgentCaller, Owner
from trimcp.agent_tools.messages.manifests import Manifest, VersionKey, version_key
from trimcp.server.tools import ToolEntry

LONGEST_VERSION: Final = 64
"""Characters of a version that are looked at."""

Progress: TypeAlias = Callable[[float, float | None, str | None], None]
"""Called with the progress of a call, its last value if known, and one line for a person. Never waits."""


class Provider(Protocol):
    """Whoever carries out tools elsewhere and is connected now.

    Attributes:
        name: for logs.
    """

    @property
    def name(self) -> str: ...

    async def call(
        self, manifest: Manifest, arguments: Mapping[str, Any], *, progress: Progress, request_id: str
    ) -> Any:
        """Carry out a call and return its result, any JSON value. Cancelling it cancels the call there.

        Args:
            manifest: as the provider sent it, without the prefix of its name.
            arguments: of the call, valid for the manifest.
            progress: reports how far the call is.
            request_id: as no other call has it.

        Raises:
            ToolFailed: the tool reports an error of its own.
            ProviderGone: the provider has disconnected; raised at once when it does.
            AgentToolsError: anything else that the provider answered.
        """
        ...


@attrs.frozen(eq=False)
class Candidate:
    """A manifest as sent and with its full name, whose it is, and its entry; None until its callback is resolved."""

    sent: Manifest
    manifest: Manifest
    caller: AgentCaller
    by: Provider | None
    entry: ToolEntry | None


@attrs.define(eq=False)
class VersionPlace:
    """One version of one tool: what is offered, and what waits to be."""

    version: VersionKey
    offered: Candidate | None = None
    waiting: Candidate | None = None


@attrs.define(eq=False)
class ToolVersions:
    """All versions of one tool, the newest first.

    `keys` has those that are offered, by their keys in `server.tools`, and `texts` the versions as they are written.
    """

    name: str
    owner: Owner
    slots: list[VersionPlace] = attrs.field(factory=list)
    keys: dict[str, ToolEntry] = attrs.field(factory=dict)
    texts: list[str] = attrs.field(factory=list)

    def slot(self, version: str) -> VersionPlace | None:
        wanted = version_key(version[:LONGEST_VERSION])
        return next((slot for slot in self.slots if slot.version == wanted), None)

    @property
    def memory(self) -> int:
        """Bytes that its manifests take, as estimated."""
        return sum(each.manifest.memory for slot in self.slots for each in (slot.offered, slot.waiting) if each)

    def layout(self) -> dict[str, Candidate]:
        """Return what is offered by key: the newest version has the tool's name."""
        offered = [slot.offered for slot in self.slots if slot.offered is not None]
        return {f"{self.name}@{each.manifest.version}" if at else self.name: each for at, each in enumerate(offered)}
