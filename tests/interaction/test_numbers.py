"""Integers that JSON of 64 bits cannot carry: a call that sends one, or is answered with one, fails by its id."""

from __future__ import annotations

import orjson
import pytest

from tests.interaction.links import Links
from tests.peers.messages import text_of
from trimcp.errors import InvalidReply, LocalError, RemoteError
from trimcp.wire.codes import INVALID_REQUEST
from trimcp.wire.revisions import V2025_06_18

BIG = orjson.Fragment(b"18446744073709551616")  # sent as it is, as another implementation would


async def test_an_integer_beyond_64_bits_fails_its_call_and_no_other(links: Links) -> None:
    async with links() as session:
        with pytest.raises(RemoteError, match="an integer does not fit in 64 bits") as refused:
            await session.call_tool("add", {"a": BIG, "b": 2})
        assert refused.value.code == INVALID_REQUEST
        if links.revision >= V2025_06_18:  # before, results have no structure
            wrong = RemoteError if links.through_proxy else InvalidReply
            with pytest.raises(wrong, match="an integer does not fit in 64 bits"):
                await session.call_tool("beyond")
            result = await session.call_tool("partly_beyond")
            assert text_of(result) == "near"
            # What a proxy left out is in its log.
            assert [each.place for each in result.rejected] == ([] if links.through_proxy else ["content[1]"])
        with pytest.raises(LocalError, match="64-bit"):
            await session.call_tool("add", {"a": 2**64, "b": 2})
        assert text_of(await session.call_tool("add", {"a": 40, "b": 2})) == "42"
