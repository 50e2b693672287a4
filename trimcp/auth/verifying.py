"""Access tokens and proofs, judged: signatures, who issued them, for whom, and until when. No input or output.

RFC 9068 section 4 (JWT access tokens), RFC 8725 (JWT best practice), RFC 9449 section 4.3 (DPoP). Signatures are
checked by joserfc.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import attrs
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

from trimcp.auth.jose import hash_of
from trimcp.auth.metadata import canonical_url, is_text, json_object, same_issuer, texts_in

ASYMMETRIC: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Algorithms whose keys can be published: who checks a signature could not have made it."""

_MAX_TOKEN: Final = 16 * 1024
_MAX_KEYS: Final = 100
_TYPES: Final = ("at+jwt", "application/at+jwt")
_PUBLIC: Final[Mapping[str, type[Any]]] = {"RSA": RSAKey, "EC": ECKey, "OKP": OKPKey}
_KINDS: Final[Mapping[str, type[Any]]] = {"RS": RSAKey, "PS": RSAKey, "ES": ECKey, "Ed": OKPKey, "HS": OctKey}
_CURVES: Final = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}
PROOF_SECONDS: Final = 300.0


class BadToken(Exception):
    """A token or proof is not good; the text says why and quotes nothing of it."""

    def __init__(self, why: str, error: str = "invalid_token") -> None:
        super().__init__(why)
        self.error = error  # the code for the client (RFC 6750 section 3.1, RFC 9449 section 7.1)


@attrs.frozen
class AccessToken:
    """What a good access token says."""

    # `issuer`, `subject`: who gave it, and to act for whom
    issuer: str
    subject: str
    client_id: str | None  # the client it was given to, or None
    scopes: tuple[str, ...]  # what it is good for
    expires_at: float  # seconds since 1970
    key: str | None = None  # the thumbprint of the key it is bound to (`cnf.jkt`), or None
    certificate: str | None = None  # the digest of the certificate it is bound to (`cnf.x5t#S256`), or None
    claims: Mapping[str, Any] = attrs.field(factory=lambda: MappingProxyType({}), repr=False)  # all that it says


def unverified(token: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header and the claims of a JWT, which nobody has checked yet. Raises BadToken: it is none."""
    parts = token.split(".")
    if len(token) > _MAX_TOKEN or len(parts) != 3:
        raise BadToken("the token is not a JWT")
    try:
        header, claims = [json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))) for part in parts[:2]]
    except (ValueError, RecursionError):
        raise BadToken("the token is not a JWT") from None
    if not isinstance(header, dict) or not isinstance(claims, dict):
        raise BadToken("the token is not a JWT")
    return header, claims


def read_keys(body: bytes) -> dict[str, Key]:
    """Return the keys of a JWK set (RFC 7517 section 5), by their id; those that cannot be used are left out.

    Secret keys are left out, too: who publishes one has made a mistake, and a public key taken for a secret one is an
    attack. Raises ValueError: it is no such set, or holds more than 100 keys.
    """
    keys = (json_object(body) or {}).get("keys")
    if not isinstance(keys, list) or len(keys) > _MAX_KEYS:
        raise ValueError(f"it is no JWK set, or has more than {_MAX_KEYS} keys")
    found: dict[str, Key] = {}
    for number, jwk in enumerate(keys):
        kind = _PUBLIC.get(str(jwk.get("kty"))) if isinstance(jwk, dict) else None
        if kind is None or jwk.get("use", "sig") != "sig":
            continue
        public = {name: value for name, value in jwk.items() if name not in ("d", "p", "q", "dp", "dq", "qi", "oth")}
        try:
            key = kind.import_key(public)
        except (JoseError, ValueError, TypeError, KeyError):
            continue
        kid = jwk.get("kid")
        found[kid if isinstance(kid, str) else f"\0{number}"] = key
    return found


def key_for(keys: Mapping[str, Key], header: Mapping[str, Any]) -> Key | None:
    """Return the key that a header names, or the only one that fits where it names none; None if there is none."""
    algorithm, kid = header.get("alg"), header.get("kid")
    if isinstance(kid, str):
        found = [keys[kid]] if kid in keys else []
    else:
        found = [key for key in keys.values() if _fits(key, str(algorithm))]
    return found[0] if len(found) == 1 and _fits(found[0], str(algorithm)) else None


def _fits(key: Key, algorithm: str) -> bool:
    """Return whether a key is one for an algorithm: a public key is never taken for a shared secret."""
    kind = _KINDS.get(algorithm[:2])
    if kind is None or not isinstance(key, kind):
        return False
    said = key.get("alg")
    if said is not None and said != algorithm:
        return False
    return not isinstance(key, ECKey) or key.curve_name == _CURVES.get(algorithm)


@attrs.frozen
class TokenRules:
    """What an access token has to be."""

    issuers: Sequence[str]  # who may have given it
    audiences: Sequence[str]  # for whom it may be; one of them is enough
    algorithms: Sequence[str] = ASYMMETRIC  # of its signature
    skew: float = 30.0  # seconds by which clocks may differ
    # whether `typ` need not be "at+jwt" (RFC 9068 section 2.1), as many issuers leave it. Then an ID token for the same
    # audience would pass, too.
    any_type: bool = False

    def issuer_of(self, header: Mapping[str, Any], claims: Mapping[str, Any]) -> str:
        """Return who says to have given a token, before its signature is checked.

        Raises BadToken: whoever gave it, it is not good.
        """
        kind = header.get("typ")
        if header.get("alg") not in self.algorithms:
            raise BadToken("the token's algorithm is not allowed")
        if "crit" in header:
            raise BadToken("the token has critical extensions that are not known here")
        if not self.any_type and (not isinstance(kind, str) or kind.lower() not in _TYPES):
            raise BadToken("the token is no access token (typ)")
        return self._issuer_in(claims)

    def _issuer_in(self, claims: Mapping[str, Any]) -> str:
        """Return the issuer that claims name, as it is called here."""
        said = claims.get("iss")
        if isinstance(said, str):
            for issuer in self.issuers:
                if same_issuer(issuer, said):
                    return issuer
        raise BadToken("the token is from another issuer")

    def judge(self, token: str, key: Key, now: float) -> AccessToken:
        """Check a token's signature and what it says. Raises BadToken: it is not good."""
        try:
            found = jws.deserialize_compact(token, key, algorithms=list(self.algorithms))
            claims = json.loads(found.payload)
        except (JoseError, ValueError, TypeError, RecursionError):
            raise BadToken("the token's signature is not good") from None
        return self.judge_claims(claims, now)

    def judge_claims(self, claims: Mapping[str, Any], now: float) -> AccessToken:
        """Check what a token says that is known to be its issuer's. Raises BadToken: it is not good."""
        issuer, subject, audience = self._issuer_in(claims), claims.get("sub"), claims.get("aud")
        audiences = audience if isinstance(audience, list) else [audience]
        if not any(isinstance(one, str) and one in self.audiences for one in audiences):
            raise BadToken("the token is for another audience")
        expires = _seconds(claims, "exp")
        if expires is None or now - self.skew >= expires:
            raise BadToken("the token has expired")
        for name, why in (("nbf", "the token is not good yet"), ("iat", "the token is from the future")):
            begins = _seconds(claims, name)
            if begins is not None and begins > now + self.skew:
                raise BadToken(why)
        client = claims.get("client_id", claims.get("azp"))
        subject = client if subject is None else subject  # a program that is a user of its own
        if not is_text(subject) or not subject:
            raise BadToken("the token does not say for whom it acts")
        bound = claims.get("cnf")
        bound = bound if isinstance(bound, dict) else {}
        if bound and not (bound.keys() & {"jkt", "x5t#S256"}):
            raise BadToken("the token is bound in a way that is not known here")
        return AccessToken(
            issuer,
            subject,
            client if is_text(client) else None,
            scopes_in(claims),
            expires,
            _text(bound, "jkt"),
            _text(bound, "x5t#S256"),
            MappingProxyType(dict(claims)),
        )


def scopes_in(claims: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the scopes that claims name: `scope` as text (RFC 8693), or a list, which some call `scp`."""
    return texts_in(claims.get("scope", claims.get("scp")))


def _seconds(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not abs(value) < 1e15:
        raise BadToken(f"the token's {name} is no time")
    return float(value)


def _text(bound: Mapping[str, Any], name: str) -> str | None:
    value = bound.get(name)
    if value is not None and not isinstance(value, str):
        raise BadToken("the token is bound in a way that is not known here")
    return value


# Proofs

USED: Final = "the proof was used before"


@attrs.define(eq=False)
class Replays:
    """Remembers which proofs were used, for as long as they would be good: at most `most` of them.

    When it is full the oldest goes, and with it all proofs of its key that are no younger: none of them is taken any
    more. So nobody makes another's proof good again by sending many of their own, and who sends that many can go on, as
    long as their clock does. Of so many keys that even this cannot be remembered of each, it holds for all.
    """

    most: int = 100_000
    _used: OrderedDict[bytes, tuple[str, float, float]] = attrs.field(init=False, factory=OrderedDict)
    _floors: OrderedDict[str, float] = attrs.field(init=False, factory=OrderedDict)
    _floor: float = attrs.field(init=False, default=-math.inf)

    def first_use(self, key: str, id: str, issued: float, now: float) -> bool:
        """Note a proof; return whether it is good for the first time."""
        used, floors = self._used, self._floors
        while used and ((entry := next(iter(used.values())))[2] <= now or len(used) >= self.most):
            used.popitem(last=False)
            if entry[2] > now:
                floors[entry[0]] = max(entry[1], floors.get(entry[0], -math.inf))
                floors.move_to_end(entry[0])
        while floors and ((floor := next(iter(floors.values()))) < now - PROOF_SECONDS or len(floors) > self.most):
            floors.popitem(last=False)
            if floor >= now - PROOF_SECONDS:
                self._floor = max(self._floor, floor)
        mark = hashlib.sha256(f"{key} {id}".encode("utf-8", "surrogatepass")).digest()[:16]
        if mark in used or issued <= max(self._floor, floors.get(key, -math.inf)):
            return False
        used[mark] = key, issued, now + 2 * PROOF_SECONDS
        return True


def check_proof(
    proof: str,
    *,
    method: str,
    url: str,
    token: str,
    key: str,
    now: float,
    replays: Replays,
    nonce: Callable[[object], bool] | None = None,
) -> str:
    """Check that whoever sends a token has the key it is bound to (RFC 9449 section 4.3), and return its proof's id.

    Raises BadToken if not. `url` is that of the request without query; `nonce` tells whether the proof's nonce is good;
    None asks for none.
    """

    def bad(why: str, error: str = "invalid_dpop_proof") -> BadToken:
        return BadToken(why, error)

    try:
        header, claims = unverified(proof)
    except BadToken:
        raise bad("the proof is not a JWT") from None
    jwk, algorithm = header.get("jwk"), str(header.get("alg"))
    if header.get("typ") != "dpop+jwt" or algorithm not in ASYMMETRIC or not isinstance(jwk, dict):
        raise bad("the proof is not one of DPoP (typ), or its algorithm is not allowed")
    if jwk.keys() & {"d", "p", "q", "dp", "dq", "qi", "k", "oth"}:
        raise bad("the proof shows a private key")
    try:
        public = _PUBLIC[str(jwk.get("kty"))].import_key(jwk)
        if not _fits(public, algorithm):
            raise ValueError
        thumbprint: str = public.thumbprint()
        # Before its signature is checked: how long that takes is up to whoever chose the key.
        if not _equal(thumbprint, key):
            raise bad("the proof is by another key than the token's", "invalid_token")
        jws.deserialize_compact(proof, public, algorithms=[algorithm])
    except (JoseError, ValueError, TypeError, KeyError):
        raise bad("the proof's signature is not good") from None
    id, issued, theirs = claims.get("jti"), claims.get("iat"), claims.get("ath")
    if claims.get("htm") != method or not isinstance(claims.get("htu"), str) or not _same(claims["htu"], url):
        raise bad("the proof is for another request")
    if not isinstance(theirs, str) or not _equal(theirs, hash_of(token)):
        raise bad("the proof is for another token")
    if not isinstance(id, str) or not 0 < len(id) <= 256:
        raise bad("the proof has no id of its own")
    if nonce is not None and not nonce(claims.get("nonce")):
        raise bad("the proof lacks a nonce of ours", "use_dpop_nonce")
    if not isinstance(issued, int | float) or not now - PROOF_SECONDS <= issued <= now + PROOF_SECONDS:
        raise bad("the proof is too old, or from the future")
    if not replays.first_use(thumbprint, id, issued, now):
        raise bad(USED)
    return id


def _equal(one: str, other: str) -> bool:
    """Return whether two texts are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(one.encode("utf-8", "surrogatepass"), other.encode("utf-8", "surrogatepass"))


def _same(one: str, other: str) -> bool:
    try:
        return canonical_url(one) == canonical_url(other)
    except ValueError:
        return False
