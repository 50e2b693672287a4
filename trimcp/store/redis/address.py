"""Where a Redis is, and as whom we speak to it: `redis://user:password@host:6379/0`, `rediss://...`, `unix:///path`."""

from __future__ import annotations

import ssl
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import attrs
import trio

from trimcp.errors import LocalError
from trimcp.support.addresses import host_port

_PORT: Final = 6379
_DATABASES: Final = 1_000_000


@attrs.frozen
class RedisAddress:
    """The parts of a URL. As text it is the URL without name and password."""

    host: str  # "" for a Unix socket
    port: int
    path: str  # of a Unix socket
    tls: bool
    user: str
    password: str = attrs.field(repr=False)
    database: int

    def __str__(self) -> str:
        if self.path:
            return f"unix://{self.path}"
        return f"redis{'s' if self.tls else ''}://{host_port(self.host, self.port)}/{self.database}"

    async def connect(self, context: ssl.SSLContext | None) -> trio.abc.Stream:
        """Return a connection. Raises OSError, also when TLS fails."""
        if self.path:
            return await trio.open_unix_socket(self.path)
        stream = await trio.open_tcp_stream(self.host, self.port)
        if not self.tls:
            return stream
        secured = trio.SSLStream(stream, context or ssl.create_default_context(), server_hostname=self.host)
        try:
            await secured.do_handshake()
        except BaseException as error:
            await trio.aclose_forcefully(stream)
            if isinstance(error, trio.BrokenResourceError):
                raise OSError(f"no TLS: {error.__cause__ or 'the connection was closed'}") from error
            raise
        return secured


def redis_address(url: str) -> RedisAddress:
    """Return what a URL says. Raises LocalError, whose text has no password."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    except ValueError:  # whose text may quote a part of a password that is not encoded
        raise LocalError("a URL of Redis is not valid: in a name or password / : @ are %2F %3A %40") from None
    unix = parts.scheme == "unix"
    database = query.pop("db", "0") if unix else parts.path.strip("/") or "0"
    wrong = ""
    if parts.scheme not in ("redis", "rediss", "unix"):
        wrong = "it begins with redis://, rediss:// or unix://"
    elif unix and (host or port or not parts.path.startswith("/")):
        wrong = "unix:// is followed by a path that begins with /"
    elif not unix and not host:
        wrong = "it names no host"
    elif port == 0:
        wrong = "its port is 0"
    elif not (database.isascii() and database.isdigit() and int(database[:7]) < _DATABASES):
        wrong = "a database is a number, as in redis://host/0" if not unix else "a database is a number, as in ?db=0"
    elif query or parts.fragment:
        wrong = "it has parts that mean nothing here"
    if wrong:
        raise LocalError(f"a URL of Redis is not valid: {wrong}")
    return RedisAddress(
        host="" if unix else host,
        port=port or _PORT,
        path=unquote(parts.path) if unix else "",
        tls=parts.scheme == "rediss",
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        database=int(database),
    )
