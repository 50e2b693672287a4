"""The task that a call of a tool runs as, for its handler: `ctx.task`."""

from __future__ import annotations

from typing import Any

import trio

from trimcp.wire.jsonrpc import JSON, encode


class CallTask:
    """The task of a call. A call that is none has one too, without id, so that one handler serves both.

    Attributes:
        id: its id; None if the call is no task. Who knows it may be able to read the result.
        saved: the value of the last checkpoint, if the handler begins again after a restart of the server; else None.
    """

    id: str | None = None
    saved: Any = None

    async def checkpoint(self, value: JSON) -> None:
        """Save how far the handler is; returns when the value would be found again. It replaces the last one.

        Args:
            value: any JSON value, at most 1 MiB of it.

        Raises:
            LocalError: JSON cannot carry the value, or it is too large.
        """
        encode(value)
        await trio.lowlevel.checkpoint()
