"""Responses: whole and streamed, to old and new clients, and what can never be part of one."""

from __future__ import annotations

import pytest
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.peers.http1 import http_request
from tests.transports.http.support import JSON, memory
from trimcp.transports.http.interfaces import HttpResponse

HELLO = b'{"hello": 1}'


async def test_a_streamed_response(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.request("POST", "/wait", body=b"")
        await wait_all_tasks_blocked()
        reply = site.face.handlers[0].reply
        assert not reply.gone
        reply.start(HttpResponse(200, (("Content-Type", "text/event-stream"),), b"one"))
        head = await client.head()
        assert (head.status, head.headers["transfer-encoding"]) == (200, "chunked")
        assert "content-length" not in head.headers
        assert await client.chunk() == b"one"
        reply.write(b"")  # no chunk: it would be the last
        reply.write(b"two")
        assert await client.chunk() == b"two"
        assert site.face.ended == []
        reply.finish(b"three")
        assert reply.gone
        reply.write(b"late")
        reply.finish(b"later")
        reply.abort()
        assert [chunk async for chunk in client.chunks()] == [b"three"]
        assert (await client.fetch("POST", body=HELLO)).body == HELLO
        assert site.face.ended[0] == ("/wait", 200, 11)


async def test_what_is_written_late_is_not_part_of_the_next_response(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.send(http_request(path="/wait") * 2)
        await wait_all_tasks_blocked()
        first = site.face.handlers[0].reply
        first.send(HttpResponse(200, (), b"first"))
        await wait_all_tasks_blocked()
        first.send(HttpResponse(200, (), b"again"))
        first.start(HttpResponse(200, (), b"again"))
        first.write(b"again")
        first.finish(b"again")
        first.abort()
        await first.room()
        assert first.waiting == 0
        site.face.handlers[1].reply.send(HttpResponse(200, (), b"second"))
        assert [(await client.answer()).body for _ in range(2)] == [b"first", b"second"]


async def test_head_requests_get_no_body(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        answer = await client.fetch("HEAD", "/no")
        assert (answer.status, answer.headers["content-length"]) == (403, "4")
        await client.request("HEAD", "/wait")
        await wait_all_tasks_blocked()
        reply = site.face.handlers[0].reply
        reply.start(HttpResponse(200, (), b"body"))
        reply.write(b"body")
        reply.finish(b"body")
        assert (await client.answer("HEAD")).status == 200
        assert (await client.fetch("POST", body=HELLO)).body == HELLO
        assert site.face.ended[:2] == [("/no", 403, 0), ("/wait", 200, 0)]


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body(status: int, autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        for how in ("send", "start"):
            await client.request(path="/wait")
            await wait_all_tasks_blocked()
            reply = site.face.handlers[-1].reply
            getattr(reply, how)(HttpResponse(status, (), b"not sent"))
            reply.finish(b"not sent")
            answer = await client.answer()
            assert answer.status == status
            assert "content-length" not in answer.headers
            assert "transfer-encoding" not in answer.headers
        assert (await client.fetch("POST", body=HELLO)).body == HELLO


async def test_a_head_request_with_an_unknown_status(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.request(path="/wait")
        await wait_all_tasks_blocked()
        site.face.handlers[0].reply.send(HttpResponse(299, (), b"x"))
        assert (await client.answer()).status == 299


async def test_http_1_0_clients(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.request("POST", "/echo", "Connection: keep-alive", body=HELLO, version="1.0")
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (HELLO, "keep-alive")
        await client.request("POST", "/echo", body=HELLO, version="1.0")
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (HELLO, "close")
        await client.closed()

        # A stream has no chunks and ends with the connection, whatever the client asked for.
        client = site.connect()
        await client.request("POST", "/wait", "Connection: keep-alive", body=b"", version="1.0")
        await wait_all_tasks_blocked()
        reply = site.face.handlers[-1].reply
        reply.start(HttpResponse(200, (), b"one"))
        reply.write(b"two")
        reply.finish(b"three")
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"onetwothree", "close")
        assert "transfer-encoding" not in answer.headers


async def test_abort_lets_the_client_tell(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.request("POST", "/wait", body=HELLO)
        await wait_all_tasks_blocked()
        handler = site.face.handlers[0]
        handler.reply.start(HttpResponse(200, (), b"half"))
        await client.head()
        assert await client.chunk() == b"half"
        handler.reply.abort()
        assert handler.reply.gone
        with pytest.raises(EOFError):
            await client.chunk()
        assert handler.gone == 0
        assert site.face.ended == [("/wait", 200, 4)]


@pytest.mark.parametrize(
    "headers",
    [(("X", "a\r\nSet-Cookie: b"),), (("X", "a\nb"),), (("X\r\nY", "a"),), (("X", "a\rb"),), (("X", "\u20ac"),)],
)
async def test_headers_cannot_split_a_response(
    headers: tuple[tuple[str, str], ...], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with memory() as site:
        client = site.connect()
        await client.request("POST", "/wait", body=HELLO)
        await wait_all_tasks_blocked()
        site.face.handlers[0].reply.send(HttpResponse(200, (*JSON, *headers), b"body"))
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"body")
        assert set(answer.headers) == {"date", "content-length"}
        assert [record.levelname for record in caplog.records] == ["ERROR"]
