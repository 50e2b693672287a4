"""Tokens and proofs of any shape, spelling and number: whoever shows them costs others nothing and gets nothing."""

from __future__ import annotations

import base64
import gc
import json
import logging
import sys
import weakref
from typing import Any

import attrs
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from joserfc import jws
from joserfc.jwk import ECKey
from trio.testing import wait_all_tasks_blocked

from tests.auth.authority import reply
from tests.auth.test_resource_server import (
    ISSUER,
    KEY,
    NOW,
    OTHER,
    RESOURCE,
    Now,
    Published,
    ask,
    proof,
    serving,
    token,
)
from trimcp.auth.issuers import Introspection, TokenQuestions
from trimcp.auth.jose import ProofKey
from trimcp.auth.resource_server import ResourceServer
from trimcp.auth.verifying import Replays
from trimcp.principal import Principal
from trimcp.transports.http.peers.identity import Refused, bearer_tokens

ASKING = Introspection(f"{ISSUER}/introspect", "me", "s3cret", ISSUER)
GOOD = {"active": True, "sub": "ann", "aud": RESOURCE, "exp": NOW + 600}


@pytest.fixture
def published() -> Published:
    return Published()


def questions_of(server: ResourceServer) -> TokenQuestions:
    assert server._questions is not None
    return server._questions


def under_way(server: ResourceServer) -> tuple[object, object]:
    """The tokens that its issuer is asked about, and who waits for turns."""
    questions = questions_of(server)
    return questions._questions, questions._asking


@attrs.define(eq=False)
class Slow(Published):
    """Answers about tokens when it may, and counts who waits at the same time."""

    may: trio.Event = attrs.field(factory=trio.Event)
    now: int = 0
    most: int = 0
    bodies: list[bytes] = attrs.field(factory=list)

    async def answer(self, request: Any) -> Any:
        if request.url.path == "/introspect":
            self.bodies.append(request.content)
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                await self.may.wait()
            finally:
                self.now -= 1
            if self.status == 0:
                return reply(503)
        return await super().answer(request)


# Introspection


@pytest.mark.parametrize(
    ("introspected", "status", "kind"),
    [({"active": False}, 200, 401), (GOOD, 200, None), ({**GOOD, "aud": "x"}, 200, 401), ({}, 0, 503), ({}, 200, 503)],
)
async def test_a_token_is_asked_about_once_however_many_show_it_at_once(
    introspected: dict[str, Any], status: int, kind: int | None
) -> None:
    slow = Slow(introspected=introspected, status=status)
    found: list[int | None] = []

    async def show() -> None:
        got = await ask(server, "opaque")
        found.append(got.status if isinstance(got, Refused) else None)

    async with serving(slow, introspection=ASKING) as server:
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(show)
            await wait_all_tasks_blocked()
            slow.may.set()
        assert found == [kind] * 100
        assert len(slow.bodies) == 1
        assert under_way(server) == ({}, {})


async def test_a_token_that_was_refused_is_not_asked_about_for_some_seconds(published: Published) -> None:
    now = Now()
    async with serving(published, introspection=ASKING, now=now) as server:
        for number in range(50):
            assert isinstance(await ask(server, "opaque"), Refused)
            assert isinstance(await ask(server, f"other{number}"), Refused)
        assert published.asked.count("/introspect") == 51
        now.now += 5
        assert isinstance(await ask(server, "opaque"), Refused)
        assert published.asked.count("/introspect") == 52
        published.status = 503  # that is no refusal, and not remembered
        for _ in range(2):
            refused = await ask(server, "new")
            assert isinstance(refused, Refused)
            assert refused.status == 503
        assert published.asked.count("/introspect") == 54


async def test_no_more_refusals_are_remembered_than_tokens(published: Published) -> None:
    async with serving(published, introspection=ASKING, max_tokens=5) as server:
        for number in range(50):
            await ask(server, f"opaque{number}")
        assert len(questions_of(server)._refused) == 5


class Watched:
    """Something that a request holds, of which it can be seen whether it is still there."""


@pytest.mark.parametrize("status", [200, 503])
async def test_a_refusal_keeps_nothing_of_its_request(published: Published, status: int) -> None:
    async def show() -> weakref.ref[Watched]:
        held = Watched()
        await ask(server, "opaque", headers={"x-held": held})
        return weakref.ref(held)

    published.status = status
    async with serving(published, introspection=ASKING) as server:
        await show()
        gc.collect()
        gc.disable()
        try:
            assert (await show())() is None  # asked about, or remembered
            questions_of(server)._refused.clear()
            assert (await show())() is None
        finally:
            gc.enable()


async def test_a_clock_that_is_set_back_prolongs_no_answer_about_a_token(published: Published) -> None:
    now = Now()
    async with serving(published, introspection=ASKING, now=now) as server:
        assert isinstance(await ask(server, "bad"), Refused)
        published.introspected = {**GOOD, "iat": NOW - 86_400}
        assert isinstance(await ask(server, "good"), Principal)
        now.now -= 3_600
        assert isinstance(await ask(server, "bad"), Principal)  # its issuer says so by now
        published.introspected = {"active": False}
        now.now -= 3_600
        assert isinstance(await ask(server, "good"), Refused)


@pytest.mark.parametrize("name", ["sub", "client_id", "azp", "scope", "scp"])
async def test_half_a_character_in_a_token_reaches_nobody(published: Published, name: str) -> None:
    async with serving(published) as server:
        said = {**PLAIN, name: ["a", "\ud800"] if name == "scp" else "a \ud800"}
        found = await ask(server, _made({"alg": "ES256", "typ": "at+jwt", "kid": "k1"}, said, KEY))
        if name == "sub":
            assert isinstance(found, Refused)
            assert found.status == 401
        else:
            assert isinstance(found, Principal)
            assert found.client_id is None
            assert found.scopes <= {"a"}
        with_name = {**PLAIN, "name": "cut \ud83d"}  # an issuer's fault, and of no use here
        found = await ask(server, _made({"alg": "ES256", "typ": "at+jwt", "kid": "k1"}, with_name, KEY))
        assert isinstance(found, Principal)


async def test_an_issuer_that_is_away_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(status=0)
    slow.may.set()
    async with serving(slow, introspection=ASKING) as server:
        for number in range(200):
            refused = await ask(server, f"guess{number}")
            assert isinstance(refused, Refused)
            assert refused.status == 503
    assert 1 <= len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 20


async def test_keys_that_no_library_expects_end_no_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(body: bytes) -> Any:
        raise AttributeError("'int' object has no attribute 'encode'")

    monkeypatch.setattr("trimcp.auth.issuers.read_keys", crash)
    async with serving(Published()) as server:
        refused = await ask(server, token())
        assert isinstance(refused, Refused)
        assert refused.status == 503
    assert "could not be read" in caplog.text


async def test_who_asked_first_may_leave_at_any_moment() -> None:
    for checkpoints in range(12):
        slow = Slow(introspected=GOOD)
        slow.may.set()
        found: list[Any] = []

        async def show(scope: trio.CancelScope, server: Any, found: list[Any] = found) -> None:
            with scope:
                found.append(await ask(server, "opaque"))

        async with serving(slow, introspection=ASKING) as server:
            scopes = [trio.CancelScope() for _ in range(3)]
            async with trio.open_nursery() as nursery:
                for scope in scopes:
                    nursery.start_soon(show, scope, server)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                scopes[0].cancel()
                await trio.lowlevel.checkpoint()
                scopes[1].cancel()
            assert found
            assert all(isinstance(each, Principal) for each in found)
            assert under_way(server) == ({}, {})


@pytest.mark.parametrize("peer", ["192.0.2.1:{}", "[2001:db8::{:x}]:1000", "[2001:db8::1:{:x}:2]:{}"])
async def test_a_storm_of_unknown_tokens_of_one_address_keeps_nobody_else_waiting(peer: str) -> None:
    slow = Slow()
    async with serving(slow, introspection=ASKING) as server, trio.open_nursery() as nursery:

        async def show(number: int) -> None:
            await ask(server, f"guess{number}", peer=peer.format(number + 1, number))

        for number in range(200):
            nursery.start_soon(show, number)
        await wait_all_tasks_blocked()
        assert slow.most == 8
        nursery.start_soon(ask, server, "honest")
        await wait_all_tasks_blocked()
        assert b"honest" in slow.bodies[-1]
        questions = questions_of(server)
        nursery.cancel_scope.cancel()
    assert (questions._questions, questions._asking) == ({}, {})


async def test_a_fixed_token_is_not_shown_to_the_issuer() -> None:
    slow = Slow()
    slow.may.set()
    async with serving(slow, introspection=ASKING, also=bearer_tokens({"fixed-s3cret": "robot"})) as server:
        for _ in range(5):
            assert await ask(server, "fixed-s3cret") == Principal("robot")
        assert isinstance(await ask(server, "opaque"), Refused)
        assert isinstance(await ask(server, token()), Principal)
    assert [b"opaque" in body for body in slow.bodies] == [True]


# Spellings


@pytest.mark.parametrize("configured", [ISSUER, f"{ISSUER}/"])
@pytest.mark.parametrize("published_as", [ISSUER, f"{ISSUER}/"])
async def test_an_issuer_is_the_same_with_its_slash_and_without(configured: str, published_as: str) -> None:
    published = Published(metadata={"issuer": published_as})
    asking = attrs.evolve(ASKING, issuer=published_as)
    async with serving(published, issuers=[configured], introspection=asking) as server:
        found = [await ask(server, token(iss=said)) for said in (ISSUER, f"{ISSUER}/")]
        published.introspected = {**GOOD, "iss": f"{ISSUER}/"}
        found.append(await ask(server, "opaque"))
        # One person, by whatever name the token calls the issuer.
        assert {str(each) for each in found if isinstance(each, Principal)} == {f"{configured}#ann"}
        assert len(found) == 3
        for other in (f"{ISSUER}//", f"{ISSUER}/a", ISSUER.upper(), f"{ISSUER}:443", "", None, 1, [ISSUER], {}):
            refused = await ask(server, token(iss=other))
            assert isinstance(refused, Refused), other
        assert list(server.metadata["authorization_servers"]) == [configured]


async def test_a_page_for_whatever_is_asked_hides_no_keys(published: Published) -> None:
    class Pages(Published):
        async def answer(self, request: Any) -> Any:
            if request.url.path == "/.well-known/oauth-authorization-server":
                return reply(200, b"<!doctype html>")
            if request.url.path == "/.well-known/openid-configuration":
                return reply(200, {"issuer": ISSUER, "jwks_uri": f"{ISSUER}/keys"})
            return await super().answer(request)

    async with serving(Pages()) as server:
        assert isinstance(await ask(server, token()), Principal)


@pytest.mark.parametrize("audience", [RESOURCE, f"{RESOURCE}/", ["x", f"{RESOURCE}/"]])
async def test_an_audience_is_the_same_with_a_slash_and_without(published: Published, audience: Any) -> None:
    async with serving(published) as server:
        assert isinstance(await ask(server, token(aud=audience)), Principal)
        for other in (f"{RESOURCE}//", f"{RESOURCE}/a", RESOURCE.upper(), "https://mcp.example/", [], None, {}, [None]):
            assert isinstance(await ask(server, token(aud=other)), Refused), other
    async with serving(published, audiences=("api",)) as server:  # what was named is exact
        assert isinstance(await ask(server, token(aud="api")), Principal)
        assert isinstance(await ask(server, token(aud="api/")), Refused)


# Any shape

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from([ISSUER, RESOURCE, "at+jwt", "ES256", "none", "HS256", "k1", NOW, 10**400, "\ud800", "b64"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from(["iss", "sub", "aud", "exp", "nbf", "iat", "cnf", "scope", "scp", "client_id", "azp", "jti"])
HEADERS = st.sampled_from(["alg", "typ", "kid", "crit", "jwk", "jku", "x5c", "x5u", "b64", "zip", "enc"])


PLAIN = {"iss": ISSUER, "sub": "ann", "aud": RESOURCE, "exp": NOW + 600}


def _made(header: dict[str, Any], claims: object, key: ECKey) -> str:
    """Sign what no library would."""

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    head, body = part(header), part(claims)
    raw = jws.JWSRegistry.algorithms["ES256"].sign(f"{head}.{body}".encode(), key)
    signature = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
    return f"{head}.{body}.{signature}"


@given(
    header=st.dictionaries(HEADERS, JSON, max_size=3),
    claims=st.dictionaries(NAMES, JSON, max_size=4),
    bare=st.one_of(st.none(), JSON),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_token_of_any_shape_lets_nobody_in_and_crashes_nothing(
    header: dict[str, Any], claims: dict[str, Any], bare: object
) -> None:
    said = {**PLAIN, **claims}
    head = {"alg": "ES256", "typ": "at+jwt", "kid": "k1", **header}

    async def main() -> None:
        async with serving(Published()) as server:
            assert isinstance(await ask(server, _made({"alg": "ES256", "typ": "at+jwt"}, PLAIN, KEY)), Principal)
            good = await ask(server, _made(head, said, KEY))
            if isinstance(good, Principal):
                assert said["iss"] == ISSUER
                assert RESOURCE in (said["aud"] if isinstance(said["aud"], list) else [said["aud"]])
                assert (head["alg"], head["typ"].lower()) == ("ES256", "at+jwt")
            for text in (_made(head, said, OTHER), _made(head, bare, KEY), _made({**head, "alg": "none"}, said, KEY)):
                found = await ask(server, text)
                assert isinstance(found, Refused)
                assert found.status in (400, 401)
                assert all(value.isprintable() for _, value in found.headers)

    trio.run(main)


@given(said=st.dictionaries(NAMES, JSON, max_size=6), active=JSON)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_answer_about_a_token_of_any_shape_crashes_nothing(said: dict[str, Any], active: object) -> None:
    async def main() -> None:
        published = Published(introspected={**GOOD, **said, "active": active})
        async with serving(published, introspection=ASKING) as server:
            found = await ask(server, "opaque")
            if isinstance(found, Principal):
                assert active is True
            else:
                assert found.status in (401, 503)

    trio.run(main)


# Proofs


async def test_proofs_of_ones_own_make_no_proof_of_another_good_again(published: Published) -> None:
    ann = attrs.evolve(ProofKey.generate(), now=lambda: NOW)
    text = token(cnf={"jkt": ann.thumbprint})
    async with serving(published) as server:
        server._replays.most = 100
        captured = proof(ann, text)
        assert isinstance(await ask(server, text, "DPoP", headers=captured), Principal)
        for number in range(300):
            assert server._replays.first_use("eve", str(number), NOW, NOW) == (number <= 99), number
        again = await ask(server, text, "DPoP", headers=captured)
        assert isinstance(again, Refused)
        later = attrs.evolve(ann, now=lambda: NOW + 1)
        assert isinstance(await ask(server, text, "DPoP", headers=proof(later, text)), Principal)


@given(
    most=st.integers(1, 8),
    steps=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(0, 5), st.integers(-310, 310), st.integers(0, 40)),
        max_size=60,
    ),
)
def test_no_proof_is_good_twice_whatever_is_sent_between(most: int, steps: list[tuple[str, int, int, int]]) -> None:
    replays, used, now = Replays(most), set(), NOW
    for key, id, offset, passed in steps:
        now += passed
        issued = round(now + offset, -1)  # so that the same one comes again
        if not now - 300 <= issued <= now + 300:
            continue
        good = replays.first_use(key, str(id), issued, now)
        assert not (good and (key, id, issued) in used)
        if good:
            used.add((key, id, issued))
        assert len(replays._used) <= most
        assert len(replays._floors) <= most + 1


@pytest.mark.parametrize("keys", [1, 3, 100, 5_000])
def test_a_client_goes_on_beside_any_storm(keys: int) -> None:
    replays, now = Replays(200), NOW
    for second in range(60):
        now += 1
        assert replays.first_use("ann", f"a{second}", now - 1, now)  # a second on the way
        for number in range(150):
            replays.first_use(f"eve{(second * 150 + number) % keys}", f"{second}.{number}", now, now)
        for earlier in range(second + 1):
            assert not replays.first_use("ann", f"a{earlier}", NOW + earlier, now)
    now += 1_200
    assert replays.first_use("bob", "b", now, now)
    assert (len(replays._used), len(replays._floors)) == (1, 0)


def test_what_is_kept_of_a_proof_does_not_grow_with_what_it_calls_itself() -> None:
    replays = Replays()
    for number in range(1_000):
        assert replays.first_use("k" * 43, chr(0x1F600) * 250 + str(number), NOW, NOW)
    assert sum(sys.getsizeof(mark) for mark in replays._used) < 1_000 * 64
