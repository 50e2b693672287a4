"""Promise 17: agent tools keep the promises above: input with something wrong does no harm, strangers get nothing."""

from __future__ import annotations

import random
import sys
from functools import partial
from typing import Any

import pytest

from tests.fuzz.effort import count
from tests.guarantees.mutating import CALM, HASTY, MOMENT, say_all, survives
from tests.hostile.mutations import of_agent_frames, of_agent_requests
from tests.peers.servers import ServerPool
from tests.peers.serving import SOFTWARE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]
OnBoth = pytest.mark.parametrize("host", SOFTWARE)

# What mutations make by chance, contexts and tools, ends or fills its bound soon, so that it is no leak.
_FEW: dict[str, Any] = {
    "agent_tools": {
        "registration": {"max_tools": 5, "timeout": 0.5},
        "contexts": {"max_contexts": 50, "idle": 0.5, "gone": 0.2, "max_gone": 50},
    }
}


@OnBoth
async def test_mutations_of_requests_of_agents_do_no_harm(servers: ServerPool, host: str) -> None:
    many = count(5_000 if host == "own" else 500)
    async with servers(host, **HASTY, **_FEW) as server:
        await server.warm()
        make = of_agent_requests(random.Random(20_000))
        say = partial(say_all, server, make)
        await survives(server, "agent tools, http", min(many // 5, 1_000), many, say, promise=17)


@OnBoth
async def test_mutations_of_websockets_of_agents_do_no_harm(servers: ServerPool, host: str) -> None:
    many = count(1_500 if host == "own" else 300)
    async with servers(host, **CALM, **_FEW) as server:
        await server.warm()
        make = of_agent_frames(random.Random(20_000))
        say = partial(say_all, server, make, websocket="/agent", patience=MOMENT)
        await survives(server, "agent tools, websocket", min(many // 2, 1_000), many, say, promise=17)
