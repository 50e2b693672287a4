"""Who asks: an id, with what a token or the application knows beside it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any


class Principal(str):
    """Who asks. It is the text of its id, so it compares, sorts and logs as that; two of one id are the same.

    Attributes:
        claims: what else is known about it, for the application.
        subject: for whom it acts, as its issuer calls them; None where no token says so.
        client_id: the client that was let in, or None.
        scopes: what it may do; None where no token says so, which restricts nothing.
        expires_at: seconds since 1970 until which it is let in, or None for no end.
    """

    claims: Mapping[str, Any]
    subject: str | None
    client_id: str | None
    scopes: frozenset[str] | None
    expires_at: float | None

    def __new__(
        cls,
        id: str,
        claims: Mapping[str, Any] = MappingProxyType({}),
        *,
        subject: str | None = None,
        client_id: str | None = None,
        scopes: Collection[str] | None = None,
        expires_at: float | None = None,
    ) -> Principal:
        """Return the principal of an id.

        Args:
            id: what tells this one from others, the same for each of its requests and not secret: it stands in logs.
            claims, subject, client_id, scopes, expires_at: see the attributes.

        Raises:
            ValueError: the id is empty.
        """
        if not id:
            raise ValueError("a principal has an id, by which its sessions are told from those of others")
        self = super().__new__(cls, id)
        self.claims = claims
        self.subject = subject
        self.client_id = client_id
        self.scopes = None if scopes is None else frozenset(scopes)
        self.expires_at = expires_at
        return self

    @property
    def id(self) -> str:
        """What tells this one from others."""
        return str(self)

    def facts(self) -> dict[str, Any]:
        """Return it as JSON values, from which `Principal(**facts)` makes it again, without its claims."""
        return {
            "id": self.id,
            "subject": self.subject,
            "client_id": self.client_id,
            "scopes": None if self.scopes is None else sorted(self.scopes),
            "expires_at": self.expires_at,
        }

    def may(self, scopes: frozenset[str]) -> bool:
        """Return whether it may do what needs these scopes."""
        return self.scopes is None or scopes <= self.scopes
