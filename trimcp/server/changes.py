"""Change notices: a bus from whoever changes something to whoever listens. Publishing is synchronous and conflated.

A list change is a flag and an updated resource a member of a set, so a slow listener costs no more than what it
watches. `subscriptions/listen` and the legacy notifications are two kinds of listener on the same bus.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import attrs

from trimcp.session.queues import Changes

__all__ = ["Bus", "Change", "ChangeListener", "Watch"]


class Change(Enum):
    """What may change about a server as a whole."""

    TOOLS = "tools"
    PROMPTS = "prompts"
    RESOURCES = "resources"

    @property
    def notification(self) -> str:
        """The notification that tells of it."""
        return f"notifications/{self.value}/list_changed"


class ChangeListener(Protocol):
    """What is told of changes. The publisher calls it, so it must not block."""

    def changed(self, change: Change) -> None: ...
    def updated(self, uri: str) -> None: ...


@attrs.define(eq=False, repr=False)
class Bus:
    """Tells every listener of every change."""

    _listeners: dict[ChangeListener, None] = attrs.field(factory=dict)

    def attach(self, listener: ChangeListener) -> None:
        self._listeners[listener] = None

    def detach(self, listener: ChangeListener) -> None:
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
    """A listener that keeps what it watches, lists (`changes`) and resources (`uris`), until a task receives it.

    `noted` is what was told and not received yet: lists, and URIs of resources.
    """

    changes: frozenset[Change]
    uris: frozenset[str]
    noted: Changes[Change | str] = attrs.field(init=False, factory=Changes)

    def changed(self, change: Change) -> None:
        if change in self.changes:
            self.noted.add(change)

    def updated(self, uri: str) -> None:
        if uri in self.uris:
            self.noted.add(uri)
