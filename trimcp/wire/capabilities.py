"""The capabilities that each side declares. The set is open: unknown ones are kept in `extra`."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import attrs

from trimcp.wire.fields import field, wire, wire_name
from trimcp.wire.revisions import V2025_03_26, V2025_06_18, V2025_11_25, V2026_07_28

Settings: TypeAlias = dict[str, Any]
"""A capability that is declared or not; no settings are defined for it yet."""

APPS: Final = "io.modelcontextprotocol/ui"
"""The extension "MCP Apps": pages that a host shows beside a tool's result."""
APP_TYPE: Final = "text/html;profile=mcp-app"
"""The media type of such a page, which a client that shows them declares."""
SKILLS: Final = "io.modelcontextprotocol/skills"
"""The extension "Skills": folders of instructions that a server offers to models."""
TASKS: Final = "io.modelcontextprotocol/tasks"
"""The extension "Tasks": calls whose results are fetched later."""


@wire
class RootsCapability:
    """The client can list its roots, and until 2025-11-25 notify that they changed."""

    list_changed: bool | None = field(default=None, until=V2026_07_28)
    extra: dict[str, Any] = field(factory=dict)


@wire
class SamplingCapability:
    """The client can ask a model: with context from other servers, with tools."""

    context: Settings | None = field(default=None, since=V2025_11_25)
    tools: Settings | None = field(default=None, since=V2025_11_25)
    extra: dict[str, Any] = field(factory=dict)


@wire(since=V2025_06_18)
class ElicitationCapability:
    """The client can ask its user: with a form, or by sending them to a URL. If neither is declared, form is meant."""

    form: Settings | None = field(default=None, since=V2025_11_25)
    url: Settings | None = field(default=None, since=V2025_11_25)
    extra: dict[str, Any] = field(factory=dict)


@wire(since=V2025_11_25, until=V2026_07_28)
class TaskRequests:
    """Which requests may become tasks, by the methods of each feature: `{"call": {}}` for `tools/call`.

    A client declares `sampling` and `elicitation`, a server `tools`.
    """

    sampling: dict[str, Settings] | None = field(default=None)
    elicitation: dict[str, Settings] | None = field(default=None)
    tools: dict[str, Settings] | None = field(default=None)


@wire(since=V2025_11_25, until=V2026_07_28)
class TasksCapability:
    """Requests can be run as tasks (experimental, basic/utilities/tasks)."""

    list: Settings | None = field(default=None)
    cancel: Settings | None = field(default=None)
    requests: TaskRequests | None = field(default=None)
    extra: dict[str, Any] = field(factory=dict)


@wire
class ClientCapabilities:
    """What a client declares, once in the handshake or in every request's `_meta`."""

    roots: RootsCapability | None = field(default=None)
    sampling: SamplingCapability | None = field(default=None)
    elicitation: ElicitationCapability | None = field(default=None, since=V2025_06_18)
    tasks: TasksCapability | None = field(default=None, since=V2025_11_25, until=V2026_07_28)
    experimental: dict[str, Settings] | None = field(default=None)
    extensions: dict[str, Settings] | None = field(default=None, since=V2025_06_18)
    extra: dict[str, Any] = field(factory=dict)

    @property
    def shows_apps(self) -> bool:
        """Whether the client shows the pages of apps (the extension "MCP Apps")."""
        types = (self.extensions or {}).get(APPS, {}).get("mimeTypes")
        return isinstance(types, list) and APP_TYPE in types


@wire
class PromptsCapability:
    """The server has prompts, and may notify that they changed."""

    list_changed: bool | None = field(default=None)
    extra: dict[str, Any] = field(factory=dict)


@wire
class ResourcesCapability:
    """The server has resources, may let clients subscribe to them, and may notify that the list changed."""

    subscribe: bool | None = field(default=None)
    list_changed: bool | None = field(default=None)
    extra: dict[str, Any] = field(factory=dict)


@wire
class ToolsCapability:
    """The server has tools, and may notify that they changed."""

    list_changed: bool | None = field(default=None)
    extra: dict[str, Any] = field(factory=dict)


@wire
class ServerCapabilities:
    """What a server declares, in `InitializeResult` or `DiscoverResult`."""

    tools: ToolsCapability | None = field(default=None)
    resources: ResourcesCapability | None = field(default=None)
    prompts: PromptsCapability | None = field(default=None)
    completions: Settings | None = field(default=None, since=V2025_03_26)
    logging: Settings | None = field(default=None)
    tasks: TasksCapability | None = field(default=None, since=V2025_11_25, until=V2026_07_28)
    experimental: dict[str, Settings] | None = field(default=None)
    extensions: dict[str, Settings] | None = field(default=None, since=V2025_06_18)
    extra: dict[str, Any] = field(factory=dict)


def declares(capabilities: ClientCapabilities | ServerCapabilities, path: str) -> bool:
    """Return whether a capability is declared, by its path as in `METHODS`: `"tools"`, `"resources.subscribe"`.

    A flag counts if it is true, an object if it is present, even if empty. `elicitation` with neither mode means
    `elicitation.form` (client/elicitation, "Capabilities").
    """
    found: Any = capabilities
    for step in path.split("."):
        if isinstance(found, ElicitationCapability) and step == "form" and not isinstance(found.url, dict):
            return True
        found = _member(found, step)
        if found is None or found is False:
            return False
    return True


def _member(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value.get(name)
    if not attrs.has(type(value)):
        return None
    for attribute in attrs.fields(type(value)):
        if wire_name(attribute) == name and name != "extra":
            return getattr(value, attribute.name)
    return value.extra.get(name) if hasattr(value, "extra") else None
