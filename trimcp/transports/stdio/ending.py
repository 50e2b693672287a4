"""The end of a child process and all its descendants, in steps and within a bounded time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import attrs
import trio

from trimcp.support.bounds import checked
from trimcp.support.descendants import Descendants, look, signal_until_gone
from trimcp.support.slotted import valued

_HURRIED: Final = 0.5

_log = logging.getLogger("trimcp.stdio")


@attrs.frozen(field_transformer=checked(zero=("close", "terminate", "kill")))
@valued
class ShutdownTimes:
    """Seconds a child gets for each step of its shutdown; the defaults add up to less than five."""

    close: float = 2.0  # to exit by itself after its standard input was closed
    terminate: float = 1.5  # to exit, with its descendants, after SIGTERM
    kill: float = 0.5  # for the system to remove the processes after SIGKILL


async def end_process(
    process: trio.Process, descendants: Descendants, close_input: Callable[[], None], times: ShutdownTimes
) -> None:
    """End a child and its descendants: close its input, wait, SIGTERM, wait, SIGKILL.

    The steps are those of the specification's "Shutdown". Returns when all have exited, or when `times` are over, which
    is logged. Only processes identified as descendants are signalled. Cancelling shortens the first wait to half a
    second. The rest is shielded, since no process may outlive its connection, and bounded by `times`.

    `process`: the child. It may have exited already; its descendants are ended all the same.
    """
    with trio.CancelScope(shield=True):
        await look(descendants)  # before the child exits: orphans lose their parent id
    close_input()
    hurried = min(_HURRIED, times.close)
    try:
        with trio.move_on_after(times.close):
            await process.wait()
        hurried = 0
    finally:
        with trio.CancelScope(shield=True):
            with trio.move_on_after(hurried):
                await process.wait()
            await _clear(process, descendants, times)


async def _clear(process: trio.Process, descendants: Descendants, times: ShutdownTimes) -> None:
    for name, seconds in (("SIGTERM", times.terminate), ("SIGKILL", times.kill)):
        with trio.move_on_after(seconds):
            await signal_until_gone(process, descendants, name)
            return
    _log.warning("process %d or a descendant of it survived SIGKILL", process.pid)
