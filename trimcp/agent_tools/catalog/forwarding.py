"""Calls of tools whose providers are connected to other processes: they go there, and come from there, in letters."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Final

import attrs
import trio

from trimcp.agent_tools.catalog.entries import Progress, Provider
from trimcp.agent_tools.messages import errors
from trimcp.agent_tools.messages.manifests import Manifest
from trimcp.session.scopes import cancellation_text
from trimcp.store.letters import PostBox
from trimcp.wire.jsonrpc import encode, parse_value

_MOST_CALLS: Final = 10_000  # of other processes, carried out here at once
_PROGRESS: Final = 0.05  # seconds between two reports of one call


@attrs.define(eq=False)
class RemoteProvider:
    """A provider that is connected to another process. A `Provider` to the catalog."""

    calls: ForwardedCalls
    holder: str
    id: str
    name: str  # of the agent

    async def call(
        self, manifest: Manifest, arguments: Mapping[str, Any], *, progress: Progress, request_id: str
    ) -> Any:
        """Have the other process carry out a call; see `Provider`."""
        return await self.calls.call(self, manifest, arguments, progress)


@attrs.define(eq=False)
class _CallElsewhere:
    """A call that another process carries out."""

    holder: str
    progress: Progress
    answered: trio.Event = attrs.field(factory=trio.Event)
    result: Any = None
    error: errors.AgentToolsError | None = None


@attrs.define(eq=False)
class ForwardedCalls:
    """The calls that this process has others carry out, and those that it carries out for them.

    Attributes:
        find: returns a provider that is connected here, by its id, and its tool of a name and version as it sent it.
        nursery: runs the calls of others; None while there is none.
    """

    letters: PostBox
    find: Callable[[str, str, str], tuple[Provider, Manifest] | None]
    nursery: trio.Nursery | None = None
    _calls: dict[int, _CallElsewhere] = attrs.field(init=False, factory=dict)
    _serving: dict[tuple[str, int], trio.CancelScope] = attrs.field(init=False, factory=dict)
    _numbers: count[int] = attrs.field(init=False, factory=lambda: count(1))

    def __attrs_post_init__(self) -> None:
        self.letters.readers |= {
            "tool_call": self._asked,
            "tool_cancel": self._cancelled,
            "tool_progress": self._progressed,
            "tool_answer": self._answered,
        }
        self.letters.on_lost.append(self.lose)

    def processes(self) -> set[str]:
        """Return with which processes calls are under way."""
        return {call.holder for call in self._calls.values()} | {sender for sender, _ in self._serving}

    async def call(
        self, provider: RemoteProvider, manifest: Manifest, arguments: Mapping[str, Any], progress: Progress
    ) -> Any:
        """Have another process carry out a call of one of its providers."""
        number, call = next(self._numbers), _CallElsewhere(provider.holder, progress)
        self._calls[number] = call
        data = encode({"name": manifest.name, "version": manifest.version, "arguments": dict(arguments)})
        try:
            if self.letters.say(provider.holder, "tool_call", data, n=number, provider=provider.id) is None:
                raise errors.TooMuch("too much waits for another process; try again later", retry_after=1.0)
            await call.answered.wait()
        except trio.Cancelled as cancelled:
            if not call.answered.is_set():
                self.letters.say(provider.holder, "tool_cancel", n=number, why=cancellation_text(cancelled))
            raise
        finally:
            del self._calls[number]
        if call.error is not None:
            raise call.error
        return call.result

    def _progressed(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        call = self._calls.get(int(said["n"]))
        if call is not None and call.holder == sender:
            call.progress(*parse_value(data))

    def _answered(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        call, answer = self._calls.get(int(said["n"])), parse_value(data)
        if call is not None and call.holder == sender and not call.answered.is_set():
            call.result = answer.get("result")
            call.error = errors.error_from(answer["error"]) if "error" in answer else None
            call.answered.set()

    def lose(self, name: str) -> None:
        """End what is under way with a process that is gone."""
        for call in self._calls.values():
            if call.holder == name and not call.answered.is_set():
                call.error = errors.ProviderGone("the process to which this tool's provider was connected has ended")
                call.answered.set()
        for sender, number in list(self._serving):
            if sender == name:
                self._serving[sender, number].cancel(reason="the process of the caller has ended")

    def _asked(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        number, asked = int(said["n"]), parse_value(data)
        found = self.find(said["provider"], asked["name"], asked["version"])
        if found is None or self.nursery is None:
            self._answer(sender, number, errors.ProviderGone("the provider of this tool has disconnected"))
        elif len(self._serving) >= _MOST_CALLS:
            self._answer(sender, number, errors.TooMuch("too many calls are under way; try again later"))
        else:
            scope = self._serving[sender, number] = trio.CancelScope()
            self.nursery.start_soon(self._carry_out, sender, number, scope, *found, asked["arguments"])

    def _cancelled(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        scope = self._serving.get((sender, int(said["n"])))
        if scope is not None:
            scope.cancel(reason=said["why"])

    async def _carry_out(
        self,
        sender: str,
        number: int,
        scope: trio.CancelScope,
        provider: Provider,
        sent: Manifest,
        arguments: Mapping[str, Any],
    ) -> None:
        """Carry out a call of another process, with progress now and then."""
        told = -_PROGRESS

        def progress(*report: Any) -> None:
            nonlocal told
            if trio.current_time() - told >= _PROGRESS:
                told = trio.current_time()
                self.letters.say(sender, "tool_progress", encode(list(report)), n=number)

        answer: Any = errors.RequestCancelled("the call was cancelled")
        try:
            with scope:
                id = f"call_{secrets.token_urlsafe(12)}"
                answer = {"result": await provider.call(sent, arguments, progress=progress, request_id=id)}
        except errors.AgentToolsError as error:
            answer = error
        except Exception as error:  # a provider's, or ours: this call's answer, and nobody else's
            answer = errors.crashed(error, {"type": "tool_call"})
        finally:
            del self._serving[sender, number]
        self._answer(sender, number, answer)

    def _answer(self, to: str, number: int, answer: Any) -> None:
        said = {"error": answer.body()} if isinstance(answer, errors.AgentToolsError) else answer
        self.letters.say(to, "tool_answer", encode(said), n=number)
