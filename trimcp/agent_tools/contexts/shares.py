"""Whose share of all contexts one counts into."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from trimcp.agent_tools.callers import Owner
from trimcp.budget.accounts import Holding
from trimcp.budget.owners import owner_of

ShareKey: TypeAlias = tuple[str, str]
"""The owner as the budget names it, and the agent."""


@attrs.define(eq=False, repr=False)
class ContextShare:
    """The contexts of one principal and agent, or without a principal of one address.

    Attributes:
        live, ending: how many there are.
    """

    key: ShareKey  # whose it is
    holding: Holding  # counts their memory
    live: int = 0
    ending: int = 0


def share_of(owner: Owner, address: str | None) -> ShareKey:
    """Return whose share a context counts into: it is in the budget with all else of that principal or address."""
    principal, agent = owner
    return owner_of(principal or None, address), agent
