"""Keeps one connection open: opens it again when it is lost, leaves a failing server alone, asks a silent one.

One task owns the connection and goes through the states of `UpstreamState`; `upstream` is the face for callers. Why
the circuit breaker and the pauses are one machine is told in docs/design/upstreams.md.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from random import Random
from typing import TYPE_CHECKING, Final

import attrs
import trio

from trimcp.client.combinators import first_of
from trimcp.client.connect import Connectable
from trimcp.client.facade import ClientSession
from trimcp.client.supervision import Breaker, Health, Restarts, UpstreamState, UpstreamStatistics, one_line
from trimcp.errors import ConnectionLost, InvalidReply, McpError, RemoteError, UpstreamDown
from trimcp.session.scopes import open_service_nursery
from trimcp.wire.revisions import Revision

if TYPE_CHECKING:
    from trimcp.client.client import Client

__all__ = ["Supervisor"]

log: logging.Logger = logging.getLogger("trimcp.client")

_REASONS_KEPT: Final = 10
_LISTEN: Final = "subscriptions/listen"
_SHUT: Final = (UpstreamState.OPEN, UpstreamState.GIVEN_UP, UpstreamState.ENDED)
_LEVELS: Final = {
    UpstreamState.UP: logging.INFO,
    UpstreamState.WAITING: logging.WARNING,
    UpstreamState.OPEN: logging.WARNING,
    UpstreamState.GIVEN_UP: logging.ERROR,
}


@attrs.define(eq=False, repr=False)
class Supervisor:
    """One upstream: its connection, its state, its counts. `run` is its task.

    Attributes:
        session: the connection there is, or None.
    """

    client: Client
    target: Connectable
    name: str
    revision: Revision | str | None
    restarts: Restarts
    breaker: Breaker | None
    health: Health | None
    random: Random
    state: UpstreamState = attrs.field(init=False, default=UpstreamState.CONNECTING)
    session: ClientSession | None = attrs.field(init=False, default=None)
    since: float = attrs.field(init=False, factory=trio.current_time)
    next_attempt: float | None = attrs.field(init=False, default=None)
    attempts: int = attrs.field(init=False, default=0)
    connections: int = attrs.field(init=False, default=0)
    failed_attempts: int = attrs.field(init=False, default=0)
    losses: int = attrs.field(init=False, default=0)
    unanswered: int = attrs.field(init=False, default=0)
    repeated: int = attrs.field(init=False, default=0)
    refused: int = attrs.field(init=False, default=0)
    pings: int = attrs.field(init=False, default=0)
    reasons: deque[str] = attrs.field(init=False, factory=lambda: deque(maxlen=_REASONS_KEPT))
    _recent: deque[float] = attrs.field(init=False, factory=deque)
    _in_a_row: int = attrs.field(init=False, default=0)
    _calls_in_a_row: int = attrs.field(init=False, default=0)
    _open_until: float = attrs.field(init=False, default=-math.inf)
    _leaving: bool = attrs.field(init=False, default=False)
    _wish: trio.Event = attrs.field(init=False, factory=trio.Event)
    _doubt: trio.Event = attrs.field(init=False, factory=trio.Event)
    _opening: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _changed: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    # For callers

    async def usable(self, wait: bool) -> ClientSession:
        """Return a connection that stands.

        Args:
            wait: wait for one, except where the circuit is open or the upstream was given up.

        Raises:
            UpstreamDown: there is none.
        """
        while (session := self._standing) is None:
            if not wait or self.state in _SHUT:
                self.refused += 1
                raise self.down()
            await self._changed.park()
        return session

    async def standing(self) -> ClientSession:
        """Wait for a connection, through open circuits too.

        Raises:
            UpstreamDown: there will be none: the upstream was given up, or left.
        """
        while (session := self._standing) is None:
            if self.state in (UpstreamState.GIVEN_UP, UpstreamState.ENDED):
                raise self.down()
            await self._changed.park()
        return session

    @property
    def _standing(self) -> ClientSession | None:
        session = self.session
        up = self.state is UpstreamState.UP and session is not None and session.session.lost is None
        return session if up else None

    async def wait_state(self, states: tuple[UpstreamState, ...]) -> UpstreamState:
        """Wait until it is in one of these states, and return which."""
        await trio.lowlevel.checkpoint()
        while self.state not in states:
            await self._changed.park()
        return self.state

    def down(self) -> UpstreamDown:
        """Return what to tell a caller now."""
        text = f"the upstream {self.name!r} "
        reason = one_line(self.reasons[-1]) if self.reasons else ""
        if self.state is UpstreamState.ENDED:
            return UpstreamDown(f"{text}was left", self.reasons, None, True)
        if self.state is UpstreamState.GIVEN_UP:
            most, within = self.restarts.most, self.restarts.within
            text += f"was given up after {most} restarts within {within:g} s; the last reason: {reason}"
            return UpstreamDown(text, self.reasons, None, True)
        text += "is down" if self.connections or self.failed_attempts else "is not connected yet"
        text += f": {reason}" if reason else ""
        if self.next_attempt is None:
            now = self.state in (UpstreamState.CONNECTING, UpstreamState.PROBING)
            return UpstreamDown(f"{text}; it is {'being tried now' if now else 'tried again soon'}", self.reasons)
        left = max(0.0, self.next_attempt - trio.current_time())
        return UpstreamDown(f"{text}; it is tried again in {left:.3g} s", self.reasons, self.next_attempt)

    def answered(self) -> None:
        """Note that a call was answered, if only with an error."""
        self._calls_in_a_row = 0

    def unanswered_by(self, session: ClientSession) -> None:
        """Note that a call got no answer over this connection: unless that is lost as well, it is to be doubted."""
        if session is self.session and session.session.lost is None:
            self.unanswered += 1
            self._calls_in_a_row += 1
            self._doubt.set()

    def doubt(self, session: ClientSession) -> None:
        """Let it be found out whether this connection still leads to anybody."""
        if session is self.session and session.session.lost is None:
            self._doubt.set()

    async def verdict(self, session: ClientSession) -> None:
        """Wait until it is found out whether a doubted connection still leads to anybody."""
        if self.health is not None:
            while self.state is UpstreamState.UP and session is self.session and self._doubt.is_set():
                await self._changed.park()

    def restart(self) -> None:
        """Give up the connection there is, forget all failures, and open a new one now.

        Raises:
            UpstreamDown: the upstream was left.
        """
        if self._leaving:
            raise self.down()
        self._recent.clear()
        self._in_a_row = self._calls_in_a_row = 0
        self._open_until = -math.inf
        self._hurry()
        self.session = None  # who calls from now on gets the new one
        self._become(UpstreamState.CONNECTING)

    def leave(self) -> None:
        """End, in order if there is a connection, at once if not."""
        self._leaving = True
        self._hurry()

    def _hurry(self) -> None:
        self._wish.set()
        if self.session is None:
            self._opening.cancel(reason="the upstream was left" if self._leaving else "the upstream is restarted")

    def statistics(self) -> UpstreamStatistics:
        """Return a snapshot."""
        return UpstreamStatistics(
            state=self.state,
            since=self.since,
            next_attempt=self.next_attempt,
            connections=self.connections,
            restarts=max(0, self.attempts - 1),
            failed_attempts=self.failed_attempts,
            losses=self.losses,
            unanswered_calls=self.unanswered,
            repeated_calls=self.repeated,
            refused_calls=self.refused,
            pings=self.pings,
            reasons=tuple(self.reasons),
        )

    # Its task

    async def run(self) -> None:
        """Keep a connection open until `leave`."""
        try:
            while not self._leaving:
                self._wish = trio.Event()
                self._become(UpstreamState.PROBING if self._open else UpstreamState.CONNECTING)
                await self._connect()
                if not self._wish.is_set():
                    await self._pause()
        finally:
            self._become(UpstreamState.ENDED)

    @property
    def _open(self) -> bool:
        """Whether the circuit is open, because of the connections there were or of the calls over the last one."""
        breaker = self.breaker
        return breaker is not None and (self._in_a_row >= breaker.failures or self._open_until > -math.inf)

    async def _connect(self) -> None:
        """Open a connection and hold it for as long as it lives; what went wrong is noted."""
        self.attempts += 1
        limit = self.restarts.connect_timeout
        why: str | None = f"it did not answer within {limit:g} s"
        stood: float | None = None
        opening = self._opening = trio.CancelScope(deadline=trio.current_time() + limit)
        try:
            with opening:
                async with self.client.connect(self.target, revision=self.revision) as session:
                    opening.deadline = math.inf
                    stood = trio.current_time()
                    await self._hold(session, stood)
                    why = None
        except Exception as error:  # whatever it is, it is this upstream's failure and no caller's
            if not isinstance(error, McpError | OSError | trio.TooSlowError):
                log.exception("the connection to the upstream %r failed", self.name)
            why = None if why is None else str(error) or type(error).__name__
        if why is not None and not self._wish.is_set():
            self._note(why, stood)

    async def _hold(self, session: ClientSession, since: float) -> None:
        """Let calls go through until the connection is lost, which is noted, or no longer wanted.

        What is left to do then, such as ending a process, keeps nobody from knowing it.
        """
        self.connections += 1
        self.session = session
        if self.breaker is not None:  # what earlier calls came to opens the circuit only together with a new one
            self._calls_in_a_row = min(self._calls_in_a_row, self.breaker.failures - 1)
        self._open_until = -math.inf
        self._doubt = trio.Event()
        self._become(UpstreamState.UP)
        try:
            async with open_service_nursery() as nursery:
                nursery.start_soon(self._watch, session)
                await first_of(self._wish.wait, session.wait_lost)
        finally:
            self.session = None
            self._changed.unpark_all()
        if not self._wish.is_set():
            lost = session.session.lost
            self._note("the session was closed" if lost is None else str(lost), since)
            self._become(UpstreamState.OPEN if self._open else UpstreamState.WAITING)

    def _note(self, why: str, stood: float | None) -> None:
        """Count a connection that failed, or that was lost."""
        self.reasons.append(why)
        if stood is None:
            self.failed_attempts += 1
        else:
            self.losses += 1
        if stood is not None and trio.current_time() - stood >= self.restarts.lasting:
            self._in_a_row = 0
        else:
            self._in_a_row += 1

    async def _pause(self) -> None:
        """Wait until the next attempt is due, or for `restart` if there were too many."""
        now = trio.current_time()
        while self._recent and self._recent[0] <= now - self.restarts.within:
            self._recent.popleft()
        if len(self._recent) >= self.restarts.most:
            self._become(UpstreamState.GIVEN_UP)
            await self._wish.wait()
            return
        pause = self.restarts.pause(self._in_a_row, self.random)
        if self._open and self.breaker is not None:
            pause += self._open_until - now if self._open_until > now else self.breaker.open_for
        self._recent.append(now + pause)
        self._become(UpstreamState.OPEN if self._open else UpstreamState.WAITING, now + pause)
        with trio.move_on_after(pause):
            await self._wish.wait()

    def _become(self, state: UpstreamState, next_attempt: float | None = None) -> None:
        """Go into a state, say so in the log, and wake whoever waits for a change."""
        before, self.state, self.next_attempt = self.state, state, next_attempt
        now = trio.current_time()
        self.since = self.since if before is state else now
        self._changed.unpark_all()
        text = "" if state in (UpstreamState.UP, UpstreamState.ENDED) or not self.reasons else self.reasons[-1]
        if state is UpstreamState.UP:
            text = f"connection {self.connections}"
        elif next_attempt is not None:
            text = f"tried again in {next_attempt - now:.3g} s: {text}"
        level = logging.DEBUG if state is before else _LEVELS.get(state, logging.DEBUG)
        log.log(level, "upstream %r: %s -> %s: %s", self.name, before.value, state.value, one_line(text))

    # Watching a connection that stands

    async def _watch(self, session: ClientSession) -> None:
        """Ask a silent or doubted upstream whether it lives, and leave one alone that answers no calls."""
        health = self.health
        tick = math.inf if health is None else min(health.owing, health.idle)
        heard = trio.current_time()
        while True:
            _prick_up(session)
            with trio.move_on_after(tick):
                await self._doubt.wait()
            breaker = self.breaker
            if breaker is not None and self._calls_in_a_row >= breaker.failures:
                if not await self._leave_alone(session, breaker):
                    return
            elif health is not None:
                now = trio.current_time()
                heard = now if _heard(session) else heard
                silence = now - heard
                overdue = silence >= (health.owing if _owes(session) else health.idle)
                if (overdue or self._doubt.is_set()) and not await self._lives(session, health):
                    return
                heard = trio.current_time() if overdue else heard
            if self._doubt.is_set():
                self._doubt = trio.Event()
                self._changed.unpark_all()

    async def _leave_alone(self, session: ClientSession, breaker: Breaker) -> bool:
        """Open the circuit although the connection stands, then probe it; return whether it still stands."""
        failed = self._calls_in_a_row
        self.reasons.append("a call got no answer" if failed == 1 else f"{failed} calls in a row got no answer")
        self._open_until = trio.current_time() + breaker.open_for
        self._become(UpstreamState.OPEN, self._open_until)
        await trio.sleep_until(self._open_until)
        self._become(UpstreamState.PROBING)
        if not await self._lives(session, self.health or Health()):
            return False
        self._open_until = -math.inf
        self._calls_in_a_row = breaker.failures - 1  # on trial: the next call decides
        self._become(UpstreamState.UP)
        return True

    async def _lives(self, session: ClientSession, health: Health) -> bool:
        """Ask the upstream. If it says nothing at all the connection is given up, and pending calls fail now."""
        self.pings += 1
        _prick_up(session)
        try:
            with trio.fail_after(health.patience):
                await session.ping()
            return True
        except RemoteError:
            return True  # it does not know how to answer, but answers
        except (ConnectionLost, InvalidReply) as error:
            # Over HTTP a probe nobody answered comes back as an invalid reply, too, though as one without a size.
            if isinstance(error, InvalidReply) and _heard(session):
                return True
            why = str(error)
        except trio.TooSlowError:
            if _heard(session):
                return True
            why = f"the upstream was silent, and did not answer a ping for {health.patience:g} s"
        session.session.lose(why)
        session.session.close()
        return False


# The session's reader writes there the size of each message it takes, so that whether any came costs it nothing more.
# What a channel itself reports of a failed exchange has no size and is no sign of life.


def _prick_up(session: ClientSession) -> None:
    """From now on `_heard` tells whether a message arrived."""
    session.session.arriving = 0


def _heard(session: ClientSession) -> bool:
    return session.session.arriving > 0


def _owes(session: ClientSession) -> bool:
    """Whether a request is under way; a subscription is one that may be silent for days."""
    return any(pending.verb.name != _LISTEN for pending in session.session.pending.values())
