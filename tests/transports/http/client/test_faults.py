"""The client over HTTP while connections fail: an error for that call alone, and nothing left over, on both engines."""

from __future__ import annotations

import logging
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trimcp
from tests.hostile.faults import (
    AFTER_THE_REPLY,
    ANSWERED,
    FAMILIES,
    FAULTS,
    HANGS,
    LOST,
    SECRET,
    Fault,
    faulty,
)
from tests.peers.tls import authority, server_context
from tests.transports.http.client.faults_support import (
    PATIENCE,
    InBoth,
    OnBoth,
    World,
    connected,
    load,
    sensible,
    sockets,
    world,
)
from trimcp.transports.http.client.policy import Timeouts
from trimcp.wire.revisions import LATEST, V2025_11_25, Revision

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are counted in /proc")

_BRIEF = 0.05  # seconds that a call has whose answer never comes


@OnBoth
@InBoth
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_fault_costs_its_call_alone(
    engine: str, revision: Revision, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(engine, revision) as here:
        for fault in FAMILIES[family]:
            try:
                await _suffer(here, fault)
            except Exception as error:
                error.add_note(f"the fault is {fault.name}")
                raise
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR or each.exc_info]
    assert SECRET not in caplog.text


async def _suffer(here: World, fault: Fault) -> None:
    outcome, error = await here.harm(fault.name, _BRIEF if fault.hangs else math.inf)
    assert outcome in fault.outcomes, (outcome, error)
    sensible(error)
    if here.engine == "httpx2" and fault.name in AFTER_THE_REPLY:
        # It takes what follows a reply for the reply to the next request, which then fails, or gets it.
        await here.recover()
    await here.clean()


@OnBoth
@InBoth
@pytest.mark.parametrize("name", [each for each in FAULTS if "answer_of_another_call" in each])
async def test_the_reply_to_one_call_answers_no_other(engine: str, revision: Revision, name: str) -> None:
    async with world(engine, revision) as here, trio.open_nursery() as nursery:

        @nursery.start_soon
        async def wait() -> None:
            assert await here.harm("waits") == (ANSWERED, None)

        await here.server.wait_for(lambda: here.server.faults["waits"] == 1)
        outcome, _ = await here.harm(name)
        assert outcome in FAULTS[name].outcomes
        here.server.release.set()


@OnBoth
@InBoth
@pytest.mark.parametrize("fault", [each for each in FAMILIES["half dead"] if not each.name.startswith("drips")])
async def test_silence_is_the_end_of_a_connection(
    engine: str, revision: Revision, fault: Fault, steady_clock: trio.abc.Clock
) -> None:
    async with world(engine, revision, timeouts=Timeouts(silence=0.1)) as here:
        outcome, error = await here.harm(fault.name)
        assert outcome == LOST
        assert "silent for too long" in str(error) or fault.name == "stops_in_an_event"
        sensible(error)
        await here.clean()


# Replies to requests that were not read

_PADDING = "x" * (8 * 1024 * 1024)  # more than sockets of both sides hold


@OnBoth
@InBoth
@pytest.mark.parametrize("name", [name for name, each in FAULTS.items() if each.early])
async def test_a_reply_before_the_request_was_read_harms_its_call_alone(
    engine: str, revision: Revision, name: str, steady_clock: trio.abc.Clock
) -> None:
    async with world(engine, revision, timeouts=Timeouts(write=0.2)) as here:
        here.server.early = FAULTS[name]
        outcome, error = await here.harm("gzip", text="early", padding=_PADDING)
        assert outcome in FAULTS[name].outcomes
        sensible(error)
        here.server.early = None
        here.server.release.set()
        await here.clean()


@OnBoth
async def test_a_large_request_is_answered_like_any_other(engine: str) -> None:
    async with world(engine, LATEST) as here:
        for _ in range(2):
            assert await here.harm("small_chunks", padding=_PADDING) == (ANSWERED, None)
            await here.clean()


# Connections that are closed while they are idle, or while they are used again


@OnBoth
@InBoth
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
async def test_a_connection_that_was_closed_while_idle_is_not_used(
    engine: str, revision: Revision, reset: bool
) -> None:
    async with world(engine, revision) as here:
        for _ in range(10):
            here.server.hang_up(reset=reset)
            await here.fine()
        await here.clean()


@OnBoth
@InBoth
async def test_a_reply_to_nobody_reaches_nobody(engine: str, revision: Revision) -> None:
    async with world(engine, revision) as here:
        for _ in range(10):
            await here.server.say_unasked()
            await here.fine()
        await here.clean()


@OnBoth
@InBoth
async def test_a_connection_that_is_closed_while_it_is_used_again_costs_no_second_call(
    engine: str, revision: Revision
) -> None:
    async with world(engine, revision) as here:
        for turns in range(30):
            outcomes: list[tuple[str, Any]] = []

            async def call(outcomes: list[tuple[str, Any]] = outcomes) -> None:
                outcomes.append(await here.harm("small_chunks"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(call)
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                here.server.hang_up(reset=bool(turns % 2))
            [(outcome, error)] = outcomes
            assert outcome in (ANSWERED, LOST)
            sensible(error)
            await here.clean()


@OnBoth
@InBoth
async def test_a_connection_that_ends_as_its_next_request_begins_is_told_of(engine: str, revision: Revision) -> None:
    async with world(engine, revision) as here:
        for _ in range(5):
            here.server.hangs_up = True
            outcome, error = await here.harm("gzip")
            assert outcome == LOST, "what was sent may have been carried out, so it is not sent again"
            sensible(error)
            await here.clean()


# Unix sockets


@OnBoth
async def test_a_unix_socket_that_vanishes_is_found_again(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with (
        faulty(LATEST, uds=path) as server,
        connected(server, engine, uds=path, retries=0) as session,
        trio.open_nursery() as nursery,
    ):
        here = World(engine, session, server)
        await here.settle()
        path.unlink()
        await here.clean()  # the connection lives on
        for _ in range(2):  # nothing is there, and then what is no socket
            server.hang_up()
            calls = server.heard.total()
            outcome, error = await here.harm("gzip")
            assert outcome == LOST
            assert "cannot connect to" in str(error)
            assert server.heard.total() == calls
            path.touch()
        path.unlink()
        await nursery.start(partial(server.listen, uds=path))
        here.sockets += 1
        here.tasks += 2
        await here.clean()
        nursery.cancel_scope.cancel()


# TLS


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust the authority of the tests, as users name theirs."""
    path = tmp_path / "authority.pem"
    authority().cert_pem.write_to_path(str(path))
    monkeypatch.setenv("SSL_CERT_FILE", str(path))


@OnBoth
@pytest.mark.parametrize("family", ["ends", "more than one reply", "chunks"])
@pytest.mark.usefixtures("trusted")
async def test_a_fault_inside_of_tls_costs_its_call_alone(engine: str, family: str) -> None:
    async with world(engine, LATEST, tls=server_context("localhost")) as here:
        for fault in FAMILIES[family]:
            try:
                await _suffer(here, fault)
            except Exception as error:
                error.add_note(f"the fault is {fault.name}")
                raise


@OnBoth
@pytest.mark.parametrize("junk", [b"\x16\x03\x03\x00\x04\0\0\0\0", b"\x15\x03\x03\x00\x02\x02\x28", b"junk" * 99])
@pytest.mark.usefixtures("trusted")
async def test_what_is_no_tls_costs_its_call_alone(engine: str, junk: bytes) -> None:
    """What asks for another handshake, an alert, and anything, where no plain text may stand."""
    async with world(engine, LATEST, tls=server_context("localhost")) as here:
        outcome, error = await here.harm("says_below_tls", junk=list(junk))
        assert outcome == LOST
        sensible(error)
        await here.clean()


@OnBoth
@pytest.mark.parametrize("name", ["localhost", "other.example"])
async def test_a_certificate_that_is_not_trusted_is_told_of(
    engine: str, name: str, request: pytest.FixtureRequest
) -> None:
    if name != "localhost":
        request.getfixturevalue("trusted")
    async with faulty(LATEST, tls=server_context(name)) as server:
        before = sockets()
        with pytest.raises(trimcp.ConnectionLost, match=r"(?i)certificate") as caught:
            async with connected(server, engine, retries=0, trusting=name != "localhost"):
                pass
        sensible(caught.value)
        await wait_all_tasks_blocked(0.01)
        assert (server.open, sockets()) == (0, before)


@OnBoth
async def test_a_handshake_that_is_not_answered_is_told_of(engine: str, steady_clock: trio.abc.Clock) -> None:
    before = sockets()
    async with faulty(LATEST) as server:
        server.url = server.url.replace("http:", "https:")
        with pytest.raises(trimcp.ConnectionLost, match="cannot connect") as caught:
            async with connected(server, engine, retries=0, timeouts=Timeouts(connect=0.2)):
                pass
        sensible(caught.value)
        with trio.fail_after(PATIENCE):
            await server.wait_for(lambda: server.open == 0)
    assert sockets() == before


@pytest.mark.parametrize(("engine", "scheme"), [("own", "http"), ("own", "https"), ("httpx2", "http")])
async def test_connecting_can_be_cancelled(engine: str, scheme: str) -> None:
    """Before anything is answered, be it of TLS or of HTTP. (In a handshake of TLS httpx2 forgets its socket then.)"""
    before = sockets()
    async with faulty(LATEST) as server, trio.open_nursery() as nursery:
        server.url = server.url.replace("http:", f"{scheme}:")
        server.deaf = True

        async def connect() -> None:
            async with connected(server, engine):
                raise AssertionError

        nursery.start_soon(connect)
        with trio.fail_after(PATIENCE):
            await server.wait_for(lambda: server.open == 1)
            await wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
    assert sockets() == before


# Cancelling


@OnBoth
@InBoth
@pytest.mark.parametrize("fresh", [False, True], ids=["used again", "fresh"])
async def test_a_call_can_be_cancelled_at_every_point(engine: str, revision: Revision, fresh: bool) -> None:
    async with world(engine, revision) as here, trio.open_nursery() as nursery:
        held: list[tuple[str, Any]] = []

        async def hold() -> None:
            held.append(await here.harm("waits"))

        nursery.start_soon(hold)
        with trio.fail_after(PATIENCE):
            await here.server.wait_for(lambda: here.server.faults["waits"] == 1)
        here.busy = 1
        await here.settle()
        here.most = here.open + 3  # of a cancellation, of what was being opened for the call, of the call after it
        turns = whole = 0
        while whole < 3:
            if fresh:
                here.server.hang_up(idle=True)
            whole += await _cancelled_after(here, turns)
            turns += 1
            await here.clean()
        here.server.release.set()
    assert turns > 5
    assert held == [(ANSWERED, None)]


async def _cancelled_after(here: World, turns: int) -> bool:
    """Cancel a call after so many turns of the event loop; return whether it was over before."""
    outcome = None
    scope = trio.CancelScope()

    async def call() -> None:
        nonlocal outcome
        with scope:
            outcome = await here.harm("small_chunks_of_events")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        scope.cancel()
    return outcome is not None


@OnBoth
@InBoth
@pytest.mark.parametrize("name", ["never_answers", "stops_in_the_head", "stops_in_the_body", "stops_in_an_event"])
async def test_many_calls_are_cancelled_at_once(engine: str, revision: Revision, name: str) -> None:
    async with world(engine, revision) as here:
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(here.harm, name)
            with trio.fail_after(PATIENCE):
                await here.server.wait_for(lambda: here.server.faults[name] == 20)
            await wait_all_tasks_blocked(0.01)
            nursery.cancel_scope.cancel()
        here.most = 21  # with those of cancellations
        await here.clean()


@OnBoth
@pytest.mark.parametrize(
    "name",
    [
        *("cut_before_the_reply", "reset_before_the_reply", "cut_in_the_head", "stops_in_the_head", "drips_the_head"),
        *("never_answers", "garbage", "many_headers", "an_endless_head", "endless_interim_replies", "http_2_preface"),
    ],
)
async def test_a_cancellation_that_fails_costs_nothing(engine: str, name: str, steady_clock: trio.abc.Clock) -> None:
    """In this era it is a request of its own, for which nobody waits."""
    async with world(engine, V2025_11_25, timeouts=Timeouts(notice=0.1)) as here:
        here.server.notices = FAULTS[name]
        for n in range(3):
            assert await here.harm("stops_in_the_body", _BRIEF) == (HANGS, None)
            with trio.fail_after(PATIENCE):
                await here.server.wait_for(lambda n=n: here.server.faults[name] > n)
            await here.clean()


@OnBoth
async def test_calls_are_cancelled_while_they_are_written(engine: str) -> None:
    async with world(engine, LATEST) as here:
        here.server.early = FAULTS["reads_nothing"]
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(partial(here.harm, "gzip", padding=_PADDING))
            with trio.fail_after(PATIENCE):
                await here.server.wait_for(lambda: here.server.faults["reads_nothing"] == 3)
            nursery.cancel_scope.cancel()
        here.server.release.set()
        await here.clean()


@OnBoth
@InBoth
async def test_a_session_ends_whatever_is_under_way(engine: str, revision: Revision) -> None:
    before = sockets()
    async with faulty(revision) as server:
        async with connected(server, engine, timeouts=Timeouts(close=0.2)) as session, trio.open_nursery() as nursery:
            here = World(engine, session, server)
            names = [each.name for each in FAMILIES["half dead"]]
            for name in names:
                nursery.start_soon(here.harm, name)
            with trio.fail_after(PATIENCE):
                await server.wait_for(lambda: all(server.faults[name] for name in names))
            nursery.cancel_scope.cancel()
        with trio.fail_after(PATIENCE):
            await server.wait_for(lambda: server.open == 0)
    assert sockets() == before


# Beside others, and in number


@pytest.mark.slow
@InBoth
@pytest.mark.parametrize(("engine", "count"), [("own", 2_000), ("httpx2", 500)])
async def test_faults_in_number_harm_no_call_beside_them_and_leave_nothing(
    engine: str, revision: Revision, count: int, steady_clock: trio.abc.Clock
) -> None:
    """As many as run in a few seconds; promise 13 is held with 10,000."""
    async with world(engine, revision) as here:
        await load(here, 200)
        await load(here, count, seed=16)
