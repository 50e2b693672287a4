from __future__ import annotations

import pytest

from trimcp.cli.text import describe_content, describe_resource
from trimcp.support.cleaning import clean, one_line
from trimcp.wire.content import (
    BlobResourceContents,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb", "a\\rb"),
        ("a\x07\x00", "a\\x07\\x00"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("zero\u200bwidth", "zero\\u200bwidth"),
        ("line\u2028sep", "line\\u2028sep"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_what_a_terminal_obeys_is_made_visible(hostile: str, shown: str) -> None:
    assert clean(hostile) == shown
    assert one_line(hostile) == shown


def test_plain_text_of_any_script_stays() -> None:
    text = "Grüße, 世界 [bold]\n\tκόσμε 🎉"
    assert clean(text) == text
    assert clean("a\r\nb") == "a\nb"


def test_one_line_is_one_line_of_bounded_width() -> None:
    assert one_line("a\n\n b\tc") == "a b c"
    assert one_line("x" * 1000, 10) == "x" * 9 + "…"


def test_content_of_all_kinds_is_described() -> None:
    blocks = [
        TextContent("hi\x1b"),
        ImageContent(data="AAAA", mime_type="image/png\x1b"),
        ResourceLink(name="n\nn", uri="file:///x"),
        EmbeddedResource(resource=TextResourceContents(uri="u:", text="t\x07")),
        EmbeddedResource(resource=BlobResourceContents(uri="u:", blob="AAA=")),
    ]
    assert list(describe_content(blocks)) == [
        "hi\\x1b",
        "[image, image/png\\x1b, 3 bytes]",
        "[resource file:///x: n n]",
        "t\\x07",
        "[u:: binary, 2 bytes]",
    ]
    assert describe_resource(TextResourceContents(uri="u:", text="a\nb")) == "a\nb"
