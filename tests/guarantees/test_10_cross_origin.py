"""Promise 10: pages of other origins and rebound host names get in nowhere; Origin and Host are parsed, not matched."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.guarantees.near import BINDS, doors, near
from tests.guarantees.report import figure
from tests.peers.serving import HTTP2, SOFTWARE
from trimcp.transports.http.peers.origins import Origins
from trimcp.transports.http.settings import HttpSettings

pytestmark = pytest.mark.slow
# Each host on every bind; what is behind a proxy is bound where that is.
OnEvery = pytest.mark.parametrize(("host", "bind"), [*itertools.product(SOFTWARE, BINDS), (HTTP2, "127.0.0.1")])


_STRANGE_ORIGINS = [
    "http://evil.example",
    "null",
    "http://localhost.evil.example",
    "http://localhost:1.evil.example",
    "http://localhost@evil.example",
    "https://localhost",
    "http://127.0.0.1.nip.io",
    "file://",
    "chrome-extension://abcdef",
    "http://localhost, http://evil.example",
    "",
]

_STRANGE_HOSTS = [
    "evil.example",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "0.0.0.0",
    "[::ffff:10.0.0.1]",
    "localhost#evil.example",
    "2130706433",
]

_FAMILIAR_HOSTS = ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]", "127.1.2.3"]
MORE_ORIGINS = [
    *("http://localhost.", "http://localhost:80evil", "http://localhost\\@evil.example", "http://[::1].evil.example"),
    *("http://localhost/", "http://LOCALHOST.EVIL.example", "http://127.0.0.1:80@evil.example", "localhost"),
    *("http:localhost", "//localhost", "http://localhost?x", "http://localhost#x", "http://0x7f.1.evil.example"),
    *("http://ｌｏｃａｌｈｏｓｔ.evil.example", "http://xn--localhost-.evil", "data:text/html", "about:blank", "NULL"),
]
OURS = ["http://localhost", "HTTP://LOCALHOST", "http://localhost:80"]


@OnEvery
async def test_no_page_of_another_origin_gets_in_on_any_bind(host: str, bind: str, tmp_path: Path) -> None:
    tried = [origin for origin in [*_STRANGE_ORIGINS, *MORE_ORIGINS] if origin.isascii()]
    let_in: list[tuple[str, list[int]]] = []
    async with near(host, bind=bind, folder=tmp_path) as server:
        for origin in tried:
            found = await server.statuses(doors(f"Origin: {origin}"))
            let_in += [] if found == [403] * 3 else [(origin, found)]
        for origin in OURS:
            assert await server.statuses(doors(f"Origin: {origin}")) == [200, 200, 101], origin
        assert await server.statuses(doors()) == [200, 200, 101], "who is no browser has none"
    figure(10, f"of {len(tried)} origins of strangers, let in", len(let_in), 0, "", f"{host}, {bind}")
    assert not let_in


@OnEvery
async def test_no_name_of_a_stranger_gets_in_on_loopback(host: str, bind: str, tmp_path: Path) -> None:
    """A page may have had its name rebound to this machine; no browser reaches a Unix socket."""
    names = [
        *_STRANGE_HOSTS,
        "localhost.evil",
        "localhost:80:80",
        "localhost:80@evil",
        "[::1",
        "127.0.0.1.",
        "128.0.0.1",
    ]
    let_in: list[tuple[str, list[int]]] = []
    async with near(host, bind=bind, folder=tmp_path) as server:
        for name in names if bind != "a Unix socket" else []:
            strange = doors(host=name)
            found = await server.statuses(strange)
            let_in += [] if set(found) <= {400, 403} else [(name, found)]
        for name in _FAMILIAR_HOSTS:
            known = doors(host=name)
            assert await server.statuses(known) == [200, 200, 101], name
    if bind != "a Unix socket":
        figure(10, f"of {len(names)} host names of strangers, let in", len(let_in), 0, "", f"{host}, {bind}")
    assert not let_in


@OnEvery
async def test_where_hosts_are_named_no_other_gets_in_on_any_bind(host: str, bind: str, tmp_path: Path) -> None:
    names = ["xmcp.example", "mcp.example.evil", "mcp.example:80x", "mcp.exampl", "example", "a.mcp.example"]
    origins = [
        *("http://app.example", "https://app.example:444", "https://app.example.evil", "https://xapp.example"),
        *("https://app.example@evil", "https://app.exampl", "https://sub.app.example", "null"),
    ]
    named = Origins(allow_origins=["https://app.example"], allowed_hosts=["mcp.example"])
    let_in: list[tuple[str, list[int]]] = []

    async with near(host, bind=bind, folder=tmp_path, settings=HttpSettings(origins=named)) as server:
        assert await server.statuses(doors("Origin: https://app.example", host="mcp.example")) == [200, 200, 101]
        assert await server.statuses(doors(host="MCP.example:99")) == [200, 200, 101]
        for name in names:
            found = await server.statuses(doors(host=name))
            let_in += [] if set(found) <= {400, 403} else [(name, found)]
        for origin in origins:
            found = await server.statuses(doors(f"Origin: {origin}", host="mcp.example"))
            let_in += [] if found == [403] * 3 else [(origin, found)]
    many = len(names) + len(origins)
    figure(10, f"of {many} neighbours of those that are named, let in", len(let_in), 0, "", f"{host}, {bind}")
    assert not let_in
