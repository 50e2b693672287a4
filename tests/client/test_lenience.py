"""What a client takes from servers that leave out what newer revisions demand."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from tests.client.peers import Scripted, discover_result, initialize_result
from trimcp.client.client import Client
from trimcp.errors import InvalidReply, RemoteError
from trimcp.wire.revisions import LATEST, REVISIONS, Revision


async def test_an_absent_result_type_means_complete_and_an_absent_ttl_means_stale() -> None:
    def script(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            return discover_result(message["id"], tools={})
        return {"id": message["id"], "result": {"tools": [{"name": "t", "inputSchema": {"type": "object"}}]}}

    server = Scripted(script)
    async with Client("c").connect(server, revision=LATEST) as session:
        assert [tool.name for tool in await session.list_tools()] == ["t"]
        assert [tool.name for tool in await session.list_tools()] == ["t"]
    assert server.methods == ["server/discover", "tools/list", "tools/list"]


def modern(message: dict[str, Any], answer: Any) -> Any:
    """A server's answers: `answer` to calls."""
    if message.get("method") == "server/discover":
        return discover_result(message["id"], tools={})
    return answer(message) if message.get("method") == "tools/call" else None


DONE = {"resultType": "complete", "content": [{"type": "text", "text": "done"}]}


async def test_ids_as_text_are_taken() -> None:
    def answer(message: dict[str, Any]) -> Any:
        id = str(message["id"])
        failed = {"id": id, "error": {"code": 7, "message": "no"}}
        return failed if message["params"]["name"] == "fail" else {"id": id, "result": DONE}

    def script(message: dict[str, Any]) -> Any:
        found = modern(message, answer)
        return {**found, "id": str(found["id"])} if isinstance(found, dict) else found

    async with Client("c").connect(Scripted(script)) as session:
        assert (await session.call_tool("run")).text == "done"
        with pytest.raises(RemoteError, match="no"):
            await session.call_tool("fail")


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ({"id": 1, "result": DONE}, "a reply with the id '1'"),
        ({"id": "constant", "result": DONE}, "a reply with the id 'constant'"),
        ({"id": None, "error": {"code": -32600, "message": "what is this"}}, "what is this"),
    ],
    ids=["constant", "text", "null"],
)
async def test_a_reply_that_answers_nothing_is_told_while_somebody_waits(
    reply: dict[str, Any], told: str, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = Scripted(lambda message: modern(message, lambda call: reply))
    async with Client("c", request_timeout=5).connect(server, revision=LATEST) as session:
        with pytest.raises(trio.TooSlowError):
            await session.call_tool("run")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told in warning
    assert "tools/call" in warning


async def test_a_late_reply_is_not_worth_a_word(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    waiting: list[int] = []

    def answer(message: dict[str, Any]) -> Any:
        waiting.append(message["id"])
        return [{"id": id, "result": DONE} for id in waiting] if len(waiting) == 2 else None

    async with Client("c").connect(Scripted(lambda message: modern(message, answer))) as session:
        with trio.move_on_after(1):
            await session.call_tool("slow")
        assert (await session.call_tool("run")).text == "done"
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize("revision", REVISIONS[2:])
async def test_a_result_with_structured_content_alone_is_taken(revision: Revision) -> None:
    def script(message: dict[str, Any]) -> Any:
        if message.get("method") == "initialize":
            return initialize_result(message["id"], revision.name, tools={})
        alone = {"id": message.get("id"), "result": {"structuredContent": {"total": 3}}}
        return alone if message.get("method") == "tools/call" else modern(message, None)

    async with Client("c").connect(Scripted(script), revision=revision) as session:
        result = await session.call_tool("add")
        assert (result.data, result.content) == ({"total": 3}, [])


async def test_a_result_without_anything_is_still_wrong() -> None:
    server = Scripted(lambda message: modern(message, lambda call: {"id": call["id"], "result": {}}))
    async with Client("c").connect(server) as session:
        with pytest.raises(InvalidReply, match="content"):
            await session.call_tool("add")
