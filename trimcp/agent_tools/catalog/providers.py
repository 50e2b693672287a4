"""A provider that is connected: its tools are carried out at the other end of one stream, and live as long as that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import trio

from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.catalog import Catalog
from trimcp.agent_tools.catalog.entries import Progress
from trimcp.agent_tools.messages import messages
from trimcp.agent_tools.messages.errors import ProviderGone, ToolFailed, error_from
from trimcp.agent_tools.messages.manifests import Manifest
from trimcp.channel import Kind, Outgoing, Sink
from trimcp.session.scopes import cancellation_text


@attrs.define(eq=False, repr=False)
class _CallDown:
    """One call that the provider carries out."""

    progress: Progress
    answered: trio.Event = attrs.field(factory=trio.Event)
    response: messages.ToolResponse | None = None


@attrs.define(eq=False, repr=False)
class StreamProvider:
    """The tools of one stream. A `Provider` to the catalog."""

    catalog: Catalog
    caller: AgentCaller
    down: Sink  # sends messages to the provider
    on_idle: Callable[[], object] = lambda: None  # called when the last call under way has ended
    # the calls under way, by the ids that they have on this stream
    calls: dict[str, _CallDown] = attrs.field(init=False, factory=dict)
    _lost: str | None = attrs.field(init=False, default=None)

    @property
    def name(self) -> str:
        return self.caller.agent

    async def offer(self, manifests: Sequence[Any]) -> messages.ToolsRegistered:
        """Register tools, all of them or none, and say what became of each."""
        if self._lost is not None:
            raise ProviderGone(f"the provider has disconnected: {self._lost}")
        registered = await self.catalog.register_all(manifests, self.caller, self)
        return messages.ToolsRegistered(tools=[each.to_json() for each in registered])

    def receive(self, message: messages.ToolResponse | messages.ToolProgress) -> None:
        """Take what the provider sends of a call. What belongs to no call is dropped: it was cancelled."""
        call = self.calls.get(message.request_id or "")
        if call is None or call.answered.is_set():
            return
        if isinstance(message, messages.ToolProgress):
            call.progress(message.progress, message.total, message.message)
        else:
            call.response = message
            call.answered.set()

    def lose(self, why: str) -> None:
        """End it: its tools vanish, and its calls fail now. A second call has no effect."""
        if self._lost is not None:
            return
        self._lost = why
        self.catalog.withdraw(self)
        for call in self.calls.values():
            call.answered.set()

    def _post(self, message: messages.AgentMessage) -> None:
        self.down.post(Outgoing(messages.encode_message(message), Kind.NOTIFICATION))

    # Called by the catalog

    async def call(
        self, manifest: Manifest, arguments: Mapping[str, Any], *, progress: Progress, request_id: str
    ) -> Any:
        """Carry out a call; see `Provider`."""
        call = self.calls[request_id] = _CallDown(progress)
        sent = False
        try:
            if self.down.full:
                await self.down.room()
            if self._lost is None:
                request = messages.ToolRequest(
                    tool_name=manifest.name,
                    version=manifest.version,
                    arguments=dict(arguments),
                    request_id=request_id,
                    progress=True,
                    statuses="extended",
                )
                self._post(request)
                sent = True
            await call.answered.wait() if self._lost is None else await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            if sent and not call.answered.is_set():
                self._post(messages.ToolCancel(request_id=request_id, reason=cancellation_text(cancelled)))
            raise
        finally:
            del self.calls[request_id]
            if not self.calls:
                self.on_idle()
        response = call.response
        if response is None:
            raise ProviderGone(f"the provider of this tool has disconnected: {self._lost}")
        if response.status == "success":
            return response.result
        if response.error is None:
            raise ToolFailed(f"the provider of {manifest.name} answered `{response.status}` without an error")
        raise error_from(response.error)
