"""A load without a connection, and channels that lead to a server in this test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import orjson
import trio

from trimcp.bench.mux import LoadCaller, LoadChannel, Opener
from trimcp.bench.plan import MixEntry, Plan, prepare
from trimcp.bench.supply import Load, Supply
from trimcp.bench.tally import Tally
from trimcp.wire.revisions import LATEST, Revision

ECHO = MixEntry.tool("echo", {"text": "hello {n}"}, expect="hello {n}")


def a_plan(**options: Any) -> Plan:
    return Plan(options.pop("mix", ECHO), **options)


def a_load(revision: Revision = LATEST, http: bool = False, **options: Any) -> Load:
    """A load whose measurement has begun."""
    plan = a_plan(**options)
    requests = [prepare(request, revision, progress=plan.progress, http=http) for request in plan.mix]
    tally = Tally()
    tally.begin(0.0)
    return Load(plan, revision, Supply(plan, requests, tally), tally)


def errors(load: Load) -> dict[str, int]:
    return {kind: each.count for kind, each in load.tally.errors.items()}


def reply(request: dict[str, Any], text: str | None = None) -> bytes:
    """The right answer to a call of `echo`, or one with another text."""
    said = request["params"]["arguments"]["text"] if text is None else text
    content = [{"type": "text", "text": said}]
    return orjson.dumps({"jsonrpc": "2.0", "id": request["id"], "result": {"content": content}})


def progress(request: dict[str, Any], value: float = 1) -> bytes:
    token = request["params"]["_meta"]["progressToken"]
    params = {"progressToken": token, "progress": value}
    return orjson.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": params})


def greeting(request: dict[str, Any]) -> bytes:
    """The answer to the first request on a connection."""
    result = {"protocolVersion": request["params"].get("protocolVersion"), "capabilities": {"tools": {}}}
    result["serverInfo"] = {"name": "of the tests", "version": "0"}
    return orjson.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result})


@attrs.define(eq=False)
class FakeChannel:
    """A connection to a server that is a function in this test.

    Args:
        serve: called with each message that is sent and the channel, on which it may `answer` now or later.
        greets: the first request is answered properly, and not by the function.

    Attributes:
        sent: every message, with the time it was sent at.
    """

    serve: Callable[[dict[str, Any], FakeChannel], object]
    nursery: trio.Nursery
    greets: bool = True
    sent: list[tuple[float, dict[str, Any]]] = attrs.field(factory=list)
    closed: bool = False
    _arrived: list[bytes] = attrs.field(factory=list)
    _changed: trio.Event = attrs.field(factory=trio.Event)
    _ended: bool = False

    def send(self, messages: Sequence[bytes]) -> None:
        for text in messages:
            message = orjson.loads(text)
            self.sent.append((trio.current_time(), message))
            if self.greets and message.get("id") == 0:
                self.answer(greeting(message))
            else:
                self.serve(message, self)

    async def run(self) -> None:
        await trio.sleep_forever()

    async def receive(self) -> Sequence[bytes]:
        while not self._arrived:
            if self._ended:
                raise trio.EndOfChannel
            self._changed = trio.Event()
            await self._changed.wait()
        await trio.lowlevel.checkpoint()
        arrived, self._arrived = self._arrived, []
        return arrived

    async def close_reason(self) -> str:
        await trio.lowlevel.checkpoint()
        return "the server died"

    # What the server in the test does

    def answer(self, *texts: bytes) -> None:
        self._arrived += texts
        self._changed.set()

    def answer_after(self, seconds: float, *texts: bytes) -> None:
        async def later() -> None:
            await trio.sleep(seconds)
            self.answer(*texts)

        self.nursery.start_soon(later)

    def die(self) -> None:
        self._ended = True
        self._changed.set()

    @property
    def calls(self) -> list[tuple[float, dict[str, Any]]]:
        return [(at, message) for at, message in self.sent if message["method"] == "tools/call"]

    @property
    def cancelled(self) -> list[int]:
        return [each["params"]["requestId"] for _, each in self.sent if each["method"] == "notifications/cancelled"]


def fake_opener(
    serve: Callable[[dict[str, Any], FakeChannel], object], channels: list[FakeChannel], *, greets: bool = True
) -> Opener:
    """Return what opens such connections, and puts them into the list."""

    @asynccontextmanager
    async def opened(load: Load, caller: LoadCaller) -> AsyncIterator[LoadChannel]:
        async with trio.open_nursery() as nursery:
            channel = FakeChannel(serve, nursery, greets)
            channels.append(channel)
            try:
                yield channel
            finally:
                channel.closed = True
                nursery.cancel_scope.cancel()

    return opened


def at_once(message: dict[str, Any], channel: FakeChannel) -> None:
    """A server that answers rightly at once."""
    if message["method"] == "tools/call":
        channel.answer(reply(message))


def after(seconds: float) -> Callable[[dict[str, Any], FakeChannel], object]:
    """A server that answers rightly after some time."""

    def serve(message: dict[str, Any], channel: FakeChannel) -> None:
        if message["method"] == "tools/call":
            channel.answer_after(seconds, reply(message))

    return serve
