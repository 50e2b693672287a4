"""A proxy that speaks HTTP/1.1 to clients and HTTP/2 to the server, as many requests over one connection as it allows.

So what is tested over HTTP/1.1 is tested over HTTP/2 by the same clients, WebSockets too (RFC 8441). It passes on what
both sides do: who leaves it while it is answered resets its stream, a stream that is reset resets the connection of its
client, who is answered before its request has ended is told that the connection closes, and who does not read or is not
read fills a window. The connections to the server end with the last client.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import h11
import trio

from tests.peers.websockets import token
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.h2.engine import Engine
from trimcp.transports.http.h2.frames import Code, Http2Error, Setting
from trimcp.transports.http.h2.heads import BlockReader, ResponseFields, read_response, write_block
from trimcp.transports.http.h2.interface import EngineUser, Http2Stream

_WINDOW = 64 * 1024
_LINGER = 8 * 1024 * 1024  # bytes of a request that are read after its answer: closing earlier might lose that
_RESET = struct.pack("ii", 1, 0)
_HOP_BY_HOP = (b"host", b"connection", b"transfer-encoding", b"keep-alive", b"upgrade", b"sec-websocket-key")


class _Stream(Http2Stream):
    """One request on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.head: ResponseFields | None = None
        self.body = bytearray()
        self.ended = False
        self.broken = False
        self.news = trio.lowlevel.ParkingLot()
        self.room = trio.lowlevel.ParkingLot()

    def response(self, head: ResponseFields) -> bool:
        if head.status < 200:
            return True
        self.head = head
        self.news.unpark_all()
        return False

    def arrived(self, data: bytes) -> None:
        self.body += data
        self.news.unpark_all()

    def peer_ended(self) -> None:
        self.ended = True
        self.news.unpark_all()

    def was_reset(self, code: int, reason: str) -> None:
        self.broken = True
        self.news.unpark_all()
        self.room.unpark_all()

    def window_opened(self) -> None:
        self.room.unpark_all()


@attrs.define(eq=False)
class _Upstream(EngineUser):
    """A connection to the server, from the address of those it is for."""

    port: int
    source: str
    engine: Engine = attrs.field(init=False)
    ready: trio.Event = attrs.field(factory=trio.Event)
    gone: bool = False
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _out: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        reader: BlockReader[Any] = BlockReader(1 << 20, read_response)
        settings = {Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW_SIZE: _WINDOW}
        self.engine = Engine(self, reader, client=True, settings=settings)

    @property
    def has_room(self) -> bool:
        """Whether a stream may be opened."""
        return not self.gone and len(self.engine.streams) < self.engine.peer_streams

    def end(self) -> None:
        """Close it, whatever is under way."""
        self.gone = True
        self.scope.cancel()

    async def run(self) -> None:
        try:
            with self.scope:
                stream = await trio.open_tcp_stream("127.0.0.1", self.port, local_address=self.source)
                await self._exchange(stream)
        except OSError:  # nobody listens there any more
            pass
        finally:
            self.gone = True
            self.ready.set()

    async def _exchange(self, stream: trio.SocketStream) -> None:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream)
                async for data in stream:
                    self.engine.feed(bytes(data), trio.current_time())
                    while self.engine.advance(64):
                        pass
                    self.flush()
                nursery.cancel_scope.cancel()
        except (trio.BrokenResourceError, Http2Error):
            pass
        finally:
            self.gone = True
            for each in list(self.engine.streams.values()):
                each.was_reset(0, "")
            await trio.aclose_forcefully(stream)

    async def _write(self, stream: trio.abc.Stream) -> None:
        try:
            while True:
                if out := bytes(self.engine.out):
                    self.engine.out.clear()
                    await stream.send_all(out)
                else:
                    await self._out.park()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await trio.sleep_forever()  # the reader notices

    def flush(self) -> None:
        self._out.unpark_all()

    # Called by the engine

    def windows_opened(self) -> None:
        for stream in self.engine.streams.values():
            stream.window_opened()

    def settings_came(self) -> None:
        self.ready.set()

    def went_away(self, last: int, code: int) -> None:
        self.gone = True


@attrs.define(eq=False)
class _Relay:
    """Connections of clients, and those to the server: one more where none has room for a stream."""

    port: int
    nursery: trio.Nursery
    _clients: int = 0
    _upstreams: list[_Upstream] = attrs.field(factory=list)
    _opening: trio.Lock = attrs.field(factory=trio.Lock)

    async def serve(self, client: trio.SocketStream) -> None:
        wire = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        self._clients += 1
        try:
            try:
                while await self._relay(client, wire):
                    wire.start_next_cycle()
            finally:
                self._left()
            await _linger(client)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, h11.ProtocolError):
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        finally:
            await trio.aclose_forcefully(client)

    def _left(self) -> None:
        self._clients -= 1
        if not self._clients:
            for upstream in self._upstreams:
                upstream.end()

    async def _upstream(self, source: str) -> _Upstream:
        """A connection from this address with room for a stream. Raises `trio.BrokenResourceError`: there is none."""
        async with self._opening:
            self._upstreams = [each for each in self._upstreams if not each.gone]
            for upstream in self._upstreams:
                if upstream.source == source and upstream.has_room:
                    return upstream
            upstream = _Upstream(self.port, source)
            self._upstreams.append(upstream)
            self.nursery.start_soon(upstream.run)
            await upstream.ready.wait()
            if not upstream.has_room:
                raise trio.BrokenResourceError
            return upstream

    async def _relay(self, client: trio.SocketStream, wire: h11.Connection) -> bool:
        request = await _event(client, wire)
        if not isinstance(request, h11.Request):
            return False
        upstream = await self._upstream(client.socket.getpeername()[0])
        headers = dict(request.headers)
        upgrades = headers.get(b"upgrade") == b"websocket"
        fields = [(":method", "CONNECT" if upgrades else request.method.decode())]
        fields += [(":protocol", "websocket")] if upgrades else []
        fields += [(":scheme", "http"), (":authority", headers[b"host"].decode()), (":path", request.target.decode())]
        fields += [(n.decode(), v.decode("latin-1")) for n, v in request.headers if n not in _HOP_BY_HOP]
        stream, engine, keeps = _Stream(), upstream.engine, False
        engine.open(stream, write_block(fields), end=False)
        upstream.flush()
        try:
            async with open_service_nursery() as nursery:
                if upgrades and await _accepted(stream):
                    key = headers[b"sec-websocket-key"].decode()
                    await self._switch(client, wire, upstream, stream, key, nursery)
                else:
                    nursery.start_soon(self._send_body, client, wire, upstream, stream, nursery.cancel_scope)
                    keeps = await self._answer(client, wire, upstream, stream)
                nursery.cancel_scope.cancel()
        finally:
            engine.reset(stream, Code.CANCEL)
            upstream.flush()
        return keeps

    async def _send_body(
        self,
        client: trio.SocketStream,
        wire: h11.Connection,
        upstream: _Upstream,
        stream: _Stream,
        scope: trio.CancelScope,
    ) -> None:
        """Send the body as far as the server takes it, then look whether the client leaves."""
        try:
            while isinstance(event := await _event(client, wire), h11.Data):
                await _pass_on(upstream, stream, bytes(event.data))
            if isinstance(event, h11.EndOfMessage) and stream.sends:
                upstream.engine.send_data(stream, b"", end=True)
                upstream.flush()
                if data := await client.receive_some(65536):
                    wire.receive_data(data)  # the next request
                else:
                    scope.cancel()
        except (trio.BrokenResourceError, h11.ProtocolError):
            scope.cancel()

    async def _answer(
        self, client: trio.SocketStream, wire: h11.Connection, upstream: _Upstream, stream: _Stream
    ) -> bool:
        """Send the response; return whether the connection is kept. Raises `trio.BrokenResourceError`: it was cut."""
        head = await _head(stream)
        headers = list(head.headers.items())
        if wire.their_state is h11.SEND_BODY:
            headers.append(("connection", "close"))
        out = wire.send(h11.Response(status_code=head.status, headers=headers)) or b""
        if not stream.body and not stream.ended:
            await client.send_all(out)
            out = b""
        while data := await _body(stream):
            await client.send_all(out + (wire.send(h11.Data(data=data)) or b""))
            out = b""
            upstream.engine.credit(stream, len(data))
            upstream.flush()
        if out := out + (wire.send(h11.EndOfMessage()) or b""):
            await client.send_all(out)
        return wire.our_state is h11.DONE and wire.their_state is h11.DONE

    async def _switch(
        self,
        client: trio.SocketStream,
        wire: h11.Connection,
        upstream: _Upstream,
        stream: _Stream,
        key: str,
        nursery: trio.Nursery,
    ) -> None:
        """Pass on the bytes of a WebSocket that was accepted, until the server ends it or either side cuts it."""
        head = await _head(stream)
        headers = [*head.headers.items(), ("Upgrade", "websocket"), ("Connection", "Upgrade")]
        headers.append(("Sec-WebSocket-Accept", token(key)))
        await _event(client, wire)  # the end of the request
        await client.send_all(wire.send(h11.InformationalResponse(status_code=101, headers=headers)) or b"")
        nursery.start_soon(self._listen, client, wire.trailing_data[0], upstream, stream, nursery.cancel_scope)
        while data := await _body(stream):
            await client.send_all(data)
            upstream.engine.credit(stream, len(data))
            upstream.flush()

    async def _listen(
        self, client: trio.SocketStream, data: bytes, upstream: _Upstream, stream: _Stream, scope: trio.CancelScope
    ) -> None:
        try:
            await _pass_on(upstream, stream, data)
            while data := bytes(await client.receive_some(65536)):
                await _pass_on(upstream, stream, data)
            if stream.sends:
                upstream.engine.send_data(stream, b"", end=True)
                upstream.flush()
        except trio.BrokenResourceError:
            scope.cancel()


async def _pass_on(upstream: _Upstream, stream: _Stream, data: bytes) -> None:
    """Send bytes of a client as far as the server takes them."""
    while data and stream.sends:
        taken = upstream.engine.send_data(stream, data, end=False)
        data = data[taken:]
        upstream.flush()
        if data:
            await stream.room.park()


async def _head(stream: _Stream) -> ResponseFields:
    while stream.head is None:
        await _news(stream)
    return stream.head


async def _accepted(stream: _Stream) -> bool:
    return (await _head(stream)).status == 200


async def _body(stream: _Stream) -> bytes:
    """What has arrived; b"" at the end."""
    while not stream.body:
        if stream.ended:
            return b""
        await _news(stream)
    data, stream.body = bytes(stream.body), bytearray()
    return data


async def _news(stream: _Stream) -> None:
    if stream.broken:
        raise trio.BrokenResourceError
    await stream.news.park()


async def _linger(client: trio.SocketStream) -> None:
    """Say that nothing more is sent, and read until the client has seen that."""
    await client.send_eof()
    left = _LINGER
    while left > 0 and (data := await client.receive_some(65536)):
        left -= len(data)


async def _event(client: trio.SocketStream, wire: h11.Connection) -> Any:
    while (event := wire.next_event()) is h11.NEED_DATA:
        if wire.they_are_waiting_for_100_continue:
            await client.send_all(wire.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
        wire.receive_data(await client.receive_some(65536))
    return event


@asynccontextmanager
async def translated(port: int) -> AsyncIterator[int]:
    """Run a proxy before the server at this port, and yield the port where it listens."""
    async with open_service_nursery() as nursery:
        relay = _Relay(port, nursery)
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, relay.serve, [listener])
        yield listener.socket.getsockname()[1]
        nursery.cancel_scope.cancel()
