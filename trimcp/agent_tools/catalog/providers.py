"""A provider that is connected: its tools are carried out at the other end of one stream, and live as long as that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from trimcp.agent_tools.callers import AgentCaller
from trimcp.agent_tools.catalog.catalog import Catalog
from trimcp.agent_tools.catalog.entries import Progress
from trimcp.agent_tools.messages import errors, messages
from trimcp.agent_tools.messages.manifests import Manifest
from trimcp.agent_tools.messages.pending import PendingAnswer
from trimcp.channel import Kind, Outgoing, Sink


@attrs.define(eq=False, repr=False)
class StreamProvider:
    """The tools of one stream. A `Provider` to the catalog."""

    catalog: Catalog
    caller: AgentCaller
    down: Sink  # sends messages to the provider
    on_idle: Callable[[], object] = lambda: None  # called when the last call under way has ended
    # the calls under way, by the ids that they have on this stream
    calls: dict[str, PendingAnswer] = attrs.field(init=False, factory=dict)
    _lost: str | None = attrs.field(init=False, default=None)

    @property
    def name(self) -> str:
        return self.caller.agent

    async def offer(self, manifests: Sequence[Any]) -> messages.ToolsRegistered:
        """Register tools, all of them or none, and say what became of each."""
        if self._lost is not None:
            raise errors.ProviderGone(f"the provider has disconnected: {self._lost}")
        registered = await self.catalog.register_all(manifests, self.caller, self)
        return messages.ToolsRegistered(tools=[each.to_json() for each in registered])

    def receive(self, message: messages.ToolResponse | messages.ToolProgress) -> None:
        """Take what the provider sends of a call. What belongs to no call is dropped: it was cancelled."""
        call = self.calls.get(message.request_id or "")
        if call is None or call.resolved.is_set():
            return
        if isinstance(message, messages.ToolResponse):
            call.resolve(message)
        elif call.progressed is not None:
            call.progressed(message.progress, message.total, message.message)

    def lose(self, why: str) -> None:
        """End it: its tools vanish, and its calls fail now. A second call has no effect."""
        if self._lost is not None:
            return
        self._lost = why
        self.catalog.withdraw(self)
        for call in self.calls.values():
            call.resolve(error=self._gone())

    def _gone(self) -> errors.ProviderGone:
        return errors.ProviderGone(f"the provider of this tool has disconnected: {self._lost}")

    def _post(self, message: messages.AgentMessage) -> None:
        self.down.post(Outgoing(messages.encode_message(message), Kind.NOTIFICATION))

    # Called by the catalog

    async def call(
        self, manifest: Manifest, arguments: Mapping[str, Any], *, progress: Progress, request_id: str
    ) -> Any:
        """Carry out a call; see `Provider`."""
        if self._lost is not None:
            raise self._gone()
        call = self.calls[request_id] = PendingAnswer(progress)
        try:
            if self.down.full:
                await self.down.room()
            if not call.resolved.is_set():  # it is if the provider was lost meanwhile
                request = messages.ToolRequest(
                    tool_name=manifest.name,
                    version=manifest.version,
                    arguments=dict(arguments),
                    request_id=request_id,
                    progress=True,
                    statuses="extended",
                )
                self._post(request)
            response: messages.ToolResponse = await call.answer(
                lambda why: self._post(messages.ToolCancel(request_id=request_id, reason=why))
            )
        finally:
            del self.calls[request_id]
            if not self.calls:
                self.on_idle()
        if response.status == "success":
            return response.result
        if response.error is None:
            raise errors.ToolFailed(f"the provider of {manifest.name} answered `{response.status}` without an error")
        raise errors.error_from(response.error)
