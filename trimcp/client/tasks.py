"""Calls that a server carries out as tasks (the extension "Tasks"): waited for, answered, cancelled, found again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, Protocol

import attrs
import trio

from trimcp.client.handlers import ClientProgram
from trimcp.client.tools import Outputs
from trimcp.errors import ConnectionLost, InvalidReply, LocalError, McpError, NotStarted, Overloaded, RemoteError
from trimcp.extensions.tasks import TaskState, read_state
from trimcp.protocol.bound_methods import methods_of
from trimcp.session.outgoing.calls import Caller, Rounds, gather
from trimcp.session.outgoing.listening import Subscription, Subscriptions
from trimcp.session.session import Session
from trimcp.wire.codes import CANCELLED_BY_OPERATOR, INTERNAL_ERROR
from trimcp.wire.common import RESULT_COMPLETE, RESULT_INPUT_REQUIRED
from trimcp.wire.converter import WireError, converter_for
from trimcp.wire.input_requests import InputRequiredResult
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.lifecycle import ProgressParams, SubscriptionFilter
from trimcp.wire.methods import TASK_ID
from trimcp.wire.revisions import Revision
from trimcp.wire.tools import CallToolResult

Tell = Callable[[ProgressParams], object]

_USUAL: Final = 1.0  # seconds between two looks, where the server names none,
_SHORTEST: Final = 0.02  # and the least
_LONGEST: Final = 60.0
_QUIET: Final = 30.0  # seconds between two looks at a task whose changes are notified
_AGREEING: Final = 5.0  # seconds in which a server has to agree to notify
_AWAY: Final = 60.0  # seconds for which a server may be away, while a task is waited for


class Following(Caller, Protocol):
    """The part of a `ClientSession` that follows tasks."""

    client: ClientProgram
    session: Session
    outputs: Outputs
    subscriptions: Subscriptions

    @property
    def revision(self) -> Revision: ...
    async def request_raw(self, name: str, params: Mapping[str, JSON] | None = None) -> dict[str, JSON]: ...


@attrs.define(eq=False, repr=False)
class ClientTask:
    """A call that a server carries out as a task: from `session.start_task(...)`, or `session.task(id)`.

    Leaving it alone changes nothing: the server goes on, and keeps the result for a while.

    Attributes:
        id: its id, from which another process finds it again; None if the server answered at once, without a task. It
            may be all that protects the task: keep it like a password.
        tool: the tool, by whose schema the result is checked; None checks nothing.
    """

    _session: Following
    id: str | None
    tool: str | None
    _result: CallToolResult | None = None
    _answered: set[str] = attrs.field(init=False, factory=set)
    _told: object = attrs.field(init=False, default=None)

    @property
    def _known(self) -> str:
        if self.id is None:
            raise LocalError("the server answered this call at once: there is no task, only its result()")
        return self.id

    async def state(self) -> TaskState:
        """Return how it is now. Raises RemoteError: the server does not know it, or no more."""
        return self._read(await self._session.request_raw("tasks/get", {TASK_ID: self._known}))

    async def cancel(self) -> None:
        """Ask the server to cancel it. The server may finish it all the same."""
        await self._session.request_raw("tasks/cancel", {TASK_ID: self._known})

    async def result(self, on_progress: Tell | None = None) -> CallToolResult:
        """Wait for the result and return it; answer the server's questions meanwhile. Cancelling this cancels no task.

        While the server is away (as it restarts), this waits for it, up to a minute.

        Args:
            on_progress: called with each change of its progress, or of what the server says of it.

        Raises:
            RemoteError: the call failed, the task was cancelled, or the server does not know it.
            InvalidReply: the server's answer is not valid.
        """
        if self._result is None:
            self._result = await self._follow(await self._look(), on_progress)
        return self._result

    async def _follow(self, state: TaskState, tell: Tell | None) -> CallToolResult:
        async with AsyncExitStack() as stack:
            changes: Subscription | None = None
            asked = False  # to notify: once, whatever it answers
            while True:
                if tell is not None:
                    self._tell(state, tell)
                if state.ended:
                    return self._outcome(state)
                if state.status == "input_required":
                    await self._answer(state.raw.get("inputRequests") or {})
                if not asked:
                    asked, changes = True, await self._subscribed(stack)
                    if changes is not None:
                        state = await self._look()  # it may have changed before
                        continue
                state = await self._next(state, changes)

    async def _subscribed(self, stack: AsyncExitStack) -> Subscription | None:
        """Have the server notify changes, and return the subscription; None if it does not."""
        listening = self._session.subscriptions.listening(SubscriptionFilter(task_ids=[self._known]))
        with suppress(McpError), trio.move_on_after(_AGREEING):
            changes = await stack.enter_async_context(listening)
            if changes.acknowledged.task_ids:
                return changes
            await stack.aclose()
        return None

    async def _next(self, state: TaskState, changes: Subscription | None) -> TaskState:
        """Return the next state: as it is notified, else after the time that the server wants between two looks."""
        wanted = _USUAL if state.poll_interval_ms is None else state.poll_interval_ms / 1_000
        pause = min(_LONGEST, max(_SHORTEST, wanted))
        if changes is not None and changes.end is None:
            with suppress(ConnectionLost, trio.EndOfChannel), trio.move_on_after(max(pause, _QUIET)):
                await changes.receive()
                return self._read(changes.tasks[self._known])
        else:
            await trio.sleep(pause)
        return await self._look()

    async def _look(self) -> TaskState:
        """Return how it is now; wait for a server that is away."""
        pause, until = _SHORTEST, trio.current_time() + _AWAY
        while True:
            try:
                return await self.state()
            except (ConnectionLost, NotStarted, Overloaded):
                if self._session.session.lost is not None or trio.current_time() > until:
                    raise
            await trio.sleep(pause)
            pause = min(2 * pause, _USUAL)

    def _read(self, raw: Mapping[str, Any]) -> TaskState:
        try:
            state = read_state(raw)
            if state.id != self._known:
                raise ValueError("it is another one")
        except ValueError as error:
            raise InvalidReply(f"what the server says of a task cannot be used: {error}") from None
        return state

    def _tell(self, state: TaskState, tell: Tell) -> None:
        """Pass on what is new of its progress."""
        progress = state.progress or {"message": state.message}
        if progress != self._told and (state.progress or state.message):
            self._told = progress
            done, total, message = (progress.get(key) for key in ("progress", "total", "message"))
            tell(ProgressParams(progress_token=0, progress=0.0 if done is None else done, total=total, message=message))

    async def _answer(self, asked: Mapping[str, Any]) -> None:
        """Answer what the server asks and was not answered before."""
        new = {key: question for key, question in asked.items() if key not in self._answered}
        if not new:
            return
        if len(self._answered) + len(new) > 10 * self._session.client.max_rounds:
            from trimcp.security import security_event

            security_event("too_many_questions", method="tools/call")
            raise InvalidReply("the server keeps asking; no more of its questions are answered")
        converter = converter_for(self._session.revision)
        try:
            raw = {"resultType": RESULT_INPUT_REQUIRED, "inputRequests": new}
            questions = converter.load(raw, InputRequiredResult).input_requests or {}
        except WireError as error:
            raise InvalidReply(f"a question of a task cannot be read: {error}"[:500]) from None
        answers = await gather(self._session, questions)
        responses = {key: converter.dump(answer) for key, answer in answers.items()}
        await self._session.request_raw("tasks/update", {TASK_ID: self._known, "inputResponses": responses})
        self._answered.update(new)

    def _outcome(self, state: TaskState) -> CallToolResult:
        session = self._session
        if state.status == "completed":
            raw = dict(state.raw["result"])
            if raw.setdefault("resultType", RESULT_COMPLETE) != RESULT_COMPLETE:
                raise InvalidReply("the result of a task is no result of a tool")
            result: CallToolResult = session.session.engine.load_result(methods_of(session.revision)["tools/call"], raw)
            if session.client.validate_output and self.tool is not None:
                session.outputs.check(self.tool, result)
            return result
        if state.status == "failed":
            error = state.raw["error"]
            code, message = error.get("code"), error.get("message")
            if type(code) is not int or not isinstance(message, str):
                code, message = INTERNAL_ERROR, "the task failed with an error that cannot be read"
            failed = RemoteError(code, message, error.get("data"))
        else:
            said = "" if state.message is None else f": {state.message}"
            failed = RemoteError(CANCELLED_BY_OPERATOR, f"the task was cancelled{said}")
        failed.method = "tools/call"
        raise failed


async def follow(session: Following, rounds: Rounds, raw: Mapping[str, Any], detached: bool) -> Any:
    """Return the result of a call that was answered with a task, or the task itself if the caller wants that.

    Cancelling this, or an error of this side, cancels the task.
    """
    try:
        state = read_state(raw)
    except ValueError as error:
        raise InvalidReply(f"{rounds.name} was answered with a task that cannot be used: {error}") from None
    task = ClientTask(session, state.id, rounds.params.name)
    if detached:
        return task
    try:
        if state.ended:  # a new task has no result with it
            state = await task._look()
        return await task._follow(state, rounds.on_progress)
    except (RemoteError, ConnectionLost):
        raise
    except BaseException:
        with suppress(McpError, trio.Cancelled):
            # No wait for the answer, so that a cancelled block can send it too.
            await session.session.start_call("tasks/cancel", {TASK_ID: state.id})
        raise
