"""Results and messages as text for a terminal, with text from peers escaped. Does not print."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from trimcp.errors import McpError, RemoteError
from trimcp.support.cleaning import clean, one_line
from trimcp.wire import content


def theirs(text: object, width: int | None = 200) -> str:
    """Return what anybody else said (a peer, an authorization server, a file) so that it can stand in what we say.

    Nothing in it controls a terminal, and it cannot imitate lines of ours.

    `width`: it becomes one line of at most so many characters. None: all of it, its further lines marked.
    """
    if width is not None:
        return one_line(str(text), width)
    return clean(str(text)).rstrip("\n").replace("\n", "\n  | ")


def told(error: McpError) -> str:
    """Return an error of a request with the request's method."""
    return f"{error.method}: {error}" if isinstance(error, RemoteError) and error.method else str(error)


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


Line: TypeAlias = tuple[str, str]
"""A line of escaped text, and its style."""

_LARGEST = 1e15  # what a person may still read digit by digit


def number_text(value: float) -> str:
    """Return a number as people write it: 958,464 and 0.25, not 958464.0 or 1e+06."""
    if abs(value) > _LARGEST:
        return f"{value:g}"
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def range_text(least: str | None, most: str | None) -> str:
    """Return a range as text, "" if it has no limits."""
    if least is not None and most is not None:
        return f"from {least} to {most}"
    if least is not None:
        return f"at least {least}"
    return "" if most is None else f"at most {most}"


def as_json(value: Any) -> str:
    """Return a JSON value for people and programs; ASCII only, so that no terminal obeys it."""
    return json.dumps(value, indent=2)


def describe_content(blocks: Iterable[content.ContentBlock]) -> Iterator[str]:
    """Yield content as text, one piece for each block."""
    for block in blocks:
        match block:
            case content.TextContent():
                yield clean(block.text)
            case content.ImageContent() | content.AudioContent():
                yield f"[{block.type}, {theirs(block.mime_type)}, {_size(block.data)}]"
            case content.ResourceLink():
                yield f"[resource {theirs(block.uri)}: {theirs(block.name)}]"
            case content.EmbeddedResource():
                yield describe_resource(block.resource)


def describe_resource(contents: content.ResourceContents) -> str:
    """Return what a resource holds as text."""
    if isinstance(contents, content.BlobResourceContents):
        kind = theirs(contents.mime_type) if contents.mime_type else "binary"
        return f"[{theirs(contents.uri)}: {kind}, {_size(contents.blob)}]"
    return clean(contents.text)


def _size(base64_text: str) -> str:
    return f"{len(base64_text.rstrip('=')) * 3 // 4:,} bytes"
