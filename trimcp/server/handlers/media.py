"""Images and audio for results, from bytes or files, and the conversion of return values to content blocks."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, get_args

import attrs
import orjson

from trimcp.schema.convert import ConversionError, to_json
from trimcp.schema.signature import shows_itself
from trimcp.support.slotted import valued
from trimcp.wire.content import AudioContent, ContentBlock, ImageContent, TextContent
from trimcp.wire.input_requests import InputRequiredResult
from trimcp.wire.jsonrpc import JSON, Unencodable
from trimcp.wire.prompts import GetPromptResult
from trimcp.wire.resources import ReadResourceResult
from trimcp.wire.tools import CallToolResult

_RESULTS = (CallToolResult, GetPromptResult, ReadResourceResult, InputRequiredResult)
_BLOCKS: tuple[type[Any], ...] = get_args(ContentBlock)


@attrs.frozen
@valued
class Image:
    """An image to return from a tool or prompt.

    Args:
        data: its bytes, or the path of a file to read when it is sent.
        mime_type: such as "image/png"; by default guessed from the file's name.
    """

    data: bytes | str | Path
    mime_type: str | None = None

    def content(self) -> ImageContent:
        """Return a content block. Raises OSError if the file cannot be read, ValueError if the MIME type is unknown."""
        return ImageContent(*_encoded(self.data, self.mime_type))


@attrs.frozen
@valued
class Audio:
    """Audio to return from a tool or prompt; arguments as for `Image`."""

    data: bytes | str | Path
    mime_type: str | None = None

    def content(self) -> AudioContent:
        """Return a content block. Raises as `Image.content` does."""
        return AudioContent(*_encoded(self.data, self.mime_type))


def _encoded(data: bytes | str | Path, mime_type: str | None) -> tuple[str, str]:
    if isinstance(data, bytes):
        if mime_type is None:
            raise ValueError("bytes need a mime_type, such as 'image/png'")
        return base64.b64encode(data).decode("ascii"), mime_type
    if not mime_type:
        import mimetypes  # rarely needed, and it builds a table

        mime_type = mimetypes.guess_type(str(data))[0]
    if mime_type is None:
        raise ValueError(f"no mime_type can be guessed from the name {Path(data).name!r}; give one")
    return base64.b64encode(Path(data).read_bytes()).decode("ascii"), mime_type


def is_content(hint: Any) -> bool:
    """Return whether a return type is content, so that its results are not structured."""
    return isinstance(hint, type) and issubclass(hint, (*_BLOCKS, *_RESULTS, Image, Audio))


def holds_content(value: Any) -> bool:
    """Return whether a value is a list with content among its members, so that it is sent as content."""
    return isinstance(value, list | tuple) and any(isinstance(item, (*_BLOCKS, Image, Audio)) for item in value)


def json_text(value: JSON) -> str:
    """Return a JSON value as indented text, which models read best. Raises `Unencodable` for what JSON cannot carry."""
    try:
        return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
    except TypeError as error:
        raise Unencodable(f"JSON cannot carry this value: {error}") from None


def as_content(value: Any) -> list[ContentBlock]:
    """Convert a handler's return value to content blocks: text unchanged, other values as JSON text.

    An object without a JSON form that says how it is shown is that text. Raises ConversionError for any other.
    """
    if value is None:
        return []
    if isinstance(value, str):
        return [TextContent(value)]
    if isinstance(value, _BLOCKS):
        return [value]
    if isinstance(value, Image | Audio):
        return [value.content()]
    if holds_content(value):
        return [block for item in value for block in as_content(item)]
    try:
        return [TextContent(json_text(to_json(value)))]
    except ConversionError:
        if not shows_itself(type(value)):
            raise
        return [TextContent(str(value))]
