"""Who may register tools with a server, how many, and under which names; and whether a manifest is approved."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs

from trimcp.agent_tools.callers import AgentCaller, Owner
from trimcp.agent_tools.messages.errors import NotAllowed
from trimcp.agent_tools.messages.manifests import Manifest, ManifestBounds
from trimcp.support.bounds import checked
from trimcp.wire.tool_versions import VersionKey, version_key

if TYPE_CHECKING:
    from trimcp.agent_tools.catalog.callbacks import Callbacks

Verdict: TypeAlias = bool | None

Approve: TypeAlias = Callable[[Manifest, AgentCaller], Verdict | Awaitable[Verdict]]
"""Decides on a manifest, sync or async: True offers the tool, False refuses it, None keeps it until it is approved."""


@attrs.frozen(eq=False, field_transformer=checked())
class RegistrationRules:
    """Who may register tools, and how many.

    Attributes:
        scope: the scope that a token needs, if tokens have scopes; None needs none.
        anonymous_on_loopback: whether requests without a principal may register tools if they came over a loopback
            address, and no header tells of a proxy. Anybody on this machine then may, so it is said in a warning.
        approve: decides on each manifest, see `Approve`. What it approved is pinned by its hash: a changed manifest of
            the same name and version is decided on again. Without it a changed manifest is refused.
        prefix: returns what the names of tools that live elsewhere begin with, before a point; by default the agent's
            id.
        callbacks: allows tools that are called at a URL.
        strict: refuse manifests with unknown members.
        max_tools, max_per_owner, max_versions: tools registered by all, by one owner, and versions of one tool; each
            version counts. One more is taken while those of its principal and those of all, added up, are fewer than
            `max_tools`: so a newcomer gets half of those that are left, and no principal more than half of all.
        max_memory, max_memory_per_owner: bytes that the manifests of all, and of one owner, may take, as estimated: a
            usual manifest takes 20 KB, one made to take much 10 MB. Principals share `max_memory` in the same way.
        max_schema, max_depth, max_members, max_description: see `ManifestBounds`.
        timeout: seconds for one call of a tool that lives elsewhere.
        max_concurrent: calls of such a tool at once; others wait.
    """

    scope: str | None = "tools:register"
    anonymous_on_loopback: bool = False
    approve: Approve | None = None
    prefix: Callable[[AgentCaller], str] | None = None
    callbacks: Callbacks | None = None
    strict: bool = False
    max_tools: int = 1_000
    max_per_owner: int = 100
    max_versions: int = 20
    max_memory: int = 256 * 1024 * 1024
    max_memory_per_owner: int = 64 * 1024 * 1024
    max_schema: int = 64 * 1024
    max_depth: int = 32
    max_members: int = 5_000
    max_description: int = 4_096
    timeout: float = 60.0
    max_concurrent: int = 100

    @property
    def bounds(self) -> ManifestBounds:
        """How large a manifest may be."""
        return ManifestBounds(self.max_schema, self.max_depth, self.max_members, self.max_description)


def prefix_of(caller: AgentCaller) -> str:
    """Return what the names of an agent's tools begin with: its id, with a digest if it has other characters."""
    prefix = re.sub(r"[^A-Za-z0-9_-]", "_", caller.agent)[:40]
    if prefix.startswith("-"):
        prefix = f"_{prefix}"
    if prefix == caller.agent:
        return prefix
    return f"{prefix}-{hashlib.sha256(caller.agent.encode(errors='replace')).hexdigest()[:8]}"


_MOST_PINS: Final = 10_000


class Approval:
    """Decides on the manifests of one server."""

    def __init__(self, rules: RegistrationRules) -> None:
        self._rules = rules
        self._pins: OrderedDict[tuple[Owner, str, VersionKey], str] = OrderedDict()

    def check(self, caller: AgentCaller) -> None:
        """Raise NotAllowed if the caller may not register tools."""
        principal, scope = caller.principal, self._rules.scope
        if principal is None:
            if not (self._rules.anonymous_on_loopback and caller.loopback):
                raise NotAllowed("tools are not registered without a token")
        elif scope is not None and not principal.may(frozenset((scope,))):
            raise NotAllowed(f"this needs the scope {scope}", {"requiredScopes": [scope]})

    async def verdict(self, manifest: Manifest, caller: AgentCaller) -> Verdict:
        """Return whether a manifest is approved; None if somebody has yet to decide."""
        approve = self._rules.approve
        if approve is None or self._pins.get(_pin_of(manifest, caller)) == manifest.hash:
            return True
        found = approve(manifest, caller)
        verdict: Any = await found if isawaitable(found) else found
        if verdict is not None and not isinstance(verdict, bool):
            raise TypeError(f"approve returned {verdict!r:.60}: it decides by True, False or None")
        return verdict

    def remember(self, manifest: Manifest, caller: AgentCaller) -> None:
        """Approve the same manifest of the same owner from now on."""
        self._pins[_pin_of(manifest, caller)] = manifest.hash
        if len(self._pins) > _MOST_PINS:
            self._pins.popitem(last=False)


def _pin_of(manifest: Manifest, caller: AgentCaller) -> tuple[Owner, str, VersionKey]:
    return caller.owner, manifest.name, version_key(manifest.version)
