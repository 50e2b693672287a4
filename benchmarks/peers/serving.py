"""What the peers written in Python share: words of the command line, variables, uvicorn.

Nothing here may be imported at a price that a server without it would not pay: a cold start is measured, too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["BODIES", "CHANGES", "COUNTED", "TOOLS", "counts", "option", "serve"]

TOOLS = int(os.environ.get("BENCH_TOOLS", "0"))
"""How many tools that do nothing are offered beside the others."""

BODIES = int(os.environ["BENCH_MAX_MESSAGE"]) if "BENCH_MAX_MESSAGE" in os.environ else None
"""Bytes that one message may have, or None for what is usual."""

COUNTED = "BENCH_COUNTS" in os.environ
"""Whether there is a tool `counts`, which tells what the process holds."""

CHANGES = "BENCH_CHANGES" in os.environ
"""Whether there is a tool `change`, after which the subscribers of the resource are told that it did."""


def option(name: str, default: str) -> str:
    """Return what follows a word of the command line."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def serve(app: Any, path: str) -> None:
    """Serve an ASGI application on a port of the system's choice, and say where.

    On uvicorn, with which all these SDKs serve, with uvloop and httptools, which it recommends where speed counts.
    """
    import socket

    import uvicorn

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        scheme = "ws" if path == "/ws" else "http"
        print(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}{path}", flush=True)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            # A client of ours may be idle between two measurements for longer than the usual five seconds.
            timeout_keep_alive=75,
            timeout_graceful_shutdown=2,
            **({"ws_max_size": BODIES} if BODIES else {}),
        )
        uvicorn.Server(config).run(sockets=[listener])


async def counts() -> str:
    """Return how many blocks of memory, objects and tasks there are, after a collection of garbage."""
    import asyncio
    import gc

    gc.collect()
    return f"{sys.getallocatedblocks()} {len(gc.get_objects())} {len(asyncio.all_tasks())}"
