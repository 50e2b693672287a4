"""`trimcp top --web` in a real browser."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from playwright.sync_api import Page, expect
from trio.testing import wait_all_tasks_blocked

import trimcp
import trimcp.testing
from tests.browser.pages import HOSTILE, frames_in_time, picture, visit, watched
from tests.peers.chromium import serving_pages
from trimcp.cli.top.command import Sockets
from trimcp.cli.top.view import Shown, view

pytestmark = pytest.mark.needs("chromium")


def make_server(told: list[str], limits: trimcp.Limits | None = None) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("builder", version="1.0", limits=limits)

    @server.tool
    async def build(files: int = 500, *, ctx: trimcp.Context) -> str:
        for file in range(files):
            await trio.sleep(0.02)
            await ctx.report_progress(file + 1, total=files, message=f"file {file}")
        return "built"

    @server.tool
    async def stuck(*, ctx: trimcp.Context) -> str:
        try:
            await trio.sleep_forever()
        finally:
            told.append(str(ctx.cancel_detail))
        return ""

    return server


async def call(session: trimcp.ClientSession, tool: str, refusals: list[str], files: int | None = None) -> None:
    try:
        await session.call_tool(tool, {} if files is None else {"files": files})
    except trimcp.McpError as error:
        refusals.append(str(error))


async def test_progress_moves_and_a_cancel_reaches_the_handler_and_its_caller() -> None:
    told: list[str] = []
    refusals: list[str] = []
    server = make_server(told)

    def walk(page: Page) -> None:
        stats = server.statistics()
        figures = f"1 server, {stats.sessions} session, {stats.running} running, {stats.waiting} waiting, 0 refused"
        expect(page.locator("header")).to_contain_text(figures)
        bar = page.get_by_role("progressbar")
        before = bar.get_attribute("value")
        assert before is not None
        expect(bar).not_to_have_attribute("value", before)
        page.get_by_role("button", name="stuck", exact=True).click()
        expect(page.locator("pre")).to_contain_text("await trio.sleep_forever()")
        picture(page, "top")
        page.get_by_role("button", name="Cancel stuck").click()
        page.get_by_label("The reason").fill("no room")
        page.get_by_role("button", name="Cancel it").click()
        expect(page.locator(".ended")).to_contain_text("cancelled by the operator: no room")
        expect(page.get_by_role("button", name="Cancel stuck")).to_have_count(0)

    async with trimcp.testing.connected(server) as session, watched(server) as url, trio.open_nursery() as nursery:
        nursery.start_soon(call, session, "build", refusals)
        nursery.start_soon(call, session, "stuck", refusals)
        assert await visit(url, walk) == []
        assert told == ["no room"]
        assert "no room" in refusals[0]
        nursery.cancel_scope.cancel()


async def test_top_the_page_and_statistics_say_the_same_of_one_moment() -> None:
    server = make_server([], trimcp.Limits(max_running=2))
    refusals: list[str] = []
    shown: list[str] = []

    def walk(page: Page) -> None:
        expect(page.locator(".calls > li")).to_have_count(3)
        shown.append(page.locator("header").inner_text())
        shown.append(page.locator(".server").inner_text())

    async with trimcp.testing.connected(server) as session, watched(server) as url, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(call, session, "stuck", refusals)
        await wait_all_tasks_blocked()
        stats = server.statistics()  # nothing goes on from here, so it is one moment for all
        assert await visit(url, walk) == []
        async with Sockets(None).watching() as sources:
            pictures = await sources.pictures()
        assert server.statistics() == stats
        nursery.cancel_scope.cancel()
    assert (stats.sessions, stats.running, stats.waiting, stats.refused) == (1, 2, 1, 0)
    told = "1 session, 2 running, 1 waiting, 0 refused"
    lines = [line.plain for line in view(pictures, (200, 24), Shown())]
    assert f"1 server: {told}" in lines[0]
    assert f"1 server, {told}" in shown[0]
    held = f"{stats.memory.held:,} B" if stats.memory.held < 1024 else f"{stats.memory.held / 1024:.1f} KiB"
    assert f"{held} held for clients" in lines[0]
    assert f"Held for clients: {held} of 256.0 MiB" in shown[1]
    assert {name: pictures[0]["statistics"][name] for name in ("sessions", "running", "waiting", "refused")} == {
        "sessions": stats.sessions,
        "running": stats.running,
        "waiting": stats.waiting,
        "refused": stats.refused,
    }


async def test_keys_alone_select_open_cancel_close_and_drain() -> None:
    told: list[str] = []
    refusals: list[str] = []
    server = make_server(told)

    def walk(page: Page) -> None:
        calls, opened, dialog = page.locator(".calls > li"), page.locator(".opened"), page.get_by_role("dialog")
        expect(calls).to_have_count(2)
        press, type = page.keyboard.press, page.keyboard.type
        press("j")
        press("Enter")
        expect(opened).to_be_visible()
        press("Escape")
        expect(opened).to_have_count(0)
        press("/")
        type("nothing of it")
        expect(page.locator("main")).to_contain_text("Nothing that runs has this.")
        press("Control+a")
        press("Backspace")
        press("Escape")
        press("c")
        type("by hand")  # at once: nobody waits for a dialog to be drawn
        expect(page.get_by_label("The reason")).to_have_value("by hand")
        press("Enter")
        expect(dialog).to_have_count(0)
        expect(page.locator(".ended")).to_contain_text("by hand")
        expect(calls).to_have_count(1)
        press("d")  # the call that was selected has ended: this is of the first
        expect(dialog).to_contain_text("Drain builder?")
        press("Escape")
        press("x")  # at once
        type("goodbye")
        expect(dialog).to_contain_text("Close the session of")
        press("Enter")
        expect(page.get_by_role("status")).to_contain_text("The session is closed.")
        expect(calls).to_have_count(0)
        press("c")
        expect(page.get_by_role("status")).to_contain_text("There is no call.")

    async with trimcp.testing.connected(server) as session, watched(server) as url, trio.open_nursery() as nursery:
        nursery.start_soon(call, session, "stuck", refusals)
        nursery.start_soon(call, session, "stuck", refusals)
        assert await visit(url, walk) == []
    assert told == ["by hand", "goodbye"]
    assert len(refusals) == 2


async def test_what_is_said_in_a_session_is_shown_while_somebody_looks() -> None:
    server = make_server([])

    @server.tool
    async def echo(text: str, password: str) -> str:
        await trio.lowlevel.checkpoint()
        return text

    def walk(page: Page) -> None:
        lines, opened = page.locator(".wire li"), page.locator(".wire pre")
        heading = page.get_by_role("heading", name="Messages of")
        page.get_by_role("button", name="stuck", exact=True).click()
        page.locator(".opened").get_by_role("button", name="Messages").click()
        expect(heading).to_contain_text("0 events")
        trio.from_thread.run(partial(session.call_tool, "echo", {"text": "Atlas", "password": "tiger"}))
        expect(lines).to_have_count(2)
        lines.nth(1).get_by_role("button").click()
        expect(opened).to_have_text("What is in it was not asked for.")
        page.get_by_label("with what is in them").check()
        expect(heading).to_contain_text("events")
        before = heading.inner_text()
        trio.from_thread.run(partial(session.call_tool, "echo", {"text": "Atlas", "password": "tiger"}))
        expect(heading).not_to_have_text(before)
        lines.nth(1).get_by_role("button").click()
        expect(opened.first).to_contain_text('"text": "Atlas"')
        picture(page, "wire")
        assert "tiger" not in page.content()
        page.get_by_role("button", name="Look away").click()
        expect(lines).to_have_count(0)

    async with trimcp.testing.connected(server) as session, watched(server) as url, trio.open_nursery() as nursery:
        nursery.start_soon(call, session, "stuck", [])
        assert await visit(url, walk) == []
        nursery.cancel_scope.cancel()


async def test_hundreds_of_calls_are_drawn_in_time() -> None:
    server = make_server([])

    def walk(page: Page) -> None:
        calls = page.locator(".calls > li")
        expect(calls).to_have_count(100)
        expect(page.locator("main")).to_contain_text("300 calls below these")
        with frames_in_time(page):
            page.wait_for_timeout(3_000)
        page.get_by_role("button", name="Show more").click()
        expect(calls).to_have_count(200)

    async with trio.open_nursery() as nursery, trimcp.testing.connected(server) as session, watched(server) as url:
        for _ in range(400):
            nursery.start_soon(call, session, "build", [], 100_000)
        assert await visit(url, walk) == []
        nursery.cancel_scope.cancel()


async def test_what_a_client_says_is_text() -> None:
    server: trimcp.Server[None] = trimcp.Server(HOSTILE, version=HOSTILE)

    @server.tool(name="x")
    async def hold(*, ctx: trimcp.Context) -> str:
        await ctx.report_progress(1, total=2, message=HOSTILE)
        await trio.sleep_forever()
        return ""

    def walk(page: Page) -> None:
        page.get_by_role("button", name="x", exact=True).click()
        expect(page.locator("main")).to_contain_text("<script>hit()</script>")
        expect(page.locator("main")).to_contain_text("\\u202e")
        for place in ("main img", "main script", "#hit"):
            expect(page.locator(place)).to_have_count(0)

    client = trimcp.Client(HOSTILE, HOSTILE)
    async with (
        trimcp.testing.connected(server, client) as session,
        watched(server) as url,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(call, session, "x", [])
        assert await visit(url, walk) == []
        nursery.cancel_scope.cancel()


async def test_a_page_of_another_origin_learns_and_does_nothing() -> None:
    server = make_server([])

    def walk(page: Page) -> None:
        failed = """async ([url, token]) => {
            try { return (await fetch(url + "do/pictures", {method: "POST", body: "{}", headers: token ?
                {"Authorization": "Bearer " + token, "Content-Type": "application/json"} : {}})).status; }
            catch (error) { return "refused"; }
        }"""
        address, _, token = url.partition("#")
        assert page.evaluate(failed, [address, ""]) == "refused"
        assert page.evaluate(failed, [address, token]) == "refused"
        page.evaluate("url => document.body.append(Object.assign(document.createElement('iframe'), {src: url}))", url)
        page.wait_for_load_state("networkidle")
        assert all("trimcp top" not in frame.content() for frame in page.frames)

    async with watched(server) as url, serving_pages() as origin:
        assert "frame-ancestors" in str(await visit(origin, walk))


async def test_without_the_token_it_says_what_it_wants() -> None:
    def walk(page: Page) -> None:
        expect(page.get_by_role("status")).to_contain_text("the whole address that the command printed")

    async with watched(make_server([])) as url:
        assert "400" in str(await visit(url.partition("#")[0], walk))  # what the browser says of the refusal


async def test_the_token_leaves_the_address_and_a_reload_still_has_it() -> None:
    def walk(page: Page) -> None:
        expect(page.get_by_role("heading", name="builder")).to_be_visible()
        assert "#" not in page.url
        page.reload()
        expect(page.get_by_role("heading", name="builder")).to_be_visible()
        assert page.context.cookies() == []

    async with watched(make_server([])) as url:
        assert await visit(url, walk) == []
