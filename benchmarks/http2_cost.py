"""What HTTP/2 costs beside HTTP/1.1, both ours: CPU of a server for a call of MCP, and memory of what is idle.

Run by itself: `python benchmarks/http2_cost.py [--rounds N] [--calls N] [--check]`; with `--check` it ends with
status 1 where a bar of `bars.py` is missed. Calls are those of 2026-07-28, answered with JSON, 64 under way: over
HTTP/1.1 each on a connection of its own, over HTTP/2 all on one. Every reply is checked. Idle is a connection that was
used once, and a request whose body does not come. Both protocols have their turn in each round, of memory each on a
server of its own.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import attrs
import trio
from agent_grpc import Program, running, tell
from check_far_end import MODERN, Http, Peer, check, echo
from names import HTTP1, OURS
from processes import LOAD_CORE, SERVER_CORE
from rows import Rows
from sessions import open_files

from trimcp.bench.cost import memory_of
from trimcp.transports.http.h2.engine import Engine
from trimcp.transports.http.h2.heads import BlockReader, ResponseFields, read_response, write_block
from trimcp.transports.http.h2.interface import Http2Stream

__all__ = ["CELLS", "measure"]

CALLS, IDLE, STREAMS = CELLS = ("http2-json", "http2-idle", "http2-idle-stream")
UNDER_WAY = 64
MANY, FEW = 2_000, 500
ON_EACH = 50  # idle streams of a connection of HTTP/2
PROTOCOLS = {OURS: "2", HTTP1: "1"}
_HEAD = write_block(
    (
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "localhost"),
        (":path", "/mcp"),
        ("accept", "application/json, text/event-stream"),
        ("content-type", "application/json"),
        ("mcp-protocol-version", MODERN),
        ("mcp-method", "tools/call"),
        ("mcp-name", "echo"),
    )
)


async def serve() -> None:
    """Serve until killed."""
    from check_cells import make_server

    import trimcp

    async with trio.open_nursery() as nursery:
        settings = trimcp.HttpSettings(reply="json")
        urls = await nursery.start(partial(trimcp.serve_http, make_server(), port=0, settings=settings))
        print(urls[0].removeprefix("http://").partition("/")[0], flush=True)


# The load


class Answer(Http2Stream):
    """The answer to one request of HTTP/2."""

    def __init__(self) -> None:
        super().__init__()
        self.body = bytearray()
        self.done = trio.Event()

    def response(self, head: ResponseFields) -> bool:
        """See `Http2Stream.response`."""
        assert head.status == 200
        return False

    def arrived(self, data: bytes) -> None:
        """See `Http2Stream.arrived`."""
        self.body += data

    def peer_ended(self) -> None:
        """See `Http2Stream.peer_ended`."""
        self.done.set()

    def was_reset(self, code: int, reason: str) -> None:
        """See `Http2Stream.was_reset`."""
        raise AssertionError(f"the server reset a stream: {code}")


class Http2:
    """A connection of HTTP/2, which writes what is asked in one turn of Trio's loop together."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._said = trio.Event()
        self._engine = Engine(self, BlockReader(1 << 16, read_response), client=True, settings={})
        self._said.set()

    async def post(self, data: bytes) -> bytes:
        """Return the body of the answer to a call."""
        answer = self._ask()
        sent = self._engine.send_data(answer, data, end=True)
        assert sent == len(data)
        await answer.done.wait()
        return bytes(answer.body)

    async def begin(self) -> None:
        """Begin a call, whose body is still to come."""
        self._ask()

    def _ask(self) -> Answer:
        answer = Answer()
        self._engine.open(answer, _HEAD, end=False)
        self._said.set()
        return answer

    async def run(self) -> None:
        """Read and write until the server has closed."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while data := await self._stream.receive_some(1 << 16):
                    self._engine.feed(bytes(data), trio.current_time())
                    while self._engine.advance(1 << 20):
                        pass
                    if self._engine.out:
                        self._said.set()
            nursery.cancel_scope.cancel()

    async def _write(self) -> None:
        while True:
            await self._said.wait()
            self._said = trio.Event()
            data = bytes(self._engine.out)
            self._engine.out.clear()
            await self._stream.send_all(data)

    # Called by the engine

    def request(self, id: int, head: object, ended: bool) -> None: ...

    def began(self, stream: Http2Stream, ended: bool) -> None: ...

    def windows_opened(self) -> None: ...

    def settings_came(self) -> None: ...

    def ponged(self) -> None: ...

    def went_away(self, last: int, code: int) -> None: ...


@attrs.frozen
class Http1:
    """A connection of HTTP/1.1."""

    _http: Http

    async def post(self, data: bytes) -> bytes:
        """Return the body of the answer to a call."""
        _, [reply] = await self._http.post(data, method="tools/call", name="echo")
        return reply

    async def begin(self) -> None:
        """Begin a call, whose body is still to come."""
        head = "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
        head += f"MCP-Protocol-Version: {MODERN}\r\nMcp-Method: tools/call\r\nMcp-Name: echo\r\n"
        await self._http.send("POST", "/mcp", f"{head}Content-Length: 100\r\n")


class Load:
    """Asks one server over one protocol."""

    def __init__(self, protocol: str, address: str, nursery: trio.Nursery) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._second = protocol == "2"
        self._nursery = nursery
        self._ready: list[Http1 | Http2] = []
        self._kept: list[object] = []

    async def calls(self, number: int) -> None:
        """Make so many calls, 64 at a time."""
        while len(self._ready) < (1 if self._second else UNDER_WAY):
            self._ready.append(self._connect())
        async with trio.open_nursery() as nursery:
            for place in range(UNDER_WAY):
                nursery.start_soon(self._call, self._ready[place % len(self._ready)], number // UNDER_WAY)

    async def idle(self, number: int) -> None:
        """Open so many connections and use each once."""
        for _ in range(number):
            connection = self._connect()
            await self._call(connection, 1)
            self._kept.append(connection)

    async def streams(self, number: int) -> None:
        """Begin so many calls whose body does not come; over HTTP/1.1 each needs a connection."""
        each = ON_EACH if self._second else 1
        for _ in range(number // each):
            connection = self._connect()
            self._kept.append(connection)
            for _ in range(each):
                await connection.begin()
        await trio.sleep(0.5)  # the server says nothing to them

    def _connect(self) -> Http1 | Http2:
        sock = socket.create_connection(self._address)
        if not self._second:
            fd = sock.detach()
            return Http1(Http(Peer(fd, fd), MODERN))
        connection = Http2(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
        self._nursery.start_soon(connection.run)
        return connection

    async def _call(self, connection: Http1 | Http2, number: int) -> None:
        for _ in range(number):
            id, wanted, data = echo(MODERN)
            check(await connection.post(data), {id: wanted})


async def load(protocol: str, address: str) -> None:
    """Do what each line of standard input says, and say when it is done."""
    async with trio.open_nursery() as nursery:
        one = Load(protocol, address, nursery)
        work = (one.calls, one.idle, one.streams)
        for line in sys.stdin:
            number, which = json.loads(line)
            await work[which](number)
            print(0, flush=True)
        nursery.cancel_scope.cancel()


# Measuring


def measure(
    peers: Sequence[Any] = (),
    *,
    rounds: int,
    quick: bool = False,
    cells: Sequence[str] = CELLS,
    calls: int = 8_192,
) -> list[dict[str, Any]]:
    """Return the CPU per call, or the memory of what is idle, of each round: a record for each protocol and cell."""
    python = peers[0].program[0] if peers else sys.executable
    rows = Rows()
    with ExitStack() as stack, open_files(MANY + 500):
        if CALLS in cells:
            both = {peer: stack.enter_context(_both(python, protocol)) for peer, protocol in PROTOCOLS.items()}
            calls = calls // 4 if quick else calls
            for number in range(rounds + 1):
                for peer in list(both)[:: 1 if number % 2 else -1]:
                    server, load = both[peer]
                    spent = server.cpu
                    load.turn(calls, 0)
                    if number:  # the first calls are slow everywhere
                        rows.add(CALLS, "cpu", peer, "µs", (server.cpu - spent) / calls * 1e6)
        many = FEW if quick else MANY
        for cell in set(cells) & {IDLE, STREAMS}:
            for _ in range(rounds):
                for peer, protocol in PROTOCOLS.items():
                    with _both(python, protocol) as (server, load):
                        load.turn(ON_EACH, CELLS.index(cell))
                        before = memory_of(server.process.pid)[0]
                        load.turn(many, CELLS.index(cell))
                        rows.add(cell, "memory", peer, "KiB", (memory_of(server.process.pid)[0] - before) / 1024 / many)
    return rows.data


@contextmanager
def _both(python: str, protocol: str) -> Iterator[tuple[Program, Program]]:
    """Run a server and what asks it."""
    with (
        running(SERVER_CORE, python, __file__, "--serve", says=True) as server,
        running(LOAD_CORE, python, __file__, "--load", protocol, server.said) as load,
    ):
        yield server, load


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--calls", type=int, default=8_192, help="calls in a turn")
    parser.add_argument("--cell", action="append", choices=CELLS, help="only this one; again for more")
    parser.add_argument("--check", action="store_true", help="fail where a bar is missed")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--load", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with suppress(KeyboardInterrupt):
        if options.serve:
            return trio.run(serve)
        if options.load:
            return trio.run(load, *options.load)
    found = measure(rounds=options.rounds, cells=options.cell or CELLS, calls=options.calls)
    from bars import HTTP2_BARS

    return tell(found, HTTP2_BARS if options.check else ())


if __name__ == "__main__":
    main()
