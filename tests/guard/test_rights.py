"""Every request that a client may send, with every right that its token or a function may withhold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest
from trio.testing import wait_all_tasks_blocked

import trimcp
import trimcp.testing
from trimcp import Principal
from trimcp.guard import AccessRequest, Denied
from trimcp.wire.codes import FORBIDDEN, INTERNAL_ERROR
from trimcp.wire.methods import METHODS, Direction

URI, FAMILY = "files://one", "files://all/{name}"
MEMBER = "files://all/two"
SCOPE = "secret"


def crash(request: AccessRequest) -> bool:
    raise RuntimeError("the directory is down")


RIGHTS: dict[str, tuple[dict[str, Any], Principal | None]] = {
    "no scopes": ({"scopes": [SCOPE]}, Principal("ann", scopes=[])),
    "other scopes": ({"scopes": [SCOPE, "more"]}, Principal("ann", scopes=[SCOPE])),
    "refused by a function": ({"allow": lambda request: False}, Principal("ann")),
    "refused with a reason": ({"allow": lambda request: Denied("not you")}, None),
    "a function that crashes": ({"allow": crash}, Principal("ann")),
    "both": ({"scopes": [SCOPE], "allow": lambda request: True}, Principal("ann", scopes=["other"])),
}
"""What everything on a server asks for, and who asks without having it."""

Ask = Callable[[trimcp.ClientSession], Awaitable[Any]]
GUARDED: dict[str, list[Ask]] = {
    "tools/call": [lambda s: s.call_tool("tool")],
    "resources/read": [lambda s: s.read_resource(URI), lambda s: s.read_resource(MEMBER)],
    "resources/subscribe": [lambda s: _subscribe(s, URI), lambda s: _subscribe(s, MEMBER)],
    "prompts/get": [lambda s: s.get_prompt("prompt", {"name": "x"})],
    "completion/complete": [
        lambda s: s.complete_prompt("prompt", "name", ""),
        lambda s: s.complete_prompt("choices", "name", ""),
        lambda s: s.complete_resource(FAMILY, "name", ""),
        lambda s: s.complete_resource(URI, "name", ""),
    ],
}
LISTS = ("tools/list", "resources/list", "resources/templates/list", "prompts/list")
OPEN = {
    "initialize": "it says what the server can do",
    "ping": "it says nothing",
    "server/discover": "it says what the server can do",
    "logging/setLevel": "it concerns what the client is sent for its own requests",
    "resources/unsubscribe": "nobody is told more by it",
}


def test_the_table_has_every_request_of_a_client() -> None:
    sent = {
        name for name, row in METHODS.items() if row.result is not None and Direction.CLIENT_TO_SERVER in row.direction
    }
    ours = {*GUARDED, *LISTS, *OPEN, "subscriptions/listen"}
    assert {name for name in sent if not name.startswith("tasks/")} == ours


def offering(**options: Any) -> trimcp.Server[None]:
    """Everything asks for the same right, and nothing of it runs."""
    server: trimcp.Server[None] = trimcp.Server("guarded", dynamic=True)

    @server.tool(**options)
    def tool() -> str:
        raise AssertionError("called")

    @server.resource(URI, **options)
    def one() -> str:
        raise AssertionError("read")

    @server.resource(FAMILY, **options)
    def family(name: str) -> str:
        raise AssertionError("read")

    @server.prompt(**options)
    def prompt(name: str) -> str:
        raise AssertionError("got")

    @server.prompt(**options)
    def choices(name: Literal["a", "b"]) -> str:
        raise AssertionError("got")

    @server.complete("prompt", "name")
    @server.complete(FAMILY, "name")
    @server.complete(URI, "name")
    def suggest(typed: str) -> list[str]:
        raise AssertionError("completed")

    return server


async def _subscribe(session: trimcp.ClientSession, uri: str) -> None:
    """Before 2026-07-28 this is `resources/subscribe`; since then one that is not allowed is not agreed to."""
    async with session.listen(resources=[uri]) as changes:
        agreed = list(changes.acknowledged.resource_subscriptions or [])
        await wait_all_tasks_blocked()
    if not agreed:
        raise trimcp.RemoteError(FORBIDDEN, "not agreed to", None)


@trimcp.testing.every_revision
@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.parametrize("method", GUARDED)
async def test_who_lacks_a_right_is_refused_and_nothing_of_the_servers_runs(
    method: str, right: str, revision: trimcp.Revision, caplog: pytest.LogCaptureFixture
) -> None:
    options, principal = RIGHTS[right]
    server = offering(**options)
    async with trimcp.testing.connected(server, principal=principal, revision=revision) as session:
        for ask in GUARDED[method]:
            with pytest.raises(trimcp.RemoteError) as caught:
                await ask(session)
            assert caught.value.code == (INTERNAL_ERROR if right == "a function that crashes" else FORBIDDEN), ask
        server.resource_updated(URI)
        server.resource_updated(MEMBER)
    assert "AssertionError" not in caplog.text


@trimcp.testing.every_revision
@pytest.mark.parametrize("right", ["no scopes", "other scopes", "both"])
async def test_who_lacks_scopes_finds_nothing_in_the_lists(right: str, revision: trimcp.Revision) -> None:
    options, principal = RIGHTS[right]
    async with trimcp.testing.connected(offering(**options), principal=principal, revision=revision) as session:
        assert [await session.list_tools(), await session.list_resources()] == [[], []]
        assert [await session.list_resource_templates(), await session.list_prompts()] == [[], []]


@trimcp.testing.every_revision
async def test_a_function_is_told_of_each_request_what_it_is_and_for_what(revision: trimcp.Revision) -> None:
    asked: list[tuple[str, str, dict[str, Any]]] = []

    def allow(request: AccessRequest) -> bool:
        asked.append((request.method, request.name, dict(request.arguments)))
        return False

    async with trimcp.testing.connected(offering(allow=allow), revision=revision) as session:
        for asks in GUARDED.values():
            for ask in asks:
                with pytest.raises(trimcp.RemoteError):
                    await ask(session)
    watching = "subscriptions/listen" if revision.modern else "resources/subscribe"
    assert asked == [
        ("tools/call", "tool", {}),
        ("resources/read", URI, {}),
        ("resources/read", MEMBER, {"name": "two"}),
        (watching, URI, {}),
        (watching, MEMBER, {"name": "two"}),
        ("prompts/get", "prompt", {"name": "x"}),
        ("completion/complete", "prompt", {"name": ""}),
        ("completion/complete", "choices", {"name": ""}),
        ("completion/complete", FAMILY, {"name": ""}),
        ("completion/complete", URI, {"name": ""}),
    ]


async def test_a_subscription_is_agreed_to_for_what_is_allowed_and_for_nothing_else() -> None:
    server = offering(scopes=[SCOPE])
    server.add_resource("files://free", "text")
    async with (
        trimcp.testing.connected(server, principal=Principal("ann", scopes=[])) as session,
        session.listen(resources=[URI, "files://free", MEMBER], tools=True) as changes,
    ):
        assert changes.acknowledged.resource_subscriptions == ["files://free"]
        server.resource_updated(URI)
        server.resource_updated("files://free")
        assert await changes.receive() == trimcp.ResourceUpdated("files://free")
