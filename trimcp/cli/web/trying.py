"""`trimcp inspect --web`: try what a server offers in a browser, and see the latest of what is said."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.channel import Incoming, Outgoing
from trimcp.cli.conversation import Body, Parts, converse
from trimcp.cli.exits import say
from trimcp.cli.inspecting import offer_json, take_stock
from trimcp.cli.options import ConnectOptions
from trimcp.cli.screen import Screen
from trimcp.cli.targets import Target
from trimcp.cli.text import as_json
from trimcp.cli.web.exports import exported
from trimcp.cli.web.site import serving
from trimcp.client.session import ClientSession
from trimcp.errors import LocalError, RemoteError
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports import trace
from trimcp.transports.wrapped import WrappedChannel
from trimcp.watch.commands import Send
from trimcp.watch.wire import MessageLog, masked_text
from trimcp.wire.converter import converter_for
from trimcp.wire.input_requests import ElicitParams, ElicitResult
from trimcp.wire.jsonrpc import Malformed
from trimcp.wire.lifecycle import LoggingMessageParams
from trimcp.wire.revisions import LATEST

_REASON: Final = "cancelled in the browser"
_LARGEST_QUESTION: Final = 64 * 1024  # bytes
_PACE: Final = 0.1  # seconds between two batches


@attrs.define(eq=False)
class Feed(MessageLog):
    """The latest events, for pages that read as fast as they can: a slow one is told how many it has missed."""

    state: Callable[[], Mapping[str, Any]]  # returns what is true now; a page gets it with every batch
    _changed: trio.Event = attrs.field(init=False, factory=trio.Event)

    def add(self, kind: str, text: str, **members: Any) -> None:
        super().add(kind, text, **members)
        self.changed()

    def changed(self) -> None:
        """Let pages have the state anew."""
        self._changed.set()
        self._changed = trio.Event()

    async def follow(self, send: Send) -> None:
        """Send what is kept, and then what comes, until cancelled."""
        seen = 0
        while True:
            changed = self._changed
            events, missed = self.since(seen)
            seen = self.count
            await send({"events": events, "missed": missed, **self.state()})
            await trio.sleep(_PACE)
            await changed.wait()


@attrs.define(eq=False, repr=False)
class _WatchedChannel(WrappedChannel):
    """Tells a feed of each message: its size, its text with secrets masked, and how long an answer took."""

    _feed: Feed

    async def send(self, batch: Sequence[Outgoing]) -> None:
        for message in batch:
            self._note(True, orjson.loads(message.data), len(message.data))
        await super().send(batch)

    async def receive(self) -> Sequence[Incoming]:
        batch = await super().receive()
        for each in batch:
            malformed = isinstance(each.message, Malformed)
            self._note(False, {"malformed": str(each.message)} if malformed else trace.as_json(each.message), each.size)
        return batch

    def _note(self, ours: bool, value: Any, size: int) -> None:
        id, method = (value.get("id"), value.get("method")) if isinstance(value, Mapping) else (None, None)
        self._feed.message(ours, id, method, size, masked_text(value))


@attrs.frozen
class WatchedTarget:
    """A target whose messages a feed is told of."""

    target: Target
    feed: Feed

    def __getattr__(self, name: str) -> Any:  # what a client asks of a target before it connects
        return getattr(self.target, name)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[_WatchedChannel]:
        """Open the target."""
        async with self.target.connect() as channel:
            yield _WatchedChannel(channel, self.feed)


@attrs.define(eq=False)
class _OpenQuestion:
    """A question of the server's that a person has not answered yet."""

    id: int
    params: ElicitParams
    answered: trio.Event = attrs.field(init=False, factory=trio.Event)
    result: ElicitResult = attrs.field(init=False, factory=lambda: ElicitResult(action="cancel"))


@attrs.define(eq=False)
class Trying:
    """The commands of the page, and what stands in for a terminal while it is open."""

    target: str  # as it was typed
    feed: Feed = attrs.field(init=False)
    _session: ClientSession | None = attrs.field(init=False, default=None)
    _watched: WatchedTarget | None = attrs.field(init=False, default=None)
    _questions: dict[int, _OpenQuestion] = attrs.field(init=False, factory=dict)
    _ids: count[int] = attrs.field(init=False, factory=lambda: count(1))
    _calls: dict[str, trio.CancelScope] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.feed = Feed(self._state)

    # For the conversation

    def parts(self) -> Parts:
        """Return what takes the place of the terminal."""
        return Parts(self._answer, self._log, self._watch)

    @asynccontextmanager
    async def serving(self, session: ClientSession, port: int = 0) -> AsyncIterator[str]:
        """Serve the page for a session while the block runs; yield its URL."""
        self._session = session
        names = ("offer", "events", "call", "cancel", "answer", "read", "prompt", "export")
        commands = {name: getattr(self, name) for name in names}
        async with serving("inspect", commands, port) as url, open_service_nursery() as nursery:
            nursery.start_soon(self._tell_lost, session)
            yield url
            nursery.cancel_scope.cancel()

    async def run(self, port: int, session: ClientSession, screen: Screen) -> int:
        """Serve the page until it is cancelled."""
        async with self.serving(session, port) as url:
            say(f"open {url}")
            await trio.sleep_forever()

    async def _tell_lost(self, session: ClientSession) -> None:
        await session.wait_lost()
        say("the server is gone")
        self.feed.changed()

    def _watch(self, target: Any) -> WatchedTarget:
        self._watched = WatchedTarget(target, self.feed)
        return self._watched

    def _log(self, params: LoggingMessageParams) -> None:
        data = params.data if isinstance(params.data, str) else as_json(params.data)
        self.feed.add("log", data, level=params.level, logger=params.logger)

    async def _answer(self, params: ElicitParams) -> ElicitResult:
        size = len(orjson.dumps(converter_for(LATEST).dump(params)))
        if size > _LARGEST_QUESTION:  # pages get all that are open with every batch
            self.feed.add("log", f"a question of {size:,} bytes was not shown", level="warning", logger=None)
            return ElicitResult(action="cancel")
        question = _OpenQuestion(next(self._ids), params)
        self._questions[question.id] = question
        self.feed.changed()
        try:
            await question.answered.wait()
        finally:
            del self._questions[question.id]
            self.feed.changed()
        return question.result

    def _state(self) -> Mapping[str, Any]:
        session = self._session
        if session is None:
            return {"questions": [], "lost": False}
        dump = converter_for(session.revision).dump
        asked = [{"id": each.id, **dump(each.params)} for each in self._questions.values()]
        return {"questions": asked, "lost": session.session.closed.is_set()}

    # For the page

    @property
    def session(self) -> ClientSession:
        """The session; it is there before the page is served."""
        assert self._session is not None
        return self._session

    def _dump(self, value: Any) -> Any:
        return converter_for(self.session.revision).dump(value)

    async def offer(self, members: Mapping[str, Any], send: Send) -> None:
        """Send all lists of the server."""
        offer = await take_stock(self.session)
        await send({"done": {"target": self.target, **offer_json(self.session, offer)}})

    async def events(self, members: Mapping[str, Any], send: Send) -> None:
        """Send messages, logs and questions, as they come."""
        await self.feed.follow(send)

    async def call(self, members: Mapping[str, Any], send: Send) -> None:
        """Call `tool` with `arguments`: send progress, then the result. `id` is for `cancel`."""
        id, tool, arguments = str(members["id"]), str(members["tool"]), _object(members["arguments"])
        if id in self._calls:
            raise LocalError("a call with this id is under way already")
        began = trio.current_time()
        with trio.CancelScope() as scope:
            self._calls[id] = scope
            try:
                async with self.session.calling(tool, arguments) as call:
                    async for step in call.progress:
                        await send({"progress": step.progress, "total": step.total, "message": step.message})
                    result = await call.result()
                await send({"done": self._dump(result), "seconds": trio.current_time() - began})
            except RemoteError as error:
                took = trio.current_time() - began
                await send({"error": str(error), "code": error.code, "data": error.data, "seconds": took})
            finally:
                del self._calls[id]
        if scope.cancelled_caught:
            await send({"error": "cancelled", "seconds": trio.current_time() - began})

    async def cancel(self, members: Mapping[str, Any], send: Send) -> None:
        """Cancel the call `id`: the server is told `reason`."""
        scope = self._calls.get(str(members["id"]))
        if scope is None:
            raise LocalError("this call has ended")
        scope.cancel(reason=str(members.get("reason") or _REASON))
        await send({"done": None})

    async def answer(self, members: Mapping[str, Any], send: Send) -> None:
        """Answer the question `id` with `action` and, if that is to accept, `content`."""
        question = self._questions.get(members["id"])
        action = members["action"]
        if question is None:
            raise LocalError("this question is not asked any more")
        if action not in ("accept", "decline", "cancel"):
            raise ValueError("`action` is one of accept, decline and cancel")
        question.result = ElicitResult(action=action, content=members.get("content") if action == "accept" else None)
        question.answered.set()
        await send({"done": None})

    async def read(self, members: Mapping[str, Any], send: Send) -> None:
        """Send what the resource `uri` holds."""
        await send({"done": self._dump(await self.session.read_resource(str(members["uri"])))})

    async def prompt(self, members: Mapping[str, Any], send: Send) -> None:
        """Send the messages of the prompt `name`, filled in with `arguments`."""
        values = {str(name): str(value) for name, value in _object(members["arguments"]).items()}
        await send({"done": self._dump(await self.session.get_prompt(str(members["name"]), values))})

    async def export(self, members: Mapping[str, Any], send: Send) -> None:
        """Send a call as programs: a command line, Python, and a test."""
        assert self._watched is not None
        tool, arguments = str(members["tool"]), _object(members["arguments"])
        target, revision, expected = self._watched.target, self.session.revision, str(members.get("expected", ""))
        await send({"done": exported(target, self.target, revision, tool, arguments, expected)})


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("arguments are an object")
    return value


def try_in_browser(target: str, options: ConnectOptions, port: int) -> int:
    """Connect to a server and serve the page until a signal ends it; return the exit code."""
    trying = Trying(target)
    body: Body = partial(trying.run, port)
    return converse(target, options, body, trying.parts())
