"""The content types of results, prompts and sampling, each with the revision that introduced it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, get_args

from trimcp.wire.common import Annotations, Icon, Meta, only_object
from trimcp.wire.fields import ABSENT, chooses, field, wire
from trimcp.wire.revisions import V2025_03_26, V2025_06_18, V2025_11_25, V2026_07_28


@wire
class TextContent:
    """Text, for a person or a model."""

    text: str
    annotations: Annotations | None = field(default=None)
    meta: Meta | None = field(default=None, since=V2025_06_18)
    type: Literal["text"] = field(default="text", required=True)


Text = TextContent


@wire
class ImageContent:
    """An image: `data` is base64 text."""

    data: str
    mime_type: str
    annotations: Annotations | None = field(default=None)
    meta: Meta | None = field(default=None, since=V2025_06_18)
    type: Literal["image"] = field(default="image", required=True)


@wire(since=V2025_03_26)
class AudioContent:
    """Audio: `data` is base64 text."""

    data: str
    mime_type: str
    annotations: Annotations | None = field(default=None)
    meta: Meta | None = field(default=None, since=V2025_06_18)
    type: Literal["audio"] = field(default="audio", required=True)


@wire
class TextResourceContents:
    """The contents of a text resource."""

    uri: str
    text: str
    mime_type: str | None = field(default=None)
    meta: Meta | None = field(default=None, since=V2025_06_18)


@wire
class BlobResourceContents:
    """The contents of a binary resource: `blob` is base64 text."""

    uri: str
    blob: str
    mime_type: str | None = field(default=None)
    meta: Meta | None = field(default=None, since=V2025_06_18)


ResourceContents: TypeAlias = TextResourceContents | BlobResourceContents


@chooses(*get_args(ResourceContents))
def _contents(value: dict[str, Any]) -> Any:
    if "text" in value:
        return TextResourceContents
    return BlobResourceContents if "blob" in value else None


def _link_as_text(link: Any) -> TextContent:
    named = f"{link.title or link.name}: {link.uri}"
    return TextContent(f"{named}\n{link.description}" if link.description else named, annotations=link.annotations)


@wire(since=V2025_06_18, instead=_link_as_text)
class ResourceLink:
    """A resource that the server can read, which need not be in its list (server/tools, "Resource Links").

    For an older peer its title, URI and description are sent as text.
    """

    name: str
    uri: str
    title: str | None = field(default=None)
    description: str | None = field(default=None)
    mime_type: str | None = field(default=None)
    size: int | None = field(default=None)
    icons: list[Icon] | None = field(default=None, since=V2025_11_25)
    annotations: Annotations | None = field(default=None)
    meta: Meta | None = field(default=None)
    type: Literal["resource_link"] = field(default="resource_link", required=True)


@wire
class EmbeddedResource:
    """A resource's contents, included in the message."""

    resource: ResourceContents
    annotations: Annotations | None = field(default=None)
    meta: Meta | None = field(default=None, since=V2025_06_18)
    type: Literal["resource"] = field(default="resource", required=True)


ContentBlock: TypeAlias = TextContent | ImageContent | AudioContent | ResourceLink | EmbeddedResource
"""The content types of tool results and prompt messages."""


@wire(since=V2025_11_25)
class ToolUseContent:
    """A model's call of a tool, in a sampling answer (client/sampling, "Tool Use Content")."""

    id: str
    name: str
    input: dict[str, Any]
    meta: Meta | None = field(default=None)
    type: Literal["tool_use"] = field(default="tool_use", required=True)


@wire(since=V2025_11_25)
class ToolResultContent:
    """The result of that call, for the next sampling request (client/sampling, "Tool Result Content")."""

    tool_use_id: str
    content: list[ContentBlock] = field(factory=list, required=True)
    structured_content: Any = field(default=ABSENT, narrow_until=V2026_07_28, narrow=only_object)
    is_error: bool | None = field(default=None)
    meta: Meta | None = field(default=None)
    type: Literal["tool_result"] = field(default="tool_result", required=True)


SamplingContent: TypeAlias = TextContent | ImageContent | AudioContent | ToolUseContent | ToolResultContent
"""The content types of sampling messages."""


def joined_text(parts: Iterable[Any]) -> str:
    """Return the text among content blocks, or among the contents of a resource, joined with line ends."""
    return "\n".join(part.text for part in parts if isinstance(part, TextContent | TextResourceContents))
