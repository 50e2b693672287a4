"""A client connects and calls, whatever a legacy server says to the probe and in whatever form it answers."""

from __future__ import annotations

import gzip
from collections.abc import Awaitable, Callable
from itertools import product
from typing import Any

import orjson
import pytest

from tests.transports.http.scripted import Exchange, legacy, scripted
from trimcp.client.client import Client
from trimcp.wire.revisions import LATEST_LEGACY

pytestmark = pytest.mark.usefixtures("on_both_engines")

DONE = {"content": [{"type": "text", "text": "done"}]}
HTML, TEXT, JSON = "text/html; charset=utf-8", "text/plain; charset=utf-8", "application/json; charset=utf-8"
PAGES = {
    HTML: [b"<!DOCTYPE html><html>no</html>"],
    TEXT: [b"", b"no"],
    JSON: [
        *(b'{"error":"no","statusCode":400}', b'{"detail":[{"msg":"no"}]}', b"[]", b"null"),
        b'{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"Bad Request: No valid session ID provided"}}',
        b'{"jsonrpc":"2.0","error":{"code":-32700,"message":"no"}}',
        b'{"jsonrpc":"2.0","id":"server-error","error":{"code":-32600,"message":"no"}}',
        b'{"jsonrpc":"2.0","id":1,"result":{}}',
    ],
}
STATUSES = (200, 202, 400, 401, 403, 404, 405, 406, 411, 413, 415, 421, 422, 429, 500, 501, 502, 503, 504)


async def connect(probe: Callable[[Exchange], Awaitable[None]], call: Callable[[Exchange], Awaitable[None]]) -> None:
    async def then(exchange: Exchange) -> None:
        await (probe if exchange.called == "server/discover" else call)(exchange)

    async with scripted(legacy(then)) as server, Client("c").connect(server.target()) as session:
        assert session.revision is LATEST_LEGACY
        assert (await session.call_tool("x")).text == "done"


async def refuse(exchange: Exchange) -> None:
    await exchange.respond(400)


async def done(exchange: Exchange) -> None:
    await exchange.result(DONE)


@pytest.mark.parametrize("status", STATUSES)
async def test_whatever_a_legacy_server_says_to_the_probe_it_is_reached(status: int, autojump_clock: Any) -> None:
    for kind, page in ((kind, page) for kind, pages in PAGES.items() for page in pages):

        async def probe(exchange: Exchange, page: bytes = page, kind: str = kind) -> None:
            await exchange.respond(status, page, {"content-type": kind})

        await connect(probe, done)


STREAM = "text/event-stream"
FORMS: dict[str, tuple[str, Callable[[bytes], bytes], dict[str, str]]] = {
    "charset": ("Application/JSON;charset=UTF-8", lambda data: data, {}),
    "mark": (JSON, lambda data: b"\xef\xbb\xbf" + data, {}),
    "white space": (JSON, lambda data: b"\r\n\t " + data + b"\n\n", {}),
    "gzip": (JSON, gzip.compress, {"content-encoding": "gzip"}),
    "events": (STREAM, lambda data: b"data: " + data + b"\n\n", {}),
    "events, charset": ("Text/Event-Stream; charset=UTF-8", lambda data: b"data:" + data + b"\n\n", {}),
    "events, CRLF": (STREAM, lambda data: b"event: message\r\ndata: " + data + b"\r\n\r\n", {}),
    "events, CR": (STREAM, lambda data: b"event: message\rdata: " + data + b"\r\r", {}),
    "events, mark": (STREAM, lambda data: b"\xef\xbb\xbfdata: " + data + b"\n\n", {}),
    "comments": (STREAM, lambda data: b": ping\n\n:\n\nretry: 1\n\ndata: " + data + b"\n\n", {}),
    "other events": (STREAM, lambda data: b"event: ping\ndata: {}\n\ndata: ping\n\ndata: " + data + b"\n\n", {}),
    "gzipped events": (STREAM, lambda data: gzip.compress(b"data: " + data + b"\n\n"), {"content-encoding": "gzip"}),
}


@pytest.mark.parametrize(("form", "status"), list(product(FORMS, (200, 201))), ids=str)
async def test_in_whatever_form_an_answer_comes_it_is_taken(form: str, status: int, autojump_clock: Any) -> None:
    kind, written, headers = FORMS[form]

    async def call(exchange: Exchange) -> None:
        answer = orjson.dumps({"jsonrpc": "2.0", "id": exchange.id, "result": DONE})
        await exchange.respond(status, written(answer), {"content-type": kind, **headers})

    await connect(refuse, call)


@pytest.mark.parametrize("form", FORMS)
async def test_in_every_form_an_integer_beyond_64_bits_hides_its_member_alone(form: str, autojump_clock: Any) -> None:
    kind, written, headers = FORMS[form]
    far = {"type": "text", "text": "far", "n": orjson.Fragment(b"18446744073709551616")}

    async def call(exchange: Exchange) -> None:
        result = {"content": [*DONE["content"], far]}
        answer = orjson.dumps({"jsonrpc": "2.0", "id": exchange.id, "result": result})
        await exchange.respond(200, written(answer), {"content-type": kind, **headers})

    await connect(refuse, call)
