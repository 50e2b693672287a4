"""A server as a child process: its environment, its garbage, its standard error, its death and its end."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
import trio

from tests.stopwatch import Stopwatch
from trimcp.channel import Incoming, Kind, MessageChannel, Outgoing
from trimcp.client.client import Client
from trimcp.errors import ConnectionLost, LocalError
from trimcp.transports.stdio import child
from trimcp.transports.stdio.child import ChildChannel, ShutdownTimes, StdioServer, child_environment
from trimcp.wire.jsonrpc import Malformed, Notification, Request, encode_notification, encode_request
from trimcp.wire.revisions import LATEST_LEGACY

ECHO = "import sys\nfor line in sys.stdin.buffer: sys.stdout.buffer.write(line); sys.stdout.flush()"
HOLD = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)']); "


def python(code: str, *arguments: str, **settings: object) -> StdioServer:
    return StdioServer((sys.executable, "-c", code, *arguments), **settings)


def note(method: str = "n") -> Outgoing:
    return Outgoing(encode_notification(method), Kind.NOTIFICATION)


async def everything(channel: MessageChannel) -> list[Incoming]:
    arrived: list[Incoming] = []
    try:
        while True:
            arrived.extend(await channel.receive())
    except trio.EndOfChannel:
        return arrived


async def test_messages_go_both_ways() -> None:
    async with python(ECHO).connect() as channel:
        sent = [Outgoing(encode_request(n, "m"), Kind.REQUEST, n) for n in range(100)]
        await channel.send(sent)
        arrived: list[Incoming] = []
        while len(arrived) < 100:
            arrived.extend(await channel.receive())
        assert [each.message for each in arrived] == [Request(n, "m") for n in range(100)]
        assert channel.process.returncode is None
    assert channel.process.returncode == 0
    with pytest.raises(trio.ClosedResourceError):
        await channel.send([note()])
    with pytest.raises(trio.ClosedResourceError):
        await channel.receive()


async def test_garbage_and_bad_utf8_are_survived() -> None:
    code = (
        "import sys; out = sys.stdout.buffer\n"
        r"out.write(b'Listening on port 1\n\xff\xfe\n\n' + sys.argv[1].encode() + b'\n')"
    )
    async with python(code, encode_notification("n").decode()).connect() as channel:
        first, second, third = [each.message for each in await everything(channel)]
        assert isinstance(first, Malformed)
        assert isinstance(second, Malformed)
        assert second.reason == "utf8"
        assert third == Notification("n")


async def test_only_harmless_variables_are_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    monkeypatch.setenv("LANG", "() { evil; }")
    monkeypatch.setenv("HOME", "/home/ada")
    environment = child_environment({"ADDED": "1"})
    assert "GITHUB_TOKEN" not in environment
    assert "LANG" not in environment
    assert environment["HOME"] == "/home/ada"
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["ADDED"] == "1"
    assert child_environment({"A": "1"}, inherit=False) == {"A": "1"}
    assert child_environment(inherit=["GITHUB_TOKEN"]) == {"GITHUB_TOKEN": "secret"}
    assert child_environment({"HOME": "/"}, inherit=True) == {**os.environ, "HOME": "/"}


async def test_environment_and_directory_reach_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "secret")
    code = (
        "import os, json; print(json.dumps({'jsonrpc': '2.0', 'method': 'n', 'params': "
        "{'cwd': os.getcwd(), 'token': os.getenv('GITHUB_TOKEN'), 'a': os.getenv('A')}}))"
    )
    async with python(code, env={"A": "1"}, cwd=tmp_path).connect() as channel:
        (arrived,) = await everything(channel)
    assert arrived.message == Notification(
        "n", {"cwd": os.fspath(await trio.Path(tmp_path).resolve()), "token": None, "a": "1"}
    )


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (StdioServer(("no-such-program-here", "x")), "no program of that name on its PATH"),
        (StdioServer(("python server.py",)), "each of its arguments as a string of its own"),
        (StdioServer(("/no/such/program",)), "no such file"),
        (StdioServer((sys.executable,), cwd="/no/such/place"), "working directory '/no/such/place'"),
        (StdioServer((__file__,)), "not executable"),
        (StdioServer(()), "must name a program"),
        (StdioServer(("a\0b",)), "cannot start"),
    ],
)
async def test_a_program_that_cannot_be_started(server: StdioServer, says: str) -> None:
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(LocalError, match=says):
        async with server.connect():
            raise AssertionError("it must not start")
    assert len(os.listdir("/dev/fd")) == before


async def test_standard_error_goes_to_the_hook_line_by_line() -> None:
    lines: list[str] = []
    code = r"import sys; sys.stderr.buffer.write(b'one\r\ntwo \xff\n' + b'x' * 20000 + b'\nlast'); sys.stdin.read()"
    async with python(code, on_stderr=lines.append).connect():
        pass
    assert lines[:2] == ["one", "two �"]
    assert "".join(lines[2:-1]) == "x" * 20000
    assert max(map(len, lines)) <= 8192
    assert lines[-1] == "last"


async def test_a_line_without_end_is_passed_on_in_pieces_while_it_grows() -> None:
    lines: list[str] = []
    come = trio.Event()

    def hook(line: str) -> None:
        lines.append(line)
        come.set()

    code = "import sys; sys.stderr.write('x' * 20000); sys.stderr.flush(); sys.stdin.read()"
    async with python(code, on_stderr=hook).connect():
        with trio.fail_after(60):
            await come.wait()
    assert max(len(line) for line in lines) <= 8 * 1024
    assert "".join(lines) == "x" * 20000


async def test_standard_error_goes_to_the_log_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "trimcp.stdio"):
        async with python("import sys; sys.stderr.write('hello\\x1b[2K\\n'); sys.stdin.read()").connect():
            pass
    assert rf"{sys.executable}: hello\x1b[2K" in [record.getMessage() for record in caplog.records]
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


async def test_a_hook_that_fails_is_logged_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    def hook(line: str) -> None:
        raise KeyError(line)

    code = "import sys; sys.stderr.write('a\\nb\\n'); sys.stderr.flush()\n" + ECHO
    async with python(code, on_stderr=hook).connect() as channel:
        await channel.send([note()])
        assert [each.message for each in await channel.receive()] == [Notification("n")]
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.ERROR]


async def test_endless_standard_error_is_drained_and_bounded() -> None:
    code = "import sys\nfor n in range(40): sys.stderr.write('%09d\\n' % n * 10000)\n" + ECHO
    async with python(code).connect() as channel:
        await channel.send([note()])
        assert [each.message for each in await channel.receive()] == [Notification("n")]
    assert len(channel.stderr_tail) == 64 * 1024
    assert channel.stderr_tail.endswith("000000039\n")


async def test_death_ends_the_channel_with_an_obituary() -> None:
    code = f"import sys\nprint({encode_notification('n').decode()!r})\n"
    code += "sys.stderr.write('cannot\\x1b[2K go on\\r\\n')\nsys.exit(3)"
    async with python(code).connect() as channel:
        assert [each.message for each in await everything(channel)] == [Notification("n")]
        assert channel.process.returncode == 3
        assert channel.close_reason() == (
            f"the server {sys.executable!r} exited with status 3; its last words on standard error:\n"
            r"  cannot\x1b[2K go on"
        )
        with pytest.raises(trio.BrokenResourceError):
            for _ in range(10):
                await channel.send([note()])


async def test_the_last_words_of_a_child_that_stops_reading_are_told() -> None:
    code = r"""
import json, os, sys, threading
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        about = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": about}), flush=True)
    elif asked["method"] == "notifications/initialized":
        print("out of memory", file=sys.stderr, flush=True)
        os.close(0)
        threading.Event().wait()
"""
    target = python(code, shutdown=ShutdownTimes(0.1, 5))
    with pytest.raises(ConnectionLost, match=r"stopped listening: the server .*\n  out of memory$"):
        async with Client("c").connect(target, revision=LATEST_LEGACY) as session:
            await session.call_tool("x", {"text": "x" * 5_000_000})


@pytest.mark.skipif(sys.platform == "win32", reason="waits for a child without reaping it")
async def test_no_last_word_is_on_its_way_while_the_obituary_is_written() -> None:
    """Of two tasks that run together either may be first, hence several children."""
    for _ in range(10):
        async with StdioServer(("sh", "-c", "echo 'Missing API key' >&2; exit 3")).connect() as channel:
            # All has been said before any task of the channel has looked.
            os.waitid(os.P_PID, channel.process.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - on purpose
            await trio.lowlevel.checkpoint()
            assert "Missing API key" in channel.close_reason()


@pytest.mark.parametrize("direction", [0, 1])
async def test_who_closes_a_pipe_and_then_dies_is_not_told_to_be_running(
    direction: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_REAPED", 60)
    said = f"sys.stdout.buffer.write({encode_notification('n')!r} + b'\\n'); sys.stdout.flush(); "
    code = f"import os, sys, time; os.close({direction}); {said if direction == 0 else ''}time.sleep(0.1); os._exit(3)"
    async with python(code).connect() as channel:
        if direction == 1:
            with pytest.raises(trio.EndOfChannel):
                await channel.receive()
        else:
            await channel.receive()
            assert channel.sends_now == (sys.platform != "win32")
            assert channel.send_nowait(note()) is not None
            with pytest.raises(trio.BrokenResourceError):
                await channel.send([note()])
        assert "exited with status 3" in channel.close_reason()


async def test_death_is_noticed_while_a_descendant_holds_the_pipes() -> None:
    """Received at once: what the child wrote before, then the end; a clogged send breaks too."""
    code = (
        f"{HOLD}import os, sys; print({encode_notification('n').decode()!r}, flush=True); sys.stdin.read(1); os.abort()"
    )
    async with python(code).connect() as channel:
        assert [each.message for each in await channel.receive()] == [Notification("n")]
        clock = Stopwatch((channel.process.pid,))
        async with trio.open_nursery() as nursery:

            async def clog() -> None:
                with pytest.raises(trio.BrokenResourceError):
                    await channel.send([Outgoing(bytes(1_000_000), Kind.NOTIFICATION)])

            nursery.start_soon(clog)
            assert await everything(channel) == []
        assert clock.took() < 5
        assert "was ended by SIGABRT" in channel.close_reason()


async def test_a_closed_output_is_the_end_even_if_the_child_lives() -> None:
    code = "import os, sys; os.close(1); sys.stdin.read()"
    async with python(code).connect() as channel:
        with pytest.raises(trio.EndOfChannel):
            await channel.receive()
        assert f"is still running (process {channel.process.pid})" in channel.close_reason()


async def test_what_the_body_raises_comes_out_as_itself() -> None:
    with pytest.raises(ZeroDivisionError):
        async with python(ECHO).connect() as channel:
            raise ZeroDivisionError
    assert channel.process.returncode == 0


async def test_the_bodys_error_is_not_lost_to_a_cancellation() -> None:
    with trio.CancelScope() as scope:
        with pytest.raises(ZeroDivisionError):
            async with python(ECHO).connect():
                scope.cancel()
                raise ZeroDivisionError
        assert scope.cancel_called


async def test_cancelling_ends_the_child() -> None:
    channel: ChildChannel | None = None
    with trio.CancelScope() as scope:
        async with python(ECHO).connect() as channel:
            scope.cancel()
            await channel.receive()
    assert scope.cancelled_caught
    assert channel is not None
    assert channel.process.returncode == 0


async def test_a_child_may_still_write_a_lot_when_it_is_closed() -> None:
    code = "import sys; sys.stdin.read(); sys.stdout.write('x' * 1000000); sys.stdout.flush(); sys.exit(7)"
    async with python(code).connect() as channel:
        await channel.aclose()
    assert channel.process.returncode == 7


async def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/dev/fd"))
    async with python(ECHO, shutdown=ShutdownTimes()).connect() as channel:
        await channel.send([note()])
        await channel.receive()
    assert len(os.listdir("/dev/fd")) == before
