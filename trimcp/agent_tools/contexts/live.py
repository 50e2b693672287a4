"""The contexts in memory, by owner: how many each owner may have, and which gives way to a newcomer's.

Also their ids: which are valid, which the service gives out, and which have ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs

from trimcp.agent_tools.callers import Owner
from trimcp.agent_tools.contexts.actor import ContextActor, ContextsShared
from trimcp.agent_tools.contexts.history import ToolHistory
from trimcp.agent_tools.contexts.merging import StateSize
from trimcp.agent_tools.contexts.state import ContextLimits, ContextShare, ShareKey, StatesShared, memory_of
from trimcp.agent_tools.contexts.stores import ContextKey
from trimcp.agent_tools.messages.errors import MalformedMessage, TooMuch
from trimcp.budget import Budget
from trimcp.security import security_event
from trimcp.transports.http.peers.shares import Shares
from trimcp.transports.http.state.deadlines import DeadlineQueue, Deadlines

_MINTED: Final = "ctx_"
_RANDOM: Final = 16  # bytes of a minted id
_MINTED_LENGTH: Final = len(_MINTED) + 22  # as text
_LONGEST: Final = 256


def new_id() -> str:
    """Return an id that nobody can guess."""
    return _MINTED + secrets.token_urlsafe(_RANDOM)


def is_minted(id: str) -> bool:
    """Return whether an id has the form of those that the service gives out."""
    return len(id) == _MINTED_LENGTH and id.startswith(_MINTED)


def is_id(id: str) -> bool:
    """Return whether this can be an id."""
    return 0 < len(id) <= _LONGEST and id.isprintable()


def checked_id(id: str, *, new: bool = False) -> str:
    """Return an id that an agent chose. Raises MalformedMessage, for a `new` one also if only we give it out."""
    if not is_id(id):
        raise MalformedMessage(f"a context's id is 1 to {_LONGEST} printable characters")
    if new and is_minted(id):
        raise MalformedMessage(f"ids that begin with {_MINTED} are given by the service")
    return id


@attrs.define(eq=False, repr=False)
class _EndedId:
    """The id of a context that has ended, and why it did."""

    ids: EndedIds
    key: ContextKey
    reason: str

    def timed_out(self) -> None:
        self.ids.forget(self.key)


class EndedIds:
    """The ids of contexts that have ended, and why, for the time and up to the number that the limits say."""

    def __init__(self, limits: ContextLimits, deadlines: Deadlines) -> None:
        self._limits = limits
        self._found: dict[ContextKey, _EndedId] = {}  # the oldest first
        self._queue = DeadlineQueue(deadlines, limits.gone)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, key: ContextKey, reason: str) -> None:
        """Remember an id, in place of the oldest if there are too many."""
        limits = self._limits
        if not limits.gone or not limits.max_gone:
            return
        self.forget(key)
        while len(self._found) >= limits.max_gone:
            self.forget(next(iter(self._found)))
        ended = self._found[key] = _EndedId(self, key, reason)
        self._queue.add(ended)

    def forget(self, key: ContextKey) -> None:
        """Forget an id; no effect if it is not known."""
        ended = self._found.pop(key, None)
        if ended is not None:
            self._queue.remove(ended)

    def why(self, key: ContextKey) -> str | None:
        """Return why a context has ended, or None if its id is not known."""
        ended = self._found.get(key)
        return None if ended is None else ended.reason

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()


_EACH: Final = 2_048  # bytes of memory that an idle context takes beside its state and history
_LATER: Final = 60.0  # seconds after which an owner with too many contexts may try again


class LiveContexts:
    """All contexts of one run that are in memory and have not ended; and the shares of those that are ending."""

    def __init__(self, states: StatesShared, budget: Budget, end: Callable[[ContextActor, str], object]) -> None:
        self._states = states
        self._limits = states.limits
        self._budget = budget
        self.by_owner: dict[Owner, dict[str, ContextActor]] = {}  # the contexts of each owner, by id
        # Whose they are, for who gives way.
        self.shares: Shares[ContextActor] = Shares(owner_of=lambda actor: actor.share.key[0])
        self.shared: ContextsShared = ContextsShared(states.limits, end, self.shares)
        self._by_share: dict[ShareKey, ContextShare] = {}  # by budget owner and agent
        self._count = 0

    def __iter__(self) -> Iterator[ContextActor]:
        return iter([actor for contexts in self.by_owner.values() for actor in contexts.values()])

    def find(self, owner: Owner, id: str) -> ContextActor | None:
        """Return a context, or None."""
        contexts = self.by_owner.get(owner)
        return None if contexts is None else contexts.get(id)

    def make_room(self, owner: Owner, key: ShareKey, stored: Mapping[Owner, int]) -> ContextActor | None:
        """Return the context that has to end for a newcomer's, or None if there is room.

        `stored` says how many each owner has that are not in memory. Raises TooMuch if the owner has too many, or all
        have and none gives way.
        """
        limits, share = self._limits, self._by_share.get(key)
        # Of what a store kept of callers without a principal nobody knows the addresses.
        own = (0 if share is None else share.live) + (stored.get(owner, 0) if owner[0] else 0)
        if own >= limits.max_per_owner:
            raise TooMuch(f"you may have {limits.max_per_owner:,} contexts", retry_after=_LATER)
        if self._count + sum(stored.values()) < limits.max_contexts:
            return None
        found = self.shares.make_room(key[0], "context")
        if found is None:
            security_event("flood_refused", what="context", owner=key[0], why="contexts")
            raise TooMuch("there are too many contexts", retry_after=_LATER)
        return found

    def add(
        self,
        owner: Owner,
        id: str,
        state: dict[str, Any],
        size: StateSize,
        key: ShareKey,
        ends: float,
        created: float,
        version: int = 0,
        history: ToolHistory | None = None,
    ) -> ContextActor:
        """Add a context, to be found by its owner and id. Raises TooMuch if there is no memory for it."""
        memory = _EACH + memory_of(size) + (0 if history is None else history.held)
        share = self._share(key, memory)
        of = (owner, id, self._states, share, state, size, ends, created, version, history, self.shared)
        actor = ContextActor(*of)
        actor.hold(memory)
        self.by_owner.setdefault(owner, {})[id] = actor
        share.live += 1
        self.shares.add(actor)
        self._count += 1
        return actor

    def _share(self, key: ShareKey, memory: int) -> ContextShare:
        share = self._by_share.get(key)
        holding = self._budget.holding(key[0]) if share is None else share.holding
        if not holding.fits(memory):
            holding.refuse("context")
            if share is None:
                holding.close()
            raise TooMuch("the server has no memory for another context", retry_after=_LATER)
        if share is None:
            share = self._by_share[key] = ContextShare(key, holding)
        return share

    def end(self, actor: ContextActor) -> None:
        """Remove a context that is ending: it counts into its share until `forget`."""
        contexts = self.by_owner[actor.owner]
        del contexts[actor.id]
        if not contexts:
            del self.by_owner[actor.owner]
        self._count -= 1
        actor.share.live -= 1
        actor.share.ending += 1
        self.shares.remove(actor)

    def forget(self, actor: ContextActor) -> None:
        """Count an ending context no more: it is gone."""
        share = actor.share
        share.ending -= 1
        if not share.live and not share.ending:
            del self._by_share[share.key]
            share.holding.close()

    @property
    def bytes(self) -> int:
        """Memory counted for all."""
        return sum(share.holding.held for share in self._by_share.values())
