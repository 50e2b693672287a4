"""Counts how much each owner holds of a limited resource, and selects what is ended for a newcomer when it is full.

One client must not fill a table for all. So an item that was never used is ended for any newcomer: first those of the
owner that holds most, the oldest first. A used item is ended only if its owner holds far more than the newcomer.
Nothing is ended while there is room. `trimcp.budget` defines owners.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

import attrs

from trimcp.budget import Evictable
from trimcp.principal import Principal
from trimcp.security import security_event
from trimcp.support.cleaning import digest

FAR: Final = 16
"""How many times as much as the newcomer an owner must hold to lose an item with running work."""

# How many owners and items are checked for one newcomer, so that the cost does not grow with the table.
_OWNERS: Final = 16
_ITEMS: Final = 64
_CHECKED: Final = 256  # of `Places`, which only counts them


class Owned(Protocol):
    """An item that counts into an owner's share; its `owner` is a text, unless `Shares` is told another way."""

    @property
    def idle(self) -> bool: ...


T = TypeVar("T", bound=Owned)


@attrs.define(eq=False)
class _Share(Generic[T]):
    """The items of one owner, the oldest first."""

    fresh: dict[T, None] = attrs.field(factory=dict)
    used: dict[T, None] = attrs.field(factory=dict)
    count: int = 0


@attrs.define(eq=False)
class Shares(Generic[T]):
    """All items of one kind, by owner."""

    much: int = FAR  # how many times as much as the newcomer an owner must hold to lose a used, idle item
    owner_of: Callable[[T], str] = attrgetter("owner")  # returns the owner of an item
    total: int = attrs.field(init=False, default=0)  # how many there are
    _shares: dict[str, _Share[T]] = attrs.field(init=False, factory=dict)
    _by_count: dict[int, dict[str, None]] = attrs.field(init=False, factory=dict)

    def held(self, owner: str) -> int:
        share = self._shares.get(owner)
        return 0 if share is None else share.count

    def add(self, item: T, *, used: bool = False) -> None:
        owner = self.owner_of(item)
        if owner in self._shares:
            share = self._shares[owner]
        else:
            share = self._shares[owner] = _Share()
        (share.used if used else share.fresh)[item] = None
        self._count(owner, share, share.count + 1)

    def use(self, item: T) -> None:
        """Note that an item was used for the first time."""
        share = self._shares[self.owner_of(item)]
        if item in share.fresh:
            del share.fresh[item]
            share.used[item] = None

    def remove(self, item: T) -> None:
        """Stop counting an item; no effect if it is not counted."""
        owner = self.owner_of(item)
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
        self.total += now - before
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
        """Return the item to end for a new one of `newcomer`, or None if there is no room for it.

        The cost does not depend on the number of items.
        """
        own = self.held(newcomer)
        for count, owner in list(islice(self._largest_first(own), _OWNERS)):
            found = self._ended_first(self._shares[owner], count // (own + 1))
            if found is not None:
                return found
            self._by_count[count][owner] = self._by_count[count].pop(owner)  # check others next time
        share = self._shares.get(newcomer)
        return None if share is None else next(iter(share.fresh), None)

    def make_room(self, newcomer: str, what: str) -> T | None:
        """Remove and log the item that `giving_way` returns; the caller ends it."""
        other = self.giving_way(newcomer)
        if other is not None:
            owner = self.owner_of(other)
            security_event("gave_way", what=what, owner=owner, held=self.held(owner), **self.logged(other))
            self.remove(other)
        return other

    def logged(self, item: T) -> dict[str, object]:
        """Return what the security log says of an item that is ended for a newcomer."""
        return {"idle": item.idle}

    def _largest_first(self, own: int) -> Iterator[tuple[int, str]]:
        """Yield the owners that hold more than `own`, with their counts, the largest first."""
        for count in sorted(self._by_count, reverse=True):
            if count <= own:
                return
            for owner in self._by_count[count]:
                yield count, owner

    def _ended_first(self, share: _Share[T], times: int) -> T | None:
        """Return the item of a share to end; the share is `times` as large as the newcomer's."""
        for item in share.fresh:
            return item
        if times < self.much:
            return None
        used = share.used
        for item in list(islice(used, _ITEMS)):
            if item.idle:
                return item
            used[item] = used.pop(item)  # check others next time
        return next(iter(used), None) if times >= FAR else None


@attrs.define(eq=False)
class OwnerCounts:
    """How many of something each owner has, of a number for all.

    One more is admitted as long as the owner's own and those of all owners, added up, stay below the number: so one
    owner gets half of it, two get a third each, and there is always one left for somebody else.
    """

    most: int
    what: str
    _counts: dict[str, int] = attrs.field(init=False, factory=dict)
    _total: int = attrs.field(init=False, default=0)

    def admit(self, owner: str) -> bool:
        """Count one more and return True, or log that there are too many and return False."""
        own = self._counts.get(owner, 0)
        if own + self._total >= self.most:
            security_event("flood_refused", what=self.what, owner=owner, held=own, most=self.most)
            return False
        self._counts[owner] = own + 1
        self._total += 1
        return True

    def release(self, owner: str) -> None:
        """Count one less."""
        own = self._counts[owner] - 1
        self._total -= 1
        if own:
            self._counts[owner] = own
        else:
            del self._counts[owner]


class Endable(Owned, Protocol):
    """An item that can be ended for another one."""

    def evict(self, why: str) -> None:
        """End it. Must not block."""


E = TypeVar("E", bound=Endable)


@attrs.define(eq=False)
class BoundedShares(Shares[E]):
    """At most so many items of one kind."""

    what: str = attrs.field(kw_only=True)  # the name of an item in the security log
    most: int = attrs.field(kw_only=True)  # the upper bound of items

    def has_room(self, newcomer: str) -> bool:
        """Return whether one more item of this owner may be added, after ending another one if necessary."""
        if self.total < self.most:
            return True
        other = self.make_room(newcomer, self.what)
        if other is None:
            return False
        other.evict(f"there are too many {self.what}s")
        return True


class Tabled(Endable, Protocol):
    """An item that a client holds open and names by an id."""

    owner: str
    id: str  # the id that the client sends; secret
    principal: Principal | None  # its owner's identity
    fresh: bool  # whether it was never used


S = TypeVar("S", bound=Tabled)


@attrs.define(eq=False)
class Table(BoundedShares[S]):
    """The items that clients hold open, by id."""

    _found: dict[str, S] = attrs.field(init=False, factory=dict)

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._found.values()))

    def logged(self, item: S) -> dict[str, object]:
        return {"session": digest(item.id), "used": not item.fresh}

    def add(self, item: S, *, used: bool = False) -> None:
        """Add an item, to be found by its id."""
        self._found[item.id] = item
        super().add(item, used=used)

    def use(self, item: S) -> None:
        """Note that an item was used: it is then ended later than unused ones."""
        item.fresh = False
        super().use(item)

    def has(self, id: str) -> bool:
        """Return whether there is an item with this id, whoever owns it."""
        return id in self._found

    def find(self, id: str, principal: Principal | None) -> S | None:
        """Return this principal's item with an id, or None. Items of other principals are not found."""
        item = self._found.get(id)
        if item is not None and item.principal != principal:
            security_event("foreign_session", session=digest(id), owner=item.principal, principal=principal)
            return None
        return item

    def remove(self, item: S) -> None:
        """Remove an item; no effect if it is not there."""
        self._found.pop(item.id, None)
        super().remove(item)


W = TypeVar("W", bound=Evictable)


@attrs.define(eq=False)
class Places(Generic[W]):
    """Work under way, by owner: at most `most` pieces. When full, an owner with far more than the newcomer loses one.

    Entering and leaving costs a fraction of a microsecond, because nothing is sorted before the places are full.
    """

    most: int
    what: str  # the name of a piece in the security log
    taken: int = attrs.field(init=False, default=0)  # how many there are
    _owners: dict[str, dict[Hashable, W]] = attrs.field(init=False, factory=dict)  # of each the oldest first

    def __iter__(self) -> Iterator[W]:
        return iter([work for owned in self._owners.values() for work in owned.values()])

    def find(self, owner: str, key: Hashable) -> W | None:
        """Return the owner's work that was admitted under this key, or None."""
        owned = self._owners.get(owner)
        return None if owned is None else owned.get(key)

    def admit(self, owner: str, key: Hashable, work: W) -> bool:
        """Give a place to work, and return whether there was one. The owner has nothing under this key."""
        if self.taken >= self.most and not self.make_room(owner):
            return False
        owned = self._owners.get(owner)
        if owned is None:
            self._owners[owner] = {key: work}
        else:
            owned[key] = work
        self.taken += 1
        return True

    def leave(self, owner: str, key: Hashable) -> None:
        """Free a place; no effect if it is free."""
        owned = self._owners.get(owner)
        if owned is not None and owned.pop(key, None) is not None:
            self.taken -= 1
            if not owned:
                del self._owners[owner]

    def make_room(self, newcomer: str) -> bool:
        """End the oldest work of whoever has most, if that is far more than the newcomer has. Return whether it was."""
        owners = self._owners
        some = list(islice(owners, _CHECKED))
        largest = max(some, key=lambda owner: len(owners[owner]), default=newcomer)
        held, own = len(owners.get(largest, ())), len(owners.get(newcomer, ()))
        if held < FAR * (own + 1):
            for owner in some:
                owners[owner] = owners.pop(owner)  # check others next time
            security_event("flood_refused", what=self.what, owner=newcomer, held=own, most=self.most)
            return False
        security_event("gave_way", what=self.what, owner=largest, held=held, idle=False)
        next(iter(owners[largest].values())).evict("others need its place: you have too much under way")
        return True
