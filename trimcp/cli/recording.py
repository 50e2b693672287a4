"""`trimcp record`, which forwards bytes unchanged, or messages if the server is at a URL; and `trimcp replay`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import attrs
import click
import orjson
import trio

from trimcp.channel import CLIENT_MAX_MESSAGE, Incoming, Kind, MessageChannel, MessageWriter, Outgoing
from trimcp.cli.exits import NO_CONNECTION, RECORD_EXIT_CODES, REPLAY_EXIT_CODES, Failure, say
from trimcp.cli.options import POSITIVE, HeaderOptions, with_options
from trimcp.cli.screen import Screen
from trimcp.cli.targets import NO_HEADERS, find_target, lost_text, read_headers
from trimcp.cli.text import theirs
from trimcp.errors import ConnectionLost, LocalError, McpError
from trimcp.run import on_signals
from trimcp.support.nurseries import open_service_nursery
from trimcp.testing.play import outgoing_of, play
from trimcp.testing.transcript import JournalWriter, Transcript
from trimcp.transports.descriptors import READ_SIZE
from trimcp.transports.stdio.child import ChildChannel, StdioServer
from trimcp.transports.stdio.server import Claim, claim, claim_stdio
from trimcp.transports.trace import as_json
from trimcp.wire.codes import INTERNAL_ERROR
from trimcp.wire.jsonrpc import Lost, Malformed

if TYPE_CHECKING:
    from trimcp.agent_tools.client.wire import AgentTarget
    from trimcp.server.running import Running
    from trimcp.session.session import Session
    from trimcp.transports.http.interfaces import Admitted, ConnectedSession, Head

_HOST: Final = "127.0.0.1"
_LAST: Final = 1.0  # seconds for the answer to an agent whose service was not reached
_LAST_ANSWERS: Final = 30.0
"""Seconds for the server's last responses after its client has closed the connection."""

_DIFFERS: Final = 1


@click.command(epilog=RECORD_EXIT_CODES)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("target", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--unmasked", is_flag=True, help="Write secrets as they are.")
@click.option("--max-size", metavar="MIB", default=64.0, show_default=True, type=POSITIVE, help="Stop at this size.")
@click.option("--agent-tools", is_flag=True, help="Stand between an agent and a service of agent tools at ws://.")
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help="Where the agent connects on this machine; by default a free port.",
)
@with_options(HeaderOptions)
def record(
    file: Path,
    target: tuple[str, ...],
    unmasked: bool,
    max_size: float,
    agent_tools: bool,
    port: int | None,
    options: HeaderOptions,
) -> None:
    """Stand between a client and a server, and write down in FILE all that they say.

    It is put in place of the server's command in the configuration of a host: it speaks with the client over standard
    input and output, and starts the server's command (after --), or connects to its URL. An existing FILE is kept, and
    the next one gets a number.

    With --agent-tools it listens on a port of this machine for one agent, which connects to that in place of the
    service's WebSocket; a token that the agent sends goes on to the service.

    \b
    Examples:
      trimcp record weather.jsonl -- python weather.py
      trimcp record weather.jsonl https://mcp.example/mcp --bearer MY_TOKEN
      trimcp record agent.jsonl --agent-tools --port 9000 ws://127.0.0.1:8000
    """
    if port is not None and not agent_tools:
        raise click.UsageError("--port is for --agent-tools: a client of MCP speaks over standard input and output")
    headers = read_headers(options.headers, options.bearer)
    relay: Callable[[JournalWriter], Awaitable[int]]
    server: Any
    if agent_tools:
        server = _agent_target(target, headers)
        relay = partial(relay_agent, server, port or 0)
    else:
        server = _named_target(target, headers)
        relay = partial(_relay_bytes if isinstance(server, StdioServer) else _relay_messages, server)
    size = int(max_size * 1024 * 1024)
    try:
        journal = JournalWriter(file, shlex.join(target), masked=not unmasked, max_bytes=size, tell=_tell)
    except OSError as error:
        raise Failure(f"cannot write {file}: {error}") from None
    try:
        sys.exit(trio.run(_record, relay, journal))
    except McpError as error:
        raise Failure(lost_text(error, server), NO_CONNECTION) from None
    finally:
        journal.close()


def _named_target(words: tuple[str, ...], headers: Mapping[str, str]) -> Any:
    """Return the target of a single argument, or of a command's arguments."""
    if len(words) > 1 and headers:
        raise Failure(NO_HEADERS)
    target = find_target(words[0], headers=headers) if len(words) == 1 else StdioServer(words)
    if isinstance(target, StdioServer):
        # It replaces the server, so it has the environment meant for the server.
        target = attrs.evolve(target, inherit_env=True, on_stderr=say)
    return target


def _tell(line: str) -> None:
    say(f"trimcp record: {line}")


async def _record(relay: Callable[[JournalWriter], Awaitable[int]], journal: JournalWriter) -> int:
    with trio.CancelScope() as scope, on_signals(lambda number: scope.cancel(reason="told to stop")):
        return await relay(journal)
    return 0


# Bytes


async def _relay_bytes(target: StdioServer, journal: JournalWriter) -> int:
    ours = claim()
    try:
        async with target.connect() as channel:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_to_server, ours, channel, journal)
                await _pass(channel.streams[0], ours.sender, partial(journal.note, False))
                with trio.move_on_after(1):  # it has closed its output, and usually exits soon
                    await channel.process.wait()
                nursery.cancel_scope.cancel(reason="the server has ended")
            ended = channel.process.returncode
    finally:
        ours.release()
    if ended is None:
        return 0
    return ended if ended >= 0 else 128 - ended


async def _to_server(ours: Claim, channel: ChildChannel, journal: JournalWriter) -> None:
    """Forward the client's bytes; when it closes, close the server's input and wait for the last responses."""
    sender = channel.streams[1]
    await _pass(ours.receiver, sender, partial(journal.note, True))
    await sender.aclose()
    await trio.sleep(_LAST_ANSWERS)
    await channel.aclose()


async def _pass(source: trio.abc.ReceiveStream, sink: trio.abc.SendStream, note: Callable[[bytes], object]) -> None:
    """Forward bytes as they arrive, and note each whole line before its end is forwarded."""
    line = bytearray()
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while chunk := await source.receive_some(READ_SIZE):
            first, *others = chunk.split(b"\n")  # of what came only: a long line comes in many pieces
            line += first
            for other in others:
                note(bytes(line))
                line = bytearray(other)
            if len(line) > CLIENT_MAX_MESSAGE:
                line = bytearray()  # too long for a message
            await sink.send_all(chunk)
    note(bytes(line))


# Messages


async def _relay_messages(target: Any, journal: JournalWriter) -> int:
    """Forward messages until either side has closed; without a client no more responses are expected."""
    ended = trio.Event()
    telling = trio.Lock()  # what the client hears comes from both ways

    async def one_way(source: MessageChannel, sink: MessageChannel, from_client: bool) -> None:
        await _relay(source, sink, from_client, journal, tell)
        ended.set()

    async def tell(message: Outgoing) -> None:
        async with telling:
            await client.send([message])

    async with (
        target.connect() as server,
        claim_stdio() as client,
        open_service_nursery() as nursery,
    ):
        client.set_max_message(CLIENT_MAX_MESSAGE)
        nursery.start_soon(one_way, server, client, False)
        nursery.start_soon(one_way, client, server, True)
        await ended.wait()
    return 0


async def _relay(
    source: MessageChannel,
    sink: MessageChannel,
    from_client: bool,
    journal: JournalWriter,
    tell: Callable[[Outgoing], Awaitable[None]],
) -> None:
    """Forward messages. The client is told of its requests that could not be read, or whose answer could not."""
    with suppress(trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
        while True:
            for incoming in await source.receive():
                message = incoming.message
                if not isinstance(message, Lost | Malformed):
                    said = as_json(message)
                    journal.note(from_client, orjson.dumps(said))
                    await (sink.send([outgoing_of(said)]) if from_client else tell(outgoing_of(said)))
                    continue
                error = {"code": INTERNAL_ERROR, "message": message.message}
                failed = {"jsonrpc": "2.0", "id": message.id, "error": error}
                if isinstance(message, Lost):
                    noted, waits = orjson.dumps(failed), True
                else:
                    noted = message.message.encode()
                    waits = message.is_request if from_client else message.is_response
                journal.note(from_client, noted)
                if waits and message.id is not None:
                    await tell(outgoing_of(failed))


# A WebSocket on this machine that an agent connects to in place of a service


def _agent_target(words: tuple[str, ...], headers: Mapping[str, str]) -> AgentTarget:
    """Return the service that a TARGET names. Raises Failure if it is not the URL of a WebSocket."""
    url = words[0] if len(words) == 1 else ""
    if not url.startswith(("ws://", "wss://", "ws+unix://")):
        raise Failure("agent tools are recorded and replayed over WebSocket: write ws://HOST:PORT, or wss, ws+unix")
    from trimcp.agent_tools.client.wire import AgentTarget

    try:
        return AgentTarget(url, headers=headers)
    except LocalError as error:
        raise Failure(theirs(error)) from None


async def relay_agent(target: AgentTarget, port: int, journal: JournalWriter) -> int:
    """Wait for one agent, and forward and note what it and the service say until either has closed.

    The service gets the token that the agent has, if `target` has none. `port`: on this machine; 0 for a free one.
    """
    from trimcp.agent_tools.client.websocket import PATH
    from trimcp.net import serve_http  # loaded by those who record agents, as below
    from trimcp.server.server import Server
    from trimcp.transports.http.h1.sockets import open_tcp
    from trimcp.transports.http.settings import HttpSettings

    try:
        (sock,) = await open_tcp(_HOST, port)
    except LocalError as error:
        raise Failure(str(error)) from None
    server = Server("trimcp")
    async with server.running() as running, open_service_nursery() as nursery:
        relay = AgentRelay(target, journal, nursery, running)
        routes = dict.fromkeys(("/", PATH, urlsplit(target.url).path or "/"), relay.admit)
        settings = HttpSettings(path=None, sse_path=None, websocket_path=None, health=False, routes=routes)
        serve = partial(serve_http, server, sockets=[sock], settings=settings, stop=relay.over, grace=_LAST)
        at = sock.getsockname()[1]
        await nursery.start(serve)
        journal.tell(f"the agent connects to ws://{_HOST}:{at}")
        await relay.over.wait()
    if relay.failure is not None:
        raise relay.failure
    return 0


@attrs.define(eq=False)
class AgentRelay:
    """Takes one agent's connection, and connects it to a service."""

    _target: AgentTarget
    _journal: JournalWriter
    _nursery: trio.Nursery
    _running: Running
    over: trio.Event = attrs.field(init=False, factory=trio.Event)  # set when either side has closed
    failure: McpError | None = attrs.field(init=False, default=None)  # why the service was not reached, or None
    _taken: bool = attrs.field(init=False, default=False)

    async def admit(self, head: Head) -> Admitted:
        """Admit the first agent, once the service is reached. Web pages, which have an Origin, were refused before."""
        from trimcp.agent_tools.messages.messages import SUBPROTOCOL
        from trimcp.transports.http.endpoint.accept import is_websocket_key
        from trimcp.transports.http.interfaces import Upgrade, refusal

        headers = head.headers
        offered = [name.strip() for name in headers.get("sec-websocket-protocol", "").split(",")]
        whole = head.websocket and is_websocket_key(headers.get("sec-websocket-key"))
        if not whole or SUBPROTOCOL not in offered:
            return refusal(400, f"this is a WebSocket of agent tools: offer the subprotocol {SUBPROTOCOL}")
        if self._taken:
            return refusal(503, "one agent is recorded already")
        self._taken = True
        target = self._target
        if "authorization" in headers and "authorization" not in target.headers:
            target = attrs.evolve(target, headers={**target.headers, "authorization": headers["authorization"]})
        try:
            service: MessageChannel = await self._nursery.start(self._reach, target)
        except BaseException as error:  # then there is nothing to record
            self.over.set()
            if not isinstance(error, McpError):
                raise
            self.failure = error
            return refusal(502, "the service was not reached")
        serve, opened = partial(self._serve, service), partial(self._open, service)
        return Upgrade(serve, SUBPROTOCOL, CLIENT_MAX_MESSAGE, headers=headers, read=bytes, open=opened)

    async def _reach(self, target: AgentTarget, task_status: trio.TaskStatus[MessageChannel]) -> None:
        """Keep a connection to the service until either side has closed."""
        from trimcp.agent_tools.client.websocket import open_agent_channel

        async with open_agent_channel(target, read=bytes) as service:
            task_status.started(service)
            await self.over.wait()

    def _open(self, service: MessageChannel, writer: MessageWriter) -> ConnectedSession:
        opened = self._running.open_connected(writer)
        opened.receiver = agent = RecordedAgent(opened.session)
        self._nursery.start_soon(self._serve, service, agent)
        return opened

    async def _serve(self, service: MessageChannel, agent: MessageChannel) -> None:
        try:
            async with open_service_nursery() as nursery:
                nursery.start_soon(self._pass_on, agent, service, True)
                await self._pass_on(service, agent, False)
        finally:
            self.over.set()

    async def _pass_on(self, source: MessageChannel, sink: MessageChannel, from_agent: bool) -> None:
        with suppress(trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                for incoming in await source.receive():
                    if isinstance(incoming.message, bytes):  # else it was larger than any message may be
                        self._journal.note(from_agent, incoming.message)
                        await sink.send([Outgoing(incoming.message, Kind.NOTIFICATION)])
        await sink.aclose()  # which ends the other direction


class RecordedAgent(MessageChannel):
    """The connection of the agent, read no further while a batch of it waits for the service to take it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sink = session.sink
        self._batch: Sequence[Incoming] = ()
        self._changed = trio.lowlevel.ParkingLot()
        session.watchers.add(self._lost)

    @property
    def paused(self) -> bool:
        return bool(self._batch) and not self._session.closed.is_set()

    async def readable(self) -> None:
        while self.paused:
            await self._changed.park()

    def deliver(self, batch: Sequence[Incoming]) -> None:
        self._batch = (*self._batch, *batch)
        self._changed.unpark_all()

    async def receive(self) -> Sequence[Incoming]:
        while not self._batch:
            if self._session.closed.is_set():
                raise trio.EndOfChannel
            await self._changed.park()
        batch, self._batch = self._batch, ()
        self._changed.unpark_all()
        return batch

    async def send(self, batch: Sequence[Outgoing]) -> None:
        for outgoing in batch:
            await self._sink.room()
            if self._session.closed.is_set():
                raise trio.ClosedResourceError
            self._sink.post(outgoing)

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self._session.close()
        self._changed.unpark_all()

    def _lost(self, _why: ConnectionLost) -> None:
        self._session.watchers.discard(self._lost)
        self._session.close()  # now, so that who waits for more does not wait on
        self._changed.unpark_all()


# Replaying


@click.command(epilog=REPLAY_EXIT_CODES)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", nargs=-1, type=click.UNPROCESSED)
@click.option("--ignore", multiple=True, metavar="POINTER", help="What may differ in any message; * is any step.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    type=POSITIVE,
    help="Time for what is expected next.",
)
@click.option(
    "--side", default="client", show_default=True, type=click.Choice(["client", "server"]), help="Which one to play."
)
@with_options(HeaderOptions)
def replay(
    file: Path, target: tuple[str, ...], ignore: tuple[str, ...], timeout: float, side: str, options: HeaderOptions
) -> None:
    """Say to TARGET what the client said in FILE, and compare the answers with what the server said then.

    What cannot be the same twice is not compared: ids, cursors, points in time, how often there was progress, and what
    --ignore names by its JSON Pointer, such as /result/structuredContent/elapsed. TARGET is what the other commands
    take; a command may be written last, after --. With --side server there is none: it plays the server over standard
    input and output, for a client that starts it in place of one. A recording of agent tools is played to the URL of a
    service's WebSocket.

    \b
    Examples:
      trimcp replay weather.jsonl weather.py
      trimcp replay agent.jsonl ws://127.0.0.1:8000
      trimcp replay weather.jsonl --ignore /result/_meta -- npx -y some-server
    """
    client = side == "client"
    if client != bool(target):
        problem = "name the server to replay to" if client else "--side server takes no TARGET: the client starts it"
        raise Failure(problem)
    try:
        transcript = Transcript.load(file)
    except (ValueError, OSError) as error:
        raise Failure(f"{file}: {error}") from None
    headers = read_headers(options.headers, options.bearer)
    connection: AbstractAsyncContextManager[MessageChannel]
    server: Any = None
    if not transcript.agent_tools:
        server = _named_target(target, headers) if client else None
        connection = claim_stdio() if server is None else server.connect()
    elif client:
        from trimcp.agent_tools.client.websocket import open_agent_channel

        server = _agent_target(target, headers)
        connection = open_agent_channel(server)
    else:
        raise Failure("--side server is for MCP: an agent starts no server")

    async def run() -> list[str]:
        async with connection as channel:
            return await play(transcript.messages, channel, client=client, ignore=list(ignore), patience=timeout)

    try:
        problems = trio.run(run)
    except McpError as error:
        raise Failure(lost_text(error, server), NO_CONNECTION) from None
    screen = Screen()
    write = screen.show if client else screen.complain  # playing the server, standard output belongs to the client
    who = "server" if client else "client"
    for problem in problems:
        write(theirs(problem, None))
    if problems:
        write(f"{len(problems)} differences in what the {who} says")
    else:
        count = sum(from_client != client for from_client, _ in transcript.messages)
        write(f"the {who} says the same: {count} messages")
    sys.exit(_DIFFERS if problems else 0)
