"""Agent tools on both hosts, over sockets: requests that are closed, slow readers, the access log, the end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import attrs
import h2.events
import h2.exceptions
import orjson
import pytest
import trio

import trimcp
from tests.agent_tools.faces import head_of, serving_world
from tests.agent_tools.world import World, call_of, conforms, make_world
from tests.fuzz.effort import PATIENCE
from tests.peers.http1 import HttpWire, http_request
from tests.peers.http2 import H2Client
from tests.peers.serving import ServedHere
from tests.peers.states import until
from trimcp.support.cleaning import digest

HOSTS = pytest.mark.parametrize("host", ["http", "http on hypercorn", "http/2"])
EVENTS = {"accept": "text/event-stream, application/json"}


@attrs.define(eq=False)
class Spoken:
    """Requests to one host, each on a connection, or for HTTP/2 a stream, of its own."""

    place: ServedHere
    world: World
    client: H2Client | None = None

    @asynccontextmanager
    async def begun(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> AsyncIterator[HttpWire | int]:
        """Send a request, and close it after the block."""
        ours = {**head_of("demo-token"), **(headers or {})}
        text = b"" if body is None else orjson.dumps(body)
        if body is not None:
            ours["content-type"] = "application/json"
        if self.client is not None:
            pairs = [(name.encode(), value.encode()) for name, value in ours.items()]
            number = await self.client.request(path.encode(), method.encode(), text, pairs)
            yield number
            with suppress(h2.exceptions.ProtocolError, trio.BrokenResourceError):  # it was answered, or all has ended
                self.client.connection.reset_stream(number)
                await self.client.flush()
            return
        lines = [f"{name}: {value}" for name, value in ours.items()]
        async with self.place.wire() as wire:
            await wire.send(http_request(method, path, *lines, body=None if body is None else text))
            yield wire


@asynccontextmanager
async def speaking(host: str, world: World, **options: object) -> AsyncIterator[Spoken]:
    async with serving_world(host, world, **options) as face, face.place.wire() as wire:
        yield Spoken(face.place, world, H2Client(wire.stream) if face.many else None)


async def at_rest(world: World) -> None:
    """Wait until the server counts nothing that is under way."""
    with trio.fail_after(PATIENCE):
        await until(lambda: not any(world.server.statistics().hosts[name] for name in ("exchanges", "agent_calls")))


@HOSTS
@pytest.mark.parametrize("headers", [{}, EVENTS])
@pytest.mark.parametrize("context", [None, "c"])
async def test_closing_a_request_cancels_its_handler(host: str, headers: dict[str, str], context: str | None) -> None:
    world = make_world()
    async with speaking(host, world) as spoken:
        async with spoken.begun("POST", "/tools/call", call_of("count_and_wait", context=context), headers):
            with trio.fail_after(PATIENCE):
                await world.began.wait()
        with trio.fail_after(PATIENCE):
            await world.wait_for(1)
        assert world.reasons == ["disconnected"]
        await at_rest(world)
    assert (world.audit[-1]["outcome"], world.audit[-1]["reason"]) == ("cancelled", "disconnected")


@HOSTS
async def test_closing_a_watch_ends_it(host: str) -> None:
    world = make_world()
    async with speaking(host, world) as spoken:
        async with spoken.begun("PATCH", "/contexts/c", {"a": 1}) as made:
            if isinstance(made, HttpWire):
                assert (await made.answer()).headers["etag"] == '"1"'
            else:
                assert spoken.client is not None
                await spoken.client.response(made)
        async with spoken.begun("GET", "/contexts/c/events") as watch:
            if isinstance(watch, HttpWire):
                assert (await watch.head()).headers["content-type"] == "text/event-stream"
                assert conforms(await watch.message())["type"] == "context_state"
            else:
                assert spoken.client is not None
                await spoken.client.event(h2.events.DataReceived, watch)
            assert world.server.statistics().hosts["exchanges"] == 1
        await at_rest(world)


@HOSTS
async def test_who_does_not_read_makes_the_tool_wait_and_is_dropped(host: str) -> None:
    world = make_world()
    sent = 0

    @world.server.tool
    async def flood(ctx: trimcp.Context) -> int:
        nonlocal sent
        for number in range(1_000_000):
            await ctx.report_progress(number, message="x" * 2_000)
            await trio.lowlevel.checkpoint()
            sent = number
        raise AssertionError

    limits = trimcp.HttpLimits(stall_timeout=0.5)
    async with serving_world(host, world, limits=limits) as face, face.place.wire(receive_buffer=4_096) as wire:
        headers = {**head_of("demo-token"), **EVENTS, "content-type": "application/json"}
        body = orjson.dumps(call_of("flood"))
        if face.many:
            client = H2Client(wire.stream, window=1_000)
            pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
            await client.request(b"/tools/call", b"POST", body, pairs)
        else:
            lines = [f"{name}: {value}" for name, value in headers.items()]
            await wire.send(http_request("POST", "/tools/call", *lines, body=body))
        with trio.fail_after(PATIENCE):
            await until(lambda: sent)
        await at_rest(world)
    assert world.audit[-1]["outcome"] == "cancelled"
    assert sent < 100_000


@HOSTS
async def test_the_access_log_has_each_request(host: str, caplog: pytest.LogCaptureFixture) -> None:
    world = make_world()
    caplog.set_level("INFO", "trimcp.access")
    settings = trimcp.HttpSettings(access_log=trimcp.AccessLog())
    async with speaking(host, world, settings=settings) as spoken:
        for method, path, body in (
            ("POST", "/tools/call", call_of("echo", text="x")),
            ("GET", "/contexts/nobodys?reason=a", None),
        ):
            async with spoken.begun(method, path, body) as request:
                if isinstance(request, HttpWire):
                    await request.answer()
                else:
                    assert spoken.client is not None
                    await spoken.client.response(request)
        with trio.fail_after(PATIENCE):
            await until(lambda: sum(record.name == "trimcp.access" for record in caplog.records) == 2)
    found = [vars(record) for record in caplog.records if record.name == "trimcp.access"]
    assert [(each["http_method"], each["path"], each["status"], each["principal"]) for each in found] == [
        ("POST", "/tools/call", 200, "demo"),
        ("GET", f"/contexts/{digest('nobodys')}", 404, "demo"),
    ]


@HOSTS
async def test_the_end_of_the_server_ends_calls_and_watches(host: str) -> None:
    world = make_world()
    async with speaking(host, world, grace=0.05) as spoken, trio.open_nursery() as nursery:

        async def call(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            async with spoken.begun("POST", "/tools/call", call_of("wait")) as request:
                await world.began.wait()
                task_status.started()
                if isinstance(request, HttpWire):
                    answer = await request.answer()
                    assert (answer.status, orjson.loads(answer.body)["error"]["code"]) == (503, "draining")
                else:
                    assert spoken.client is not None
                    status, body = await spoken.client.response(request)
                    assert (status, orjson.loads(body)["error"]["code"]) == (503, "draining")

        await nursery.start(call)
        spoken.place.stop.set()
    assert world.reasons == ["drain"]


@pytest.mark.parametrize("host", ["websocket", "websocket on hypercorn"])
async def test_a_trace_shows_the_messages_of_a_websocket(host: str) -> None:
    lines: list[str] = []
    settings = trimcp.HttpSettings(trace=lines.append)
    async with serving_world(host, make_world(), settings=settings) as face, face.link("demo-token") as agent:
        assert (await agent.ask(call_of("echo", text="x"))).message["result"] == "x"
        for odd in (b"{", b"[1]", b"1", b'""'):
            assert (await agent.ask(odd)).error["code"] == "malformed"
    assert [line.split()[1] for line in lines] == ["<--", "-->"] * 5
    assert '"tool_request"' in lines[0]
    assert '"tool_response"' in lines[1]


@pytest.mark.parametrize(("host", "reason"), [("websocket", "drain"), ("websocket on hypercorn", "deadline exceeded")])
async def test_a_websocket_ends_with_its_token(host: str, reason: str) -> None:
    world = make_world(authenticate=lambda head: trimcp.Principal("brief", expires_at=time.time() + 0.3))
    async with serving_world(host, world) as face, face.link("any") as agent:
        await agent.send(call_of("wait"))
        with trio.fail_after(PATIENCE):
            assert (await agent.receive()).error["code"] == "draining"
            await world.wait_for(1)
    assert world.reasons == [reason]
