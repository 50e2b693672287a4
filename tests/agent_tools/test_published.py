"""What a service publishes of itself: the schemas of its messages, and errors that say what they answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import pytest
from jsonschema import Draft202012Validator

import trimcp
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools.messages.messages import MESSAGES, schemas


@asynccontextmanager
async def served() -> AsyncIterator[httpx2.AsyncClient]:
    server = trimcp.Server("published", "1")
    server.add_tool(lambda: "here", name="known", description="Be there.")
    app = trimcp.asgi_app(server, agent_tools=AgentTools(server))
    async with (
        app.lifespan(),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost") as web,
    ):
        yield web


async def test_the_schemas_are_what_the_service_answers() -> None:
    async with served() as web:
        assert (await web.get("/schemas")).json() == schemas()


def test_the_schemas_are_schemas() -> None:
    found = schemas()
    Draft202012Validator.check_schema(found)
    assert [entry["$ref"].rpartition("/")[2] for entry in found["oneOf"]] == list(MESSAGES)
    references = {word for word in json.dumps(found).split('"') if word.startswith("#/$defs/")}
    assert {reference.rpartition("/")[2] for reference in references} == set(found["$defs"])


@pytest.mark.parametrize(
    ("manifest", "valid"),
    [
        ({"name": "a", "parameters": {"type": "object"}}, True),
        ({"name": "a", "parameters": {"type": "object"}, "implementation": "b"}, True),
        ({"name": "a"}, False),
        ({"parameters": {"type": "object"}}, False),
    ],
)
def test_a_manifest_has_a_schema_wherever_it_stands(manifest: object, *, valid: bool) -> None:
    validator = Draft202012Validator(schemas())
    assert validator.is_valid({"type": "register_tool", "tool": manifest}) == valid
    assert validator.is_valid({"type": "provide_tools", "tools": [manifest]}) == valid


async def test_an_error_over_http_repeats_the_id_of_what_it_answers() -> None:
    async with served() as web:
        asked = {"type": "context_read", "context_id": "nobody-made-it", "request_id": "req-7"}
        reply = await web.post("/mcp", json=asked)
        assert reply.status_code == 404
        assert reply.json()["request_id"] == "req-7"
        assert reply.json()["error"]["code"] == "unknown_context"


async def test_a_version_that_is_not_there_is_named() -> None:
    async with served() as web:
        assert (await web.get("/tools/known")).json()["tools"][0]["version"] == "1"
        reply = await web.get("/tools/known?version=7")
        assert reply.status_code == 404
        assert reply.json()["error"]["message"] == "there is no tool named known of version 7"
