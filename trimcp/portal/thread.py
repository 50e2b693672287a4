"""One thread that runs Trio for the rest of the process, and what other threads have it do.

The thread begins with the first connection and ends with the last. What is done for a caller is a task, which ends
before the caller goes on, also when the caller is interrupted.
"""

from __future__ import annotations

import _thread
import atexit
import contextvars
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Final

import attrs
import trio

from trimcp.errors import ConnectionLost, LocalError
from trimcp.support.nurseries import open_service_nursery

_OVER: Final = "the session has ended"
_FAREWELL: Final = 5.0  # seconds for connections that a program left open to close, at its exit


class PortalOutcome:
    """What another thread waits for: a value, or an exception.

    Not a `Future`: an interrupt within one may keep its lock for ever, for which the thread of Trio would wait. Here an
    interrupt comes before or after the one step that waits.
    """

    def __init__(self) -> None:
        self.done: bool = False
        self.error: Exception | None = None
        self._value: Any = None
        self._came = threading.Lock()
        self._came.acquire()
        self._tell: list[Callable[[], object]] = []

    def resolve(self, error: Exception | None, value: Any = None) -> None:
        """Give it a value or an exception, unless it has one. In the thread of Trio."""
        if not self.done:
            self.error, self._value, self.done = error, value, True
            self._came.release()
            for tell in self._tell:
                tell()

    def tell(self, function: Callable[[], object]) -> None:
        """Have a function called once it is there, perhaps twice, in any thread."""
        self._tell.append(function)
        if self.done:
            function()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is there. Raises TimeoutError."""
        if not self.done:
            if not self._came.acquire(timeout=-1 if timeout is None else timeout):
                raise TimeoutError
            self._came.release()

    def result(self) -> Any:
        """Return the value that is there, or raise the exception."""
        if self.error is not None:
            raise self.error
        return self._value


class Portal:
    """A thread that runs Trio."""

    token: trio.lowlevel.TrioToken
    nursery: trio.Nursery

    def __init__(self) -> None:
        self.leases: set[Lease] = set()
        self._process = os.getpid()
        self._ready = PortalOutcome()
        # A daemon: a program that forgets a connection ends nevertheless.
        self._thread = threading.Thread(target=self._run, name="trimcp", daemon=True)
        self.works: set[PortalWork] = set()  # those that have begun
        self._started = False

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if not self._started:
            self._started = True  # before it is: an interrupt may come at any moment
            # From a thread that no interrupt reaches: `start` waits, and interrupted it may keep its lock for ever.
            _thread.start_new_thread(self._thread.start, ())

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until the thread takes what it is told."""
        self._ready.wait(timeout)

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        finally:  # whatever ends it, nobody waits for ever
            for work in [*self.works]:
                work.resolve(ConnectionLost(_OVER))

    async def _serve(self) -> None:
        async with trio.open_nursery() as self.nursery:
            self.token = trio.lowlevel.current_trio_token()
            self._ready.resolve(None)
            await trio.sleep_forever()

    @property
    def lost(self) -> bool:
        """Whether this is another process than the one whose thread it is: `os.fork` copies no threads."""
        return os.getpid() != self._process

    def soon(self, function: Callable[[], object]) -> None:
        """Have the thread call a function that does not wait.

        Raises LocalError in another process or in the thread itself, ConnectionLost if it has ended.
        """
        if self.lost:
            raise LocalError("this connection was made before os.fork(): make another in the new process")
        if threading.get_ident() == self._thread.ident:
            raise LocalError("what runs in Trio uses the session of Trio, and cannot wait for another thread")
        try:
            self.token.run_sync_soon(function)
        except (trio.RunFinishedError, OSError):
            raise ConnectionLost(_OVER) from None

    def close(self, timeout: float | None = None) -> None:
        """Cancel what runs, and wait for the thread to end."""
        if self.lost or not self._started:
            return
        with suppress(ConnectionLost, TimeoutError):  # it has ended, or an interrupt kept it from beginning
            self.wait_ready(_FAREWELL)
            self.soon(self.nursery.cancel_scope.cancel)
            self._thread.join(timeout)


_portal: Portal | None = None  # of this process, while it has connections
_lock: Final = threading.Lock()


class Lease:
    """The use of this process's thread by one connection. Interrupted at any moment, it can be given back."""

    portal: Portal | None = None

    def take(self) -> Portal:
        """Return the thread, which is started for the first."""
        global _portal
        with _lock:
            if _portal is None or _portal.lost:
                _portal = Portal()
            self.portal = _portal
            self.portal.leases.add(self)
            self.portal.start()
        self.portal.wait_ready()
        return self.portal

    def give_back(self) -> None:
        """Use it no longer. The last ends the thread."""
        try:
            self._give_back()
        except BaseException:  # an interrupt: each step may be done once more
            self._give_back()
            raise

    def _give_back(self) -> None:
        global _portal
        portal = self.portal
        if portal is None:
            return
        with _lock:
            portal.leases.discard(self)
            if portal.leases:
                return
            _portal = None if _portal is portal else _portal
        portal.close()


def _end() -> None:
    if _portal is not None:
        _portal.close(_FAREWELL)


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
atexit.register(_end)


@attrs.define(eq=False)
class PortalWork:
    """A function that runs in a task of the thread. Its `outcome` is there once the task has ended."""

    portal: Portal
    around: PortalBlock | None  # in which it runs, so that this ends it, too
    _function: Callable[[], Awaitable[Any]] | None = None
    outcome: PortalOutcome = attrs.field(init=False, factory=PortalOutcome)
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _began: bool = attrs.field(init=False, default=False)

    def begin(self) -> None:
        """Begin it, with the context variables of the caller. Raises as `Portal.soon`."""
        context = contextvars.copy_context()
        self.portal.soon(lambda: self._begin(context))

    def _begin(self, context: contextvars.Context) -> None:
        while self.around is not None and self.around.around is not None and self.around.left:
            self.around = self.around.around  # what was opened may still be asked, as in Trio
        around = self.around
        nursery = self.portal.nursery if around is None else around.nursery
        if self.outcome.done:
            return
        if nursery is None:
            assert around is not None
            self.resolve(around.over())
        else:
            self._began = True
            self.portal.works.add(self)
            context.run(nursery.start_soon, self._run)

    def cancel(self) -> None:
        """Cancel it: soon it has an outcome. Raises as `Portal.soon`."""
        self.portal.soon(self._cancel)

    def _cancel(self) -> None:
        self._scope.cancel(reason="the caller gave it up")
        if not self._began:
            self.resolve(CancelledError())

    async def _run(self) -> None:
        error: Exception | None = None
        value = None
        try:
            with self._scope:
                value = await self.perform()
        except Exception as failure:  # the caller's
            error = failure
        except BaseException:  # what is around it ends, and says why
            if self.around is None:
                self.resolve(ConnectionLost(_OVER))
            else:
                self.around.orphans.append(self)
            raise
        self.resolve(CancelledError() if self._scope.cancelled_caught else error, value)

    async def perform(self) -> Any:
        """Do it, and return its value."""
        assert self._function is not None
        return await self._function()

    def resolve(self, error: Exception | None, value: Any = None) -> None:
        """Give it its outcome, unless it has one. Exceptions of Trio become those that other programs know."""
        for kind, instead in ((trio.TooSlowError, TimeoutError), (trio.EndOfChannel, EOFError)):
            if isinstance(error, kind):
                known = instead(*error.args)
                known.__cause__, error = error, known
        self.portal.works.discard(self)
        self.outcome.resolve(error, value)


@attrs.define(eq=False)
class PortalBlock(PortalWork):
    """An async context manager, entered in a task of the thread. Work is done inside it.

    So leaving it, or a time limit of its own, ends what is done inside, as it would in Trio.
    """

    manager: AbstractAsyncContextManager[Any] = attrs.field(kw_only=True)
    entered: PortalOutcome = attrs.field(init=False, factory=PortalOutcome)  # what the context manager yields
    nursery: trio.Nursery | None = attrs.field(init=False, default=None)
    orphans: list[PortalWork] = attrs.field(init=False, factory=list)  # what ended with it, and has no outcome yet
    _leaving: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def perform(self) -> None:
        async with self.manager as value, open_service_nursery() as self.nursery:
            self.entered.resolve(None, value)
            await self._leaving.wait()

    def leave(self) -> None:
        """Begin to leave it. Raises as `Portal.soon`."""
        self.portal.soon(self._leaving.set)

    @property
    def left(self) -> bool:
        """Whether its context manager was left without a failure."""
        return self.outcome.done and self.outcome.error is None

    def over(self) -> Exception:
        """Return what who comes too late is told: why it ended, or that it has."""
        failure = self.outcome.error
        return ConnectionLost(_OVER) if failure is None or isinstance(failure, CancelledError) else failure

    def resolve(self, error: Exception | None, value: Any = None) -> None:
        super().resolve(error, value)
        self.nursery = None
        self.entered.resolve(self.outcome.error or ConnectionLost(_OVER))
        for work in self.orphans:
            work.resolve(self.over())
