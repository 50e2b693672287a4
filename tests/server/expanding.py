"""RFC 6570's expansion of URI templates, for tests of what reads URIs back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

RESERVED = ":/?#[]@!$&'()*+,;="
OPERATORS = {"": ("", ","), "+": ("", ","), "#": ("#", ",")} | {sign: (sign, sign) for sign in "./;"}
OPERATORS |= {"?": ("?", "&"), "&": ("&", "&")}


def expand(template: str, values: Mapping[str, Any]) -> str:
    """Return the URI for these texts, lists and mappings (3.2.1); None and missing ones are undefined."""
    pieces = re.split(r"\{([^{}]*)\}", template)
    pieces[1::2] = [_expression(body, values) for body in pieces[1::2]]
    pieces[::2] = [quote(literal, safe=RESERVED + "%~") for literal in pieces[::2]]
    return "".join(pieces)


def _expression(body: str, values: Mapping[str, Any]) -> str:
    sign = body[0] if body[0] in OPERATORS else ""
    first, separator = OPERATORS[sign]
    texts = [_variable(sign, separator, each, values) for each in body.removeprefix(sign).split(",")]
    found = [text for text in texts if text is not None]
    return first + separator.join(found) if found else ""


def _variable(sign: str, separator: str, text: str, values: Mapping[str, Any]) -> str | None:
    name, _, prefix = text.removesuffix("*").partition(":")
    explode, value = text.endswith("*"), values.get(name)

    def encode(each: str) -> str:
        if sign not in ("+", "#"):
            return quote(each, safe="~")
        return re.sub("%25(?=[0-9A-Fa-f]{2})", "%", quote(each, safe=RESERVED + "~"))

    def named(item: str) -> str:
        if sign not in (";", "?", "&"):
            return item
        return f"{name}={item}" if item or sign != ";" else name

    if value is None or value == [] or value == {}:
        return None
    if isinstance(value, Mapping):
        pairs = [(encode(key), encode(each)) for key, each in value.items()]
        if explode:
            return separator.join(f"{key}={each}" for key, each in pairs)
        return named(",".join(item for pair in pairs for item in pair))
    if isinstance(value, list):
        items = [encode(each) for each in value]
        return separator.join(map(named, items)) if explode else named(",".join(items))
    return named(encode(value[: int(prefix)] if prefix else value))
