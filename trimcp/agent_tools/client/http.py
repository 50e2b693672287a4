"""The agent-tools protocol over HTTP, for clients: each message is a request, and its answer the response.

A call with progress and a watch get their answers as streams of events. Cancelling closes the request, which cancels it
at the service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote, urlencode

import attrs
import trio

from trimcp.agent_tools.client import wire
from trimcp.agent_tools.messages import errors, messages
from trimcp.agent_tools.messages.http import MERGE_PATCH, HttpForm, form_of
from trimcp.errors import AuthorizationError, ConnectionLost, InvalidReply, LocalError
from trimcp.framing.sse import Event
from trimcp.transports.http.client.engine import ExchangeBroken
from trimcp.transports.http.client.exchanges import EVENT_STREAM, JSON_TEXT, Http, NotAuthorized, OpenReply, TooLarge
from trimcp.transports.http.client.incoming import Cursor, Inbox, read_events
from trimcp.transports.http.client.policy import PASSING, AttemptFailure, Backoff, Timeouts
from trimcp.transports.http.client.target import HttpServer
from trimcp.wire.jsonrpc import encode

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


@attrs.define(eq=False)
class HttpWire(wire.ExchangeWire):
    """An `AgentWire` over HTTP. There is no connection: a request that fails affects no other."""

    _http: Http
    _backoff: Backoff
    _sizes: Inbox

    async def provide(self, offer: messages.ProvideTools, begin: wire.Begin, registered: wire.Registered) -> None:
        """Raise: HTTP has no stream on which a service could ask."""
        raise LocalError("tools cannot be provided over HTTP; use a URL with ws:// or grpc://")

    async def wait_lost(self) -> None:
        """Wait for ever: each request has a connection of its own."""
        await trio.sleep_forever()

    async def exchange(
        self, message: messages.AgentMessage, read: wire.ReadValue[wire.AnswerT], *, stream: bool = False
    ) -> wire.AnswerT | None:
        """See `ExchangeWire.exchange`. The request is sent again where that is safe.

        Raises as `AgentWire` says, and AuthorizationError if no access token could be obtained.
        """
        form, path, body, headers = _sent(message, stream=stream)
        url = self._http.url.partition("?")[0].rstrip("/") + path
        attempt = 0
        while True:
            why: Exception
            try:
                async with self._http.open(form.method, headers, body, url=url) as reply:
                    try:
                        if reply.content_type == EVENT_STREAM and reply.status < 300:
                            return await self._read_events(reply, read)
                        return await read(await self._value(reply))
                    except (errors.AgentToolsError, InvalidReply) as error:
                        why = error
                        later = reply.status in PASSING and reply.status != 504
                        failure = AttemptFailure(str(error), untouched=False, passing=later, after=reply.retry_after)
            except ExchangeBroken as broken:
                why = _lost(broken)
                passing = not isinstance(broken, NotAuthorized)
                failure = AttemptFailure(broken.why, untouched=broken.nothing_sent, passing=passing)
            pause = self._backoff.before_next(attempt, failure, repeatable=form.repeatable)
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
        value: Any = None
        try:
            value = messages.read_value(body)
        except errors.MalformedMessage as error:
            if reply.status < 300:
                raise InvalidReply(f"the service's answer cannot be read: {error.message}") from None
        if reply.status >= 300:
            if type(value) is not dict or value.get("type") not in wire.FAILURES:
                raise _refused(reply)
            failure = value.get("error")
            if reply.retry_after is not None and type(failure) is dict:
                failure.setdefault("retry_after", reply.retry_after)
        return value

    async def _read_events(self, reply: OpenReply, read: wire.ReadValue[wire.AnswerT]) -> wire.AnswerT | None:
        """Read a stream of events until one is the last, and return what that was read as; None if none was."""
        last: wire.AnswerT | None = None
        scope = trio.CancelScope()

        async def receive(event: Event) -> None:
            nonlocal last
            if last is None and (event.data or event.oversize):
                last = await read(self._event(event))
                if last is not None:
                    scope.deadline = trio.current_time() + _LAST

        with scope:
            broken = await read_events(reply, Cursor(), self._sizes, receive)
            if broken is not None and last is None:
                raise _lost(broken)
        return last

    def _event(self, event: Event) -> Any:
        if event.oversize is not None:
            raise InvalidReply(f"the service sent an event of more than {self._sizes.max_message} bytes")
        try:
            return messages.read_value(event.data)
        except errors.MalformedMessage as error:
            raise InvalidReply(f"the service sent an event that cannot be read: {error.message}") from None


def _sent(
    message: messages.AgentMessage, *, stream: bool = False
) -> tuple[HttpForm, str, bytes | None, dict[str, str]]:
    """Return the form, path, body and headers of the request that a message is; its answer may be a `stream`.

    The path has no part of the service's URL. The headers are those beside the common ones.
    """
    form = form_of(message)
    if form is None:
        raise LocalError(f"{message.type} has no request over HTTP")
    path = f"{form.path}{_part(getattr(message, form.named))}{form.after}" if form.named else form.path
    query = {name: value for name in form.query if (value := getattr(message, name)) is not None}
    headers = {"accept": EVENT_STREAM if isinstance(message, messages.ContextWatch) else JSON_TEXT}
    body = None
    if form.body == "*":
        body = messages.as_json(message)
        if not isinstance(message, messages.ToolRequest):
            del body["type"]
    elif form.body:
        body = getattr(message, form.body)
    if body is not None:
        headers["content-type"] = JSON_TEXT
    if isinstance(message, messages.ToolRequest):
        headers["accept-encoding"] = "identity"
        if stream:
            headers["accept"] = f"{EVENT_STREAM}, {JSON_TEXT}"
    elif isinstance(message, messages.ContextUpdate):
        headers["content-type"] = MERGE_PATCH
        if message.version is not None:
            headers["if-match"] = f'"{message.version}"'
    whole = f"{path}?{urlencode(query)}" if query else path
    return form, whole, None if body is None else encode(body), headers


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
