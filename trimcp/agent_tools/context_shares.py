"""Whose share of all contexts one counts into, and which of them was never used and can end for a newcomer's."""

from __future__ import annotations

from typing import Generic, Protocol, TypeAlias, TypeVar

import attrs

from trimcp.agent_tools.callers import Owner
from trimcp.budget import Holding, owner_of

ShareKey: TypeAlias = tuple[str, str]
"""The owner as the budget names it, and the agent."""


class Shareable(Protocol):
    """A context, to its share."""

    fresh: bool

    @property
    def ended(self) -> str | None: ...


ContextT = TypeVar("ContextT", bound=Shareable)


@attrs.define(eq=False, repr=False)
class ContextShare(Generic[ContextT]):
    """The contexts of one principal and agent, or without a principal of one address.

    Attributes:
        key: whose it is.
        holding: counts their memory.
        live, ending: how many there are.
        fresh: those that were never used, as far as it is known, the oldest first.
    """

    key: ShareKey
    holding: Holding
    live: int = 0
    ending: int = 0
    fresh: dict[ContextT, None] = attrs.field(factory=dict)

    def never_used(self) -> ContextT | None:
        """Return the oldest context that nobody has used since it was made, or None."""
        while self.fresh:
            context = next(iter(self.fresh))
            if context.fresh and context.ended is None:
                return context
            del self.fresh[context]
        return None


def share_of(owner: Owner, address: str | None) -> ShareKey:
    """Return whose share a context counts into: it is in the budget with all else of that principal or address."""
    principal, agent = owner
    return owner_of(principal or None, address), agent
