"""How connections end: drained, left, or cut. Handlers unwind, calls fail at once, nothing is left over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from tests.fuzz.effort import PATIENCE
from tests.interaction.links import Links
from tests.peers.messages import text_of
from tests.stopwatch import Stopwatch
from trimcp.client.session import ClientSession
from trimcp.errors import ConnectionLost, RemoteError
from trimcp.wire.codes import CANCELLED_BY_DRAIN


async def outcome(call: Callable[[], Awaitable[Any]], into: list[Any]) -> None:
    try:
        into.append(text_of(await call()))
    except Exception as error:
        into.append(error)


async def refused_from_now_on(session: ClientSession) -> RemoteError | ConnectionLost:
    """Call until the server refuses because it is shutting down, or takes no more connections."""
    while True:
        try:
            await session.call_tool("echo", {"text": "still?"})
        except (RemoteError, ConnectionLost) as error:
            return error


async def test_draining_answers_what_is_under_way_and_refuses_the_rest(links: Links, clock: Any) -> None:
    links.grace, links.at_once = 2.0, True
    held: list[Any] = []
    hung: list[Any] = []
    until = f"key stopped: {links.cancelled}"
    with trio.fail_after(PATIENCE):
        async with links() as session, trio.open_nursery() as nursery:
            nursery.start_soon(outcome, lambda: session.call_tool("hold", {"name": "held", "until": until}), held)
            nursery.start_soon(outcome, lambda: session.call_tool("hang", {"name": "hung"}), hung)
            async with session.calling("hang", {"name": "key"}):
                for name in ("held", "hung", "key"):
                    await session.call_tool("wait_for", {"line": f"{name} started"})
                links.shut_down()
                refused = await refused_from_now_on(session)
                assert (held, hung) == ([], [])
            if links.connected:
                await session.wait_lost()
    assert isinstance(refused, ConnectionLost) or refused.code == CANCELLED_BY_DRAIN
    assert held == ["held done"], "it was done within the grace"
    [cut] = hung
    assert isinstance(cut, RemoteError)
    assert cut.code == CANCELLED_BY_DRAIN
    assert links.journal()[-2:] == [f"hung stopped: {links.drained}", "lifespan left"]
    assert "Traceback" not in links.log()


async def test_a_client_that_leaves_stops_its_handlers(links: Links, clock: Any) -> None:
    with trio.fail_after(PATIENCE):
        async with links.wire() as wire:
            await wire.meet()
            await wire.say(wire.call(1, "hang", name="left"), wire.call(2, "wait_for", line="left started"))
            assert (await wire.hear())["id"] == 2
    assert links.journal()[-2:] == ["left stopped: DISCONNECTED", "lifespan left"]
    assert "Traceback" not in links.log()


async def test_calls_fail_at_once_when_the_server_dies(links: Links, clock: Any) -> None:
    outcomes: list[Any] = []
    links.mortal = links.at_once = True
    with trio.fail_after(PATIENCE):
        async with links() as session:
            async with trio.open_nursery() as nursery:
                for number in range(10):
                    name = f"call {number}"
                    nursery.start_soon(outcome, lambda name=name: session.call_tool("hang", {"name": name}), outcomes)
                for number in range(10):  # over HTTP each has a connection of its own, so the last may come first
                    await session.call_tool("wait_for", {"line": f"call {number} started"})
                async with session.listen(tools=True) as changes:
                    links.kill()
                    began, clock = trio.current_time(), Stopwatch(())
                    if links.connected or links.modern:  # else the stream of changes is a connection that is made again
                        with pytest.raises(ConnectionLost):
                            await changes.receive()
            assert (trio.current_time() - began if links.local else clock.took()) < 1.0
            assert len(outcomes) == 10
            assert all(isinstance(error, ConnectionLost) for error in outcomes), outcomes
            with pytest.raises(ConnectionLost):
                await session.call_tool("echo", {"text": "late"})
            if links.connected:
                await session.wait_lost()
