"""A server: its name, its bounds and what it offers, and its runs."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Generic

from trimcp.channel import Sink
from trimcp.errors import LocalError
from trimcp.protocol.connection import Connection
from trimcp.protocol.profile import Profile, Role
from trimcp.protocol.request_state import Cipher, Sealer
from trimcp.server.offering import Confirm, Offering
from trimcp.server.running import Handler, Running
from trimcp.session.context import StateT
from trimcp.session.drive import Road
from trimcp.session.limits import Limits
from trimcp.session.outbox import Outbox
from trimcp.session.scopes import open_service_nursery
from trimcp.session.session import Session
from trimcp.wire.capabilities import ServerCapabilities
from trimcp.wire.common import CacheScope, Icon, Implementation
from trimcp.wire.fields import ABSENT
from trimcp.wire.revisions import REVISIONS, Revision

if TYPE_CHECKING:
    from trimcp.server.audit import Audit
    from trimcp.server.confirming import Fallback
    from trimcp.server.statistics import ServerStatistics

__all__ = ["Server"]


@asynccontextmanager
async def _no_lifespan(server: Server[Any]) -> AsyncIterator[Any]:
    yield None


def _check_loading() -> None:
    worker = sys.modules.get("trimcp.server.worker")
    if worker is not None and worker.loading:
        raise LocalError(
            "a worker process loads this module for one of its tools, and must not serve it: run the server under "
            'if __name__ == "__main__":'
        )


class Server(Offering, Generic[StateT]):
    """A server, to be filled with tools, resources and prompts and then served over any transport.

    Args:
        name: the program's name, for display.
        version: its version.
        title: a name for people, where it differs.
        instructions: advice to the model on how to use it.
        description, icons, website_url: more about the program, in revisions that carry it.
        lifespan: `async with lifespan(server) as state` surrounds every run; handlers find the state as `ctx.state`.
        dynamic: announce that lists may change (`listChanged`). Otherwise that is announced only once they did.
        page_size: entries to a page of a list; None puts all on one, which every client understands.
        list_ttl_ms, list_cache_scope: how long (milliseconds) and for whom clients may keep lists (2026-07-28).
        extensions: settings by extension identifier, declared as capabilities (2026-07-28).
        state_keys: secrets that sign `requestState`, newest first, shared by all workers; None makes one up, good for
            a single process.
        state_cipher: encrypts `requestState` too, so that clients cannot read it.
        max_threads: sync handlers that may run in threads at once.
        max_processes: worker processes for tools with `run="process"`, one call in each; None for one to a core.
        limits: every bound and grace period of a session.
        revisions: the revisions to speak.
        audit: where a record of each call goes; None keeps none.
        confirm: "destructive" asks the user before a tool runs whose annotations have `destructive_hint=True`; a tool's
            own `confirm=` comes before it.
        confirm_fallback: what becomes of such a call where the client cannot ask: "refuse" or "allow".
        handler_errors: "log" answers and logs a crash; "raise" (for tests) lets it end the session as well.

    Attributes:
        info: its name, version and so on, as clients are told.
        tools, resources, templates, prompts: what is offered, by name or address. Read them; methods change them.
        runs: the runs under way, each with its `sessions`.
        lifespan, dynamic, page_size, list_ttl_ms, list_cache_scope, extensions: as given.
        max_threads, max_processes, limits, audit, confirm, confirm_fallback, handler_errors: as given.

    What else has a public name is there for what serves it (`Running`, the logging bridge), and may change.
    """

    def __init__(
        self,
        name: str,
        version: str = "0",
        *,
        title: str | None = None,
        instructions: str | None = None,
        description: str | None = None,
        icons: Sequence[Icon] = (),
        website_url: str | None = None,
        lifespan: Callable[[Server[StateT]], AbstractAsyncContextManager[StateT]] = _no_lifespan,
        dynamic: bool = False,
        page_size: int | None = None,
        list_ttl_ms: int = 0,
        list_cache_scope: CacheScope = "public",
        extensions: Mapping[str, Mapping[str, Any]] | None = None,
        state_keys: Sequence[bytes] | None = None,
        state_cipher: Cipher | None = None,
        max_threads: int = 256,
        max_processes: int | None = None,
        limits: Limits | None = None,
        revisions: Sequence[Revision] = REVISIONS,
        audit: Audit | None = None,
        confirm: Confirm | None = None,
        confirm_fallback: Fallback = "refuse",
        handler_errors: str = "log",
    ) -> None:
        if handler_errors not in ("log", "raise"):
            raise ValueError(f"handler_errors is 'log' or 'raise', not {handler_errors!r}")
        if max_processes is not None and max_processes < 1:
            raise ValueError(f"max_processes is at least 1 or None, not {max_processes!r}")
        if confirm not in (None, "destructive"):
            raise ValueError(f"confirm is 'destructive' or None, not {confirm!r}")
        if confirm_fallback not in ("refuse", "allow"):
            raise ValueError(f"confirm_fallback is 'refuse' or 'allow', not {confirm_fallback!r}")
        self.info: Implementation = Implementation(
            name=name,
            version=version,
            title=title or ABSENT,
            description=description or ABSENT,
            icons=list(icons) or ABSENT,
            website_url=website_url or ABSENT,
        )
        profile = Profile(self.info, ServerCapabilities(), instructions, tuple(sorted(revisions)))
        super().__init__(profile, dynamic=dynamic, extensions=extensions or {})
        self.confirm: Confirm | None = confirm
        self.confirm_fallback: Fallback = confirm_fallback
        self.audit: Audit | None = audit
        self.lifespan = lifespan
        self.page_size = page_size
        self.list_ttl_ms = list_ttl_ms
        self.list_cache_scope = list_cache_scope
        self.max_threads = max_threads
        self.max_processes = max_processes
        self.limits: Limits = limits or Limits()
        self.handler_errors = handler_errors
        self.sealer: Sealer = Sealer(state_keys, cipher=state_cipher)
        self.runs: set[Running] = set()

    # Running

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Running]:
        """Enter the lifespan and open the server's nursery: `async with server.running() as running`.

        Several sessions may be served in one run. Leaving cancels work of `ctx.server`; sessions end before.
        """
        _check_loading()
        self._lifespans += 1
        try:
            async with self._entered() as state, open_service_nursery() as nursery:
                running = Running(self, state, nursery)
                self.runs.add(running)
                try:
                    yield running
                finally:
                    self.runs.discard(running)
        finally:
            self._lifespans -= 1

    @asynccontextmanager
    async def _entered(self) -> AsyncIterator[StateT]:
        """Enter the lifespan, within the time in which records can be written."""
        with nullcontext() if self.audit is None else self.audit.opened():
            async with self.lifespan(self) as state:
                yield state

    def dressed(self, name: str, handler: Handler) -> Handler:
        """Return the handler of a method with everything around it: middleware, filters, what the audit refuses."""
        handler = self.filtered(name, self.wrap(handler))
        audit = self.audit
        return audit.guarded(handler) if audit is not None and audit.required and name in audit.methods else handler

    def statistics(self) -> ServerStatistics:
        """Return a snapshot of what the server is busy with, what waits, what was refused and what gave way."""
        from trimcp.server.statistics import add_up  # a server that nobody asks does not load it

        return add_up(self.runs)

    def session(self, running: Running, *, sink: Sink | None = None, force_rerun: bool = False) -> Session:
        """Return a new session of this run, for a driver. `force_rerun` is for tests, see `Session`."""
        engine = Connection(Role.SERVER, self.profile, running.served, self.foreign)
        session = Session(
            engine,
            running,
            self.limits,
            Outbox.of(self.limits) if sink is None else sink,
            handler_errors=self.handler_errors,
            force_rerun=force_rerun,
            sealer=self.sealer,
        )
        if self.audit is not None:
            session.on_finished = self.audit.finished
        running.opened(session)
        return session

    async def serve(self, channel: Road) -> None:
        """Serve one connection in a run of its own until the peer leaves; then close the channel.

        Cancelling it stops every handler and closes the channel.
        """
        async with self.running() as running:
            await running.serve(channel)
