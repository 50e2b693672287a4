"""How much memory all peers of a server together may make it keep, and who gives way when that is used up.

Counted is what a peer decides about: bodies and messages being read, requests that wait or are under way, results that
nobody has taken, events kept for clients that come back, handshakes. Each connection or session has a `Holding`, and
those of one owner (a principal, else an address) are counted together.

A holding may grow as long as it, its owner and all owners added up stay below the bound. So one owner alone gets half
of it, two get a third each, and there is always room for one more. Results cannot be refused that way; where they pass
the bound, whoever holds most and is not at work is ended.
"""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Final, Protocol

import trio

DEFAULT_MEMORY: Final = 256 * 1024 * 1024
"""Bytes that the peers of one server may make it keep unless told otherwise."""

LITTLE: Final = 64 * 1024
"""Bytes that a connection or session may always hold: whoever holds little is served while others give way."""

STEP: Final = 4 * 1024
"""Bytes by which what is held may always change before it is counted, so that small calls cost nothing."""

LARGE: Final = 32 * 1024
"""Bytes from which a message is parsed in turn with others; see `Budget.take_turn`."""

# Parts of the bound, as divisors
_HIGH: Final = 4  # much is held beyond it,
_LOW: Final = 16  # and little below it
_UNCOUNTED: Final = 32  # may go uncounted in all: where few are connected, steps are larger
_SLACK: Final = 8  # beyond the bound, where somebody at work is ended, too; one at rest has to hold as much of theirs

_LARGEST_STEP: Final = 128 * 1024
_TURNS: Final = 16  # of the loop, in which others run between two large messages, at most
_READS: Final = 8  # of messages larger than one read, in a turn of the loop

NOWHERE_KNOWN: Final = "address unknown"
"""The share of everybody without a name and an address: over Unix sockets, pipes, and where a host does not tell."""

# A host with 64 bits of its own address space can take a new address for each connection (RFC 4291, 2.5.1; RFC 8981).
_IPV6_PREFIX: Final = 8  # bytes
_MAPPED: Final = bytes(10) + b"\xff\xff"  # what stands before an IPv4 address in IPv6 (RFC 4291, 2.5.5.2)
_LONGEST: Final = 64  # characters of an address, with a zone


class Holder(Protocol):
    """A connection or session that can be ended when the memory is used up."""

    @property
    def at_rest(self) -> bool:
        """Whether no handler is at work in it, so that ending it stops none."""
        ...

    def give_way(self, why: str) -> None:
        """End it. Called at most once, and must not wait."""


class _Owner:
    """What one principal or address holds, in all its holdings."""

    __slots__ = ("favoured", "held", "holdings", "name")

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.held: int = 0
        self.holdings: set[Holding] = set()
        # One of the holdings that wait for room goes on all the same, or they might all wait for each other.
        self.favoured: Holding | None = None

    def largest(self, *, at_rest: bool) -> Holding | None:
        """Return the largest holding that can be ended, if `at_rest` of those in which no handler is at work."""
        found = [holding for holding in self.holdings if holding.can_be_ended(at_rest=at_rest)]
        return max(found, key=lambda holding: holding.held) if found else None


class Budget:
    """The memory that all peers of a server may make it keep.

    Args:
        bound: bytes.

    Attributes:
        held: bytes that are held now, as far as they are counted.
        step: bytes by which each amount may change before it is counted anew.
        refused: bodies and messages that were refused for want of room.
        ended: holdings that were ended because they held most.
        when_low: called once little is held after much was: a time to give memory back to the system. May be set.
    """

    def __init__(self, bound: int = DEFAULT_MEMORY) -> None:
        self.bound: int = bound
        self.held: int = 0
        self.step: int = STEP
        self.refused: int = 0
        self.ended: int = 0
        self._began = 0.0  # when parsing of a large message last began, on Trio's clock
        self._next_turn = -math.inf  # when the next one may be parsed
        self._turn = trio.Lock()
        self._reads = _READS
        self._readers = trio.lowlevel.ParkingLot()
        self._holdings = 0
        self._fewer, self._more = -1, 1  # numbers of holdings at which another step is chosen
        self._owners: dict[str, _Owner] = {}
        self._waiting: dict[Holding, Callable[[], object]] = {}
        self._relieving = False
        self._next = 0  # bytes held from which it is worth looking again for somebody to end
        self._flooded = False  # whether much was held since little was
        self._mark = bound // _HIGH  # bytes beyond which to look
        self.when_low: Callable[[], object] | None = None

    def holding(self, owner: str, holder: Holder | None = None) -> Holding:
        """Return a new holding, to be closed by whoever made it.

        Args:
            owner: the principal or the address it is counted with; see `owner_of`.
            holder: what can be ended when too much is held; None for what cannot.
        """
        mine = self._owner(owner)
        holding = Holding(self, mine, holder)
        mine.holdings.add(holding)
        self._holdings += 1
        if self._holdings >= self._more:
            self._choose_step()
        return holding

    def take_turn(self) -> bool:
        """Return whether a message of `LARGE` bytes or more may be parsed now; if so, call `parsed` after it.

        Of those that come at once one is parsed at a time, else everybody would wait for all of them. Between two
        others have as much time as the first one took. Where this is False, `Holding.wait_for_turn`.
        """
        now = trio.current_time()
        if now < self._next_turn:
            return False
        self._began = now
        return True

    def parsed(self) -> None:
        """Note that the large message whose turn it was is parsed."""
        now = trio.current_time()
        self._next_turn = now + (now - self._began)

    async def read_in_turn(self) -> None:
        """Wait for the turn of a read that goes on with a large message: a few are made in each turn of the loop."""
        while not self._reads:
            await self._readers.park()
        self._reads -= 1
        if not self._reads:
            trio.lowlevel.current_trio_token().run_sync_soon(self._refill, idempotent=True)

    def _refill(self) -> None:
        """Let the next ones read, in the next turn of the loop."""
        self._reads = _READS
        self._readers.unpark(count=_READS)

    def owners(self) -> list[tuple[str, int]]:
        """Return who holds anything, and how many bytes, the largest first."""
        return sorted(
            ((name, owner.held) for name, owner in self._owners.items() if owner.held), key=lambda one: -one[1]
        )

    def _choose_step(self) -> None:
        """Choose the step for as many holdings as there are, and for up to twice as many, or down to half."""
        number = 1 << max(self._holdings.bit_length() - 1, 0)
        self.step = max(STEP, min(_LARGEST_STEP, self.bound // (_UNCOUNTED * number)))
        self._more = 2 * number
        self._fewer = -1 if self.step == _LARGEST_STEP else number // 2

    def _owner(self, name: str) -> _Owner:
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _Owner(name)
        return owner

    def _forget(self, holding: Holding, owner: _Owner) -> None:
        """Take a holding from its owner, and forget an owner that has none left."""
        owner.holdings.discard(holding)
        if owner.favoured is holding:
            owner.favoured = None
        if not owner.holdings:
            self._owners.pop(owner.name, None)

    def _much_held(self) -> None:
        """Note that much is held, and end somebody if it is too much."""
        self._flooded, self._mark = True, self.bound
        if self.held > self.bound:
            self._relieve()

    def _less_held(self) -> None:
        """Let those that wait go on, as far as there is room for them now, and tell once little is left of much."""
        for holding in list(self._waiting):
            owner = holding.owner
            if owner.favoured is None:
                owner.favoured = holding
            if holding.may_grow:
                self._waiting.pop(holding)()
        if self._flooded and self.held < self.bound // _LOW:
            self._flooded, self._mark = False, self.bound // _HIGH
            if self.when_low is not None:
                self.when_low()

    def _relieve(self) -> None:
        """End those that hold most, until what is held is within the bound, as far as anybody can be ended."""
        if self._relieving or self.held < self._next:
            return
        self._relieving = True
        try:
            while self.held > self.bound:
                found = self._who_gives_way()
                if found is None:
                    self._next = self.held + LITTLE  # to look again at once would find the same
                    return
                self._end(found)
            self._next = 0
        finally:
            self._relieving = False

    def _who_gives_way(self) -> Holding | None:
        """Return who holds most at rest, of the owner who holds most; or who holds most at all, if that must be.

        Whoever holds little beside that one is not ended: it would not help.
        """
        owners = sorted(self._owners.values(), key=lambda owner: -owner.held)
        resting = next(filter(None, (owner.largest(at_rest=True) for owner in owners)), None)
        largest = next(filter(None, (owner.largest(at_rest=False) for owner in owners)), None)
        if resting is not None and largest is not None and resting.held * _SLACK >= largest.held:
            return resting
        return largest if self.held > self.bound + self.bound // _SLACK else None

    def _end(self, holding: Holding) -> None:
        from trimcp.security import security_event  # which most programs never need

        size, name, holder = holding.held, holding.owner.name, holding.holder
        self.ended += 1
        holding.close()
        security_event("memory_reclaimed", owner=name, bytes=size, bound=self.bound)
        if holder is not None:
            holder.give_way(f"it held {size} bytes when the memory for all peers was used up")


class Holding:
    """What one connection or session makes a server keep; `Budget.holding` makes it.

    Attributes:
        budget: what it counts in.
        held: bytes.
        holder: what can be ended, or None. May be set later.
    """

    __slots__ = ("budget", "held", "holder", "owner")

    def __init__(self, budget: Budget, owner: _Owner, holder: Holder | None) -> None:
        self.budget: Budget = budget
        self.owner: _Owner = owner
        self.holder: Holder | None = holder
        self.held: int = 0

    def fits(self, size: int) -> bool:
        """Return whether so many bytes more may be taken. Where not, whoever asks refuses them and counts that."""
        held = self.held + size
        return held <= LITTLE or held + self.owner.held + self.budget.held <= self.budget.bound

    @property
    def may_grow(self) -> bool:
        """Whether whoever can wait may read on."""
        return self.held <= LITTLE or self.fits(0) or self.owner.favoured is self

    def refuse(self, what: str) -> None:
        """Note that something of this peer's was refused for want of room."""
        from trimcp.security import security_event

        self.budget.refused += 1
        security_event("flood_refused", what=what, owner=self.owner.name, held=self.held, why="memory")

    def add(self, change: int) -> None:
        """Hold so many bytes more, or less, without a check: ask `fits` before."""
        budget = self.budget
        self.held += change
        self.owner.held += change
        held = budget.held = budget.held + change
        if change > 0:
            if held > budget._mark:
                budget._much_held()
        elif budget._waiting or budget._flooded:
            owner = self.owner
            if owner.favoured is self and self.held <= LITTLE:
                owner.favoured = None
            budget._less_held()

    def move(self, name: str) -> None:
        """Count it with another owner from now on, such as the principal that its address turned out to be."""
        owner = self.owner
        if owner.name == name or self.budget is _NONE:
            return
        owner.held -= self.held
        self.budget._forget(self, owner)
        self.owner = self.budget._owner(name)
        self.owner.held += self.held
        self.owner.holdings.add(self)

    def when_it_may_grow(self, wake: Callable[[], object]) -> bool:
        """Have this called once it may grow; the last one given counts. Returns False if there is nothing to wait for.

        Of each owner one need not wait, or all might wait for each other.
        """
        favoured = self.owner.favoured
        if favoured is None or favoured.held <= LITTLE:  # which had its turn
            self.owner.favoured = self
        if self.may_grow:
            return False
        self.budget._waiting[self] = wake
        return True

    async def room(self) -> None:
        """Wait until it may grow. Cancelling it loses nothing."""
        lot = trio.lowlevel.ParkingLot()
        try:
            while not self.may_grow and self.when_it_may_grow(lot.unpark_all):
                await lot.park()
        finally:
            self.budget._waiting.pop(self, None)

    async def wait_for_turn(self, size: int) -> None:
        """Wait until a message of so many bytes may be parsed, see `Budget.take_turn`, and count it meanwhile."""
        budget, waiting = self.budget, Amount(self)
        waiting.set(size)
        try:
            async with budget._turn:
                for _ in range(_TURNS):  # and not by a timer, which on a clock that stands still would never ring
                    await trio.lowlevel.checkpoint()
                    if budget.take_turn():
                        return
                budget._began = trio.current_time()
        finally:
            waiting.set(0)

    def can_be_ended(self, *, at_rest: bool) -> bool:
        """Return whether ending it would help: it holds something, and nothing is at work in it if `at_rest`."""
        holder = self.holder
        return holder is not None and self.held > 0 and (not at_rest or holder.at_rest)

    def close(self) -> None:
        """Hold nothing any more, and count nothing; safe to call twice."""
        budget, owner = self.budget, self.owner
        if budget is _NONE:
            return
        if self.held or budget._waiting:
            self.add(-self.held)
        budget._forget(self, owner)
        budget._holdings -= 1
        if budget._holdings <= budget._fewer:
            budget._choose_step()
        self.budget, self.owner = _NONE, _NOBODY  # what is said from now on counts nowhere
        self.holder = None
        if budget._waiting and (wake := budget._waiting.pop(self, None)) is not None:
            wake()


class Amount:
    """One of the things that a holding consists of, as far as it was counted.

    Attributes:
        holding: what it is a part of; None counts nothing.
        counted: bytes that were counted.
    """

    __slots__ = ("counted", "holding")

    def __init__(self, holding: Holding | None = None) -> None:
        self.holding: Holding | None = holding
        self.counted: int = 0

    def set(self, size: int) -> None:
        """Set how large it is now. Small changes are counted once they have come to a step of the budget."""
        change = size - self.counted
        if change and (holding := self.holding) is not None:
            step = holding.budget.step
            if change >= step or change <= -step or not size:
                self.counted = size
                holding.add(change)

    def belong_to(self, holding: Holding | None) -> None:
        """Count it in another holding from now on, and nothing of it until it is set again."""
        if self.counted:
            self.set(0)
        self.holding = holding


_NONE: Final = Budget(1 << 62)
_NOBODY: Final = _Owner("nobody")


async def give_back() -> None:
    """Give the system what the C library keeps free for later, where it has a word for that (glibc).

    After a flood of large messages that can be a tenth of what they took.
    """
    await trio.to_thread.run_sync(_trim)


def _trim() -> None:
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def owner_of(principal: str | None, address: str | None) -> str:
    """Return whose share something counts into: the principal's, else that of the address it comes from.

    It is text for tables and logs: "principal alice", "address 192.0.2.1" or "address 2001:db8::/64" (one machine has
    that many addresses). An IPv4 address that is mapped into IPv6 is the same as without. Without a readable address
    all are one, `NOWHERE_KNOWN`. No principal has the key of an address, or the other way round. Never raises.

    Args:
        principal: who asks, as the transport's identity hook decided, or None.
        address: where from, with or without a port: "192.0.2.1", "192.0.2.1:40312", "2001:db8::1", "[2001:db8::1]:443".
    """
    if principal is not None:
        return f"principal {principal}"
    if not address:
        return NOWHERE_KNOWN
    if address[0] == "[":
        host = address[1:].partition("]")[0]
    elif address.count(":") == 1:
        host = address.partition(":")[0]
    else:
        host = address
    return _of_host(host) if len(host) <= _LONGEST else NOWHERE_KNOWN


@lru_cache(4_096)  # clients come back
def _of_host(host: str) -> str:
    host = host.partition("%")[0]  # without the zone of a link
    try:
        if ":" not in host:
            return f"address {socket.inet_ntop(socket.AF_INET, socket.inet_pton(socket.AF_INET, host))}"
        address = socket.inet_pton(socket.AF_INET6, host)
    except (OSError, ValueError):
        return NOWHERE_KNOWN
    if address.startswith(_MAPPED):
        return f"address {socket.inet_ntop(socket.AF_INET, address[len(_MAPPED) :])}"
    network = address[:_IPV6_PREFIX] + bytes(len(address) - _IPV6_PREFIX)
    return f"address {socket.inet_ntop(socket.AF_INET6, network)}/{_IPV6_PREFIX * 8}"
