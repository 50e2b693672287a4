"""Registering tools, calling them and what goes wrong with them, as an agent sees it over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any

import attrs
import httpx2
import pytest
import trio

import trimcp
from trimcp.agent_tools import (
    AgentCaller,
    AgentTools,
    AgentToolsError,
    DeadlinePassed,
    Implemented,
    InvalidArguments,
    Manifest,
    NotAllowed,
    ProviderGone,
    RegistrationRules,
    ToolFailed,
    TooMuch,
)
from trimcp.transports.http.interfaces import Head

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get current weather for a city", "parameters": SCHEMA}
CALLBACK = {"name": "pay", "parameters": {"type": "object"}, "callback": "https://a.example/"}
TOKENS = {
    "ada": trimcp.Principal("ada", scopes={"tools:register"}),
    "bob": trimcp.Principal("bob", scopes={"tools:register"}),
    "eve": trimcp.Principal("eve", scopes=()),
}
ADA = AgentCaller(TOKENS["ada"], "ada")


def authenticate(head: Head) -> trimcp.Principal | trimcp.Refused:
    return TOKENS.get(head.headers.get("authorization", "").removeprefix("Bearer "), trimcp.Refused(401))


def check(arguments: Mapping[str, Any]) -> None:
    if arguments["city"] == "Atlantis":
        raise ValueError("there is no such city")


async def get_weather(city: str) -> dict[str, Any]:
    if city == "Nowhere":
        raise trimcp.ToolError("no weather there")
    return {"city": city}


async def anything(arguments: Any) -> Any:
    return arguments.get("value")


async def counter() -> list[int]:
    return []


async def counted(seen: Annotated[list[int], trimcp.Depends(counter, scope="server")]) -> int:
    seen.append(len(seen))
    return len(seen)


@attrs.define(eq=False)
class Agent:
    """Speaks to a service as one agent or another."""

    web: httpx2.AsyncClient
    tools: AgentTools

    async def ask(self, method: str, path: str, body: Any = None, who: str | None = "ada") -> tuple[int, Any]:
        headers = {} if who is None else {"authorization": f"Bearer {who}"}
        reply = await self.web.request(method, path, json=body, headers=headers)
        return reply.status_code, reply.json()

    async def register(self, manifest: Any, who: str | None = "ada") -> tuple[int, Any]:
        return await self.ask("POST", "/tools/register", manifest, who)

    async def call(self, name: str, arguments: Any = None, **members: Any) -> tuple[int, Any]:
        """Call a tool; the answer's result or error."""
        request = {
            "type": "tool_request",
            "tool_name": name,
            "arguments": arguments or {},
            "request_id": "r",
            **members,
        }
        status, answer = await self.ask("POST", "/mcp", request)
        return status, answer.get("error", answer.get("result"))


@asynccontextmanager
async def serving(
    rules: RegistrationRules | None = None, *, tokens: bool = True, host: str = "localhost"
) -> AsyncIterator[Agent]:
    server = trimcp.Server("s")
    server.add_tool(get_weather, name="own")
    implementations: dict[str, Any] = {
        "get_weather": Implemented(get_weather, validate=check),
        "anything": anything,
        "counted": counted,
    }
    tools = AgentTools(server, implementations=implementations, registration=rules)
    settings = trimcp.HttpSettings(authenticate=authenticate) if tokens else None
    app = trimcp.asgi_app(server, agent_tools=tools, **({} if settings is None else {"settings": settings}))
    transport = httpx2.ASGITransport(app=app)
    async with app.lifespan(), httpx2.AsyncClient(transport=transport, base_url=f"http://{host}") as web:
        yield Agent(web, tools)


async def test_registering_calling_listing_and_removing() -> None:
    async with serving() as agent:
        status, answer = await agent.register(WEATHER)
        assert status in (200, 201)
        (tool,) = answer["tools"]
        assert tool == {
            "name": "get_weather",
            "version": "1",
            "hash": Manifest.parse(WEATHER).hash,
            "status": "registered",
        }
        assert await agent.call("get_weather", {"city": "Beijing"}) == (200, {"city": "Beijing"})
        _, listed = await agent.ask("GET", "/tools/get_weather", who="bob")
        assert listed["tools"] == [{**WEATHER, "version": "1"}]
        assert (await agent.ask("DELETE", "/tools/get_weather"))[0] in (200, 204)
        assert (await agent.call("get_weather", {"city": "Beijing"}))[0] == 404


async def test_an_implementation_needs_what_the_server_entered_at_its_start() -> None:
    async with serving() as agent:
        assert (await agent.register({"name": "counted", "parameters": {"type": "object"}}))[0] in (200, 201)
        assert [await agent.call("counted") for _ in range(2)] == [(200, 1), (200, 2)]


@pytest.mark.parametrize("value", [{"a": 1}, [1, None], "text", "7", 7, 1.5, True, None, {"result": 1}])
async def test_whatever_an_implementation_returns_is_the_result(value: Any) -> None:
    async with serving() as agent:
        await agent.register({"name": "anything", "parameters": {"type": "object"}})
        assert await agent.call("anything", {"value": value}) == (200, value)


async def test_a_version_may_be_asked_for() -> None:
    async with serving() as agent:
        for version in ("1", "2", "10"):
            schema = {"type": "object", "properties": {"value": {"const": version}}}
            await agent.register({"name": "anything", "parameters": schema, "version": version})
        for version in ("1", "2", "10", "10.0"):
            value = version.removesuffix(".0")
            assert await agent.call("anything", {"value": value}, version=version) == (200, value)
        assert await agent.call("anything", {"value": "10"}) == (200, "10")
        assert (await agent.call("anything", {"value": "9"}))[0] == 422
        status, error = await agent.call("anything", {}, version="3")
        assert (status, error["code"]) == (404, "unknown_tool")
        assert (await agent.ask("DELETE", "/tools/anything?version=10"))[0] in (200, 204)
        assert await agent.call("anything", {"value": "2"}) == (200, "2")


@pytest.mark.parametrize(
    ("manifest", "token", "status", "code"),
    [
        (WEATHER, None, 401, "unauthenticated"),
        (WEATHER, "nobody", 401, "unauthenticated"),
        (WEATHER, "eve", 403, "forbidden"),
        (WEATHER, "bob", 409, "name_taken"),
        ({**WEATHER, "description": "other"}, "ada", 409, "name_taken"),
        ({**WEATHER, "name": "own"}, "ada", 422, "invalid_manifest"),
        ({**WEATHER, "name": "own", "implementation": "get_weather"}, "ada", 409, "name_taken"),
        ({**WEATHER, "name": "a b"}, "ada", 422, "invalid_manifest"),
        (
            {**WEATHER, "parameters": {"type": "object", "a": {"$ref": "x"} | {"b": [[[[]]]] * 9_000}}},
            "ada",
            422,
            "invalid_manifest",
        ),
        (
            {"name": "anything", "parameters": {"type": "object", "properties": {"a": {"$ref": "https://b.example/"}}}},
            "ada",
            422,
            "invalid_manifest",
        ),
        (CALLBACK, "ada", 403, "forbidden"),
        ([WEATHER], "ada", 400, "malformed"),
    ],
)
async def test_registrations_that_are_refused(manifest: Any, token: str | None, status: int, code: str) -> None:
    async with serving() as agent:
        await agent.register(WEATHER)
        found, answer = await agent.register(manifest, token)
        assert (found, answer["error"]["code"]) == (status, code)
        _, listed = await agent.ask("GET", "/tools")
        assert [(tool["name"], tool["version"]) for tool in listed["tools"]] == [("own", "1"), ("get_weather", "1")]


async def test_too_many_registrations() -> None:
    async with serving(RegistrationRules(max_per_owner=1)) as agent:
        await agent.register(WEATHER)
        status, answer = await agent.register({"name": "anything", "parameters": {"type": "object"}})
        assert (status, answer["error"]["code"]) == (429, "too_much")


@pytest.mark.parametrize(("token", "status"), [("bob", 403), ("eve", 403)])
async def test_somebody_else_removes_nothing(token: str, status: int) -> None:
    async with serving() as agent:
        await agent.register(WEATHER)
        for name in ("get_weather", "own"):
            assert (await agent.ask("DELETE", f"/tools/{name}", who=token))[0] == status
        assert (await agent.ask("DELETE", "/tools/nothing", who="bob"))[0] == 404
        assert (await agent.call("get_weather", {"city": "Beijing"}))[0] == 200


async def test_what_is_registered_waits_for_approval() -> None:
    async with serving(RegistrationRules(approve=lambda manifest, caller: None)) as agent:
        _, answer = await agent.register(WEATHER)
        (tool,) = answer["tools"]
        assert tool["status"] == "pending"
        assert (await agent.call("get_weather", {"city": "Beijing"}))[0] == 404
        agent.tools.catalog.approve(tool["name"], tool["version"], tool["hash"])
        assert (await agent.call("get_weather", {"city": "Beijing"}))[0] == 200


async def test_arguments_are_validated_three_times() -> None:
    async with serving() as agent:
        await agent.register({**WEATHER, "parameters": {"type": "object", "properties": {"city": {"maxLength": 20}}}})
        for arguments, problem in (
            ({"city": "x" * 21}, "city"),  # by the manifest
            ({"city": 7}, "must be a string"),  # by the implementation's type hints
            ({"city": "Atlantis"}, "there is no such city"),  # by its own function
        ):
            status, error = await agent.call("get_weather", arguments)
            assert (status, error["code"]) == (422, "invalid_arguments")
            assert problem in str(error["data"]["problems"])
        assert (await agent.call("get_weather", {"city": "Nowhere"}))[1]["code"] == "tool_error"


# Tools that live elsewhere


@attrs.define(eq=False)
class Stream:
    """A provider as a stream's other end plays it."""

    answer: Any
    name: str = "stream"

    async def call(self, manifest: Manifest, arguments: Mapping[str, Any], *, progress: Any, request_id: str) -> Any:
        await trio.lowlevel.checkpoint()
        if isinstance(self.answer, AgentToolsError):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("value", [{"a": 1}, [1, None], "text", 7, None, {"result": 1}])
async def test_whatever_a_provider_returns_is_the_result(value: Any) -> None:
    async with serving() as agent:
        await agent.tools.catalog.register({"name": "any", "parameters": {"type": "object"}}, ADA, by=Stream(value))
        assert await agent.call("ada.any") == (200, value)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ToolFailed("no"), 200, "tool_error"),
        (InvalidArguments("no", {"problems": ["no"]}), 422, "invalid_arguments"),
        (NotAllowed("no"), 403, "forbidden"),
        (TooMuch("no", retry_after=3), 429, "too_much"),
        (DeadlinePassed("no"), 504, "deadline"),
        (ProviderGone("no"), 503, "provider_gone"),
        (AgentToolsError("no"), 500, "crashed"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_errors_of_a_provider_are_told(error: AgentToolsError, status: int, code: str) -> None:
    async with serving() as agent:
        await agent.tools.catalog.register({"name": "any", "parameters": {"type": "object"}}, ADA, by=Stream(error))
        found, told = await agent.call("ada.any")
        assert (found, told["code"]) == (status, code)
        assert "no" in told["message"]


# Without a token


async def test_without_a_token_on_loopback_only_where_that_was_chosen() -> None:
    async with serving(tokens=False) as agent:
        status, answer = await agent.register(WEATHER, None)
        assert (status, answer["error"]["code"]) == (403, "forbidden")
    async with serving(RegistrationRules(anonymous_on_loopback=True), tokens=False) as agent:
        assert (await agent.register(WEATHER, None))[0] in (200, 201)
        assert await agent.call("get_weather", {"city": "Beijing"}) == (200, {"city": "Beijing"})
