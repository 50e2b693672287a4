"""Tokens for a client: one login or renewal at a time, kept, renewed in time, and given up when nobody waits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import httpx2
import pytest
import trio
from filelock import FileLock
from trio.testing import MockClock, wait_all_tasks_blocked

import trimcp
from tests.auth.authority import ISSUER, REDIRECT, SERVER, Authority, reply
from trimcp.auth.browser import Redirect, UserAgent
from trimcp.auth.credentials import Credentials, Registration, StoreKey, Tokens
from trimcp.auth.grants import ClientCredentials
from trimcp.auth.oauth import Authorizer, OAuth
from trimcp.auth.steps import Fetch, Visit
from trimcp.auth.stores import CredentialStore, FileStore, KeyringStore, MemoryStore
from trimcp.errors import AuthorizationError

KEY = StoreKey(SERVER)
UNAUTHORIZED = {"www-authenticate": "Bearer"}


@attrs.define(eq=False)
class Person(UserAgent, Redirect):
    """Says yes when `says_yes` is set."""

    authority: Authority
    uri: str = REDIRECT
    says_yes: trio.Event = attrs.field(factory=trio.Event)
    here: int = 0

    def redirect(self, preferred: str | None) -> AbstractAsyncContextManager[Redirect]:
        @asynccontextmanager
        async def being_here() -> AsyncIterator[Redirect]:
            self.here += 1
            try:
                yield self
            finally:
                self.here -= 1

        return being_here()

    async def visit(self, url: str, state: str) -> str:
        await self.says_yes.wait()
        return self.authority.visit(Visit(url, state))


@attrs.define(eq=False)
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@attrs.define(eq=False)
class World:
    authority: Authority = attrs.field(factory=Authority)
    clock: Clock = attrs.field(factory=Clock)
    person: Person = attrs.field(init=False)
    oauth: OAuth = attrs.field(init=False)
    refused: int = 0

    def __attrs_post_init__(self) -> None:
        self.person = Person(self.authority)
        self.oauth = self.make()

    def make(self, **more: Any) -> OAuth:
        return OAuth(user_agent=self.person, http_client=self.web(), now=self.clock, **more)

    def web(self, *, refusing: bool = False) -> httpx2.AsyncClient:
        """Return a way to all pages, and perhaps to a server that refuses every token."""

        async def answer(request: httpx2.Request) -> httpx2.Response:
            await trio.lowlevel.checkpoint()
            if refusing and str(request.url) == SERVER:
                self.refused += 1
                return reply(401, b"", UNAUTHORIZED)
            fetch = Fetch(str(request.url), request.method, dict(request.headers), request.content or None)
            answer = self.authority.answer(fetch)
            return reply(answer.status, answer.body, answer.headers)

        return httpx2.AsyncClient(transport=httpx2.MockTransport(answer))

    async def ask_who_refuses(self, requests: int) -> None:
        """Make requests over HTTP to a server that refuses every token, each by a connection of its own."""
        self.person.says_yes.set()
        web = self.web(refusing=True)
        oauth = OAuth(user_agent=self.person, http_client=web, now=self.clock)
        for _ in range(requests):
            with pytest.raises(AuthorizationError, match="refuses the token"):
                async with trimcp.Client("host").connect(trimcp.http(SERVER, auth=oauth, client=web, retries=0)):
                    pass

    def of(self, path: str) -> int:
        return sum(url.endswith(path) for url in self.authority.urls)


@pytest.fixture
def world() -> World:
    return World()


async def ask(authorizer: Authorizer, good: Callable[[str], bool] = bool, tries: int = 0) -> str:
    """Make a request as the transport does, to a server that takes only tokens that are `good`; return the token."""
    while True:
        sent = await authorizer.headers("POST", SERVER)
        token = sent.get("authorization", "").partition(" ")[2]
        if token and good(token):
            return token
        await authorizer.refused(401, UNAUTHORIZED, sent, tries)
        tries += 1


async def test_a_refusal_leads_to_a_login_and_the_token_is_kept(world: World) -> None:
    world.person.says_yes.set()
    async with world.oauth.connected(SERVER) as authorizer:
        assert await authorizer.headers("POST", SERVER) == {}
        assert await ask(authorizer) == "token-1"
        assert await authorizer.headers("GET", SERVER) == {"authorization": "Bearer token-1"}
        assert await authorizer.headers("GET", "https://other.example/mcp") == {}
    async with world.oauth.connected(SERVER) as again:
        assert await again.headers("POST", SERVER) == {"authorization": "Bearer token-1"}
    kept = await world.oauth.store.load(KEY)
    assert kept is not None
    assert kept.issuer == ISSUER
    assert await world.oauth.logout(SERVER)
    async with world.oauth.connected(SERVER) as after:
        assert await after.headers("POST", SERVER) == {}


async def test_all_who_need_a_token_wait_for_one_login(world: World) -> None:
    got: list[str] = []

    async def need(authorizer: Authorizer) -> None:
        got.append(await ask(authorizer))

    async with (
        world.oauth.connected(SERVER) as one,
        world.oauth.connected(SERVER) as two,
        trio.open_nursery() as nursery,
    ):
        for authorizer in (one, two) * 5:
            nursery.start_soon(need, authorizer)
        await wait_all_tasks_blocked()
        world.person.says_yes.set()
    assert got == ["token-1"] * 10
    assert (world.of("/register"), world.of("/token"), len(world.authority.visited)) == (1, 1, 1)


async def test_one_who_leaves_does_not_end_a_login_that_others_wait_for_and_the_last_does(world: World) -> None:
    async with world.oauth.connected(SERVER) as authorizer, trio.open_nursery() as nursery:
        scopes = [trio.CancelScope() for _ in range(3)]

        async def need(scope: trio.CancelScope) -> None:
            with scope:
                await ask(authorizer)

        for scope in scopes:
            nursery.start_soon(need, scope)
        await wait_all_tasks_blocked()
        for scope in scopes[:2]:
            scope.cancel()
            await wait_all_tasks_blocked()
            assert world.person.here == 1
        scopes[2].cancel()
        await wait_all_tasks_blocked()
        assert world.person.here == 0  # no port, page or task is left
        world.person.says_yes.set()
        assert await ask(authorizer) == "token-1"


async def test_a_login_whose_connection_ends_is_begun_again_by_who_waits_on_another(world: World) -> None:
    got: list[str] = []

    async def use(scope: trio.CancelScope) -> None:
        with scope:
            async with world.oauth.connected(SERVER) as authorizer:
                got.append(await ask(authorizer))

    first, second = trio.CancelScope(), trio.CancelScope()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(use, first)
        await wait_all_tasks_blocked()
        nursery.start_soon(use, second)
        await wait_all_tasks_blocked()
        first.cancel()
        await wait_all_tasks_blocked()
        assert world.person.here == 1
        world.person.says_yes.set()
    assert got == ["token-1"]
    assert len(world.authority.visited) == 1


async def test_a_login_that_fails_is_told_to_each_who_waited(world: World) -> None:
    world.authority.refuses = [{"error": "server_error"}]
    world.person.says_yes.set()
    failed = []

    async def need(authorizer: Authorizer) -> None:
        with pytest.raises(AuthorizationError, match="server_error") as caught:
            await ask(authorizer)
        failed.append(caught.value)

    async with world.oauth.connected(SERVER) as authorizer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(need, authorizer)
            nursery.start_soon(need, authorizer)
        assert await ask(authorizer) == "token-1"
    assert len({id(error) for error in failed}) == 2


async def test_what_a_program_raises_is_logged_and_ends_nothing_else(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(issuer: str) -> str:
        raise RuntimeError("the vault is closed")

    from trimcp.auth.grants import JwtBearer

    oauth = world.make(grant=JwtBearer(broken, issuer=ISSUER))
    async with oauth.connected(SERVER) as authorizer:
        with pytest.raises(AuthorizationError, match="RuntimeError; the log has"):
            await ask(authorizer)
    assert "the vault is closed" in caplog.text


# Renewed


def keep(world: World, **more: Any) -> None:
    tokens = Tokens("old", expires_at=world.clock.now + 600, lifetime=600, **more)
    store = world.oauth.store
    assert isinstance(store, MemoryStore)
    store._kept[KEY] = Credentials(SERVER, ISSUER, Registration("me"), tokens)


async def test_a_token_is_renewed_before_it_ends_beside_what_goes_on(world: World) -> None:
    keep(world, refresh_token="again")
    async with world.oauth.connected(SERVER) as authorizer:
        assert await authorizer.headers("POST", SERVER) == {"authorization": "Bearer old"}
        world.clock.now += 541
        for _ in range(3):
            assert await authorizer.headers("POST", SERVER) == {"authorization": "Bearer old"}
        await wait_all_tasks_blocked()
        assert await authorizer.headers("POST", SERVER) == {"authorization": "Bearer token-1"}
    assert world.of("/token") == 1
    assert not world.authority.visited


async def test_one_that_has_ended_is_waited_for(world: World) -> None:
    keep(world, refresh_token="again")
    world.clock.now += 601
    async with world.oauth.connected(SERVER) as authorizer:
        assert await authorizer.headers("POST", SERVER) == {"authorization": "Bearer token-1"}


async def test_one_that_has_ended_for_good_is_not_sent(world: World) -> None:
    keep(world)
    world.clock.now += 601
    world.person.says_yes.set()
    async with world.oauth.connected(SERVER) as authorizer:
        assert await authorizer.headers("POST", SERVER) == {}
        assert await ask(authorizer) == "token-1"


async def test_a_refresh_token_that_is_over_leads_to_a_login(world: World) -> None:
    keep(world, refresh_token="again")
    world.authority.refuses = [{"error": "invalid_grant"}]
    world.person.says_yes.set()
    async with world.oauth.connected(SERVER) as authorizer:
        assert await ask(authorizer, good=lambda token: token != "old") == "token-1"
    assert len(world.authority.visited) == 1


async def test_a_token_that_somebody_renewed_meanwhile_is_taken(world: World) -> None:
    keep(world, refresh_token="again")
    async with world.oauth.connected(SERVER) as authorizer:
        sent = await authorizer.headers("POST", SERVER)
        authorizer.account.take(attrs.evolve(authorizer.account.credentials, tokens=Tokens("newer")), False)
        await authorizer.refused(401, UNAUTHORIZED, sent, 0)
    assert not world.authority.asked


async def test_one_that_another_process_renewed_is_taken(world: World) -> None:
    keep(world, refresh_token="again")
    async with world.oauth.connected(SERVER) as authorizer:
        store = world.oauth.store
        found = await store.load(KEY)
        assert found is not None
        await store.save(KEY, attrs.evolve(found, tokens=Tokens("theirs")))
        assert await ask(authorizer, good=lambda token: token != "old") == "theirs"
    assert not world.authority.asked


async def test_a_server_that_refuses_every_token_is_told_of(world: World) -> None:
    world.person.says_yes.set()
    async with world.oauth.connected(SERVER) as authorizer:
        with pytest.raises(AuthorizationError, match="refuses the token"):
            await ask(authorizer, good=lambda token: False)
    assert 1 <= len(world.authority.visited) <= 3


async def test_a_server_that_always_wants_more_is_given_up(world: World) -> None:
    world.person.says_yes.set()
    wants = {"www-authenticate": 'Bearer error="insufficient_scope", scope="more"'}
    async with world.oauth.connected(SERVER) as authorizer:
        await ask(authorizer)
        for _ in range(3):
            with pytest.raises(AuthorizationError, match="scopes that the token does not have: more"):
                for tries in range(5):
                    sent = await authorizer.headers("POST", SERVER)
                    assert authorizer.helps(403, wants)
                    await authorizer.refused(403, wants, sent, tries)
    assert 2 <= len(world.authority.visited) <= 4
    assert world.authority.visited[-1]["scope"] == "more"


async def test_a_403_that_asks_for_no_scope_is_the_servers_last_word(world: World) -> None:
    async with world.oauth.connected(SERVER) as authorizer:
        assert not authorizer.helps(403, {})
        assert not authorizer.helps(403, {"www-authenticate": 'Bearer error="invalid_token"'})


async def test_a_proof_goes_with_each_request_and_holds_the_nonce(world: World) -> None:
    world.authority.metadata["dpop_signing_alg_values_supported"] = ["ES256"]
    world.person.says_yes.set()
    oauth = world.make(dpop=True)
    async with oauth.connected(SERVER) as authorizer:
        await ask(authorizer)
        first, second = [await authorizer.headers("POST", SERVER) for _ in range(2)]
        assert first["authorization"] == "DPoP token-1"
        assert first["dpop"] != second["dpop"]
        wanted = {"www-authenticate": 'DPoP error="use_dpop_nonce"', "dpop-nonce": "n"}
        await authorizer.refused(401, wanted, first, 0)
        key = authorizer.account.proof_key
        assert key is not None
        assert key.nonces == {"https://mcp.example": "n"}


async def test_a_program_of_its_own_needs_nobody(world: World) -> None:
    oauth = world.make(grant=ClientCredentials("robot", "s", issuer=ISSUER))
    world.authority.metadata["token_endpoint_auth_methods_supported"] = ["client_secret_post"]
    async with oauth.connected(SERVER) as authorizer:
        assert await ask(authorizer) == "token-1"
    assert world.authority.form()["client_secret"] == "s"


# Beside one another


async def test_calls_that_need_the_same_scope_at_once_step_up_once(world: World) -> None:
    world.person.says_yes.set()
    wants = {"www-authenticate": 'Bearer error="insufficient_scope", scope="write"'}
    async with world.oauth.connected(SERVER) as authorizer:
        await ask(authorizer)
        sent = await authorizer.headers("POST", SERVER)
        world.person.says_yes = trio.Event()
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(authorizer.refused, 403, wants, sent, 0)
            await wait_all_tasks_blocked()
            world.person.says_yes.set()
        assert (await authorizer.headers("POST", SERVER))["authorization"] == "Bearer token-2"
    assert len(world.authority.visited) == 2


async def test_a_refusal_of_a_request_that_was_sent_before_the_login_leads_to_no_other(world: World) -> None:
    world.person.says_yes.set()
    async with world.oauth.connected(SERVER) as authorizer:
        sent = await authorizer.headers("POST", SERVER)
        assert await ask(authorizer) == "token-1"
        await authorizer.refused(401, UNAUTHORIZED, sent, 0)
        assert (await authorizer.headers("POST", SERVER))["authorization"] == "Bearer token-1"
    assert len(world.authority.visited) == 1


async def test_who_waited_for_a_login_in_another_process_takes_its_token(world: World) -> None:
    store = world.oauth.store
    async with world.oauth.connected(SERVER) as authorizer, trio.open_nursery() as nursery:
        async with store.exclusively(KEY):
            nursery.start_soon(ask, authorizer)
            await wait_all_tasks_blocked()
            await store.save(KEY, Credentials(SERVER, ISSUER, Registration("me"), Tokens("theirs")))
        await wait_all_tasks_blocked()
        assert (await authorizer.headers("POST", SERVER))["authorization"] == "Bearer theirs"
    assert not world.authority.visited


async def test_a_connection_that_opens_beside_a_login_does_not_undo_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.person.says_yes.set()
    store = world.oauth.store
    loaded, go_on = trio.Event(), trio.Event()
    load = store.load

    async def slow(key: StoreKey) -> Credentials | None:
        found = await load(key)
        loaded.set()
        await go_on.wait()
        return found

    async def other() -> None:
        async with world.oauth.connected(SERVER):
            pass

    async with world.oauth.connected(SERVER) as authorizer, trio.open_nursery() as nursery:
        monkeypatch.setattr(store, "load", slow)
        nursery.start_soon(other)
        await loaded.wait()
        monkeypatch.setattr(store, "load", load)
        await ask(authorizer)
        go_on.set()
        await wait_all_tasks_blocked()
        assert await authorizer.headers("POST", SERVER) == {"authorization": "Bearer token-1"}


async def test_logging_out_ends_a_login_that_is_under_way_and_what_open_connections_send(world: World) -> None:
    async with world.oauth.connected(SERVER) as authorizer, trio.open_nursery() as nursery:

        async def need() -> None:
            with pytest.raises(AuthorizationError, match="logged out"):
                await ask(authorizer)

        nursery.start_soon(need)
        await wait_all_tasks_blocked()
        await world.oauth.logout(SERVER)
        assert world.person.here == 0
        world.person.says_yes.set()
        await ask(authorizer)
        assert await world.oauth.logout(SERVER)
        assert await authorizer.headers("POST", SERVER) == {}
    assert await world.oauth.store.load(KEY) is None


async def test_nothing_is_held_for_a_server_without_connections(world: World) -> None:
    for number in range(10):
        async with world.oauth.connected(f"https://server{number}.example/mcp"):
            pass
    assert not world.oauth._accounts


async def test_a_server_that_wants_ever_other_scopes_is_given_up(world: World) -> None:
    world.person.says_yes.set()
    async with world.oauth.connected(SERVER) as authorizer:
        await ask(authorizer)
        with pytest.raises(AuthorizationError, match="scopes that the token does not have"):
            for number in range(100):
                wants = {"www-authenticate": f'Bearer error="insufficient_scope", scope="s{number}"'}
                world.clock.now += 1_000
                await ask(authorizer)  # another page, as the token has ended: beside step-ups twenty an hour
                authorizer.accepted(await authorizer.headers("POST", SERVER))
                await authorizer.refused(403, wants, await authorizer.headers("POST", SERVER), 0)
                authorizer.accepted(await authorizer.headers("POST", SERVER))
    assert len(world.authority.visited) == 2 * 50 + 2


@pytest.mark.parametrize("checkpoints", range(60))
async def test_giving_up_at_any_moment_leaves_nothing_and_the_next_one_gets_a_token(
    world: World, checkpoints: int
) -> None:
    world.person.says_yes.set()
    async with world.oauth.connected(SERVER) as authorizer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, authorizer)
            for _ in range(checkpoints):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert authorizer.account.attempt is None
        assert world.person.here == 0
        assert (await ask(authorizer)).startswith("token-")
    assert len(world.authority.visited) <= 2


async def test_what_was_given_is_kept_even_if_nobody_waits_any_more(world: World, autojump_clock: MockClock) -> None:
    world.person.says_yes.set()

    @attrs.define(eq=False)
    class Slow(MemoryStore):
        seconds: float = 1.0

        async def save(self, key: StoreKey, credentials: Credentials) -> None:
            nursery.cancel_scope.cancel()
            await trio.sleep(self.seconds)
            await super().save(key, credentials)

    for seconds, kept in ((1.0, True), (100.0, False)):
        store = Slow(seconds)
        MemoryStore.__init__(store)
        async with world.make(store=store).connected(SERVER) as authorizer, trio.open_nursery() as nursery:
            nursery.start_soon(ask, authorizer)
        assert (await store.load(KEY) is not None) == kept


# Nonsense


@pytest.mark.parametrize("lifetime", [0, -1, True, "600", None, 1e300, 0.001, [], 10**400])
async def test_a_lifetime_that_is_nonsense_ends_nothing(world: World, lifetime: Any) -> None:
    world.person.says_yes.set()
    world.authority.tokens["expires_in"] = lifetime
    async with world.oauth.connected(SERVER) as authorizer:
        assert await ask(authorizer)
        assert (await authorizer.headers("POST", SERVER)).keys() == {"authorization"}
    assert world.of("/token") <= 3


async def test_a_secret_that_ends_beyond_all_time_has_no_end(world: World) -> None:
    world.person.says_yes.set()
    world.authority.registers = {"client_secret": "s", "client_secret_expires_at": 10**400}
    async with world.oauth.connected(SERVER) as authorizer:
        assert await ask(authorizer) == "token-1"


async def test_an_address_that_a_terminal_would_obey_is_not_shown(world: World) -> None:
    world.authority.metadata["authorization_endpoint"] = f"{ISSUER}/\x1b]0;evil\x07"
    async with world.oauth.connected(SERVER) as authorizer:
        with pytest.raises(AuthorizationError, match="authorization endpoint") as caught:
            await ask(authorizer)
    assert "\x1b" not in str(caught.value)
    assert not world.authority.visited


async def test_a_renewed_token_that_is_bound_is_kept_with_its_key(world: World) -> None:
    keep(world, refresh_token="again")
    world.authority.metadata["dpop_signing_alg_values_supported"] = ["ES256"]
    world.clock.now += 601
    oauth = world.make(dpop=True, store=world.oauth.store)
    async with oauth.connected(SERVER) as authorizer:
        first = await authorizer.headers("POST", SERVER)
        assert first["authorization"] == "DPoP token-1"
        key = authorizer.account.proof_key
    async with oauth.connected(SERVER) as again:
        assert again.account.proof_key == key


@pytest.mark.parametrize("key", [None, {}, {"kty": "EC"}, "public"])
async def test_a_bound_token_whose_key_is_lost_leads_to_a_login(
    world: World, key: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from trimcp.auth.jose import ProofKey

    if key == "public":
        key = {name: value for name, value in ProofKey.generate().jwk.items() if name != "d"}
    tokens = Tokens("old", "dpop")
    await world.oauth.store.save(KEY, Credentials(SERVER, ISSUER, Registration("me"), tokens, proof_key=key))
    world.person.says_yes.set()
    async with world.oauth.connected(SERVER) as authorizer:
        assert await authorizer.headers("POST", SERVER) == {}
        assert await ask(authorizer) == "token-1"
    assert "is not used" in caplog.text


async def test_what_ends_a_login_inside_a_nursery_of_its_own_is_told_as_itself(world: World) -> None:
    @attrs.define(eq=False)
    class Gone(Person):
        async def visit(self, url: str, state: str) -> str:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.leave)
            return ""

        async def leave(self) -> None:
            raise AuthorizationError("the window was closed")

    world.person = Gone(world.authority)
    async with world.make().connected(SERVER) as authorizer:
        with pytest.raises(AuthorizationError, match=r"^the window was closed$"):
            await ask(authorizer)


# Kept


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CredentialStore:
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path / "deep" / "logins.json")


async def test_a_store_keeps_what_it_is_given(store: CredentialStore) -> None:
    one, two = StoreKey("HTTPS://MCP.example:443/", "me"), StoreKey(SERVER)
    first = Credentials("r", "i", Registration("c", "s"), Tokens("t"))
    assert await store.load(one) is None
    await store.save(one, first)
    await store.save(two, attrs.evolve(first, issuer="j"))
    assert await store.load(StoreKey("https://mcp.example", "me")) == first
    assert sorted(map(str, await store.keys())) == ["https://mcp.example as me", SERVER]
    assert await store.remove(one)
    assert not await store.remove(one)
    assert await store.load(one) is None
    assert await store.load(two) is not None


async def test_one_at_a_time_may_get_a_token(store: CredentialStore) -> None:
    inside = most = 0

    async def get(key: StoreKey) -> None:
        nonlocal inside, most
        async with store.exclusively(key):
            inside += 1
            most = max(most, inside)
            await trio.lowlevel.checkpoint()
            inside -= 1

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(get, KEY)
    assert most == 1
    async with store.exclusively(KEY), store.exclusively(StoreKey("https://other.example")):
        pass


async def test_a_file_is_its_owners_alone_and_survives_what_is_no_login(tmp_path: Path) -> None:
    path = tmp_path / "new" / "logins.json"
    store = FileStore(path)
    await store.save(KEY, Credentials("r", "i", Registration("c"), Tokens("t")))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.write_text('{"logins": 3}')
    with pytest.raises(AuthorizationError, match="move it away"):
        await store.load(KEY)
    path.write_text('{"logins": {"[\\"https://mcp.example/mcp\\", \\"\\"]": "{}"}}')
    with pytest.raises(AuthorizationError, match="log in again"):
        await store.load(KEY)


async def test_two_processes_do_not_lose_what_the_other_keeps(tmp_path: Path) -> None:
    path = tmp_path / "logins.json"
    one, two = FileStore(path), FileStore(path)

    async def keep_many(store: FileStore, name: str) -> None:
        for number in range(10):
            key = StoreKey(f"https://{name}{number}.example")
            await store.save(key, Credentials("r", "i", Registration("c")))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_many, one, "a")
        nursery.start_soon(keep_many, two, "b")
    assert len(await one.keys()) == 20


async def test_the_systems_keyring_keeps_the_secrets_and_a_file_only_the_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[tuple[str, str], str] = {}
    keyring = SimpleNamespace(
        get_password=lambda service, name: kept.get((service, name)),
        set_password=lambda service, name, text: kept.update({(service, name): text}),
        delete_password=lambda service, name: kept.pop((service, name)),
    )
    monkeypatch.setitem(sys.modules, "keyring", keyring)
    store = KeyringStore(tmp_path / "names.json")
    credentials = Credentials("r", "i", Registration("c", "very secret"), Tokens("a token"))
    await store.save(KEY, credentials)
    assert await store.load(KEY) == credentials
    assert await store.keys() == [KEY]
    assert "secret" not in (tmp_path / "names.json").read_text()
    async with store.exclusively(KEY):
        pass
    assert await store.remove(KEY)
    assert not await store.remove(KEY)
    assert (kept, await store.keys()) == ({}, [])
    monkeypatch.setitem(sys.modules, "keyring", None)
    with pytest.raises(AuthorizationError, match="pip install"):
        KeyringStore()


HOLD = """
import sys, trio
from trimcp.auth.credentials import StoreKey
from trimcp.auth.stores import FileStore

async def main():
    async with FileStore(sys.argv[1]).exclusively(StoreKey(sys.argv[2])):
        print("held", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


async def test_another_process_is_waited_for_which_may_be_killed(tmp_path: Path) -> None:
    path = tmp_path / "logins.json"
    command = [sys.executable, "-c", HOLD, str(path), SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:  # noqa: ASYNC220  # it is killed by hand
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        store = FileStore(path)
        with trio.move_on_after(0.3) as scope:
            async with store.exclusively(KEY):
                pass
        assert scope.cancelled_caught  # waiting for it can be given up
        async with store.exclusively(StoreKey("https://other.example")):
            pass
        holder.kill()
    with trio.fail_after(10):
        async with store.exclusively(KEY):
            pass
        async with store.exclusively(KEY):  # who gave up left no lock
            pass


async def test_a_file_that_another_process_keeps_locked_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimcp.auth.stores._LOCK_SECONDS", 0.1)
    with FileLock(tmp_path / ".logins.json.lock"), pytest.raises(AuthorizationError, match="locked by another process"):
        await FileStore(tmp_path / "logins.json").save(KEY, Credentials("r", "i", Registration("c")))


async def test_the_time_of_a_person_at_the_browser_does_not_count_against_a_call(
    world: World, autojump_clock: MockClock
) -> None:
    server: trimcp.Server[None] = trimcp.Server("files", version="1")

    @server.tool
    async def whoami(*, ctx: trimcp.Context) -> str:
        return str(ctx.principal)

    async def say_yes() -> None:
        await trio.sleep(3_600)
        world.person.says_yes.set()

    hosts = trimcp.Origins(allowed_hosts=["mcp.example"])
    settings = trimcp.HttpSettings(authenticate=trimcp.bearer_tokens({"token-1": "ann"}), origins=hosts)
    app = trimcp.asgi_app(server, settings=settings)
    web = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app))
    client = trimcp.Client("host", request_timeout=5, probe_timeout=5, connect_timeout=5)
    async with app.lifespan(), web, trio.open_nursery() as nursery:
        nursery.start_soon(say_yes)
        async with client.connect(trimcp.http(SERVER, auth=world.oauth, client=web)) as session:
            assert (await session.call_tool("whoami")).text == "ann"
    assert trio.current_time() >= 3_600
