"""Channels that misbehave on purpose: slow, cut, stalled, delayed, doubled, reordered, garbled, with garbage between.

Each wraps another one and is deterministic: time is Trio's, and what happens to a message follows from the seed and the
message's number alone, not from when it comes. Byte streams that misbehave are in `fault_streams`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypedDict

import attrs
import orjson
import trio

from trimcp.bounds import checked
from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.client.connect import Connectable, Target, named
from trimcp.run import InProcess
from trimcp.session.drive import Road
from trimcp.testing.fault_streams import CutStream
from trimcp.transports.trace import as_json
from trimcp.transports.wrapped import WrappedChannel
from trimcp.wire.jsonrpc import Lost, Malformed, parse

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Chances", "CutStream", "Fault", "Faults", "FaultyChannel", "FaultyTarget", "SlowChannel", "faulty"]

Direction: TypeAlias = Literal["send", "receive"]

_KEPT: Final = 10_000
_CUT: Final = "cut on purpose"
# Valid JSON that is no message, and text that is no JSON.
_NONSENSE: Final = (
    b"42",
    b"[]",
    b"null",
    b'"hello"',
    b"{}",
    b'{"jsonrpc":"2.0"}',
    b'{"jsonrpc":"1.0","id":1}',
    b"{",
    b"]]",
)


@attrs.define(eq=False)
class SlowChannel(WrappedChannel):
    """A channel that takes its time, or whose reader stops until released.

    Args:
        channel: the one that does the work.
        send_delay: seconds of Trio's clock before each batch is sent.
        receive_delay: seconds before each receive.
    """

    send_delay: float = attrs.field(default=0, kw_only=True)
    receive_delay: float = attrs.field(default=0, kw_only=True)
    _reading: trio.Event = attrs.field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._reading.set()

    def stop_reading(self) -> None:
        """Let every receive from now on wait for `resume`."""
        if self._reading.is_set():
            self._reading = trio.Event()

    def resume(self) -> None:
        """Read on."""
        self._reading.set()

    async def send(self, batch: Sequence[Outgoing]) -> None:
        """Send after the delay; see `MessageChannel.send`."""
        if self.send_delay:
            await trio.sleep(self.send_delay)
        await self.channel.send(batch)

    async def receive(self) -> Sequence[Incoming]:
        """Receive after the delay, once reading is allowed; see `MessageChannel.receive`."""
        if self.receive_delay:
            await trio.sleep(self.receive_delay)
        await self._reading.wait()
        return await self.channel.receive()

    async def aclose(self) -> None:
        """Close the channel underneath, and let a stopped reader find out."""
        self._reading.set()
        await self.channel.aclose()


class Chances(TypedDict, total=False):
    """What `faulty` and `FaultyChannel` take by name: see `Faults`."""

    seed: int
    cut: float
    stall: float
    stall_seconds: float
    delay: float
    duplicate: float
    reorder: float
    garble: float
    garbage: float
    on: Literal["both", "send", "receive"]


_AMOUNTS = ("cut", "stall", "stall_seconds", "delay", "duplicate", "reorder", "garble", "garbage")


@attrs.frozen
class Fault:
    """One thing that was done to a message on purpose.

    Attributes:
        kind: "cut", "stall", "delay", "duplicate", "reorder", "garble" or "garbage".
        direction: whether our side was sending or receiving.
        message: the number of the message in its direction, from 0.
        connection: the number of the connection, from 0, of those made with these faults.
        seconds: how long it was held up (stall, delay).
    """

    kind: str
    direction: Direction
    message: int
    connection: int = 0
    seconds: float = 0


@attrs.frozen
class _Fate:
    """What will happen to one message."""

    seconds: float = 0
    cut: bool = False
    garble: bool = False
    duplicate: bool = False
    reorder: bool = False
    garbage: bytes | None = None


@attrs.frozen(eq=False, field_transformer=checked(zero=_AMOUNTS, unchecked=("seed",)))
class Faults:
    """How often a connection misbehaves. All chances are between 0 and 1 and are taken for each message.

    Attributes:
        seed: the same seed does the same to the same messages.
        cut: chance that the connection ends instead of this message.
        stall: chance that this message, and what is sent with it or comes behind it, waits `stall_seconds`.
        stall_seconds: of Trio's clock.
        delay: seconds of Trio's clock that each message takes at most; how many is drawn. What is behind it waits.
        duplicate: chance that a message comes twice.
        reorder: chance that a message changes places with the one before it, if they are under way together.
        garble: chance that a message loses its second half, and so is no JSON any more (over HTTP: that we receive).
        garbage: chance that something that is no message comes before this one (likewise).
        on: spoil what our side sends, what it receives, or both.
        journal: what has been done, the last 10,000 of it.
    """

    seed: int = 0
    cut: float = 0
    stall: float = 0
    stall_seconds: float = 1
    delay: float = 0
    duplicate: float = 0
    reorder: float = 0
    garble: float = 0
    garbage: float = 0
    on: Literal["both", "send", "receive"] = "both"
    journal: deque[Fault] = attrs.field(init=False, factory=lambda: deque(maxlen=_KEPT), repr=False)
    _connections: Iterator[int] = attrs.field(init=False, factory=count, repr=False)

    def new_connection(self) -> int:
        """Return the number of a new connection: a second one is not spoiled in the same places as the first."""
        return next(self._connections)

    def fate(self, direction: Direction, message: int, connection: int, *, legible: bool = False) -> _Fate:
        """Decide what happens to a message, and write it down; `legible` if it must stay a message."""
        if self.on not in ("both", direction):
            return _Fate()
        # One generator for each message: its fate must not hang on how messages happen to be batched.
        draw = random.Random(f"{self.seed}/{connection}/{direction}/{message}")
        chances = [self.cut, self.stall, self.duplicate, self.reorder, self.garble, self.garbage]
        cut, stall, duplicate, reorder, garble, garbage = (draw.random() < chance for chance in chances)
        delay = draw.random() * self.delay
        if cut:
            duplicate = reorder = garble = garbage = False
        if legible:
            garble = garbage = False
        happened = {"stall": stall, "delay": delay > 0, "cut": cut, "garbage": garbage}
        happened |= {"garble": garble, "duplicate": duplicate, "reorder": reorder}
        seconds = {"stall": self.stall_seconds, "delay": delay}
        for kind in (kind for kind, happens in happened.items() if happens):
            self.journal.append(Fault(kind, direction, message, connection, seconds.get(kind, 0)))
        wait = (self.stall_seconds if stall else 0) + delay
        return _Fate(wait, cut, garble, duplicate, reorder, _nonsense(draw) if garbage else None)


def _nonsense(draw: random.Random) -> bytes:
    """Return one line that is no message: valid JSON, half of it, or any characters."""
    if draw.random() < 0.5:
        return draw.choice(_NONSENSE)
    return "".join(chr(draw.randrange(0x20, 0x2FF)) for _ in range(draw.randrange(1, 60))).encode()


class FaultyChannel(WrappedChannel):
    """A channel that spoils what goes through it.

    Attributes:
        channel: the one that does the work.
        faults: what is done, how often, and in `faults.journal` what was done.
    """

    def __init__(self, channel: MessageChannel, faults: Faults | None = None, **chances: Unpack[Chances]) -> None:
        """Wrap a channel.

        Args:
            channel: the one that does the work.
            faults: how often what is done, for one connection or several.
            chances: the same by name, for this one: `FaultyChannel(channel, seed=7, cut=0.01)`.
        """
        super().__init__(channel)
        self.faults: Faults = Faults(**chances) if faults is None else faults
        self._connection: int = self.faults.new_connection()
        self._sent: int = 0
        self._received: int = 0
        self._broken: bool = False
        self._torn: bool = False
        self._closed: bool = False
        self._arrived: deque[Incoming] = deque()
        self._ready: list[Incoming] = []
        self._next: tuple[_Fate, float] | None = None

    async def send(self, batch: Sequence[Outgoing]) -> None:
        """Send what the faults leave of the batch.

        Raises:
            trio.BrokenResourceError: the connection was cut, besides the reasons of `MessageChannel.send`.
        """
        self._check()
        if self._torn:
            raise trio.BrokenResourceError("an earlier send was cut short")
        spoiled: list[Outgoing] = []
        for message in batch:
            # What is sent over HTTP is read first, to be put into headers and to know what answers it.
            fate = self.faults.fate("send", self._sent, self._connection, legible=self.mirrors_headers)
            self._sent += 1
            if fate.seconds:
                self._torn = True  # cancelled meanwhile, the rest would be missing
                await trio.sleep(fate.seconds)
                self._torn = False
            if fate.cut:
                if spoiled:
                    await self.channel.send(spoiled)
                await self._break()
            if fate.garbage is not None:
                spoiled.append(Outgoing(fate.garbage, Kind.NOTIFICATION))
            if fate.garble:
                message = attrs.evolve(message, data=message.data[: len(message.data) // 2])
            spoiled.append(message)
            if fate.reorder and len(spoiled) > 1:
                spoiled[-2:] = spoiled[:-3:-1]
            if fate.duplicate:
                spoiled.append(message)
        await self.channel.send(spoiled)

    async def receive(self) -> Sequence[Incoming]:
        """Return what the faults leave of what has arrived; see `MessageChannel.receive`."""
        if self.faults.on == "send":
            return await self._receive()
        if self._arrived or self._ready:
            await trio.lowlevel.checkpoint()
        while True:
            if not self._arrived:
                if self._ready:
                    return self._take()
                self._arrived.extend(await self._receive())
            if self._next is None:
                self._next = self._draw(self._arrived[0])
            fate, due = self._next
            if self._ready and (fate.cut or due > trio.current_time()):
                return self._take()  # what comes before must not wait with it
            if due > trio.current_time():
                await trio.sleep_until(due)
            if fate.cut:
                await self._break()
            self._next = None
            self._pass(self._arrived.popleft(), fate)

    def _draw(self, incoming: Incoming) -> tuple[_Fate, float]:
        if isinstance(incoming.message, Lost):
            return _Fate(), 0  # that came over no wire
        fate = self.faults.fate("receive", self._received, self._connection)
        self._received += 1
        return fate, trio.current_time() + fate.seconds if fate.seconds else 0

    def _pass(self, incoming: Incoming, fate: _Fate) -> None:
        ready = self._ready
        if fate.garbage is not None:
            ready.append(Incoming(parse(fate.garbage), len(fate.garbage), incoming.origin))
        if fate.garble and not isinstance(incoming.message, Malformed):
            data = orjson.dumps(as_json(incoming.message))
            incoming = attrs.evolve(incoming, message=parse(data[: len(data) // 2]))
        ready.append(incoming)
        if fate.reorder and len(ready) > 1:
            ready[-2:] = ready[:-3:-1]
        if fate.duplicate:
            ready.append(incoming)

    def _take(self) -> list[Incoming]:
        ready, self._ready = self._ready, []
        return ready

    async def _receive(self) -> Sequence[Incoming]:
        self._check()
        try:
            return await self.channel.receive()
        except trio.ClosedResourceError:
            self._check()  # who cut it closed it, too
            raise

    async def _break(self) -> None:
        self._broken = True
        await self.channel.aclose()
        raise trio.BrokenResourceError(_CUT)

    def _check(self) -> None:
        if self._broken and not self._closed:
            raise trio.BrokenResourceError(_CUT)

    async def aclose(self) -> None:
        """Close the channel underneath."""
        self._closed = True
        await self.channel.aclose()


@attrs.frozen(eq=False)
class FaultyTarget:
    """A target each connection to which misbehaves.

    Attributes:
        target: what is connected to.
        faults: how; `faults.journal` says what was done.
    """

    target: Target
    faults: Faults

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[MessageChannel]:
        """Open the target and yield its channel, spoiled."""
        async with _opened(self.target) as channel:
            assert isinstance(channel, MessageChannel)
            yield FaultyChannel(channel, self.faults)


def _opened(given: Target) -> AbstractAsyncContextManager[Road]:
    target = named(given)
    if isinstance(target, InProcess) and not target.framed:
        target = attrs.evolve(target, framed=True)  # else there is no wire between the sides that could be faulty
    if isinstance(target, MessageChannel):
        return target
    if isinstance(target, Connectable):
        return target.connect()
    return target if isinstance(target, AbstractAsyncContextManager) else nullcontext(target)


def faulty(target: Target, faults: Faults | None = None, **chances: Unpack[Chances]) -> FaultyTarget:
    """Put faults around any target: `client.connect(faulty(trimcp.http(url), seed=7, cut=0.01))`.

    Args:
        target: what `trimcp.stdio`, `trimcp.http`, `trimcp.websocket` or `trimcp.in_process` returns, or another.
        faults: how often what is done.
        chances: the same by name, see `Faults`.
    """
    return FaultyTarget(target, Faults(**chances) if faults is None else faults)
