"""The public methods of a client's session, read from it, and how they are made into those of a stand-in.

A stand-in has each of them under the same name with the same parameters. `docs/stubs.py` writes what type checkers see.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, ClassVar, Final, TypeVar

from trimcp.client.client import Client, Target, connecting, named
from trimcp.client.handlers import ClientProgram
from trimcp.client.session import ClientSession
from trimcp.portal.thread import PortalBlock, PortalWork
from trimcp.session.outgoing.calls import Call
from trimcp.session.outgoing.listening import Subscription
from trimcp.wire.revisions import Revision

INTERNAL: Final = frozenset(
    {"peer", "client", "session", "cache", "clocks", "subscriptions", "logs", "outputs", "mirrors"}
    | {"ask_for_logs", "notified", "allow", "refresh", "answer", "check"}
    | {"follow", "request_raw", "start_task", "task"}
)
"""The public names of a session and what it opens that only trimcp itself uses."""

FACTS: Final = frozenset({"server_info", "server_capabilities", "instructions", "revision", "acknowledged"})
"""What is shown as it is: it does not change."""

StandInT = TypeVar("StandInT", bound="StandIn")


class StandIn:
    """What stands elsewhere for an object of Trio: `origin`, which belongs to a block.

    Each kind of program has a class with these three ways to use it; `standing_for` gives that the methods.
    """

    opened: ClassVar[dict[str, Any]] = {}  # what stands in for what methods open, by the name of the method
    block: PortalBlock
    origin: Any

    def wait(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Do what takes time."""
        raise NotImplementedError

    def enter(self) -> Any:
        """Return a context manager that enters the block of this object, and yields the object."""
        raise NotImplementedError

    def open(self, name: str, manager: AbstractAsyncContextManager[Any]) -> Any:
        """Return a context manager that is entered here."""
        made = self.opened[name]()
        made.block = PortalBlock(self.block.portal, self.block, manager=manager)
        return made.enter()

    def call(self, function: Callable[[], Any]) -> Any:
        """Return what a function returns at once, in Trio's thread."""

        async def call() -> Any:
            return function()

        work = PortalWork(self.block.portal, self.block, call)
        work.begin()
        work.outcome.wait()
        return work.outcome.result()


def public_methods(origin: type) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Yield the methods of a class of Trio that its stand-ins have, each with the way of `StandIn` by which it goes."""
    for name, method in vars(origin).items():
        if inspect.isfunction(method) and not name.startswith("_") and name not in INTERNAL:
            opens = str(inspect.signature(method).return_annotation).startswith("AbstractAsyncContextManager")
            yield name, method, "wait" if inspect.iscoroutinefunction(method) else "open" if opens else "call"


def standing_for(origin: type) -> Callable[[type[StandInT]], type[StandInT]]:
    """Return a decorator that gives a stand-in the methods and facts of a class of Trio."""

    def decorate(kind: type[StandInT]) -> type[StandInT]:
        for name, method, how in public_methods(origin):
            setattr(kind, name, _method(name, method, how))
        for name in FACTS & {*dir(origin)}:
            setattr(kind, name, property(operator.attrgetter(f"origin.{name}")))
        return kind

    return decorate


def _method(name: str, origin: Callable[..., Any], how: str) -> Callable[..., Any]:
    @functools.wraps(origin)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = functools.partial(getattr(self.origin, name), *args, **kwargs)
        return self.open(name, bound()) if how == "open" else getattr(self, how)(bound)

    return method


class ArrivalStream:
    """What arrives for a stand-in, one after the other; it ends with EOFError."""

    def __init__(self, used: StandIn, receive: Callable[[], Awaitable[Any]]) -> None:
        self._used, self._receive = used, receive

    def __iter__(self) -> ArrivalStream:
        return self

    def __next__(self) -> Any:
        try:
            return self._used.wait(self._receive)
        except EOFError:
            raise StopIteration from None

    def __aiter__(self) -> ArrivalStream:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._used.wait(self._receive)
        except EOFError:
            raise StopAsyncIteration from None


@standing_for(Call)
class CallStandIn(StandIn):
    """What stands for a call in progress."""

    @property
    def progress(self) -> ArrivalStream:
        return ArrivalStream(self, self.origin.progress.receive)


@standing_for(Subscription)
class SubscriptionStandIn(StandIn):
    """What stands for a subscription: iterate over it."""

    def __iter__(self) -> ArrivalStream:
        return ArrivalStream(self, self.origin.receive)

    __aiter__ = __iter__


@asynccontextmanager
async def connection(
    session: StandIn,
    target: Target,
    client: ClientProgram | None,
    revision: Revision | str | None,
    host: Callable[[Callable[[], Any]], Awaitable[Any]],
) -> AsyncIterator[ClientSession]:
    """Connect in Trio, for what stands in for the session.

    Handlers of the client run where its program runs: `host` runs each, which may return an awaitable. One that wants
    the session gets it.
    """
    original = Client("trimcp") if client is None else client
    hosting: Any = copy.copy(original)

    def wrapped(handler: Callable[..., Any], method: str = "") -> Callable[..., Any]:
        @functools.wraps(handler)
        async def run(*args: Any, **kwargs: Any) -> Any:
            if "session" in kwargs:
                session.origin, kwargs["session"] = kwargs["session"], session
            newest = original.served.get(method, handler)  # roots may be set anew
            return await host(functools.partial(newest, *args, **kwargs))

        return run

    hosting.sessions = set()
    hosting.served = {name: wrapped(handler, name) for name, handler in original.served.items()}
    heard = original.notification_handlers.items()
    hosting.notification_handlers = {name: [*map(wrapped, handlers)] for name, handlers in heard}
    for name in ("on_logging", "on_call", "before_sampling", "after_sampling"):
        handler = getattr(original, name)
        setattr(hosting, name, None if handler is None else wrapped(handler))
    told: set[Any] = original.sessions  # of new roots
    async with connecting(hosting, named(target), revision, original.connect_timeout) as found:
        told.add(session)
        try:
            yield found
        finally:
            told.discard(session)
