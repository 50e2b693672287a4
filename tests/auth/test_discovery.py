"""Who gives tokens for a server, as real servers say it: slashes, pages for everything, clients that are forgotten."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from joserfc.jwk import ECKey

from tests.auth.authority import ISSUER, REDIRECT, SERVER, Authority
from tests.auth.test_flow import NOW, WELL_KNOWN, challenge, kept, login
from trimcp.auth.credentials import Credentials, Registration, Tokens
from trimcp.auth.grants import AuthorizationCode, ClientCredentials, EnterpriseManaged, Grant, JwtBearer
from trimcp.auth.jose import SigningKey
from trimcp.auth.metadata import covers, find_challenge, parse_challenges, same_issuer
from trimcp.auth.steps import Fetch, Fetched
from trimcp.errors import AuthorizationError

AT = f"{ISSUER}/.well-known/oauth-authorization-server"
OPENID = f"{ISSUER}/.well-known/openid-configuration"
HONEST = "https://sts.example"  # an issuer whose metadata may lie elsewhere
HTML = b"<!doctype html><title>Welcome</title>"


@attrs.define(eq=False)
class Replying(Authority):
    """Answers some addresses by hand, and knows only some clients."""

    by_hand: dict[str, Fetched] = attrs.field(factory=dict)
    clients: set[str] | None = None
    unknown: str = "invalid_client"
    sends_back: bool = False

    def answer(self, fetch: Fetch) -> Fetched:
        if (found := self.by_hand.get(fetch.url)) is not None:
            self.asked.append(fetch)
            return found
        if fetch.url.startswith(f"{ISSUER}/authorize?"):
            self.asked.append(fetch)
            known = self.clients is None or any(f"client_id={one}&" in fetch.url for one in self.clients)
            return Fetched(200 if known or self.sends_back else 400, body=HTML)
        return super().answer(fetch)

    def _token(self, fetch: Fetch) -> Fetched:
        id = self.form().get("client_id")
        if self.clients is not None and id not in self.clients:
            if not id or not id.startswith("client-"):
                return Fetched(401, body=json.dumps({"error": self.unknown}).encode())
            self.clients.add(id)  # registered just now
        return super()._token(fetch)


# Issuers that differ by a slash

OTHERS = [ISSUER.upper(), f"{ISSUER}//", f"{ISSUER}/a", f"{ISSUER}/a/", f"{ISSUER}:443", f"{ISSUER}/?", f"{ISSUER}/#"]


def test_issuers_are_the_same_but_for_a_slash_that_is_all_of_the_path() -> None:
    assert same_issuer(ISSUER, f"{ISSUER}/")
    assert same_issuer(f"{ISSUER}:8443/", f"{ISSUER}:8443")
    for other in [*OTHERS, "", "/", "http://["]:
        assert not same_issuer(ISSUER, other), other
        assert not same_issuer(f"{ISSUER}/", other), other
    assert not same_issuer(f"{ISSUER}/a", f"{ISSUER}/a/")
    assert not same_issuer("/", "")


@given(st.text(alphabet="htps:/.?#[]@a1 \t\n\\", max_size=20))
def test_nothing_else_makes_two_issuers_the_same(text: str) -> None:
    assert same_issuer(text, text)
    if same_issuer(text, ISSUER):
        assert text in (ISSUER, f"{ISSUER}/")
    if same_issuer(text, text + "/"):
        assert text.startswith(("http://", "https://"))


@pytest.mark.parametrize("named", [ISSUER, f"{ISSUER}/"])
@pytest.mark.parametrize("said", [ISSUER, f"{ISSUER}/"])
@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("pinned", [None, ISSUER, f"{ISSUER}/"])
def test_a_slash_makes_no_difference_wherever_it_stands(
    named: str, said: str, answers: bool, pinned: str | None
) -> None:
    authority = Authority(
        resource={"authorization_servers": [named]},
        metadata={"issuer": said, "authorization_response_iss_parameter_supported": answers},
        iss=said if answers else None,  # which is compared character by character (RFC 9207 section 2.4)
    )
    grant = AuthorizationCode("id", "s3cret" if pinned else None, pinned)
    found = authority.walk(login(grant).begin(None, None))
    assert found.issuer == said  # what the authorization server says
    refreshed = attrs.evolve(found, tokens=attrs.evolve(found.tokens, refresh_token="r"))
    for other in (ISSUER, f"{ISSUER}/"):  # also of a login that was kept under the other spelling
        assert authority.walk(login(grant).refresh(attrs.evolve(refreshed, issuer=other))) is not None
    again = authority.walk(login(grant).begin(None, attrs.evolve(found, issuer=ISSUER, asked=("a",))))
    assert again.asked == ("a",)


@pytest.mark.parametrize("said", OTHERS)
def test_any_other_mismatch_names_both_and_the_way_out(said: str) -> None:
    authority = Authority(metadata={"issuer": said})
    with pytest.raises(AuthorizationError, match="nothing in it is used") as caught:
        authority.walk(login().begin(None, None))
    text = str(caught.value)
    assert ISSUER in text
    assert f"--issuer {said.rstrip('?#')}" in text
    assert not authority.visited


def test_an_issuer_that_is_pinned_is_taken_where_its_metadata_lies_elsewhere() -> None:
    for endpoints in (ISSUER, HONEST):  # all of them at one of both places
        where = {f"{name}_endpoint": f"{endpoints}/{path}" for name, path in ENDPOINTS.items()}
        authority = Authority(metadata={"issuer": HONEST, **where}, iss=HONEST)
        found = authority.walk(login(AuthorizationCode(issuer=HONEST)).begin(None, None))
        assert (found.issuer, found.found_at) == (HONEST, AT)
        assert authority.urls[1].startswith(f"GET {HONEST}/")  # its own address comes first
        refreshed = attrs.evolve(found, tokens=attrs.evolve(found.tokens, refresh_token="r"))
        assert authority.walk(login(AuthorizationCode(issuer=HONEST)).refresh(refreshed)) is not None
        assert authority.urls[-2:] == [f"GET {AT}", f"POST {endpoints}/token"]
    at_home = f"{HONEST}/.well-known/oauth-authorization-server"
    authority = Authority(issuer=HONEST, metadata_at=at_home, resource={"authorization_servers": [ISSUER]})
    found = authority.walk(login(AuthorizationCode(issuer=HONEST)).begin(None, None))
    assert (found.issuer, found.found_at) == (HONEST, None)


ENDPOINTS = {"authorization": "authorize", "token": "token", "registration": "register"}


@pytest.mark.parametrize(
    "places", list(itertools.product([ISSUER, "https://sts.example", "https://x.example"], repeat=3))
)
@pytest.mark.parametrize("shows", ["nothing", "a secret", "a key"])
def test_who_says_to_be_the_pinned_one_gets_no_code_and_no_secret_of_it(places: tuple[str, ...], shows: str) -> None:
    """Mix-up: a server names an authorization server of its own, which says to be the honest one."""
    where = {
        f"{name}_endpoint": f"{place}/x/{path}" for place, (name, path) in zip(places, ENDPOINTS.items(), strict=True)
    }
    authority = Authority(metadata={"issuer": HONEST, **where}, iss=HONEST)
    key = SigningKey.from_pem(PEM) if shows == "a key" else None
    grant = AuthorizationCode("id", "s3cret" if shows == "a secret" else None, HONEST, signing_key=key)
    good = set(places) == {HONEST} or (shows == "nothing" and set(places) == {ISSUER})
    if good:
        authority.walk(login(grant).begin(None, None))
    else:
        with pytest.raises(AuthorizationError, match="nothing in it is used"):
            authority.walk(login(grant).begin(None, None))
        assert not authority.visited
        assert all(url.startswith("GET ") for url in authority.urls)


def test_what_the_honest_one_gave_is_not_shown_to_who_says_to_be_it() -> None:
    where = {f"{name}_endpoint": f"{ISSUER}/{path}" for name, path in ENDPOINTS.items()}
    authority = Authority(metadata={"issuer": HONEST, **where}, iss=HONEST)
    known = Credentials(
        SERVER, HONEST, Registration("theirs", "s3cret", None, REDIRECT), Tokens("t", refresh_token="r")
    )
    found = authority.walk(login(AuthorizationCode(issuer=HONEST)).begin(None, known))
    assert found.registration.client_id != "theirs"
    assert "s3cret" not in repr([(ask.body, ask.headers) for ask in authority.asked])


# A secret goes to who is named with it

PEM = ECKey.generate_key("P-256").as_pem(private=True)
SECRETS: list[Grant] = [
    AuthorizationCode("id", "s3cret"),
    ClientCredentials("id", "s3cret"),
    JwtBearer(lambda issuer: "s3cret"),
    EnterpriseManaged("id", "s3cret", "https://idp.example/token", "there", lambda endpoint: "s3cret"),
]


@pytest.mark.parametrize("grant", SECRETS, ids=lambda grant: type(grant).__name__)
@pytest.mark.parametrize("metadata", [True, False])
def test_a_secret_is_shown_to_nobody_that_is_merely_named(grant: Any, metadata: bool) -> None:
    evil = "https://evil.example"
    place = f"{evil}/.well-known/oauth-authorization-server"
    authority = Authority(issuer=evil, metadata_at=place, resource_at=f"{WELL_KNOWN}/mcp" if metadata else None)
    named = evil if metadata else "https://mcp.example"
    with pytest.raises(AuthorizationError, match=f"issuer='{named}' .trimcp login --issuer {named}."):
        authority.walk(login(grant).begin(None, None))
    with pytest.raises(AuthorizationError, match="register it with the new one"):
        authority.walk(login(attrs.evolve(grant, issuer=ISSUER)).begin(None, None))
    assert not authority.visited
    assert "s3cret" not in repr([(ask.url, ask.body, ask.headers) for ask in authority.asked])
    # Nor what was kept of an earlier login, where somebody is pinned now.
    old = kept()
    assert authority.walk(login(attrs.evolve(grant, issuer="https://other.example")).refresh(old)) is None


def test_a_key_and_a_name_may_be_shown_to_whoever_is_named() -> None:
    for grant in (ClientCredentials("id", signing_key=SigningKey.from_pem(PEM)), AuthorizationCode("id")):
        assert Authority().walk(login(grant).begin(None, None)).issuer == ISSUER


# Pages for whatever is asked


@pytest.mark.parametrize(
    "reply",
    [
        Fetched(200, body=HTML),
        Fetched(200, body=b"[]"),
        Fetched(200, body=b'{"error": "not found"}'),
        Fetched(200, body=b"[" * 100_000),
        Fetched(204),
        Fetched(302, {"location": "https://mcp.example/login"}),
        Fetched(308),
        Fetched(403, body=HTML),
        Fetched(500),
        Fetched(503, body=HTML),
    ],
    ids=lambda reply: f"{reply.status}-{reply.body[:10]!r}",
)
def test_discovery_goes_on_after_what_is_no_metadata(reply: Fetched) -> None:
    authority = Replying(by_hand={f"{WELL_KNOWN}/mcp": reply, AT: reply}, resource_at=WELL_KNOWN, metadata_at=OPENID)
    found = authority.walk(login().begin(None, None))
    assert found.issuer == ISSUER
    assert authority.urls[:4] == [f"GET {WELL_KNOWN}/mcp", f"GET {WELL_KNOWN}", f"GET {AT}", f"GET {OPENID}"]
    # Where the challenge named the address it is a mistake there, and said.
    named = challenge(resource_metadata=f"{WELL_KNOWN}/mcp")
    with pytest.raises(AuthorizationError, match="metadata at"):
        authority.walk(login().begin(named, None))
    # Everywhere: what was in the way is told with what came of guessing.
    everywhere = dict.fromkeys((f"{WELL_KNOWN}/mcp", WELL_KNOWN), reply)
    bare = Replying(resource_at=None, metadata_at=None, by_hand={**everywhere, "https://mcp.example/register": reply})
    with pytest.raises(AuthorizationError, match=r"did not register.*oauth-protected-resource/mcp answered"):
        bare.walk(login().begin(None, None))
    assert bare.urls[-1] == "POST https://mcp.example/register"
    nowhere = Replying(by_hand={AT: reply, OPENID: reply})
    with pytest.raises(AuthorizationError, match=r"publishes no metadata .*oauth-authorization-server answered"):
        nowhere.walk(login().begin(None, None))


@pytest.mark.parametrize("at", [f"{WELL_KNOWN}/mcp", AT])
def test_who_cannot_be_reached_is_not_guessed_at(at: str) -> None:
    authority = Replying(by_hand={at: Fetched(0, why="it took longer than 30 s")})
    with pytest.raises(AuthorizationError, match="could not be fetched: it took longer"):
        authority.walk(login().begin(None, None))
    assert authority.urls[-1] == f"GET {at}"


@pytest.mark.parametrize(
    ("resource", "server"),
    [
        ("https://mcp.example/mcp/", SERVER),
        (SERVER, f"{SERVER}/"),
        ("https://mcp.example/", SERVER),
        ("https://mcp.example/", "https://mcp.example"),
        ("https://mcp.example", "https://mcp.example/"),
    ],
)
def test_a_slash_at_the_end_of_the_resource_makes_no_difference(resource: str, server: str) -> None:
    assert covers(resource, server)
    authority = Authority(resource_at=WELL_KNOWN + urlsplit(server).path.rstrip("/"), resource={"resource": resource})
    found = authority.walk(login(server=server).begin(None, None))
    assert found.resource == authority.form()["resource"] == resource  # as the server says it
    for other in (f"{server.rstrip('/')}x", f"{server.rstrip('/')}//", "https://mcp.example/mcp/deeper", "https://x"):
        assert not covers(other, server), other


# `resource` left out


@pytest.mark.parametrize("refusal", ["invalid_target", "invalid_request"])
def test_the_resource_can_be_left_out_and_stays_so_for_the_login(refusal: str) -> None:
    authority = Authority(refuses=[{"error": refusal}], tokens={"refresh_token": "r"})
    with pytest.raises(AuthorizationError, match=refusal) as caught:
        authority.walk(login().begin(None, None))
    assert ("trimcp login --no-resource" in str(caught.value)) == (refusal == "invalid_target")
    found = authority.walk(login(resource=False).begin(None, None))
    assert "resource" not in authority.visited[-1]
    assert "resource" not in authority.form()
    assert not found.names_resource
    read = Credentials.from_json(found.to_json())
    authority.walk(login().refresh(read))  # by a command that was not told
    assert "resource" not in authority.form()
    authority.walk(login(resource=False).refresh(attrs.evolve(read, names_resource=True)))
    assert "resource" not in authority.form()


# 200 with an error


@pytest.mark.parametrize("status", [200, 400, 401])
def test_an_error_with_200_names_its_reason(status: int) -> None:
    said = {"error": "bad_verification_code", "error_description": "The code is incorrect"}
    authority = Replying(by_hand={f"{ISSUER}/token": Fetched(status, body=json.dumps(said).encode())})
    with pytest.raises(AuthorizationError, match="bad_verification_code: The code is incorrect") as caught:
        authority.walk(login().begin(None, None))
    assert caught.value.code == "bad_verification_code"
    authority = Replying(by_hand={f"{ISSUER}/register": Fetched(status, body=json.dumps(said).encode())})
    with pytest.raises(AuthorizationError, match="did not register this client: bad_verification_code"):
        authority.walk(login().begin(None, None))
    # A refresh token that is refused, in whatever words, leads to a login; a server that is away does not.
    authority = Replying(by_hand={f"{ISSUER}/token": Fetched(status, body=b'{"error": "bad_refresh_token"}')})
    assert authority.walk(login().refresh(kept())) is None


@pytest.mark.parametrize(
    "reply",
    [Fetched(503, body=HTML), Fetched(429), Fetched(0, why="x"), Fetched(500, body=b'{"error":"server_error"}')],
)
def test_a_refresh_token_stays_good_while_its_server_is_away(reply: Fetched) -> None:
    with pytest.raises(AuthorizationError):
        Replying(by_hand={f"{ISSUER}/token": reply}).walk(login().refresh(kept()))


# Clients that are forgotten


def registered(id: str = "old") -> Credentials:
    tokens = Tokens("t", refresh_token="again", expires_at=NOW - 1)
    return Credentials(SERVER, ISSUER, Registration(id, redirect_uri=REDIRECT), tokens, ("a",))


@pytest.mark.parametrize("unknown", ["invalid_client", "unauthorized_client"])
@pytest.mark.parametrize("sends_back", [True, False])
@pytest.mark.parametrize("refreshes", [True, False])
def test_a_client_that_was_forgotten_is_registered_once_more(
    unknown: str, sends_back: bool, refreshes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Replying(clients=set(), unknown=unknown, sends_back=sends_back)
    way = login()
    if refreshes:
        assert authority.walk(way.refresh(registered())) is None
    found = authority.walk(way.begin(None, registered()))
    assert found.registration.client_id.startswith("client-")
    assert found.asked == ("a",)
    assert sum(url.endswith("/register") for url in authority.urls) == 1
    assert len(authority.visited) == (2 if sends_back and not refreshes else 1)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == [
        f"{ISSUER} does not know this client any more: it is registered once more"
    ]
    # It is known now, and used again.
    caplog.clear()
    again = authority.walk(login().begin(None, found))
    assert again.registration == found.registration
    assert not caplog.records


def test_a_server_that_knows_no_client_at_all_is_not_asked_for_ever() -> None:
    authority = Replying(by_hand={f"{ISSUER}/token": Fetched(401, body=b'{"error": "invalid_client"}')})
    with pytest.raises(AuthorizationError, match="invalid_client"):
        authority.walk(login().begin(None, registered()))
    assert sum(url.endswith("/register") for url in authority.urls) == 1
    assert len(authority.visited) == 2


def test_a_client_that_was_registered_by_hand_is_not_replaced() -> None:
    authority = Replying(clients=set())
    with pytest.raises(AuthorizationError, match="invalid_client"):
        authority.walk(login(AuthorizationCode("mine")).begin(None, registered("mine")))
    authority = Replying(clients=set(), metadata={"registration_endpoint": None})
    with pytest.raises(AuthorizationError, match="invalid_client"):
        authority.walk(login().begin(None, registered("mine")))
    assert not any(url.endswith("/register") for url in authority.urls)


# Challenges without commas

WHERE = f"{WELL_KNOWN}/mcp"


@pytest.mark.parametrize(
    "header",
    [
        f'Bearer error="invalid_token", resource_metadata="{WHERE}"',
        f'Bearer error="invalid_token" resource_metadata="{WHERE}"',
        f'Bearer error="invalid_token"resource_metadata="{WHERE}"',
        f'Bearer error="invalid_token";resource_metadata="{WHERE}"',
        f'Bearer error=invalid_token  ;\tresource_metadata = "{WHERE}"',
        f"Bearer error=invalid_token resource_metadata={WHERE}",
        f"Bearer error=invalid_token,resource_metadata={WHERE}",
        f'Basic realm="a" Bearer error="invalid_token" resource_metadata="{WHERE}"',
        f'Bearer error="invalid_token" resource_metadata="{WHERE}" Basic realm="b" error="c"',
        f'Negotiate YWJj==, Bearer resource_metadata="{WHERE}" error="invalid_token"',
        f',, BEARER ERROR="invalid_token" , RESOURCE_METADATA="{WHERE}",,',
    ],
)
def test_challenges_are_read_with_and_without_commas(header: str) -> None:
    found = find_challenge(header)
    assert found is not None
    assert dict(found.parameters) == {"error": "invalid_token", "resource_metadata": WHERE}


@given(st.text(alphabet='Bearer =",;\\\t/:a1-', max_size=80))
def test_no_header_is_too_odd(header: str) -> None:
    for found in parse_challenges(header):
        assert found.scheme == found.scheme.lower()


@pytest.mark.parametrize("piece", ["a", "a ", "a=", 'a="', "a\\", 'a="\\', " ", "=", '"', ",", "a=b ", 'a="b"', "a b"])
def test_a_header_costs_what_its_length_is_worth(piece: str) -> None:
    """By the processor's time, of the same header four times as long."""

    def cost(times: int) -> float:
        header = piece * times
        return min(_timed(header, time.thread_time) for _ in range(5))

    small, large = cost(1_000), cost(4_000)
    assert large < 12 * max(small, 2e-4)  # quadratic would be 16 times


def _timed(header: str, clock: Callable[[], float]) -> float:
    began = clock()
    parse_challenges(header)
    return clock() - began
