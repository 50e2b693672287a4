"""The official Python SDK's client, of either generation, logs in to our server at an authorization server.

    python tests/interop/official_login.py legacy|auto URL PYTHON SCENARIO...

Prints a line of JSON for each scenario: its name, and what went wrong in it, or nothing. `PYTHON log_in.py` is the
person before the browser.
"""

import json
import sys
import traceback
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio
from mcp.client.auth import OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from pydantic import AnyUrl

try:
    from httpx2 import AsyncClient
    from mcp import Client
    from mcp.shared.auth import AuthorizationCodeResult
except ImportError:
    from httpx import AsyncClient
    from mcp import ClientSession

    Client = None

MODE, URL, PYTHON, *WANTED = sys.argv[1:]
CALLBACK = "http://127.0.0.1:8765/callback"
SECONDS = 30.0


class User:
    """What the client keeps, and the person before its browser."""

    def __init__(self) -> None:
        self.tokens: OAuthToken | None = None
        self.client: OAuthClientInformationFull | None = None
        self.logins = 0
        self.answer = ""

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info

    async def visit(self, url: str) -> None:
        self.logins += 1
        command = [PYTHON, str(Path(__file__).with_name("log_in.py")), url]
        self.answer = (await anyio.run_process(command, stderr=None)).stdout.decode().strip()

    async def come_back(self) -> Any:
        said = {name: values[0] for name, values in parse_qs(urlsplit(self.answer).query).items()}
        if Client is None:
            return said["code"], said["state"]
        return AuthorizationCodeResult(code=said["code"], state=said["state"], iss=said["iss"])


user = User()
# One for all scenarios: what it has found out about the authorization server is not among what is kept.
auth = OAuthClientProvider(
    URL,
    OAuthClientMetadata(client_name="official", redirect_uris=[AnyUrl(CALLBACK)], token_endpoint_auth_method="none"),
    user,
    user.visit,
    user.come_back,
)


@asynccontextmanager
async def connected():
    """Yield a client that has been introduced."""
    async with AsyncClient(auth=auth) as web:
        if Client is not None:
            async with Client(streamable_http_client(URL, http_client=web), mode=MODE) as client:
                yield client
        else:
            async with (
                streamable_http_client(URL, http_client=web) as (read, write, _),
                ClientSession(read, write) as session,
            ):
                await session.initialize()
                yield session


async def called(client: Any, name: str) -> str:
    """Call a tool, and return the text of its result."""
    (content,) = (await client.call_tool(name, {})).content
    return content.text


async def tools(client: Any) -> list[str]:
    """Return the names of the tools."""
    return [tool.name for tool in (await client.list_tools()).tools]


async def login() -> None:
    async with connected() as client:
        assert await called(client, "whoami") == "ann"
        assert await tools(client) == ["whoami", "token_id"]
    assert user.logins == 1


async def renewal() -> None:
    async with connected() as client:
        first = await called(client, "token_id")
        auth.context.token_expiry_time = 1.0  # so that it takes the token for one that has ended
        assert await called(client, "token_id") != first
    assert user.logins == 1


async def more_scopes() -> None:
    async with connected() as client:
        assert await called(client, "write") == "written"
        assert len(await tools(client)) == 3
    assert user.logins == 2


async def main() -> None:
    """Carry out what is tested."""
    for scenario in (login, renewal, more_scopes):
        if scenario.__name__ not in WANTED:
            continue
        error = ""
        try:
            with anyio.fail_after(SECONDS):
                await scenario()
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"scenario": scenario.__name__, "error": error}), flush=True)


anyio.run(main)
