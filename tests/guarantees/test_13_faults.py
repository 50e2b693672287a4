"""Promise 13: connections that fail cost our client over HTTP their calls, and nothing stays, however many they are."""

from __future__ import annotations

import gc
import os
import sys

import pytest

from tests.guarantees.report import figure
from tests.peers.processes import MIB, memory_of
from tests.transports.http.client.faults_support import InBoth, OnBoth, load, world
from trimcp.wire.revisions import Revision

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

_MANY = {"own": 10_000, "httpx2": 2_000}
"""Faults by engine: the connections of the second are httpx2's, which takes twice as long for each."""


@OnBoth
@InBoth
async def test_thousands_of_faults_leave_nothing(engine: str, revision: Revision) -> None:
    """`load` asserts the rest: no call hangs, no tool is called twice, and all connections are idle or closed."""
    many = _MANY[engine]
    async with world(engine, revision) as here:
        await load(here, many // 4)
        gc.collect()
        base = memory_of(os.getpid())
        await load(here, many, seed=17)
        gc.collect()
        kept = memory_of(os.getpid()) - base
        on = f"client, {engine}, {revision}"
        figure(13, f"kept after {many:,} failed exchanges", round(kept / MIB, 3), 2, "MiB", on)
    assert kept <= 2 * MIB
