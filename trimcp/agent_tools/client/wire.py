"""What carries a client's messages to a service: the interface that HTTP, WebSocket and gRPC implement.

A wire sends messages and returns their answers as messages. Queues, contexts and typed errors of calls are the client's
(`connection`), so that they are the same over every transport.
"""

from __future__ import annotations

import ssl
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit

import attrs
import trio

from trimcp.agent_tools.messages import errors, messages
from trimcp.channel import CLIENT_MAX_MESSAGE, Incoming, Sink
from trimcp.errors import ConnectionLost, InvalidReply, LocalError, McpError
from trimcp.support.bounds import checked
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.slotted import evolved
from trimcp.transports.targets import checked_headers, checked_url, masked_url, socket_path

if TYPE_CHECKING:
    import httpx2

    from trimcp.transports.http.client.exchanges import ClientAuth


SCHEMES: Final = ("http", "https", "http+unix", "ws", "wss", "ws+unix", "grpc", "grpcs")
"""Of the URL of a service."""

AnswerT = TypeVar("AnswerT")

ReadValue: TypeAlias = Callable[[Any], Awaitable[AnswerT | None]]
"""Reads a JSON value of an answer; None of one that others follow."""

Progressed: TypeAlias = Callable[[messages.ToolProgress], object]
"""Called with the progress of a call. It never waits."""


Begin: TypeAlias = Callable[[Sink], Callable[[Incoming], object]]
"""Gets what takes `tool_response` and `tool_progress` messages, as JSON text; after the end they are dropped.

It returns what is called with each `tool_request` and `tool_cancel` of the service, a JSON object; that never waits."""

Registered: TypeAlias = Callable[[messages.ToolsRegistered], object]
"""Called with what the service made of an offer. It never waits."""


Events: TypeAlias = "trio.abc.ReceiveChannel[messages.AgentMessage | Exception]"
"""Events of a watched context. A wire raises why there are no more, or gives it in place of an event, as the last."""


class NotSent(ConnectionLost):
    """The connection is lost, and nothing of the request was sent over it: it can be sent over another one."""


class AgentWire(Protocol):
    """A way to one service. Any task may use it.

    Cancelling any of its methods cancels the request at the service, with the reason where the transport carries one.
    All of them raise

        AgentToolsError: the service answered with an error that is not the answer to a call.
        InvalidReply: its answer is not valid, or larger than `AgentTarget.max_message`.
        ConnectionLost: it is gone, or was never reached; `NotSent`, if nothing of the request was sent.
        LocalError: the message cannot be sent over this transport; nothing was sent.
    """

    async def call(self, request: messages.ToolRequest, progressed: Progressed | None) -> messages.ToolResponse:
        """Call a tool and return the answer, whatever its status, also one that no specification has.

        The request's `request_id` is unique among the calls under way over this wire in its context. It is sent as it
        is, but for `progress`, which the wire sets or leaves out: `progressed` is called with that as it arrives.
        """
        ...

    async def ask(self, message: messages.AgentMessage) -> messages.AgentMessage:
        """Send a message that is no call and opens no stream; return its answer, as `answer_in` has it.

        A `request_id` is the wire's own: the message has none.
        """
        ...

    def watching(self, context_id: str) -> AbstractAsyncContextManager[Events]:
        """Watch a context: a `ContextState` first, then `ContextUpdate`, or `ContextState` in place of several updates.

        Nothing is received after `ContextDestroyed`. A slow reader makes the service wait, or gets a state in place
        of what it missed; nothing is queued without bounds. Leaving the block ends the watch at the service.
        """
        ...

    async def provide(self, offer: messages.ProvideTools, begin: Begin, registered: Registered) -> None:
        """Offer tools, and have them called until the connection is lost, which is then raised.

        They are withdrawn when the connection is closed at the latest: a wire that provides is left when this ends.
        """
        ...

    async def wait_lost(self) -> None:
        """Wait until the connection is lost; for ever if each request has a connection of its own."""
        ...


class ExchangeWire:
    """An `AgentWire` on which each message is an exchange of its own: what is the same over HTTP and gRPC."""

    __slots__ = ()

    @abstractmethod
    async def exchange(
        self, message: messages.AgentMessage, read: ReadValue[AnswerT], *, stream: bool = False
    ) -> AnswerT | None:
        """Send a message, have the JSON values of its answer read, and return what the last was read as.

        Only in a `stream` there may be several. None if the last did not come.
        """

    async def call(self, request: messages.ToolRequest, progressed: Progressed | None) -> messages.ToolResponse:
        """See `AgentWire.call`."""

        async def read(value: Any) -> messages.ToolResponse | None:
            if type(value) is not dict or value.get("type") != messages.ToolProgress.type:
                return response_in(value)
            progress = event_in(value, messages.ToolProgress)
            if progressed is not None:
                progressed(progress)
            return None

        if request.progress is not None:
            request = evolved(request, progress=None)
        return _last(await self.exchange(request, read, stream=progressed is not None))

    async def ask(self, message: messages.AgentMessage) -> messages.AgentMessage:
        """See `AgentWire.ask`."""

        async def read(value: Any) -> messages.AgentMessage:
            return answer_in(value, message)

        return _last(await self.exchange(message, read))

    @asynccontextmanager
    async def watching(self, context_id: str) -> AsyncIterator[Events]:
        """See `AgentWire.watching`. One event is read ahead, so a slow reader makes the service wait."""
        events_in, events = trio.open_memory_channel[messages.AgentMessage | Exception](0)

        async def run(task_status: trio.TaskStatus[None]) -> None:
            begun = False

            async def keep(event: messages.AgentMessage | Exception) -> None:
                nonlocal begun
                if not begun:
                    begun = True
                    task_status.started()
                await events_in.send(event)

            async def read(value: Any) -> messages.AgentMessage | None:
                event: messages.AgentMessage = event_in(value, *messages.EVENTS)
                await keep(event)
                return event if isinstance(event, messages.ContextDestroyed) else None

            end: Exception = ConnectionLost("the service ended the watch")
            try:
                try:
                    await self.exchange(messages.ContextWatch(context_id=context_id), read, stream=True)
                except McpError as error:
                    if not begun:
                        raise
                    end = error
                await keep(end)
            except trio.BrokenResourceError:
                pass  # the reader closed the channel

        async with open_service_nursery() as nursery:
            await nursery.start(run)
            yield events


def _last(answer: AnswerT | None) -> AnswerT:
    if answer is None:
        raise ConnectionLost("the service ended the stream without an answer")
    return answer


def _check_url(instance: object, attribute: Any, url: str) -> None:
    needed = "a service's URL begins with http://, ws:// or grpc:// (https, wss, grpcs with TLS) and names a host"
    checked_url(url, SCHEMES, needed)


def _without_endpoint(url: str) -> str:
    """Return a service's URL without the path of its endpoint for MCP, which is what servers print."""
    return url.removesuffix("/mcp") if url.startswith("http") else url


@attrs.frozen(field_transformer=checked(zero=("retries",)))
class AgentTarget:
    """A service of agent tools, and how to reach it.

    Attributes:
        url: "http://host:port", "ws://...", "grpc://...", with TLS "https", "wss" and "grpcs", on a Unix socket
            "http+unix://%2Frun%2Fservice.sock" and "ws+unix://...". A path in it goes before the protocol's own paths;
            over HTTP a last "/mcp" is left out of it.
        token: sent as `Authorization: Bearer`; None for none. Never logged.
        headers: sent with every request, or with the one that opens the connection. Never logged.
        uds: path of a Unix socket to connect to; the host of `url` is then sent but not connected to.
        ssl_context: for `wss` and `grpcs`; None for one that trusts the system's certificates.
        auth: gets access tokens over HTTP, such as `trimcp.auth.OAuth()`.
        client: an `httpx2.AsyncClient` of your own for HTTP; it is not closed.
        max_message: bytes of the largest message or event that is accepted.
        timeout: seconds that connecting may take.
        retries: how often a request that did not reach the service, or only reads, is sent again over HTTP.
    """

    url: str = attrs.field(converter=_without_endpoint, validator=_check_url, repr=lambda url: repr(masked_url(url)))
    token: str | None = attrs.field(default=None, repr=False)
    headers: Mapping[str, str] = attrs.field(default=None, converter=checked_headers, repr=False, kw_only=True)
    uds: str | None = attrs.field(default=None, kw_only=True)
    ssl_context: ssl.SSLContext | None = attrs.field(default=None, repr=False, kw_only=True)
    auth: ClientAuth | None = attrs.field(default=None, repr=False, kw_only=True)
    client: httpx2.AsyncClient | None = attrs.field(default=None, repr=False, kw_only=True)
    max_message: int = attrs.field(default=CLIENT_MAX_MESSAGE, kw_only=True)
    timeout: float = attrs.field(default=10.0, kw_only=True)
    retries: int = attrs.field(default=3, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.token is not None and "authorization" in self.headers:
            raise LocalError("give a token or a header Authorization, not both")
        self.all_headers()

    @property
    def scheme(self) -> str:
        """The scheme of its URL."""
        return urlsplit(self.url).scheme

    @property
    def socket(self) -> str | None:
        """The path of the Unix socket to connect to, or None for TCP."""
        return socket_path(self.url, self.uds)

    def check_no_auth(self) -> None:
        """Raise LocalError if it has options that only HTTP takes."""
        if self.auth is not None or self.client is not None:
            raise LocalError("`auth` and `client` are for HTTP; give a token")

    def all_headers(self) -> dict[str, str]:
        """Return the headers to send, with the token."""
        token = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        return {**checked_headers(token), **self.headers}


# Reading answers

FAILURES: Final = (messages.ErrorMessage.type, messages.ToolResponse.type)
"""The types of messages that may have an error."""


def response_in(value: Any) -> messages.ToolResponse:
    """Return the answer to a call, from its JSON value. A status that no specification has is left as it is.

    Raises an AgentToolsError without a status, and InvalidReply if it is no answer to a call.
    """
    if type(value) is dict and value.get("type") == messages.ToolResponse.type and type(value.get("status")) is str:
        status = value["status"]
        response = _read(messages.ToolResponse, {**value, "status": "success"})
        response.status = status
        return response
    raise failure_in(value)


def answer_in(value: Any, asked: messages.AgentMessage) -> messages.AgentMessage:
    """Return the answer to a message that is no call, from its JSON value.

    Raises the AgentToolsError that it is, and InvalidReply if it is no answer to such a message.
    """
    return event_in(value, messages.MESSAGES[asked.answer])


def too_large(most: int) -> InvalidReply:
    """Return the error for an answer of more bytes than `AgentTarget.max_message`."""
    return InvalidReply(f"the service's answer has more than {most} bytes, the limit of this client")


def event_in(value: Any, *wanted: type[messages.MessageT]) -> messages.MessageT:
    """Return a message that is one of these, from its JSON value. Raises as `answer_in`."""
    if type(value) is dict:
        for cls in wanted:
            if value.get("type") == cls.type:
                return _read(cls, value)
    raise failure_in(value)


def failure_in(value: Any) -> Exception:
    """Return the error that a JSON value is; InvalidReply if it is none."""
    if type(value) is dict and value.get("type") in FAILURES:
        return errors.error_from(value.get("error"))
    return InvalidReply("the service's answer is none of the protocol's messages, or not the one that was asked for")


def _read(cls: type[messages.MessageT], value: dict[str, Any]) -> messages.MessageT:
    try:
        return messages.read_as(cls, value)
    except errors.MalformedMessage as error:
        raise InvalidReply(f"the service's answer is malformed: {error.message}") from None
