"""An MCP server's metadata and its authorization server, as replies to requests: no network, no clock of its own."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote_plus, urlencode, urlsplit

import attrs
import httpx2
import trio
from joserfc import jwt
from joserfc.jwk import ECKey

from trimcp.auth.steps import Fetch, Fetched, Listen, Obtain, Visit

T = TypeVar("T")

SERVER = "https://mcp.example/mcp"
ISSUER = "https://auth.example"
REDIRECT = "http://127.0.0.1:7000/callback"


@attrs.define(eq=False)
class Authority:
    """What answers at every address, and remembers what it was asked.

    Attributes:
        resource_at: where the server's metadata stands; None where it has none.
        resource: the server's metadata.
        issuer: the authorization server's name.
        metadata_at: where its metadata stands.
        metadata: more of its metadata, over the usual.
        iss: what comes back from the browser as `iss`; None for nothing, "" for the issuer.
        registers: what a registration is answered with, over the usual.
        refuses: errors of the token endpoint, in turn.
        nonce: what proofs must hold, or None.
        asked: requests, the oldest first.
        visited: the queries of pages that were visited.
    """

    resource_at: str | None = "https://mcp.example/.well-known/oauth-protected-resource/mcp"
    resource: dict[str, Any] = attrs.field(factory=dict)
    issuer: str = ISSUER
    metadata_at: str | None = f"{ISSUER}/.well-known/oauth-authorization-server"
    metadata: dict[str, Any] = attrs.field(factory=dict)
    iss: str | None = ""
    state: str | None = None
    registers: dict[str, Any] = attrs.field(factory=dict)
    refuses: list[dict[str, str]] = attrs.field(factory=list)
    nonce: str | None = None
    tokens: dict[str, Any] = attrs.field(factory=dict)
    asked: list[Fetch] = attrs.field(factory=list)
    visited: list[dict[str, str]] = attrs.field(factory=list)
    given: int = 0

    @property
    def urls(self) -> list[str]:
        """What was asked for, as "POST https://...", the oldest first."""
        return [f"{fetch.method} {fetch.url}" for fetch in self.asked]

    def form(self, at: int = -1) -> dict[str, str]:
        """The fields of a request to the token endpoint."""
        bodies = [fetch.body for fetch in self.asked if fetch.url.endswith("/token")]
        return {name: values[0] for name, values in parse_qs((bodies[at] or b"").decode()).items()}

    @property
    def known(self) -> dict[str, Any]:
        """The authorization server's metadata."""
        return {
            "issuer": self.issuer,
            "authorization_endpoint": f"{self.issuer}/authorize",
            "token_endpoint": f"{self.issuer}/token",
            "registration_endpoint": f"{self.issuer}/register",
            "code_challenge_methods_supported": ["S256"],
            "token_endpoint_auth_methods_supported": ["none"],
            "authorization_response_iss_parameter_supported": True,
            **self.metadata,
        }

    def answer(self, fetch: Fetch) -> Fetched:
        """Answer one request."""
        self.asked.append(fetch)
        if fetch.url == self.resource_at:
            return _json(200, {"resource": SERVER, "authorization_servers": [self.issuer], **self.resource})
        if fetch.url == self.metadata_at:
            return _json(200, {name: value for name, value in self.known.items() if value is not None})
        path = urlsplit(fetch.url).path
        if fetch.method == "POST" and path.endswith("/register"):
            return _json(201, {"client_id": f"client-{len(self.asked)}", **self.registers})
        if fetch.method == "POST" and path.endswith("/token"):
            return self._token(fetch)
        return Fetched(404, body=b"nothing here")

    def _token(self, fetch: Fetch) -> Fetched:
        proof = fetch.headers.get("dpop")
        if proof is not None:
            said = jwt.decode(proof, ECKey.import_key(_header(proof)["jwk"]), algorithms=["ES256"])
            assert said.header["typ"] == "dpop+jwt"
            assert (said.claims["htm"], said.claims["htu"]) == ("POST", fetch.url)
            if self.nonce is not None and said.claims.get("nonce") != self.nonce:
                refused = _json(400, {"error": "use_dpop_nonce"})
                return attrs.evolve(refused, headers={"dpop-nonce": self.nonce})
        if self.refuses:
            return _json(400, self.refuses.pop(0))
        form = self.form()
        if form["grant_type"] == "authorization_code":
            challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest())
            assert challenge.rstrip(b"=").decode() == self.visited[-1]["code_challenge"]
            assert form["redirect_uri"] == self.visited[-1]["redirect_uri"]
        self.given += 1
        kind = "Bearer" if proof is None else "DPoP"
        return _json(200, {"access_token": f"token-{self.given}", "token_type": kind, "expires_in": 600, **self.tokens})

    def visit(self, step: Visit) -> str:
        """Be the person who says yes."""
        query = {name: values[0] for name, values in parse_qs(urlsplit(step.url).query).items()}
        self.visited.append(query)
        back = {"code": "a-code", "state": query["state"] if self.state is None else self.state}
        if self.iss is not None:
            back["iss"] = self.iss or self.issuer
        return f"{query['redirect_uri']}?{urlencode(back)}"

    def walk(self, flow: Generator[Any, Any, T], obtain: Callable[[str], str] | None = None) -> T:
        """Carry out a flow."""
        try:
            step = next(flow)
            while True:
                match step:
                    case Fetch():
                        came: object = self.answer(step)
                    case Listen():
                        came = REDIRECT
                    case Visit():
                        came = self.visit(step)
                    case Obtain():
                        came = step.function(step.argument)
                step = flow.send(came)
        except StopIteration as end:
            result: T = end.value
            return result


def basic(fetch: Fetch) -> tuple[str, str]:
    """The name and password of a request."""
    text = base64.b64decode(fetch.headers["authorization"].removeprefix("Basic ")).decode()
    name, _, password = text.partition(":")
    return unquote_plus(name), unquote_plus(password)


def _header(token: str) -> dict[str, Any]:
    head = token.partition(".")[0]
    header: dict[str, Any] = json.loads(base64.urlsafe_b64decode(head + "=" * (-len(head) % 4)))
    return header


def _json(status: int, value: object) -> Fetched:
    return Fetched(status, {"content-type": "application/json"}, json.dumps(value).encode())


class Body(httpx2.AsyncByteStream):
    """The body of a response as a network brings it: in pieces."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self.data), 65_536):
            await trio.lowlevel.checkpoint()
            yield self.data[at : at + 65_536]


def reply(status: int, data: bytes | object = b"", headers: Mapping[str, str] | None = None) -> httpx2.Response:
    """A response of a page; what is no bytes becomes JSON."""
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return httpx2.Response(status, headers=dict(headers or {}), stream=Body(body))
