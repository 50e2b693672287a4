"""How two peers meet, what they know of each other, and how a body leaves."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.interaction.everything_server import INSTRUCTIONS
from tests.interaction.links import Links
from trimcp.client.client import Client
from trimcp.errors import ConnectionLost, InvalidReply, RemoteError
from trimcp.session.limits import Limits
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2025_03_26, V2025_06_18


class OurOwnError(Exception):
    pass


async def test_they_introduce_themselves_and_a_bodys_exception_comes_out_as_itself(links: Links, clock: Any) -> None:
    with pytest.raises(OurOwnError) as caught:
        async with links(Client("introduced", "3.1")) as session:
            assert session.revision is links.revision
            assert session.server_info is not None
            assert (session.server_info.name, session.server_info.version) == ("everything", "1.2")
            assert bool(session.server_info.title) is (links.revision >= V2025_06_18)
            assert session.instructions == INSTRUCTIONS
            capabilities = session.server_capabilities
            assert capabilities.tools.list_changed is True
            assert capabilities.resources.subscribe is True
            assert capabilities.prompts.list_changed is True
            assert bool(capabilities.completions is not None) is (links.revision >= V2025_03_26)
            await session.ping()
            trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            result = await session.call_tool("who", meta={"traceparent": trace})
            said = result.content[0].text
            for word in ("introduced", links.revision.name, "tools/call", trace):
                assert word in said
            raise OurOwnError("from the body")
    assert caught.value.args == ("from the body",)
    assert caught.value.__cause__ is None
    # A proxy starts a program once to learn what it offers, and once for each client.
    started = 2 if links.behind and links.transport == "stdio" else 1
    assert links.journal() == ["lifespan entered", "lifespan left"] * started
    with pytest.raises(ConnectionLost):
        await session.call_tool("echo", {"text": "too late"})


async def test_a_cancelled_body_ends_the_connection_in_good_order(links: Links, clock: Any) -> None:
    with trio.move_on_after(60) as scope:
        async with links() as session, trio.open_nursery() as nursery:
            nursery.start_soon(session.call_tool, "hang", {"name": "call"})
            await session.call_tool("wait_for", {"line": "call started"})
            scope.cancel()
    assert scope.cancelled_caught
    assert links.journal()[-2:] in (
        ["call stopped: PEER", "lifespan left"],
        ["call stopped: DISCONNECTED", "lifespan left"],
        ["call stopped: DRAIN", "lifespan left"],
    )


@pytest.mark.parametrize("transport", ["framed", "stdio", "http", "websocket"])
@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_what_they_keep_of_each_other_is_bounded(links: Links, clock: Any) -> None:
    """A client that says too much of itself is refused with the reason; no client keeps too much of a server."""
    with pytest.raises((RemoteError, InvalidReply)) as refused:
        async with links(Client("c" * Limits().max_client_info)) as session:
            await session.list_tools()
    if not links.revision.modern:  # else it was `server/discover` that was refused, and there is nothing else to try
        assert isinstance(refused.value, RemoteError)
        assert refused.value.code == INVALID_PARAMS
        assert str(Limits().max_client_info) in str(refused.value)
    with pytest.raises(InvalidReply, match="400 bytes"):
        async with links(Client("c", limits=Limits(max_server_info=400))):
            pass
