"""A call of ours from its first request to its final answer, including questions in between and progress.

This module knows nothing of tools or handlers: a `Caller` answers questions and checks results. A call may take several
rounds (2026-07-28 basic/patterns/mrtr), each a request with a new id. Progress of all rounds is reported together.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import attrs
import trio

from trimcp.errors import AnsweredByTask, ConnectionLost, InvalidReply, RemoteError
from trimcp.protocol.events import Replied
from trimcp.session.clock import Clocks, WorkClock
from trimcp.session.outgoing.pending import Pending
from trimcp.session.scopes import cancellation_text
from trimcp.session.session import Session
from trimcp.support.nurseries import unwrap_single
from trimcp.wire.codes import HEADER_MISMATCH
from trimcp.wire.common import META_TIMEOUT
from trimcp.wire.converter import converter_for
from trimcp.wire.input_requests import InputRequest, InputRequiredResult
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.lifecycle import ProgressParams

ResultT = TypeVar("ResultT")


class Caller(Protocol):
    """The object on whose behalf a call is made."""

    async def allow(self, rounds: Rounds) -> None:
        """Raise if the call is not allowed; nothing was sent yet. May set its `headers`."""

    async def refresh(self, rounds: Rounds) -> None:
        """Set new `headers` for a call, because the peer refused the previous ones."""

    async def answer(self, question: InputRequest) -> Any:
        """Return the payload that answers one question of the server."""

    async def follow(self, rounds: Rounds, task: dict[str, Any]) -> Any:
        """Return the final payload of a call that was answered with a task."""

    def check(self, rounds: Rounds, payload: Any) -> None:
        """Check the final payload; raises `InvalidReply` if it is not valid."""


@attrs.define(eq=False, repr=False)
class Rounds:
    """One call: a request and, while the answer consists of questions, the same request again with their answers."""

    session: Session
    caller: Caller
    # `name`, `params`: the method and its payload; the questions' answers are added to a copy
    name: str
    params: Any
    left: int  # how many more rounds of questions are answered
    meta: Mapping[str, JSON] | None = None  # added to `_meta` of every round, or None
    # `on_progress`, `on_reply`: called with progress and with each reply, or None
    on_progress: Callable[[ProgressParams], object] | None = None
    on_reply: Callable[[Replied], object] | None = None
    headers: Mapping[str, str] | None = None  # additional headers of every round, or None if the channel carries none
    deadline: float = math.inf  # when the caller stops waiting, on Trio's clock; the peer is sent the remaining seconds
    # whether there was a question. The result then depends on its answers.
    asked: bool = attrs.field(init=False, default=False)
    _pending: Pending | None = attrs.field(init=False, default=None)

    async def begin(self) -> Pending:
        """Send the request of this round. If cancelled, it has sent nothing."""
        meta = self.meta
        if self.deadline != math.inf:
            # Up to the next millisecond: the peer must not give up before our own scopes do, or the caller would get
            # its error instead of being cancelled. The last digits are those of the clock's arithmetic.
            left = math.ceil(max(0.0, self.deadline - trio.current_time()) * 1_000 - 1e-4) / 1_000
            meta = {META_TIMEOUT: left} if meta is None else {META_TIMEOUT: left, **meta}
        pending = self._pending = await self.session.start_call(
            self.name,
            self.params,
            meta=meta,
            headers=self.headers,
            on_progress=self.on_progress,
            on_reply=self.on_reply,
        )
        return pending

    async def payload(self) -> Any:
        """Wait for the final answer and return its payload; answer the server's questions meanwhile.

        If the peer refused the headers, and so did nothing, the request is sent once more with new ones. Cancelling
        this tells the peer, which stops its handler. Raises as `Session.call`, and what the caller raises in place of
        an answer.
        """
        pending = self._pending
        assert pending is not None
        try:
            try:
                payload = await pending.payload()
            except RemoteError as error:
                if not self.headers_refused(error):
                    raise
                await self.caller.refresh(self)
                pending = await self.begin()
                payload = await pending.payload()
            while type(payload) is InputRequiredResult:
                pending = await self._answer(payload)
                payload = await pending.payload()
        except trio.Cancelled as cancelled:
            self.abandon(cancellation_text(cancelled))
            raise
        except AnsweredByTask as answered:
            task = answered.task
        else:
            self.caller.check(self, payload)
            return payload
        return await self.caller.follow(self, task)

    def headers_refused(self, error: Exception | None) -> bool:
        """Whether other headers may lead to another answer (2026-07-28 streamable-http, "Client Behavior")."""
        return self.headers is not None and isinstance(error, RemoteError) and error.code == HEADER_MISMATCH

    def payload_now(self) -> Any:
        """Return the final payload of an answer that has arrived and asks nothing; raises as `payload` does."""
        assert self._pending is not None
        payload = self._pending.payload_now()
        self.caller.check(self, payload)
        return payload

    def abandon(self, why: str) -> None:
        """Cancel the request in progress, if any, and tell the peer. Never blocks."""
        if self._pending is not None:
            self.session.abandon(self._pending, why)

    async def _answer(self, asked: InputRequiredResult) -> Pending:
        """Get the answers to the server's questions, and send the next round with them."""
        if asked.input_requests is None and asked.request_state is None:
            raise InvalidReply(f"{self.name}: the server wants more input but does not say what")
        if self.left == 0:
            from trimcp.security import security_event

            security_event("too_many_questions", method=self.name)
            raise InvalidReply(f"{self.name}: the server keeps asking; no more of its questions are answered")
        self.left -= 1
        self.asked = True
        answers = await gather(self.caller, asked.input_requests or {})
        revision = self.session.revision
        assert revision is not None
        dump = converter_for(revision).dump
        # The state is returned exactly as received, or not at all.
        self.params = attrs.evolve(
            self.params,
            input_responses={key: dump(answer) for key, answer in answers.items()} or None,
            request_state=asked.request_state,
        )
        return await self.begin()


async def gather(caller: Caller, questions: Mapping[str, InputRequest]) -> dict[str, Any]:
    """Return the answers by key; several questions are asked concurrently."""
    answers: dict[str, Any] = {}

    async def one(key: str, question: InputRequest) -> None:
        answers[key] = await caller.answer(question)

    if len(questions) == 1:
        for key, question in questions.items():
            await one(key, question)
        return answers
    try:
        async with trio.open_nursery() as nursery:
            for key, question in questions.items():
                nursery.start_soon(one, key, question)
    except BaseExceptionGroup as group:
        raise unwrap_single(group) from None
    return answers


@attrs.define(eq=False, repr=False)
class Call(Generic[ResultT]):
    """A call in progress: `async with` sends it, and leaving the block without its result cancels it.

    Cancelling the block tells the peer, which stops its handler. This is a class because an async generator would cost
    more than the rest of a call.

    Attributes:
        progress: a receive channel of the call's progress, which ends when the answer has arrived. It keeps
            `Limits.progress_kept` messages for a slow reader; beyond it the oldest are dropped and counted in
            `statistics().dropped`.

    Raises:
        trio.TooSlowError: on leaving; the work clock expired before the answer arrived, and cancelled the block.
    """

    _rounds: Rounds
    _clocks: Clocks
    progress: trio.MemoryReceiveChannel[ProgressParams] = attrs.field(init=False)
    _keep: trio.MemorySendChannel[ProgressParams] = attrs.field(init=False)
    _context: contextvars.Context = attrs.field(init=False)
    _clock: WorkClock | None = attrs.field(init=False, default=None)
    _around: ExitStack = attrs.field(init=False, factory=ExitStack)
    _asking: trio.CancelScope | None = attrs.field(init=False, default=None)
    _over: trio.Event = attrs.field(init=False, factory=trio.Event)
    _outcome: Any = attrs.field(init=False, default=None)
    _error: Exception | None = attrs.field(init=False, default=None)

    async def __aenter__(self) -> Self:
        rounds = self._rounds
        rounds.deadline = self._clocks.deadline()
        await rounds.caller.allow(rounds)
        self._keep, self.progress = trio.open_memory_channel[ProgressParams](rounds.session.limits.progress_kept)
        self._context = contextvars.copy_context()
        with ExitStack() as around:
            if self._clocks:
                self._clock = around.enter_context(self._clocks.running())
            rounds.on_progress, rounds.on_reply = self._progressed, self._replied
            await rounds.begin()
            self._around = around.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, trio.Cancelled):
            why = cancellation_text(error)
        else:
            why = "the caller left before the result was there"
        with self._around:
            self._keep.close()
            self._rounds.abandon(why)
            if self._asking is not None:
                self._asking.cancel(reason=why)
                await self._over.wait()  # until its background work has ended
            if error is not None:
                raise error

    async def result(self) -> ResultT:
        """Wait for the answer and return it; may be called more than once.

        Cancelling this does not cancel the call; leaving the block does.

        Raises:
            RemoteError: the peer answered with an error.
            InvalidReply: the peer's answer is not valid.
            ConnectionLost: the connection ended before the answer.
        """
        await self._over.wait()
        if self._error is None and self._outcome is None:
            try:
                self._outcome = self._rounds.payload_now()
            except Exception as error:  # an invalid answer; each `result` raises it
                self._error = error
        if self._error is not None:
            raise self._error
        return cast("ResultT", self._outcome)

    def _progressed(self, params: ProgressParams) -> None:
        """Keep progress for the reader; if there is no room, the oldest is dropped."""
        if self._clock is not None:
            self._clock.restart()
        session = self._rounds.session
        allowed = session.limits.kept_of(session.limits.progress_kept, session.memory.arriving)
        try:
            while self._keep.statistics().current_buffer_used >= allowed:
                self.progress.receive_nowait()
                session.counts.drop("progress")
            self._keep.send_nowait(params)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the reader closed the channel

    def _replied(self, reply: Replied) -> None:
        """Note a reply. If it is not the final one, a task of the session answers its questions."""
        if self._asking is not None:
            return
        asks = reply.result is not None and reply.result.get("resultType", "complete") != "complete"
        if asks or self._rounds.headers_refused(reply.error):
            self._asking = trio.CancelScope()
            self._context.run(self._rounds.session.nursery.start_soon, self._finish)
        else:
            self._end()

    async def _finish(self) -> None:
        assert self._asking is not None
        self._error = ConnectionLost("the session has ended")
        try:
            with self._asking:
                self._outcome = await self._rounds.payload()
                self._error = None
        except Exception as error:  # any failure; `result` raises it in the caller's task
            self._error = error
        finally:
            self._end()

    def _end(self) -> None:
        if self._clock is not None:
            self._clock.stop()
        self._keep.close()
        self._over.set()
