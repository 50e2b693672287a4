"""Messages that are no calls, from request to answer: what is done now, and what takes time.

What a message means stands here once. A binding that answers requests one by one waits for each answer; one whose
messages come in order learns from `Later.while_waiting` what may overtake.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import attrs

from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.catalog import Catalog
from trimcp.agent_tools.contexts.actor import ContextActor
from trimcp.agent_tools.contexts.state import Applied
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.agent_tools.messages import errors, messages
from trimcp.budget import LARGE, TurnBound
from trimcp.session.agent_context import ContextEvent
from trimcp.support.nurseries import contained

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

Overtaking: TypeAlias = Literal["nothing", "updates", "approvals", "everything"]
"""What may be carried out of the messages behind one that takes time: `updates` are applied already and wait for the
store in their order; whoever sends `approvals` can have many of them wait, so they are bounded."""


@attrs.frozen(eq=False)
class Later:
    """An answer that takes time."""

    message: messages.AgentMessage
    _answer: Callable[[], Awaitable[Found]]
    while_waiting: Overtaking = "nothing"

    async def answer(self) -> messages.AgentMessage | None:
        """Wait for the answer; None if what was begun answers by itself. Raises AgentToolsError."""
        # It may call functions of the user's: what decides on a registration, a store.
        found: Found = await contained(self._answer)
        if isinstance(found, Later):
            return await found.answer()
        if found is not None:
            found.request_id = self.message.request_id
        return found


Found: TypeAlias = "messages.AgentMessage | Later | None"
"""The answer to a message, or what waits for it; None if what was begun answers by itself, as a call does."""

InContext: TypeAlias = Callable[[Any], Found]
"""Carries a message out in its context, a `ContextActor`, or None if it names none."""


@attrs.frozen(eq=False)
class Answering:
    """Answers the messages of one run that are no calls."""

    contexts: ContextTable
    catalog: Catalog
    results: TurnBound  # bounds what large results are encoded in one turn of the event loop

    def receive(self, message: messages.AgentMessage, caller: AgentCaller) -> Found:
        """Carry a message out and return its answer, or what waits for it. Raises AgentToolsError."""
        kind = type(message)
        if (now := _NOW.get(kind)) is not None:
            found = now(self, message, caller)
            if found is not None and not isinstance(found, Later):
                found.request_id = message.request_id
            return found
        in_time = _IN_TIME.get(kind)
        if in_time is None:
            raise errors.MalformedMessage(f"`{message.type}` is no request here")
        waits = type(message) is messages.RegisterTool and self.catalog.may_wait((message.tool,))
        return Later(message, partial(in_time, self, message, caller), "approvals" if waits else "nothing")

    def in_context(self, message: Any, caller: AgentCaller, then: InContext, *, make: bool = False) -> Found:
        """Carry a message out in its context: now, if that is in memory or the message names none.

        With `make` the context begins if nobody made it yet.
        """
        id = message.context_id
        context = None if id is None else self.contexts.get(caller.owner, id)
        if context is None and id is not None:
            return Later(message, partial(self._in_found, message, caller, then, make))
        return then(context)

    async def _in_found(self, message: Any, caller: AgentCaller, then: InContext, make: bool) -> Found:
        table, id, address = self.contexts, message.context_id, caller.address
        if make:
            context = await table.find_or_make(caller.owner, id, permissions=_permissions(caller), address=address)
        else:
            context = await table.find(caller.owner, id, address=address)
        context.used()
        return then(context)

    # Contexts

    async def _create(self, message: messages.ContextCreate, caller: AgentCaller) -> Found:
        context = await self.contexts.create(
            caller.owner,
            message.context_id,
            message.state,
            message.ttl,
            session=message.session_id,
            permissions=_permissions(caller),
            address=caller.address,
        )
        return message_of(context.whole())

    def in_turn(self, message: messages.AgentMessage, then: InContext) -> InContext:
        """Return what does the same to a context, a large one in a turn of its own: its whole state is encoded."""

        def then_in_turn(context: ContextActor) -> Found:
            async def after_others() -> Found:
                await self.results.wait(context.text_size)
                return then(context)

            return then(context) if context.text_size < LARGE else Later(message, after_others)

        return then_in_turn

    def _read(self, message: messages.ContextRead, caller: AgentCaller) -> Found:
        whole = self.in_turn(message, lambda context: message_of(context.whole()))
        return self.in_context(message, caller, whole)

    def _update(self, message: messages.ContextUpdate, caller: AgentCaller) -> Found:
        def apply(context: ContextActor) -> Found:
            applied = context.apply(message.updates, message.version)

            async def stored() -> Found:
                return answer(await applied.stored())

            return Later(message, stored, "updates") if self.contexts.durable else answer(applied)

        def answer(applied: Applied) -> Found:
            id, updates = message.context_id, dict(applied.updates)
            return messages.ContextUpdate(context_id=id, updates=updates, version=applied.version)

        # An update of a version that is there begins no context.
        return self.in_context(message, caller, apply, make=not message.version)

    def _destroy(self, message: messages.ContextDestroy, caller: AgentCaller) -> Found:
        session, reason = message.session_id, message.reason or "the agent ended the context"
        if (message.context_id is None) == (session is None):
            raise errors.MalformedMessage("context_destroy: it has `context_id` or `session_id`")

        async def end_session(session: str) -> Found:
            await self.contexts.end_session(caller.owner, session, reason, address=caller.address)
            return messages.ContextDestroyed(session_id=session, reason=reason)

        def end(context: ContextActor) -> Found:
            async def ended() -> Found:
                await context.wait_over()
                return messages.ContextDestroyed(context_id=context.id, reason=reason)

            context.check()
            context.end(reason)
            return Later(message, ended, "everything")

        if session is not None:
            return Later(message, partial(end_session, session))
        return self.in_context(message, caller, end)

    # Tools

    async def _list(self, message: messages.ListTools, caller: AgentCaller) -> Found:
        found = self.catalog.manifests(message.name, message.version, caller.principal)
        if message.name is not None and not found:
            raise errors.unknown_tool(message.name, message.version)
        return messages.ToolList(tools=[manifest.to_json() for manifest in found])

    async def _register(self, message: messages.RegisterTool, caller: AgentCaller) -> Found:
        registered = await self.catalog.register(message.tool, caller)
        return messages.ToolsRegistered(tools=[registered.to_json()])

    async def _remove(self, message: messages.RemoveTool, caller: AgentCaller) -> Found:
        await self.catalog.remove(message.name, caller, message.version)
        return messages.ToolRemoved(name=message.name, version=message.version)


def message_of(event: ContextEvent) -> messages.AgentMessage:
    """Return what a watcher is told as a message."""
    content = {} if event.content is None else dict(event.content)
    if event.kind == "state":
        return messages.ContextState(context_id=event.context_id, version=event.version, state=content)
    if event.kind == "update":
        return messages.ContextUpdate(context_id=event.context_id, version=event.version, updates=content)
    return messages.ContextDestroyed(context_id=event.context_id, reason=event.reason)


def failed(asked: Any, error: errors.AgentToolsError) -> messages.AgentMessage:
    """Return the answer to a message that failed, or to the JSON value that was to be one: a call gets a response."""
    said = asked if type(asked) is dict else {}
    if isinstance(asked, messages.AgentMessage):
        said = {"type": asked.type, "request_id": asked.request_id, "statuses": getattr(asked, "statuses", None)}
    id = said.get("request_id")
    if type(id) is not str or not 0 < len(id) <= messages.MAX_ID:
        id = None
    if said.get("type") == messages.ToolRequest.type and id is not None:
        status = error.extended_status if said.get("statuses") == "extended" else "error"
        return messages.ToolResponse(request_id=id, status=status, error=error.body())
    return messages.ErrorMessage(request_id=id, error=error.body())


def _permissions(caller: AgentCaller) -> Sequence[str]:
    """Return the `permissions` of a new context: the scopes of the token that makes it."""
    scopes = None if caller.principal is None else caller.principal.scopes
    return () if scopes is None else sorted(scopes)


_NOW: Final[dict[type, Callable[[Answering, Any, AgentCaller], Found]]] = {
    messages.ContextRead: Answering._read,
    messages.ContextUpdate: Answering._update,
    messages.ContextDestroy: Answering._destroy,
}

_IN_TIME: Final[dict[type, Callable[[Answering, Any, AgentCaller], Awaitable[Found]]]] = {
    messages.ListTools: Answering._list,
    messages.RegisterTool: Answering._register,
    messages.RemoveTool: Answering._remove,
    messages.ContextCreate: Answering._create,
}
