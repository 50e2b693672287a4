"""A page on this machine alone: its files for whoever asks, and commands for whoever has the token.

The files hold nothing of anybody. A command is a POST of a JSON object to `/do/NAME`, answered with lines of JSON as
they come; a page that leaves cancels it. The token is in the fragment of the URL, which no browser sends, and comes in
a header that no page of another origin can set: docs/reference/admin.md.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import orjson
import trio

from trimcp.errors import McpError
from trimcp.net import serve_http
from trimcp.principal import Principal
from trimcp.server.server import Server
from trimcp.support.cleaning import log_crash
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.h1.sockets import open_tcp, url_of
from trimcp.transports.http.interfaces import Admitted, Handler, Head, HttpReply, HttpResponse
from trimcp.transports.http.peers.identity import Identity, bearer_tokens
from trimcp.transports.http.settings import HttpLimits, HttpSettings

log: logging.Logger = logging.getLogger("trimcp.web")

Send: TypeAlias = Callable[[Any], Awaitable[None]]
"""Sends one value to the page, and waits while it does not read."""

Command: TypeAlias = Callable[[Mapping[str, Any], Send], Awaitable[None]]
"""What a page may ask for: it gets the members of the request."""

_FOLDER: Final = Path(__file__).with_name("page")
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS: Final = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
}
_LINES: Final = ("Content-Type", "application/x-ndjson")
_LARGEST: Final = 4 * 1024 * 1024  # bytes of a request
_MOST: Final = 64  # commands at a time, over all tabs
_CONNECTIONS: Final = 128


def page_files(page: str) -> dict[str, tuple[str, bytes]]:
    """Return the files of a page by path, each with its type; `page` is the module that it begins with."""
    found = {}
    for file in (each for each in _FOLDER.rglob("*") if each.suffix in _TYPES):
        data = file.read_bytes()
        if file.name == "hooks.mjs":  # its one import is by a package's name, for which a page would need a map
            data = data.replace(b'from"preact"', b'from"/vendor/preact.mjs"')
        found[f"/{file.relative_to(_FOLDER).as_posix()}"] = _TYPES[file.suffix], data
    return {**found, "/": found["/index.html"], "/page.js": found[f"/{page}.js"]}


@asynccontextmanager
async def serving(page: str, commands: Mapping[str, Command], port: int = 0) -> AsyncIterator[str]:
    """Serve a page on a loopback address while the block runs; yield its URL with the token.

    The page is "top" or "inspect", and may ask for these commands. Raises LocalError if it cannot listen there.
    """
    token = secrets.token_urlsafe(32)
    files = page_files(page)
    async with open_service_nursery() as nursery:
        site = _PageSite(files, commands, bearer_tokens({token: "the page"}), nursery)
        settings = HttpSettings(
            path=None,
            sse_path=None,
            websocket_path=None,
            health=False,
            routes={**dict.fromkeys(files, site.file), **{f"/do/{name}": site.command for name in commands}},
            authenticate=site.identify,
        )
        sockets = await open_tcp("127.0.0.1", port)
        url = url_of(sockets[0])
        limits = HttpLimits(max_connections=_CONNECTIONS)
        serve = partial(serve_http, Server("trimcp"), sockets=sockets, settings=settings, limits=limits)
        await nursery.start(serve)
        yield f"{url}/#{token}"
        nursery.cancel_scope.cancel(reason="the page is served no more")


@attrs.define(eq=False)
class _PageSite:
    files: Mapping[str, tuple[str, bytes]]
    commands: Mapping[str, Command]
    known: Callable[[Head], Identity]
    nursery: trio.Nursery
    running: int = 0

    def identify(self, head: Head) -> Identity:
        """Return who asks: anybody may have the files, and the token alone lets command."""
        return Principal("anybody") if head.path in self.files else self.known(head)

    async def file(self, head: Head) -> HttpResponse:
        """Answer a request for a file."""
        if head.method not in ("GET", "HEAD"):
            return HttpResponse(405, (("Allow", "GET, HEAD"), *_HEADERS))
        kind, data = self.files[head.path]
        return HttpResponse(200, (("Content-Type", kind), *_HEADERS), data)

    async def command(self, head: Head) -> Admitted:
        """Admit a command."""
        if head.method != "POST":
            return HttpResponse(405, (("Allow", "POST"), *_HEADERS))
        if self.running >= _MOST:
            return HttpResponse(503, (("Retry-After", "1"), *_HEADERS))
        return _PageRequest(self, self.commands[head.path.removeprefix("/do/")])


@attrs.define(eq=False)
class _PageRequest(Handler):
    """One command on its way."""

    site: _PageSite
    command: Command
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)

    @property
    def max_body(self) -> int:
        return _LARGEST

    def start(self, body: bytes, reply: HttpReply) -> None:
        try:
            members = orjson.loads(body)
        except orjson.JSONDecodeError:
            members = None
        if not isinstance(members, dict):
            reply.send(HttpResponse(400, _HEADERS, b"a command is a JSON object"))
            return
        reply.start(HttpResponse(200, (_LINES, *_HEADERS)))
        self.site.running += 1
        self.site.nursery.start_soon(self._run, members, reply)

    def disconnected(self, slow: str | None = None) -> None:
        self.scope.cancel(reason="the page has left")

    async def _run(self, members: Mapping[str, Any], reply: HttpReply) -> None:
        async def send(value: Any) -> None:
            await reply.room()
            reply.write(orjson.dumps(value) + b"\n")

        try:
            with self.scope:
                try:
                    await self.command(members, send)
                except (McpError, ValueError) as error:
                    await send({"error": str(error), "code": getattr(error, "code", None)})
                except Exception as error:  # a bug here must not end the page, whose user may have much in it
                    log_crash(log, error, "a command of the page crashed")
                    await send({"error": "an internal error; the terminal says more"})
        finally:
            self.site.running -= 1
            reply.finish()
