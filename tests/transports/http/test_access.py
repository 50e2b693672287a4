"""The access log: one harmless line for each response, with fields, and without what opens doors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimcp.transports.http.interfaces import Head
from trimcp.transports.http.peers.access import AccessLog, JsonFormatter


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    caplog.set_level(logging.INFO, "trimcp.access")
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append
    logging.getLogger("trimcp.access").addHandler(handler)
    yield found
    logging.getLogger("trimcp.access").removeHandler(handler)


async def test_a_response_is_one_line_with_fields(
    records: list[logging.LogRecord], autojump_clock: trio.testing.MockClock
) -> None:
    head = Head(
        *("POST", "/mcp", ""),
        {"mcp-protocol-version": "x", "user-agent": "probe/1", "mcp-session-id": "s3cret", "mcp-method": "tools/call"},
        "127.0.0.1:9",
        root="/tools",
        principal="ada",
        began=trio.current_time(),
    )
    await trio.sleep(0.25)
    AccessLog().record(head, 200, 123)
    (record,) = records
    assert record.levelno == logging.INFO
    line = '127.0.0.1:9 "POST /tools/mcp" 200 123 250.0ms rpc_method=tools/call principal=ada'
    assert record.getMessage() == line
    fields = vars(record)
    expected = {
        "peer": "127.0.0.1:9",
        "http_method": "POST",
        "path": "/tools/mcp",
        "status": 200,
        "sent": 123,
        "duration": 0.25,
        "principal": "ada",
        "rpc_method": "tools/call",
        "user_agent": "probe/1",
        "protocol_version": "x",
    }
    assert {name: fields[name] for name in expected} == expected
    assert "query" not in fields


async def test_what_is_not_known_is_left_out(records: list[logging.LogRecord]) -> None:
    AccessLog().record(Head("GET", "/healthz"), 0, 0)
    (record,) = records
    assert record.getMessage().startswith(' "GET /healthz" 0 0 ')
    assert not {"principal", "rpc_method", "session", "query", "user_agent"} & set(vars(record))


async def test_sessions_are_told_apart_and_not_told(records: list[logging.LogRecord]) -> None:
    log = AccessLog()
    for session in ("one-secret", "two-secret", "one-secret"):
        head = Head("GET", "/sse", f"sessionId={session}&key={session}&flag&=x", {"mcp-session-id": session})
        log.record(head, 200, 0)
    one, two, again = [vars(record)["session"] for record in records]
    assert one == again != two
    assert vars(records[0])["query"] == "sessionId=***&key=***&flag&=***"
    assert "/sse?sessionId=***&key=***&flag&=***" in records[0].getMessage()
    assert not [record for record in records if "secret" in repr(vars(record))]


@pytest.mark.parametrize(
    ("before", "id", "after"),
    [
        ("/contexts/", "one-secret", ""),
        ("/contexts/", "one-secret", "/events"),
        ("/contexts/", "a/one-secret/b", "/events"),
        ("/contexts/", "one-secret/events", "/events"),
        ("/contexts", "", ""),
        ("/contexts/", "", ""),
        ("/tools/contexts/x", "", ""),
    ],
)
async def test_contexts_are_told_apart_and_not_told(
    before: str, id: str, after: str, records: list[logging.LogRecord]
) -> None:
    log = AccessLog()
    for method in ("GET", "PATCH"):
        log.record(Head(method, before + id + after, root="/api"), 200, 0)
    first, second = [vars(record)["path"] for record in records]
    assert first == second
    assert first.startswith(f"/api{before}")
    assert first.endswith(after)
    assert "secret" not in repr([vars(record) for record in records])
    assert (first == f"/api{before}") is (not id and before != "/contexts/")


async def test_nobody_pays_for_a_log_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "trimcp.access")
    head: Any = None  # it is not even looked at
    AccessLog().record(head, 200, 0)
    assert caplog.records == []


async def test_it_goes_where_it_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shop.requests")
    AccessLog("shop.requests").record(Head("GET", "/"), 200, 0)
    assert [record.name for record in caplog.records] == ["shop.requests"]


@pytest.mark.parametrize(
    "text", ["/a\r\nERROR all is lost", "/\x1b[31m", '/" 200 0', "/\u202eevil", "/\ud800", "/\\x0a", "/\xa0\x85"]
)
async def test_what_a_client_wrote_stays_on_its_line(text: str, records: list[logging.LogRecord]) -> None:
    named = ("user-agent", "mcp-protocol-version", "mcp-session-id", "mcp-method")
    head = Head(text, text, text, dict.fromkeys(named, text), text, principal=text)
    AccessLog().record(head, 404, 0)
    (record,) = records
    line = record.getMessage()
    assert line.isascii()
    assert line.isprintable()
    assert line.count('"') == 2
    for name in ("peer", "http_method", "path", "query", "principal", "rpc_method", "user_agent", "protocol_version"):
        value = vars(record)[name]
        assert value.isascii()
        assert value.isprintable()
        assert '"' not in value
    assert JsonFormatter().format(record).isprintable()


async def test_no_field_can_pretend_to_be_another(records: list[logging.LogRecord]) -> None:
    headers = {"mcp-method": "tools/call principal=root"}
    AccessLog().record(Head("POST", "/", headers=headers, principal="ada"), 200, 0)
    line = records[0].getMessage()
    assert line.endswith(" rpc_method=tools/call\\x20principal=root principal=ada")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.one_of(st.text(max_size=500), st.sampled_from(["x" * 100_000, "\x00" * 100_000])))
def test_a_line_is_bounded(text: str, records: list[logging.LogRecord]) -> None:
    async def record() -> None:
        headers = {"user-agent": text, "mcp-method": text}
        AccessLog().record(Head(text, text, text, headers, text, principal=text), 1, 1)

    records.clear()
    trio.run(record)
    (found,) = records
    line = JsonFormatter().format(found)
    assert len(line) < 30_000
    assert "\n" not in line
    assert line.isascii()


# JSON


def formatted(**fields: Any) -> dict[str, Any]:
    record = logging.makeLogRecord({"name": "a.b", "levelname": "INFO", "msg": "it %s", "args": ("is",), **fields})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_any_record_becomes_one_line_of_json() -> None:
    found = formatted(status=200, created=0.25, anything=object, path="\u202e\n")
    assert found.pop("anything") == "<class 'object'>"
    assert found == {
        "time": "1970-01-01T00:00:00.250+00:00",
        "level": "INFO",
        "logger": "a.b",
        "message": "it is",
        "status": 200,
        "path": "\u202e\n",
    }


def test_a_traceback_stands_on_the_same_line() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        found = formatted(exc_info=(ValueError, error, error.__traceback__), stack_info="Stack:\n  here")
    assert "ValueError: no\nway" in found["exception"]
    assert found["stack"] == "Stack:\n  here"


def test_an_applications_fields_do_not_replace_ours() -> None:
    found = formatted(time="never", level="NONE", logger="x", exception="mine")
    assert (found["level"], found["logger"], found["exception"]) == ("INFO", "a.b", "mine")
    assert found["time"] != "never"
    assert formatted(dict={(1, 2): 3, "a": 4})["dict"] == {"a": 4}
