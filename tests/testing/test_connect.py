"""`connected` itself: what it yields, and that it adds nothing of its own to what happens inside."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

import trimcp
from trimcp.client.client import Client
from trimcp.errors import ConnectionLost, LocalError
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.testing import SlowChannel, connected, every_revision
from trimcp.wire.input_requests import ElicitResult
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, V2025_06_18, Revision


class OurOwnError(Exception):
    pass


def make_server(ran: list[str] | None = None) -> Server[Any]:
    server = Server("s")

    @server.tool
    async def slow(ctx: Context) -> str:
        await trio.sleep(3600)
        return "late"

    @server.tool
    def blocking() -> str:
        return "from a thread"

    @server.tool
    async def ask(ctx: Context) -> str:
        assert ran is not None
        ran.append("ran")
        answer = await ctx.elicit("Name?", {"type": "object", "properties": {"name": {"type": "string"}}})
        return answer.content["name"]

    return server


def asked_client() -> Client:
    client = Client("c")

    @client.elicitation
    async def user(params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"name": "Ada"})

    return client


@every_revision
@pytest.mark.parametrize("framed", [False, True], ids=["memory", "framed"])
async def test_both_sides_are_there_and_at_rest_in_the_end(revision: Revision, framed: bool) -> None:
    async with connected(make_server(), revision=revision, framed=framed) as session:
        assert session.revision is revision
        assert session.peer.engine.revision in (revision, None)
        result = await session.call_tool("blocking")
        assert result.content[0].text == "from a thread"
        await trio.testing.wait_all_tasks_blocked()
        for side in (session.statistics(), session.peer.statistics()):
            assert (side.running, side.pending, side.waiting, side.outbox) == (0, 0, 0, 0)
    assert session.peer.closed.is_set()


async def test_only_a_session_of_connected_knows_its_peer() -> None:
    async with Client("c").connect(trimcp.in_process(make_server())) as session:
        with pytest.raises(LocalError, match=r"trimcp\.testing\.connected"):
            _ = session.peer


def test_every_revision_means_every_one() -> None:
    @every_revision
    def test(revision: Revision) -> None: ...

    [mark] = test.pytestmark
    assert mark.args[1] == REVISIONS


async def test_the_latest_revision_is_the_default() -> None:
    async with connected(make_server()) as session:
        assert session.revision is LATEST


@every_revision
async def test_hours_pass_in_no_time(revision: Revision, autojump_clock: trio.testing.MockClock) -> None:
    async with connected(make_server(), revision=revision) as session:
        result = await session.call_tool("slow")
        assert result.content[0].text == "late"
        result = await session.call_tool("blocking")
        assert result.content[0].text == "from a thread"
        assert 3600 <= trio.current_time() < 3601, "thread tools take no virtual time"


@every_revision
async def test_what_the_body_raises_leaves_as_itself(revision: Revision) -> None:
    with pytest.raises(OurOwnError) as caught:
        async with connected(make_server(), revision=revision):
            raise OurOwnError("body")
    assert type(caught.value) is OurOwnError


async def test_what_the_server_is_doing_ends_with_the_block(autojump_clock: Any) -> None:
    with trio.fail_after(5):
        async with connected(make_server()) as session, trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises((ConnectionLost, trio.Cancelled)):
                    await session.call_tool("slow")

            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            assert session.peer.statistics().running == 1
            nursery.cancel_scope.cancel()
    assert session.peer.statistics().running == 0


@pytest.mark.parametrize("revision", [r for r in REVISIONS if r >= V2025_06_18], ids=str)
@pytest.mark.parametrize("force_rerun", [False, True], ids=["", "rerun"])
async def test_handlers_can_be_made_to_run_again_in_every_revision(revision: Revision, force_rerun: bool) -> None:
    ran: list[str] = []
    server = make_server(ran)
    async with connected(server, asked_client(), revision=revision, force_rerun=force_rerun) as session:
        result = await session.call_tool("ask")
        assert result.content[0].text == "Ada"
    assert len(ran) == (2 if force_rerun or revision.modern else 1)


async def test_the_clients_channel_can_be_wrapped(autojump_clock: trio.testing.MockClock) -> None:
    slow: list[SlowChannel] = []

    def wrap(channel: Any) -> SlowChannel:
        slow.append(SlowChannel(channel, send_delay=2))
        return slow[0]

    async with connected(make_server(), revision=LATEST_LEGACY, wrap=wrap) as session:
        before = trio.current_time()
        await session.ping()
        assert trio.current_time() - before == pytest.approx(2, abs=0.01)
