"""What one connection serves to its server: bounded answers to questions, and handlers of notifications.

Questions are requests in the legacy era, and part of results since 2026-07-28. One function answers both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import attrs
import trio

from trimcp.client.handlers import ClientProgram, call_handler
from trimcp.errors import ErrorReply, LocalError
from trimcp.protocol.events import Notified
from trimcp.security import security_event
from trimcp.session.clock import Clocks
from trimcp.session.incoming.job import Job
from trimcp.session.scopes import written
from trimcp.session.session import Session
from trimcp.support.cleaning import log_crash
from trimcp.support.rates import TokenBucket
from trimcp.wire.capabilities import declares
from trimcp.wire.codes import INVALID_PARAMS, METHOD_NOT_FOUND, OVERLOADED
from trimcp.wire.content import TextContent
from trimcp.wire.input_requests import (
    CreateMessageParams,
    CreateMessageResult,
    ElicitURLParams,
    InputRequest,
    ListRootsResult,
    Root,
)
from trimcp.wire.lifecycle import LoggingMessageParams

log: logging.Logger = logging.getLogger("trimcp.client")

# client/sampling, "Error Handling": the error code when the user refuses.
_REFUSED = -1


@attrs.define(eq=False)
class Logs:
    """A queue of a server's log messages for the handler; the oldest are dropped when it is slow."""

    _handler: Callable[..., Any]
    _actor: Session
    _send: trio.MemorySendChannel[LoggingMessageParams | Notified] = attrs.field(init=False)
    _receive: trio.MemoryReceiveChannel[LoggingMessageParams | Notified] = attrs.field(init=False)
    unread: int = attrs.field(init=False, default=0)  # messages that the handler has not seen yet
    _all_read: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def __attrs_post_init__(self) -> None:
        most = self._actor.limits.logs_kept
        self._send, self._receive = trio.open_memory_channel[LoggingMessageParams | Notified](most)

    def put(self, params: LoggingMessageParams | Notified) -> None:
        """Queue a message for the handler."""
        limits = self._actor.limits
        allowed = limits.kept_of(limits.logs_kept, self._actor.memory.arriving)
        while self._send.statistics().current_buffer_used >= allowed:
            self._receive.receive_nowait()
            self._actor.counts.drop("logs")
            self.unread -= 1
        self._send.send_nowait(params)
        self.unread += 1

    async def run(self, session: object) -> None:
        """Call the handler with one message after the other, until the session ends."""
        async for params in self._receive:
            try:
                await call_handler(self._handler, params, session=session)
            except Exception as error:  # the handler's own; continue with the next message
                log_crash(log, error, "the logging handler crashed")
            self.unread -= 1
            if not self.unread:
                self._all_read.unpark_all()

    async def drained(self) -> None:
        """Wait until the handler has seen every message that has arrived."""
        if self.unread:
            await self._all_read.park()


@attrs.define(eq=False)
class ClientEndpoint:
    """What one connection serves to its server."""

    client: ClientProgram
    session: Any = attrs.field(init=False)  # the `ClientSession` that it belongs to, which sets this
    clocks: Clocks = attrs.field(init=False)  # pause while a person answers a question
    _bucket: TokenBucket = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        client = self.client
        most = client.asks_per_minute
        self.clocks = Clocks(client.request_timeout, client.max_request_time, client.send_deadlines)
        self._bucket = TokenBucket(most / 60, most, trio.current_time())

    async def handle(self, actor: Session, job: Job) -> Any:
        """Answer a legacy server's question."""
        return await self._answer(job.request.method.name, job.request.params)

    async def failure(self, actor: Session, job: Job, error: BaseException) -> Any:
        """Return None: a crash is not described to the server."""

    def source_location(self, job: Job) -> str | None:
        """Return the source location of the handler of a server's question, for the log."""
        handler = self.client.served.get(job.request.method.name)
        return None if handler is None else written(handler)

    async def answer(self, question: InputRequest) -> Any:
        """Answer a question in a result.

        Raises LocalError: it cannot be answered: there is no handler, the user refused, or there are too many.
        """
        try:
            return await self._answer(question.method, getattr(question, "params", None))
        except ErrorReply as error:
            raise LocalError(f"the server's question ({question.method}) was not answered: {error.message}") from error

    async def _answer(self, name: str, params: Any) -> Any:
        handler = self.client.served.get(name)
        if handler is None:
            raise ErrorReply(METHOD_NOT_FOUND, f"this client has no handler for {name}")
        if not self._bucket.take(trio.current_time()):
            most = self.client.asks_per_minute
            security_event("too_many_questions", method=name, most_per_minute=most)
            raise ErrorReply(OVERLOADED, f"this client answers at most {most} questions a minute")
        if name == "roots/list":
            roots = await self._call(handler)
            return ListRootsResult(roots=[Root(uri=root) if isinstance(root, str) else root for root in roots])
        with self.clocks.person():
            if name == "sampling/createMessage":
                return await self._sample(handler, params)
            mode = "url" if isinstance(params, ElicitURLParams) else "form"
            if not declares(self.client.capabilities, f"elicitation.{mode}"):
                raise ErrorReply(INVALID_PARAMS, f"this client did not declare elicitation in {mode} mode")
            return await self._call(handler, params)

    async def _call(self, handler: Callable[..., Any], *args: Any) -> Any:
        return await call_handler(handler, *args, session=self.session)

    async def _sample(self, handler: Callable[..., Any], params: CreateMessageParams) -> CreateMessageResult:
        client = self.client
        if params.tools is not None and not declares(client.capabilities, "sampling.tools"):
            raise ErrorReply(INVALID_PARAMS, "this client did not declare that its model may use tools")
        if client.before_sampling is not None:
            params = _approved(await self._call(client.before_sampling, params), params, "the request")
        result = await self._call(handler, params)
        if isinstance(result, str):
            result = CreateMessageResult(role="assistant", content=TextContent(text=result), model="unknown")
        if client.after_sampling is not None:
            result = _approved(await self._call(client.after_sampling, params, result), result, "the model's answer")
        sampled: CreateMessageResult = result
        return sampled

    def notified(self, actor: Session, event: Notified) -> None:
        """Call the handlers of a notification, and tell the session."""
        handlers = self.client.notification_handlers.get(event.method.name)
        if handlers is not None and actor.driven:
            actor.start_notice(self._notice, handlers, event.params)
        self.session.notified(event)

    async def _notice(self, handlers: list[Callable[..., Any]], params: Any) -> None:
        for handler in handlers:  # a crash of one does not affect the next
            try:
                await self._call(handler, params)
            except Exception as error:  # any failure of the handler
                log_crash(log, error, "the handler of a notification crashed (%s)", written(handler))

    def closed(self, actor: Session) -> None:
        """Forget the connection."""
        self.client.sessions.discard(self.session)
        if self.client.on_session is not None:
            self.client.on_session(actor, False)


def _approved(verdict: Any, value: Any, what: str) -> Any:
    """Return the approved value: `value`, or its replacement by the hook."""
    if verdict is True:
        return value
    if isinstance(verdict, type(value)):
        return verdict
    raise ErrorReply(_REFUSED, f"the user refused {what}")
