"""The end of a child process and its descendants, step by step and within a bounded time.

It knows signals and time; who is descended from whom is `family`'s business, and what was said on the pipes
nobody's.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from typing import Final

import attrs
import trio

from trimcp.transports.family import Family, Kin
from trimcp.values import valued

__all__ = ["Patience", "end_process"]

_HURRIED: Final = 0.5
_POLL: Final = 0.03

_log = logging.getLogger("trimcp.stdio")


@attrs.frozen
@valued
class Patience:
    """How long a child gets for each step of its end, in seconds; the defaults add up to less than five.

    Attributes:
        close: to exit by itself once its standard input was closed.
        terminate: to exit, with its descendants, after SIGTERM.
        kill: for the system to clear away what SIGKILL ended.
    """

    close: float = 2.0
    terminate: float = 1.5
    kill: float = 0.5


async def end_process(
    process: trio.Process, family: Family, close_input: Callable[[], None], patience: Patience | None = None
) -> None:
    """End a child and its descendants: close its input, wait, SIGTERM, wait, SIGKILL.

    The steps are those of the specification's "Shutdown". Returns when nobody is left, or when `patience` is
    at its end, which is logged. Only processes identified as descendants are signalled. Cancelling it
    shortens the first wait to half a second; from there on it is shielded, as everywhere in Trio for the
    bounded close of a thing that must not outlive its owner.

    Args:
        process: the child; may have exited already, its descendants are looked for all the same.
        family: the child's descendants.
        close_input: closes the child's standard input, without waiting.
        patience: how long each step may take, None for the defaults.
    """
    patience = patience if patience is not None else Patience()
    with trio.CancelScope(shield=True):  # it reads a table of processes, which takes milliseconds
        await _look(family)  # while parents still tell whose children they are
    close_input()
    hurried = min(_HURRIED, patience.close)
    try:
        with trio.move_on_after(patience.close):
            await process.wait()
        hurried = 0
    finally:
        # No process outlives its connection, also when that is cancelled. `patience` bounds what it takes.
        with trio.CancelScope(shield=True):
            with trio.move_on_after(hurried):
                await process.wait()
            await _clear(process, family, patience)


async def _clear(process: trio.Process, family: Family, patience: Patience) -> None:
    for name, seconds in (("SIGTERM", patience.terminate), ("SIGKILL", patience.kill)):
        with trio.move_on_after(seconds):
            await _signal_until_gone(process, family, name)
            return
    _log.warning("process %d or a descendant of it survived SIGKILL", process.pid)


async def _signal_until_gone(process: trio.Process, family: Family, name: str) -> None:
    signalled: set[Kin] = set()
    if process.returncode is None:
        _log.debug("sending %s to process %d", name, process.pid)
        if name == "SIGKILL":
            process.kill()
        else:
            process.terminate()
    while True:
        kin = await _look(family)
        if sys.platform != "win32":
            fresh = [each for each in kin if each not in signalled]  # a fork may have overtaken the last look
            family.signal(fresh, signal.Signals[name])
            signalled.update(fresh)
        if process.returncode is not None and not kin:
            return
        await trio.sleep(_POLL)


async def _look(family: Family) -> list[Kin]:
    # A limiter of its own: the shared one may be full of the very calls that are being shut down.
    return await trio.to_thread.run_sync(family.look, limiter=trio.CapacityLimiter(1))
