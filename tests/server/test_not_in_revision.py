"""What the revision of a request has no words for: a clear error, and another thing in its place where there is one."""

from __future__ import annotations

import logging
from typing import Any, Literal

import attrs
import pytest

import trimcp
import trimcp.testing
from trimcp.wire.codes import INTERNAL_ERROR
from trimcp.wire.input_requests import LegacyTitledEnumSchema, TitledSingleSelectEnumSchema
from trimcp.wire.revisions import REVISIONS, V2024_11_05, V2025_03_26, V2025_06_18, V2025_11_25, Revision

every_revision = pytest.mark.parametrize("revision", REVISIONS, ids=str)

LINK = trimcp.ResourceLink(name="week", title="The week", uri="weather://week", description="in numbers")
SOUND = trimcp.Audio(b"la", mime_type="audio/wav")


async def asked(server: trimcp.Server[Any], revision: Revision, client: Any = None) -> trimcp.CallToolResult:
    """What the tool of this server answers in a revision."""
    (tool,) = server.tools
    async with trimcp.testing.connected(server, client, revision=revision) as session:
        return await session.call_tool(tool.listed.name)


@every_revision
async def test_a_link_alone_is_text_where_there_are_no_links(revision: Revision, autojump_clock: Any) -> None:
    server = trimcp.Server("s")

    @server.tool
    async def link() -> trimcp.ResourceLink:
        return LINK

    result = await asked(server, revision)
    assert result.is_error is False
    told = [trimcp.Text("The week: weather://week\nin numbers")] if revision < V2025_06_18 else [LINK]
    assert result.content == told


@every_revision
@pytest.mark.parametrize("run", ["inline", "thread"])
async def test_sound_alone_is_a_tool_error_that_says_so(
    revision: Revision, run: Any, caplog: pytest.LogCaptureFixture, autojump_clock: Any
) -> None:
    server = trimcp.Server("s")

    @server.tool(run=run)
    def sing() -> trimcp.Audio:
        return SOUND

    result = await asked(server, revision)
    if revision < V2025_03_26:
        assert result.is_error is True
        text = "AudioContent does not exist in revision 2024-11-05"
        assert result.content == [trimcp.Text(f"the result cannot be sent: {text}")]
        [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert record.getMessage() == f"the result of tools/call cannot be sent: {text}"
    else:
        assert result.is_error is False
        assert result.content == [SOUND.content()]


async def test_so_it_is_an_error_of_a_prompt(autojump_clock: Any) -> None:
    server = trimcp.Server("s")

    @server.prompt
    async def sing() -> trimcp.Audio:
        return SOUND

    async with trimcp.testing.connected(server, revision=V2024_11_05) as session:
        with pytest.raises(trimcp.RemoteError) as caught:
            await session.get_prompt("sing")
    assert caught.value.code == INTERNAL_ERROR
    assert caught.value.message == ("the result cannot be sent: AudioContent does not exist in revision 2024-11-05")


@attrs.frozen
class Several:
    likes: list[Literal["a", "b"]]


@pytest.mark.parametrize("revision", [r for r in REVISIONS if r >= V2025_06_18], ids=str)
async def test_a_form_of_several_choices_is_a_tool_error_where_forms_have_none(
    revision: Revision, autojump_clock: Any
) -> None:
    server, client = trimcp.Server("s"), trimcp.Client("c")

    @client.elicitation
    async def user(params: Any) -> trimcp.ElicitResult:
        return trimcp.ElicitResult(action="accept", content={"likes": ["b"]})

    @server.tool
    async def ask(*, ctx: trimcp.Context) -> str:
        return str((await ctx.elicit("Which?", Several)).value)

    result = await asked(server, revision, client)
    text = result.content[0].text
    if revision < V2025_11_25:
        assert result.is_error is True
        assert text.startswith("the client cannot be asked that: elicitation/create cannot be sent: ")
        assert text.endswith("MultiSelectEnumSchema does not exist in revision 2025-06-18")
    else:
        assert text == "Several(likes=['b'])"


@pytest.mark.parametrize("revision", [V2025_06_18, V2025_11_25], ids=str)
async def test_named_choices_are_spelt_as_the_revision_spells_them(revision: Revision, autojump_clock: Any) -> None:
    server, client = trimcp.Server("s"), trimcp.Client("c")
    shown: list[Any] = []

    @client.elicitation
    async def user(params: Any) -> trimcp.ElicitResult:
        shown.append(params.requested_schema.properties["colour"])
        return trimcp.ElicitResult(action="accept", content={"colour": "g"})

    @server.tool
    async def ask(*, ctx: trimcp.Context) -> str:
        colours = [{"const": "r", "title": "Red"}, {"const": "g", "title": "Green"}]
        form = {"type": "object", "properties": {"colour": {"type": "string", "oneOf": colours}}}
        return str((await ctx.elicit("Which?", form)).content)

    assert (await asked(server, revision, client)).is_error is False
    (field,) = shown
    assert type(field) is (LegacyTitledEnumSchema if revision == V2025_06_18 else TitledSingleSelectEnumSchema)
    assert field.choices == [("r", "Red"), ("g", "Green")]
