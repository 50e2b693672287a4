"""Programs in a sandbox: what they cannot do, each beside a control that shows what would happen without it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from tests.workers.test_commands import NASTY, _running, out_of_time
from tests.workers.test_pool import until
from trimcp.testing import connected
from trimcp.wire.tools import CallToolResult
from trimcp.workers import bubblewrap
from trimcp.workers.commands import Command
from trimcp.workers.programs import bounded_by

pytestmark = [pytest.mark.slow, pytest.mark.needs("bwrap", "coreutils")]

HOME = os.path.expanduser("~")
ROOT = Path(trimcp.__file__).parent.parent
PYTHON = sorted({sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))})
"""Where this interpreter is: seldom where a sandbox shows it by itself."""


async def call(
    command: list[str], arguments: Mapping[str, Any] | None = None, *, isolation: Any = "bwrap", **options: Any
) -> CallToolResult:
    server = trimcp.Server("s")
    server.add_command("tool", command, isolation=isolation, **options)
    async with connected(server) as session:
        return await session.call_tool("tool", arguments or {})


async def run(lines: str, *words: str, isolation: str = "bwrap", read: Any = (), **options: Any) -> Any:
    """Run Python inside and return what it prints, as JSON."""
    if isolation == "bwrap":
        options["read"] = [*PYTHON, *read]
    text = f"import json, os, socket, sys\ndef say(what): print(json.dumps(what))\n{lines}"
    assert "{" not in lines  # it would be a placeholder
    command = [sys.executable, "-I", "-c", text.replace("{isolation}", isolation), *words]
    result = await call(command, isolation=isolation, **options)
    assert not result.is_error, result.text
    return json.loads(result.text)


def names(directory: Path) -> list[str]:
    """What is in it, as this process sees it."""
    return sorted(each.name for each in directory.iterdir())


TRY = """
def attempt(function, *args):
    try:
        function(*args)
    except OSError as error:
        return type(error).__name__ if error.errno is None else __import__('errno').errorcode[error.errno]
    return 'done'
"""


# Files

WRITE = TRY + "say([attempt(open, path + '/written by a sandbox', 'w') for path in sys.argv[1:]])"


async def test_nothing_outside_is_written(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    home = "/root" if HOME.startswith("/tmp") else HOME
    places = [str(tmp_path), str(shown), home, "/", "/usr", "/etc", "/dev", "/proc", "/var/tmp", "/opt"]
    said = dict(zip(places, await run(WRITE, *places, read=[shown]), strict=True))
    assert said.pop(str(shown)) == "EROFS"
    assert said.pop("/usr") in ("EROFS", "EACCES")
    said.pop(str(tmp_path))  # what stands in between is in its own /tmp
    assert "done" not in said.values(), said
    assert names(tmp_path) == ["shown"]
    assert names(shown) == []
    control = await run(WRITE, str(tmp_path), str(shown), isolation="command")
    assert control == ["done", "done"]
    assert len(names(shown)) == 1


async def test_the_kernel_s_own_settings_are_not_to_be_written() -> None:
    """Root could, even one without capabilities, if /proc were as it is elsewhere."""
    lines = TRY + "say([attempt(open, path, 'a') for path in sys.argv[1:]])"
    said = await run(lines, "/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger")
    assert "done" not in said, said


async def test_what_is_to_be_written_is(tmp_path: Path) -> None:
    assert await run(WRITE, str(tmp_path), write=[tmp_path]) == ["done"]
    assert names(tmp_path) == ["written by a sandbox"]


async def test_only_the_system_and_what_is_named_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "shown").write_text("shown")
    lines = TRY + "say([attempt(open, path) for path in sys.argv[1:]])"
    places = [str(tmp_path / "secret"), str(tmp_path / "shown"), "/etc/passwd", "/etc/shadow", "/etc/machine-id"]
    said = await run(lines, *places, read=[tmp_path / "shown"])
    assert said == ["ENOENT", "done", "done", "ENOENT", "ENOENT"]
    assert (await run(lines, places[0], isolation="command")) == ["done"]
    there = set(await run("say(os.listdir('/'))"))
    assert not there & {"home", "run", "srv", "var", "mnt", "media", "boot", "sys", "opt"} - {
        each.split("/")[1] for each in PYTHON
    }


async def test_its_own_directory_is_nobody_else_s(tmp_path: Path) -> None:
    lines = "open('/tmp/of a sandbox', 'w').close(); say([os.getcwd(), os.listdir('.'), dict(os.environ)])"
    for _ in range(2):
        directory, files, environment = await run(lines)
        assert directory == environment["HOME"] == environment["TMPDIR"] == "/tmp"
        assert [file for file in files if not any(each.startswith(f"/tmp/{file}") for each in PYTHON)] == [
            "of a sandbox"
        ]
    assert "of a sandbox" not in names(Path("/tmp"))


async def test_its_own_directory_is_bounded() -> None:
    lines = TRY + "say([attempt(open(path, 'wb', 0).write, b'x' * 2_000_000) for path in sys.argv[1:]])"
    assert await run(lines, "/tmp/f", "/dev/shm/f", scratch=2**22) == ["done", "done"]
    lines = lines.replace("2_000_000", "8_000_000").replace(".write,", ".writelines,").replace("b'x'", "[b'x' * 1000]")
    lines = lines.replace("8_000_000", "8_000")
    assert await run(lines, "/tmp/f", "/dev/shm/f", scratch=2**22) == ["ENOSPC", "ENOSPC"]


async def test_a_directory_may_be_given(tmp_path: Path) -> None:
    assert await run("say(os.getcwd())", cwd=tmp_path, read=[tmp_path]) == str(tmp_path)
    with pytest.raises(ValueError, match="is not visible in the sandbox; add it to read= or write="):
        await run("say(os.getcwd())", cwd=tmp_path)


# Connections


@pytest.fixture
def listening() -> Iterator[int]:
    """The port of a listener on this machine."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=16)) as listener:
        yield listener.getsockname()[1]


async def test_connections_are_refused(listening: int) -> None:
    lines = TRY + (
        "def dial(kind, *address):\n"
        "    with socket.socket(kind) as each:\n"
        "        each.settimeout(5)\n"
        "        each.connect(address)\n"
        "say([attempt(dial, socket.AF_INET, '127.0.0.1', int(sys.argv[1])),"
        " attempt(dial, socket.AF_INET, '192.0.2.1', 80),"
        " attempt(dial, socket.AF_INET6, '2001:db8::1', 80)])"
    )
    said = await run(lines, str(listening))
    assert said == ["ECONNREFUSED", "ENETUNREACH", "ENETUNREACH"]
    control = await run(lines.partition("say")[0] + "say(attempt(dial, socket.AF_INET, '127.0.0.1', int(sys.argv[1])))",
                        str(listening), isolation="command")  # fmt: skip
    assert control == "done"


async def test_sockets_in_files_lead_nowhere(tmp_path: Path) -> None:
    """A mount that is read-only does not keep anybody from connecting to a socket in it, such as that of Docker."""
    lines = TRY + (
        "def dial(path):\n    with socket.socket(socket.AF_UNIX) as each: each.connect(path)\n"
        "say([attempt(dial, path) for path in sys.argv[1:]])"
    )
    abstract = f"trimcp-{os.getpid()}"
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.bind(path)
        second.bind(f"\0{abstract}")
        first.listen()
        second.listen()
        assert await run(lines, path, read=[tmp_path]) == ["EACCES"]
        assert await run(lines.replace("(path)\n", "('\\0' + path)\n"), abstract) == ["EACCES"]
        assert await run(lines, path, isolation="command") == ["done"]


# Processes and privileges


async def test_it_sees_no_process_but_its_own() -> None:
    lines = "say([name for name in os.listdir('/proc') if name.isdecimal()])"
    assert len(await run(lines)) <= 3
    assert str(os.getpid()) in await run(lines, isolation="command")


async def test_it_gets_no_descriptor_but_its_streams() -> None:
    near, far = socket.socketpair()
    with near, far:
        assert await run("say(sorted(map(int, os.listdir('/proc/self/fd'))))") == [
            0,
            1,
            2,
            3,
        ]  # the last is the listing


async def test_it_has_no_privileges_and_gets_none() -> None:
    lines = "say([line.split() for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNew', 'Seccomp:'))])"
    status = dict(await run(lines))
    assert {int(status[name], 16) for name in ("CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:")} == {0}
    assert (status["NoNewPrivs:"], status["Seccomp:"]) == ("1", "2")


async def test_system_calls_are_refused() -> None:
    """Each with arguments with which it would do nothing: what counts is who refuses."""
    lines = (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def told(name, *args):\n"
        "    ctypes.set_errno(0)\n"
        "    getattr(libc, name)(*args)\n"
        "    return errno.errorcode.get(ctypes.get_errno(), 'done')\n"
        "say([told('unshare', 0), told('ptrace', 0, 0, 0, 0), told('setns', -1, 0), told('mount', 0, 0, 0, 0, 0)])"
    )
    assert await run(lines) == ["EPERM"] * 4
    assert (await run(lines, isolation="command"))[0] == "done"


async def test_threads_and_processes_work_in_it() -> None:
    lines = (
        "import threading, subprocess\nfound = []\n"
        "each = threading.Thread(target=found.append, args=('thread',)); each.start(); each.join()\n"
        "found.append(subprocess.run(['echo', 'process'], capture_output=True, text=True).stdout.strip())\n"
        "if os.fork() == 0: os._exit(5)\n"
        "found.append(os.waitstatus_to_exitcode(os.wait()[1]))\nsay(found)"
    )
    assert await run(lines) == ["thread", "process", 5]


# What holds for every command


async def test_arguments_and_results_are_those_of_any_command() -> None:
    lines = "say([sys.argv[1:], sys.stdin.read()])"
    text = f"import json, sys\ndef say(what): print(json.dumps(what))\n{lines}"
    result = await call(
        [sys.executable, "-I", "-c", text, "{first}"], {"first": NASTY, "text": "in"}, stdin="{text}", read=PYTHON
    )
    assert json.loads(result.text) == [[NASTY], "in"]
    assert (await call(["sh", "-c", "echo bad >&2; exit 7"])).text == "sh failed with exit status 7: bad"
    assert (await call(["sh", "-c", "kill -SEGV $$"])).text == "sh was ended by SIGSEGV"
    assert (await call(["cat", "/dev/zero"], max_output=1000)).text.startswith("cat wrote more than 1000 bytes")


async def test_the_environment_does_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    environment = await run("say(dict(os.environ))", env={"MINE": "m"})
    assert environment["MINE"] == "m"
    assert "API_TOKEN" not in environment
    inside = "say([open('/proc/' + name + '/environ').read() for name in os.listdir('/proc') if name.isdecimal()])"
    assert "secret" not in str(await run(inside))


async def test_memory_and_processor_time_are_bounded() -> None:
    command = [sys.executable, "-I", "-c"]
    result = await call([*command, "bytearray(2**30)"], memory=2**29, read=PYTHON)
    assert "MemoryError" in result.text
    result = await call([*command, "while True: pass"], cpu_time=0.5, read=PYTHON)
    assert result.text.endswith("used more than 0.5 s of processor time")


@pytest.mark.skipif(sys.platform == "linux" and os.geteuid() == 0, reason="the bounds of root count nothing")
async def test_processes_are_counted() -> None:
    lines = TRY + "say([attempt(lambda: os.fork() or __import__('time').sleep(600)) for _ in range(5)])"
    assert await run(lines, processes=4) == ["done"] * 3 + ["EAGAIN"] * 2


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs to become somebody else")
def test_processes_of_others_than_root_are_counted() -> None:
    """The same in a shell, for whoever runs the tests as root. What others run does not count."""
    prlimit = shutil.which("prlimit")
    assert prlimit is not None
    inside = "for i in 1 2 3 4 5; do (sleep 600 & echo begun) & wait $!; done 2>&1"
    sandbox = bubblewrap.Sandbox.of((), (), 2**20)
    for most in (4, 40):
        line = sandbox.command([*bounded_by(prlimit, None, None, most), "/bin/sh", "-c", inside], "/tmp")
        become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
        done = subprocess.run([*become, *line], capture_output=True, text=True, timeout=60)
        assert (done.stdout.count("begun") == 5) is (most == 40), done


def test_processes_are_not_counted_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    server = trimcp.Server("s")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(trimcp.LocalError, match="bounds nothing for root"):
        server.add_command("tool", ["true"], isolation="bwrap", processes=5)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("platform.release", lambda: "5.10.0-28-amd64")
    with pytest.raises(trimcp.LocalError, match=r"needs Linux 5\.14"):
        server.add_command("tool", ["true"], isolation="bwrap", processes=5)


# The end

FLIGHT = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execve('/bin/sleep', ['sleep', 'MARK'], dict())
time.sleep(0.1)
os.execv('/bin/sleep', ['sleep', 'MARK'])
"""
"""Two that leave: the session, the parent, the environment. Of a plain command we would not find them all."""


async def test_cancelling_leaves_no_process() -> None:
    mark = f"600.{os.getpid()}"
    server = trimcp.Server("s")
    command = [sys.executable, "-I", "-c", FLIGHT.replace("MARK", mark)]
    server.add_command("tool", command, isolation="bwrap", read=PYTHON)
    async with connected(server) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "tool")
        await until(lambda: len([pid for pid in _running(mark) if _is_sleep(pid)]) == 3)
        nursery.cancel_scope.cancel()
    await until(lambda: not _running(mark))


def _is_sleep(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text() == "sleep\n"
    except OSError:
        return False


async def test_all_is_over_when_a_call_is(tmp_path: Path) -> None:
    """A timeout, and a program that ends before what it started."""
    mark = f"601.{os.getpid()}"
    lines = FLIGHT.replace("MARK", mark)
    file = tmp_path / "began"
    began = f"{lines.rpartition('os.execv(')[0]}open({str(file)!r}, 'w'); time.sleep(600)"
    command = [sys.executable, "-I", "-c", began]
    await out_of_time(command, file.exists, file, isolation="bwrap", read=PYTHON, write=[tmp_path])
    assert _running(mark) == []
    with trio.fail_after(30):
        result = await call([sys.executable, "-I", "-c", lines.rpartition("os.execv(")[0]], read=PYTHON)
    assert not result.is_error, result.text
    assert _running(mark) == []


async def test_cancelling_while_it_starts_leaves_nothing() -> None:
    mark = f"602.{os.getpid()}"
    command = Command(["sleep", mark], isolation="bwrap")
    before = set(os.listdir("/proc/self/fd"))
    for moment in range(40):
        with trio.move_on_after(moment / 2_000):
            await command({})
    assert _running(mark) == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("seconds", [0, 0.001, 0.002, 0.004])
async def test_a_start_that_takes_too_long_is_given_up(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever state bwrap is then."""
    monkeypatch.setattr(bubblewrap, "_INFORMED", seconds)
    mark = f"605.{os.getpid()}"
    given_up = 0
    for _ in range(15):
        try:
            with trio.move_on_after(0.05):  # where it was fast enough
                await Command(["sleep", mark], isolation="bwrap")({})
        except TimeoutError:
            given_up += 1
        assert _running(mark) == []
    assert given_up or seconds


async def test_it_outlives_the_idle_time_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes the thread that started it for its parent."""
    monkeypatch.setattr("trio._core._thread_cache.IDLE_TIMEOUT", 0.05)
    threads = threading.active_count()
    result = await call(["sh", "-c", "sleep 1; echo awake"])
    assert (result.text, result.is_error) == ("awake\n", False)
    await until(lambda: threading.active_count() <= threads)


SERVER = """
import sys, trio, trimcp
from trimcp.testing import connected
server = trimcp.Server("s")
server.add_command("tool", ["sleep", sys.argv[1]], isolation="bwrap")
async def main():
    async with connected(server) as session:
        await session.call_tool("tool")
trio.run(main)
"""


async def test_it_goes_with_a_server_that_was_killed() -> None:
    mark = f"603.{os.getpid()}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", SERVER, mark], env=environment) as server:  # noqa: ASYNC220 -- to be killed
        try:
            await until(lambda: any(map(_is_sleep, _running(mark))))
            server.kill()
            server.wait()
            await until(lambda: not _running(mark))
        finally:
            server.kill()


# Without it nothing runs


def test_without_bubblewrap_a_command_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **options: None if name == "bwrap" else which(name, **options))
    server = trimcp.Server("s")
    with pytest.raises(trimcp.LocalError, match='install the package "bubblewrap"'):
        server.add_command("tool", ["true"], isolation="bwrap")
    assert len(server.tools) == 0


def test_where_no_sandbox_can_be_made_a_command_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(trimcp.LocalError, match=r"can make no sandbox here: bwrap: No permissions .* Nothing runs"):
        trimcp.Server("s").add_command("tool", ["true"], isolation="bwrap")


async def test_a_sandbox_that_vanishes_takes_the_tool_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninstalled while the server runs: the call fails, and the program does not run."""
    real = shutil.which("bwrap")
    assert real is not None
    (tmp_path / "bwrap").symlink_to(real)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ran = tmp_path / "ran"
    command = Command(["touch", str(ran)], isolation="bwrap", write=[tmp_path])
    await command({})
    assert ran.exists()
    ran.unlink()
    (tmp_path / "bwrap").unlink()
    with pytest.raises(FileNotFoundError):
        await command({})
    assert not ran.exists()


@pytest.mark.parametrize("path", ["/", "/tmp", "/proc", "/dev", "relative", "/no/such/place"])
def test_what_cannot_be_opened(path: str) -> None:
    with pytest.raises(ValueError, match="read"):
        trimcp.Server("s").add_command("tool", ["true"], isolation="bwrap", read=[path])


def test_a_program_that_the_sandbox_does_not_show_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o755)
    with pytest.raises(trimcp.LocalError, match="is not visible in the sandbox; add its directory to read="):
        trimcp.Server("s").add_command("tool", [str(program)], isolation="bwrap")
    trimcp.Server("s").add_command("tool", [str(program)], isolation="bwrap", read=[tmp_path])


def test_machines_without_a_filter_say_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(bubblewrap, "seccomp_filter", lambda: None)
    bwrap = shutil.which("bwrap")
    assert bwrap is not None
    bubblewrap._try.__wrapped__(bwrap)
    assert "no seccomp filter is known for this machine" in caplog.text
