"""What becomes of a tool whose client answers its question with an error."""

from __future__ import annotations

from typing import Any

import pytest

import trimcp
from trimcp.errors import ErrorReply
from trimcp.testing import connected
from trimcp.wire.input_requests import CreateMessageParams
from trimcp.wire.revisions import LATEST_LEGACY


def asking_server() -> trimcp.Server[Any]:
    server = trimcp.Server("asks")

    @server.tool
    async def ask(what: str, *, ctx: trimcp.Context) -> str:
        if what == "roots":
            return str(await ctx.list_roots())
        if what == "elicitation":
            return str(await ctx.elicit("Your name?", {"type": "object", "properties": {"n": {"type": "string"}}}))
        return str(await ctx.sample(CreateMessageParams(messages=[], max_tokens=1)))

    @server.tool
    async def go_on(*, ctx: trimcp.Context) -> str:
        try:
            await ctx.list_roots()
        except trimcp.AskRefused as refused:
            return f"{refused.method} {refused.code} {refused.message}"
        return "no"

    @server.prompt
    async def review(*, ctx: trimcp.Context) -> str:
        return str(await ctx.list_roots())

    return server


def refusing(code: int, message: str) -> trimcp.Client:
    client = trimcp.Client("says no")

    async def refuse(*given: Any) -> Any:
        raise ErrorReply(code, message)

    client.sampling(refuse)
    client.elicitation(refuse)
    client.roots(refuse)
    return client


@pytest.mark.parametrize("force_rerun", [False, True])
@pytest.mark.parametrize("what", ["sampling", "elicitation", "roots"])
@pytest.mark.parametrize(("code", "message"), [(-1, "User rejected"), (-32601, "no such method"), (-32602, "wrong")])
async def test_a_no_is_a_tool_error_that_says_who_and_why(
    what: str, code: int, message: str, force_rerun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    how = {"force_rerun": True} if force_rerun else {}
    async with connected(asking_server(), refusing(code, message), revision=LATEST_LEGACY, **how) as session:
        result = await session.call_tool("ask", {"what": what})
        assert result.is_error is True
        assert "the client refused" in result.text
        assert f"{message} (code {code})" in result.text
        assert (await session.call_tool("go_on")).text == f"roots/list {code} {message}"
        with pytest.raises(trimcp.RemoteError, match=f"the client refused roots/list: {message}"):
            await session.get_prompt("review")
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
