"""A server on the network under attack: what comes in wrong, too large, too late or twice, over each transport."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import trio

from tests.hostile.network import HOSTS, ROADS, Pool, Served, Socket, Stream, Wire, http, on, post
from tests.hostile.peers import MIB
from tests.transports.websocket_support import message

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the server is looked into by way of /proc"),
]
Everywhere = pytest.mark.parametrize(("host", "road"), [(host, road) for road in ROADS for host in HOSTS])
OnBoth = pytest.mark.parametrize("host", HOSTS)


# Many at once


@OnBoth
@pytest.mark.parametrize("road", ["modern", "session"])
async def test_every_pipelined_request_gets_its_answer(servers: Pool, host: str, road: str) -> None:
    # Hypercorn takes ten times as long for each.
    connections, each = (50, 200 if road == "modern" else 50) if host == "own" else (20, 50)
    answered = 0

    async def one(server: Served, lane: Any, first: int) -> None:
        nonlocal answered
        async with server.wire() as wire, trio.open_nursery() as nursery:
            ids = range(first, first + each)
            texts = [post(lane.call(id, "echo", text=f"number {id}"), session=lane.session) for id in ids]
            nursery.start_soon(wire.say, *texts)
            for id in ids:
                answer = await wire.answer()
                assert (answer.status, answer.reply["id"]) == (200, id)
                assert answer.reply["result"]["content"][0]["text"] == f"number {id}"
                answered += 1

    async with servers(host) as server, on(server, road) as lane, trio.open_nursery() as nursery:
        for first in range(0, connections * each, each):
            nursery.start_soon(one, server, lane, first)
    assert answered == connections * each


@OnBoth
@pytest.mark.parametrize("road", ["sse", "websocket"])
async def test_every_request_on_one_stream_gets_its_answer(servers: Pool, host: str, road: str) -> None:
    many = 10_000 if host == "own" else 1_000

    async def pour(server: Served, lane: Any) -> None:
        texts = [lane.call(id, "echo", text=f"number {id}") for id in range(many)]
        if isinstance(lane, Socket):
            for first in range(0, many, 100):
                await lane.raw.say(*map(message, texts[first : first + 100]))
        else:
            async with trio.open_nursery() as nursery:
                for first in range(0, many, 200):
                    nursery.start_soon(_post_all, server, lane, texts[first : first + 200])

    async with servers(host) as server, on(server, road) as lane, trio.open_nursery() as nursery:
        nursery.start_soon(pour, server, lane)
        answers: dict[int, str] = {}
        while len(answers) < many:
            answer = await lane.hear()
            assert answer["id"] not in answers
            answers[answer["id"]] = answer["result"]["content"][0]["text"]
    assert answers == {id: f"number {id}" for id in range(many)}


async def _post_all(server: Served, lane: Stream, texts: list[bytes]) -> None:
    async with server.wire() as wire, trio.open_nursery() as nursery:
        nursery.start_soon(wire.say, *(post(text, path=lane.path) for text in texts))
        for _ in texts:
            assert (await wire.answer()).status == 202


# Bad input

_PING = b'{"jsonrpc":"2.0","method":"ping","params":%b,"id":%b}'
_BAD: dict[str, tuple[bytes, int | None, int]] = {
    "null id": (_PING % (b"{}", b"null"), None, -32600),
    "float id": (_PING % (b"{}", b"1.5"), None, -32600),
    "object id": (_PING % (b"{}", b"{}"), None, -32600),
    "bool id": (_PING % (b"{}", b"true"), None, -32600),
    "huge id": (_PING % (b"{}", b"9" * 20), None, -32600),
    "lone surrogate": (_PING % (b'{"a":"\\ud800"}', b"7"), 7, -32700),
    "invalid UTF-8": (_PING % (b'{"a":"\xff"}', b"7"), 7, -32700),
    "900 levels": (_PING % (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", b"7"), 7, -32600),
    "5,000 digits": (_PING % (b'{"a":' + b"9" * 5_000 + b"}", b"7"), 7, -32600),
    "infinite": (_PING % (b'{"a":1e999}', b"7"), 7, -32600),
    "300,000 members": (_PING % (b'{"a":[' + b"[]," * 300_000 + b"1]}", b"7"), 7, -32600),
    "another version": (b'{"jsonrpc":"1.0","id":7,"method":"ping"}', 7, -32600),
    "params in an array": (_PING % (b"[]", b"7"), 7, -32602),
    "half": (_PING[:30], None, -32700),
    "no message": (b"7", None, -32600),
    "no message in an array": (b"[]", None, -32600),
    "nothing": (b"", None, -32700),
}


@Everywhere
async def test_what_is_no_message_is_told_so_by_its_id_and_all_goes_on(servers: Pool, host: str, road: str) -> None:
    async with servers(host) as server, on(server, road) as lane:
        for name, (text, id, code) in _BAD.items():
            if road == "websocket" and name == "invalid UTF-8":
                continue  # ends the connection: the next test
            status, answer = await lane.put(text)
            assert (answer.get("id"), answer["error"]["code"]) == (id, code), name
            assert status == {"sse": 202, "websocket": 0}.get(road, 400)
        assert (await lane.ask("a", "echo", text="alive"))["result"]["content"][0]["text"] == "alive"


@OnBoth
@pytest.mark.parametrize("road", ROADS[1:])  # since 2026-07-28 each POST is alone with its ids
async def test_an_id_under_way_is_taken_and_nothing_happens_to_its_call(servers: Pool, host: str, road: str) -> None:
    async with servers(host) as server, on(server, road) as lane, server.wire() as beside:
        first = lane.call("same", "wait", gate="g")
        if road == "session":
            await beside.say(post(first, session=lane.session))
        elif road == "sse":
            assert (await lane.send(first)).status == 202
        else:
            await lane.raw.say(message(first))
        while (await server.counts())["running"] < 1:  # noqa: ASYNC110  # it is another process
            await trio.sleep(0.01)
        for _ in range(3):
            _, refusal = await lane.put(lane.call("same", "echo"))
            assert (refusal["id"], refusal["error"]["code"]) == ("same", -32600)
        answers = [await lane.ask("o", "open", gate="g")]
        answers.append((await beside.answer()).reply if road == "session" else await lane.hear())
        told = {answer["id"]: answer["result"]["content"][0]["text"] for answer in answers}
        assert told == {"o": "open", "same": "waited"}
        assert (await lane.ask("same", "echo", text="again"))["result"]["content"][0]["text"] == "again"


# Sizes


def _large(size: int) -> bytes:
    return b'{"jsonrpc":"2.0","id":77,"method":"ping","params":{"a":"' + b"x" * (size - 59) + b'"}}'


@Everywhere
async def test_a_message_too_large_costs_little_and_ends_nothing(servers: Pool, host: str, road: str) -> None:
    async with servers(host) as server:
        await server.warm()
        async with on(server, road) as lane:
            base = server.forget_peak()
            if (host, road) == ("hypercorn", "websocket"):
                await lane.raw.say(message(_large(4 * MIB + 1)))
                assert await lane.raw.close_code() == 1009
            else:
                status, answer = await lane.put(_large(4 * MIB + 1))
                assert (status, answer["error"]["code"]) == ({"websocket": 0}.get(road, 413), -32600)
                assert answer["id"] == 77
                assert (await lane.ask(1, "echo", text="alive"))["id"] == 1
            spent = server.peak - base
            print(f"{host}, {road}: {spent / MIB:.2f} MiB for a message of 4 MiB and a byte")
            assert spent <= 8 * MIB
            if road != "websocket":
                assert (await lane.put(_large(4 * MIB)))[0] in (200, 202, 400), "just not too large"


@OnBoth
async def test_a_body_without_end_is_read_to_the_limit(servers: Pool, host: str) -> None:
    async with servers(host) as server, server.wire() as wire:
        head = post(b"{}").replace(b"Content-Length: 2", b"Transfer-Encoding: chunked").removesuffix(b"{}")
        written = 0
        with pytest.raises(trio.BrokenResourceError):
            await wire.say(head)
            while True:
                await wire.say(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                written += 65536
        assert written <= 16 * MIB, "that is, the limit and what is on its way"
        assert (await wire.answer()).status == 413


# Requests that two might read differently


def _variants() -> dict[str, bytes]:
    text = b"{}"
    plain = post(text)
    length = b"Content-Length: 2\r\n"

    def head(lines: bytes, body: bytes = b"0\r\n\r\n") -> bytes:
        return plain.replace(length, lines).removesuffix(text) + body

    chunked = b"Transfer-Encoding: chunked\r\n"
    return {
        "both lengths": head(length + chunked),
        "two lengths": head(b"Content-Length: 2\r\nContent-Length: 3\r\n", text),
        "a signed length": head(b"Content-Length: +2\r\n", text),
        "a length in hex": head(b"Content-Length: 0x2\r\n", text),
        "no length": head(b"Content-Length: \r\n", text),
        "an endless length": head(b"Content-Length: " + b"9" * 40 + b"\r\n", text),
        "another coding": head(b"Transfer-Encoding: xchunked\r\n"),
        "two codings": head(b"Transfer-Encoding: chunked, identity\r\n"),
        "a coding twice": head(chunked * 2),
        "a blank before the colon": head(b"Transfer-Encoding : chunked\r\n"),
        "a vertical tab": head(b"Transfer-Encoding: \x0bchunked\r\n"),
        "a signed chunk": head(chunked, b"-1\r\n{}\r\n0\r\n\r\n"),
        "a chunk in hex": head(chunked, b"0x2\r\n{}\r\n0\r\n\r\n"),
        "a chunk too long": head(chunked, b"5\r\n{}\r\n0\r\n\r\n"),
        "a chunk too short": head(chunked, b"1\r\n{}\r\n0\r\n\r\n"),
        "no Host": plain.replace(b"Host: localhost\r\n", b""),
        "two Hosts": plain.replace(b"Host: localhost\r\n", b"Host: localhost\r\nHost: localhost\r\n"),
        "a bare carriage return": plain.replace(b"Host: localhost\r\n", b"Host: localhost\rX: y\r\n"),
        "a NUL": plain.replace(b"Host: localhost\r\n", b"Host: localhost\r\nX: a\0b\r\n"),
        "a blank before a name": plain.replace(b"Host: localhost\r\n", b" Host: localhost\r\n"),
        "HTTP/0.9": b"POST /mcp\r\n\r\n",
    }


@OnBoth
async def test_no_request_is_smuggled_behind_another(servers: Pool, host: str) -> None:
    victim = http("GET", "/healthz")
    async with servers(host, limits={"body_timeout": 0.5, "linger_timeout": 0.1}) as server:
        for name, attack in _variants().items():
            async with server.wire() as wire:
                await wire.say(attack, victim)
                said = await wire.closed()
            if host == "own" or said:  # Hypercorn's answer can be lost to a reset
                assert said[9:12] in (b"400", b"408", b"413", b"501"), name
            assert said.count(b"HTTP/1.1 ") <= 1, f"{name}: what came behind was answered"


@OnBoth
async def test_heads_and_codings_beyond_measure_are_refused(servers: Pool, host: str) -> None:
    plain, host_line = post(b"{}"), b"Host: localhost\r\n"
    attacks = {
        "a long header": plain.replace(host_line, host_line + b"X: " + b"y" * 200_000 + b"\r\n"),
        "many headers": plain.replace(host_line, host_line + b"X: y\r\n" * 50_000),
        "a long line": plain.replace(b"/mcp", b"/" + b"x" * 200_000),
        "compressed": plain.replace(host_line, host_line + b"Content-Encoding: gzip\r\n"),
    }
    async with servers(host) as server:
        for name, attack in attacks.items():
            async with server.wire() as wire:
                status = (await wire.ask(attack)).status
                assert status == 415 if name == "compressed" else status in (400, 414, 431), name


async def test_who_takes_his_time_is_not_waited_for(servers: Pool) -> None:
    """Nor does a byte now and then buy any."""
    late: dict[str, float] = {}

    async def drip(server: Served, data: bytes) -> None:
        async with server.wire() as wire, trio.open_nursery() as nursery:
            began = trio.current_time()
            nursery.start_soon(_write_slowly, wire, data)
            said = await wire.closed()
            late[f"{server.software} {data[:5]!r}"] = trio.current_time() - began
            assert said[:13] in (b"", b"HTTP/1.1 408 "), said
            nursery.cancel_scope.cancel()

    settings = {"limits": {"head_timeout": 0.5, "body_timeout": 1.0, "linger_timeout": 0.2}}
    async with (
        servers("own", **settings) as own,
        servers("hypercorn", **settings) as hypercorn,
        trio.open_nursery() as nursery,
    ):
        for server in (own, hypercorn):
            for data in (b"G", b"GET / HTTP/1.1\r\nX", post(b"x" * 100)[:-90]):
                nursery.start_soon(drip, server, data)
    print({name: round(seconds, 2) for name, seconds in late.items()})
    assert len(late) == 6
    assert max(late.values()) <= 4 * 1.5


async def _write_slowly(wire: Wire, data: bytes) -> None:
    try:
        await wire.say(data)
        while True:
            await trio.sleep(0.1)
            await wire.say(b"y")
    except trio.BrokenResourceError:
        pass
