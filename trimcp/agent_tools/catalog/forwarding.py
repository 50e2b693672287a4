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
from trimcp.agent_tools.messages.pending import PendingAnswer
from trimcp.store.letters import PostBox
from trimcp.wire.jsonrpc import encode, parse_value

_MOST_CALLS: Final = 10_000  # of other processes, carried out here at once
_PROGRESS: Final = 0.05  # seconds between two reports of one call


@attrs.define(eq=False)
class RemoteProvider:
    """A provider that is connected to another process. A `Provider` to the catalog."""

    forwarded: ForwardedCalls
    holder: str  # the process to which it is connected
    id: str
    name: str  # of the agent

    async def call(
        self, manifest: Manifest, arguments: Mapping[str, Any], *, progress: Progress, request_id: str
    ) -> Any:
        """Have the other process carry out a call; see `Provider`."""
        say, calls = self.forwarded.letters.say, self.forwarded.calls
        key = to, number = self.holder, next(self.forwarded.numbers)
        call = calls[key] = PendingAnswer(progress)
        data = encode({"name": manifest.name, "version": manifest.version, "arguments": dict(arguments)})
        try:
            if say(to, "tool_call", data, n=number, provider=self.id) is None:
                raise errors.TooMuch("too much waits for another process; try again later", retry_after=1.0)
            return await call.answer(lambda why: say(to, "tool_cancel", n=number, why=why))
        finally:
            del calls[key]


@attrs.define(eq=False)
class ForwardedCalls:
    """The calls that this process has others carry out, and those that it carries out for them."""

    letters: PostBox
    # returns a provider that is connected here, by its id, and its tool of a name and version as it sent it
    find: Callable[[str, str, str], tuple[Provider, Manifest] | None]
    nursery: trio.Nursery | None = None  # runs the calls of others; None while there is none
    # by the process that carries them out, and their numbers
    calls: dict[tuple[str, int], PendingAnswer] = attrs.field(init=False, factory=dict)
    numbers: count[int] = attrs.field(init=False, factory=lambda: count(1))
    # by the process that asked for them, and their numbers there
    _serving: dict[tuple[str, int], trio.CancelScope] = attrs.field(init=False, factory=dict)

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
        return {name for name, _ in (*self.calls, *self._serving)}

    def _progressed(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        call = self.calls.get((sender, int(said["n"])))
        if call is not None and call.progressed is not None:
            call.progressed(*parse_value(data))

    def _answered(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        call, answer = self.calls.get((sender, int(said["n"]))), parse_value(data)
        if call is not None:
            call.resolve(answer.get("result"), errors.error_from(answer["error"]) if "error" in answer else None)

    def lose(self, name: str) -> None:
        """End what is under way with a process that is gone."""
        gone = "the process to which this tool's provider was connected has ended"
        for (holder, _), call in self.calls.items():
            if holder == name:
                call.resolve(error=errors.ProviderGone(gone))
        for (sender, _), scope in list(self._serving.items()):
            if sender == name:
                scope.cancel(reason="the process of the caller has ended")

    def _asked(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        key = sender, int(said["n"])
        asked = parse_value(data)
        found = self.find(said["provider"], asked["name"], asked["version"])
        if found is None or self.nursery is None:
            self._answer(*key, errors.ProviderGone("the provider of this tool has disconnected"))
        elif len(self._serving) >= _MOST_CALLS:
            self._answer(*key, errors.TooMuch("too many calls are under way; try again later"))
        else:
            self._serving[key] = trio.CancelScope()
            self.nursery.start_soon(self._carry_out, key, *found, asked["arguments"])

    def _cancelled(self, sender: str, said: Mapping[str, Any], data: bytes) -> None:
        scope = self._serving.get((sender, int(said["n"])))
        if scope is not None:
            scope.cancel(reason=said["why"])

    async def _carry_out(
        self, key: tuple[str, int], provider: Provider, sent: Manifest, arguments: Mapping[str, Any]
    ) -> None:
        """Carry out a call of another process, with progress now and then."""
        told = -_PROGRESS

        def progress(*report: Any) -> None:
            nonlocal told
            if trio.current_time() - told >= _PROGRESS:
                told = trio.current_time()
                self.letters.say(key[0], "tool_progress", encode(list(report)), n=key[1])

        answer: Any = errors.RequestCancelled("the call was cancelled")
        try:
            with self._serving[key]:
                id = f"call_{secrets.token_urlsafe(12)}"
                answer = {"result": await provider.call(sent, arguments, progress=progress, request_id=id)}
        except errors.AgentToolsError as error:
            answer = error
        except Exception as error:  # a provider's, or ours: this call's answer, and nobody else's
            answer = errors.crashed(error, {"type": "tool_call"})
        finally:
            del self._serving[key]
        self._answer(*key, answer)

    def _answer(self, to: str, number: int, answer: Any) -> None:
        said = {"error": answer.body()} if isinstance(answer, errors.AgentToolsError) else answer
        self.letters.say(to, "tool_answer", encode(said), n=number)
