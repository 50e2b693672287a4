"""The page of `trimcp bench --html` in a browser: on a telephone, in the dark, and printed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.bench.test_regression import a_run
from tests.browser.pages import HOSTILE
from trimcp.bench.report import Failures
from trimcp.bench.requirements import Check
from trimcp.cli.bench.html import page as as_html
from trimcp.cli.bench.table import Side

OVERFLOW = "document.documentElement.scrollWidth - innerWidth"
CUT = """[...document.querySelectorAll('svg text')].filter(text => {
  const [inner, outer] = [text.getBoundingClientRect(), text.closest('svg').getBoundingClientRect()]
  return inner.left < outer.left - 1 || inner.right > outer.right + 1
}).map(text => text.textContent)"""


def test_it_fits_on_every_screen(tmp_path: Path) -> None:
    file = tmp_path / "bench.html"
    bad = a_run(1, errors={HOSTILE: Failures(3, HOSTILE)}, server_name=HOSTILE)
    sides = [Side("now", [bad]), Side("before", [a_run(2)])]
    file.write_text(as_html(sides, f"trimcp bench {'x' * 300}", [Check("p99<50ms", False, "75 ms")]), "utf-8")
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=root)
        page = browser.new_page()
        troubles: list[str] = []
        page.on("console", lambda line: troubles.append(line.text))
        page.on("request", lambda request: troubles.append(request.url) if "bench.html" not in request.url else None)
        grounds = []
        for width, scheme, media in ((1200, "light", "screen"), (400, "dark", "screen"), (700, "dark", "print")):
            page.set_viewport_size({"width": width, "height": 800})
            page.emulate_media(color_scheme=scheme, media=media)  # type: ignore[arg-type]  # of their literals
            page.goto(file.as_uri())
            assert page.evaluate(OVERFLOW) <= 0, width
            assert page.evaluate(CUT) == [], width
            grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert grounds[0] == grounds[2] == "rgb(255, 255, 255)"
        assert grounds[1] != grounds[0]
        assert page.locator("#hit").count() == 0
        browser.close()
    assert troubles == []
