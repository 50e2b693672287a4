"""A server and a client connected in one process, for a test: `async with connected(server) as session`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import attrs

from trimcp.channel import Incoming, MessageChannel
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.principal import Principal
from trimcp.server.server import Server
from trimcp.session.drive import AnyChannel, direct_ends, drive
from trimcp.support.nurseries import open_service_nursery
from trimcp.testing.faults import Faults, FaultyChannel
from trimcp.transports.memory import memory_channels
from trimcp.transports.wrapped import WrappedChannel
from trimcp.wire.revisions import LATEST, REVISIONS, Revision

_TestT = TypeVar("_TestT")


def every_revision(test: _TestT) -> _TestT:
    """Run a test, or every test of a class, once for each revision, passed as the argument `revision`."""
    import pytest  # only needed here

    names = [revision.name for revision in REVISIONS]
    return cast(_TestT, pytest.mark.parametrize("revision", REVISIONS, ids=names)(cast(Any, test)))


@attrs.define(eq=False, repr=False)
class _FromPrincipal(WrappedChannel):
    """Sets the principal of every message."""

    principal: Principal

    async def receive(self) -> Sequence[Incoming]:
        return [attrs.evolve(incoming, principal=self.principal) for incoming in await self.channel.receive()]


@asynccontextmanager
async def connected(
    server: Server[Any],
    client: Client | None = None,
    *,
    revision: Revision = LATEST,
    framed: bool = False,
    force_rerun: bool = False,
    principal: Principal | None = None,
    wrap: Callable[[MessageChannel], MessageChannel] | None = None,
    faults: Faults | None = None,
) -> AsyncIterator[ClientSession]:
    """Yield a client's session with `server`, both in this process. Works in virtual time, also with thread tools.

    `session.peer` is the server's session, for example for `session.peer.statistics()`.

    Args:
        server: the server to test, in a run of its own.
        client: by default one without handlers.
        revision: the revision to use.
        framed: pass every message through line framing and a small pipe.
        force_rerun: run handlers again after a question in every revision, to find those that must not run twice.
        principal: the client's principal, as if authenticated by a token; None for none.
        wrap: wraps the client's channel, for example in a `SlowChannel`.
        faults: applied between the two, in both directions; `faults.journal` lists them.
    """
    client = client or Client("test")
    ours: AnyChannel
    theirs: AnyChannel
    if framed or principal is not None or wrap is not None or faults is not None:
        ours, channel = memory_channels(framed=framed)
        ours = ours if principal is None else _FromPrincipal(ours, principal)
        channel = channel if wrap is None else wrap(channel)
        theirs = channel if faults is None else FaultyChannel(channel, faults)
    else:
        ours, theirs = direct_ends()
    async with server.running() as running, open_service_nursery() as nursery:
        peer = running.session(force_rerun=force_rerun)
        nursery.start_soon(drive, peer, ours)
        async with client.connect(theirs, revision=revision) as session:
            session.peer = peer
            yield session
