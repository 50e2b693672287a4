"""One gRPC call of a client: its headers, its bytes in both directions, its status. It knows no frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import attrs
import trio

from trimcp.cleaning import one_line
from trimcp.framing.grpc import GrpcDecoder, GrpcStatus, decode_text, status_of_http

WINDOW: Final = 256 * 1024
"""Bytes of one call that may wait here unread."""

_LONGEST: Final = 200


class CallFailed(Exception):
    """A gRPC call has not ended well.

    Attributes:
        status: its status.
        message: what the server said about it, or what happened to it here. Untrusted text.
        trailers: the server's metadata after the answer, by lower-case name.
        begun: whether the server may have begun it: if not, it can be repeated on another connection.
    """

    def __init__(
        self, status: GrpcStatus, message: str, trailers: Mapping[str, str] | None = None, *, begun: bool = True
    ) -> None:
        super().__init__(f"{status.name}: {message}" if message else status.name)
        self.status: GrpcStatus = status
        self.message: str = message
        self.trailers: Mapping[str, str] = trailers or {}
        self.begun: bool = begun


class Carrier(Protocol):
    """The connection of a call."""

    async def send_data(self, call: Http2Call, data: bytes, end: bool) -> None:
        """Send bytes on a call as its window lets them. Raises CallFailed if it has ended."""

    def grant_call(self, id: int, size: int) -> None:
        """Let the server send so many bytes more on a call."""

    def end_call(self, call: Http2Call) -> None:
        """Tell the server that nothing more follows on a call."""

    def forget(self, call: Http2Call, *, reset: bool) -> None:
        """Note that a call is over for its caller."""


@attrs.define(eq=False)
class Http2Call:
    """One call. Made by `Http2Client.call`.

    Attributes:
        headers: the server's first headers by lower-case name, once they are there.
        trailers: its last ones.
        failure: why it has failed, or None.
        ended: whether the server has said everything.
        gone: set when nothing sent reaches the server any more.
        pieces: counts what was sent.
    """

    _connection: Carrier
    id: int
    headers: dict[str, str] | None = attrs.field(init=False, default=None)
    trailers: dict[str, str] = attrs.field(init=False, factory=dict)
    failure: CallFailed | None = attrs.field(init=False, default=None)
    ended: bool = attrs.field(init=False, default=False)
    gone: trio.Event = attrs.field(init=False, factory=trio.Event)
    pieces: int = attrs.field(init=False, default=0)
    _arrived: bytearray = attrs.field(init=False, factory=bytearray)  # not a list: pieces may be tiny
    _owed: int = attrs.field(init=False, default=0)  # bytes taken, and not granted again yet
    _news: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _closed: bool = attrs.field(init=False, default=False)

    # The caller

    async def begun(self) -> None:
        """Wait for the server's first headers.

        Raises:
            CallFailed: it refused the call, or there was none that it understands.
        """
        while self.failure is None and not self.ended and not self._closed:
            if self.headers is not None and "grpc-status" not in self.headers:
                break
            await self._news.park()
        if self.failure is not None:
            raise self.failure
        if self.ended and self.status is not GrpcStatus.OK:
            raise self._outcome()
        headers = self.headers or {}
        if headers.get(":status") != "200" or not headers.get("content-type", "").startswith("application/grpc"):
            raise self._outcome()

    async def send(self, data: bytes, *, end: bool = False) -> None:
        """Send bytes; with `end`, nothing more follows. If cancelled, a part of them may have been sent.

        Raises:
            CallFailed: the call has ended.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._connection.send_data(self, data, end)

    async def receive(self) -> bytes:
        """Return the bytes that have arrived, at least one; b"" at the end. Call `credit` once they are used.

        Raises:
            CallFailed: the call has failed.
            trio.ClosedResourceError: it was closed here.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._arrived:
            if self._closed:
                raise trio.ClosedResourceError("this call was closed")
            if self.failure is not None:
                raise self.failure
            if self.ended:
                await trio.lowlevel.cancel_shielded_checkpoint()
                if self.status is not GrpcStatus.OK:
                    raise self._outcome()
                return b""
            await self._news.park()
        arrived = bytes(self._arrived)
        self._arrived = bytearray()
        return arrived

    def credit(self, size: int) -> None:
        """Note that received bytes have been used, so that the server may send as many again."""
        self._owed += size
        if self._owed >= WINDOW // 4 and not self.ended:
            owed, self._owed = self._owed, 0
            self._connection.grant_call(self.id, owed)

    async def next_message(self, decoder: GrpcDecoder) -> bytes | None:
        """Return the next message of the answer; None at the end. Cancelling this loses nothing.

        Args:
            decoder: what keeps the rest of what has arrived, the same one for the whole call.

        Raises:
            CallFailed: the call has failed, or a message is larger than the decoder takes.
        """
        while True:
            before = decoder.taken
            found = decoder.take(1)
            self.credit(decoder.taken - before)
            if decoder.fault is not None:
                raise CallFailed(decoder.fault.status, decoder.fault.reason)
            if found:
                assert isinstance(found[0], bytes)
                return found[0]
            data = await self.receive()
            if not data:
                if decoder.unfinished:
                    raise CallFailed(GrpcStatus.INTERNAL, "the server stopped within a message")
                return None
            decoder.feed(data)

    def end(self) -> None:
        """Say that nothing more follows. Returns at once."""
        self._connection.end_call(self)

    def cancel(self) -> None:
        """End the call now: the server is told, unless it has ended already. May be called more than once."""
        self._closed = True
        self.gone.set()
        self._arrived = bytearray()
        self._connection.forget(self, reset=True)
        self._news.unpark_all()

    @property
    def status(self) -> GrpcStatus:
        """The status that the server ended it with."""
        said = self.trailers.get("grpc-status")
        if said is None:
            http = (self.headers or {}).get(":status", "")
            return status_of_http(int(http)) if http.isascii() and http.isdigit() else GrpcStatus.UNKNOWN
        try:
            return GrpcStatus(int(said))
        except ValueError:
            return GrpcStatus.UNKNOWN

    def _outcome(self) -> CallFailed:
        http = (self.headers or {}).get(":status", "")
        message = self.trailers.get("grpc-message")
        text = f"the server answered with HTTP status {http:.10}" if message is None else decode_text(message)
        status = self.status
        if status is GrpcStatus.OK:
            status = GrpcStatus.UNKNOWN
        return CallFailed(status, one_line(text, _LONGEST), self.trailers)

    def check(self) -> None:
        """Raise CallFailed if nothing can be sent any more."""
        self.check_broken()
        if self.ended and self.status is not GrpcStatus.OK:
            raise self._outcome()
        if self.ended or self._closed:
            raise CallFailed(GrpcStatus.CANCELLED, "the call has ended")

    def check_broken(self) -> None:
        """Raise CallFailed if the call has failed."""
        if self.failure is not None:
            raise self.failure

    # The connection

    def take_data(self, data: bytes, size: int) -> None:
        """Keep received bytes; `size` counts their padding too."""
        if data and not self._closed:
            self._arrived += data
        self.credit(size - len(data))
        self._news.unpark_all()

    def take_headers(self, headers: dict[str, str], *, last: bool) -> None:
        """Note the server's first or last headers."""
        if last or "grpc-status" in headers:
            self.trailers = headers
        if not last:
            self.headers = headers
        self._news.unpark_all()

    def take_end(self) -> None:
        """Note that the server has ended the call."""
        self.ended = True
        self.gone.set()
        self._connection.forget(self, reset=True)  # our side may be open still
        self._news.unpark_all()

    def fail(self, failure: CallFailed) -> None:
        """Note that the call has failed."""
        if not self.ended and self.failure is None:
            self.failure = failure
        self.gone.set()
        self._connection.forget(self, reset=False)
        self._news.unpark_all()
