"""What a client keeps of a login: how it is registered, its tokens, and the key they are bound to."""

from __future__ import annotations

import json
from typing import Any

import attrs
import cattrs

from trimcp.auth.metadata import canonical_url

_converter = cattrs.Converter(omit_if_default=True)


@attrs.frozen
class StoreKey:
    """What credentials are kept under: nobody else gets them.

    Attributes:
        resource: the server, a canonical URL.
        identity: whose login it is, where there are several for one server.
    """

    resource: str = attrs.field(converter=canonical_url)
    identity: str = ""

    def __str__(self) -> str:
        return f"{self.resource} as {self.identity}" if self.identity else self.resource


@attrs.frozen
class Registration:
    """What an authorization server knows this client as. It means nothing to any other (SEP-2352).

    Attributes:
        client_id: its name there.
        client_secret: its secret, or None for a public client.
        auth_method: how it tells who it is (`token_endpoint_auth_method`); None to choose by what is supported.
        redirect_uri: what was registered with it, or None.
        expires_at: seconds since 1970 at which the secret ends, or None.
        scopes: what it may ask for; None where that is not known to be limited.
    """

    client_id: str
    client_secret: str | None = attrs.field(default=None, repr=False)
    auth_method: str | None = None
    redirect_uri: str | None = None
    expires_at: float | None = None
    scopes: tuple[str, ...] | None = None


@attrs.frozen
class Tokens:
    """What a token endpoint gave (RFC 6749 section 5.1).

    Attributes:
        access_token: to be sent to the resource, and nowhere else.
        token_type: "bearer" or "dpop".
        scopes: what it is good for.
        expires_at: seconds since 1970, or None where nothing was said.
        lifetime: seconds it was good for when it was given, or None.
        refresh_token: to get the next one with, or None.
    """

    access_token: str = attrs.field(repr=False)
    token_type: str = "bearer"
    scopes: tuple[str, ...] = ()
    expires_at: float | None = None
    lifetime: float | None = None
    refresh_token: str | None = attrs.field(default=None, repr=False)

    def expired(self, now: float, early: float = 0.0) -> bool:
        """Return whether it is over at `now`, or will be `early` seconds later."""
        return self.expires_at is not None and now + early >= self.expires_at

    def due(self, now: float) -> bool:
        """Return whether it is time to get the next one: with a minute or a tenth of its time left."""
        early = 60.0 if self.lifetime is None else min(60.0, self.lifetime / 10)
        return self.expired(now, early)


@attrs.frozen
class Credentials:
    """A login as it is kept, tied to the issuer that gave it and the resource it is for.

    Attributes:
        resource: what the tokens are for (RFC 8707).
        issuer: who gave them.
        registration: what the client is known as there.
        tokens: the newest ones, or None: registered, not logged in.
        asked: every scope that was asked for so far.
        proof_key: the private key that the tokens are bound to, as a JWK, or None. Secret.
        names_resource: whether the authorization server was told the resource.
        found_at: where the issuer's metadata lies, if not at its own address.
    """

    resource: str
    issuer: str
    registration: Registration
    tokens: Tokens | None = None
    asked: tuple[str, ...] = ()
    proof_key: dict[str, Any] | None = attrs.field(default=None, repr=False)
    names_resource: bool = True
    found_at: str | None = None

    @property
    def bound(self) -> bool:
        """Whether its tokens are good only with the key."""
        return self.tokens is not None and self.tokens.token_type == "dpop"

    def to_json(self) -> str:
        """Return it as text. Secret."""
        return json.dumps(_converter.unstructure(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Credentials:
        """Return what was kept as text.

        Raises:
            ValueError: it is no such text. It does not quote it.
        """
        try:
            return _converter.structure(json.loads(text), cls)
        except (ValueError, TypeError, KeyError, RecursionError, cattrs.BaseValidationError):
            raise ValueError("these are no credentials that trimcp kept") from None
