"""A login survives: a store that fails at any step, a call given up at any step of a renewal, a server that refuses."""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.auth.authority import ISSUER, SERVER, Authority, reply
from tests.auth.test_oauth import KEY, UNAUTHORIZED, World, ask
from trimcp.auth.credentials import Credentials, Registration, StoreKey, Tokens
from trimcp.auth.grants import ClientCredentials
from trimcp.auth.oauth import OAuth
from trimcp.auth.steps import Fetch, Fetched
from trimcp.auth.stores import CredentialStore, FileStore, MemoryStore
from trimcp.errors import AuthorizationError

MORE = {"www-authenticate": 'Bearer error="insufficient_scope", scope="more"'}


@attrs.define(eq=False)
class Rotating(Authority):
    """Takes each refresh token once. One that comes again was stolen: then none of that login is good any more."""

    good: set[str] = attrs.field(factory=lambda: {"r0"})
    reused: int = 0

    def _token(self, fetch: Fetch) -> Fetched:
        shown = self.form().get("refresh_token")
        if shown is not None:
            if shown not in self.good:
                self.good.clear()
                self.reused += 1
                return Fetched(400, body=b'{"error": "invalid_grant"}')
            self.good.remove(shown)
        following = f"r{self.given + 1}"
        self.good.add(following)
        self.tokens = {"refresh_token": following}
        return super()._token(fetch)


@attrs.define(eq=False)
class Failing(MemoryStore):
    """Raises what is in `saves`, `loads` or `locks`, in turn; None stands for a success."""

    saves: list[BaseException | None] = attrs.field(factory=list)
    loads: list[BaseException | None] = attrs.field(factory=list)
    locks: list[BaseException | None] = attrs.field(factory=list)
    tried: int = 0

    def __attrs_post_init__(self) -> None:
        MemoryStore.__init__(self)

    async def load(self, key: StoreKey) -> Credentials | None:
        await trio.lowlevel.checkpoint()
        _raise(self.loads)
        return await super().load(key)

    async def save(self, key: StoreKey, credentials: Credentials) -> None:
        self.tried += 1
        await trio.lowlevel.checkpoint()
        _raise(self.saves)
        await super().save(key, credentials)

    @asynccontextmanager
    async def exclusively(self, key: StoreKey) -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        _raise(self.locks)
        async with super().exclusively(key):
            yield


def _raise(errors: list[BaseException | None]) -> None:
    if errors and (error := errors.pop(0)) is not None:
        raise error


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def rotating(store: CredentialStore | None = None) -> tuple[World, OAuth]:
    world = World(Rotating())
    world.person.says_yes.set()  # else a test that is red would wait for ever
    return world, world.make(store=MemoryStore() if store is None else store)


async def keep(world: World, store: CredentialStore, **more: Any) -> None:
    tokens = Tokens("old", expires_at=world.clock.now + 600, lifetime=600, refresh_token="r0", **more)
    await store.save(KEY, Credentials(SERVER, ISSUER, Registration("me"), tokens))


def newest(world: World) -> Callable[[str], bool]:
    return lambda token: token == f"token-{world.authority.given}"


# A store that fails


@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_a_renewed_login_that_could_not_be_kept_is_used_and_kept_later(
    failures: int, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    store = Failing()
    world, oauth = rotating(store)
    await keep(world, store)
    store.saves = [full() for _ in range(failures)]
    async with oauth.connected(SERVER) as authorizer:
        for number in range(1, 4):  # each would fail with the refresh token that the store has
            world.clock.now += 601
            assert await authorizer.headers("POST", SERVER) == {"authorization": f"Bearer token-{number}"}
        await trio.sleep(60)
        kept = await store.load(KEY)
        assert kept is not None
        assert kept.tokens is not None
        assert kept.tokens.refresh_token == "r3"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "could not be kept: OSError: [Errno 28] No space left on device" in warnings[0]
    assert "r1" not in caplog.text
    assert not world.authority.visited


async def test_it_is_kept_without_another_request_and_at_the_latest_as_the_connection_ends(
    autojump_clock: MockClock,
) -> None:
    for saves, seconds in (([full()], 2.0), ([full(), full()], 0.1), ([full(), full()], 4.0)):
        store = Failing()
        world, oauth = rotating(store)
        await keep(world, store)
        store.saves = [*saves]
        world.clock.now += 601
        async with oauth.connected(SERVER) as authorizer:
            await authorizer.headers("POST", SERVER)
            await trio.sleep(seconds)
        store.saves.clear()
        async with oauth.connected(SERVER) as again:  # or it is still known, and kept as this one ends
            assert await again.headers("POST", SERVER) == {"authorization": "Bearer token-1"}
        kept = await store.load(KEY)
        assert kept is not None
        assert kept.tokens is not None
        assert kept.tokens.refresh_token == "r1"
        assert not oauth._accounts


async def test_one_connection_goes_on_trying_where_another_ends(autojump_clock: MockClock) -> None:
    store = Failing()
    world, oauth = rotating(store)
    await keep(world, store)
    store.saves = [full(), full()]
    world.clock.now += 601
    async with oauth.connected(SERVER) as staying:
        async with oauth.connected(SERVER) as leaving:
            await leaving.headers("POST", SERVER)
            await staying.headers("POST", SERVER)
        await trio.sleep(10)
        assert store.tried == 4  # once by hand above, and three times
        assert staying.account.unsaved is None


async def test_what_somebody_else_kept_meanwhile_is_newer(autojump_clock: MockClock) -> None:
    store = Failing()
    world, oauth = rotating(store)
    await keep(world, store)
    store.saves = [full()]
    world.clock.now += 601
    async with oauth.connected(SERVER) as authorizer:
        await authorizer.headers("POST", SERVER)
        theirs = Credentials(SERVER, ISSUER, Registration("me"), Tokens("theirs"))
        store._kept[KEY] = theirs
        await trio.sleep(5)
        assert await authorizer.headers("POST", SERVER) == {"authorization": "Bearer theirs"}
    assert await store.load(KEY) == theirs


async def test_who_logs_out_is_not_logged_in_again_by_a_save_that_is_tried_again(autojump_clock: MockClock) -> None:
    store = Failing()
    world, oauth = rotating(store)
    await keep(world, store)
    world.clock.now += 601
    store.saves = [full()]
    async with oauth.connected(SERVER) as authorizer:
        await authorizer.headers("POST", SERVER)
        await oauth.logout(SERVER)
        await trio.sleep(10)
        assert await authorizer.headers("POST", SERVER) == {}
    assert await store.load(KEY) is None


@pytest.mark.parametrize("where", ["saves", "loads", "locks"])
@pytest.mark.parametrize("error", [full(), AuthorizationError("it is damaged"), RuntimeError("\x1b[2J"), KeyError("k")])
async def test_a_store_that_fails_anywhere_loses_no_login_and_ends_no_connection(
    where: str, error: BaseException, autojump_clock: MockClock
) -> None:
    for good in range(4):  # so many go well before it
        store = Failing()
        world, oauth = rotating(store)
        await keep(world, store)
        errors: list[str] = []
        async with oauth.connected(SERVER) as authorizer:
            setattr(store, where, [*[None] * good, error])
            for _ in range(4):
                world.clock.now += 601
                try:
                    await authorizer.headers("POST", SERVER)
                except AuthorizationError as failed:
                    errors.append(str(failed))
            world.clock.now += 601
            assert (await authorizer.headers("POST", SERVER))["authorization"].startswith("Bearer token-")
        assert len(errors) <= (where == "locks"), errors  # then nothing was sent
        assert "\x1b" not in "".join(errors)
        assert not world.authority.visited
        assert isinstance(world.authority, Rotating)
        assert not world.authority.reused
        kept = await store.load(KEY)
        assert kept is not None
        assert kept.tokens is not None
        assert world.authority.good == {kept.tokens.refresh_token}


async def test_a_login_by_hand_that_cannot_be_kept_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path / "logins.json")
    world, oauth = rotating(store)
    world.person.says_yes.set()

    def no_room(*args: Any, **more: Any) -> Any:
        raise full()

    monkeypatch.setattr("tempfile.mkstemp", no_room)
    with pytest.raises(AuthorizationError, match=r"could not be kept: .*logins.json cannot be written: No space left"):
        await oauth.login(SERVER)
    monkeypatch.undo()
    await oauth.login(SERVER)
    assert len(await store.keys()) == 1


# A call given up


@pytest.mark.parametrize("way", ["call", "connection", "both connections", "logout"])
@pytest.mark.parametrize("kind", ["memory", "file"])
async def test_a_renewal_given_up_at_any_moment_keeps_the_rotated_token(way: str, kind: str, tmp_path: Path) -> None:
    for checkpoints in range(40 if kind == "memory" else 14):
        store = MemoryStore() if kind == "memory" else FileStore(tmp_path / f"{checkpoints}.json")
        world, oauth = rotating(store)
        await keep(world, store)
        world.clock.now += 601

        async def call(scope: trio.CancelScope, oauth: OAuth = oauth) -> None:
            with scope, suppress(AuthorizationError):  # that it was logged out
                async with oauth.connected(SERVER) as authorizer:
                    await authorizer.headers("POST", SERVER)

        scopes = [trio.CancelScope(), trio.CancelScope()]
        async with oauth.connected(SERVER) as other, trio.open_nursery() as nursery:
            if way == "call":
                nursery.start_soon(partial(_within, scopes[0], other.headers, "POST", SERVER))
            else:
                for scope in scopes[: 2 if way == "both connections" else 1]:
                    nursery.start_soon(call, scope)
            for _ in range(checkpoints):
                await trio.lowlevel.checkpoint()
            if way == "logout":
                await oauth.logout(SERVER)
            for scope in scopes:
                scope.cancel()
        if way == "logout":
            assert await store.load(KEY) is None
            continue
        async with oauth.connected(SERVER) as authorizer:
            assert (await authorizer.headers("POST", SERVER))["authorization"].startswith("Bearer token-")
        assert isinstance(world.authority, Rotating)
        assert (world.authority.visited, world.authority.reused) == ([], 0), checkpoints
        kept = await store.load(KEY)
        assert kept is not None
        assert kept.tokens is not None
        assert world.authority.good == {kept.tokens.refresh_token}


async def _within(scope: trio.CancelScope, call: Callable[..., Any], *args: Any) -> None:
    with scope:
        await call(*args)


async def test_a_renewal_that_nobody_waits_for_is_bounded(autojump_clock: MockClock) -> None:
    world, oauth = rotating()
    await keep(world, oauth.store)
    world.clock.now += 601

    async def silent(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/token"):
            await trio.sleep_forever()
        fetch = Fetch(str(request.url), request.method, dict(request.headers), request.content or None)
        answer = world.authority.answer(fetch)
        return reply(answer.status, answer.body, answer.headers)

    web = httpx2.AsyncClient(transport=httpx2.MockTransport(silent))
    began = trio.current_time()
    with trio.move_on_after(1) as scope:
        async with attrs.evolve(oauth, http_client=web).connected(SERVER) as authorizer:
            await authorizer.headers("POST", SERVER)
    assert scope.cancelled_caught
    assert 5.5 < trio.current_time() - began < 12


async def test_a_code_that_came_back_is_exchanged_even_if_nobody_waits_any_more() -> None:
    for checkpoints in range(30):
        world, oauth = rotating()
        world.person.says_yes.set()
        with trio.CancelScope() as scope:
            async with oauth.connected(SERVER) as authorizer, trio.open_nursery() as nursery:
                nursery.start_soon(ask, authorizer)
                while not any(url.endswith("/token") for url in world.authority.urls):
                    await trio.lowlevel.checkpoint()
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
                await trio.lowlevel.checkpoint()
        assert await oauth.store.load(KEY) is not None


async def test_a_renewal_beside_what_goes_on_that_fails_is_not_tried_with_each_request(
    autojump_clock: MockClock,
) -> None:
    world, oauth = rotating()
    await keep(world, oauth.store)
    world.authority.metadata_at = None
    world.clock.now += 560
    async with oauth.connected(SERVER) as authorizer:
        for _ in range(50):
            assert await authorizer.headers("POST", SERVER) == {"authorization": "Bearer old"}
            await wait_all_tasks_blocked()
        assert world.of("/.well-known/oauth-authorization-server") == 1
        await trio.sleep(6)
        world.authority.metadata_at = f"{ISSUER}/.well-known/oauth-authorization-server"
        await authorizer.headers("POST", SERVER)
        await wait_all_tasks_blocked()
        assert await authorizer.headers("POST", SERVER) == {"authorization": "Bearer token-1"}


# A server that refuses


async def refuse(world: World, oauth: OAuth, requests: int, *, status: int = 401, connections: int = 1) -> int:
    """Let every request be refused; return how many ended in an error."""
    world.person.says_yes.set()
    errors: list[str] = []
    for _ in range(connections):
        async with oauth.connected(SERVER) as authorizer:
            for _ in range(requests):
                try:
                    for tries in range(10):
                        sent = await authorizer.headers("POST", SERVER)
                        await authorizer.refused(status, MORE if status == 403 else UNAUTHORIZED, sent, tries)
                except AuthorizationError as error:
                    errors.append(str(error))
    assert all("refuses the token" in error or "scopes that the token does not have" in error for error in errors), (
        errors
    )
    return len(errors)


@pytest.mark.parametrize("connections", [1, 40])
@pytest.mark.parametrize("status", [401, 403])
async def test_a_server_that_refuses_every_token_opens_two_pages(connections: int, status: int) -> None:
    world = World()
    failed = await refuse(world, world.oauth, 40 // connections, status=status, connections=connections)
    assert (failed, len(world.authority.visited)) == (40, 2)
    with pytest.raises(AuthorizationError, match=r"OAuth.login\(\) \(trimcp login URL\)"):
        async with world.oauth.connected(SERVER) as authorizer:
            await ask(authorizer, good=lambda token: False)
    await world.oauth.login(SERVER)  # by hand
    assert len(world.authority.visited) == 3
    async with world.oauth.connected(SERVER) as authorizer:
        assert await ask(authorizer) == "token-3"


async def test_a_request_that_is_accepted_begins_to_count_anew() -> None:
    world = World()
    world.person.says_yes.set()
    async with world.oauth.connected(SERVER) as authorizer:
        for number in range(6):
            world.clock.now += 1_000  # there is no refresh token
            assert await ask(authorizer) == f"token-{number + 1}"
            authorizer.accepted({})  # without a token, as before a login
            assert authorizer.account.unaccepted == 1
            authorizer.accepted(await authorizer.headers("POST", SERVER))
    assert len(world.authority.visited) == 6


@pytest.mark.parametrize("connections", [1, 100])
async def test_a_server_that_takes_every_token_once_opens_twenty_pages_an_hour(connections: int) -> None:
    world = World()
    world.person.says_yes.set()
    failed = 0
    for _ in range(connections):
        async with world.oauth.connected(SERVER) as authorizer:
            for _ in range(100 // connections):
                world.clock.now += 1
                sent = await authorizer.headers("POST", SERVER)
                try:
                    await authorizer.refused(401, UNAUTHORIZED, sent, 0)
                    authorizer.accepted(await authorizer.headers("POST", SERVER))
                except AuthorizationError:
                    failed += 1
    assert (failed, len(world.authority.visited)) == (80, 20)
    world.clock.now += 3_600
    async with world.oauth.connected(SERVER) as authorizer:
        await authorizer.refused(401, UNAUTHORIZED, await authorizer.headers("POST", SERVER), 0)
    world.clock.now += 3_601
    async with world.oauth.connected(SERVER):
        assert len(world.oauth._accounts) == 1
    async with world.oauth.connected("https://other.example/mcp"):
        pass
    assert not world.oauth._accounts


async def test_a_person_who_says_no_is_not_asked_for_ever() -> None:
    world = World()
    world.person.says_yes.set()
    world.authority.refuses = [{"error": "access_denied"}] * 100
    async with world.oauth.connected(SERVER) as authorizer:
        for _ in range(40):
            with pytest.raises(AuthorizationError):
                await ask(authorizer)
    assert len(world.authority.visited) == 2


async def test_an_authorization_server_that_is_away_does_not_count(world: World) -> None:
    world.person.says_yes.set()
    at, world.authority.metadata_at = world.authority.metadata_at, None
    async with world.oauth.connected(SERVER) as authorizer:
        for _ in range(5):
            with pytest.raises(AuthorizationError):
                await ask(authorizer)
        world.authority.metadata_at = at
        assert await ask(authorizer) == "token-1"


async def test_a_program_that_nobody_watches_tries_again_after_a_minute() -> None:
    world = World()
    oauth = world.make(grant=ClientCredentials("robot", "s", issuer=ISSUER))
    world.authority.metadata["token_endpoint_auth_methods_supported"] = ["client_secret_post"]
    assert await refuse(world, oauth, 40) == 40
    assert world.authority.given == 2
    world.clock.now += 61
    async with oauth.connected(SERVER) as authorizer:
        assert await ask(authorizer, good=lambda token: token == "token-3") == "token-3"


@pytest.fixture
def world() -> World:
    return World()


async def test_over_http_a_server_that_refuses_every_token_opens_two_pages(world: World) -> None:
    """The issue's own numbers: 40 requests, of which each opened two pages."""
    await world.ask_who_refuses(40)
    assert world.refused >= 40
    assert len(world.authority.visited) == 2
