"""A real browser without a window: chromedriver, spoken to over plain HTTP (W3C, "WebDriver")."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import attrs
import trio

__all__ = ["Chromium", "chromium", "serving_pages"]

_PATIENCE = 120  # seconds; a busy machine takes long to start a browser
_OPTIONS = {
    "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions"],
}


@attrs.define(eq=False)
class Chromium:
    """One window of the browser."""

    url: str

    async def ask(self, method: str, path: str, **body: Any) -> Any:
        """Send a command and return its value."""
        return await trio.to_thread.run_sync(_ask, method, self.url + path, body, abandon_on_cancel=True)

    async def open(self, url: str) -> None:
        await self.ask("POST", "/url", url=url)

    async def run(self, function: str, *args: Any) -> Any:
        """Run the body of an async function in the page, with `args`, and return its result or {"failed": ...}."""
        script = f"""
            const done = arguments[arguments.length - 1];
            (async (...args) => {{ {function} }})(...arguments)
                .then(done, error => done({{failed: `${{error}}`}}));
        """
        return await self.ask("POST", "/execute/async", script=script, args=list(args))

    async def click(self, css: str) -> None:
        found = await self.ask("POST", "/element", using="css selector", value=css)
        await self.ask("POST", f"/element/{next(iter(found.values()))}/click")

    async def address(self) -> str:
        found: str = await self.ask("GET", "/url")
        return found


def _ask(method: str, url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode() if method == "POST" else None
    request = Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urlopen(request, timeout=_PATIENCE) as reply:
        return json.load(reply)["value"]


@asynccontextmanager
async def chromium() -> AsyncIterator[Chromium]:
    """Run a browser as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "HOME": folder}
        command = ["chromedriver", "--port=0"]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, env=environment, process_group=0) as driver:  # noqa: ASYNC220 -- to be killed
            assert driver.stdout is not None
            try:
                base = await trio.to_thread.run_sync(_base_of, driver, abandon_on_cancel=True)
                options = {**_OPTIONS, "args": [*_OPTIONS["args"], f"--user-data-dir={Path(folder) / 'profile'}"]}
                capabilities = {"alwaysMatch": {"goog:chromeOptions": options, "timeouts": {"script": 60_000}}}
                made = await Chromium(base).ask("POST", "/session", capabilities=capabilities)
                browser = Chromium(f"{base}/session/{made['sessionId']}")
                try:
                    yield browser
                finally:
                    with trio.move_on_after(20, shield=True):
                        await browser.ask("DELETE", "")
            finally:
                driver.kill()


def _base_of(driver: subprocess.Popen[bytes]) -> str:
    assert driver.stdout is not None
    for line in driver.stdout:
        if b"successfully on port" in line:
            return f"http://127.0.0.1:{int(line.split()[-1].rstrip(b'.'))}"
    raise AssertionError("chromedriver did not start")


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"<!doctype html><meta charset=utf-8><title>a page</title><p>of another origin"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@asynccontextmanager
async def serving_pages() -> AsyncIterator[str]:
    """Serve an empty page at every path of an origin of its own, and yield that origin."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
