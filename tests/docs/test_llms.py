"""`llms.txt`: every page of the navigation, with its title and a sentence."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from tests.pages import ROOT

HOOK = runpy.run_path(str(ROOT / "docs" / "llms.py"))


def nav() -> list[Any]:
    """The navigation of mkdocs.yml: of its YAML it has strings, lists and names alone."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    top: list[Any] = []
    levels: list[tuple[int, list[Any]]] = [(2, top)]
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        while levels[-1][0] > indent:
            levels.pop()
        entry = line.strip().removeprefix("- ")
        if entry.endswith(":"):
            inside: list[Any] = []
            levels[-1][1].append({entry[:-1]: inside})
            levels.append((indent + 4, inside))
        else:
            title, colon, page = entry.partition(": ")
            levels[-1][1].append({title: page} if colon else entry)
    return top


def test_every_page_is_there_with_a_title_and_a_sentence() -> None:
    text = HOOK["llms_text"](nav(), ROOT / "docs", "trimcp", "The Model Context Protocol for Trio")
    assert text.startswith("# trimcp\n\n> The Model Context Protocol for Trio.\n\n## Start\n\n- [trimcp](index.md): ")
    links = re.findall(r"^- \[(.+)\]\((.+?\.md)\)(.*)$", text, re.MULTILINE)
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert [page for _, page, _ in links] == list(dict.fromkeys(page for _, page, _ in links))
    assert {page for _, page, _ in links} == pages
    assert [page for title, page, _ in links if title == page] == []
    assert [page for _, page, said in links if said and not re.fullmatch(r": .{10,400}", said)] == []
    assert len([1 for _, _, said in links if said]) > 0.8 * len(links)


def test_there_are_at_most_seven_entries_at_the_top() -> None:
    assert len(nav()) <= 7


def test_the_hook_writes_it_beside_the_pages(tmp_path: Path) -> None:
    docs, site = tmp_path / "docs", tmp_path / "site"
    (docs / "howto").mkdir(parents=True)
    site.mkdir()
    (docs / "index.md").write_text("# One\n\nA [first](x.md) sentence. Another.\n")
    (docs / "howto" / "two.md").write_text("# Two\n\n```python\n```\n")
    HOOK["on_post_build"](
        {
            "docs_dir": str(docs),
            "site_dir": str(site),
            "site_name": "s",
            "site_description": "d",
            "nav": ["index.md", {"How": [{"In": ["howto/two.md"]}]}],
        }
    )
    wanted = "# s\n\n> d.\n\n## Start\n\n- [One](index.md): A first sentence.\n\n## How\n\n- [Two](howto/two.md)\n"
    assert (site / "llms.txt").read_text() == wanted
    assert (site / "howto" / "two.md").read_text() == (docs / "howto" / "two.md").read_text()
