"""The client of the agent-tools protocol: `async with agent_tools.connect(url) as agent: await agent.call(...)`.

The same over HTTP, WebSocket and gRPC: `wire` has what each of them implements. Errors of the service are raised
as the classes of `errors`.
"""

from __future__ import annotations

import inspect
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import trio

from trimcp.agent_tools.client.wire import AgentTarget, AgentWire, Events, Progressed
from trimcp.agent_tools.messages import errors, messages
from trimcp.agent_tools.messages.pending import PendingAnswer
from trimcp.channel import require_trio
from trimcp.errors import InvalidReply, LocalError, McpError
from trimcp.session.agent_context import ContextEvent
from trimcp.support.bounds import check_number
from trimcp.support.cleaning import one_line
from trimcp.support.nurseries import open_service_nursery
from trimcp.support.slotted import evolved
from trimcp.wire.jsonrpc import JSON

if TYPE_CHECKING:
    import ssl

    import httpx2

    from trimcp.transports.http.client.exchanges import ClientAuth

OnProgress: TypeAlias = Callable[[messages.ToolProgress], Awaitable[object] | object]
"""Called with the progress of a call, one message after another, in the task that calls."""

OnInput: TypeAlias = Callable[[dict[str, Any]], Awaitable[Mapping[str, JSON]] | Mapping[str, JSON]]
"""Answers the questions of a tool: both are by the questions' keys."""

_GRACE: Final = 2.0  # seconds beyond a call's timeout: the service's own answer says more
_CLOSING: Final = 2.0  # seconds to destroy a context when its block is left
_PROGRESS_KEPT: Final = 1_024  # as `Limits.progress_kept`
MAX_ROUNDS: Final = 10
_LONGEST_REASON: Final = 500

_log = logging.getLogger("trimcp.agent_tools")


class InputRequired(errors.AgentToolsError, code="input_required", http=200, grpc="OK", extended="input_required"):
    """A tool asks questions instead of returning a result, and there is no `on_input` to answer them.

    Call it again with `input_responses` and `request_state` to answer.

    Attributes:
        questions: the questions by their keys, as the service sent them. Untrusted text.
        request_state: to be sent with the answers, or None.
    """

    def __init__(self, questions: dict[str, Any], request_state: str | None = None) -> None:
        super().__init__("the tool asks for input", questions)
        self.questions = questions
        self.request_state = request_state


@asynccontextmanager
async def connect(
    url: str | AgentTarget,
    *,
    token: str | None = None,
    headers: Mapping[str, str] | None = None,
    on_input: OnInput | None = None,
    max_rounds: int = MAX_ROUNDS,
    uds: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    auth: ClientAuth | None = None,
    client: httpx2.AsyncClient | None = None,
) -> AsyncIterator[AgentConnection]:
    """Connect to a service and yield the connection; leaving the block ends it, with its calls and contexts.

    Args:
        url: where the service is, such as "http://localhost:8080", "ws://localhost:8080" or "grpc://localhost:8080"; or
            an `AgentTarget` with all options.
        token, headers, uds, ssl_context, auth, client: see `AgentTarget`.
        on_input: answers the questions of tools; without it they raise `InputRequired`.
        max_rounds: how often one call's questions are answered.

    Raises:
        ConnectionLost: there is no connection. Over HTTP the first request says so.
    """
    target = target_of(
        url, max_rounds, token=token, headers=headers, uds=uds, ssl_context=ssl_context, auth=auth, client=client
    )
    async with opened_wire(target) as wire:
        agent = AgentConnection(wire, on_input, max_rounds)
        try:
            yield agent
        finally:
            agent.ended = True


def target_of(url: str | AgentTarget, max_rounds: int, **options: Any) -> AgentTarget:
    """Return the target of a connection, after checking what it was opened with; options of None were not given."""
    require_trio()
    check_number("max_rounds", max_rounds, whole=True, zero=True)
    if isinstance(url, AgentTarget):
        if any(option is not None for option in options.values()):
            raise LocalError("options of the connection belong into the AgentTarget")
        return url
    return AgentTarget(url, **options)


def opened_wire(target: AgentTarget) -> AbstractAsyncContextManager[AgentWire]:
    """Return a context manager that yields a wire to a service."""
    if target.scheme.startswith("http"):
        from trimcp.agent_tools.client.http import open_http

        return open_http(target)
    if target.scheme.startswith("ws"):
        from trimcp.agent_tools.client.websocket import open_websocket_wire

        return open_websocket_wire(target)
    from trimcp.agent_tools.client.grpc import open_grpc_wire

    return open_grpc_wire(target)


@attrs.define(eq=False, repr=False)
class AgentConnection:
    """A connection to one service, valid until its `connect` block is left. Any task may use it.

    Cancelling any of its calls (a deadline included) cancels it at the service. All of them raise `AgentToolsError`, of
    the class that the error's row in the table has, if the service answers with an error; `InvalidReply` if its answer
    is invalid, `ConnectionLost` if it is gone, and `LocalError` if the request cannot be sent.

    Attributes:
        dropped: how many progress messages were dropped because their reader was slow.
        ended: whether the block was left.
    """

    _wire: AgentWire
    _on_input: OnInput | None
    _max_rounds: int
    dropped: int = attrs.field(init=False, default=0)
    ended: bool = attrs.field(init=False, default=False)
    # Ids are unique in a context, which may be used by other processes too.
    _prefix: str = attrs.field(init=False, factory=lambda: f"req-{secrets.token_hex(4)}-")
    _numbers: count[int] = attrs.field(init=False, factory=lambda: count(1))

    async def wait_lost(self) -> None:
        """Wait until the service is gone; for ever over HTTP, where each request has a connection of its own."""
        await self._wire.wait_lost()

    # Tools

    async def call(
        self,
        name: str,
        arguments: Mapping[str, JSON] | None = None,
        *,
        version: str | None = None,
        context: ContextHandle | str | None = None,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
        on_input: OnInput | None = None,
        input_responses: Mapping[str, JSON] | None = None,
        request_state: str | None = None,
        request_id: str | None = None,
    ) -> Any:
        """Call a tool and return its result, a JSON value.

        Args:
            name: the tool's name.
            arguments: its arguments.
            version: its version; None for the newest.
            context: the context to call it in, or its id. A context that nobody made yet begins with the call.
            timeout: seconds after which the service cancels the call.
            on_progress: called with each `ToolProgress`; what it raises cancels the call. May be async.
            on_input: answers the tool's questions, instead of that of `connect`.
            input_responses, request_state: answers to the questions of an `InputRequired`, and its state.
            request_id: unique among the calls under way; None for a new one.

        Raises:
            ToolFailed: the tool reports an error of its own.
            DeadlinePassed: the `timeout` is over.
            InputRequired: the tool asks questions that nobody answers.
            AgentToolsError: the service answered with another error.
            InvalidReply, ConnectionLost, LocalError: as for the class.
        """
        request = self._request(name, arguments, version, context, timeout, input_responses, request_state, request_id)
        if on_progress is None:
            return await self.complete(request, None, on_input)
        async with self._calling(request, on_input) as call:
            async for progress in call.progress:
                answer = on_progress(progress)
                if inspect.isawaitable(answer):
                    await answer
            return await call.result()

    def calling(
        self,
        name: str,
        arguments: Mapping[str, JSON] | None = None,
        *,
        version: str | None = None,
        context: ContextHandle | str | None = None,
        timeout: float | None = None,
        on_input: OnInput | None = None,
        request_id: str | None = None,
    ) -> AbstractAsyncContextManager[ToolCalling]:
        """Call a tool and yield the call, to follow its `progress` and await its `result()`. Arguments as for `call`.

        Leaving the block without the result, also by an exception or a cancellation, cancels the call at the service.
        """
        return self._calling(
            self._request(name, arguments, version, context, timeout, None, None, request_id), on_input
        )

    async def tools(self, name: str | None = None, version: str | None = None) -> list[dict[str, Any]]:
        """Return the tools' manifests as the service sent them: `name`, `description`, `parameters`, `version`.

        Args:
            name: only the versions of this tool.
            version: only this version.
        """
        return (await self.ask(messages.ListTools(name=name, version=version), messages.ToolList)).tools

    async def register(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Register a tool that the service can run; return its `name`, `version`, `hash` and `status`.

        The status is "registered", or "pending" while somebody has to approve it.
        """
        answer = await self.ask(messages.RegisterTool(tool=dict(manifest)), messages.ToolsRegistered)
        if len(answer.tools) != 1:
            raise InvalidReply("the service's answer to one manifest is about another number of tools")
        return answer.tools[0]

    async def remove(self, name: str, version: str | None = None) -> None:
        """Remove a tool that this agent registered, or one version of it."""
        await self.ask(messages.RemoveTool(name=name, version=version), messages.ToolRemoved)

    # Contexts

    @asynccontextmanager
    async def context(
        self,
        id: str | None = None,
        *,
        state: Mapping[str, JSON] | None = None,
        ttl: float | None = None,
        session: str | None = None,
    ) -> AsyncIterator[ContextHandle]:
        """Make a context and yield it; leaving the block destroys it, with the calls under way in it.

        If the block is left by a cancellation, destroying still gets two seconds. If it does not succeed, the context
        ends at its own time.

        Args:
            id: None for one that the service makes.
            state: its first state.
            ttl: seconds after which it ends; at most what the service allows.
            session: the user's session that it belongs to; `end_session` ends all contexts of one.
        """
        first = None if state is None else dict(state)
        asked = messages.ContextCreate(context_id=id, state=first, ttl=ttl, session_id=session)
        context = ContextHandle(self, (await self.ask(asked, messages.ContextState)).context_id)
        reason = "its block was left"
        try:
            yield context
        except trio.Cancelled:
            reason = "its block was cancelled"
            raise
        except Exception as error:  # the body's, raised on: the service is told its kind
            reason = f"its block raised {type(error).__name__}"
            raise
        finally:
            # However the block ended, the service is told, for a bounded time.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSING):
                await context.leave(reason)

    def existing_context(self, id: str) -> ContextHandle:
        """Return a context by its id, without asking the service; it is not destroyed at the end."""
        return ContextHandle(self, id)

    async def end_session(self, id: str, reason: str | None = None) -> None:
        """End all contexts of this agent that belong to a session. Raises `UnknownContext` if there is none."""
        await self.ask(messages.ContextDestroy(session_id=id, reason=reason), messages.ContextDestroyed)

    # Messages

    async def ask(self, message: messages.AgentMessage, answer: type[messages.MessageT]) -> messages.MessageT:
        """Send a message that is no call, and return its answer, which is of this class."""
        self._check()
        found = await self._wire.ask(message)
        assert isinstance(found, answer)
        return found

    def watching(self, context_id: str) -> AbstractAsyncContextManager[Events]:
        """See `ContextHandle.watch`."""
        self._check()
        return self._wire.watching(context_id)

    def _check(self) -> None:
        if self.ended:
            raise LocalError("the block of this connection was left")

    def _request(
        self,
        name: str,
        arguments: Mapping[str, JSON] | None,
        version: str | None,
        context: ContextHandle | str | None,
        timeout: float | None,
        input_responses: Mapping[str, JSON] | None,
        request_state: str | None,
        request_id: str | None,
    ) -> messages.ToolRequest:
        check_number("timeout", timeout, optional=True)
        return messages.ToolRequest(
            tool_name=name,
            arguments=dict(arguments or {}),
            request_id=request_id or f"{self._prefix}{next(self._numbers)}",
            context_id=context.id if isinstance(context, ContextHandle) else context,
            version=version,
            timeout=timeout,
            statuses="extended",
            input_responses=None if input_responses is None else dict(input_responses),
            request_state=request_state,
        )

    # Calls

    @asynccontextmanager
    async def _calling(self, request: messages.ToolRequest, on_input: OnInput | None) -> AsyncIterator[ToolCalling]:
        call = ToolCalling(self, request.request_id)
        async with open_service_nursery() as nursery:
            nursery.start_soon(call.run, request, on_input)
            try:
                yield call
            finally:
                call.leave()

    async def complete(
        self, request: messages.ToolRequest, progressed: Progressed | None, on_input: OnInput | None
    ) -> Any:
        """Send a call and return its result; answer its questions meanwhile."""
        answering = on_input or self._on_input
        left = self._max_rounds
        while True:
            response = await self._response(request, progressed)
            if response.status == "success":
                return response.result
            if response.status != "input_required":
                raise _failure(response)
            asked = _questions(response)
            if answering is None:
                raise asked
            if left == 0:
                raise InvalidReply(f"{request.tool_name}: the tool keeps asking; no more of its questions are answered")
            left -= 1
            answers = answering(asked.questions)
            given = await answers if inspect.isawaitable(answers) else answers
            request = evolved(
                request,
                input_responses=dict(given),
                request_state=asked.request_state,
                request_id=f"{self._prefix}{next(self._numbers)}",
            )

    async def _response(self, request: messages.ToolRequest, progressed: Progressed | None) -> messages.ToolResponse:
        self._check()
        if request.timeout is None:
            return await self._wire.call(request, progressed)
        with trio.move_on_after(request.timeout + _GRACE):
            return await self._wire.call(request, progressed)
        raise errors.DeadlinePassed(f"the service did not answer in {request.timeout:g} seconds")


@attrs.define(eq=False, repr=False)
class ToolCalling:
    """A call in progress.

    Attributes:
        request_id: its id.
        progress: a receive channel of the call's progress, which ends when the answer has arrived. It keeps 1,024
            messages for a slow reader; beyond it the oldest are dropped and counted in `AgentConnection.dropped`.
    """

    _agent: AgentConnection
    request_id: str
    progress: trio.MemoryReceiveChannel[messages.ToolProgress] = attrs.field(init=False)
    _progress_in: trio.MemorySendChannel[messages.ToolProgress] = attrs.field(init=False)
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _result: PendingAnswer = attrs.field(init=False, factory=PendingAnswer)

    def __attrs_post_init__(self) -> None:
        self._progress_in, self.progress = trio.open_memory_channel[messages.ToolProgress](_PROGRESS_KEPT)

    async def result(self) -> Any:
        """Wait for the answer and return the result; may be called more than once. Raises as `AgentConnection.call`.

        Cancelling this does not cancel the call; leaving the block does.
        """
        return await self._result.answer()

    async def run(self, request: messages.ToolRequest, on_input: OnInput | None) -> None:
        """Make the call."""
        try:
            with self._scope:
                self._result.resolve(await self._agent.complete(request, self._progressed, on_input))
        except Exception as error:  # any failure; `result` raises it in the caller's task
            self._result.resolve(error=error)
        finally:
            self._progress_in.close()
            self._result.resolve(error=LocalError("the block of this call was left before the result was there"))

    def leave(self) -> None:
        """Cancel the call unless its answer is there."""
        self._scope.cancel(reason="the caller left before the result was there")

    def _progressed(self, progress: messages.ToolProgress) -> None:
        """Keep progress for the reader; if there is no room, the oldest is dropped."""
        try:
            try:
                self._progress_in.send_nowait(progress)
            except trio.WouldBlock:
                self.progress.receive_nowait()
                self._agent.dropped += 1
                self._progress_in.send_nowait(progress)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the reader closed the channel


@attrs.define(eq=False)
class ContextHandle:
    """A context at the service: its state, and calls in it. Any task may use it.

    Attributes:
        id: its id.
    """

    _agent: AgentConnection = attrs.field(repr=False)
    id: str

    async def read(self) -> messages.ContextState:
        """Return its `state` and `version`."""
        return await self._agent.ask(messages.ContextRead(context_id=self.id), messages.ContextState)

    async def update(self, updates: Mapping[str, JSON], version: int | None = None) -> messages.ContextUpdate:
        """Change its state by a JSON merge patch (RFC 7396), and return the update as applied with its new `version`.

        Args:
            updates: the patch; None removes a member.
            version: apply it to this version only.

        Raises:
            VersionConflict: the context has another version.
        """
        asked = messages.ContextUpdate(context_id=self.id, updates=dict(updates), version=version)
        return await self._agent.ask(asked, messages.ContextUpdate)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[trio.abc.ReceiveChannel[ContextEvent]]:
        """Follow its changes: `async with context.watch() as events: async for event in events: ...`.

        Events are as for handlers: "state" (the first, and whenever a slow reader missed updates), "update" and, as the
        last, "destroyed". A slow reader never makes anything grow: it gets a state in place of what it missed. The
        iteration raises `ConnectionLost` when the connection is lost.
        """
        async with self._agent.watching(self.id) as watched:
            yield ContextEvents(watched)

    async def call(self, name: str, arguments: Mapping[str, JSON] | None = None, **options: Any) -> Any:
        """Call a tool in this context. See `AgentConnection.call`."""
        return await self._agent.call(name, arguments, context=self, **options)

    def calling(
        self, name: str, arguments: Mapping[str, JSON] | None = None, **options: Any
    ) -> AbstractAsyncContextManager[ToolCalling]:
        """Call a tool in this context and yield the call. See `AgentConnection.calling`."""
        return self._agent.calling(name, arguments, context=self, **options)

    async def destroy(self, reason: str | None = None) -> None:
        """End it: calls under way in it are cancelled with the reason, watchers are told, the state is forgotten."""
        await self._agent.ask(messages.ContextDestroy(context_id=self.id, reason=reason), messages.ContextDestroyed)

    async def leave(self, reason: str) -> None:
        """Destroy it unless it has ended, or the service is gone."""
        try:
            await self.destroy(reason[:_LONGEST_REASON])
        except McpError as error:
            _log.debug("the context could not be destroyed: %s", one_line(str(error)))


@attrs.define(eq=False)
class ContextEvents(trio.abc.ReceiveChannel[ContextEvent]):
    """The events of a context that is watched."""

    _messages: Events
    _version: int = attrs.field(init=False, default=0)
    _end: Exception | None = attrs.field(init=False, default=None)

    async def receive(self) -> ContextEvent:
        """Wait for the next event; none follows "destroyed". Cancelling this loses nothing."""
        if self._end is not None:
            await trio.lowlevel.checkpoint()
            raise self._end
        message = await self._messages.receive()
        if isinstance(message, messages.ContextState):
            self._version = message.version
            return ContextEvent("state", message.context_id, message.version, message.state)
        if isinstance(message, messages.ContextUpdate):
            self._version = self._version if message.version is None else message.version
            return ContextEvent("update", message.context_id, self._version, message.updates)
        if isinstance(message, Exception):
            self._end = message
            raise message
        assert isinstance(message, messages.ContextDestroyed)
        self._end = trio.EndOfChannel()
        return ContextEvent("destroyed", message.context_id or "", self._version, reason=message.reason)

    async def aclose(self) -> None:
        """Receive no more; the block around it ends the watch."""
        await self._messages.aclose()


def _failure(response: messages.ToolResponse) -> Exception:
    """Return the exception for an answer that is no result."""
    if response.error is not None:
        return errors.error_from(response.error)
    cls = _OF_STATUS.get(response.status)
    if cls is None:
        return InvalidReply(f"the answer's status is {response.status[:40]!r}, and it has no error")
    return cls("the service does not say why")


_OF_STATUS: Final[dict[str, type[errors.AgentToolsError]]] = {
    "error": errors.AgentToolsError,
    **{cls.extended_status: cls for cls in (errors.RequestCancelled, errors.DeadlinePassed, errors.NotAllowed)},
}


def _questions(response: messages.ToolResponse) -> InputRequired:
    result = response.result
    if type(result) is not dict:
        raise InvalidReply("the tool wants more input but does not say what")
    questions, state = result.get("input_requests"), result.get("request_state")
    if type(questions or {}) is not dict or type(state or "") is not str or (not questions and state is None):
        raise InvalidReply("the tool wants more input but does not say what")
    return InputRequired(questions or {}, state)
