"""What a client keeps of a login: how it is registered, its tokens, and the key they are bound to."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import attrs
import cattrs

from trimcp.auth.metadata import canonical_url, is_text

_LATEST: Final = 1e12  # seconds since 1970
_KINDS: Final = ("bearer", "dpop")


def _strictly(kind: type[Any]) -> Callable[[Any, Any], Any]:
    """Return a hook that takes what it is, and nothing that could be turned into it."""

    def structure(value: Any, _: Any) -> Any:
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise TypeError
        if kind is str and not is_text(value):
            raise ValueError
        if isinstance(value, int | float) and not abs(value) < _LATEST:  # no infinity, and no number that is none
            raise ValueError
        return kind(value)

    return structure


def _texts(value: Any, _: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(map(is_text, value)):
        raise TypeError
    return tuple(value)


_converter = cattrs.Converter(omit_if_default=True)
for _kind in (str, float, bool):
    _converter.register_structure_hook(_kind, _strictly(_kind))
_converter.register_structure_hook_func(lambda kind: kind == tuple[str, ...], _texts)


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
            found = _converter.structure(json.loads(text), cls)
            if (tokens := found.tokens) is None or (sendable(tokens.access_token) and tokens.token_type in _KINDS):
                return found
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, cattrs.BaseValidationError):
            pass
        raise ValueError("these are no credentials that trimcp kept")


def sendable(token: str) -> bool:
    """Return whether a text can be sent as an access token, in a header."""
    return bool(token) and token.isascii() and token.isprintable()
