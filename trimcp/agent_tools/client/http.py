"""The agent-tools protocol over HTTP, for clients: each message is a request, and its answer the response.

A call with progress and a watch get their answers as streams of events. Cancelling closes the request, which cancels it
at the service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlencode

import attrs
import trio

from trimcp.agent_tools.client import wire
from trimcp.agent_tools.messages import errors, messages
from trimcp.agent_tools.messages.http import MERGE_PATCH, form_of
from trimcp.errors import AuthorizationError, ConnectionLost, InvalidReply, LocalError
from trimcp.framing.sse import Event
from trimcp.support.slotted import evolved
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import EVENT_STREAM, JSON_TEXT, Http, NotAuthorized, OpenReply, TooLarge
from trimcp.transports.http.client.incoming import Cursor, Inbox, read_events
from trimcp.transports.http.client.policy import PASSING, AttemptFailure, Backoff, Timeouts
from trimcp.transports.http.client.target import HttpServer
from trimcp.wire.jsonrpc import encode

AnswerT = TypeVar("AnswerT")

_LAST: Final = 1.0  # seconds that a stream may go on after its last event, so that the connection can be used again


@asynccontextmanager
async def open_http(target: wire.AgentTarget) -> AsyncIterator[HttpWire]:
    """Yield a wire to the service; nothing is sent before its first message."""
    timeouts = Timeouts(connect=target.timeout)
    server = HttpServer(
        target.url, target.all_headers(), target.uds, client=target.client, auth=target.auth, timeouts=timeouts
    )
    async with server.exchanges() as http:
        yield HttpWire(http, Backoff(target.retries), Inbox(max_message=target.max_message))


@attrs.frozen
class _Sent:
    """A request as HTTP has it. Its path has no part of the service's URL."""

    method: str
    path: str
    body: bytes | None = None  # a JSON text, or None for none
    headers: dict[str, str] = attrs.field(factory=dict)  # beside the common ones
    repeatable: bool = False  # it may be carried out twice


@attrs.define(eq=False)
class HttpWire:
    """An `AgentWire` over HTTP. There is no connection: a request that fails affects no other."""

    _http: Http
    _backoff: Backoff
    _sizes: Inbox

    async def call(self, request: messages.ToolRequest, progressed: wire.Progressed | None) -> messages.ToolResponse:
        """See `AgentWire.call`."""
        body = encode(messages.as_json(evolved(request, progress=None)))
        accept = JSON_TEXT if progressed is None else f"{EVENT_STREAM}, {JSON_TEXT}"
        sent = _Sent("POST", "/tools/call", body, {"accept": accept, "accept-encoding": "identity"})

        async def read(reply: OpenReply) -> messages.ToolResponse:
            if reply.content_type == EVENT_STREAM and reply.status < 300:
                return await self._read_call(reply, progressed)
            return wire.response_in(await self._value(reply))

        return await self._exchange(sent, read)

    async def ask(self, message: messages.AgentMessage) -> messages.AgentMessage:
        """See `AgentWire.ask`."""

        async def read(reply: OpenReply) -> messages.AgentMessage:
            return wire.answer_in(await self._value(reply), message)

        return await self._exchange(_sent(message), read)

    def watching(self, context_id: str) -> AbstractAsyncContextManager[wire.Events]:
        """See `AgentWire.watching`."""
        return wire.watched(partial(self._watch, context_id))

    async def provide(self, offer: messages.ProvideTools, begin: wire.Begin, registered: wire.Registered) -> None:
        """Raise: HTTP has no stream on which a service could ask."""
        raise LocalError("tools cannot be provided over HTTP; use a URL with ws:// or grpc://")

    async def wait_lost(self) -> None:
        """Wait for ever: each request has a connection of its own."""
        await trio.sleep_forever()

    # Exchanges

    async def _exchange(self, sent: _Sent, read: Callable[[OpenReply], Awaitable[AnswerT]]) -> AnswerT:
        """Send a request and return what `read` makes of its reply; send it again where that is safe.

        Raises as `AgentWire` says, and AuthorizationError if no access token could be obtained.
        """
        url = self._http.url.partition("?")[0].rstrip("/") + sent.path
        headers = {"accept": JSON_TEXT, **({} if sent.body is None else {"content-type": JSON_TEXT}), **sent.headers}
        attempt = 0
        while True:
            why: Exception
            try:
                async with self._http.open(sent.method, headers, sent.body, url=url) as reply:
                    try:
                        return await read(reply)
                    except (errors.AgentToolsError, InvalidReply) as error:
                        why = error
                        later = reply.status in PASSING and reply.status != 504
                        failure = AttemptFailure(str(error), untouched=False, passing=later, after=reply.retry_after)
            except ExchangeBroken as broken:
                why = _lost(broken)
                passing = not isinstance(broken, NotAuthorized)
                failure = AttemptFailure(broken.why, untouched=broken.nothing_sent, passing=passing)
            pause = self._backoff.before_next(attempt, failure, repeatable=sent.repeatable)
            if pause is None:
                raise why
            await trio.sleep(pause)
            attempt += 1

    async def _value(self, reply: OpenReply) -> Any:
        """Return the JSON value of a reply. Raises InvalidReply if it is too large or no JSON, ExchangeBroken.

        What is no JSON, as from a proxy, is the error of the protocol that its status stands for, if there is one.
        """
        try:
            body = await reply.body(self._sizes.max_message)
        except TooLarge:
            raise wire.too_large(self._sizes.max_message) from None
        try:
            value = messages.read_value(body)
        except errors.MalformedMessage as error:
            if reply.status >= 300:
                raise _refused(reply) from None
            raise InvalidReply(f"the service's answer cannot be read: {error.message}") from None
        if reply.status >= 300:
            if type(value) is not dict or value.get("type") not in wire.FAILURES:
                raise _refused(reply)
            failure = value.get("error")
            if reply.retry_after is not None and type(failure) is dict:
                failure.setdefault("retry_after", reply.retry_after)
        return value

    # Streams

    async def _read_call(self, reply: OpenReply, progressed: wire.Progressed | None) -> messages.ToolResponse:
        """Return the answer to a call from its stream of events."""
        answers: list[messages.ToolResponse] = []
        failure: Exception | None = None
        broken: ExchangeBroken | None = None
        scope = trio.CancelScope()

        async def receive(event: Event) -> None:
            nonlocal failure
            if answers or failure is not None or not (event.data or event.oversize):
                return
            try:
                value = self._event(event)
                if type(value) is dict and value.get("type") == messages.ToolProgress.type:
                    message = wire.event_in(value, messages.ToolProgress)
                    if progressed is not None:
                        progressed(message)
                    return
                answers.append(wire.response_in(value))
            except Exception as error:  # the answer is an error, or no answer, or the callback failed
                failure = error
            scope.deadline = trio.current_time() + _LAST

        with scope:
            broken = await read_events(reply, Cursor(), self._sizes, receive)
        if failure is not None:
            raise failure
        if answers:
            return answers[0]
        raise ExchangeBroken("the service ended the stream without an answer") if broken is None else broken

    async def _watch(self, context_id: str, keep: wire.Keep) -> None:
        """Read a context's events until the service ends them. Raises why it did not, or why they cannot be read."""
        sent = _sent(messages.ContextWatch(context_id=context_id))
        sent.headers["accept"] = EVENT_STREAM

        async def receive(event: Event) -> None:
            if event.data or event.oversize:
                await keep(wire.event_in(self._event(event), *messages.EVENTS))

        async def read(reply: OpenReply) -> None:
            if reply.status >= 300 or reply.content_type != EVENT_STREAM:
                raise wire.failure_in(await self._value(reply))
            broken = await read_events(reply, Cursor(), self._sizes, receive)
            if broken is not None:
                raise _lost(broken)

        await self._exchange(sent, read)

    def _event(self, event: Event) -> Any:
        if event.oversize is not None:
            raise InvalidReply(f"the service sent an event of more than {self._sizes.max_message} bytes")
        try:
            return messages.read_value(event.data)
        except errors.MalformedMessage as error:
            raise InvalidReply(f"the service sent an event that cannot be read: {error.message}") from None


def _sent(message: messages.AgentMessage) -> _Sent:
    """Return the request of HTTP that a message is."""
    form = form_of(message)
    if form is None:
        raise LocalError(f"{message.type} has no request over HTTP")
    path = f"{form.path}{_part(getattr(message, form.named))}{form.after}" if form.named else form.path
    query = {name: value for name in form.query if (value := getattr(message, name)) is not None}
    body = None
    if form.body == "*":
        body = {name: value for name, value in messages.as_json(message).items() if name != "type"}
    elif form.body:
        body = getattr(message, form.body)
    headers = {}
    if isinstance(message, messages.ContextUpdate):
        headers["content-type"] = MERGE_PATCH
        if message.version is not None:
            headers["if-match"] = f'"{message.version}"'
    whole = f"{path}?{urlencode(query)}" if query else path
    return _Sent(form.method, whole, None if body is None else encode(body), headers, form.repeatable)


def _part(name: str) -> str:
    """Return a name as one segment of a path. "." and ".." would be taken for others."""
    if name in (".", ".."):
        raise LocalError(f"{name!r} cannot stand in a path")
    return quote(name, safe="")


def _refused(reply: OpenReply) -> Exception:
    """Return the error for a reply without a message of the protocol."""
    cls = errors.ERRORS_BY_HTTP_STATUS.get(reply.status)
    return InvalidReply(reply.refusal()) if cls is None else cls(reply.refusal(), retry_after=reply.retry_after)


def _lost(broken: ExchangeBroken) -> Exception:
    if isinstance(broken, NotAuthorized):
        return AuthorizationError(broken.why, broken.code)
    return ConnectionLost(broken.why)
