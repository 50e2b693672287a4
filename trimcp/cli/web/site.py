"""A page on this machine alone: its files for whoever asks, and commands for whoever has the token.

The files hold nothing of anybody. A command (`watch.commands`) is a POST to `/do/NAME`. The token is in the fragment of
the URL, which no browser sends, and comes in a header that no page of another origin can set: docs/reference/admin.md.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import attrs

from trimcp.net import serve_http
from trimcp.principal import Principal
from trimcp.server.server import Server
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.h1.sockets import open_tcp, url_of
from trimcp.transports.http.interfaces import Admitted, Head, HttpResponse
from trimcp.transports.http.peers.identity import Identity, bearer_tokens
from trimcp.transports.http.settings import HttpLimits, HttpSettings
from trimcp.watch.commands import Command, RunningCommands

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
        running = RunningCommands(nursery, _HEADERS, _LARGEST, _MOST)
        site = _PageSite(files, commands, bearer_tokens({token: "the page"}), running)
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
    running: RunningCommands

    def identify(self, head: Head) -> Identity:
        """Return who asks: anybody may have the files, and the token alone lets command."""
        return Principal("anybody") if head.path in self.files else self.known(head)

    async def file(self, head: Head) -> HttpResponse:
        if head.method not in ("GET", "HEAD"):
            return HttpResponse(405, (("Allow", "GET, HEAD"), *_HEADERS))
        kind, data = self.files[head.path]
        return HttpResponse(200, (("Content-Type", kind), *_HEADERS), data)

    async def command(self, head: Head) -> Admitted:
        command = self.commands[head.path.removeprefix("/do/")]
        return self.running.admit(head, lambda members: command)
