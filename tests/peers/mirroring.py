"""An in-process connection on which headers travel beside each message, as they do on HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.server.server import Server
from trimcp.session.drive import drive
from trimcp.support.nurseries import open_service_nursery
from trimcp.wire.jsonrpc import parse
from trimcp.wire.revisions import LATEST, Revision

Tamper = Callable[[Outgoing], None]
"""Changes what a client sends, on its way."""


@attrs.define(eq=False)
class HeaderChannel(MessageChannel):
    """One end. `sent` keeps every message that went out."""

    _send: trio.MemorySendChannel[Outgoing]
    _receive: trio.MemoryReceiveChannel[Outgoing]
    mirrors_headers: bool = False
    tamper: Tamper | None = None
    sent: list[Outgoing] = attrs.field(init=False, factory=list)

    async def send(self, batch: Sequence[Outgoing]) -> None:
        for outgoing in batch:
            self.sent.append(outgoing)
            if self.tamper is not None:
                self.tamper(outgoing)
            await self._send.send(outgoing)

    async def receive(self) -> Sequence[Incoming]:
        outgoing = await self._receive.receive()
        return [Incoming(parse(outgoing.data), len(outgoing.data), headers=outgoing.headers)]

    async def aclose(self) -> None:
        self._send.close()
        self._receive.close()
        await trio.lowlevel.checkpoint()

    def headers_of(self, method: str) -> list[Any]:
        """The headers of each request of this method, in order."""
        requests = (each for each in self.sent if each.kind is Kind.REQUEST)
        return [each.headers for each in requests if getattr(parse(each.data), "method", None) == method]


def header_channels(*, mirrors: bool = True, tamper: Tamper | None = None) -> tuple[HeaderChannel, HeaderChannel]:
    """The server's end and the client's, of which only the client's has headers to write."""
    to_client, from_server = trio.open_memory_channel[Outgoing](16)
    to_server, from_client = trio.open_memory_channel[Outgoing](16)
    return HeaderChannel(to_client, from_client), HeaderChannel(to_server, from_server, mirrors, tamper)


@asynccontextmanager
async def mirrored(
    server: Server[Any],
    client: Client | None = None,
    *,
    revision: Revision = LATEST,
    mirrors: bool = True,
    tamper: Tamper | None = None,
) -> AsyncIterator[tuple[ClientSession, HeaderChannel]]:
    """Yield a client's session with `server`, and the client's channel.

    Args:
        mirrors: whether the client's channel says that it carries headers.
        tamper: changes each of the client's messages.
    """
    client = client or Client("test")
    ours, theirs = header_channels(mirrors=mirrors, tamper=tamper)
    async with server.running() as running, open_service_nursery() as nursery:
        nursery.start_soon(drive, running.session(), ours)
        async with client.connect(theirs, revision=revision) as session:
            yield session, theirs
