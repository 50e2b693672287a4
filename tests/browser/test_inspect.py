"""`trimcp inspect --web` in a real browser."""

from __future__ import annotations

from enum import Enum
from typing import Any

import attrs
import pytest
import trio
from playwright.sync_api import Page, expect

import trimcp
from tests.browser.pages import HOSTILE, Answers, frames_in_time, inspected, picture, visit

pytestmark = pytest.mark.needs("chromium")


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


@attrs.define
class Frame:
    width: int
    colour: str = "red"


def make_server(told: list[str]) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("press", version="1.0")

    @server.tool
    async def render(
        title: str,
        frame: Frame,
        size: Size = Size.SMALL,
        copies: int = 2,
        tags: list[str] | None = None,
        *,
        loud: bool = False,
        ctx: trimcp.Context,
    ) -> str:
        """Render a page, tile by tile."""
        for tile in range(10 * copies):
            await ctx.report_progress(tile + 1, total=10 * copies, message=f"tile {tile}")
        return f"{title}, {frame.width} {frame.colour}, {size.value}, {copies}, {tags}, {loud}"

    @server.tool
    async def hold(*, ctx: trimcp.Context) -> str:
        """Wait until it is cancelled."""
        await ctx.report_progress(1, total=4, message="waiting")
        try:
            await trio.sleep_forever()
        finally:
            told.append(str(ctx.cancel_detail))
        return ""

    @server.tool
    async def sign(*, ctx: trimcp.Context) -> str:
        """Ask who signs."""
        answer = await ctx.elicit("Who signs this?", Answers)
        return answer.action if answer.value is None else f"signed by {answer.value.name}, {answer.value.copies} times"

    @server.tool
    async def flood(messages: int = 10_000, *, ctx: trimcp.Context) -> str:
        """Report much."""
        for number in range(messages):
            await ctx.report_progress(number + 1, total=messages, message=f"step {number}")
            await trio.lowlevel.checkpoint()
        return "told all"

    return server


def choose(page: Page, tool: str) -> None:
    page.get_by_role("button", name=tool, exact=True).click()


def submit(page: Page) -> None:
    page.get_by_role("button", name="Call", exact=True).click()


async def test_a_form_makes_a_call_which_is_repeated_and_written_down() -> None:
    def walk(page: Page) -> None:
        choose(page, "render")
        page.locator("[name=title]").fill("Atlas")
        page.locator("[name=width]").fill("3")
        page.locator("[name=size]").select_option("large")
        page.get_by_role("button", name="Add one").click()
        page.locator("[name='1']").fill("maps")
        page.locator("[name=loud]").select_option("yes")
        submit(page)
        result = page.locator("pre.result")
        expect(result).to_have_text("Atlas, 3 red, large, 2, ['maps'], True")
        picture(page, "inspect")
        page.get_by_role("button", name="Repeat").click()
        expect(result).to_have_count(2)
        page.get_by_role("button", name="As programs").first.click()
        expect(page.locator("pre.program")).to_have_count(4)
        expect(page.locator("pre.program").nth(1)).to_contain_text("curl --silent")
        page.get_by_role("button", name="tools/call").last.click()
        expect(page.locator(".wire pre")).to_contain_text('"title": "Atlas"')

    async with inspected(make_server([])) as url:
        assert await visit(url, walk) == []


async def test_raw_json_and_what_a_form_refuses() -> None:
    def walk(page: Page) -> None:
        choose(page, "render")
        submit(page)  # the width is missing: the browser says so, and nothing is called
        expect(page.locator(".calls > li")).to_have_count(0)
        page.get_by_role("button", name="As JSON").click()
        page.locator("[name=raw]").fill('{"title": "Ü", "frame": {"width": 9007199254740993}}')
        submit(page)
        expect(page.locator("pre.result")).to_contain_text("Ü, 9007199254740993 red, small, 2, None, False")
        page.locator("[name=raw]").fill("[]")
        submit(page)
        expect(page.locator(".calls > li")).to_have_count(1)

    async with inspected(make_server([])) as url:
        assert await visit(url, walk) == []


async def test_progress_is_seen_and_a_cancel_reaches_the_handler_with_its_reason() -> None:
    told: list[str] = []

    def walk(page: Page) -> None:
        choose(page, "hold")
        submit(page)
        expect(page.get_by_role("progressbar")).to_have_attribute("value", "0.25")
        page.get_by_label("Reason to cancel").fill("changed my mind")
        page.get_by_role("button", name="Cancel", exact=True).click()
        expect(page.locator(".calls")).to_contain_text("cancelled after")

    async with inspected(make_server(told), "websocket") as url:
        assert await visit(url, walk) == []
        while not told:
            await trio.testing.wait_all_tasks_blocked(0.01)
    assert told == ["changed my mind"]


async def test_a_question_comes_as_a_dialog_and_is_answered_or_not() -> None:
    def walk(page: Page) -> None:
        choose(page, "sign")
        submit(page)
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Who signs this?")
        expect(dialog.locator("[name=copies]")).to_have_value("2")
        dialog.locator("[name=name]").fill("Ada")
        dialog.get_by_role("button", name="Answer").click()
        expect(page.locator("pre.result").first).to_have_text("signed by Ada, 2 times")
        for leave, answer in (("Decline", "decline"), ("Escape", "cancel")):
            submit(page)
            expect(dialog).to_be_visible()
            if leave == "Escape":
                page.keyboard.press("Escape")
            else:
                dialog.get_by_role("button", name=leave).click()
            expect(page.locator("pre.result").first).to_have_text(answer)

    async with inspected(make_server([])) as url:
        assert await visit(url, walk) == []


async def test_ten_thousand_messages_are_drawn_in_time_and_take_bounded_memory() -> None:
    def walk(page: Page) -> None:
        measures = page.context.new_cdp_session(page)

        def used() -> tuple[float, float]:
            expect(page.locator(".wire li").first).to_contain_text("answer")  # the last message is drawn
            expect(page.locator(".wire li")).to_have_count(100)
            for name in ("Hold", "Go on"):  # what was drawn before the last message is held by nothing any more
                page.get_by_role("button", name=name, exact=True).click()
            measures.send("HeapProfiler.collectGarbage")
            found: list[dict[str, Any]] = measures.send("Performance.getMetrics")["metrics"]
            values = {each["name"]: each["value"] for each in found}
            return values["JSHeapUsedSize"], values["Nodes"]

        measures.send("Performance.enable")
        choose(page, "flood")
        page.locator("[name=messages]").fill("2000")
        submit(page)
        expect(page.locator("pre.result")).to_have_count(1)
        before = used()
        page.locator("[name=messages]").fill("10000")
        with frames_in_time(page):
            submit(page)
            expect(page.locator("pre.result")).to_have_count(2)
        after = used()
        assert after[0] < 1.25 * before[0]
        assert after[1] < before[1] + 100  # of the second call in the list, and of no row that is gone

    async with inspected(make_server([])) as url:
        assert await visit(url, walk) == []


async def test_a_hostile_server_is_shown_as_text() -> None:
    server: trimcp.Server[None] = trimcp.Server(HOSTILE, version=HOSTILE, instructions=HOSTILE)

    @server.tool(name="attack", title=HOSTILE, description=HOSTILE)
    async def attack(*, ctx: trimcp.Context) -> str:
        await ctx.report_progress(1, total=2, message=HOSTILE)
        await ctx.elicit(HOSTILE, Answers)
        return HOSTILE

    def walk(page: Page) -> None:
        expect(page.locator("pre")).to_contain_text("<script>hit()</script>")
        choose(page, "attack")
        expect(page.locator("form")).to_contain_text("<script>hit()</script>")
        submit(page)
        expect(page.locator(".asked")).to_contain_text("<script>hit()</script>")
        expect(page.locator(".progress")).to_contain_text("<script>hit()")
        page.get_by_role("button", name="Decline").click()
        expect(page.locator("pre.result")).to_contain_text("<script>hit()</script>")
        page.get_by_role("button", name="tools/call").last.click()
        page.get_by_role("button", name="As programs").click()
        expect(page.locator("pre.program").first).to_be_visible()
        for place in ("#page img", "#page script", "#hit"):
            expect(page.locator(place)).to_have_count(0)
        policy = (
            "() => { try { document.body.innerHTML = '<b>'; return 'taken'; } catch (error) { return error.name; } }"
        )
        assert page.evaluate(policy) == "TypeError"  # trusted types: no text becomes markup

    async with inspected(server) as url:
        (trouble,) = await visit(url, walk)
    assert "TrustedHTML" in trouble  # of the last step alone
