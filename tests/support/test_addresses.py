"""Which hosts are this machine, asked wherever it matters, and how a host and a port are written."""

from __future__ import annotations

import pytest

from trimcp.auth.metadata import secure_url
from trimcp.support.addresses import host_port, is_loopback, is_loopback_address
from trimcp.transports.http.h1.sockets import peer_name

HERE = ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1"]
ELSEWHERE = ["192.0.2.1", "0.0.0.0", "::", "::1234:1", "2001:db8::1", "::ffff:192.0.2.1"]


@pytest.mark.parametrize(("host", "here"), [*((host, True) for host in HERE), *((host, False) for host in ELSEWHERE)])
def test_an_address_is_this_machines_or_not_wherever_that_is_asked(host: str, here: bool) -> None:
    assert is_loopback_address(host) is here
    assert is_loopback(host) is here
    assert peer_name((host, 1)) == (host_port(host, 1), here)
    assert secure_url(f"http://{host_port(host, 8000)}/mcp") is here


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("localhost", True),
        ("app.localhost", True),
        ("[::1]", True),
        ("[127.0.0.1]", False),
        ("localhost.example.com", False),
        ("127.example.com", False),
        ("", False),
    ],
)
def test_a_name_is_this_machines_or_not(name: str, here: bool) -> None:
    assert is_loopback(name) is here


def test_text_that_is_no_address_is_neither() -> None:
    assert is_loopback_address("localhost") is None


@pytest.mark.parametrize(("host", "written"), [("192.0.2.1", "192.0.2.1:80"), ("::1", "[::1]:80"), ("a", "a:80")])
def test_a_host_and_a_port_are_written_as_urls_have_them(host: str, written: str) -> None:
    assert host_port(host, 80) == written
