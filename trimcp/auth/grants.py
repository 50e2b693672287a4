"""What a client has to show for a token: the grants of OAuth 2.1 and of the extensions of the specification."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import attrs

from trimcp.auth.jose import SigningKey

Assertion: TypeAlias = Callable[[str], str | Awaitable[str]]
"""Returns a JWT for the issuer it is given, or raises; sync or async."""


@attrs.frozen
class AuthorizationCode:
    """A person logs in with a browser (OAuth 2.1 section 4.1, with PKCE).

    Attributes:
        client_id: what the client is registered as, or None.
        client_secret: its secret, or None for a public client.
        issuer: who registered it; it is shown to no other. None for whichever the server names.
        metadata_url: the URL of a document about the client, used as its id where that is supported (CIMD).
        client_name: what a person is told when the client registers itself.
        signing_key: by which the client tells who it is, instead of a secret.
    """

    client_id: str | None = None
    client_secret: str | None = attrs.field(default=None, repr=False)
    issuer: str | None = None
    metadata_url: str | None = None
    client_name: str = "trimcp"
    signing_key: SigningKey | None = attrs.field(default=None, repr=False)


@attrs.frozen
class ClientCredentials:
    """A program that is a user of its own, with a secret or a key (extension "OAuth Client Credentials").

    Attributes:
        client_id: what it is registered as.
        client_secret: its secret.
        signing_key: a key in place of a secret, which is better: it never leaves.
        issuer: who registered it; None for whichever the server names.
    """

    client_id: str
    client_secret: str | None = attrs.field(default=None, repr=False)
    signing_key: SigningKey | None = attrs.field(default=None, repr=False)
    issuer: str | None = None


@attrs.frozen
class JwtBearer:
    """A program whose platform says who it is, by a JWT (RFC 7523 section 2.1; workload identity federation).

    Attributes:
        assertion: returns such a JWT for an issuer; may be async.
        client_id: what it is registered as, or None.
        issuer: whom the assertion is shown to; None for whichever the server names.
    """

    assertion: Assertion = attrs.field(repr=False)
    client_id: str | None = None
    issuer: str | None = None


@attrs.frozen
class EnterpriseManaged:
    """An employee who has logged in to the company (extension "Enterprise-Managed Authorization").

    Attributes:
        client_id, client_secret: what the client is registered as at the server's authorization server.
        idp_token_endpoint: where the company's identity provider exchanges tokens.
        idp_client_id: what the client is registered as there.
        idp_client_secret: its secret there, or None.
        id_token: returns the person's ID token for the identity provider's endpoint; may be async.
        issuer: the server's authorization server; None for whichever the server names.
    """

    client_id: str
    client_secret: str = attrs.field(repr=False)
    idp_token_endpoint: str
    idp_client_id: str
    id_token: Assertion = attrs.field(repr=False)
    idp_client_secret: str | None = attrs.field(default=None, repr=False)
    issuer: str | None = None


Grant: TypeAlias = AuthorizationCode | ClientCredentials | JwtBearer | EnterpriseManaged
"""What a client has to show for a token, by one of the ways above."""
