"""The site of the pages: on a loopback address, its files for anybody, its commands for the token alone."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

from tests.peers.http1 import HttpWire, http_request
from trimcp.cli.web.site import page_files, serving
from trimcp.errors import LocalError
from trimcp.watch.commands import Command, Send

JSON = "Content-Type: application/json"


@attrs.frozen
class Visited:
    """The site, and what a browser knows of it."""

    port: int
    token: str

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[HttpWire]:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with stream:
            yield HttpWire(stream)

    async def ask(self, *lines: str, name: str = "echo", body: bytes = b"{}", host: str = "") -> Any:
        """Return the response to a command with these headers."""
        async with self.wire() as wire:
            host = host or f"127.0.0.1:{self.port}"
            return await wire.ask(http_request("POST", f"/do/{name}", JSON, *lines, body=body, host=host))

    @property
    def bearer(self) -> str:
        return f"Authorization: Bearer {self.token}"


async def echo(members: Mapping[str, Any], send: Send) -> None:
    for value in members.get("say", ["done"]):
        await send(value)


@asynccontextmanager
async def visited(**commands: Command) -> AsyncIterator[Visited]:
    async with serving("top", {"echo": echo, **commands}) as url:
        address, _, token = url.partition("/#")
        yield Visited(int(address.rpartition(":")[2]), token)


async def test_files_are_anybodys_and_hold_nothing_of_anybody() -> None:
    async with visited() as site, site.wire() as wire:
        for path in ("/", "/page.js", "/base.js", "/style.css", "/vendor/preact.mjs", "/vendor/hooks.mjs"):
            answer = await wire.fetch("GET", path)
            assert answer.status == 200
            assert site.token.encode() not in answer.body
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "require-trusted-types-for 'script'" in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
        assert (await wire.fetch("GET", "/do/echo")).status == 401
        assert (await wire.fetch("GET", "/vendor/preact.LICENSE")).status == 404
        assert (await wire.fetch("GET", "/../site.py")).status in (400, 404)


async def test_a_command_is_answered_line_by_line() -> None:
    async with visited() as site:
        answer = await site.ask(site.bearer, body=json.dumps({"say": [1, {"two": "<b>"}]}).encode())
    assert (answer.status, answer.body) == (200, b'1\n{"two":"<b>"}\n')
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "line", ["", "Authorization: Bearer nonsense", "Authorization: Basic dDp0", "Cookie: token={}"]
)
async def test_without_the_token_nothing_is_done(line: str) -> None:
    async with visited() as site:
        answer = await site.ask(*([line.format(site.token)] if line else []))
    assert answer.status == 401


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:1", "null", "http://localhost"])
async def test_a_page_of_another_origin_is_refused_even_with_the_token(origin: str) -> None:
    async with visited() as site:
        assert (await site.ask(site.bearer, f"Origin: {origin}")).status == 403
        assert (await site.ask(site.bearer, f"Origin: http://127.0.0.1:{site.port}")).status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example"])
async def test_a_name_that_was_rebound_to_this_machine_is_refused(host: str) -> None:
    async with visited() as site, site.wire() as wire:
        assert (await site.ask(site.bearer, host=host)).status == 403
        assert (await wire.ask(http_request("GET", "/", host=host))).status == 403


async def test_no_other_page_is_told_that_it_may_ask() -> None:
    async with visited() as site, site.wire() as wire:
        lines = ("Origin: https://evil.example", "Access-Control-Request-Method: POST")
        answer = await wire.ask(http_request("OPTIONS", "/do/echo", *lines, host=f"127.0.0.1:{site.port}"))
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("body", [b"", b"[]", b"nonsense", b"1"])
async def test_what_is_no_object_is_refused(body: bytes) -> None:
    async with visited() as site:
        assert (await site.ask(site.bearer, body=body)).status == 400


async def test_a_command_that_fails_says_so_and_the_next_is_done(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(members: Mapping[str, Any], send: Send) -> None:
        raise LocalError("it has ended")

    async def crash(members: Mapping[str, Any], send: Send) -> None:
        raise RuntimeError("secret")

    async with visited(refuse=refuse, crash=crash) as site:
        assert json.loads((await site.ask(site.bearer, name="refuse")).body)["error"] == "it has ended"
        told = (await site.ask(site.bearer, name="crash")).body
        assert (await site.ask(site.bearer)).body == b'"done"\n'
    assert b"internal error" in told
    assert b"secret" not in told
    assert "secret" in caplog.text


async def test_a_page_that_leaves_cancels_its_command() -> None:
    began, ended = trio.Event(), trio.Event()

    async def hold(members: Mapping[str, Any], send: Send) -> None:
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    async with visited(hold=hold) as site:
        async with site.wire() as wire:
            await wire.send(http_request("POST", "/do/hold", JSON, site.bearer, body=b"{}"))
            await began.wait()
        await ended.wait()


async def test_a_page_that_does_not_read_keeps_its_command_waiting() -> None:
    sent = 0

    async def pour(members: Mapping[str, Any], send: Send) -> None:
        nonlocal sent
        while True:
            await send("x" * 65_536)
            sent += 1
            await trio.lowlevel.checkpoint()

    async with visited(pour=pour) as site, site.wire() as wire:
        await wire.send(http_request("POST", "/do/pour", JSON, site.bearer, body=b"{}"))
        await wire.head()
        before = -1
        while before != sent:  # until nothing more is sent
            before = sent
            await trio.testing.wait_all_tasks_blocked(0.01)
    assert 0 < sent < 1_000


async def test_only_so_many_commands_at_a_time() -> None:
    async def hold(members: Mapping[str, Any], send: Send) -> None:
        await send("began")
        await trio.sleep_forever()

    async with visited(hold=hold) as site:
        async with trio.open_nursery() as nursery:

            async def one() -> None:
                async with site.wire() as wire:
                    await wire.send(http_request("POST", "/do/hold", JSON, site.bearer, body=b"{}"))
                    await wire.head()
                    began.add(wire)
                    await trio.sleep_forever()

            began: set[HttpWire] = set()
            for _ in range(64):
                nursery.start_soon(one)
            while len(began) < 64:
                await trio.testing.wait_all_tasks_blocked(0.01)
            answer = await site.ask(site.bearer)
            nursery.cancel_scope.cancel()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")


def test_the_libraries_are_small() -> None:
    vendored = [data for path, (_, data) in page_files("top").items() if path.startswith("/vendor/")]
    assert len(vendored) == 3
    assert sum(map(len, vendored)) < 17 * 1024
    assert sum(len(gzip.compress(data)) for data in vendored) < 8 * 1024
