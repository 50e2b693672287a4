"""A server that serves what another one offers, over any transport and in any revision: `trimcp.proxy(target)`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs

from trimcp.client.client import Connectable, Target, named
from trimcp.compose.forwarding import EXTENSIONS, Forwarding
from trimcp.compose.relays import Relays
from trimcp.errors import ErrorReply, LocalError
from trimcp.protocol.events import Notified
from trimcp.server.running import Running
from trimcp.server.server import Server
from trimcp.session.limits import Limits
from trimcp.session.session import Session
from trimcp.support.bounds import check_members, check_number
from trimcp.support.cleaning import one_line
from trimcp.wire.capabilities import ServerCapabilities
from trimcp.wire.common import Implementation
from trimcp.wire.methods import METHODS
from trimcp.wire.revisions import OLDEST, Revision

log: logging.Logger = logging.getLogger("trimcp.compose")

_INITIALIZED = "notifications/initialized"
_ROOTS_CHANGED = "notifications/roots/list_changed"


class ProxyServer(Server[None]):
    """A server whose requests are made at an upstream. `proxy` makes one."""

    reads_unlisted = True

    def __init__(
        self,
        relays: Relays,
        methods: Iterable[str],
        notifications: Iterable[str],
        *,
        required: bool = True,
        **options: Any,
    ) -> None:
        self._declared: ServerCapabilities | None = None
        self._required = required
        self.relays = relays
        super().__init__(relays.name, dynamic=True, **options)
        self._forwarding = Forwarding(relays)
        handlers = self._forwarding.handlers((*EXTENSIONS, *methods))
        self._handlers = handlers
        foreign = {name: each for name, each in handlers.items() if name not in METHODS or name in EXTENSIONS}
        self.foreign.update(foreign)
        self.notification_handlers.update({name: [] for name in (*notifications, _ROOTS_CHANGED)})
        self._notifications = frozenset(notifications)
        self.parts.append(self._relaying)
        self.beside.append(relays.beside)

    @asynccontextmanager
    async def _relaying(self, running: Running) -> AsyncIterator[None]:
        """Serve a run from the upstream while the block runs."""
        async with self.relays.opened():
            if self.mounted:
                # Beside others it cannot pass on a client's subscription as it is: one of its own serves all clients.
                self._forwarding.tell_all(self.changes.publish)
                running.subscribers.others = self._forwarding.watch_for_all
                running.subscribers.tasks.append(self._forwarding.watching)
            else:
                self.relays.tell_lists = self._forwarding.tell_lists
            try:
                await (self._forwarding.learn() if self.mounted else self.relays.learn())
                self._introduce()
            except LocalError as error:
                if self._required:
                    raise
                log.warning("%s; it is tried again", one_line(str(error)))
            running.serve_by(self._handlers)
            running.on_notified = self._noticed
            yield

    def _introduce(self) -> None:
        """Introduce ourselves as the upstream does: a client is to see no difference."""
        learned = self.relays.learned
        assert learned is not None
        if learned.info is not None:
            self.info: Implementation = learned.info
            self.profile.info = learned.info
        self.profile.instructions = learned.instructions
        declared: Any = learned.capabilities
        self._declared = attrs.evolve(declared, tasks=None)
        self.extensions: dict[str, dict[str, Any]] = dict(learned.capabilities.extensions or {})
        self._declare()

    def _declare(self) -> None:
        if self._declared is None:
            super()._declare()
        else:
            self.profile.capabilities = self._declared

    @property
    def completes(self) -> bool:
        """Whether the upstream completes arguments."""
        learned = self.relays.learned  # the oldest revision has completion, and no capability for it
        return learned is not None and (learned.capabilities.completions is not None or learned.revision is OLDEST)

    def _noticed(self, session: Session, event: Notified) -> None:
        name, relays = event.method.name, self.relays
        relay = relays.find(session)
        if name == _INITIALIZED:
            if not self.mounted:
                with suppress(ErrorReply):  # there are too many; its first request is told so
                    relays.begin_session(session, event.admission)
        elif name in self._notifications:
            if relay is None and session.transport.single_request:
                try:
                    relay = relays.of_nobody(event.admission.principal)
                except ErrorReply:
                    session.counts.drop("others")
                    return
            if relay is None:
                relays.keep(session, name, event.params)
            else:
                relay.pass_on(session, name, event.params)
        elif name == _ROOTS_CHANGED and relay is not None:
            relay.pass_on(session, name, event.params)


def proxy(
    target: Target,
    *,
    name: str | None = None,
    revision: Revision | str | None = None,
    shared: bool = False,
    methods: Iterable[str] = (),
    notifications: Iterable[str] = (),
    max_connections: int = 100,
    idle: float = 300.0,
    connect_timeout: float = 60.0,
    limits: Limits | None = None,
    **options: Any,
) -> ProxyServer:
    """Return a server that serves what another server offers: `trimcp.run_http(trimcp.proxy(trimcp.stdio("server")))`.

    It speaks every revision and serves over every transport, whatever the other one does. Each client has a connection
    of its own to the other server, opened when it is first needed and opened again when it is lost. Who connects is
    known by the proxy alone: no token and no header of a client reaches the other server.

    Args:
        target: the other server, as for `Client.connect`. It must be possible to connect to it repeatedly.
        name: its name in errors and logs; by default the target's class.
        revision: the revision to speak with it; by default the newest that it knows.
        shared: whether all clients share one connection. Then the other server cannot ask them anything.
        methods: request methods of extensions to pass on, beside those of the official ones.
        notifications: notifications of extensions to pass on, in both directions.
        max_connections: how many connections there may be to it at once. Where they are all in use, one without a
            request is closed for a newcomer if its client has more than twice as many; it is opened again when it is
            needed.
        idle: seconds after which a connection ends that belongs to no session and is not used.
        connect_timeout: seconds that connecting may take.
        limits: the bounds and grace periods of sessions.
        options: what else a `Server` takes, such as `audit`, `memory` or `revisions`.

    Raises:
        TypeError: the target is not valid, or an option is unknown.
        LocalError: the target can be connected to only once.
    """
    given = named(target)
    if not isinstance(given, Connectable):
        kind = type(given).__name__
        raise LocalError(f"a {kind} is good for one connection; pass a target such as trimcp.stdio(...)")
    check_number("max_connections", max_connections, whole=True)
    check_number("idle", idle)
    check_number("connect_timeout", connect_timeout)
    methods = check_members("methods", methods, str, "texts")
    notifications = check_members("notifications", notifications, str, "texts")
    relays = Relays(
        given,
        type(given).__name__ if name is None else name,
        revision,
        shared=shared,
        most=max_connections,
        idle=idle,
        connect_timeout=connect_timeout,
        methods=(*EXTENSIONS, *methods),
        notifications=tuple(notifications),
    )
    return ProxyServer(relays, methods, notifications, limits=limits, **options)
