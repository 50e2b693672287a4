"""What a server may ask of its client in the middle of a call, in place or by running the handler again."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.interaction.links import Links
from tests.peers.messages import text_of
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.errors import RemoteError
from trimcp.wire.codes import MISSING_CAPABILITY
from trimcp.wire.input_requests import CreateMessageParams, ElicitResult, ElicitURLParams, Root
from trimcp.wire.revisions import V2025_06_18, V2025_11_25


def make_client() -> Client:
    client = Client("asked")
    client.set_roots([Root(uri="file:///a", name="Ada"), Root(uri="file:///b")])

    @client.sampling
    async def model(params: CreateMessageParams) -> str:
        return params.messages[0].blocks[0].text.upper()

    @client.elicitation
    async def user(params: Any) -> ElicitResult:
        if isinstance(params, ElicitURLParams):
            assert params.url == "https://example.org/pay"
            return ElicitResult(action="accept")
        if params.message == "Sure?":
            return ElicitResult(action="decline")
        values = {"Your name?": {"name": "Ada"}, "Whom?": {"name": "Bob"}, "How often?": {"times": 2}}
        return ElicitResult(action="accept", content=values[params.message])

    return client


async def test_questions_are_answered_on_the_way(links: Links, clock: Any) -> None:
    client = make_client()
    async with links(client) as session:
        with trio.fail_after(PATIENCE):
            assert text_of(await session.call_tool("think", {"question": "why"})) == "WHY"
            assert '"file:///a"' in text_of(await session.call_tool("where"))
            await check_once(links, session)
            [contents] = (await session.read_resource("whose://book")).contents
            assert contents.text == "book of Ada"
            if links.revision >= V2025_06_18:
                await check_forms(links, session)
            if links.revision >= V2025_11_25:
                assert text_of(await session.call_tool("visit")) == "accept"
            async with session.calling("think", {"question": "and"}) as call:
                assert text_of(await call.result()) == "AND"
            shielded = await session.call_tool("ask_shielded")
            # In place it can be asked; a handler that has to unwind for it cannot.
            assert shielded.is_error is links.modern
            assert ("shielded" in text_of(shielded)) is links.modern
            await check_changed_roots(links, client, session)


async def check_once(links: Links, session: ClientSession) -> None:
    assert text_of(await session.call_tool("in_order")) == "ticket 2 2"
    journal = links.journal()
    assert journal.count("bought") == 1
    assert journal.count("in_order ran") == (3 if links.modern else 1)


async def check_forms(links: Links, session: ClientSession) -> None:
    assert text_of(await session.call_tool("ask_name")) == "accept: Ada"
    assert links.journal().count("ask_name ran") == (2 if links.modern else 1)
    assert text_of(await session.call_tool("greet", {"greeting": "hi"})) == "hi Bob hi Bob"
    assert links.journal().count("greet ran") == 1, "declared questions are answered before the body runs"
    assert text_of(await session.call_tool("decline_known")) == "decline"


async def check_changed_roots(links: Links, client: Client, session: ClientSession) -> None:
    """In the legacy eras a server is told; in the modern one it asks again anyway."""
    client.set_roots(["file:///c"])
    if not links.modern:
        await session.call_tool("wait_for", {"line": "roots changed"})
    assert '"file:///c"' in text_of(await session.call_tool("where"))


async def test_a_client_that_cannot_be_asked_is_not_asked(links: Links, clock: Any) -> None:
    async with links(Client("mute")) as session:
        with trio.fail_after(PATIENCE):
            for tool in ("ask_name", "visit", "where", "in_order"):
                if links.modern:
                    with pytest.raises(RemoteError) as refused:
                        await session.call_tool(tool)
                    assert refused.value.code == MISSING_CAPABILITY
                    assert refused.value.data["requiredCapabilities"]
                else:
                    result = await session.call_tool(tool)
                    assert result.is_error is True
            assert text_of(await session.call_tool("echo", {"text": "next"})) == "next"
    assert "crashed" not in links.log()
