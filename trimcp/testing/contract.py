"""Checks that a transport fulfils the contract of `MessageChannel`, like `trio.testing.check_two_way_stream`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Final, TypeAlias

import trio
from trio.testing import assert_checkpoints, wait_all_tasks_blocked

from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing, require_trio
from trimcp.support.nurseries import unwrap_single
from trimcp.wire.jsonrpc import Malformed, Request, encode_request

MakePair: TypeAlias = Callable[[], AbstractAsyncContextManager[tuple[MessageChannel, MessageChannel]]]
"""Returns an async context manager that yields the two ends of a new connection."""

_HANG: Final = 20
_CUSHION: Final = 0.02
_LARGE: Final = "x" * 65536
_ENOUGH: Final = 2000  # sends after which one must have failed or blocked


async def check_channel(make_pair: MakePair, *, clogs: bool = True, big: int = 1_000_000) -> None:
    """Check the contract of `MessageChannel`, each part with a new pair of channels.

    Checked: order within and across batches, both directions at once, big and empty batches, garbage, the end after
    the peer's close and the errors after it, one sender and one receiver at a time, checkpoints, and cancelling.

    Args:
        make_pair: returns an async context manager that yields two connected channels. This function closes the
            channels; the context manager closes everything else.
        clogs: whether `send` blocks eventually if the peer does not read.
        big: characters of the longest message.

    Raises:
        AssertionError: a check failed; the traceback names it.
        trio.TooSlowError: a check took 20 seconds.
    """
    require_trio()
    checks: list[_Check] = [_order, _both_directions, _empty_batch, _garbage, partial(_big_message, size=big)]
    checks += [_end_of_channel, _own_close, _close_wakes_receiver, _close_when_cancelled, _peer_gone]
    checks += [_one_receiver, _cancelled_receive, _checkpoints]
    if clogs:
        checks += [_cancelled_send, _close_wakes_sender, _one_sender]
    for check in checks:
        with trio.fail_after(_HANG):
            await _run(check, make_pair)


_Check: TypeAlias = Callable[[MessageChannel, MessageChannel], Awaitable[None]]


async def _run(check: _Check, make_pair: MakePair) -> None:
    try:
        async with make_pair() as (left, right):
            try:
                await check(left, right)
            finally:
                for channel in (left, right):
                    with trio.CancelScope() as scope:
                        scope.cancel()  # close at once
                        await channel.aclose()
    except BaseExceptionGroup as group:
        failures, rest = group.split(AssertionError)
        if failures is None or rest is not None:
            raise
        raise AssertionError(
            str(unwrap_single(failures))
        ) from group  # without the exception groups of the nurseries here


async def _order(left: MessageChannel, right: MessageChannel) -> None:
    async def send() -> None:
        sent = 0
        for length in (1, 3, 1, 50, 200, 2):
            await left.send([_request(n) for n in range(sent, sent + length)])
            sent += length

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        arrived = await _receive(right, 257)
    assert _ids(arrived) == list(range(257)), "messages were lost, doubled or reordered"
    assert arrived[7].message == Request(7, "check", {"text": "7"}), "a message changed on its way"
    assert all(message.size > 0 for message in arrived), "Incoming.size counts the bytes of the message"


async def _both_directions(left: MessageChannel, right: MessageChannel) -> None:
    async def send(channel: MessageChannel) -> None:
        for n in range(100):
            await channel.send([_request(2 * n), _request(2 * n + 1, "y" * 1000)])

    async def receive(channel: MessageChannel) -> None:
        assert _ids(await _receive(channel, 200)) == list(range(200)), "the two directions disturb each other"

    async with trio.open_nursery() as nursery:
        for channel in (left, right):
            nursery.start_soon(send, channel)
            nursery.start_soon(receive, channel)


async def _big_message(left: MessageChannel, right: MessageChannel, size: int) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(left.send, [_request(1, "z" * size), _request(2)])
        first, second = await _receive(right, 2)
    assert first.message == Request(1, "check", {"text": "z" * size}), "a big message was changed"
    assert _ids([second]) == [2], "what follows a big message was lost"


async def _empty_batch(left: MessageChannel, right: MessageChannel) -> None:
    await left.send([])
    await left.send([_request(1)])
    await left.send([])
    assert _ids(await right.receive()) == [1], "an empty batch is nothing at all"


async def _garbage(left: MessageChannel, right: MessageChannel) -> None:
    await left.send([Outgoing(b'{"jsonrpc": nonsense', Kind.NOTIFICATION), _request(1)])
    garbage, good = await _receive(right, 2)
    assert isinstance(garbage.message, Malformed), "what cannot be parsed is a message like any other"
    assert _ids([good]) == [1], "garbage must not disturb what follows"


async def _end_of_channel(left: MessageChannel, right: MessageChannel) -> None:
    await left.send([_request(n) for n in range(3)])
    await left.aclose()
    assert _ids(await _receive(right, 3)) == [0, 1, 2], "what was sent before the close must arrive"
    for _ in range(2):
        with _raises(trio.EndOfChannel):
            await right.receive()


async def _own_close(left: MessageChannel, right: MessageChannel) -> None:
    await right.send([_request(1)])
    await left.aclose()
    await left.aclose()
    for _ in range(2):
        with _raises(trio.ClosedResourceError):
            await left.receive()
        with _raises(trio.ClosedResourceError):
            await left.send([_request(2)])


async def _close_wakes_receiver(left: MessageChannel, right: MessageChannel) -> None:
    async def receive() -> None:
        with _raises(trio.ClosedResourceError):
            await left.receive()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await wait_all_tasks_blocked(_CUSHION)
        await left.aclose()


async def _peer_gone(left: MessageChannel, right: MessageChannel) -> None:
    await right.aclose()
    with _raises(trio.BrokenResourceError):
        for n in range(_ENOUGH):
            await left.send([_request(n, "x" * 1000)])
    with _raises(trio.BrokenResourceError):
        await left.send([_request(1)])


async def _one_receiver(left: MessageChannel, right: MessageChannel) -> None:
    async def receive() -> None:
        assert _ids(await right.receive()) == [1], "the receiver that came first was disturbed"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        await wait_all_tasks_blocked(_CUSHION)
        with _raises(trio.BusyResourceError):
            await right.receive()
        await left.send([_request(1)])


async def _cancelled_receive(left: MessageChannel, right: MessageChannel) -> None:
    arrived: list[Incoming] = []

    async def receive(scope: trio.CancelScope) -> None:
        with scope:
            arrived.extend(await right.receive())

    for n in range(20):  # cancel at about the time a message arrives: it is returned now or by the next call
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(receive, scope)
            await wait_all_tasks_blocked()
            await left.send([_request(n)])
            scope.cancel()
    await wait_all_tasks_blocked(_CUSHION)
    scope = trio.CancelScope()
    scope.cancel()
    await receive(scope)
    await left.send([_request(20)])
    while 20 not in _ids(arrived):
        arrived += await right.receive()
    assert _ids(arrived) == list(range(21)), "a cancelled receive lost or reordered messages"


async def _checkpoints(left: MessageChannel, right: MessageChannel) -> None:
    one, none = partial(left.send, [_request(1)]), partial(left.send, [])
    for call in (one, none, right.receive, left.aclose, left.aclose, right.aclose):
        with assert_checkpoints():
            await call()


async def _close_when_cancelled(left: MessageChannel, right: MessageChannel) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await left.aclose()
    with _raises(trio.ClosedResourceError):
        await left.send([_request(1)])
    with _raises(trio.EndOfChannel, trio.BrokenResourceError):
        await right.receive()


async def _cancelled_send(left: MessageChannel, right: MessageChannel) -> None:
    """Check that the peer receives a prefix of the sent messages; only the last one may be incomplete."""
    async with _clogged(left) as scope:
        scope.cancel()
    arrived: list[Incoming] = []

    async def receive_all() -> None:
        with _raises(trio.EndOfChannel, trio.BrokenResourceError):
            while True:
                arrived.extend(await right.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive_all)
        try:
            await left.send([_request(-1)])
        except trio.BrokenResourceError:
            whole = False
        else:
            whole = True
        await left.aclose()
    if not whole and arrived and isinstance(arrived[-1].message, Malformed):
        arrived.pop()
    ids = _ids(arrived)
    if whole:
        assert ids.pop() == -1, "a channel that is not broken must deliver"
    assert ids == list(range(len(ids))), "a cancelled send mangled other messages"


async def _close_wakes_sender(left: MessageChannel, right: MessageChannel) -> None:
    async with _clogged(left):
        await left.aclose()


async def _one_sender(left: MessageChannel, right: MessageChannel) -> None:
    async with _clogged(left) as scope:
        with _raises(trio.BusyResourceError):
            await left.send([_request(-1)])
        scope.cancel()


@asynccontextmanager
async def _clogged(channel: MessageChannel) -> AsyncIterator[trio.CancelScope]:
    """Run the body while a task blocks in `send` because the peer does not read; cancelling or closing ends it."""
    scope = trio.CancelScope()
    done = False

    async def send() -> None:
        nonlocal done
        with scope, suppress(trio.ClosedResourceError):
            for n in range(_ENOUGH):
                await channel.send([_request(n, _LARGE)])
        done = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        await wait_all_tasks_blocked(_CUSHION)
        assert not done, "sending to a peer that does not read must block (or pass clogs=False)"
        yield scope


def _request(n: int, text: str | None = None) -> Outgoing:
    data = encode_request(n, "check", {"text": str(n) if text is None else text})
    return Outgoing(data, Kind.REQUEST, n)


async def _receive(channel: MessageChannel, count: int) -> list[Incoming]:
    arrived: list[Incoming] = []
    while len(arrived) < count:
        batch = await channel.receive()
        assert batch, "receive returns at least one message"
        arrived.extend(batch)
    return arrived


def _ids(arrived: Sequence[Incoming]) -> list[object]:
    return [message.message.id if isinstance(message.message, Request) else message.message for message in arrived]


@contextmanager
def _raises(*expected: type[Exception]) -> Iterator[None]:
    try:
        yield
    except expected:
        return
    raise AssertionError(f"expected {' or '.join(kind.__name__ for kind in expected)}")
