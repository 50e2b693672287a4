"""A server: its settings, its tools, resources and prompts, and its runs."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Generic

from trimcp.budget import DEFAULT_MEMORY, Budget
from trimcp.channel import require_trio
from trimcp.errors import LocalError
from trimcp.protocol.events import Admission
from trimcp.protocol.profile import Profile, Role
from trimcp.protocol.request_state import Cipher, Sealer
from trimcp.server.extensions.extending import Extending
from trimcp.server.offering import Confirm, HandlerErrors, Offers
from trimcp.server.options import check_cache_scope, check_scopes
from trimcp.server.running import Running
from trimcp.session.context import StateT
from trimcp.session.drive import AnyChannel, direct_ends
from trimcp.session.incoming.job import Finished
from trimcp.session.limits import Limits, limits_of
from trimcp.session.session import Session
from trimcp.support.bounds import check_callable, check_number, check_truth
from trimcp.support.nurseries import open_service_nursery
from trimcp.wire.capabilities import ServerCapabilities
from trimcp.wire.common import CacheScope, Icon, Implementation
from trimcp.wire.given import given_implementation, given_text
from trimcp.wire.revisions import REVISIONS, Revision

if TYPE_CHECKING:
    from trimcp.guard.audit import Audit
    from trimcp.guard.permission import Fallback
    from trimcp.server.mounting import Mounts
    from trimcp.session.facts import Beside
    from trimcp.watch.observing import Observation
    from trimcp.watch.statistics import ServerStatistics

_MESSAGES: Final = 4  # the least memory, in messages of the largest size


@asynccontextmanager
async def _no_lifespan(server: Server[Any]) -> AsyncIterator[Any]:
    yield None


class Server(Extending, Generic[StateT]):
    """An MCP server: add tools, resources and prompts, then serve it over any transport.

    It has more than 300 lines because its settings are documented here, and each way to compose and watch it.

    Args:
        name: the program's name, for display.
        version: its version.
        title: a display name, if different.
        instructions: advice to the model on how to use the server.
        description, icons, website_url: more about the program, in revisions that have these members. An icon is an
            `Icon` or a dict such as `{"src": "https://example.com/icon.png"}`.
        lifespan: `async with lifespan(server) as state` surrounds every run; handlers get the state as `ctx.state`.
        offers: which of tools, resources and prompts it declares and lists, also while it has none of them. One with
            tools alone says so with `offers=["tools"]`; then no client asks for the other lists.
        dynamic: declare `listChanged` from the start. Otherwise it is declared only once a list has changed.
        page_size: entries per page of a list; None puts all on one, which every client understands.
        list_ttl_ms, list_cache_scope: how long (milliseconds) and for whom clients may keep lists (2026-07-28).
        extensions: settings by extension identifier, declared as capabilities (since 2025-06-18).
        state_keys: secrets that sign `requestState`, newest first, shared by all workers; None generates one, which
            works for a single process.
        state_cipher: also encrypts `requestState`, so that clients cannot read it.
        max_threads: sync handlers that may run in threads at once.
        max_processes: worker processes for tools with `run="process"`, one call in each; None for one per core.
        limits: the bounds and grace periods of a session.
        memory: the most bytes that all peers together can make the server keep, over all sessions, transports and runs:
            messages being read, requests that wait or run, results not yet read, events kept for clients that
            reconnect, handshakes. At least four times the largest message; by default that or 256 MiB.
        revisions: the revisions to speak, or their names.
        audit: receives a record of each call; None keeps none.
        confirm: "destructive" asks the user before a tool runs whose annotations have `destructive_hint=True`; a tool's
            own `confirm=` has precedence.
        confirm_fallback: how such a call is treated if the client cannot ask: "refuse" or "allow".
        handler_errors: "log" answers with an error and logs the crash; "tell" also sends the text of a tool's crash to
            the model, with recognised secrets masked; "raise" (for tests) also ends the session.

    Attributes:
        info: its name, version and so on, as sent to clients.
        tools, resources, templates, prompts: the entries, by name or URI. Read only; methods change them.
        runs: the runs under way, each with its `sessions`.
        mounts: the servers that are mounted in it, or None.
        mounted: whether it is mounted in another.
        parts: called with each run; what they return is entered before anybody is served, and left after the last.
        lifespan, offers, dynamic, page_size, list_ttl_ms, list_cache_scope, extensions: as given.
        max_threads, max_processes, limits, audit, confirm, confirm_fallback, handler_errors: as given.

    Other public names are for `Running` and the logging bridge, and may change.
    """

    def __init__(
        self,
        name: str,
        version: str = "0",
        *,
        title: str | None = None,
        instructions: str | None = None,
        description: str | None = None,
        icons: Iterable[Icon | Mapping[str, Any]] = (),
        website_url: str | None = None,
        lifespan: Callable[[Server[StateT]], AbstractAsyncContextManager[StateT]] = _no_lifespan,
        offers: Iterable[Offers] = ("tools", "resources", "prompts"),
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
        memory: int | None = None,
        revisions: Iterable[Revision | str] = REVISIONS,
        audit: Audit | None = None,
        confirm: Confirm | None = None,
        confirm_fallback: Fallback = "refuse",
        handler_errors: HandlerErrors = "log",
    ) -> None:
        self.mounts: Mounts | None = None
        if handler_errors not in ("log", "tell", "raise"):
            raise ValueError(f"handler_errors is 'log', 'tell' or 'raise', not {handler_errors!r}")
        check_truth("dynamic", dynamic)
        check_callable("lifespan", lifespan)
        if audit is not None and not hasattr(audit, "opened"):
            raise TypeError(f"audit is a trimcp.guard.Audit(...), not {audit!r:.60}")
        check_cache_scope("list_cache_scope", list_cache_scope)
        check_number("page_size", page_size, whole=True, optional=True)
        check_number("list_ttl_ms", list_ttl_ms, whole=True, zero=True)
        check_number("max_threads", max_threads, whole=True)
        check_number("max_processes", max_processes, whole=True, optional=True)
        if confirm not in (None, "destructive"):
            raise ValueError(f"confirm is 'destructive' or None, not {confirm!r}")
        if confirm_fallback not in ("refuse", "allow"):
            raise ValueError(f"confirm_fallback is 'refuse' or 'allow', not {confirm_fallback!r}")
        self.limits: Limits = limits_of(limits)
        needed = _MESSAGES * self.limits.largest_into(Role.SERVER)
        if memory is not None and (type(memory) is not int or memory < needed):
            text = f"memory is a number of bytes, at least four times the largest message ({needed}), not {memory!r}"
            raise ValueError(text)
        texts = {"title": title, "description": description, "website_url": website_url}
        self.info: Implementation = given_implementation(name, version, icons, **texts)
        advice = given_text("instructions", instructions)
        most = self.limits.max_client_info
        profile = Profile(self.info, ServerCapabilities(), advice or None, revisions, max_peer_info=most)
        super().__init__(profile, dynamic=dynamic, extensions=extensions or {}, offers=offers)
        self.confirm: Confirm | None = confirm
        self.confirm_fallback: Fallback = confirm_fallback
        self.audit = audit
        self.lifespan = lifespan
        self.page_size = page_size
        self.list_ttl_ms = list_ttl_ms
        self.list_cache_scope: CacheScope = list_cache_scope
        self.max_threads = max_threads
        self.max_processes = max_processes
        self.runs: set[Running] = set()
        self.on_finished: list[Finished] = [] if audit is None else [audit.finished]
        self.budget: Budget = Budget(max(DEFAULT_MEMORY, needed) if memory is None else memory)
        self.handler_errors: HandlerErrors = handler_errors
        self.sealer: Sealer = Sealer(state_keys, cipher=state_cipher)
        self.beside: list[Callable[[], Iterable[Beside]]] = []
        self.parts: list[Callable[[Running], AbstractAsyncContextManager[object]]] = []
        self.outer_parts: list[Callable[[Running], AbstractAsyncContextManager[object]]] = []
        self.mounted: bool = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Running]:
        """Enter the lifespan and open the server's nursery: `async with server.running() as running`.

        Several sessions may be served in one run. End them before leaving, which cancels the tasks of `ctx.server`.
        """
        require_trio()
        worker = sys.modules.get("trimcp.worker_program.serve")
        if worker is not None and worker.loading:
            raise LocalError(
                "a worker process loads this module for one of its tools, and must not serve it: run the server under "
                'if __name__ == "__main__":'
            )
        self._lifespans += 1
        try:
            with nullcontext() if self.audit is None else self.audit.opened():  # also while the lifespan ends
                async with self.lifespan(self) as state, open_service_nursery() as nursery:
                    running = Running(self, state, nursery)
                    self.runs.add(running)
                    try:
                        async with AsyncExitStack() as stack:
                            if self.needs.shared:
                                from trimcp.server.handlers.provided import while_running  # few servers need it

                                await stack.enter_async_context(while_running(running))
                            for part in (*self.parts, *self.outer_parts):
                                await stack.enter_async_context(part(running))
                            yield running
                    finally:
                        self.runs.discard(running)
        finally:
            self._lifespans -= 1

    @contextmanager
    def override(self, provider: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
        """Have `replacement()` provide what `provider` does (see `Depends`) while the block runs, as tests want it.

        The replacement takes nothing; it may be async and may yield, as any provider. What belongs to the server is
        entered when that starts, so override it before.

        Raises TypeError: it takes something.
        """
        from trimcp.server.handlers.needs import replacement_of

        overrides = self.needs.overrides
        before = overrides.get(provider)
        overrides[provider] = replacement_of(replacement)
        try:
            yield
        finally:
            if before is None:
                del overrides[provider]
            else:
                overrides[provider] = before

    def include(self, other: Server[Any]) -> None:
        """Offer what another server offers, too: a large program has one in each of its modules, and serves one.

        That is its tools, resources, prompts, completions, methods of extensions and notification handlers, as they are
        now. They are called in runs of this server: with its state, its limits and inside its middleware.

        Raises:
            LocalError: both have something of one name, or the other has what only a server that is served uses: a
                lifespan, middleware, filters or another `confirm`. Then nothing is included.
        """
        from trimcp.server.including import include  # few servers need it

        if not isinstance(other, Server):
            raise TypeError(f"include takes a trimcp.Server, not {other!r:.60}")
        own: dict[str, object] = {"a lifespan": other.lifespan is not _no_lifespan, "middleware": other.middlewares}
        own = {**own, "filters": other._filters, "a search for tools": other.outer_parts}
        include(self, other, live=self._live, own=own)

    def mount(
        self,
        other: Server[Any],
        *,
        prefix: str,
        scopes: Iterable[str] = (),
        visible: Callable[[Admission], bool] | None = None,
    ) -> None:
        """Offer what another server offers, with a prefix: its tool `distance` is `maps__distance` with "maps".

        Unlike an included one, it keeps everything of its own: it runs beside this server, with its lifespan and state,
        its middleware, filters, limits and quotas, and what it changes while it runs changes here. It may be a
        `trimcp.proxy`. Addresses of resources stay as they are, unless two servers have the same one.

        Args:
            other: the server.
            prefix: letters, digits, - and single _; it comes before the names of its tools and prompts.
            scopes: the scopes that a token needs to see any of it.
            visible: returns whether it exists for the sender of a request, such as by `admission.principal`.

        Raises:
            TypeError: it is no server.
            LocalError: the prefix is taken or not valid, this server runs, or the other has tools that run as tasks.
        """
        from trimcp.server.mounting import Mounted, Mounts  # few servers need it

        if not isinstance(other, Server):
            raise TypeError(f"mount takes a trimcp.Server, not {other!r:.60}; make one of a target with trimcp.proxy")
        if self._live:
            raise LocalError("a server cannot be mounted while this one runs")
        if visible is not None:
            check_callable("visible", visible)
        if self.mounts is None:
            self.mounts = Mounts(self)
            self.parts.append(self.mounts.while_running)
        self.mounts.add(Mounted(prefix, other, frozenset(check_scopes("scopes", scopes)), visible))

    @property
    def completes(self) -> bool:
        """Whether there are suggestions for arguments, here or in a mounted server."""
        mounts = self.mounts
        return super().completes or (mounts is not None and any(each.server.completes for each in mounts))

    @property
    def has_tasks(self) -> bool:
        """Whether calls of any of its tools may become tasks."""
        return self._tasks is not None

    def statistics(self) -> ServerStatistics:
        """Return a snapshot of the requests that run, wait or were refused, dropped messages, and memory."""
        from trimcp.watch.statistics import ServerStatistics  # loaded on first use

        return sum((running.statistics() for running in self.runs), ServerStatistics())

    @contextmanager
    def observe(self, interval: float = 0.25) -> Iterator[Observation]:
        """Look at what runs while the block runs: `with server.observe() as pictures: async for picture in pictures`.

        Nothing is done for it while nobody looks. The last 100 requests that end from then on are shown, too.

        Args:
            interval: the least seconds between two pictures.

        Raises:
            ValueError: the interval is not positive.
        """
        from trimcp.watch.observing import Observation  # loaded on first use

        with Observation(self, interval) as observation:
            yield observation

    @contextmanager
    def telling_finished(self, hook: Finished) -> Iterator[None]:
        """Tell `hook` of each request that ends while the block runs. It must not block; what it raises is logged."""
        self.on_finished.append(hook)
        try:
            yield
        finally:
            self.on_finished.remove(hook)

    def sessions(self) -> dict[Session, float]:
        """Return the sessions of all runs and when each began: seconds on Trio's clock, 0 for those of one request."""
        return {session: began for running in list(self.runs) for session, began in list(running.sessions.items())}

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AnyChannel]:
        """Serve one connection in this process while the block runs, and yield the client's end of it.

        So a client takes the server itself as a target: `client.connect(server)`.
        """
        ours, theirs = direct_ends()
        async with open_service_nursery() as nursery:
            nursery.start_soon(self.serve, ours)
            yield theirs

    async def serve(self, channel: AnyChannel) -> None:
        """Serve one connection in a run of its own until the peer closes it; then close the channel.

        Cancelling it stops every handler and closes the channel.
        """
        async with self.running() as running:
            await running.serve(channel)
