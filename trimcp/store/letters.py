"""Letters between processes that share a store: each has a kind, what it says as JSON, and bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, Final, TypeAlias

import attrs
import trio

from trimcp.store.shared import Letter, SharedStore
from trimcp.store.writing import WriteQueue
from trimcp.support.cleaning import log_crash
from trimcp.wire.jsonrpc import JSON, encode, parse_value

log: logging.Logger = logging.getLogger("trimcp.http")

_MOST_HEARD: Final = 1_000  # processes whose letters are told apart
_PAUSE: Final = 0.5  # seconds before a store that failed is asked again

ReadLetter: TypeAlias = Callable[[str, Mapping[str, Any], bytes], object]
"""Called with the sender of a letter, what it says, and its bytes. It must not wait; what it raises is logged."""


@attrs.define(eq=False)
class PostBox:
    """Sends the letters of one process, and reads those to it.

    Args:
        queue: writes letters, behind what was put there before.

    Attributes:
        readers: what reads the letters of each kind.
        on_lost: called with the name of each process that is gone.
    """

    queue: WriteQueue
    readers: dict[str, ReadLetter] = attrs.field(init=False, factory=dict)
    on_lost: list[Callable[[str], object]] = attrs.field(init=False, factory=list)
    _numbers: count[int] = attrs.field(init=False, factory=lambda: count(1))
    _heard: dict[str, int] = attrs.field(init=False, factory=dict)  # the number of the last letter, by process

    @property
    def store(self) -> SharedStore:
        """The store in which they are."""
        return self.queue.store

    @property
    def has_come(self) -> bool:
        """Whether another process has sent a letter."""
        return bool(self._heard)

    def say(self, to: str | None, kind: str, data: bytes = b"", **said: JSON) -> Letter | None:
        """Send a letter to a process, or to all others (None), and return it; None if too many wait."""
        # With a number, larger than that of each one before it: it may come twice.
        head = {"kind": kind, "from": self.queue.store.name, "letter": next(self._numbers), **said}
        letter = Letter(to, b"\n".join((encode(head), data)))
        return letter if self.queue.put(letter) else None

    async def run(self) -> None:
        """Read letters until cancelled."""
        while True:
            try:
                await self._read_some()
            except OSError as error:
                log.warning("letters of other processes were not read: %s", error)
                await trio.sleep(_PAUSE)

    async def retire(self) -> None:
        """Read all letters that come before this process takes none any more, and write what they lead to.

        Raises OSError: the store cannot be reached.
        """
        await self.queue.flush()
        while not await self.queue.store.retire():
            await self._read_some()
            await self.queue.flush()

    async def _read_some(self) -> None:
        for letter in await self.queue.store.receive():
            beginning, _, data = letter.partition(b"\n")
            try:
                self._read(parse_value(beginning), data)
            except Exception as error:
                log_crash(log, error, "a letter of another process cannot be read")

    def _read(self, said: Any, data: bytes) -> None:
        sender, number = str(said["from"]), int(said["letter"])
        if number <= self._heard.get(sender, 0):
            return
        self._heard[sender] = number
        if len(self._heard) > _MOST_HEARD:
            del self._heard[next(iter(self._heard))]
        self.readers[said["kind"]](sender, said, data)
