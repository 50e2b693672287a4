"""Parsing docstrings in the Google, NumPy and Sphinx styles: a text for the model and a description per parameter."""

from __future__ import annotations

import inspect
import re
from collections.abc import Container
from typing import Final, NamedTuple

_PARAMETERS: Final = frozenset(
    {"args", "arguments", "parameters", "params", "keyword args", "keyword arguments", "other parameters"}
    | {"attributes", "inputs"}
)
_OTHERS: Final = frozenset(
    {"returns", "return", "yields", "yield", "raises", "raise", "warns", "receives", "see also", "references"}
)
# Python compiles each of these patterns at its first use: most docstrings need none of them.
_UNDERLINE: Final = r"^(-{3,}|={3,})$"
_NAME: Final = r"[`*]{0,3}\\?\*{0,2}\w+[`*]{0,3}"
# A bullet or number, names in backticks or bold, a type in brackets; then a colon or dash, and the text.
_ITEM: Final = (
    rf"^(?:[-*+•]\s+|\d+[.)]\s+)?({_NAME}(?:\s*(?:,|/|&|\band\b)\s*{_NAME})*)\s*(?:[(\[<].*?[)\]>]\s*(?=[:–—-]|$))?"
    r"(?P<mark>::?[*`]{0,3}(?:\s|$)|\s*(?:--?|–|—)\s|$)\s*(.*)$"
)
_TYPED_NAME: Final = r"^((?:[-*+•]\s+|\d+[.)]\s+)?`\w+)\s*:[^`]*(`)"  # `name: type`
_NUMPY_ITEM: Final = r"^([`*]*\w+[`*]*(?:\s*,\s*[`*]*\w+[`*]*)*)\s*(?::(.*))?$"
_TYPE: Final = r"^\s*(\S*|.*[\[\]|{}].*|.*\b(optional|default|or|of)\b.*)$"
_SPHINX_PARAMETER: Final = (
    r"^[:@](?:param|parameter|arg|argument|key|keyword|ivar|var)\s+(?:[^:]*\s)?[`*]*\*{0,2}(\w+)[`*]*\s*:\s*(.*)$"
)
_SPHINX_FIELD: Final = r"^:(?:\w+)(?:\s[^:]*)?:(?:\s|$)|^@\w+(?:\s[^:]*)?:(?:\s|$)"


class Docstring(NamedTuple):
    """The text of a docstring without the sections on parameters, results and exceptions, and its parameters.

    `parameters` are descriptions by parameter or attribute name, each on one line.
    """

    description: str
    parameters: dict[str, str]


def parse(text: str | None, names: Container[str] | None = None) -> Docstring:
    """Parse a docstring of any of the three styles. Unknown sections stay in the description.

    So does what stands in a section on parameters and names none of them.

    `names`: the parameters that there are; by default any is taken.
    """
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
                found, rest = _items(lines[start:end], names, numpy=_is_underlined(lines, at))
                parameters.update(found)
                kept += [*lines[at:start], *rest] if rest else []
            at = end
        elif line[:1] in (":", "@") and re.match(_SPHINX_FIELD, line):
            end = _end_of_block(lines, at + 1)
            described = re.match(_SPHINX_PARAMETER, line)
            if described and (names is None or described[1] in names):
                parameters[described[1]] = _one_line([described[2], *lines[at + 1 : end]])
            elif described:
                kept += lines[at:end]
            at = end
        else:
            kept.append(line)
            at += 1
    return Docstring(re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip(), parameters)


def _is_underlined(lines: list[str], at: int) -> bool:
    return at + 1 < len(lines) and re.match(_UNDERLINE, lines[at + 1].strip()) is not None


def _section_title(lines: list[str], at: int) -> tuple[str, int, int] | None:
    """Return (title, first line, end) of the section that begins at line `at`, or None if it is not a known section."""
    line = lines[at]
    if line[:1].isspace():
        return None
    title = line.strip("#*_: \t").lower()
    if title not in _PARAMETERS and title not in _OTHERS:
        return None
    if _is_underlined(lines, at):
        end = at + 2
        while end < len(lines) and not _is_underlined(lines, end):
            end += 1
        return title, at + 2, end
    if not line.rstrip("*_ \t").endswith(":") and not line.startswith("#"):
        return None
    end = _end_of_block(lines, at + 1)
    if title in _PARAMETERS and not any(line.strip() for line in lines[at + 1 : end]):
        end = _end_of_list(lines, end)
    return title, at + 1, end


def _end_of_list(lines: list[str], at: int) -> int:
    """Return the end of a list of items that is not indented, perhaps after an empty line."""
    end = at
    while at < len(lines) and not lines[at].strip():
        at += 1
    while at < len(lines) and (found := _match_item(lines[at])) and found["mark"]:
        at = end = _end_of_block(lines, at + 1)
    return end


def _end_of_block(lines: list[str], at: int) -> int:
    """Return the end of the block of indented and empty lines that begins at `at`."""
    end = at
    for number in range(at, len(lines)):
        if lines[number][:1].isspace():
            end = number + 1
        elif lines[number].strip():
            break
    return end


def _match_item(line: str) -> re.Match[str] | None:
    return re.match(_ITEM, re.sub(_TYPED_NAME, r"\1\2", line))


def _items(lines: list[str], names: Container[str] | None, *, numpy: bool) -> tuple[dict[str, str], list[str]]:
    """Return the named items of a section, and the lines that belong to none.

    Lines indented further continue the item before them.
    """
    filled = [line for line in lines if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in filled), default=0)
    items: dict[str, list[str]] = {}
    rest: list[str] = []
    current = rest
    for number, line in enumerate(filled):
        body = line[indent:]
        found = None if body[:1].isspace() else re.match(_NUMPY_ITEM, body) if numpy else _match_item(body)
        continued = number + 1 < len(filled) and filled[number + 1][indent : indent + 1].isspace()
        if found is None or not (numpy or found["mark"] or continued):
            current.append(line)
            continue
        called = [name.strip("`*\\ ") for name in re.split(r"[,/&]|\band\b", found[1])]
        if names is not None and not any(name in names for name in called):
            rest.append(line)
            current = rest
            continue
        said = found[found.re.groups] or ""
        # After the colon of NumPy stands a type, unless nothing else describes the parameter.
        current = [] if numpy and (continued or re.match(_TYPE, said)) else [said]
        items.update((name, current) for name in called)
    return {name: _one_line(text) for name, text in items.items() if any(text)}, rest


def _one_line(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())
