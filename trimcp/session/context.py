"""What a handler gets beside its arguments: facts about the request, and methods to send messages while it runs."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Generic, overload

import trio

from trimcp.budget import owner_of
from trimcp.channel import Kind, Outgoing
from trimcp.errors import LocalError
from trimcp.protocol.bound_methods import methods_of
from trimcp.protocol.events import Admission, Admitted
from trimcp.protocol.states import Inbound
from trimcp.session.clock import WorkClock
from trimcp.session.incoming.job import NUMBERS, CancelReason, Job, Reports
from trimcp.session.scopes import Background, Scope, Work, cancelled_around
from trimcp.session.session import Session
from trimcp.support.slotted import slotted
from trimcp.wire.common import SEVERITY, LoggingLevel
from trimcp.wire.given import given_form
from trimcp.wire.input_requests import (
    CreateMessageParams,
    CreateMessageResult,
    ElicitationCompleteParams,
    ElicitFormParams,
    ElicitResult,
    ElicitURLParams,
    Root,
)
from trimcp.wire.jsonrpc import JSON, RequestId, encode
from trimcp.wire.lifecycle import LoggingMessageParams, ProgressParams

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from trimcp.schema.forms import Answer, Form
    from trimcp.session.agent_context import AgentContext

    StateT = TypeVar("StateT", default=Any)  # so that plain `Context` is a complete type
else:
    from typing import TypeVar

    StateT = TypeVar("StateT")

_T = TypeVar("_T")

# A report that never yields would starve the writer; one that always does (11 µs each) would prevent merging. So at
# least every 64th is a schedule point, and each is a cancel point.
_REPORTS_PER_CHECKPOINT: Final = 64
_COMPLETE: Final = "notifications/elicitation/complete"


@slotted
class RequestScope:
    """Starts tasks that end before the request's answer is sent."""

    _session: Session
    _job: Job

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run `await function(*args)` beside the handler. Cancelling the request cancels it.

        The answer waits for it, and its crash fails the request.

        Raises:
            LocalError: the request has ended.
        """
        job = self._job
        extras = job.with_extras()
        if extras.work is None:
            if job.scope is None:
                raise LocalError("the request is over; nothing can be started for it")
            extras.work = Work(self._session.nursery, job.scope)
        extras.work.start_soon(function, *args)


class CallTask:
    """The task of a call. A call that is none has one too, without id, so that one handler serves both.

    Attributes:
        id: its id; None if the call is no task. Who knows it may be able to read the result.
        saved: the value of the last checkpoint, if the handler begins again after a restart of the server; else None.
    """

    id: str | None = None
    saved: Any = None

    async def checkpoint(self, value: JSON) -> None:
        """Save how far the handler is; returns when the value would be found again. It replaces the last one.

        Args:
            value: any JSON value, at most 1 MiB of it.

        Raises:
            LocalError: JSON cannot carry the value, or it is too large.
        """
        encode(value)
        await trio.lowlevel.checkpoint()


@slotted
class Context(Admitted, Generic[StateT]):
    """One request, for its handler. Valid until the handler returns.

    It has more than 300 lines because all that a handler may ask for is a documented method of one object.

    Attributes:
        admission: who asks, in which revision, with which capabilities.
        state: the value yielded by the server's lifespan, or None.
    """

    _session: Session
    _job: Job
    state: StateT
    _server_scope: Scope | None = None
    _running: object = None

    # The sender

    @property
    def admission(self) -> Admission:
        """Everything known about the sender of the request."""
        return self._job.request.admission

    @property
    def request_id(self) -> RequestId:
        """The request's id, chosen by the peer."""
        return self._job.request.id

    @property
    def method(self) -> str:
        """The request's method, such as `tools/call`."""
        return self._job.request.method.name

    @property
    def headers(self) -> Mapping[str, str]:
        """Transport headers by lower-case name; empty if the transport has none."""
        return self._job.headers or {}

    @property
    def agent_context(self) -> AgentContext | None:
        """The context that the call of an agent belongs to (the agent-tools protocol); None in MCP."""
        found: AgentContext | None = getattr(self._job.origin, "agent_context", None)
        return found

    @property
    def task(self) -> CallTask:
        """The task that this call runs as (`@server.tool(task=...)`), with its checkpoints; one without id if none."""
        found: CallTask | None = getattr(self._job.origin, "task", None)
        return CallTask() if found is None else found

    # Cancelling

    @property
    def cancel_reason(self) -> CancelReason | None:
        """Why this request is being cancelled, or None while it is not. Useful in a `finally` block."""
        reason = self._job.reason
        if reason is None and trio.lowlevel.in_trio_task():
            if trio.current_time() >= self.deadline:
                return CancelReason.DEADLINE
            scope = self._job.scope
            if scope is not None and cancelled_around(scope):
                return CancelReason.DRAIN
        return reason

    @property
    def deadline(self) -> float:
        """The handler's deadline on Trio's clock: the caller's, or the tool's own timeout if that ends sooner.

        Infinity if there is none. While the client is asked a question, the tool's own timeout pauses.
        """
        job = self._job
        clock = None if job.extras is None else job.extras.clock
        return job.deadline if clock is None else min(job.deadline, clock.scope.deadline)

    @contextmanager
    def timed_by(self, clock: WorkClock) -> Iterator[None]:
        """Use this clock as the handler's own timeout while the block runs. It pauses while the peer is asked."""
        job = self._job
        extras = job.with_extras()
        extras.clock = clock
        try:
            yield
        except trio.Cancelled:
            if clock.scope.cancel_called and job.cancelled is None:
                job.note_cancelled(CancelReason.DEADLINE, "the tool's own time was over")
            raise
        finally:
            extras.clock = None

    @property
    def cancel_detail(self) -> str | None:
        """The reason that the peer sent when it cancelled, or None. Untrusted text."""
        cancelled = self._job.cancelled
        return None if cancelled is None else cancelled.detail

    @property
    def running(self) -> Any:
        """The run of the server whose handler it is for; another than the session's if that server is mounted."""
        return self._running or self._session.endpoint

    @property
    def internals(self) -> tuple[Session, Job]:
        """The session and the job of this context, for code that builds on sessions itself."""
        return self._session, self._job

    # Starting tasks

    @property
    def request(self) -> RequestScope:
        """Starts tasks that end before this request's answer is sent."""
        return RequestScope(self._session, self._job)

    @property
    def session(self) -> Scope:
        """Starts tasks that end with this connection."""
        return Scope(self._background)

    def _background(self) -> Background:
        session = self._session
        if session.transport.single_request and self._job.over:  # it may process another request by now
            raise LocalError("the session has ended; nothing can be started for it")
        return session.background

    @property
    def server(self) -> Scope:
        """Starts tasks that end with the server."""
        return self._server_scope or self.session

    # Progress and logging

    async def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Send progress to the peer: in order, and none that increases is dropped. Waits only while the outbox is full.

        Nothing is sent if the peer did not ask for progress, or of a value that is not larger than the last one
        (basic/utilities/progress); a handler that runs again after a question begins where it was. Always a cancel
        point.

        Args:
            progress: how far it is.
            total: the final value of `progress`, if known.
            message: one line for a person; dropped in revisions without it.
        """
        job = self._job
        reports = job.reports
        if reports is None:
            reports = job.reports = Reports()
        if not progress > reports.last:  # written like this to find NaN too
            reports.drop(progress)
            await trio.lowlevel.checkpoint()
            return
        data = self._encode_progress(reports, progress, total, message)
        reports.last = progress
        reports.count += 1
        request, sink = job.request, job.sink
        if data is not None and sink.full:
            await sink.room()
        elif reports.count % _REPORTS_PER_CHECKPOINT:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            await trio.lowlevel.checkpoint()
        if data is not None:
            # Nothing may follow the answer, or be sent for a cancelled request.
            under_way = request.state is Inbound.UNDER_WAY
            if reports.latest_queued:  # it was smaller, so it is sent first
                reports.latest_queued = False
                sink.finish_latest(("progress", request.id), keep=under_way)
            if under_way:
                sink.post(Outgoing(data, Kind.NOTIFICATION, request.id, job.origin))

    def report_progress_nowait(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Send progress to the peer without ever waiting: while the peer is slow, only the latest value is kept.

        A value that does not increase is dropped. The last one is sent before the result.
        """
        job = self._job
        reports = job.reports
        if reports is None:
            reports = job.reports = Reports()
        if not progress > reports.last:
            reports.drop(progress)
            return
        data = self._encode_progress(reports, progress, total, message)
        reports.last = progress
        if data is not None and job.request.state is Inbound.UNDER_WAY:
            id = job.request.id
            reports.latest_queued = True
            job.sink.post_latest(("progress", id), Outgoing(data, Kind.NOTIFICATION, id, job.origin))

    def _encode_progress(
        self, reports: Reports, progress: float, total: float | None, message: str | None
    ) -> bytes | None:
        """Return the notification, or None if the peer did not ask for progress."""
        token = self._job.request.admission.progress_token
        if token is None:
            reports.told = total, message
            return None
        if message is None and type(progress) in NUMBERS and (total is None or type(total) in NUMBERS):
            if reports.head is None:
                example = self._encode("notifications/progress", ProgressParams(progress_token=token, progress=0))
                reports.head = example.removesuffix(b"0}}")
            data = reports.text(progress, total)
            if data is not None:
                return data
        reports.told = total, message
        params = ProgressParams(
            progress_token=token,
            progress=progress,
            total=total,
            message=message,
        )
        return self._encode("notifications/progress", params)

    def _encode(self, name: str, params: Any) -> bytes:
        return self._session.encode_notification(name, params, self._job)

    def _post(self, data: bytes) -> None:
        # Nothing may follow the answer, or be sent for a cancelled request.
        if self._job.request.state is Inbound.UNDER_WAY:
            self._job.sink.post(Outgoing(data, Kind.NOTIFICATION, self.request_id, self._job.origin))

    async def notify(self, name: str, params: Mapping[str, JSON] | None = None) -> None:
        """Send a notification that is defined by an extension, for this request. Waits for room.

        A client that has no handler for it ignores it. Nothing is sent for a request that was cancelled.

        Raises:
            LocalError: the protocol itself defines the notification, or JSON cannot carry the params.
        """
        data = self._session.encode_foreign(name, params)
        sink = self._job.sink
        if sink.full:
            await sink.room()
        else:
            await trio.lowlevel.checkpoint()
        self._post(data)

    async def log(self, level: LoggingLevel, data: JSON, *, logger: str | None = None) -> None:
        """Send a log message for this request, if the peer wants messages of this level. Waits for room.

        Args:
            level: a syslog severity, "debug" to "emergency" (RFC 5424).
            data: any JSON value, often a string. It must not contain secrets.
            logger: a name for the source.
        """
        if not self._wants(level):
            await trio.lowlevel.checkpoint()
            return
        message = self._encode_log(level, data, logger)
        sink = self._job.sink
        if sink.full:
            await sink.room()
        else:
            await trio.lowlevel.checkpoint()
        self._tell_dropped()
        self._post(message)

    def log_nowait(self, level: LoggingLevel, data: JSON, *, logger: str | None = None) -> bool:
        """As `log`, but never waits: while the outbox is full the message is dropped and counted.

        Before the next message that is sent, or else before the result, a warning says how many were dropped.

        Returns False if the message was dropped, True if it was sent or not wanted.
        """
        if not self._wants(level):
            return True
        if self._job.sink.full:
            self._session.counts.drop("logs")
            self._session.counts.untold += 1
            return False
        self._tell_dropped()
        self._post(self._encode_log(level, data, logger))
        return True

    def _tell_dropped(self) -> None:
        if self._session.counts.untold and self._job.request.state is Inbound.UNDER_WAY:
            self._session.tell_dropped_logs(self._job)

    def _wants(self, level: LoggingLevel) -> bool:
        wanted = self._session.engine.log_level(self.admission)
        return wanted is not None and SEVERITY[level] >= SEVERITY[wanted]

    def _encode_log(self, level: LoggingLevel, data: JSON, logger: str | None) -> bytes:
        params = LoggingMessageParams(level=level, data=data, logger=logger)
        return self._encode("notifications/message", params)

    async def debug(self, data: JSON, *, logger: str | None = None) -> None:
        """`log` at level "debug"."""
        await self.log("debug", data, logger=logger)

    async def info(self, data: JSON, *, logger: str | None = None) -> None:
        """`log` at level "info"."""
        await self.log("info", data, logger=logger)

    async def warning(self, data: JSON, *, logger: str | None = None) -> None:
        """`log` at level "warning"."""
        await self.log("warning", data, logger=logger)

    async def error(self, data: JSON, *, logger: str | None = None) -> None:
        """`log` at level "error"."""
        await self.log("error", data, logger=logger)

    def close_stream(self) -> None:
        """Close the connection on which this request's answer would be sent; the client fetches the rest later.

        During a long call this saves an open connection, if the transport supports it (Streamable HTTP from 2025-11-25
        on, "Sending Messages": the client polls). Otherwise it does nothing.
        """
        self._job.sink.release()

    # Questions

    @overload
    async def elicit(self, message: str, schema: type[_T], *, key: str | None = None) -> Answer[_T]: ...
    @overload
    async def elicit(
        self, message: str, schema: Mapping[str, JSON] | Form[Any], *, key: str | None = None
    ) -> ElicitResult: ...
    async def elicit(self, message: str, schema: Any, *, key: str | None = None) -> Any:
        """Ask the user for something with a form, and return the user's action: accept, decline or cancel.

        For a class the result is an `Answer`, whose `value` is an instance of that class. For a schema or a form it is
        an `ElicitResult`, with the content as received.

        In revisions where a server may not call its client, the handler unwinds here and runs again **from the top**
        once the answer has arrived: everything before the last question must be repeatable (see `once`).

        Args:
            message: the question for the user.
            schema: an attrs class, dataclass, TypedDict, NamedTuple or Pydantic model, each of whose fields becomes a
                field of the form; or the type of a single field; or a flat JSON Schema of an object
                (client/elicitation, "Requested Schema"); or what `trimcp.form` returns.
            key: the question's name when re-running; by default derived from what is asked.

        Raises:
            LocalError: the client cannot be asked, or not from here; or a form does not support a field, which is
                named.
            ToolError: the answer does not fit the class.
        """
        form: Form[Any] | None = None
        if isinstance(schema, Mapping):
            requested = schema
        else:
            from trimcp.schema.forms import Form, known_form  # loaded only by servers that ask

            if isinstance(schema, Form):
                requested = schema.schema
            else:
                try:
                    form = known_form(schema)
                except TypeError as error:
                    raise LocalError(f"{getattr(schema, '__name__', schema)!s} cannot be asked for: {error}") from None
                requested = form.schema
        try:
            asked = given_form(requested)
        except TypeError as error:
            raise LocalError(str(error)) from None
        params = ElicitFormParams(message=message, requested_schema=asked)
        result: ElicitResult = await self.ask("elicitation/create", params, key=key)
        return result if form is None else form.read(message, result)

    async def elicit_url(
        self, message: str, url: str, *, elicitation_id: str | None = None, key: str | None = None
    ) -> ElicitResult:
        """Ask the user to open a URL (client/elicitation, "URL Mode"), for data that the client must not see.

        Args:
            message, url: what the user is told, and the page.
            elicitation_id: for `elicitation_complete`, in 2025-11-25; made up where that revision wants one.
            key: see `elicit`.
        """
        if elicitation_id is None and _COMPLETE in methods_of(self.revision):
            elicitation_id = os.urandom(16).hex()
        params = ElicitURLParams(message=message, url=url, elicitation_id=elicitation_id)
        result: ElicitResult = await self.ask("elicitation/create", params, key=key)
        return result

    async def elicitation_complete(self, elicitation_id: str) -> None:
        """Tell the client that its user has finished at a URL (2025-11-25); in other revisions nothing is sent.

        Args:
            elicitation_id: the one passed to `elicit_url`.
        """
        if _COMPLETE in methods_of(self.revision):
            self._post(self._encode(_COMPLETE, ElicitationCompleteParams(elicitation_id=elicitation_id)))
        await trio.lowlevel.checkpoint()

    async def sample(self, params: CreateMessageParams, *, key: str | None = None) -> CreateMessageResult:
        """Ask the client's model (client/sampling); the user may change or refuse it. Re-runs as `elicit` does."""
        result: CreateMessageResult = await self.ask("sampling/createMessage", params, key=key)
        return result

    async def list_roots(self, *, key: str | None = None) -> list[Root]:
        """Ask which directories or files the client works on (client/roots). Re-runs as `elicit` does."""
        result = await self.ask("roots/list", None, key=key)
        return list(result.roots)

    async def ask(self, name: str, params: Any, *, key: str | None = None) -> Any:
        """Send the peer any request: `name` is the method, `params` its payload."""
        from trimcp.session.outgoing.asking import ask  # loaded with the first question

        return await ask(self._session, self._job, name, params, key=key)

    async def once(self, key: str, function: Callable[[], Awaitable[_T]]) -> _T:
        """Return `await function()`, calling it only once even if the handler runs again after a question.

        The result is sent to the client and back, signed but readable, so it must be JSON and not secret.

        Raises:
            LocalError: the result is not JSON.
        """
        from trimcp.session.outgoing.asking import open_questions

        kept = open_questions(self._session, self._job).memory.kept
        if key in kept:
            await trio.lowlevel.checkpoint()
            value: _T = kept[key]
            return value
        result = await function()
        encode(result)
        kept[key] = result
        return result


def client_key(ctx: Context[Any]) -> Hashable:
    """Return a key for the client: its session, or its principal or address if each request has its own session."""
    session, job = ctx.internals
    if not session.transport.single_request:
        return session
    return owner_of(ctx.principal, job.client)


CURRENT: ContextVar[Context[Any] | None] = ContextVar("trimcp_request", default=None)
"""The context of the request being handled in this task or thread; for what logs."""
