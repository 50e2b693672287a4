"""Our client and our server with each subset of the revisions, over every transport."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain, combinations
from typing import Any

import pytest
import trio

import trimcp
from tests.interaction.links import EVERY_PAIR, SSE, TRANSPORTS, speaks
from tests.peers.serving import IN_MEMORY, served
from trimcp.errors import McpError
from trimcp.wire.revisions import LEGACY, OLDEST, REVISIONS, Revision

SUBSETS = [*chain.from_iterable(combinations(REVISIONS, size) for size in range(1, len(REVISIONS) + 1))]

# Over the others of a kind sessions begin as over these, by the same code: each revision alone, the old ones and all.
ONE_OF_A_KIND = ("memory", "http", "http/2", "http+sse", "websocket", "grpc")

CHILD = """
import sys, trimcp
server = trimcp.Server("some", revisions=[each for each in trimcp.REVISIONS if each.name in sys.argv[1:]])
server.add_tool(lambda: "pong", name="ping")
trimcp.run_stdio(server)
"""


def common(transport: str, ours: tuple[Revision, ...], theirs: tuple[Revision, ...]) -> Revision | None:
    """What a client and a server have to agree on, by the specification's ways; None: they cannot.

    The newest modern one; else the handshake, in which each side names one alone. HTTP+SSE begins with that.
    """
    modern = [each for each in ours if each.modern and each in theirs and transport not in SSE]
    if modern:
        return max(modern)
    legacy, served_here = ([each for each in side if not each.modern] for side in (ours, theirs))
    if not legacy or not served_here:
        return None
    answer = max(legacy) if max(legacy) in served_here else max(served_here)
    return answer if answer in legacy else None


@asynccontextmanager
async def target(transport: str, revisions: tuple[Revision, ...]) -> AsyncIterator[Any]:
    """A server of these revisions, as what to connect to."""
    if transport == "stdio":
        yield trimcp.stdio(sys.executable, "-c", CHILD, *(each.name for each in revisions))
        return
    server = trimcp.Server("some", revisions=revisions)
    server.add_tool(lambda: "pong", name="ping")
    if transport in IN_MEMORY:
        yield trimcp.in_process(server, framed=transport == "framed")
        return
    async with served(server, transport) as place:
        yield place.target()


def tried(transport: str, *, served_here: bool) -> list[tuple[Revision, ...]]:
    """The subsets tried over a transport, of a server or of clients: all, except where that takes time."""
    if transport == "framed" or EVERY_PAIR or (served_here and transport in ONE_OF_A_KIND):
        chosen = SUBSETS
    elif transport == "stdio" and not served_here:
        chosen = [REVISIONS]
    else:
        chosen = [*((each,) for each in REVISIONS), LEGACY, REVISIONS]
    if transport in SSE:  # which carries the others too, but is served for the oldest
        return [subset for subset in chosen if OLDEST in subset or not served_here]
    return [subset for subset in chosen if any(speaks(transport, each) for each in subset)]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_each_subset_meets_each_other(transport: str) -> None:
    for theirs in tried(transport, served_here=True):
        async with target(transport, theirs) as where:
            for ours in tried(transport, served_here=False):
                with trio.fail_after(30):
                    await meet(where, ours, theirs, common(transport, ours, theirs))


async def meet(where: Any, ours: tuple[Revision, ...], theirs: tuple[Revision, ...], expected: Revision | None) -> None:
    client = trimcp.Client("some", revisions=ours)
    if expected is None:
        with pytest.raises(McpError) as caught:
            async with client.connect(where):
                pytest.fail(f"{ours} and {theirs} have nothing in common")
        said = f"{caught.value}"
        assert "of the legacy era" in said or any(each.name in said for each in theirs), (ours, theirs, said)
        return
    async with client.connect(where) as session:
        assert session.revision is expected, (ours, theirs)
        assert (await session.call_tool("ping")).text == "pong"
