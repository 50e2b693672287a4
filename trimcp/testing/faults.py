"""Channels and byte streams with faults, for tests: slow, cut, stalled, garbled, messages duplicated or reordered.

Each wraps another one and is deterministic: it uses Trio's clock, and a message's faults depend only on the seed and
the message's number, not on timing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, TypedDict

import attrs
import orjson
import trio

from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.client.client import Target, named, opened
from trimcp.run import InProcess
from trimcp.support.bounds import checked
from trimcp.transports.trace import as_json
from trimcp.transports.wrapped import WrappedChannel
from trimcp.wire.jsonrpc import Lost, Malformed, parse

if TYPE_CHECKING:
    from typing_extensions import Unpack

Direction: TypeAlias = Literal["send", "receive"]

_JOURNAL_SIZE: Final = 10_000
_MAX_PIECE: Final = 65_536  # bytes
_CUT: Final = "cut on purpose"
# Valid JSON that is not a message, and text that is not JSON.
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
    """A channel that delays sending and receiving, and can stop reading.

    Args:
        channel: the wrapped channel.
        send_delay: seconds of Trio's clock before each batch is sent.
        receive_delay: seconds before each receive.
    """

    send_delay: float = attrs.field(default=0, kw_only=True)
    receive_delay: float = attrs.field(default=0, kw_only=True)
    _reading: trio.Event = attrs.field(factory=trio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self._reading.set()

    def stop_reading(self) -> None:
        """Block every receive from now on until `resume`."""
        if self._reading.is_set():
            self._reading = trio.Event()

    def resume(self) -> None:
        """Continue to read."""
        self._reading.set()

    async def send(self, batch: Sequence[Outgoing]) -> None:
        if self.send_delay:
            await trio.sleep(self.send_delay)
        await self.channel.send(batch)

    async def receive(self) -> Sequence[Incoming]:
        if self.receive_delay:
            await trio.sleep(self.receive_delay)
        await self._reading.wait()
        return await self.channel.receive()

    async def aclose(self) -> None:
        self.resume()  # a blocked receive then raises the error of a closed channel
        await self.channel.aclose()


class Chances(TypedDict, total=False):
    """The attributes of `Faults` as keyword arguments."""

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


@attrs.frozen
class Fault:
    """One fault that was applied to a message.

    Attributes:
        kind: "cut", "stall", "delay", "duplicate", "reorder", "garble" or "garbage".
        direction: "send" or "receive", as seen from the wrapped side.
        message: the number of the message in its direction, from 0.
        connection: the number of the connection among those with the same `Faults`, from 0.
        seconds: how long the message was delayed (stall, delay).
    """

    kind: str
    direction: Direction
    message: int
    connection: int = 0
    seconds: float = 0


@attrs.frozen
class _Effects:
    """The faults of one message."""

    seconds: float = 0
    cut: bool = False
    garble: bool = False
    duplicate: bool = False
    reorder: bool = False
    garbage: bytes | None = None


@attrs.frozen(
    eq=False, field_transformer=checked(zero=Chances.__annotations__.keys() - {"seed", "on"}, unchecked=("seed",))
)
class Faults:
    """The probabilities of faults on a connection: between 0 and 1, drawn for each message.

    Attributes:
        seed: the same seed gives the same faults for the same messages.
        cut: chance that the connection breaks instead of this message.
        stall: chance that this message, its batch and later messages wait `stall_seconds`.
        stall_seconds: seconds of Trio's clock.
        delay: the longest random delay of each message, in seconds of Trio's clock. Later messages wait as well.
        duplicate: chance that a message is sent or received twice.
        reorder: chance that a message changes places with the one before it, if both are in one batch.
        garble: chance that a message loses its second half, so that it is not JSON (over HTTP: only received ones).
        garbage: chance that data that is not a message precedes this one (over HTTP: only received ones).
        on: apply faults to sent messages, received messages, or both.
        journal: the last 10,000 faults that were applied.
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
    journal: deque[Fault] = attrs.field(init=False, factory=lambda: deque(maxlen=_JOURNAL_SIZE), repr=False)
    _connections: Iterator[int] = attrs.field(init=False, factory=count, repr=False)

    def new_connection(self) -> int:
        """Return the number of a new connection; each number gives different faults."""
        return next(self._connections)

    def draw(self, direction: Direction, message: int, connection: int, *, valid: bool = False) -> _Effects:
        """Draw the faults of a message and note them in the journal; with `valid` it stays a valid message."""
        if self.on not in ("both", direction):
            return _Effects()
        # One generator for each message, so that the result does not depend on the batches.
        chance = random.Random(f"{self.seed}/{connection}/{direction}/{message}")
        chances = [self.cut, self.stall, self.duplicate, self.reorder, self.garble, self.garbage]
        cut, stall, duplicate, reorder, garble, garbage = (chance.random() < each for each in chances)
        delay = chance.random() * self.delay
        if cut:
            duplicate = reorder = garble = garbage = False
        if valid:
            garble = garbage = False
        happened = {"stall": stall, "delay": delay > 0, "cut": cut, "garbage": garbage}
        happened |= {"garble": garble, "duplicate": duplicate, "reorder": reorder}
        seconds = {"stall": self.stall_seconds, "delay": delay}
        for kind in (kind for kind, happens in happened.items() if happens):
            self.journal.append(Fault(kind, direction, message, connection, seconds.get(kind, 0)))
        wait = (self.stall_seconds if stall else 0) + delay
        return _Effects(wait, cut, garble, duplicate, reorder, _nonsense(chance) if garbage else None)


def _nonsense(chance: random.Random) -> bytes:
    """Return one line that is not a message: valid JSON, half of it, or random characters."""
    if chance.random() < 0.5:
        return chance.choice(_NONSENSE)
    return "".join(chr(chance.randrange(0x20, 0x2FF)) for _ in range(chance.randrange(1, 60))).encode()


class FaultyChannel(WrappedChannel):
    """A channel with faults; `faults.journal` lists those that were applied.

    Args:
        channel: the wrapped channel.
        faults: the probabilities of faults, for one connection or several.
        chances: the same as keyword arguments, for this channel: `FaultyChannel(channel, seed=7, cut=0.01)`.
    """

    def __init__(self, channel: MessageChannel, faults: Faults | None = None, **chances: Unpack[Chances]) -> None:
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
        self._next: tuple[_Effects, float] | None = None

    async def send(self, batch: Sequence[Outgoing]) -> None:
        self._check()
        if self._torn:
            raise trio.BrokenResourceError("an earlier send was cut short")
        changed: list[Outgoing] = []
        for message in batch:
            # The HTTP channel parses messages to send, for headers and to match the response.
            effects = self.faults.draw("send", self._sent, self._connection, valid=self.mirrors_headers)
            self._sent += 1
            if effects.seconds:
                self._torn = True  # if cancelled here, the rest of the batch is lost
                await trio.sleep(effects.seconds)
                self._torn = False
            if effects.cut:
                if changed:
                    await self.channel.send(changed)
                await self._break()
            if effects.garbage is not None:
                changed.append(Outgoing(effects.garbage, Kind.NOTIFICATION))
            if effects.garble:
                message = attrs.evolve(message, data=message.data[: len(message.data) // 2])
            changed.append(message)
            if effects.reorder and len(changed) > 1:
                changed[-2:] = changed[:-3:-1]
            if effects.duplicate:
                changed.append(message)
        await self.channel.send(changed)

    async def receive(self) -> Sequence[Incoming]:
        if self.faults.on == "send":
            return await self._receive()
        if self._arrived or self._ready:
            await trio.lowlevel.checkpoint()
        while True:
            if not self._arrived:
                if self._ready:
                    return self._take_ready()
                self._arrived.extend(await self._receive())
            if self._next is None:
                self._next = self._draw(self._arrived[0])
            effects, due = self._next
            if self._ready and (effects.cut or due > trio.current_time()):
                return self._take_ready()  # earlier messages must not wait with it
            if due > trio.current_time():
                await trio.sleep_until(due)
            if effects.cut:
                await self._break()
            self._next = None
            self._apply(effects, self._arrived.popleft())

    def _draw(self, incoming: Incoming) -> tuple[_Effects, float]:
        """Return the faults of a message and the time until which it is delayed, on Trio's clock."""
        if isinstance(incoming.message, Lost):
            return _Effects(), 0  # generated by the channel itself, not received over the wire
        effects = self.faults.draw("receive", self._received, self._connection)
        self._received += 1
        return effects, trio.current_time() + effects.seconds if effects.seconds else 0

    def _apply(self, effects: _Effects, incoming: Incoming) -> None:
        ready = self._ready
        if effects.garbage is not None:
            ready.append(Incoming(parse(effects.garbage), len(effects.garbage), incoming.origin))
        if effects.garble and not isinstance(incoming.message, Malformed):
            data = orjson.dumps(as_json(incoming.message))
            incoming = attrs.evolve(incoming, message=parse(data[: len(data) // 2]))
        ready.append(incoming)
        if effects.reorder and len(ready) > 1:
            ready[-2:] = ready[:-3:-1]
        if effects.duplicate:
            ready.append(incoming)

    def _take_ready(self) -> list[Incoming]:
        ready, self._ready = self._ready, []
        return ready

    async def _receive(self) -> Sequence[Incoming]:
        self._check()
        try:
            return await self.channel.receive()
        except trio.ClosedResourceError:
            self._check()  # cutting the connection also closed the channel
            raise

    async def _break(self) -> None:
        self._broken = True
        await self.channel.aclose()
        raise trio.BrokenResourceError(_CUT)

    def _check(self) -> None:
        if self._broken and not self._closed:
            raise trio.BrokenResourceError(_CUT)

    async def aclose(self) -> None:
        self._closed = True
        await self.channel.aclose()


@attrs.frozen(eq=False)
class FaultyTarget:
    """A target whose connections have faults; `faults.journal` lists those that were applied."""

    target: Target
    faults: Faults

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[MessageChannel]:
        """Connect to the target and yield its channel with faults."""
        target = named(self.target)
        if isinstance(target, InProcess) and not target.framed:
            target = InProcess(target.server, framed=True, trace=target.trace)  # without, no bytes pass
        async with opened(target) as channel:
            assert isinstance(channel, MessageChannel)
            yield FaultyChannel(channel, self.faults)


def faulty(target: Target, faults: Faults | None = None, **chances: Unpack[Chances]) -> FaultyTarget:
    """Return a target with faults: `client.connect(faulty(trimcp.http(url), seed=7, cut=0.01))`.

    Args:
        target: from `trimcp.stdio`, `trimcp.http`, `trimcp.websocket`, `trimcp.in_process`, or a target of your own.
        faults: the probabilities of faults.
        chances: the same as keyword arguments, see `Faults`.
    """
    return FaultyTarget(target, Faults(**chances) if faults is None else faults)


@attrs.define(eq=False)
class CutStream(trio.abc.SendStream):
    """A byte stream that breaks after a number of bytes, perhaps in the middle of a line.

    Args:
        stream: the wrapped stream.
        after: the number of bytes that are sent before it breaks.
    """

    stream: trio.abc.SendStream
    after: int

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send up to the limit; beyond it close the stream and raise `trio.BrokenResourceError`."""
        allowed = bytes(data)[: self.after]
        self.after -= len(allowed)
        await self.stream.send_all(allowed)
        if len(allowed) < len(data):
            await self.stream.aclose()
            raise trio.BrokenResourceError("cut on purpose")

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self.stream.aclose()


@attrs.define(eq=False)
class FaultyStream(trio.abc.HalfCloseableStream):
    """A two-way byte stream with faults in both directions. The data is split into pieces.

    Args:
        stream: the wrapped stream.
        seed: the same seed gives the same faults for the same pieces.
        small: bytes of the largest piece that is read or written at once; 0 for no limit.
        stall: chance that a piece waits `stall_seconds` of Trio's clock.
        garble: chance that one byte of the piece is changed.
        cut: chance that the connection breaks instead of this piece.
    """

    stream: trio.abc.Stream
    seed: int = attrs.field(default=0, kw_only=True)
    small: int = attrs.field(default=0, kw_only=True)
    stall: float = attrs.field(default=0, kw_only=True)
    stall_seconds: float = attrs.field(default=1, kw_only=True)
    garble: float = attrs.field(default=0, kw_only=True)
    cut: float = attrs.field(default=0, kw_only=True)
    _sending: random.Random = attrs.field(init=False)
    _receiving: random.Random = attrs.field(init=False)
    _broken: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._sending = random.Random(f"{self.seed}/send")
        self._receiving = random.Random(f"{self.seed}/receive")

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        rest = bytes(data)
        while rest:
            size = self._size(self._sending, len(rest))
            garble = await self._before_piece(self._sending)
            await self.stream.send_all(_garbled(self._sending, rest[:size]) if garble else rest[:size])
            rest = rest[size:]

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        size = self._size(self._receiving, _MAX_PIECE if max_bytes is None else max_bytes)
        garble = await self._before_piece(self._receiving)
        piece = bytes(await self.stream.receive_some(size))
        return _garbled(self._receiving, piece) if garble else piece

    def _size(self, draw: random.Random, most: int) -> int:
        return min(most, draw.randint(1, self.small)) if self.small else most

    async def _before_piece(self, draw: random.Random) -> bool:
        """Apply stall and cut before a piece, and return whether to garble it."""
        stall, garble, cut = (draw.random() < chance for chance in (self.stall, self.garble, self.cut))
        if stall:
            await trio.sleep(self.stall_seconds)
        if cut or self._broken:
            self._broken = True
            await self.stream.aclose()
            raise trio.BrokenResourceError("cut on purpose")
        return garble

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        if not isinstance(self.stream, trio.abc.HalfCloseableStream):
            raise NotImplementedError("this stream cannot be closed in one direction")
        await self.stream.send_eof()

    async def aclose(self) -> None:
        await self.stream.aclose()


def _garbled(draw: random.Random, piece: bytes) -> bytes:
    if not piece:
        return piece
    at = draw.randrange(len(piece))
    return piece[:at] + bytes([piece[at] ^ draw.randrange(1, 256)]) + piece[at + 1 :]
