"""What a session serves: a server's registries, or a client's handlers."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any, Protocol

from trimcp.errors import ConnectionLost
from trimcp.protocol.events import Notified
from trimcp.session.job import Job

if TYPE_CHECKING:
    from trimcp.session.session import Session

__all__ = ["Endpoint", "Watcher"]


class Endpoint(Protocol):
    """What a session serves: a server's registries, or a client's handlers."""

    @property
    def served(self) -> Container[str]:
        """The names of the request methods that have a handler."""
        ...

    async def handle(self, session: Session, job: Job) -> Any:
        """Work on one request and return its result payload; cancelled when the request is."""

    def notified(self, session: Session, event: Notified) -> None:
        """Take note of a notification. Synchronous and quick: the reader calls it."""

    def closed(self, session: Session) -> None:
        """Forget the session: it has ended."""


class Watcher(Protocol):
    """Whoever wants to know that the peer is gone although no call of theirs is pending."""

    def lost(self, error: ConnectionLost) -> None:
        """Note that the peer is gone. Synchronous and quick."""
