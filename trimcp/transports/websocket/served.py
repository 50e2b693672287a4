"""A WebSocket on our own listener: its connection's task reads frames and pushes the messages into the session.

What the session says is written by the task that says it, as long as the socket accepts it (`H1Writer`). So a message
passes two tasks, this one and the handler's, and a silent connection has one task and no timer of its own: the
listener's clock asks for pings. The frames of messages are read by `FrameGate`, those of control by wsproto.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any, Final

import trio

from trimcp.budget import Evictable, MemoryCharge
from trimcp.channel import Incoming, Link, Outgoing
from trimcp.framing.frames import TURN, FrameGate, text_frame
from trimcp.support.deadlines import Deadline, Deadlines
from trimcp.transports.descriptors import PIECE, READ_SIZE
from trimcp.transports.http.h1.wires import Wire
from trimcp.transports.http.h1.writer import H1Writer
from trimcp.transports.http.interfaces import ConnectedSession, Head, Upgrade, token_expired
from trimcp.transports.websocket.frames import (
    GONE,
    LATE,
    LATE_MESSAGE,
    KeepAlive,
    LifeSign,
    PeerSigns,
    close_text,
    fault_of,
    fault_text,
    silence_text,
)
from trimcp.transports.websocket.handshake import HandshakeFailed, accept

if TYPE_CHECKING:
    from wsproto.frame_protocol import FrameProtocol

_CLOSING: Final = 1.0  # seconds for the closing handshake
_DRAINED: Final = 16  # reads after a Close frame that names a fault
_AHEAD: Final = (TURN, 2 * READ_SIZE)  # what one turn of a read brings, and the beginning of a message before it
_LARGE: Final = 32 * 1024  # bytes; a message of more is not copied to join its header

_PING: Final = b"\x89\x00"
_PONG: Final = b"\x8a\x00"
_GOING_AWAY: Final = 1001
_INTERNAL_ERROR: Final = 1011

_log = logging.getLogger("trimcp.websocket")


async def serve_websocket(
    keep_alive: KeepAlive,
    early: bytes,
    wire: Wire,
    writer: H1Writer,
    deadlines: Deadlines,
    head: Head,
    upgrade: Upgrade,
) -> bool:
    """Answer a request for a WebSocket, and serve it until either side closes it. The caller closes the wire.

    `early`: bytes that arrived after the head. Over HTTP/2 the request was answered before. Returns whether there was a
    WebSocket; else the refusal was written.
    """
    if not head.http2:
        try:
            writer.write(accept(head.headers, upgrade.subprotocol))
        except HandshakeFailed as failure:
            writer.write(failure.answer)
            _log.debug("no WebSocket for %s: %s", head.peer, failure)
            return False
    wire.lift_timeout()
    await ServedWebSocket(keep_alive, wire, writer, deadlines, head, upgrade).run(early)
    return True


class ServedWebSocket:
    """One connection and its session. A `MessageWriter` to the session, the owner of its writer, an `Evictable`.

    It has more than 300 lines because reading, writing and closing share the state of one connection.
    """

    __slots__ = (
        *("_alarm", "_answer", "_connection", "_controls", "_gate", "_head", "_keep_alive", "_lost", "_parked"),
        *("_pinged", "_session", "_signs", "_upgrade", "_wire", "_writer"),
    )

    def __init__(
        self, keep_alive: KeepAlive, wire: Wire, writer: H1Writer, deadlines: Deadlines, head: Head, upgrade: Upgrade
    ) -> None:
        self._keep_alive = keep_alive
        self._wire = wire
        self._writer = writer
        self._head = head
        self._upgrade = upgrade
        self._gate = FrameGate(upgrade.max_message, masked=True)
        self._signs = PeerSigns(self._gate, keep_alive, MemoryCharge(head.holding))
        self._controls: FrameProtocol | None = None  # created with the first control frame
        self._pinged = False  # whether a ping was not answered yet
        self._parked: trio.lowlevel.ParkingLot | None = None  # the connection's task, while it waits for the writer
        self._lost = False  # whether the peer has left, or was dropped
        self._answer: bytes | None = None  # to the peer's Close frame
        self._connection: Evictable | None = None  # which holds what this holds
        self._alarm: Deadline = deadlines.new(self._look)
        assert upgrade.open is not None
        self._session: ConnectedSession = upgrade.open(self)
        writer.owner = self
        writer.stall_timeout = self._session.stall_timeout
        if head.holding is not None:
            self._connection, head.holding.holder = head.holding.holder, self

    # For the session

    @property
    def read_ahead(self) -> tuple[int, int]:
        return _AHEAD

    @property
    def link(self) -> Link:
        return self._head.link

    @property
    def blocked(self) -> bool:
        return self._writer.blocked

    @property
    def waiting(self) -> int:
        return self._writer.waiting or self._writer.undelivered

    def write(self, outgoing: Outgoing) -> None:
        data = outgoing.data
        if self._upgrade.show is not None:
            self._upgrade.show("-->", data)
        header, _ = text_frame(data, masked=False)
        if len(data) < _LARGE:
            self._writer.gather(header + data)
        else:
            self._writer.gather(header)
            self._writer.write(data)

    def write_later(self) -> None:
        self._writer.write_later()

    def session_ended(self) -> None:
        self.wake()

    # For the writer

    def drained(self) -> None:
        self._session.writable()
        if not self._writer.waiting:
            self._unpark()

    def wake(self) -> None:
        """Let the connection's task look: the writer is broken, or the session was closed."""
        writer, session = self._writer, self._session
        if writer.broken and not session.closed:
            if writer.stalled:
                session.stalled()
            else:
                self._lose("the peer stopped listening")
        self._unpark()
        self._wire.wake()

    # For the budget

    @property
    def at_rest(self) -> bool:
        return self._session.at_rest

    def evict(self, why: str) -> None:
        """Drop the peer at once, with what is queued for it."""
        connection, self._connection = self._connection, None
        self._session.disconnect(why, slow=True)
        self._writer.give_up()
        if connection is not None:
            connection.evict(why)

    # The clock

    def _look(self) -> None:
        """Ping a silent peer, end the connection of one that does not answer, is too slow or authorized no longer."""
        left = self._upgrade.until - time.time()
        if left <= 0:
            token_expired(self._head.principal)
            self._session.close()
            return
        sign, at = self._signs.look(writing=self._writer.waiting > 0)
        if sign is LifeSign.SILENT:
            self._lose(f"the connection broke: {silence_text(self._keep_alive.dead_after)}")
        elif sign is LifeSign.LATE:
            self._gate.fault = LATE_MESSAGE
            self._lose(f"the connection broke: {LATE}")
        else:
            if sign is LifeSign.PONG:
                self._writer.write(_PONG)
            elif sign is LifeSign.PING and not self._pinged:
                self._pinged = True  # one at a time: if it is not answered, the next one would not be either
                self._writer.write(_PING)
            self._alarm.set(min(at - trio.current_time(), left))

    # The connection's task

    async def run(self, early: bytes) -> None:
        """Serve until either side ends it. A crash is raised once the peer was told."""
        session = self._session
        try:
            self._look()
            try:
                await self._read(early)
            except trio.Cancelled:
                if not session.closed:
                    session.close()
                    # Shielded, because the last messages of cancelled handlers are still sent; bounded.
                    with trio.CancelScope(shield=True, deadline=trio.current_time() + session.drain_timeout):
                        await self._send_rest()
                raise
            except Exception:
                self._lose("an error of ours ended the connection")
                await self._close(self._frames().close(_INTERNAL_ERROR))
                raise
            await self._end()
        finally:
            self._alarm.close()
            session.forget()
            self._writer.close()
            del session, self._session  # they refer to each other

    async def _read(self, data: bytes) -> None:
        """Deliver messages until the session is closed, by either side."""
        session, gate, signs = self._session, self._gate, self._signs
        while True:
            signs.feed(data)
            if gate.texts:
                self._deliver()
                if signs.amount.counted:
                    signs.count()
            if not gate.empty:
                await self._take_controls()
            if gate.fault is not None:
                self._lose(f"the connection broke: {fault_text(gate.fault)}")
            while not session.closed:
                if session.paused:
                    holding = signs.amount.holding
                    if signs.amount.counted and holding is not None and not holding.may_grow:
                        signs.wait_for_room()
                    if await session.readable(self._wire.wait_peer_closed):
                        self._lose("the peer closed the connection")
                elif gate.behind:
                    await trio.lowlevel.checkpoint()
                    data = b""
                    break
                elif received := await self._receive():
                    data = received
                    break
                elif received is not None:
                    self._lose(f"the connection broke: {GONE}")
            else:
                return

    async def _receive(self) -> bytes | None:
        """Wait for input; b"" once the peer has closed, None if there is something else to look at."""
        signs, session = self._signs, self._session
        holding = signs.amount.holding
        if signs.amount.counted and holding is not None:
            while not (holding.may_grow or session.closed) and holding.when_it_may_grow(self._unpark):
                signs.wait_for_room()
                await self._park()
            await holding.budget.reads.wait(1)
            if session.closed:
                return None
        signs.begin_read()
        try:
            return await self._wire.read(READ_SIZE)
        finally:
            signs.end_read()

    def _deliver(self) -> None:
        gate, upgrade = self._gate, self._upgrade
        read, headers, principal = upgrade.read, upgrade.headers, upgrade.principal
        batch = []
        for data in gate.take_texts():
            message = gate.oversized.pop(0) if not data and gate.oversized else read(data)
            batch.append(Incoming(message, len(data), None, headers, principal))
        if upgrade.show is not None:
            for incoming in batch:
                upgrade.show("<--", incoming.message)
        self._session.deliver(batch)

    async def _take_controls(self) -> None:
        """Answer pings and a Close frame. A peer that pings and does not read our answers is not read either."""
        from wsproto.frame_protocol import Opcode, ParseFailed

        gate, writer, frames = self._gate, self._writer, self._frames()
        while piece := gate.take(PIECE):
            frames.receive_bytes(piece)
        answered = False
        try:
            for frame in frames.received_frames():
                payload: Any = frame.payload
                if frame.opcode is Opcode.PING:
                    writer.gather(bytes(frames.pong(payload)))
                    answered = True
                elif frame.opcode is Opcode.PONG:
                    self._pinged = False
                else:
                    code, reason = payload
                    self._answer = bytes(frames.close(code, reason))
                    self._lose(close_text(int(code), reason or ""))
        except ParseFailed as error:
            gate.fault = fault_of(error.code)
        while answered and writer.waiting and not self._session.closed:
            await self._park()

    def _frames(self) -> FrameProtocol:
        if self._controls is None:
            from wsproto.frame_protocol import FrameProtocol  # late: a twelfth of what a server over HTTP imports

            self._controls = FrameProtocol(False, [])
        return self._controls

    def _lose(self, why: str) -> None:
        self._lost = True
        if not self._session.closed:
            _log.debug("the peer %s is gone: %s", self._head.peer, why)
            self._session.disconnect(why)

    async def _park(self) -> None:
        """Wait until the writer has written everything, or `wake` was called."""
        if self._parked is None:
            self._parked = trio.lowlevel.ParkingLot()
        await self._parked.park()

    def _unpark(self) -> None:
        if self._parked is not None:
            self._parked.unpark_all()

    # The end

    async def _end(self) -> None:
        """Close the connection of a session that was closed: by us after its last messages, else at once."""
        session, writer, fault = self._session, self._writer, self._gate.fault
        if self._answer is not None:
            await self._close(self._answer)
        elif fault is not None:
            await self._close(self._frames().close(fault.code, fault.reason))
        elif not (self._lost or writer.broken):
            with trio.move_on_after(session.drain_timeout) as sending:
                await self._send_rest()
            if not sending.cancelled_caught:
                await self._close(self._frames().close(_GOING_AWAY))
        unsent = writer.waiting > 0
        writer.give_up()
        await self._wire.close(reset=unsent)
        await session.finish()

    async def _send_rest(self) -> None:
        """Wait until the handlers have unwound, and the peer has read what they said last."""
        session, writer = self._session, self._writer
        await session.finish()
        while (session.unsent or writer.waiting) and not writer.broken:
            await self._park()

    async def _close(self, frame: bytes | bytearray) -> None:
        """Send a Close frame and wait for the peer's, if there was none: a second at most."""
        gate, writer = self._gate, self._writer
        with trio.move_on_after(_CLOSING):
            writer.write(bytes(frame))
            while writer.waiting:
                await self._park()
            if writer.broken or self._answer is not None:
                return
            left: float = math.inf
            if gate.fault is not None:
                left = _DRAINED
                await self._wire.shut_write()
            # Closing with unread input would send a reset, which could overtake the Close frame.
            while left > 0:
                data = await self._wire.read(READ_SIZE)
                if data == b"":
                    return
                left -= 1
                if gate.fault is None and data:
                    gate.feed(data)
                    while gate.behind:
                        await trio.lowlevel.checkpoint()
                        gate.feed(b"")
                    gate.take_texts()
                    gate.oversized.clear()
                    if gate.closing or gate.fault is not None:
                        return
