"""How a client comes to an access token: OAuth 2.1 as the specification wants it, without input or output.

Each function here is a generator: it yields what is to be done next (`Fetch`, `Listen`, `Visit`, `Obtain`), is sent
what came of it, and returns or raises at the end. So every step can be tested by hand, and one driver carries out all
of them (`trimcp.auth.oauth`).

Specification, "Authorization"; OAuth 2.1; RFC 7591 (registration), 7636 (PKCE), 8707 (resource), 9207 (`iss`), 9449
(DPoP); extensions "OAuth Client Credentials" and "Enterprise-Managed Authorization".
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import parse_qs, quote_plus, urlencode, urlsplit

import attrs

from trimcp.auth.credentials import Credentials, Registration, Tokens, sendable
from trimcp.auth.discovery import Discovery, Flow, TokenSource, check_url
from trimcp.auth.grants import AuthorizationCode, ClientCredentials, EnterpriseManaged, Grant, JwtBearer
from trimcp.auth.jose import ProofKey, hash_of
from trimcp.auth.metadata import (
    AuthChallenge,
    AuthorizationServer,
    is_text,
    origin_of,
    same_issuer,
    secure_url,
    texts_in,
)
from trimcp.auth.steps import Fetch, Fetched, Listen, Obtain, Visit, accepted, code_of, hint, object_in, refusal, shown
from trimcp.errors import AuthorizationError
from trimcp.transports.targets import basic_authorization

_log = logging.getLogger("trimcp.auth")

_JWT_BEARER: Final = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_ASSERTION_TYPE: Final = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_TOKEN_EXCHANGE: Final = "urn:ietf:params:oauth:grant-type:token-exchange"
_ID_JAG: Final = "urn:ietf:params:oauth:token-type:id-jag"
_ID_TOKEN: Final = "urn:ietf:params:oauth:token-type:id_token"
_FORM: Final = {"content-type": "application/x-www-form-urlencoded", "accept": "application/json"}
_LONGEST_LIFE: Final = 1e10  # seconds; beyond that a lifetime is none
_OFFLINE: Final = "offline_access"
_FORGOTTEN: Final = ("invalid_client", "unauthorized_client")
_PASSING: Final = ("slow_down", "temporarily_unavailable", "server_error")


@attrs.define(eq=False)
class Login:
    """The way to a token for one server.

    It has more than 300 lines because each step of one login, from discovery to the token, needs what the steps
    before it found.
    """

    server: str  # the URL of the MCP server
    grant: Grant  # what the client has to show
    now: Callable[[], float]  # returns the seconds since 1970
    scopes: tuple[str, ...] | None = None  # what to ask for, whatever the server suggests; None to go by the server
    proof_key: ProofKey | None = None  # a key that tokens are to be bound to, or None
    resource: bool = True  # whether the authorization server is told what the token is for
    # whether the authorization server does not know the registration that was kept any more
    forgotten: bool = attrs.field(init=False, default=False)

    def begin(self, challenge: AuthChallenge | None, known: Credentials | None) -> Flow[Credentials]:
        """Find out who gives tokens, and get one. Raises AuthorizationError: there is no token to be had.

        Of what is `known` of an earlier login, the registration is used again where the issuer is the same, and what it
        was allowed to do is asked for again.
        """
        discovery = self._discovery()
        found = yield from discovery.find(challenge)
        try:
            return (yield from self._begin(found, challenge, known))
        except AuthorizationError as error:
            if found.guessed and discovery.notes:  # it may be why the guess was wrong
                raise AuthorizationError(f"{error} ({'; '.join(discovery.notes)})", error.code) from None
            raise

    def _begin(
        self, found: TokenSource, challenge: AuthChallenge | None, known: Credentials | None
    ) -> Flow[Credentials]:
        issuer, grant = found.server.issuer, self.grant
        if grant.issuer is not None and not same_issuer(grant.issuer, issuer):
            raise AuthorizationError(
                f"the server now names the authorization server {shown(issuer)}, but the client is registered with "
                f"{shown(grant.issuer)}: register it with the new one"
            )
        if grant.issuer is None and _shows_secret(grant):
            raise AuthorizationError(
                f"the server names the authorization server {shown(issuer)}: the secret of a client is shown only to "
                f"who is named with it, issuer={issuer!r:.200} (trimcp login --issuer {shown(issuer)})"
            )
        if known is not None and not (same_issuer(known.issuer, issuer) and known.found_at == found.found_at):
            known = None
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
        tokens = yield from self._tokens(found.server, registration, form, self._resource(found), asked)
        return self._kept(found, registration, tokens, asked)

    def refresh(self, known: Credentials) -> Flow[Credentials | None]:
        """Exchange a refresh token, or return None where it is not good any more (RFC 6749 section 6).

        Raises AuthorizationError: it could not be tried, so that it may be good later.
        """
        tokens, pinned = known.tokens, self.grant.issuer
        if tokens is None or tokens.refresh_token is None or not (pinned is None or same_issuer(pinned, known.issuer)):
            return None
        server = yield from self._discovery().issuer_metadata(known.issuer, known.found_at)
        form = {"grant_type": "refresh_token", "refresh_token": tokens.refresh_token}
        resource = known.resource if self.resource and known.names_resource else None
        try:
            new = yield from self._tokens(server, known.registration, form, resource, ())
        except AuthorizationError as error:
            self.forgotten = error.code in _FORGOTTEN
            if error.code and error.code not in _PASSING:
                return None
            raise
        # What is not said anew stays as it was: the scopes, and a refresh token that is not rotated.
        new = attrs.evolve(
            new, scopes=new.scopes or tokens.scopes, refresh_token=new.refresh_token or tokens.refresh_token
        )
        return attrs.evolve(known, tokens=new, proof_key=self._key_of(new))

    def _discovery(self) -> Discovery:
        grant = self.grant
        secret = _shows_secret(grant) or getattr(grant, "signing_key", None) is not None
        return Discovery(self.server, grant.issuer, secret, isinstance(grant, AuthorizationCode))

    def _resource(self, found: TokenSource) -> str | None:
        """Return what the authorization server is told that the token is for (RFC 8707)."""
        return found.resource if self.resource else None

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
            raise AuthorizationError(f"the authorization server {shown(server.issuer)} offers no login with a browser")
        earlier = None if known is None else known.registration
        redirect_uri: str = yield Listen(None if earlier is None else earlier.redirect_uri)
        if earlier is not None and not self.forgotten:
            registration = yield from self._registration(grant, server, earlier, redirect_uri, asked)
            try:
                return (yield from self._code(found, registration, asked, trying=registration is earlier))
            except AuthorizationError as error:
                if error.code not in _FORGOTTEN or registration is not earlier or not server.registration_endpoint:
                    raise
                self.forgotten = True
        if self.forgotten and grant.client_id is None and server.registration_endpoint:
            _log.warning("%s does not know this client any more: it is registered once more", shown(server.issuer))
        registration = yield from self._registration(grant, server, None, redirect_uri, asked)
        return (yield from self._code(found, registration, asked))

    def _code(
        self, found: TokenSource, registration: Registration, asked: tuple[str, ...], *, trying: bool = False
    ) -> Flow[Credentials]:
        """Let a person log in, and exchange the code that they come back with.

        `trying`: whether the registration is one of an earlier login, of which the server may know nothing any more.
        """
        server, resource, redirect_uri = found.server, self._resource(found), registration.redirect_uri or ""
        verifier, state = secrets.token_urlsafe(48), secrets.token_urlsafe(24)
        query = {
            "response_type": "code",
            "client_id": registration.client_id,
            "redirect_uri": redirect_uri,
            "code_challenge": hash_of(verifier),
            "code_challenge_method": "S256",
            "state": state,
        }
        if resource is not None:
            query["resource"] = resource
        if asked:
            query["scope"] = " ".join(asked)
        if _OFFLINE in asked:
            query["prompt"] = "consent"  # OpenID Connect Core section 11: else it may be ignored
        if self._bound(server):
            assert self.proof_key is not None
            query["dpop_jkt"] = self.proof_key.thumbprint
        separator = "&" if urlsplit(server.authorization_endpoint).query else "?"
        url = f"{server.authorization_endpoint}{separator}{urlencode(query)}"
        if trying and server.registration_endpoint:
            # A server that knows no such client sends nobody back: the person would be left at a page that says so.
            page: Fetched = yield Fetch(url, headers={"accept": "text/html"})
            if page.status in (400, 401):
                raise refusal(f"{shown(server.issuer)} refused the client", page, {"error": _FORGOTTEN[0]})
        came: str = yield Visit(url, state)
        code = authorization_code(came, state, server)
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
        }
        tokens = yield from self._tokens(server, registration, form, resource, ())
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
                f"{shown(server.issuer)} does not register clients by itself: register one there, and pass its "
                "client_id (trimcp login --client-id)"
            )
        methods = server.token_endpoint_auth_methods_supported or ("none",)
        method = next((m for m in ("none", "client_secret_basic", "client_secret_post") if m in methods), "none")
        native = secure_url(redirect_uri) and urlsplit(redirect_uri).scheme == "http"
        about: dict[str, Any] = {
            "client_name": grant.client_name,
            "redirect_uris": [redirect_uri],
            "grant_types": ["authorization_code", "refresh_token"],
            "response_types": ["code"],
            "token_endpoint_auth_method": method,
            "application_type": "native" if native else "web",
        }
        if asked:
            about["scope"] = " ".join(asked)
        if self._bound(server):
            about["dpop_bound_access_tokens"] = True
        headers = {"content-type": "application/json", "accept": "application/json"}
        reply: Fetched = yield Fetch(server.registration_endpoint, "POST", headers, json.dumps(about).encode())
        said = accepted(reply, f"{shown(server.issuer)} did not register this client", 200, 201)
        client_id, secret = said.get("client_id"), said.get("client_secret")
        ends, named = said.get("client_secret_expires_at"), said.get("token_endpoint_auth_method")
        limit = said.get("scope")  # RFC 7591 section 2: the client may ask for no others
        if not is_text(client_id) or not client_id or not (secret is None or is_text(secret)):
            raise AuthorizationError(f"what {shown(server.issuer)} registered has no client_id")
        return Registration(
            client_id,
            secret,
            named if is_text(named) else None,
            redirect_uri,
            _seconds(ends),
            # With those it was asked for and left out: to ask again would bring nothing.
            tuple(dict.fromkeys((*asked, *texts_in(limit)))) if isinstance(limit, str) else None,
        )

    # The enterprise's identity provider

    def _identity_assertion(self, grant: EnterpriseManaged, found: TokenSource, asked: tuple[str, ...]) -> Flow[str]:
        """Exchange the person's ID token for one that the server's authorization server takes (RFC 8693)."""
        endpoint = grant.idp_token_endpoint
        check_url(endpoint, "the identity provider's token endpoint")
        form = {
            "grant_type": _TOKEN_EXCHANGE,
            "requested_token_type": _ID_JAG,
            "audience": found.server.issuer,
            "subject_token": (yield Obtain(grant.id_token, endpoint)),
            "subject_token_type": _ID_TOKEN,
            "client_id": grant.idp_client_id,
        }
        if (resource := self._resource(found)) is not None:
            form["resource"] = resource
        if asked:
            form["scope"] = " ".join(asked)
        if grant.idp_client_secret is not None:
            form["client_secret"] = grant.idp_client_secret
        reply: Fetched = yield Fetch(endpoint, "POST", _FORM, urlencode(form).encode())
        said = accepted(reply, "the identity provider gave no assertion for the server")
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
        resource: str | None,
        scopes: tuple[str, ...],
    ) -> Flow[Tokens]:
        """Ask the token endpoint (RFC 6749 section 4 and 5)."""
        fields = {**form} if resource is None else {**form, "resource": resource}
        if scopes:
            fields["scope"] = " ".join(scopes)
        endpoint = server.token_endpoint
        if not endpoint:
            raise AuthorizationError(f"the authorization server {shown(server.issuer)} has no token endpoint")
        bound = self._bound(server)
        reply = yield from self._ask(server, registration, fields, bound)
        nonce = reply.headers.get("dpop-nonce")
        if bound and nonce and (object_in(reply) or {}).get("error") == "use_dpop_nonce":
            assert self.proof_key is not None
            self.proof_key.nonces[origin_of(endpoint)] = nonce  # RFC 9449 section 8
            reply = yield from self._ask(server, registration, fields, bound)
        said = accepted(reply, f"{shown(server.issuer)} gave no token")
        return self._taken(said, scopes, bound, server.issuer)

    def _ask(
        self, server: AuthorizationServer, registration: Registration, fields: Mapping[str, str], bound: bool
    ) -> Flow[Fetched]:
        fields = dict(fields)
        headers = {**_FORM, **self._client_authentication(server, registration, fields)}
        if bound:
            assert self.proof_key is not None
            headers["dpop"] = self.proof_key.proof("POST", server.token_endpoint)
        reply: Fetched = yield Fetch(server.token_endpoint, "POST", headers, urlencode(fields).encode(), once=True)
        return reply

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
            return {"authorization": basic_authorization(quote_plus(registration.client_id), quote_plus(secret))}
        elif method == "client_secret_post" and secret is not None:
            fields["client_id"], fields["client_secret"] = registration.client_id, secret
        elif registration.client_id:
            fields["client_id"] = registration.client_id
        return {}

    def _taken(self, said: dict[str, Any], scopes: tuple[str, ...], bound: bool, issuer: str) -> Tokens:
        token, kind = said.get("access_token"), said.get("token_type")
        if not isinstance(token, str) or not sendable(token):
            raise AuthorizationError(f"{shown(issuer)} gave no access token")
        kind = kind.lower() if isinstance(kind, str) else ""
        if kind != ("dpop" if bound else "bearer"):
            wanted = "bound to our key (DPoP)" if bound else "a bearer token"
            raise AuthorizationError(f"{shown(issuer)} gave a token that is not {wanted}")
        scope, refresh, ends = said.get("scope"), said.get("refresh_token"), said.get("expires_in")
        seconds = _seconds(ends)
        return Tokens(
            token,
            kind,
            texts_in(scope) if isinstance(scope, str) else scopes,
            None if seconds is None else self.now() + seconds,
            seconds,
            refresh if is_text(refresh) and refresh else None,
        )

    def _bound(self, server: AuthorizationServer) -> bool:
        """Return whether tokens are to be bound to our key."""
        return self.proof_key is not None and "ES256" in (server.dpop_signing_alg_values_supported or ())

    def _kept(
        self, found: TokenSource, registration: Registration, tokens: Tokens, asked: tuple[str, ...]
    ) -> Credentials:
        key = self._key_of(tokens)
        return Credentials(
            found.resource, found.server.issuer, registration, tokens, asked, key, self.resource, found.found_at
        )

    def _key_of(self, tokens: Tokens) -> dict[str, Any] | None:
        """Return the private key that tokens are bound to, as it is kept, or None."""
        return self.proof_key.jwk if self.proof_key is not None and tokens.token_type == "dpop" else None


def authorization_code(came: str, state: str, server: AuthorizationServer) -> str:
    """Return the code with which a person came back (RFC 6749 section 4.1.2; RFC 9207 section 2.4).

    Raises AuthorizationError: it is an answer to another question, by another server, or a refusal.
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
        raise AuthorizationError(f"what came back from the browser does not say that it is from {shown(server.issuer)}")
    # Character by character (RFC 9207 section 2.4), and before anything else of it is used or shown.
    if issuer is not None and issuer != server.issuer:
        raise AuthorizationError(f"what came back from the browser is not from {shown(server.issuer)}")
    if (error := said.get("error")) is not None:
        about = said.get("error_description", "")
        why = "the login was refused" if error == "access_denied" else f"the login failed: {shown(error)}"
        raise AuthorizationError(f"{f'{why} ({shown(about)})' if about else why}{hint(error)}", code_of(error))
    if not (code := said.get("code")):
        raise AuthorizationError("what came back from the browser has no code")
    return code


def _shows_secret(grant: Grant) -> bool:
    """Return whether a grant shows what was given for one authorization server, and would be good for another too."""
    return isinstance(grant, JwtBearer) or grant.client_secret is not None


def _seconds(value: Any) -> float | None:
    """Return a number of seconds that somebody said, or None where that is none."""
    return float(value) if type(value) in (int, float) and 0 < value < _LONGEST_LIFE else None
