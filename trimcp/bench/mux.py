"""One session over a connection with many concurrent calls: its handshake and its calls.

It is independent of the transport, which is a `LoadChannel`; a transport may send through a `Writer`.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final, Protocol, TypeAlias

import attrs
import orjson
import trio

from trimcp.bench.plan import cancellation
from trimcp.bench.replicas import UNTOLD, named_by_message
from trimcp.bench.supply import INITIALIZED, Load, LoadCall, Seat, Supply
from trimcp.bench.tally import Tally
from trimcp.wire.codes import METHOD_NOT_FOUND
from trimcp.wire.jsonrpc import encode_error, encode_result

_REMEMBERED: Final = 65_536  # abandoned calls whose responses may still arrive


def _answer_to(message: dict[str, Any]) -> bytes | None:
    """Return the response to a request from the server; None for a notification, or without a valid id.

    Pings are answered, all other requests are refused.
    """
    id = message.get("id")
    if not isinstance(id, str | int) or isinstance(id, bool):
        return None
    if message.get("method") == "ping":
        return encode_result(id, {})
    return encode_error(id, METHOD_NOT_FOUND, "this client only measures")


@attrs.define(eq=False)
class LoadCaller:
    """The calls of one connection: matches and checks their responses.

    It does no I/O: it takes received messages and returns messages to send; the caller passes the time.
    """

    supply: Supply  # the source of calls
    places: int  # the maximum number of concurrent calls
    think: float = 0.0  # seconds between a response and the next call in its place
    # called when there may be a message to send although none arrived. It must not raise.
    wake: Callable[[], object] = lambda: None
    # the result of `initialize`, once received; an error's text if it was refused
    greeting: dict[str, Any] | str | None = None
    seat: Seat = attrs.field(factory=Seat)  # how many calls it makes
    replica: str | None = None  # who answers, where the connection or its handshake tells it and an answer does not
    _free: int = attrs.field(init=False)
    _id: int = attrs.field(init=False, default=0)
    _pending: dict[int, LoadCall] = attrs.field(init=False, factory=dict)
    _given_up: OrderedDict[int, None] = attrs.field(init=False, factory=OrderedDict)
    _limits: list[tuple[float, int]] = attrs.field(init=False, factory=list)
    _thinking: deque[float] = attrs.field(init=False, factory=deque)
    _answers: list[bytes] = attrs.field(init=False, factory=list)
    _is_waiting: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._free = self.places

    @property
    def idle(self) -> bool:
        """Whether no call waits for its response."""
        return not self._pending

    # Messages to send

    def ready(self, now: float) -> list[bytes]:
        """Return the messages to send now: responses to the server, calls for free places, due cancellations."""
        messages = self.answers()
        while self._thinking and self._thinking[0] <= now:
            self._thinking.popleft()
            self._free += 1
        if self._limits:
            self._expire(now, messages)
        supply, pending = self.supply, self._pending
        while self._free:
            call = supply.take(now, self.seat)
            if call is None:
                self._wait()
                break
            self._free -= 1
            self._id = id = self._id + 1
            pending[id] = call
            messages.append(call.request.render(id, call.number))
            if call.give_up < math.inf:
                heapq.heappush(self._limits, (now + call.give_up, id))
        return messages

    def due(self) -> float:
        """Return the time for the next `ready` without a received message: `math.inf` for never."""
        limit = self._limits[0][0] if self._limits else math.inf
        return min(limit, self._thinking[0]) if self._thinking else limit

    def _wait(self) -> None:
        """Register a free place with the supply; it also wakes when no more calls begin."""
        if not self._is_waiting and not self.supply.over and self.seat.left > 0:
            self._is_waiting = True
            self.supply.wait(self._woken)

    def _woken(self) -> None:
        self._is_waiting = False
        if self.seat.left <= 0:
            self.supply.pass_on()
        self.wake()

    def _expire(self, now: float, messages: list[bytes]) -> None:
        while self._limits and self._limits[0][0] <= now:
            _, id = heapq.heappop(self._limits)
            if self.give_up(id, now):
                messages.append(cancellation(id))

    # Calls that the transport sends itself

    def begin(self, id: int, call: LoadCall) -> None:
        """Expect the response to this call."""
        self._id = id
        self._pending[id] = call

    def give_up(self, id: int, now: float) -> bool:
        """Stop expecting the response to a call; return False if it has already arrived."""
        call = self._pending.pop(id, None)
        if call is None:
            return False
        self._given_up[id] = None
        if len(self._given_up) > _REMEMBERED:
            self._given_up.popitem(last=False)
        self.supply.tally.given_up(timeout=call.timeout)
        self._end(now)
        return True

    def answers(self) -> list[bytes]:
        """Return the responses to requests from the server, to be sent."""
        answers, self._answers = self._answers, []
        return answers

    # Received messages

    def take(self, text: bytes, now: float) -> None:
        """Process one received message."""
        try:
            message = orjson.loads(text)
        except orjson.JSONDecodeError:
            if self.greeting is not None:  # output during startup does not belong to a call
                self.supply.tally.wrong("not JSON", text.decode(errors="replace"), now)
            return
        for each in message if type(message) is list else (message,):
            if type(each) is not dict:
                self.supply.tally.wrong("no JSON-RPC", each, now)
            elif "method" in each:
                self._asked(each, now)
            else:
                self._answered(each, now)

    def _answered(self, message: dict[str, Any], now: float) -> None:
        id = message.get("id")
        call = self._pending.pop(id, None) if type(id) is int else None
        if call is None:
            self._unexpected(id, message, now)
            return
        wrong = call.request.check(message, call.number)
        if wrong is None:
            self.supply.tally.right(now - call.due, now, call.request.label)
        else:
            self.supply.tally.wrong(*wrong, now)
        self._credit(message, None if wrong is not None else now - call.due, now)
        self._end(now)

    def _credit(self, message: dict[str, Any], seconds: float | None, now: float) -> None:
        by = self.supply.plan.replica_by
        if by is not None or self.seat.server is not None:
            told = named_by_message(by, message) or self.replica or self.seat.server or UNTOLD
            self.supply.tally.answered_by(told, seconds, now)

    def _end(self, now: float) -> None:
        if self.think:
            self._thinking.append(now + self.think)
        else:
            self._free += 1
        self.supply.count_ended()

    def _unexpected(self, id: Any, message: dict[str, Any], now: float) -> None:
        if id == 0 and self.greeting is None:
            result = message.get("result")
            self.greeting = result if isinstance(result, dict) else repr(message.get("error"))
            self.replica = named_by_message(self.supply.plan.replica_by, message) or self.replica
            self.wake()
        elif type(id) is int and id in self._given_up:
            del self._given_up[id]  # it was sent before the cancellation arrived
        elif type(id) is int and 0 <= id <= self._id:
            self.supply.tally.wrong("answered twice", message, now)
        elif id is None and "error" in message:
            self.supply.tally.wrong("error without an id", message["error"], now)
        else:
            self.supply.tally.wrong("answer to no call", message, now)

    def _asked(self, message: dict[str, Any], now: float) -> None:
        if message["method"] == "notifications/progress":
            params = message.get("params")
            token = params.get("progressToken") if type(params) is dict else None
            if type(token) is not int:
                self.supply.tally.wrong("progress of no call", message, now)
            elif (call := self._pending.get(token)) is not None:
                self._hear(call, message, now)
            elif token not in self._given_up:
                self.supply.tally.wrong("progress of no call", message, now)
        elif (answer := _answer_to(message)) is not None:
            self._answers.append(answer)

    def _hear(self, call: LoadCall, message: dict[str, Any], now: float) -> None:
        """Count a progress notification: when it came, and whether its value is larger than the last."""
        tally, value = self.supply.tally, message["params"].get("progress")
        tally.reported(1)
        what = "first progress" if call.heard is None else "progress gap"
        tally.observe(f"{call.request.label}: {what}", now - (call.due if call.heard is None else call.heard))
        if type(value) not in (int, float) or value <= call.progress:
            tally.wrong("progress does not rise", message, now)
        else:
            call.progress = value
        call.heard = now

    # The end of the connection

    def fail(self, id: object, kind: str, why: str, now: float) -> None:
        """Count the failure of a message that could not be sent, and of its call if it was one."""
        self.supply.tally.wrong(kind, why, now)
        if type(id) is int and self._pending.pop(id, None) is not None:
            self._credit({}, None, now)
            self._end(now)
        elif id == 0 and self.greeting is None:
            self.greeting = why
        self.wake()

    def lose(self, kind: str, why: str, now: float) -> None:
        """Count every waiting call as failed, or one failure if none waits: the connection is lost for good."""
        lost, self._pending = self._pending, {}
        if not lost:
            self.supply.tally.wrong(kind, why, now)
        for _ in lost:
            self.supply.tally.wrong(kind, why, now)
            self._credit({}, None, now)
            self.supply.count_ended()


class LoadChannel(Protocol):
    """One connection for the load: sends and receives whole messages as bytes."""

    def send(self, messages: Sequence[bytes]) -> None:
        """Send without waiting what the system takes, and leave the rest to `run`. Does not raise."""

    async def run(self) -> None:
        """Send what `send` left over, until cancelled. Raises trio.BrokenResourceError: the connection broke."""

    async def receive(self) -> Sequence[bytes]:
        """Return all messages that have arrived, perhaps none. Cancelling it loses nothing.

        Raises trio.EndOfChannel or trio.BrokenResourceError: the connection has ended.
        """
        ...

    async def close_reason(self) -> str:
        """Return how the connection ended, as text."""
        ...


Opener: TypeAlias = Callable[[Load, LoadCaller], AbstractAsyncContextManager[LoadChannel]]
"""Opens a connection, within `Plan.opening`. Raises McpError if it cannot; leaving the block closes it."""


async def multiplexed(connect: Opener, load: Load, seat: Seat, usable: Callable[[], object]) -> bool:
    """Run a session whose calls share one connection; see `SessionRunner`."""
    caller = LoadCaller(load.supply, load.plan.places, load.plan.think, seat=seat)
    async with connect(load, caller) as channel:
        return await _Conversation(load, caller, channel).run(usable)


@attrs.define(eq=False)
class _Conversation:
    """One connection, from its handshake to its end."""

    _load: Load
    _caller: LoadCaller
    _channel: LoadChannel
    _scope: trio.CancelScope = attrs.field(init=False)
    _timer: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _greeted: trio.Event = attrs.field(init=False, factory=trio.Event)
    _is_open: bool = attrs.field(init=False, default=False)
    _kind: str = attrs.field(init=False, default="")
    _why: str | None = attrs.field(init=False, default=None)

    async def run(self, usable: Callable[[], object]) -> bool:
        load, caller = self._load, self._caller
        caller.wake = caller.seat.on_leave = self._kick
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                nursery.start_soon(self._write)
                nursery.start_soon(self._read)
                if await self._greet():
                    self._is_open = True
                    load.open += 1
                    usable()
                    nursery.start_soon(self._keep_time)
                    self._pump(trio.current_time())
        except BaseException:  # cancelled, in whatever groups; noted only, where what is under way is overdue as well
            if load.overdue and not caller.idle:
                caller.lose("no answer", f"none came within {load.plan.patience:g} seconds", trio.current_time())
            raise
        finally:
            caller.wake = load.supply.pass_on
            load.open -= self._is_open
        if self._why is not None:
            caller.lose(self._kind, self._why, trio.current_time())
        return self._why is None

    def _end(self, kind: str, why: str) -> None:
        if self._why is None:
            self._kind, self._why = kind, why
        self._scope.cancel()

    async def _lost(self) -> None:
        self._end("connection lost" if self._is_open else "no connection", await self._channel.close_reason())

    async def _greet(self) -> bool:
        """Do the handshake, or without one wait for a first response; return False if none arrives."""
        load = self._load
        self._channel.send([load.greeting()])
        with trio.move_on_after(load.plan.opening):
            await self._greeted.wait()
        greeting = self._caller.greeting
        if greeting is not None and load.revision.modern:
            return True
        if isinstance(greeting, dict):
            self._channel.send([INITIALIZED])
            return True
        self._end("no connection", greeting or f"the server was not ready within {load.plan.opening:g} seconds")
        return False

    # The three tasks

    async def _write(self) -> None:
        try:
            await self._channel.run()
        except trio.BrokenResourceError:
            await self._lost()

    async def _read(self) -> None:
        caller, receive = self._caller, self._channel.receive
        try:
            while True:
                texts = await receive()
                now = trio.current_time()
                for text in texts:
                    caller.take(text, now)
                self._pump(now)
        except (trio.EndOfChannel, trio.BrokenResourceError):
            await self._lost()

    async def _keep_time(self) -> None:
        """Wake up for due timeouts, cancellations and ends of think times."""
        while True:
            self._timer = trio.CancelScope(deadline=self._caller.due())
            with self._timer:
                await trio.sleep_forever()
            self._pump(trio.current_time())

    # Beginning calls

    def _kick(self) -> None:
        if self._caller.greeting is not None:
            self._greeted.set()
        self._pump(trio.current_time())

    def _pump(self, now: float) -> None:
        if not self._is_open:
            return
        caller = self._caller
        messages = caller.ready(now)
        if messages:
            self._channel.send(messages)
        due = caller.due()
        if due < self._timer.deadline:
            self._timer.deadline = due
        if caller.idle and (self._load.supply.over or caller.seat.left <= 0):
            self._scope.cancel()


@attrs.define(eq=False)
class Writer:
    """Sends without waiting as much as the system takes, and the rest in `run`, so that the reader never waits.

    Its buffer is bounded by the number of concurrent calls.
    """

    # sends without waiting and returns how many bytes the system took; None if not supported
    _send_nowait: Callable[[bytes], int] | None
    _send_all: Callable[[bytes], Awaitable[object]]  # sends everything
    _tally: Tally  # counts the bytes
    _waiting: list[bytes] = attrs.field(init=False, factory=list)
    _is_busy: bool = attrs.field(init=False, default=False)
    _more: trio.Event = attrs.field(init=False, factory=trio.Event)

    def write(self, data: bytes) -> None:
        """Send without waiting, and buffer the rest. Does not raise: if the connection broke, `run` does."""
        self._tally.bytes_out += len(data)
        if not self._is_busy and self._send_nowait is not None:
            sent = 0
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                sent = self._send_nowait(data)
            if sent == len(data):
                return
            data = data[sent:]
        self._is_busy = True
        self._waiting.append(data)
        self._more.set()

    async def run(self) -> None:
        """Send what `write` has buffered, until cancelled. Raises as `send_all` does."""
        while True:
            await self._more.wait()
            self._more = trio.Event()
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                await self._send_all(b"".join(waiting))
            self._is_busy = False
