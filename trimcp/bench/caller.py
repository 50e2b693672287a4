"""The calls of one connection that carries many at a time: which wait for an answer, and whether it is the right one.

Sans-I/O: takes message texts as they came, gives message texts to send; whoever calls says what time it is.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Final

import attrs
import orjson

from trimcp.bench.shot import cancellation
from trimcp.bench.supply import LoadCall, Supply
from trimcp.wire.codes import METHOD_NOT_FOUND
from trimcp.wire.jsonrpc import encode_error, encode_result

__all__ = ["LoadCaller", "answer_to"]

_REMEMBERED: Final = 65_536  # calls given up, whose answers may still come


def answer_to(message: dict[str, Any]) -> bytes | None:
    """Return the answer to a request of the server's; None for a notification, and for one without a proper id.

    A load does nothing for a server but live: pings are answered, anything else is refused.
    """
    id = message.get("id")
    if not isinstance(id, str | int) or isinstance(id, bool):
        return None
    if message.get("method") == "ping":
        return encode_result(id, {})
    return encode_error(id, METHOD_NOT_FOUND, "this client only measures")


@attrs.define(eq=False)
class LoadCaller:
    """One session's calls over a connection that carries many at a time.

    Args:
        supply: where calls come from.
        places: how many may be under way.
        think: seconds that a place stays empty after an answer.
        wake: called when there may be something to send although nothing arrived. It must not raise.

    Attributes:
        greeting: the result of `initialize`, once it is there; an error's text if it was refused.
    """

    supply: Supply
    places: int
    think: float = 0.0
    wake: Callable[[], object] = lambda: None
    greeting: dict[str, Any] | str | None = None
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
        """Whether no call waits for its answer."""
        return not self._pending

    # What is to be sent

    def ready(self, now: float) -> list[bytes]:
        """Return what is to be sent now: answers to the server, calls for free places, cancellations due."""
        messages, self._answers = self._answers, []
        while self._thinking and self._thinking[0] <= now:
            self._thinking.popleft()
            self._free += 1
        if self._limits:
            self._expire(now, messages)
        supply, pending = self.supply, self._pending
        while self._free:
            call = supply.take(now)
            if call is None:
                self._wait()
                break
            self._free -= 1
            self._id = id = self._id + 1
            pending[id] = call
            messages.append(call.shot.render(id, call.number))
            if call.give_up < math.inf:
                heapq.heappush(self._limits, (now + call.give_up, id))
        return messages

    def due(self) -> float:
        """Return when `ready` is to be called although nothing came in: `math.inf` for never."""
        limit = self._limits[0][0] if self._limits else math.inf
        return min(limit, self._thinking[0]) if self._thinking else limit

    def _wait(self) -> None:
        """Leave word that there is a free place; also at the end of all, which has to be noticed."""
        if not self._is_waiting and not self.supply.over:
            self._is_waiting = True
            self.supply.wait(self._woken)

    def _woken(self) -> None:
        self._is_waiting = False
        self.wake()

    def _expire(self, now: float, messages: list[bytes]) -> None:
        while self._limits and self._limits[0][0] <= now:
            _, id = heapq.heappop(self._limits)
            call = self._pending.pop(id, None)
            if call is None:
                continue
            self._given_up[id] = None
            if len(self._given_up) > _REMEMBERED:
                self._given_up.popitem(last=False)
            messages.append(cancellation(id))
            self.supply.tally.given_up(timeout=call.timeout)
            self._settle(now)

    # What arrived

    def take(self, text: bytes, now: float) -> None:
        """Take in one message."""
        try:
            message = orjson.loads(text)
        except orjson.JSONDecodeError:
            if self.greeting is not None:  # what it says on starting up has nothing to do with a call
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
        trouble = call.shot.trouble(message, call.number)
        if trouble is None:
            self.supply.tally.right(now - call.due, now)
        else:
            self.supply.tally.wrong(*trouble, now)
        self._settle(now)

    def _settle(self, now: float) -> None:
        if self.think:
            self._thinking.append(now + self.think)
        else:
            self._free += 1
        self.supply.settle()

    def _unexpected(self, id: Any, message: dict[str, Any], now: float) -> None:
        if id == 0 and self.greeting is None:
            result = message.get("result")
            self.greeting = result if isinstance(result, dict) else repr(message.get("error"))
            self.wake()
        elif type(id) is int and id in self._given_up:
            del self._given_up[id]  # it crossed the cancellation
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
            elif token in self._pending:
                self.supply.tally.reported(1)
            elif token not in self._given_up:
                self.supply.tally.wrong("progress of no call", message, now)
        elif (answer := answer_to(message)) is not None:
            self._answers.append(answer)

    # The end of the connection

    def fail(self, id: object, kind: str, why: str, now: float) -> None:
        """A message could not be sent: the call of this id has failed, if it is one."""
        self.supply.tally.wrong(kind, why, now)
        if type(id) is int and self._pending.pop(id, None) is not None:
            self._settle(now)
        elif id == 0 and self.greeting is None:
            self.greeting = why
        self.wake()

    def lose(self, kind: str, why: str, now: float) -> None:
        """The connection is gone: every call that waits for its answer has failed."""
        lost, self._pending = self._pending, {}
        for _ in lost:
            self.supply.tally.wrong(kind, why, now)
            self.supply.settle()
        self.greeting = None
        self._free = self.places
        self._limits.clear()
        self._thinking.clear()
        self._answers.clear()
        self._given_up.clear()
