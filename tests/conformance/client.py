"""The client that the official conformance suite drives, and that uses everything a server offers.

    python tests/conformance/client.py http://localhost:8000/mcp

The suite says in the environment which of its scenarios it plays. Most of them want what any client would do.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import trio

import trimcp
from trimcp import auth

client = trimcp.Client("conformance", "1.0", roots=[Path.cwd().as_uri()])


@client.elicitation
def fill_in(request: trimcp.ElicitParams) -> trimcp.ElicitResult:
    """Accept what the form suggests, and invent the rest."""
    if not isinstance(request, trimcp.wire.ElicitFormParams):
        return trimcp.ElicitResult(action="decline")
    invented = {name: INVENTED[field.type] for name, field in request.requested_schema.properties.items()}
    return trimcp.ElicitResult(action="accept", content=invented | trimcp.fill_defaults(request.requested_schema))


@client.sampling
def complete(params: trimcp.CreateMessageParams) -> str:
    """Stand in for a model."""
    return "a model's words"


async def use_everything(session: trimcp.ClientSession) -> None:
    """Look at everything the server lists."""
    for tool in await session.list_tools():
        await session.call_tool(tool.name, invent(tool.input_schema))
    for resource in await session.list_resources():
        await session.read_resource(resource.uri)
    for prompt in await session.list_prompts():
        await session.get_prompt(prompt.name, {argument.name: "text" for argument in prompt.arguments or ()})


async def look_and_call(session: trimcp.ClientSession) -> None:
    """List tools and call the first one, which is all that protected servers have."""
    tools = await session.list_tools()
    await session.call_tool(tools[0].name, {})


async def look_at_tools(session: trimcp.ClientSession) -> None:
    """List tools, which is all that some servers answer."""
    await session.list_tools()


async def make_the_calls_asked_for(session: trimcp.ClientSession) -> None:
    """Call tools with arguments that travel in headers."""
    context = json.loads(os.environ["MCP_CONFORMANCE_CONTEXT"])
    await session.list_tools()  # whose schemas say which
    for call in context["toolCalls"]:
        await session.call_tool(call["name"], call["arguments"])


async def return_the_schema(session: trimcp.ClientSession) -> None:
    """Send the schema of a tool back as it was understood."""
    tools = {tool.name: tool for tool in await session.list_tools()}
    schema = dict(tools["json_schema_2020_12_tool"].input_schema)
    await session.call_tool("json_schema_echo", {"schema": schema})


async def use_a_skill(session: trimcp.ClientSession) -> None:
    """Activate the first skill, and read every file of it."""
    skills = trimcp.ServerSkills(session, lambda skill: True)
    active = await skills.activate((await skills.list_all())[0])
    for path in active.files:
        await active.read(path)


async def look_at_skills(session: trimcp.ClientSession) -> None:
    """List skills, and use none."""
    await trimcp.ServerSkills(session, lambda skill: True).list_all()


# Authorization


class Robot(auth.UserAgent, auth.Redirect):
    """A person who always says yes: it asks for the page, and is told where to come back to."""

    uri = "http://localhost:3000/callback"

    @asynccontextmanager
    async def redirect(self, preferred: str | None) -> AsyncIterator[auth.Redirect]:
        """Listen to nobody: the way back is read off."""
        yield self

    async def visit(self, url: str, state: str) -> str:
        """Return the address to which the page sends."""
        async with httpx2.AsyncClient() as web:
            reply = await web.get(url, follow_redirects=False)
        return reply.headers["location"]


async def issuer_for(url: str) -> str:
    """Who gives tokens for a server: who has a secret knows from whom, which these scenarios do not say."""
    async with httpx2.AsyncClient() as web:
        origin, path = str(httpx2.URL(url).join("/")).rstrip("/"), httpx2.URL(url).path
        for where in (path, ""):
            reply = await web.get(f"{origin}/.well-known/oauth-protected-resource{where}")
            if reply.status_code == 200:
                return str(reply.json()["authorization_servers"][0])
    return origin


async def authorization(scenario: str, url: str) -> auth.OAuth:
    """How a scenario wants its token to be got."""
    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
    id, secret = context.get("client_id"), context.get("client_secret")
    secrets = ("auth/wif-jwt-bearer", "auth/enterprise-managed-authorization")
    issuer = await issuer_for(url) if secret is not None or scenario in secrets else None
    grant: auth.Grant
    match scenario:
        case "auth/client-credentials-jwt":
            key = auth.SigningKey.from_pem(context["private_key_pem"], context["signing_algorithm"])
            grant = auth.ClientCredentials(id, signing_key=key)
        case "auth/client-credentials-basic":
            grant = auth.ClientCredentials(id, secret, issuer=issuer)
        case "auth/wif-jwt-bearer":
            grant = auth.JwtBearer(lambda issuer: context["valid_jwt"], issuer=issuer)
        case "auth/enterprise-managed-authorization":
            idp = context["idp_token_endpoint"], context["idp_client_id"]
            grant = auth.EnterpriseManaged(id, secret, *idp, lambda endpoint: context["idp_id_token"], issuer=issuer)
        case _:
            document = "https://conformance-test.local/client-metadata.json"
            grant = auth.AuthorizationCode(id, secret, issuer, metadata_url=document)
    return auth.OAuth(grant, user_agent=Robot(), dpop=scenario.startswith("auth/dpop"))


SPECIAL = {
    "http-custom-headers": make_the_calls_asked_for,
    "json-schema-2020-12-preservation": return_the_schema,
    "json-schema-ref-no-deref": look_at_tools,
    "sep-2640-client-no-prefetch": look_at_skills,
    **dict.fromkeys((f"sep-2640-client-verify-{what}" for what in ("digest", "size", "frontmatter")), use_a_skill),
}

INVENTED: dict[str, Any] = {"string": "text", "number": 5, "integer": 3, "boolean": True, "array": [], "object": {}}


def invent(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """Return what suits the schema of an object, as far as its types, its choices and its own definitions tell."""
    root = schema if root is None else root
    if (name := str(schema.get("$ref", ""))).startswith("#/$defs/"):
        return invent(root["$defs"][name.removeprefix("#/$defs/")], root)
    if "enum" in schema:
        return schema["enum"][0]
    if "properties" in schema or root is schema:
        return {name: invent(each, root) for name, each in schema.get("properties", {}).items()}
    return INVENTED.get(schema.get("type", "string"))


async def main(url: str) -> None:
    name = os.environ.get("MCP_CONFORMANCE_SCENARIO", "")
    oauth = await authorization(name, url) if name.startswith("auth/") else None
    async with client.connect(trimcp.http(url, auth=oauth)) as session:
        await SPECIAL.get(name, look_and_call if oauth else use_everything)(session)


if __name__ == "__main__":
    trio.run(main, sys.argv[-1])
