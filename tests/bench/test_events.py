"""Load over HTTP+SSE: on this package's listener, and on servers that go wrong as they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import httptools
import orjson
import pytest
import trio

from tests.bench.support import ECHO, greeting, reply
from tests.bench.test_http import _Request, counts, serving
from trimcp.bench.engine import measure
from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.report import Report
from trimcp.errors import McpError
from trimcp.transports.http.client.target import HttpServer
from trimcp.wire.revisions import LATEST_LEGACY


@pytest.mark.parametrize(("transport", "path"), [("auto", "/sse"), ("sse", "/sse")])
async def test_a_right_server_answers_rightly(transport: Any, path: str) -> None:
    async with serving() as url:
        target = HttpServer(url.removesuffix("/mcp") + path)
        plan = Plan(ECHO, count=200, under_way=8, sessions=2, transport=transport)
        report = await measure(target, plan)
    assert (report.calls, report.errors) == (200, {})
    assert (report.transport, report.reply) == ("sse", None)


async def test_progress_and_giving_up_go_their_ways() -> None:
    stream = MixEntry.tool("stream", {"n": 20}, expect="done")
    slow = MixEntry.tool("slow", {"seconds": 60})
    async with serving() as url:
        target = HttpServer(url.removesuffix("/mcp") + "/sse")
        report = await measure(target, Plan(stream, count=6, under_way=3, progress=True))
        assert (report.calls, report.progress, report.errors) == (6, 120, {})
        report = await measure(target, Plan([slow, ECHO], count=40, under_way=4, timeout=0.1))
    assert report.timed_out + report.calls == 40
    assert (report.timed_out > 5, report.calls > 5, report.errors) == (True, True, {})


async def test_the_other_transport_is_not_spoken_where_one_is_asked_for() -> None:
    async with serving() as url:
        with pytest.raises(McpError):
            await measure(HttpServer(url.removesuffix("/mcp") + "/sse"), Plan(ECHO, count=1, transport="http"))


# A server without library

Answer = Callable[[int, dict[str, Any]], tuple[int, list[bytes] | None]]


@attrs.define(eq=False)
class Wrong:
    """A server of HTTP+SSE.

    Args:
        answer: says the status of the POST of a call and what then comes over the stream; None ends the stream.
        endpoint: the first event on each stream after that of the client that looks first.
    """

    answer: Answer
    endpoint: bytes = b"event: endpoint\r\ndata: /messages?s=1\r\n\r\n"
    calls: int = 0
    streams: int = 0
    _stream: trio.SocketStream | None = None
    _turn: trio.Lock = attrs.field(factory=trio.Lock)

    async def serve(self, stream: trio.SocketStream) -> None:
        request = _Request()
        parser = httptools.HttpRequestParser(request)
        try:
            while data := await stream.receive_some():
                parser.feed_data(data)
                if not request.complete:
                    continue
                body = bytes(request.body)
                request.__init__()
                if parser.get_method() == b"GET":
                    self.streams += 1
                    self._stream = stream
                    await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
                    good = b"event: endpoint\ndata: /messages?s=1\n\n"
                    await stream.send_all(good if self.streams == 1 else self.endpoint)
                else:
                    await self._take(stream, orjson.loads(body))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return

    async def _take(self, stream: trio.SocketStream, message: dict[str, Any]) -> None:
        status, texts = self._answer(message)
        await stream.send_all(b"HTTP/1.1 %d X\r\ncontent-length: 2\r\n\r\nno" % status)
        assert self._stream is not None
        if texts is None:
            await self._stream.aclose()
            return
        async with self._turn:
            for text in texts:
                await self._stream.send_all(b"event: message\ndata: %b\n\n" % text)

    def _answer(self, message: dict[str, Any]) -> tuple[int, list[bytes] | None]:
        if message.get("method") == "initialize":
            return 202, [greeting(message)]
        if message.get("method") == "tools/list":
            tools = [{"name": "echo", "inputSchema": {"type": "object"}}]
            return 202, [orjson.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {"tools": tools}})]
        if message.get("method") == "tools/call":
            self.calls += 1
            return self.answer(self.calls, message)
        return 202, []


async def of_wrong(
    answer: Answer,
    *,
    endpoint: bytes | None = None,
    **options: Any,
) -> tuple[Report, Wrong]:
    wrong = Wrong(answer)
    if endpoint is not None:
        wrong.endpoint = endpoint
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, wrong.serve, listeners)
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/sse"
        options = {"count": 6, "reopen": 0, "transport": "sse", "revision": LATEST_LEGACY.name, **options}
        with trio.fail_after(30):
            report = await measure(HttpServer(url), Plan(ECHO, **options))
        nursery.cancel_scope.cancel()
    return report, wrong


async def test_the_test_server_is_right_when_it_is_told_to_be() -> None:
    report, wrong = await of_wrong(lambda n, m: (202, [reply(m)]), under_way=3)
    assert (report.calls, report.errors, wrong.calls) == (6, {}, 6)


@pytest.mark.parametrize(
    ("answer", "right", "kinds"),
    [
        (lambda n, m: (202, [reply(m, "no")]), 0, {"wrong text": 6}),
        (lambda n, m: (500, []), 0, {"HTTP 500": 6}),
        (lambda n, m: (503 if n % 2 else 202, [] if n % 2 else [reply(m)]), 3, {"HTTP 503": 3}),
        (lambda n, m: (202, [reply(m), reply(m)]), 6, {"answered twice": 6}),
        (lambda n, m: (202, [b"nonsense", reply(m)]), 6, {"not JSON": 6}),
        (lambda n, m: (202, None if n == 4 else [reply(m)]), 3, {"connection lost": 1}),
        (lambda n, m: (202, [] if n == 6 else [reply(m)]), 5, {"no answer": 1}),
    ],
)
async def test_wrong_answers_are_counted_by_kind(answer: Any, right: int, kinds: dict[str, int]) -> None:
    report, _ = await of_wrong(answer, patience=0.5)
    assert report.calls == right
    found = counts(report)
    if "answered twice" in kinds:  # the second answer to the last call may come when all is over
        assert found["answered twice"] in (5, 6)
    else:
        assert found == kinds


async def test_a_stream_that_ends_is_opened_again() -> None:
    report, wrong = await of_wrong(lambda n, m: (202, None if n == 4 else [reply(m)]), reopen=1)
    assert (report.calls, counts(report)) == (5, {"connection lost": 1})
    assert wrong.streams == 1 + 2


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        (b"event: message\ndata: {}\n\n", "named no endpoint of its own but b'{}'"),
        (b"event: endpoint\ndata: http://evil.example/messages\n\n", "named no endpoint of its own"),
        (b"event: endpoint\ndata: /messages", "named no endpoint within 0.5 seconds"),
    ],
)
async def test_without_an_endpoint_there_is_no_connection(endpoint: bytes, told: str) -> None:
    report, _ = await of_wrong(lambda n, m: (202, [reply(m)]), endpoint=endpoint, opening=0.5)
    assert (report.calls, counts(report)) == (0, {"no connection": 1})
    assert told in report.errors["no connection"].example
