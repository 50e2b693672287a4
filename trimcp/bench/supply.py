"""The times when calls begin: as soon as a place is free (closed loop), or at times fixed beforehand (open loop).

It is independent of connections. A connection with a free place takes a call; if it gets none, it uses `Supply.wait`.
"""

from __future__ import annotations

import math
import random
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, Literal

import attrs
import trio

from trimcp.bench.plan import CLIENT, Plan, PreparedRequest
from trimcp.bench.stages import Stages
from trimcp.bench.tally import LATE, Tally
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION
from trimcp.wire.jsonrpc import encode_request
from trimcp.wire.revisions import Revision

INITIALIZED: Final = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
"""The last message of a legacy session's handshake."""

_GRAIN: Final = 0.002  # the error of timers: the system's have a resolution of milliseconds
_NO_MEAN: Final = 0.001  # before the first answer


@attrs.define(eq=False)
class LoadCall:
    """One call that begins now; the first of a measurement has the number 1."""

    number: int
    request: PreparedRequest
    due: float  # when it should have begun; its time counts from here
    give_up: float = math.inf  # seconds after which it is abandoned
    timeout: bool = False  # whether it is abandoned for its timeout, not for a planned cancellation
    cut: bool = False  # whether its connection is to be cut, and its stream resumed
    heard: float | None = None  # when its last progress came
    progress: float = -math.inf  # the value of that


@attrs.define(eq=False)
class Seat:
    """The place of one session in a load: how many calls it may begin before it ends."""

    left: float = math.inf  # calls that it may still begin
    server: str | None = None  # which of several servers it is with; None for the only one
    on_leave: Callable[[], object] = lambda: None  # called when it is to leave; must not raise

    def leave(self) -> None:
        """Let the session end without another call."""
        self.left = 0
        self.on_leave()


@attrs.define(eq=False)
class Supply:
    """The calls of one measurement."""

    plan: Plan
    requests: Sequence[PreparedRequest]
    tally: Tally
    over: bool = attrs.field(init=False, default=False)  # whether no more calls begin; `ended` is set then
    ended: trio.Event = attrs.field(init=False, factory=trio.Event)
    under_way: int = attrs.field(init=False, default=0)  # calls that have begun and not ended
    done: int = attrs.field(init=False, default=0)  # calls that have ended, with any outcome
    # the value of `done` at which `on_milestone` is called, once
    milestone: float = attrs.field(init=False, default=math.inf)
    on_milestone: Callable[[], object] = attrs.field(init=False, default=lambda: None)
    _number: int = attrs.field(init=False, default=0)
    _left: float = attrs.field(init=False, default=0)
    _allowed: trio.Event = attrs.field(init=False, factory=trio.Event)
    _waiting: deque[Callable[[], object]] = attrs.field(init=False, factory=deque)
    _backlog: deque[float] = attrs.field(init=False, factory=deque)
    _random: random.Random = attrs.field(init=False)
    _weights: list[float] = attrs.field(init=False)
    _only: PreparedRequest | None = attrs.field(init=False)
    _paced: bool = attrs.field(init=False)
    _gives_up: bool = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._random = random.Random(self.plan.seed)
        self._number = self.plan.first_number
        self._weights = list(accumulate(request.entry.weight for request in self.requests))
        self._only = self.requests[0] if len(self.requests) == 1 else None
        self._paced = self.plan.paced
        self._gives_up = bool(self.plan.cancel or self.plan.cut) or self.plan.timeout is not None

    # Called by the measurement

    def allow(self, calls: float) -> None:
        """Allow this many calls to begin, `math.inf` for any number."""
        self._left = calls
        self._allowed.set()
        if not self._paced:
            self._wake(len(self._waiting))

    def close(self, now: float) -> None:
        """Let no more calls begin. Calls of an open loop that did not begin count as late."""
        self.over = True
        self.ended.set()
        self._left = 0
        for due in self._backlog:
            if now - due > LATE:
                self._lose("the measurement ended before it could begin", now)
        self._backlog.clear()
        self._allowed.set()
        self._wake(len(self._waiting))

    async def pace(self) -> None:
        """Make the calls of an open loop available at their times, until `close`."""
        course = self.plan.course or Stages.constant(self.plan.rate or 1.0)
        while not self.over:
            await self._allowed.wait()
            began = due = trio.current_time()
            begun = 0.0
            while self._left > 0:
                now = trio.current_time()
                while due <= now and self._left > 0:
                    self._left -= 1
                    # The delay of the timer is not the server's.
                    self._arrive(now if now - due < _GRAIN else due, now)
                    # Between two calls of a Poisson process lies one call in the mean, whatever the rate is then.
                    begun += 1.0 if self.plan.spacing == "constant" else self._random.expovariate(1.0)
                    due = began + course.after(begun)
                await trio.sleep_until(due)
            self._allowed = trio.Event()

    # Called by connections

    def take(self, now: float, seat: Seat | None = None) -> LoadCall | None:
        """Return a call to begin now. If None, call `wait`, unless `over` is true or the seat is left."""
        if seat is not None and seat.left <= 0:
            return None
        if self._paced:
            if not self._backlog:
                return None
            due = self._backlog.popleft()
            if now - due > LATE and self.tally.counting:
                self.tally.late += 1
        else:
            if self._left <= 0:
                return None
            self._left -= 1
            due = now
        if seat is not None:
            seat.left -= 1
        self.under_way += 1
        self._number += 1
        request = self._only or self._random.choices(self.requests, cum_weights=self._weights)[0]
        call = LoadCall(self._number, request, due)
        if self._gives_up:
            self._limit(call)
        return call

    def wait(self, wake: Callable[[], object]) -> None:
        """Call `wake` once when a call may be available, or no more begin. It must not raise."""
        self._waiting.append(wake)

    def pass_on(self) -> None:
        """Wake the next waiting connection instead: the one that was woken cannot take a call."""
        if not self.exhausted:
            self._wake(1)

    def count_ended(self) -> None:
        """Count the end of a call that was taken."""
        self.under_way -= 1
        self._ended()

    @property
    def exhausted(self) -> bool:
        """Whether all allowed calls have begun."""
        return self._left <= 0 and not self._backlog

    # Internal

    def _limit(self, call: LoadCall) -> None:
        """Decide whether and when the call is abandoned, or its connection cut."""
        plan = self.plan
        call.cut = plan.cut > 0 and self._random.random() < plan.cut
        if plan.cancel and self._random.random() < plan.cancel:
            part = self._random.random() * (self.tally.mean or _NO_MEAN)
            call.give_up = part if plan.cancel_after is None else plan.cancel_after
        elif plan.timeout is not None and self._random.random() < plan.timeouts:
            call.give_up, call.timeout = plan.timeout, True

    def _arrive(self, due: float, now: float) -> None:
        if len(self._backlog) >= self.plan.backlog:
            self._lose("too many calls waited for a free place", now)
        else:
            self._backlog.append(due)
            self._wake(1)

    def _lose(self, why: str, now: float) -> None:
        if self.tally.counting:
            self.tally.late += 1
        self.tally.wrong("not begun", why, now)
        self._ended()

    def _ended(self) -> None:
        self.done += 1
        if self.done >= self.milestone:
            self.milestone = math.inf
            self.on_milestone()

    def _wake(self, most: int) -> None:
        for _ in range(min(most, len(self._waiting))):
            self._waiting.popleft()()


@attrs.define(eq=False)
class Load:
    """The state shared by all sessions of a measurement."""

    plan: Plan
    revision: Revision  # the revision to use
    supply: Supply
    tally: Tally
    ssl_context: ssl.SSLContext | None = None  # certificates to trust at an https or wss URL; None for the system's
    pids: set[int] = attrs.field(init=False, factory=set)  # the child processes that were started
    open: int = attrs.field(init=False, default=0)  # the number of usable sessions
    overdue: bool = attrs.field(init=False, default=False)  # whether calls without a response are now abandoned
    # the kinds of responses received over Streamable HTTP
    replies: set[Literal["json", "sse"]] = attrs.field(init=False, factory=set)

    @property
    def reply(self) -> Literal["json", "sse", "mixed"] | None:
        """The kind of responses received over Streamable HTTP."""
        if len(self.replies) > 1:
            return "mixed"
        return next(iter(self.replies), None)

    def greeting(self) -> bytes:
        """Return the first request on a connection. Its id is 0; the ids of calls begin with 1.

        The modern era has no handshake, but the first request of a starting process waits until it is ready.
        """
        if self.revision.modern:
            meta = {META_PROTOCOL_VERSION: self.revision.name, META_CLIENT_INFO: CLIENT, META_CLIENT_CAPABILITIES: {}}
            return encode_request(0, "server/discover", {"_meta": meta})
        params = {"protocolVersion": self.revision.name, "capabilities": {}, "clientInfo": CLIENT}
        return encode_request(0, "initialize", params)

    async def again(self, attempt: int) -> bool:
        """Wait before opening again, after `attempt` earlier attempts; return False if no more are allowed."""
        if self.supply.over or attempt >= self.plan.reopen:
            return False
        await trio.sleep(min(0.05 * 2**attempt, 2.0))
        return not self.supply.over
