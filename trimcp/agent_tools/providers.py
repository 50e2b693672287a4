"""A provider that is connected: its tools are carried out at the other end of one stream, and live as long as that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import attrs
import trio

from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog import Catalog, Progress
from trimcp.agent_tools.errors import AgentToolsError, ProviderGone, UnknownTool, error_from
from trimcp.agent_tools.manifests import Manifest
from trimcp.agent_tools.messages import (
    AgentMessage,
    ToolCancel,
    ToolProgress,
    ToolRequest,
    ToolResponse,
    ToolsRegistered,
)
from trimcp.session.scopes import cancellation_text


class Downstream(Protocol):
    """The way of messages down to the provider."""

    @property
    def full(self) -> bool:
        """Whether a sender has to wait for room first."""
        ...

    async def room(self) -> None:
        """Wait until there is room, or the stream has ended."""
        ...

    def post(self, message: AgentMessage, /) -> None:
        """Enqueue now; never blocks. Dropped if the stream has ended."""
        ...


@attrs.define(eq=False, repr=False)
class _CallDown:
    """One call that the provider carries out."""

    progress: Progress
    answered: trio.Event = attrs.field(factory=trio.Event)
    response: ToolResponse | None = None


@attrs.define(eq=False, repr=False)
class StreamProvider:
    """The tools of one stream. A `Provider` to the catalog.

    Args:
        catalog: where its tools are registered.
        caller: whose stream it is.
        down: sends messages to it.
    """

    catalog: Catalog
    caller: AgentCaller
    down: Downstream
    _calls: dict[str, _CallDown] = attrs.field(init=False, factory=dict)
    _offered: set[tuple[str, str]] = attrs.field(init=False, factory=set)  # names and versions
    _lost: str | None = attrs.field(init=False, default=None)

    @property
    def name(self) -> str:
        return self.caller.agent

    async def offer(self, manifests: Sequence[Any]) -> ToolsRegistered:
        """Register tools, all of them or none, and say what became of each.

        Raises:
            AgentToolsError: one of them cannot be registered.
        """
        added: list[dict[str, Any]] = []
        registered: list[dict[str, Any]] = []
        try:
            for raw in manifests:
                if self._lost is not None:  # while somebody decided on the one before
                    raise ProviderGone(self._lost)
                one = (await self.catalog.register(raw, self.caller, self)).to_json()
                registered.append(one)
                if (one["name"], one["version"]) not in self._offered:
                    added.append(one)
        except AgentToolsError:
            for one in added:
                with suppress(UnknownTool):  # it has vanished with the stream
                    await self.catalog.remove(one["name"], self.caller, one["version"])
            raise
        self._offered.update((one["name"], one["version"]) for one in added)
        return ToolsRegistered(tools=registered)

    def take(self, message: ToolResponse | ToolProgress) -> None:
        """Take what the provider sends of a call. What belongs to no call is dropped: it was cancelled."""
        call = self._calls.get(message.request_id or "")
        if call is None or call.answered.is_set():
            return
        if isinstance(message, ToolProgress):
            call.progress(message.progress, message.total, message.message)
        else:
            call.response = message
            call.answered.set()

    def lose(self, why: str) -> None:
        """End it: its tools vanish, and its calls fail now."""
        self._lost = why
        self.catalog.withdraw(self)
        for call in self._calls.values():
            call.answered.set()

    # Called by the catalog

    async def call(
        self, manifest: Manifest, arguments: Mapping[str, Any], *, progress: Progress, request_id: str
    ) -> Any:
        """Carry out a call; see `Provider`."""
        call = self._calls[request_id] = _CallDown(progress)
        sent = False
        try:
            if self.down.full:
                await self.down.room()
            if self._lost is None:
                request = ToolRequest(
                    tool_name=manifest.name,
                    version=manifest.version,
                    arguments=dict(arguments),
                    request_id=request_id,
                    progress=True,
                    statuses="extended",
                )
                self.down.post(request)
                sent = True
            await call.answered.wait() if self._lost is None else await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            if sent and not call.answered.is_set():
                self.down.post(ToolCancel(request_id=request_id, reason=cancellation_text(cancelled)))
            raise
        finally:
            del self._calls[request_id]
        response = call.response
        if response is None:
            raise ProviderGone(f"the provider of {manifest.name} has disconnected: {self._lost}")
        if response.status == "success":
            return response.result
        raise error_from(response.error)
