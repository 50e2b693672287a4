"""What targets on a network have in common: their URLs and headers, connecting, and texts for what went wrong."""

from __future__ import annotations

import os
import ssl
from collections.abc import Collection, Mapping
from http import HTTPStatus
from socket import gaierror
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

import trio

from trimcp.bounds import is_token
from trimcp.errors import ConnectionLost, LocalError

_LONGEST_PART: Final = 16
_FRAMING: Final = ("content-length", "transfer-encoding")  # they say where a message ends, which only its sender knows


def checked_url(url: str, schemes: Collection[str], needed: str) -> SplitResult:
    """Return the parts of a server's URL.

    Raises:
        LocalError: it is no URL, names no host or has another scheme; for these two the text is `needed`.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise LocalError(f"this is no URL of a server: {error}") from None
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        raise LocalError(needed)
    return parts


def socket_path(url: str, uds: str | None) -> str | None:
    """Return the path of the Unix socket that a URL like "http+unix://%2Fpath/" names, or else `uds`."""
    parts = urlsplit(url)
    return unquote(parts.netloc.rpartition("@")[2]) if parts.scheme.endswith("+unix") else uds


def checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return headers by lower-case name.

    Raises:
        LocalError: a name or value cannot be sent. Values may be secrets, so the text does not quote them.
    """
    checked: dict[str, str] = {}
    for name, value in (headers or {}).items():
        if not is_token(name):
            raise LocalError(f"{name!r:.60} cannot be the name of a header")
        if not (value.isascii() and value.isprintable()):
            raise LocalError(f"the value of the header {name} must be a string of printable ASCII characters")
        if name.lower() in _FRAMING:
            raise LocalError(f"the header {name} is set for each request and cannot be given")
        checked[name.lower()] = value
    return checked


def masked_url(url: str, *, path: bool = False) -> str:
    """Return a URL without what may be secret in it: user, path, query and fragment.

    With `path` the path stays, where the person who typed it is to tell one URL from another.
    """
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    place = f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}"
    return f"{place}{parts.path or '/'}{'?...' if parts.query else ''}" if path else f"{place}/..."


def shown_url(url: str) -> str:
    """Return a URL as an error names it: without credentials and query, and "..." for what may be a key in its path.

    A part of the path is shown if it has at most 16 characters, and no more than three digits among them.
    """
    parts = urlsplit(url).path.split("/")
    harmless = [len(part) <= _LONGEST_PART and sum(map(str.isdigit, part)) <= 3 for part in parts]
    path = "/".join([part if shown else "..." for part, shown in zip(parts, harmless, strict=True)])
    return masked_url(url).removesuffix("/...") + path.encode("ascii", "backslashreplace").decode()


def status_text(status: int) -> str:
    """Return a status with its usual name; the server's own words for it are not quoted."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


async def dial(
    host: str, port: int, *, path: str | None, tls: ssl.SSLContext | None, timeout: float, trusting: str
) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
    """Open a stream to a server.

    Args:
        host, port: where it listens.
        path: of the Unix socket to connect to in place of these, or None.
        tls: what to trust; None for no TLS.
        timeout: seconds it may take, the handshake of TLS included.
        trusting: how a user says which certificates to trust.

    Raises:
        ConnectionLost: there is none; the text says why, without the address.
    """
    stream: trio.SocketStream | None = None
    try:
        with trio.fail_after(timeout):
            if path is None:
                stream = await trio.open_tcp_stream(host, port)
            else:
                stream = await trio.open_unix_socket(path)
            if tls is None:
                return stream
            secure = trio.SSLStream(stream, tls, server_hostname=host, https_compatible=True)
            await secure.do_handshake()
            return secure
    except BaseException as error:  # cancelled included: a stream that nobody gets must not stay open
        if stream is not None:
            stream.socket.close()
        if isinstance(error, trio.TooSlowError):
            raise ConnectionLost(f"no connection within {timeout:g} seconds") from None
        if isinstance(error, trio.BrokenResourceError | OSError):
            raise ConnectionLost(unreachable(error, trusting) or "the connection broke while TLS began") from error
        raise


def unreachable(error: BaseException, trusting: str) -> str | None:
    """Say why no connection came about, and what to look at.

    Args:
        error: what was raised; the reason may be some causes down.
        trusting: how a user says which certificates to trust.

    Returns:
        Text without the address, or None if none of the causes is one of the network's or of TLS.
    """
    told: BaseException | None = error
    while told is not None:
        if isinstance(told, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted ({told.verify_message}); {trusting}"
        if isinstance(told, ssl.SSLError):
            return f"TLS failed ({told.reason}); does the server speak TLS on this port?"
        if isinstance(told, gaierror):
            return f"no address is known for this host ({told.strerror})"
        if isinstance(told, OSError):
            # One attempt for each address of the host, and most often one reason.
            reasons = sorted({_reason(each) for each in _leaves(told.__cause__ or told)})
            return f"{'; '.join(reasons)}; is the server running, and is this its address?"
        told = told.__cause__ or told.__context__
    return None


def _reason(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else str(error)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]
