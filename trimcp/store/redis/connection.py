"""A connection to Redis that many tasks use at once, and that is opened again when it is lost.

Commands leave in the order in which they came, and replies come in that order; a task that gave up leaves a hole. What
waits is bounded in bytes. Nothing waits for ever: neither for a connection, nor for a reply.
"""

from __future__ import annotations

import logging
import math
import os
import ssl
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha1
from typing import Any, Final, NoReturn

import attrs
import trio

from trimcp.errors import ConnectionLost, LocalError, Overloaded
from trimcp.store.redis.address import RedisAddress
from trimcp.store.redis.resp import GarbledReply, Part, RedisRefusal, RedisReplies, packer
from trimcp.support.bounds import checked
from trimcp.support.cleaning import MASK, one_line
from trimcp.support.nurseries import leaves, open_service_nursery
from trimcp.support.restarts import RestartCount, Restarts
from trimcp.wire.codes import OVERLOADED

log: logging.Logger = logging.getLogger("trimcp.store")

_OLDEST: Final = 7  # the first version with what the scripts use
_READ: Final = 65_536  # bytes in one read
_WRITE: Final = 262_144  # bytes in one write, unless a single command has more
# They never give up: there are never as many within a second.
_RESTARTS: Final = Restarts(most=sys.maxsize, within=1.0, first_pause=0.1, longest_pause=3.0, lasting=5.0)


@attrs.frozen(field_transformer=checked())
class RedisLimits:
    """The bounds of a connection to Redis.

    Attributes:
        timeout: seconds without a byte from Redis after which the connection is lost, if something waits; also for
            connecting.
        patience: seconds for which a command waits while there is no connection, or is sent again.
        max_waiting: bytes of commands that are not answered yet; beyond it a command is refused. One alone may have
            more.
        max_reply: bytes of one reply.
    """

    timeout: float = 5.0
    patience: float = 5.0
    max_waiting: int = 64 * 1024 * 1024
    max_reply: int = 64 * 1024 * 1024


@attrs.frozen
class RedisScript:
    """A script in Lua, called by its digest. What it changes it changes whole, or not at all.

    Args:
        body: the script without its first line.
        flags: those of its first line, such as "no-writes".
    """

    body: str
    flags: str = ""
    text: str = attrs.field(init=False)
    digest: str = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        text = f"#!lua{f' flags={self.flags}' if self.flags else ''}\n{self.body}"
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "digest", sha1(text.encode(), usedforsecurity=False).hexdigest())


class UnusableRedis(LocalError, OSError):
    """Redis cannot be reached, refuses us, or is none; the text names it and says why."""


class RedisLost(ConnectionLost, OSError):
    """There is no connection, or it was lost; `nothing_sent` says which."""


class RedisOverloaded(Overloaded, OSError):
    """Too much waits for Redis. Nothing was sent."""


@attrs.define(eq=False)
class _WaitingCommand:
    """A command that is not answered yet."""

    data: bytes
    size: int
    task: trio.lowlevel.Task | None  # that waits; None if it gave up
    reply: Any = None
    error: Exception | None = None

    def finish(self, reply: Any, error: Exception | None = None) -> None:
        if (task := self.task) is not None:
            self.task, self.reply, self.error = None, reply, error
            trio.lowlevel.reschedule(task)


@attrs.define(eq=False)
class RedisConnection:
    """A connection that is opened again when it is lost.

    Attributes:
        address: where it leads.
        name: shown by `CLIENT LIST`.
        failure: why there is no connection now, or "".
    """

    address: RedisAddress
    limits: RedisLimits
    name: str
    slower: float = 0.0  # seconds that a reply may take beyond the limit
    context: ssl.SSLContext | None = None
    failure: str = attrs.field(init=False, default="it is not open")
    connections: int = attrs.field(init=False, default=0)  # how many there were
    _open: bool = attrs.field(init=False, default=False)
    _up: trio.Event = attrs.field(init=False, factory=trio.Event)
    waiting: int = attrs.field(init=False, default=0)  # bytes
    _unsent: deque[_WaitingCommand] = attrs.field(init=False, factory=deque)
    _sent: deque[_WaitingCommand] = attrs.field(init=False, factory=deque)
    _writer: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    # around what reads; its deadline is when something should have come
    _silence: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _pack: Any = attrs.field(init=False, factory=packer)

    # For those who ask

    async def run(self, *parts: Part) -> Any:
        """Return the reply to a command. It is sent once.

        Raises:
            RedisRefusal: it was refused, and did nothing.
            RedisOverloaded: too much waits; it was not sent.
            RedisLost: there is no connection (`nothing_sent`), or it was lost: then it may or may not have run.
        """
        data = self._pack(parts)
        size = len(data)
        if self.waiting and self.waiting + size > self.limits.max_waiting:
            raise RedisOverloaded(OVERLOADED, f"{self.waiting:,} bytes wait for Redis already; try again later")
        self.waiting += size
        try:
            if self.failure:
                await self._wait_connected()
            command = _WaitingCommand(data, size, trio.lowlevel.current_task())
        except BaseException:
            self.waiting -= size
            raise
        del data
        self._unsent.append(command)
        self._writer.unpark()

        def give_up(_: Any) -> trio.lowlevel.Abort:
            command.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(give_up)
        if command.error is not None:
            raise command.error
        if isinstance(command.reply, RedisRefusal):
            raise command.reply
        return command.reply

    async def repeat(self, *parts: Part) -> Any:
        """Return the reply to a command that may run twice: when the connection is lost it is sent again.

        Raises as `run`, once `patience` is over.
        """
        deadline, sent = trio.current_time() + self.limits.patience, False
        while True:
            try:
                return await self.run(*parts)
            except RedisLost as error:
                sent |= not error.nothing_sent
                if trio.current_time() >= deadline or not self._open:
                    error.nothing_sent = not sent
                    raise

    async def script(self, script: RedisScript, keys: Sequence[str], *arguments: Part) -> Any:
        """Return what a script returns. It may run twice, and the second time has to change nothing.

        Raises as `repeat`.
        """
        call = ("EVALSHA", script.digest, len(keys), *keys, *arguments)
        try:
            return await self.repeat(*call)
        except RedisRefusal as error:
            if error.code != "NOSCRIPT":
                raise
        await self.repeat("SCRIPT", "LOAD", script.text)
        return await self.repeat(*call)

    async def _wait_connected(self) -> None:
        with trio.move_on_after(self.limits.patience):
            while self.failure and self._open:
                await self._up.wait()
            if self._open:
                return
        raise RedisLost(f"there is no connection to {self.address}: {self.failure}", nothing_sent=True)

    # The connection

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep a connection while the block runs. At its end, and not before, it is closed, even if all is cancelled.

        Raises:
            UnusableRedis: it cannot be reached, refuses us, or is none. An OSError.
        """
        stream, replies = await self._connect()
        self._open = True
        try:
            async with open_service_nursery() as nursery:
                scope = await nursery.start(self._run, stream, replies)
                try:
                    yield
                finally:
                    scope.cancel(reason="the store is closed")
        finally:
            self._open = False
            self._lose("it is not open")
            self._up.set()

    async def _run(
        self, stream: trio.abc.Stream, replies: RedisReplies, task_status: trio.TaskStatus[trio.CancelScope]
    ) -> None:
        """Keep a connection. What uses it may end later than what opened it is cancelled."""
        count = RestartCount(_RESTARTS)
        with trio.CancelScope(shield=True) as scope:
            task_status.started(scope)
            while True:
                since: float | None = trio.current_time()
                why = await self._use(stream, replies)
                log.warning("the connection to %s was lost: %s", self.address, why)
                while True:
                    count.ended(trio.current_time(), since)
                    await trio.sleep(count.next_pause(trio.current_time()) or 0)
                    try:
                        stream, replies = await self._connect()
                        break
                    except OSError:
                        since = None
                log.warning("there is a connection to %s again", self.address)

    async def _use(self, stream: trio.abc.Stream, replies: RedisReplies) -> str:
        """Send commands and read replies until the connection is lost; return why it was."""
        why = "the server closed it"
        self._silence = trio.CancelScope()
        self.failure = ""
        self.connections += 1
        self._up.set()
        self._up = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream, nursery.cancel_scope)
                with self._silence:
                    why = await self._read(stream, replies)
                if self._silence.cancelled_caught:
                    why = f"nothing came for {self.limits.timeout + self.slower:g} s"
                nursery.cancel_scope.cancel(reason="the connection is lost")
        finally:
            self._lose(why)
            await trio.aclose_forcefully(stream)
        return why

    def _lose(self, why: str) -> None:
        """Fail all that waits."""
        self.failure = why
        sent, unsent = list(self._sent), list(self._unsent)
        self._sent.clear()
        self._unsent.clear()
        for command in (*sent, *unsent):
            self.waiting -= command.size
        text = f"the connection to {self.address} was lost: {why}"
        for command in sent:
            command.finish(None, RedisLost(f"{text}; the command may or may not have run"))
        for command in unsent:
            command.finish(None, RedisLost(text, nothing_sent=True))

    async def _write(self, stream: trio.abc.Stream, lost: trio.CancelScope) -> None:
        unsent, sent = self._unsent, self._sent
        try:
            while True:
                while not unsent:
                    await self._writer.park()
                batch, size = [], 0
                while unsent and size < _WRITE:
                    command = unsent.popleft()
                    if command.task is None:  # gave up before it was sent
                        self.waiting -= command.size
                        continue
                    batch.append(command.data)
                    command.data = b""
                    size += command.size
                    sent.append(command)
                if sent and self._silence.deadline == math.inf:
                    self._expect()
                await self._send(stream, b"".join(batch))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            lost.cancel(reason="the connection is lost")

    async def _send(self, stream: trio.abc.Stream, data: bytes) -> None:
        if len(data) <= _WRITE:
            await stream.send_all(data)
            return
        for begin in range(0, len(data), _WRITE):  # each piece that the server takes is a sign of life
            await stream.send_all(data[begin : begin + _WRITE])
            self._expect()

    def _expect(self) -> None:
        self._silence.deadline = trio.current_time() + self.limits.timeout + self.slower

    async def _read(self, stream: trio.abc.Stream, replies: RedisReplies) -> str:
        sent = self._sent
        try:
            while data := await stream.receive_some(_READ):
                for reply in replies.feed(bytes(data)):
                    if not sent:
                        return "the server answered what was not asked"
                    command = sent.popleft()
                    self.waiting -= command.size
                    command.finish(reply)
                if sent:
                    self._expect()
                else:
                    self._silence.deadline = math.inf
        except GarbledReply as error:
            return f"what came is no reply of Redis: {one_line(str(error))}"
        except trio.BrokenResourceError:
            return "it broke"
        return "the server closed it"

    async def _connect(self) -> tuple[trio.abc.Stream, RedisReplies]:
        """Return a connection on which commands may be sent. Raises OSError."""
        stream: trio.abc.Stream | None = None
        try:
            with trio.fail_after(self.limits.timeout):
                stream = await self.address.connect(self.context)
                replies = RedisReplies(self.limits.max_reply)
                await self._introduce(stream, replies)
        except BaseException as error:
            if stream is not None:
                await trio.aclose_forcefully(stream)
            if isinstance(error, trio.TooSlowError):
                self._fail(f"no answer within {self.limits.timeout:g} s", error)
            if isinstance(error, GarbledReply):
                self._fail("what answers there is no Redis", error)
            if isinstance(error, (OSError, trio.BrokenResourceError, ValueError)):
                first = leaves(error.__cause__ or error)[0]  # of several addresses
                known = os.strerror(first.errno or 0) if isinstance(first, ConnectionError) else None
                self._fail(known or getattr(first, "strerror", None) or str(error) or "the connection broke", error)
            raise
        return stream, replies

    def _fail(self, why: str, error: BaseException) -> NoReturn:
        if self.address.password:  # which servers quote that do not know the command
            why = why.replace(self.address.password, MASK)
        self.failure = one_line(why)
        raise UnusableRedis(f"cannot use {self.address}: {self.failure}") from error

    async def _introduce(self, stream: trio.abc.Stream, replies: RedisReplies) -> None:
        """Log in, and find out whether this can be used. Raises OSError, GarbledReply."""
        address = self.address
        login: tuple[Part, ...] = ("AUTH", address.user or "default", address.password) if address.password else ()
        commands: list[tuple[Part, ...]] = [("HELLO", 2, *login, "SETNAME", self.name)]
        if address.database:
            commands.append(("SELECT", address.database))
        commands.append(("PING",))  # which a server refuses that is still reading its file
        await stream.send_all(b"".join(map(self._pack, commands)))
        found: list[Any] = []
        while len(found) < len(commands):
            data = await stream.receive_some(_READ)
            if not data:
                raise OSError("the server closed the connection")
            found += replies.feed(bytes(data))
            for reply in found:
                if isinstance(reply, RedisRefusal):
                    raise reply
        if len(found) != len(commands) or found[-1] != b"PONG" or not isinstance(found[0], list):
            raise GarbledReply("no greeting")
        self._check(dict(zip(found[0][::2], found[0][1::2], strict=False)))

    def _check(self, told: dict[Any, Any]) -> None:
        """Raise OSError unless what the server says of itself is what we need."""
        version = told.get(b"version")
        if not isinstance(version, bytes) or not version.split(b".")[0].isdigit():
            raise GarbledReply("no version")
        if int(version.split(b".")[0][:9]) < _OLDEST:
            raise OSError(f"version {version.decode('ascii', 'replace')} is too old: {_OLDEST}.0 is the oldest")
        if told.get(b"mode") == b"cluster":
            raise OSError("it is part of a Redis Cluster, which is not supported")
        if told.get(b"role") == b"replica":
            raise OSError("it is a replica: name the master")
