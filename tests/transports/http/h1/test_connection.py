"""One connection, in virtual time: who speaks when, what is dropped, what takes too long, and how it ends."""

from __future__ import annotations

import gc
import random
from functools import partial

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from tests.peers.http1 import HttpWire, http_request
from tests.transports.http import support
from tests.transports.http.support import DummyFace, OfferingWire
from trimcp.budget import Budget
from trimcp.support.deadlines import Deadlines
from trimcp.transports.http.h1.connection import H1Connection
from trimcp.transports.http.h1.parser import RequestParser
from trimcp.transports.http.h1.wires import StreamWire, Wire
from trimcp.transports.http.h1.writer import H1Writer
from trimcp.transports.http.interfaces import Admitted, Head, HttpResponse, Upgrade
from trimcp.transports.http.settings import HttpLimits

LIMITS = HttpLimits()
HELLO = b'{"hello": 1}'


@pytest.fixture(
    autouse=True, params=[pytest.param(StreamWire, id="reads"), pytest.param(OfferingWire, id="is offered")]
)
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let connections read, or be offered what came for as long as they wait."""
    monkeypatch.setitem(globals(), "memory", partial(support.memory, wire=request.param))


memory = support.memory

# Requests and responses


async def test_requests_follow_each_other(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        for n in range(3):
            answer = await client.fetch("POST", "/echo", body=HELLO * n)
            assert (answer.status, answer.body) == (200, HELLO * n)
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["date"].endswith("GMT")
            assert "connection" not in answer.headers
        assert site.face.ended == [("/echo", 200, len(HELLO) * n) for n in range(3)]
        head = site.face.handlers[0].head
        assert (head.method, head.path, head.peer) == ("POST", "/echo", "test")


@pytest.mark.parametrize("again", [True, False])
async def test_a_head_like_the_one_before_is_judged_once_if_the_face_allows(
    again: bool, autojump_clock: MockClock
) -> None:
    """As long as requests come whole; however they come, they are answered alike."""
    bodies = [HELLO, HELLO, b"", HELLO * 200, HELLO * 1_000, HELLO, HELLO * 4_000, HELLO]
    async with memory(DummyFace(again=again, max_body=10_000)) as site:
        client = site.connect()
        for body in bodies:
            answer = await client.fetch("POST", "/echo", body=body)
            assert (answer.status, answer.body) == ((200, body) if len(body) <= 10_000 else (413, b'"too large"'))
        assert site.face.judged == (3 if again else len(bodies))  # the first, and those that are too large
        answered = [handler for handler in site.face.handlers if handler.body is not None]
        assert [handler.body for handler in answered] == [body for body in bodies if len(body) <= 10_000]
        assert all(handler.head.headers["content-length"] == str(len(handler.body or b"")) for handler in answered)


@pytest.mark.parametrize("change", ["a header", "the length", "nothing"])
async def test_only_the_length_may_differ_in_a_head_that_is_not_judged_again(
    change: str, autojump_clock: MockClock
) -> None:
    first = http_request("POST", "/echo", "Origin: http://a", body=HELLO)
    second = {
        "a header": first.replace(b"http://a", b"http://b"),
        "the length": first.replace(b": 12", b":  012"),
        "nothing": first,
    }[change]
    async with memory() as site:
        client = site.connect()
        for data in (first, second, second):
            await client.send(data)
            assert (await client.answer()).body == HELLO
        assert site.face.judged == (1 if change == "nothing" else 2)
        last = site.face.handlers[-1].head.headers
        assert last["origin"] == ("http://b" if change == "a header" else "http://a")


async def test_a_request_that_is_like_the_one_before_may_take_its_time(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        for _ in range(2):
            await client.send(http_request("POST", "/wait", body=HELLO))
            await trio.sleep(LIMITS.idle_timeout + LIMITS.head_timeout + LIMITS.body_timeout)
            site.face.handlers[-1].reply.send(HttpResponse(200))
            assert (await client.answer()).status == 200
        assert site.face.judged == 1


@pytest.mark.parametrize("how", ["leaves", "half closes", "is drained", "gives way", "says more"])
async def test_what_happens_during_a_request_that_is_like_the_one_before(how: str, autojump_clock: MockClock) -> None:
    """Happens to it as to any other."""
    async with memory() as site:
        client = site.connect()
        for _ in range(2):
            await client.send(http_request("POST", "/wait", body=HELLO))
            await wait_all_tasks_blocked()
            if len(site.face.handlers) == 1:
                site.face.handlers[0].reply.send(HttpResponse(200))
                await client.answer()
        handler, [connection] = site.face.handlers[-1], site.connections
        if how == "leaves":
            await client.stream.aclose()
        elif how == "half closes":
            assert isinstance(client.stream, trio.StapledStream)
            await client.stream.send_eof()
        elif how == "is drained":
            site.hosting.ending = site.hosting.draining = True
            connection.wake()
        elif how == "gives way":
            connection.evict("for the test")
        else:
            await client.send(http_request("POST", "/echo", body=HELLO)[:-1])
        await wait_all_tasks_blocked()
        assert handler.gone == (how in ("leaves", "half closes", "gives way"))
        assert site.ended == handler.gone
        if not handler.gone:
            handler.reply.send(HttpResponse(200))
            answer = await client.answer()
            assert answer.headers.get("connection") == ("close" if how == "is drained" else None)
        if how == "says more":
            await client.send(HELLO[-1:])
            assert (await client.answer()).body == HELLO
        elif how == "is drained":
            await wait_all_tasks_blocked()
            await client.stream.aclose()
            await site.over.wait()


async def test_a_bug_in_what_admits_a_head_again_ends_one_connection(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with memory() as site:
        client, other = site.connect(), site.connect()

        def crash(head: Head) -> None:
            raise RuntimeError("the face's bug")

        await client.fetch("POST", "/echo", body=HELLO)
        site.face.handlers[0].head.again = crash
        await client.send(http_request("POST", "/echo", body=HELLO))
        await site.over.wait()
        assert [record.message for record in caplog.records] == ["serving a connection from test crashed"]
        assert (await other.fetch("POST", "/echo", body=HELLO)).body == HELLO


async def test_bytes_may_come_one_by_one(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        for byte in (
            http_request("POST", body=HELLO)
            + http_request("POST", "/no", body=HELLO)
            + http_request("POST", body=HELLO)
        ):
            await client.send(bytes([byte]))
            await wait_all_tasks_blocked()
        assert [(await client.answer()).status for _ in range(3)] == [200, 403, 200]
        assert [handler.body for handler in site.face.handlers] == [HELLO, HELLO]


async def test_pipelined_requests_are_answered_in_order_one_at_a_time(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.send(b"".join(http_request("POST", "/wait", body=b"%d" % n) for n in range(5)))
        for n in range(5):
            await wait_all_tasks_blocked()
            assert [handler.body for handler in site.face.handlers] == [b"%d" % m for m in range(n + 1)]
            site.face.handlers[n].reply.send(HttpResponse(200, (), b"answer %d" % n))
            assert (await client.answer()).body == b"answer %d" % n


async def test_reading_stops_at_a_bounded_amount_of_following_requests(autojump_clock: MockClock) -> None:
    class Counting(trio.abc.Stream):
        def __init__(self, stream: trio.abc.Stream) -> None:
            self.stream = stream
            self.count = 0

        async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
            data = await self.stream.receive_some(max_bytes)
            self.count += len(data)
            return data

        async def send_all(self, data: bytes | bytearray | memoryview) -> None:
            await self.stream.send_all(data)

        async def wait_send_all_might_not_block(self) -> None:
            await self.stream.wait_send_all_might_not_block()

        async def aclose(self) -> None:
            await self.stream.aclose()

    counting: list[Counting] = []

    def pair() -> tuple[trio.abc.Stream, trio.abc.Stream]:
        ours, theirs = memory_stream_pair()
        counting.append(Counting(theirs))
        return ours, counting[0]

    async with memory() as site:
        client = site.connect(pair)
        one = http_request("POST", "/wait", body=b"x" * 1_000)
        await client.send(one * 1_000)
        await wait_all_tasks_blocked()
        assert LIMITS.max_pipelined <= counting[0].count <= 2 * 64 * 1024 + 64 * 1024
        for n in range(1_000):
            while len(site.face.handlers) <= n:
                await wait_all_tasks_blocked()
            site.face.handlers[n].reply.send(HttpResponse(202))
            assert (await client.answer()).status == 202


async def test_chunked_bodies(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.request("POST", "/echo", "Transfer-Encoding: chunked")
        for piece in (b"3\r\nabc\r\n", b"2\r\nd", b"e\r\n0\r", b"\nX: y\r\n", b"\r\n"):
            await wait_all_tasks_blocked()
            assert site.face.handlers[0].body is None
            await client.send(piece)
        assert (await client.answer()).body == b"abcde"
        assert (await client.fetch("POST", body=HELLO)).body == HELLO


async def test_connection_close_is_honoured(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.send(http_request("POST", "/echo", "Connection: close", body=HELLO) + http_request())
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (HELLO, "close")
        await client.closed()
        assert len(site.face.handlers) == 1


async def test_100_continue_comes_when_the_head_was_admitted(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        site.face.held = trio.Event()
        await client.send(http_request("POST", "/echo", "Expect: 100-continue", f"Content-Length: {len(HELLO)}"))
        await wait_all_tasks_blocked()
        assert site.face.handlers == []
        site.face.held.set()
        assert (await client.answer()).status == 100
        await client.send(HELLO)
        assert (await client.answer()).body == HELLO

        # It is left out where the body has begun already, or there is none.
        await client.send(
            http_request("POST", "/echo", "Expect: 100-continue", f"Content-Length: {len(HELLO)}") + HELLO[:1]
        )
        await wait_all_tasks_blocked()
        await client.send(HELLO[1:])
        assert (await client.answer()).status == 200
        await client.request("POST", "/echo", "Expect: 100-continue", body=HELLO)
        assert (await client.answer()).status == 200
        await client.request("POST", "/echo", "Expect: 100-continue", body=b"")
        assert (await client.answer()).status == 200

        # Refused: the client will not send the body, or it will; so the connection cannot go on.
        await client.send(http_request("POST", "/no", "Expect: 100-continue", f"Content-Length: {len(HELLO)}"))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (403, "close")
        await client.closed()


# Bodies nobody wants


async def test_a_small_body_is_dropped_when_its_request_is_turned_away(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.send(http_request("POST", "/no", "Content-Length: 1000") + b"x" * 400)
        assert (await client.answer()).status == 403  # at once
        await client.send(b"x" * 600 + http_request("POST", body=HELLO))
        assert (await client.answer()).body == HELLO


async def test_a_large_body_is_not_read_when_its_request_is_turned_away(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.send(http_request("POST", "/no", "Content-Length: 100000"))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (403, "close")
        await client.closed()
        client = site.connect()
        await client.send(http_request("POST", "/no", "Transfer-Encoding: chunked"))
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (403, "close")
        await client.closed()


async def test_a_dropped_body_that_does_not_come_ends_the_connection(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.send(http_request("POST", "/no", "Content-Length: 10"))
        assert (await client.answer()).status == 403
        start = trio.current_time()
        await client.closed()
        assert trio.current_time() - start == LIMITS.body_timeout


async def test_a_length_above_the_limit_is_answered_without_reading(autojump_clock: MockClock) -> None:
    async with memory(DummyFace(max_body=1_000)) as site:
        client = site.connect()
        await client.send(http_request("POST", "/echo", "Expect: 100-continue", "Content-Length: 1001"))
        answer = await client.answer()
        assert (answer.status, answer.body, answer.headers["connection"]) == (413, b'"too large"', "close")
        await client.closed()
        assert site.face.handlers[0].beginning == b""

        client = site.connect()
        await client.request("POST", body=b"y" * 1_001)
        assert (await client.answer()).status == 413
        assert site.face.handlers[1].beginning == b"y" * 1_001

        client = site.connect()
        assert (await client.fetch("POST", body=b"z" * 1_000)).status == 200
        assert site.face.ended == [("/echo", 413, 11), ("/echo", 413, 11), ("/echo", 200, 1_000)]


async def test_a_chunked_body_is_read_to_the_limit_and_no_further(autojump_clock: MockClock) -> None:
    async with memory(DummyFace(max_body=200_000)) as site:
        client = site.connect()
        await client.request("POST", "/echo", "Transfer-Encoding: chunked")
        async with trio.open_nursery() as nursery:

            async def send_for_ever() -> None:
                with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
                    while True:
                        await client.send(b"3e8\r\n" + b"x" * 1_000 + b"\r\n")

            nursery.start_soon(send_for_ever)
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (413, "close")
            start = trio.current_time()
            await client.closed()
            assert trio.current_time() - start <= LIMITS.linger_timeout
            nursery.cancel_scope.cancel()
        assert site.face.handlers[0].beginning == b"x" * 65_536
        assert site.face.budget.held == 0


async def test_all_unfinished_bodies_together_are_bounded(autojump_clock: MockClock) -> None:
    async with memory(DummyFace(budget=Budget(600_000))) as site:
        clients = [site.connect() for _ in range(3)]
        for client in clients[:2]:
            await client.send(http_request("POST", "/echo", "Content-Length: 100001") + b"x" * 100_000)
        await wait_all_tasks_blocked()
        assert site.face.budget.held == 200_000
        await clients[2].send(http_request("POST", "/echo", "Content-Length: 100001") + b"x" * 100_000)
        answer = await clients[2].answer()
        assert (answer.status, answer.headers["connection"], answer.headers["retry-after"]) == (503, "close", "1")
        for client in clients[:2]:
            await client.send(b"x")
            assert (await client.answer()).status == 200
        assert site.face.budget.held == 0


async def test_a_body_counts_while_it_waits_for_its_turn(autojump_clock: MockClock) -> None:
    async with memory(DummyFace()) as site:
        budget = site.face.budget
        client = site.connect()
        budget._next_turn = trio.current_time() + 60  # a large one was parsed just now
        async with budget._turn:
            await client.send(http_request("POST", "/echo", "Content-Length: 300000") + b"x" * 300_000)
            await wait_all_tasks_blocked()
            assert budget.held == 300_000
        assert (await client.answer()).status == 200
        assert budget.held == 0


async def test_who_is_ended_while_its_body_waits_for_its_turn_is_not_served(autojump_clock: MockClock) -> None:
    async with memory(DummyFace(budget=Budget(90_000))) as site:
        budget = site.face.budget
        client = site.connect()
        budget._next_turn = trio.current_time() + 60
        async with budget._turn:
            await client.send(http_request("POST", "/echo", "Content-Length: 60000") + b"x" * 60_000)
            await wait_all_tasks_blocked()
            budget.holding("somebody else").add(50_000)
            assert (budget.ended, budget.held) == (1, 50_000)
        await client.closed()
        assert site.face.handlers[0].body is None


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (http_request("POST", "/echo", "Transfer-Encoding: chunked") + b"zz\r\n", 400),
        (b"GET /" + b"x" * 20_000, 414),
        (http_request("GET", "/", "X: " + "x" * 70_000), 431),
    ],
)
async def test_what_is_no_request_ends_the_connection(data: bytes, status: int, autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.send(http_request("POST", "/echo", body=HELLO) + data + b"\r\n" + http_request(path="/smuggled"))
        assert (await client.answer()).body == HELLO
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert answer.headers["content-type"].startswith("text/plain")
        await client.closed()
        assert "/smuggled" not in [handler.head.path for handler in site.face.handlers]


class KnowsFewPaths(DummyFace):
    async def admit(self, head: Head) -> Admitted:
        known = head.path in ("/echo", "/no") or (head.path == "/ws" and head.websocket)
        return await super().admit(head) if known else HttpResponse(404)


async def test_mutated_requests_end_in_order(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    samples = [
        http_request("POST", "/echo", body=HELLO) * 2,
        http_request("POST", "/echo", "Transfer-Encoding: chunked")
        + b"5\r\nhello\r\n0\r\n\r\n"
        + http_request(path="/no"),
        http_request("POST", "/no", "Expect: 100-continue", body=HELLO) + http_request("HEAD", "/echo"),
        http_request("GET", "/ws", "Connection: upgrade", "Upgrade: websocket") + http_request(version="1.0"),
    ]
    choose = random.Random(20261121)
    async with memory(KnowsFewPaths()) as site:
        for _ in range(2_000):
            data = bytearray(choose.choice(samples))
            for _ in range(choose.randrange(1, 4)):
                at = choose.randrange(len(data))
                data[at : at + choose.choice([0, 1, 1, 5])] = choose.choice(
                    [b"", b"\r", b"\n", b"\0", b" ", b":", b"\xff", b"0", b"9", b"\r\n\r\n", choose.randbytes(3)]
                )
            client = site.connect()
            await client.send(bytes(data))
            if choose.random() < 0.9:
                assert isinstance(client.stream, trio.StapledStream)
                await client.stream.send_eof()
            await client.rest()
            await client.stream.aclose()
        await wait_all_tasks_blocked()
        assert (site.ended, site.connections, site.face.budget.held) == (2_000, [], 0)
        assert {record.name for record in caplog.records} <= {"trimcp.security"}


# Time


async def test_a_head_must_be_complete_ten_seconds_after_accepting(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        start = trio.current_time()
        await client.closed()
        assert trio.current_time() - start == 10

        client = site.connect()
        start = trio.current_time()
        await trio.sleep(5)
        for byte in http_request()[:9]:
            await client.send(bytes([byte]))
            await trio.sleep(0.5)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert trio.current_time() - start == 10
        await client.closed()


async def test_a_later_head_has_ten_seconds_from_its_first_byte(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.fetch("POST", body=HELLO)
        await trio.sleep(70)
        await client.send(b"POST ")
        start = trio.current_time()
        await trio.sleep(9)
        await client.send(http_request("POST", body=HELLO)[5:])
        assert (await client.answer()).body == HELLO
        await client.send(b"POST ")
        start = trio.current_time()
        assert (await client.answer()).status == 408
        assert trio.current_time() - start == 10


async def test_an_idle_connection_is_closed_after_75_seconds(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        for _ in range(3):
            assert (await client.fetch("POST", body=HELLO)).body == HELLO
            await trio.sleep(74)
        await client.send(b"\r\n")  # is no beginning of anything
        start = trio.current_time()
        await client.closed()
        assert trio.current_time() - start == 1


async def test_a_body_must_be_complete_in_thirty_seconds(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        start = trio.current_time()
        await client.send(http_request("POST", "/echo", "Content-Length: 1000"))
        for _ in range(29):
            await client.send(b"x")
            await trio.sleep(1)
        assert (await client.answer()).status == 408
        assert trio.current_time() - start == pytest.approx(30, abs=0.001)
        assert site.face.handlers[0].body is None
        assert site.face.handlers[0].gone == 0


async def test_a_body_that_comes_at_its_rate_may_take_longer(autojump_clock: MockClock) -> None:
    async with memory(limits=HttpLimits(body_timeout=10, body_rate=1_000)) as site:
        client = site.connect()
        await client.send(http_request("POST", "/echo", "Content-Length: 30000"))
        for _ in range(30):
            await trio.sleep(1)
            await client.send(b"x" * 1_000)
        assert (await client.answer()).status == 200
        start = trio.current_time()
        await client.send(http_request("POST", "/echo", "Content-Length: 30000"))
        await client.send(b"x" * 5_000)
        assert (await client.answer()).status == 408
        assert trio.current_time() - start == pytest.approx(15, abs=0.001)


async def test_an_answer_may_take_its_time(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.request("POST", "/wait", body=HELLO)
        await trio.sleep(80_000)
        site.face.handlers[0].reply.send(HttpResponse(200, (), b"done"))
        assert (await client.answer()).body == b"done"
        await client.send(b"P")
        assert (await client.answer()).status == 408


async def test_lingering_is_bounded_in_time(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.fetch("POST", "/echo", "Connection: close", body=HELLO)
        start = trio.current_time()
        await client.closed()  # at once: we say that we are done
        assert trio.current_time() == start
        await site.over.wait()  # and listen for a little while
        assert trio.current_time() - start == LIMITS.linger_timeout


# A client that leaves


async def test_the_end_comes_as_soon_as_a_refusal_was_taken(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect(lockstep_stream_pair)
        start = trio.current_time()
        await client.send(b"nonsense\r\n\r\n")
        await trio.sleep(LIMITS.linger_timeout / 2)
        assert (await client.answer()).status == 400
        await client.closed()
        assert trio.current_time() - start == LIMITS.linger_timeout / 2


async def test_an_end_of_file_while_a_request_runs_is_a_disconnect(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.request("POST", "/wait", body=HELLO)
        await wait_all_tasks_blocked()
        handler = site.face.handlers[0]
        assert handler.gone == 0
        assert isinstance(client.stream, trio.StapledStream)
        await client.stream.send_eof()
        await wait_all_tasks_blocked()
        assert handler.gone == 1
        assert handler.reply.gone
        handler.reply.send(HttpResponse(200, (), b"to nobody"))
        handler.reply.start(HttpResponse(200))
        handler.reply.write(b"to nobody")
        handler.reply.finish()
        handler.reply.abort()
        await handler.reply.room()
        await wait_all_tasks_blocked()
        assert (handler.gone, site.ended) == (1, 1)
        assert site.face.ended == [("/wait", 0, 0)]
        await client.closed()


async def test_an_end_of_file_in_the_middle_of_a_stream(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.request("GET", "/wait")
        await wait_all_tasks_blocked()
        handler = site.face.handlers[0]
        handler.reply.start(HttpResponse(200, (), b"12345"))
        await client.head()
        await client.stream.aclose()
        await wait_all_tasks_blocked()
        assert handler.gone == 1
        assert site.face.ended == [("/wait", 200, 5)]


@pytest.mark.parametrize("data", [b"POST ", http_request("POST", "/wait", "Content-Length: 5") + b"1234"])
async def test_a_client_that_leaves_before_its_request_is_complete(data: bytes, autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.send(data)
        await wait_all_tasks_blocked()
        await client.stream.aclose()
        await wait_all_tasks_blocked()
        assert site.ended == 1
        assert all(handler.body is None and handler.gone == 0 for handler in site.face.handlers)


async def test_a_client_that_leaves_while_it_is_judged(autojump_clock: MockClock) -> None:
    async with memory() as site:
        site.face.held = trio.Event()
        client = site.connect()
        await client.request("POST", "/wait", body=HELLO)
        await client.stream.aclose()
        await wait_all_tasks_blocked()
        site.face.held.set()
        await wait_all_tasks_blocked()
        assert [handler.gone for handler in site.face.handlers] == [1]


async def test_a_finished_response_is_delivered_to_a_client_that_will_send_no_more(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect(lockstep_stream_pair)
        await client.request("POST", "/wait", body=HELLO)
        await wait_all_tasks_blocked()
        handler = site.face.handlers[0]
        handler.reply.send(HttpResponse(200, (), b"x" * 1_000_000))
        await wait_all_tasks_blocked()
        assert isinstance(client.stream, trio.StapledStream)
        await client.stream.send_eof()
        await wait_all_tasks_blocked()
        assert (await client.answer()).body == b"x" * 1_000_000
        await client.closed()
        assert handler.gone == 0


# A client that reads slowly


async def test_pipelined_requests_wait_until_the_response_before_is_taken(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect(lockstep_stream_pair)
        await client.send(http_request("POST", "/wait", body=HELLO) * 3)
        for n in range(3):
            await wait_all_tasks_blocked()
            assert len(site.face.handlers) == n + 1
            site.face.handlers[n].reply.send(HttpResponse(200, (), b"x" * 500_000))
            await wait_all_tasks_blocked()
            assert len(site.face.handlers) == n + 1
            assert len((await client.answer()).body) == 500_000


# Our own end


async def test_draining_ends_idle_connections_and_lets_others_finish(autojump_clock: MockClock) -> None:
    async with memory() as site:
        idle, fresh, busy, streaming, sending = (site.connect() for _ in range(5))
        await idle.fetch("POST", body=HELLO)
        await busy.request("POST", "/wait", body=HELLO)
        await wait_all_tasks_blocked()
        await streaming.request("POST", "/wait", body=HELLO)
        await sending.send(http_request("POST", "/echo", "Content-Length: 5") + b"123")
        await wait_all_tasks_blocked()
        site.face.handlers[2].reply.start(HttpResponse(200, (), b"event"))

        site.hosting.ending = site.hosting.draining = True
        for connection in site.connections:
            connection.wake()
        await idle.closed()
        await fresh.closed()
        site.face.handlers[1].reply.send(HttpResponse(200, (), b"done"))
        answer = await busy.answer()
        assert (answer.body, answer.headers["connection"]) == (b"done", "close")
        await busy.closed()
        site.face.handlers[2].reply.finish(b"last event")
        assert (await streaming.answer()).body == b"eventlast event"
        await streaming.closed()
        await sending.send(b"45")
        answer = await sending.answer()
        assert (answer.body, answer.headers["connection"]) == (b"12345", "close")
        await sending.closed()


@pytest.mark.parametrize(("path", "statuses"), [("/bug", [500]), ("/crash", [500]), ("/half", [])])
async def test_a_bug_is_logged_and_ends_one_request(
    path: str, statuses: list[int], autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with memory() as site:
        other = site.connect()
        await other.request("POST", "/wait", body=HELLO)
        client = site.connect()
        await client.request("POST", path, body=HELLO)
        if statuses:
            answer = await client.answer()
            assert (answer.status, answer.body) == (500, b"")
            assert (await client.fetch("POST", body=HELLO)).body == HELLO
        else:
            await client.rest()
        (record,) = caplog.records
        assert record.levelname == "ERROR"
        assert record.exc_info is not None
        site.face.handlers[0].reply.send(HttpResponse(200))
        assert (await other.answer()).status == 200


@pytest.mark.parametrize("where", ["disconnected", "done", "writable"])
async def test_a_bug_in_what_is_called_back_ends_one_connection(
    where: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*args: object) -> None:
        raise RuntimeError("a bug")

    async with memory() as site:
        client = site.connect(lockstep_stream_pair)
        await client.request("POST", "/wait", body=HELLO)
        await wait_all_tasks_blocked()
        handler = site.face.handlers[0]
        monkeypatch.setattr(site.face if where == "done" else handler, where, crash)
        handler.reply.start(HttpResponse(200, (), b"x"))
        if where == "writable":
            await client.head()
        else:
            await client.stream.aclose()
        await wait_all_tasks_blocked()
        assert site.ended == 1
        assert [record.levelname for record in caplog.records] == ["ERROR"]


async def test_a_connection_that_is_cut_off_tells_its_handler(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        await client.request("POST", "/wait", body=HELLO)
        await wait_all_tasks_blocked()
    assert site.face.handlers[0].gone == 1
    assert site.face.handlers[0].reply.gone
    await client.closed()


def living() -> int:
    kinds = (H1Connection, RequestParser, H1Writer, StreamWire)
    return sum(isinstance(each, kinds) for each in gc.get_objects())


async def test_nothing_refers_to_a_connection_that_has_ended(autojump_clock: MockClock) -> None:
    gc.collect()
    others = living()  # of other tests
    async with memory() as site:
        clients: list[HttpWire] = [site.connect() for _ in range(3)]
        await clients[0].fetch("POST", body=HELLO)
        await clients[1].request("POST", "/wait", body=HELLO)
        await clients[2].send(b"POST ")
        await wait_all_tasks_blocked()
        site.face.handlers[1].reply.start(HttpResponse(200))
        assert living() > others
        gc.collect()
        gc.disable()
        try:
            for client in clients:
                await client.stream.aclose()
            await wait_all_tasks_blocked()
            assert site.ended == 3
            assert living() == others
        finally:
            gc.enable()


# WebSocket


async def test_an_upgrade_gets_the_head_as_it_was_read_and_all_that_follows(autojump_clock: MockClock) -> None:
    upgrades: list[tuple[Head, Upgrade]] = []

    async def serve(
        seen: bytes, wire: Wire, writer: H1Writer, deadlines: Deadlines, head: Head, upgrade: Upgrade
    ) -> bool:
        upgrades.append((head, upgrade))
        while not seen.endswith(b"end"):
            seen += await wire.read(7) or b""
        writer.write(b"seen: " + seen)
        while writer.waiting:
            await trio.lowlevel.checkpoint()
        return False

    ask = http_request("GET", "/ws", "Connection: Upgrade", "Upgrade: websocket")
    async with memory(serve_websocket=serve) as site:
        client = site.connect()
        await client.fetch("POST", body=HELLO)
        await client.send(ask + b"frame")
        await wait_all_tasks_blocked()
        site.hosting.ending = site.hosting.draining = True
        site.connections[0].wake()  # not for us to end
        await trio.sleep(1_000)
        await client.send(b"end")
        assert await client.rest() == b"seen: frameend"
        await wait_all_tasks_blocked()
        ((head, upgrade),) = upgrades
        assert head.path == "/ws"
        assert head.headers["upgrade"] == "websocket"
        assert upgrade.max_message == 1024
        assert site.face.ended[1:] == [("/ws", 101, 0)]


async def test_an_upgrade_that_cannot_be(autojump_clock: MockClock) -> None:
    async with memory() as site:
        client = site.connect()
        assert (await client.fetch("GET", "/ws", "Connection: Upgrade", "Upgrade: websocket")).status == 400


async def test_a_crash_in_an_upgrade_ends_one_connection(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(*args: object) -> bool:
        raise ExceptionGroup("bugs", [RuntimeError("a bug")])

    async with memory(serve_websocket=crash) as site:
        client = site.connect()
        await client.send(http_request("GET", "/ws", "Connection: Upgrade", "Upgrade: websocket"))
        await client.closed()
        await wait_all_tasks_blocked()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
