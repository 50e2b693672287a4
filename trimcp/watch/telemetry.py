"""Spans and metrics of servers and clients for OpenTelemetry: docs/howto/tracing.md.

They follow its "Semantic conventions for Model Context Protocol (MCP)". This takes the extra `otel`, which is the API
of OpenTelemetry: what is recorded, and where it goes, is for the SDK that a program configures.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias

import attrs
import trio
from opentelemetry import context, metrics, propagate, trace
from opentelemetry.metrics import Histogram, Meter, MeterProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider

from trimcp.channel import Link
from trimcp.errors import RemoteError
from trimcp.session.incoming.job import Job, session_key
from trimcp.session.outgoing.calls import Rounds
from trimcp.session.scopes import cancellation_text
from trimcp.session.session import Session
from trimcp.support.cleaning import one_line
from trimcp.watch.picture import Observed, link_of, outcome_of, target_of, why_cancelled

BUCKETS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histograms, in seconds, as the conventions give them."""

_LONGEST: Final = 200  # characters of a text that somebody else chose
_PROTOCOLS: Final = {"HTTP": "http", "HTTP+SSE": "http", "WebSocket": "websocket", "gRPC": "grpc"}

Attributes: TypeAlias = dict[str, str]
_TOOL_ERROR: Final[Attributes] = {"error.type": "tool_error"}
_Handler: TypeAlias = Callable[[Any, Any], Any]


class InstrumentedClient(Protocol):
    """The part of `Client` that is instrumented."""

    make_rounds: Any
    on_session: Any


def instrument_server(
    server: Observed,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Let OpenTelemetry know of each request of a server: a span of kind SERVER, and how long it took.

    A span begins when the request arrives and ends with its reply. While the handler runs it is the current one; its
    parent is the client's, from `_meta`, or else from the headers. Requests of the connection itself have no span.
    Where no provider is configured when the server begins to run, nothing is done, and nothing is paid.

    Args:
        server: the server, which does not run yet.
        tracer_provider, meter_provider: instead of the global ones.
    """
    instruments = _Instruments("server", tracer_provider, meter_provider)
    telemetry = _ServerTelemetry(server, instruments)
    server.around, server.on_session = telemetry.around, instruments.on_session
    server.parts.append(telemetry.while_running)


def instrument_client(
    client: InstrumentedClient,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Let OpenTelemetry know of each request of a client: a span of kind CLIENT, and how long it took.

    A call that a server answers with questions is one span. Its trace context goes to the server in `_meta`, unless the
    caller gave one with `meta=`. Where no provider is configured when it connects, nothing is done.

    Args:
        client: the client, which is not connected yet.
        tracer_provider, meter_provider: instead of the global ones.
    """
    instruments = _Instruments("client", tracer_provider, meter_provider)
    client.make_rounds, client.on_session = instruments.make_rounds, instruments.on_session


class _Instruments:
    """Where spans and measurements go, of those that were configured when `look` was called last."""

    def __init__(self, side: str, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self._side = side
        self._given = tracer_provider, meter_provider
        self._known: tuple[object, object] | None = None
        self.tracer: Tracer | None = None
        self.operations: Histogram | None = None
        self._sessions: Histogram | None = None
        self._began: dict[int, float] = {}

    def make_rounds(self, *args: Any) -> Rounds:
        """Return a call that is told of, or a plain one while there is nobody to tell."""
        if self.tracer is None and self.operations is None:
            return Rounds(*args)
        rounds = _ToldRounds(*args)
        rounds.instruments = self
        return rounds

    def look(self) -> bool:
        """Take the providers that are configured now; return whether there is one. Not for each request: it asks."""
        tracers = self._given[0] or trace.get_tracer_provider()
        meters = self._given[1] or metrics.get_meter_provider()
        if self._known != (tracers, meters):
            self._known = tracers, meters
            if _records(tracers):
                self.tracer = tracers.get_tracer("trimcp")
            if _records(meters):
                meter = meters.get_meter("trimcp")
                self.operations = _histogram(meter, self._side, "operation", "How long a request took.")
                self._sessions = _histogram(meter, self._side, "session", "How long a session lasted.")
        return self.tracer is not None or self.operations is not None

    def on_session(self, session: Session, opened: bool) -> None:
        """Note that a session begins or has ended."""
        if opened:
            if self.look() and self._sessions is not None:
                self._began[id(session)] = trio.current_time()
            return
        began = self._began.pop(id(session), None)
        if began is not None and self._sessions is not None and not session.transport.single_request:
            said = {} if session.revision is None else {"mcp.protocol.version": session.revision.name}
            self._sessions.record(trio.current_time() - began, said)


def _records(provider: object) -> bool:
    """Return whether a provider is more than the stand-in of the API."""
    return not type(provider).__module__.startswith(("opentelemetry.trace", "opentelemetry.metrics"))


def _histogram(meter: Meter, side: str, what: str, told: str) -> Histogram:
    return meter.create_histogram(
        f"mcp.{side}.{what}.duration", unit="s", description=told, explicit_bucket_boundaries_advisory=BUCKETS
    )


def _described(method: str, target: str | None) -> tuple[str, Attributes]:
    """Return a span's name, and what is known of its request from the start."""
    said = {"mcp.method.name": method}
    if target is None or method not in ("tools/call", "prompts/get"):
        return method, said
    if method == "tools/call":
        said["gen_ai.operation.name"] = "execute_tool"
        said["gen_ai.tool.name"] = target
    else:
        said["gen_ai.prompt.name"] = target
    return f"{method} {target}", said


@lru_cache(maxsize=100)
def _network(transport: str, unix: bool) -> Attributes:
    """Return what is said of the network that a message came over, or goes over."""
    if transport == "stdio":
        return {"network.transport": "pipe"}
    kind, _, version = transport.partition("/")
    if kind not in _PROTOCOLS:
        return {}
    said = {"network.transport": "unix" if unix else "quic" if version == "3" else "tcp"}
    said["network.protocol.name"] = _PROTOCOLS[kind]
    return said | {"network.protocol.version": version} if version else said


def _of_link(link: Link | None) -> Attributes:
    return {} if link is None else _network(link.transport, link.address == "unix")


@attrs.define(eq=False)
class _ServerTelemetry:
    _server: Observed
    _instruments: _Instruments
    # Of the requests under way: the span, and what is known of the request from the start
    _spans: dict[int, tuple[Span, Attributes]] = attrs.field(init=False, factory=dict)

    @asynccontextmanager
    async def while_running(self, running: object) -> AsyncIterator[None]:
        """Be told of each request that ends, if that is for anything."""
        with ExitStack() as telling:
            if self._instruments.look():
                telling.enter_context(self._server.telling_finished(self._finished))
            yield

    def around(self, handler: _Handler) -> _Handler:
        """Return a handler during which the span of its request is the current one."""
        if not self._instruments.look() or self._instruments.tracer is None:
            return handler

        async def within_span(ctx: Any, params: Any) -> Any:
            job: Job = ctx.internals[1]
            parent, link = _sent(ctx.trace, ctx.headers)
            known = self._spans.get(id(job))  # a handler may run again after a question
            if known is None:
                known = self._spans[id(job)] = self._begin(job, parent, link)
            token = context.attach(trace.set_span_in_context(known[0], parent))
            try:
                return await handler(ctx, params)
            finally:
                context.detach(token)

        return within_span

    def _describe(self, job: Job) -> tuple[str, Attributes]:
        name, said = _described(job.request.method.name, target_of(self._server, job))
        said["mcp.protocol.version"] = job.request.admission.revision.name
        return name, said | _of_link(link_of(job.session, job.sink))

    def _begin(self, job: Job, parent: context.Context | None, link: trace.Link | None) -> tuple[Span, Attributes]:
        tracer = self._instruments.tracer
        assert tracer is not None
        name, said = self._describe(job)
        # What has no end is for a span alone, not for a series of measurements.
        more = {"jsonrpc.request.id": one_line(str(job.request.id), _LONGEST)}
        if not job.session.transport.single_request:
            more["mcp.session.id"] = session_key(job.session)
        if job.request.method.name.startswith("resources/") and job.target is not None:
            more["mcp.resource.uri"] = one_line(job.target, _LONGEST)
        began = time.time_ns() - int(_age(job) * 1e9)
        links = None if link is None else [link]
        return tracer.start_span(name, parent, SpanKind.SERVER, said | more, links, start_time=began), said

    def _finished(self, job: Job, reply: bytes | None) -> None:
        span, said = self._spans.pop(id(job), (None, None))
        outcome = outcome_of(job, reply)
        failed: Attributes = {}
        if outcome == "failed":
            failed = _TOOL_ERROR
        elif job.error is not None:
            failed["error.type"] = failed["rpc.response.status_code"] = str(job.error.code)
        elif outcome != "ok":
            failed["error.type"] = outcome
        if self._instruments.operations is not None:
            self._instruments.operations.record(_age(job), (said or self._describe(job)[1]) | failed)
        if span is not None:
            told = None if job.error is None else job.error.message
            _end(span, failed, told if job.cancelled is None else why_cancelled(job))


def _age(job: Job) -> float:
    return max(0.0, trio.current_time() - job.arrived)


def _sent(inside: Mapping[str, str], headers: Mapping[str, str]) -> tuple[context.Context | None, trace.Link | None]:
    """Return the context that came with a request, and a link to that of the HTTP request that carried it."""
    outside = propagate.extract(headers) if "traceparent" in headers else None
    if "traceparent" not in inside:
        return outside, None
    parent = propagate.extract(inside)
    return parent, None if outside is None else trace.Link(trace.get_current_span(outside).get_span_context())


def _end(span: Span, failed: Attributes, why: str | None) -> None:
    if failed and span.is_recording():
        span.set_attributes(failed)
        span.set_status(Status(StatusCode.ERROR, None if why is None else one_line(why, _LONGEST)))
    span.end()


@attrs.define(eq=False, repr=False)
class _ToldRounds(Rounds):
    """A call with a span from its first request to its end."""

    instruments: _Instruments = attrs.field(init=False)
    _span: Span | None = attrs.field(init=False, default=None)
    _said: Attributes | None = attrs.field(init=False, default=None)  # while it is under way
    _began: float = attrs.field(init=False, default=0.0)

    async def begin(self) -> Any:
        if self._said is None:
            self._open()
        try:
            pending = await super().begin()
        except BaseException as error:
            self._close(error)
            raise
        if self._span is not None:
            self._span.set_attribute("jsonrpc.request.id", str(pending.id))  # after questions that of the last request
        return pending

    async def payload(self) -> Any:
        try:
            payload = await super().payload()
        except BaseException as error:
            self._close(error)
            raise
        self._close(None, payload)
        return payload

    def payload_now(self) -> Any:
        try:
            payload = super().payload_now()
        except Exception as error:
            self._close(error)
            raise
        self._close(None, payload)
        return payload

    def abandon(self, why: str) -> None:
        reply = None if self._pending is None else self._pending.reply
        super().abandon(why)
        if reply is None:
            self._finish({"error.type": "cancelled"}, why)
        elif reply.result is not None:  # nobody took it
            self._finish(_TOOL_ERROR if reply.result.get("isError") is True else {}, None)
        else:
            self._close(reply.error)

    def _open(self) -> None:
        target = getattr(self.params, "name", None)
        name, said = _described(self.name, target if isinstance(target, str) else None)
        if self.session.revision is not None:
            said["mcp.protocol.version"] = self.session.revision.name
        said |= _of_link(self.session.transport.link)
        self._said, self._began = said, trio.current_time()
        tracer = self.instruments.tracer
        if tracer is None:
            return
        uri = getattr(self.params, "uri", None)
        about = {**said, "mcp.session.id": session_key(self.session)}
        if isinstance(uri, str):
            about["mcp.resource.uri"] = uri
        self._span = tracer.start_span(name, kind=SpanKind.CLIENT, attributes=about)
        carrier: dict[str, Any] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        if carrier:
            self.meta = {**carrier, **(self.meta or {})}

    def _close(self, error: BaseException | None, payload: Any = None) -> None:
        if error is None:
            self._finish(_TOOL_ERROR if getattr(payload, "is_error", False) is True else {}, None)
        elif isinstance(error, trio.Cancelled):
            self._finish({"error.type": "cancelled"}, cancellation_text(error))
        elif isinstance(error, RemoteError):
            code = str(error.code)
            self._finish({"error.type": code, "rpc.response.status_code": code}, error.message)
        else:
            self._finish({"error.type": type(error).__qualname__}, None)

    def _finish(self, failed: Attributes, why: str | None) -> None:
        said, self._said = self._said, None
        if said is None:
            return
        if self.instruments.operations is not None:
            self.instruments.operations.record(trio.current_time() - self._began, said | failed)
        if self._span is not None:
            _end(self._span, failed, why)
