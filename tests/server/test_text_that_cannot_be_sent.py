"""Text that UTF-8 cannot carry, errors that the wire cannot say, and URIs that are written in another form."""

from __future__ import annotations

from typing import Any

import pytest

import trimcp
from trimcp.testing import connected
from trimcp.wire.revisions import LATEST, LATEST_LEGACY

ODD = "a\ud800b"


def odd_server() -> trimcp.Server[Any]:
    server = trimcp.Server("odd")

    @server.tool
    async def report(*, ctx: trimcp.Context) -> str:
        await ctx.report_progress(1, message=ODD)
        await ctx.log("warning", {ODD: [ODD, 1]})
        return "done"

    @server.tool
    async def fail() -> str:
        raise trimcp.ToolError(ODD)

    @server.tool
    async def refuse() -> str:
        raise trimcp.ErrorReply(7, ODD, {"odd": ODD})

    @server.tool
    async def give() -> str:
        return ODD

    @server.tool
    async def give_many() -> list[str]:
        return [ODD]

    return server


@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST])
async def test_a_lone_surrogate_never_ends_a_tool(revision: trimcp.Revision, caplog: pytest.LogCaptureFixture) -> None:
    client = trimcp.Client("c")
    logged: list[Any] = []
    client.logging(lambda params: logged.append(params.data))
    async with connected(odd_server(), client, revision=revision) as session:
        async with session.calling("report", {}) as call:
            assert [step.message async for step in call.progress] == ["a\\ud800b"]
            assert (await call.result()).text == "done"
        failed = await session.call_tool("fail")
        assert (failed.is_error, failed.text) == (True, "a\\ud800b")
        with pytest.raises(trimcp.RemoteError) as refused:
            await session.call_tool("refuse")
        assert (refused.value.code, refused.value.message) == (7, "a\\ud800b")
        for name in ("give", "give_many"):
            told = await session.call_tool(name)
            assert told.is_error is True
            assert name in told.text
            assert "surrogate" in told.text
    assert logged == [{"a\\ud800b": ["a\\ud800b", 1]}]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("code", "message"), [("7", "no"), (7.0, "no"), (True, "no"), (2**63, "no"), (7, None), (7, b"x")]
)
def test_an_error_that_the_wire_cannot_say_is_refused_where_it_is_made(code: Any, message: Any) -> None:
    with pytest.raises(TypeError, match="of an ErrorReply is"):
        trimcp.ErrorReply(code, message)


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("https://Example.com", "https://example.com/"),
        ("https://example.com/", "https://example.com"),
        ("HTTP://EXAMPLE.com/A", "http://example.com/A"),
        ("file:///my notes.txt", "file:///my%20notes.txt"),
        ("file:///gr\u00fc\u00dfe", "file:///gr%C3%BC%C3%9Fe"),
        ("x://y/%7euser", "x://y/~user"),
        ("x://y/a%2fb", "x://y/a%2Fb"),
    ],
)
async def test_a_fixed_resource_is_found_in_the_normal_form_of_its_uri(address: str, asked: str) -> None:
    server = trimcp.Server("r")
    server.add_resource(address, "first")
    async with connected(server) as session:
        for uri in (address, asked):
            (contents,) = (await session.read_resource(uri)).contents
            assert contents.text == "first"
        with pytest.raises(trimcp.RemoteError):
            await session.read_resource(asked + "x")
        server.add_resource(asked + "x", "second")
        (contents,) = (await session.read_resource(asked + "x")).contents
        assert contents.text == "second"
        server.remove_resource(address)
        with pytest.raises(trimcp.RemoteError):
            await session.read_resource(asked)


async def test_other_resources_stay_others() -> None:
    server = trimcp.Server("r")
    server.add_resource("x://y/a%2Fb", "escaped")
    async with connected(server) as session:
        for uri in ("x://y/a/b", "x://y/A%2Fb", "x://y/a%2Fb/", "x://y/a%252Fb"):
            with pytest.raises(trimcp.RemoteError):
                await session.read_resource(uri)
