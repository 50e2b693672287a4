"""Resources, prompts and completion, from both sides."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest

from tests.interaction.everything_server import PIXEL
from tests.interaction.links import Links
from trimcp.client.session import ClientSession
from trimcp.errors import RemoteError
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.content import EmbeddedResource, TextContent
from trimcp.wire.revisions import V2025_06_18


async def test_resources_prompts_and_completion(links: Links, clock: Any) -> None:
    async with links() as session:
        await check_resources(links, session)
        await check_missing(links, session)
        await check_prompts(links, session)
        await check_completion(links, session)


async def check_resources(links: Links, session: ClientSession) -> None:
    listed = await session.list_resources()
    assert [resource.uri for resource in listed] == ["notes://readme", "notes://pixel", "notes://both"]
    assert (listed[0].mime_type, listed[0].description) == ("text/markdown", "Read this first")
    templates = await session.list_resource_templates()
    assert [template.uri_template for template in templates] == ["numbers://{first}/{second}", "whose://{thing}"]
    [readme] = (await session.read_resource("notes://readme")).contents
    assert (readme.uri, readme.text, readme.mime_type) == ("notes://readme", "hello", "text/markdown")
    [pixel] = (await session.read_resource("notes://pixel")).contents
    assert (base64.b64decode(pixel.blob), pixel.mime_type) == (PIXEL, "image/png")
    text, blob = (await session.read_resource("notes://both")).contents
    assert (text.text, base64.b64decode(blob.blob)) == ("text", PIXEL)
    [numbers] = (await session.read_resource("numbers://3/4")).contents
    assert (numbers.uri, orjson.loads(numbers.text)) == ("numbers://3/4", {"sum": 7})


async def check_missing(links: Links, session: ClientSession) -> None:
    for uri in ("notes://nothing", "numbers://1/0", "numbers://1", "file:///etc/passwd", ""):
        with pytest.raises(RemoteError) as missing:
            await session.read_resource(uri)
        assert missing.value.code == links.revision.resource_missing_code, uri
        assert missing.value.data == {"uri": uri}


async def check_prompts(links: Links, session: ClientSession) -> None:
    prompts = {prompt.name: prompt for prompt in await session.list_prompts()}
    path, style = prompts["review"].arguments
    assert (path.name, path.required, path.description) == ("path", True, "which file")
    assert (style.name, style.required) == ("style", False)
    result = await session.get_prompt("review", {"path": "a.py", "style": "long"})
    assert [message.role for message in result.messages] == ["user", "user", "assistant"]
    assert result.messages[0].content == TextContent("Review a.py, long")
    assert isinstance(result.messages[1].content, EmbeddedResource)
    assert result.description == "Review a file."
    for name, arguments, said in (
        ("review", {}, "lacks the required property 'path'"),
        ("review", {"path": "a.py", "style": "wrong"}, "must be one of 'short', 'long' @ style"),
        ("review", {"path": "a.py", "more": "x"}, "has unknown properties: 'more'"),
        ("nothing", {}, "unknown prompt"),
    ):
        with pytest.raises(RemoteError, match=said) as refused:
            await session.get_prompt(name, arguments)
        assert refused.value.code == INVALID_PARAMS
    assert "prompts/get of review" in links.journal(), "middleware saw it"


async def check_completion(links: Links, session: ClientSession) -> None:
    found = await session.complete_prompt("review", "path", "src/", {"style": "txt"})
    ending = "txt" if links.revision >= V2025_06_18 else "py"
    assert found.values[:2] == [f"src/0.{ending}", f"src/1.{ending}"]
    assert (len(found.values), found.total, found.has_more) == (100, 150, True)
    found = await session.complete_prompt("review", "style", "l")
    assert found.values == ["long"]
    found = await session.complete_resource("numbers://{first}/{second}", "second", "2")
    assert found.values == ["2", *(str(number) for number in range(20, 30))]
    for wrong in (session.complete_prompt("nothing", "x", ""), session.complete_resource("nothing://{x}", "x", "")):
        with pytest.raises(RemoteError) as refused:
            await wrong
        assert refused.value.code == INVALID_PARAMS
