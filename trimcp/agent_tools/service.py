"""Agent tools in one run of a server, and each call from its request to its answer.

A `tool_request` becomes a `tools/call` of the newest revision of MCP, delivered to a session that transports push into.
So there is one registry, and every limit, quota, filter, permission and record of a call is that of MCP. `AgentCall` is
where the session sends what belongs to the call, and translates it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import count
from typing import Any, ClassVar, Final, Protocol

import attrs
import trio

from trimcp.agent_tools.answering import Answering, Found, Later
from trimcp.agent_tools.callers import AgentCaller, agent_of
from trimcp.agent_tools.catalog.catalog import Catalog
from trimcp.agent_tools.catalog.entries import shown, version_of
from trimcp.agent_tools.contexts.actor import ActorContext, ContextActor
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.agent_tools.messages import errors, messages
from trimcp.agent_tools.messages.answers import CallAnswer, answer_to, asked_by, progress_of
from trimcp.channel import Incoming, Kind, Link, Outgoing, Sink, lane_of
from trimcp.errors import LocalError
from trimcp.schema.convert import without_root
from trimcp.security import security_event
from trimcp.server.running import Running
from trimcp.server.tools import ToolEntry
from trimcp.session.agent_context import AgentContext
from trimcp.session.facts import Beside
from trimcp.session.push import Pushed
from trimcp.session.session import Session
from trimcp.support.bounds import checked
from trimcp.support.cleaning import digest
from trimcp.support.shares import Places
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION, META_TIMEOUT
from trimcp.wire.jsonrpc import Notification, Request, RequestId
from trimcp.wire.revisions import LATEST

_INFO: Final = {"name": "agent-tools", "version": "1"}
_PLAIN: Final = {META_PROTOCOL_VERSION: LATEST.name, META_CLIENT_INFO: _INFO, META_CLIENT_CAPABILITIES: {}}
_ASKABLE: Final = {**_PLAIN, META_CLIENT_CAPABILITIES: {"elicitation": {"form": {}}}}
"""The envelope of a call whose agent takes questions as an answer (`"statuses": "extended"`)."""

MAX_CALLS: Final = 10_000
"""Default of the calls under way, over all callers."""


class AgentBinding(Protocol):
    """One request, or one connection, by which messages of an agent come and are answered.

    Attributes:
        transport: its name in records.
    """

    __slots__ = ()

    transport: str

    @property
    def out(self) -> Sink:
        """What takes the progress of calls, and says when a tool has to wait for the reader."""
        ...

    def open_session(self) -> tuple[Session, Pushed | None]:
        """Return the session for a call: that of the connection, or one for this call alone, which is there twice."""
        ...

    def call(self, request: messages.ToolRequest, received: Any, context: ContextActor | None, /) -> Found:
        """Start a call, once its context is known. Raises AgentToolsError if it was not started."""
        ...

    def watch(self, message: messages.ContextWatch, received: Any, context: ContextActor, /) -> Found:
        """Send the context's events from now on."""
        ...

    def translate(self, data: bytes, request_id: str, /) -> bytes:
        """Return a progress notification as what is sent of it."""
        return progress_of(data, request_id)

    def answered(self, call: AgentCall, answer: CallAnswer, /) -> None:
        """Send the answer to a call: once for each that was started, perhaps before that returns. Must not block."""


@attrs.define(eq=False, repr=False, field_transformer=checked())
class AgentRun:
    """Agent tools in one run of a server.

    Attributes:
        server: the server's run.
        contexts: its contexts.
        catalog: the tools and who registered them.
        agent_claim: the claim of a token that names the agent; None for the client that it was issued to.
        strict: whether messages with members that the protocol does not have are refused.
        bind_permissions: whether a context's `permissions` decide which tools are called in it.
        anonymous_anywhere: whether callers without a token are served who are not on this machine.
        max_calls: calls under way, over all callers.
        calls: those under way, by the account of their callers.
        answers: answers messages that are no calls.
    """

    server: Running
    contexts: ContextTable
    catalog: Catalog
    agent_claim: str | None = None
    strict: bool = False
    max_calls: int = MAX_CALLS
    bind_permissions: bool = True
    anonymous_anywhere: bool = False
    calls: Places[AgentCall] = attrs.field(init=False)
    answers: Answering = attrs.field(init=False)
    _ids: Iterator[int] = attrs.field(init=False, factory=lambda: count(1))

    def __attrs_post_init__(self) -> None:
        self.calls = Places(self.max_calls, "call")
        self.answers = Answering(self.contexts, self.catalog, self.server.handler_tasks.results)

    def caller(self, principal: Any, address: str | None, said: str | None = None, *, loopback: bool) -> AgentCaller:
        """Return who sends a request. Raises as `agent_of`; Unauthenticated if it is unknown and from afar."""
        if principal is None and not loopback and not self.anonymous_anywhere:
            raise errors.Unauthenticated(
                "this service has no check of tokens, so it serves callers on its own machine only"
            )
        return AgentCaller(principal, agent_of(principal, self.agent_claim, said), address, loopback)

    def find(self, request: messages.ToolRequest, caller: AgentCaller) -> tuple[str, ToolEntry]:
        """Return the tool that a request is for. Raises UnknownTool, InvalidArguments: nothing is queued before."""
        key, entry = self.catalog.find(request.tool_name, request.version, caller)
        arguments = request.arguments or {}
        # Who may not see the tool learns nothing of its schema: the session refuses the call.
        if not entry.validator.is_valid(arguments) and shown(entry, caller.principal):
            problems = without_root(entry.validator.problems(arguments))
            text = f"invalid arguments for {request.tool_name}: {'; '.join(problems)}"
            raise errors.InvalidArguments(text[:500], {"problems": problems})
        return key, entry

    def receive(
        self, message: messages.AgentMessage, caller: AgentCaller, binding: AgentBinding, received: Any = None
    ) -> Found:
        """Carry a message of an agent out: return its answer, or what waits for it; None if it answers by itself.

        `binding` begins a call, or a watch, and gets `received` again. Raises AgentToolsError.
        """
        if type(message) is messages.ToolRequest:
            call, shared = partial(binding.call, message, received), self.catalog.shared
            if shared is None or message.tool_name in self.server.server.tools:
                return self.answers.in_context(message, caller, call, make=True)

            async def once_known() -> Found:  # another process may just have registered it
                with suppress(OSError):
                    await shared.refresh()
                return self.answers.in_context(message, caller, call, make=True)

            return Later(message, once_known)
        if type(message) is messages.ContextWatch:
            watch = partial(binding.watch, message, received)
            return self.answers.in_context(message, caller, self.answers.in_turn(message, watch))
        return self.answers.receive(message, caller)

    def start_call(
        self,
        request: messages.ToolRequest,
        caller: AgentCaller,
        context: ContextActor | None,
        binding: AgentBinding,
        headers: Mapping[str, str] | None = None,
        size: int = 0,
    ) -> AgentCall:
        """Start a call, whose answer and progress `binding` sends. Raises AgentToolsError if it was not started."""
        key, entry = self.find(request, caller)
        asked = None
        if context is not None:
            if self.bind_permissions and (permissions := context.permissions) is not None:
                self._check_permissions(permissions, request.tool_name, entry, caller)
            asked = asked_by(request)
            given = None if context.answers is None else context.answers.by_id.get(request.request_id)
            if given is not None:
                if given[0] != asked:
                    raise errors.RequestUnderWay(
                        "this request_id was another request's in the context: choose a new one"
                    )
                call = AgentCall(self, request, caller, context, entry, binding, 0, None)
                binding.answered(call, given[1].again())
                return call
        session, own = binding.open_session()
        call = AgentCall(self, request, caller, context, entry, binding, next(self._ids), session, own, asked)
        try:
            if context is not None:
                context.begin_call(request.request_id, call)
            elif self.calls.find(caller.account, call.key) is not None:
                raise errors.RequestUnderWay("a request with this request_id is under way")
            if not self.calls.admit(caller.account, call.key, call):
                if context is not None:
                    context.end_call(request.request_id)
                raise errors.too_much()
        except errors.AgentToolsError:
            if own is not None:
                own.close()
            raise
        meta: dict[str, Any] = dict(_PLAIN if request.statuses is None else _ASKABLE)
        if request.progress is True:
            meta["progressToken"] = call.id
        if request.timeout is not None:
            meta[META_TIMEOUT] = request.timeout
        params: dict[str, Any] = {"name": key, "arguments": request.arguments or {}, "_meta": meta}
        if request.input_responses is not None:
            params["inputResponses"] = request.input_responses
        if request.request_state is not None:
            params["requestState"] = request.request_state
        message = Request(call.id, "tools/call", params)
        session.deliver((Incoming(message, size, call, headers, caller.principal),))
        return call

    def _check_permissions(self, permissions: Sequence[str], name: str, entry: ToolEntry, caller: AgentCaller) -> None:
        """Raise NotAllowed unless a context's permissions include a tool: they name it, or have all scopes it needs.

        One that needs no scope they include if they are scopes only: what the caller's token has or some tool needs. So
        a name that has become unknown still excludes the rest.
        """
        needed = frozenset[str]() if entry.permission is None else entry.permission.scopes
        if name in permissions or (needed and needed.issubset(permissions)):
            return
        if not needed and permissions:
            principal = caller.principal
            others = set(permissions).difference(() if principal is None else principal.scopes or ())
            if not others or others <= self.server.server.tools.scopes:
                return
        who = caller.principal
        security_event("not_allowed", method="tools/call", name=name, principal=who, why="permissions of the context")
        raise errors.NotAllowed(f"the permissions of the context do not include {name}")

    def call_of(
        self, caller: AgentCaller, context_id: str | None, request_id: str, session: Session
    ) -> AgentCall | None:
        """Return a call that is under way, or None: in a context of this caller, or without one on this connection."""
        if context_id is None:
            return self.calls.find(caller.account, (id(session), request_id))
        context = self.contexts.get(caller.owner, context_id, as_it_is=True)
        return None if context is None else context.calls.get(request_id)

    def call_is_over(self, call: AgentCall, status: str, answer: CallAnswer | None) -> None:
        """Forget a call, and note it in its context's history, with an answer that the same request gets again."""
        self.calls.leave(call.caller.account, call.key)
        context = call.agent_actor
        if context is not None:
            request, id = call.request, call.request.request_id
            entry = {
                "request_id": id,
                "tool": request.tool_name,
                "version": call.version,
                "arguments": request.arguments or {},
                "status": status,
                "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            }
            context.end_call(id)
            context.record(entry, call.asked, answer)

    def statistics(self) -> dict[str, int]:
        """Return the numbers of contexts in memory, of calls under way and of tools that agents registered."""
        return {
            "agent_contexts": self.contexts.statistics().contexts,
            "agent_calls": self.calls.taken,
            "agent_tools": self.catalog.registered,
        }

    def beside(self) -> Iterator[Beside]:
        """Say of each provider and context in memory how it is. An id of a context may be all that protects it."""
        now = trio.current_time()
        for provider, tools in self.catalog.providers().items():
            yield Beside("provider", provider.name, f"tools: {tools}")
        for actor in self.contexts.in_memory():
            state = f"calls: {len(actor.calls)}, tasks: {actor.tasks}, watchers: {actor.watchers}"
            yield Beside("context", f"{digest(actor.id)} of {actor.owner[1]}", state, now - actor.last_used)

    def end(self) -> None:
        """Cancel the calls that belong to no context; contexts end theirs."""
        for call in self.calls:
            if call.agent_actor is None:
                call.cancel(errors.ENDS)


@attrs.define(eq=False, repr=False)
class AgentCall(Sink):
    """One `tool_request` under way: the origin and the sink of its `tools/call`.

    Attributes:
        request: what was asked.
        caller: who asked.
        agent_actor: the context that it belongs to, or None.
        entry: the tool.
        id: of its `tools/call`; 0 if its answer was there already.
        asked: what the request asks for, in a form that compares; None without a context.
        key: by what it is known among the calls of its account.
        explicit_errors: wrong arguments and crashes are answered with errors that have data.
    """

    run: AgentRun
    request: messages.ToolRequest
    caller: AgentCaller
    agent_actor: ContextActor | None
    entry: ToolEntry
    _binding: AgentBinding
    id: int
    _session: Session | None  # None once the call is over
    _own: Pushed | None = None  # the same, if it is for this call alone
    asked: bytes | None = None
    key: Hashable = attrs.field(init=False)
    explicit_errors: ClassVar[bool] = True
    _out: Sink = attrs.field(init=False)
    _why: str | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self._out = self._binding.out
        # An id is one of its context, else of its connection; over HTTP, where each request is alone, of nothing.
        named = self._own is None and self.agent_actor is None
        self.key = (id(self._session), self.request.request_id) if named else self.id

    @property
    def version(self) -> str:
        """The tool's version."""
        return version_of(self.entry)

    @property
    def over(self) -> bool:
        """Whether it was answered."""
        return self._session is None

    @property
    def at_rest(self) -> bool:
        """Whether no handler is running for it."""
        return self._session is None or self._session.jobs.at_rest

    def cancel(self, reason: str) -> None:
        """Cancel the call, which is answered with the reason."""
        if self._session is not None and self._why is None:
            self._why = reason
            self._cancel_in(self._session, reason)

    def disconnected(self, why: str, *, slow: bool = False, ending: bool = False) -> None:
        """End the call because nobody can read its answer any more, or the server ends. Its handler is cancelled."""
        own, self._own = self._own, None
        if self._session is None:
            return
        if own is None:
            self.cancel(why)
            return
        self._session = None
        self.run.call_is_over(self, "cancelled", None)
        own.disconnect(why, slow=slow, ending=ending)

    def evict(self, why: str) -> None:
        """Answer the call at once as cancelled; its handler unwinds after that."""
        session, own = self._session, self._own
        if session is None:
            return
        self._own = None  # else it would be taken back while its handler runs
        self._answer(CallAnswer(error=errors.RequestCancelled(why)))
        if own is not None:
            own.disconnect(why)
        else:
            self._cancel_in(session, why)

    def _cancel_in(self, session: Session, reason: str) -> None:
        notification = Notification("notifications/cancelled", {"requestId": self.id, "reason": reason})
        session.deliver((Incoming(notification),))

    # The origin of its messages

    @property
    def link(self) -> Link | None:
        return self._out.link

    @property
    def name(self) -> str:
        return "tool_request"

    @property
    def client(self) -> str | None:
        return self.caller.address

    @property
    def sink(self) -> Sink:
        return self

    @property
    def agent_context(self) -> AgentContext | None:
        return None if self.agent_actor is None else ActorContext(self.agent_actor)

    # Called by the session

    @property
    def full(self) -> bool:
        return self._out.full

    async def room(self) -> None:
        await self._out.room()

    def post(self, outgoing: Outgoing) -> None:
        """Translate a message and pass it on; the reply ends the call."""
        if outgoing.kind is Kind.REPLY:
            if self._session is not None:
                answer = answer_to(outgoing, self.entry, self._why)
                if isinstance(answer.error, errors.MalformedMessage):
                    try:
                        self.run.catalog.find(self.request.tool_name, self.request.version)
                    except errors.UnknownTool as error:  # it was removed before its call began
                        answer.error = error
                self._answer(answer)
        elif outgoing.kind is Kind.REQUEST:
            raise LocalError("an agent cannot be asked while its call runs")
        else:
            translated = self._translated(outgoing)
            if translated is not None:
                self._out.post(translated)

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        translated = self._translated(outgoing)
        if translated is not None:
            self._out.post_latest((self.id, key), translated)

    def finish_latest(self, key: Hashable, *, keep: bool) -> None:
        self._out.finish_latest((self.id, key), keep=keep)

    def unanswered(self, request_id: RequestId) -> None:
        if self._session is not None:
            self._answer(CallAnswer(error=errors.RequestCancelled(self._why or "the call was cancelled")))

    def waiting(self) -> tuple[Sequence[Outgoing], int]:
        return self._out.waiting()

    @property
    def audited(self) -> dict[str, str]:
        """What a record of it has beside, or instead of, that of its `tools/call`."""
        found = {
            "transport": self._binding.transport,
            "request_id": self.request.request_id,
            "agent": self.caller.agent,
        }
        id = self.request.context_id
        if id is not None:
            # Without a principal the id is all that protects the context.
            found["context"] = digest(id) if self.caller.principal is None else id
        return found

    def _translated(self, outgoing: Outgoing) -> Outgoing | None:
        """Return progress as a `tool_progress`; None for a message that this protocol does not have."""
        if self._session is None:
            return None
        lane = lane_of(outgoing)
        if lane != "progress" or self.request.progress is not True:
            self._session.counts.drop(lane)
            return None
        return Outgoing(self._binding.translate(outgoing.data, self.request.request_id), Kind.NOTIFICATION)

    def _answer(self, answer: CallAnswer) -> None:
        self._session = None
        self.run.call_is_over(self, answer.status(extended=True), None if self.asked is None else answer.lasting())
        own, self._own = self._own, None
        if own is not None:
            own.close()
        self._binding.answered(self, answer)
