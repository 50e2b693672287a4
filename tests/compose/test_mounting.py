"""`server.mount`: several servers as one, each with what is its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import pytest
import trio
from trio.testing import MockClock

import trimcp
from tests.interaction.proxied import Behind, able
from trimcp.compose.proxy import proxy
from trimcp.errors import LocalError, RemoteError
from trimcp.principal import Principal
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.testing import connected
from trimcp.wire.common import META_PROGRESS
from trimcp.wire.content import EmbeddedResource, ResourceLink, TextResourceContents
from trimcp.wire.lifecycle import SubscriptionFilter
from trimcp.wire.revisions import LATEST, LATEST_LEGACY

FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.fixture
def clock() -> MockClock:
    return MockClock(autojump_threshold=0)


def make(name: str, journal: list[str]) -> Server[str]:
    @asynccontextmanager
    async def lifespan(server: Server[str]) -> AsyncIterator[str]:
        journal.append(f"{name} entered")
        try:
            yield f"state of {name}"
        finally:
            journal.append(f"{name} left")

    async def open_db() -> AsyncIterator[str]:
        yield f"db of {name}"

    server = Server(name, "1.0", lifespan=lifespan, page_size=2, dynamic=True)

    @server.middleware
    async def note(ctx: Any, params: Any, call_next: Any) -> Any:
        journal.append(f"{name}: {ctx.method}")
        return await call_next(ctx, params)

    @server.tool
    async def state(ctx: Context[str], db: Annotated[str, trimcp.Depends(open_db, scope="server")]) -> str:
        return f"{ctx.state}, {db}"

    @server.tool
    async def ask(ctx: Context[str]) -> str:
        answer = await ctx.elicit("Your name?", FORM)
        return f"{name}: {(answer.content or {})['name']}"

    @server.tool
    async def more(what: str) -> str:
        async def later() -> str:
            return what

        server.add_tool(later, name=what)
        return what

    @server.tool(structured=False)
    async def links() -> list[Any]:
        contents = TextResourceContents(uri="notes://same", text=name)
        return [ResourceLink(name="own", uri=f"notes://{name}"), EmbeddedResource(contents)]

    @server.tool
    async def touch(uri: str) -> str:
        server.resource_updated(uri)
        return uri

    server.add_resource("notes://same", f"same of {name}")
    server.add_resource(f"notes://{name}", f"own of {name}")

    @server.resource(name + "://{thing}")
    async def things(thing: str) -> str:
        return f"{thing} of {name}"

    @server.prompt
    async def review(path: str) -> str:
        return f"{name} reviews {path}"

    @server.complete("review", "path")
    async def paths(value: str) -> list[str]:
        return [f"{name}/{value}"]

    return server


def make_all(kind: str, journal: list[str]) -> Server[Any]:
    """A server with two mounted in it: as they are, or through a proxy before each."""
    outer = Server("outer", "1.0")

    @outer.tool
    async def own() -> str:
        return "own"

    outer.add_resource("notes://same", "same of outer")
    for name in ("maps", "wx"):
        inner: Server[Any] = make(name, journal)
        if kind == "proxies":
            behind = Behind(inner)
            inner = proxy(behind, name=name)
            inner.parts.insert(0, behind.while_running)
        outer.mount(inner, prefix=name)
    return outer


async def test_of_two_that_are_mounted_the_first_keeps_its_address(clock: Any) -> None:
    outer = Server("outer")
    for name in ("maps", "wx"):
        outer.mount(make(name, []), prefix=name)
    async with able().connect(outer) as session:
        uris = [resource.uri for resource in await session.list_resources()]
        assert uris == ["notes://same", "notes://maps", "notes://wx+same", "notes://wx"]
        texts = [(await session.read_resource(uri)).contents[0].text for uri in uris]
        assert texts == ["same of maps", "own of maps", "same of wx", "own of wx"]
        _, embedded = (await session.call_tool("wx__links")).content
        assert embedded.resource.uri == "notes://wx+same"
        _, embedded = (await session.call_tool("maps__links")).content
        assert embedded.resource.uri == "notes://same"


@pytest.mark.parametrize("kind", ["servers", "proxies"])
@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_each_keeps_what_is_its_own(kind: str, revision: Any, clock: Any) -> None:
    journal: list[str] = []
    outer = make_all(kind, journal)
    with trio.fail_after(60):
        async with able().connect(outer, revision=revision) as session:
            names = [tool.name for tool in await session.list_tools()]
            mounted = [
                f"{prefix}__{name}" for prefix in ("maps", "wx") for name in ("state", "ask", "more", "links", "touch")
            ]
            assert names == ["own", *mounted]
            assert (await session.call_tool("own")).text == "own"
            for name in ("maps", "wx"):
                assert (await session.call_tool(f"{name}__state")).text == f"state of {name}, db of {name}"
                assert (await session.call_tool(f"{name}__ask")).text == f"{name}: Ada"
                assert (await session.get_prompt(f"{name}__review", {"path": "x"})).messages[
                    0
                ].text == f"{name} reviews x"
                assert (await session.complete_prompt(f"{name}__review", "path", "y")).values == [f"{name}/y"]
            assert "maps: tools/call" in journal
            for wrong in ("maps__none", "none__state", "state"):
                with pytest.raises(RemoteError, match="unknown tool"):
                    await session.call_tool(wrong)
    assert journal.count("maps left") == journal.count("wx left") == 1


@pytest.mark.parametrize("kind", ["servers", "proxies"])
async def test_addresses_change_only_where_they_clash(kind: str, clock: Any) -> None:
    async with able().connect(make_all(kind, [])) as session:
        uris = [resource.uri for resource in await session.list_resources()]
        assert uris == ["notes://same", "notes://maps+same", "notes://maps", "notes://wx+same", "notes://wx"]
        read = {uri: (await session.read_resource(uri)).contents[0] for uri in uris}
        assert [each.text for each in read.values()] == [
            *("same of outer", "same of maps", "own of maps", "same of wx", "own of wx")
        ]
        assert [contents.uri for contents in read.values()] == uris
        assert [each.uri_template for each in await session.list_resource_templates()] == [
            "maps://{thing}",
            "wx://{thing}",
        ]
        assert (await session.read_resource("wx://a")).contents[0].text == "a of wx"
        link, embedded = (await session.call_tool("wx__links")).content
        assert (link.uri, embedded.resource.uri) == ("notes://wx", "notes://wx+same")
        with pytest.raises(RemoteError) as missing:
            await session.read_resource("none://x")
        assert missing.value.code == LATEST.resource_missing_code


@pytest.mark.parametrize("kind", ["servers", "proxies"])
@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_changes_of_what_is_mounted_are_told(kind: str, revision: Any, clock: Any) -> None:
    with trio.fail_after(60):
        async with (
            able().connect(make_all(kind, []), revision=revision) as session,
            session.listen(tools=True, resources=["notes://wx"]) as changes,
        ):
            await session.call_tool("wx__more", {"what": "new"})
            assert await changes.receive() == trimcp.ToolsChanged()
            assert "wx__new" in [tool.name for tool in await session.list_tools()]
            assert (await session.call_tool("wx__new")).text == "new"
            await session.call_tool("maps__touch", {"uri": "notes://maps"})
            await session.call_tool("wx__touch", {"uri": "notes://wx"})
            assert await changes.receive() == trimcp.ResourceUpdated("notes://wx")


async def test_changes_of_tasks_behind_a_prefix_are_told(clock: Any) -> None:
    async def slow(ctx: Context[Any]) -> str:
        for step in (1, 2):
            await trio.sleep(60)
            await ctx.report_progress(step)
        await trio.sleep(60)
        return "done"

    outer, middle = Server("outer"), Server("middle")
    outer.tool(task="required")(slow)
    outer.tasks(running=4)
    for where, prefix in ((outer, "near"), (outer, "gone"), (middle, "deep")):
        inner = Server(prefix)
        inner.tool(task="required")(slow)
        behind = Behind(inner)
        made = proxy(behind, name=prefix)
        made.parts.insert(0, behind.while_running)
        where.mount(made, prefix=prefix)
    outer.mount(middle, prefix="middle", visible=lambda admission: admission.principal == "ada")
    for who, names in (
        ("ada", ["slow", "near__slow", "middle__deep__slow"]),
        ("eve", ["slow", "near__slow"]),
    ):
        client = trimcp.Client("c", tasks=True)
        async with connected(outer, client, principal=Principal(who)) as session:
            tasks = [await session.start_task(name) for name in names]
            ids = [task.id for task in tasks if task.id is not None]
            foreign = ["near__none", "gone__none", "middle__deep__none", "none"]
            wanted = SubscriptionFilter(task_ids=[*ids, *foreign])
            async with session.subscriptions.listening(wanted) as changes:
                assert changes.acknowledged.task_ids == ids
                for _ in range(2 * len(ids)):
                    told: Any = await changes.receive()
                    state = changes.tasks[told.id]
                    assert (state["taskId"], state["status"]) == (told.id, "working")
                assert {state["_meta"][META_PROGRESS]["progress"] for state in changes.tasks.values()} == {2}
            for task in tasks:
                assert (await task.result()).text == "done"


async def test_a_mounted_server_that_refuses_to_tell_of_tasks_takes_nothing_from_the_others(
    clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    behind, outer = Behind(Server("behind")), Server("outer")
    behind.server.tasks()
    made = proxy(behind, name="behind")
    made.parts.insert(0, behind.while_running)
    outer.mount(made, prefix="far")
    outer.add_resource("notes://here", "here")
    wanted = SubscriptionFilter(task_ids=["far__x"], resource_subscriptions=["notes://here"])
    async with connected(outer) as session, session.subscriptions.listening(wanted) as changes:
        assert changes.acknowledged == SubscriptionFilter(resource_subscriptions=["notes://here"])
        assert "did not declare the extension for tasks" in caplog.text
        outer.resource_updated("notes://here")
        assert await changes.receive() == trimcp.ResourceUpdated("notes://here")


async def test_who_may_see_it_is_asked(clock: Any) -> None:
    outer = Server("outer")
    outer.mount(make("maps", []), prefix="maps", scopes=["maps"])
    outer.mount(make("wx", []), prefix="wx", visible=lambda admission: admission.principal == "ann")
    for principal, seen in ((Principal("ann", scopes=[]), "wx"), (Principal("bob", scopes=["maps"]), "maps")):
        async with connected(outer, principal=principal) as session:
            assert {tool.name.partition("__")[0] for tool in await session.list_tools()} == {seen}
            other = "maps" if seen == "wx" else "wx"
            assert (await session.call_tool(f"{seen}__state")).text
            with pytest.raises(RemoteError, match="unknown tool"):
                await session.call_tool(f"{other}__state")
            with pytest.raises(RemoteError, match="not found"):
                await session.read_resource(f"notes://{other}")


def test_what_cannot_be_mounted_is_refused() -> None:
    outer = Server("outer")
    outer.mount(Server("a"), prefix="a")
    tasks = Server("tasks")
    tasks.tasks()
    for other, prefix, why in (
        (Server("b"), "a", "already"),
        (Server("b"), "a__b", "letters"),
        (Server("b"), "", "letters"),
        (outer, "o", "in itself"),
        (tasks, "t", "as tasks"),
    ):
        with pytest.raises(LocalError, match=why):
            outer.mount(other, prefix=prefix)
    with pytest.raises(TypeError, match=r"trimcp\.proxy"):
        outer.mount("https://mcp.example/mcp", prefix="x")  # type: ignore[arg-type]
