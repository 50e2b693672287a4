"""Messages that are no calls, from request to answer: what is done now, and what takes time.

What a message means stands here once. A binding that answers requests one by one waits for each answer; one whose
messages come in order learns from `Later.while_waiting` what may overtake.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import attrs

from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.catalog import Catalog
from trimcp.agent_tools.contexts.actor import ContextActor
from trimcp.agent_tools.contexts.state import Applied
from trimcp.agent_tools.contexts.table import ContextTable
from trimcp.agent_tools.messages import errors, messages
from trimcp.session.agent_context import ContextEvent
from trimcp.support.cleaning import harmless, log_crash
from trimcp.support.containment import contained

log: logging.Logger = logging.getLogger("trimcp.agent_tools")

Overtaking: TypeAlias = Literal["nothing", "updates", "approvals", "everything"]
"""What may be carried out of the messages behind one that takes time: `updates` are applied already and wait for the
store in their order; whoever sends `approvals` can have many of them wait, so they are bounded."""


@attrs.frozen(eq=False)
class Later:
    """An answer that takes time."""

    message: messages.AgentMessage
    while_waiting: Overtaking
    _answer: Callable[[], Awaitable[messages.AgentMessage]]

    async def answer(self) -> messages.AgentMessage:
        """Wait for the answer. Raises AgentToolsError."""
        # It may call functions of the user's: what decides on a registration, a store.
        answer: messages.AgentMessage = await contained(self._answer)
        answer.request_id = self.message.request_id
        return answer


@attrs.frozen(eq=False)
class Answering:
    """Answers the messages of one run that are no calls."""

    contexts: ContextTable
    catalog: Catalog

    def take(self, message: messages.AgentMessage, caller: AgentCaller) -> messages.AgentMessage | Later:
        """Carry a message out and return its answer, or what waits for it.

        Raises:
            AgentToolsError: it cannot be carried out.
        """
        at_once = _AT_ONCE.get(type(message))
        found = None if at_once is None else at_once(self, message, caller)
        if found is None:
            carry_out = _CARRY_OUT.get(type(message))
            if carry_out is None:
                raise errors.MalformedMessage(f"`{message.type}` is no request here")
            waits = type(message) is messages.RegisterTool and self.catalog.may_wait((message.tool,))
            return Later(message, "approvals" if waits else "nothing", partial(carry_out, self, message, caller))
        if not isinstance(found, Later):
            found.request_id = message.request_id
        return found

    async def answer(self, message: messages.AgentMessage, caller: AgentCaller) -> messages.AgentMessage:
        """Carry a message out, and return its answer. Raises as `take`."""
        found = self.take(message, caller)
        return await found.answer() if isinstance(found, Later) else found

    # At once, if its context is in memory; else None

    def _read_now(self, message: messages.ContextRead, caller: AgentCaller) -> messages.AgentMessage | None:
        context = self.contexts.get(caller.owner, message.context_id)
        return None if context is None else message_of(context.whole())

    def _update_now(self, message: messages.ContextUpdate, caller: AgentCaller) -> messages.AgentMessage | Later | None:
        context = self.contexts.get(caller.owner, message.context_id)
        if context is None:
            return None
        applied = context.apply(message.updates, message.version)
        if self.contexts.durable:
            return Later(message, "updates", partial(_stored, message, applied))
        return _updated(message, applied)

    def _end_now(self, message: messages.ContextDestroy, caller: AgentCaller) -> Later | None:
        id = message.context_id
        context = None if id is None or message.session_id is not None else self.contexts.get(caller.owner, id)
        if context is None:
            return None
        context.check()
        context.end(_reason(message))
        return Later(message, "everything", partial(_ended, message, context))

    # In time

    async def _list(self, message: messages.ListTools, caller: AgentCaller) -> messages.AgentMessage:
        found = self.catalog.manifests(message.name, message.version, caller.principal)
        if message.name is not None and not found:
            of = "" if message.version is None else f" of version {harmless(message.version, 64)}"
            raise errors.UnknownTool(f"there is no tool named {harmless(message.name, 100)}{of}")
        return messages.ToolList(tools=[manifest.to_json() for manifest in found])

    async def _register(self, message: messages.RegisterTool, caller: AgentCaller) -> messages.AgentMessage:
        registered = await self.catalog.register(message.tool, caller)
        return messages.ToolsRegistered(tools=[registered.to_json()])

    async def _remove(self, message: messages.RemoveTool, caller: AgentCaller) -> messages.AgentMessage:
        await self.catalog.remove(message.name, caller, message.version)
        return messages.ToolRemoved(name=message.name, version=message.version)

    async def _create(self, message: messages.ContextCreate, caller: AgentCaller) -> messages.AgentMessage:
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

    async def _read(self, message: messages.ContextRead, caller: AgentCaller) -> messages.AgentMessage:
        context = await self.find(caller, message.context_id)
        context.used()
        return message_of(context.whole())

    async def _update(self, message: messages.ContextUpdate, caller: AgentCaller) -> messages.AgentMessage:
        # An update of a version that is there begins no context.
        find = self.find if message.version else self.context
        context = await find(caller, message.context_id)
        return _updated(message, await context.update(message.updates, message.version))

    async def _destroy(self, message: messages.ContextDestroy, caller: AgentCaller) -> messages.AgentMessage:
        id, session = message.context_id, message.session_id
        if (id is None) == (session is None):
            raise errors.MalformedMessage("context_destroy: it has `context_id` or `session_id`")
        if id is not None:
            await (await self.find(caller, id)).destroy(_reason(message))
        elif session is not None:
            await self.contexts.end_session(caller.owner, session, _reason(message), address=caller.address)
        return messages.ContextDestroyed(context_id=id, session_id=session, reason=_reason(message))

    # Contexts

    async def find(self, caller: AgentCaller, id: str) -> ContextActor:
        """Return a caller's context. Raises UnknownContext, ContextGone."""
        return await self.contexts.find(caller.owner, id, address=caller.address)

    async def context(self, caller: AgentCaller, id: str) -> ContextActor:
        """Return the context of a request, which begins if nobody made it yet. Raises as `AgentRun.context`."""
        permissions = _permissions(caller)
        return await self.contexts.find_or_make(caller.owner, id, permissions=permissions, address=caller.address)

    @asynccontextmanager
    async def watch(self, id: str, caller: AgentCaller) -> AsyncIterator[AsyncIterator[messages.AgentMessage]]:
        """Watch a context: yield its state, then each update, as messages; they end with `context_destroyed`."""
        async with (await self.find(caller, id)).watch() as events:
            yield _EventMessages(events)


def crashed(error: Exception, message: object) -> errors.ToolCrashed:
    """Log what carrying out a message raised, and return the error that answers it."""
    incident = secrets.token_hex(6)
    kind = message.get("type") if isinstance(message, dict) else getattr(message, "type", None)
    log_crash(log, error, "carrying out a message (%.40r) crashed; incident %s", kind, incident)
    return errors.ToolCrashed("internal error", {"incident": incident})


def message_of(event: ContextEvent) -> messages.AgentMessage:
    """Return what a watcher is told as a message."""
    content = {} if event.content is None else dict(event.content)
    if event.kind == "state":
        return messages.ContextState(context_id=event.context_id, version=event.version, state=content)
    if event.kind == "update":
        return messages.ContextUpdate(context_id=event.context_id, version=event.version, updates=content)
    return messages.ContextDestroyed(context_id=event.context_id, reason=event.reason)


@attrs.frozen(eq=False)
class _EventMessages(AsyncIterator[messages.AgentMessage]):
    """The events of a context as messages. No generator, because it may be left before its end."""

    _events: AsyncIterator[ContextEvent]

    async def __anext__(self) -> messages.AgentMessage:
        return message_of(await self._events.__anext__())


def _permissions(caller: AgentCaller) -> Sequence[str]:
    """Return the `permissions` of a new context: the scopes of the token that makes it."""
    scopes = None if caller.principal is None else caller.principal.scopes
    return () if scopes is None else sorted(scopes)


def _reason(message: messages.ContextDestroy) -> str:
    return message.reason or "the agent ended the context"


def _updated(message: messages.ContextUpdate, applied: Applied) -> messages.ContextUpdate:
    updates = dict(applied.updates)
    return messages.ContextUpdate(context_id=message.context_id, updates=updates, version=applied.version)


async def _stored(message: messages.ContextUpdate, applied: Applied) -> messages.AgentMessage:
    return _updated(message, await applied.stored())


async def _ended(message: messages.ContextDestroy, context: ContextActor) -> messages.AgentMessage:
    await context.wait_over()
    return messages.ContextDestroyed(context_id=context.id, reason=_reason(message))


_AT_ONCE: Final[dict[type, Callable[[Answering, Any, AgentCaller], messages.AgentMessage | Later | None]]] = {
    messages.ContextRead: Answering._read_now,
    messages.ContextUpdate: Answering._update_now,
    messages.ContextDestroy: Answering._end_now,
}

_CARRY_OUT: Final[dict[type, Callable[[Answering, Any, AgentCaller], Awaitable[messages.AgentMessage]]]] = {
    messages.ListTools: Answering._list,
    messages.RegisterTool: Answering._register,
    messages.RemoveTool: Answering._remove,
    messages.ContextCreate: Answering._create,
    messages.ContextRead: Answering._read,
    messages.ContextUpdate: Answering._update,
    messages.ContextDestroy: Answering._destroy,
}
