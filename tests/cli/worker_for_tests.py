"""A worker for the tests of `workers`: does on a connection what it is told."""

from __future__ import annotations

import os
import sys

import trio

from trimcp.cli.serve.processes import inherited


async def obey(stream: trio.SocketStream) -> None:
    order = (await stream.receive_some(100)).decode()
    if order == "pid":
        await stream.send_all(str(os.getpid()).encode())
    elif order == "environment":
        await stream.send_all(repr({name: value for name, value in os.environ.items() if "TRIMCP" in name}).encode())
    elif order == "crash":
        os._exit(7)
    elif order == "stubborn":
        await stream.send_all(b"yes")
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()
    await stream.aclose()


async def main() -> None:
    worker = inherited()
    if worker is None:
        sys.exit("started by nobody")
    if "--broken" in sys.argv:
        sys.exit(5)
    async with trio.open_nursery() as nursery:
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(each)) for each in worker.sockets]
        nursery.start_soon(trio.serve_listeners, obey, listeners)
        worker.ready()
        await worker.stopped()
        nursery.cancel_scope.cancel()


trio.run(main)
