"""URI templates (RFC 6570, all four levels), matched against URIs.

The RFC leaves matching open. The rules here: the time is linear in the URI; the leftmost variables take as little as
they can, so each URI has one reading; by default no value can leave the directory it is joined to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final
from urllib.parse import quote, unquote_to_bytes

import attrs

from trimcp.support.slotted import valued

Value = str | list[str]

_LONGEST_URI: Final = 8 * 1024
_MOST_VARIABLES: Final = 64
_RESERVED: Final = ":/?#[]@!$&'()*+,;="
_EXPRESSION: Final = re.compile(r"\{([^{}]*)\}")
_NAME: Final = re.compile(r"^(?:\w|%[0-9A-Fa-f]{2})(?:\.?(?:\w|%[0-9A-Fa-f]{2}))*$", re.ASCII)
_TRIPLET: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_DRIVE: Final = re.compile(r"^[A-Za-z]:")


@attrs.frozen
@valued
class _Operator:
    """A row of RFC 6570 appendix A, with the characters that end its text and whether its values may hold `/`."""

    first: str
    separator: str
    named: bool
    stops: str
    slashes: bool


_OPERATORS: Final = {
    "": _Operator("", ",", False, "/?#", False),
    "+": _Operator("", ",", False, "", True),
    "#": _Operator("#", ",", False, "", True),
    ".": _Operator(".", ".", False, "/?#", False),
    "/": _Operator("/", "/", False, "/?#", False),
    ";": _Operator(";", ";", True, "/?#", True),
    "?": _Operator("?", "&", True, "#", True),
    "&": _Operator("&", "&", True, "#", True),
}


@attrs.frozen
@valued
class _Variable:
    name: str
    explode: bool = False
    prefix: int | None = None


@attrs.frozen
@valued
class _Expression:
    operator: _Operator
    variables: tuple[_Variable, ...]

    @property
    def stops(self) -> str:
        """The characters that this part of a URI cannot contain."""
        whole_path = self.operator.first == "/" and self.variables[0].explode
        return "?#" if whole_path else self.operator.stops


Part = str | _Expression


class UriTemplate:
    """One template, such as `file:///{+path}{?lines}`.

    `text`: the template. Raises ValueError: it is not a template by RFC 6570.
    """

    __slots__ = ("_steps", "text", "variables")

    def __init__(self, text: str) -> None:
        self.text: str = text  # the template
        parts = _parse(text)
        found = [v.name for part in parts if isinstance(part, _Expression) for v in part.variables]
        if len(found) > _MOST_VARIABLES:
            raise ValueError(f"a template may have {_MOST_VARIABLES} variables, this one has {len(found)}")
        self.variables: tuple[str, ...] = tuple(dict.fromkeys(found))  # its variable names, in order, each once
        self._steps = tuple(step for part in parts for step in _steps(part))

    def __repr__(self) -> str:
        return f"UriTemplate({self.text!r})"

    def match(self, uri: str, *, guard: bool = True) -> dict[str, Value] | None:
        """Return the variables of `uri`, percent-decoded, or None if it does not match the template.

        Exploded variables (`{path*}`) give lists, all others strings. Variables with an operator that writes a first
        character (`# . / ; ? &`) may be missing; the others must not be empty. Names in `; ? &` may be in any order.
        A variable that occurs twice must have the same value both times.

        Args:
            uri: at most 8 KiB; longer ones never match.
            guard: refuse values that could leave a directory: a segment `..`, a backslash, control characters, a
                leading `/`, a drive letter, and in all but `+ # ; ? &` a slash in any encoding, doubled ones too.
        """
        if len(uri) > _LONGEST_URI:
            return None
        try:
            uri = quote(uri, safe=_RESERVED + "%~")
        except UnicodeEncodeError:  # a lone surrogate
            return None
        if _TRIPLET.search(uri) or len(uri) > 3 * _LONGEST_URI:
            return None
        texts = _read(self._steps, uri)
        if texts is None:
            return None
        found: dict[str, Value] = {}
        prefixes: list[tuple[_Variable, str]] = []
        for expression, text in texts:
            values = _split(expression, text)
            if values is None:
                return None
            for variable, value in values:
                decoded = _decode(value)
                if decoded is None or (guard and not _is_safe(decoded, slashes=expression.operator.slashes)):
                    return None
                if variable.prefix is not None and isinstance(decoded, str):
                    prefixes.append((variable, decoded))
                elif found.setdefault(variable.name, decoded) != decoded:
                    return None
        return found if _prefixes_fit(found, prefixes) else None


# --- parsing ---


def _parse(text: str) -> list[Part]:
    parts: list[Part] = []
    end = 0
    for expression in _EXPRESSION.finditer(text):
        parts += _literal(text[end : expression.start()])
        parts.append(_parse_expression(expression[1]))
        end = expression.end()
    return parts + _literal(text[end:])


def _literal(text: str) -> list[Part]:
    if "{" in text or "}" in text:
        raise ValueError(f"unbalanced braces near {text[:40]!r}")
    return [quote(text, safe=_RESERVED + "%~")] if text else []


def _parse_expression(body: str) -> _Expression:
    sign = body[:1] if body[:1] in _OPERATORS else ""
    variables = tuple(_parse_variable(each) for each in body.removeprefix(sign).split(","))
    return _Expression(_OPERATORS[sign], variables)


def _parse_variable(text: str) -> _Variable:
    name, colon, length = text.partition(":")
    explode = name.endswith("*") and not colon
    name = name.removesuffix("*") if explode else name
    if not _NAME.match(name):
        raise ValueError(f"{{{text}}} is no variable of a URI template (RFC 6570, 2.3)")
    if not colon:
        return _Variable(name, explode)
    if not re.fullmatch(r"[1-9][0-9]{0,3}", length):
        raise ValueError(f"the prefix in {{{text}}} must be a number from 1 to 9999")
    return _Variable(name, prefix=int(length))


# --- matching ---


def _steps(part: Part) -> Iterator[Part]:
    """Yield the parts to match one by one: the variables of `{/a,b}` and `{.a,b}` each begin with the operator."""
    if isinstance(part, _Expression) and part.operator.first in (".", "/"):
        yield from (_Expression(part.operator, (variable,)) for variable in part.variables)
    else:
        yield part


def _read(steps: Sequence[Part], uri: str) -> list[tuple[_Expression, str]] | None:
    """Return the text of each expression that is present, without its first character; None if the URI does not match.

    The first pass goes backwards. For each step it notes the places from which the remaining steps can reach the end,
    and where the shortest match of the step ends. The second pass follows these notes from the start. Each is linear
    in the URI.
    """
    size = len(uri)
    reach = bytearray(size + 1)
    reach[size] = 1
    stops: list[list[int]] = []
    for step in reversed(steps):
        if isinstance(step, str):
            reach, ends = _literal_ends(step, uri, reach)
        else:
            reach, ends = _expression_ends(step, uri, reach)
        stops.append(ends)
    if not reach[0]:
        return None
    texts: list[tuple[_Expression, str]] = []
    at = 0
    for step, ends in zip(steps, reversed(stops), strict=True):
        end = ends[at]
        if isinstance(step, _Expression) and end > at:
            texts.append((step, uri[at + len(step.operator.first) : end]))
        at = end
    return texts


def _literal_ends(text: str, uri: str, after: bytearray) -> tuple[bytearray, list[int]]:
    reach = bytearray(len(after))
    ends = [-1] * len(after)
    at = uri.find(text)
    while at >= 0:
        if after[at + len(text)]:
            reach[at] = 1
            ends[at] = at + len(text)
        at = uri.find(text, at + 1)
    return reach, ends


def _expression_ends(step: _Expression, uri: str, after: bytearray) -> tuple[bytearray, list[int]]:
    stops, first = step.stops, step.operator.first
    size = len(uri)
    reach = bytearray(size + 1)
    ends = [-1] * (size + 1)
    if first:  # may be missing
        reach[:] = after
        ends = [place if after[place] else -1 for place in range(size + 1)]
    nearest = size if after[size] else -1  # the first possible end at or after `place + 1`
    for place in range(size - 1, -1, -1):
        if nearest >= 0 and (uri[place] == first if first else uri[place] not in stops):
            reach[place] = 1
            ends[place] = nearest
        if after[place]:
            nearest = place
        elif uri[place] in stops:
            nearest = -1
    return reach, ends


def _split(expression: _Expression, text: str) -> list[tuple[_Variable, Value]] | None:
    """Return the text of each variable of an expression, still encoded, or None if the text does not match."""
    operator, variables = expression.operator, expression.variables
    if operator.named:
        return _split_named(operator, variables, text)
    pieces = text.split(operator.separator)
    found: list[tuple[_Variable, Value]] = []
    for number, variable in enumerate(variables):
        behind = len(variables) - number - 1
        if not pieces:
            break
        if variable.explode:
            count = max(len(pieces) - behind, 1)
            found.append((variable, pieces[:count]))
        else:
            count = 1 if behind else len(pieces)
            found.append((variable, operator.separator.join(pieces[:count])))
        pieces = pieces[count:]
    return found


def _split_named(
    operator: _Operator, variables: tuple[_Variable, ...], text: str
) -> list[tuple[_Variable, Value]] | None:
    by_name = {variable.name: variable for variable in variables}
    values: dict[str, list[str]] = {}
    for piece in text.split(operator.separator):
        name, _, value = piece.partition("=")
        if name not in by_name:
            return None
        values.setdefault(name, []).append(value)
    if any(len(each) > 1 and not by_name[name].explode for name, each in values.items()):
        return None
    return [(by_name[n], each if by_name[n].explode else each[0]) for n, each in values.items()]


def _decode(value: Value) -> Value | None:
    try:
        if isinstance(value, str):
            return unquote_to_bytes(value).decode("utf-8")
        return [unquote_to_bytes(each).decode("utf-8") for each in value]
    except UnicodeDecodeError:
        return None


def _is_safe(value: Value, *, slashes: bool) -> bool:
    if isinstance(value, list):
        return all(_is_safe(each, slashes=slashes) for each in value)
    for _ in range(4):
        if not _is_safe_text(value, slashes):
            return False
        inner = unquote_to_bytes(value).decode("utf-8", "replace")
        if inner == value:
            return True
        value = inner
    return False  # encoding four times has no honest use


def _is_safe_text(text: str, slashes: bool) -> bool:
    if "\\" in text or _CONTROL.search(text) or _DRIVE.match(text) or text.startswith("/"):
        return False
    return (slashes or "/" not in text) and ".." not in text.split("/")


def _prefixes_fit(found: dict[str, Value], prefixes: list[tuple[_Variable, str]]) -> bool:
    """Check `{var:3}` against its length and the whole value; without a whole value the prefix becomes the value."""
    for variable, text in prefixes:
        assert variable.prefix is not None
        whole = found.setdefault(variable.name, text)
        if len(text) > variable.prefix or not isinstance(whole, str) or whole[: variable.prefix] != text:
            return False
    return True
