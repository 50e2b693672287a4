"""Opens listening sockets: TCP on one or all addresses, and Unix sockets that replace stale ones. Builds TLS contexts.

The caller closes the sockets.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import ssl
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, TypeAlias

import trio

from trimcp.errors import LocalError
from trimcp.support.addresses import host_port, is_loopback_address

_Addresses: TypeAlias = Sequence[tuple[int, tuple[object, ...]]]

ALPN: Final = ["h2", "http/1.1"]
"""The protocols that a server offers over TLS (RFC 7301)."""

_TRIES: Final = 10  # attempts to find a port that is free on every address


async def open_tcp(
    host: str | None, port: int, *, backlog: int = 1_024, unacknowledged: float = 60.0
) -> list[socket.socket]:
    """Return listening sockets, one for each address of `host` (None: of this machine), all on the same port.

    `unacknowledged`: seconds after which the system ends a connection whose peer does not acknowledge data (Linux). The
    default of Linux is a quarter of an hour. Raises LocalError: the address is not ours, is taken, or is not permitted;
    the text says which.
    """
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
        sockets = _open_all(addresses, port, backlog)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise LocalError(f"cannot listen on {host or '*'}:{port}: {reason}") from error
    for sock in sockets:
        if sys.platform == "linux":
            # Accepted connections inherit it.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unacknowledged * 1_000))
    return sockets


def _open_all(addresses: _Addresses, port: int, backlog: int) -> list[socket.socket]:
    for _ in range(_TRIES if port == 0 else 0):
        try:
            return _open_each(addresses, port, backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _open_each(addresses, port, backlog)


def _open_each(addresses: _Addresses, port: int, backlog: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, address in addresses:
            try:
                place = (address[0], port, *address[2:])
                sockets.append(socket.create_server(place, family=family, backlog=backlog))
            except OSError as error:
                # A name may have an address of a family that this machine does not use.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error
            else:
                port = sockets[-1].getsockname()[1]
        if missing is not None and not sockets:
            raise missing
    except BaseException:  # an interrupt too: sockets that are not returned must be closed
        for sock in sockets:
            sock.close()
        raise
    finally:
        missing = None  # breaks the reference cycle between this frame and the exception
    return sockets


@contextmanager
def open_unix(path: str | os.PathLike[str], *, mode: int = 0o600, backlog: int = 1_024) -> Iterator[socket.socket]:
    """Listen on a Unix socket for as long as the block runs, then remove it.

    A stale socket is replaced atomically: a client finds the old one or the new one. `mode` decides who may connect:
    whoever may write to the socket. Raises LocalError: another process listens there, or the path is no socket, is too
    long (about 95 bytes) or not writable.
    """
    path = os.fspath(path)
    if not hasattr(socket, "AF_UNIX"):
        raise LocalError("this system has no Unix sockets")
    _check_free(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            made = _put(sock, path, mode, backlog)
        except OSError as error:
            raise LocalError(f"cannot listen on {path!r}: {error.strerror or error}") from error
        try:
            yield sock
        finally:
            with suppress(OSError):
                if os.path.samestat(made, os.stat(path)):  # otherwise another process has replaced it
                    os.unlink(path)


def _put(sock: socket.socket, path: str, mode: int, backlog: int) -> os.stat_result:
    """Listen under another name first, so that no client finds a socket that is not ready or has the wrong mode."""
    temporary = f"{path}.{secrets.token_hex(4)}"
    sock.bind(temporary)
    try:
        os.chmod(temporary, mode)
        sock.listen(backlog)
        made = os.stat(temporary)
        os.rename(temporary, path)
    except BaseException:  # an interrupt too: the temporary name must not stay behind
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return made


def _check_free(path: str) -> None:
    try:
        found = os.lstat(path)
    except OSError:
        return  # any error is reported when the socket is made
    if not stat.S_ISSOCK(found.st_mode):
        raise LocalError(f"cannot listen on {path!r}: there is something else that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        except FileNotFoundError:
            return
        except OSError:
            pass  # its queue is full, or we may not connect
    raise LocalError(f"cannot listen on {path!r}: somebody else does")


def tls_context(certfile: str | os.PathLike[str], keyfile: str | os.PathLike[str] | None = None) -> ssl.SSLContext:
    """Return a context for a server that speaks HTTP/2 and HTTP/1.1 over TLS 1.2 or newer, from PEM files.

    `certfile`: the chain of certificates up to the authority's, and the key unless it is in `keyfile`. Raises
    LocalError: a file is missing or invalid.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(ALPN)
    try:
        context.load_cert_chain(certfile, keyfile)
    except OSError as error:  # includes ssl.SSLError
        reason = error.strerror or error
        key = "" if keyfile is None else f" with the key {os.fspath(keyfile)!r}"
        raise LocalError(f"cannot use the certificate {os.fspath(certfile)!r}{key}: {reason}") from error
    return context


def url_of(sock: socket.socket, *, secure: bool = False) -> str:
    """Return the URL of a socket: "http://127.0.0.1:8000", "https://[::]:443". For a Unix socket, without its path."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return "unix"
    return f"{'https' if secure else 'http'}://{host_port(*sock.getsockname()[:2])}"


def peer_name(address: object) -> tuple[str, bool]:
    """Return a peer's address for logs, and whether the peer is on this machine."""
    if not isinstance(address, tuple):
        return "unix", True
    return host_port(*address[:2]), is_loopback_address(address[0]) is True
