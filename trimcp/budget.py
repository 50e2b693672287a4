"""A bound on the memory that all peers of a server together may use, and the choice of the peer to end beyond it.

Only what a peer can influence is counted: bodies and messages being read, requests that wait or run, results not yet
sent, events kept for clients that reconnect, handshakes. Each connection or session has a `MemoryAccount`, its
holding. The holdings of one owner (a principal, else an address) are counted together.

A holding may grow as long as its own bytes, its owner's bytes and the bytes of all owners, added up, stay below the
bound. So a single owner gets half of the bound, two owners get a third each, and there is always room for one more.
Results cannot be refused like that. When they exceed the bound, the largest holding without a running handler is ended.
"""

from __future__ import annotations

import logging
import math
import socket
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Final, Protocol

import trio

_log = logging.getLogger("trimcp.budget")

DEFAULT_MEMORY: Final = 256 * 1024 * 1024
"""Default bound, in bytes, on the memory that the peers of one server may use."""

LITTLE: Final = 64 * 1024
"""Bytes that every connection or session may hold, so that small peers are served while large ones must wait."""

STEP: Final = 4 * 1024
"""Bytes by which an amount may change before it is counted, so that small calls cost nothing."""

LARGE: Final = 32 * 1024
"""Bytes from which a message has to wait for its turn to be parsed; see `Budget.take_turn`."""

# Fractions of the bound, as divisors
_HIGH: Final = 4  # above this much is held,
_LOW: Final = 16  # and below this little is held
_UNCOUNTED: Final = 32  # may be uncounted over all holdings: with few holdings, the steps are larger
_SLACK: Final = 8  # above the bound: then also a busy holding is ended, unless an idle one has this part of its size

_LARGEST_STEP: Final = 128 * 1024
_TURNS: Final = 16  # at most so many turns of the event loop between two large messages, for other tasks


_READS: Final = 8  # reads of messages larger than one read, in one turn of the event loop
_RESULTS: Final = 256 * 1024  # bytes of large results that are encoded in one turn of the event loop


class TurnBound:
    """A bound on how much of one kind of work is done per turn of the event loop, so that other tasks wait for little.

    Work that takes more than is left is done all the same; what comes after it waits for the next turn.
    """

    __slots__ = ("_at_once", "_coming", "_lot", "_most", "left")

    def __init__(self, most: int, at_once: int = 1) -> None:
        self._most = most
        self._at_once = at_once  # tasks that may go on in each turn, of those that wait
        self._lot = trio.lowlevel.ParkingLot()
        self._coming = False  # whether `_next_turn` will be called: to ask Trio for that costs a system call
        self.left: int = most  # in this turn; work takes from it. At 0 or less, the next work calls `wait` first.

    async def wait(self, amount: int = 0) -> None:
        """Wait until something is left, and take so much."""
        while self.left <= 0:
            self._refill_soon()
            await self._lot.park()
        self.left -= amount
        if self.left <= 0:
            self._refill_soon()
        else:
            self._lot.unpark()  # it looks for itself, in the next turn

    def refill(self) -> None:
        """Note that a turn has begun. Who waits notices it without this; a task that runs once a turn is cheaper."""
        self.left = self._most

    def _refill_soon(self) -> None:
        if not self._coming:
            trio.lowlevel.current_trio_token().run_sync_soon(self._next_turn)
            self._coming = True

    def _next_turn(self) -> None:
        self._coming = False
        self.left = self._most
        self._lot.unpark(count=self._at_once)


def reads_per_turn() -> TurnBound:
    """Return the bound on further reads of messages that are larger than one read: `wait(1)` before each."""
    return TurnBound(_READS, _READS)


def results_per_turn() -> TurnBound:
    """Return the bound on bytes of large results that are encoded."""
    return TurnBound(_RESULTS)


class Evictable(Protocol):
    """A connection or session that can be ended when the memory is used up."""

    @property
    def at_rest(self) -> bool:
        """Whether no handler is running in it, so that ending it interrupts none."""
        ...

    def evict(self, why: str) -> None:
        """End it. Called at most once; must not block."""


class _OwnerAccount:
    """All holdings of one principal or address."""

    __slots__ = ("favoured", "held", "holdings", "name")

    def __init__(self, name: str) -> None:
        self.name: str = name
        self.held: int = 0
        self.holdings: set[MemoryAccount] = set()
        # One of the holdings that wait for room may continue anyway, or all of them might wait for each other.
        self.favoured: MemoryAccount | None = None

    def largest(self, *, at_rest: bool) -> MemoryAccount | None:
        """Return the largest holding that can be ended; with `at_rest`, only of those without a running handler."""
        found = [holding for holding in self.holdings if holding.can_be_ended(at_rest=at_rest)]
        return max(found, key=lambda holding: holding.held) if found else None


class Budget:
    """A bound, in bytes, on the memory that all peers of a server together may use."""

    def __init__(self, bound: int = DEFAULT_MEMORY) -> None:
        self.bound: int = bound
        self.held: int = 0  # bytes counted now
        self.step: int = STEP  # bytes by which each amount may change before it is counted again
        self.refused: int = 0  # number of bodies and messages refused because there was no room
        self.ended: int = 0  # number of holdings ended because they were the largest
        self._began = 0.0  # when the last large message began to be parsed, on Trio's clock
        self._next_turn = -math.inf  # when the next large message may be parsed
        self._turn = trio.Lock()
        self.reads: TurnBound = reads_per_turn()
        self._holdings = 0
        self._fewer, self._more = -1, 1  # numbers of holdings at which the step changes
        self._owners: dict[str, _OwnerAccount] = {}
        self._waiting: dict[MemoryAccount, Callable[[], object]] = {}
        self._relieving = False
        self._next = 0  # held bytes at which to look again for a holding to end
        self._flooded = False  # whether much was held since little was held
        self._mark = bound // _HIGH  # held bytes above which to look
        # called when little is held again after much was held, for example to return memory to the system. May be set.
        self.when_low: Callable[[], object] | None = None

    def holding(self, owner: str, holder: Evictable | None = None) -> MemoryAccount:
        """Return a new holding. The caller closes it.

        `holder`: the connection or session that can be ended when too much is held; None if it cannot be ended.
        """
        mine = self._owner(owner)
        holding = MemoryAccount(self, mine, holder)
        mine.holdings.add(holding)
        self._holdings += 1
        if self._holdings >= self._more:
            self._choose_step()
        return holding

    def take_turn(self) -> bool:
        """Return whether a message of `LARGE` bytes or more may be parsed now; if so, call `parsed` after it.

        Large messages that arrive together are parsed one at a time, so that other tasks can run between them for as
        long as the previous message took. If this returns False, call `MemoryAccount.wait_for_turn`.
        """
        now = trio.current_time()
        if now < self._next_turn:
            return False
        self._began = now
        return True

    def parsed(self) -> None:
        """Note that the large message whose turn it was has been parsed."""
        now = trio.current_time()
        self._next_turn = now + (now - self._began)

    def owners(self) -> list[tuple[str, int]]:
        """Return the owners that hold anything, with their bytes, the largest first."""
        return sorted(
            ((name, owner.held) for name, owner in self._owners.items() if owner.held), key=lambda one: -one[1]
        )

    def _choose_step(self) -> None:
        """Choose the step for the present number of holdings. It is used until that number has doubled or halved."""
        number = 1 << max(self._holdings.bit_length() - 1, 0)
        self.step = max(STEP, min(_LARGEST_STEP, self.bound // (_UNCOUNTED * number)))
        self._more = 2 * number
        self._fewer = -1 if self.step == _LARGEST_STEP else number // 2

    def _owner(self, name: str) -> _OwnerAccount:
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _OwnerAccount(name)
        return owner

    def _forget(self, holding: MemoryAccount, owner: _OwnerAccount) -> None:
        """Remove a holding from its owner, and the owner when it has none left."""
        owner.holdings.discard(holding)
        if owner.favoured is holding:
            owner.favoured = None
        if not owner.holdings:
            self._owners.pop(owner.name, None)

    def _much_held(self) -> None:
        """Note that much is held, and end holdings if it is too much."""
        self._flooded, self._mark = True, self.bound
        if self.held > self.bound:
            self._relieve()

    def _less_held(self) -> None:
        """Wake the waiting holdings that now fit, and call `when_low` if little is held after much was."""
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
        """End the largest holdings until the bound is kept or none is left that can be ended."""
        if self._relieving or self.held < self._next:
            return
        self._relieving = True
        try:
            while self.held > self.bound:
                found = self._whom_to_evict()
                if found is None:
                    self._next = self.held + LITTLE  # looking again at once would find the same
                    return
                self._end(found)
            self._next = 0
        finally:
            self._relieving = False

    def _whom_to_evict(self) -> MemoryAccount | None:
        """Return the largest idle holding of the largest owner, or the largest holding of all if nothing else helps.

        A holding that is small beside the largest one is not returned: ending it would not help.
        """
        owners = sorted(self._owners.values(), key=lambda owner: -owner.held)
        resting = next(filter(None, (owner.largest(at_rest=True) for owner in owners)), None)
        largest = next(filter(None, (owner.largest(at_rest=False) for owner in owners)), None)
        if resting is not None and largest is not None and resting.held * _SLACK >= largest.held:
            return resting
        return largest if self.held > self.bound + self.bound // _SLACK else None

    def _end(self, holding: MemoryAccount) -> None:
        from trimcp.security import security_event  # most programs never need it

        size, name, holder = holding.held, holding.owner.name, holding.holder
        self.ended += 1
        holding.close()
        holding.holder = holder  # until it has been evicted, or has ended by itself
        security_event("memory_reclaimed", owner=name, bytes=size, bound=self.bound)
        # Not here: a cancelled task keeps the frames of whoever cancelled it until it has ended, and they hold the
        # message for which there was no room. Many of them in one turn came to four times the bound.
        why = f"it held {size} bytes when the memory for all peers was used up"
        trio.lowlevel.current_trio_token().run_sync_soon(_evict, holding, why)


def _evict(holding: MemoryAccount, why: str) -> None:
    """End a holder, unless it has ended by itself. Never raises."""
    holder, holding.holder = holding.holder, None
    try:
        if holder is not None:
            holder.evict(why)
    except Exception as error:  # of any transport: an error here would end the whole program
        from trimcp.support.cleaning import log_crash  # only needed for errors

        log_crash(_log, error, "ending a peer that held most crashed")


class MemoryAccount:
    """The memory that one connection or session uses in a server. Made by `Budget.holding`."""

    __slots__ = ("budget", "held", "holder", "little", "owner")

    def __init__(self, budget: Budget, owner: _OwnerAccount, holder: Evictable | None) -> None:
        self.budget: Budget = budget  # the budget it is counted in
        self.owner: _OwnerAccount = owner
        self.holder: Evictable | None = holder  # the connection or session that can be ended. May be set later.
        self.held: int = 0  # bytes
        self.little: int = LITTLE  # bytes that it may hold, whatever others do

    def fits(self, size: int) -> bool:
        """Return whether so many more bytes may be added. If not, the caller refuses them and calls `refuse`."""
        held = self.held + size
        return held <= self.little or held + self.owner.held + self.budget.held <= self.budget.bound

    @property
    def may_grow(self) -> bool:
        """Whether a reader that can wait may read on."""
        return self.held <= self.little or self.fits(0) or self.owner.favoured is self

    def refuse(self, what: str) -> None:
        """Count and log that something from this peer was refused because there was no room."""
        from trimcp.security import security_event

        self.budget.refused += 1
        security_event("flood_refused", what=what, owner=self.owner.name, held=self.held, why="memory")

    def add(self, change: int) -> None:
        """Add `change` bytes (may be negative) without a check: call `fits` before."""
        budget = self.budget
        self.held += change
        self.owner.held += change
        held = budget.held = budget.held + change
        if change > 0:
            if held > budget._mark:
                budget._much_held()
        elif budget._waiting or budget._flooded:
            owner = self.owner
            if owner.favoured is self and self.held <= self.little:
                owner.favoured = None
            budget._less_held()

    def move(self, name: str) -> None:
        """Count it with another owner from now on, for example after its peer has authenticated."""
        owner = self.owner
        if owner.name == name or self.budget is _NONE:
            return
        owner.held -= self.held
        self.budget._forget(self, owner)
        self.owner = self.budget._owner(name)
        self.owner.held += self.held
        self.owner.holdings.add(self)

    def when_it_may_grow(self, wake: Callable[[], object]) -> bool:
        """Have `wake` called when it may grow; it replaces the last one. Returns False if it need not wait.

        One holding of each owner need not wait, or all of them might wait for each other.
        """
        favoured = self.owner.favoured
        if favoured is None or favoured.held <= favoured.little:  # it has had its turn
            self.owner.favoured = self
        if self.may_grow:
            return False
        self.budget._waiting[self] = wake
        return True

    async def room(self) -> None:
        """Wait until it may grow. Cancelling this loses nothing."""
        lot = trio.lowlevel.ParkingLot()
        try:
            while not self.may_grow and self.when_it_may_grow(lot.unpark_all):
                await lot.park()
        finally:
            self.budget._waiting.pop(self, None)

    async def wait_for_turn(self, size: int) -> None:
        """Wait until a message of `size` bytes may be parsed (see `Budget.take_turn`). It is counted meanwhile."""
        budget, waiting = self.budget, MemoryCharge(self)
        waiting.set(size)
        try:
            async with budget._turn:
                for _ in range(_TURNS):  # not a timer, which would never fire on a clock that does not advance
                    await trio.lowlevel.checkpoint()
                    if budget.take_turn():
                        return
                budget._began = trio.current_time()
        finally:
            waiting.set(0)

    def can_be_ended(self, *, at_rest: bool) -> bool:
        """Return whether ending it helps: it holds something and, with `at_rest`, no handler is running in it."""
        holder = self.holder
        return holder is not None and self.held > 0 and (not at_rest or holder.at_rest)

    def close(self) -> None:
        """Hold nothing and count nothing any more. May be called twice."""
        budget, owner = self.budget, self.owner
        if budget is _NONE:
            self.holder = None
            return
        if self.held or budget._waiting:
            self.add(-self.held)
        budget._forget(self, owner)
        budget._holdings -= 1
        if budget._holdings <= budget._fewer:
            budget._choose_step()
        self.budget, self.owner = _NONE, _NOBODY  # later changes are counted nowhere
        self.holder = None
        if budget._waiting and (wake := budget._waiting.pop(self, None)) is not None:
            wake()


class WorkTurns:
    """Turns of one peer's work: `async with turns` around a piece that keeps the event loop for milliseconds.

    One piece of all peers is at work at a time, parsing large messages included, and between two of them other tasks
    run. `close` it after the last.
    """

    __slots__ = ("_budget", "_holding", "_owner")

    def __init__(self, budget: Budget, owner: str) -> None:
        self._budget = budget
        self._owner = owner
        self._holding: MemoryAccount | None = None

    async def __aenter__(self) -> None:
        if not self._budget.take_turn():
            if self._holding is None:
                self._holding = self._budget.holding(self._owner)
            await self._holding.wait_for_turn(0)

    async def __aexit__(self, *raised: object) -> None:
        self._budget.parsed()

    def close(self) -> None:
        if self._holding is not None:
            self._holding.close()


class MemoryCharge:
    """One part of a holding, and how much of it has been counted."""

    __slots__ = ("counted", "holding")

    def __init__(self, holding: MemoryAccount | None = None) -> None:
        self.holding: MemoryAccount | None = holding  # the holding it is part of; None counts nothing
        self.counted: int = 0  # bytes counted

    def set(self, size: int) -> None:
        """Set its size. A change is counted once it reaches one step of the budget."""
        change = size - self.counted
        if change and (holding := self.holding) is not None:
            step = holding.budget.step
            if change >= step or change <= -step or not size:
                self.counted = size
                holding.add(change)

    def belong_to(self, holding: MemoryAccount | None) -> None:
        """Count it in another holding from now on, from 0 bytes until the next `set`."""
        if self.counted:
            self.set(0)
        self.holding = holding


_NONE: Final = Budget(1 << 62)
_NOBODY: Final = _OwnerAccount("nobody")


async def give_back() -> None:
    """Return memory that the C library keeps free for later use to the system, where that is possible (glibc).

    After a flood of large messages this can be a tenth of their size.
    """
    await trio.to_thread.run_sync(_trim)


def _trim() -> None:
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


NOWHERE_KNOWN: Final = "address unknown"
"""The owner of every peer without a principal and an address: Unix sockets, pipes, hosts that pass no address."""

# A host with 64 bits of its own address space can take a new address for each connection (RFC 4291, 2.5.1; RFC 8981).
_IPV6_PREFIX: Final = 8  # bytes
_MAPPED: Final = bytes(10) + b"\xff\xff"  # prefix of an IPv4 address mapped into IPv6 (RFC 4291, 2.5.5.2)
_LONGEST: Final = 64  # characters of an address, including the zone


def owner_of(principal: str | None, address: str | None) -> str:
    """Return the owner to count memory with: the principal, else the address.

    The result is text for tables and logs: "principal alice", "address 192.0.2.1" or "address 2001:db8::/64" (one
    machine may have all these addresses). An IPv4 address mapped into IPv6 is the same as the IPv4 address. All peers
    without a readable address share `NOWHERE_KNOWN`. A principal and an address never have the same result. Never
    raises.

    `address`: with or without a port: "192.0.2.1", "192.0.2.1:40312", "2001:db8::1", "[2001:db8::1]:443".
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


@lru_cache(4_096)  # clients reconnect
def _of_host(host: str) -> str:
    host = host.partition("%")[0]  # without the zone
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
