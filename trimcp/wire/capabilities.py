"""The capabilities that each side declares. The set is open: unknown ones are kept in `extra`."""

from __future__ import annotations

from typing import Any, TypeAlias

import attrs

from trimcp.wire.fields import ABSENT, Absent, field, wire, wire_name
from trimcp.wire.revisions import V2025_03_26, V2025_06_18, V2025_11_25, V2026_07_28

Settings: TypeAlias = dict[str, Any]
"""A capability that is declared or not; no settings are defined for it yet."""


@wire
class RootsCapability:
    """The client can list its roots, and until 2025-11-25 notify that they changed."""

    list_changed: bool | Absent = field(default=ABSENT, until=V2026_07_28)
    extra: dict[str, Any] = field(factory=dict)


@wire
class SamplingCapability:
    """The client can ask a model: with context from other servers, with tools."""

    context: Settings | Absent = field(default=ABSENT, since=V2025_11_25)
    tools: Settings | Absent = field(default=ABSENT, since=V2025_11_25)
    extra: dict[str, Any] = field(factory=dict)


@wire(since=V2025_06_18)
class ElicitationCapability:
    """The client can ask its user: with a form, or by sending them to a URL. If neither is declared, form is meant."""

    form: Settings | Absent = field(default=ABSENT, since=V2025_11_25)
    url: Settings | Absent = field(default=ABSENT, since=V2025_11_25)
    extra: dict[str, Any] = field(factory=dict)


@wire(since=V2025_11_25, until=V2026_07_28)
class TaskRequests:
    """Which requests may become tasks, by the methods of each feature: `{"call": {}}` for `tools/call`.

    A client declares `sampling` and `elicitation`, a server `tools`.
    """

    sampling: dict[str, Settings] | Absent = field(default=ABSENT)
    elicitation: dict[str, Settings] | Absent = field(default=ABSENT)
    tools: dict[str, Settings] | Absent = field(default=ABSENT)


@wire(since=V2025_11_25, until=V2026_07_28)
class TasksCapability:
    """Requests can be run as tasks (experimental, basic/utilities/tasks)."""

    list: Settings | Absent = field(default=ABSENT)
    cancel: Settings | Absent = field(default=ABSENT)
    requests: TaskRequests | Absent = field(default=ABSENT)
    extra: dict[str, Any] = field(factory=dict)


@wire
class ClientCapabilities:
    """What a client declares, once in the handshake or in every request's `_meta`."""

    roots: RootsCapability | Absent = field(default=ABSENT)
    sampling: SamplingCapability | Absent = field(default=ABSENT)
    elicitation: ElicitationCapability | Absent = field(default=ABSENT, since=V2025_06_18)
    tasks: TasksCapability | Absent = field(default=ABSENT, since=V2025_11_25, until=V2026_07_28)
    experimental: dict[str, Settings] | Absent = field(default=ABSENT)
    extensions: dict[str, Settings] | Absent = field(default=ABSENT, since=V2026_07_28)
    extra: dict[str, Any] = field(factory=dict)


@wire
class PromptsCapability:
    """The server has prompts, and may notify that they changed."""

    list_changed: bool | Absent = field(default=ABSENT)
    extra: dict[str, Any] = field(factory=dict)


@wire
class ResourcesCapability:
    """The server has resources, may let clients subscribe to them, and may notify that the list changed."""

    subscribe: bool | Absent = field(default=ABSENT)
    list_changed: bool | Absent = field(default=ABSENT)
    extra: dict[str, Any] = field(factory=dict)


@wire
class ToolsCapability:
    """The server has tools, and may notify that they changed."""

    list_changed: bool | Absent = field(default=ABSENT)
    extra: dict[str, Any] = field(factory=dict)


@wire
class ServerCapabilities:
    """What a server declares, in `InitializeResult` or `DiscoverResult`."""

    tools: ToolsCapability | Absent = field(default=ABSENT)
    resources: ResourcesCapability | Absent = field(default=ABSENT)
    prompts: PromptsCapability | Absent = field(default=ABSENT)
    completions: Settings | Absent = field(default=ABSENT, since=V2025_03_26)
    logging: Settings | Absent = field(default=ABSENT)
    tasks: TasksCapability | Absent = field(default=ABSENT, since=V2025_11_25, until=V2026_07_28)
    experimental: dict[str, Settings] | Absent = field(default=ABSENT)
    extensions: dict[str, Settings] | Absent = field(default=ABSENT, since=V2026_07_28)
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
        if found is ABSENT or found is None or found is False:
            return False
    return True


def _member(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return value.get(name, ABSENT)
    if not attrs.has(type(value)):
        return ABSENT
    for attribute in attrs.fields(type(value)):
        if wire_name(attribute) == name and name != "extra":
            return getattr(value, attribute.name)
    return value.extra.get(name, ABSENT) if hasattr(value, "extra") else ABSENT
