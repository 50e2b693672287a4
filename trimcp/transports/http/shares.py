"""Counts who holds how much of what is limited, and says what gives way to a newcomer once all of it is taken.

One client must not fill a table for everybody. So what was never used gives way to any newcomer: the oldest first, of
whoever holds most first; everything else only to a newcomer that holds far less. While there is room nothing does.
`trimcp.budget` says who is who.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, Generic, Protocol, TypeVar

import attrs

from trimcp.cleaning import digest
from trimcp.principal import Principal
from trimcp.security import security_event

FAR: Final = 16
"""How many times as much as a newcomer somebody has to hold to give way with what is at work."""

# How many are looked at for one newcomer: its cost does not grow with the table.
_OWNERS: Final = 16
_ITEMS: Final = 64


class Owned(Protocol):
    """What counts into somebody's share."""

    owner: str

    @property
    def idle(self) -> bool: ...


T = TypeVar("T", bound=Owned)


@attrs.define(eq=False)
class _Share(Generic[T]):
    """What one owner holds, the oldest first."""

    fresh: dict[T, None] = attrs.field(factory=dict)
    used: dict[T, None] = attrs.field(factory=dict)
    count: int = 0


@attrs.define(eq=False)
class Shares(Generic[T]):
    """Everything of one kind, by owner.

    Args:
        much: how many times as much as a newcomer somebody has to hold to give way with what was used, but is idle.
    """

    much: int = FAR
    _shares: dict[str, _Share[T]] = attrs.field(init=False, factory=dict)
    _by_count: dict[int, dict[str, None]] = attrs.field(init=False, factory=dict)

    def held(self, owner: str) -> int:
        share = self._shares.get(owner)
        return 0 if share is None else share.count

    def add(self, item: T, *, used: bool = False) -> None:
        owner = item.owner
        if owner in self._shares:
            share = self._shares[owner]
        else:
            share = self._shares[owner] = _Share()
        (share.used if used else share.fresh)[item] = None
        self._count(owner, share, share.count + 1)

    def use(self, item: T) -> None:
        """Note that it was used for the first time."""
        share = self._shares[item.owner]
        if item in share.fresh:
            del share.fresh[item]
            share.used[item] = None

    def remove(self, item: T) -> None:
        """Count it no longer, if it was."""
        owner = item.owner
        if owner not in self._shares:
            return
        share = self._shares[owner]
        if item in share.fresh:
            del share.fresh[item]
        elif item in share.used:
            del share.used[item]
        else:
            return
        self._count(owner, share, share.count - 1)

    def _count(self, owner: str, share: _Share[T], now: int) -> None:
        """Store how much an owner holds now."""
        by_count, before = self._by_count, share.count
        share.count = now
        if before:
            kin = by_count[before]
            del kin[owner]
            if not kin:
                del by_count[before]
        if not now:
            del self._shares[owner]
        elif now in by_count:
            by_count[now][owner] = None
        else:
            by_count[now] = {owner: None}

    def giving_way(self, newcomer: str) -> T | None:
        """Return what has to give way to something new of `newcomer`, or None: then there is no room for it.

        It costs the same however much there is.
        """
        own = self.held(newcomer)
        for count, owner in list(islice(self._from_most(own), _OWNERS)):
            found = self._yielded(self._shares[owner], count // (own + 1))
            if found is not None:
                return found
            self._by_count[count][owner] = self._by_count[count].pop(owner)  # others are looked at next time
        share = self._shares.get(newcomer)
        return None if share is None else next(iter(share.fresh), None)

    def make_way(self, newcomer: str, what: str) -> T | None:
        """Take out and report what `giving_way` returns; the caller ends it."""
        other = self.giving_way(newcomer)
        if other is not None:
            held = self.held(other.owner)
            security_event("gave_way", what=what, owner=other.owner, held=held, idle=other.idle)
            self.remove(other)
        return other

    def _from_most(self, own: int) -> Iterator[tuple[int, str]]:
        """Yield who holds more than that, those who hold most first."""
        for count in sorted(self._by_count, reverse=True):
            if count <= own:
                return
            for owner in self._by_count[count]:
                yield count, owner

    def _yielded(self, share: _Share[T], times: int) -> T | None:
        """Return what gives way in a share to a newcomer that holds so many times less."""
        for item in share.fresh:
            return item
        if times < self.much:
            return None
        used = share.used
        for item in list(islice(used, _ITEMS)):
            if item.idle:
                return item
            used[item] = used.pop(item)  # others are looked at next time
        return next(iter(used), None) if times >= FAR else None


class Tabled(Owned, Protocol):
    """What a client holds open and names by an id."""

    id: str  # what the client sends to name it; secret
    principal: Principal | None  # whose it is
    fresh: bool  # whether it was never used

    def end(self, why: str) -> None:
        """End it, and remove it from its table."""


S = TypeVar("S", bound=Tabled)


@attrs.define(eq=False)
class Table(Generic[S]):
    """What clients hold open at a face, by id: so much, and when all of it is taken, `Shares` says what gives way."""

    what: str  # what one is called in the security log
    most: int  # how many there may be
    _found: dict[str, S] = attrs.field(init=False, factory=dict)
    _shares: Shares[S] = attrs.field(init=False, factory=Shares)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._found.values()))

    def has_room(self, owner: str) -> bool:
        """Return whether there may be one more of this owner's, after another was ended for it if need be."""
        if len(self._found) < self.most:
            return True
        other = self._shares.giving_way(owner)
        if other is None:
            return False
        held, id = self._shares.held(other.owner), digest(other.id)
        security_event("gave_way", what=self.what, owner=other.owner, held=held, session=id, used=not other.fresh)
        other.end("there are too many sessions")
        return True

    def add(self, item: S) -> None:
        """Let it be found by its id."""
        self._found[item.id] = item
        self._shares.add(item)

    def use(self, item: S) -> None:
        """Note that it was used: it gives way later than what never was."""
        item.fresh = False
        self._shares.use(item)

    def find(self, id: str, principal: Principal | None) -> S | None:
        """Return what this principal has under an id; what is another's is not there."""
        item = self._found.get(id)
        if item is not None and item.principal != principal:
            security_event("foreign_session", session=digest(id), owner=item.principal, principal=principal)
            return None
        return item

    def remove(self, item: S) -> None:
        """Let it be found no longer."""
        self._found.pop(item.id, None)
        self._shares.remove(item)
