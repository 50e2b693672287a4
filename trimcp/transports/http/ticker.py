"""The clock of a face: one task for every reply that is silent, every stream that is, and every session that is idle.

A deadline for each request would cost more than most requests do. So time is looked at every half second while there
is something to look at, and not at all otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import attrs
import trio

if TYPE_CHECKING:
    from trimcp.transports.http.exchange import Exchange
    from trimcp.transports.http.sessions import SessionTable
    from trimcp.transports.http.settings import Settings
    from trimcp.transports.http.streams import EventStream

__all__ = ["Ticker"]

_TICK: Final = 0.5
_SWEEP: Final = 30.0


@attrs.define(eq=False)
class Ticker:
    """Watches over what waits. `run` is its task."""

    settings: Settings
    _silent: dict[Exchange, float] = attrs.field(init=False, factory=dict)
    _streams: dict[EventStream, None] = attrs.field(init=False, factory=dict)
    _lot: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def expect(self, exchange: Exchange) -> None:
        """Let this exchange become a stream unless it is answered soon."""
        self._silent[exchange] = trio.current_time()
        if self._lot:
            self._lot.unpark_all()

    def settled(self, exchange: Exchange) -> None:
        """Note that it was answered."""
        self._silent.pop(exchange, None)

    def watch(self, stream: EventStream) -> None:
        """Keep this stream alive while nothing is written to it."""
        self._streams[stream] = None
        if self._lot:
            self._lot.unpark_all()

    def unwatch(self, stream: EventStream) -> None:
        """Note that nobody reads it any more."""
        self._streams.pop(stream, None)

    async def run(self, sessions: SessionTable) -> None:
        """Look at the time until cancelled."""
        kept_alive = swept = trio.current_time()
        while True:
            if self._silent or self._streams:
                await trio.sleep(_TICK)
            else:
                with trio.move_on_after(self._until_sweep(sessions)):
                    await self._lot.park()
            now = trio.current_time()
            self._hurry(now)
            if now - kept_alive >= self.settings.keep_alive / 2:  # a stream is silent for this long twice at most
                kept_alive = now
                self._keep_alive()
            if now - swept >= min(_SWEEP, self.settings.session_idle):
                swept = now
                sessions.sweep(now)

    def _until_sweep(self, sessions: SessionTable) -> float:
        return min(_SWEEP, self.settings.session_idle) if len(sessions) else float("inf")

    def _keep_alive(self) -> None:
        for stream in list(self._streams):
            if stream.read:
                stream.keep_alive()
            else:  # we ended it, and nobody tells us of the connection of a response that is over
                self.unwatch(stream)

    def _hurry(self, now: float) -> None:
        """Make streams of what was silent for too long. The oldest come first."""
        while self._silent:
            exchange, since = next(iter(self._silent.items()))
            if now - since < self.settings.silence:
                return
            del self._silent[exchange]
            exchange.grow_impatient()
