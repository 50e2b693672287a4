"""What OpenTelemetry is told of servers and clients, as its SDK keeps it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import httpx2
import pytest
import trio
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from trio.testing import MockClock

import trimcp
import trimcp.testing
from tests.peers.serving import served
from trimcp.session.outgoing.calls import Rounds
from trimcp.watch import instrument_client, instrument_server
from trimcp.watch.telemetry import BUCKETS
from trimcp.wire.revisions import OLDEST

LEGACY, MODERN = "2025-11-25", "2026-07-28"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@attrs.define
class Terms:
    """What is asked."""

    certain: bool


@attrs.define
class Collected:
    """Providers of the SDK, and what they were told."""

    spans: InMemorySpanExporter = attrs.field(factory=InMemorySpanExporter)
    measured: InMemoryMetricReader = attrs.field(factory=InMemoryMetricReader)
    tracers: TracerProvider = attrs.field(init=False)
    meters: MeterProvider = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.meters = MeterProvider([self.measured], shutdown_on_exit=False)

    @property
    def providers(self) -> dict[str, Any]:
        return {"tracer_provider": self.tracers, "meter_provider": self.meters}

    def span(self, name: str, kind: SpanKind = SpanKind.SERVER) -> ReadableSpan:
        (found,) = self.all(name, kind)
        return found

    def all(self, name: str, kind: SpanKind = SpanKind.SERVER) -> list[ReadableSpan]:
        return [span for span in self.spans.get_finished_spans() if (span.name, span.kind) == (name, kind)]

    def points(self, name: str) -> list[tuple[Mapping[str, Any], float, tuple[float, ...]]]:
        """The attributes, the sum in seconds and the bounds of each series of a histogram."""
        data = self.measured.get_metrics_data()
        if data is None:
            return []
        return [
            (dict(point.attributes or {}), point.sum, tuple(point.explicit_bounds))
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
            if hasattr(point, "explicit_bounds")
        ]


@pytest.fixture
def collected() -> Collected:
    return Collected()


def make_server(collected: Collected) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("works", version="1")

    @server.tool
    async def build(seconds: float = 0) -> str:
        await trio.sleep(seconds)
        if seconds > 100:
            raise trimcp.ToolError("too long")
        return f"{trace.get_current_span().get_span_context().span_id:x}"

    @server.tool
    async def crash() -> str:
        raise OSError("a secret")

    @server.tool
    async def ask(ctx: trimcp.Context[None]) -> str:
        answer = await ctx.elicit("May I?", Terms)
        assert answer.value is not None
        return str(answer.value.certain)

    @server.resource("notes://{name}")
    async def note(name: str) -> str:
        return name

    @server.prompt
    async def greet() -> str:
        return "Say hello"

    instrument_server(server, **collected.providers)
    return server


def make_client(collected: Collected) -> trimcp.Client:
    client = trimcp.Client("host")
    instrument_client(client, **collected.providers)
    return client


def ids(span: ReadableSpan) -> tuple[int, int]:
    found = span.get_span_context()
    assert found is not None
    return found.trace_id, found.span_id


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("revision", [LEGACY, MODERN])
async def test_a_client_a_server_and_a_server_behind_it_are_one_trace(collected: Collected, revision: str) -> None:
    behind = make_server(collected)
    server: trimcp.Server[None] = trimcp.Server("front", version="1")
    instrument_server(server, **collected.providers)

    @server.tool
    async def front() -> str:
        async with make_client(collected).connect(behind, revision=revision) as session:
            return (await session.call_tool("build")).text

    with collected.tracers.get_tracer("test").start_as_current_span("all") as whole:
        async with make_client(collected).connect(trimcp.in_process(server), revision=revision) as session:
            current = (await session.call_tool("front")).text
    chain = [
        collected.span("tools/call front", SpanKind.CLIENT),
        collected.span("tools/call front"),
        collected.span("tools/call build", SpanKind.CLIENT),
        collected.span("tools/call build"),
    ]
    parent = whole.get_span_context().span_id
    for span in chain:
        assert span.parent is not None
        assert (ids(span)[0], span.parent.span_id) == (whole.get_span_context().trace_id, parent)
        parent = ids(span)[1]
    assert f"{parent:x}" == current  # it is the current one while the handler runs
    assert said(chain[2])["jsonrpc.request.id"] == said(chain[3])["jsonrpc.request.id"]
    for span in chain:
        about = said(span)
        assert about.pop("jsonrpc.request.id").isdigit()
        assert about.pop("mcp.session.id")
        assert about == {
            "mcp.method.name": "tools/call",
            "mcp.protocol.version": revision,
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": span.name.split()[1],
        }
        assert span.status.status_code is StatusCode.UNSET


async def test_how_a_request_ends_is_told_on_both_sides(collected: Collected, autojump_clock: MockClock) -> None:
    server, client = make_server(collected), make_client(collected)
    async with client.connect(server) as session:
        await session.call_tool("build", {"seconds": 101})
        for name in ("crash", "madeup"):
            with pytest.raises(trimcp.RemoteError):
                await session.call_tool(name)
        with trio.move_on_after(1):
            await session.call_tool("build", {"seconds": 9})
        await session.read_resource("notes://one")
        await session.get_prompt("greet")
        await session.list_tools()
    for kind, cancelled in ((SpanKind.SERVER, "cancelled by peer"), (SpanKind.CLIENT, "")):
        failed, stopped = collected.all("tools/call build", kind)
        assert said(failed)["error.type"] == "tool_error"
        assert said(stopped)["error.type"] == "cancelled"
        assert (stopped.status.description or "").startswith(cancelled)
        assert {failed.status.status_code, stopped.status.status_code} == {StatusCode.ERROR}
        crashed = said(collected.span("tools/call crash", kind))
        assert crashed["error.type"] == crashed["rpc.response.status_code"] == "-32603"
        assert collected.span("tools/call crash", kind).status.description == "internal error"
        assert "a secret" not in collected.span("tools/call crash", kind).to_json()
        assert said(collected.span("resources/read", kind))["mcp.resource.uri"] == "notes://one"
        assert said(collected.span("prompts/get greet", kind))["gen_ai.prompt.name"] == "greet"
        assert said(collected.span("tools/list", kind))["mcp.method.name"] == "tools/list"
    assert said(collected.span("tools/call madeup", SpanKind.CLIENT))["error.type"] == "-32602"
    assert said(collected.span("tools/call"))["error.type"] == "-32602"  # its name is not one of ours

    for side in ("server", "client"):
        points = collected.points(f"mcp.{side}.operation.duration")
        assert {bounds for _, _, bounds in points} == {BUCKETS}
        times = {(about.get("gen_ai.tool.name"), about.get("error.type")): spent for about, spent, _ in points}
        assert times["build", "tool_error"] == pytest.approx(101, abs=0.01)
        assert times["build", "cancelled"] == pytest.approx(1, abs=0.01)
        # Of what a peer makes up nothing is kept for ever.
        for name in ("jsonrpc.request.id", "mcp.resource.uri", "mcp.session.id"):
            assert all(name not in about for about, _, _ in points)
    assert "madeup" not in str(collected.points("mcp.server.operation.duration"))


def network_of(about: Mapping[str, Any]) -> tuple[str | None, ...]:
    return tuple(about.get(f"network.{name}") for name in ("transport", "protocol.name", "protocol.version"))


@pytest.mark.parametrize("revision", [LEGACY, MODERN])
@pytest.mark.parametrize(
    ("transport", "came"),
    [
        ("http", ("tcp", "http", "1.1")),
        ("http/2", ("tcp", "http", "2")),
        ("http+sse", ("tcp", "http", None)),
        ("websocket", ("tcp", "websocket", None)),
        ("grpc", ("tcp", "grpc", None)),
    ],
)
async def test_the_network_and_the_session_are_told_on_both_sides(
    collected: Collected, transport: str, came: tuple[str | None, ...], revision: str
) -> None:
    revision = OLDEST.name if transport == "http+sse" else revision
    server, client = make_server(collected), make_client(collected)
    async with served(server, transport) as place, client.connect(place.target(), revision=revision) as session:
        with server.observe() as pictures:
            await session.call_tool("build")
            keys = {one.key for one in pictures.picture().sessions}
    about = said(collected.span("tools/call build"))
    assert network_of(about) == came
    single = revision == MODERN and transport in ("http", "http/2")
    assert about.get("mcp.session.id") in ({None} if single else keys)  # as in pictures and logs; of one request none
    assert network_of(said(collected.span("tools/call build", SpanKind.CLIENT))) == (*came[:2], None)
    for side, version in (("server", came[2]), ("client", None)):
        ((measured, _, _),) = collected.points(f"mcp.{side}.operation.duration")
        assert network_of(measured) == (*came[:2], version)


async def test_a_unix_socket_and_a_pipe_are_told(collected: Collected) -> None:
    with TemporaryDirectory() as folder:  # the path of a Unix socket has at most 107 bytes
        path = f"{folder}/server.sock"
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(trimcp.serve_http, make_server(collected), uds=path))
            targets = trimcp.http("http://localhost/mcp", uds=path), trimcp.websocket("ws://localhost/ws", uds=path)
            for target in targets:
                async with make_client(collected).connect(target) as session:
                    await session.call_tool("build")
            nursery.cancel_scope.cancel()
    for kind in (SpanKind.SERVER, SpanKind.CLIENT):
        found = [network_of(said(span))[:2] for span in collected.all("tools/call build", kind)]
        assert found == [("unix", "http"), ("unix", "websocket")]
    program = "import trimcp\ntrimcp.run_stdio(trimcp.Server('piped'))"
    async with make_client(collected).connect(trimcp.stdio(sys.executable, "-c", program)) as session:
        await session.list_tools()
    assert network_of(said(collected.span("tools/list", SpanKind.CLIENT))) == ("pipe", None, None)


async def test_an_operator_s_reason_is_told(collected: Collected, autojump_clock: MockClock) -> None:
    server = make_server(collected)
    async with trimcp.testing.connected(server) as session, trio.open_nursery() as nursery:

        async def call() -> None:
            with pytest.raises(trimcp.RemoteError):
                await session.call_tool("build", {"seconds": 50})

        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        with server.observe() as pictures:
            pictures.cancel(pictures.picture().sessions[0].requests[0].key, "too slow")
    assert collected.span("tools/call build").status.description == "cancelled by the operator: too slow"


@pytest.mark.parametrize("revision", [LEGACY, MODERN])
async def test_a_call_with_questions_is_one_span_of_its_client(collected: Collected, revision: str) -> None:
    client = make_client(collected)

    @client.elicitation
    async def answer(params: object) -> trimcp.ElicitResult:
        return trimcp.ElicitResult(action="accept", content={"certain": True})

    async with client.connect(make_server(collected), revision=revision) as session:
        assert (await session.call_tool("ask")).text == "True"
        async with session.calling("ask") as call:
            assert (await call.result()).text == "True"
    calls = collected.all("tools/call ask", SpanKind.CLIENT)
    assert len(calls) == 2
    served = collected.all("tools/call ask")
    assert {span.parent.span_id for span in served if span.parent} == {ids(span)[1] for span in calls}
    assert all("error.type" not in said(span) for span in (*calls, *served))


async def test_an_answer_that_nobody_takes_is_no_cancellation(collected: Collected) -> None:
    async with make_client(collected).connect(make_server(collected)) as session:
        for name in ("build", "madeup"):
            async with session.calling(name) as call:
                async for _ in call.progress:
                    pass  # it ends with the answer
    assert "error.type" not in said(collected.span("tools/call build", SpanKind.CLIENT))
    assert said(collected.span("tools/call madeup", SpanKind.CLIENT))["error.type"] == "-32602"


async def test_threads_and_tasks_of_a_call_are_within_its_span(collected: Collected) -> None:
    server = make_server(collected)

    def here() -> str:
        return f"{trace.get_current_span().get_span_context().span_id:x}"

    @server.tool
    def in_thread() -> str:
        return here()

    @server.tool
    async def in_task(ctx: trimcp.Context[None]) -> str:
        found: list[str] = []

        async def look() -> None:
            found.append(here())

        ctx.request.start_soon(look)
        while not found:  # a turn is enough
            await trio.lowlevel.checkpoint()
        return found[0]

    async with make_client(collected).connect(server) as session:
        found = {name: (await session.call_tool(name)).text for name in ("in_thread", "in_task")}
    assert found == {name: f"{ids(collected.span(f'tools/call {name}'))[1]:x}" for name in found}


async def test_a_caller_s_own_context_is_left_as_it_is(collected: Collected) -> None:
    async with make_client(collected).connect(make_server(collected)) as session:
        await session.call_tool("build", meta={"traceparent": PARENT})
    assert f"{ids(collected.span('tools/call build'))[0]:032x}" == PARENT.split("-")[1]


@pytest.mark.parametrize("inside", [False, True])
async def test_headers_give_the_parent_or_else_a_link(collected: Collected, inside: bool) -> None:
    server = make_server(collected)
    meta = {"traceparent": OTHER} if inside else {}
    app = trimcp.asgi_app(server)
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost")
    async with app.lifespan(), http:
        opened = await http.post(
            "/mcp",
            json={
                "jsonrpc": "2.0",
                "id": 1,
                "method": "initialize",
                "params": {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
            },
            headers={"Accept": "application/json, text/event-stream"},
        )
        await http.post(
            "/mcp",
            json={
                "jsonrpc": "2.0",
                "id": 2,
                "method": "tools/call",
                "params": {"name": "build", "arguments": {}, "_meta": meta},
            },
            headers={
                "Accept": "application/json, text/event-stream",
                "Mcp-Session-Id": opened.headers["mcp-session-id"],
                "traceparent": PARENT,
            },
        )
    span = collected.span("tools/call build")
    expected, link = (OTHER, PARENT) if inside else (PARENT, None)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == expected.split("-")[2]
    assert [f"{each.context.span_id:016x}" for each in span.links] == ([link.split("-")[2]] if link else [])


async def test_sessions_are_measured_but_those_of_one_request(collected: Collected, autojump_clock: MockClock) -> None:
    server = make_server(collected)
    async with make_client(collected).connect(server) as session:
        await session.call_tool("build", {"seconds": 40})
    # Since 2026-07-28 a server knows the revision of requests only.
    for side, known in (("server", {}), ("client", {"mcp.protocol.version": MODERN})):
        ((about, seconds, bounds),) = collected.points(f"mcp.{side}.session.duration")
        assert about == known
        assert (seconds, bounds) == (pytest.approx(40, abs=0.01), BUCKETS)


async def test_nothing_is_done_while_nobody_is_configured() -> None:
    server: trimcp.Server[None] = trimcp.Server("works", version="1")
    client = trimcp.Client("host")
    instrument_server(server)
    instrument_client(client)

    @server.tool
    async def trace_of_call(ctx: trimcp.Context[None]) -> str:
        return str(dict(ctx.trace))

    async with client.connect(server) as session:
        assert not server.on_finished
        assert (await session.call_tool("trace_of_call")).text == "{}"
        assert type(client.make_rounds(session.session, session, "tools/list", None, 0, None)) is Rounds


async def test_nothing_of_it_is_loaded_by_a_server_that_does_not_use_it() -> None:
    program = (
        "import sys, trio, trimcp, trimcp.testing\n"
        "server = trimcp.Server('x', version='1')\n"
        "async def main():\n"
        "    async with trimcp.testing.connected(server) as session:\n"
        "        await session.ping()\n"
        "    print([name for name in sys.modules if 'trimcp.watch' in name])\n"
        "    with server.observe() as pictures:\n"
        "        pictures.picture()\n"
        "trio.run(main)\n"
        "print([name for name in sys.modules if 'opentelemetry' in name])\n"
    )
    done = await trio.run_process([sys.executable, "-c", program], capture_stdout=True)
    assert done.stdout.split() == [b"[]", b"[]"]  # before somebody looks, and after
