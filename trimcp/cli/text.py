"""Text of other people made fit for a terminal, and results and messages as text. It prints nothing itself."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

from trimcp.wire.content import (
    AudioContent,
    BlobResourceContents,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceContents,
    ResourceLink,
    TextContent,
)

__all__ = ["as_json", "clean", "describe_content", "describe_resource", "one_line"]

# Control characters could move the cursor, rewrite what stands above or paste into the shell; format characters
# (bidirectional overrides among them) could show another text than there is; line separators could fake lines.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


def clean(text: str) -> str:
    """Return text with everything a terminal might obey made visible; lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(character) for character in text.replace("\r\n", "\n"))


def _visible(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


def one_line(text: str, width: int = 200) -> str:
    """Return text as one harmless line of at most `width` characters."""
    line = " ".join(clean(text[: 4 * width]).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def as_json(value: Any) -> str:
    """Return a JSON value for people and programs; ASCII only, so that no terminal obeys it."""
    return json.dumps(value, indent=2)


def describe_content(blocks: Iterable[ContentBlock]) -> Iterator[str]:
    """Yield content as text, one piece for each block."""
    for block in blocks:
        match block:
            case TextContent():
                yield clean(block.text)
            case ImageContent() | AudioContent():
                yield f"[{block.type}, {one_line(block.mime_type)}, {_size(block.data)}]"
            case ResourceLink():
                yield f"[resource {one_line(block.uri)}: {one_line(block.name)}]"
            case EmbeddedResource():
                yield describe_resource(block.resource)


def describe_resource(contents: ResourceContents) -> str:
    """Return what a resource holds as text."""
    if isinstance(contents, BlobResourceContents):
        kind = one_line(contents.mime_type) if contents.mime_type else "binary"
        return f"[{one_line(contents.uri)}: {kind}, {_size(contents.blob)}]"
    return clean(contents.text)


def _size(base64_text: str) -> str:
    return f"{len(base64_text.rstrip('=')) * 3 // 4:,} bytes"
