"""A relay between a client and a server, which can cut what runs through it: as when a network or a server is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import attrs
import trio

from tests.peers.serving import Place

__all__ = ["Relay", "relayed"]


@attrs.define(eq=False)
class Relay(Place):
    """Passes connections on to a server, at an address of its own.

    Attributes:
        server: where they lead.
        url: the address.
        mark: a connection on which the server sends this is closed right before it.
        cuts: how often that was.
    """

    server: Place
    url: str
    mark: bytes | None = None
    cuts: int = 0
    _streams: set[trio.SocketStream] = attrs.field(factory=set)
    _listening: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    async def run(self, listener: trio.SocketListener) -> None:
        """Pass on whoever comes, until it is closed."""
        with self._listening:
            await trio.serve_listeners(self._pass_on, [listener])

    async def _pass_on(self, near: trio.SocketStream) -> None:
        async with self.server.wire() as wire, trio.open_nursery() as nursery:
            self._streams |= {near, wire.stream}
            nursery.start_soon(self._pump, near, wire.stream, None)
            nursery.start_soon(self._pump, wire.stream, near, self.mark)
        self._streams -= {near, wire.stream}

    async def _pump(self, source: trio.SocketStream, sink: trio.SocketStream, mark: bytes | None) -> None:
        try:
            async for data in source:
                if mark is not None and (at := data.find(mark)) >= 0:
                    self.cuts += 1
                    await sink.send_all(data[:at])
                    break
                await sink.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            source.socket.close()
            sink.socket.close()

    def cut(self) -> None:
        """Close every connection."""
        for stream in list(self._streams):
            stream.socket.close()

    def close(self) -> None:
        """Close every connection, and refuse new ones."""
        self._listening.cancel()
        self.cut()


@asynccontextmanager
async def relayed(server: Place, *, mark: bytes | None = None) -> AsyncIterator[Relay]:
    """Run a relay to a server; it has the server's path, on a port of its own."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    parts = urlsplit(server.url)
    address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
    url = parts._replace(scheme=parts.scheme.removesuffix("+unix"), netloc=address).geturl()
    relay = Relay(server, url, mark)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relay.run, listener)
        yield relay
        nursery.cancel_scope.cancel()
