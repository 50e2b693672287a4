"""The load of agents on contexts over WebSockets, in short: every update once and in order, and nothing left."""

from __future__ import annotations

import sys

import pytest

from tests.peers.serving import SOFTWARE
from tests.soak.agent_load import MOST_PER_CONTEXT, AgentLoad, put_load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]


@pytest.mark.parametrize("host", SOFTWARE)
async def test_every_update_of_every_agent_is_applied_answered_and_watched_once_and_in_order(host: str) -> None:
    figures = await put_load(AgentLoad(contexts=200, agents=10, seconds=2, host=host))
    print(figures)
    assert figures.updates == 4_000
    assert figures.per_context <= MOST_PER_CONTEXT


async def test_so_it_is_where_a_file_keeps_them(tmp_path: object) -> None:
    figures = await put_load(AgentLoad(contexts=100, agents=10, seconds=1, file=f"{tmp_path}/contexts.db"))
    assert figures.updates == 1_000
