"""What `trimcp top` reads: servers that come and go, and acts beside the pictures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio

import trimcp
import trimcp.testing
from trimcp.cli.top.command import Sockets, sockets_of
from trimcp.watch.admin import serve_admin


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # The path of a Unix socket has at most 107 bytes, so not below `tmp_path`.
    with TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


async def test_servers_that_come_are_seen_and_those_that_end_are_not() -> None:
    first: trimcp.Server[None] = trimcp.Server("first")
    second: trimcp.Server[None] = trimcp.Server("second")
    async with Sockets(None).watching() as sources:
        assert await sources.pictures() == []
        async with serve_admin(first) as path:
            (picture,) = await sources.pictures()
            assert (picture["server"], picture["source"]) == ("first", str(path))
            async with serve_admin(second):
                assert {one["server"] for one in await sources.pictures()} == {"first", "second"}
            assert [one["server"] for one in await sources.pictures()] == ["first"]
        assert await sources.pictures() == []


async def test_an_act_and_a_picture_do_not_disturb_each_other() -> None:
    server: trimcp.Server[None] = trimcp.Server("index")

    @server.tool
    async def hold() -> str:
        await trio.sleep_forever()
        return ""

    async def call() -> None:
        with pytest.raises(trimcp.RemoteError, match="enough"):
            await session.call_tool("hold")

    async with (
        trimcp.testing.connected(server) as session,
        serve_admin(server),
        Sockets(None).watching() as sources,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        (picture,) = await sources.pictures()
        key = picture["sessions"][0]["requests"][0]["key"]
        async with trio.open_nursery() as both:
            both.start_soon(sources.pictures)
            await Sockets(None).act(picture["source"], "cancel", request=key, reason="enough")


async def test_an_act_reaches_no_other_socket() -> None:
    with pytest.raises(trimcp.LocalError, match="not there"):
        await Sockets(None).act("/run/somebody/else.sock", "drain")


def test_two_servers_of_a_process_are_told_apart(runtime: Path) -> None:
    async def look() -> set[str]:
        async with (
            serve_admin(trimcp.Server("one")),
            serve_admin(trimcp.Server("two")),
            Sockets(str(sockets_of(None)[0]).rpartition("/")[2].partition(".")[0]).watching() as sources,
        ):
            return {one["source"] for one in await sources.pictures()}

    assert len(trio.run(look)) == 2
