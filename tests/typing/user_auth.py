"""A program that protects a server, says who may use what, and logs in. Checkers see it as its user's would."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import assert_type

import trimcp
import trimcp.auth
import trimcp.testing
from trimcp.auth import (
    AuthorizationCode,
    Browser,
    ClientCredentials,
    Credentials,
    CredentialStore,
    FileStore,
    Grant,
    Introspection,
    Issuer,
    MemoryStore,
    OAuth,
    PastedUrl,
    Redirect,
    ResourceServer,
    StoreKey,
    UserAgent,
)
from trimcp.guard import ASK, AccessRequest, Decision, Denied

server = trimcp.Server("files", version="1.0")
auth = ResourceServer(
    "https://mcp.example/mcp",
    ["https://auth.example", Issuer("https://login.example", max_age=60.0)],
    scopes=("files:read",),
    introspection=Introspection("https://auth.example/ask", "files", "s3cret", "https://auth.example"),
    binding="required",
    also=trimcp.bearer_tokens({"t0ken": "backup"}),
)
settings = trimcp.HttpSettings(auth=auth)
app = trimcp.asgi_app(server, auth=auth)


def decide(request: AccessRequest) -> Decision:
    """Decide on a request."""
    assert_type(request.principal, trimcp.Principal | None)
    if request.principal is None:
        return Denied("nobody is known")
    return ASK if request.arguments else True


async def decide_later(request: AccessRequest) -> Decision:
    """Decide on a request, and wait for something."""
    return False


@server.tool(scopes=["files:write"], allow=decide)
async def write(text: str, *, ctx: trimcp.Context) -> str:
    """Write."""
    who = ctx.principal
    if who is None:
        return text
    assert_type(who.scopes, frozenset[str] | None)
    return f"{who.subject} {who.client_id} {who.expires_at} {who.claims.get('department')}"


@server.resource("files://secret", scopes=["files:read"], allow=decide_later)
async def secret() -> str:
    """Read."""
    return "secret"


class Window(UserAgent, Redirect):
    """A window of one's own."""

    uri = "http://127.0.0.1/callback"

    @asynccontextmanager
    async def redirect(self, preferred: str | None) -> AsyncIterator[Redirect]:
        """Be there."""
        yield self

    async def visit(self, url: str, state: str) -> str:
        """Show the page."""
        return f"{self.uri}?state={state}"


async def paste(text: str) -> str:
    """Ask for an address."""
    return text


agents: list[UserAgent] = [Window(), Browser(port=8765), PastedUrl(paste)]
stores: list[CredentialStore] = [MemoryStore(), FileStore("logins.json")]
grants: list[Grant] = [AuthorizationCode("app"), ClientCredentials("robot", "s3cret")]


async def main() -> None:
    """Log in, and call."""
    oauth = OAuth(grants[0], stores[1], scopes=("files:read",), user_agent=agents[0], dpop=True)
    credentials = await oauth.login("https://mcp.example/mcp")
    assert_type(credentials, Credentials)
    assert_type(await stores[0].load(StoreKey("https://mcp.example/mcp")), Credentials | None)
    try:
        async with trimcp.Client("host").connect(trimcp.http("https://mcp.example/mcp", auth=oauth)) as session:
            await session.call_tool("write", {"text": "hello"})
    except trimcp.auth.AuthorizationError as error:
        assert_type(error.code, str)
    async with trimcp.testing.toy_issuer(lifetime=60.0) as issuer:
        assert_type(issuer.token("ann", "https://mcp.example/mcp", "files:read", department="sales"), str)


# A function with settings of a program's own.
if __name__ == "__main__":
    trimcp.run_http(server, auth=auth, port=8000)
