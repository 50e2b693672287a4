"""Where a server is reached over HTTP: what is accepted as an address, and what of it is never shown."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trimcp.client.client import Connectable
from trimcp.errors import LocalError
from trimcp.transports.http.client.target import HttpServer


@pytest.mark.parametrize(
    "url",
    ["", "host/mcp", "ftp://host/", "http://", "http:///mcp", "http://host:0/", "http://host:70000/", "http://[::1"],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(LocalError, match="URL"):
        HttpServer(url)


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(LocalError, match="'websocket'"):
        HttpServer("http://host/", mode="websocket")


@pytest.mark.parametrize("name", ["", "a b", "a:", "na\nme", "ü"])
def test_what_cannot_be_the_name_of_a_header_is_refused(name: str) -> None:
    with pytest.raises(LocalError, match="name of a header"):
        HttpServer("http://host/", {name: "x"})


@pytest.mark.parametrize("value", ["secret\r\nX: y", "secret\x00", "sécret"])
def test_what_cannot_be_the_value_of_a_header_is_refused_and_not_quoted(value: str) -> None:
    with pytest.raises(LocalError, match="value of the header authorization") as caught:
        HttpServer("http://host/", {"authorization": value})
    assert "secret" not in str(caught.value)


def test_its_repr_shows_no_secret() -> None:
    server = HttpServer("https://user:pass@api.example:8443/key/12345?token=abc", {"Authorization": "Bearer xyz"})
    text = repr(server)
    assert "'https://api.example:8443/...'" in text
    for secret in ("user", "pass", "12345", "abc", "xyz"):
        assert secret not in text


def test_the_address_is_what_requests_are_sent_to() -> None:
    assert HttpServer("http://host").address == "http://host/"
    assert HttpServer("https://host:8443/mcp?x=1#part").address == "https://host:8443/mcp?x=1"


def test_a_unix_socket_is_named_in_the_url_or_beside_it() -> None:
    server = HttpServer("http+unix://%2Frun%2Fmcp%20server.sock/mcp")
    assert (server.socket, server.address) == ("/run/mcp server.sock", "http://localhost/mcp")
    server = HttpServer("http://anything/mcp", uds="/run/mcp.sock")
    assert (server.socket, server.address) == ("/run/mcp.sock", "http://anything/mcp")
    assert HttpServer("http://host/").socket is None


def test_the_same_server_has_the_same_key() -> None:
    assert HttpServer("http://host/a").key == HttpServer("http://host/a", {"x": "y"}).key
    different = [
        HttpServer("http://host/b"),
        HttpServer("http://host/a", uds="/s"),
        HttpServer("http://host/a", mode="sse"),
    ]
    assert len({each.key for each in different} | {HttpServer("http://host/a").key}) == 4


def test_it_is_a_target() -> None:
    assert isinstance(HttpServer("http://host/"), Connectable)


def test_httpx2_is_not_imported_unless_it_is_needed() -> None:
    code = """
import sys, trio
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.target import HttpServer

async def main():
    target = HttpServer("http://127.0.0.1:1/", {"a": "b"})
    async with target.connect(), target.exchanges() as http:
        try:
            async with http.open("GET", {}):
                pass
        except ExchangeBroken:
            print(*[name in sys.modules for name in ("httpx2", "httpcore2", "http.cookiejar")])

trio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]
