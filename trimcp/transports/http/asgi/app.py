"""The HTTP application as an ASGI 3 application: for Hypercorn on Trio, and for mounting in other applications.

The lifespan owns the nursery of the sessions; a call only moves bytes (`request`, `websocket`). An application serves
one process: several workers are separate processes, each with its own application. (ASGI specification 3.0.)
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from typing import Final, TypeAlias

import attrs
import trio

from trimcp.budget import Budget, owner_of
from trimcp.support.cleaning import log_crash
from trimcp.support.deadlines import Deadlines
from trimcp.transports.http.asgi.request import HttpCall, Receive, Scope, Send, plain, read_head
from trimcp.transports.http.asgi.websocket import WebSocketCall
from trimcp.transports.http.interfaces import Application, Head, HttpResponse
from trimcp.transports.http.settings import HttpLimits

_log = logging.getLogger("trimcp.http")

RunApplication: TypeAlias = Callable[[], AbstractAsyncContextManager[Application]]
"""Makes a context manager that yields an application and runs its tasks inside its block."""

_NOT_TRIO: Final = (
    "this ASGI application runs only on Trio: serve it with "
    "trimcp.transports.http.asgi.hypercorn.serve_hypercorn, or with `hypercorn --worker-class trio`"
)
_NO_LIFESPAN: Final = (
    "a request came before the lifespan of the ASGI application: let the server run it, or, where the application is "
    "mounted in another, write `async with app.lifespan():` in the lifespan of that"
)
_REASON: Final = 500  # characters of a failure that are sent to the server


@attrs.define(eq=False)
class AsgiApp:
    """An ASGI application around an application.

    Its lifespan enters and leaves `running`. Servers run the lifespan. A parent application that does not forward it to
    mounted applications must enter `lifespan` in its own lifespan. Until then every request is answered with 500.

    Args:
        running: makes the context manager that yields the application.
        root: the prefix under which it is mounted, for parents that do not set `root_path`.
        limits: bounds for the size and time of a request. The server bounds connections and heads.
    """

    running: RunApplication
    root: str = attrs.field(default="", kw_only=True)
    limits: HttpLimits = attrs.field(factory=HttpLimits, kw_only=True)
    _application: Application | None = attrs.field(init=False, default=None)
    _entered: bool = attrs.field(init=False, default=False)
    _warned: bool = attrs.field(init=False, default=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a call of an ASGI server.

        Raises RuntimeError: the server does not run on Trio.
        """
        kind = scope["type"]
        if kind == "lifespan":
            await self._lifespan(receive, send)
        elif not trio.lowlevel.in_trio_run():
            raise RuntimeError(_NOT_TRIO)
        elif kind in ("http", "websocket"):
            application, head = self._admit(scope)
            with closing(application.budget.holding(owner_of(None, head.peer))) as holding:
                head.holding = holding
                if kind == "http":
                    await self.serve_http(application, head, scope, receive, send)
                else:
                    await WebSocketCall(application, head, scope, receive, send, self.limits.stall_timeout).run()
        else:
            raise ValueError(f"an ASGI scope of type {kind!r} is none of ours")

    async def serve_http(
        self, application: Application, head: Head, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer one request, whose memory `head.holding` counts."""
        assert head.holding is not None
        await HttpCall(application, head, self.limits, head.holding, receive, send).run()

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[Application]:
        """Run the application inside the block, and yield it: for the lifespan of a parent application.

        Raises:
            RuntimeError: it runs already.
        """
        if self._entered:
            raise RuntimeError("the lifespan of this ASGI application was entered already")
        self._entered = True
        try:
            async with self.running() as application:
                self._application = application
                try:
                    yield application
                finally:
                    self._application = None
        finally:
            self._entered = False

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        if not trio.lowlevel.in_trio_run():
            await send({"type": "lifespan.startup.failed", "message": _NOT_TRIO})
            return
        stage = "startup"
        try:
            async with self.lifespan():
                await send({"type": "lifespan.startup.complete"})
                stage = "running"
                await receive()
                stage = "shutdown"
        except Exception as error:  # told to the server, as ASGI has it for a lifespan that fails
            if stage == "running":
                raise  # ASGI has no event for this: servers log the exception
            log_crash(_log, error, "the %s of the application failed", stage, level=logging.DEBUG)
            message = f"{type(error).__name__}: {error}"[:_REASON]
            await send({"type": f"lifespan.{stage}.failed", "message": message})
        else:
            await send({"type": "lifespan.shutdown.complete"})

    def _admit(self, scope: Scope) -> tuple[Application, Head]:
        head = read_head(scope, self.root)
        if self._application is None:
            if not self._warned:
                self._warned = True
                _log.error("%s", _NO_LIFESPAN)
            return _Refusing(plain(500, "the server is not running")), Head(scope.get("method", "GET"), "/")
        if isinstance(head, HttpResponse):
            return _Refusing(head), Head(scope.get("method", "GET"), "/")
        return self._application, head


@attrs.define(eq=False)
class _Refusing:
    """An application that gives every request the same response."""

    response: HttpResponse
    connections: int = 0
    deadlines: Deadlines = attrs.field(factory=Deadlines)
    budget: Budget = attrs.field(factory=Budget)

    async def admit(self, head: Head) -> HttpResponse:
        return self.response

    def done(self, head: Head, status: int, sent: int) -> None: ...
