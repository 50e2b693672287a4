"""Several processes that serve the same sockets: the parent, which starts them anew, and what each one inherits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import attrs
import trio

from trimcp.run import on_signals
from trimcp.support.descendants import signal_name
from trimcp.transports.http.h1.spread import ConnectionShares, leave, open_shares

_CONTROL: Final = "TRIMCP_WORKER_CONTROL"
_SOCKETS: Final = "TRIMCP_WORKER_SOCKETS"
_SHARES: Final = "TRIMCP_WORKER_SHARES"
# In seconds.
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 10.0
_LONGEST_AFTER_SERVING: Final = 1.0
_STEADY: Final = 30.0
_MARGIN: Final = 5.0
_REAPED: Final = 5.0


@attrs.define(eq=False)
class InheritedSockets:
    """What a worker inherits from its parent: listening sockets, the control socket, and how connections are spread."""

    sockets: list[socket.socket]
    _control: socket.socket
    shares: ConnectionShares | None

    def ready(self) -> None:
        """Tell the parent that requests are answered from now on."""
        try:
            self._control.send(b"r")
        except OSError:
            pass  # the parent has exited; `stopped` returns then

    async def stopped(self) -> None:
        """Wait until the parent asks this worker to end, or has exited."""
        control = trio.socket.from_stdlib_socket(self._control)
        try:
            while await control.recv(1):
                pass
        except OSError:
            pass

    def close(self) -> None:
        """Close the control socket; the listening sockets are closed by what serves them."""
        self._control.close()


def inherited() -> InheritedSockets | None:
    """Return the inherited sockets, only at the first call; None if this process is not a worker."""
    control, sockets = os.environ.pop(_CONTROL, None), os.environ.pop(_SOCKETS, None)
    if control is None or sockets is None:
        return None
    found = [socket.socket(fileno=int(number)) for number in (control, *sockets.split(","))]
    for each in found:
        each.set_inheritable(False)  # child processes of the server must not get them
    shares: ConnectionShares | None = None
    if place := os.environ.pop(_SHARES, None):
        fd, _, number = place.partition(":")
        shares = ConnectionShares(int(fd), int(number))
        os.close(int(fd))
    return InheritedSockets(found[1:], found[0], shares)


@attrs.define(eq=False)
class Workers:
    """A number of processes that run the same command and serve the same sockets.

    The parent opens the sockets and the workers inherit them. So port 0 is one port for all, and while a worker is
    replaced another one accepts waiting connections. Each worker has a control socket to the parent. The worker reports
    on it that it listens; when the parent closes it or exits, the worker drains. It is not a signal, so that a service
    manager that signals every process of a group does not signal the workers twice.
    """

    command: Sequence[str]  # the program and its arguments; no secrets, other users can read them
    number: int  # how many
    sockets: Sequence[socket.socket]  # what they serve; the caller closes them
    env: Mapping[str, str]  # variables for them beside our own
    grace: float  # seconds they may take to end when asked to; then they are killed
    say: Callable[[str], object]  # called with lines for a person
    # seconds before the first replacement of a worker that crashed. It doubles each time, to ten seconds, or to one
    # where the worker had been ready, until a worker has lived for half a minute.
    pause: float = _FIRST_PAUSE
    _controls: dict[trio.Process, socket.socket] = attrs.field(init=False, factory=dict)
    _ready: dict[int, trio.Process] = attrs.field(init=False, factory=dict)  # who was ready last, by number
    _stop: trio.Event = attrs.field(init=False, factory=trio.Event)
    _code: int = attrs.field(init=False, default=0)
    _shares: int | None = attrs.field(init=False, default=None)

    async def run(self, listening: Callable[[], object]) -> int:
        """Keep the workers running until SIGINT or SIGTERM comes, and return the exit code.

        The first signal lets them drain; the second kills them and ends this process at once. If a worker ends before
        any has been ready there is no sense in starting others: all end, and the code is that worker's. `listening` is
        called once, when each of them is ready for the first time.
        """
        with ExitStack() as stack:
            stack.enter_context(on_signals(lambda number: self._stop.set(), self._kill_all))
            if self.number > 1:
                self._shares = open_shares(self.number)
                stack.callback(os.close, self._shares)
            async with trio.open_nursery() as nursery:
                for number in range(1, self.number + 1):
                    nursery.start_soon(self._keep, number, listening)
                await self._stop.wait()
                self._end()
                nursery.cancel_scope.deadline = trio.current_time() + self.grace + _MARGIN
            if nursery.cancel_scope.cancelled_caught:
                self.say("a worker did not end in time and was killed")
                return self._code or 1
        return self._code

    async def _keep(self, number: int, listening: Callable[[], object]) -> None:
        """Run one worker, and another one whenever it ends, until all are to end."""
        pause = self.pause
        while not self._stop.is_set():
            begun = trio.current_time()
            process = await self._run_one(partial(self._heard, number, listening), number - 1)
            how = _how_it_ended(process.returncode)
            if self._stop.is_set():
                if process.returncode:
                    self.say(f"worker {number} {how}")
                    self._code = self._code or 1
                return
            if not self._ready:
                self._code = process.returncode if process.returncode and process.returncode > 0 else 1
                self.say(f"worker {number} {how} before it served anything")
                self._stop.set()
                return
            longest = _LONGEST_AFTER_SERVING if self._ready.get(number) is process else _LONGEST_PAUSE
            pause = self.pause if trio.current_time() - begun > _STEADY else min(pause, longest)
            self.say(f"worker {number} (process {process.pid}) {how}; the next one starts in {pause:g} s")
            with trio.move_on_after(pause):
                await self._stop.wait()
            pause *= 2

    async def run_versions(self, listening: Callable[[], object], changed: AsyncIterable[str]) -> int:
        """Keep one worker until SIGINT or SIGTERM comes, and start the next one whenever something has changed.

        The one before drains once the next one is ready, and goes on if that ends before. Returns as `run`.
        """
        serving: tuple[int, trio.Process] | None = None
        following = trio.CancelScope()

        def ready(version: int, process: trio.Process) -> None:
            nonlocal serving
            old, new = serving, (version, process)
            if old is None:
                serving = new
                listening()
                return
            late, serving = (old, new) if old[0] < version else (new, old)
            self.say(f"version {serving[0]} serves from now on")
            self._drain(late[1])

        async def follow() -> None:
            version = 1
            with following:
                async for name in changed:
                    version += 1
                    self.say(f"{name} has changed")
                    nursery.start_soon(keep, version)

        async def keep(version: int) -> None:
            nonlocal serving
            process = await self._run_one(partial(ready, version))
            if self._stop.is_set():
                return
            how = _how_it_ended(process.returncode)
            if serving is None:
                self.say(f"the server {how} before it served anything; it starts again when a file changes")
            elif serving[1] is process:
                serving = None
                self.say(f"the server {how}; it starts again when a file changes")
            elif serving[0] < version:
                self.say(f"the new version {how} before it served anything; the old one goes on")

        with on_signals(lambda number: self._stop.set(), self._kill_all):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep, 1)
                nursery.start_soon(follow)
                await self._stop.wait()
                following.cancel(reason="told to end")
                self._end()
                nursery.cancel_scope.deadline = trio.current_time() + self.grace + _MARGIN
        return 0

    async def _run_one(self, ready: Callable[[trio.Process], object], place: int = 0) -> trio.Process:
        """Run a worker until it ends; `ready` is called once it is. `place`: its own in the shares of connections."""
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), *(each.fileno() for each in self.sockets)]
        env = {**os.environ, **self.env, _CONTROL: str(fds[0]), _SOCKETS: ",".join(map(str, fds[1:]))}
        if self._shares is not None:
            env[_SHARES] = f"{self._shares}:{place}"
            fds.append(self._shares)
        with theirs:
            # A group of its own: Ctrl-C at a terminal is for the parent, which then asks its workers to end.
            process = await trio.lowlevel.open_process(
                list(self.command), stdin=subprocess.DEVNULL, pass_fds=fds, env=env, process_group=0
            )
        with ours:
            self._controls[process] = ours
            try:
                await self._attend(process, ours, ready)
            except BaseException:  # cancelled, mostly: no worker outlives who looks after it
                _kill(process)
                with trio.move_on_after(_REAPED, shield=True):  # it is dead; this is for the system to say so
                    await process.wait()
                raise
            finally:
                del self._controls[process]
                if self._shares is not None:
                    leave(self._shares, place)
        return process

    async def _attend(
        self, process: trio.Process, ours: socket.socket, ready: Callable[[trio.Process], object]
    ) -> None:
        if self._stop.is_set():  # set while the process was being started
            ours.shutdown(socket.SHUT_RDWR)
        control = trio.socket.from_stdlib_socket(ours)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._hear, control, process, ready)
            await process.wait()
            nursery.cancel_scope.cancel()

    async def _hear(
        self, control: trio.socket.SocketType, process: trio.Process, ready: Callable[[trio.Process], object]
    ) -> None:
        try:
            said = await control.recv(1)
        except OSError:
            return
        if said:
            ready(process)

    def _heard(self, number: int, listening: Callable[[], object], process: trio.Process) -> None:
        first = number not in self._ready
        self._ready[number] = process
        if first and len(self._ready) == self.number:
            listening()

    def _end(self) -> None:
        for process in self._controls:
            self._drain(process)

    def _drain(self, process: trio.Process) -> None:
        try:
            self._controls[process].shutdown(socket.SHUT_RDWR)
        except (KeyError, OSError):
            pass  # already ended

    def _kill_all(self) -> None:
        for process in self._controls:
            _kill(process)


def _kill(process: trio.Process) -> None:
    """Kill a worker and all processes in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal_name(-code)}"
    return f"ended with status {code}"
