"""A server that takes access tokens: who asks, and what a request is answered that shows none, or not enough.

A token is verified once; its next requests cost a look-up. Keys are fetched beside what goes on. (Specification,
"Authorization"; RFC 6750, 9068, 9449, 9728, 7662.)
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import attrs

from trimcp.auth.issuers import Introspection, Issuer, IssuerKeys, TokenQuestions
from trimcp.auth.metadata import (
    RESOURCE_METADATA,
    canonical_url,
    challenge_text,
    host_of,
    origin_of,
    same_issuer,
    secure_url,
)
from trimcp.auth.verifying import (
    ASYMMETRIC,
    PROOF_SECONDS,
    USED,
    AccessToken,
    BadToken,
    Replays,
    TokenRules,
    check_proof,
    unverified,
)
from trimcp.budget import owner_of
from trimcp.channel import require_trio
from trimcp.errors import AuthorizationError
from trimcp.principal import Principal
from trimcp.support.bounds import checked
from trimcp.support.cleaning import one_line
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.rates import TokenBucket
from trimcp.transports.http.interfaces import Head, HttpResponse
from trimcp.transports.http.peers.identity import Authenticate, Identity, Refused, SharedUses

if TYPE_CHECKING:
    import httpx2


_log = logging.getLogger("trimcp.auth")

TokenBinding: TypeAlias = Literal["off", "allowed", "required"]
"""Whether tokens may, or must, be bound to a key of the client's (DPoP)."""

_MAX_CREDENTIALS: Final = 16 * 1024
_NONCE_SECONDS: Final = 300.0
_PRINTABLE: Final = frozenset(map(chr, range(0x21, 0x7F)))


@attrs.frozen
class _Verified:
    token: AccessToken
    principal: Principal
    since: float  # a clock that is set back prolongs nothing
    until: float
    reusable: bool  # shown as a bearer token it is good for every request, with nothing more to judge


@attrs.define(eq=False, field_transformer=checked(zero=("skew",)))
class ResourceServer:
    """Takes the access tokens of authorization servers: `serve_http(server, auth=ResourceServer(...))`.

    It has more than 20 fields because what may be set for it is checked together, for each token.

    Attributes:
        resource: the URL at which clients reach the server, with the path of its endpoint. It is what tokens have to
            be for, and what its metadata says.
        issuers: whose tokens are taken, by name or with settings. At https, or on this machine.
        scopes: what every request needs.
        scopes_supported: what the metadata says that clients may ask for; by default `scopes`.
        audiences: what tokens may be for instead; by default `resource`.
        algorithms: of signatures; by default those whose keys can be published.
        skew: seconds by which clocks may differ.
        any_type: take tokens that do not say that they are access tokens, as some issuers leave it (`TokenRules`).
        introspection: how tokens are judged that are no JWT; None refuses them.
        binding: whether tokens may or must be bound to a key. One that is bound is never taken without its proof.
        nonces: ask for a nonce of ours in each proof, so that none can be made ahead.
        also: a check for requests whose credentials are no token of these issuers, such as `bearer_tokens(...)`.
        allowed_hosts: names of hosts that may have addresses that are not public; those of `issuers` always may.
        http_client: an `httpx2.AsyncClient` of your own to ask issuers with; it is not closed.
        max_tokens: verified tokens that are remembered; then those that were not used for longest go.
        now: returns the seconds since 1970.
    """

    resource: str
    issuers: Sequence[Issuer | str]
    scopes: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    scopes_supported: tuple[str, ...] | None = attrs.field(default=None, kw_only=True)
    audiences: tuple[str, ...] = attrs.field(default=(), kw_only=True)
    algorithms: tuple[str, ...] = attrs.field(default=ASYMMETRIC, kw_only=True)
    skew: float = attrs.field(default=30.0, kw_only=True)
    any_type: bool = attrs.field(default=False, kw_only=True)
    introspection: Introspection | None = attrs.field(default=None, kw_only=True)
    binding: TokenBinding = attrs.field(default="allowed", kw_only=True)
    nonces: bool = attrs.field(default=False, kw_only=True)
    also: Authenticate | None = attrs.field(default=None, kw_only=True)
    allowed_hosts: frozenset[str] = attrs.field(default=frozenset(), kw_only=True)
    http_client: httpx2.AsyncClient | None = attrs.field(default=None, kw_only=True, repr=False)
    max_tokens: int = attrs.field(default=10_000, kw_only=True)
    now: Callable[[], float] = attrs.field(default=time.time, kw_only=True, repr=False)
    metadata_paths: tuple[str, ...] = attrs.field(init=False)
    _rules: TokenRules = attrs.field(init=False, repr=False)
    _keys: dict[str, IssuerKeys] = attrs.field(init=False, factory=dict, repr=False)
    _questions: TokenQuestions | None = attrs.field(init=False, default=None, repr=False)
    _verified: OrderedDict[bytes, _Verified] = attrs.field(init=False, factory=OrderedDict, repr=False)
    _replays: Replays = attrs.field(init=False, factory=Replays, repr=False)
    _uses: SharedUses | None = attrs.field(init=False, default=None, repr=False)
    _told: TokenBucket = attrs.field(init=False, factory=lambda: TokenBucket(0.2, 10, time.monotonic()), repr=False)
    _secret: bytes = attrs.field(init=False, factory=lambda: secrets.token_bytes(32), repr=False)

    def __attrs_post_init__(self) -> None:
        if not secure_url(self.resource):
            raise ValueError("the resource is the URL of the server, at https or on this machine")
        if any(algorithm.startswith("HS") or algorithm == "none" for algorithm in self.algorithms):
            raise ValueError("signatures are asymmetric, such as ES256: whoever checks another could have made it")
        if not self.issuers:
            raise ValueError("name at least one issuer")
        resource = canonical_url(self.resource)
        self.issuers = tuple(Issuer(one) if isinstance(one, str) else one for one in self.issuers)
        names = [issuer.name for issuer in self.issuers if isinstance(issuer, Issuer)]
        if (asked := self.introspection) is not None and not any(same_issuer(asked.issuer, name) for name in names):
            names.append(asked.issuer)
        # One slash at the end makes no difference: libraries add one to a host, and some take it off a path.
        bare = resource.removesuffix("/")
        audiences = self.audiences or tuple(dict.fromkeys((resource, self.resource, bare, f"{bare}/")))
        self._rules = TokenRules(names, audiences, self.algorithms, self.skew, self.any_type)
        # The path of the endpoint goes behind; who knows only the host asks without it (RFC 9728 section 3.1).
        self.metadata_paths = (RESOURCE_METADATA + urlsplit(resource).path.rstrip("/"), RESOURCE_METADATA)

    # What the server says of itself

    @property
    def metadata_url(self) -> str:
        """Where the server's metadata is (RFC 9728 section 3.1)."""
        return origin_of(self.resource) + self.metadata_paths[0]

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The server's metadata (RFC 9728 section 2)."""
        said: dict[str, Any] = {
            "resource": canonical_url(self.resource),
            "authorization_servers": list(self._rules.issuers),
            "bearer_methods_supported": ["header"],
        }
        scopes = self.scopes if self.scopes_supported is None else self.scopes_supported
        if scopes:
            said["scopes_supported"] = list(scopes)
        if self.binding != "off":
            said["dpop_signing_alg_values_supported"] = list(ASYMMETRIC)
            said["dpop_bound_access_tokens_required"] = self.binding == "required"
        return said

    async def describe(self, head: Head) -> HttpResponse:
        """Answer a request for the metadata, which anybody may make, from any page."""
        if head.method not in ("GET", "HEAD"):
            return HttpResponse(405, (("Allow", "GET, HEAD"),))
        headers = (
            ("Content-Type", "application/json"),
            ("Cache-Control", "max-age=3600"),
            ("Access-Control-Allow-Origin", "*"),
        )
        return HttpResponse(200, headers, json.dumps(self.metadata).encode())

    # Its life

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the issuers' keys fresh while the block runs. Whoever serves does this."""
        from trimcp.auth.fetching import opened_fetcher

        require_trio()
        # Who is named here is meant. What their metadata names is not: it could point anywhere.
        own = [url for issuer in self.issuers if isinstance(issuer, Issuer) for url in (issuer.name, issuer.jwks_uri)]
        own.append(None if self.introspection is None else self.introspection.endpoint)
        allowed = self.allowed_hosts.union(host_of(url) for url in own if url is not None)
        fetching = opened_fetcher(allowed, client=self.http_client, timeout=10.0)
        async with fetching as fetcher, open_service_nursery() as nursery:
            if self.introspection is not None:
                self._questions = TokenQuestions(self.introspection, self._rules, fetcher, self.now, self.max_tokens)
            self._keys = {
                issuer.name: IssuerKeys(issuer, fetcher) for issuer in self.issuers if isinstance(issuer, Issuer)
            }
            for keys in self._keys.values():
                nursery.start_soon(keys.keep_fresh)
            try:
                yield
            finally:
                self._keys, self._questions = {}, None

    async def share(self, uses: SharedUses, /) -> None:
        """From now on take each proof once in all processes, and nonces of all of them. Raises OSError."""
        self._secret = await uses.agree("DPoP-Nonce", self._secret)
        self._uses = uses

    # Who asks

    def __call__(self, head: Head) -> Identity | Awaitable[Identity]:
        """Return who makes a request; waits only for a token that was not seen before."""
        said = head.headers.get("authorization", "")
        if "access_token" in head.query:
            return Refused(400, self._challenge("invalid_request"), "send the token in a header, not in the URL")
        scheme, _, token = said.partition(" ")
        token = token.strip(" ")
        scheme = scheme.lower()
        if scheme not in ("bearer", "dpop") or not token:
            return self._other(head, bool(said))
        digest = hashlib.sha256(token.encode("latin-1", "replace")).digest()
        found = self._verified.get(digest)
        if found is None or not found.since <= self.now() < found.until:
            return self._verify(head, scheme, token, digest)
        self._verified.move_to_end(digest)
        if found.reusable and scheme == "bearer":
            return found.principal
        return self._allowed(head, scheme, token, found)

    def _other(self, head: Head, shown: bool) -> Identity | Awaitable[Identity]:
        """Judge a request without a token."""
        if self.also is not None and shown:
            return self.also(head)
        return Refused(401, self._challenge(None), "an access token is required")

    async def _verify(self, head: Head, scheme: str, token: str, digest: bytes) -> Identity:
        judged = False
        try:
            if len(token) > _MAX_CREDENTIALS or not _PRINTABLE.issuperset(token):
                raise BadToken("the token is malformed", "invalid_request")
            found = await self._signed(token)
            if found is None:
                judged = True  # by others first: a token of theirs is not shown to the issuer
                if (other := await self._by_others(head)) is not None:
                    return other
                found = await self._opaque(head, token, digest)
        except BadToken as bad:
            other = None if judged else await self._by_others(head)
            return self._bad(bad) if other is None else other
        except AuthorizationError as error:
            return self._unchecked("token", error)
        self._verified[digest] = found
        while len(self._verified) > self.max_tokens:
            self._verified.popitem(last=False)
        allowed = self._allowed(head, scheme, token, found)
        return await allowed if isawaitable(allowed) else allowed

    async def _by_others(self, head: Head) -> Principal | None:
        """Return who makes a request by the application's own check, or None."""
        if self.also is None:
            return None
        found = self.also(head)
        found = await found if isawaitable(found) else found
        return found if isinstance(found, Principal) else None

    async def _signed(self, token: str) -> _Verified | None:
        """Judge a token by the keys of its issuer; return None if that is none whose keys are known."""
        if token.count(".") != 2:
            return None
        header, claims = unverified(token)
        issuer = self._rules.issuer_of(header, claims)
        if (keys := self._keys.get(issuer)) is None:
            return None
        key = keys.known(header) or await keys.find(header)
        if key is None:
            raise BadToken("the token is signed by a key that its issuer does not publish")
        good = self._rules.judge(token, key, self.now())
        if good.issuer != issuer:  # a key is good for the tokens of whoever published it
            raise BadToken("the token is from another issuer")
        return self._remembered(good, good.expires_at + self.skew)

    async def _opaque(self, head: Head, token: str, digest: bytes) -> _Verified:
        """Judge a token that says nothing by itself."""
        if self.introspection is None:
            raise BadToken("the token is not a JWT of an issuer that is known here")
        assert self._questions is not None  # since somebody serves
        good = await self._questions.ask(token, digest, owner_of(None, head.peer))
        until = min(good.expires_at + self.skew, self.now() + self.introspection.max_age)
        return self._remembered(good, until)

    def _remembered(self, good: AccessToken, until: float) -> _Verified:
        free = good.key is None and good.certificate is None and self.binding != "required"
        return _Verified(good, _principal(good), self.now(), until, free and set(self.scopes) <= set(good.scopes))

    def _allowed(self, head: Head, scheme: str, token: str, found: _Verified) -> Identity | Awaitable[Identity]:
        """Judge who shows a good token: whether it is theirs, and whether it suffices."""
        good, proof = found.token, None
        try:
            if good.key is not None or scheme == "dpop" or self.binding == "required":
                proof = self._check_binding(head, scheme, token, good)
            if good.certificate is not None and good.certificate != head.certificate:
                raise BadToken("the token is bound to another certificate")
        except BadToken as bad:
            return self._bad(bad)
        if self.scopes and not set(self.scopes) <= set(good.scopes):
            return self.insufficient(self.scopes)
        if proof is None or self._uses is None:
            return found.principal
        return self._first_of_all(self._uses, proof, found)

    async def _first_of_all(self, uses: SharedUses, proof: str, found: _Verified) -> Identity:
        """Refuse a proof that another process has taken."""
        try:
            first = await uses.first_use(f"DPoP {found.token.key}", proof, 2 * PROOF_SECONDS)
        except OSError as error:
            return self._unchecked("proof", error)
        return found.principal if first else self._bad(BadToken(USED, "invalid_dpop_proof"))

    def _unchecked(self, what: str, error: Exception) -> Refused:
        """Return the answer where nobody can say whether what is shown is good, which is not the client's fault."""
        log = _log.warning if self._told.take(time.monotonic()) else _log.debug  # strangers decide how often
        log("a %s could not be checked: %s", what, one_line(str(error)))
        return Refused(503, (("Retry-After", "5"),), f"{what}s cannot be checked now; try again later")

    def _check_binding(self, head: Head, scheme: str, token: str, good: AccessToken) -> str:
        """Return the id of the proof that a token is sent with. Raises BadToken."""
        if scheme != "dpop" or self.binding == "off":
            raise BadToken("the token is sent without a proof, or proofs are not taken here")
        if good.key is None:
            raise BadToken("the token is bound to no key")
        proof = head.headers.get("dpop")
        if not proof or len(proof) > _MAX_CREDENTIALS:
            raise BadToken("the proof is missing", "invalid_dpop_proof")
        return check_proof(
            proof,
            method=head.method,
            url=origin_of(self.resource) + head.root + head.path,
            token=token,
            key=good.key,
            now=self.now(),
            replays=self._replays,
            nonce=self._is_nonce if self.nonces else None,
        )

    # What a refused request is answered

    def insufficient(self, scopes: Sequence[str]) -> Refused:
        """Return the answer to a request whose token lacks scopes (RFC 6750 section 3.1).

        Args:
            scopes: what it needs beside what every request does. Both are named: some clients ask for these alone.
        """
        challenge = self._challenge("insufficient_scope", scopes=tuple(dict.fromkeys((*self.scopes, *scopes))))
        return Refused(403, challenge, "the token does not suffice for this")

    def _bad(self, bad: BadToken) -> Refused:
        status = 400 if bad.error == "invalid_request" else 401
        headers = self._challenge(bad.error, str(bad))
        if self.nonces and bad.error == "use_dpop_nonce":
            headers = (*headers, ("DPoP-Nonce", self._nonce(self.now())))
        return Refused(status, headers, str(bad))

    def _challenge(
        self, error: str | None, why: str | None = None, scopes: tuple[str, ...] | None = None
    ) -> tuple[tuple[str, str], ...]:
        said = {
            "error": error,
            "error_description": why,
            "scope": " ".join(self.scopes if scopes is None else scopes) or None,
            "resource_metadata": self.metadata_url,
        }
        challenges = []
        if self.binding != "required":
            challenges.append(challenge_text("Bearer", said))
        if self.binding == "required" or error in ("invalid_dpop_proof", "use_dpop_nonce"):
            challenges.insert(0, challenge_text("DPoP", {**said, "algs": " ".join(ASYMMETRIC)}))
        return tuple(("WWW-Authenticate", text) for text in challenges)

    # Nonces: nothing is kept of them, and each is good for five to ten minutes

    def _nonce(self, now: float) -> str:
        turn = int(now // _NONCE_SECONDS).to_bytes(8, "big")
        return base64.urlsafe_b64encode(hmac.digest(self._secret, turn, "sha256")[:18]).decode()

    def _is_nonce(self, text: object) -> bool:
        now = self.now()
        return isinstance(text, str) and any(
            hmac.compare_digest(text.encode("utf-8", "replace"), self._nonce(when).encode())
            for when in (now, now - _NONCE_SECONDS)
        )


def _principal(token: AccessToken) -> Principal:
    return Principal(
        f"{token.issuer}#{token.subject}",
        token.claims,
        subject=token.subject,
        client_id=token.client_id,
        scopes=token.scopes,
        expires_at=token.expires_at,
    )
