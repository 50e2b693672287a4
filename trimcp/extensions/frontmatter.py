"""The frontmatter of a SKILL.md: YAML 1.2 by its core schema, as JSON values. Dates and times are text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from trimcp.errors import LocalError

_MOST_BYTES: Final = 16 * 1024
_MOST_NODES: Final = 1_000
_DEEPEST: Final = 16
_FRONTMATTER: Final = re.compile(r"\A---[ \t]*\r?\n(?P<yaml>.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
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


def require_yaml() -> Any:
    """Return the library that reads YAML. Raises LocalError if it is not installed."""
    try:
        from ruamel import yaml
    except ImportError:
        raise LocalError("skills need a reader of YAML: pip install 'trimcp[skills]'") from None
    return yaml


def read_frontmatter(content: bytes) -> dict[str, Any]:
    """Return the frontmatter with which a SKILL.md begins.

    Raises ValueError: there is none, it is no mapping of JSON values, or it has an alias, a tag or too much; the text
    tells which. LocalError: the library is not installed.
    """
    try:
        text = content[: _MOST_BYTES + 16].decode("utf-8", "ignore" if len(content) > _MOST_BYTES else "strict")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    found = _FRONTMATTER.match(text)
    if found is None:
        raise ValueError(f"it does not begin with frontmatter between lines of ---, at most {_MOST_BYTES} bytes")
    yaml = require_yaml()
    try:
        value = _built(yaml.YAML(typ="safe", pure=True).parse(found["yaml"]))
    except yaml.error.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = "" if where is None else f" in line {where.line + 2}"
        raise ValueError(f"its frontmatter is not YAML{line}") from None
    if not isinstance(value, dict):
        raise ValueError("its frontmatter is no mapping")
    return value


def _built(events: Iterable[Any]) -> Any:
    """Build JSON values of the events of a parser, without recursion, and no more of them than the bounds allow."""
    top: list[Any] = []
    containers: list[Any] = [top]
    keys: list[Any] = [None]  # of each container: the key that waits for its value
    for count, event in enumerate(events):
        kind = type(event).__name__
        if count > _MOST_NODES or len(containers) > _DEEPEST:
            raise ValueError(f"its frontmatter has more than {_MOST_NODES} nodes, or {_DEEPEST} inside each other")
        if kind in ("MappingEndEvent", "SequenceEndEvent"):
            containers.pop()
            keys.pop()
            continue
        if kind == "DocumentStartEvent" and top:
            raise ValueError("its frontmatter has more than one document")
        if kind == "AliasEvent" or getattr(event, "anchor", None) is not None:
            raise ValueError("its frontmatter has an alias or an anchor, which are not read")
        if kind not in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent"):
            continue
        if getattr(event, "tag", None) is not None:
            raise ValueError("its frontmatter has a tag, which is not read")
        into = containers[-1]
        if isinstance(into, dict) and keys[-1] is None:
            if kind != "ScalarEvent" or event.value in into:
                raise ValueError("its frontmatter has a key twice, or one that is no text")
            keys[-1] = event.value
            continue
        value = _scalar(event) if kind == "ScalarEvent" else {} if kind == "MappingStartEvent" else []
        if isinstance(into, dict):
            into[keys[-1]] = value
            keys[-1] = None
        else:
            into.append(value)
        if kind != "ScalarEvent":
            containers.append(value)
            keys.append(None)
    return top[0] if top else None


def _scalar(event: Any) -> Any:
    text: str = event.value
    if not event.implicit[0]:  # in quotes, or a block
        return text
    for form, convert in _CORE:
        if form.fullmatch(text):
            value = convert(text) if len(text) < 64 else None
            if len(text) >= 64 or (type(value) is int and value.bit_length() > 63) or value in (1e999, -1e999):
                raise ValueError("its frontmatter has a number that JSON cannot carry; write it in quotes")
            return value
    if _NO_NUMBER.fullmatch(text):
        raise ValueError("its frontmatter has a number that JSON cannot carry; write it in quotes")
    return text
