"""A small authorization server for tests and local experiments: it accepts every user name without a password.

It listens on the loopback interface only and stores nothing. Never expose it to a network.
"""

from __future__ import annotations

import base64
import html
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import parse_qs, urlencode, urlsplit

import attrs
from joserfc import jwt
from joserfc.jwk import ECKey

from trimcp.auth.jose import hash_of
from trimcp.budget import Budget
from trimcp.channel import require_trio
from trimcp.support.addresses import is_loopback
from trimcp.support.deadlines import Deadlines
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.h1.listener import serve_http1
from trimcp.transports.http.interfaces import JSON_HEADERS, Admitted, Handler, Head, HttpReply, HttpResponse

_FORM: Final = """<!doctype html><meta charset=utf-8><title>Log in</title>
<p>{client} asks to use {resource}{scopes}. It is for tests: whatever name you write is believed.
<form method=post><label>Your name <input name=user value=ann autofocus></label> <button>Log in</button></form>
"""


_FOR_PAGES: Final = (("Access-Control-Allow-Origin", "*"),)  # a client may be a page


@attrs.define(eq=False)
class ToyIssuer:
    """An authorization server: PKCE, registration, refresh tokens that rotate, client credentials, DPoP.

    Args:
        url: where it listens; also the issuer identifier.
        lifetime: seconds for which access tokens are valid.
        clients: secrets by client id, for client credentials.
        now: returns the time in seconds since 1970.
    """

    url: str
    lifetime: float = 600.0
    clients: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    now: Callable[[], float] = attrs.field(default=time.time, repr=False)
    key: ECKey = attrs.field(init=False, factory=lambda: ECKey.generate_key("P-256", {"kid": "toy"}), repr=False)
    connections: int = attrs.field(init=False, default=0)
    deadlines: Deadlines = attrs.field(init=False, factory=Deadlines, repr=False)
    budget: Budget = attrs.field(init=False, factory=Budget, repr=False)
    _codes: dict[str, tuple[Mapping[str, str], str]] = attrs.field(init=False, factory=dict, repr=False)
    _refresh: dict[str, dict[str, str]] = attrs.field(init=False, factory=dict, repr=False)

    def token(self, user: str, resource: str, scope: str = "", **claims: Any) -> str:
        """Return an access token (RFC 9068), for a test that needs one without a login.

        Args:
            user: the subject.
            resource: the URL of the server it is for (the audience).
            scope: its scopes, separated by spaces.
            claims: more claims, or replacements; None leaves one out.
        """
        now = self.now()
        said = {
            "iss": self.url,
            "sub": user,
            "aud": resource,
            "client_id": "test",
            "iat": int(now),
            "exp": now + self.lifetime,
            "jti": secrets.token_urlsafe(8),
            "scope": scope,
            **claims,
        }
        header = {"alg": "ES256", "typ": "at+jwt", "kid": "toy"}
        return jwt.encode(header, {name: value for name, value in said.items() if value is not None}, self.key)

    # For the listener

    async def admit(self, head: Head) -> Admitted:
        """Answer a request, or accept its body first."""
        if head.method == "POST" and head.path in ("/authorize", "/token", "/register"):
            return _Posted(self, head)
        if head.method == "OPTIONS":
            return HttpResponse(204, (*_FOR_PAGES, ("Access-Control-Allow-Headers", "*, Authorization")))
        if head.method != "GET":
            return _error(405, "invalid_request", "no such method")
        if head.path in ("/.well-known/oauth-authorization-server", "/.well-known/openid-configuration"):
            return _json(200, self._metadata())
        if head.path == "/keys":
            return _json(200, {"keys": [self.key.as_dict(private=False)]})
        if head.path == "/authorize":
            return self._page(_fields(head.query))
        return _error(404, "invalid_request", "there is nothing here")

    def done(self, head: Head, status: int, sent: int) -> None:
        """Do nothing: requests are not logged."""

    def posted(self, head: Head, body: bytes) -> HttpResponse:
        """Answer a request whose body was received."""
        if head.path == "/register":
            about = json.loads(body)
            return _json(201, {**about, "client_id": f"client-{secrets.token_hex(4)}"})
        fields = _fields(body.decode())
        if head.path == "/authorize":
            return self._approve(_fields(head.query), fields.get("user", ""))
        return self._give(head, fields)

    def _metadata(self) -> dict[str, Any]:
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "registration_endpoint": f"{self.url}/register",
            "jwks_uri": f"{self.url}/keys",
            "response_types_supported": ["code"],
            "grant_types_supported": ["authorization_code", "refresh_token", "client_credentials"],
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["none", "client_secret_basic"],
            "authorization_response_iss_parameter_supported": True,
            "dpop_signing_alg_values_supported": ["ES256"],
        }

    def _page(self, query: Mapping[str, str]) -> HttpResponse:
        scopes = query.get("scope")
        text = _FORM.format(
            client=html.escape(query.get("client_id", "somebody")),
            resource=html.escape(query.get("resource", "something")),
            scopes=f" ({html.escape(scopes)})" if scopes else "",
        )
        return HttpResponse(200, (("Content-Type", "text/html; charset=utf-8"),), text.encode())

    def _approve(self, query: Mapping[str, str], user: str) -> HttpResponse:
        target = query.get("redirect_uri", "")
        if not is_loopback(urlsplit(target).hostname or ""):
            return _error(400, "invalid_request", "the redirect_uri has to be on this machine")
        back = {"state": query.get("state", ""), "iss": self.url}
        if user and query.get("code_challenge_method") == "S256":
            code = secrets.token_urlsafe(16)
            self._codes[code] = query, user
            back["code"] = code
        else:
            back["error"] = "access_denied"
        return HttpResponse(302, (("Location", f"{target}?{urlencode(back)}"), ("Cache-Control", "no-store")))

    def _give(self, head: Head, fields: Mapping[str, str]) -> HttpResponse:
        grant = fields.get("grant_type")
        if grant == "authorization_code":
            query, user = self._codes.pop(fields.get("code", ""), ({}, ""))
            if hash_of(fields.get("code_verifier", "")) != query.get("code_challenge"):
                return _error(400, "invalid_grant", "there is no such code")
            granted = {"sub": user, "client_id": query["client_id"], "scope": query.get("scope", "")}
            return self._tokens(head, granted, fields.get("resource", ""))
        if grant == "refresh_token":
            known = self._refresh.pop(fields.get("refresh_token", ""), None)
            if known is None:
                return _error(400, "invalid_grant", "the refresh token was used, or never given")
            return self._tokens(head, known, fields.get("resource", ""))
        if grant == "client_credentials":
            name, _, secret = _basic(head).partition(":")
            if not name or self.clients.get(name) != secret:
                return _error(401, "invalid_client", "there is no such client")
            granted = {"sub": name, "client_id": name, "scope": fields.get("scope", "")}
            return self._tokens(head, granted, fields.get("resource", ""))
        return _error(400, "unsupported_grant_type", "use authorization_code, refresh_token or client_credentials")

    def _tokens(self, head: Head, granted: dict[str, str], resource: str) -> HttpResponse:
        more: dict[str, Any] = {"client_id": granted["client_id"]}
        proof = head.headers.get("dpop")
        if proof is not None:
            key = _proved(proof)
            if key is None:
                return _error(400, "invalid_dpop_proof", "the proof is not good")
            more["cnf"] = {"jkt": key.thumbprint()}
        refresh = secrets.token_urlsafe(16)
        self._refresh[refresh] = granted
        said = {
            "access_token": self.token(granted["sub"], resource, granted["scope"], **more),
            "token_type": "Bearer" if proof is None else "DPoP",
            "expires_in": self.lifetime,
            "scope": granted["scope"],
            "refresh_token": refresh,
        }
        return _json(200, said)


@attrs.define(eq=False)
class _Posted(Handler):
    issuer: ToyIssuer
    head: Head

    @property
    def max_body(self) -> int:
        return 64 * 1024

    def start(self, body: bytes, reply: HttpReply) -> None:
        try:
            response = self.issuer.posted(self.head, body)
        except (ValueError, TypeError, KeyError):
            response = _error(400, "invalid_request", "that could not be read")
        reply.send(response)


@asynccontextmanager
async def toy_issuer(port: int = 0, **settings: Any) -> AsyncIterator[ToyIssuer]:
    """Run a `ToyIssuer` on the loopback interface while the block runs, and yield it.

    Args:
        port: the port; 0 for any free one.
        settings: see `ToyIssuer`.
    """
    require_trio()
    issuer = ToyIssuer("", **settings)
    async with open_service_nursery() as nursery:
        nursery.start_soon(issuer.deadlines.run)
        [issuer.url] = await nursery.start(_listen, issuer, port)
        yield issuer


async def _listen(issuer: ToyIssuer, port: int, task_status: Any) -> None:
    await serve_http1(issuer, host="127.0.0.1", port=port, task_status=task_status)


def _json(status: int, value: object) -> HttpResponse:
    return HttpResponse(status, (*JSON_HEADERS, *_FOR_PAGES, ("Cache-Control", "no-store")), json.dumps(value).encode())


def _error(status: int, code: str, why: str) -> HttpResponse:
    return _json(status, {"error": code, "error_description": why})


def _fields(text: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(text).items()}


def _basic(head: Head) -> str:
    scheme, _, text = head.headers.get("authorization", "").partition(" ")
    return base64.b64decode(text).decode() if scheme.lower() == "basic" else ""


def _proved(proof: str) -> ECKey | None:
    from joserfc.errors import JoseError

    try:
        header = json.loads(base64.urlsafe_b64decode(proof.partition(".")[0] + "=="))
        key = ECKey.import_key(header["jwk"])
        jwt.decode(proof, key, algorithms=["ES256"])
    except (JoseError, ValueError, KeyError, TypeError):
        return None
    return key
