"""Messages over one gRPC call, `Mcp.Exchange`: the channel of both sides. It knows bytes and framing, not HTTP/2."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import attrs
import trio

from trimcp.budget import MemoryCharge
from trimcp.channel import Incoming, MessageChannel, OneTask, Outgoing
from trimcp.framing.grpc import OK_TRAILERS, GrpcDecoder, GrpcStatus, json_rpc_header, status_trailers
from trimcp.principal import Principal
from trimcp.transports.descriptors import PIECE
from trimcp.transports.http.interfaces import ByteStream
from trimcp.wire.jsonrpc import Malformed, parse

EXCHANGE: Final = "/trimcp.v1.Mcp/Exchange"
"""The path of the method that carries MCP."""

ResultT = TypeVar("ResultT")

_BATCH: Final = 128  # messages that one `receive` returns at most: each costs as much as a line of standard input
_SMALLEST: Final = 32  # bytes of a short request, approximately


@attrs.define(eq=False)
class GrpcChannel(MessageChannel):
    """One JSON-RPC message per `JsonRpc`.

    A message over the limit is received as `Malformed` and is not kept in memory. What is no `JsonRpc`, or
    one of sixteen times the limit, ends the call, as does one that is not whole in time.

    It has more than 20 fields because both directions of one call keep what they have begun.
    """

    _stream: ByteStream  # the call; finished with the channel
    max_message: int  # bytes of the largest message that is accepted
    message_timeout: float = attrs.field(default=30.0, kw_only=True)  # seconds from a message's first byte to its last
    # bytes; for each so many that arrive of a message it gets one second more
    message_rate: float = attrs.field(default=64 * 1024, kw_only=True)
    # bytes that may arrive before any of them is used
    _window: int = attrs.field(default=64 * 1024, kw_only=True, alias="window")
    # how messages may be compressed: the call's header `grpc-encoding`, or None
    _encoding: str | None = attrs.field(default=None, kw_only=True, alias="encoding")
    # returns the trailers with which the channel ends the call (servers)
    _ending: Callable[[], tuple[tuple[str, str], ...]] = attrs.field(
        default=lambda: OK_TRAILERS, kw_only=True, alias="ending"
    )
    # set on every received message
    _principal: Principal | None = attrs.field(default=None, kw_only=True, alias="principal")
    _headers: Mapping[str, str] | None = attrs.field(default=None, kw_only=True, alias="headers")
    # returns the messages that payloads of another kind than `JsonRpc` are, and the frame of a message's JSON text in
    # that kind. Neither raises.
    _read: Callable[[Sequence[bytes]], Awaitable[list[Any]]] | None = attrs.field(
        default=None, kw_only=True, alias="read"
    )
    _write: Callable[[bytes], Awaitable[bytes]] | None = attrs.field(default=None, kw_only=True, alias="write")
    read_ahead: tuple[int, int] = attrs.field(init=False)
    _decoder: GrpcDecoder = attrs.field(init=False)
    _unfinished: MemoryCharge = attrs.field(init=False, factory=MemoryCharge)
    _left: float = attrs.field(init=False, default=math.inf)  # seconds for the message in progress, if any
    _rounds: int = attrs.field(init=False, default=0)
    _sending: OneTask = attrs.field(init=False, factory=partial(OneTask, "sending on"))
    _receiving: OneTask = attrs.field(init=False, factory=partial(OneTask, "receiving from"))
    _broken: bool = attrs.field(init=False, default=False)
    _closed: bool = attrs.field(init=False, default=False)
    _why: str | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._decoder = GrpcDecoder(self.max_message, tunnel=self._write is None, encoding=self._encoding)
        self.read_ahead = (_BATCH + self._window // _SMALLEST, 2 * self._window)

    @property
    def half_open(self) -> bool:  # type: ignore[override]  # it depends on how the peer ended its side
        """Whether the peer has only said everything: it may still read the answers."""
        return self._stream.half_closed

    @property
    def too_slow(self) -> bool:  # type: ignore[override]  # as above
        return self._stream.too_slow

    @property
    def sends(self) -> bool:
        """Whether a part of a message has not been taken from it yet."""
        return self._broken

    async def send(self, batch: Sequence[Outgoing]) -> None:
        with self._sending:
            await trio.lowlevel.checkpoint_if_cancelled()
            self._check_open()
            if self._broken:
                raise trio.BrokenResourceError(self._why or "an earlier send failed or was cut short")
            if not batch:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return
            self._broken = True  # until all bytes are written
            held: list[bytes] = []
            size = 0
            try:
                for message in batch:
                    data = message.data
                    if self._write is not None:
                        data = await self._write(data)
                    else:
                        held.append(json_rpc_header(len(data)))
                    if held and len(data) >= PIECE:  # is not copied
                        await self._stream.send(b"".join(held))
                        held, size = [], 0
                    held.append(data)
                    size += len(data)
                    if size >= PIECE:
                        await self._stream.send(b"".join(held))
                        held, size = [], 0
                if held:
                    await self._stream.send(b"".join(held))
            except trio.BrokenResourceError as error:
                self._check_open()
                self._why = self._why or str(error)
                raise
            self._broken = False

    def write_progress(self) -> Hashable:
        return self._stream.progress()

    async def receive(self) -> Sequence[Incoming]:
        with self._receiving:
            await trio.lowlevel.checkpoint_if_cancelled()
            self.count_received()
            decoder = self._decoder
            while True:
                self._check_open()
                if decoder.behind:
                    await trio.lowlevel.checkpoint()
                    if found := self._take():
                        return found if self._read is None else await self._converted(found, self._read)
                if decoder.fault is not None:
                    raise self._failed(decoder.fault.status, decoder.fault.reason)
                if self._unfinished.counted and self.holding is not None and not self.holding.may_grow:
                    await self._in_time(self.holding.room)
                if not (data := await self._more()):
                    self._check_open()
                    raise trio.EndOfChannel("the peer has ended the call")
                decoder.feed(data)
                if found := self._take():
                    return found if self._read is None else await self._converted(found, self._read)

    @staticmethod
    async def _converted(
        found: list[Incoming], read: Callable[[Sequence[bytes]], Awaitable[list[Any]]]
    ) -> list[Incoming]:
        payloads: list[Any] = [each.message for each in found]
        for each, message in zip(found, await read(payloads), strict=True):
            each.message = message
        return found

    def _take(self) -> list[Incoming]:
        decoder, before = self._decoder, self._decoder.taken
        found = decoder.take(_BATCH)
        used = decoder.taken - before
        self._stream.credit(used)
        if not found and (decoder.held or self._unfinished.counted):
            self._unfinished.holding = self.holding
            self._unfinished.set(decoder.held)
        if decoder.rounds != self._rounds:
            self._rounds, self._left = decoder.rounds, math.inf
        if self._left < math.inf:
            self._left += used / self.message_rate
        return [self._incoming(message) for message in found]

    def _incoming(self, found: bytes | Malformed) -> Incoming:
        if isinstance(found, bytes):
            message: Any = parse(found) if self._read is None else found
            return Incoming(message, len(found), None, self._headers, self._principal)
        return Incoming(found, 0, None, self._headers, self._principal)

    async def _more(self) -> bytes:
        """Wait for bytes. A message that has begun has to be whole in time; waiting for memory counts as well."""
        if not self._decoder.unfinished:
            try:
                return await self._stream.receive()
            except trio.BrokenResourceError as error:
                self._why = str(error)
                raise
        return await self._in_time(self._stream.receive)

    async def _in_time(self, wait: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Wait for something in the middle of a message, for as long as the message may still take."""
        began = trio.current_time()
        if self._left == math.inf:
            self._left = self.message_timeout
        try:
            with trio.move_on_after(self._left):
                return await wait()
        finally:
            self._left -= trio.current_time() - began
        raise self._failed(GrpcStatus.DEADLINE_EXCEEDED, "a message took too long")

    def _failed(self, status: GrpcStatus, why: str) -> trio.BrokenResourceError:
        self._why = f"the peer broke the protocol ({why})"
        self._stream.finish(status_trailers(status, why))
        return trio.BrokenResourceError(self._why)

    def count_received(self) -> None:
        if self._unfinished.counted:
            self._unfinished.set(self._decoder.held)

    def set_max_message(self, size: int) -> None:
        self._decoder.max_size = size

    async def wait_peer_closed(self) -> None:
        await self._stream.gone.wait()

    async def aclose(self) -> None:
        self._closed = True
        self._unfinished.set(0)
        self._stream.finish(self._ending())
        await trio.lowlevel.checkpoint()

    def close_reason(self) -> str | None:
        return self._why

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this channel was closed")
