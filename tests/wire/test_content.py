"""The text of what carries content of several kinds."""

from __future__ import annotations

import pytest

from trimcp.wire.content import BlobResourceContents, EmbeddedResource, ImageContent, Text, TextResourceContents
from trimcp.wire.input_requests import CreateMessageResult, SamplingMessage
from trimcp.wire.prompts import PromptMessage
from trimcp.wire.resources import ReadResourceResult
from trimcp.wire.tools import CallToolResult

PICTURE = ImageContent(data="iVBO", mime_type="image/png")
NOTE = TextResourceContents(uri="notes://1", text="of a note")


@pytest.mark.parametrize(
    ("carrier", "text"),
    [
        (CallToolResult(content=[Text("one"), PICTURE, EmbeddedResource(resource=NOTE), Text("two")]), "one\ntwo"),
        (CallToolResult(content=[PICTURE]), ""),
        (CallToolResult(content=[]), ""),
        (PromptMessage(role="user", content=Text("one")), "one"),
        (PromptMessage(role="user", content=PICTURE), ""),
        (ReadResourceResult(contents=[NOTE, BlobResourceContents(uri="notes://2", blob="AA==")]), "of a note"),
        (SamplingMessage(role="user", content=Text("one")), "one"),
        (CreateMessageResult(role="assistant", model="m", content=[Text("one"), PICTURE, Text("two")]), "one\ntwo"),
    ],
)
def test_the_text_of_content(
    carrier: CallToolResult | PromptMessage | ReadResourceResult | SamplingMessage | CreateMessageResult, text: str
) -> None:
    assert carrier.text == text
