"""The page of examples/dashboard.py in a small host of ours: the messages of MCP Apps between a page and its host."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import trio
from playwright.sync_api import Page, expect

import trimcp
from tests.browser.pages import PICTURES, visit
from tests.examples.test_examples import load
from trimcp.testing import connected

pytestmark = pytest.mark.needs("chromium")

APPS = {"io.modelcontextprotocol/ui": {"mimeTypes": ["text/html;profile=mcp-app"]}}
REFUSED = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'none';"
    " frame-src 'none'; object-src 'none'; base-uri 'self'"
)
"""What a host allows a page that declares no origins."""

HOST = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:16px;font:14px system-ui">
<style>iframe { width: 100%; height: 60px; border: 1px solid #888; border-radius: 8px }</style>
<p>Hash 40 items for me.</p><iframe id="view" sandbox="allow-scripts"></iframe>
<script>
"use strict";
const view = document.getElementById("view"), seen = [];
window.seen = seen;
window.send = (message) => view.contentWindow.postMessage({ jsonrpc: "2.0", ...message }, "*");
window.open_view = (html) => { view.srcdoc = html; };
addEventListener("message", async ({ source, data }) => {
  if (source !== view.contentWindow) return;
  seen.push(data.method ?? `answer ${data.id}`);
  if (data.method === "ui/initialize") {
    window.wanted = data.params;
    send({ id: data.id, result: { protocolVersion: "2026-01-26", hostInfo: { name: "host", version: "1" },
      hostCapabilities: window.lets_call ? { serverTools: {} } : {}, hostContext: { theme: "light" } } });
  } else if (data.method === "tools/call") {
    const [result, error] = await window.call_tool(data.params);
    send(error ? { id: data.id, error } : { id: data.id, result });
  } else if (data.method === "ui/notifications/size-changed") {
    view.style.height = `${data.params.height}px`;
  }
});
</script>"""


async def shown(walk: Any, *, lets_call: bool = True) -> list[str]:
    """Show the page of `batch` in the host, which calls tools of a session; return what the browser complained of."""
    dashboard = load("dashboard")
    done: list[trimcp.CallToolResult] = []
    client = trimcp.Client("host", extensions=APPS)
    async with connected(dashboard.server, client) as session, trio.open_nursery() as nursery:
        tools = {tool.name: tool for tool in await session.list_tools()}
        assert tools["batch"].app is not None
        contents = (await session.read_resource(tools["batch"].app)).contents[0]

        async def forward(params: dict[str, Any]) -> tuple[Any, Any]:
            if not tools[params["name"]].visible_to("app"):
                return None, {"code": -32602, "message": "this tool is not for pages"}
            return trimcp.to_json(await session.call_tool(params["name"], params["arguments"])), None

        async def batch() -> None:
            done.append(await session.call_tool("batch", {"items": 40, "mib": 1}))

        held = threading.Event()
        dashboard.hash_block = lambda number, mib: (number < 10 or held.wait(60), b"")[1]
        token = trio.lowlevel.current_trio_token()

        def go(page: Page) -> None:
            page.expose_function("call_tool", lambda params: trio.from_thread.run(forward, params, trio_token=token))
            page.set_content(HOST)
            page.evaluate("lets => { window.lets_call = lets }", lets_call)
            html = f'<meta http-equiv="Content-Security-Policy" content="{REFUSED}">{contents.text}'
            page.evaluate("html => open_view(html)", html)
            walk(page, held, done)

        nursery.start_soon(batch)
        try:
            troubles = await visit("about:blank", go)
        finally:
            held.set()
    return troubles


async def test_the_page_of_a_long_job_shows_its_progress_while_it_runs() -> None:
    def walk(page: Page, held: threading.Event, done: list[trimcp.CallToolResult]) -> None:
        view = page.frame_locator("#view")
        expect(view.get_by_text("10 of 40, running")).to_be_visible()
        assert page.evaluate("seen.slice(0, 2)") == ["ui/initialize", "ui/notifications/initialized"]
        assert page.evaluate("wanted.protocolVersion") == "2026-01-26"
        page.evaluate("send({ method: 'ui/notifications/tool-input', params: { arguments: { items: 40 } } })")
        expect(view.get_by_text("working on 40 items")).to_be_visible()
        if PICTURES:
            page.set_viewport_size({"width": 800, "height": 260})
            page.screenshot(path="docs/howto/pages/app-jobs.png")
        held.set()
        expect(view.get_by_text("40 of 40, finished")).to_be_visible()
        [result] = done
        page.evaluate(
            "result => send({ method: 'ui/notifications/tool-result', params: result })", trimcp.to_json(result)
        )
        expect(view.get_by_role("status")).to_have_text(re.compile("job 1 is done: 40 items, digest [0-9a-f]{12}"))
        page.evaluate("send({ id: 7, method: 'ui/resource-teardown', params: { reason: 'gone' } })")
        page.wait_for_function("seen.includes('answer 7')")
        assert page.locator("#view").evaluate("view => view.clientHeight") > 60

    assert await shown(walk) == []


async def test_the_page_says_what_a_host_does_not_allow_and_runs_no_text_as_a_program() -> None:
    hostile = "<img src=x onerror=document.title='hit'>"

    def walk(page: Page, held: threading.Event, done: list[trimcp.CallToolResult]) -> None:
        view = page.frame_locator("#view")
        expect(view.get_by_text("this host lets no page call tools")).to_be_visible()
        page.evaluate("text => send({ method: 'ui/notifications/tool-cancelled', params: { reason: text } })", hostile)
        expect(view.get_by_role("status")).to_contain_text("onerror")
        assert view.locator("img").count() == 0

    assert await shown(walk, lets_call=False) == []
