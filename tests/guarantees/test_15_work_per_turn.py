"""Promise 15: strangers, however many and however hasty, leave the others their turn."""

from __future__ import annotations

import subprocess
import sys

import hpack
import pytest
import trio

from tests.guarantees.report import figure
from tests.guarantees.worlds import Home, Homes, World, worlds
from tests.peers.http1 import BOTH, http_request
from tests.peers.http2 import preface, request_fields
from tests.peers.websockets import handshake
from trimcp.transports.grpc.channel import EXCHANGE
from trimcp.transports.http.h2 import frames as h2
from trimcp.transports.http.h2.heads import write_block

pytestmark = [pytest.mark.slow, pytest.mark.alone]
_MANY = 4
_ECHOES = 100

# Says the same again and again, as fast as it is read, reads what comes back, and comes again when it is thrown out.
_POUR = """
import socket, sys, threading
port = int(sys.argv[1])
begin, again = (bytes.fromhex(line) for line in sys.stdin)
again *= max(1, 100_000 // len(again))
told = False
def drain(connection):
    try:
        while connection.recv(65536):
            pass
    except OSError:
        pass
while True:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # what waits in the system outlives us
    connection.connect(("127.0.0.1", port))
    threading.Thread(target=drain, args=[connection], daemon=True).start()
    try:
        connection.sendall(begin)
        if not told:
            told = True
            print("begun", flush=True)
        while True:
            connection.sendall(again)
    except OSError:
        connection.close()
"""

_POST = http_request("POST", "/mcp", "Content-Type: application/json", f"Accept: {BOTH}", "Transfer-Encoding: chunked")
_HASTY = {
    "pongs": (handshake(), b"\x8a\x80\0\0\0\0"),
    "fragments": (handshake() + b"\x01\x81\0\0\0\0x", b"\0\x80\0\0\0\0"),
    "chunks of a byte": (_POST, b"1\r\nx\r\n"),
}

_FIELDS = b"".join(b"\0\1x\1" + b"%x" % (n % 16) for n in range(10_000))


def _floods(over: str, path: str, content_type: str) -> dict[str, tuple[bytes, bytes]]:
    """What hasty clients of this path say over HTTP/2: the beginning, and what they repeat."""
    fields = request_fields(path, headers=[("content-type", content_type)])
    block, heavy = write_block(fields), hpack.Encoder().encode([*fields, ("x-heavy", "~" * 16_000)], huffman=True)
    begin, ids = preface() + h2.header_frames(1, block, end=False), range(3, 4_003, 2)
    # as many as there may be on a connection, each reset at once
    given_up = b"".join(h2.header_frames(id, block, end=True) + h2.rst_stream(id, h2.Code.CANCEL) for id in ids)
    floods = {
        "pings": (begin, h2.frame(h2.PING, 0, 0, bytes(8))),
        "priorities": (begin, h2.frame(h2.PRIORITY, 0, 3, bytes(5))),
        "settings": (begin, h2.settings_frame({h2.Setting.INITIAL_WINDOW_SIZE: 1})),
        "windows": (begin, h2.window_update(1, 1)),
        "frames of unknown kinds": (begin, h2.frame(0x55, 0, 0)),
        "frames without data": (begin, h2.frame(h2.DATA, 0, 1)),
        "frames of a byte": (begin, h2.frame(h2.DATA, 0, 1, b" ")),
        "data of streams that have ended": (begin + h2.rst_stream(1, 0), h2.frame(h2.DATA, 0, 1, b" ")),
        "heads that go on": (preface() + h2.frame(h2.HEADERS, 0, 1), h2.frame(h2.CONTINUATION, 0, 1)),
        "requests that are given up": (preface(), given_up),
        "requests that do not end": (preface(), b"".join(h2.header_frames(id, block, end=False) for id in ids)),
        "heads that are hard to read": (
            preface(),
            b"".join(h2.header_frames(id, heavy, end=True) for id in range(1, 21, 2)),
        ),
        "heads of 10,000 fields": (preface(), h2.header_frames(1, block + _FIELDS, end=True)),
    }
    return {f"{what} {over}": said for what, said in floods.items()}


_HASTY |= _floods("over HTTP/2", "/mcp", "application/json")
_HASTY |= _floods("through gRPC", EXCHANGE, "application/grpc")


async def echoes(home: Home) -> tuple[float, float]:
    """The seconds that half of a hundred echoes take at most, and 99 of them."""
    took: list[float] = []
    async with home.peer() as peer:
        for n in range(_ECHOES):
            began = trio.current_time()
            await peer.ask(f"echo{n}", "echo")
            took.append(trio.current_time() - began)
    took.sort()
    return took[_ECHOES // 2], took[-2]


@pytest.mark.parametrize("what", _HASTY)
@pytest.mark.parametrize("world", [each for each in worlds(transport="http", host="own") if each.modern], ids=str)
async def test_work_per_turn(homes: Homes, world: World, what: str) -> None:
    begin, again = _HASTY[what]
    async with homes(world) as home:
        await home.warm()
        assert home.served is not None
        quiet, quiet_late = await echoes(home)
        command = [sys.executable, "-c", _POUR, str(home.served.port)]
        pipe = subprocess.PIPE
        hasty = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(_MANY)]  # noqa: ASYNC220  # they are awaited by nobody
        try:
            for each in hasty:
                assert each.stdin is not None
                assert each.stdout is not None
                each.stdin.write(f"{begin.hex()}\n{again.hex()}")
                each.stdin.close()
                each.stdin = None  # so that nobody closes it again
                await trio.to_thread.run_sync(each.stdout.readline)
            half, late = await echoes(home)
        finally:
            for each in hasty:
                each.kill()
                each.communicate()
    figure(15, f"half of others' echoes beside {_MANY} that send {what}", half * 1000, 10, "ms", str(world))
    figure(15, f"p99 of others' echoes beside {_MANY} that send {what}", late * 1000, 50, "ms", str(world))
    assert half <= 4 * max(0.01, quiet)
    assert late <= 4 * max(0.05, quiet_late)
