"""What a server says unasked, told to the client's own handlers."""

from __future__ import annotations

from typing import Any

import pytest
import trio.testing

import trimcp
import trimcp.testing
from tests.client.peers import HandMade, Scripted, connected, discover_result, initialize_result, text
from trimcp.client.client import Client
from trimcp.wire.jsonrpc import Notification
from trimcp.wire.resources import ResourceUpdatedParams
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, V2025_11_25

NOTE = {"method": "com.example/moved", "params": {"to": 3}}


def talking(message: dict[str, Any]) -> Any:
    """A server that says something of an extension's, and of the protocol's, once it has been met."""
    said = [NOTE, {"method": "notifications/resources/updated", "params": {"uri": "x:y"}}]
    if message.get("method") == "server/discover":
        return [discover_result(message["id"]), *said]
    if message.get("method") == "initialize":
        return initialize_result(message["id"], resources={"subscribe": True})
    return said if message.get("method") == "notifications/initialized" else None


@pytest.mark.parametrize("revision", [LATEST, LATEST_LEGACY], ids=str)
async def test_a_handler_is_called_with_each_notification_of_its_name(revision: Any) -> None:
    client = Client("c")
    heard: list[Any] = []

    @client.notification("com.example/moved")
    async def moved(params: dict[str, Any], session: trimcp.ClientSession) -> None:
        heard.append((params, session.revision))

    @client.notification("notifications/resources/updated")
    def updated(params: ResourceUpdatedParams) -> None:
        heard.append(params.uri)

    async with client.connect(Scripted(talking), revision=revision) as session:
        await trio.testing.wait_all_tasks_blocked()
        assert session.session.jobs.notices == 0
    assert len(heard) == 2
    assert "x:y" in heard
    assert ({"to": 3}, revision) in heard


async def test_a_crash_of_a_handler_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    client = Client("c")
    heard: list[Any] = []

    @client.notification("com.example/moved")
    async def crash(params: Any) -> None:
        raise ZeroDivisionError

    client.notification("com.example/moved")(heard.append)
    async with client.connect(Scripted(talking), revision=LATEST) as session:
        await trio.testing.wait_all_tasks_blocked()
        assert session.session.lost is None
    assert heard == [{"to": 3}]
    assert "crashed" in caplog.text


async def test_too_many_at_once_are_dropped_and_counted() -> None:
    client = Client("c", limits=trimcp.Limits(backlog_requests=2))

    @client.notification("com.example/moved")
    async def hang(params: Any) -> None:
        await trio.sleep_forever()

    def script(message: dict[str, Any]) -> Any:
        return [discover_result(message["id"]), *[NOTE] * 5] if "id" in message else None

    async with client.connect(Scripted(script), revision=LATEST) as session:
        await trio.testing.wait_all_tasks_blocked()
        assert session.session.jobs.notices == 2
        assert session.statistics().dropped == 3


async def test_a_server_hears_notifications_of_extensions() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    heard: list[Any] = []

    @server.notification("com.example/moved")
    async def moved(params: Any) -> None:
        heard.append(params)

    async with trimcp.testing.connected(server) as session:
        assert session.peer is not None
        session.peer.deliver([trimcp.channel.Incoming(Notification("com.example/moved", {"to": 4}), 10)])
        session.peer.deliver([trimcp.channel.Incoming(Notification("com.example/other", {}), 10)])
        await trio.testing.wait_all_tasks_blocked()
    assert heard == [{"to": 4}]


@pytest.mark.parametrize("revision", REVISIONS, ids=str)
async def test_what_was_done_at_a_url_is_told(revision: Any) -> None:
    server, client = HandMade(), Client("c")
    heard: list[str] = []

    @server.tool
    async def pay(params: Any, ctx: Any) -> Any:
        await ctx.elicitation_complete("e1")
        return text("paid")

    @client.notification("notifications/elicitation/complete")
    async def complete(params: Any) -> None:
        heard.append(params.elicitation_id)

    async with connected(server, client, revision) as session:
        assert (await session.call_tool("pay")).text == "paid"
        await trio.testing.wait_all_tasks_blocked()
    assert heard == (["e1"] if revision is V2025_11_25 else [])
