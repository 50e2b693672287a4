"""Writes `llms.txt` beside the built documentation, and each page as Markdown, for programs that read (an mkdocs hook).

The form is that of https://llmstxt.org: a title, a summary, and under each heading of the navigation links with one
sentence each.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_SENTENCE = re.compile(r"(.+?[.:])(?:\s|$)", re.DOTALL)


def on_post_build(config: Any, **_: Any) -> None:
    """Write the files; mkdocs calls this once everything is built."""
    source, site = Path(config["docs_dir"]), Path(config["site_dir"])
    (site / "llms.txt").write_text(
        llms_text(config["nav"], source, config["site_name"], config["site_description"]), "utf-8"
    )
    for page in source.rglob("*.md"):
        target = site / page.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(page, target)


def llms_text(nav: list[Any], docs: Path, name: str, about: str) -> str:
    """Return the text of `llms.txt`."""
    lines = [f"# {name}", "", f"> {about}.", ""]
    for entry in nav:
        title, inside = ("Start", entry) if isinstance(entry, str) else next(iter(entry.items()))
        lines += [f"## {title}", "", *(_link(docs / page, page) for page in _pages(inside)), ""]
    return "\n".join(lines)


def _pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
        return
    for each in entry.values() if isinstance(entry, dict) else entry:
        yield from _pages(each)


def _link(file: Path, page: str) -> str:
    """Return the link to a page, with its title and its first sentence."""
    text = file.read_text("utf-8")
    title = _TITLE.search(text)
    rest = text[title.end() :] if title else text
    prose = next((part for part in rest.split("\n\n") if re.match(r"[A-Za-z`\[*]", part.strip())), "")
    plain = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", " ".join(prose.split()))
    sentence = _SENTENCE.match(plain)
    said = f": {sentence[1].rstrip(':')}" if sentence else ""
    return f"- [{title[1] if title else page}]({page}){said}"
