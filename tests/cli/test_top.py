"""`trimcp ps` and `trimcp top`: what they show is a function of pictures, and a terminal is as it was afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import orjson
import pytest
import trio
from click.testing import CliRunner, Result
from rich.text import Text

import trimcp
import trimcp.testing
from trimcp.cli.app import app
from trimcp.cli.top.command import keys_of
from trimcp.cli.top.view import KEYS, Shown, rows_of, view, whole_view
from trimcp.watch import admin
from trimcp.watch.picture import take_picture

TRIMCP = (sys.executable, "-m", "trimcp.cli")
PROGRAM = """
import trimcp, trio

server = trimcp.Server("builder", version="1.0")

@server.tool
async def build(n: int, *, ctx: trimcp.Context) -> str:
    await ctx.report_progress(1, total=n, message="half")
    await trio.sleep_forever()
    return ""
"""


async def picture_of(server: trimcp.Server[None]) -> dict[str, Any]:
    """Return a picture as a viewer gets it."""
    found: dict[str, Any] = {"source": "a socket"}
    found |= orjson.loads(admin.answer_line({"done": take_picture(server)}))["done"]
    return found


async def pictures(*tools: str, principal: str | None = None) -> list[dict[str, Any]]:
    server: trimcp.Server[None] = trimcp.Server("maps", version="2")
    for tool in tools:

        @server.tool(name=tool)
        async def work(*, ctx: trimcp.Context) -> str:
            await ctx.report_progress(1, total=4, message="a tile")
            await trio.sleep_forever()
            return ""

    async with trimcp.testing.connected(server) as session, trio.open_nursery() as nursery:
        for tool in tools:
            nursery.start_soon(session.call_tool, tool)
        await trio.testing.wait_all_tasks_blocked()
        found = [await picture_of(server)]
        nursery.cancel_scope.cancel()
    return found


def text_of(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (40, 10), (20, 5), (1, 1)])
@pytest.mark.parametrize("opened", [False, True])
async def test_it_fills_a_terminal_of_any_size(size: tuple[int, int], opened: bool) -> None:
    shown = await pictures("draw", "list")
    choice = Shown(opened=opened, selected=rows_of(shown, Shown())[0].key)
    lines = view(shown, size, choice)
    assert len(lines) == size[1]
    assert max(line.cell_len for line in lines) <= size[0]


async def test_it_shows_what_runs_and_where_it_waits() -> None:
    shown = await pictures("draw", "list")
    told = text_of(view(shown, (300, 24), Shown()))
    assert "1 server: 1 session, 2 running" in told
    assert "maps 2" in told
    assert "25%" in told
    assert "await trio.sleep_forever()" in told
    assert KEYS in told
    row = rows_of(shown, Shown())[0]
    told = text_of(view(shown, (140, 24), Shown(opened=True, selected=row.key)))
    assert "a tile" in told
    assert f"revision {shown[0]['sessions'][0]['revision']} · in memory" in told
    assert "waits at" in told


async def test_in_80_columns_the_line_where_a_call_waits_and_all_keys_are_there() -> None:
    shown = await pictures("draw", "list")
    told = text_of(view(shown, (80, 24), Shown()))
    assert "test_top.py:" in told
    assert KEYS in told
    ended = {"target": "draw", "method": "x", "seconds": 1, "outcome": "cancelled", "reason": "no room", "at": 1}
    told = text_of(view([{**shown[0], "ended": [ended]}], (80, 24), Shown(opened=True, selected=("", "gone"))))
    assert "it has ended" in told
    assert "cancelled: no room" in told


async def test_in_80_columns_an_opened_call_shows_all_of_a_line_that_is_longer() -> None:
    shown = await pictures("draw")
    request = shown[0]["sessions"][0]["requests"][0]
    request["waits"] = [f"  there.py:1 in far: {'first ' * 20}second"]
    told = text_of(view(shown, (80, 24), Shown(opened=True, selected=rows_of(shown, Shown())[0].key)))
    assert (told.count("first"), told.count("second")) == (20, 1)
    assert "…" not in told.partition("waits at")[2]


async def test_once_all_calls_are_told_each_with_all_of_its_line() -> None:
    shown = await pictures(*(f"tool{number:03}" for number in range(60)))  # of one session
    shown[0]["ended"] = [{"target": "gone", "method": "x", "seconds": 1, "outcome": "ok", "reason": None, "at": 1}]
    shown[0]["sessions"][0]["requests"][0]["waits"] = ["there.py:1 in far: " + "x" * 150]
    lines = [line.plain for line in whole_view(shown, 1_000)]
    for number in range(60):
        assert sum(f"tool{number:03}" in line for line in lines) == 1
    assert sum("x" * 150 in line for line in lines) == 1
    assert "gone ok" in lines[-1]
    assert all(line == line.rstrip() for line in lines)
    assert whole_view([{**shown[0], "sessions": [], "ended": []}], 80)[-1].plain == "  nothing runs"


async def test_it_sorts_and_filters() -> None:
    shown = await pictures("draw", "list", "find")
    assert [row.tool for row in rows_of(shown, Shown(sort="tool"))] == ["draw", "find", "list"]
    assert [row.tool for row in rows_of(shown, Shown(filter="FIN"))] == ["find"]
    told = text_of(view(shown, (100, 24), Shown(filter="nothing of it")))
    assert "nothing that runs has this" in told


async def test_what_is_selected_stays_in_sight() -> None:
    shown = await pictures(*(f"tool{number:03}" for number in range(100)))
    for row in rows_of(shown, Shown(sort="tool")):
        told = text_of(view(shown, (100, 24), Shown(sort="tool", selected=row.key)))
        assert row.tool in told


@pytest.mark.parametrize("progress", [0.0, 1e-300, 5e-324, 1e308, -1.0, -1e308])
@pytest.mark.parametrize("total", [1e308, 1e-300, 5e-324, -1e308])
async def test_no_number_of_a_handlers_ends_it(progress: float, total: float) -> None:
    [picture] = await pictures("build")
    [request] = picture["sessions"][0]["requests"]
    request.update(progress=progress, total=total, per_second=progress / 2, left=1e300)
    for opened in (False, True):
        choice = Shown(selected=(picture["source"], request["key"]), opened=opened)
        shown = text_of(view([picture], (120, 24), choice))
        assert "build" in shown
        assert "inf" not in shown


async def test_hostile_names_control_no_terminal() -> None:
    (shown,) = await pictures("draw")
    hostile = "\x1b]0;title\x07\x9b2J\u202egpj.exe\nforged line"
    request, session = shown["sessions"][0]["requests"][0], shown["sessions"][0]
    request |= {"target": hostile, "message": hostile, "reason": hostile, "id": hostile, "waits": [hostile]}
    session |= {"peer": hostile, "principal": hostile, "owner": hostile, "address": hostile}
    shown |= {"server": hostile, "version": hostile}
    shown["ended"] = [{"target": hostile, "method": "x", "seconds": 1, "outcome": "error", "reason": hostile, "at": 1}]
    key = rows_of([shown], Shown())[0].key
    for choice in (Shown(), Shown(opened=True, selected=key), Shown(asked="?", typed=hostile), Shown(said=hostile)):
        lines = view([shown], (300, 40), choice)
        assert len(lines) == 40
        for line in lines:
            assert not any(sign in line.plain for sign in "\x1b\x07\x9b\u202e\n")


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"\x1b[A\x1b[Bx", ["up", "down", "x"]),
        (b"\r\x7f\x1b", ["enter", "backspace", "escape"]),
        (b"\x1b[15~a", ["a"]),
        (b"\x1b[", []),
        (b"\x00\x01\xff", []),
        ("für".encode(), ["f", "ü", "r"]),
    ],
)
def test_keys(data: bytes, keys: list[str]) -> None:
    assert list(keys_of(data)) == keys


# As programs


@attrs.frozen
class Place:
    """A server that can be looked at, and a client whose call runs there."""

    env: dict[str, str]
    caller: subprocess.Popen[str]
    pid: int


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "builder.py").write_text(PROGRAM, "utf-8")
    # The path of a Unix socket has at most 107 bytes, so not below `tmp_path`.
    with TemporaryDirectory() as runtime, ExitStack() as stack:
        env = {**os.environ, "XDG_RUNTIME_DIR": runtime, "TERM": "xterm-256color"}
        words = [*TRIMCP, "run", "builder.py", "--http", "--port", "0", "--admin"]
        server = stack.enter_context(running(words, env, tmp_path, stderr=subprocess.PIPE))
        assert server.stderr is not None
        url = server.stderr.readline().split()[-1]
        words = [*TRIMCP, "call", url, "build", "n=2"]
        caller = stack.enter_context(running(words, env, tmp_path, stderr=subprocess.PIPE))
        assert caller.stderr is not None
        assert "half" in caller.stderr.readline()
        yield Place(env, caller, server.pid)


@contextmanager
def running(words: list[str], env: dict[str, str], folder: Path, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(words, env=env, cwd=folder, stdout=subprocess.PIPE, text=True, **streams) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def done(place: Place, *words: str) -> Result:
    return CliRunner().invoke(app, words, env=place.env, prog_name="trimcp")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"", "the server is gone"),
        (b"{\xff}\n", "what the server says cannot be read"),
        (b"[1]\n", "what the server says cannot be read"),
        (b"null\n", "what the server says cannot be read"),
        (b"[" * 100_000 + b"\n", "what the server says cannot be read"),
        (b'{"done": 5}\n', "what the server says cannot be read"),
        (b'{"done": {"sessions": 5}}\n', "what the server says cannot be read: it may be of another version"),
        (b'{"error": "\\u001b[2Jno"}\n', "\\x1b[2Jno"),
    ],
)
def test_a_socket_that_says_what_no_server_says_is_one_sentence(said: bytes, told: str) -> None:
    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some()
            await stream.send_all(said)

    async def main(path: str) -> None:
        async with trio.open_nursery() as nursery:
            sock = trio.socket.socket(trio.socket.AF_UNIX)
            await sock.bind(path)
            sock.listen()
            nursery.start_soon(trio.serve_listeners, answer, [trio.SocketListener(sock)])
            await trio.to_thread.run_sync(look, path)
            nursery.cancel_scope.cancel()

    def look(path: str) -> None:
        found = CliRunner().invoke(app, ["top", path, "--once"])
        assert (found.exit_code, found.output.splitlines()[-1]) == (3, f"Error: {told}")

    with TemporaryDirectory() as folder:
        trio.run(main, f"{folder}/admin.sock")


async def test_a_socket_that_says_nothing_is_not_waited_for_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = trio.socket.socketpair()
    with theirs:
        stream = trio.SocketStream(ours)
        client = admin.AdminClient(stream, admin.Lines(stream.receive_some, 100))
        with pytest.raises(trimcp.ConnectionLost, match="does not answer"):
            await client.ask("picture")
        ours.close()


@pytest.mark.slow
def test_ps_and_top_tell_of_it_once(place: Place) -> None:
    told = done(place, "ps")
    assert (told.exit_code, told.stderr) == (0, "")
    assert told.stdout.splitlines()[1].split() == [str(place.pid), "1", "1", "builder", "1.0"]
    assert json.loads(done(place, "ps", "--json").stdout)[0]["running"] == 1
    told = done(place, "top", str(place.pid), "--once")
    assert told.exit_code == 0
    assert "50%" in told.stdout
    (picture,) = json.loads(done(place, "top", "--json").stdout)
    assert picture["sessions"][0]["requests"][0]["message"] == "half"
    refused = done(place, "top", "1")
    assert (refused.exit_code, refused.stderr) == (2, "Error: no server 1 can be looked at: trimcp ps\n")


def read_until(terminal: int, text: str) -> str:
    """Read from a pseudo-terminal until a text was shown."""
    shown = b""
    while text.encode() not in shown:
        shown += os.read(terminal, 65_536)
    return shown.decode()


@pytest.mark.slow
def test_an_operator_cancels_a_call_and_its_caller_is_told_why(place: Place) -> None:
    terminal, line = os.openpty()
    before = termios.tcgetattr(line)
    with subprocess.Popen([*TRIMCP, "top"], env=place.env, stdin=line, stdout=line, stderr=line) as viewer:
        try:
            read_until(terminal, "build")
            os.write(terminal, b"\r")  # nothing is selected: it opens the first
            read_until(terminal, "waits at")
            os.write(terminal, b"\r")
            read_until(terminal, "\x1b[7m")  # in the list it is shown in reverse
            os.write(terminal, b"\x1b[Bc")
            read_until(terminal, "cancel build of")
            os.write(terminal, b"no room\r")
            shown = read_until(terminal, "cancelled by the operator: no room")
            os.write(terminal, b"q")
            shown += read_until(terminal, "\x1b[?1049l")  # the screen of before
            assert viewer.wait(30) == 0
        finally:
            viewer.kill()
    assert "ended" in shown.lower()
    assert termios.tcgetattr(line) == before
    out, err = place.caller.communicate(timeout=30)
    assert (place.caller.returncode, out) == (4, "")
    assert "stopped: cancelled by the operator: no room (code 1005)" in err
    os.close(terminal)
    os.close(line)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(place: Place, number: signal.Signals) -> None:
    terminal, line = os.openpty()
    before = termios.tcgetattr(line)
    with subprocess.Popen([*TRIMCP, "top"], env=place.env, stdin=line, stdout=line, stderr=line) as viewer:
        try:
            read_until(terminal, "build")
            viewer.send_signal(number)
            read_until(terminal, "\x1b[?1049l")
            assert viewer.wait(30) == (130 if number == signal.SIGINT else 0)
        finally:
            viewer.kill()
    assert termios.tcgetattr(line) == before
    os.close(terminal)
    os.close(line)


@pytest.mark.slow
def test_a_stop_gives_the_terminal_back_until_it_goes_on_and_so_does_the_end_of_the_server(place: Place) -> None:
    terminal, line = os.openpty()
    before = termios.tcgetattr(line)
    with subprocess.Popen([*TRIMCP, "top"], env=place.env, stdin=line, stdout=line, stderr=line) as viewer:
        try:
            read_until(terminal, "build")
            viewer.send_signal(signal.SIGTSTP)  # as Ctrl-Z does
            read_until(terminal, "\x1b[?1049l")
            _, status = os.waitpid(viewer.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert termios.tcgetattr(line) == before
            viewer.send_signal(signal.SIGCONT)
            read_until(terminal, "build")
            os.kill(place.pid, signal.SIGKILL)
            assert "the server is gone" in read_until(terminal, "gone")
            assert viewer.wait(30) == 3
        finally:
            viewer.kill()
    assert termios.tcgetattr(line) == before
    os.close(terminal)
    os.close(line)


@pytest.mark.slow
def test_a_viewer_that_is_killed_costs_the_server_nothing(place: Place) -> None:
    terminal, line = os.openpty()
    with subprocess.Popen([*TRIMCP, "top"], env=place.env, stdin=line, stdout=line, stderr=line) as viewer:
        read_until(terminal, "build")
        viewer.kill()
    told = done(place, "top", "--once")
    assert told.exit_code == 0
    assert "build" in told.stdout
    os.close(terminal)
    os.close(line)


@pytest.mark.slow
def test_processes_that_share_a_port_are_looked_at_over_the_network(tmp_path: Path) -> None:
    (tmp_path / "builder.py").write_text(PROGRAM, "utf-8")
    (tmp_path / "tokens").write_text("ada: user\nops [trimcp:admin files:read]: operator\n", "utf-8")
    with TemporaryDirectory() as runtime, ExitStack() as stack:
        env = {**os.environ, "XDG_RUNTIME_DIR": runtime, "OPERATOR": "operator", "USER_TOKEN": "user"}
        options = ("--http", "--port", "0", "--workers", "2", "--token-file", "tokens", "--admin-http")
        server = stack.enter_context(
            running([*TRIMCP, "run", "builder.py", *options], env, tmp_path, stderr=subprocess.PIPE)
        )
        assert server.stderr is not None
        url = next(line for line in server.stderr if "listening on http" in line).split()[-1]
        words = [*TRIMCP, "call", url, "build", "n=2", "--bearer", "USER_TOKEN"]
        caller = stack.enter_context(running(words, env, tmp_path, stderr=subprocess.PIPE))
        assert caller.stderr is not None
        assert "half" in caller.stderr.readline()
        place = Place(env, caller, server.pid)
        told = done(place, "top", url, "--bearer", "OPERATOR", "--json")
        assert (told.exit_code, told.stderr) == (0, "")
        pictures = json.loads(told.stdout)
        assert len({one["pid"] for one in pictures}) == 2
        assert sum(one["statistics"]["running"] for one in pictures) == 1
        assert "50%" in done(place, "top", url, "--bearer", "OPERATOR", "--once").stdout
        for bearer, why in (("USER_TOKEN", "does not have the scope trimcp:admin"), (None, "it wants a token")):
            refused = done(place, "top", url, "--once", *(() if bearer is None else ("--bearer", bearer)))
            assert refused.exit_code == 3
            assert why in refused.stderr
            assert refused.stdout == ""
        server.terminate()
        assert server.wait(30) == 0


@pytest.mark.slow
def test_where_nobody_is_authenticated_nobody_looks_over_the_network(tmp_path: Path) -> None:
    (tmp_path / "builder.py").write_text(PROGRAM, "utf-8")
    words = [*TRIMCP, "run", "builder.py", "--http", "--port", "0", "--admin-http"]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert told.returncode != 0
    assert "--admin-http wants tokens to tell who may look" in told.stderr
