"""Tools: listing, calling, results (server/tools)."""

from __future__ import annotations

from typing import Any, Literal

from trimcp.wire.common import Cacheable, Icon, Meta, Params, Result, only_object
from trimcp.wire.content import ContentBlock, TextContent, joined_text
from trimcp.wire.fields import ABSENT, field, wire
from trimcp.wire.lifecycle import TaskMetadata
from trimcp.wire.revisions import V2025_03_26, V2025_06_18, V2025_11_25, V2026_07_28


@wire(since=V2025_03_26)
class ToolAnnotations:
    """Hints about a tool. Do not rely on them unless you trust the server."""

    title: str | None = field(default=None)
    read_only_hint: bool | None = field(default=None)
    destructive_hint: bool | None = field(default=None)
    idempotent_hint: bool | None = field(default=None)
    open_world_hint: bool | None = field(default=None)


@wire(since=V2025_11_25, until=V2026_07_28)
class ToolExecution:
    """Whether calls of a tool may become tasks (experimental)."""

    task_support: Literal["forbidden", "optional", "required"] | None = field(default=None)


@wire(since=V2025_11_25)
class ToolChoice:
    """Whether a model must, may or must not use tools in a sampling answer."""

    mode: Literal["auto", "required", "none"] | None = field(default=None)


@wire
class Tool:
    """One tool as listed. The schemas are the author's JSON, unchanged.

    Until 2025-11-25 an output schema had to describe an object; any other one is omitted for an older peer.
    """

    name: str
    input_schema: dict[str, Any]
    title: str | None = field(default=None, since=V2025_06_18)
    description: str | None = field(default=None)
    output_schema: dict[str, Any] | None = field(
        default=None,
        since=V2025_06_18,
        narrow_until=V2026_07_28,
        narrow=lambda schema: schema if schema.get("type") == "object" else ABSENT,
    )
    annotations: ToolAnnotations | None = field(default=None, since=V2025_03_26)
    icons: list[Icon] | None = field(default=None, since=V2025_11_25)
    execution: ToolExecution | None = field(default=None, since=V2025_11_25, until=V2026_07_28)
    meta: Meta | None = field(default=None, since=V2025_06_18)

    def visible_to(self, who: Literal["model", "app"]) -> bool:
        """Return whether a host may show it to its model, or let a page of this server call it ("MCP Apps").

        Both, unless the server says otherwise. A tool that is for pages alone must not be shown to a model.
        """
        visibility = self._ui.get("visibility")
        return who in visibility if isinstance(visibility, list) else True

    @property
    def app(self) -> str | None:
        """The `ui://` address of the page that shows its results, or None."""
        uri = self._ui.get("resourceUri")
        return uri if isinstance(uri, str) and uri.startswith("ui://") else None

    @property
    def _ui(self) -> dict[str, Any]:
        found = (self.meta or {}).get("ui")
        return found if isinstance(found, dict) else {}


@wire
class ListToolsResult(Cacheable):
    """One page of a server's tools."""

    tools: list[Tool]
    next_cursor: str | None = field(default=None)


@wire
class CallToolParams(Params):
    """A call. Answers to earlier questions are raw JSON: their type depends on the question."""

    name: str
    arguments: dict[str, Any] | None = field(default=None)
    input_responses: dict[str, dict[str, Any]] | None = field(default=None, since=V2026_07_28)
    request_state: str | None = field(default=None, since=V2026_07_28)
    task: TaskMetadata | None = field(default=None, since=V2025_11_25, until=V2026_07_28)


@wire
class CallToolResult(Result):
    """The result of a call (server/tools, "Tool Result").

    Until 2025-11-25 structured content had to be an object; any other is omitted for an older peer.
    """

    content: list[ContentBlock] = field(factory=list, required=True)
    structured_content: Any = field(default=ABSENT, since=V2025_06_18, narrow_until=V2026_07_28, narrow=only_object)
    is_error: bool | None = field(default=None)

    @property
    def text(self) -> str:
        """The text blocks of the content, joined with line ends; "" if there are none."""
        return joined_text(self.content)

    @property
    def data(self) -> Any:
        """The structured content as JSON values; None if the tool returned none, or the revision has none."""
        return None if self.structured_content is ABSENT else self.structured_content


def failed_call(text: str) -> CallToolResult:
    """Return the result of a failed call, with a text for the model (server/tools, "Error Handling")."""
    text = text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be sent
    return CallToolResult(content=[TextContent(text)], is_error=True)
