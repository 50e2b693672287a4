"""Resources: what a server lists, what a client reads and watches (server/resources)."""

from __future__ import annotations

from typing import Any

from trimcp.wire.common import Annotations, Cacheable, Icon, Meta, Params
from trimcp.wire.content import ResourceContents, joined_text
from trimcp.wire.fields import ABSENT, Absent, field, wire
from trimcp.wire.revisions import V2025_06_18, V2025_11_25, V2026_07_28


@wire
class Resource:
    """One resource as listed; `size` is in bytes, before any base64."""

    uri: str
    name: str
    title: str | Absent = field(default=ABSENT, since=V2025_06_18)
    description: str | Absent = field(default=ABSENT)
    mime_type: str | Absent = field(default=ABSENT)
    size: int | Absent = field(default=ABSENT)
    annotations: Annotations | Absent = field(default=ABSENT)
    icons: list[Icon] | Absent = field(default=ABSENT, since=V2025_11_25)
    meta: Meta | Absent = field(default=ABSENT, since=V2025_06_18)


@wire
class ResourceTemplate:
    """A family of resources, by an RFC 6570 template of their addresses."""

    uri_template: str
    name: str
    title: str | Absent = field(default=ABSENT, since=V2025_06_18)
    description: str | Absent = field(default=ABSENT)
    mime_type: str | Absent = field(default=ABSENT)
    annotations: Annotations | Absent = field(default=ABSENT)
    icons: list[Icon] | Absent = field(default=ABSENT, since=V2025_11_25)
    meta: Meta | Absent = field(default=ABSENT, since=V2025_06_18)


@wire
class ListResourcesResult(Cacheable):
    """One page of a server's resources."""

    resources: list[Resource]
    next_cursor: str | Absent = field(default=ABSENT)


@wire
class ListResourceTemplatesResult(Cacheable):
    """One page of a server's resource templates."""

    resource_templates: list[ResourceTemplate]
    next_cursor: str | Absent = field(default=ABSENT)


@wire
class ReadResourceParams(Params):
    """Which resource to read; answers to earlier questions stay raw JSON, as in `CallToolParams`."""

    uri: str
    input_responses: dict[str, dict[str, Any]] | Absent = field(default=ABSENT, since=V2026_07_28)
    request_state: str | Absent = field(default=ABSENT, since=V2026_07_28)


@wire
class ReadResourceResult(Cacheable):
    """What the resource holds: one piece, or several for one that stands for many."""

    contents: list[ResourceContents]

    @property
    def text(self) -> str:
        """The contents that are text, joined with line ends; "" if none are."""
        return joined_text(self.contents)


@wire(until=V2026_07_28)
class SubscribeParams(Params):
    """Which resource to watch, or to watch no longer, in the legacy era."""

    uri: str


@wire
class ResourceUpdatedParams(Params):
    """Which watched resource changed."""

    uri: str
