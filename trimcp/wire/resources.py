"""Resources: listing, reading and subscribing (server/resources)."""

from __future__ import annotations

from typing import Any

from trimcp.wire.common import Annotations, Cacheable, Icon, Meta, Params
from trimcp.wire.content import ResourceContents, joined_text
from trimcp.wire.fields import field, wire
from trimcp.wire.revisions import V2025_06_18, V2025_11_25, V2026_07_28


@wire
class Resource:
    """One resource as listed; `size` is in bytes, before any base64."""

    uri: str
    name: str
    title: str | None = field(default=None, since=V2025_06_18)
    description: str | None = field(default=None)
    mime_type: str | None = field(default=None)
    size: int | None = field(default=None)
    annotations: Annotations | None = field(default=None)
    icons: list[Icon] | None = field(default=None, since=V2025_11_25)
    meta: Meta | None = field(default=None, since=V2025_06_18)


@wire
class ResourceTemplate:
    """A family of resources, by an RFC 6570 template of their URIs."""

    uri_template: str
    name: str
    title: str | None = field(default=None, since=V2025_06_18)
    description: str | None = field(default=None)
    mime_type: str | None = field(default=None)
    annotations: Annotations | None = field(default=None)
    icons: list[Icon] | None = field(default=None, since=V2025_11_25)
    meta: Meta | None = field(default=None, since=V2025_06_18)


@wire
class ListResourcesResult(Cacheable):
    """One page of a server's resources."""

    resources: list[Resource]
    next_cursor: str | None = field(default=None)


@wire
class ListResourceTemplatesResult(Cacheable):
    """One page of a server's resource templates."""

    resource_templates: list[ResourceTemplate]
    next_cursor: str | None = field(default=None)


@wire
class ReadResourceParams(Params):
    """Which resource to read; answers to earlier questions are raw JSON, as in `CallToolParams`."""

    uri: str
    input_responses: dict[str, dict[str, Any]] | None = field(default=None, since=V2026_07_28)
    request_state: str | None = field(default=None, since=V2026_07_28)


@wire
class ReadResourceResult(Cacheable):
    """The contents of a resource: one item, or several if it stands for many."""

    contents: list[ResourceContents]

    @property
    def text(self) -> str:
        """The text contents, joined with line ends; "" if there are none."""
        return joined_text(self.contents)


@wire(until=V2026_07_28)
class SubscribeParams(Params):
    """Which resource to subscribe to or unsubscribe from, in the legacy era."""

    uri: str


@wire
class ResourceUpdatedParams(Params):
    """Which resource that the client subscribed to has changed."""

    uri: str
