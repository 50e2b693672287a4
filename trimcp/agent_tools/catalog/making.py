"""From a manifest to the name and the entry under which a server offers it, and who carries its calls out."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.entries import Elsewhere, EntryTemplate, Implemented, by_reference, elsewhere
from trimcp.agent_tools.catalog.rules import RegistrationRules, prefix_of
from trimcp.agent_tools.catalog.versions import Provider
from trimcp.agent_tools.messages.errors import NotAllowed, UnfitManifest
from trimcp.agent_tools.messages.manifests import NAME, Manifest
from trimcp.server.offering import Offering
from trimcp.server.tools import ToolEntry
from trimcp.session.context import Context
from trimcp.support.cleaning import harmless


class EntryMaker:
    """Makes the entries of registered tools for one server."""

    def __init__(
        self,
        server: Offering,
        implementations: Mapping[str, Callable[..., Any] | Implemented],
        rules: RegistrationRules,
    ) -> None:
        self._server = server
        self._rules = rules
        self._implementations = {name: by_reference(name, given) for name, given in implementations.items()}

    def full_name(self, sent: Manifest, caller: AgentCaller, by: Provider | None) -> str:
        """Return the name under which a manifest is registered. Raises UnfitManifest."""
        if by is None and sent.callback is None:
            wanted = sent.implementation or sent.name
            if wanted not in self._implementations:
                raise UnfitManifest(f"the server has no implementation named {harmless(wanted, 100)}")
            if "." in sent.name and sent.name not in self._implementations:
                raise UnfitManifest("a name with a point is for tools that live elsewhere, which begin with a prefix")
            return sent.name
        if by is not None and (sent.implementation is not None or sent.callback is not None):
            raise UnfitManifest("the tool of a provider is called on its stream: it has no implementation or callback")
        prefix = (self._rules.prefix or prefix_of)(caller)
        if not prefix or sent.name.startswith(f"{prefix}."):
            return sent.name
        name = f"{prefix}.{sent.name}"
        if NAME.fullmatch(name) is None:
            raise UnfitManifest(f"{harmless(name, 160)}, which has the prefix of this agent, is no tool's name")
        return name

    def entry(self, sent: Manifest, manifest: Manifest, by: Provider | None) -> ToolEntry | None:
        """Return the entry of a manifest; None for a callback, whose host is yet to be resolved."""
        if manifest.callback is not None:
            if self._rules.callbacks is None:
                raise NotAllowed("this server calls no tools at URLs")
            self._rules.callbacks.check(manifest.callback)
            return None
        if by is None:
            return self._guarded(self._implementations[manifest.implementation or manifest.name], manifest)

        async def call(ctx: Context[Any], arguments: dict[str, Any]) -> Any:
            return await by.call(sent, arguments, progress=ctx.report_progress_nowait, request_id=_new_id())

        return self._elsewhere(call, manifest)

    async def resolved(self, sent: Manifest, manifest: Manifest) -> ToolEntry:
        """Return the entry of a callback, at the addresses that its host has now."""
        assert self._rules.callbacks is not None
        assert manifest.callback is not None
        target = await self._rules.callbacks.resolve(manifest.callback)

        async def call(ctx: Context[Any], arguments: dict[str, Any]) -> Any:
            return await target.call(sent, arguments, request_id=_new_id())

        return self._elsewhere(call, manifest)

    def _elsewhere(self, call: Elsewhere, manifest: Manifest) -> ToolEntry:
        rules = self._rules
        return self._guarded(elsewhere(call, manifest.name, rules.timeout, rules.max_concurrent), manifest)

    def _guarded(self, template: EntryTemplate, manifest: Manifest) -> ToolEntry:
        """Return a template's entry for a manifest, with its rights."""
        entry = template.entry_for(manifest)
        self._server.guard_tool(entry, template.options)
        return entry


def _new_id() -> str:
    return f"call_{secrets.token_urlsafe(12)}"
