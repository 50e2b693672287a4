"""Parsing docstrings in the Google, NumPy and Sphinx styles: a text for the model and a description per parameter."""

from __future__ import annotations

import inspect
import re
from typing import Final, NamedTuple

_PARAMETERS: Final = frozenset(
    {"args", "arguments", "parameters", "params", "keyword args", "keyword arguments", "other parameters"}
    | {"attributes"}
)
_OTHERS: Final = frozenset(
    {"returns", "return", "yields", "yield", "raises", "raise", "warns", "receives", "see also", "references"}
)
# Python compiles each of these patterns at its first use: most docstrings need none of them.
_UNDERLINE: Final = r"^(-{3,}|={3,})$"
_GOOGLE_ITEM: Final = r"^\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)$"
_NUMPY_ITEM: Final = r"^(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$"
_SPHINX_PARAMETER: Final = (
    r"^:(?:param|parameter|arg|argument|key|keyword|ivar|var)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:\s*(.*)$"
)
_SPHINX_FIELD: Final = r"^:(?:\w+)(?:\s[^:]*)?:(?:\s|$)"


class Docstring(NamedTuple):
    """The text of a docstring without the sections on parameters, results and exceptions, and its parameters.

    `parameters` are descriptions by parameter or attribute name, each on one line.
    """

    description: str
    parameters: dict[str, str]


def parse(text: str | None) -> Docstring:
    """Parse a docstring of any of the three styles. Unknown sections stay in the description."""
    lines = inspect.cleandoc(text or "").splitlines()
    kept: list[str] = []
    parameters: dict[str, str] = {}
    at = 0
    while at < len(lines):
        line = lines[at]
        section = _section_title(lines, at)
        if section is not None:
            title, start, end = section
            if title in _PARAMETERS:
                parameters.update(_items(lines[start:end], numpy=start == at + 2))
            at = end
        elif line.startswith(":") and re.match(_SPHINX_FIELD, line):
            end = _end_of_block(lines, at + 1)
            if found := re.match(_SPHINX_PARAMETER, line):
                parameters[found[1]] = _one_line([found[2], *lines[at + 1 : end]])
            at = end
        else:
            kept.append(line)
            at += 1
    return Docstring(re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip(), parameters)


def _section_title(lines: list[str], at: int) -> tuple[str, int, int] | None:
    """Return (title, first line, end) of the section that begins at line `at`, or None if it is not a known section."""
    line = lines[at]
    if line[:1].isspace():
        return None
    title = line.strip().rstrip(":").lower()
    if title not in _PARAMETERS and title not in _OTHERS:
        return None
    if at + 1 < len(lines) and re.match(_UNDERLINE, lines[at + 1].strip()):
        end = at + 2
        while end < len(lines) and not (end + 1 < len(lines) and re.match(_UNDERLINE, lines[end + 1].strip())):
            end += 1
        return title, at + 2, end
    if line.rstrip().endswith(":"):
        return title, at + 1, _end_of_block(lines, at + 1)
    return None


def _end_of_block(lines: list[str], at: int) -> int:
    """Return the end of the block of indented and empty lines that begins at `at`."""
    end = at
    for number in range(at, len(lines)):
        if lines[number][:1].isspace():
            end = number + 1
        elif lines[number].strip():
            break
    return end


def _items(lines: list[str], *, numpy: bool) -> dict[str, str]:
    """Return the named items of a section; lines indented further continue the item before them."""
    filled = [line for line in lines if line.strip()]
    if not filled:
        return {}
    indent = min(len(line) - len(line.lstrip()) for line in filled)
    pattern = _NUMPY_ITEM if numpy else _GOOGLE_ITEM
    items: dict[str, list[str]] = {}
    current: list[str] = []
    for line in filled:
        body = line[indent:]
        found = None if body[:1].isspace() else re.match(pattern, body)
        if found is None:
            current.append(body)
            continue
        current = [] if numpy else [found[2]]
        for name in found[1].split(","):
            items[name.strip().lstrip("*")] = current
    return {name: _one_line(text) for name, text in items.items() if any(text)}


def _one_line(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())
