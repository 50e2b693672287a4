"""The pages of the command in a real browser: Debian's chromium, driven by Playwright in a thread beside the server."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import orjson
import pytest
import trio
from playwright.sync_api import Page, expect, sync_playwright

import trimcp
from tests.peers.serving import served
from trimcp.cli.top.command import Sockets
from trimcp.cli.web.site import serving
from trimcp.cli.web.trying import Trying
from trimcp.watch.admin import serve_admin

__all__ = ["HOSTILE", "PICTURES", "Answers", "frames_in_time", "inspected", "picture", "visit", "watched"]

HOSTILE = "<img src=x onerror=hit()><script>hit()</script><b id=hit>\u202e\"'`${hit()}javascript:hit()"
"""What a peer says that wants to be markup or a program."""

PICTURES = os.environ.get("TRIMCP_PICTURES") == "1"
"""Whether the pictures of docs/ are taken anew."""

_FOLDER = Path(__file__).parents[2] / "docs/howto/pages"
_PATIENCE = 60_000  # milliseconds; a busy machine draws slowly


@attrs.define
class Answers:
    """What a tool asks for."""

    name: str
    copies: int = 2


async def visit(url: str, walk: Callable[[Page], None]) -> list[str]:
    """Open a page and walk through it in a thread; return what the browser complained of."""
    return await trio.to_thread.run_sync(_visit, url, walk)


def _visit(url: str, walk: Callable[[Page], None]) -> list[str]:
    troubles: list[str] = []
    expect.set_options(timeout=_PATIENCE)
    with sync_playwright() as playwright:
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=root)
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 800})
            page.set_default_timeout(_PATIENCE)
            page.on("pageerror", lambda error: troubles.append(str(error)))
            page.on("console", lambda line: troubles.append(line.text) if line.type == "error" else None)
            page.goto(url)
            walk(page)
        finally:
            browser.close()
    return troubles


def picture(page: Page, name: str) -> None:
    """Take the pictures of a page that docs/ shows: light and dark, wide and narrow."""
    if not PICTURES:
        return
    for width, height in ((1200, 750), (400, 800)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # one of its literals
            kind = "wide" if width > 400 else "narrow"
            page.screenshot(path=_FOLDER / f"{name}-{kind}-{scheme}.png")
    page.set_viewport_size({"width": 1200, "height": 800})


_FRAME = 33.0  # milliseconds that nearly every frame may take
_NOTICED = 2.0  # milliseconds below which a task is none that draws
_TRACED = ["disabled-by-default-devtools.timeline", "__metadata"]


@contextmanager
def frames_in_time(page: Page) -> Iterator[None]:
    """Check that 19 of 20 tasks that draw what the block does take no longer than 33 ms each of the page's thread.

    It is the thread's own time, so it says the same on a machine that is busy with something else.
    """
    browser = page.context.browser
    assert browser is not None
    browser.start_tracing(page=page, categories=_TRACED)
    try:
        yield
    finally:
        events = orjson.loads(browser.stop_tracing())["traceEvents"]
    names = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    tasks = [one for one in events if one["name"].endswith("RunTask") and one["ph"] == "X" and "tdur" in one]
    drawing = [one["tdur"] / 1000 for one in tasks if names.get((one["pid"], one["tid"])) == "CrRendererMain"]
    taken = sorted(milliseconds for milliseconds in drawing if milliseconds > _NOTICED)
    assert taken  # it draws, and the browser tells of it
    assert taken[int(0.95 * len(taken))] <= _FRAME


@contextmanager
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have a folder of sockets of the test's own."""
    with TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@asynccontextmanager
async def watched(*servers: trimcp.Server[None]) -> AsyncIterator[str]:
    """Let `trimcp top --web` look at servers; yield the page's URL."""
    with pytest.MonkeyPatch.context() as patch, runtime(patch):
        async with (
            serve_admin(servers[0]),
            serve_admin(servers[-1]) if len(servers) > 1 else trio.open_nursery(),
            serving("top", Sockets(None).commands) as url,
        ):
            yield url


@asynccontextmanager
async def inspected(server: trimcp.Server[None], transport: str = "http") -> AsyncIterator[str]:
    """Let `trimcp inspect --web` try a server over the network; yield the page's URL."""
    async with served(server, transport) as place:
        trying = Trying(place.url)
        parts = trying.parts()
        client = trimcp.Client("trimcp", "1.0")
        client.logging(parts.log)
        client.elicitation(parts.answer)
        async with (
            client.connect(parts.watch(place.target())) as session,
            trying.serving(session) as url,
        ):
            yield url
