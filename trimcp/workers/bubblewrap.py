"""Programs inside bubblewrap (Linux): what they see and may do there, and their end.

bwrap runs a program in namespaces of its own: of processes, of the network (with nothing in it), of mounts, users and
names. Its first process in there is their init, so killing that one kills all. No root and no daemon are needed, only
the package `bubblewrap` and a kernel that lets users make namespaces.
"""

from __future__ import annotations

import functools
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.errors import LocalError
from trimcp.support.descendants import MARK, Descendants, look, parent_of
from trimcp.workers.programs import INHERITED, Pipes, environment_of, worker_loads
from trimcp.workers.seccomp import seccomp_filter

log: logging.Logger = logging.getLogger("trimcp.server")

HOME: Final = "/tmp"  # noqa: S108 -- of the sandbox: nobody else sees it
"""The directory of a program in a sandbox: empty at first, its own, and gone with it."""

SCRATCH: Final = 64 * 2**20
"""Bytes that fit into that directory by default."""

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store")
_ETC: Final = (
    # of libraries and programs
    *(
        "alternatives",
        "ld.so.cache",
        "ld.so.conf",
        "ld.so.conf.d",
        "ld-musl-x86_64.path",
        "fonts",
        "magic",
        "mime.types",
    ),
    # of users, names and times
    *(
        "group",
        "hosts",
        "locale.alias",
        "locale.conf",
        "localtime",
        "nsswitch.conf",
        "os-release",
        "passwd",
        "timezone",
    ),
    # of trusted authorities; private keys are elsewhere
    *("ca-certificates", "pki/tls/certs", "pki/ca-trust", "ssl/certs", "ssl/openssl.cnf"),
)
_VISIBLE: Final = (*_SYSTEM, *(f"/etc/{name}" for name in _ETC))

_OWN: Final = ("/", "//", "/proc", "/dev", "/dev/shm", HOME)  # noqa: S108 -- the sandbox's

_INSTALL: Final = (
    'isolation="bwrap" needs the program bwrap: install the package "bubblewrap" (Debian, Ubuntu, Fedora, Arch). '
    "Nothing runs without its sandbox"
)
_INFORMED: Final = 5.0  # seconds for bwrap to say which process is the sandbox's first
_POLL: Final = 0.01  # seconds
_ENDED: Final = 5.0  # seconds for the system to end killed processes


@attrs.frozen
class Sandbox:
    """What programs in a sandbox see and may do beside what every one may."""

    bwrap: str  # the path of bubblewrap's program
    read: tuple[str, ...]  # paths that are visible, not to be written
    write: tuple[str, ...]  # paths that may be written, too
    scratch: int  # bytes that fit into /tmp, and into /dev/shm; they are memory

    @staticmethod
    def of(read: Sequence[str | os.PathLike[str]], write: Sequence[str | os.PathLike[str]], scratch: int) -> Sandbox:
        """Return the settings, checked. Raises ValueError: a path is not absolute, or does not exist.

        Raises LocalError: bubblewrap is not installed, or it can make no sandbox here; the text says why.
        """
        if worker_loads():
            return Sandbox("bwrap", (), (), scratch)
        if sys.platform != "linux":
            raise LocalError('isolation="bwrap" needs Linux; nothing runs without its sandbox')
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise LocalError(_INSTALL)
        sandbox = Sandbox(bwrap, _paths("read", read), _paths("write", write), scratch)
        _try(bwrap)
        return sandbox

    def shows(self, path: str | os.PathLike[str]) -> bool:
        """Return whether this path is visible in the sandbox, and every link on the way to it."""
        given = os.path.abspath(path)
        seen = (*_VISIBLE, *self.read, *self.write)
        return all(any(_is_in(each, root) for root in seen) for each in (given, os.path.realpath(given)))

    def command(self, command: Sequence[str], directory: str | os.PathLike[str], *options: str) -> list[str]:
        """Return the command line that runs a command in a sandbox."""
        size = str(self.scratch)
        line = [self.bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        for path in _VISIBLE:
            line += ["--ro-bind-try", path, path]
        # Root may write the kernel's settings in /proc/sys, also without capabilities.
        line += ["--proc", "/proc", "--remount-ro", "/proc"]
        line += ["--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]  # noqa: S108
        line += ["--size", size, "--tmpfs", HOME]
        for path in self.read:
            line += ["--ro-bind", path, path]
        for path in self.write:
            line += ["--bind", path, path]
        return [*line, "--remount-ro", "/", "--chdir", os.fspath(directory), *options, "--", *command]


def check_counted() -> None:
    """Raise LocalError where the kernel does not count the processes of a sandbox by themselves.

    Before Linux 5.14 it counts all of the user's, and those of root never.
    """
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if release is not None and tuple(map(int, release.groups())) < (5, 14):
        raise LocalError("processes= needs Linux 5.14 or newer, which counts those of a sandbox by themselves")
    if os.geteuid() == 0:
        raise LocalError("processes= bounds nothing for root; run the server as another user")


def _paths(name: str, paths: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    if isinstance(paths, str | bytes):
        raise TypeError(f"{name} is a list of paths, not one: {name}=[{paths!r}]")
    found = tuple(os.fspath(path) for path in paths)
    for path in found:
        if not os.path.isabs(path) or not os.path.exists(path):
            raise ValueError(f"{name} names absolute paths that exist, not {path!r}")
        if os.path.normpath(path) in _OWN:
            raise ValueError(f"{name} cannot name {path!r}, which the sandbox has of its own; name what is in it")
    return found


def _is_in(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


@functools.cache
def _try(bwrap: str) -> None:
    """Run what does nothing, once in a process: containers and some kernels do not let users make namespaces."""
    sandbox = Sandbox(bwrap, (), (), 1_048_576)
    nothing = shutil.which("true") or "/bin/true"
    with _seccomp() as (descriptors, filters):
        done = subprocess.run(  # noqa: S603 -- a fixed command
            sandbox.command([nothing], HOME, *filters),
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    if done.returncode:
        raise LocalError(
            f"bubblewrap can make no sandbox here: {done.stderr.strip()[:500]} (a container or the kernel may forbid "
            "namespaces to users). Nothing runs without its sandbox"
        )
    if not filters:
        log.warning("no seccomp filter is known for this machine: sandboxes have namespaces only")


@contextmanager
def _seccomp() -> Iterator[tuple[list[int], list[str]]]:
    """Yield the seccomp filter as a descriptor that bwrap reads, and the options that name it; neither if unknown."""
    program = seccomp_filter()
    if program is None:
        yield [], []
        return
    handle = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    try:
        os.write(handle, program)
        os.lseek(handle, 0, os.SEEK_SET)
        yield [handle], ["--seccomp", str(handle)]
    finally:
        os.close(handle)


@attrs.define(eq=False, repr=False)
class SandboxedProgram:
    """A program in a sandbox, with the thread that started it.

    The kernel ends a sandbox with its parent (`--die-with-parent`), and takes the *thread* that started it for that. So
    this thread waits until the end.
    """

    _popen: subprocess.Popen[Any]
    _over: trio.Event
    _waiting: trio.CancelScope
    _init: int | None = None  # a pidfd of the sandbox's first process
    _killed: bool = False

    @staticmethod
    async def start(
        nursery: trio.Nursery,
        sandbox: Sandbox,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: str | os.PathLike[str],
        pipes: Pipes,
        *,
        keep: Sequence[int] = (),
    ) -> SandboxedProgram:
        """Start a program in a sandbox; a task in the nursery waits for its end. Raises OSError if that fails.

        It cannot be cancelled, and takes some milliseconds. The nursery must not end before it has. It inherits the
        descriptors `keep` beside its standard streams.
        """
        mark = Descendants.new_mark()
        reading, writing = os.pipe()
        info = trio.lowlevel.FdStream(reading)
        try:
            with _seccomp() as (descriptors, filters):
                arguments: dict[str, Any] = {
                    "args": sandbox.command(command, directory, *filters, "--info-fd", str(writing)),
                    "stdin": pipes.stdin,
                    "stdout": pipes.stdout,
                    "stderr": pipes.stderr,
                    "env": {**environment, MARK: mark},
                    "pass_fds": (*descriptors, writing, *keep),
                    "start_new_session": True,
                }
                with trio.CancelScope(shield=True):  # a process that has begun must become known, to be killed
                    program: SandboxedProgram = await nursery.start(_keep, arguments)
            os.close(writing)
            writing = -1
            with trio.move_on_after(_INFORMED, shield=True) as waiting:
                program._find_init(await _read_all(info))
            if waiting.cancelled_caught:
                with trio.move_on_after(_ENDED, shield=True):
                    await program._kill_blindly(Descendants(program.pid, mark))
                await program.end()
                raise TimeoutError(f"bubblewrap did not make a sandbox within {_INFORMED:g} seconds")
        finally:
            info.close()
            if writing != -1:
                os.close(writing)
        return program

    def _find_init(self, told: bytes) -> None:
        """Open the sandbox's first process: bwrap tells its id, and its parent is bwrap, as long as that lives."""
        with suppress(orjson.JSONDecodeError, KeyError, OSError):
            pid = orjson.loads(told)["child-pid"]
            handle = os.pidfd_open(pid)
            if parent_of(pid) == self._popen.pid:
                self._init = handle
            else:  # it has ended already, and its id is another's
                os.close(handle)

    @property
    def pid(self) -> int:
        """The process of bwrap, outside."""
        return self._popen.pid

    stopped = False  # of what is inside nobody can tell

    @property
    def returncode(self) -> int | None:
        code = self._popen.returncode if self._over.is_set() else None
        # bwrap ends with 128 and the signal that ended the program, as shells do.
        return 128 - code if code is not None and code - 128 in signal.valid_signals() else code

    async def _kill_blindly(self, descendants: Descendants) -> None:
        """Kill bwrap and its child, of which it has not told yet. Alone, that child would wait for bwrap for ever."""
        self._popen.kill()
        await self._over.wait()
        while living := await look(descendants):
            descendants.signal(living, signal.SIGKILL)
            await trio.sleep(_POLL)

    async def exited(self) -> None:
        await self._over.wait()

    def kill(self) -> None:
        """Kill the sandbox's first process: the kernel then kills all in it. `end` waits for that."""
        if self._init is None:
            self._popen.kill()
        else:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._init, signal.SIGKILL)

    async def end(self) -> int | None:
        if not self._killed:
            self._killed = True
            self.kill()
            with trio.move_on_after(_ENDED, shield=True):
                await self._gone()
            if not self._over.is_set():
                log.error("the sandbox of process %d survived SIGKILL", self._popen.pid)
                self._waiting.cancel(reason="it survived SIGKILL")
        return self.returncode

    async def _gone(self) -> None:
        """Wait until nothing is left in the sandbox: its first process is over when all others are."""
        try:
            if self._init is not None:
                await trio.lowlevel.wait_readable(self._init)
            self._popen.kill()
            await self._over.wait()
        finally:
            if self._init is not None:
                os.close(self._init)
                self._init = None


async def start_worker(
    nursery: trio.Nursery, sandbox: Sandbox, command: Sequence[str], output: int, keep: Sequence[int]
) -> SandboxedProgram:
    """Start a worker process in a sandbox, with these descriptors; see `SandboxedProgram.start`."""
    environment = environment_of(INHERITED, HOME, {})
    pipes = Pipes(subprocess.DEVNULL, output, output)
    return await SandboxedProgram.start(nursery, sandbox, command, environment, HOME, pipes, keep=keep)


def of_python(file: str) -> list[str]:
    """Return what a sandbox has to show for Python to load this file with all that we find: our `sys.path`."""
    wanted = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))]
    wanted += [os.path.dirname(os.path.abspath(file)), os.path.abspath(file), *map(os.path.abspath, sys.path)]
    found = dict.fromkeys(path for path in wanted if os.path.exists(path) and path not in _OWN)
    return [path for path in found if not any(_is_in(path, system) for system in _SYSTEM)]


async def _keep(arguments: Mapping[str, Any], *, task_status: trio.TaskStatus[SandboxedProgram]) -> None:
    """Start a program in a thread that then waits for its end, and reaps it."""
    over = trio.Event()
    waiting = trio.CancelScope(shield=True)  # until the program has ended, which `end` sees to

    def run() -> None:
        popen = subprocess.Popen(**arguments)
        trio.from_thread.run_sync(task_status.started, SandboxedProgram(popen, over, waiting))
        popen.wait()

    with waiting:
        await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
        over.set()


async def _read_all(stream: trio.lowlevel.FdStream) -> bytes:
    told = b""
    while chunk := await stream.receive_some(4_096):
        told += chunk
    return told
