"""YAML 1.2 by its core schema, as JSON values: bounded, without aliases and tags. Dates and times are text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from trimcp.errors import LocalError

# YAML 1.2.2, section 10.3.2. The library's own rules take more for numbers, and so do not agree with other readers.
_CORE: Final = (
    (re.compile(r"null|Null|NULL|~|"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text, 16)),
    (re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"), float),
)
_NO_NUMBER: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def require_yaml(what: str) -> Any:
    """Return the library that reads YAML. Raises LocalError if it is not installed; `what` needs it, several things."""
    try:
        from ruamel import yaml
    except ImportError:
        raise LocalError(f"{what} need a reader of YAML: pip install 'trimcp[skills]'") from None
    return yaml


def read_yaml(text: str, what: str, *, kind: str, most_nodes: int, deepest: int, first_line: int = 1) -> Any:
    """Return the JSON value of a YAML text, `what` in error messages; `kind` are several such.

    Raises ValueError: it is no YAML or no JSON value, has an alias or a tag, or is too much; the text tells which.
    LocalError: the library is not installed.
    """
    yaml = require_yaml(kind)
    try:
        return _built(yaml.YAML(typ="safe", pure=True).parse(text), what, most_nodes, deepest)
    except yaml.error.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f" in line {where.line + first_line}"
        raise ValueError(f"{what} is not YAML{line}") from None


def _built(events: Iterable[Any], what: str, most_nodes: int, deepest: int) -> Any:
    """Build JSON values of the events of a parser, without recursion, and no more of them than the bounds allow."""
    top: list[Any] = []
    containers: list[Any] = [top]
    keys: list[Any] = [None]  # of each container: the key that waits for its value
    for count, event in enumerate(events):
        kind = type(event).__name__
        if count > most_nodes or len(containers) > deepest:
            raise ValueError(f"{what} has more than {most_nodes} nodes, or {deepest} inside each other")
        if kind in ("MappingEndEvent", "SequenceEndEvent"):
            containers.pop()
            keys.pop()
            continue
        if kind == "DocumentStartEvent" and top:
            raise ValueError(f"{what} has more than one document")
        if kind == "AliasEvent" or getattr(event, "anchor", None) is not None:
            raise ValueError(f"{what} has an alias or an anchor, which are not read")
        if kind not in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent"):
            continue
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"{what} has a tag, which is not read")
        into = containers[-1]
        if isinstance(into, dict) and keys[-1] is None:
            if kind != "ScalarEvent" or event.value in into:
                raise ValueError(f"{what} has a key twice, or one that is no text")
            keys[-1] = event.value
            continue
        value = _scalar(event, what) if kind == "ScalarEvent" else {} if kind == "MappingStartEvent" else []
        if isinstance(into, dict):
            into[keys[-1]] = value
            keys[-1] = None
        else:
            into.append(value)
        if kind != "ScalarEvent":
            containers.append(value)
            keys.append(None)
    return top[0] if top else None


def _scalar(event: Any, what: str) -> Any:
    text: str = event.value
    if not event.implicit[0]:  # in quotes, or a block
        return text
    for form, convert in _CORE:
        if form.fullmatch(text):
            value = convert(text) if len(text) < 64 else None
            if len(text) >= 64 or (type(value) is int and value.bit_length() > 63) or value in (1e999, -1e999):
                raise ValueError(f"{what} has a number that JSON cannot carry; write it in quotes")
            return value
    if _NO_NUMBER.fullmatch(text):
        raise ValueError(f"{what} has a number that JSON cannot carry; write it in quotes")
    return text
