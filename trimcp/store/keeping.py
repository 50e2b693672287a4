"""What a server does, so that processes share its sessions and what it counts: the interfaces, without its classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from trimcp.store.shared import SharedStore
from trimcp.wire.jsonrpc import JSON


class SessionKeeper(Protocol):
    """Writes down what a server knows of its legacy sessions, for other processes, and restores them."""

    def state_of(self, pushed: Any, /) -> dict[str, JSON]:
        """Return the state of a session after its handshake, as JSON."""
        ...

    def restore(self, pushed: Any, state: Mapping[str, Any], fence: int, /) -> Callable[[], object]:
        """Give a new session this state; return what tells it of changes it may have missed. Raises if it is none."""
        ...

    def listening(self, listener: Callable[[str, bool], object], /) -> AbstractContextManager[None]:
        """Call `listener` with each change here while the block runs: the list or the resource's URI, and if a list."""
        ...

    def publish(self, changed: str, is_list: bool, /) -> None:
        """Tell clients of a change that another process has told. Raises ValueError: there is no such list."""

    @property
    def lacks_state_key(self) -> bool:
        """Whether `requestState` is signed with a key that only this process knows."""
        ...

    def use_state_key(self, key: bytes, /) -> None:
        """Sign `requestState` with a key that other processes know, too."""

    def share_turns(self, store: SharedStore, tell: Callable[[str, str], object], /) -> SharedCounts:
        """Count turns under quotas in a store. `tell`: tells another process that the time of a turn has come."""
        ...


class SharedCounts(Protocol):
    """Asks a store for the turns of this process."""

    async def run(self) -> None:
        """Ask until cancelled."""

    async def flush(self) -> None:
        """Give back what is still to be given back."""

    def come(self, id: str, /) -> None:
        """Note that the time of a turn has come."""
