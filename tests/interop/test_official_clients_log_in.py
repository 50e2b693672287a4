"""The official SDKs' clients, Python's and TypeScript's, log in to our server at an authorization server.

The server and the person are those of `test_authorization_server.py`. These clients name scopes when they register, and
do not register again when they need more: the authorization server lets them ask for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from urllib.parse import parse_qs, urlsplit

import anyio
import attrs
import httpx2
import mcp_types as t
import pytest
from mcp import Client
from mcp.client.auth import OAuthClientProvider
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthToken,
)
from pydantic import AnyUrl

from tests.interop.authorities import Authorities, authorities
from tests.interop.log_in import PERSON, log_in
from tests.interop.peers import HERE, NODE, run_scenarios

SECONDS = 30.0
CALLBACK = "http://127.0.0.1:8765/callback"

on_both_hosts = pytest.mark.parametrize("host", ["own", "hypercorn"])


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authorities]:
    with authorities(tmp_path_factory.mktemp("authorities")) as started:
        yield started


# Python's


@attrs.define(eq=False)
class User:
    """What the client keeps, and the person before its browser.

    Attributes:
        tokens, client: what it keeps.
        logins: how often a page was opened.
    """

    tokens: OAuthToken | None = None
    client: OAuthClientInformationFull | None = None
    logins: int = 0
    answer: str = ""

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
        self.answer = await anyio.to_thread.run_sync(log_in, url)

    async def come_back(self) -> AuthorizationCodeResult:
        said = {name: values[0] for name, values in parse_qs(urlsplit(self.answer).query).items()}
        return AuthorizationCodeResult(code=said["code"], state=said["state"], iss=said["iss"])

    def auth(self, url: str) -> OAuthClientProvider:
        about = OAuthClientMetadata(
            client_name="official", redirect_uris=[AnyUrl(CALLBACK)], token_endpoint_auth_method="none"
        )
        return OAuthClientProvider(url, about, self, self.visit, self.come_back)


async def called(client: Client, name: str) -> str:
    (content,) = (await client.call_tool(name, {})).content
    assert isinstance(content, t.TextContent)
    return content.text


@on_both_hosts
@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_the_official_python_client_logs_in_renews_and_asks_for_more(there: Authorities, host: str, mode: str) -> None:
    url, user = there.protected(host, there.issuer("wide").base).http, User()
    failures: list[Exception] = []

    async def main() -> None:
        with anyio.fail_after(SECONDS):
            auth = user.auth(url)
            async with (
                httpx2.AsyncClient(auth=auth) as web,
                Client(streamable_http_client(url, http_client=web), mode=mode) as client,
            ):
                # Kept aside, because the client's task groups would wrap it in three groups.
                try:
                    await converse(client, auth)
                except Exception as failure:
                    failures.append(failure)

    async def converse(client: Client, auth: OAuthClientProvider) -> None:
        assert await called(client, "whoami") == PERSON
        assert [tool.name for tool in (await client.list_tools()).tools] == ["whoami", "token_id"]
        first = await called(client, "token_id")
        auth.context.token_expiry_time = 1.0  # it takes it for one that has ended
        assert await called(client, "token_id") != first
        assert user.logins == 1
        assert await called(client, "write") == "written"
        assert user.logins == 2
        assert len((await client.list_tools()).tools) == 3

    anyio.run(main)
    if failures:
        raise failures[0]


# TypeScript's

Errors = Callable[[str, str, str], dict[str, str]]


@pytest.fixture(scope="module")
def errors(there: Authorities, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Runs the client, unless it has been, and returns what went wrong in each scenario."""

    @cache
    def run(era: str, kind: str, host: str) -> dict[str, str]:
        if kind == "dpop":
            url = there.protected(host, there.issuer("wide", "nonces").base, "dpop").http
        else:
            url = there.protected(host, there.issuer("wide").base).http
        log = tmp_path_factory.mktemp("client") / "stderr.log"
        return run_scenarios([NODE, HERE / "node_login.mjs", era, kind, url, sys.executable], log)

    return run


@on_both_hosts
@pytest.mark.parametrize("era", ["legacy", "modern"])
@pytest.mark.parametrize("kind", ["bearer", "dpop"])
@pytest.mark.parametrize("scenario", ["login", "renewal", "more_scopes"])
def test_the_official_typescript_client(errors: Errors, era: str, kind: str, host: str, scenario: str) -> None:
    assert errors(era, kind, host)[scenario] == ""
