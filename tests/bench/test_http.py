"""Load over Streamable HTTP: on this package's listener in both eras, and on servers that go wrong as they are told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import attrs
import httptools
import orjson
import pytest
import trio

import trimcp
from tests.bench.server_for_bench import server as right
from tests.bench.support import ECHO
from tests.peers.serving import served
from tests.peers.states import until
from tests.peers.tls import client_context, server_context
from trimcp.bench.engine import measure
from trimcp.bench.plan import MixEntry, Plan
from trimcp.bench.report import Report
from trimcp.cli.bench.table import describe_report
from trimcp.errors import ConnectionLost, LocalError, McpError
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.http.peers.identity import bearer_tokens
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.revisions import LATEST, LATEST_LEGACY

ERAS = [LATEST.name, LATEST_LEGACY.name]


@asynccontextmanager
async def serving(server: Any = right, **options: Any) -> AsyncIterator[str]:
    async with served(server, **options) as place:
        yield place.url


def counts(report: Report) -> dict[str, int]:
    return {kind: each.count for kind, each in report.errors.items()}


# The right one


@pytest.mark.parametrize("revision", ERAS)
@pytest.mark.parametrize("reply", ["json", "sse"])
async def test_a_right_server_answers_rightly(revision: str, reply: Any) -> None:
    async with serving(settings=HttpSettings(reply=reply)) as url:
        report = await measure(HttpServer(url), Plan(ECHO, count=200, under_way=8, sessions=2, revision=revision))
    assert (report.calls, report.errors) == (200, {})
    assert (report.transport, report.revision, report.reply) == ("http", revision, reply)
    assert (report.server_name, report.server_version) == ("right", "1.5")


@pytest.mark.parametrize(
    ("wanted", "given", "kind"),
    [("json", "sse", "events in place of JSON"), ("sse", "json", "JSON in place of events")],
)
async def test_another_kind_of_reply_than_wanted_is_an_error(wanted: Any, given: Any, kind: str) -> None:
    async with serving(settings=HttpSettings(reply=given)) as url:
        report = await measure(HttpServer(url), Plan(ECHO, count=10, under_way=2, reply=wanted))
    assert (report.calls, counts(report), report.reply) == (0, {kind: 10}, given)


@pytest.mark.parametrize("revision", ERAS)
async def test_progress_is_counted(revision: str) -> None:
    stream = MixEntry.tool("stream", {"n": 20}, expect="done")
    async with serving(settings=HttpSettings(reply="sse")) as url:
        plan = Plan(stream, count=6, under_way=3, progress=True, revision=revision)
        report = await measure(HttpServer(url), plan)
    assert (report.calls, report.progress, report.errors) == (6, 120, {})


async def test_a_cut_connection_is_resumed() -> None:
    server = trimcp.Server("patient")

    @server.tool
    async def wait(*, ctx: trimcp.Context[Any]) -> str:
        """Report, and report again a little later."""
        await ctx.report_progress(1, 2)
        await trio.sleep(0.02)
        await ctx.report_progress(2, 2)
        return "done"

    entry = MixEntry.tool("wait", expect="done")
    async with serving(server) as url:
        options: Any = {"count": 20, "under_way": 4, "progress": True, "revision": LATEST_LEGACY.name}
        report = await measure(HttpServer(url), Plan(entry, cut=0.5, **options))
        with pytest.raises(LocalError, match="--cut needs Streamable HTTP, and a revision such as"):
            await measure(HttpServer(url), Plan(entry, cut=0.5, count=1))
    assert (report.calls, report.progress, report.errors) == (20, 40, {})
    assert 0 < report.requests["wait: resumed"].count < 20


@pytest.mark.parametrize("revision", ERAS)
async def test_what_is_given_up_ends_at_the_server(revision: str) -> None:
    server = trimcp.Server("slow")
    begun = ended = 0

    @server.tool
    async def wait() -> str:
        """Wait."""
        nonlocal begun, ended
        begun += 1
        try:
            await trio.sleep_forever()
        finally:
            ended += 1
        return ""

    async with serving(server) as url:
        plan = Plan(MixEntry.tool("wait"), count=12, under_way=4, timeout=0.05, revision=revision)
        with trio.fail_after(60):
            report = await measure(HttpServer(url), plan)
            await until(lambda: ended == begun)  # on a busy machine some are given up unheard
    assert 0 < begun <= 12
    assert (report.calls, report.timed_out, report.errors) == (0, 12, {})


@pytest.mark.parametrize("revision", ERAS)
async def test_headers_of_the_user_and_of_the_tool_are_sent(revision: str) -> None:
    server = trimcp.Server("picky")

    @server.tool
    async def route(region: Annotated[str, trimcp.Arg(header="Region")]) -> str:
        """Return the region; a modern server refuses the call where the header is missing or says something else."""
        return region

    async with serving(server, settings=HttpSettings(authenticate=bearer_tokens({"secret": "somebody"}))) as url:
        plan = Plan(MixEntry.tool("route", {"region": "r{n}"}, expect="r{n}"), count=5, revision=revision)
        report = await measure(HttpServer(url, {"Authorization": "Bearer secret"}), plan)
        assert (report.calls, report.errors) == (5, {})
        assert "secret" not in str(report.to_json())
        with pytest.raises(McpError):
            await measure(HttpServer(url), plan)


async def test_tls_is_spoken_with_whom_is_trusted() -> None:
    ours = client_context()
    async with serving(ssl_context=server_context("127.0.0.1")) as url:
        assert url.startswith("https:")
        import httpx2

        client = httpx2.AsyncClient(verify=ours)
        report = await measure(HttpServer(url, client=client), Plan(ECHO, count=20, under_way=4), ssl_context=ours)
        assert (report.calls, report.errors) == (20, {})
        report = await measure(HttpServer(url, client=client), Plan(ECHO, count=2, reopen=0))
        assert report.calls == 0
        assert "its certificate is not trusted" in report.errors["no connection"].example
        await client.aclose()


async def test_a_unix_socket_is_an_address(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with serving(uds=path) as url:
        report = await measure(HttpServer(url), Plan(ECHO, count=20, under_way=4))
    assert (report.calls, report.errors) == (20, {})


async def test_nobody_there_is_told_before_anything_is_measured() -> None:
    with pytest.raises(ConnectionLost, match="Connection refused"):
        await measure(HttpServer("http://127.0.0.1:9/mcp"), Plan(ECHO))


# Wrong ones


@attrs.define(eq=False)
class Wrong:
    """A server of HTTP/1.1 whose answers to calls are bytes from a function.

    Attributes:
        forgets_at: with this call the session it belongs to is forgotten.
        later: what the sessions after the first are called, before their number.
        resumed: the reply to who resumes a stream; 405 without one.
        connections: how many there were; `at_first` before the first call.
        deleted: how many sessions were ended.
        notified, answered: the notifications, and the answers to what it asked, that came.
    """

    answer: Callable[[int, dict[str, Any]], bytes]
    forgets_at: int = 0
    later: str = "s"
    resumed: bytes = b""
    forgotten: str | None = None
    connections: int = 0
    at_first: int = 0
    initialized: int = 0
    deleted: int = 0
    calls: int = 0
    notified: list[str] = attrs.field(factory=list)
    answered: list[dict[str, Any]] = attrs.field(factory=list)

    async def serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        request = _Request()
        parser = httptools.HttpRequestParser(request)
        try:
            while data := await stream.receive_some():
                parser.feed_data(data)
                if request.complete:
                    said = self._say(parser.get_method(), bytes(request.body), request.session)
                    request.__init__()
                    await stream.send_all(said)
                    if said.startswith(b"HTTP/1.0") or b"connection: close" in said or not said:
                        return
        except trio.BrokenResourceError:
            return

    def _say(self, method: bytes, body: bytes, session: str) -> bytes:
        if method == b"DELETE":
            self.deleted += 1
            return http(b"")
        if method != b"POST":
            return self.resumed or http(b"", status=405)
        message = orjson.loads(body)
        if message.get("method") == "initialize":
            self.initialized += 1
            name = "s" if self.initialized == 1 else self.later
            version = message["params"]["protocolVersion"]
            info = {"name": "wrong", "version": "0"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
            return http(result_of(message, result), headers=f"mcp-session-id: {name}{self.initialized}\r\n")
        if message.get("method") == "tools/list":
            return http(result_of(message, {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}))
        if message.get("method") == "tools/call":
            self.calls += 1
            if self.calls == 1:
                self.at_first = self.connections
            if self.calls == self.forgets_at:
                self.forgotten = session
            if session == self.forgotten:
                return http(b"gone", status=404)
            return self.answer(self.calls, message)
        if "method" not in message:
            self.answered.append(message)
            return http(b"", status=202)
        if "id" in message:
            return http(orjson.dumps({"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": ""}}))
        self.notified.append(message["method"])
        return http(b"", status=202)


class _Request:
    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False
        self.session = ""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"mcp-session-id":
            self.session = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


def http(body: bytes, *, status: int = 200, kind: str = "application/json", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def result_of(message: dict[str, Any], result: object) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})


def echoed(message: dict[str, Any]) -> bytes:
    return result_of(message, {"content": [{"type": "text", "text": message["params"]["arguments"]["text"]}]})


def events(*texts: bytes) -> bytes:
    return http(b"".join(b"event: message\ndata: %b\n\n" % text for text in texts), kind="text/event-stream; charset=x")


async def of_wrong(
    answer: Callable[[int, dict[str, Any]], bytes],
    *,
    forgets_at: int = 0,
    later: str = "s",
    resumed: bytes = b"",
    **options: Any,
) -> tuple[Report, Wrong]:
    wrong = Wrong(answer, forgets_at, later, resumed)
    options.setdefault("count", 6)
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, wrong.serve, listeners)
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/mcp"
        with trio.fail_after(30):
            report = await measure(HttpServer(url), Plan(ECHO, revision=LATEST_LEGACY.name, **options))
        nursery.cancel_scope.cancel()
    return report, wrong


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda n, m: http(b"busy", status=503), "HTTP 503"),
        (lambda n, m: http(b"", status=202), "HTTP 202"),
        (lambda n, m: http(b"<html>", kind="text/html"), "neither JSON nor events"),
        (lambda n, m: http(result_of(m, {"content": []})), "no text"),
        (lambda n, m: http(echoed({**m, "params": {"arguments": {"text": "x"}}})), "wrong text"),
        (lambda n, m: events(echoed({**m, "params": {"arguments": {"text": "x"}}})), "wrong text"),
        (lambda n, m: events(), "no answer in the stream"),
        (lambda n, m: events(b'{"jsonrpc":"2.0","method":"notifications/message"}'), "no answer in the stream"),
    ],
)
async def test_wrong_answers_are_counted_by_kind(answer: Any, kind: str) -> None:
    report, _ = await of_wrong(answer)
    assert (report.calls, counts(report)) == (0, {kind: 6})


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (lambda n, m: http(b"nonsense"), {"not JSON": 6, "no answer in the reply": 6}),
        (lambda n, m: http(b"[3]"), {"no JSON-RPC": 6, "no answer in the reply": 6}),
        (lambda n, m: http(echoed({**m, "id": m["id"] + 1})), {"answer to no call": 6, "no answer in the reply": 6}),
        (lambda n, m: http(echoed({**m, "id": str(m["id"])})), {"answer to no call": 6, "no answer in the reply": 6}),
        (lambda n, m: events(b"nonsense"), {"not JSON": 6, "no answer in the stream": 6}),
    ],
)
async def test_a_reply_without_the_answer_fails_its_call_as_well(answer: Any, kinds: dict[str, int]) -> None:
    report, _ = await of_wrong(answer)
    assert (report.calls, counts(report)) == (0, kinds)


@pytest.mark.parametrize("form", [events, lambda *texts: http(b"[" + b",".join(texts) + b"]")])
async def test_a_second_answer_is_an_error(form: Any) -> None:
    report, _ = await of_wrong(lambda n, m: form(echoed(m), echoed(m)))
    assert (report.calls, counts(report)) == (6, {"answered twice": 6})


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: Application/JSON\r\n"
PING = b'{"jsonrpc":"2.0","id":"x","method":"ping"}'


@pytest.mark.parametrize(
    "form",
    [
        lambda right: HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(right), right),
        lambda right: b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + http(right),
        lambda right: http(right, kind="application/json; charset=utf-8"),
        lambda right: b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n" + right,  # ends with its connection
        lambda right: events(b"", PING, right, PING),
        lambda right: http(b": comment\r\n\r\nid: 1\r\ndata: " + right + b"\r\n\r\n", kind="text/event-stream"),
    ],
)
async def test_right_replies_in_unusual_forms_are_right(form: Any) -> None:
    report, _ = await of_wrong(lambda n, m: form(echoed(m)), under_way=2)
    assert (report.calls, report.errors) == (6, {})


async def test_what_a_server_asks_on_a_stream_is_answered() -> None:
    report, wrong = await of_wrong(lambda n, m: events(PING, echoed(m)), count=3)
    assert (report.calls, report.errors) == (3, {})
    assert wrong.answered == [{"jsonrpc": "2.0", "id": "x", "result": {}}] * 3


async def test_a_stream_that_does_not_end_with_the_answer_is_left() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    report, wrong = await of_wrong(lambda n, m: head + b"data: %b\n\n" % echoed(m), count=4, under_way=2)
    assert (report.calls, report.errors) == (4, {})
    assert report.latency.most < 0.5  # the answer counts, not the end
    assert wrong.connections >= 4


async def test_a_cut_stream_that_the_server_does_not_resume_is_an_error() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    report, _ = await of_wrong(lambda n, m: head + b"id: e7\ndata:\n\n", count=4, under_way=2, cut=1.0)
    assert (report.calls, counts(report)) == (0, {"not resumed": 4})
    assert report.errors["not resumed"].example.startswith("HTTP 405")
    report, _ = await of_wrong(lambda n, m: head + b"id: e7\ndata:\n\n", count=4, cut=1.0, resumed=events())
    assert (report.calls, counts(report), report.uncut) == (0, {"not resumed": 4}, 0)
    assert report.errors["not resumed"].example == "the stream ended without the answer"


@pytest.mark.parametrize("form", [http, events])
async def test_calls_that_were_answered_before_they_could_be_cut_are_told(form: Any) -> None:
    report, _ = await of_wrong(lambda n, m: form(echoed(m)), count=4, cut=1.0)
    assert (report.calls, report.errors, report.uncut) == (4, {}, 4)
    lines = [text for text, _ in describe_report(report)]
    assert "  not cut     4 calls were answered before an event with an id had come" in lines


async def test_connections_are_kept() -> None:
    report, wrong = await of_wrong(lambda n, m: http(echoed(m)), count=50, under_way=3)
    assert (report.calls, report.errors) == (50, {})
    assert wrong.connections <= 3 + 3  # the places', the session's own, the two of the client that looked first


async def test_connecting_is_over_before_the_first_call() -> None:
    report, wrong = await of_wrong(lambda n, m: http(echoed(m)), count=20, under_way=10)
    assert (report.calls, report.errors) == (20, {})
    assert wrong.at_first >= 10 + 1  # the places', and the session's own


async def test_a_server_that_closes_after_each_answer_is_connected_to_again() -> None:
    report, wrong = await of_wrong(lambda n, m: http(echoed(m), headers="connection: close\r\n"), count=10)
    assert (report.calls, report.errors) == (10, {})
    assert wrong.connections >= 10


async def test_a_connection_that_breaks_fails_its_call_and_no_other() -> None:
    report, _ = await of_wrong(lambda n, m: b"" if n % 5 == 0 else http(echoed(m)), count=20)
    assert (report.calls, counts(report)) == (16, {"connection lost": 4})


async def test_what_is_no_http_is_told() -> None:
    report, _ = await of_wrong(lambda n, m: b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    assert (report.calls, counts(report)) == (0, {"not HTTP": 6})


async def test_a_session_that_no_header_can_name_is_not_opened() -> None:
    report, wrong = await of_wrong(lambda n, m: http(echoed(m)), later="\N{LATIN SMALL LETTER E WITH ACUTE}", reopen=0)
    assert (report.calls, counts(report)) == (0, {"no connection": 1})
    assert wrong.calls == 0


async def test_a_forgotten_session_is_begun_again_a_bounded_number_of_times() -> None:
    report, wrong = await of_wrong(lambda n, m: http(b"gone", status=404) if n == 3 else http(echoed(m)), count=10)
    assert (report.calls, counts(report)) == (9, {"HTTP 404": 1})
    assert wrong.initialized == 1 + 2  # the client that looked first, and ours, twice
    report, wrong = await of_wrong(lambda n, m: http(b"gone", status=404), count=100, reopen=2)
    assert wrong.initialized == 1 + 1 + 2
    assert report.calls == 0


async def test_places_that_find_a_session_forgotten_begin_one_together() -> None:
    report, wrong = await of_wrong(lambda n, m: http(echoed(m)), forgets_at=20, count=60, under_way=6)
    assert wrong.initialized == 1 + 2
    assert 1 <= counts(report)["HTTP 404"] <= 6
    assert report.calls + counts(report)["HTTP 404"] == 60


async def test_in_the_legacy_era_a_call_that_is_given_up_is_cancelled_with_a_notification() -> None:
    def answer(n: int, message: dict[str, Any]) -> bytes:
        return b"HTTP/1.1 200 OK\r\n"  # and never the rest

    report, wrong = await of_wrong(answer, count=6, under_way=2, timeout=0.05)
    assert (report.timed_out, report.errors) == (6, {})
    assert wrong.notified.count("notifications/cancelled") == 6


async def test_sessions_are_ended_at_the_server() -> None:
    report, wrong = await of_wrong(lambda n, m: http(echoed(m)), sessions=3)
    assert wrong.deleted == 1 + 3
    assert report.errors == {}


async def test_a_silent_server_has_not_answered() -> None:
    def answer(n: int, message: dict[str, Any]) -> bytes:
        return b"HTTP/1.1 200 OK\r\n"  # and never the rest

    report, _ = await of_wrong(answer, count=3, under_way=3, patience=0.5)
    assert (report.calls, counts(report)) == (0, {"no answer": 3})


async def test_a_server_that_goes_away_ends_the_measurement() -> None:
    """All places find nobody, and give up after some attempts each."""
    enough = trio.Event()
    reports = []

    def answer(n: int, message: dict[str, Any]) -> bytes:
        if n == 100:
            enough.set()
        return http(echoed(message))

    async def load(url: str) -> None:
        plan = Plan(ECHO, seconds=600.0, under_way=4, reopen=1, revision=LATEST_LEGACY.name)
        reports.append(await measure(HttpServer(url), plan))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            nursery.start_soon(load, f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}/mcp")
            async with trio.open_nursery() as serving:
                serving.start_soon(trio.serve_listeners, Wrong(answer).serve, listeners)
                await enough.wait()
                serving.cancel_scope.cancel()
    (report,) = reports
    assert report.calls >= 90
    assert counts(report).keys() <= {"connection lost", "no connection"}
    assert counts(report)["no connection"] >= 4


async def test_a_place_waits_for_its_turn_in_an_open_loop(steady_clock: trio.abc.Clock) -> None:
    report, wrong = await of_wrong(lambda n, m: http(echoed(m)), count=30, rate=60.0, sessions=3, under_way=20)
    assert (report.calls, report.errors) == (30, {})
    assert wrong.connections <= 20  # warm ones are used again, not one after the other of sixty


@pytest.mark.parametrize("revision", ERAS)
@pytest.mark.parametrize("options", [{}, {"rate": 400.0}])
async def test_sessions_that_end_after_some_calls_lose_none(revision: str, options: dict[str, Any]) -> None:
    async with serving() as url:
        plan = Plan(ECHO, count=200, under_way=4, sessions=3, session_calls=9, revision=revision, **options)
        report = await measure(HttpServer(url), plan)
    assert (report.calls, report.errors) == (200, {})


async def test_sessions_follow_the_stages() -> None:
    async with serving() as url:
        plan = Plan(ECHO, stages="0:1,200ms:6,200ms:6,200ms:1", stages_of="sessions", revision=ERAS[1])
        report = await measure(HttpServer(url), plan)
    assert report.errors == {}
    assert report.calls > 20
