"""Our client logs in at an authorization server that nobody here wrote, for our server and the official Python SDK's.

It is npm's `oidc-provider`: registration, PKCE, resource indicators, JWT access tokens, rotated refresh tokens, DPoP.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest
import trio

import trimcp
from tests.interop.authorities import Authorities, authorities
from tests.interop.log_in import PERSON, log_in
from trimcp.auth import (
    AuthorizationCode,
    AuthorizationError,
    Browser,
    ClientCredentials,
    Credentials,
    FileStore,
    OAuth,
    SigningKey,
    StoreKey,
)

SECONDS = 30.0
OFFICIAL_1 = os.environ["TRIMCP_OFFICIAL_SDK_1"]
TOKEN_SECONDS = 600  # for which its tokens are good
LEGACY, MODERN = trimcp.LATEST_LEGACY, trimcp.LATEST

on_both_hosts = pytest.mark.parametrize("host", ["own", "hypercorn"])
in_both_eras = pytest.mark.parametrize("revision", [LEGACY, MODERN], ids=["legacy", "modern"])


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authorities]:
    with authorities(tmp_path_factory.mktemp("authorities")) as started:
        yield started


@attrs.define(eq=False)
class User:
    """Our client, and the person before its browser.

    Attributes:
        ahead: seconds by which our clock is ahead of the others'.
        refuses: abort each login.
        logins: how often a page was opened.
    """

    ahead: float = 0.0
    refuses: bool = False
    logins: int = 0

    def now(self) -> float:
        return time.time() + self.ahead

    async def open(self, url: str) -> None:
        self.logins += 1
        end = await trio.to_thread.run_sync(partial(log_in, url, refuse=self.refuses))
        async with httpx2.AsyncClient() as browser:
            await browser.get(end)

    def oauth(self, *settings: Any, **more: Any) -> OAuth:
        agent = Browser(open=self.open, notify=lambda line: None)
        return OAuth(*settings, user_agent=agent, now=self.now, **more)


@asynccontextmanager
async def connected(url: str, oauth: OAuth, revision: trimcp.Revision = MODERN) -> AsyncIterator[trimcp.ClientSession]:
    with trio.fail_after(SECONDS):
        async with trimcp.Client("interop").connect(trimcp.http(url, auth=oauth), revision=revision) as session:
            yield session


async def kept(oauth: OAuth, url: str) -> Credentials:
    found = await oauth.store.load(StoreKey(url))
    assert found is not None
    assert found.tokens is not None
    return found


async def refused(url: str, token: str) -> str:
    """Show our server a token that it has to refuse; return its challenge."""
    async with httpx2.AsyncClient() as web:
        reply = await web.post(url, json={}, headers={"Authorization": f"Bearer {token}"})
    assert reply.status_code == 401
    challenge: str = reply.headers["www-authenticate"]
    return challenge


@on_both_hosts
@in_both_eras
async def test_a_person_logs_in_and_asks_for_more(there: Authorities, host: str, revision: trimcp.Revision) -> None:
    url, user = there.protected(host, there.issuer().base).http, User()
    oauth = user.oauth()
    async with connected(url, oauth, revision) as session:
        assert (await session.call_tool("whoami")).text == PERSON
        assert [tool.name for tool in await session.list_tools()] == ["whoami", "token_id"]
        assert user.logins == 1
        assert (await session.call_tool("write")).text == "written"
        assert user.logins == 2
        assert len(await session.list_tools()) == 3
    found = await kept(oauth, url)
    assert found.issuer == there.issuer().base
    assert found.tokens is not None
    assert {"files:read", "files:write"} <= set(found.tokens.scopes)
    # Another connection of the same person uses what is kept.
    async with connected(url, oauth, revision) as session:
        assert (await session.call_tool("write")).text == "written"
    assert user.logins == 2


@on_both_hosts
async def test_tokens_are_renewed_without_the_person_and_refresh_tokens_are_rotated(
    there: Authorities, host: str
) -> None:
    url, user = there.protected(host, there.issuer().base).http, User()
    oauth = user.oauth()
    seen, shown = set(), set()
    async with connected(url, oauth) as session:
        for _ in range(3):
            seen.add((await session.call_tool("token_id")).text)
            found = await kept(oauth, url)
            assert found.tokens is not None
            shown.add(found.tokens.refresh_token)
            user.ahead += TOKEN_SECONDS + 1
    assert len(seen) == len(shown) == 3
    assert None not in shown
    assert user.logins == 1


async def test_all_who_find_a_token_over_renew_it_once(there: Authorities, tmp_path: Path) -> None:
    # A refresh token that is shown twice takes the whole login away, so that more than one renewal would be seen.
    url, user = there.protected("own", there.issuer().base).http, User()
    stores = [FileStore(tmp_path / "logins.json") for _ in range(2)]  # as two processes have them
    one, other = (user.oauth(store=store) for store in stores)
    seen: set[str] = set()

    async def call(session: trimcp.ClientSession) -> None:
        seen.add((await session.call_tool("token_id")).text)

    async with connected(url, one) as first, connected(url, other) as second:
        for renewals in range(3):
            async with trio.open_nursery() as nursery:
                for session in (first, second) * 10:
                    nursery.start_soon(call, session)
            assert len(seen) == renewals + 1
            user.ahead += TOKEN_SECONDS + 1
    assert user.logins == 1


async def test_a_refresh_token_that_was_used_before_leads_to_a_login(there: Authorities) -> None:
    url, user = there.protected("own", there.issuer().base).http, User()
    oauth = user.oauth()
    async with connected(url, oauth) as session:
        before = await kept(oauth, url)
        user.ahead += TOKEN_SECONDS + 1
        await session.call_tool("whoami")
    assert (await kept(oauth, url)).tokens != before.tokens
    again = user.oauth()
    await again.store.save(StoreKey(url), before)
    async with connected(url, again) as session:
        assert (await session.call_tool("whoami")).text == PERSON
    assert user.logins == 2


async def test_who_aborts_the_login_is_told_so(there: Authorities) -> None:
    url, user = there.protected("own", there.issuer().base).http, User(refuses=True)
    with pytest.raises(AuthorizationError, match="the login was refused") as caught:
        async with connected(url, user.oauth()):
            pass
    assert caught.value.code == "access_denied"


@on_both_hosts
@in_both_eras
async def test_tokens_are_bound_to_a_key_with_nonces_of_both_servers(
    there: Authorities, host: str, revision: trimcp.Revision
) -> None:
    url, user = there.protected(host, there.issuer("nonces").base, "dpop").http, User()
    oauth = user.oauth(dpop=True)
    async with connected(url, oauth, revision) as session:
        first = (await session.call_tool("token_id")).text
        user.ahead += TOKEN_SECONDS + 1
        second = (await session.call_tool("token_id")).text
        assert first != second
        assert (await session.call_tool("write")).text == "written"
    assert user.logins == 2
    found = await kept(oauth, url)
    assert found.tokens is not None
    assert found.tokens.token_type == "dpop"
    # Whoever steals the token has not the key, and whoever has no key gets no token that is good there.
    assert "DPoP" in await refused(url, found.tokens.access_token)
    with pytest.raises(AuthorizationError, match="refuses the token"):
        async with connected(url, user.oauth()):
            pass


async def test_a_client_may_be_registered_by_hand(there: Authorities) -> None:
    issuer = there.issuer().base
    url, user = there.protected("own", issuer).http, User()
    oauth = user.oauth(AuthorizationCode("app", "also s3cret: + & %", issuer))
    async with connected(url, oauth) as session:
        assert (await session.call_tool("whoami")).text == PERSON
        user.ahead += TOKEN_SECONDS + 1
        assert (await session.call_tool("write")).text == "written"
    assert user.logins == 2
    assert (await kept(oauth, url)).registration.client_id == "app"
    with pytest.raises(AuthorizationError, match="register it with the new one"):
        async with connected(url, user.oauth(AuthorizationCode("app", issuer="https://other.example"))):
            pass


@pytest.mark.parametrize("how", ["secret", "key"])
async def test_a_program_comes_in_with_a_secret_or_a_key(there: Authorities, how: str) -> None:
    issuer = there.issuer().base
    url, user = there.protected("own", issuer).http, User()
    grant = ClientCredentials("robot", "s3cret", issuer=issuer)
    if how == "key":
        key = SigningKey.from_pem(there.key.as_pem(private=True), key_id="robot")
        grant = ClientCredentials("signing-robot", signing_key=key)
    async with connected(url, user.oauth(grant)) as session:
        assert (await session.call_tool("whoami")).text == grant.client_id
        assert (await session.call_tool("write")).text == "written"
    with pytest.raises(AuthorizationError, match="gave no token"):
        async with connected(url, user.oauth(ClientCredentials("robot", "wrong", issuer=issuer))):
            pass
    assert not user.logins


async def test_tokens_that_say_nothing_are_introspected(there: Authorities) -> None:
    issuer = there.issuer().base
    served, user = there.protected("own", issuer, "introspection"), User()
    url = f"{served.base}/opaque"
    oauth = user.oauth()
    async with connected(url, oauth) as session:
        assert (await session.call_tool("whoami")).text == PERSON
    found = await kept(oauth, url)
    assert found.tokens is not None
    assert "." not in found.tokens.access_token
    assert "invalid_token" in await refused(url, "nonsense")


async def test_tokens_for_others_are_refused(there: Authorities) -> None:
    issuer = there.issuer().base
    url = there.protected("own", issuer).http
    async with httpx2.AsyncClient(auth=("robot", "s3cret")) as web:

        async def token(**form: str) -> str:
            reply = await web.post(f"{issuer}/token", data={"grant_type": "client_credentials", **form})
            said: dict[str, Any] = reply.json()
            return str(said["access_token"])

        other = await token(resource="http://127.0.0.1:9/mcp", scope="files:read")
        assert "another audience" in await refused(url, other)
        assert "not a JWT" in await refused(url, await token())
        good = await token(resource=url, scope="files:read")
        assert "signature" in await refused(url, good[:-8] + good[-8:][::-1])
        narrow = {"Authorization": f"Bearer {await token(resource=url)}"}
        reply = await web.post(url, json={}, headers=narrow, auth=None)
        assert reply.status_code == 403
        assert 'error="insufficient_scope"' in reply.headers["www-authenticate"]


async def test_an_issuer_may_have_a_path(there: Authorities) -> None:
    issuer = f"{there.issuer('path').base}/tenant"
    url, user = there.protected("own", issuer).http, User()
    oauth = user.oauth()
    async with connected(url, oauth) as session:
        assert (await session.call_tool("whoami")).text == PERSON
    assert (await kept(oauth, url)).issuer == issuer


@pytest.mark.parametrize(
    ("python", "revision"),
    [(sys.executable, LEGACY), (sys.executable, MODERN), (OFFICIAL_1, LEGACY)],
    ids=["2-legacy", "2-modern", "1-legacy"],
)
async def test_we_log_in_to_the_official_python_sdks_server(
    there: Authorities, python: str, revision: trimcp.Revision
) -> None:
    url, user = there.official(python, f"{there.issuer('path').base}/tenant").http, User()
    oauth = user.oauth()
    async with connected(url, oauth, revision) as session:
        first = (await kept(oauth, url)).tokens
        user.ahead += TOKEN_SECONDS + 1
        assert (await session.call_tool("whoami")).text == PERSON
        assert (await kept(oauth, url)).tokens != first
    assert user.logins == 1


async def test_the_official_python_sdk_1_may_write_an_issuer_without_a_path_with_a_slash(there: Authorities) -> None:
    url, user = there.official(OFFICIAL_1, there.issuer().base).http, User()
    async with connected(url, user.oauth(), LEGACY) as session:
        await session.ping()
    assert user.logins == 1
