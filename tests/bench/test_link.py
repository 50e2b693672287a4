"""Bytes to and from an address."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trimcp.bench.link import Address, LoadLink
from trimcp.errors import ConnectionLost


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[LoadLink, trio.SocketStream]]:
    """A link and the other end of it."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        link = await Address("127.0.0.1", listener.socket.getsockname()[1]).dial(5.0)
        async with await listener.accept() as stream:
            try:
                yield link, stream
            finally:
                link.close()


async def test_bytes_go_both_ways() -> None:
    async with connected() as (link, stream):
        assert link.send_nowait(b"hello") == 5
        assert await stream.receive_some() == b"hello"
        await stream.send_all(b"world")
        assert await link.receive() == b"world"
        await stream.aclose()
        assert await link.receive() == b""


async def test_more_than_the_system_takes_is_sent_by_and_by() -> None:
    data = bytes(range(256)) * 40_000
    async with connected() as (link, stream):
        received = b""

        async def receive() -> None:
            nonlocal received
            while len(received) < len(data):
                received += await stream.receive_some(1_000_000)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.send_all, data)
            await wait_all_tasks_blocked()
            nursery.start_soon(receive)
        assert received == data


async def test_an_end_or_bytes_unasked_are_seen_before_the_link_is_used_again() -> None:
    async with connected() as (link, stream):
        assert not link.ended()
        await stream.send_all(b"unasked")
        await trio.lowlevel.wait_readable(link._socket)
        assert link.ended()
        assert await link.receive() == b"unasked"
        assert not link.ended()
        await stream.aclose()
        await trio.lowlevel.wait_readable(link._socket)
        assert link.ended()


async def test_a_reset_breaks_it() -> None:
    async with connected() as (link, stream):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        stream.socket.close()
        with pytest.raises(trio.BrokenResourceError):
            await link.receive()
        with pytest.raises(trio.BrokenResourceError):
            link.send_nowait(b"x")


async def test_closing_wakes_who_receives() -> None:
    async with connected() as (link, _), trio.open_nursery() as nursery:

        async def receive() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await link.receive()

        nursery.start_soon(receive)
        await wait_all_tasks_blocked()
        link.close()
        link.close()


async def test_nobody_there_is_no_connection(tmp_path: Path) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    with pytest.raises(ConnectionLost, match="Connection refused; is the server running"):
        await Address("127.0.0.1", port).dial(5.0)
    with pytest.raises(ConnectionLost, match="No such file"):
        await Address("localhost", 0, path=str(tmp_path / "nobody")).dial(5.0)


async def test_a_server_that_does_not_shake_hands_is_no_connection() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        port = listener.socket.getsockname()[1]
        with pytest.raises(ConnectionLost, match=r"no connection within 0\.1 seconds"):
            await Address("127.0.0.1", port, tls=True).dial(0.1)


async def test_what_is_no_tls_is_no_connection() -> None:
    async def answer(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer, listeners)
        with pytest.raises(ConnectionLost, match="TLS failed"):
            await Address("127.0.0.1", listeners[0].socket.getsockname()[1], tls=True).dial(5.0)
        nursery.cancel_scope.cancel()
