"""One request of a client, as it is made at the upstream: its progress, its questions, its result.

Questions take one of three ways. A client that may be called is asked in place. One that may not gets those that an
upstream of its own era asks in a result, with the upstream's state sealed in ours: nothing waits here. Only if the
upstream asks in the middle of its work is the call held (`HeldCall`) until the client comes back with the answers.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import attrs
import trio

from trimcp.client.session import ClientSession
from trimcp.errors import CannotAsk, ErrorReply
from trimcp.protocol.bound_methods import foreign
from trimcp.protocol.connection import Encoded
from trimcp.protocol.request_state import Memory
from trimcp.session.context import Context
from trimcp.session.outgoing.asking import REQUESTS, open_questions
from trimcp.session.outgoing.calls import Call, Rounds
from trimcp.session.outgoing.pending import Pending
from trimcp.wire import common
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.converter import WireError, converter_for
from trimcp.wire.input_requests import InputRequest, InputRequiredResult
from trimcp.wire.jsonrpc import JSON, encode
from trimcp.wire.methods import METHODS, TASK_ID

_OF_ONE_CONNECTION: Final = frozenset(
    (
        *(common.META_CLIENT_CAPABILITIES, common.META_CLIENT_INFO, common.META_LOG_LEVEL),
        *(common.META_PROGRESS_TOKEN, common.META_PROTOCOL_VERSION, common.META_TIMEOUT),
    )
)
_KEPT: Final = "relayed"  # the key in our sealed state of what is the upstream's, or names a call that is held


class QuestionsAsked(Exception):
    """The upstream answered a call with questions, which the client is to answer itself."""

    def __init__(self, asked: InputRequiredResult) -> None:
        super().__init__("the upstream asks")
        self.asked = asked


@attrs.define(eq=False, repr=False)
class RelayedRounds(Rounds):
    """The rounds of a call at the upstream. With `pass_on` there is one: its questions are the result.

    `until`: when the client stops waiting, which is sooner than our own scopes end.
    """

    pass_on: bool = False
    until: float = math.inf

    async def begin(self) -> Pending:
        self.deadline: float = min(self.deadline, self.until)
        return await Rounds.begin(self)

    async def _answer(self, asked: InputRequiredResult) -> Pending:
        if self.pass_on:
            raise QuestionsAsked(asked)
        return await Rounds._answer(self, asked)


@attrs.define(eq=False, repr=False)
class RelayedCall:
    """One request of a client, made at the upstream: the `Caller` of its rounds."""

    ctx: Context[Any]  # of the client's request; of its last round, if it is held
    method: str
    params: Any
    held: HeldCall | None = None
    _session: ClientSession = attrs.field(init=False)

    @property
    def may_ask(self) -> bool:
        """Whether questions of the upstream can be passed on for it."""
        return self.held is not None or self.ctx.revision.server_may_call

    async def run(self, session: ClientSession) -> Any:
        """Make it over this connection, and return the upstream's payload. Raises as `ClientSession.call_tool`."""
        self._session = session
        ctx = self.ctx
        meta: dict[str, JSON] = {key: each for key, each in ctx.meta.items() if key not in _OF_ONE_CONNECTION}
        level = ctx.internals[0].engine.log_level(ctx.admission)
        if level is not None and session.revision.logs_on_request:
            meta[common.META_LOG_LEVEL] = level
        pass_on = self.held is None and not ctx.revision.server_may_call
        left = session.client.max_rounds
        rounds = RelayedRounds(session.session, self, self.method, self.params, left, meta or None, pass_on=pass_on)
        rounds.until = ctx.deadline if self.held is None else math.inf
        if ctx.progress_wanted:
            return await self._followed(rounds, session)
        rounds.deadline = session.clocks.deadline()
        await self.allow(rounds)
        await rounds.begin()
        return await rounds.payload()

    async def _followed(self, rounds: Rounds, session: ClientSession) -> Any:
        """Pass on the progress, for which the upstream waits no longer than its bounded queue."""
        async with Call[Any](rounds, session.clocks) as call:
            async for step in call.progress:
                await self.ctx.report_progress(step.progress, step.total, step.message)
            return await call.result()

    async def ask(self, name: str, params: Any) -> Any:
        """Have the client answer a question. Raises CannotAsk: it cannot; AskRefused: it will not."""
        if self.held is not None:
            return await self.held.ask(name, params)
        return await self.ctx.ask(name, params)

    # The `Caller` of its rounds

    async def allow(self, rounds: Rounds) -> None:
        if self.method == "tools/call":
            await self._session.allow(rounds)

    async def refresh(self, rounds: Rounds) -> None:
        await self._session.refresh(rounds)

    async def answer(self, question: InputRequest) -> Any:
        return await self.ask(question.method, getattr(question, "params", None))

    async def follow(self, rounds: Rounds, task: dict[str, Any]) -> Any:
        """Return the task itself: the client follows it, through us."""
        session, _ = self.ctx.internals
        task = {**task, TASK_ID: outward_task(self.ctx, task[TASK_ID])}
        raw = session.engine.modern.dump_result(foreign("tasks/get"), task, self.ctx.revision)
        return Encoded(encode(raw), task)

    def check(self, rounds: Rounds, payload: Any) -> None:
        """Warn of what was left out because it cannot be read. What the client checks is left to it."""
        self._session.check(rounds, payload)


# Tasks


def outward_task(ctx: Context[Any], id: str) -> str:
    """Return the id by which a client knows a task of the upstream.

    The upstream knows one caller, the proxy, and shows it the tasks of all clients. So with a client's principal the id
    is its own: nobody else can use it.
    """
    return id if ctx.principal is None else ctx.internals[0].sealer.bind(id, ctx.principal)


def inward_task(ctx: Context[Any], id: str) -> str | None:
    """Return the upstream's id of a task that a client names; None if it is not the client's."""
    return id if ctx.principal is None else ctx.internals[0].sealer.unbind(id, ctx.principal)


# Calls that are held


@attrs.define(eq=False)
class _HeldQuestion:
    """A question that waits for the client's answer."""

    name: str
    params: Any
    answered: trio.Event = attrs.field(init=False, factory=trio.Event)
    answer: Any = attrs.field(init=False, default=None)


@attrs.define(eq=False, repr=False)
class HeldCall:
    """A call that goes on at the upstream between two requests of its client, while that finds the answers."""

    call: RelayedCall  # what is made at the upstream
    owner: object  # whose it is, to count them
    patience: float  # seconds for which it waits for its client to come back; then the upstream's call is cancelled
    may_wait: Callable[[], bool]  # returns whether its client may have another call that waits for answers
    # names it in the sealed state that the client brings back
    id: str = attrs.field(init=False, factory=lambda: secrets.token_urlsafe(16))
    scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    awaited: bool = attrs.field(init=False, default=False)  # whether a request of the client waits for it
    _questions: dict[str, _HeldQuestion] = attrs.field(init=False, factory=dict)
    _count: int = attrs.field(init=False, default=0)
    _over: bool = attrs.field(init=False, default=False)
    _result: Any = attrs.field(init=False, default=None)
    _error: Exception | None = attrs.field(init=False, default=None)
    _changed: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    async def run(self, work: Callable[[], Awaitable[Any]], ended: Callable[[], object]) -> None:
        """Do the work, until it is done or nobody waits for it any more."""
        self._error = ErrorReply(INVALID_PARAMS, "this call is no longer under way: begin it again")
        try:
            with self.scope:
                self._result = await work()
                self._error = None
        except Exception as error:  # any failure; the client's next request gets it
            self._error = error
        finally:
            self._over = True
            self._changed.unpark_all()
            ended()

    @property
    def asks(self) -> bool:
        """Whether it waits for answers."""
        return bool(self._questions)

    async def ask(self, name: str, params: Any) -> Any:
        """Wait for the client's answer to a question of the upstream."""
        if not self.asks and not self.may_wait():
            raise CannotAsk("too many calls of this client wait for its answers")
        self._count += 1
        key, question = f"question {self._count}", _HeldQuestion(name, params)
        self._questions[key] = question
        self._changed.unpark_all()
        try:
            await question.answered.wait()
        finally:
            self._questions.pop(key, None)
        return question.answer

    async def outcome(self) -> Any:
        """Wait for the result, or for questions; return which it is. Cancelling this cancels the call."""
        if self.awaited:
            raise ErrorReply(INVALID_PARAMS, "another request waits for this call already")
        self.awaited, self.scope.deadline = True, math.inf
        try:
            while not self._over and not self._questions:
                await self._changed.park()
        except BaseException:
            self.scope.cancel(reason="its client gave it up")
            raise
        finally:
            self.awaited = False
        if self._over:
            if self._error is not None:
                raise self._error
            return self._result
        self.scope.deadline = trio.current_time() + self.patience
        asked = {key: REQUESTS[each.name](each.params) for key, each in self._questions.items()}
        return InputRequiredResult(input_requests=asked)

    def take(self, answers: Mapping[str, Any], ctx: Context[Any]) -> None:
        """Take the client's answers to what was asked. Raises ErrorReply: one is no answer to its question."""
        converter = converter_for(ctx.revision)
        for key, question in list(self._questions.items()):
            if key not in answers:
                continue
            try:
                question.answer = converter.load(answers[key], METHODS[question.name].result)
            except WireError as error:
                raise ErrorReply(INVALID_PARAMS, f"inputResponses.{key} is invalid: {error}"[:500]) from None
            del self._questions[key]
            question.answered.set()


def kept_of(ctx: Context[Any]) -> Mapping[str, Any]:
    """Return what was sealed for the upstream, or for a call that is held, in the state that a request brings back."""
    kept = open_questions(*ctx.internals).memory.kept.get(_KEPT)
    return kept if isinstance(kept, dict) else {}


def asked_of(ctx: Context[Any], asked: InputRequiredResult, **kept: JSON) -> InputRequiredResult:
    """Return questions for the client, with a state of ours in which `kept` is sealed for its next request."""
    session, job = ctx.internals
    if ctx.revision.server_may_call:
        raise CannotAsk("the client cannot be asked in the result of this request")
    questions = open_questions(session, job)
    questions.unwound = True
    progress = None if job.reports is None else job.reports.kept
    memory = Memory(kept={_KEPT: kept}, progress=progress)
    state = session.sealer.seal(memory, digest=questions.digest, principal=ctx.principal, now=time.time())
    return InputRequiredResult(input_requests=asked.input_requests, request_state=state, meta=asked.meta)
