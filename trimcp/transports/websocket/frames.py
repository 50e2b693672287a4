"""The byte stream under a trio-websocket connection: bounded reads, joined writes, the time of the last sign of life.

trio-websocket reads as fast as it can, and writes each frame separately. The gate under it checks every frame and
keeps the messages: of what arrives the library sees control frames only. Nothing is read while enough messages wait to
be received, and the frames of a batch are sent in one write. Nothing here parses messages.

Why a connection has ended is said here for both sides: close codes (RFC 6455, section 7.4.1), faults, error texts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimcp.budget import MemoryCharge
from trimcp.framing.frames import FrameFault, FrameGate
from trimcp.support.bounds import checked
from trimcp.transports.descriptors import PIECE, READ_SIZE, progress_of

if TYPE_CHECKING:
    from trio_websocket import WebSocketConnection

WINDOW: Final = 256 * 1024
"""Bytes of waiting messages, with an overhead for each, above which nothing more is read."""

_CLOSE: Final = 0x88


PROTOCOL_ERROR: Final = 1002
NOT_UTF8: Final = 1007
_POLICY: Final = 1008

# Texts for error messages.
_CODES: Final = {
    1000: "normal",
    1001: "going away",
    1002: "protocol error",
    1003: "unsupported data",
    1005: "no code",
    1007: "text that is not UTF-8",
    1008: "policy violation",
    1009: "message too big",
    1010: "missing extension",
    1011: "internal error",
    1012: "restarting",
    1013: "try again later",
}

LATE_MESSAGE: Final = FrameFault(_POLICY, "a message took too long")
LATE: Final = "the peer took too long to end a message"
CLOSED: Final = "the peer has closed the connection"
GONE: Final = "the peer is gone without a closing handshake"


def fault_of(code: int) -> FrameFault:
    """Return the fault of a peer whose input the frame protocol could not read, by the code that it says."""
    if code == NOT_UTF8:
        return FrameFault(NOT_UTF8, "text is UTF-8")
    return FrameFault(PROTOCOL_ERROR, "a Close frame holds a code and a text, or nothing")


def fault_text(fault: FrameFault) -> str:
    """Return what is said of a peer that was closed for this fault."""
    return f"the peer broke the WebSocket protocol ({fault.code}: {fault.reason})"


def silence_text(seconds: float) -> str:
    """Return what is said of a peer that was given up after so many seconds."""
    return f"nothing was heard of the peer for {seconds:g} seconds"


def close_text(code: int, reason: str) -> str:
    """Return what is said of a peer that has sent this Close frame."""
    name = f" ({_CODES[code]})" if code in _CODES else ""
    return f"the peer closed the WebSocket with code {code}{name}" + (f": {reason[:200]!r}" if reason else "")


@attrs.frozen(field_transformer=checked())
class KeepAlive:
    """Pings and time limits for a silent peer. Times are seconds; `math.inf` for never.

    A busy peer that is alive answers pings. While we do not read, because enough messages wait, the peer's silence is
    not counted; a pong is sent every `interval` as our own sign of life. Waiting for memory in the middle of a message
    does count as the message's time.

    A sign of life is a whole message or control frame. A part of one extends the time by as long as it takes at
    `message_rate`. Otherwise one byte from time to time could keep a connection, and the incomplete message in memory,
    for ever.

    Attributes:
        interval: of silence before a ping, and between pings.
        dead_after: without a sign of life, after which the connection is ended.
        message_timeout: from a message's first byte to its last. Then the connection is closed with 1008.
        message_rate: bytes; for each so many bytes that arrive of a message, it gets one second more.
    """

    interval: float = 20.0
    dead_after: float = 60.0
    message_timeout: float = 30.0
    message_rate: float = 64 * 1024


KEEP_ALIVE: Final = KeepAlive()


class LifeSign(Enum):
    """What is to be done about a peer's silence."""

    NOTHING = auto()
    PING = auto()
    PONG = auto()
    """We do not read, so we cannot hear an answer: say that we are there."""
    LATE = auto()
    """End it: a message took too long."""
    SILENT = auto()
    """End it: nothing was heard for too long."""


@attrs.define(eq=False, repr=False)
class PeerSigns:
    """When a peer gave signs of life, and what its silence asks for. It sets no timer: its user asks it."""

    _gate: FrameGate
    _keep_alive: KeepAlive
    # counts the bytes kept of messages that are incomplete, or that nobody has taken
    amount: MemoryCharge = attrs.field(factory=MemoryCharge)
    reading: bool = attrs.field(init=False, default=False)  # a read is in progress, so the peer's silence counts
    starved: bool = attrs.field(init=False, default=False)  # reading waits until there is memory for more of a message
    # when the peer gave the last sign of life, on Trio's clock, plus the time in which we did not read
    since: float = attrs.field(init=False, factory=trio.current_time)
    # when the message in progress has to be complete; infinity without one
    due: float = attrs.field(init=False, default=math.inf)
    _signs: int = attrs.field(init=False, default=0)  # the gate's counters at the last `feed`
    _rounds: int = attrs.field(init=False, default=0)
    _stopped: float = attrs.field(init=False)  # when the last read ended
    _sent: float = attrs.field(init=False)  # when the last ping or pong was due

    def __attrs_post_init__(self) -> None:
        self._stopped = self._sent = self.since

    def begin_read(self) -> None:
        """Note that a read begins. The time in which nothing was read is not counted as silence."""
        self.reading = True
        paused = trio.current_time() - self._stopped
        self.since += paused
        if self.starved:
            self.starved = False
        else:
            self.due += paused

    def wait_for_room(self) -> None:
        """Note that reading waits for memory. That is the message's time: it must not hold what it has for ever."""
        if not self.starved:
            self.starved = True
            self.due += trio.current_time() - self._stopped

    def end_read(self) -> None:
        """Note that a read has ended."""
        self.reading = False
        self._stopped = trio.current_time()

    def feed(self, chunk: bytes) -> None:
        """Pass arrived bytes to the gate, and update the peer's last sign of life and the message's deadline."""
        gate, now = self._gate, self._stopped
        gate.feed(chunk)
        unfinished = gate.unfinished
        if unfinished or self.amount.counted:
            self.count()
        credit = len(chunk) / self._keep_alive.message_rate
        if gate.signs != self._signs:
            self._signs, self.since = gate.signs, now
        else:
            self.since = min(now, self.since + credit)
        if gate.rounds != self._rounds:
            self._rounds, self.due = gate.rounds, math.inf
        if self.due < math.inf:
            self.due += credit
        elif unfinished and not gate.behind:
            self.due = now + self._keep_alive.message_timeout + credit

    def count(self) -> None:
        """Count what has arrived and was not taken yet. A whole message counts until the session counts it.

        If it were counted nowhere for a moment, the next of its owner's connections that wait would take its place.
        """
        self.amount.set(self._gate.begun + self._gate.weight)

    def look(self, *, writing: bool) -> tuple[LifeSign, float]:
        """Return what to do now, and the time on Trio's clock at which to look again at the latest.

        `writing`: whether a write waits for the peer to read.
        """
        now, keep_alive = trio.current_time(), self._keep_alive
        heard = self.since if self.reading else now
        # A peer that reads a large message of ours may send nothing meanwhile; one that reads nothing answers
        # no ping. For these the sender's limit (`Limits.stall_timeout`) decides, so wait twice as long here.
        dead = heard + keep_alive.dead_after * (2 if writing else 1)
        if now >= dead:
            return LifeSign.SILENT, now
        timed = self.reading or self.starved
        if timed and now >= self.due:
            return LifeSign.LATE, now
        sign = LifeSign.NOTHING
        due = (max(self._sent, heard) if self.reading else self._sent) + keep_alive.interval
        if now >= due:
            self._sent, due = now, now + keep_alive.interval
            if not writing:  # the write is a sign of life
                sign = LifeSign.PING if self.reading else LifeSign.PONG
        # A message that begins during this wait is due after this time at the earliest.
        late = now + keep_alive.message_timeout
        if timed:
            late = min(late, self.due)
        return sign, min(due, dead, late)


class GatedStream(trio.abc.Stream):
    """The stream that one trio-websocket connection reads from and writes to.

    That to the peer is never closed here: a Close frame may still have to be sent. `early` arrived with the handshake.
    """

    def __init__(
        self, stream: trio.abc.Stream, gate: FrameGate, keep_alive: KeepAlive = KEEP_ALIVE, early: bytes = b""
    ) -> None:
        self.over: trio.Event = trio.Event()  # set when nothing more will be read
        self.writing: bool = False  # a write is in progress, or one was cut short
        self.sent_close: bool = False  # a Close frame was written
        self.unlimited: bool = False  # read on however many messages wait, because they will be dropped
        # the peer's signs of life
        self.signs: PeerSigns = PeerSigns(gate, keep_alive)
        self.held: int = 0  # bytes that wait to be flushed
        self.connection: WebSocketConnection | None = None  # trio-websocket's connection, once it exists
        self._stream = stream
        self._gate = gate
        self.arrival: trio.lowlevel.ParkingLot = trio.lowlevel.ParkingLot()  # of whoever waits for messages
        self._room = trio.Event()
        self._held: list[bytes] = []
        self._turn = trio.Lock()
        self._pieces = 0
        self.signs.feed(early)

    # Called by trio-websocket

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return checked control frames, b"" after the last one. Waits while too many messages wait to be received."""
        gate = self._gate
        data = gate.take(PIECE)
        while not data:
            if gate.fault is not None or gate.closing or self._given_up:
                self.over.set()
                return b""
            while gate.weight >= WINDOW and not self.unlimited:
                self._room = trio.Event()
                await self._room.wait()
            if gate.behind:
                await trio.lowlevel.checkpoint()
                self._feed(b"")
            elif chunk := await self._receive():
                self._feed(chunk)
            else:
                return b""
            data = gate.take(PIECE)
        if gate.closing and gate.empty:
            self.over.set()  # only the closing handshake is left, which the peer may never read
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write a frame after those that are held."""
        if data[0] == _CLOSE:
            self.sent_close = True
        self.hold(bytes(data))
        await self.flush()

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        """Note that trio-websocket has finished."""
        self.over.set()
        await trio.lowlevel.checkpoint()

    # Called by the channel

    def hold(self, *pieces: bytes) -> None:
        """Hold a frame until the next flush, which keeps the order."""
        self._held += pieces
        self.held += sum(map(len, pieces))

    async def flush(self) -> None:
        """Write the held frames, in as few writes as possible.

        Raises trio.BrokenResourceError: the peer is gone, or an earlier write was cut short.
        """
        try:
            self._turn.acquire_nowait()
        except trio.WouldBlock:
            await self._turn.acquire()
        try:
            if self.writing:
                raise trio.BrokenResourceError("an earlier write was cut short")
            while self._held:
                held, self._held, self.held = self._held, [], 0
                self.writing = True  # until all bytes are written
                for piece in _gathered(held):
                    await self._stream.send_all(piece)
                    self._pieces += 1
                self.writing = False
        finally:
            self._turn.release()

    def progress(self) -> Hashable:
        """Return a value that changes when the peer reads more of the current write."""
        return self._pieces, progress_of(self._stream)

    def consumed(self) -> None:
        """Read on, if messages were taken from the gate."""
        if self._gate.weight < WINDOW:
            self._room.set()

    def read_unlimited(self) -> None:
        """Read on without limit, because all further messages are dropped."""
        self.unlimited = True
        self._room.set()

    @property
    def _given_up(self) -> bool:
        """Whether trio-websocket has stopped after input that it could not read; as a client it would read on."""
        closed = self.connection is not None and self.connection.closed is not None
        return closed and not self.sent_close and not self.unlimited

    def _feed(self, chunk: bytes) -> None:
        self.signs.feed(chunk)
        if self._gate.texts:
            self.arrival.unpark_all()

    async def _receive(self) -> bytes:
        self.signs.begin_read()
        try:
            chunk = await self._stream.receive_some(READ_SIZE)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.over.set()
            raise
        finally:
            self.signs.end_read()
        if not chunk:
            self.over.set()
        return bytes(chunk)


def _gathered(pieces: list[bytes]) -> Iterator[bytes | memoryview]:
    """Join small pieces into one write. A large piece is not copied but written in parts, so that progress is seen."""
    small: list[bytes] = []
    for piece in pieces:
        if len(piece) < PIECE:
            small.append(piece)
            continue
        if small:
            yield b"".join(small)
            small.clear()
        with memoryview(piece) as view:
            for start in range(0, len(piece), PIECE):
                with view[start : start + PIECE] as part:
                    yield part
    if small:
        yield b"".join(small)
