"""Who may use what: by the scopes of their token, and by a function of the request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import trimcp
import trimcp.testing
from trimcp import Principal
from trimcp.guard import ASK, AccessRequest, Denied
from trimcp.wire.codes import FORBIDDEN

ANYBODY = None
READER = Principal("ann", scopes=["read"])
WRITER = Principal("bob", scopes=["read", "write", "more"])
TRUSTED = Principal("robot")


def offering() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("files", version="1")

    @server.tool
    async def free(*, ctx: trimcp.Context) -> str:
        return str(ctx.principal)

    @server.tool(scopes=["read"])
    async def read() -> str:
        return "read"

    @server.tool(scopes=["read", "write"])
    async def write() -> str:
        return "written"

    @server.resource("files://secret", scopes=["write"])
    async def secret() -> str:
        return "secret"

    @server.resource("files://{name}", scopes=["write"])
    async def family(name: str) -> str:
        return name

    @server.prompt(scopes=["write"])
    def review() -> str:
        return "review this"

    @server.prompt
    def greet(name: str) -> str:
        return f"greet {name}"

    @server.complete("greet", "name", scopes=["write"])
    def names(typed: str) -> list[str]:
        return ["Ann"]

    return server


@asynccontextmanager
async def connected(
    server: trimcp.Server[Any], principal: Principal | None, **more: Any
) -> AsyncIterator[trimcp.ClientSession]:
    async with trimcp.testing.connected(server, principal=principal, **more) as session:
        yield session


async def refused(call: Any, *scopes: str) -> None:
    with pytest.raises(trimcp.RemoteError) as caught:
        await call
    assert caught.value.code == FORBIDDEN
    assert caught.value.data == {"requiredScopes": list(scopes)}


@trimcp.testing.every_revision
async def test_what_somebody_may_not_use_is_refused_and_does_not_stand_in_their_lists(
    revision: trimcp.Revision,
) -> None:
    server = offering()
    async with connected(server, READER, revision=revision) as session:
        assert [tool.name for tool in await session.list_tools()] == ["free", "read"]
        assert await session.list_resources() == []
        assert await session.list_resource_templates() == []
        assert [prompt.name for prompt in await session.list_prompts()] == ["greet"]
        assert (await session.call_tool("free")).text == "ann"
        assert (await session.call_tool("read")).text == "read"
        await refused(session.call_tool("write"), "read", "write")
        await refused(session.read_resource("files://secret"), "write")
        await refused(session.read_resource("files://other"), "write")
        await refused(session.get_prompt("review"), "write")


@pytest.mark.parametrize("principal", [ANYBODY, WRITER, TRUSTED])
async def test_who_has_every_scope_or_was_given_none_sees_and_may_all(principal: Principal | None) -> None:
    async with connected(offering(), principal) as session:
        assert len(await session.list_tools()) == 3
        assert (await session.call_tool("write")).text == "written"
        assert len(await session.list_resources()) == 1
        assert len(await session.list_prompts()) == 2


def test_a_list_is_kept_for_each_set_of_rights_not_for_each_of_those_who_ask() -> None:
    tools = offering().tools
    assert tools.rights_of(READER) == tools.rights_of(Principal("cy", scopes=["read", "unknown"])) == {"read"}
    assert tools.rights_of(WRITER) is None
    assert tools.rights_of(ANYBODY) is None
    assert offering().prompts.rights_of(Principal("dee", scopes=[])) == frozenset()


# By a function


def finance(request: AccessRequest) -> Any:
    """Only the department's own agents, and large sums only if the user agrees."""
    if request.principal is None or request.principal.claims.get("department") != "finance":
        return Denied("only for agents of the finance department")
    return ASK if request.arguments["amount"] > 100 else True


def paying(allow: Any) -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("bank", version="1")

    @server.tool(allow=allow)
    async def pay(amount: int) -> str:
        return f"paid {amount}"

    return server


async def test_a_function_of_the_request_decides() -> None:
    clerk, other = Principal("ann", {"department": "finance"}), Principal("bob", {"department": "sales"})
    async with connected(paying(finance), clerk) as session:
        assert (await session.call_tool("pay", {"amount": 5})).text == "paid 5"
    for principal in (other, None):
        async with connected(paying(finance), principal) as session:
            with pytest.raises(trimcp.RemoteError, match="only for agents of the finance department") as caught:
                await session.call_tool("pay", {"amount": 5})
            assert (caught.value.code, caught.value.data) == (FORBIDDEN, None)


@pytest.mark.parametrize("revision", [revision for revision in trimcp.REVISIONS if revision.name >= "2025-06"])
async def test_it_may_have_the_user_asked(revision: trimcp.Revision) -> None:
    clerk = Principal("ann", {"department": "finance"})
    client = trimcp.Client("host")
    questions = []

    @client.elicitation
    def answer(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        questions.append(params.message)
        return trimcp.ElicitResult(action="accept", content={"confirm": len(questions) == 1})

    async with connected(paying(finance), clerk, client=client, revision=revision) as session:
        assert (await session.call_tool("pay", {"amount": 500})).text == "paid 500"
        assert (await session.call_tool("pay", {"amount": 501})).is_error
    assert "500" in questions[0]


@pytest.mark.parametrize("decision", [None, "yes", 1, "deny"])
async def test_what_is_no_decision_denies_and_is_logged(decision: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(paying(lambda request: decision), None) as session:
        with pytest.raises(trimcp.RemoteError, match="internal error"):
            await session.call_tool("pay", {"amount": 5})
    assert "decides by True, False, Denied or ASK" in caplog.text


async def test_a_function_that_crashes_denies(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: AccessRequest) -> bool:
        raise KeyError("the policy is gone")

    async with connected(paying(broken), None) as session:
        with pytest.raises(trimcp.RemoteError, match="internal error"):
            await session.call_tool("pay", {"amount": 5})
    assert "the policy is gone" in caplog.text


async def test_it_sees_only_arguments_that_are_valid() -> None:
    seen = []

    async def allow(request: AccessRequest) -> bool:
        seen.append((request.method, request.name, dict(request.arguments)))
        return False

    async with connected(paying(allow), None) as session:
        assert (await session.call_tool("pay", {"amount": "much"})).is_error
        with pytest.raises(trimcp.RemoteError, match="not allowed"):
            await session.call_tool("pay", {"amount": 7})
    assert seen == [("tools/call", "pay", {"amount": 7})]


def test_options_that_cannot_be_meant_are_refused() -> None:
    server: trimcp.Server[None] = trimcp.Server("files", version="1")
    with pytest.raises(TypeError, match=r"scopes is a list of scopes, such as \['read'\]"):
        server.add_tool(lambda: None, name="x", scopes="read")
    with pytest.raises(TypeError, match="allow is a function"):
        server.add_tool(lambda: None, name="x", allow=True)  # that is the point


@trimcp.testing.every_revision
async def test_each_decision_is_one_record_of_the_audit(revision: trimcp.Revision) -> None:
    records: list[dict[str, Any]] = []
    server = trimcp.Server("files", version="1", audit=trimcp.guard.Audit(write=records.append))

    @server.tool(scopes=["read", "write"])
    async def write() -> str:
        return "written"

    @server.tool(allow=lambda request: Denied("only in office\nhours") if request.arguments["amount"] > 9 else True)
    async def pay(amount: int) -> str:
        return "paid"

    @server.resource("files://secret", scopes=["write"])
    async def secret() -> str:
        return "secret"

    async with connected(server, READER, revision=revision) as session:
        for call in (
            session.call_tool("write"),
            session.call_tool("pay", {"amount": 10}),
            session.read_resource("files://secret"),
        ):
            with pytest.raises(trimcp.RemoteError):
                await call
        await session.call_tool("pay", {"amount": 1})
    told = ("principal", "target", "outcome", "code", "reason", "scopes", "detail")
    assert [{name: record[name] for name in told if name in record} for record in records] == [
        {
            "principal": "ann",
            "target": "write",
            "outcome": "refused",
            "code": FORBIDDEN,
            "reason": "scopes",
            "scopes": ["read", "write"],
            "detail": "this needs the scopes read write",
        },
        {
            "principal": "ann",
            "target": "pay",
            "outcome": "refused",
            "code": FORBIDDEN,
            "reason": "forbidden",
            "detail": "only in office\\nhours",
        },
        {
            "principal": "ann",
            "target": "files://secret",
            "outcome": "refused",
            "code": FORBIDDEN,
            "reason": "scopes",
            "scopes": ["write"],
            "detail": "this needs the scopes write",
        },
        {"principal": "ann", "target": "pay", "outcome": "ok"},
    ]


async def test_a_call_whose_user_says_no_is_one_record_of_the_audit() -> None:
    records: list[dict[str, Any]] = []
    server = trimcp.Server("files", version="1", audit=trimcp.guard.Audit(write=records.append))

    @server.tool(allow=lambda request: ASK)
    async def pay() -> str:
        return "paid"

    client = trimcp.Client("host")

    @client.elicitation
    def answer(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        return trimcp.ElicitResult(action="decline")

    async with connected(server, READER, client=client, revision=trimcp.LATEST_LEGACY) as session:
        assert (await session.call_tool("pay")).is_error
    assert [record["outcome"] for record in records] == ["tool_error"]
