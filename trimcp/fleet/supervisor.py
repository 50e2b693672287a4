"""Keeps one connection open: reopens it when it is lost, pauses for a failing server, pings a silent one.

One task owns the connection and passes through the states of `UpstreamState`; callers use `upstream`. For why the
circuit breaker and the pauses are one state machine, see docs/design/upstreams.md.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from random import Random
from typing import Any, Final, TypeVar

import attrs
import trio

from trimcp.client.client import Client, Connectable, connecting
from trimcp.client.session import ClientSession
from trimcp.errors import ConnectionLost, InvalidReply, McpError, NotStarted, RemoteError, Stopped, UpstreamDown
from trimcp.fleet.combinators import first_of
from trimcp.support.bounds import checked
from trimcp.support.cleaning import log_crash, one_line
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.restarts import RestartCount, Restarts
from trimcp.support.slotted import valued
from trimcp.wire.codes import CANCELLED_BY_DRAIN
from trimcp.wire.methods import LISTEN
from trimcp.wire.revisions import Revision


@attrs.frozen(field_transformer=checked())
@valued
class Breaker:
    """When the circuit opens: for some time nothing is sent to the upstream, and calls fail at once.

    Then it is probed once, with a new connection or a ping over the present one. If that succeeds calls are sent again,
    but the first of them that fails opens the circuit again.

    Attributes:
        failures: consecutive connections that failed or did not last, or consecutive calls that got no answer. An
            error is an answer; a cancelled call does not count.
        open_for: seconds until the probe; a new connection is made after a further pause of `Restarts`.
    """

    failures: int = 5
    open_for: float = 30.0


@attrs.frozen(field_transformer=checked())
@valued
class Health:
    """When an upstream that sends nothing is pinged. Times are seconds of Trio's clock.

    Any message counts, including errors and progress of other calls. The ping is sent at the latest after twice the
    given time; after a call that got no answer, at once.

    Attributes:
        owing: seconds without a message while requests are in progress; subscriptions do not count.
        idle: seconds without a message while none are.
        patience: seconds to wait for a message after the ping; then the connection is closed.
    """

    owing: float = 15.0
    idle: float = 60.0
    patience: float = 10.0


class UpstreamState(Enum):
    """The state of a supervised upstream."""

    CONNECTING = "connecting"
    """A connection is being opened."""

    UP = "up"
    """There is a connection; calls can be made."""

    WAITING = "waiting"
    """The connection is lost, or its server shuts down; the next attempt is made after a pause."""

    OPEN = "open"
    """The circuit is open after too many failures in a row; calls fail at once."""

    PROBING = "probing"
    """The circuit is half open: one probe shows whether calls can be made again."""

    GIVEN_UP = "given up"
    """It was restarted too often; there is no further attempt until `restart`."""

    ENDED = "ended"
    """Its block was left."""


@attrs.frozen
@valued
class UpstreamStatistics:
    """A snapshot of one supervised upstream. Times are on Trio's clock.

    Attributes:
        state: its state.
        since: when it entered that state.
        next_attempt: when it reconnects or is probed, or None if no time is set.
        connections: connections that were opened.
        restarts: attempts to open one after the first.
        failed_attempts: attempts that failed.
        losses: connections that were lost.
        unanswered_calls: calls that ended without an answer although the connection was not lost.
        repeated_calls: calls made a second time.
        refused_calls: calls that failed at once, since it was down.
        pings: pings that were sent.
        reasons: why the last ten connections failed or were lost, the newest last. May quote the server: untrusted
            text.
    """

    state: UpstreamState
    since: float
    next_attempt: float | None = None
    connections: int = 0
    restarts: int = 0
    failed_attempts: int = 0
    losses: int = 0
    unanswered_calls: int = 0
    repeated_calls: int = 0
    refused_calls: int = 0
    pings: int = 0
    reasons: Sequence[str] = ()

    @property
    def last_reason(self) -> str | None:
        """The last of `reasons`, or None if there are none."""
        return self.reasons[-1] if self.reasons else None


log: logging.Logger = logging.getLogger("trimcp.client")

T = TypeVar("T")

_MOST_REASONS: Final = 10
_SHUT: Final = (UpstreamState.OPEN, UpstreamState.GIVEN_UP, UpstreamState.ENDED)
_LONGEST_REASON: Final = 500  # characters, which may be a server's text
_LEVELS: Final = {
    UpstreamState.UP: logging.INFO,
    UpstreamState.WAITING: logging.WARNING,
    UpstreamState.OPEN: logging.WARNING,
    UpstreamState.GIVEN_UP: logging.ERROR,
}


@attrs.define(eq=False, repr=False)
class Supervisor:
    """One upstream: its connection, its state, its counts. `run` is its task.

    It has more than 300 lines because one task opens, watches, gives up and opens again one connection, and counts
    it.
    """

    client: Client
    target: Connectable
    name: str
    revision: Revision | str | None
    restarts: Restarts
    breaker: Breaker | None
    health: Health | None
    random: Random
    session: ClientSession | None = attrs.field(init=False, default=None)  # the current connection, or None
    _retired: ClientSession | None = attrs.field(init=False, default=None)
    statistics: UpstreamStatistics = attrs.field(init=False)  # its state and counts, a new record after each change
    _count: RestartCount = attrs.field(init=False)
    _calls_in_a_row: int = attrs.field(init=False, default=0)
    _open_until: float = attrs.field(init=False, default=-math.inf)
    _leaving: bool = attrs.field(init=False, default=False)
    _interrupted: trio.Event = attrs.field(init=False, factory=trio.Event)
    _suspected: trio.Event = attrs.field(init=False, factory=trio.Event)
    _opening: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _changed: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        self._count = RestartCount(self.restarts, self.random)
        self.statistics = UpstreamStatistics(UpstreamState.CONNECTING, since=trio.current_time())

    # For callers

    @property
    def state(self) -> UpstreamState:
        return self.statistics.state

    async def usable(self, wait: bool) -> ClientSession:
        """Return the connection for calls. With `wait`, wait for one, unless the circuit is open or it was given up.

        Raises UpstreamDown: there is none.
        """
        while (session := self._usable) is None:
            if not wait or self.state in _SHUT:
                self.count("refused_calls")
                raise self.down()
            await self._changed.park()
        return session

    async def connected(self) -> ClientSession:
        """Wait for a connection, even while the circuit is open.

        Raises UpstreamDown: there will be none: the upstream was given up, or its block was left.
        """
        while (session := self._usable) is None:
            if self.state in (UpstreamState.GIVEN_UP, UpstreamState.ENDED):
                raise self.down()
            await self._changed.park()
        return session

    @property
    def _usable(self) -> ClientSession | None:
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
        """Return the error for a call that gets no connection now."""
        known = self.statistics
        text = f"the upstream {self.name!r} "
        reason = one_line(known.last_reason or "", _LONGEST_REASON)
        if self.state is UpstreamState.ENDED:
            return UpstreamDown(f"{text}was left", known.reasons, None, True)
        if self.state is UpstreamState.GIVEN_UP:
            most, within = self.restarts.most, self.restarts.within
            text += f"was given up after {most} restarts within {within:g} s; the last reason: {reason}"
            return UpstreamDown(text, known.reasons, None, True)
        text += "is down" if known.connections or known.failed_attempts else "is not connected yet"
        text += f": {reason}" if reason else ""
        if known.next_attempt is None:
            now = self.state in (UpstreamState.CONNECTING, UpstreamState.PROBING)
            return UpstreamDown(f"{text}; it is {'being tried now' if now else 'tried again soon'}", known.reasons)
        left = max(0.0, known.next_attempt - trio.current_time())
        return UpstreamDown(f"{text}; it is tried again in {left:.3g} s", known.reasons, known.next_attempt)

    def count(self, name: str) -> None:
        """Add 1 to a count of the statistics."""
        self._change(**{name: getattr(self.statistics, name) + 1})

    def _change(self, **changes: Any) -> None:
        self.statistics = attrs.evolve(self.statistics, **changes)

    async def call(self, ask: Callable[[ClientSession], Awaitable[T]], session: ClientSession) -> T:
        """Make a call over this connection, and note whether it was answered. A cancelled call counts as neither."""
        try:
            answer = await ask(session)
        except (RemoteError, InvalidReply) as error:
            self._calls_in_a_row = 0
            if isinstance(error, NotStarted | Stopped):
                self._retire(session, str(error))
            elif isinstance(error, RemoteError) and error.code == CANCELLED_BY_DRAIN:
                self.suspect(session)
            raise
        except (ConnectionLost, trio.TooSlowError) as error:
            if self.suspect(session):
                self.count("unanswered_calls")
                self._calls_in_a_row += 1
            if self.health is None and isinstance(error, ConnectionLost) and error.nothing_sent:
                self._retire(session, str(error))  # over HTTP: nobody listens, and nothing else would tell
            raise
        finally:
            self.released(session)
        self._calls_in_a_row = 0
        return answer

    def suspect(self, session: ClientSession) -> bool:
        """Have this connection checked now, as it may no longer work. Return whether it is still the present one."""
        current = session is self.session and session.session.lost is None
        if current:
            self._suspected.set()
        return current

    def _retire(self, session: ClientSession, why: str) -> None:
        """Make no more calls over this connection, whose server shuts down. It stays until those under way ended."""
        if session is self.session and session.session.lost is None:
            self.session, self._retired = None, session
            self._add_reason(why)
            self._become(UpstreamState.WAITING)
            self._suspected.set()

    def released(self, session: ClientSession) -> None:
        """Note that somebody no longer uses this connection: if it was the last call over one that ends, it may."""
        if session is self._retired:
            self._suspected.set()

    async def wait_checked(self, session: ClientSession) -> None:
        """Wait until a suspected connection has been checked."""
        if self.health is not None:
            while self.state is UpstreamState.UP and session is self.session and self._suspected.is_set():
                await self._changed.park()

    def restart(self) -> None:
        """Close the current connection, forget all failures, and open a new one now; see `Upstream.restart`."""
        if self._leaving:
            raise self.down()
        self._count.forget()
        self._calls_in_a_row = 0
        self._open_until = -math.inf
        self._interrupt()
        self.session = None  # later calls get the new one
        self._become(UpstreamState.CONNECTING)

    def leave(self) -> None:
        """End: close the connection gracefully, or stop opening one at once."""
        self._leaving = True
        self._interrupt()

    def _interrupt(self) -> None:
        self._interrupted.set()
        if self.session is None:
            self._opening.cancel(reason="the upstream was left" if self._leaving else "the upstream is restarted")

    # Its task

    async def run(self) -> None:
        """Keep a connection open until `leave`; the state is ENDED once the last one is closed."""
        try:
            while not self._leaving:
                self._interrupted = trio.Event()
                self._become(UpstreamState.PROBING if self._open else UpstreamState.CONNECTING)
                await self._connect()
                if not self._interrupted.is_set():
                    await self._pause()
                if not self._leaving:
                    self.count("restarts")
        finally:
            self._become(UpstreamState.ENDED)

    @property
    def _open(self) -> bool:
        """Whether the circuit is open, because of failed connections or of failed calls over the last one."""
        breaker = self.breaker
        return breaker is not None and (self._count.in_a_row >= breaker.failures or self._open_until > -math.inf)

    async def _connect(self) -> None:
        """Open a connection and keep it until it is lost; record what went wrong."""
        why: str | None = "it was given up"
        stood: float | None = None
        opening = self._opening = trio.CancelScope()
        try:
            with opening:
                limit = self.restarts.connect_timeout
                async with connecting(self.client, self.target, self.revision, limit) as session:
                    stood = trio.current_time()
                    await self._hold(session, stood)
                    why = None
        except Exception as error:  # any failure is this upstream's and no caller's
            if not isinstance(error, McpError | OSError | trio.TooSlowError):
                log_crash(log, error, "the connection to the upstream %r failed", self.name)
            why = None if why is None else str(error) or type(error).__name__
        if why is not None and not self._interrupted.is_set():
            self._note(why, stood)

    async def _hold(self, session: ClientSession, since: float) -> None:
        """Allow calls until the connection is lost or no longer wanted.

        A loss is recorded before the connection is closed, which may take some time if a process has to be ended.
        """
        self.count("connections")
        self.session = session
        if self.breaker is not None:  # earlier failures open the circuit only together with a new one
            self._calls_in_a_row = min(self._calls_in_a_row, self.breaker.failures - 1)
        self._open_until = -math.inf
        self._suspected = trio.Event()
        self._become(UpstreamState.UP)
        try:
            async with open_service_nursery() as nursery:
                nursery.start_soon(self._watch, session)
                await first_of(self._interrupted.wait, session.wait_lost)
        finally:
            retired = self._retired is session
            self.session = self._retired = None
            self._changed.unpark_all()
        if not self._interrupted.is_set():
            lost = session.session.lost
            why = None if retired else "the session was closed" if lost is None else str(lost)
            self._note(why, since)
            self._become(UpstreamState.OPEN if self._open else UpstreamState.WAITING)

    def _note(self, why: str | None, stood: float | None) -> None:
        """Count a connection that failed, or that was lost. The reason is None if it is known already."""
        if why is not None:
            self._add_reason(why)
        self.count("failed_attempts" if stood is None else "losses")
        self._count.ended(trio.current_time(), stood)

    def _add_reason(self, why: str) -> None:
        self._change(reasons=(*self.statistics.reasons, why)[-_MOST_REASONS:])

    async def _pause(self) -> None:
        """Wait until the next attempt is due, or for `restart` if there were too many."""
        now, longer = trio.current_time(), 0.0
        if self._open and self.breaker is not None:
            longer = self._open_until - now if self._open_until > now else self.breaker.open_for
        pause = self._count.next_pause(now, longer)
        if pause is None:
            self._become(UpstreamState.GIVEN_UP)
            await self._interrupted.wait()
            return
        self._become(UpstreamState.OPEN if self._open else UpstreamState.WAITING, now + pause)
        with trio.move_on_after(pause):
            await self._interrupted.wait()

    def _become(self, state: UpstreamState, next_attempt: float | None = None) -> None:
        """Change the state, log it, and wake the tasks that wait for a change."""
        before, now = self.state, trio.current_time()
        self._change(state=state, since=self.statistics.since if before is state else now, next_attempt=next_attempt)
        self._changed.unpark_all()
        text = "" if state is UpstreamState.ENDED else self.statistics.last_reason or ""
        if state is UpstreamState.UP:
            text = f"connection {self.statistics.connections}"
        elif next_attempt is not None:
            text = f"tried again in {next_attempt - now:.3g} s: {text}"
        level = logging.DEBUG if state is before else _LEVELS.get(state, logging.DEBUG)
        shown = one_line(text, _LONGEST_REASON)
        log.log(level, "upstream %r: %s -> %s: %s", self.name, before.value, state.value, shown)

    # Watching a connection that is up

    async def _watch(self, session: ClientSession) -> None:
        """Ping an upstream that is silent or suspected, and open the circuit of one that answers no calls."""
        health = self.health
        tick = math.inf if health is None else min(health.owing, health.idle)
        heard = trio.current_time()
        while True:
            _reset_activity(session)
            with trio.move_on_after(tick):
                await self._suspected.wait()
            breaker, retired = self.breaker, session is self._retired
            if retired and not _owes(session):
                _end(session, "the server is shutting down")
                return
            if breaker is not None and self._calls_in_a_row >= breaker.failures and not retired:
                if not await self._open_circuit(session, breaker):
                    return
            elif health is not None:
                now = trio.current_time()
                heard = now if _heard(session) else heard
                silence = now - heard
                overdue = silence >= (health.owing if _owes(session) else health.idle)
                if (overdue or (self._suspected.is_set() and not retired)) and not await self._answers(
                    session, health, talks=not overdue and _owes(session)
                ):
                    return
                heard = trio.current_time() if overdue else heard
            if self._suspected.is_set() and (retired or session is not self._retired):
                self._suspected = trio.Event()
                self._changed.unpark_all()

    async def _open_circuit(self, session: ClientSession, breaker: Breaker) -> bool:
        """Open the circuit although the connection is up, then probe it; return whether it is still up."""
        failed = self._calls_in_a_row
        self._add_reason("a call got no answer" if failed == 1 else f"{failed} calls in a row got no answer")
        self._open_until = trio.current_time() + breaker.open_for
        self._become(UpstreamState.OPEN, self._open_until)
        await trio.sleep_until(self._open_until)
        self._become(UpstreamState.PROBING)
        if not await self._answers(session, self.health or Health()):
            return False
        self._open_until = -math.inf
        self._calls_in_a_row = breaker.failures - 1  # the next call that fails opens the circuit again
        self._become(UpstreamState.UP)
        return True

    async def _answers(self, session: ClientSession, health: Health, *, talks: bool = False) -> bool:
        """Ping the upstream. If nothing arrives the connection is closed, and pending calls fail now.

        One that still answers calls (`talks`) although it takes no more is spared until those have ended, as over HTTP
        a server that shuts down, which listens no more.
        """
        self.count("pings")
        _reset_activity(session)
        try:
            with trio.fail_after(health.patience):
                await session.ping()
            return True
        except RemoteError:
            return True  # it does not support pings, but it answers
        except (ConnectionLost, InvalidReply) as error:
            # Over HTTP an unanswered ping is also reported as an invalid reply, but one without a size.
            if isinstance(error, InvalidReply) and _heard(session):
                return True
            why = str(error)
            if talks and session.session.lost is None:
                self._retire(session, why)
                return True
        except trio.TooSlowError:
            if _heard(session):
                return True
            why = f"the upstream was silent, and did not answer a ping for {health.patience:g} s"
        _end(session, why)
        return False


# `arriving` is the size of the message that the session's reader processed last. A channel's own report of a failed
# exchange has no size, so it does not count as a message of the server.


def _reset_activity(session: ClientSession) -> None:
    """Reset, so that `_heard` counts only messages from now on."""
    session.session.memory.arriving = 0


def _end(session: ClientSession, why: str) -> None:
    """Close a connection. Calls over it fail now."""
    session.session.lose(why)
    session.session.close()


def _heard(session: ClientSession) -> bool:
    return session.session.memory.arriving > 0


def _owes(session: ClientSession) -> bool:
    """Return whether a request is in progress; subscriptions do not count, as they may be silent for days."""
    return any(pending.method.name != LISTEN for pending in session.session.pending.values())
