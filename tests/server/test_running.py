"""One run of a server with many connections."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from trimcp.client.client import Client
from trimcp.errors import RemoteError
from trimcp.server.server import Server
from trimcp.session.limits import Limits
from trimcp.testing import connected
from trimcp.transports.memory import memory_channels
from trimcp.wire.codes import INVALID_PARAMS, METHOD_NOT_FOUND
from trimcp.wire.lifecycle import LoggingMessageParams, SubscriptionFilter
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, Revision


@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_whoever_left_is_told_no_more(revision: Revision) -> None:
    server: Server[None] = Server("s")
    async with connected(server, revision=revision) as session:
        async with session.listen(tools=True):
            assert len(server.changes._listeners) == 1
        await trio.testing.wait_all_tasks_blocked()
        assert len(server.changes._listeners) == (0 if revision.modern else 1)
    assert not server.changes._listeners


@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_one_client_watches_only_so_many_resources(revision: Revision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimcp.server.subscribing._MOST_SUBSCRIPTIONS", 2)
    server: Server[None] = Server("s")

    @server.resource("x://{n}")
    async def numbered(n: int) -> str:
        return str(n)

    async with connected(server, revision=revision) as session:
        async with session.listen(resources=["x://1", "x://2"]):
            pass
        await trio.testing.wait_all_tasks_blocked()  # until they are unsubscribed, where nobody waits for it
        with pytest.raises(RemoteError, match="more than 2") as refused:
            async with session.listen(resources=["x://1", "x://2", "x://3"]):
                pass
        assert refused.value.code == INVALID_PARAMS


async def test_only_what_was_asked_for_is_acknowledged() -> None:
    server: Server[None] = Server("s")
    async with connected(server) as session:
        server.add_resource("x:1", "one")
        server.add_tool(test_many_connections_share_one_run)
    async with connected(server) as session, session.listen(tools=True) as changes:
        assert changes.acknowledged == SubscriptionFilter(tools_list_changed=True)


async def test_a_legacy_client_cannot_watch_what_does_not_exist() -> None:
    server: Server[None] = Server("s")
    server.add_resource("x:1", "one")
    async with connected(server, revision=LATEST_LEGACY) as session:
        with pytest.raises(RemoteError, match="not found") as refused:
            async with session.listen(resources=["x:2"]):
                pass
        assert refused.value.code == LATEST_LEGACY.resource_missing_code


async def test_many_connections_share_one_run() -> None:
    server: Server[None] = Server("shared")
    with_us: list[int] = []

    @server.tool
    async def look() -> int:
        with_us.append(len(next(iter(server.runs)).sessions))
        return 1

    async with server.running() as running, trio.open_nursery() as nursery:
        first_ours, first = memory_channels()
        second_ours, second = memory_channels()
        nursery.start_soon(running.serve, first_ours)
        nursery.start_soon(running.serve, second_ours)
        async with Client("a").connect(first) as one, Client("b").connect(second) as two:
            await one.call_tool("look")
            await two.call_tool("look")
        assert with_us == [2, 2]
        while running.sessions:
            await trio.testing.wait_all_tasks_blocked()


async def test_a_completer_added_while_it_runs_is_served_on_open_connections() -> None:
    server: Server[None] = Server("grows")

    @server.prompt
    async def review(path: str) -> str:
        return path

    async with connected(server) as session:
        with pytest.raises(RemoteError) as refused:
            await session.complete_prompt("review", "path", "a")
        assert refused.value.code == METHOD_NOT_FOUND

        @server.complete("review", "path")
        async def paths(value: str) -> list[str]:
            return [value + "bc"]

        assert (await session.complete_prompt("review", "path", "a")).values == ["abc"]


async def test_notifications_without_end_start_no_tasks_without_end() -> None:
    server: Server[None] = Server("s", limits=Limits(backlog_requests=3))
    release = trio.Event()
    begun = 0

    @server.notification("notifications/roots/list_changed")
    async def changed(params: object) -> None:
        nonlocal begun
        begun += 1
        await release.wait()

    async with connected(server, Client("c", roots=["file:///a"]), revision=LATEST_LEGACY) as session:
        for _ in range(10):
            session.roots_changed()
        await trio.testing.wait_all_tasks_blocked()
        assert (begun, session.peer.statistics().dropped) == (3, 7)
        release.set()
        await trio.testing.wait_all_tasks_blocked()
        session.roots_changed()
        await trio.testing.wait_all_tasks_blocked()
        assert begun == 4, "what ended makes room"


async def test_a_log_message_outside_a_request_is_dropped_and_counted_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server: Server[None] = Server("s")
    client = Client("c")
    heard: list[object] = []

    @client.logging
    async def log(params: LoggingMessageParams) -> None:
        heard.append(params.data)

    async with connected(server, client, revision=LATEST_LEGACY) as session:
        [running] = server.runs
        running.log_to_all("error", "there is room")
        monkeypatch.setattr(type(session.peer.sink), "full", True)
        running.log_to_all("error", "there is none")
        await trio.testing.wait_all_tasks_blocked()
        assert heard == ["there is room"]
        assert session.peer.statistics().dropped == 1
