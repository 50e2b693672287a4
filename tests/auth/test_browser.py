"""A person's way back from the browser: who comes first to the port that waits for them, and what they are told."""

from __future__ import annotations

from contextlib import AsyncExitStack

import httpx2
import pytest
import trio

from trimcp.auth import AuthorizationError, Browser, PastedUrl

PAGE = "https://auth.example/authorize"
STRANGERS = [
    ("GET", "/callback?state=wrong&code=stolen"),
    ("GET", "/callback?code=stolen"),
    ("GET", "/callback?"),
    ("GET", "/callback?state=right&state=wrong&code=stolen"),
    ("GET", "/favicon.ico"),
    ("POST", "/callback?state=right&code=stolen"),
]


async def test_whoever_comes_with_another_state_is_sent_away_and_the_person_is_waited_for() -> None:
    said: list[str] = []
    seen: list[httpx2.Response] = []

    async def person(url: str) -> None:
        async with httpx2.AsyncClient() as web:
            for method, target in STRANGERS:
                seen.append(await web.request(method, origin + target))
            good = await web.get(f"{origin}/callback?state=right&code=ours")
            assert "You are logged in. You can close this window." in good.text

    async with Browser(open=person, notify=said.append).redirect(None) as redirect:
        origin = redirect.uri.removesuffix("/callback")
        with trio.fail_after(10):
            assert await redirect.visit(PAGE, "right") == f"{redirect.uri}?state=right&code=ours"
    assert [reply.status_code for reply in seen] == [404] * len(STRANGERS)
    assert said == [f"Log in at {PAGE}"]


async def test_who_says_nothing_keeps_nobody_waiting() -> None:
    async def person(url: str) -> None:
        port = int(redirect.uri.rpartition(":")[2].partition("/")[0])
        async with AsyncExitStack() as stack:
            for _ in range(8):
                await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port))
            async with httpx2.AsyncClient() as web:
                await web.get(f"{redirect.uri}?state=right&error=access_denied")

    async with Browser(open=person, notify=lambda line: None).redirect(None) as redirect:
        with trio.fail_after(10):
            assert (await redirect.visit(PAGE, "right")).endswith("?state=right&error=access_denied")


async def test_the_port_is_closed_when_the_login_ends() -> None:
    with trio.move_on_after(0.1):
        async with Browser(open=lambda url: None, notify=lambda line: None).redirect(None) as redirect:
            await redirect.visit(PAGE, "right")
    with pytest.raises(httpx2.ConnectError):
        async with httpx2.AsyncClient() as web:
            await web.get(redirect.uri)


async def test_the_port_of_the_last_time_is_used_again_if_it_is_free() -> None:
    browser = Browser(open=lambda url: None)
    async with browser.redirect(None) as first, browser.redirect(first.uri) as second:
        assert second.uri != first.uri
    async with browser.redirect(first.uri) as again:
        assert again.uri == first.uri
        port = int(again.uri.rpartition(":")[2].partition("/")[0])
        with pytest.raises(AuthorizationError, match=f"port {port} is taken"):
            async with Browser(port=port).redirect(None):
                pass


async def test_what_is_pasted_is_asked_for_until_it_is_an_address() -> None:
    asked: list[str] = []
    answers = iter(["", "hello", "http://127.0.0.1:8765/callback?code=1&state=2\n"])

    async def ask(text: str) -> str:
        asked.append(text)
        return next(answers)

    async with PastedUrl(ask).redirect(None) as redirect:
        assert await redirect.visit(PAGE, "2") == "http://127.0.0.1:8765/callback?code=1&state=2"
    assert PAGE in asked[0]
    assert all("That was no address" in text for text in asked[1:])
