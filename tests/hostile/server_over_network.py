"""The server under attack over the network, run as a program; its argument is JSON, see `main`.

It writes its URL to standard output and serves until its standard input ends. What it has to complain about goes to
standard error: level and logger first, so that a test can tell that nobody complained.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

import trimcp
import trimcp.net
from tests.hostile.server_for_attack import give_back, make_server
from trimcp.store.events import MemoryEvents
from trimcp.transports.http.endpoint.application import HttpApplication
from trimcp.transports.http.interfaces import Head, HttpResponse
from trimcp.transports.http.peers.origins import Origins
from trimcp.transports.http.settings import HttpLimits, HttpSettings

_faces: list[HttpApplication] = []


class NotedFace(HttpApplication):
    """A face whose inside can be looked into."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _faces.append(self)


async def statistics(count_more: Callable[[], dict[str, int]], head: Head) -> HttpResponse:
    """Count what a server at rest has none of, and, if asked for, the objects that are left after a collection."""
    gc.collect()
    if head.query == "objects":
        return HttpResponse(200, (("Content-Type", "application/json"),), b"[%d]" % len(gc.get_objects()))
    if head.query == "kept":
        give_back()
    [face] = _faces
    counts = {
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "files": len(os.listdir("/proc/self/fd")),
        "exchanges": face.shared.exchanges,
        "sessions": len(face.shared.sessions),
        "streams": len(face.sse2024.streams),
        "held": face.budget.held // 65_536,  # a session takes a little of it
        "running": sum(session.statistics().running for session in face.service.sessions),
        **contexts_of(face),
        **count_more(),
    }
    return HttpResponse(200, (("Content-Type", "application/json"),), json.dumps(counts).encode())


def contexts_of(face: HttpApplication) -> dict[str, int]:
    """Count what agents have with a server at rest: nothing."""
    second_protocol: Any = face.shared.second_protocol
    if second_protocol is None:
        return {}
    counts = second_protocol.run.contexts.statistics()
    return {"contexts": counts.contexts, "watchers": counts.watchers, "ending": counts.ending}


def make_agent_tools(
    server: trimcp.Server[Any],
    registration: dict[str, Any] | None = None,
    contexts: dict[str, Any] | None = None,
    store: str | None = None,
    slow: float | None = None,
    **options: Any,
) -> Any:
    from trimcp.agent_tools import AgentTools, ContextLimits, RegistrationRules, SqliteContexts

    rules = RegistrationRules(anonymous_on_loopback=True, **(registration or {}))
    implementations = {"weather": lambda city: {"city": city}}
    limits = ContextLimits(**(contexts or {}))
    kept = None if store is None else SqliteContexts(store)
    if slow is not None:
        from tests.hostile.slow_store import SlowContexts

        kept = SlowContexts(slow)
    return AgentTools(
        server,
        implementations=implementations,
        registration=rules,
        contexts=limits,
        store=kept,
        anonymous="loopback",
        **options,
    )


async def main(
    make: Callable[..., trimcp.Server[Any]] = make_server,
    count_more: Callable[[], dict[str, int]] = dict,
    *,
    software: str = "own",
    alone: bool = False,
    tokens: dict[str, str] | None = None,
    limits: dict[str, Any] | None = None,
    events: dict[str, int] | None = None,
    origins: dict[str, list[str]] | None = None,
    server: dict[str, Any] | None = None,
    agent_tools: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    """Serve.

    Args:
        make: makes the server.
        count_more: returns what `/statistics` tells besides.
        software: what listens; "grpc" is Hypercorn with gRPC on the same port.
        alone: over WebSocket alone.
        tokens: principals by bearer token.
        limits: an `HttpLimits`.
        events: a `MemoryEvents`.
        origins: an `Origins`.
        server: options of the `Server`.
        agent_tools: serve agent tools too; options of `RegistrationRules` and `ContextLimits` in it, and a store: the
            path of a file, or `slow`, the seconds that each write takes.
        settings: the rest of `Settings`.
    """
    trimcp.net.HttpApplication = NotedFace
    served = make(**(server or {}))
    chosen = HttpSettings(
        agent_tools=None if agent_tools is None else make_agent_tools(served, **agent_tools),
        routes={"/statistics": partial(statistics, count_more)},
        authenticate=None if tokens is None else trimcp.bearer_tokens(tokens),
        events=None if events is None else MemoryEvents(**events),
        origins=Origins(**(origins or {})),
        **settings,
    )
    stop = trio.Event()
    how: dict[str, Any] = {"software": software, "limits": HttpLimits(**(limits or {})), "stop": stop, "grace": 1.0}
    serve = trimcp.serve_websocket if alone else trimcp.serve_http
    if software == "grpc":
        how.update(software="own")
    async with trio.open_nursery() as nursery:

        async def listen(task_status: trio.TaskStatus[list[str]]) -> None:
            await serve(served, port=0, settings=chosen, task_status=task_status, **how)

        urls = await nursery.start(listen)
        print(urls[0], flush=True)
        async with trio.lowlevel.FdStream(os.dup(0)) as commands:
            while await commands.receive_some():
                pass
        stop.set()


def is_complaint(record: logging.LogRecord) -> bool:
    """Whether a record is more than is to be logged of the tool that crashes, of attacks as such, and of a rule."""
    if record.name == "trimcp.security" or "anonymous_on_loopback" in record.getMessage():
        return False
    return record.exc_info is None or "secret of the handler" not in str(record.exc_info[1])


def log_complaints() -> None:
    """Log to standard error what is a complaint."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger().handlers[0].addFilter(is_complaint)


if __name__ == "__main__":
    log_complaints()
    trio.run(lambda: main(**json.loads(sys.argv[1])))
