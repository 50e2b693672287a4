"""The table of errors, row by row, on each face: how each is provoked, and what an agent sees of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest

import trimcp
from tests.agent_tools.faces import FACES, AgentFace, AgentLink, AgentReply, serving_world
from tests.agent_tools.rpc_faces import RPC_FACES
from tests.agent_tools.world import WEATHER, World, call_of, make_world
from tests.peers.states import until
from trimcp.agent_tools import AgentCaller, ContextLimits, Manifest
from trimcp.agent_tools.messages.errors import ERRORS_BY_CODE, ProviderGone

DEMO = "demo-token"
BOUND = 32 * 1024  # bytes of a message


@attrs.frozen
class Table:
    """What a row is provoked on.

    Attributes:
        face: the way to the service.
        world: what is served.
        agent: a connection with a token.
    """

    face: AgentFace
    world: World
    agent: AgentLink

    @asynccontextmanager
    async def beside(self, token: str | None = DEMO) -> AsyncIterator[AgentLink]:
        """Another connection."""
        async with self.face.link(token) as link:
            yield link


Provoke = Callable[[Table], Awaitable[AgentReply]]


@attrs.frozen
class Row:
    """One row: what an agent does, and what it gets.

    Attributes:
        provoke: does it, and returns the answer.
        code: of the error.
        status: the `status` of the answer to a call that asked for `extended` ones; "" for what is no call.
        later: whether it says when to try again.
        bytes: whether it is about how a message is written as JSON, which no protocol buffer can be.
        known: what its `data` has, as names.
    """

    provoke: Provoke
    code: str
    status: str = "error"
    later: bool = False
    bytes: bool = False
    known: tuple[str, ...] = ()


ROWS: dict[str, Row] = {}


def row(
    code: str, status: str = "error", *, later: bool = False, bytes: bool = False, known: tuple[str, ...] = ()
) -> Any:
    """Add a row that this function provokes."""

    def add(provoke: Provoke) -> Provoke:
        ROWS[provoke.__name__] = Row(provoke, code, status, later, bytes, known)
        return provoke

    return add


def call(tool: str, **members: Any) -> dict[str, Any]:
    return call_of(tool, statuses="extended", **members)


@row("malformed", "", bytes=True)
async def no_json(at: Table) -> AgentReply:
    return await at.agent.ask(b'{"type": "tool_request"')


@row("malformed", "", bytes=True)
async def no_object(at: Table) -> AgentReply:
    return await at.agent.ask(b"[1]")


@row("malformed", "", bytes=True)
async def member_missing(at: Table) -> AgentReply:
    return await at.agent.ask({"type": "tool_request", "tool_name": "echo"})


@row("malformed", bytes=True)
async def member_of_a_wrong_type(at: Table) -> AgentReply:
    return await at.agent.ask({**call("echo"), "arguments": []})


@row("unknown_tool")
async def unknown_tool(at: Table) -> AgentReply:
    return await at.agent.ask(call("nothing"))


@row("unknown_tool")
async def unknown_version(at: Table) -> AgentReply:
    return await at.agent.ask(call("echo", version="7", text="x"))


@row("invalid_arguments", known=("problems",))
async def arguments_of_a_wrong_type(at: Table) -> AgentReply:
    return await at.agent.ask(call("echo", text=1))


@row("invalid_arguments", known=("problems",))
async def arguments_that_middleware_spoiled(at: Table) -> AgentReply:
    return await at.agent.ask(call("echo", text="spoil me"))


@row("tool_error")
async def error_of_the_tool(at: Table) -> AgentReply:
    return await at.agent.ask(call("fail"))


@row("tool_error")
async def protocol_error_of_the_tool(at: Table) -> AgentReply:
    return await at.agent.ask(call("odd"))


@row("crashed", known=("incident",))
async def crash(at: Table) -> AgentReply:
    return await at.agent.ask(call("crash"))


@row("unauthenticated", "")
async def no_token(at: Table) -> AgentReply:
    async with at.beside(None) as anybody:
        return await anybody.ask(call("echo", text="x"))


@row("unauthenticated", "")
async def bad_token(at: Table) -> AgentReply:
    async with at.beside("wrong") as anybody:
        return await anybody.ask(call("echo", text="x"))


@row("forbidden", "denied")
async def not_allowed(at: Table) -> AgentReply:
    return await at.agent.ask(call("forbidden"))


@row("forbidden", "denied", known=("requiredScopes",))
async def scopes_missing(at: Table) -> AgentReply:
    async with at.beside("weak-token") as weak:
        return await weak.ask(call("guarded", text="x"))


@row("forbidden", "", known=("requiredScopes",))
async def registration_without_the_scope(at: Table) -> AgentReply:
    async with at.beside("weak-token") as weak:
        return await weak.ask({"type": "register_tool", "tool": WEATHER})


@row("context_gone", "")
async def context_gone(at: Table) -> AgentReply:
    await at.agent.ask({"type": "context_create", "context_id": "c"})
    await at.agent.ask({"type": "context_destroy", "context_id": "c"})
    return await at.agent.ask({"type": "context_read", "context_id": "c"})


@row("context_gone")
async def call_in_a_context_that_is_gone(at: Table) -> AgentReply:
    await at.agent.ask({"type": "context_create", "context_id": "c"})
    await at.agent.ask({"type": "context_destroy", "context_id": "c"})
    return await at.agent.ask(call("echo", context="c", text="x"))


@row("unknown_context", "")
async def unknown_context(at: Table) -> AgentReply:
    return await at.agent.ask({"type": "context_read", "context_id": "nobodys"})


@row("unknown_context")
async def context_of_somebody_else(at: Table) -> AgentReply:
    made = await at.agent.ask({"type": "context_create"})
    async with at.beside("other-token") as other:
        return await other.ask(call("echo", context=made.message["context_id"], text="x"))


@row("version_conflict", "", known=("version",))
async def version_conflict(at: Table) -> AgentReply:
    await at.agent.ask({"type": "context_update", "context_id": "c", "updates": {"a": 1}})
    return await at.agent.ask({"type": "context_update", "context_id": "c", "updates": {"a": 2}, "version": 0})


@row("too_much", later=True)
async def quota(at: Table) -> AgentReply:
    assert (await at.agent.ask(call("seldom"))).message["status"] == "success"
    return await at.agent.ask(call("seldom", id="r2"))


@row("too_much", "", later=True)
async def too_many_contexts(at: Table) -> AgentReply:
    for number in range(5):
        await at.agent.ask({"type": "context_create", "context_id": f"c{number}"})
    return await at.agent.ask({"type": "context_create"})


@row("too_large", "")
async def message_too_large(at: Table) -> AgentReply:
    return await at.agent.ask(call("echo", text="x" * BOUND))


@row("too_large", "")
async def state_too_large(at: Table) -> AgentReply:
    update = {"type": "context_update", "context_id": "c", "updates": {"a": "x" * 5_000}}
    return await at.agent.ask(update)


@row("deadline", "timeout")
async def deadline(at: Table) -> AgentReply:
    return await at.agent.ask(call("wait", timeout=0.01))


@row("deadline", "timeout")
async def deadline_of_the_tool(at: Table) -> AgentReply:
    return await at.agent.ask(call("slow"))


@row("draining", later=True)
async def draining(at: Table) -> AgentReply:
    async with at.beside() as busy:
        await busy.send(call("wait", id="busy"))
        await at.world.began.wait()

        async def drain() -> None:
            at.face.place.stop.set()
            await until(lambda: at.world.draining)

        if not at.face.many:
            reply = await at.agent.ask(call("echo", text="x"), drain)  # under way, so that its connection is not closed
            at.world.release.set()
            assert (await busy.receive()).message["result"] == "released"
            return reply
        await busy.send(call("echo", text="x"), drain)
        found = {}
        for _ in range(2):
            reply = await busy.receive()
            found["result" in reply.message] = reply
            at.world.release.set()
        assert found[True].message["result"] == "released"
        return found[False]


@row("duplicate_request")
async def request_under_way(at: Table) -> AgentReply:
    async with at.beside() as busy:
        await busy.send(call("wait", id="same", context="c"))
        await at.world.began.wait()
        return await at.agent.ask(call("echo", id="same", context="c", text="x"))


@row("cancelled", "cancelled")
async def cancelled_with_its_context(at: Table) -> AgentReply:
    async with at.beside() as busy:
        await busy.send(call("wait", context="c"))
        await at.world.began.wait()
        await at.agent.ask({"type": "context_destroy", "context_id": "c", "reason": "enough"})
        reply = await busy.receive()
        assert reply.error["message"] == "enough"
        return reply


class LostProvider:
    """Says of each call that its provider is gone."""

    name = "lost"

    async def call(self, manifest: Manifest, arguments: Mapping[str, Any], **options: Any) -> Any:
        raise ProviderGone("the provider has disconnected")


@row("provider_gone")
async def provider_gone(at: Table) -> AgentReply:
    caller = AgentCaller(trimcp.Principal("p"), "elsewhere")
    manifest = {"name": "shout", "parameters": {"type": "object"}}
    registered = await at.world.agent_tools.catalog.register(manifest, caller, LostProvider())
    return await at.agent.ask(call(registered.manifest.name))


@row("name_taken", "")
async def name_taken(at: Table) -> AgentReply:
    return await at.agent.ask(
        {"type": "register_tool", "tool": {**WEATHER, "name": "echo", "implementation": "get_weather"}}
    )


@row("invalid_manifest", "", known=("problems",))
async def manifest_with_problems(at: Table) -> AgentReply:
    return await at.agent.ask({"type": "register_tool", "tool": {"name": "x"}})


EVERY = {**FACES, **RPC_FACES}
PAIRS = [(face, name) for face in EVERY for name, row in ROWS.items() if not (row.bytes and face in RPC_FACES)]


@pytest.mark.parametrize(("face", "name"), PAIRS)
async def test_each_row_on_each_face(face: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    row = ROWS[name]
    contexts = ContextLimits(max_per_owner=5, max_state=4_096)
    world = make_world(limits=trimcp.Limits(max_message=BOUND), contexts=contexts)
    async with serving_world(face, world, faces=EVERY) as served, served.link("demo-token") as agent:
        reply = await row.provoke(Table(served, world, agent))
        world.release.set()
    if face == "websocket on hypercorn" and name == "message_too_large":
        assert reply.status == 1009  # Hypercorn closes the connection
        return
    kind = ERRORS_BY_CODE[row.code]
    if reply.code:
        assert reply.code.replace("CANCELED", "CANCELLED") == kind.grpc_status
    error = reply.error
    assert error["code"] == row.code
    assert error["message"]
    assert "secret" not in str(reply.message)
    for known in row.known:
        assert error["data"][known]
    if row.status and not reply.code:
        assert (reply.message["type"], reply.message["status"]) == ("tool_response", row.status)
    if row.code == "crashed":
        assert f"incident {error['data']['incident']}" in caplog.text
    if row.code == "unauthenticated" and not reply.code:
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    elif reply.status is not None:
        assert reply.status == kind.http_status
        assert ("retry-after" in reply.headers) is row.later
        assert reply.headers["content-type"] == "application/json"
    if row.later and row.code == "too_much":
        assert error["retry_after"] > 0


def test_every_error_has_a_row() -> None:
    assert {row.code for row in ROWS.values()} == set(ERRORS_BY_CODE) - {"not_found"}  # which is no message's
