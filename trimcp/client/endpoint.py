"""What one connection serves to its server: answers to questions, within caps, and a place for its notices.

Questions come as requests in the legacy era and inside results since 2026-07-28; both end in `answer`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import attrs
import trio

from trimcp.errors import ErrorReply, LocalError
from trimcp.protocol.events import Notified
from trimcp.session.clock import Clocks
from trimcp.session.job import Job
from trimcp.session.session import Session
from trimcp.wire.capabilities import declares
from trimcp.wire.codes import INVALID_PARAMS, METHOD_NOT_FOUND, OVERLOADED
from trimcp.wire.content import TextContent
from trimcp.wire.elicitation import ElicitURLParams
from trimcp.wire.fields import ABSENT
from trimcp.wire.input_required import InputRequest
from trimcp.wire.logs import LoggingMessageParams
from trimcp.wire.roots import ListRootsResult, Root
from trimcp.wire.sampling import CreateMessageParams, CreateMessageResult

if TYPE_CHECKING:
    from trimcp.client.client import Client
    from trimcp.client.facade import ClientSession

__all__ = ["ClientEndpoint", "Logs", "call_handler"]

log: logging.Logger = logging.getLogger("trimcp.client")

# client/sampling, "Error Handling": what a server is told when the user refused.
_REFUSED = -1


async def call_handler(handler: Callable[..., Any], *args: Any, session: ClientSession | None = None) -> Any:
    """Return what a sync or async handler returns, giving it the session if it takes a keyword of that name."""
    kwargs = {"session": session} if session is not None and _takes_session(handler) else {}
    value = handler(*args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def _takes_session(handler: Callable[..., Any]) -> bool:
    try:
        return "session" in inspect.signature(handler).parameters
    except (TypeError, ValueError):
        return False


@attrs.define(eq=False)
class _Bucket:
    """Lets `per_minute` through in any minute on average, and at most as many at once."""

    per_minute: int
    _left: float = attrs.field(init=False)
    _at: float = attrs.field(init=False, factory=trio.current_time)

    def __attrs_post_init__(self) -> None:
        self._left = float(self.per_minute)

    def take(self) -> bool:
        now = trio.current_time()
        self._left = min(float(self.per_minute), self._left + (now - self._at) * self.per_minute / 60)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


@attrs.define(eq=False)
class Logs:
    """A server's log messages on their way to the handler; the oldest give way when it is slow."""

    _client: Client
    _session: Session
    _send: trio.MemorySendChannel[LoggingMessageParams]
    _receive: trio.MemoryReceiveChannel[LoggingMessageParams]
    _unread: int = attrs.field(init=False, default=0)
    _quiet: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    @classmethod
    def of(cls, client: Client, session: Session) -> Logs:
        """For one connection."""
        send, receive = trio.open_memory_channel[LoggingMessageParams](session.limits.logs_kept)
        return cls(client, session, send, receive)

    def put(self, params: LoggingMessageParams) -> None:
        """Keep a message for the handler."""
        limits = self._session.limits
        allowed = limits.kept_of(limits.logs_kept, self._session.arriving)
        while self._send.statistics().current_buffer_used >= allowed:
            self._receive.receive_nowait()
            self._session.counts.drop("logs")
            self._unread -= 1
        self._send.send_nowait(params)
        self._unread += 1

    async def run(self, session: ClientSession) -> None:
        """Hand messages to the handler, one after the other, until the session ends."""
        async for params in self._receive:
            try:
                handler = self._client.on_logging
                if handler is not None:
                    await call_handler(handler, params, session=session)
            except Exception:  # the user's own; the next message may fare better
                log.exception("the logging handler crashed")
            self._unread -= 1
            if not self._unread:
                self._quiet.unpark_all()

    async def drained(self) -> None:
        """Wait until the handler has seen every message that has arrived."""
        if self._unread:
            await self._quiet.park()


@attrs.define(eq=False)
class ClientEndpoint:
    """The client's side of one connection, as its actor sees it. `facade` is set once, right after it is made."""

    client: Client
    facade: ClientSession = attrs.field(init=False)
    _bucket: _Bucket = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._bucket = _Bucket(self.client.asks_per_minute)

    @property
    def served(self) -> Container[str]:
        """The methods a legacy server may call."""
        return self.client.served

    async def handle(self, session: Session, job: Job) -> Any:
        """Answer a legacy server's question."""
        return await self._answer(job.request.verb.name, job.params)

    async def answer(self, question: InputRequest) -> Any:
        """Answer a question that came inside a result.

        Raises:
            LocalError: it cannot be answered: there is no handler, the user refused, or there are too many.
        """
        try:
            return await self._answer(question.method, getattr(question, "params", None))
        except ErrorReply as error:
            raise LocalError(f"the server's question ({question.method}) was not answered: {error.message}") from error

    async def _answer(self, name: str, params: Any) -> Any:
        if name not in self.client.served:
            raise ErrorReply(METHOD_NOT_FOUND, f"this client has no handler for {name}")
        if not self._bucket.take():
            from trimcp.security import security_event

            most = self.client.asks_per_minute
            security_event("too_many_questions", method=name, most_per_minute=most)
            raise ErrorReply(OVERLOADED, f"this client answers at most {most} questions a minute")
        if name == "roots/list":
            return await self._roots()
        with self._clocks.person():
            if name == "sampling/createMessage":
                return await self._sample(params)
            return await self._elicit(params)

    @property
    def _clocks(self) -> Clocks:
        return self.facade.clocks

    async def _roots(self) -> ListRootsResult:
        assert self.client.on_roots is not None
        roots = await call_handler(self.client.on_roots, session=self.facade)
        return ListRootsResult(roots=[Root(uri=root) if isinstance(root, str) else root for root in roots])

    async def _elicit(self, params: Any) -> Any:
        mode = "url" if isinstance(params, ElicitURLParams) else "form"
        if mode not in self.client.elicitation_modes:
            raise ErrorReply(INVALID_PARAMS, f"this client did not declare elicitation in {mode} mode")
        assert self.client.on_elicitation is not None
        return await call_handler(self.client.on_elicitation, params, session=self.facade)

    async def _sample(self, params: CreateMessageParams) -> CreateMessageResult:
        client = self.client
        assert client.on_sampling is not None
        if params.tools is not ABSENT and not declares(client.capabilities, "sampling.tools"):
            raise ErrorReply(INVALID_PARAMS, "this client did not declare that its model may use tools")
        if client.before_sampling is not None:
            verdict = await call_handler(client.before_sampling, params, session=self.facade)
            params = _approved(verdict, params, "the request")
        result = await call_handler(client.on_sampling, params, session=self.facade)
        if isinstance(result, str):
            result = CreateMessageResult(role="assistant", content=TextContent(text=result), model="unknown")
        if client.after_sampling is not None:
            verdict = await call_handler(client.after_sampling, params, result, session=self.facade)
            result = _approved(verdict, result, "the model's answer")
        sampled: CreateMessageResult = result
        return sampled

    def notified(self, session: Session, event: Notified) -> None:
        """Take note of a server's notice."""
        if event.verb.name == "notifications/message":
            if self.facade.logs is not None:
                self.facade.logs.put(event.params)
            return
        if event.verb.name == "notifications/tools/list_changed":
            self.facade.outputs.listed(())  # what they promise is not known until they are listed again
        self.facade.cache.notified(event)
        self.facade.subscriptions.notified(event)

    def closed(self, session: Session) -> None:
        """Forget the connection."""
        self.client.sessions.discard(self.facade)


def _approved(verdict: Any, value: Any, what: str) -> Any:
    """Return what is to be used: `value`, or what the hook put in its place."""
    if verdict is True:
        return value
    if isinstance(verdict, type(value)):
        return verdict
    raise ErrorReply(_REFUSED, f"the user refused {what}")
