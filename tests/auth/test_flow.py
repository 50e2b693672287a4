"""The way to a token, step by step, by hand."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey

from tests.auth.authority import ISSUER, REDIRECT, SERVER, Authority, basic
from trimcp.auth.credentials import Credentials, Registration, Tokens
from trimcp.auth.flow import Login
from trimcp.auth.grants import AuthorizationCode, ClientCredentials, EnterpriseManaged, Grant, JwtBearer
from trimcp.auth.jose import ProofKey, SigningKey
from trimcp.auth.metadata import AuthChallenge
from trimcp.auth.steps import Fetch, Fetched
from trimcp.errors import AuthorizationError

NOW = 1_000_000.0
WELL_KNOWN = "https://mcp.example/.well-known/oauth-protected-resource"


def login(grant: Grant | None = None, server: str = SERVER, **more: Any) -> Login:
    return Login(server, grant or AuthorizationCode(), lambda: NOW, **more)


def challenge(**parameters: str) -> AuthChallenge:
    return AuthChallenge("bearer", parameters)


# Discovery


def test_the_whole_way_to_a_token() -> None:
    authority = Authority()
    kept = authority.walk(login().begin(None, None))
    assert authority.urls == [
        f"GET {WELL_KNOWN}/mcp",
        f"GET {ISSUER}/.well-known/oauth-authorization-server",
        f"POST {ISSUER}/register",
        f"POST {ISSUER}/token",
    ]
    assert kept.tokens == Tokens("token-1", "bearer", (), NOW + 600, 600)
    assert (kept.issuer, kept.resource, kept.registration.client_id) == (ISSUER, SERVER, "client-3")
    assert authority.visited[0]["resource"] == authority.form()["resource"] == SERVER
    assert authority.visited[0]["code_challenge_method"] == "S256"
    assert "scope" not in authority.visited[0]


def test_the_challenge_names_the_metadata_and_nothing_else_is_asked() -> None:
    where = "https://mcp.example/custom/metadata.json"
    authority = Authority(resource_at=where)
    authority.walk(login().begin(challenge(resource_metadata=where), None))
    assert authority.urls[0] == f"GET {where}"


def test_the_root_is_asked_where_the_path_has_nothing() -> None:
    authority = Authority(resource_at=WELL_KNOWN, resource={"resource": "https://mcp.example"})
    kept = authority.walk(login().begin(None, None))
    assert authority.urls[:2] == [f"GET {WELL_KNOWN}/mcp", f"GET {WELL_KNOWN}"]
    assert kept.resource == "https://mcp.example"


@pytest.mark.parametrize(
    ("issuer", "asked"),
    [
        ("https://auth.example", ["/.well-known/oauth-authorization-server", "/.well-known/openid-configuration"]),
        (
            "https://auth.example/tenant1",
            [
                "/.well-known/oauth-authorization-server/tenant1",
                "/.well-known/openid-configuration/tenant1",
                "/tenant1/.well-known/openid-configuration",
            ],
        ),
    ],
)
def test_an_issuers_metadata_is_looked_for_in_order(issuer: str, asked: list[str]) -> None:
    authority = Authority(issuer=issuer, metadata_at=f"https://auth.example{asked[-1]}")
    authority.walk(login().begin(None, None))
    assert authority.urls[1:-2] == [f"GET https://auth.example{path}" for path in asked]


def test_without_metadata_the_servers_own_origin_is_asked_as_in_2025_03_26() -> None:
    origin = "https://mcp.example"
    authority = Authority(
        resource_at=None, issuer=f"{origin}/oauth", metadata_at=f"{origin}/.well-known/oauth-authorization-server"
    )
    authority.walk(login().begin(None, None))
    assert authority.urls[-1] == f"POST {origin}/oauth/token"
    bare = Authority(resource_at=None, issuer=origin, metadata_at=None, iss=None)
    bare.walk(login().begin(None, None))
    assert bare.urls[-2:] == [f"POST {origin}/register", f"POST {origin}/token"]


@pytest.mark.parametrize(
    "resource",
    [
        "https://evil.example/mcp",
        "https://mcp.example/other",
        "https://mcp.example/mc",
        "http://mcp.example/mcp",
        "https://mcp.example:8443/mcp",
        "https://mcp.example/mcp/deeper",
    ],
)
def test_metadata_of_another_resource_ends_it(resource: str) -> None:
    authority = Authority(resource={"resource": resource})
    with pytest.raises(AuthorizationError, match="is about"):
        authority.walk(login().begin(None, None))
    assert len(authority.asked) == 1


@pytest.mark.parametrize(
    "said",
    ["https://honest.example", "HTTPS://auth.example", f"{ISSUER}//", f"{ISSUER}/a", f"{ISSUER}/?", f"{ISSUER}/#", "/"],
)
def test_metadata_of_another_issuer_is_not_used(said: str) -> None:
    authority = Authority(metadata={"issuer": said})
    with pytest.raises(AuthorizationError, match="nothing in it is used"):
        authority.walk(login().begin(None, None))
    assert not authority.visited


@pytest.mark.parametrize("methods", [None, [], ["plain"]])
def test_without_pkce_nobody_logs_in(methods: list[str] | None) -> None:
    authority = Authority(metadata={"code_challenge_methods_supported": methods})
    with pytest.raises(AuthorizationError, match="PKCE"):
        authority.walk(login().begin(None, None))


@pytest.mark.parametrize("name", ["authorization_endpoint", "token_endpoint", "registration_endpoint"])
@pytest.mark.parametrize("url", ["http://auth.example/x", "file:///etc/passwd", "https://me:secret@auth.example/x"])
def test_an_endpoint_that_could_be_overheard_ends_it(name: str, url: str) -> None:
    authority = Authority(metadata={name: url})
    with pytest.raises(AuthorizationError, match="neither https nor on this machine") as caught:
        authority.walk(login().begin(None, None))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"resource": 1}', b'{"resource": ""}', b"[" * 100_000, b"\xff"])
def test_metadata_that_is_none_is_an_error_that_says_so(body: bytes) -> None:
    authority = Authority()
    authority.resource_at = None
    flow = login().begin(challenge(resource_metadata=WELL_KNOWN), None)
    fetch = next(flow)
    assert isinstance(fetch, Fetch)
    with pytest.raises(AuthorizationError, match="metadata"):
        flow.send(Fetched(200, {}, body))
    assert fetch.url == WELL_KNOWN


# The client's name


def test_a_client_that_was_registered_by_hand_is_not_registered_again() -> None:
    authority = Authority(metadata={"token_endpoint_auth_methods_supported": ["client_secret_basic"]})
    authority.walk(login(AuthorizationCode("my id", "a/secret", ISSUER)).begin(None, None))
    assert not any("register" in url for url in authority.urls)
    assert basic(authority.asked[-1]) == ("my id", "a/secret")


def test_the_url_of_a_document_is_the_id_where_that_is_supported() -> None:
    url = "https://app.example/client.json"
    authority = Authority(metadata={"client_id_metadata_document_supported": True})
    authority.walk(login(AuthorizationCode(metadata_url=url)).begin(None, None))
    assert authority.visited[0]["client_id"] == authority.form()["client_id"] == url
    other = Authority()
    other.walk(login(AuthorizationCode(metadata_url=url)).begin(None, None))
    assert other.visited[0]["client_id"] == "client-3"


@pytest.mark.parametrize("method", ["none", "client_secret_basic", "client_secret_post"])
def test_the_method_that_is_supported_is_used(method: str) -> None:
    authority = Authority(
        metadata={"token_endpoint_auth_methods_supported": [method]}, registers={"client_secret": "s3cret"}
    )
    authority.walk(login().begin(None, None))
    fetch, form = authority.asked[-1], authority.form()
    if method == "client_secret_basic":
        assert basic(fetch) == ("client-3", "s3cret")
    else:
        assert "authorization" not in fetch.headers
        assert form.get("client_secret") == ("s3cret" if method == "client_secret_post" else None)


def test_nothing_that_one_authorization_server_gave_is_shown_to_another() -> None:
    first, second = Authority(), Authority(issuer="https://two.example")
    second.metadata_at = "https://two.example/.well-known/oauth-authorization-server"
    kept = first.walk(login().begin(None, None))
    again = second.walk(login().begin(None, kept))
    assert (again.issuer, again.registration.client_id) == ("https://two.example", "client-3")
    assert any(url == "POST https://two.example/register" for url in second.urls)
    with pytest.raises(AuthorizationError, match="register it with the new one"):
        second.walk(login(AuthorizationCode("id", issuer=ISSUER)).begin(None, None))


def test_a_registration_is_used_again_while_it_is_good() -> None:
    authority = Authority(registers={"client_secret": "s", "client_secret_expires_at": NOW + 10})
    kept = authority.walk(login().begin(None, None))
    assert authority.walk(login().begin(None, kept)).registration == kept.registration
    old = attrs.evolve(kept, registration=attrs.evolve(kept.registration, expires_at=NOW - 1))
    assert authority.walk(login().begin(None, old)).registration != kept.registration
    moved = attrs.evolve(kept, registration=attrs.evolve(kept.registration, redirect_uri="http://127.0.0.1:1/callback"))
    assert authority.walk(login().begin(None, moved)).registration.redirect_uri == REDIRECT


@pytest.mark.parametrize("limited", [True, False])
def test_a_client_that_may_ask_for_some_scopes_alone_is_registered_again_for_more(limited: bool) -> None:
    authority = Authority(registers={"scope": "read"} if limited else {})
    first = authority.walk(login().begin(challenge(scope="read"), None))
    more = authority.walk(login().begin(challenge(scope="write"), first))
    assert (more.registration != first.registration) == limited
    assert authority.visited[-1]["scope"] == "read write"
    if limited:
        (about,) = [json.loads(ask.body or b"") for ask in authority.asked if ask.url.endswith("/register")][1:]
        assert about["scope"] == "read write"
    # What was left out for all that is not asked for again.
    assert authority.walk(login().begin(challenge(scope="write"), more)).registration == more.registration


def test_who_cannot_be_registered_is_told_what_to_do() -> None:
    authority = Authority(metadata={"registration_endpoint": None})
    with pytest.raises(AuthorizationError, match="--client-id"):
        authority.walk(login().begin(None, None))


# Scopes


@pytest.mark.parametrize(
    ("named", "supported", "asked"),
    [
        ("a b", ["c"], "a b"),
        (None, ["c", "d"], "c d"),
        (None, None, None),
    ],
)
def test_scopes_come_from_the_challenge_else_from_the_metadata(
    named: str | None, supported: list[str] | None, asked: str | None
) -> None:
    authority = Authority(resource={} if supported is None else {"scopes_supported": supported})
    authority.walk(login().begin(None if named is None else challenge(scope=named), None))
    assert authority.visited[0].get("scope") == asked


def test_a_step_up_keeps_what_was_asked_for_before() -> None:
    authority = Authority(resource={"scopes_supported": ["everything"]})
    kept = authority.walk(login().begin(challenge(scope="read"), None))
    authority.walk(login().begin(challenge(scope="write", error="insufficient_scope"), kept))
    assert authority.visited[1]["scope"] == "read write"


def test_offline_access_is_asked_for_where_there_is_such_a_thing() -> None:
    authority = Authority(resource={"scopes_supported": ["a"]}, metadata={"scopes_supported": ["a", "offline_access"]})
    authority.walk(login().begin(None, None))
    assert authority.visited[0]["scope"] == "a offline_access"


def test_scopes_of_the_programs_own_choice() -> None:
    authority = Authority()
    authority.walk(login(scopes=("mine",)).begin(challenge(scope="theirs"), None))
    assert authority.visited[0]["scope"] == "mine theirs"


# What comes back from the browser


@pytest.mark.parametrize(
    ("advertised", "iss", "good"),
    [
        (True, "", True),
        (True, None, False),
        (None, "", True),
        (None, None, True),
        (True, "https://evil.example", False),
        (None, "https://evil.example", False),
        (True, f"{ISSUER}/", False),  # the same elsewhere, but not here: RFC 9207 section 2.4
        (True, f"{ISSUER}//", False),
        (True, f"{ISSUER}/a", False),
    ],
)
def test_who_answers_is_who_was_asked(advertised: bool | None, iss: str | None, good: bool) -> None:
    authority = Authority(metadata={"authorization_response_iss_parameter_supported": advertised}, iss=iss)
    if good:
        authority.walk(login().begin(None, None))
    else:
        with pytest.raises(AuthorizationError, match="from the browser"):
            authority.walk(login().begin(None, None))
        assert not any(url.endswith("/token") for url in authority.urls)


@pytest.mark.parametrize("state", ["", "another"])
def test_an_answer_to_another_login_is_refused(state: str) -> None:
    authority = Authority(state=state)
    with pytest.raises(AuthorizationError, match="another login"):
        authority.walk(login().begin(None, None))


def test_a_refusal_is_told_only_if_it_is_the_servers_own() -> None:
    from trimcp.auth.flow import authorization_code
    from trimcp.auth.metadata import AuthorizationServer

    server = AuthorizationServer(ISSUER)
    refusal = f"{REDIRECT}?error=access_denied&error_description=No%0Away&state=s"
    with pytest.raises(AuthorizationError, match=r"refused \(No\?way\)") as caught:
        authorization_code(refusal, "s", server)
    assert caught.value.code == "access_denied"
    with pytest.raises(AuthorizationError) as caught:
        authorization_code(f"{refusal}&iss=https%3A%2F%2Fevil.example", "s", server)
    assert "way" not in str(caught.value)
    for twice in (f"{REDIRECT}?code=a&code=b&state=s", f"{REDIRECT}?code=a&state=s&state=t"):
        with pytest.raises(AuthorizationError, match="another login"):
            authorization_code(twice, "s", server)


# The token endpoint


@pytest.mark.parametrize(
    "tokens",
    [{"access_token": None}, {"access_token": ""}, {"access_token": "a\nb"}, {"token_type": "mac"}, {"token_type": 1}],
)
def test_what_is_no_token_is_not_taken_for_one(tokens: dict[str, Any]) -> None:
    authority = Authority(tokens=tokens)
    with pytest.raises(AuthorizationError, match="gave"):
        authority.walk(login().begin(None, None))


def test_an_error_of_the_token_endpoint_is_told() -> None:
    authority = Authority(refuses=[{"error": "invalid_grant", "error_description": "used before"}])
    with pytest.raises(AuthorizationError, match="invalid_grant: used before") as caught:
        authority.walk(login().begin(None, None))
    assert caught.value.code == "invalid_grant"


def kept(**more: Any) -> Credentials:
    tokens = Tokens("old", scopes=("a",), refresh_token="again", **more)
    return Credentials(SERVER, ISSUER, Registration("me"), tokens, ("a",))


def test_a_refresh_keeps_what_is_not_said_anew() -> None:
    authority = Authority()
    new = authority.walk(login().refresh(kept()))
    assert new is not None
    assert new.tokens == Tokens("token-1", "bearer", ("a",), NOW + 600, 600, "again")
    assert authority.form() == {
        "grant_type": "refresh_token",
        "refresh_token": "again",
        "resource": SERVER,
        "client_id": "me",
    }
    rotated = Authority(tokens={"refresh_token": "next", "scope": "b"}).walk(login().refresh(kept()))
    assert rotated is not None
    assert rotated.tokens is not None
    assert (rotated.tokens.refresh_token, rotated.tokens.scopes) == ("next", ("b",))


def test_a_refresh_token_that_is_over_is_no_error() -> None:
    assert Authority(refuses=[{"error": "invalid_grant"}]).walk(login().refresh(kept())) is None
    with pytest.raises(AuthorizationError, match="slow_down"):
        Authority(refuses=[{"error": "slow_down"}]).walk(login().refresh(kept()))


# Other grants


def test_a_program_with_a_secret() -> None:
    authority = Authority(metadata={"token_endpoint_auth_methods_supported": ["client_secret_basic"]})
    result = authority.walk(login(ClientCredentials("robot", "s", issuer=ISSUER)).begin(challenge(scope="run"), None))
    assert authority.form() == {"grant_type": "client_credentials", "resource": SERVER, "scope": "run"}
    assert basic(authority.asked[-1]) == ("robot", "s")
    assert result.tokens is not None
    assert result.tokens.scopes == ("run",)


def test_a_program_with_a_key() -> None:
    key = ECKey.generate_key("P-256")
    authority = Authority(metadata={"token_endpoint_auth_methods_supported": ["private_key_jwt"]})
    signing = SigningKey.from_pem(key.as_pem(private=True))
    authority.walk(login(ClientCredentials("robot", signing_key=signing)).begin(None, None))
    form = authority.form()
    said = jwt.decode(form["client_assertion"], key, algorithms=["ES256"]).claims
    assert (said["iss"], said["sub"], said["aud"], said["exp"] - said["iat"]) == ("robot", "robot", ISSUER, 60)
    assert "client_id" not in form
    with pytest.raises(ValueError, match="no private key"):
        SigningKey.from_pem(key.as_pem(private=False))


def test_a_workload_with_a_jwt_tries_once() -> None:
    authority = Authority(refuses=[{"error": "invalid_grant"}])
    with pytest.raises(AuthorizationError):
        authority.walk(login(JwtBearer(lambda issuer: f"jwt for {issuer}", issuer=ISSUER)).begin(None, None))
    assert authority.form() == {
        "grant_type": "urn:ietf:params:oauth:grant-type:jwt-bearer",
        "assertion": f"jwt for {ISSUER}",
        "resource": SERVER,
    }
    assert authority.urls.count(f"POST {ISSUER}/token") == 1


def test_an_employee_of_a_company() -> None:
    jag = "urn:ietf:params:oauth:token-type:id-jag"
    authority = Authority(tokens={"issued_token_type": jag})
    authority.metadata["token_endpoint_auth_methods_supported"] = ["client_secret_basic"]
    grant = EnterpriseManaged(
        "me", "s", "https://idp.example/token", "me-there", lambda endpoint: "id token", issuer=ISSUER
    )
    authority.walk(login(grant).begin(None, None))
    exchange, bearer = authority.form(0), authority.form(1)
    assert (exchange["audience"], exchange["resource"], exchange["subject_token"]) == (ISSUER, SERVER, "id token")
    assert exchange["requested_token_type"] == jag
    assert (bearer["assertion"], basic(authority.asked[-1])) == ("token-1", ("me", "s"))


# Proof of possession


def test_tokens_are_bound_to_a_key_where_that_can_be() -> None:
    key = ProofKey.generate()
    authority = Authority(metadata={"dpop_signing_alg_values_supported": ["ES256"]}, nonce="n1")
    result = authority.walk(login(proof_key=key).begin(None, None))
    assert result.tokens is not None
    assert (result.tokens.token_type, result.proof_key) == ("dpop", key.jwk)
    assert authority.visited[0]["dpop_jkt"] == key.thumbprint
    assert authority.urls.count(f"POST {ISSUER}/token") == 2  # the nonce was asked for
    plain = Authority().walk(login(proof_key=key).begin(None, None))
    assert plain.tokens is not None
    assert (plain.tokens.token_type, plain.proof_key) == ("bearer", None)
    with pytest.raises(AuthorizationError, match="not bound"):
        Authority(metadata={"dpop_signing_alg_values_supported": ["ES256"]}, tokens={"token_type": "Bearer"}).walk(
            login(proof_key=key).begin(None, None)
        )


def test_what_is_kept_can_be_read_again_and_shows_no_secret() -> None:
    key = ProofKey.generate()
    whole = attrs.evolve(kept(expires_at=1.5), registration=Registration("me", "very secret"), proof_key=key.jwk)
    assert Credentials.from_json(whole.to_json()) == whole
    for secret in ("very secret", "old", "again", key.jwk["d"]):
        assert secret not in repr(whole)
    for text in ("", "{}", "[]", '{"resource": 1}', "[" * 100_000):
        with pytest.raises(ValueError, match="no credentials"):
            Credentials.from_json(text)
