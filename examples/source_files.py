"""Files of source code for `codesearch.py`: which there are, and what is in their lines. It knows nothing of MCP.

All of it is to run in threads of Trio's, and notices there when its caller is cancelled.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import jsonschema_rs
import trio

SKIPPED = {
    "__pycache__",
    "node_modules",
    "site-packages",
    "dist-packages",
    "build",
    "dist",
    "venv",
}  # and whatever is hidden
MOST_FILES = 200_000
BLOCK = 256 * 1024
LONGEST_LINE = 2_000


def matcher(pattern: str, *, regex: bool, ignore_case: bool) -> Callable[[str], bool]:
    """Return what decides on a line."""
    if not regex:
        if ignore_case:
            wanted = pattern.casefold()
            return lambda line: wanted in line.casefold()
        return lambda line: pattern in line
    # Not `re`, which a pattern like (a+)+b can keep busy for years: this engine takes linear time for any pattern.
    options = jsonschema_rs.RegexOptions(size_limit=2_000_000)
    schema = {"pattern": f"(?i){pattern}" if ignore_case else pattern}
    try:
        return jsonschema_rs.Draft202012Validator(schema, pattern_options=options).is_valid
    except jsonschema_rs.ValidationError:
        raise ValueError(
            f"{pattern!r} is not a regular expression we can run: look-around and back-references are not supported"
        ) from None


def find_lines(file: Path, matches_line: Callable[[str], bool], most: int) -> list[tuple[int, str]] | None:
    """Return the number and text of lines that match, or None where the file is no text or cannot be read."""
    hits: list[tuple[int, str]] = []
    before = 0
    try:
        for lines in read_blocks(file):
            for number, line in enumerate(lines, before + 1):
                if matches_line(line):
                    hits.append((number, line[:LONGEST_LINE]))
                    if len(hits) == most:
                        return hits
            before += len(lines)
    except (OSError, UnicodeDecodeError):
        return None
    return hits


def count_lines(file: Path) -> tuple[int, int] | None:
    """Return how many lines a file has and how many of them are blank, or None as above."""
    lines = blank = 0
    try:
        for block in read_blocks(file):
            lines += len(block)
            blank += sum(not line or line.isspace() for line in block)
    except (OSError, UnicodeDecodeError):
        return None
    return lines, blank


def read_blocks(file: Path) -> Iterator[list[str]]:
    """Yield a text file's lines, a block at a time, so that neither memory nor the time to cancel depends on its size.

    A line longer than a block comes in pieces.
    """
    with file.open(encoding="utf-8") as text:
        while block := text.read(BLOCK):
            trio.from_thread.check_cancelled()
            if "\0" in block:
                raise UnicodeDecodeError("utf-8", b"", 0, 1, "it is binary")
            lines = (block + text.readline(BLOCK)).split("\n")
            if not lines[-1]:
                lines.pop()
            yield lines


def list_files(places: list[Path], glob: str) -> list[Path]:
    """Return the files at or below some places in a stable order, without hidden ones, build products and links."""
    files = [place for place in places if place.is_file()]
    for place in places:
        for folder, folders, names in os.walk(place):
            trio.from_thread.check_cancelled()
            folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.startswith("."))
            for name in sorted(names):
                file = Path(folder, name)
                fits = fnmatch(name, glob) or fnmatch(file.relative_to(place).as_posix(), glob)
                if fits and not name.startswith(".") and os.path.isfile(file) and not os.path.islink(file):
                    files.append(file)
            if len(files) > MOST_FILES:
                raise ValueError(f"more than {MOST_FILES} files; name a smaller directory")
    return list(dict.fromkeys(files))
