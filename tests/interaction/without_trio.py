"""What stands in for a session, awaited in Trio as a session is: what the interaction tests do, done without Trio.

Calls of `trimcp.blocking` run in threads, those of `trimcp.asyncio` in a loop in a thread. Cancelling one in Trio is an
interrupt there, or the cancellation of its task. Handlers run there, and have Trio's do what the test wants.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

import attrs
import trio

import trimcp
from trimcp.client.client import Client
from trimcp.client.session import ClientSession
from trimcp.portal.methods import FACTS, public_methods
from trimcp.portal.thread import PortalWork
from trimcp.wire.revisions import Revision

KINDS: Final = ("blocking", "asyncio")
_HOW: Final = {name: how for name, _, how in public_methods(ClientSession)}
_END: Final = object()


class Blocking:
    """Does what `trimcp.blocking` offers in threads."""

    connect: Any = staticmethod(trimcp.blocking.connect)
    interrupt: type[BaseException] = KeyboardInterrupt

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(4_000)
        self._local = threading.local()

    @contextmanager
    def running(self) -> Any:
        begin = PortalWork.begin

        def noted(work: PortalWork) -> None:
            getattr(self._local, "works", []).append(work)
            begin(work)

        PortalWork.begin = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            PortalWork.begin = begin  # type: ignore[method-assign]

    async def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in a thread. Cancelled, do what an interrupt of the thread does."""
        works: list[PortalWork] = []
        ended, token = trio.Event(), trio.lowlevel.current_trio_token()

        def call() -> Any:
            self._local.works = works
            try:
                return function(*args)
            finally:
                self._local.works = []
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(ended.set)

        try:
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)
        except trio.Cancelled:
            for work in works:
                work.cancel()
            with trio.CancelScope(shield=True):
                if works:
                    await ended.wait()
            raise

    enter = staticmethod(lambda manager: manager.__enter__())
    leave = staticmethod(lambda manager, error: manager.__exit__(type(error) if error else None, error, None))
    iterate = staticmethod(iter)
    following = staticmethod(lambda arrivals: next(arrivals, _END))

    def hosted(self, token: trio.lowlevel.TrioToken, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: trio.from_thread.run(functools.partial(call, *args, **kwargs), trio_token=token)


class Asyncio:
    """Does what `trimcp.asyncio` offers in a loop of its own."""

    connect: Any = staticmethod(trimcp.asyncio.connect)
    interrupt: type[BaseException] = asyncio.CancelledError

    @contextmanager
    def running(self) -> Any:
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever)
        thread.start()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await a function in the loop. Cancelled, cancel its task, and wait for that to end."""
        ended, token = trio.Event(), trio.lowlevel.current_trio_token()

        async def call() -> Any:
            try:
                found = function(*args)
                return await found if inspect.isawaitable(found) else found
            finally:
                with suppress(trio.RunFinishedError):
                    token.run_sync_soon(ended.set)

        if self._loop.is_closed():  # the connection has ended
            return await trio.to_thread.run_sync(lambda: asyncio.run(call()))
        future: Future[Any] = asyncio.run_coroutine_threadsafe(call(), self._loop)
        done = trio.Event()
        future.add_done_callback(lambda _: token.run_sync_soon(done.set))
        try:
            await done.wait()
        except trio.Cancelled:
            future.cancel()
            with trio.CancelScope(shield=True):
                await ended.wait()
            raise
        return future.result()

    enter = staticmethod(lambda manager: manager.__aenter__())
    leave = staticmethod(lambda manager, error: manager.__aexit__(type(error) if error else None, error, None))
    iterate = staticmethod(aiter)
    following = staticmethod(lambda arrivals: anext(arrivals, _END))

    def hosted(self, token: trio.lowlevel.TrioToken, call: Callable[..., Any]) -> Callable[..., Any]:
        async def host(*args: Any, **kwargs: Any) -> Any:
            run = functools.partial(trio.from_thread.run, functools.partial(call, *args, **kwargs), trio_token=token)
            return await asyncio.to_thread(run)

        return host


@attrs.define
class InTrio:
    """A stand-in, or what one opened, with the methods of Trio."""

    kind: Any
    without: Any

    @property
    def session(self) -> Any:
        return self.without.origin.session

    @property
    def client(self) -> Any:
        return self.without.origin.client

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.without, name)
        if name in FACTS:
            return member
        if name == "progress":
            return self._arriving(member)
        if _HOW.get(name) == "call":
            return member
        if _HOW.get(name) == "open":
            return lambda *args, **kwargs: self._opened(member(*args, **kwargs))
        return lambda *args, **kwargs: self._do(functools.partial(member, *args, **kwargs))

    async def _do(self, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return await self.kind.do(function, *args)
        except TimeoutError as error:
            raise trio.TooSlowError(*error.args) from error
        except EOFError as error:
            raise trio.EndOfChannel from error

    async def _arriving(self, arrivals: Any) -> AsyncIterator[Any]:
        iterator = self.kind.iterate(arrivals)
        while (found := await self._do(self.kind.following, iterator)) is not _END:
            yield found

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._arriving(self.without)

    async def __anext__(self) -> Any:
        return await self._do(self.kind.following, self.kind.iterate(self.without))

    @asynccontextmanager
    async def _opened(self, manager: Any) -> AsyncIterator[InTrio]:
        opened = InTrio(self.kind, await self._do(self.kind.enter, manager))
        try:
            yield opened
        except BaseException as error:
            with trio.CancelScope(shield=True):
                instead = error if isinstance(error, Exception) else self.kind.interrupt()
                try:
                    await self._do(self.kind.leave, manager, instead)
                except BaseException as raised:
                    if isinstance(error, trio.Cancelled) and isinstance(raised, trio.TooSlowError):
                        raise  # of its own clock
            raise
        await self._do(self.kind.leave, manager, None)


@asynccontextmanager
async def connected(kind: str, target: Any, client: Client, revision: Revision) -> AsyncIterator[InTrio]:
    """Connect without Trio, and yield what is used as a session."""
    token = trio.lowlevel.current_trio_token()
    does = {"blocking": Blocking, "asyncio": Asyncio}[kind]()

    def hosted(handler: Callable[..., Any], method: str = "") -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            value = client.served.get(method, handler)(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value

        return functools.wraps(handler)(does.hosted(token, call))

    hosting: Any = copy.copy(client)
    hosting.served = {name: hosted(handler, name) for name, handler in client.served.items()}
    heard = client.notification_handlers.items()
    hosting.notification_handlers = {name: [*map(hosted, handlers)] for name, handlers in heard}
    for name in ("on_logging", "on_call", "before_sampling", "after_sampling"):
        handler = getattr(client, name)
        setattr(hosting, name, handler and hosted(handler))
    with does.running():
        whole = InTrio(does, None)
        async with whole._opened(does.connect(target, client=hosting, revision=revision)) as session:
            yield session
