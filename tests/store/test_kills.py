"""Three processes that share sessions, while one after another is killed: no event is lost and none is doubled."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import trio

from tests.cli.test_serving import serving
from tests.store.history import CallHistory, CountingClient, problems, seen
from tests.store.memory_store import MemoryStore
from tests.transports.http.test_sharing import replicas
from trimcp.store.shared import AppendEvent
from trimcp.support.descendants import parent_of, with_descendants

SERVER = "tests/store/counting_server.py"
LEASE = 10.0


def workers_of(process: int) -> list[int]:
    return [pid for pid in with_descendants([process]) if parent_of(pid) == process]


def both_happened(calls: Sequence[CallHistory]) -> bool:
    """Whether a stream went on in another process, and a call died with its own."""
    ends = [call.ends for call in calls if call.resumed]
    return ["result"] in ends and ["error"] in ends


async def test_kills_lose_and_double_nothing() -> None:
    chosen = random.Random(22)  # which are killed
    async with serving("--http", "--port", "0", "--workers", "3", "--no-websocket", server=SERVER) as served:
        url = await served.url()
        clients = [CountingClient(url, "2025-11-25" if number % 2 else "2025-06-18") for number in range(6)]
        stop = trio.Event()

        async def go_on(client: CountingClient) -> None:
            while not stop.is_set():
                await client.count(40, 0.02)

        async with trio.open_nursery() as nursery:
            for client in clients:
                await client.begin()
                nursery.start_soon(go_on, client)
            kills = 0
            while kills < 4 or not (kills == 12 or both_happened(seen(clients))):
                await trio.sleep(2)  # under load
                alive = await trio.to_thread.run_sync(workers_of, served.process.pid)
                os.kill(chosen.choice(alive), signal.SIGKILL)
                kills += 1
            await trio.sleep(2)
            stop.set()
        calls = seen(clients)
        assert problems(calls, 40 * 0.02 + LEASE + 5) == []
        ends = [call.ends[0] for call in calls]
        assert ends.count("result") > len(ends) / 2, ends
        assert both_happened(calls)
        assert served.text.count("was ended by SIGKILL") == kills


# The checker


def heard(*numbers: int, to: int = 5, **more: Any) -> CallHistory:
    return CallHistory(to, list(numbers), [f"1-{place}" for place, _ in enumerate(numbers)], ["result"], **more)


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (heard(1, 2, 3, 4, 5), ""),
        (attrs.evolve(heard(1, 2), ends=["error"]), ""),
        (heard(1, 2, 4, 5), "lost, or out of order"),
        (heard(1, 2, 3, 4), "lost: 4 of 5"),
        (heard(2, 1, 3, 4, 5), "out of order"),
        (heard(1, 2, 3, 3, 4, 5), "doubled"),
        (attrs.evolve(heard(1, 2, 3, 4, 5), ids=["1-1", "1-1"]), "doubled"),
        (attrs.evolve(heard(1, 2, 3, 4, 5), ends=[]), "ended by []"),
        (attrs.evolve(heard(1, 2, 3, 4, 5), ends=["result", "result"]), "ended by"),
        (attrs.evolve(heard(1), ends=["session lost"]), "ended by"),
        (heard(1, 2, 3, 4, 5, seconds=99.0), "after 99.0 s"),
    ],
)
def test_the_checker_finds_what_is_wrong(call: CallHistory, found: str) -> None:
    said = problems([heard(1, 2, 3, 4, 5), call], 10.0)
    assert len(said) == (1 if found else 0)
    assert found in "".join(said)


class Losing(MemoryStore):
    """Loses the third event of a stream, without a word."""

    def _carry_out(self, write: Any) -> bool:
        if isinstance(write, AppendEvent) and b'"progress":8' in write.data:
            return True
        return super()._carry_out(write)


class Doubling(MemoryStore):
    """Reads events from one before that which was asked for."""

    async def after(self, session: str, stream: int, seq: int) -> Sequence[tuple[int, bytes]]:
        return await super().after(session, stream, seq - 1)


@pytest.mark.parametrize(
    ("kind", "found"), [(MemoryStore, ""), (Losing, "lost, or out of order"), (Doubling, "doubled")]
)
async def test_a_store_that_errs_is_found_out(kind: type[MemoryStore], found: str, autojump_clock: Any) -> None:
    """The same client's history, of a stream that breaks off and goes on at another process."""
    async with replicas(kind=kind) as ([_, two], visitor):
        await visitor.initialize()
        answer = await visitor.call("steps", token=1, count=20)
        await answer.events(6)
        answer.leave()
        await trio.sleep(10)
        rest = await (await two.visit(visitor).listen(answer.now()[-1].id)).done()
        call = CallHistory(20)
        for event in (*answer.now(), *rest.now()):
            call.ids.append(event.id or "")
        for message in (*answer.messages, *rest.messages):
            CountingClient._note(call, visitor.last, message)
        said = "".join(problems([call], 60.0))
        assert found in said
        assert bool(found) is bool(said)
