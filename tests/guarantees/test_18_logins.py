"""Promise 18: a token, proof or login file of any shape lets nobody in and crashes nothing, and no login is lost."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.auth.authority import SERVER
from tests.auth.test_damaged import GOOD
from tests.auth.test_discovery import SECRETS, Authority, login
from tests.auth.test_oauth import KEY, World
from tests.auth.test_resource_server import NOW, Published, ask, proof, serving, token
from tests.auth.test_surviving import Failing, Rotating, full, keep, rotating
from tests.auth.test_tokens import ASKING, Slow
from tests.guarantees.report import figure
from trimcp.auth import AuthorizationError, FileStore, OAuth
from trimcp.auth.jose import ProofKey
from trimcp.auth.verifying import Replays
from trimcp.principal import Principal
from trimcp.transports.http.peers.identity import Refused

pytestmark = pytest.mark.slow

_MUTATIONS = 1_000
_PROOFS = 100_000
_MIB = 1024 * 1024
LONG = "\U0001f600" * 240


def _mutated(chance: random.Random, data: bytes) -> bytes:
    """Change, cut, double or put in some bytes."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5, 40])):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(4):
            case 0 if at < len(changed):
                changed[at] = chance.randrange(256)
            case 1:
                del changed[at : at + chance.randrange(1, 20)]
            case 2:
                changed[at:at] = changed[at : at + chance.randrange(1, 20)]
            case _:
                changed[at:at] = bytes([chance.choice(b'{}[]",:.=\\0e-')])
    return bytes(changed)


async def test_mutated_tokens_let_nobody_in() -> None:
    chance, let_in, other = random.Random(18), 0, 0
    good = token()
    async with serving(Published()) as server:
        assert isinstance(await ask(server, good), Principal)
        for _ in range(_MUTATIONS):
            text = _mutated(chance, good.encode()).decode("latin-1")
            if text.strip(" ") == good:
                continue
            found = await ask(server, text)
            # The last character of a signature has bits that say nothing.
            let_in += isinstance(found, Principal) and text[:-1] != good[:-1]
            other += isinstance(found, Refused) and found.status not in (400, 401)
    figure(18, f"of {_MUTATIONS:,} mutated tokens, let in", let_in, 0, "", "resource server")
    figure(18, f"of {_MUTATIONS:,} mutated tokens, answered with neither 400 nor 401", other, 0, "", "resource server")
    assert (let_in, other) == (0, 0)


async def test_mutated_login_files_crash_nothing(tmp_path: Path) -> None:
    chance, crashes, unnamed = random.Random(19), [], 0
    path = tmp_path / "logins.json"
    await FileStore(path).save(KEY, GOOD)
    data = await trio.Path(path).read_bytes()
    for _ in range(_MUTATIONS):
        await trio.Path(path).write_bytes(_mutated(chance, data))
        store = FileStore(path)
        try:
            await store.keys()
            await store.load(KEY)
        except AuthorizationError as error:
            unnamed += str(path) not in str(error) or "\n" in str(error)
        except Exception as error:
            crashes.append(repr(error))
    figure(18, f"of {_MUTATIONS:,} mutated login files, crashes", len(crashes), 0, "", "file")
    figure(18, f"of {_MUTATIONS:,} mutated login files, errors without the path", unnamed, 0, "", "file")
    assert (crashes, unnamed) == ([], 0)


async def test_no_login_is_lost_to_a_store_or_a_call_given_up() -> None:
    lost, moments = 0, 0
    for step in ("saves", "loads", "locks"):
        for good in range(5):
            store = Failing()
            world, oauth = rotating(store)
            await keep(world, store)
            async with oauth.connected(SERVER) as authorizer:
                setattr(store, step, [*[None] * good, full()])
                for _ in range(5):
                    world.clock.now += 601
                    with trio.move_on_after(1):
                        try:
                            await authorizer.headers("POST", SERVER)
                        except AuthorizationError:
                            pass
            moments += 1
            lost += await _is_lost(world, oauth)
    figure(18, f"of {moments} failures of a store in renewals, logins lost", lost, 0, "", "client")
    given_up = 40
    for checkpoints in range(given_up):
        world, oauth = rotating()
        await keep(world, oauth.store)
        world.clock.now += 601
        with trio.CancelScope() as scope:
            async with oauth.connected(SERVER) as authorizer, trio.open_nursery() as nursery:
                nursery.start_soon(authorizer.headers, "POST", SERVER)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
        lost += await _is_lost(world, oauth)
    figure(18, f"of {given_up} renewals given up at each checkpoint, logins lost", lost, 0, "", "client")
    assert lost == 0


async def _is_lost(world: World, oauth: OAuth) -> bool:
    """Whether somebody is asked, or a refresh token that was used comes again."""
    world.clock.now += 601
    async with oauth.connected(SERVER) as authorizer:
        await authorizer.headers("POST", SERVER)
    assert isinstance(world.authority, Rotating)
    return bool(world.authority.visited or world.authority.reused)


async def test_a_server_that_refuses_every_token_opens_few_pages() -> None:
    world = World()
    await world.ask_who_refuses(40)
    pages = len(world.authority.visited)
    figure(18, "pages opened for 40 requests that are all refused", pages, 2, "", "Streamable HTTP")
    assert pages == 2


async def test_a_bad_token_is_asked_about_once() -> None:
    slow = Slow()
    slow.may.set()
    async with serving(slow, introspection=ASKING) as server, trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(ask, server, "opaque")
    figure(18, "introspections for 100 requests with one bad token", len(slow.bodies), 1, "", "resource server")
    assert len(slow.bodies) == 1


async def test_proofs_of_ones_own_make_no_other_good_again() -> None:
    ann, replays, taken = ProofKey.generate(), Replays(), 0
    captured = [(ann.thumbprint, f"ann {number}", NOW + number / 100) for number in range(100)]
    for name, id, issued in captured:
        assert replays.first_use(name, id, issued, NOW + 1)
    for number in range(_PROOFS):
        taken += replays.first_use("e" * 43, str(number), NOW + 2 + number / 1_000, NOW + 2)
    good = sum(replays.first_use(name, id, issued, NOW + 3) for name, id, issued in captured)
    assert replays.first_use(ann.thumbprint, "another", NOW + 3, NOW + 3)
    figure(18, f"of 100 captured proofs, good again after {_PROOFS:,} of another", good, 0, "", "resource server")
    assert (good, taken) == (0, _PROOFS)
    few = 10_000
    tracemalloc.start()
    try:
        replays, before = Replays(), tracemalloc.get_traced_memory()[0]
        for number in range(few):
            replays.first_use(f"{number:043}", f"{number} {LONG}", NOW, NOW)
        kept = (tracemalloc.get_traced_memory()[0] - before) * (_PROOFS / few) / _MIB
    finally:
        tracemalloc.stop()
    figure(18, f"memory for {_PROOFS:,} proofs, each of a key of its own", kept, 48, "MiB", "resource server")
    assert kept < 48
    # The same, whole: over the check of a request.
    key = ProofKey.generate()
    async with serving(Published(), now=lambda: key.now()) as server:
        now = key.now()
        text = token(cnf={"jkt": key.thumbprint}, exp=now + 600, iat=now)
        headers = proof(key, text)
        assert isinstance(await ask(server, text, "DPoP", headers=headers), Principal)
        server._replays.most = 10
        for number in range(100):
            server._replays.first_use("eve", str(number), now + number / 100, now)
        assert isinstance(await ask(server, text, "DPoP", headers=headers), Refused)


def test_secrets_go_to_who_is_named_with_them() -> None:
    shown = 0
    for grant in SECRETS:
        evil = "https://evil.example"
        authority: Any = Authority(issuer=evil, metadata_at=f"{evil}/.well-known/oauth-authorization-server")
        with pytest.raises(AuthorizationError, match="issuer="):
            authority.walk(login(grant).begin(None, None))
        shown += "s3cret" in repr([(each.url, each.body, each.headers) for each in authority.asked])
    figure(18, f"of {len(SECRETS)} secrets, shown to whom a server merely names", shown, 0, "", "client")
    assert shown == 0
