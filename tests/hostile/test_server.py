"""A server process under attack: what it costs, what it still answers, and what is left over."""

from __future__ import annotations

import random
import sys
from typing import Any

import orjson
import pytest
import trio

from tests.guarantees.report import figure
from tests.hostile.peers import MIB, Target, call, enveloped, notice, request, target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]


async def test_an_endless_line_costs_at_most_eight_mebibytes() -> None:
    async with target() as server:
        await server.meet()
        await server.warmed()
        base = server.forget_peak()
        await server.pour(b'{"jsonrpc":"2.0","method":"x","params":{"a":"')
        for _ in range(200):
            await server.pour(b"x" * MIB)
        await server.pour(b'"},"id":77}\n')
        answer = await server.hear()
        assert (answer["id"], answer["error"]["code"]) == (77, -32600)
        assert server.peak - base <= 8 * MIB
        await server.pour(call(1, "echo", text="alive"))
        assert (await server.answer(1))["result"]["content"][0]["text"] == "alive"


async def test_a_peer_that_never_reads_is_read_no_further_and_loses_nothing() -> None:
    many = 100_000
    written = 0
    async with target() as server:
        await server.meet()
        await server.warmed()
        base = server.forget_peak()

        async def pour() -> None:
            nonlocal written
            for first in range(0, many, 100):
                lines = [call(id, "echo", text=f"number {id}") for id in range(first, first + 100)]
                await server.pour(b"".join(lines))
                written = first + 100

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pour)
            before = -1
            while written != before:
                before = written
                await trio.sleep(0.5)
            assert written < many
            assert server.peak - base <= 16 * MIB
            answers: dict[int, str] = {}
            while len(answers) < many:
                message = await server.hear()
                assert message["id"] not in answers
                answers[message["id"]] = message["result"]["content"][0]["text"]
        assert answers == {id: f"number {id}" for id in range(many)}


@pytest.mark.parametrize("tool", ["stream", "chatter"])
@pytest.mark.parametrize("size", [10, 1_000])
async def test_a_slow_reader_of_progress_and_logs_costs_at_most_two_mebibytes(tool: str, size: int) -> None:
    async with target() as server:
        await server.meet()
        await server.warmed()
        base = server.forget_peak()
        arguments = {"count": 1_000_000, "size": size}
        await server.pour(request(1, "tools/call", name=tool, arguments=arguments, _meta={"progressToken": 1}))
        await server.hear()  # the flood has begun; from now on nobody reads
        await trio.sleep(1)
        assert server.peak - base <= 2 * MIB


async def test_a_pending_large_result_costs_at_most_three_times_its_size_and_is_let_go() -> None:
    # Otherwise the C library, having seen a large block freed, keeps the next one for later use.
    async with target({"MALLOC_MMAP_THRESHOLD_": "131072"}) as server:
        await server.meet()
        await server.warmed()
        base = server.forget_peak()
        await server.pour(call(1, "big", size=20 * MIB))
        assert server.process.stdout is not None
        await trio.lowlevel.wait_readable(server.process.stdout.fileno())  # it is ready, and has begun to leave
        assert server.peak - base <= 3 * 20 * MIB
        assert len((await server.answer(1))["result"]["content"][0]["text"]) == 20 * MIB
        assert server.peak - base <= 3 * 20 * MIB
        with trio.move_on_after(5):
            while server.memory - base > 2 * MIB:  # noqa: ASYNC110  # it is another process
                await trio.sleep(0.01)
        assert server.memory - base <= 2 * MIB


async def test_a_question_left_open_is_no_way_to_have_pongs_piled_up() -> None:
    async with target() as server:
        await server.meet(elicitation={})
        await server.warmed()
        base = server.forget_peak()
        await server.pour(call("q", "ask"))
        question = await server.hear()
        pings = b"".join(request(n, "ping") for n in range(1_000))
        sent = 0
        with trio.move_on_after(2):
            while True:
                await server.pour(pings)
                sent += 1
        assert 5 < sent < 50
        assert server.peak - base <= 16 * MIB
        assert question["method"] == "elicitation/create"


async def test_replies_held_for_an_array_that_is_never_complete_are_bounded() -> None:
    async with target() as server:
        await server.meet("2025-03-26")
        await server.warmed()
        base = server.forget_peak()
        for n in range(5):
            members = [call(f"hang {n}", "hang"), *(call(f"{n}.{m}", "big", size=MIB) for m in range(20))]
            await server.pour(b"[" + b",".join(members).replace(b"\n", b"") + b"]\n")
        while (await server.statistics())["running"] > 6:
            pass
        assert server.peak - base <= 24 * MIB
        await server.pour(b"".join(notice("notifications/cancelled", requestId=f"hang {n}") for n in range(5)))
        arrays = [await server.hear() for _ in range(5)]
        replies = {reply["id"]: reply for array in arrays for reply in array}
        assert len(replies) == 100
        errors = [reply["error"]["code"] for reply in replies.values() if "error" in reply]
        assert 80 <= len(errors) <= 90
        assert set(errors) == {1001}


async def test_requests_under_way_are_bounded_by_what_they_occupy() -> None:
    """An empty array is three bytes on the wire and seventy in memory."""
    junk = [[] for _ in range(60_000)]  # type: ignore[var-annotated]
    async with target() as server:
        await server.meet()
        await server.warmed()
        base = server.forget_peak()
        with trio.move_on_after(3):
            for n in range(100):
                await server.pour(request(n, "tools/call", name="hang", arguments={}, _meta={"junk": junk}))
        assert server.peak - base <= 100 * MIB


async def test_cancel_storms_and_ids_reused_under_way_leave_nothing() -> None:
    async with target() as server:
        await server.meet()
        await server.warmed()
        before = await server.statistics()
        storm = [notice("notifications/cancelled", requestId=n) for n in range(50_000)]
        await server.pour(b"".join(storm))
        for first in range(0, 5_000, 500):
            pairs = [
                call(id, "hang") + notice("notifications/cancelled", requestId=id) for id in range(first, first + 500)
            ]
            await server.pour(b"".join(pairs))
        await server.pour(call("same", "hang"))

        async def again() -> None:
            for _ in range(100):
                await server.pour(call("same", "hang") * 100)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(again)
            for _ in range(10_000):
                answer = await server.hear()
                assert (answer["id"], answer["error"]["code"]) == ("same", -32600)
        await server.pour(notice("notifications/cancelled", requestId="same"))
        with trio.fail_after(10):
            while await server.statistics() != before:
                pass


async def _worst_echo(server: Target, name: str) -> float:
    worst = 0.0
    for n in range(50):
        began = trio.current_time()
        await server.pour(call(f"{name} {n}", "echo"))
        await server.answer(f"{name} {n}")
        worst = max(worst, trio.current_time() - began)
    return worst


async def test_two_hundred_blocked_threads_delay_no_echo() -> None:
    async with target() as server:
        await server.meet()
        control = await _worst_echo(server, "control")
        await server.pour(b"".join(call(n, "block") for n in range(200)))
        while (await server.statistics())["running"] < 201:
            pass
        # The best of three rounds: a loop that threads hold up is held up in each, a busy machine now and then.
        worst = min([await _worst_echo(server, f"beside {number}") for number in range(3)])
        print(f"worst of 50 echoes: {worst * 1000:.1f} ms, without the threads {control * 1000:.1f} ms")
        # Promised are 50 ms. On a machine that starves both, the run without the threads says what it can do.
        assert worst <= 4 * max(0.05, control)
        await server.pour(call("release", "release"))
        ids = {(await server.hear())["id"] for _ in range(201)}
        assert ids == {*range(200), "release"}


_SEEDS = [
    call(1, "echo", text="hi"),
    call(2, "crash"),
    enveloped(3, "tools/call", name="echo", arguments={"text": "x"}),
    enveloped(4, "server/discover"),
    enveloped(5, "prompts/get", name="review", arguments={"path": "p"}),
    enveloped(6, "subscriptions/listen", notifications={"toolsListChanged": True}),
    request(7, "tools/list"),
    request(8, "resources/subscribe", uri="note://x"),
    request(9, "completion/complete", ref={"type": "ref/prompt", "name": "review"}, argument={"name": "path"}),
    request(10, "initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "a", "version": "1"}),
    request(11, "logging/setLevel", level="info"),
    notice("notifications/cancelled", requestId=1, reason="x"),
    b"[" + request(12, "ping")[:-1] + b"]\n",
]
_WORDS = [b"null", b"[]", b"{}", b"1e999", b'"\\ud800"', b"-1", b"99999999999999999999", b"true", b",", b"\xff"]


def mutated(rng: random.Random, line: bytes) -> bytes:
    data = bytearray(line[:-1])
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            data[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[place : place + rng.randrange(1, 8)]
        elif kind == 2:
            data[place:place] = rng.choice(_WORDS)
        else:
            data[place:place] = data[rng.randrange(len(data) + 1) :][:20]
    return bytes(data).replace(b"\n", b" ") + b"\n"


@pytest.mark.parametrize("revision", ["2025-03-26", "2025-11-25", None], ids=str)
async def test_twenty_thousand_mutations_do_no_harm(revision: str | None) -> None:
    rng = random.Random(20_000)
    async with target() as server:
        if revision is not None:
            await server.meet(revision)
        await _mutate(server, rng, 4_000)
        base, before = server.memory, await _at_rest(server)
        await _mutate(server, rng, 20_000)
        kept = server.memory - base
        figure(12, "kept after 20,000 mutations", round(kept / MIB, 3), 2, "MiB", f"stdio, {revision or 'modern'}")
        assert kept <= 2 * MIB
        assert await _at_rest(server) == before
        assert await server.end() == 0
    assert server.errors.count(b"Traceback") == server.errors.count(b"the handler of tools/call crashed")


async def _at_rest(server: Target) -> dict[str, int]:
    """What it counts of itself. The last of what was given up may still be ending when the first answer is made."""
    counts = await server.statistics()
    while (again := await server.statistics()) != counts:
        counts = again
    return counts


async def _mutate(server: Target, rng: random.Random, count: int) -> None:
    for first in range(0, count, 100):
        mark = f"mark {first}"
        lines = [mutated(rng, rng.choice(_SEEDS)) for _ in range(100)]
        await server.pour(b"".join(lines) + enveloped(mark, "tools/call", name="echo", arguments={}))
        found: Any = None
        while not isinstance(found, dict) or found.get("id") != mark:
            line = await server.line()
            assert b"Traceback" not in line
            assert b"secret of the handler" not in line
            found = orjson.loads(line)
            if isinstance(found, dict) and found.get("method") == "notifications/subscriptions/acknowledged":
                # What was subscribed to by chance is given up, so that in the end nothing is under way.
                subscription = found["params"]["_meta"]["io.modelcontextprotocol/subscriptionId"]
                await server.pour(notice("notifications/cancelled", requestId=subscription))


async def test_a_server_whose_client_is_killed_is_gone_within_a_second() -> None:
    """The client leaves by nothing but the end of its pipes, with a call under way and its output unread."""
    async with target() as server:
        await server.meet()
        assert server.process.stdin is not None
        assert server.process.stdout is not None
        await server.pour(call(1, "hang") + call(2, "big", size=MIB))
        await trio.lowlevel.wait_readable(server.process.stdout.fileno())
        began = trio.current_time()
        await server.process.stdin.aclose()
        await server.process.stdout.aclose()
        assert await server.process.wait() == 0
        assert trio.current_time() - began <= 4 * 1.0
    assert b"Traceback" not in server.errors
