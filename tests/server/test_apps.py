"""Pages of apps: what a server declares and lists of them, to clients that show them and to those that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trimcp
from trimcp.extensions.apps import AppSources
from trimcp.testing import connected, every_revision
from trimcp.wire.capabilities import ClientCapabilities

UI = "io.modelcontextprotocol/ui"
TYPE = "text/html;profile=mcp-app"
PAGE = "ui://jobs/progress"
HTML = "<!DOCTYPE html><title>Jobs</title>"
ORIGINS = {"connectDomains": ["https://api.example.com"]}
META = {"ui": {"csp": ORIGINS, "permissions": {"camera": {}}, "prefersBorder": True}}


def make_server() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("apps")
    server.ui(PAGE, HTML, csp=ORIGINS, permissions=["camera"], prefers_border=True)

    @server.tool(ui=PAGE, meta={"com.example/kept": 1})
    async def start(ctx: trimcp.Context[None]) -> str:
        """Start."""
        return "with a page" if ctx.capabilities.shows_apps else "text alone"

    @server.tool(ui=PAGE, visibility=["app"])
    async def refresh() -> str:
        """Refresh."""
        return "fresh"

    return server


def host(**settings: Any) -> trimcp.Client:
    return trimcp.Client("host", extensions={UI: settings or {"mimeTypes": [TYPE]}})


def has_extensions(revision: trimcp.Revision) -> bool:
    return revision.name >= "2025-06-18"


@every_revision
async def test_a_client_that_shows_pages_is_told_of_them(revision: trimcp.Revision) -> None:
    async with connected(make_server(), host(), revision=revision) as session:
        tools = {tool.name: tool for tool in await session.list_tools()}
        read = await session.read_resource(PAGE)
        said = (await session.call_tool("start")).text
        declared = session.server_capabilities.extensions
    [contents] = read.contents
    assert (contents.mime_type, read.text) == (TYPE, HTML)
    if not has_extensions(revision):  # nor have tools or contents a `_meta`
        assert (declared, list(tools), said) == (None, ["start"], "text alone")
        return
    assert declared == {UI: {}}
    assert contents.meta == META
    assert said == "with a page"
    assert tools["start"].meta == {"com.example/kept": 1, "ui": {"resourceUri": PAGE}}
    assert tools["start"].app == tools["refresh"].app == PAGE
    assert (tools["start"].visible_to("model"), tools["start"].visible_to("app")) == (True, True)
    assert tools["refresh"].meta == {"ui": {"resourceUri": PAGE, "visibility": ["app"]}}
    assert (tools["refresh"].visible_to("model"), tools["refresh"].visible_to("app")) == (False, True)


@every_revision
@pytest.mark.parametrize("settings", [None, {"mimeTypes": ["text/uri-list"]}, {"mimeTypes": TYPE}, {"other": 1}])
async def test_a_client_that_shows_none_has_no_tool_for_pages_in_its_list(
    revision: trimcp.Revision, settings: dict[str, Any] | None
) -> None:
    client = trimcp.Client("plain") if settings is None else host(**settings)
    async with connected(make_server(), client, revision=revision) as session:
        assert [tool.name for tool in await session.list_tools()] == ["start"]
        assert (await session.call_tool("start")).text == "text alone"
        assert (await session.call_tool("refresh")).text == "fresh"  # who knows the name may still call it


async def test_rights_and_pages_hide_a_tool_together() -> None:
    server = make_server()
    server.remove_tool("refresh")

    @server.tool(visibility=["app"], visible=lambda who: who.peer is not None and who.peer.name != "host")
    async def hidden() -> str:
        """Hide."""
        return ""

    for client, sees in ((host(), False), (trimcp.Client("other", extensions={UI: {"mimeTypes": [TYPE]}}), True)):
        async with connected(server, client) as session:
            assert ("hidden" in {tool.name for tool in await session.list_tools()}) is sees


async def test_a_tool_for_pages_declares_the_extension_though_the_server_has_no_page() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    server.add_tool(lambda: "fresh", name="refresh", visibility=["app"])
    async with connected(server, host()) as session:
        assert session.server_capabilities.extensions == {UI: {}}
        assert [tool.app for tool in await session.list_tools()] == [None]


async def test_a_page_of_a_file_is_read_for_each_request(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("<p>one", "utf-8")
    server: trimcp.Server[None] = trimcp.Server("s")
    server.ui(PAGE, file, csp=AppSources(resource_domains=["https://c.example"]), title="Jobs", domain="a.example")
    async with connected(server, host()) as session:
        assert (await session.read_resource(PAGE)).text == "<p>one"
        file.write_text("<p>two", "utf-8")
        assert (await session.read_resource(PAGE)).text == "<p>two"
        [listed] = await session.list_resources()
    assert (listed.title, listed.mime_type) == ("Jobs", TYPE)
    assert listed.meta == {"ui": {"csp": {"resourceDomains": ["https://c.example"]}, "domain": "a.example"}}


@every_revision
async def test_a_server_without_pages_declares_nothing(revision: trimcp.Revision) -> None:
    async with connected(trimcp.Server("s"), host(), revision=revision) as session:
        assert session.server_capabilities.extensions is None


WRONG: list[tuple[type[Exception], str, Callable[[trimcp.Server[None]], object]]] = [
    (ValueError, "begins with ui://", lambda s: s.ui("https://x", HTML)),
    (ValueError, "begins with ui://", lambda s: s.ui("ui://{x}", HTML)),
    (TypeError, "uri is a text", lambda s: s.ui(7, HTML)),  # type: ignore[arg-type]
    (ValueError, "for a file write Path", lambda s: s.ui("ui://x", "page.html")),
    (TypeError, "HTML text or the Path", lambda s: s.ui("ui://x", b"<p>")),  # type: ignore[arg-type]
    (TypeError, "in a dict it is 'connectDomains'", lambda s: s.ui("ui://x", HTML, csp={"connect_domains": []})),
    (TypeError, "csp", lambda s: s.ui("ui://x", HTML, csp={"connectDomains": "https://x"})),
    (ValueError, "permissions are some of", lambda s: s.ui("ui://x", HTML, permissions=["usb"])),  # type: ignore[list-item]
    (TypeError, "prefers_border", lambda s: s.ui("ui://x", HTML, prefers_border="yes")),  # type: ignore[arg-type]
    (TypeError, "no option 'tittle'", lambda s: s.ui("ui://x", HTML, tittle="x")),  # type: ignore[call-arg]
    (trimcp.LocalError, "already", lambda s: s.ui(PAGE, HTML)),
    (trimcp.LocalError, "add it with server.ui", lambda s: s.add_tool(lambda: 1, name="x", ui="ui://nowhere")),
    (TypeError, "ui is the address", lambda s: s.add_tool(lambda: 1, name="x", ui=Path("x"))),  # type: ignore[arg-type]
    (ValueError, "visibility is some of", lambda s: s.add_tool(lambda: 1, name="x", visibility=["user"])),  # type: ignore[list-item]
    (ValueError, "visibility is some of", lambda s: s.add_tool(lambda: 1, name="x", visibility=[])),
]


@pytest.mark.parametrize(("kind", "text", "add"), WRONG, ids=[text for _, text, _ in WRONG])
def test_what_is_wrong_is_told_where_it_is_written(
    kind: type[Exception], text: str, add: Callable[[trimcp.Server[None]], object]
) -> None:
    with pytest.raises(kind, match=text):
        add(make_server())


@pytest.mark.parametrize("meta", [None, {"ui": 7}, {"ui": {"visibility": "app"}}, {"ui": {"resourceUri": "https://x"}}])
def test_what_a_server_says_oddly_of_a_page_hides_no_tool(meta: dict[str, Any] | None) -> None:
    tool = trimcp.Tool(name="odd", input_schema={"type": "object"}, meta=meta)
    assert tool.visible_to("model")
    assert tool.app is None


@pytest.mark.parametrize("extensions", [None, {}, {UI: {}}, {UI: {"mimeTypes": 7}}])
def test_who_declares_no_type_shows_no_pages(extensions: dict[str, Any] | None) -> None:
    assert not ClientCapabilities(extensions=extensions).shows_apps
