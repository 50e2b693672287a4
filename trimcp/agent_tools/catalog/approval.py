"""Who may register tools, and whether a manifest is approved: by a function, once for what it has approved before."""

from __future__ import annotations

from collections import OrderedDict
from inspect import isawaitable
from typing import Any, Final

from trimcp.agent_tools.callers import AgentCaller, Owner
from trimcp.agent_tools.catalog.rules import RegistrationRules, Verdict
from trimcp.agent_tools.catalog.versions import Candidate
from trimcp.agent_tools.messages.errors import NotAllowed
from trimcp.agent_tools.messages.manifests import VersionKey, version_key

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

    async def verdict(self, candidate: Candidate) -> Verdict:
        """Return whether a manifest is approved; None if somebody has yet to decide."""
        approve, manifest = self._rules.approve, candidate.manifest
        if approve is None or self._pins.get(_pin_of(candidate)) == manifest.hash:
            return True
        found = approve(manifest, candidate.caller)
        verdict: Any = await found if isawaitable(found) else found
        if verdict is not None and not isinstance(verdict, bool):
            raise TypeError(f"approve returned {verdict!r:.60}: it decides by True, False or None")
        return verdict

    def remember(self, candidate: Candidate) -> None:
        """Approve the same manifest of the same owner from now on."""
        # What somebody unknown runs elsewhere may be another program the next time.
        if candidate.caller.principal is None and not (candidate.by is None and candidate.manifest.callback is None):
            return
        self._pins[_pin_of(candidate)] = candidate.manifest.hash
        if len(self._pins) > _MOST_PINS:
            self._pins.popitem(last=False)


def _pin_of(candidate: Candidate) -> tuple[Owner, str, VersionKey]:
    manifest = candidate.manifest
    return candidate.caller.owner, manifest.name, version_key(manifest.version)
