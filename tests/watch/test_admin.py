"""The socket at which whoever runs a server looks at it, and acts."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trimcp
import trimcp.testing
from tests.fuzz.effort import PATIENCE
from tests.peers.serving import served
from trimcp.errors import ConnectionLost, LocalError
from trimcp.watch import admin
from trimcp.watch.admin import announced_sockets, connect_admin, registry, serve_admin


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # The path of a Unix socket has at most 107 bytes, so not below `tmp_path`.
    with TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


def make_server() -> trimcp.Server[None]:
    server: trimcp.Server[None] = trimcp.Server("index")

    @server.tool
    async def hold(*, ctx: trimcp.Context) -> str:
        await ctx.report_progress(1, total=2)
        await trio.sleep_forever()
        return ""

    return server


async def said(path: Path, *lines: bytes) -> list[Any]:
    """Send these lines and return the answers to them."""
    stream = await trio.open_unix_socket(str(path))
    async with stream:
        await stream.send_all(b"".join(lines))
        found = b""
        while found.count(b"\n") < len(lines):
            data = await stream.receive_some()
            if not data:
                break
            found += data
    return [json.loads(line) for line in found.splitlines()]


async def test_a_viewer_sees_what_runs_and_cancels_it() -> None:
    server = make_server()
    refused: list[trimcp.RemoteError] = []

    async def call() -> None:
        with pytest.raises(trimcp.RemoteError) as caught:
            await session.call_tool("hold")
        refused.append(caught.value)

    async with trimcp.testing.connected(server) as session, serve_admin(server) as path:
        assert announced_sockets() == [path]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        async with connect_admin(path) as viewer, trio.open_nursery() as nursery:
            nursery.start_soon(call)
            while not (requests := (await viewer.ask("picture"))["sessions"][0]["requests"]):
                await trio.lowlevel.checkpoint()
            assert requests[0]["target"] == "hold"
            await viewer.ask("cancel", request=requests[0]["key"], reason="enough")
        assert "enough" in str(refused[0])
    assert not path.exists()
    assert announced_sockets() == []


async def test_what_it_says_is_what_the_statistics_say() -> None:
    server = make_server()
    async with trimcp.testing.connected(server), serve_admin(server) as path, connect_admin(path) as viewer:
        told = (await viewer.ask("picture"))["statistics"]
        mine = server.statistics()
    assert told["sessions"] == mine.sessions == 1
    assert told["memory"] == {"bound": mine.memory.bound, "held": 0, "owners": {}, "refused": 0, "ended": 0}
    assert set(told) == {name for name in dir(mine) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"\n", "a request is a JSON object"),
        (b"nonsense\n", "a request is a JSON object"),
        (b"[]\n", "a request is a JSON object"),
        (b'{"do":"ask"}\n', "a request is a JSON object"),
        (b'{"do":["picture"]}\n', "a request is a JSON object"),
        (b'{"do":"picture","more":1}\n', "these members do not belong"),
        (b'{"do":"cancel"}\n', "these members do not belong"),
        (b'{"do":"cancel","request":"x","reason":"y"}\n', "this request has ended"),
        (b'{"do":"close","session":{},"reason":"y"}\n', "this session has ended"),
        (b'{"do":"drain","grace":"soon"}\n', "these members do not belong"),
        (b'{"do":"drain","grace":-1}\n', "grace is a number of at least 0"),
    ],
)
async def test_what_is_no_request_is_refused_and_the_next_is_answered(line: bytes, told: str) -> None:
    server = make_server()
    async with trimcp.testing.connected(server), serve_admin(server) as path:
        first, second = await said(path, line, b'{"do":"picture"}\n')
    assert first["version"] == 1
    assert told in first["error"]
    assert second["done"]["server"] == "index"


async def test_a_line_without_end_ends_the_viewer_and_no_other() -> None:
    server = make_server()
    async with trimcp.testing.connected(server), serve_admin(server) as path, connect_admin(path) as viewer:
        stream = await trio.open_unix_socket(str(path))
        async with stream:
            with pytest.raises(trio.BrokenResourceError):
                while True:
                    await stream.send_all(b"x" * 65_536)
        assert (await viewer.ask("picture"))["server"] == "index"


async def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    server = make_server()
    mine = os.getuid()
    async with trimcp.testing.connected(server), serve_admin(server) as path:
        monkeypatch.setattr(admin, "_CREDENTIALS", _Credentials(mine + 1))
        with suppress(trio.BrokenResourceError):  # it may be closed before it is written to
            assert await said(path, b'{"do":"picture"}\n') == []
    (line,) = [one.getMessage() for one in caplog.records if "admin_refused" in one.getMessage()]
    assert f"user={mine + 1}" in line


class _Credentials:
    """Reads another user than the kernel tells of."""

    size = 12

    def __init__(self, user: int) -> None:
        self.user = user

    def unpack(self, data: bytes) -> tuple[int, int, int]:
        pid, _, group = struct.unpack("3i", data)
        return pid, self.user, group


async def test_a_viewer_that_reads_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server()
    monkeypatch.setattr(admin, "_PATIENCE", 0.05)
    async with trimcp.testing.connected(server), serve_admin(server) as path:
        mute = await trio.open_unix_socket(str(path))
        async with mute:
            with pytest.raises(trio.BrokenResourceError):
                while True:
                    await mute.send_all(b'{"do":"picture"}\n' * 1_000)
        async with connect_admin(path) as viewer:
            assert (await viewer.ask("picture"))["server"] == "index"


@pytest.mark.parametrize("reads", [True, False])
async def test_a_viewer_that_hangs_is_told_late_and_once_it_is_killed_nothing_of_it_is_left(reads: bool) -> None:
    server: trimcp.Server[None] = trimcp.Server("index")

    @server.tool
    async def add(number: int) -> int:
        return number + 1

    async def looked_at(looked: bool, count: int) -> None:
        """Wait until somebody looks, or nobody, and so many tasks live: a socket is between."""
        with trio.fail_after(PATIENCE):
            while (bool(server.on_finished), trio.lowlevel.current_statistics().tasks_living) != (looked, count):  # noqa: ASYNC110
                await trio.sleep(0.001)

    async with trimcp.testing.connected(server) as session, serve_admin(server) as path:
        await session.call_tool("add", {"number": 0})
        await wait_all_tasks_blocked()
        tasks = trio.lowlevel.current_statistics().tasks_living
        viewer = await trio.open_unix_socket(str(path))
        async with viewer:
            await viewer.send_all(b'{"do":"picture"}\n' * (1 if reads else 200))
            if reads:
                assert await viewer.receive_some()
            await looked_at(True, tasks + 1)
            for number in range(300):
                found = await session.call_tool("add", {"number": number})
                assert found.structured_content == {"result": number + 1}
            await looked_at(True, tasks + 1)
        await looked_at(False, tasks)


async def test_a_socket_elsewhere_is_announced(runtime: Path) -> None:
    server = make_server()
    async with trimcp.testing.connected(server), serve_admin(server, runtime / "here.sock") as path:
        (link,) = announced_sockets()
        assert link.resolve() == path
        async with connect_admin(link) as viewer:
            assert (await viewer.ask("picture"))["pid"] == os.getpid()
    assert announced_sockets() == []


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("admin", ["here.sock", True])
async def test_serve_http_opens_it_too(runtime: Path, admin: Any, running: bool) -> None:
    server = make_server()
    place = admin if admin is True else runtime / admin
    async with server.running() as run, served(run if running else server, admin=place):
        (link,) = announced_sockets()
        async with connect_admin(link if admin is True else place) as viewer:
            assert (await viewer.ask("picture"))["server"] == "index"
    assert announced_sockets() == []
    async with served(server):
        assert announced_sockets() == []


async def test_what_an_ended_process_left_is_removed() -> None:
    (registry() / "999999999.ab.sock").touch()
    (registry() / "nonsense.sock").touch()
    assert announced_sockets() == []
    assert list(registry().iterdir()) == []


@pytest.mark.parametrize("kind", ["open", "file"])
def test_a_folder_that_is_not_ours_alone_is_refused(kind: str, runtime: Path) -> None:
    if kind == "file":
        (runtime / "trimcp").touch()
    else:
        (runtime / "trimcp").mkdir()
        (runtime / "trimcp").chmod(0o755)
    with pytest.raises(LocalError, match="trimcp"):
        registry()


async def test_where_nobody_listens_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConnectionLost, match=r"cannot connect to .*nobody"):
        async with connect_admin(tmp_path / "nobody"):
            pass


async def test_odd_progress_of_a_handler_blinds_no_viewer() -> None:
    server = trimcp.Server("odd")

    @server.tool
    async def odd(*, ctx: trimcp.Context) -> str:
        await ctx.report_progress(1, total=2**70, message="half \ud800 a pair" + "x" * 10_000)
        await trio.sleep_forever()
        return ""

    async with (
        trimcp.testing.connected(server) as session,
        serve_admin(server) as path,
        connect_admin(path) as viewer,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(session.call_tool, "odd")
        await wait_all_tasks_blocked()
        (shown,) = (await viewer.ask("picture"))["sessions"][0]["requests"]
        nursery.cancel_scope.cancel()
    assert (shown["progress"], shown["total"]) == (1, None)
    assert shown["message"].startswith("half ")
    assert len(shown["message"]) <= 500


async def test_a_fault_of_ours_ends_a_viewer_and_not_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server()

    def crash(*_: object) -> None:
        raise ZeroDivisionError("ours")

    async with trimcp.testing.connected(server) as session, serve_admin(server) as path:
        with monkeypatch.context() as broken:
            broken.setattr("trimcp.watch.observing.take_picture", crash)
            assert await said(path, b'{"do":"picture"}\n') == []
        await session.ping()
        assert (await said(path, b'{"do":"picture"}\n'))[0]["done"]["server"] == "index"
    assert "a viewer's request crashed" in caplog.text


async def test_there_are_so_many_viewers_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server()
    monkeypatch.setattr(admin, "_MOST", 1)
    async with trimcp.testing.connected(server), serve_admin(server) as path, connect_admin(path) as viewer:
        assert (await viewer.ask("picture"))["server"] == "index"
        async with connect_admin(path) as another:
            with pytest.raises(ConnectionLost):
                await another.ask("picture")
        assert (await viewer.ask("picture"))["server"] == "index"
