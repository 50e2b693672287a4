"""Registered tools of several processes: each offers those of all, and a call finds its provider wherever that is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

import trimcp
from tests.agent_tools.test_providing import Provided, providing_to
from tests.peers.serving import served
from tests.peers.states import until
from tests.store.memory_store import MemoryHub, MemoryStore
from trimcp import agent_tools
from trimcp.agent_tools.catalog import forwarding, sharing

TOKENS = {"agent": "agent-7", "provider": "calc", "other": "other"}
BEARER = {"authorization": "Bearer agent"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather", "parameters": SCHEMA}


@attrs.define(eq=False)
class Process:
    """One process, as far as the others can tell."""

    tools: agent_tools.AgentTools
    store: MemoryStore
    url: str
    place: Any

    @property
    def streaming(self) -> str:
        return self.url.replace("http", "ws", 1)

    @property
    def names(self) -> list[str]:
        return [manifest.name for manifest in self.tools.catalog.manifests()]

    def die(self) -> None:
        del self.store.hub.leased[self.store.name]


def process(hub: MemoryHub, rules: agent_tools.RegistrationRules | None) -> tuple[agent_tools.AgentTools, MemoryStore]:
    def get_weather(city: str) -> str:
        return f"rain in {city}"

    tools = agent_tools.AgentTools(
        trimcp.Server("service"),
        authenticate=trimcp.bearer_tokens(TOKENS),
        implementations={"get_weather": get_weather},
        registration=rules,
    )
    return tools, MemoryStore(hub)


@asynccontextmanager
async def started(hub: MemoryHub, rules: agent_tools.RegistrationRules | None = None) -> AsyncIterator[Process]:
    tools, store = process(hub, rules)
    store.lease = 2.0
    async with served(tools.server, "http", agent_tools=tools, store=store, port=0) as place:
        yield Process(tools, store, place.url.removesuffix("/mcp"), place)


@asynccontextmanager
async def processes(number: int = 2, **rules: Any) -> AsyncIterator[list[Process]]:
    hub, registration = MemoryHub(), agent_tools.RegistrationRules(**rules) if rules else None
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(started(hub, registration)) for _ in range(number)]
        with trio.fail_after(20):
            yield made


async def test_a_tool_by_reference_is_offered_by_all_and_removed_by_all() -> None:
    async with processes(3) as made:
        one, two, three = made
        async with agent_tools.connect(one.url, token="provider") as agent:
            await agent.register(WEATHER)
        for each in made:
            async with agent_tools.connect(each.url, token="agent") as agent:
                assert await agent.call("get_weather", {"city": "Oslo"}) == "rain in Oslo"
        async with agent_tools.connect(two.url, token="other") as agent:
            with pytest.raises(agent_tools.NameTaken, match="somebody else"):
                await agent.register({**WEATHER, "version": "2"})
            with pytest.raises(agent_tools.NotAllowed):
                await agent.remove("get_weather")
        async with agent_tools.connect(three.url, token="provider") as agent:
            await agent.remove("get_weather")
        await until(lambda: not any(each.names for each in made))
        assert one.store.hub.records == {}


async def test_of_two_that_register_one_name_at_once_one_gets_it() -> None:
    async with processes() as made, AsyncExitStack() as stack:
        agents = [
            await stack.enter_async_context(agent_tools.connect(each.url, token=token))
            for each, token in zip(made, ("provider", "other"), strict=True)
        ]
        outcomes: list[str] = []

        async def register(agent: Any) -> None:
            try:
                await agent.register(WEATHER)
                outcomes.append("ok")
            except agent_tools.NameTaken:
                outcomes.append("taken")

        async with trio.open_nursery() as nursery:
            for agent in agents:
                nursery.start_soon(register, agent)
        assert sorted(outcomes) == ["ok", "taken"]
        await until(lambda: all(each.names == ["get_weather"] for each in made))


async def test_of_two_providers_of_one_agent_at_once_one_is_taken() -> None:
    async with processes() as made, trio.open_nursery() as nursery:
        outcomes: list[str] = []

        async def provide(each: Process) -> None:
            with pytest.raises(agent_tools.NameTaken, match="another stream"):
                await agent_tools.provide(
                    each.streaming,
                    [Provided().add],
                    token="provider",
                    on_registered=lambda _: outcomes.append("ok"),
                )
            outcomes.append("taken")

        for each in made:
            nursery.start_soon(provide, each)
        await until(lambda: sorted(outcomes) == ["ok", "taken"])
        nursery.cancel_scope.cancel()


async def test_what_was_registered_before_a_process_began_is_offered_by_it() -> None:
    async with processes(1) as [one]:
        async with agent_tools.connect(one.url, token="provider") as agent:
            await agent.register(WEATHER)
        async with started(one.store.hub) as two:
            assert two.names == ["get_weather"]


async def test_a_call_is_carried_out_where_its_provider_is_connected() -> None:
    seen: list[float] = []
    provided = Provided()
    async with processes() as [one, two], agent_tools.connect(two.url, token="agent") as agent:
        async with providing_to(one.streaming, provided.tools):
            assert await agent.call("calc.add", {"a": 1, "b": 2}) == 3
            count = agent.call("calc.count", {"number": 3}, on_progress=lambda each: seen.append(each.progress))
            assert await count == 3
            assert seen[0] == 1
            with pytest.raises(agent_tools.ToolFailed, match="broken"):
                await agent.call("calc.fail")
            with pytest.raises(agent_tools.AgentToolsError) as crashed:
                await agent.call("calc.crash")
            assert "secret" not in str(crashed.value)
            async with trimcp.Client("c").connect(trimcp.http(f"{two.url}/mcp", headers=BEARER)) as session:
                assert (await session.call_tool("calc.add", {"a": 2, "b": 2})).data == {"result": 4}
        await until(lambda: not two.names)
        assert one.store.hub.records == {}


async def test_cancelling_a_call_cancels_it_at_the_provider_of_another_process() -> None:
    provided = Provided()
    async with processes() as [one, two], providing_to(one.streaming, provided.tools):
        async with agent_tools.connect(two.url, token="agent") as agent, trio.open_nursery() as nursery:
            nursery.start_soon(agent.call, "calc.wait")
            await provided.began.wait()
            nursery.cancel_scope.cancel(reason="enough")
        await provided.ended.wait()


async def test_a_provider_that_breaks_at_another_process_fails_its_call_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with processes() as [one, two], providing_to(one.streaming, Provided().tools):
        await until(lambda: len(two.names) == 5)

        async def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("secret")

        async with agent_tools.connect(two.url, token="agent") as agent:
            with monkeypatch.context() as patching:
                patching.setattr(type(one.tools.catalog._table.offered("calc.add")[0].by), "call", broken)
                with pytest.raises(agent_tools.ToolCrashed, match="internal error"):
                    await agent.call("calc.add", {"a": 1, "b": 2})
            assert "crashed; incident" in caplog.text
            assert await agent.call("calc.add", {"a": 1, "b": 2}) == 3


async def test_calls_end_with_one_error_when_the_process_of_their_provider_is_gone() -> None:
    provided = Provided()
    async with processes() as [one, two], providing_to(one.streaming, provided.tools):
        async with agent_tools.connect(two.url, token="agent") as agent, trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(agent_tools.ProviderGone, match="has ended"):
                    await agent.call("calc.wait")

            nursery.start_soon(call)
            await provided.began.wait()
            one.die()
        await until(lambda: not two.names)


async def test_a_provider_that_comes_back_at_another_process_is_not_refused() -> None:
    async with processes() as [one, two], providing_to(one.streaming, Provided().tools):
        await until(lambda: len(two.names) == 5)
        one.die()
        async with providing_to(two.streaming, Provided().tools) as registered:
            assert len(registered) == 5
            async with agent_tools.connect(two.url, token="agent") as agent:
                assert await agent.call("calc.add", {"a": 1, "b": 2}) == 3


async def test_a_tool_is_approved_for_all() -> None:
    async def later(*_: Any) -> None:
        return None

    async with processes(approve=later) as [one, two]:
        async with agent_tools.connect(one.url, token="provider") as agent:
            (registered,) = [await agent.register(WEATHER)]
        assert two.names == one.names == []
        assert registered["status"] == "pending"
        one.tools.catalog.approve("get_weather", "1", registered["hash"])
        await until(lambda: two.names == ["get_weather"])


async def test_without_the_store_nothing_is_registered_and_what_is_there_is_called() -> None:
    async with processes() as [one, two]:
        async with agent_tools.connect(one.url, token="provider") as agent:
            await agent.register(WEATHER)
            await until(lambda: two.names == ["get_weather"])
            one.store.broken = OSError("away")
            with pytest.raises(agent_tools.AgentToolsError, match="could not keep"):
                await agent.register({**WEATHER, "version": "2"})
            assert await agent.call("get_weather", {"city": "Oslo"}) == "rain in Oslo"
            one.store.broken = None
            await agent.register({**WEATHER, "version": "2"})
        await until(lambda: len(two.tools.catalog.manifests("get_weather")) == 2)


async def test_a_record_that_another_has_written_wrongly_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async with processes(1) as [one]:
        hub = one.store.hub
        for number, data in enumerate([b"", b"x", b"[]", b'{"form":99,"versions":[]}', b'{"form":1,"versions":[7]}']):
            hub.records["tools", f"bad{number}"] = data, trio.current_time() + 600
        async with agent_tools.connect(one.url, token="provider") as agent:
            await agent.register(WEATHER)
        async with started(hub) as two:
            assert two.names == ["get_weather"]
    assert "cannot be offered" in caplog.text


def test_bounds() -> None:
    assert sharing._KEPT > sharing._AGAIN > 60
    assert forwarding._MOST_CALLS <= 10_000
