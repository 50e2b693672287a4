"""A Redis as a store uses it: a connection for commands, and one that waits for what others add to streams."""

from __future__ import annotations

import logging
import os
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Final

import attrs
import trio

from trimcp.store.redis.address import RedisAddress, redis_address
from trimcp.store.redis.connection import RedisConnection, RedisLimits, RedisLost, RedisScript
from trimcp.store.redis.resp import NotOurs, Part, RedisRefusal
from trimcp.support.cleaning import one_line
from trimcp.support.nurseries import open_service_nursery

log: logging.Logger = logging.getLogger("trimcp.store")

_BLOCK: Final = 5.0  # seconds that one question waits
_AT_ONCE: Final = 100  # entries of each stream in one reply
_PAUSE: Final = 1.0  # seconds before the next question where Redis refused one

# KEYS: a mailbox. Its process reads, and asks anew.
_WAKE: Final = RedisScript(
    "redis.call('XADD', KEYS[1], 'MAXLEN', '~', 1000, '*', 'wake', '') redis.call('PEXPIRE', KEYS[1], 3600000)",
    "allow-oom",
)

Entry = tuple[str, dict[bytes, bytes]]
"""The id of an entry of a stream, and its fields."""

Tell = Callable[["list[Entry] | None"], object]
"""Called with what was added to a stream, or None where something may have been missed."""


def entries_of(reply: Any) -> list[Entry]:
    """Return the entries that Redis listed. Raises NotOurs: these are none."""
    found = []
    try:
        for id, fields in reply or ():
            found.append((id.decode("ascii"), dict(zip(fields[::2], fields[1::2], strict=True))))
    except (TypeError, AttributeError, ValueError) as error:
        raise NotOurs("Redis has no stream there") from error
    return found


@attrs.define(eq=False)
class _Followed:
    """A stream that is followed."""

    last: str  # the id of the last entry that was told
    tell: Tell


@attrs.define(eq=False)
class Redis:
    """The connections of one process.

    Args:
        url: where it is.
        prefix: what all keys begin with.
        limits: of each connection.
        context: for `rediss://`; by default the system's certificates count.
        tell: called when something was added to the mailbox; must not wait.

    Attributes:
        commands: takes commands.
        token: this process, among all.
        mailbox: the key of a stream to which others add what this process is to read.
    """

    address: RedisAddress = attrs.field(converter=redis_address)
    prefix: str
    limits: RedisLimits = attrs.field(factory=RedisLimits)
    context: ssl.SSLContext | None = None
    tell: Tell = attrs.field(default=lambda entries: None)
    commands: RedisConnection = attrs.field(init=False)
    token: str = attrs.field(init=False, factory=lambda: secrets.token_hex(8))
    mailbox: str = attrs.field(init=False)
    _blocking: RedisConnection = attrs.field(init=False)
    _followed: dict[str, _Followed] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        name = f"trimcp-{os.getpid()}"
        self.mailbox = self.mailbox_of(self.token)
        self.commands = RedisConnection(self.address, self.limits, name, context=self.context)
        self._blocking = RedisConnection(self.address, self.limits, f"{name}-waits", _BLOCK, self.context)

    def mailbox_of(self, token: str) -> str:
        """Return the key of the mailbox of a process."""
        return f"{self.prefix}:mailbox:{token}"

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep the connections while the block runs. Raises OSError: Redis cannot be used."""
        async with self.commands.opened(), self._blocking.opened(), open_service_nursery() as nursery:
            await self._warn()
            self._followed[self.mailbox] = _Followed("0-0", self.tell)
            nursery.start_soon(self._follow)
            yield

    async def _warn(self) -> None:
        """Say so where Redis may forget what it was given."""
        with suppress(RedisRefusal):  # users may not be allowed to ask
            told = await self.commands.repeat("INFO", "memory")
            for line in bytes(told).split():
                name, _, value = line.partition(b":")
                if name == b"maxmemory_policy" and value != b"noeviction":
                    log.warning(
                        "%s forgets what it has when its memory is full (%s): set maxmemory-policy to noeviction",
                        self.address,
                        value.decode("ascii", "replace"),
                    )

    async def follow(self, stream: str, last: str, tell: Tell) -> None:
        """Have what is added to a stream after this entry told.

        `tell` must not wait.
        """
        self._followed[stream] = _Followed(last, tell)
        with suppress(OSError):  # else the next question comes when this one ends
            await self.commands.script(_WAKE, [self.mailbox])

    def from_others(self, entries: list[Entry] | None) -> bool:
        """Return whether another process may have added one of the entries, of which each says `by` whom it is."""
        return entries is None or any(fields.get(b"by") != self.token.encode() for _, fields in entries)

    async def _follow(self) -> None:
        connections, warned = self._blocking.connections, False
        while True:
            streams = [(name, each.last) for name, each in self._followed.items()]
            names, lasts = zip(*streams, strict=True)
            question = ("XREAD", "COUNT", _AT_ONCE, "BLOCK", int(_BLOCK * 1000), "STREAMS", *names, *lasts)
            try:
                found = list(self._found(await self._blocking.run(*question)))
            except RedisLost:
                continue
            except (OSError, ValueError) as error:
                if not warned:  # once, not every second
                    log.warning("streams of %s cannot be read: %s", self.address, one_line(str(error)))
                warned = True
                self._tell_all()
                await trio.sleep(_PAUSE)
                continue
            warned = False
            if self._blocking.connections != connections:
                connections = self._blocking.connections
                self._tell_all()
            for name, entries in found:
                followed = self._followed.get(name)
                if followed is not None and entries:
                    followed.last = entries[-1][0]
                    followed.tell(entries)

    def _found(self, reply: Any) -> Iterator[tuple[str, list[Entry]]]:
        for name, entries in reply or ():
            yield name.decode(), entries_of(entries)

    def _tell_all(self) -> None:
        for followed in list(self._followed.values()):
            followed.tell(None)


@attrs.define(eq=False)
class SharedRedis:
    """A store in a Redis, and the other processes on it."""

    url: str = attrs.field(repr=False)
    prefix: str = "trimcp"
    limits: RedisLimits = attrs.field(factory=RedisLimits)
    context: ssl.SSLContext | None = None
    _redis: Redis = attrs.field(init=False)
    _open: bool = attrs.field(init=False, default=False)
    _what: ClassVar[str]  # it keeps, such as "contexts"

    def __attrs_post_init__(self) -> None:
        self._redis = self._new()

    def _new(self, tell: Tell = lambda entries: None) -> Redis:
        return Redis(self.url, self.prefix, self.limits, self.context, tell)

    @property
    def failure(self) -> str:
        """Why there is no connection now, or ""."""
        return self._redis.commands.failure

    @asynccontextmanager
    async def _used(self, tell: Tell = lambda entries: None) -> AsyncIterator[Redis]:
        """Keep connections, under a new name, while the block runs; `tell` as in `Redis`.

        Raises OSError: Redis cannot be used, or this store is open.
        """
        if self._open:
            raise OSError(f"the {self._what} in {self._redis.address} are in use by this store already")
        self._open = True
        try:
            self._redis = redis = self._new(tell)
            async with redis.opened():
                yield redis
        finally:
            self._open = False

    async def _ask(self, *parts: Part) -> Any:
        return await self._redis.commands.repeat(*parts)

    async def _script(self, script: RedisScript, keys: Sequence[str], *values: Part) -> Any:
        return await self._redis.commands.script(script, keys, *values)
