"""Promise 15: strangers, however many and however hasty, leave the others their turn."""

from __future__ import annotations

import subprocess
import sys

import pytest
import trio

from tests.guarantees.report import figure
from tests.guarantees.worlds import Home, Homes, World, worlds
from tests.peers.http1 import BOTH, http_request
from tests.peers.websockets import handshake

pytestmark = [pytest.mark.slow, pytest.mark.alone]
_MANY = 4
_ECHOES = 100

# Says the same again and again, as fast as it is read, and reads what comes back.
_POUR = """
import socket, sys, threading
port, begin, again = int(sys.argv[1]), bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3]) * 20_000
connection = socket.socket()
connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # what waits in the system outlives us
connection.connect(("127.0.0.1", port))
connection.sendall(begin)
def drain():
    while connection.recv(65536):
        pass
threading.Thread(target=drain, daemon=True).start()
print("begun", flush=True)
while True:
    connection.sendall(again)
"""

_POST = http_request("POST", "/mcp", "Content-Type: application/json", f"Accept: {BOTH}", "Transfer-Encoding: chunked")
_HASTY = {
    "pongs": (handshake(), b"\x8a\x80\0\0\0\0"),
    "fragments": (handshake() + b"\x01\x81\0\0\0\0x", b"\0\x80\0\0\0\0"),
    "chunks of a byte": (_POST, b"1\r\nx\r\n"),
}


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
        command = [sys.executable, "-c", _POUR, str(home.served.port), begin.hex(), again.hex()]
        hasty = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(_MANY)]  # noqa: ASYNC220
        try:
            for each in hasty:
                assert each.stdout is not None
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
