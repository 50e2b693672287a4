"""The HTTP+SSE transport of 2024-11-05 from the client's side, alone and as what a channel turns to."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.transports.http.scripted import (
    Exchange,
    Handler,
    answer,
    cancellation,
    event,
    notification,
    receive,
    reply_event,
    request,
    scripted,
    shake_hands,
    welcome,
)
from trimcp.channel import Incoming, MessageChannel, Outgoing
from trimcp.testing import check_channel
from trimcp.transports.http.client.policy import Timeouts
from trimcp.wire.jsonrpc import ErrorResponse, Lost, Malformed, Notification, Response, parse
from trimcp.wire.revisions import REVISIONS, V2024_11_05, V2025_06_18, Revision

pytestmark = pytest.mark.usefixtures("on_both_engines")

ENDPOINT = b"event: endpoint\ndata: /messages?session_id=the-session\n\n"
LEGACY = [revision for revision in REVISIONS if not revision.modern]


@attrs.define(eq=False)
class Old:
    """A server of the old transport at /mcp, which answers a POST there as it is told to."""

    endpoint: bytes = ENDPOINT
    revision: Revision = V2024_11_05
    at_mcp: Handler = attrs.field(default=lambda exchange: exchange.respond(405))
    accept: Handler = attrs.field(default=lambda exchange: exchange.respond(202, b"Accepted"))
    results: Callable[[Exchange], bytes | None] = attrs.field(default=lambda exchange: reply_event(exchange.id))
    stream: Exchange = attrs.field(init=False)
    cut: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.method == "GET":
            self.stream = exchange
            await exchange.events(self.endpoint)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until, self.cut, nursery)
                nursery.start_soon(self._until, exchange.gone, nursery)
        elif exchange.target == "/mcp":
            await self.at_mcp(exchange)
        else:
            await self.accept(exchange)
            if exchange.called == "initialize":
                await self.stream.write(reply_event(exchange.id, welcome(self.revision)))
            elif exchange.called not in ("reply", "notifications/initialized", "notifications/cancelled"):
                result = self.results(exchange)
                if result is not None:
                    await self.stream.write(result)

    async def _until(self, happened: trio.Event, nursery: trio.Nursery) -> None:
        await happened.wait()
        nursery.cancel_scope.cancel()


MODES = pytest.mark.parametrize("mode", ["auto", "sse"])


@MODES
@pytest.mark.parametrize("revision", LEGACY)
async def test_everything_goes_to_the_endpoint_that_the_server_names(mode: str, revision: Revision) -> None:
    async with scripted(Old(revision=revision)) as server, server.target(mode=mode).connect() as channel:
        await shake_hands(channel, revision)
        await channel.send([request(1, modern=False), answer(7)])
        assert await receive(channel) == [Response(1, {})]
        await server.wait_for("reply")
        stream = server.called("GET")[0]
        posts = [each for each in server.asked if each.method == "POST" and each.target != "/mcp"]
        assert [each.called for each in posts] == ["initialize", "notifications/initialized", "tools/call", "reply"]
        assert {each.target for each in posts} == {"/messages?session_id=the-session"}
        for each in posts[1:]:
            assert each.headers.get("mcp-protocol-version") == (revision.name if revision.version_header else None)
    await stream.gone.wait()
    assert "DELETE" not in server.calls


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b"<html>"),
        (404, b"<html>"),
        (405, b"<html>"),
        (405, b'{"jsonrpc":"2.0","error":{"code":-32600,"message":"no such method here"}}'),
    ],
)
async def test_a_server_that_knows_no_post_is_met_by_the_old_transport(status: int, body: bytes) -> None:
    old = Old(at_mcp=lambda exchange: exchange.respond(status, body))
    async with scripted(old) as server, server.target().connect() as channel:
        await channel.send([request(0, "server/discover")])
        (probe,) = await receive(channel)
        assert isinstance(probe, Lost | ErrorResponse)
        await shake_hands(channel)
        assert server.calls[:4] == ["server/discover", "initialize", "GET", "initialize"]


@pytest.mark.parametrize(
    "at_mcp",
    [
        lambda exchange: exchange.respond(401),
        lambda exchange: exchange.respond(500),
        lambda exchange: exchange.json(
            {"jsonrpc": "2.0", "id": 0, "error": {"code": -32600, "message": "no session"}}, 400
        ),
    ],
)
async def test_a_server_that_says_anything_else_is_not(at_mcp: Handler, autojump_clock: object) -> None:
    async with scripted(Old(at_mcp=at_mcp)) as server, server.target().connect() as channel:
        await channel.send([request(0, "initialize", modern=False)])
        (message,) = await receive(channel)
        assert isinstance(message, Lost | ErrorResponse)
        assert "GET" not in server.calls


async def test_nor_if_only_streamable_http_is_wanted() -> None:
    async with scripted(Old()) as server, server.target(mode="streamable").connect() as channel:
        await channel.send([request(0, "initialize", modern=False)])
        (message,) = await receive(channel)
        assert message == Lost(0, "the server answered 405 Method Not Allowed at http://server.test/mcp")
        assert "GET" not in server.calls


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        (b"event: endpoint\ndata: http://other.test/messages?session_id=the-session\n\n", "http://other.test"),
        (b"event: endpoint\ndata: //other.test/messages\n\n", "http://other.test"),
        (b"event: endpoint\ndata: https://server.test/messages\n\n", "https://server.test"),
        (b"event: endpoint\ndata: http://server.test:8080/messages\n\n", "http://server.test:8080"),
        (b"event: endpoint\ndata: javascript:alert(1)\n\n", "no URL"),
        (b"event: endpoint\ndata: \xff\n\n", "no URL"),
        (b"data: /messages\n\n" + ENDPOINT, "does not name an endpoint"),
        (b": nothing\n\n", "named no endpoint in 10 s"),
    ],
)
@MODES
async def test_an_endpoint_that_is_not_ours_to_use(
    mode: str, endpoint: bytes, why: str, autojump_clock: object
) -> None:
    async with scripted(Old(endpoint)) as server, server.target(mode=mode).connect() as channel:
        if mode == "auto":
            await channel.send([request(0, "initialize", modern=False)])
            (lost,) = await receive(channel)
            assert isinstance(lost, Lost)
            said = lost.message
        else:
            with pytest.raises(trio.BrokenResourceError):
                await channel.send([request(0, "initialize", modern=False)])
            with pytest.raises(trio.EndOfChannel):
                await channel.receive()
            said = channel.close_reason() or ""
        assert why in said
        assert "the-session" not in said
        await server.called("GET")[0].gone.wait()
        assert all(each.target == "/mcp" for each in server.asked)


@MODES
async def test_the_end_of_the_stream_is_the_end_of_the_connection(mode: str) -> None:
    old = Old()
    async with scripted(old) as server, server.target(mode=mode).connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        await old.stream.write(event({"jsonrpc": "2.0", "method": "last"}))
        old.cut.set()
        found = []
        with pytest.raises(trio.EndOfChannel):
            while True:
                found += [each.message for each in await channel.receive()]
        assert Notification("last") in found
        with pytest.raises(trio.BrokenResourceError):
            await channel.send([request(2, modern=False)])
        assert channel.close_reason() is not None


async def test_the_endpoint_is_relative_to_where_the_stream_really_is() -> None:
    old = Old(b"event: endpoint\ndata: messages\n\n")

    async def moved(exchange: Exchange) -> None:
        if exchange.method == "GET" and exchange.target == "/mcp":
            await exchange.respond(307, b"", {"location": "/deep/down/sse"})
        else:
            await old(exchange)

    async with scripted(moved) as server, server.target(mode="sse").connect() as channel:
        await shake_hands(channel)
        assert server.called("initialize")[0].target == "/deep/down/messages"


async def test_a_modern_probe_is_answered_without_asking_the_server() -> None:
    async with scripted(Old()) as server, server.target(mode="sse").connect() as channel:
        await channel.send([request(0, "server/discover")])
        (message,) = await receive(channel)
        assert isinstance(message, Malformed)
        assert message.id == 0
        await server.wait_for("GET")
        await wait_all_tasks_blocked()
        assert server.calls == ["GET"]


async def test_a_server_that_is_not_there(autojump_clock: object) -> None:
    async with scripted(Old()) as server:
        server.refuse = True
        async with server.target(mode="sse").connect() as channel:
            with pytest.raises(trio.EndOfChannel):
                await channel.receive()
            assert channel.close_reason() == server.refusal


async def test_a_refused_request_is_lost_and_nothing_else() -> None:
    async def accept(exchange: Exchange) -> None:
        if exchange.called == "refused":
            await exchange.respond(404, b"Could not find session")
        elif exchange.called == "wrong":
            await exchange.json({"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "no"}}, 400)
        else:
            await exchange.respond(202)

    old = Old(accept=accept, results=lambda exchange: reply_event(exchange.id) if exchange.called == "good" else None)
    async with scripted(old) as server, server.target(mode="sse").connect() as channel:
        await shake_hands(channel)
        await channel.send([request(n, name, modern=False) for n, name in ((1, "refused"), (2, "wrong"), (3, "good"))])
        lost, wrong, good = await receive(channel, 3)
        assert lost == Lost(1, "the server answered 404 Not Found at http://server.test/messages")
        assert wrong == ErrorResponse(2, -32700, "no")
        assert good == Response(3, {})


async def test_messages_keep_their_order(autojump_clock: object) -> None:
    async def accept(exchange: Exchange) -> None:
        await trio.sleep(0.9)
        await exchange.respond(202)

    async with scripted(Old(accept=accept)) as server, server.target(mode="sse").connect() as channel:
        await shake_hands(channel)
        await channel.send([request(n, modern=False) for n in range(1, 20)])
        assert [each.id for each in server.called("tools/call")] == list(range(1, 20))


async def test_a_server_that_accepts_a_call_when_it_is_done_holds_up_nothing_for_long(autojump_clock: object) -> None:
    async def accept(exchange: Exchange) -> None:
        if exchange.called == "tools/call":
            await exchange.gone.wait() if exchange.id == 1 else await trio.sleep(100)
        await exchange.respond(202)

    async with scripted(Old(accept=accept)) as server, server.target(mode="sse").connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False), request(2, modern=False), cancellation(1)])
        assert (await server.wait_for("notifications/cancelled")).at == 2
        assert await receive(channel) == [Response(2, {})]
        assert trio.current_time() == 101


async def test_not_too_many_wait_to_be_accepted(autojump_clock: object) -> None:
    async def accept(exchange: Exchange) -> None:
        if exchange.called == "tools/call":
            await exchange.gone.wait()
        await exchange.respond(202)

    old = Old(accept=accept)
    async with scripted(old) as server, server.target(mode="sse").connect() as channel:
        await shake_hands(channel)
        with trio.move_on_after(10_000) as scope:
            await channel.send([request(n, modern=False) for n in range(1, 200)])
        assert scope.cancelled_caught
        assert len(server.called("tools/call")) == 64
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_broken, channel)
            await wait_all_tasks_blocked()
            old.cut.set()  # the end of the stream ends the wait


async def _broken(channel: MessageChannel) -> None:
    with pytest.raises(trio.BrokenResourceError):
        await channel.send([request(999, modern=False)])


@MODES
async def test_the_session_in_the_address_is_never_logged(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with scripted(Old()) as server, server.target(mode=mode).connect() as channel:
        await shake_hands(channel)
        await channel.send([request(1, modern=False)])
        await receive(channel)
        assert "the-session" not in repr(channel)
    assert "messages go to http://server.test" in caplog.text
    assert "the-session" not in caplog.text


async def test_the_endpoint_is_waited_for_as_long_as_is_said(autojump_clock: object) -> None:
    old = Old()

    async def slow(exchange: Exchange) -> None:
        if exchange.method == "GET":
            await trio.sleep(25)
        await old(exchange)

    patience = Timeouts(endpoint=30)
    async with scripted(slow) as server, server.target(mode="sse", timeouts=patience).connect() as channel:
        await shake_hands(channel)
        assert trio.current_time() == 25


# The contract of channels


@attrs.define(eq=False)
class ServerEnd(MessageChannel):
    """The other end: what is POSTed arrives, what is sent becomes events."""

    arrived: trio.MemoryReceiveChannel[Incoming]
    keep: trio.MemorySendChannel[Incoming]
    streaming: trio.Event = attrs.field(factory=trio.Event)
    closed: trio.Event = attrs.field(factory=trio.Event)
    client_left: bool = False
    receiving: bool = False
    stream: Any = None

    async def handle(self, exchange: Exchange) -> None:
        if exchange.method == "GET":
            await exchange.events(ENDPOINT)
            self.stream = exchange
            self.streaming.set()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until, self.closed, nursery)
                nursery.start_soon(self._until, exchange.gone, nursery)
            self.client_left = exchange.gone.is_set()
            self.keep.close()
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._until, exchange.gone, nursery)
                nursery.start_soon(self._until, self.closed, nursery)
                await self.keep.send(Incoming(parse(exchange.body), len(exchange.body)))
                nursery.cancel_scope.cancel()
            await exchange.respond(202)

    async def _until(self, happened: trio.Event, nursery: trio.Nursery) -> None:
        await happened.wait()
        nursery.cancel_scope.cancel()

    async def send(self, batch: Sequence[Outgoing]) -> None:
        await trio.lowlevel.checkpoint()
        if self.closed.is_set():
            raise trio.ClosedResourceError
        await self.streaming.wait()
        for each in batch:
            if self.client_left or self.stream.gone.is_set():
                raise trio.BrokenResourceError
            await self.stream.write(event(each.data))

    async def receive(self) -> Sequence[Incoming]:
        if self.closed.is_set():
            await trio.lowlevel.checkpoint()
            raise trio.ClosedResourceError
        if self.receiving:
            raise trio.BusyResourceError
        self.receiving = True
        try:
            return [await self.arrived.receive()]
        finally:
            self.receiving = False

    async def aclose(self) -> None:
        self.closed.set()
        self.arrived.close()
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
    keep, arrived = trio.open_memory_channel[Incoming](10)
    end = ServerEnd(arrived, keep)
    async with scripted(end.handle) as server, server.target(mode="sse").connect() as channel:
        await end.streaming.wait()
        yield channel, end


async def test_it_keeps_the_contract_of_channels(autojump_clock: object) -> None:
    await check_channel(pair)


async def test_a_legacy_revision_with_headers_of_its_own_is_told(autojump_clock: object) -> None:
    old = Old(revision=V2025_06_18, results=lambda exchange: None)
    async with scripted(old) as server, server.target(mode="sse").connect() as channel:
        await shake_hands(channel, V2025_06_18)
        await channel.send([notification("notifications/roots/list_changed")])
        changed = await server.wait_for("notifications/roots/list_changed")
        assert changed.headers["mcp-protocol-version"] == V2025_06_18.name
