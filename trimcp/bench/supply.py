"""Which call begins when: at once when a place is free (closed loop), or at moments fixed beforehand (open loop).

It knows no connection. Whoever has a free place takes a call; who gets none waits for `Supply.wait` to call.
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

from trimcp.bench.plan import Plan
from trimcp.bench.requests import CLIENT, PreparedRequest
from trimcp.bench.tally import LATE, Tally
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION
from trimcp.wire.jsonrpc import encode_request
from trimcp.wire.revisions import Revision

INITIALIZED: Final = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
"""What ends the handshake of a legacy session."""

_GRAIN: Final = 0.002  # what timers are off by: the system's are told milliseconds
_NO_MEAN: Final = 0.001  # before the first answer


@attrs.define(eq=False)
class LoadCall:
    """One call that begins now; the first of a measurement has the number 1.

    Attributes:
        due: when it should have begun, from where its time counts.
        give_up: seconds after which it is given up.
        timeout: whether that is for its timeout.
    """

    number: int
    request: PreparedRequest
    due: float
    give_up: float = math.inf
    timeout: bool = False


@attrs.define(eq=False)
class Supply:
    """The calls of one measurement.

    Attributes:
        over: no more calls begin; `ended` is set then.
        under_way: calls that have begun and are not settled.
        settled: calls that are over, however they ended.
        milestone: how many are to be over for `on_milestone` to be called, once.
    """

    plan: Plan
    requests: Sequence[PreparedRequest]
    tally: Tally
    over: bool = attrs.field(init=False, default=False)
    ended: trio.Event = attrs.field(init=False, factory=trio.Event)
    under_way: int = attrs.field(init=False, default=0)
    settled: int = attrs.field(init=False, default=0)
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
        self._weights = list(accumulate(request.entry.weight for request in self.requests))
        self._only = self.requests[0] if len(self.requests) == 1 else None
        self._paced = self.plan.rate is not None
        self._gives_up = bool(self.plan.cancel) or self.plan.timeout is not None

    # What the measurement says

    def allow(self, calls: float) -> None:
        """Let so many calls begin, `math.inf` for any number."""
        self._left = calls
        self._allowed.set()
        if not self._paced:
            self._wake(len(self._waiting))

    def close(self, now: float) -> None:
        """Let no more calls begin. What an open loop did not come to is late, and not begun at all."""
        self.over = True
        self.ended.set()
        self._left = 0
        for due in self._backlog:
            if now - due > LATE:
                self._lose(now)
        self._backlog.clear()
        self._allowed.set()
        self._wake(len(self._waiting))

    async def pace(self) -> None:
        """Let the calls of an open loop arrive, until it is closed."""
        while not self.over:
            await self._allowed.wait()
            due = trio.current_time()
            while self._left > 0:
                now = trio.current_time()
                while due <= now and self._left > 0:
                    self._left -= 1
                    # What the timer adds is no delay that the server made.
                    self._arrive(now if now - due < _GRAIN else due, now)
                    due += self._interval()
                await trio.sleep_until(due)
            self._allowed = trio.Event()

    # What connections ask

    def take(self, now: float) -> LoadCall | None:
        """Return a call that is to begin now, None if there is none: all is over, or `wait` is to be called."""
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
        self.under_way += 1
        self._number += 1
        request = self._only or self._random.choices(self.requests, cum_weights=self._weights)[0]
        call = LoadCall(self._number, request, due)
        if self._gives_up:
            self._limit(call)
        return call

    def wait(self, wake: Callable[[], object]) -> None:
        """Have `wake` called once when there may be a call, or all is over. It must not raise."""
        self._waiting.append(wake)

    def pass_on(self) -> None:
        """Wake somebody else: who was woken cannot take a call."""
        if not self.exhausted:
            self._wake(1)

    def settle(self) -> None:
        """A call that was taken is over."""
        self.under_way -= 1
        self._settled()

    @property
    def exhausted(self) -> bool:
        """Whether all calls that were allowed have begun."""
        return self._left <= 0 and not self._backlog

    # How it is decided

    def _limit(self, call: LoadCall) -> None:
        """Decide whether the call is given up, and when."""
        plan = self.plan
        if plan.cancel and self._random.random() < plan.cancel:
            part = self._random.random() * (self.tally.mean or _NO_MEAN)
            call.give_up = part if plan.cancel_after is None else plan.cancel_after
        elif plan.timeout is not None and self._random.random() < plan.timeouts:
            call.give_up, call.timeout = plan.timeout, True

    def _interval(self) -> float:
        assert self.plan.rate is not None
        mean = 1 / self.plan.rate
        return mean if self.plan.spacing == "constant" else self._random.expovariate(1 / mean)

    def _arrive(self, due: float, now: float) -> None:
        if len(self._backlog) >= self.plan.backlog:
            self._lose(now)
        else:
            self._backlog.append(due)
            self._wake(1)

    def _lose(self, now: float) -> None:
        if self.tally.counting:
            self.tally.late += 1
        self.tally.wrong("not begun", "too many calls waited for a free place", now)
        self._settled()

    def _settled(self) -> None:
        self.settled += 1
        if self.settled >= self.milestone:
            self.milestone = math.inf
            self.on_milestone()

    def _wake(self, most: int) -> None:
        for _ in range(min(most, len(self._waiting))):
            self._waiting.popleft()()


@attrs.define(eq=False)
class Load:
    """What all sessions of a measurement share.

    Attributes:
        revision: what is spoken.
        ssl_context: what to trust at an https or wss URL; None for what this system trusts.
        pids: the child processes that were started.
        open: how many sessions can be used now.
        overdue: what is not answered by now is given up.
        replies: which kinds of reply have come over Streamable HTTP.
    """

    plan: Plan
    revision: Revision
    supply: Supply
    tally: Tally
    ssl_context: ssl.SSLContext | None = None
    pids: set[int] = attrs.field(init=False, factory=set)
    open: int = attrs.field(init=False, default=0)
    overdue: bool = attrs.field(init=False, default=False)
    replies: set[Literal["json", "sse"]] = attrs.field(init=False, factory=set)

    @property
    def reply(self) -> Literal["json", "sse", "mixed"] | None:
        """Which kind of reply has come over Streamable HTTP."""
        if len(self.replies) > 1:
            return "mixed"
        return next(iter(self.replies), None)

    def greeting(self) -> bytes:
        """Return the first request on a connection. Its id is 0, the calls' ids begin with 1.

        The modern era has no handshake, but a process that is just starting would let the first calls wait.
        """
        if self.revision.modern:
            meta = {META_PROTOCOL_VERSION: self.revision.name, META_CLIENT_INFO: CLIENT, META_CLIENT_CAPABILITIES: {}}
            return encode_request(0, "server/discover", {"_meta": meta})
        params = {"protocolVersion": self.revision.name, "capabilities": {}, "clientInfo": CLIENT}
        return encode_request(0, "initialize", params)

    async def again(self, attempt: int) -> bool:
        """Wait before something that failed is opened again, 0 times until now; False if it is not to be."""
        if self.supply.over or attempt >= self.plan.reopen:
            return False
        await trio.sleep(min(0.05 * 2**attempt, 2.0))
        return not self.supply.over
