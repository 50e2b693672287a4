"""A channel around another one tells of it what it tells of itself, whoever wraps it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import attrs
import pytest
import trio

from trimcp.budget import Budget
from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.testing import FaultyChannel, SlowChannel
from trimcp.transports.trace import traced
from trimcp.transports.wrapped import WrappedChannel

Wrap = Callable[[MessageChannel], MessageChannel]


@attrs.define(eq=False)
class Inner(MessageChannel):
    """Differs from what a `MessageChannel` says of itself in every word."""

    sent: list[Outgoing] = attrs.field(init=False, factory=list)
    closed: bool = attrs.field(init=False, default=False)
    gone: bool = attrs.field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.mirrors_headers, self.half_open, self.read_ahead, self.sends_now = True, False, (7, 700), True

    async def send(self, batch: Sequence[Outgoing]) -> None:
        self.sent.extend(batch)

    def send_nowait(self, outgoing: Outgoing) -> Outgoing | None:
        self.sent.append(outgoing)
        return None

    async def receive(self) -> Sequence[Incoming]:
        raise trio.EndOfChannel

    async def aclose(self) -> None:
        self.closed = True

    async def wait_peer_closed(self) -> None:
        self.gone = True

    def close_reason(self) -> str | None:
        return "it ended with exit code 3"

    def write_progress(self) -> Hashable:
        return len(self.sent)


@pytest.mark.parametrize("wrap", [WrappedChannel, lambda inner: traced(inner, str), SlowChannel, FaultyChannel])
async def test_what_a_wrapper_does_not_change_passes_through(wrap: Wrap) -> None:
    inner = Inner()
    outer = wrap(inner)
    assert (outer.mirrors_headers, outer.half_open, outer.too_slow) == (True, False, False)
    inner.half_open = True  # it may turn out late, as over gRPC
    assert outer.half_open
    assert outer.read_ahead == (7, 700)
    assert outer.close_reason() == "it ended with exit code 3"
    assert outer.write_progress() == 0
    outer.holding = Budget().holding("somebody")
    assert inner.holding is outer.holding, "else what is counted below would be nobody's"
    await outer.send([Outgoing(b'{"jsonrpc":"2.0","method":"m"}', Kind.NOTIFICATION)])
    assert outer.write_progress() == len(inner.sent) == 1
    inner.too_slow = True
    assert outer.too_slow
    with pytest.raises(trio.EndOfChannel):
        await outer.receive()
    await outer.wait_peer_closed()
    assert inner.gone
    await outer.aclose()
    assert inner.closed


async def test_only_a_wrapper_that_changes_nothing_sent_sends_at_once() -> None:
    inner = Inner()
    outer = WrappedChannel(inner)
    assert outer.sends_now
    assert outer.send_nowait(Outgoing(b"{}", Kind.NOTIFICATION)) is None
    assert [outgoing.data for outgoing in inner.sent] == [b"{}"]
    assert not SlowChannel(Inner()).sends_now, "else it would not slow this down"
    assert not traced(Inner(), str).sends_now, "else it would not be in the trace"
