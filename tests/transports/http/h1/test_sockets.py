"""Sockets to listen on: what they replace, what they refuse, what they leave behind."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import trustme

from trimcp.errors import LocalError
from trimcp.transports.http.h1.sockets import open_tcp, open_unix, peer_name, tls_context, url_of


def stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


def can_connect(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def test_a_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    stale(path)
    assert not can_connect(path)
    with open_unix(path) as sock:
        assert can_connect(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert url_of(sock) == "unix"
    assert list(tmp_path.iterdir()) == []


def test_a_unix_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_unix(path):
        with pytest.raises(LocalError, match="somebody else does"), open_unix(path):
            pass
        assert can_connect(path)


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(LocalError, match="no socket"), open_unix(path):
        pass
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(LocalError, match="no socket"), open_unix(link):
        pass
    assert path.read_text() == "precious"


def test_a_unix_socket_that_was_replaced_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_unix(path):
        path.unlink()
        stale(path)
    assert path.exists()


@pytest.mark.parametrize("name", ["x" * 200, "missing/s"])
def test_where_no_unix_socket_can_be(name: str, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot listen on"), open_unix(tmp_path / name):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_crash_in_the_block_removes_it_too(tmp_path: Path) -> None:
    with pytest.raises(KeyError), open_unix(tmp_path / "s"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


async def test_every_address_gets_the_same_port() -> None:
    sockets = await open_tcp(None, 0)
    try:
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        assert len({sock.family for sock in sockets}) == len(sockets)
    finally:
        for sock in sockets:
            sock.close()


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere connections do not inherit it, or there is no such thing"
)
async def test_connections_do_not_wait_for_a_peer_that_vanished() -> None:
    (sock,) = await open_tcp("127.0.0.1", 0, unacknowledged=7)
    with sock, socket.create_connection(sock.getsockname()):
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7_000


async def test_addresses_that_cannot_be_had() -> None:
    (sock,) = await open_tcp("127.0.0.1", 0)
    with sock, pytest.raises(LocalError, match="Address already in use"):
        await open_tcp("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(LocalError, match=r"cannot listen on 192\.0\.2\.1:0"):
        await open_tcp("192.0.2.1", 0)
    with pytest.raises(LocalError, match="cannot listen on"):
        await open_tcp("no-such-name.invalid", 0)


@pytest.mark.parametrize(
    ("address", "name", "local"),
    [
        (("127.0.0.1", 80), "127.0.0.1:80", True),
        (("127.1.2.3", 80), "127.1.2.3:80", True),
        (("::1", 80, 0, 0), "[::1]:80", True),
        (("::ffff:127.0.0.1", 80, 0, 0), "[::ffff:127.0.0.1]:80", True),
        (("10.0.0.1", 80), "10.0.0.1:80", False),
        (("2001:db8::1", 80, 0, 0), "[2001:db8::1]:80", False),
        (("128.127.0.1", 80), "128.127.0.1:80", False),
        ("", "unix", True),
        (b"\0abstract", "unix", True),
    ],
)
def test_names_of_peers(address: object, name: str, local: bool) -> None:
    assert peer_name(address) == (name, local)


def test_certificates(tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("localhost")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    tls_context(cert, key)
    with pytest.raises(LocalError, match=r"cannot use the certificate .*cert\.pem"):
        tls_context(cert)
    with pytest.raises(LocalError, match="No such file"):
        tls_context(tmp_path / "missing.pem")
    with pytest.raises(LocalError, match=r"cert\.pem' with the key '.*missing\.pem': No such file"):
        tls_context(cert, tmp_path / "missing.pem")
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(str(other))
    with pytest.raises(LocalError, match="cannot use the certificate"):
        tls_context(cert, other)
