"""What a server says of an app's page (the extension "MCP Apps"): what it may load and do, and how it is framed."""

from __future__ import annotations

from typing import Any

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


@wire(since=V2025_06_18)
class AppMeta:
    """The member `ui` in the `_meta` of a page.

    Attributes:
        csp: what it may reach.
        permissions: what it asks of the browser: `camera`, `microphone`, `geolocation`, `clipboardWrite`.
        domain: an origin of its own, in the form that the host wants.
        prefers_border: whether the host should draw a frame around it; None leaves that to the host.
    """

    csp: AppSources | None = field(default=None)
    permissions: dict[str, Any] | None = field(default=None)
    domain: str | None = field(default=None)
    prefers_border: bool | None = field(default=None)
