"""What waits for the answer to a message that was sent: of a client, and of a call that is carried out elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import trio

from trimcp.session.scopes import cancellation_text


@attrs.define(eq=False, repr=False)
class PendingAnswer:
    """An answer that is still to come, from another task."""

    progressed: Callable[..., object] | None = None  # called with the progress of a call, or None
    value: Any = None  # the answer
    error: Exception | None = None  # why there is none
    resolved: trio.Event = attrs.field(factory=trio.Event)

    def resolve(self, value: Any = None, error: Exception | None = None) -> None:
        """Let who waits have the answer, or raise the error. Only the first counts."""
        if not self.resolved.is_set():
            self.value, self.error = value, error
            self.resolved.set()

    async def answer(self, cancel: Callable[[str], object] = lambda why: None) -> Any:
        """Wait for the answer. If that is cancelled before it has come, `cancel` is called with the reason."""
        try:
            await self.resolved.wait()
        except trio.Cancelled as cancelled:
            if not self.resolved.is_set():
                cancel(cancellation_text(cancelled))
            raise
        if self.error is not None:
            raise self.error
        return self.value
