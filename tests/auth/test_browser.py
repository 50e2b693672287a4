"""How a person comes back from the page where they logged in; whoever else finds the port gets and ends nothing.

What these tests speak to the port by hand is what a browser, a stranger's program or a page of another site would.
"""

from __future__ import annotations

import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trimcp.auth import browser as browser_module
from trimcp.auth.browser import Browser, PastedUrl
from trimcp.errors import AuthorizationError

STATE = "the-state"
PAGE = "https://auth.example/authorize?x=1"
SECONDS = 10.0


@attrs.define(eq=False)
class Waiting:
    """A login that waits for its person, and what came of it."""

    uri: str
    came: list[str] = attrs.field(factory=list)
    said: list[str] = attrs.field(factory=list)
    done: trio.Event = attrs.field(factory=trio.Event)

    @property
    def port(self) -> int:
        port = urlsplit(self.uri).port
        assert port is not None
        return port

    async def ask(self, request: str | bytes) -> str:
        """Send something to the port, and return all that is answered."""
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        async with stream:
            await stream.send_all(request if isinstance(request, bytes) else request.encode())
            answer = b""
            with trio.fail_after(SECONDS):
                try:
                    async for data in stream:
                        answer += data
                except trio.BrokenResourceError:  # it was closed with some of the request unread
                    pass
            return answer.decode()

    async def come(self, query: str) -> str:
        return await self.ask(f"GET /callback?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")


@asynccontextmanager
async def waiting(**settings: Any) -> AsyncIterator[Waiting]:
    """Wait for a person until the block ends."""
    said: list[str] = []
    agent = Browser(**{"open": lambda url: None, "notify": said.append, **settings})
    async with agent.redirect(None) as redirect, trio.open_nursery() as nursery:
        there = Waiting(redirect.uri, said=said)

        async def visit() -> None:
            there.came.append(await redirect.visit(PAGE, STATE))
            there.done.set()

        nursery.start_soon(visit)
        await wait_all_tasks_blocked()
        yield there
        nursery.cancel_scope.cancel()


def is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        except OSError:
            return False
        return True


async def test_a_person_comes_back_and_is_told_so() -> None:
    async with waiting() as there:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/callback", there.uri)
        assert there.said == [f"Log in at {PAGE}"]
        page = await there.come(f"code=a&state={STATE}&iss=i")
        await wait_all_tasks_blocked()
        assert there.came == [f"{there.uri}?code=a&state={STATE}&iss=i"]
    head, _, body = page.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")
    assert "You are logged in. You can close this window." in body
    for line in ("Cache-Control: no-store", "Referrer-Policy: no-referrer", "Content-Security-Policy: default-src"):
        assert line in head
    assert "code=a" not in page
    assert is_free(there.port)


async def test_a_refusal_is_a_page_of_its_own_and_shows_nothing_of_what_came() -> None:
    async with waiting() as there:
        page = await there.come(f"error=access_denied&error_description=<script>evil</script>&state={STATE}")
        assert "The login was refused. You can close this window." in page
        assert "evil" not in page
        await wait_all_tasks_blocked()
        assert len(there.came) == 1


STRANGERS = {
    "no state": "GET /callback?code=evil HTTP/1.1\r\n\r\n",
    "another state": "GET /callback?code=evil&state=guess HTTP/1.1\r\n\r\n",
    "the state twice": f"GET /callback?code=evil&state=guess&state={STATE} HTTP/1.1\r\n\r\n",
    "another path": f"GET /other?code=evil&state={STATE} HTTP/1.1\r\n\r\n",
    "another method": f"POST /callback?code=evil&state={STATE} HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "an icon": "GET /favicon.ico HTTP/1.1\r\n\r\n",
    "no query": "GET /callback HTTP/1.1\r\n\r\n",
    "no target": "GET\r\n\r\n",
    "nothing": "\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\xff\xfe\x00\r\n\r\n",
    "no URL": "GET http://[ HTTP/1.1\r\n\r\n",
    "a thousand fields": f"GET /callback?{'a=1&' * 1000}state={STATE} HTTP/1.1\r\n\r\n",
    "a head without end": b"GET /callback?" + b"x" * 40_000,
}


@pytest.mark.parametrize("name", STRANGERS)
async def test_a_stranger_who_comes_first_gets_nothing_and_the_person_still_comes_back(name: str) -> None:
    async with waiting() as there:
        answer = await there.ask(STRANGERS[name])
        assert not answer or answer.startswith("HTTP/1.1 404 ")
        assert STATE not in answer
        assert not there.came
        await there.come(f"code=good&state={STATE}")
        await wait_all_tasks_blocked()
        assert there.came == [f"{there.uri}?code=good&state={STATE}"]


async def test_of_two_who_come_back_the_first_counts() -> None:
    async with waiting() as there:
        streams = [await trio.open_tcp_stream("127.0.0.1", there.port) for _ in range(2)]
        await wait_all_tasks_blocked()
        for number, stream in enumerate(streams):
            await stream.send_all(f"GET /callback?code={number}&state={STATE} HTTP/1.1\r\n\r\n".encode())
        await wait_all_tasks_blocked()
        assert len(there.came) == 1
        for stream in streams:
            await stream.aclose()


async def test_an_answer_counts_even_if_its_page_cannot_be_shown() -> None:
    async with waiting() as there:
        with socket.create_connection(("127.0.0.1", there.port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(f"GET /callback?code=a&state={STATE} HTTP/1.1\r\n\r\n".encode())
        with trio.fail_after(SECONDS):
            await there.done.wait()


async def test_who_says_nothing_is_dropped_and_no_more_than_a_few_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_module, "_PATIENCE", 0.3)
    served = most = 0
    answer = browser_module._Loopback._answer

    async def counted(self: browser_module._Loopback, stream: trio.SocketStream, state: str) -> str | None:
        nonlocal served, most
        served += 1
        most = max(most, served)
        try:
            return await answer(self, stream, state)
        finally:
            served -= 1

    monkeypatch.setattr(browser_module._Loopback, "_answer", counted)
    async with waiting() as there:
        silent = [await trio.open_tcp_stream("127.0.0.1", there.port) for _ in range(40)]
        await there.come(f"code=good&state={STATE}")
        await wait_all_tasks_blocked()
        assert there.came == [f"{there.uri}?code=good&state={STATE}"]
        assert most == browser_module._MOST
        for stream in silent:
            await stream.aclose()


async def test_a_person_may_take_hours(autojump_clock: MockClock) -> None:
    async with waiting() as there:
        await trio.sleep(10_000)
        assert not there.came


async def test_giving_up_leaves_no_port_and_no_task() -> None:
    before = trio.lowlevel.current_statistics().tasks_living
    closed = []

    async def slow(url: str) -> None:
        try:
            await trio.sleep_forever()
        finally:
            closed.append(url)

    async with waiting(open=slow) as there:
        stranger = await trio.open_tcp_stream("127.0.0.1", there.port)
        await wait_all_tasks_blocked()
        assert not is_free(there.port)
    assert closed == [PAGE]
    assert is_free(there.port)
    assert trio.lowlevel.current_statistics().tasks_living == before
    assert await stranger.receive_some() == b""
    await stranger.aclose()


@pytest.mark.parametrize("checkpoints", range(12))
async def test_giving_up_at_any_moment_leaves_no_port(checkpoints: int) -> None:
    agent = Browser(open=lambda url: None, notify=lambda text: None)
    port = 0

    async def visit() -> None:
        nonlocal port
        async with agent.redirect(None) as redirect:
            port = urlsplit(redirect.uri).port or 0
            await redirect.visit(PAGE, STATE)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit)
        for _ in range(checkpoints):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert not port or is_free(port)


async def test_what_opens_the_page_may_fail_and_ends_the_login() -> None:
    def broken(url: str) -> None:
        raise OSError("no browser here")

    async with Browser(open=broken, notify=lambda text: None).redirect(None) as redirect:
        with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="no browser")):
            await redirect.visit(PAGE, STATE)


async def test_the_port_of_the_last_time_is_used_again_if_it_can_be() -> None:
    agent = Browser()
    async with agent.redirect(None) as first:
        uri = first.uri
        async with agent.redirect(uri) as second:
            assert second.uri != uri  # it is taken
    async with agent.redirect(uri) as again:
        assert again.uri == uri
    async with agent.redirect("https://elsewhere.example:1/callback") as other:
        assert "127.0.0.1" in other.uri


async def test_a_port_that_was_asked_for_and_is_taken_is_an_error() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(AuthorizationError, match="is in use"):
            async with Browser(port=sock.getsockname()[1]).redirect(None):
                pass


# Without a browser


async def test_an_address_is_pasted_and_anything_else_is_asked_for_again() -> None:
    pasted = iter(
        ["", "hello", "http://[", "http://127.0.0.1:8765/callback", "https://x.example/?code=c&state=old", f" {GOOD}\n"]
    )
    asked: list[str] = []

    async def ask(text: str) -> str:
        await trio.lowlevel.checkpoint()
        asked.append(text)
        return next(pasted)

    async with PastedUrl(ask).redirect(None) as redirect:
        assert redirect.uri == "http://127.0.0.1:8765/callback"
        assert await redirect.visit(PAGE, STATE) == GOOD
    assert PAGE in asked[0]
    assert all("no address like http://127.0.0.1:8765/callback?code=..." in text for text in asked[1:5])
    assert "of another login" in asked[5]


GOOD = f"http://127.0.0.1:8765/callback?code=c&state={STATE}"


async def test_asking_can_be_given_up() -> None:
    async def ask(text: str) -> str:
        await trio.sleep_forever()
        raise AssertionError("nobody pastes")

    with trio.move_on_after(0.01) as scope:
        async with PastedUrl(ask).redirect(None) as redirect:
            await redirect.visit(PAGE, STATE)
    assert scope.cancelled_caught
