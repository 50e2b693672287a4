"""What names a request in the records that are logged while it is handled."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import trio
from opentelemetry import context, trace

import trimcp
import trimcp.testing
from trimcp.testing import Transcript, replay
from trimcp.watch import RequestIds

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
log = logging.getLogger("importer")


class Kept(logging.Handler):
    """Keeps what is logged, as lines of JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, str]] = []
        self.setFormatter(trimcp.JsonFormatter())
        self.addFilter(RequestIds())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, root = Kept(), logging.getLogger()
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)


def make_server() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("importer", version="1")

    @server.tool
    async def load() -> str:
        log.warning("no date")
        await trio.to_thread.run_sync(log.warning, "in a thread")
        return "loaded"

    @server.tool
    async def crash() -> str:
        raise OSError("full")

    @server.tool
    async def spanned() -> str:
        span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=False))
        token = context.attach(trace.set_span_in_context(span))
        try:
            log.warning("in a span")
        finally:
            context.detach(token)
        return "done"

    return server


async def test_records_name_session_request_and_trace(kept: Kept) -> None:
    async with trimcp.testing.connected(make_server()) as session:
        key = f"{id(session.peer):x}"
        log.warning("outside")
        await session.call_tool("load", meta={"traceparent": PARENT})
        with pytest.raises(trimcp.RemoteError):
            await session.call_tool("crash", meta={"traceparent": PARENT})
        await session.call_tool("load", meta={"traceparent": "nothing"})
    ours = [line for line in kept.lines if line["level"] != "DEBUG"]
    assert [line["message"].split(":")[0] for line in ours] == [
        *("outside", "no date", "in a thread", "the handler of tools/call crashed", "no date", "in a thread")
    ]
    assert "mcp_session" not in ours[0]
    assert {line["mcp_session"] for line in ours[1:]} == {key}
    first, second, crashed, third, _ = (line["mcp_request"] for line in ours[1:])
    assert first == second
    assert len({first, crashed, third}) == 3
    assert all(text.startswith("tools/call ") for text in (first, crashed, third))
    assert {line.get("trace_id") for line in ours[1:4]} == {PARENT.split("-")[1]}
    assert "trace_id" not in ours[4]


async def test_the_current_span_s_trace_comes_first(kept: Kept) -> None:
    async with trimcp.testing.connected(make_server()) as session:
        await session.call_tool("spanned", meta={"traceparent": PARENT})
    assert [line["trace_id"] for line in kept.lines if line["message"] == "in a span"] == [f"{0xABC:032x}"]


async def test_an_id_cannot_forge_a_line(kept: Kept) -> None:
    name = "x\n\x1b[31mERROR" + "y" * 200
    opening = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    call = {"name": "load", "arguments": {}}
    conversation = [
        ("-->", {"id": 0, "method": "initialize", "params": opening}),
        ("<--", {"id": 0, "result": "..."}),
        ("-->", {"method": "notifications/initialized"}),
        ("-->", {"id": name, "method": "tools/call", "params": call}),
        ("<--", {"id": name, "result": "..."}),
    ]
    lines = [f"{arrow} {json.dumps({'jsonrpc': '2.0', **message})}" for arrow, message in conversation]
    await replay(Transcript.parse("\n".join(lines)), make_server())
    (said,) = {line["mcp_request"] for line in kept.lines if "mcp_request" in line}
    assert said.isprintable()
    assert len(said) <= 101
