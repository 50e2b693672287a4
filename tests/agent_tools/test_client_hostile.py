"""What a hostile service can say to the client: anything, which leads to no other errors than the documented ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import orjson
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from trimcp.agent_tools.client.channel import ChannelWire, WireWatch, _PendingMessage
from trimcp.agent_tools.client.wire import answer_in, event_in, response_in
from trimcp.agent_tools.messages.errors import AgentToolsError
from trimcp.agent_tools.messages.messages import (
    MESSAGES,
    RULES,
    ContextCreate,
    ContextDestroy,
    ContextRead,
    ContextUpdate,
    ListTools,
    ProvideTools,
    RegisterTool,
    RemoveTool,
)
from trimcp.channel import Incoming, MessageChannel, Outgoing
from trimcp.errors import InvalidReply, McpError
from trimcp.wire.jsonrpc import Malformed, parse_value

ASKED = (
    ContextCreate(),
    ContextRead(context_id="c"),
    ContextUpdate(context_id="c", updates={}),
    ContextDestroy(context_id="c"),
    ListTools(),
    RegisterTool(tool={}),
    RemoveTool(name="x"),
    ProvideTools(tools=[]),
)

ENDS = (AgentToolsError, McpError, trio.EndOfChannel)
"""What watches and streams may end with."""

TEXTS = st.sampled_from(["", "c", "r", "x", "ask-1", "success", "error", "input_required", "x" * 300, "\ud7ff\n"])
SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
ERRORS = VALUES | st.fixed_dictionaries(
    {"code": TEXTS | st.sampled_from(["too_much", "draining"])}, optional={"message": VALUES, "retry_after": VALUES}
)


@st.composite
def messages(draw: Callable[..., Any]) -> Any:
    """A message, with members that may be of any kind or missing."""
    kind = draw(st.sampled_from(sorted(MESSAGES)))
    value: dict[str, Any] = {"type": kind}
    for name in RULES[MESSAGES[kind]]:
        if draw(st.booleans()) or name in ("request_id", "context_id"):
            value[name] = draw(ERRORS if name == "error" else VALUES)
    return value


def as_read(value: Any) -> Any:
    """The value as a client gets it, which is no other than JSON can carry."""
    try:
        return parse_value(orjson.dumps(value))
    except TypeError:  # an integer that this library does not write
        return value


@pytest.mark.slow
@settings(max_examples=500)
@given(VALUES | messages())
def test_an_answer_is_read_or_an_error_of_its_own(value: Any) -> None:
    value = as_read(value)
    readers: list[Callable[[Any], object]] = [response_in, *(partial(answer_in, asked=asked) for asked in ASKED)]
    for read in readers:
        with suppress(AgentToolsError, InvalidReply):
            read(value)
    for wanted in MESSAGES.values():
        with suppress(AgentToolsError, InvalidReply):
            assert isinstance(event_in(value, wanted), wanted)


@attrs.define(eq=False)
class Said(MessageChannel):
    """A channel on which these values arrive."""

    values: list[Any]

    async def send(self, batch: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def receive(self) -> list[Incoming]:
        await trio.lowlevel.checkpoint()
        if not self.values:
            raise trio.EndOfChannel
        return [Incoming(self.values.pop(0), 100)]

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(VALUES | messages(), max_size=20))
def test_whatever_arrives_the_connection_ends_in_an_orderly_way(values: list[Any]) -> None:
    async def main() -> None:
        wire = ChannelWire(Said([as_read(value) for value in values]))
        seen: list[Any] = []

        def watching() -> WireWatch:
            return WireWatch(lambda: ContextRead(context_id="c"), wire=wire, begun=False)

        wire._asked = {
            "r": _PendingMessage(seen.append),
            "ask-1": _PendingMessage(watch=watching()),
            "x": _PendingMessage(),
        }
        watch = watching()
        wire._watches["c"] = [watch]
        asked: list[Any] = []
        wire._provided = lambda incoming: asked.append(incoming.message)
        await wire.read()
        assert wire.lost is not None
        for pending in wire._asked.values():
            assert pending.resolved.is_set()
        with pytest.raises(ENDS):
            while True:
                await watch.receive()
        assert all(each["type"] in ("tool_request", "tool_cancel") for each in asked)

    trio.run(main)


def test_a_message_that_is_too_large_ends_the_connection() -> None:
    async def main() -> None:
        wire = ChannelWire(Said([Malformed(-32600, "too large", None, "size")]))
        await wire.read()
        assert "too large" in (wire.lost or "")

    trio.run(main)


def test_what_is_posted_after_the_end_is_dropped() -> None:
    async def main() -> None:
        wire = ChannelWire(Said([]))
        await wire.read()
        wire._outbox.post(Outgoing(b"{}", None))
        assert len(wire._outbox) == 0

    trio.run(main)
