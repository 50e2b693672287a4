"""Who sends requests: an id, and what a token or the application knows about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any


class Principal(str):
    """Who sends requests. A `str`, its id, so it compares, sorts and logs as that; equal ids are equal principals.

    Attributes:
        claims: other facts about it, for the application.
        subject: the user it acts for, as named by the token's issuer; None without a token that names one.
        client_id: the authenticated client, or None.
        scopes: what it may do; None if no token says so, which means no restriction.
        expires_at: when its access ends, in seconds since 1970; None for never.
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
        """Return the principal with an id.

        Args:
            id: identifies it, the same in each of its requests. Not secret: it is written to logs.
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
        """Its id, as plain text."""
        return str(self)

    def facts(self) -> dict[str, Any]:
        """Return it as JSON values, without its claims. `Principal(**facts)` restores it."""
        return {
            "id": self.id,
            "subject": self.subject,
            "client_id": self.client_id,
            "scopes": None if self.scopes is None else sorted(self.scopes),
            "expires_at": self.expires_at,
        }

    def may(self, scopes: frozenset[str]) -> bool:
        """Return whether it has all of these scopes."""
        return self.scopes is None or scopes <= self.scopes
