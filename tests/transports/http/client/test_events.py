"""Streams of events as they are read: what carries a message, and where a cut stream is taken up again."""

from __future__ import annotations

import pytest

from tests.transports.http.scripted import Exchange, event, scripted
from tests.transports.websocket_support import turns_of
from trimcp.framing.sse import Event
from trimcp.transports.http.client.exchanges import ExchangeBroken
from trimcp.transports.http.client.incoming import Cursor, Inbox, message_in, read_events
from trimcp.wire.jsonrpc import Malformed, Notification

pytestmark = pytest.mark.usefixtures("on_both_engines")

NOTE = {"jsonrpc": "2.0", "method": "n"}


async def read(
    *chunks: bytes, cut: bool = False, max_event: int = 1000
) -> tuple[list[Event], Cursor, ExchangeBroken | None]:
    async def handle(exchange: Exchange) -> None:
        await exchange.start(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
        for chunk in chunks:
            await exchange.write(chunk)
        if not cut:
            await exchange.finish()

    found: list[Event] = []

    async def take(event: Event) -> None:
        found.append(event)

    cursor = Cursor()
    async with (
        scripted(handle) as server,
        server.target().exchanges() as http,
        http.open("GET", {}) as reply,
    ):
        end = await read_events(reply, cursor, Inbox(max_message=max_event), take)
    return found, cursor, end


async def test_every_event_is_handed_on() -> None:
    found, cursor, end = await read(event(NOTE, id="a"), event(NOTE, id="b", retry=1500), b"id: c\n\n")
    assert [each.id for each in found] == ["a", "b"]
    assert (cursor.last_event_id, cursor.retry, cursor.moved, end) == ("c", 1.5, True, None)


@pytest.mark.parametrize("line", [b"\n", b"\r", b":\n", b"data:x\n\n"])
async def test_of_many_lines_others_have_their_turn_in_between(line: bytes) -> None:
    count = 60_000 // len(line)
    found: list[Event] = []

    async def run() -> None:
        found.extend((await read(b"id:a\n\n" + line * count + event(NOTE, id="b")))[0])

    assert await turns_of(run) >= 60_000 / 1024
    assert len(found) == (1 + count if b"data" in line else 1)
    assert found[-1].id == "b"


async def test_a_stream_that_breaks_says_so() -> None:
    found, cursor, end = await read(event(NOTE, id="a"), b"data: half", cut=True)
    assert len(found) == 1
    assert cursor.last_event_id == "a"
    assert isinstance(end, ExchangeBroken)
    assert "http://server.test broke" in end.why


@pytest.mark.parametrize(("retry", "pause"), [(0, 0.0), (10**14, 300.0), (500, 0.5)])
async def test_the_time_to_wait_is_respected_within_reason(retry: int, pause: float) -> None:
    _, cursor, _ = await read(event(NOTE, retry=retry))
    assert cursor.retry == pause


async def test_an_event_beyond_the_limit_stands_for_its_message() -> None:
    found, _, _ = await read(event({**NOTE, "id": 7, "result": "x" * 2000}), event(NOTE))
    first, second = (message_in(each) for each in found)
    assert isinstance(first, Malformed)
    assert (first.id, first.reason) == (7, "size")
    assert second == Notification("n")


def test_what_carries_no_message() -> None:
    assert message_in(Event(b"")) is None
    assert message_in(Event(b"  ")) is None
    assert message_in(Event(b'{"jsonrpc":"2.0","method":"n"}', "ping")) is None
    assert isinstance(message_in(Event(b'{"bad": "\xff"}')), Malformed)


@pytest.mark.parametrize("id", [None, "", "ü", "a\nb", "x" * 2000])
def test_an_id_that_cannot_be_asked_for_is_not(id: str | None) -> None:
    assert Cursor(id).header == {}


def test_an_id_is_asked_for_as_it_came() -> None:
    assert Cursor("3_17 =").header == {"last-event-id": "3_17 ="}
