"""`trimcp record --agent-tools`: a WebSocket on this machine that an agent connects to in place of a service."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Final

import attrs
import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, WebSocketRequest, serve_websocket

from trimcp.agent_tools.client.websocket import SUBPROTOCOL, open_agent_channel
from trimcp.agent_tools.client.wire import AgentTarget
from trimcp.channel import CLIENT_MAX_MESSAGE, Kind, MessageChannel, Outgoing
from trimcp.cli.exits import Failure
from trimcp.cli.text import theirs
from trimcp.errors import LocalError, McpError
from trimcp.support.nurseries import open_service_nursery
from trimcp.testing.transcript import JournalWriter

_HOST: Final = "127.0.0.1"
_UNSUPPORTED: Final = 1003  # close code of RFC 6455: data of a kind that is not taken


def agent_target(words: tuple[str, ...], headers: dict[str, str]) -> AgentTarget:
    """Return the service that a TARGET names. Raises Failure if it is not the URL of a WebSocket."""
    url = words[0] if len(words) == 1 else ""
    if not url.startswith(("ws://", "wss://", "ws+unix://")):
        raise Failure("agent tools are recorded and replayed over WebSocket: write ws://HOST:PORT, or wss, ws+unix")
    try:
        return AgentTarget(url, headers=headers)
    except LocalError as error:
        raise Failure(theirs(error)) from None


async def relay_agent(target: AgentTarget, port: int, journal: JournalWriter) -> int:
    """Wait for one agent, and forward and note what it and the service say until either has closed.

    The service gets the token that the agent has, if `target` has none. `port`: on this machine; 0 for a free one.
    """
    relay = AgentRelay(target, journal)
    async with open_service_nursery() as nursery:
        serve = partial(serve_websocket, relay.serve, _HOST, port, None, max_message_size=CLIENT_MAX_MESSAGE)
        try:
            server = await nursery.start(serve)
        except OSError as error:
            raise Failure(f"cannot listen on port {port}: {error.strerror or error}") from None
        journal.tell(f"the agent connects to ws://{_HOST}:{server.port}")
        await relay.over.wait()
    if relay.failure is not None:
        raise relay.failure
    return 0


@attrs.define(eq=False)
class AgentRelay:
    """Takes one agent's connection, and connects it to a service."""

    _target: AgentTarget
    _journal: JournalWriter
    over: trio.Event = attrs.field(init=False, factory=trio.Event)  # set when either side has closed
    failure: McpError | None = attrs.field(init=False, default=None)  # why the service was not reached, or None
    _taken: bool = attrs.field(init=False, default=False)

    async def serve(self, request: WebSocketRequest) -> None:
        """Serve the first agent; refuse others, and web pages, which have an Origin."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers}
        if "origin" in headers:
            await request.reject(403, body=b"web pages may not connect")
        elif SUBPROTOCOL not in request.proposed_subprotocols:
            await request.reject(400, body=b"this is a WebSocket of agent tools: offer its subprotocol")
        elif self._taken:
            await request.reject(503, body=b"one agent is recorded already")
        else:
            self._taken = True
            try:
                await self._connect(request, headers)
            finally:
                self.over.set()

    async def _connect(self, request: WebSocketRequest, headers: dict[str, str]) -> None:
        target = self._target
        if "authorization" in headers and "authorization" not in target.headers:
            target = attrs.evolve(target, headers={**target.headers, "authorization": headers["authorization"]})
        try:
            async with (
                open_agent_channel(target, read=bytes) as service,
                await request.accept(subprotocol=SUBPROTOCOL) as agent,
                open_service_nursery() as nursery,
            ):
                nursery.start_soon(self._from_agent, agent, service)
                await self._from_service(service, agent)
        except McpError as error:
            self.failure = error
            await request.reject(502, body=b"the service was not reached")

    async def _from_agent(self, agent: WebSocketConnection, service: MessageChannel) -> None:
        with suppress(ConnectionClosed, trio.BrokenResourceError, trio.ClosedResourceError):
            while isinstance(said := await agent.get_message(), str):
                data = said.encode()
                self._journal.note(True, data)
                await service.send([Outgoing(data, Kind.NOTIFICATION)])
            await agent.aclose(_UNSUPPORTED)
        await service.aclose()  # which ends the other direction

    async def _from_service(self, service: MessageChannel, agent: WebSocketConnection) -> None:
        with suppress(ConnectionClosed, trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                for incoming in await service.receive():
                    if isinstance(incoming.message, bytes):  # else it was larger than any message may be
                        self._journal.note(False, incoming.message)
                        await agent.send_message(incoming.message.decode())
