"""What a server says of an app's page (the extension "MCP Apps")."""

from __future__ import annotations

from trimcp.wire.fields import field, wire
from trimcp.wire.revisions import V2025_06_18


@wire(since=V2025_06_18)
class AppSources:
    """The origins that a page may reach, such as `https://api.example.com`; without any, it reaches none.

    Attributes:
        connect_domains: for requests of its program.
        resource_domains: for images, scripts, styles, fonts and media.
        frame_domains: for pages inside it.
        base_uri_domains: for its base address.
    """

    connect_domains: list[str] | None = field(default=None)
    resource_domains: list[str] | None = field(default=None)
    frame_domains: list[str] | None = field(default=None)
    base_uri_domains: list[str] | None = field(default=None)
