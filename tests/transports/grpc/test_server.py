"""A gRPC server as gRPC's own client sees it: MCP through `Exchange`, who may call, health, and the end."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import h2.events
import httpx2
import pytest
import trio

import trimcp
from tests.fuzz.effort import PATIENCE
from tests.peers.http2 import H2Client
from tests.peers.serving import ServedHere, connect, served
from tests.peers.states import until
from tests.transports.grpc_support import foreign
from trimcp.framing.grpc import json_of, json_rpc_header
from trimcp.transports.http.h2 import connection
from trimcp.transports.websocket.frames import KeepAlive
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION
from trimcp.wire.revisions import LATEST

EXCHANGE = "/trimcp.v1.Mcp/Exchange"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING, UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
ENVELOPE = {
    META_PROTOCOL_VERSION: LATEST.name,
    META_CLIENT_INFO: {"name": "foreign", "version": "1"},
    META_CLIENT_CAPABILITIES: {},
}


def make_server(ended: list[str] | None = None) -> trimcp.Server[Any]:
    server = trimcp.Server("s", version="1")

    @server.tool
    async def echo(text: str) -> str:
        return text

    @server.tool
    async def wait() -> str:
        try:
            await trio.sleep_forever()
        finally:
            (ended if ended is not None else []).append("ended")
        return "never"

    @server.tool
    async def who(ctx: trimcp.Context[Any]) -> str:
        return str(ctx.principal)

    return server


def payload(message: Any) -> bytes:
    """A JsonRpc, as protobuf writes it."""
    text = json.dumps(message).encode()
    return json_rpc_header(len(text))[5:] + text


def call(id: int, tool: str, **arguments: Any) -> bytes:
    params = {"name": tool, "arguments": arguments, "_meta": ENVELOPE}
    return payload({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})


def heard(answers: Iterator[bytes]) -> list[Any]:
    return [json.loads(json_of(answer) or b"null") for answer in answers]


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[ServedHere]:
    async with served(make_server(), "grpc", settings=trimcp.HttpSettings(**settings)) as place:
        yield place


@pytest.mark.parametrize("traced", [False, True])
async def test_a_foreign_client_that_says_everything_at_once_gets_every_answer(traced: bool) -> None:
    """It half-closes the call at once, which ends nothing."""
    lines: list[str] = []

    def use(channel: grpc.Channel) -> list[Any]:
        requests = [call(number, "echo", text=str(number)) for number in range(50)]
        return heard(channel.stream_stream(EXCHANGE)(iter(requests), timeout=PATIENCE))

    async with serving(trace=lines.append if traced else None) as place:
        answers = await foreign(place.url, use)
    assert len(lines) == (100 if traced else 0)
    assert sorted(answer["id"] for answer in answers) == list(range(50))
    assert all(answer["result"]["content"][0]["text"] == str(answer["id"]) for answer in answers)


async def test_a_conversation_goes_both_ways() -> None:
    def use(channel: grpc.Channel) -> list[str]:
        outgoing: queue.Queue[bytes | None] = queue.Queue()
        answers = channel.stream_stream(EXCHANGE)(iter(outgoing.get, None), timeout=PATIENCE)
        found = []
        for text in ("one", "two"):
            outgoing.put(call(1, "echo", text=text))
            found.append(heard(iter([next(answers)]))[0]["result"]["content"][0]["text"])
        outgoing.put(None)
        assert list(answers) == []
        return found

    async with serving() as place:
        assert await foreign(place.url, use) == ["one", "two"]


@pytest.mark.parametrize("way", ["cancel", "deadline", "close"])
async def test_work_ends_with_its_call(way: str) -> None:
    ended: list[str] = []

    def use(channel: grpc.Channel) -> None:
        outgoing: queue.Queue[bytes | None] = queue.Queue()
        answers = channel.stream_stream(EXCHANGE)(
            iter(outgoing.get, None), timeout=0.5 if way == "deadline" else PATIENCE
        )
        outgoing.put(call(1, "wait"))
        outgoing.put(call(2, "echo", text="x"))
        next(answers)
        if way == "cancel":
            answers.cancel()
        elif way == "close":
            channel.close()
        with pytest.raises(grpc.RpcError):
            list(answers)  # at its deadline the server may still answer before the client sees its own
        outgoing.put(None)

    async with served(make_server(ended), "grpc") as place:
        await foreign(place.url, use)
        with trio.fail_after(PATIENCE):
            await until(lambda: ended)
        assert place.server.statistics().running == 0


async def test_after_everything_was_said_leaving_still_ends_the_work() -> None:
    ended: list[str] = []

    def use(channel: grpc.Channel) -> None:
        answers = channel.stream_stream(EXCHANGE)(iter([call(1, "wait"), call(2, "echo", text="x")]), timeout=PATIENCE)
        next(answers)
        answers.cancel()

    async with served(make_server(ended), "grpc") as place:
        await foreign(place.url, use)
        with trio.fail_after(1):  # less than `eof_grace`
            await until(lambda: ended)


def refused(channel: grpc.Channel, metadata: list[tuple[str, str]]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(EXCHANGE)(iter([call(1, "who")]), metadata=metadata, timeout=PATIENCE))
    return caught.value


async def test_callers_are_identified_as_over_http() -> None:
    def use(channel: grpc.Channel) -> None:
        for metadata in ([], [("authorization", "Bearer wrong")]):
            error: Any = refused(channel, metadata)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "bearer token" in error.details()
            assert dict(error.trailing_metadata())["www-authenticate"].startswith("Bearer")
        metadata = [("authorization", "Bearer a-token")]
        answers = channel.stream_stream(EXCHANGE)(iter([call(1, "who")]), metadata=metadata, timeout=PATIENCE)
        assert heard(answers)[0]["result"]["content"][0]["text"] == "ada"
        error = refused(channel, [("authorization", "Bearer a-token"), ("origin", "http://evil.example")])
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED

    async with serving(authenticate=trimcp.bearer_tokens({"a-token": "ada"})) as place:
        await foreign(place.url, use)


async def test_a_session_more_than_allowed_is_refused() -> None:
    def use(channel: grpc.Channel) -> None:
        outgoing: queue.Queue[bytes | None] = queue.Queue()
        outgoing.put(call(1, "echo", text="x"))
        first = channel.stream_stream(EXCHANGE)(iter(outgoing.get, None), timeout=PATIENCE)
        next(first)
        error: Any = refused(channel, [])
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        outgoing.put(None)
        assert list(first) == []
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:  # its place is free a moment after its end
            with suppress(grpc.RpcError):
                assert heard(channel.stream_stream(EXCHANGE)(iter([call(1, "who")]), timeout=PATIENCE))
                return
        raise AssertionError("nobody is let in again")

    async with serving(max_sessions=1) as place:
        await foreign(place.url, use)


async def test_what_there_is_not_is_unimplemented() -> None:
    def use(channel: grpc.Channel) -> None:
        for path in ("/trimcp.v1.Mcp/Nothing", "/no.Such/Service", "/grpc.health.v1.Health/Nothing"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(path)(b"", timeout=PATIENCE)
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED, path

    async with serving() as place:
        await foreign(place.url, use)


async def test_health() -> None:
    def use(channel: grpc.Channel) -> None:
        check = channel.unary_unary(CHECK)
        assert check(b"", timeout=PATIENCE) == SERVING
        assert check(b"\x0a\x0dtrimcp.v1.Mcp", timeout=PATIENCE) == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            check(b"\x0a\x04none", timeout=PATIENCE)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert next(channel.unary_stream(WATCH)(b"\x0a\x04none", timeout=PATIENCE)) == UNKNOWN
        with pytest.raises(grpc.RpcError) as caught:
            check(b"\x0a" * 2_000, timeout=PATIENCE)

    # As over HTTP, a probe needs no token.
    async with serving(authenticate=trimcp.bearer_tokens({"a-token": "ada"})) as place:
        await foreign(place.url, use)


async def test_who_watches_health_is_told_of_the_end() -> None:
    async with serving() as place:
        seen: list[bytes] = []
        begun = trio.Event()
        loop = trio.lowlevel.current_trio_token()

        def use(channel: grpc.Channel) -> None:
            for state in channel.unary_stream(WATCH)(b"", timeout=PATIENCE):
                seen.append(state)
                loop.run_sync_soon(begun.set)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(foreign, place.url, use)
            await begun.wait()
            place.stop.set()
    assert seen == [SERVING, NOT_SERVING]


async def test_the_same_port_serves_mcp_over_http_too() -> None:
    async with serving() as place:
        url = place.url.replace("grpc", "http", 1) + "/mcp"
        async with trimcp.Client("c").connect(trimcp.http(url)) as session:
            assert (await session.call_tool("echo", {"text": "hi"})).text == "hi"
        # gRPC needs HTTP/2, and a client that comes without is told.
        async with httpx2.AsyncClient() as web:
            headers = {"content-type": "application/grpc"}
            response = await web.post(url.replace("/mcp", EXCHANGE), content=b"", headers=headers)
        assert response.status_code == 426


async def test_who_holds_far_more_sessions_makes_room_for_others() -> None:
    """All of them are one address, so principals tell the owners apart."""

    def use(channel: grpc.Channel) -> None:
        metadata = [[("authorization", f"Bearer {name}")] for name in ("many-tokens", "few-tokens")]
        outgoing: queue.Queue[bytes | None] = queue.Queue()
        held = []
        for _ in range(17):
            answers = channel.stream_stream(EXCHANGE)(iter(outgoing.get, None), metadata=metadata[0], timeout=PATIENCE)
            answers.initial_metadata()
            held.append(answers)
        newcomer: queue.Queue[bytes | None] = queue.Queue()
        newcomer.put(call(1, "who"))
        answers = channel.stream_stream(EXCHANGE)(iter(newcomer.get, None), metadata=metadata[1], timeout=PATIENCE)
        assert heard(iter([next(answers)]))[0]["result"]["content"][0]["text"] == "few"
        error: Any = refused(channel, metadata[0])  # for one more of its own no room is made
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        newcomer.put(None)
        for answers in held:
            answers.cancel()
            outgoing.put(None)

    tokens = trimcp.bearer_tokens({"many-tokens": "many", "few-tokens": "few"})
    async with serving(max_sessions=17, authenticate=tokens) as place:
        await foreign(place.url, use)


@pytest.mark.parametrize("alive", [True, False])
async def test_a_client_that_answers_no_ping_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch, alive: bool) -> None:
    monkeypatch.setattr(connection, "KEEP_ALIVE", KeepAlive(interval=0.1, dead_after=0.4))
    async with served(make_server(), "grpc") as place:
        stream = await connect(place.port)
        client = H2Client(stream)
        extra = [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
        await client.request(EXCHANGE.encode(), body=None, extra=extra)
        with trio.fail_after(PATIENCE):
            await until(lambda: place.server.statistics().sessions)
        if alive:
            for _ in range(8):
                assert await client.event(h2.events.PingReceived) is not None
            assert place.server.statistics().sessions == 1
        else:
            with trio.fail_after(PATIENCE):
                await until(lambda: not place.server.statistics().sessions)
        await trio.aclose_forcefully(stream)
