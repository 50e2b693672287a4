"""Reads the fenced blocks of the documentation: `test_docs` runs them, `check_snippets` gives them to type checkers.

How a page is read, top to bottom:

- ```` ```python ```` blocks of a page are one program, each continuing the one above. A block with `await` outside a
  function runs in Trio, in virtual time, as if it stood in an async function.
- `<!-- new program -->` above a block begins again with nothing.
- A block with `title="NAME"` is a file, written and no more; Python files must be imported or run further down.
- `<!-- output -->` above a block: this is what the Python block before it prints; `...` stands for anything.
- `<!-- run -->` above a ```` ```console ```` block: its `$ ` lines are run, and print the lines below each.
  With `<!-- run, with other figures -->` numbers and their units may be others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TITLE = re.compile(r'title="([^"]+)"')
SPEECH = re.compile(r"<!-- (new program|output|run(?:, with other figures)?) -->")


@attrs.frozen
class Block:
    """One fenced block: where its text begins, what it is, and what the comment above it says."""

    page: Path
    line: int
    language: str
    title: str | None
    speech: str | None
    text: str

    @property
    def is_run(self) -> bool:
        """Whether its `$ ` lines are run."""
        return self.speech is not None and self.speech.startswith("run")


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield a page's fenced blocks. One that is indented would go unseen, so it is refused."""
    fence: re.Match[str] | None = None
    start, speech = 0, None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if fence is not None:
            if line.strip() == fence[1]:
                title = TITLE.search(fence[3])
                text = "\n".join(lines[start : number - 1]) + "\n"
                yield Block(page, start + 1, fence[2], title and title[1], speech, text)
                fence, speech = None, None
            continue
        fence = re.fullmatch(r"(`{3,})(\w*)(.*)", line)
        if fence is not None:
            start = number
        elif line.strip():
            assert not line.lstrip().startswith("```"), f"{page.name}:{number}: a fence must not be indented"
            found = SPEECH.fullmatch(line)
            speech = found[1] if found else None
