"""One session over a connection that carries many calls at a time: its handshake, its calls, its reopening.

Knows neither pipes nor frames; a `LoadChannel` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, TypeAlias

import attrs
import trio

from trimcp.bench.caller import LoadCaller
from trimcp.bench.load import INITIALIZED, Load
from trimcp.errors import McpError

__all__ = ["LoadChannel", "Opener", "run_session"]


class LoadChannel(Protocol):
    """One connection as the load needs it: whole messages, as they stand on the wire."""

    def send(self, messages: Sequence[bytes]) -> None:
        """Send what the system takes now, and leave the rest to `run`. Does not raise."""

    async def run(self) -> None:
        """Send what `send` left over, for as long as the connection is used.

        Raises:
            trio.BrokenResourceError: nothing can be sent any more.
        """

    async def receive(self) -> Sequence[bytes]:
        """Return all messages that have arrived, maybe none. Cancelling it loses nothing.

        Raises:
            trio.EndOfChannel, trio.BrokenResourceError: nothing will arrive any more.
        """
        ...

    async def close_reason(self) -> str:
        """Say how the connection ended."""
        ...


Opener: TypeAlias = Callable[[Load, LoadCaller], AbstractAsyncContextManager[LoadChannel]]
"""Opens a connection, within `Plan.opening`. An McpError says that there is none; leaving the block closes it."""


async def run_session(
    load: Load, opener: Opener, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run one session to the end of the measurement, and open it again where it breaks, so often as the plan says.

    It counts as started once it can be used, or the first attempt to open it has failed.
    """
    caller = LoadCaller(load.supply, load.plan.places, load.plan.think)
    started = trio.Event()

    def usable() -> None:
        if not started.is_set():
            started.set()
            task_status.started()

    attempt = 0
    while True:
        try:
            async with opener(load, caller) as channel:
                kind, why = await _Conversation(load, caller, channel).run(usable)
        except McpError as error:
            kind, why = "no connection", str(error)
        except BaseException:  # cancelled, in whatever groups; noted only, where what is under way is overdue as well
            if load.overdue:
                caller.lose("no answer", f"none came within {load.plan.patience:g} seconds", trio.current_time())
            raise
        if why is None:
            return
        now = trio.current_time()
        if caller.idle:
            load.tally.wrong(kind, why, now)
        caller.lose(kind, why, now)
        usable()
        if not await load.again(attempt):
            return
        attempt += 1


@attrs.define(eq=False)
class _Conversation:
    """The life of one connection."""

    _load: Load
    _caller: LoadCaller
    _channel: LoadChannel
    _scope: trio.CancelScope = attrs.field(init=False)
    _timer: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _greeted: trio.Event = attrs.field(init=False, factory=trio.Event)
    _is_open: bool = attrs.field(init=False, default=False)
    _kind: str = attrs.field(init=False, default="")
    _why: str | None = attrs.field(init=False, default=None)

    async def run(self, usable: Callable[[], object]) -> tuple[str, str | None]:
        """Carry calls until there are none left, or the connection ends; return the kind of that end and why."""
        load, caller = self._load, self._caller
        caller.wake = self._kick
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                nursery.start_soon(self._write)
                nursery.start_soon(self._read)
                if await self._greet():
                    self._is_open = True
                    load.open += 1
                    usable()
                    nursery.start_soon(self._keep_time)
                    self._pump(trio.current_time())
        finally:
            caller.wake = load.supply.pass_on
            load.open -= self._is_open
        return self._kind, self._why

    def _end(self, kind: str, why: str) -> None:
        if self._why is None:
            self._kind, self._why = kind, why
        self._scope.cancel()

    async def _lost(self) -> None:
        self._end("connection lost" if self._is_open else "no connection", await self._channel.close_reason())

    async def _greet(self) -> bool:
        """Shake hands, or where there is no handshake see that the server is awake; False if it does not answer."""
        load = self._load
        self._channel.send([load.greeting()])
        with trio.move_on_after(load.plan.opening):
            await self._greeted.wait()
        greeting = self._caller.greeting
        if greeting is not None and load.revision.modern:
            return True
        if isinstance(greeting, dict):
            self._channel.send([INITIALIZED])
            return True
        self._end("no connection", greeting or f"the server was not ready within {load.plan.opening:g} seconds")
        return False

    # The three tasks

    async def _write(self) -> None:
        try:
            await self._channel.run()
        except trio.BrokenResourceError:
            await self._lost()

    async def _read(self) -> None:
        caller, receive = self._caller, self._channel.receive
        try:
            while True:
                texts = await receive()
                now = trio.current_time()
                for text in texts:
                    caller.take(text, now)
                self._pump(now)
        except (trio.EndOfChannel, trio.BrokenResourceError):
            await self._lost()

    async def _keep_time(self) -> None:
        """Wake up for what is due although nothing arrives: timeouts, cancellations, the end of thinking."""
        while True:
            self._timer = trio.CancelScope(deadline=self._caller.due())
            with self._timer:
                await trio.sleep_forever()
            self._pump(trio.current_time())

    # What makes calls begin

    def _kick(self) -> None:
        if self._caller.greeting is not None:
            self._greeted.set()
        self._pump(trio.current_time())

    def _pump(self, now: float) -> None:
        if not self._is_open:
            return
        caller = self._caller
        messages = caller.ready(now)
        if messages:
            self._channel.send(messages)
        due = caller.due()
        if due < self._timer.deadline:
            self._timer.deadline = due
        if self._load.supply.over and caller.idle:
            self._scope.cancel()
