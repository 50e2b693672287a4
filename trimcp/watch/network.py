"""Look at a server over the network, as a route of its own: docs/reference/admin.md.

The server's own authorization comes first, as for every route, and then the token has to have a scope for this. There
is no other way in: who is not authenticated is refused, on whatever address the server listens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final

import attrs

from trimcp.security import security_event
from trimcp.support.cleaning import in_quotes
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.http.interfaces import Admitted, Head, HttpResponse
from trimcp.watch.admin import announced_sockets, connect_admin, perform, registry
from trimcp.watch.commands import Command, RunningCommands, lacks_scope, plain
from trimcp.watch.observing import Observation, log
from trimcp.watch.picture import Observed
from trimcp.watch.viewing import Reach, Viewed, Watching

SCOPE: Final = "trimcp:admin"
"""The scope that a token needs to look at a server and to act on it."""

PATH: Final = "/_trimcp"
"""Where `trimcp run --admin-http` serves it, and `trimcp top URL` looks for it beside the server's endpoint."""

_LARGEST: Final = 64 * 1024  # bytes of a request
_MOST: Final = 16  # viewers at a time
_HEADERS: Final = (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"))
_COMMANDS: Final = ("pictures", "wire", "cancel", "close", "drain")


class NetworkAdmin:
    """Lets whoever has a token with the scope `trimcp:admin` look at a server and act on it: `trimcp top URL`.

    It is a route of the server itself, `HttpSettings(routes={"/_trimcp": NetworkAdmin(server)})`, behind its checks of
    Host, Origin and identity. Without `auth` or `authenticate` it refuses everybody.

    Args:
        server: the server, which does not run yet.
        group: of several processes that share the port, the name in which their sockets are announced; then it is one
            view of all of them.
    """

    def __init__(self, server: Observed, *, group: str | None = None) -> None:
        self._server = server
        self._group = group
        self._commands: RunningCommands | None = None
        server.parts.append(self._while_running)

    @asynccontextmanager
    async def _while_running(self, running: object) -> AsyncIterator[None]:
        async with open_service_nursery() as nursery:
            self._commands = RunningCommands(nursery, _HEADERS, _LARGEST, _MOST)
            yield
            self._commands = None
            nursery.cancel_scope.cancel(reason="the server has ended")

    async def __call__(self, head: Head) -> Admitted:
        """Answer a request of the route."""
        refused = lacks_scope(head, SCOPE)
        if refused is not None:
            security_event("admin_refused", principal=head.principal, peer=head.peer)
            return refused
        if self._commands is None:
            return HttpResponse(503)
        return self._commands.admit(head, partial(self._choose, f"{in_quotes(str(head.principal))} over the network"))

    def _choose(self, who: str, members: dict[str, Any]) -> Command:
        do = members.get("do")
        if do not in _COMMANDS:
            raise ValueError(f"`do` is one of {', '.join(_COMMANDS)}")
        reach: Reach = _Here(self._server, who)
        if self._group is not None:
            reach = _Processes(self._group)
            if do != "pictures" and (do != "wire" or members.get("text") is True):
                log.warning("%s asks for %s", who, do)  # the process that does it knows only this one
        commands = Watching(reach).commands
        return commands.get(do, commands["act"])


@attrs.frozen
class _Here:
    """The server in this process."""

    server: Observed
    who: str

    def names(self) -> Sequence[str]:
        return ("here",)

    @asynccontextmanager
    async def connect(self, name: str, /) -> AsyncIterator[Viewed]:
        with Observation(self.server, who=self.who) as observation:
            yield _Direct(observation)


@attrs.frozen
class _Direct:
    observation: Observation

    async def ask(self, do: str, **members: Any) -> Any:
        done = await perform(self.observation, {"do": do, **members})
        return plain(done) if attrs.has(type(done)) else done


@attrs.frozen
class _Processes:
    """The servers of some processes of this machine, by the names of their sockets."""

    group: str

    def names(self) -> Sequence[str]:
        return [path.stem for path in announced_sockets(self.group)]

    def connect(self, name: str, /) -> AbstractAsyncContextManager[Viewed]:
        return connect_admin(registry() / f"{name}.sock")
