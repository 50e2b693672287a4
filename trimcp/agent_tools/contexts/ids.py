"""The ids of contexts: which are valid, which the service gives out, and which have ended."""

from __future__ import annotations

import secrets
from typing import Final

import attrs

from trimcp.agent_tools.contexts.limits import ContextLimits
from trimcp.agent_tools.contexts.stores import ContextKey
from trimcp.agent_tools.messages.errors import MalformedMessage
from trimcp.transports.http.state.deadlines import DeadlineQueue, Deadlines

_MINTED: Final = "ctx_"
_RANDOM: Final = 16  # bytes of a minted id
_MINTED_LENGTH: Final = len(_MINTED) + 22  # as text
_LONGEST: Final = 256


def new_id() -> str:
    """Return an id that nobody can guess."""
    return _MINTED + secrets.token_urlsafe(_RANDOM)


def is_minted(id: str) -> bool:
    """Return whether an id has the form of those that the service gives out."""
    return len(id) == _MINTED_LENGTH and id.startswith(_MINTED)


def is_id(id: str) -> bool:
    """Return whether this can be an id."""
    return 0 < len(id) <= _LONGEST and id.isprintable()


def checked_id(id: str, *, new: bool = False) -> str:
    """Return an id that an agent chose.

    Raises:
        MalformedMessage: it is empty, too long, or has characters that cannot be printed; or it is for a `new` context
            and only the service gives out such ids.
    """
    if not is_id(id):
        raise MalformedMessage(f"a context's id is 1 to {_LONGEST} printable characters")
    if new and is_minted(id):
        raise MalformedMessage(f"ids that begin with {_MINTED} are given by the service")
    return id


@attrs.define(eq=False, repr=False)
class _EndedId:
    """The id of a context that has ended, and why it did."""

    ids: EndedIds
    key: ContextKey
    reason: str

    def timed_out(self) -> None:
        self.ids.forget(self.key)


class EndedIds:
    """The ids of contexts that have ended, and why, for the time and up to the number that the limits say."""

    def __init__(self, limits: ContextLimits, deadlines: Deadlines) -> None:
        self._limits = limits
        self._found: dict[ContextKey, _EndedId] = {}  # the oldest first
        self._queue = DeadlineQueue(deadlines, limits.gone)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, key: ContextKey, reason: str) -> None:
        """Remember an id, in place of the oldest if there are too many."""
        limits = self._limits
        if not limits.gone or not limits.max_gone:
            return
        self.forget(key)
        while len(self._found) >= limits.max_gone:
            self.forget(next(iter(self._found)))
        ended = self._found[key] = _EndedId(self, key, reason)
        self._queue.add(ended)

    def forget(self, key: ContextKey) -> None:
        """Forget an id; no effect if it is not known."""
        ended = self._found.pop(key, None)
        if ended is not None:
            self._queue.remove(ended)

    def why(self, key: ContextKey) -> str | None:
        """Return why a context has ended, or None if its id is not known."""
        ended = self._found.get(key)
        return None if ended is None else ended.reason

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()
