"""That sessions come, are used, and go."""

from __future__ import annotations

import sys
from pathlib import Path

import come_and_go
import pytest
from environments import Peer, Way

import trimcp
from tests.peers.serving import served

HERE = Path(__file__).parents[2] / "benchmarks"


async def test_each_session_is_called_once_and_none_is_left() -> None:
    server, texts = trimcp.Server("bench", version="1.0"), []

    @server.tool
    async def echo(text: str) -> str:
        texts.append(text)
        return text

    async with served(server) as place:
        await come_and_go.come_and_go(place.url, 100)
        assert len(set(texts)) == len(texts) == 100
        assert server.statistics().sessions == 0


async def test_a_wrong_text_is_found_out() -> None:
    server = trimcp.Server("bench", version="1.0")

    @server.tool
    async def echo(text: str) -> str:
        return f"{text}!"

    async with served(server) as place:
        with pytest.raises(BaseExceptionGroup) as caught:
            await come_and_go.come_and_go(place.url, 1)
        assert caught.group_contains(AssertionError, match="wanted 'hello", depth=None)


@pytest.mark.needs("taskset")
@pytest.mark.slow
def test_ours_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(come_and_go, "QUICK_SESSIONS", 8)
    monkeypatch.setattr(come_and_go, "WARM", 8)
    ways = (Way("http", "2025-11-25", "json"),)
    ours = Peer("ours", (sys.executable, str(HERE / "peers" / "ours.py")), ways)
    none = Peer("none", ("nobody",), (Way("stdio", "2025-11-25"),))
    found = come_and_go.measure([ours, none], rounds=2, quick=True)
    assert [(row["figure"], row["peer"]) for row in found] == [("cpu", "ours"), ("rate", "ours")]
    assert all(len(row["values"]) == 2 and min(row["values"]) > 0 for row in found)
    assert come_and_go.measure([ours], rounds=1, quick=True, cells=["another"]) == []
