"""A server that takes tokens: every way in which one may not be good, keys that come and go, and what is answered."""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from inspect import isawaitable
from typing import Any

import attrs
import httpx2
import pytest
import trio
from joserfc import jws, jwt
from joserfc.jwk import ECKey, RSAKey
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.auth.authority import reply
from tests.store.memory_store import MemoryHub, MemoryStore
from trimcp.auth.fetching import _is_public, opened_fetcher
from trimcp.auth.issuers import Introspection
from trimcp.auth.jose import ProofKey, hash_of
from trimcp.auth.metadata import parse_challenges
from trimcp.auth.resource_server import ResourceServer
from trimcp.auth.steps import Fetch
from trimcp.principal import Principal
from trimcp.security import security_event
from trimcp.transports.http.interfaces import Head
from trimcp.transports.http.peers.identity import Refused, bearer_tokens

RESOURCE = "https://mcp.example/mcp"
ISSUER = "https://auth.example"
METADATA = "https://mcp.example/.well-known/oauth-protected-resource/mcp"
NOW = 1_000_000.0
KEY = ECKey.generate_key("P-256", {"kid": "k1"})
OTHER = ECKey.generate_key("P-256", {"kid": "k2"})
RSA = RSAKey.generate_key(2048, {"kid": "r1"})


def token(key: Any = KEY, header: dict[str, Any] | None = None, **claims: Any) -> str:
    said = {
        "iss": ISSUER,
        "sub": "ann",
        "aud": RESOURCE,
        "exp": NOW + 600,
        "iat": NOW,
        "client_id": "app",
        "scope": "read write",
        **claims,
    }
    head = {"alg": "ES256", "typ": "at+jwt", "kid": "k1", **(header or {})}
    said = {name: value for name, value in said.items() if value is not None}
    head = {name: value for name, value in head.items() if value is not None}
    return jwt.encode(head, said, key, algorithms=[str(head["alg"])], default_type=None)


@attrs.define(eq=False)
class Published:
    """What the issuer has on its pages."""

    keys: list[Any] = attrs.field(factory=lambda: [KEY, RSA])
    body: bytes | None = None
    status: int = 200
    headers: dict[str, str] = attrs.field(factory=dict)
    metadata: dict[str, Any] = attrs.field(factory=dict)
    asked: list[str] = attrs.field(factory=list)
    introspected: dict[str, Any] = attrs.field(factory=lambda: {"active": False})

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        await trio.lowlevel.checkpoint()
        path = request.url.path
        self.asked.append(path)
        if path == "/.well-known/oauth-authorization-server":
            return reply(200, {"issuer": ISSUER, "jwks_uri": f"{ISSUER}/keys", **self.metadata})
        if path == "/introspect":
            return reply(self.status, self.introspected)
        said = {"keys": [key.as_dict(private=False) for key in self.keys]}
        content = json.dumps(said).encode() if self.body is None else self.body
        return reply(self.status, content, self.headers)

    @property
    def fetches(self) -> int:
        return self.asked.count("/keys")


@pytest.fixture
def published() -> Published:
    return Published()


@attrs.define(eq=False)
class Now:
    now: float = NOW

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def serving(published: Published, **settings: Any) -> AsyncIterator[ResourceServer]:
    web = httpx2.AsyncClient(transport=httpx2.MockTransport(published.answer))
    more = {"now": Now(), "issuers": [ISSUER], **settings}
    server = ResourceServer(RESOURCE, http_client=web, **more)
    async with server.running():
        yield server


async def ask(server: ResourceServer, text: str | None, scheme: str = "Bearer", **more: Any) -> Principal | Refused:
    headers = {} if text is None else {"authorization": f"{scheme} {text}"}
    found = server(Head("POST", "/mcp", more.pop("query", ""), {**headers, **more.pop("headers", {})}, **more))
    found = await found if isawaitable(found) else found
    assert isinstance(found, Principal | Refused)
    return found


def challenge(refused: Principal | Refused) -> dict[str, str]:
    assert isinstance(refused, Refused), refused
    [found, *_] = parse_challenges(", ".join(text for name, text in refused.headers if name == "WWW-Authenticate"))
    return dict(found.parameters)


async def test_a_good_token_says_who_asks_and_is_looked_up_the_next_time(published: Published) -> None:
    async with serving(published) as server:
        text = token()
        found = await ask(server, text)
        assert found == Principal(
            f"{ISSUER}#ann", subject="ann", client_id="app", scopes=frozenset({"read", "write"}), expires_at=NOW + 600
        )
        again = server(Head("POST", "/mcp", "", {"authorization": f"bearer {text}"}))
        assert again is found  # at once, and nothing was verified again
    assert published.asked == ["/.well-known/oauth-authorization-server", "/keys"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another audience": ({"aud": "https://other.example"}, "another audience"),
    "a list without us": ({"aud": ["https://other.example", 3]}, "another audience"),
    "no audience": ({"aud": None}, "another audience"),
    "another issuer": ({"iss": "https://evil.example"}, "another issuer"),
    "no issuer": ({"iss": None}, "another issuer"),
    "expired": ({"exp": NOW - 31}, "expired"),
    "without end": ({"exp": None}, "expired"),
    "not yet": ({"nbf": NOW + 31}, "not good yet"),
    "from the future": ({"iat": NOW + 31}, "future"),
    "an end that is none": ({"exp": "tomorrow"}, "no time"),
    "nobody": ({"sub": None, "client_id": None}, "for whom"),
    "bound in an unknown way": ({"cnf": {"x": "y"}}, "not known here"),
}


@pytest.mark.parametrize("name", BAD)
async def test_a_token_that_is_not_good(published: Published, name: str) -> None:
    claims, why = BAD[name]
    async with serving(published) as server:
        refused = await ask(server, token(**claims))
        said = challenge(refused)
        assert (said["error"], said["resource_metadata"]) == ("invalid_token", METADATA)
        assert why in said["error_description"]
        assert isinstance(refused, Refused)
        assert refused.status == 401


@pytest.mark.parametrize(
    "claims", [{"exp": NOW - 29}, {"nbf": NOW + 29}, {"iat": NOW + 29}, {"aud": ["x", RESOURCE]}, {"scope": None}]
)
async def test_a_token_that_is_good_all_the_same(published: Published, claims: dict[str, Any]) -> None:
    async with serving(published) as server:
        assert isinstance(await ask(server, token(**claims)), Principal)


def _none() -> str:
    parts = token().split(".")
    return f"eyJhbGciOiJub25lIiwidHlwIjoiYXQrand0In0.{parts[1]}."


def _confused(key: Any) -> str:
    """A token that takes the public key for a shared secret."""
    header = {"alg": "HS256", "typ": "at+jwt", "kid": key.kid}
    claims = {"iss": ISSUER, "sub": "eve", "aud": RESOURCE, "exp": NOW + 600}
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=") for part in (header, claims)]
    signature = hmac.digest(key.as_pem(private=False), b".".join(parts), "sha256")
    return b".".join((*parts, base64.urlsafe_b64encode(signature).rstrip(b"="))).decode()


FORGED = {
    "alg none": _none,
    "HS256 with the public key": lambda: _confused(KEY),
    "HS256 with the public RSA key": lambda: _confused(RSA),
    "signed by another": lambda: token(OTHER),
    "a changed claim": lambda: ".".join(
        (*token().split(".")[:1], token(sub="eve").split(".")[1], token().split(".")[2])
    ),
    "an algorithm that the key is not for": lambda: token(RSA, {"alg": "RS256", "kid": "k1"}),
    "an id token": lambda: token(header={"typ": "JWT"}),
    "without type": lambda: token(header={"typ": None}),
    "no JWT": lambda: "abc",
    "nearly a JWT": lambda: "a.b.c",
    "empty parts": lambda: "..",
    "numbers": lambda: "MQ.MQ.MQ",
    "deep": lambda: "W1tb" * 3000 + ".W10.W10",
}


@pytest.mark.parametrize("name", FORGED)
async def test_a_token_that_is_forged(published: Published, name: str) -> None:
    async with serving(published) as server:
        refused = await ask(server, FORGED[name]())
        assert challenge(refused)["error"] == "invalid_token"
        if name.startswith(("alg", "HS256")):
            assert challenge(refused)["error_description"] == "the token's algorithm is not allowed"
        assert not server._verified


@pytest.mark.parametrize("text", ["x" * 20_000, "ä", "a\tb", "a b"])
async def test_a_header_that_is_malformed_or_huge(published: Published, text: str) -> None:
    async with serving(published) as server:
        refused = await ask(server, text)
        assert isinstance(refused, Refused)
        assert refused.status == 400


async def test_without_a_token_a_client_learns_where_to_go(published: Published) -> None:
    async with serving(published, scopes=("read",)) as server:
        refused = await ask(server, None)
        assert challenge(refused) == {"scope": "read", "resource_metadata": METADATA}
        described = await server.describe(Head("GET", server.metadata_paths[0]))
        assert json.loads(described.body) == {
            **server.metadata,
            "resource": RESOURCE,
            "authorization_servers": [ISSUER],
            "scopes_supported": ["read"],
            "dpop_bound_access_tokens_required": False,
        }
        assert (await server.describe(Head("POST", server.metadata_paths[0]))).status == 405


async def test_a_token_that_lacks_a_scope_is_told_all_that_it_needs(published: Published) -> None:
    async with serving(published, scopes=("read", "delete")) as server:
        refused = await ask(server, token())
        assert isinstance(refused, Refused)
        assert refused.status == 403
        assert (challenge(refused)["error"], challenge(refused)["scope"]) == ("insufficient_scope", "read delete")
        # What one operation needs comes beside what every request does.
        assert challenge(server.insufficient(["write", "read"]))["scope"] == "read delete write"


async def test_a_token_in_an_address_is_refused(published: Published) -> None:
    async with serving(published) as server:
        refused = await ask(server, None, query=f"access_token={token()}")
        assert isinstance(refused, Refused)
        assert refused.status == 400


async def test_a_token_that_ends_is_good_no_more(published: Published) -> None:
    now = Now()
    async with serving(published, now=now) as server:
        text = token()
        assert isinstance(await ask(server, text), Principal)
        now.now += 631
        assert "expired" in challenge(await ask(server, text))["error_description"]


# Keys


async def test_a_storm_of_unknown_keys_costs_one_fetch(published: Published, autojump_clock: MockClock) -> None:
    async with serving(published) as server:
        await wait_all_tasks_blocked()
        assert published.fetches == 1
        await trio.sleep(31)
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(ask, server, token(OTHER, {"kid": f"unknown {number}"}))
        assert published.fetches == 2
        published.keys.append(OTHER)
        assert isinstance(await ask(server, token(OTHER, {"kid": "k2"})), Refused)
        await trio.sleep(31)
        assert isinstance(await ask(server, token(OTHER, {"kid": "k2"})), Principal)


async def test_old_keys_stay_good_while_the_issuer_is_down(published: Published, autojump_clock: MockClock) -> None:
    published.headers["cache-control"] = "public, max-age=60"
    async with serving(published) as server:
        assert isinstance(await ask(server, token()), Principal)
        published.status = 503
        await trio.sleep(1_000)
        assert published.fetches > 10
        assert isinstance(await ask(server, token(sub="bob")), Principal)
        published.status, published.keys = 200, [OTHER]
        await trio.sleep(100)
        assert isinstance(await ask(server, token(sub="cy")), Refused)


async def test_without_any_keys_nobody_is_let_in_and_it_is_not_the_clients_fault(published: Published) -> None:
    published.status = 500
    async with serving(published) as server:
        refused = await ask(server, token())
        assert isinstance(refused, Refused)
        assert refused.status == 503


async def test_an_issuer_that_starts_after_the_server_is_found_soon(
    published: Published, autojump_clock: MockClock
) -> None:
    published.status = 500
    async with serving(published) as server:
        await wait_all_tasks_blocked()
        for fetches, seconds in ((1, 0.9), (2, 0.2), (2, 1.8), (3, 0.3), (3, 3.8)):
            await trio.sleep(seconds)
            refused = await ask(server, token())
            assert isinstance(refused, Refused)
            assert (refused.status, published.fetches) == (503, fetches)
        published.status = 200
        await trio.sleep(0.3)
        assert isinstance(await ask(server, token()), Principal)
        assert published.fetches == 4


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b'{"keys": []}',
        b'{"keys": [1, {}]}',
        b"[" * 100_000,
        json.dumps({"keys": [KEY.as_dict(private=False)] * 101}).encode(),
        json.dumps({"keys": [KEY.as_dict(private=False)], "more": "x" * 2_000_000}).encode(),
    ],
)
async def test_keys_that_are_none_or_without_end(published: Published, body: bytes) -> None:
    published.body = body
    async with serving(published) as server:
        refused = await ask(server, token())
        assert isinstance(refused, Refused)
        assert refused.status == 503


@pytest.mark.parametrize("location", ["http://127.0.0.1:1/keys", "https://evil.example/keys", "/elsewhere"])
async def test_a_redirect_to_keys_is_not_followed(published: Published, location: str) -> None:
    published.status, published.headers["location"] = 302, location
    async with serving(published) as server:
        refused = await ask(server, token())
        assert isinstance(refused, Refused)
        assert refused.status == 503
    assert published.fetches == 1
    assert "/elsewhere" not in published.asked


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "localhost"])
async def test_what_metadata_names_is_not_fetched_from_a_private_address(host: str) -> None:
    async with opened_fetcher() as fetcher:
        reply = await fetcher.fetch(Fetch(f"https://{host}:1/keys"))
        assert reply.status == 0
        assert "not a public one" in reply.why
    async with opened_fetcher({host.strip("[]")}) as fetcher:
        reply = await fetcher.fetch(Fetch(f"https://{host}:1/keys"))
        assert "not a public one" not in reply.why


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.0.0.1", "100.64.0.1", "169.254.169.254", "192.168.0.1", "224.0.0.1", "255.255.255.255"),
        *("::", "::1", "::7f00:1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::1", "2002:a00:1::"),
        *("2001:0:7f00:1::", "fc00::1", "fe80::1", "fec0::1", "ff02::1"),
    ],
)
def test_an_address_that_leads_into_ones_own_network(address: str) -> None:
    assert not _is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"])
def test_an_address_of_the_internet(address: str) -> None:
    assert _is_public(address)


async def test_who_asks_for_an_unknown_key_and_leaves_does_not_cut_off_its_fetch(
    published: Published, autojump_clock: MockClock
) -> None:
    async with serving(published) as server:
        assert isinstance(await ask(server, token()), Principal)
        published.keys.append(OTHER)
        await trio.sleep(31)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, server, token(OTHER, {"kid": "evil"}))
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert isinstance(await ask(server, token(OTHER, {"kid": "k2"})), Principal)
        assert published.fetches == 2


async def test_keys_that_have_moved_are_found_at_their_new_place(
    published: Published, autojump_clock: MockClock
) -> None:
    published.headers["cache-control"] = "max-age=60"
    async with serving(published) as server:
        assert isinstance(await ask(server, token()), Principal)
        published.status = 404
        await trio.sleep(70)
        published.status, published.keys = 200, [OTHER]
        published.metadata["jwks_uri"] = f"{ISSUER}/moved"
        await trio.sleep(70)
        assert isinstance(await ask(server, token(OTHER, {"kid": "k2"})), Principal)
        assert "/moved" in published.asked


async def test_one_issuers_key_is_no_good_for_the_tokens_of_another(published: Published) -> None:
    async with serving(published, issuers=[ISSUER, "https://second.example"]) as server:
        await wait_all_tasks_blocked()
        server._keys["https://second.example"]._keys = {"k2": OTHER}
        refused = await ask(server, token(OTHER, {"kid": "k2"}))
        assert "does not publish" in challenge(refused)["error_description"]
        good = await ask(server, token(OTHER, {"kid": "k2"}, iss="https://second.example"))
        assert good == Principal("https://second.example#ann")


async def test_metadata_of_another_issuer_gives_no_keys(published: Published) -> None:
    published.metadata["issuer"] = "https://evil.example"
    async with serving(published) as server:
        refused = await ask(server, token())
        assert isinstance(refused, Refused)
        assert refused.status == 503
    assert published.fetches == 0


# Tokens that say nothing by themselves


async def test_the_issuer_is_asked_about_a_token_and_the_answer_is_kept_until_it_ends(published: Published) -> None:
    now = Now()
    asking = Introspection(f"{ISSUER}/introspect", "me", "s3cret", ISSUER)
    async with serving(published, introspection=asking, now=now) as server:
        refused = await ask(server, "opaque")
        assert challenge(refused)["error"] == "invalid_token"
        said = {"active": True, "sub": "ann", "aud": RESOURCE, "scope": "read", "exp": NOW + 20}
        published.introspected = said
        assert isinstance(await ask(server, "opaque"), Refused)  # it is not asked about again at once
        now.now += 6
        for _ in range(3):
            found = await ask(server, "opaque")
            assert isinstance(found, Principal)
        assert published.asked.count("/introspect") == 2
        now.now += 45  # 20 and what clocks may differ
        assert isinstance(await ask(server, "opaque"), Refused)
        published.introspected = {**said, "aud": "https://other.example"}
        assert isinstance(await ask(server, "another"), Refused)
        published.status = 500
        refused = await ask(server, "third")
        assert isinstance(refused, Refused)
        assert refused.status == 503


async def test_a_check_of_ones_own_stays_possible(published: Published) -> None:
    async with serving(published, also=bearer_tokens({"fixed-token": "robot"})) as server:
        assert await ask(server, "fixed-token") == Principal("robot")
        assert isinstance(await ask(server, token()), Principal)
        assert challenge(await ask(server, "wrong"))["error"] == "invalid_token"


async def test_no_more_tokens_are_remembered_than_may_be(published: Published) -> None:
    async with serving(published, max_tokens=3) as server:
        for number in range(10):
            await ask(server, token(sub=f"user {number}"))
        assert len(server._verified) == 3


# Proof of possession


def proof(key: ProofKey, text: str, method: str = "POST", url: str = RESOURCE) -> dict[str, str]:
    return {"dpop": key.proof(method, url, text)}


async def test_a_bound_token_goes_with_a_proof_each(published: Published) -> None:
    key = attrs.evolve(ProofKey.generate(), now=lambda: NOW)
    text = token(cnf={"jkt": key.thumbprint})
    async with serving(published) as server:
        one = proof(key, text)
        assert isinstance(await ask(server, text, "DPoP", headers=one), Principal)
        used = await ask(server, text, "DPoP", headers=one)
        assert "used before" in challenge(used)["error_description"]
        assert isinstance(await ask(server, text, "DPoP", headers=proof(key, text)), Principal)
        assert isinstance(await ask(server, text, "Bearer"), Refused)  # as if it were bound to nothing
        assert isinstance(await ask(server, text, "DPoP"), Refused)
        assert isinstance(await ask(server, token(), "DPoP", headers=proof(key, text)), Refused)


async def test_processes_that_share_a_store_take_a_proof_once(published: Published) -> None:
    key, hub = attrs.evolve(ProofKey.generate(), now=lambda: NOW), MemoryHub()
    text = token(cnf={"jkt": key.thumbprint})
    async with AsyncExitStack() as stack:
        servers, stores = list[ResourceServer](), list[MemoryStore]()
        for _ in range(2):
            servers.append(await stack.enter_async_context(serving(published, nonces=True)))
            stores.append(MemoryStore(hub))
            await servers[-1].share(stores[-1])
        refused = await ask(servers[0], text, "DPoP", headers=proof(key, text))
        assert isinstance(refused, Refused)
        key.nonces["https://mcp.example"] = dict(refused.headers)["DPoP-Nonce"]
        one = proof(key, text)
        assert isinstance(await ask(servers[1], text, "DPoP", headers=one), Principal)  # a nonce of the other one
        for server in servers:
            refused = await ask(server, text, "DPoP", headers=one)
            assert challenge(refused)["error_description"] == "the proof was used before"
        assert isinstance(await ask(servers[0], text, "DPoP", headers=proof(key, text)), Principal)
        stores[1].broken = OSError("away")
        away = await ask(servers[1], text, "DPoP", headers=proof(key, text))
        assert isinstance(away, Refused)
        assert away.status == 503
        assert dict(away.headers)["Retry-After"] == "5"


async def test_a_proof_that_is_for_something_else(published: Published) -> None:
    key = attrs.evolve(ProofKey.generate(), now=lambda: NOW)
    late = attrs.evolve(key, now=lambda: NOW - 301)
    text = token(cnf={"jkt": key.thumbprint})
    other = attrs.evolve(ProofKey.generate(), now=lambda: NOW)
    async with serving(published) as server:
        for why, headers in {
            "another request": proof(key, text, "GET"),
            "for another request": proof(key, text, url="https://mcp.example/other"),
            "another token": proof(key, token()),
            "another key": proof(other, text),
            "too old": proof(late, text),
            "not a JWT": {"dpop": "x"},
        }.items():
            refused = await ask(server, text, "DPoP", headers=headers)
            assert why in challenge(refused)["error_description"]


@pytest.mark.parametrize(
    "value", [None, 10**400, -(10**400), 1e400, "now", True, [], {}, "\ud800", "ä", "http://[", ""]
)
@pytest.mark.parametrize("name", ["htm", "htu", "ath", "iat", "nonce"])
async def test_a_proof_that_holds_nonsense_is_refused_as_a_proof(published: Published, name: str, value: Any) -> None:
    key = ECKey.generate_key("P-256")
    text = token(cnf={"jkt": key.thumbprint()})
    async with serving(published, nonces=name == "nonce") as server:
        said = {"htm": "POST", "htu": RESOURCE, "ath": hash_of(text), "jti": "one", "iat": NOW, name: value}
        header = {"alg": "ES256", "typ": "dpop+jwt", "jwk": key.as_dict(private=False)}
        made = jws.serialize_compact(header, json.dumps(said), key)
        found = await ask(server, text, "DPoP", headers={"dpop": made})
        assert challenge(found)["error"] in ("invalid_dpop_proof", "use_dpop_nonce")


async def test_a_proof_that_shows_the_right_key_and_is_not_signed_by_it(published: Published) -> None:
    key = attrs.evolve(ProofKey.generate(), now=lambda: NOW)
    text = token(cnf={"jkt": key.thumbprint})
    async with serving(published) as server:
        one, two = [proof(key, text)["dpop"].rpartition(".") for _ in range(2)]
        for forged in (f"{one[0]}.{two[2]}", f"{one[0]}."):
            refused = await ask(server, text, "DPoP", headers={"dpop": forged})
            assert "signature is not good" in challenge(refused)["error_description"]


async def test_the_signature_of_a_strangers_proof_is_not_even_checked(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = attrs.evolve(ProofKey.generate(), now=lambda: NOW)
    text = token(cnf={"jkt": key.thumbprint})
    async with serving(published) as server:
        assert isinstance(await ask(server, text, "DPoP", headers=proof(key, text)), Principal)
        monkeypatch.setattr("trimcp.auth.verifying.jws.deserialize_compact", None)
        refused = await ask(server, text, "DPoP", headers=proof(ProofKey.generate(), text))
        assert "another key" in challenge(refused)["error_description"]


async def test_what_a_user_is_called_cannot_break_out_of_a_log(
    published: Published, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(published) as server:
        found = await ask(server, token(sub="ann\n\x1b[31mroot"))
        assert isinstance(found, Principal)
        security_event("not_allowed", principal=found)
    assert caplog.text.count("\n") == 1
    assert "\x1b" not in caplog.text


async def test_a_nonce_is_asked_for_and_is_good_for_a_while(published: Published) -> None:
    now = Now()
    key = attrs.evolve(ProofKey.generate(), now=now)
    text = token(cnf={"jkt": key.thumbprint})
    async with serving(published, nonces=True, now=now) as server:
        refused = await ask(server, text, "DPoP", headers=proof(key, text))
        assert isinstance(refused, Refused)
        assert challenge(refused)["error"] == "use_dpop_nonce"
        key.nonces["https://mcp.example"] = dict(refused.headers)["DPoP-Nonce"]
        assert isinstance(await ask(server, text, "DPoP", headers=proof(key, text)), Principal)
        now.now += 301
        assert isinstance(await ask(server, text, "DPoP", headers=proof(key, text)), Principal)
        now.now += 301
        again = await ask(server, token(cnf={"jkt": key.thumbprint}, exp=NOW + 6000), "DPoP", headers=proof(key, text))
        assert isinstance(again, Refused)


async def test_where_binding_is_required_a_plain_token_is_refused(published: Published) -> None:
    async with serving(published, binding="required") as server:
        refused = await ask(server, token())
        assert isinstance(refused, Refused)
        assert refused.headers[0][1].startswith("DPoP ")


async def test_a_token_that_is_bound_to_a_certificate(published: Published) -> None:
    text = token(cnf={"x5t#S256": "digest"})
    async with serving(published) as server:
        assert isinstance(await ask(server, text), Refused)
        assert isinstance(await ask(server, text, certificate="another"), Refused)
        assert isinstance(await ask(server, text, certificate="digest"), Principal)


@pytest.mark.parametrize(
    "settings",
    [
        {"resource": "http://mcp.example/mcp"},
        {"issuers": ["http://auth.example"]},
        {"issuers": []},
        {"algorithms": ("HS256",)},
        {"algorithms": ("ES256", "none")},
    ],
)
def test_settings_that_would_not_be_safe_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"https|issuer|signature"):
        ResourceServer(**{"resource": RESOURCE, "issuers": [ISSUER], **settings})
