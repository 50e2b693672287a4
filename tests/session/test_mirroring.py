from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from tests.peers.mirroring import header_channels
from tests.session.support import Answers, client_engine
from trimcp.errors import LocalError
from trimcp.protocol.bound_methods import foreign, methods_of
from trimcp.session.drive import AnyChannel, direct_ends, driving
from trimcp.session.session import Session, mirrored
from trimcp.wire.prompts import GetPromptParams
from trimcp.wire.resources import ReadResourceParams
from trimcp.wire.revisions import LATEST, LATEST_LEGACY
from trimcp.wire.tools import CallToolParams

MORE = {"mcp-param-x": "y"}


@pytest.mark.parametrize(
    ("method", "params", "name"),
    [
        ("tools/list", None, None),
        ("tools/call", CallToolParams("echo"), "echo"),
        ("tools/call", CallToolParams("écho"), "=?base64?w6ljaG8=?="),
        ("prompts/get", GetPromptParams(""), ""),
        ("resources/read", ReadResourceParams("x:1"), "x:1"),
    ],
)
def test_a_request_is_repeated(method: str, params: Any, name: str | None) -> None:
    bound = methods_of(LATEST)[method]
    expected = {"mcp-protocol-version": LATEST.name, "mcp-method": method}
    if name is not None:
        expected["mcp-name"] = name
    assert mirrored(LATEST, bound, params) == expected
    assert mirrored(LATEST, bound, params, MORE) == {**expected, **MORE}


def test_a_request_of_an_extension_has_no_name() -> None:
    headers = mirrored(LATEST, foreign("x/y"), {"name": "n"})
    assert headers == {"mcp-protocol-version": LATEST.name, "mcp-method": "x/y"}


@pytest.mark.parametrize("revision", [None, LATEST_LEGACY], ids=str)
def test_other_revisions_repeat_nothing(revision: Any) -> None:
    method = methods_of(LATEST_LEGACY)["tools/call"]
    assert mirrored(revision, method, CallToolParams("echo")) is None
    assert mirrored(revision, method, CallToolParams("echo"), MORE) is MORE


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(LocalError, match="surrogate"):
        mirrored(LATEST, methods_of(LATEST)["tools/call"], CallToolParams("\ud800"))


@pytest.mark.parametrize("mirrors", [False, True])
async def test_the_channel_decides_whether_requests_are_repeated(mirrors: bool) -> None:
    session = Session(client_engine(), Answers())
    session.engine.modern.revision = LATEST
    _, channel = header_channels(mirrors=mirrors)
    async with driving(session, channel):
        await session.start_call("tools/list")
        await trio.testing.wait_all_tasks_blocked()
        [sent] = channel.headers_of("tools/list")
    assert (sent is not None) == mirrors


async def test_a_direct_end_carries_no_headers() -> None:
    session = Session(client_engine(), Answers())
    end: AnyChannel = direct_ends()[0]
    async with driving(session, end):
        assert session.transport.mirrors_headers is False
