"""JSON Web Tokens that a client signs: proofs that it has a key, and assertions of who it is.

RFC 9449 (DPoP), RFC 7523 (assertions). Signing is joserfc's.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, OKPKey, RSAKey

from trimcp.auth.metadata import origin_of

_PROOF: Final = "dpop+jwt"
_CURVES: Final = {"P-256": "ES256", "P-384": "ES384", "P-521": "ES512"}
_ASSERTION_SECONDS: Final = 60
_MEMBERS: Final = ("kty", "crv", "x", "y", "d")


def hash_of(text: str) -> str:
    """Return what ties a proof to an access token (`ath`; RFC 9449 section 4.2), or a code to its verifier."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode("ascii")).digest()).rstrip(b"=").decode()


@attrs.frozen
class ProofKey:
    """A key of our own that tokens are bound to: only who has it can use them (RFC 9449)."""

    _key: ECKey = attrs.field(repr=False)
    # what each server last wanted to see in a proof, by origin
    nonces: dict[str, str] = attrs.field(factory=dict, repr=False)
    now: Callable[[], float] = attrs.field(default=time.time, repr=False)

    @classmethod
    def generate(cls) -> ProofKey:
        """Return a new key (ES256)."""
        return cls(ECKey.generate_key("P-256"))

    @classmethod
    def from_jwk(cls, jwk: dict[str, Any] | None) -> ProofKey:
        """Return a key that was kept. Raises ValueError: it is no such key."""
        try:
            # What else it says of itself is left out: what it may be used for, by somebody else's rules.
            key = None if jwk is None else ECKey.import_key({name: jwk[name] for name in _MEMBERS if name in jwk})
        except (JoseError, ValueError, TypeError, KeyError):
            key = None
        if key is None or not key.is_private or key.curve_name != "P-256":
            raise ValueError("the kept key is no private key on P-256")
        return cls(key)

    @property
    def jwk(self) -> dict[str, Any]:
        """The private key, as it is kept. Secret."""
        return dict(self._key.as_dict(private=True))

    @property
    def thumbprint(self) -> str:
        """What tokens name the key by (RFC 7638)."""
        return self._key.thumbprint()

    def proof(self, method: str, url: str, token: str | None = None) -> str:
        """Return a proof for one request, sent beside `token` if there is one; each may be used once."""
        claims = {
            "jti": secrets.token_urlsafe(16),
            "htm": method,
            "htu": urlsplit(url)._replace(query="", fragment="").geturl(),
            "iat": int(self.now()),
        }
        if token is not None:
            claims["ath"] = hash_of(token)
        if (nonce := self.nonces.get(origin_of(url))) is not None:
            claims["nonce"] = nonce
        header = {"alg": "ES256", "typ": _PROOF, "jwk": self._key.as_dict(private=False)}
        return jwt.encode(header, claims, self._key)


@attrs.frozen
class SigningKey:
    """A private key by which a client tells who it is (`private_key_jwt`; RFC 7523 section 2.2).

    Attributes:
        algorithm: the signature's, such as "ES256".
        key_id: its name in the client's published keys, or None.
    """

    _key: ECKey | RSAKey | OKPKey = attrs.field(repr=False)
    algorithm: str
    key_id: str | None = None

    @classmethod
    def from_pem(cls, pem: str | bytes, algorithm: str | None = None, key_id: str | None = None) -> SigningKey:
        """Return the key that a PEM text holds.

        Args:
            pem: a private key on a curve, RSA, or Ed25519.
            algorithm: by default what fits the key: ES256, ES384, ES512, RS256, EdDSA.
            key_id: its name in the client's published keys.

        Raises:
            ValueError: the text holds no private key. It does not quote the text.
        """
        for kind, fitting in ((ECKey, None), (RSAKey, "RS256"), (OKPKey, "EdDSA")):
            try:
                key = kind.import_key(pem)
            except (JoseError, ValueError, TypeError):
                continue
            if key.is_private:
                found = _CURVES.get(key.curve_name, "ES256") if isinstance(key, ECKey) else fitting
                return cls(key, algorithm or found or "", key_id)
        raise ValueError("this is no private key in PEM: a curve's, RSA or Ed25519")

    def assertion(self, client_id: str, audience: str, now: float) -> str:
        """Return an assertion that its bearer is this client, good for a minute.

        Args:
            client_id: the client.
            audience: the issuer that it is for.
            now: seconds since 1970.
        """
        claims = {
            "iss": client_id,
            "sub": client_id,
            "aud": audience,
            "jti": secrets.token_urlsafe(16),
            "iat": int(now),
            "exp": int(now) + _ASSERTION_SECONDS,
        }
        header = {"alg": self.algorithm, "typ": "JWT"}
        if self.key_id is not None:
            header["kid"] = self.key_id
        return jwt.encode(header, claims, self._key, algorithms=[self.algorithm])
