"""Pictures, sound, and how anything becomes content."""

from __future__ import annotations

import base64
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from trimcp.schema.convert import ConversionError
from trimcp.server.handlers.media import Audio, Image, as_content, is_content
from trimcp.wire.content import EmbeddedResource, ImageContent, ResourceLink, TextContent, TextResourceContents
from trimcp.wire.prompts import GetPromptResult
from trimcp.wire.resources import ReadResourceResult
from trimcp.wire.tools import CallToolResult

DATA = bytes(range(256))


@pytest.mark.parametrize(("kind", "name", "mime_type"), [(Image, "a.png", "image/png"), (Audio, "a.mp3", "audio/mpeg")])
def test_from_bytes_and_from_files(kind: Any, name: str, mime_type: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(DATA)
    for source in (kind(DATA, mime_type), kind(path), kind(str(path)), kind(path, mime_type)):
        content = source.content()
        assert base64.b64decode(content.data) == DATA
        assert content.mime_type == mime_type
    assert kind(path, "x/y").content().mime_type == "x/y"


@pytest.mark.parametrize("kind", [Image, Audio])
def test_what_cannot_be_sent_says_why(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bytes need a mime_type"):
        kind(DATA).content()
    with pytest.raises(ValueError, match=r"'a\.unknown'; give one"):
        kind(tmp_path / "a.unknown").content()
    with pytest.raises(OSError):
        kind(tmp_path / "missing.png", "image/png").content()


def test_a_file_is_read_when_it_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture = Image(path)
    path.write_bytes(b"later")
    assert base64.b64decode(picture.content().data) == b"later"


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int


LINK = ResourceLink(name="a", uri="a://b")
EMBEDDED = EmbeddedResource(TextResourceContents(uri="a://b", text="t"))
PICTURE = ImageContent(base64.b64encode(b"p").decode(), "image/png")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, []),
        ("text", [TextContent("text")]),
        ("", [TextContent("")]),
        (TextContent("text"), [TextContent("text")]),
        (Image(b"p", "image/png"), [PICTURE]),
        (LINK, [LINK]),
        (["a", Image(b"p", "image/png"), EMBEDDED, None], [TextContent("a"), PICTURE, EMBEDDED]),
        ((LINK, 5), [LINK, TextContent("5")]),
        (5, [TextContent("5")]),
        (True, [TextContent("true")]),
        (1.5, [TextContent("1.5")]),
        ([], [TextContent("[]")]),
        (["a", "b"], [TextContent('[\n  "a",\n  "b"\n]')]),
        ({"a": Colour.RED}, [TextContent('{\n  "a": "red"\n}')]),
        (Point(1), [TextContent('{\n  "x": 1\n}')]),
        (b"\0", [TextContent('"AA=="')]),
    ],
    ids=repr,
)
def test_anything_becomes_content(value: Any, expected: Any) -> None:
    assert as_content(value) == expected


@pytest.mark.parametrize(
    "value", [object(), float("nan"), {object(): "key"}, [object()]], ids=["object", "nan", "key", "in"]
)
def test_what_json_cannot_carry_is_refused(value: Any) -> None:
    with pytest.raises(ConversionError):
        as_content(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConversionError, match="nested too deeply"):
        as_content(endless)


def test_text_in_other_scripts_is_not_escaped() -> None:
    [content] = as_content({"à": "日本"})
    assert orjson.loads(content.text) == {"à": "日本"}
    assert "日本" in content.text


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (TextContent, True),
        (Image, True),
        (Audio, True),
        (CallToolResult, True),
        (GetPromptResult, True),
        (ReadResourceResult, True),
        (int, False),
        (Point, False),
        (list[TextContent], False),
        (None, False),
        ("Image", False),
    ],
    ids=repr,
)
def test_which_return_types_are_content_already(hint: Any, expected: bool) -> None:
    assert is_content(hint) is expected
