"""Several processes over one store of contexts: nothing is lost, and what one was answered the others know."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.agent_tools.tables import ADA, open_table
from tests.programs import require
from tests.store.process import count
from tests.store.redis_server import redis_server, until
from trimcp.store.contexts_sqlite import SqliteContexts
from trimcp.store.naming import contexts_of
from trimcp.store.peers import FilePeers
from trimcp.support.files import UnusableFile

ROOT = Path(__file__).parents[2]


class Other:
    """Another process."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._rest = b""

    async def do(self, **line: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        await self.process.stdin.send_all(json.dumps(line).encode() + b"\n")
        while b"\n" not in self._rest:
            data = await self.process.stdout.receive_some()
            assert data, "the process has ended"
            self._rest += data
        answer, _, self._rest = self._rest.partition(b"\n")
        found = json.loads(answer)
        return found["result"] if "result" in found else found["error"]


@asynccontextmanager
async def another(url: str) -> AsyncIterator[Other]:
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(
                trio.run_process,
                [sys.executable, "-m", "tests.store.process", url],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                check=False,
                cwd=ROOT,
            )
        )
        yield Other(process)
        nursery.cancel_scope.cancel()


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite://{tmp_path}/contexts.db"
    else:
        require("redis-server")
        with redis_server() as server:
            yield server.url


async def test_what_one_was_answered_the_other_knows(url: str) -> None:
    async with open_table(contexts_of(url)) as table, another(url) as other:
        assert await other.do(create="ctx-001") == 0
        actor = await table.find(ADA, "ctx-001")
        for number in range(60):
            assert await other.do(update="ctx-001", patch={"n": number}) == 2 * number + 1
            assert await table.find(ADA, "ctx-001") is actor
            assert actor.snapshot()["n"] == number
            await actor.update({"m": number})
            assert (await other.do(read="ctx-001"))["m"] == number
        async with actor.watch() as watch:
            await watch.receive()
            await other.do(update="ctx-001", patch={"n": -1})
            assert (await watch.receive()).content["n"] == -1
            await other.do(destroy="ctx-001")
            assert (await watch.receive()).kind == "destroyed"
        assert await other.do(create="ctx-002") == 0
        await (await table.find(ADA, "ctx-002")).destroy()
        assert await other.do(read="ctx-002") == "context_gone"


async def test_three_that_count_lose_nothing(url: str) -> None:
    async with open_table(contexts_of(url)) as table, another(url) as first, another(url) as second:
        await table.create(ADA, "ctx-001")
        for other in (first, second):
            await other.do(read="ctx-001")  # it has begun
        conflicts = []

        async def run(name: str, other: Other | None) -> None:
            if other is None:
                conflicts.append(await count(table, "ctx-001", name, 50))
            else:
                conflicts.append(await other.do(count="ctx-001", name=name, times=50))

        async with trio.open_nursery() as nursery:
            for name, other in (("a", first), ("b", second), ("c", None)):
                nursery.start_soon(run, name, other)
        actor = await table.find(ADA, "ctx-001")
        assert actor.version == 150
        assert {name: actor.snapshot()[name] for name in "nabc"} == {"n": 150, "a": 50, "b": 50, "c": 50}
        assert all(isinstance(each, int) for each in conflicts)
    store = contexts_of(url)
    async with store.opened():
        row = await store.load(ADA, "ctx-001")
    assert row is not None
    assert row.state["n"] == row.version == 150


@pytest.mark.slow
@pytest.mark.needs("redis-server")
async def test_three_that_count_lose_and_double_nothing_while_redis_is_killed() -> None:
    """What may or may not have run is sent again, and is done once."""
    with redis_server() as server:
        url = server.url
        async with open_table(contexts_of(url)) as table, another(url) as first, another(url) as second:
            actor = await table.create(ADA, "ctx-001")
            for other in (first, second):
                await other.do(read="ctx-001")  # it has begun
            done: list[str] = []

            async def run(name: str, other: Other) -> None:
                await other.do(count="ctx-001", name=name, times=300)
                done.append(name)

            async with trio.open_nursery() as nursery:
                for name, other in (("a", first), ("b", second)):
                    nursery.start_soon(run, name, other)
                kills = 0
                while len(done) < 2:
                    before = actor.version
                    await until(lambda: actor.version >= before + 60 or len(done) == 2)  # noqa: B023
                    server.kill()
                    server.start()
                    kills += 1
            assert kills >= 3
            assert await table.find(ADA, "ctx-001") is actor
            assert {name: actor.snapshot()[name] for name in "nab"} == {"n": 600, "a": 300, "b": 300}
            assert actor.version == 600


async def test_one_that_was_killed_is_not_told_again(tmp_path: Path) -> None:
    path = tmp_path / "contexts.db"
    store = SqliteContexts(path)
    async with open_table(store) as table:
        assert store.alone
        async with another(f"sqlite://{path}") as other:
            await other.do(create="ctx-001")
            await table.find(ADA, "ctx-001")
            assert not store.alone
            other.process.kill()
            await other.process.wait()
        await (await table.find(ADA, "ctx-001")).update({"a": 1})
        assert store.alone
        assert len(os.listdir(f"{path}-peers")) == 1
    assert os.listdir(f"{path}-peers") == []


async def test_one_that_does_not_look_costs_the_others_nothing(tmp_path: Path) -> None:
    path = tmp_path / "contexts.db"
    sleeper, speaker = FilePeers(path), FilePeers(path)
    try:
        for _ in range(5_000):
            speaker.wake()
        assert sleeper.woken
        sleeper.clear()
        assert not sleeper.woken
        speaker.wake()
        with trio.fail_after(5):
            await sleeper.wait()
        assert not speaker.woken
    finally:
        sleeper.close()
        speaker.close()


@pytest.mark.parametrize("wrong", ["open to others", "a file", "a link"])
def test_a_folder_that_is_not_ours_alone_is_refused(wrong: str, tmp_path: Path) -> None:
    folder = tmp_path / "contexts.db-peers"
    if wrong == "a file":
        folder.write_bytes(b"")
    elif wrong == "a link":
        (tmp_path / "elsewhere").mkdir()
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(UnusableFile, match=r"contexts\.db-peers"):
        FilePeers(tmp_path / "contexts.db")


async def test_a_path_may_be_longer_than_that_of_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    first, second = FilePeers(folder / "contexts.db"), FilePeers(folder / "contexts.db")
    first.wake()
    assert second.woken
    first.close()
    second.close()
