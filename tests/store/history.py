"""What clients saw of numbered events, and a checker that reads it: what was lost, doubled, or never answered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any, Literal, TypeAlias

import attrs
import httpx2
import orjson
import trio

from trimcp.framing.sse import EventDecoder

End: TypeAlias = Literal["result", "error", "broken", "refused", "session lost", "silent"]
"""How a call ended. "broken": the connection broke before the client had an id with which to come back."""


@attrs.define
class CallHistory:
    """One call that counts `to` a number: what its client saw, in order."""

    to: int
    numbers: list[int] = attrs.field(factory=list)
    ids: list[str] = attrs.field(factory=list)  # of events
    ends: list[End] = attrs.field(factory=list)
    seconds: float = 0.0
    resumed: int = 0


def problems(calls: Iterable[CallHistory], longest: float) -> list[str]:
    """Return what is wrong with these histories. A call takes `longest` at most."""
    found = []
    for place, call in enumerate(calls):
        numbers = call.numbers
        wanted = list(range(1, len(set(numbers)) + 1))
        if len(set(numbers)) < len(numbers) or len(set(call.ids)) < len(call.ids):
            found.append(f"call {place}: doubled: {numbers} {call.ids}")
        elif numbers != wanted:
            found.append(f"call {place}: lost, or out of order: {numbers}")
        elif call.ends == ["result"] and len(numbers) != call.to:
            found.append(f"call {place}: lost: {len(numbers)} of {call.to} before its result")
        if len(call.ends) != 1 or call.ends[0] in ("session lost", "silent"):
            found.append(f"call {place}: ended by {call.ends}")
        elif call.seconds > longest:
            found.append(f"call {place}: ended by {call.ends} after {call.seconds:.1f} s")
    return found


@attrs.define(eq=False)
class CountingClient:
    """A client that opens a connection for each request, so that it comes to one process or another."""

    url: str
    revision: str = "2025-11-25"
    session: str = ""
    patience: float = 30.0
    calls: list[CallHistory] = attrs.field(factory=list)
    _http: httpx2.AsyncClient = attrs.field(
        factory=lambda: httpx2.AsyncClient(headers={"Connection": "close"}, timeout=30.0)
    )
    _ids: count[int] = attrs.field(factory=lambda: count(1))

    def _headers(self, **more: str) -> dict[str, str]:
        return {
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
            "MCP-Protocol-Version": self.revision,
            **({"Mcp-Session-Id": self.session} if self.session else {}),
            **more,
        }

    async def begin(self) -> None:
        params = {
            "protocolVersion": self.revision,
            "capabilities": {},
            "clientInfo": {"name": "counting", "version": "1"},
        }
        message = {"jsonrpc": "2.0", "id": next(self._ids), "method": "initialize", "params": params}
        answer = await self._http.post(self.url, json=message, headers=self._headers())
        self.session = answer.headers["mcp-session-id"]
        ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert (await self._http.post(self.url, json=ready, headers=self._headers())).status_code == 202

    async def count(self, to: int, pause: float) -> CallHistory:
        """Call the tool, come back whenever the connection breaks, and write down what is heard."""
        call, id = CallHistory(to), next(self._ids)
        self.calls.append(call)
        params = {"name": "count", "arguments": {"to": to, "pause": pause}, "_meta": {"progressToken": id}}
        body = orjson.dumps({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
        began = trio.current_time()
        with trio.move_on_after(self.patience) as scope:
            await self._hear(call, id, "POST", self._headers(), body)
            while not call.ends:
                if not call.ids:
                    call.ends.append("broken")
                    break
                call.resumed += 1
                await trio.sleep(0.05)
                await self._hear(call, id, "GET", self._headers(**{"Last-Event-ID": call.ids[-1]}), None)
        if scope.cancelled_caught:
            call.ends.append("silent")
        call.seconds = trio.current_time() - began
        return call

    async def _hear(self, call: CallHistory, id: int, method: str, headers: dict[str, str], body: bytes | None) -> None:
        try:
            async with self._http.stream(method, self.url, headers=headers, content=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    if response.status_code == 404:
                        call.ends.append("session lost")
                    elif method == "POST":
                        call.ends.append("refused")
                    return
                if response.headers["content-type"] == "application/json":
                    self._note(call, id, orjson.loads(await response.aread()))
                    return
                decoder = EventDecoder()
                async for chunk in response.aiter_bytes():
                    for event in decoder.feed(chunk):
                        if event.id:
                            call.ids.append(event.id)
                        if event.data:
                            self._note(call, id, orjson.loads(event.data))
        except httpx2.HTTPError:
            return

    @staticmethod
    def _note(call: CallHistory, id: int, message: Any) -> None:
        if message.get("method") == "notifications/progress":
            call.numbers.append(message["params"]["progress"])
        elif message.get("id") == id:
            call.ends.append("result" if "result" in message else "error")


def seen(clients: Sequence[CountingClient]) -> list[CallHistory]:
    return [call for client in clients for call in client.calls]
