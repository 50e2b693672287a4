"""The trace shows every message, masks secrets and never disturbs the channel."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from trimcp.channel import Kind, MessageChannel, Outgoing
from trimcp.testing.contract import check_channel
from trimcp.transports.memory import memory_channels
from trimcp.transports.trace import format_message, mask, trace_writer, traced
from trimcp.wire.jsonrpc import Batch, ErrorResponse, Malformed, Notification, Request, Response, encode_request


async def test_contract() -> None:
    @asynccontextmanager
    async def make() -> AsyncIterator[tuple[MessageChannel, MessageChannel]]:
        left, right = memory_channels()
        yield traced(left, lambda line: None), traced(right, lambda line: None)

    await check_channel(make)


def test_what_a_channel_can_do_is_what_the_watched_one_can() -> None:
    watched, _ = memory_channels()
    watched.half_open, watched.mirrors_headers = False, True
    channel = traced(watched, lambda line: None)
    assert (channel.half_open, channel.mirrors_headers) == (False, True)


async def test_every_message_is_one_line_with_direction() -> None:
    lines: list[str] = []
    left, right = memory_channels()
    async with left, traced(right, lines.append, clock=lambda: 0.25) as watched:
        await left.send([Outgoing(encode_request(1, "a", {"x": 1}), Kind.REQUEST, 1)])
        await watched.receive()
        await watched.send([Outgoing(b"{}", Kind.REPLY, 1), Outgoing(b"nonsense", Kind.REPLY, 1)])
    assert [line[8:] for line in lines] == [
        '.250 <-- {"jsonrpc":"2.0","id":1,"method":"a","params":{"x":1}}\n',
        ".250 --> {}\n",
        ".250 --> (not JSON) b'nonsense'\n",
    ]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (Notification("n"), '{"jsonrpc":"2.0","method":"n"}'),
        (Response(1, {"a": 2}), '{"jsonrpc":"2.0","id":1,"result":{"a":2}}'),
        (
            ErrorResponse(None, -32700, "bad", {"why": 1}),
            '{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"bad","data":{"why":1}}}',
        ),
        (Malformed(-32700, "no JSON", 3, "json"), "(malformed: json, id 3) no JSON"),
        (
            Batch((Request(1, "m"), Malformed(-32600, "x", None, "shape"))),
            '[{"jsonrpc":"2.0","id":1,"method":"m"},{"malformed":"shape","id":null}]',
        ),
    ],
)
def test_each_kind_of_message(message: Request, shown: str) -> None:
    assert format_message("<--", message, 0).split(" <-- ")[1] == shown + "\n"


def test_secrets_are_masked() -> None:
    value = {
        "Authorization": "Bearer abc",
        "headers": {"x-api-key": "abc", "Cookie": "a=b"},
        "arguments": {"password": "abc", "accessToken": "abc", "client_secret": ["abc"], "token": 5},
        "requestState": "abc",
        "uri": "https://example.com/?access_token=abc&page=2",
        "text": "curl -H 'authorization: bearer abc' x",
    }
    masked = mask(value)
    assert "abc" not in str(masked)
    assert masked["uri"] == "https://example.com/?access_token=***&page=2"
    assert value["requestState"] == "abc"


def test_what_is_no_secret_stays() -> None:
    value = {
        "_meta": {"progressToken": 7},
        "maxTokens": 100,
        "error": {"code": -32602},
        "inputSchema": {"properties": {"password": {"type": "string"}}},
        "secret": None,
    }
    assert mask(value) == value


def test_long_strings_are_cut() -> None:
    assert mask(["x" * 301, "y" * 300]) == ["x" * 300 + "... (301 characters)", "y" * 300]


async def test_a_failing_writer_ends_the_trace_only(caplog: pytest.LogCaptureFixture) -> None:
    def full(line: str) -> None:
        raise OSError("disk full")

    left, right = memory_channels()
    with caplog.at_level(logging.WARNING, "trimcp.trace"):
        async with right, traced(left, full) as watched:
            for n in range(3):
                await watched.send([Outgoing(encode_request(n, "a"), Kind.REQUEST, n)])
            assert len(await right.receive()) == 3
    assert [record.getMessage() for record in caplog.records] == ["the trace ends here, writing it failed: disk full"]


def test_writer_to_a_file_or_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write = trace_writer(str(tmp_path / "trace.txt"))
    write("one\n")
    write("two\n")
    assert (tmp_path / "trace.txt").read_text() == "one\ntwo\n"
    trace_writer("1")("three\n")
    assert capsys.readouterr().err == "three\n"
