"""What the servers made with other people's Python SDKs have in common. It runs in their environments, not in ours."""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import count
from typing import Any

import uvicorn


def serve(app: Any) -> None:
    """Serve an ASGI application on a free port of this machine, and print where."""
    serve_at(lambda base: app)


def serve_at(make_app: Callable[[str], Any]) -> None:
    """Serve an ASGI application that is made for its address, on a free port of this machine, and print it."""
    listener = socket.create_server(("127.0.0.1", 0))
    base = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = make_app(base)
    print(base, flush=True)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listener])


class Events:
    """An event store of the official SDK, as simple as it can be. Subclass it and the SDK's own."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._events: list[tuple[str, str, Any]] = []

    async def store_event(self, stream_id: str, message: Any) -> str:
        event_id = str(next(self._numbers))
        self._events.append((event_id, stream_id, message))
        return event_id

    async def replay(self, last_event_id: str, send: Callable[[str, Any], Any]) -> str | None:
        """Send what came later on the same stream."""
        stream_of = {event_id: stream_id for event_id, stream_id, _ in self._events}
        if last_event_id not in stream_of:
            return None
        for event_id, stream_id, message in self._events:
            if stream_id == stream_of[last_event_id] and int(event_id) > int(last_event_id) and message is not None:
                await send(event_id, message)
        return stream_of[last_event_id]
