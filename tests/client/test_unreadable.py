"""What a client makes of lists and contents of which a part cannot be read: the rest, and a word on what is missing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from tests.client.peers import Scripted, discover_result, initialize_result
from trimcp.client.client import Client
from trimcp.errors import InvalidReply
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.revisions import REVISIONS, Revision

GOOD: dict[str, Any] = {
    "tools": {"name": "good", "inputSchema": {"type": "object"}},
    "resources": {"uri": "file:///good", "name": "good"},
    "resourceTemplates": {"uriTemplate": "file:///{good}", "name": "good"},
    "prompts": {"name": "good"},
    "content": {"type": "text", "text": "good"},
    "contents": {"uri": "file:///good", "text": "good"},
    "messages": {"role": "user", "content": {"type": "text", "text": "good"}},
}
BAD: dict[str, list[tuple[JSON, str | None, str]]] = {
    "tools": [
        ({"name": "bad"}, "bad", "is missing @ $.inputSchema"),
        ({"name": 7, "inputSchema": {}}, None, "must be a string, not an integer @ $.name"),
        ({"name": "bad", "inputSchema": {}, "annotations": "odd"}, "bad", "must be an object"),
        ("bad", None, "must be an object, not a string"),
    ],
    "resources": [({"uri": "file:///bad"}, "file:///bad", "is missing @ $.name"), (None, None, "not null")],
    "resourceTemplates": [({"name": "bad"}, "bad", "is missing @ $.uriTemplate")],
    "prompts": [({"title": "bad"}, None, "is missing @ $.name"), ([], None, "not an array")],
    "content": [({"type": "video"}, None, 'must have "type"'), ({"type": "text"}, None, "is missing @ $.text")],
    "contents": [({"uri": "file:///bad"}, "file:///bad", "must be one of")],
    "messages": [({"role": "user"}, None, "is missing @ $.content")],
}
ASK: Mapping[str, Any] = {
    "tools": ("tools/list", lambda session: session.list_tools()),
    "resources": ("resources/list", lambda session: session.list_resources()),
    "resourceTemplates": ("resources/templates/list", lambda session: session.list_resource_templates()),
    "prompts": ("prompts/list", lambda session: session.list_prompts()),
    "content": ("tools/call", lambda session: session.call_tool("t")),
    "contents": ("resources/read", lambda session: session.read_resource("file:///good")),
    "messages": ("prompts/get", lambda session: session.get_prompt("p")),
}
CASES = [(kind, bad, name, why) for kind, many in BAD.items() for bad, name, why in many]


def server(kind: str, members: JSON, **others: JSON) -> Scripted:
    """Answer every request that `kind` belongs to with these members."""

    def script(message: dict[str, Any]) -> Any:
        capabilities: dict[str, Any] = {"tools": {}, "resources": {}, "prompts": {}}
        if message["method"] == "server/discover":
            return discover_result(message["id"], **capabilities)
        if message["method"] == "initialize":
            return initialize_result(message["id"], message["params"]["protocolVersion"], **capabilities)
        return {"id": message["id"], "result": {kind: members, **others}} if "id" in message else None

    return Scripted(script)


def members_of(result: Any) -> list[Any]:
    return result if isinstance(result, list) else next(getattr(result, n) for n in GOOD if hasattr(result, n))


@pytest.mark.parametrize("revision", REVISIONS, ids=lambda revision: revision.name)
@pytest.mark.parametrize(("kind", "bad", "name", "why"), CASES)
async def test_a_member_that_cannot_be_read_hides_no_other(
    kind: str, bad: JSON, name: str | None, why: str, revision: Revision, caplog: pytest.LogCaptureFixture
) -> None:
    if isinstance(bad, dict) and "annotations" in bad and revision is REVISIONS[0]:
        return  # not a member there
    _, ask = ASK[kind]
    good = GOOD[kind]
    async with Client("c").connect(server(kind, [good, bad, good]), revision=revision) as session:
        result = await ask(session)
        again = await ask(session)
    assert len(members_of(result)) == len(members_of(again)) == 2
    [left_out] = result.rejected
    assert (left_out.place, left_out.name) == (f"{kind}[1]", name)
    assert why in left_out.reason
    assert again.rejected == result.rejected
    [warning] = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]  # said once
    assert "'scripted'" in warning
    assert f"{kind}[1]" in warning
    assert left_out.reason in warning
    assert name is None or repr(name) in warning


@pytest.mark.parametrize("kind", ["tools", "resources", "resourceTemplates", "prompts"])
async def test_a_list_of_which_nothing_can_be_read_is_empty(kind: str) -> None:
    bad = [bad for bad, _, _ in BAD[kind]]
    async with Client("c").connect(server(kind, bad)) as session:
        found = await ASK[kind][1](session)
    assert found == []
    assert len(found.rejected) == len(bad)


@pytest.mark.parametrize("kind", ["content", "contents", "messages"])
async def test_a_result_of_which_nothing_can_be_read_is_refused(kind: str) -> None:
    async with Client("c").connect(server(kind, [bad for bad, _, _ in BAD[kind]])) as session:
        with pytest.raises(InvalidReply, match=rf"\$\.{kind}\[0\]"):
            await ASK[kind][1](session)


async def test_structured_content_is_worth_more_than_content_that_cannot_be_read() -> None:
    async with Client("c").connect(server("content", [{"type": "video"}], structuredContent={"n": 1})) as session:
        result = await session.call_tool("t")
    assert (result.content, result.data) == ([], {"n": 1})
    assert [each.place for each in result.rejected] == ["content[0]"]


async def test_what_is_wrong_beside_the_members_is_refused_as_before() -> None:
    async with Client("c").connect(server("tools", [{"name": "bad"}], nextCursor=7)) as session:
        with pytest.raises(InvalidReply, match=r"\$\.nextCursor"):
            await session.list_tools()
    async with Client("c").connect(server("tools", {"good": GOOD["tools"]})) as session:
        with pytest.raises(InvalidReply, match="must be an array"):
            await session.list_tools()


@pytest.mark.parametrize("kind", GOOD)
async def test_a_strict_client_refuses_the_whole(kind: str) -> None:
    client = Client("c", strict=True)
    async with client.connect(server(kind, [GOOD[kind], BAD[kind][0][0]])) as session:
        with pytest.raises(InvalidReply, match=rf"\$\.{kind}\[1\]"):
            await ASK[kind][1](session)


async def test_a_page_tells_what_it_lacks_and_a_list_what_all_its_pages_lack(caplog: pytest.LogCaptureFixture) -> None:
    def script(message: dict[str, Any]) -> Any:
        if message["method"] == "server/discover":
            return discover_result(message["id"], tools={})
        last = "cursor" in message["params"]
        tools = [{"name": "late"}] if last else [GOOD["tools"], {"name": "early"}]
        return {"id": message["id"], "result": {"tools": tools, **({} if last else {"nextCursor": "2"})}}

    async with Client("c").connect(Scripted(script)) as session:
        page = await session.list_page("tools/list")
        tools = await session.list_tools()
    assert [each.name for each in page.rejected] == ["early"]
    assert [each.name for each in tools.rejected] == ["early", "late"]
    assert [tool.name for tool in tools] == ["good"]


async def test_many_of_them_are_counted_and_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    async with Client("c").connect(server("tools", [{}] * 5_000 + [GOOD["tools"]])) as session:
        tools = await session.list_tools()
        assert len(tools) == 1
        assert len(tools.rejected) == 101
        assert tools.rejected[-1].reason == "4900 more members cannot be read"
        again = await session.list_tools()
        assert len(again) == 1
    assert len(caplog.records) <= 12


async def test_what_a_server_writes_into_a_warning_is_escaped(caplog: pytest.LogCaptureFixture) -> None:
    async with Client("c").connect(server("tools", [{"name": "\x1b[2J\nERROR forged" + "x" * 5_000}])) as session:
        [left_out] = (await session.list_tools()).rejected
        assert len(left_out.name or "") <= 200
    [warning] = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "\x1b" not in warning
    assert "\n" not in warning
    assert len(warning) < 1_000


# --- integers beyond 64 bits ---

WIDE = {"u64": 2**64, "i64": -(2**63) - 1, "u128": 2**128 - 1, "u2048": 2**2048}


@pytest.mark.parametrize("revision", REVISIONS, ids=lambda revision: revision.name)
@pytest.mark.parametrize("kind", GOOD)
@pytest.mark.parametrize("wide", WIDE)
async def test_an_integer_beyond_64_bits_hides_its_member_alone(
    kind: str, wide: str, revision: Revision, caplog: pytest.LogCaptureFixture
) -> None:
    good, number = GOOD[kind], WIDE[wide]
    bad = {**good, "inputSchema": {"type": "object", "properties": {"n": {"maximum": number}}}, "other": [number]}
    async with Client("c").connect(server(kind, [good, bad, good]), revision=revision) as session:
        result = await ASK[kind][1](session)
        await ASK[kind][1](session)
    assert len(members_of(result)) == 2
    [left_out] = result.rejected
    assert left_out.place == f"{kind}[1]"
    assert left_out.name == next((bad[key] for key in ("name", "uri", "uriTemplate") if key in bad), None)
    assert left_out.reason in ("an integer does not fit in 64 bits", "a number is too large to be read")
    [warning] = [each.getMessage() for each in caplog.records if "left out" in each.getMessage()]
    assert left_out.reason in warning


@pytest.mark.parametrize("odd", [{"nextCursor": 2**64}, {"_meta": {"n": 2**64}}, {"tools": {"n": 2**64}}], ids=str)
async def test_one_beside_the_members_is_refused_as_before(odd: Any) -> None:
    async with Client("c").connect(server("tools", [GOOD["tools"]], **odd)) as session:
        with pytest.raises(InvalidReply, match="an integer does not fit in 64 bits"):
            await session.list_tools()


async def test_a_strict_client_refuses_the_whole_for_one() -> None:
    bad = {**GOOD["tools"], "n": 2**64}
    async with Client("c", strict=True).connect(server("tools", [GOOD["tools"], bad])) as session:
        with pytest.raises(InvalidReply, match="an integer does not fit in 64 bits"):
            await session.list_tools()
    async with Client("c").connect(server("content", [{**GOOD["content"], "n": 2**64}])) as session:
        with pytest.raises(InvalidReply, match=r"\$\.content\[0\]"):
            await session.call_tool("t")


async def test_a_list_of_more_of_them_than_anybody_means_is_refused() -> None:
    for many, listed in ((9_000, 1), (11_000, None)):
        bad = {**GOOD["tools"], "n": [2**64] * many}
        async with Client("c").connect(server("tools", [GOOD["tools"], bad])) as session:
            if listed is None:
                with pytest.raises(InvalidReply, match="an integer does not fit in 64 bits"):
                    await session.list_tools()
            else:
                assert len(await session.list_tools()) == listed
