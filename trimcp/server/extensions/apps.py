"""Pages that hosts show beside results of tools (the extension "MCP Apps"): as resources, and in the list of tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

from trimcp.extensions.apps import AppSources
from trimcp.support.bounds import check_members, check_truth
from trimcp.wire.capabilities import APP_TYPE
from trimcp.wire.content import TextResourceContents
from trimcp.wire.converter import converter_for
from trimcp.wire.given import given_name, given_payload
from trimcp.wire.revisions import LATEST

AppPermission = Literal["camera", "microphone", "geolocation", "clipboardWrite"]
"""What a page may ask of the browser that shows it."""

_SCHEME: Final = "ui://"
_WHO: Final = ("model", "app")


def app_page(
    uri: str,
    html: str | Path,
    csp: AppSources | Mapping[str, Any] | None,
    permissions: Iterable[AppPermission],
    prefers_border: bool | None,
    domain: str | None,
) -> tuple[Callable[[], TextResourceContents], dict[str, Any]]:
    """Return the function that reads a page, and the `_meta` of its listing.

    Raises TypeError and ValueError as `Server.ui` does.
    """
    if not given_name("uri", uri).startswith(_SCHEME) or "{" in uri:
        raise ValueError(
            f"the address of an app's page begins with ui://, such as 'ui://jobs/progress', not {uri!r:.60}"
        )
    if not isinstance(html, str | Path):
        raise TypeError(f"the page is HTML text or the Path of a file, not {html!r:.60}")
    if isinstance(html, str) and "<" not in html:
        raise ValueError(f"the page is HTML text; for a file write Path({html!r:.60})")
    wanted = [permissions] if isinstance(permissions, str) else check_members("permissions", permissions, str, "texts")
    if unknown := [each for each in wanted if each not in get_args(AppPermission)]:
        raise ValueError(f"permissions are some of {', '.join(get_args(AppPermission))}, not {unknown[0]!r:.60}")
    ui: dict[str, Any] = {}
    if csp is not None:
        ui["csp"] = converter_for(LATEST).dump(given_payload("csp", csp, AppSources))
    if wanted:
        ui["permissions"] = {each: {} for each in wanted}
    if domain is not None:
        ui["domain"] = given_name("domain", domain)
    if prefers_border is not None:
        check_truth("prefers_border", prefers_border)
        ui["prefersBorder"] = prefers_border
    meta = {"ui": ui} if ui else {}

    def page() -> TextResourceContents:
        text = html if isinstance(html, str) else html.read_text("utf-8")
        return TextResourceContents(uri=uri, text=text, mime_type=APP_TYPE, meta=meta or None)

    return page, meta


def app_link(uri: str | None, visibility: Iterable[str] | None) -> dict[str, Any]:
    """Return the member `ui` in the `_meta` of a tool. Raises TypeError and ValueError for what is none."""
    link: dict[str, Any] = {}
    if uri is not None:
        if not isinstance(uri, str):
            raise TypeError(f"ui is the address of a page, such as 'ui://jobs/progress', not {uri!r:.60}")
        link["resourceUri"] = given_name("ui", uri)
    if visibility is not None:
        who = [visibility] if isinstance(visibility, str) else check_members("visibility", visibility, str, "texts")
        if not who or any(each not in _WHO for each in who):
            raise ValueError(f"visibility is some of 'model' and 'app', not {visibility!r:.60}")
        link["visibility"] = [each for each in _WHO if each in who]
    return link
