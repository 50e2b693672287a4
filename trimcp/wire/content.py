"""The kinds of content that results, prompts and sampling carry, each with the revision that brought it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, get_args

from trimcp.wire.common import Annotations, Icon, Meta, only_object
from trimcp.wire.fields import ABSENT, Absent, chooses, field, wire
from trimcp.wire.revisions import V2025_03_26, V2025_06_18, V2025_11_25, V2026_07_28


@wire
class TextContent:
    """Text, as a person or a model reads it."""

    text: str
    annotations: Annotations | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT, since=V2025_06_18)
    type: Literal["text"] = field(default="text", required=True)


Text = TextContent


@wire
class ImageContent:
    """A picture: `data` is base64 text."""

    data: str
    mime_type: str
    annotations: Annotations | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT, since=V2025_06_18)
    type: Literal["image"] = field(default="image", required=True)


@wire(since=V2025_03_26)
class AudioContent:
    """Sound: `data` is base64 text."""

    data: str
    mime_type: str
    annotations: Annotations | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT, since=V2025_06_18)
    type: Literal["audio"] = field(default="audio", required=True)


@wire
class TextResourceContents:
    """What a resource holds, when it is text."""

    uri: str
    text: str
    mime_type: str | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT, since=V2025_06_18)


@wire
class BlobResourceContents:
    """What a resource holds, when it is binary: `blob` is base64 text."""

    uri: str
    blob: str
    mime_type: str | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT, since=V2025_06_18)


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
    """A resource the server can read, which need not be in its list (server/tools, "Resource Links").

    An older peer gets its title, address and description as text.
    """

    name: str
    uri: str
    title: str | Absent = field(default=ABSENT)
    description: str | Absent = field(default=ABSENT)
    mime_type: str | Absent = field(default=ABSENT)
    size: int | Absent = field(default=ABSENT)
    icons: list[Icon] | Absent = field(default=ABSENT, since=V2025_11_25)
    annotations: Annotations | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT)
    type: Literal["resource_link"] = field(default="resource_link", required=True)


@wire
class EmbeddedResource:
    """A resource's contents, carried along."""

    resource: ResourceContents
    annotations: Annotations | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT, since=V2025_06_18)
    type: Literal["resource"] = field(default="resource", required=True)


ContentBlock: TypeAlias = TextContent | ImageContent | AudioContent | ResourceLink | EmbeddedResource
"""What tool results and prompt messages are made of."""


@wire(since=V2025_11_25)
class ToolUseContent:
    """A model asks, in a sampling answer, for a tool to be called (client/sampling, "Tool Use Content")."""

    id: str
    name: str
    input: dict[str, Any]
    meta: Meta | Absent = field(default=ABSENT)
    type: Literal["tool_use"] = field(default="tool_use", required=True)


@wire(since=V2025_11_25)
class ToolResultContent:
    """What that tool answered, for the next sampling request (client/sampling, "Tool Result Content")."""

    tool_use_id: str
    content: list[ContentBlock] = field(factory=list, required=True)
    structured_content: Any = field(default=ABSENT, narrow_until=V2026_07_28, narrow=only_object)
    is_error: bool | Absent = field(default=ABSENT)
    meta: Meta | Absent = field(default=ABSENT)
    type: Literal["tool_result"] = field(default="tool_result", required=True)


SamplingContent: TypeAlias = TextContent | ImageContent | AudioContent | ToolUseContent | ToolResultContent
"""What sampling messages are made of."""


def joined_text(parts: Iterable[Any]) -> str:
    """Return the text among blocks of content, or contents of a resource, joined with line ends."""
    return "\n".join(part.text for part in parts if isinstance(part, TextContent | TextResourceContents))
