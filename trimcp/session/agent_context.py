"""The state of an agent, which its handlers may read and change: `ctx.agent_context` in the agent-tools protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

import attrs
import trio

from trimcp.support.slotted import shown


# Mutable only because attrs takes three times as long to create a frozen object. Do not change it.
@attrs.define(eq=False)
@shown
class ContextEvent:
    """What the watcher of a context is told.

    Attributes:
        kind: "state" (the first event, and in place of updates that a slow watcher missed), "update", or "destroyed"
            (the last event).
        context_id: the context.
        version: its version after this event.
        content: the whole state, or the merge patch of an update; None with "destroyed". Shared: do not change it.
        reason: why it was destroyed, else None.
    """

    kind: Literal["state", "update", "destroyed"]
    context_id: str
    version: int
    content: Mapping[str, Any] | None = None
    reason: str | None = None


class AgentContext(Protocol):
    """The context that an agent's call belongs to."""

    @property
    def id(self) -> str:
        """Its id."""
        ...

    @property
    def version(self) -> int:
        """How often it was updated."""
        ...

    def read(self) -> dict[str, Any]:
        """Return a copy of the state."""
        ...

    async def update(self, updates: Mapping[str, Any], version: int | None = None) -> int:
        """Change the state by a JSON merge patch (RFC 7396) and return the new version.

        Updates apply in the order of their calls. Cancelling this may leave the state changed or not.

        Args:
            updates: the patch; a member that is None is removed. Unlike agents, handlers may write `permissions`: a
                list of tools' names and of scopes, which later calls in the context are held to.
            version: the version that it changes; None for any.
        """
        ...

    def watch(self) -> AbstractAsyncContextManager[trio.abc.ReceiveChannel[ContextEvent]]:
        """Open a channel that receives the state now, then each update, at last that the context was destroyed."""
        ...

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Run `await function(*args)` in a task that is cancelled when the context ends. A crash is only logged."""
        ...
