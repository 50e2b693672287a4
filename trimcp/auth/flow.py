"""How a client comes to an access token: OAuth 2.1 as the specification wants it, without input or output.

Each function here is a generator: it yields what is to be done next (`Fetch`, `Listen`, `Visit`, `Obtain`), is sent
what came of it, and returns or raises at the end. So every step can be tested by hand, and one driver carries out all
of them (`trimcp.auth.oauth`).

Specification, "Authorization"; OAuth 2.1; RFC 7591 (registration), 7636 (PKCE), 8707 (resource), 9207 (`iss`), 9449
(DPoP); extensions "OAuth Client Credentials" and "Enterprise-Managed Authorization".
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import parse_qs, quote_plus, urlencode, urlsplit

import attrs

from trimcp.auth.challenges import AuthChallenge
from trimcp.auth.credentials import Credentials, Registration, Tokens
from trimcp.auth.grants import AuthorizationCode, ClientCredentials, EnterpriseManaged, Grant, JwtBearer
from trimcp.auth.jose import ProofKey
from trimcp.auth.metadata import (
    AuthorizationServer,
    ProtectedResource,
    canonical_url,
    covers,
    issuer_metadata_urls,
    origin_of,
    read_json,
    resource_metadata_urls,
    secure_url,
)
from trimcp.auth.steps import Fetch, Fetched, Listen, Obtain, Step, Visit
from trimcp.errors import AuthorizationError

T = TypeVar("T")

_JWT_BEARER: Final = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_ASSERTION_TYPE: Final = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_TOKEN_EXCHANGE: Final = "urn:ietf:params:oauth:grant-type:token-exchange"
_ID_JAG: Final = "urn:ietf:params:oauth:token-type:id-jag"
_ID_TOKEN: Final = "urn:ietf:params:oauth:token-type:id_token"
_FORM: Final = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}
_LONGEST: Final = 200
_LONGEST_LIFE: Final = 1e10  # seconds; beyond that a lifetime is none
_OFFLINE: Final = "offline_access"


Flow: TypeAlias = Generator[Step, Any, T]
"""Yields what is to be done, is sent what came of it, and returns a T."""


@attrs.frozen
class TokenSource:
    """Who is to be asked for a token.

    Attributes:
        resource: what the token is for.
        server: who gives it.
        scopes: what basic use needs, or None where nothing was said.
        guessed: whether the endpoints are those of 2025-03-26 for servers that publish no metadata.
    """

    resource: str
    server: AuthorizationServer
    scopes: tuple[str, ...] | None = None
    guessed: bool = False


@attrs.define(eq=False)
class Login:
    """The way to a token for one server.

    Args:
        server: the URL of the MCP server.
        grant: what the client has to show.
        now: returns the seconds since 1970.
        scopes: what to ask for, whatever the server suggests; None to go by the server.
        proof_key: a key that tokens are to be bound to, or None.
    """

    server: str
    grant: Grant
    now: Callable[[], float]
    scopes: tuple[str, ...] | None = None
    proof_key: ProofKey | None = None

    def begin(self, challenge: AuthChallenge | None, known: Credentials | None) -> Flow[Credentials]:
        """Find out who gives tokens, and get one.

        Args:
            challenge: with which the server refused a request, or None.
            known: what is kept of an earlier login. Its registration is used again where the issuer is the same, and
                what it was allowed to do is asked for again.

        Raises:
            AuthorizationError: there is no token to be had.
        """
        found = yield from self.discover(challenge)
        issuer, grant = found.server.issuer, self.grant
        if grant.issuer is not None and grant.issuer != issuer:
            raise AuthorizationError(
                f"the server now names the authorization server {_shown(issuer)}, but the client is registered with "
                f"{_shown(grant.issuer)}: register it with the new one"
            )
        known = known if known is not None and known.issuer == issuer else None
        asked = self._scopes(found, challenge, known)
        if isinstance(grant, AuthorizationCode):
            return (yield from self._authorization_code(grant, found, known, asked))
        form: dict[str, str]
        if isinstance(grant, ClientCredentials):
            registration = Registration(grant.client_id, grant.client_secret)
            form = {"grant_type": "client_credentials"}
        elif isinstance(grant, JwtBearer):
            registration = Registration(grant.client_id or "", None, "none")
            form = {"grant_type": _JWT_BEARER, "assertion": (yield Obtain(grant.assertion, issuer))}
        else:
            registration = Registration(grant.client_id, grant.client_secret)
            form = {"grant_type": _JWT_BEARER, "assertion": (yield from self._identity_assertion(grant, found, asked))}
        tokens = yield from self._tokens(found.server, registration, form, found.resource, asked)
        return self._kept(found, registration, tokens, asked)

    def refresh(self, known: Credentials) -> Flow[Credentials | None]:
        """Exchange a refresh token, or return None where it is not good any more (RFC 6749 section 6).

        Raises:
            AuthorizationError: it could not be tried, so that it may be good later.
        """
        tokens = known.tokens
        if tokens is None or tokens.refresh_token is None:
            return None
        server = yield from self._issuer_metadata(known.issuer)
        form = {"grant_type": "refresh_token", "refresh_token": tokens.refresh_token}
        try:
            new = yield from self._tokens(server, known.registration, form, known.resource, ())
        except AuthorizationError as error:
            if error.code in ("invalid_grant", "invalid_client", "unauthorized_client", "invalid_request"):
                return None
            raise
        # What is not said anew stays as it was: the scopes, and a refresh token that is not rotated.
        new = attrs.evolve(
            new, scopes=new.scopes or tokens.scopes, refresh_token=new.refresh_token or tokens.refresh_token
        )
        return attrs.evolve(known, tokens=new, proof_key=self._key_of(new))

    # Discovery

    def discover(self, challenge: AuthChallenge | None) -> Flow[TokenSource]:
        """Find out who gives tokens for the server."""
        resource = yield from self._resource_metadata(challenge)
        if resource is None:
            return (yield from self._without_metadata())
        if not resource.authorization_servers:
            raise AuthorizationError("the server's metadata names no authorization server")
        wanted = self.grant.issuer
        issuer = wanted if wanted in resource.authorization_servers else resource.authorization_servers[0]
        assert issuer is not None
        server = yield from self._issuer_metadata(issuer)
        return TokenSource(resource.resource, server, resource.scopes_supported)

    def _resource_metadata(self, challenge: AuthChallenge | None) -> Flow[ProtectedResource | None]:
        """Return what the server says of itself, or None if it does not (2025-03-26)."""
        named = None if challenge is None else challenge.parameters.get("resource_metadata")
        for url in resource_metadata_urls(self.server) if named is None else (named,):
            self._check(url, "the server's metadata")
            reply: Fetched = yield Fetch(url)
            if reply.status == 200:
                found = read_json(ProtectedResource, reply.body, f"the metadata at {_shown(url)}")
                if not covers(found.resource, self.server):
                    raise AuthorizationError(
                        f"the metadata at {_shown(url)} is about {_shown(found.resource)}, not about "
                        f"{_shown(canonical_url(self.server))}"
                    )
                return found
            if named is not None or not 400 <= reply.status < 500:
                raise AuthorizationError(f"the server's metadata at {_shown(url)} {_came(reply)}")
        return None

    def _issuer_metadata(self, issuer: str) -> Flow[AuthorizationServer]:
        self._check(issuer, "the authorization server")
        found = yield from self._first(issuer_metadata_urls(issuer))
        if found is None:
            raise AuthorizationError(f"the authorization server {_shown(issuer)} publishes no metadata")
        if found.issuer != issuer:  # RFC 8414 section 3.3: character by character
            raise AuthorizationError(
                f"the metadata of {_shown(issuer)} says that it is of {_shown(found.issuer)}; nothing in it is used"
            )
        if "S256" not in (found.code_challenge_methods_supported or ()) and isinstance(self.grant, AuthorizationCode):
            raise AuthorizationError(f"the authorization server {_shown(issuer)} does not support PKCE with S256")
        return self._checked(found)

    def _without_metadata(self) -> Flow[TokenSource]:
        """Ask at the server's own origin, as in 2025-03-26 ("Server Metadata Discovery", and its fallbacks)."""
        origin = origin_of(self.server)
        self._check(origin, "the server")
        found = yield from self._first(issuer_metadata_urls(origin)[:1])
        resource = canonical_url(self.server)
        if found is not None:
            if origin_of(found.issuer) != origin:
                raise AuthorizationError(f"the metadata of {_shown(origin)} says that it is of {_shown(found.issuer)}")
            return TokenSource(resource, self._checked(found))
        server = AuthorizationServer(origin, f"{origin}/authorize", f"{origin}/token", f"{origin}/register")
        return TokenSource(resource, server, guessed=True)

    def _first(self, urls: tuple[str, ...]) -> Flow[AuthorizationServer | None]:
        for url in urls:
            reply: Fetched = yield Fetch(url)
            if reply.status == 200:
                return read_json(AuthorizationServer, reply.body, f"the metadata at {_shown(url)}")
            if not 400 <= reply.status < 500:
                raise AuthorizationError(f"the metadata at {_shown(url)} {_came(reply)}")
        return None

    def _checked(self, server: AuthorizationServer) -> AuthorizationServer:
        for name in ("authorization_endpoint", "token_endpoint", "registration_endpoint", "revocation_endpoint"):
            if url := getattr(server, name):
                self._check(url, f"the {name.replace('_', ' ')} of {_shown(server.issuer)}")
        return server

    def _check(self, url: str, what: str) -> None:
        if not secure_url(url):
            raise AuthorizationError(f"{what} is at {_shown(url)}, which is neither https nor on this machine")

    # Scopes

    def _scopes(
        self, found: TokenSource, challenge: AuthChallenge | None, known: Credentials | None
    ) -> tuple[str, ...]:
        """Return what to ask for (specification, "Scope Selection Strategy" and "Step-Up Authorization Flow")."""
        challenged = () if challenge is None else challenge.scopes
        wanted = self.scopes
        if wanted is None:
            wanted = challenged or found.scopes or ()
        # What was asked for before is kept, and so is what was missing.
        before = () if known is None or known.tokens is None else known.asked
        every = dict.fromkeys((*before, *wanted, *challenged))
        if (
            every
            and isinstance(self.grant, AuthorizationCode)
            and self.scopes is None
            and _OFFLINE in (found.server.scopes_supported or ())
        ):
            every[_OFFLINE] = None
        return tuple(every)

    # The authorization code

    def _authorization_code(
        self, grant: AuthorizationCode, found: TokenSource, known: Credentials | None, asked: tuple[str, ...]
    ) -> Flow[Credentials]:
        server = found.server
        if not server.authorization_endpoint or not server.token_endpoint:
            raise AuthorizationError(f"the authorization server {_shown(server.issuer)} offers no login with a browser")
        earlier = None if known is None else known.registration
        redirect_uri: str = yield Listen(None if earlier is None else earlier.redirect_uri)
        registration = yield from self._registration(grant, server, earlier, redirect_uri, asked)
        verifier, state = secrets.token_urlsafe(48), secrets.token_urlsafe(24)
        query = {
            "response_type": "code",
            "client_id": registration.client_id,
            "redirect_uri": redirect_uri,
            "code_challenge": _b64(hashlib.sha256(verifier.encode()).digest()),
            "code_challenge_method": "S256",
            "state": state,
            "resource": found.resource,
        }
        if asked:
            query["scope"] = " ".join(asked)
        if _OFFLINE in asked:
            query["prompt"] = "consent"  # OpenID Connect Core section 11: else it may be ignored
        if self._bound(server):
            assert self.proof_key is not None
            query["dpop_jkt"] = self.proof_key.thumbprint
        separator = "&" if urlsplit(server.authorization_endpoint).query else "?"
        came: str = yield Visit(f"{server.authorization_endpoint}{separator}{urlencode(query)}", state)
        code = authorization_code(came, state, server)
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        tokens = yield from self._tokens(server, registration, form, found.resource, ())
        return self._kept(found, registration, tokens, asked)

    def _registration(
        self,
        grant: AuthorizationCode,
        server: AuthorizationServer,
        earlier: Registration | None,
        redirect_uri: str,
        asked: tuple[str, ...],
    ) -> Flow[Registration]:
        """Return what the client is known as (specification, "Client Registration", in its order)."""
        if grant.client_id is not None:
            return Registration(grant.client_id, grant.client_secret, redirect_uri=redirect_uri)
        if grant.metadata_url is not None and server.client_id_metadata_document_supported:
            method = "none" if grant.signing_key is None else "private_key_jwt"
            return Registration(grant.metadata_url, None, method, redirect_uri)
        if (
            earlier is not None
            and earlier.redirect_uri == redirect_uri
            and (earlier.expires_at is None or self.now() < earlier.expires_at)
            and (earlier.scopes is None or set(asked) <= set(earlier.scopes))
        ):
            return earlier
        if not server.registration_endpoint:
            raise AuthorizationError(
                f"{_shown(server.issuer)} does not register clients by itself: register one there, and pass its "
                "client_id (trimcp login --client-id)"
            )
        methods = server.token_endpoint_auth_methods_supported or ("none",)
        method = next((m for m in ("none", "client_secret_basic", "client_secret_post") if m in methods), "none")
        about: dict[str, Any] = {
            "client_name": grant.client_name,
            "redirect_uris": [redirect_uri],
            "grant_types": ["authorization_code", "refresh_token"],
            "response_types": ["code"],
            "token_endpoint_auth_method": method,
            "application_type": "native" if _native(redirect_uri) else "web",
        }
        if asked:
            about["scope"] = " ".join(asked)
        if self._bound(server):
            about["dpop_bound_access_tokens"] = True
        headers = {"content-type": "application/json", "accept": "application/json"}
        reply: Fetched = yield Fetch(server.registration_endpoint, "POST", headers, json.dumps(about).encode())
        said = _object(reply)
        if reply.status not in (200, 201) or said is None:
            raise _refused(f"{_shown(server.issuer)} did not register this client", reply, said)
        client_id, secret = said.get("client_id"), said.get("client_secret")
        ends, named = said.get("client_secret_expires_at"), said.get("token_endpoint_auth_method")
        limit = said.get("scope")  # RFC 7591 section 2: the client may ask for no others
        if not isinstance(client_id, str) or not client_id or not (secret is None or isinstance(secret, str)):
            raise AuthorizationError(f"what {_shown(server.issuer)} registered has no client_id")
        return Registration(
            client_id,
            secret,
            named if isinstance(named, str) else None,
            redirect_uri,
            float(ends) if isinstance(ends, int | float) and 0 < ends < _LONGEST_LIFE else None,
            # With those it was asked for and left out: to ask again would bring nothing.
            tuple(dict.fromkeys((*asked, *limit.split()))) if isinstance(limit, str) else None,
        )

    # The enterprise's identity provider

    def _identity_assertion(self, grant: EnterpriseManaged, found: TokenSource, asked: tuple[str, ...]) -> Flow[str]:
        """Exchange the person's ID token for one that the server's authorization server takes (RFC 8693)."""
        endpoint = grant.idp_token_endpoint
        self._check(endpoint, "the identity provider's token endpoint")
        form = {
            "grant_type": _TOKEN_EXCHANGE,
            "requested_token_type": _ID_JAG,
            "audience": found.server.issuer,
            "resource": found.resource,
            "subject_token": (yield Obtain(grant.id_token, endpoint)),
            "subject_token_type": _ID_TOKEN,
            "client_id": grant.idp_client_id,
        }
        if asked:
            form["scope"] = " ".join(asked)
        if grant.idp_client_secret is not None:
            form["client_secret"] = grant.idp_client_secret
        reply: Fetched = yield Fetch(endpoint, "POST", _FORM, urlencode(form).encode())
        said = _object(reply)
        if reply.status != 200 or said is None:
            raise _refused("the identity provider gave no assertion for the server", reply, said)
        assertion = said.get("access_token")
        if said.get("issued_token_type") != _ID_JAG or not isinstance(assertion, str):
            raise AuthorizationError("the identity provider gave something else than an identity assertion")
        return assertion

    # The token endpoint

    def _tokens(
        self,
        server: AuthorizationServer,
        registration: Registration,
        form: Mapping[str, str],
        resource: str,
        scopes: tuple[str, ...],
    ) -> Flow[Tokens]:
        """Ask the token endpoint (RFC 6749 section 4 and 5)."""
        fields = {**form, "resource": resource}
        if scopes:
            fields["scope"] = " ".join(scopes)
        endpoint = server.token_endpoint
        if not endpoint:
            raise AuthorizationError(f"the authorization server {_shown(server.issuer)} has no token endpoint")
        bound = self._bound(server)
        reply, said = yield from self._ask(server, registration, fields, bound)
        nonce = reply.headers.get("dpop-nonce")
        if bound and nonce and said is not None and said.get("error") == "use_dpop_nonce":
            assert self.proof_key is not None
            self.proof_key.nonces[origin_of(endpoint)] = nonce  # RFC 9449 section 8
            reply, said = yield from self._ask(server, registration, fields, bound)
        if reply.status != 200 or said is None:
            raise _refused(f"{_shown(server.issuer)} gave no token", reply, said)
        return self._taken(said, scopes, bound, server.issuer)

    def _ask(
        self, server: AuthorizationServer, registration: Registration, fields: Mapping[str, str], bound: bool
    ) -> Flow[tuple[Fetched, dict[str, Any] | None]]:
        fields = dict(fields)
        headers = {**_FORM, **self._client_authentication(server, registration, fields)}
        if bound:
            assert self.proof_key is not None
            headers["dpop"] = self.proof_key.proof("POST", server.token_endpoint)
        reply: Fetched = yield Fetch(server.token_endpoint, "POST", headers, urlencode(fields).encode(), once=True)
        return reply, _object(reply)

    def _client_authentication(
        self, server: AuthorizationServer, registration: Registration, fields: dict[str, str]
    ) -> dict[str, str]:
        """Put into `fields`, or return as headers, what tells who the client is (OAuth 2.1 section 2.4)."""
        key = getattr(self.grant, "signing_key", None)
        supported = server.token_endpoint_auth_methods_supported or ("client_secret_basic",)
        method, secret = registration.auth_method, registration.client_secret
        if method is None:
            if key is not None:
                method = "private_key_jwt"
            elif secret is None:
                method = "none"
            else:
                order = ("client_secret_basic", "client_secret_post", "none")
                method = next((m for m in order if m in supported), "client_secret_basic")
        if method == "private_key_jwt" and key is not None:
            # The client's id stands in the assertion (RFC 7523 section 3). The audience is the issuer.
            fields["client_assertion_type"] = _ASSERTION_TYPE
            fields["client_assertion"] = key.assertion(registration.client_id, server.issuer, self.now())
        elif method == "client_secret_basic" and secret is not None:
            pair = f"{quote_plus(registration.client_id)}:{quote_plus(secret)}"
            return {"authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
        elif method == "client_secret_post" and secret is not None:
            fields["client_id"], fields["client_secret"] = registration.client_id, secret
        elif registration.client_id:
            fields["client_id"] = registration.client_id
        return {}

    def _taken(self, said: dict[str, Any], scopes: tuple[str, ...], bound: bool, issuer: str) -> Tokens:
        token, kind = said.get("access_token"), said.get("token_type")
        if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable():
            raise AuthorizationError(f"{_shown(issuer)} gave no access token")
        kind = kind.lower() if isinstance(kind, str) else ""
        if kind != ("dpop" if bound else "bearer"):
            wanted = "bound to our key (DPoP)" if bound else "a bearer token"
            raise AuthorizationError(f"{_shown(issuer)} gave a token that is not {wanted}")
        scope, refresh, ends = said.get("scope"), said.get("refresh_token"), said.get("expires_in")
        seconds = float(ends) if isinstance(ends, int | float) and 0 < ends < _LONGEST_LIFE else None
        return Tokens(
            token,
            kind,
            tuple(scope.split()) if isinstance(scope, str) else scopes,
            None if seconds is None else self.now() + seconds,
            seconds,
            refresh if isinstance(refresh, str) and refresh else None,
        )

    def _bound(self, server: AuthorizationServer) -> bool:
        """Return whether tokens are to be bound to our key."""
        return self.proof_key is not None and "ES256" in (server.dpop_signing_alg_values_supported or ())

    def _kept(
        self, found: TokenSource, registration: Registration, tokens: Tokens, asked: tuple[str, ...]
    ) -> Credentials:
        key = self._key_of(tokens)
        return Credentials(found.resource, found.server.issuer, registration, tokens, asked, key)

    def _key_of(self, tokens: Tokens) -> dict[str, Any] | None:
        """Return the private key that tokens are bound to, as it is kept, or None."""
        return self.proof_key.jwk if self.proof_key is not None and tokens.token_type == "dpop" else None


def authorization_code(came: str, state: str, server: AuthorizationServer) -> str:
    """Return the code with which a person came back (RFC 6749 section 4.1.2; RFC 9207 section 2.4).

    Args:
        came: the URL that they were redirected to.
        state: what it must hold.
        server: who was asked.

    Raises:
        AuthorizationError: it is an answer to another question, by another server, or a refusal.
    """
    try:
        query = parse_qs(urlsplit(came).query, keep_blank_values=True, max_num_fields=50)
    except ValueError:
        query = {}
    said = {name: values[0] for name, values in query.items() if len(values) == 1}
    if len(said) != len(query) or not hmac.compare_digest(said.get("state", "").encode(), state.encode()):
        raise AuthorizationError("what came back from the browser belongs to another login")
    issuer = said.get("iss")
    if issuer is None and server.authorization_response_iss_parameter_supported:
        raise AuthorizationError(
            f"what came back from the browser does not say that it is from {_shown(server.issuer)}"
        )
    if issuer is not None and issuer != server.issuer:  # before anything else of it is used or shown
        raise AuthorizationError(f"what came back from the browser is not from {_shown(server.issuer)}")
    if (error := said.get("error")) is not None:
        about = said.get("error_description", "")
        why = "the login was refused" if error == "access_denied" else f"the login failed: {_shown(error)}"
        raise AuthorizationError(f"{why} ({_shown(about)})" if about else why, error[:_LONGEST])
    if not (code := said.get("code")):
        raise AuthorizationError("what came back from the browser has no code")
    return code


def _object(reply: Fetched) -> dict[str, Any] | None:
    try:
        said = json.loads(reply.body)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def _refused(what: str, reply: Fetched, said: dict[str, Any] | None) -> AuthorizationError:
    error = said.get("error") if said is not None else None
    code = error[:_LONGEST] if isinstance(error, str) else ""
    about = said.get("error_description") if said is not None else None
    told = ": ".join(_shown(part) for part in (code, about) if isinstance(part, str) and part)
    return AuthorizationError(f"{what}: {told}" if told else f"{what}: it {_came(reply)}", code)


def _came(reply: Fetched) -> str:
    return f"answered {reply.status}" if reply.status else f"could not be fetched: {reply.why}"


def _native(redirect_uri: str) -> bool:
    return secure_url(redirect_uri) and urlsplit(redirect_uri).scheme == "http"


def _shown(text: str) -> str:
    """Return a stranger's text for an error: cut, escaped, and of a URL neither credentials nor query."""
    try:
        parts = urlsplit(text)
        if parts.scheme in ("http", "https"):
            text = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    except ValueError:
        pass
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return "".join(c if c.isprintable() else "?" for c in text)


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
