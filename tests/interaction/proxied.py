"""The servers of the interaction tests behind a proxy of ours, which is served in their place.

As a program it takes its options as JSON, and the module of the server behind in them.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from tests.interaction.everything_server import Journal
from trimcp.client.client import Client
from trimcp.compose.proxy import ProxyServer, proxy
from trimcp.run import in_process, run_stdio
from trimcp.server.running import Running
from trimcp.server.server import Server
from trimcp.session.drive import AnyChannel
from trimcp.session.limits import Limits
from trimcp.wire.input_requests import ElicitResult

NOTIFICATIONS = ("notifications/example/told", "notifications/example/announced")


def able() -> Client:
    """A client whose user answers what is asked: Ada."""
    client = Client("c")

    @client.elicitation
    async def user(params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={"name": "Ada"})

    return client


@attrs.define(eq=False)
class Behind:
    """A server in this process that runs once, whoever connects; what is connected to."""

    server: Server[Any]
    _running: Running | None = None

    @asynccontextmanager
    async def while_running(self, proxied: Running) -> AsyncIterator[None]:
        """Run it while the proxy runs."""
        async with self.server.running() as self._running:
            yield

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[AnyChannel]:
        """Connect to the server that runs."""
        assert self._running is not None
        async with in_process(self._running).connect() as channel:
            yield channel


def before(server: Server[Any], revision: str | None) -> ProxyServer:
    """A proxy before a server in this process, which speaks this revision with it."""
    behind = Behind(server)
    limits = Limits(eof_grace=0.1)
    made = proxy(behind, name="everything", revision=revision, notifications=NOTIFICATIONS, limits=limits)
    made.parts.insert(0, behind.while_running)
    return made


@attrs.define(eq=False)
class Proxied:
    """In place of a module with a server: one with a proxy before it."""

    module: ModuleType
    revision: str
    __file__: str = __file__

    def make_server(self, journal: Journal) -> ProxyServer:
        return before(self.module.make_server(journal), self.revision)

    def options(self) -> dict[str, str]:
        """What the program has to know besides."""
        return {"module": self.module.__name__, "revision": self.revision}


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    made = importlib.import_module(options["module"]).make_server(Journal(Path(options["journal"])))
    run_stdio(before(made, options["revision"]), grace=options["grace"])
