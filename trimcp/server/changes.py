"""Change notices: a bus from whoever changes something to whoever listens. Publishing is synchronous and conflated.

A list change is a flag and an updated resource a member of a set, so a slow listener costs no more than what it
watches. `subscriptions/listen` and the legacy notifications are two kinds of listener on the same bus.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import attrs
import trio

__all__ = ["Bus", "Change", "Listener", "Watch"]


class Change(Enum):
    """What may change about a server as a whole."""

    TOOLS = "tools"
    PROMPTS = "prompts"
    RESOURCES = "resources"

    @property
    def notification(self) -> str:
        """The notification that tells of it."""
        return f"notifications/{self.value}/list_changed"


class Listener(Protocol):
    """Whoever wants to know. Called by the publisher, so it must not wait."""

    def changed(self, change: Change) -> None: ...
    def updated(self, uri: str) -> None: ...


@attrs.define(eq=False, repr=False)
class Bus:
    """Tells every listener of every change."""

    _listeners: dict[Listener, None] = attrs.field(factory=dict)

    def attach(self, listener: Listener) -> None:
        """Tell this listener from now on."""
        self._listeners[listener] = None

    def detach(self, listener: Listener) -> None:
        """Tell this listener no more."""
        self._listeners.pop(listener, None)

    def changed(self, change: Change) -> None:
        """Publish that a list changed."""
        for listener in list(self._listeners):
            listener.changed(change)

    def updated(self, uri: str) -> None:
        """Publish that a resource's contents changed."""
        for listener in list(self._listeners):
            listener.updated(uri)


@attrs.define(eq=False, repr=False)
class Watch:
    """A listener that a task waits on: it collects what it watches until somebody takes it.

    Args:
        changes: the lists it watches.
        uris: the resources it watches.
    """

    changes: frozenset[Change]
    uris: frozenset[str]
    _changed: dict[Change, None] = attrs.field(init=False, factory=dict)
    _updated: dict[str, None] = attrs.field(init=False, factory=dict)
    _waiting: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)

    def changed(self, change: Change) -> None:
        """Note a list change, if it is watched."""
        if change in self.changes:
            self._changed[change] = None
            self._waiting.unpark_all()

    def updated(self, uri: str) -> None:
        """Note an updated resource, if it is watched."""
        if uri in self.uris:
            self._updated[uri] = None
            self._waiting.unpark_all()

    async def take(self) -> tuple[list[Change], list[str]]:
        """Wait for something and return everything noted since the last time, in order and without repetition."""
        while not self._changed and not self._updated:
            await self._waiting.park()
        changed, updated = list(self._changed), list(self._updated)
        self._changed.clear()
        self._updated.clear()
        return changed, updated
