"""`trimcp run --reload`: a program is started anew when a file of it changes, beside the old one, which then drains.

Over a network the processes share the sockets (`cli.serve.processes`). Over standard input and output this process
speaks with the client and forwards what is said: the next version hears the handshake of the first.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from trimcp.channel import CLIENT_MAX_MESSAGE, MessageChannel
from trimcp.cli.exits import Failure, say
from trimcp.cli.loading import RELOADED
from trimcp.errors import ConnectionLost, LocalError
from trimcp.run import signals
from trimcp.support.nurseries import open_service_nursery
from trimcp.testing.play import outgoing_of
from trimcp.transports.stdio.child import ShutdownTimes, StdioServer
from trimcp.transports.stdio.server import claim_stdio
from trimcp.transports.trace import as_json
from trimcp.wire.codes import INTERNAL_ERROR
from trimcp.wire.common import META_SUBSCRIPTION_ID
from trimcp.wire.jsonrpc import ErrorResponse, Lost, Malformed, Notification, Request, RequestId, Response
from trimcp.wire.methods import LISTEN

ENVIRONMENT: Final = {RELOADED: "1", "PYTHONDONTWRITEBYTECODE": "1"}
"""Variables for a version. Compiled files know their source by its size and second: a next one would run old code."""

_NAMED: Final = "trimcp-reload"  # begins the ids of our own requests
_FIRST_ANSWER: Final = 30.0  # seconds for a new version to answer
_LAST_ANSWERS: Final = 5.0  # seconds for calls under way when the client has closed its side
_LISTS: Final = ("tools", "prompts", "resources")


def folder_of(server: str) -> Path:
    """Return the folder whose files are watched: that of a file, or of a module the current one."""
    file = Path(server.rpartition(".py")[0] + ".py") if ".py" in server else None
    return file.resolve().parent if file is not None and file.is_file() else Path.cwd()


def own_words(words: Sequence[str]) -> list[str]:
    """Return the words of the command for a version of the program."""
    end = words.index("--") if "--" in words else len(words)
    return [word for number, word in enumerate(words) if word != "--reload" or number > end]


@asynccontextmanager
async def changes(server: str) -> AsyncIterator[trio.MemoryReceiveChannel[str]]:
    """Yield a channel that gets the name of a Python file beside a server whenever some have changed."""
    try:
        from watchfiles import PythonFilter, awatch
    except ImportError:
        raise Failure('--reload needs the package watchfiles: pip install "trimcp[reload]"') from None
    folder, stop = folder_of(server), trio.Event()
    # One place: what changes while a change is looked at is one more.
    send, receive = trio.open_memory_channel[str](1)

    async def watch() -> None:
        async with aclosing(awatch(folder, watch_filter=PythonFilter(), stop_event=stop)) as found:
            async for changed in found:
                with suppress(trio.WouldBlock):
                    send.send_nowait(Path(min(path for _, path in changed)).name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        try:
            yield receive
        finally:
            stop.set()  # it ends by itself then; a cancellation would be noticed seconds later


def run_reloading(words: Sequence[str], server: str, grace: float) -> int:
    """Serve over standard input and output until the client leaves or a signal comes, and return the exit code."""
    command = (sys.executable, "-m", "trimcp.cli", "run", *own_words(words))
    return trio.run(_serve, command, server, grace)


async def _serve(command: Sequence[str], server: str, grace: float) -> int:
    with signals() as stop:
        async with claim_stdio() as client, open_service_nursery() as nursery:
            client.set_max_message(CLIENT_MAX_MESSAGE)
            reloader = Reloader(client, command, nursery, grace)
            async with changes(server) as changed:
                nursery.start_soon(reloader.follow, changed)
                nursery.start_soon(reloader.read_client, stop)
                await reloader.start()
                await stop.wait()
                await reloader.drain()
    return reloader.code


@attrs.define(eq=False)
class Version:
    """One process of the program."""

    number: int
    channel: MessageChannel
    answers: dict[str, trio.Event] = attrs.field(init=False, factory=dict)  # to requests of our own
    failed: bool = attrs.field(init=False, default=False)  # it has answered one of them with an error
    retired: trio.Event = attrs.field(init=False, factory=trio.Event)
    over: trio.Event = attrs.field(init=False, factory=trio.Event)
    idle: trio.Event = attrs.field(init=False, factory=trio.Event)  # nothing is under way there
    sending: trio.Lock = attrs.field(init=False, factory=trio.Lock)


@attrs.define(eq=False)
class Reloader:
    """Forwards what a client and the newest version of a program say, and answers for versions that are gone."""

    client: MessageChannel
    command: Sequence[str]
    nursery: trio.Nursery
    grace: float
    code: int = attrs.field(init=False, default=0)
    _newest: Version | None = attrs.field(init=False, default=None)
    _begun: int = attrs.field(init=False, default=0)
    _calls: dict[RequestId, Version] = attrs.field(init=False, factory=dict)  # of the client, by who answers
    _questions: dict[RequestId, tuple[Version, RequestId]] = attrs.field(init=False, factory=dict)
    _handshake: Request | None = attrs.field(init=False, default=None)
    _initialized: bool = attrs.field(init=False, default=False)
    _settings: dict[str, Request] = attrs.field(init=False, factory=dict)  # what a next version is told, too
    _listening: dict[RequestId, Request] = attrs.field(init=False, factory=dict)  # requests that are subscriptions
    _renewed: set[RequestId] = attrs.field(init=False, factory=set)  # of them, those that the newest has to acknowledge
    _telling: trio.Lock = attrs.field(init=False, factory=trio.Lock)
    _begin: trio.Event = attrs.field(init=False, factory=trio.Event)  # the first version is there, or failed

    # Versions

    async def follow(self, changed: trio.MemoryReceiveChannel[str]) -> None:
        """Start the next version whenever something has changed."""
        async for name in changed:
            say(f"trimcp: {name} has changed")
            await self.start()

    async def start(self) -> None:
        """Start a version, and let it take over once it answers; an old one goes on otherwise."""
        self._begun += 1
        taken = trio.Event()
        self.nursery.start_soon(self._run, self._begun, taken)
        await taken.wait()

    async def _run(self, number: int, taken: trio.Event) -> None:
        # It is asked to end by its input's end, and has its own time for what is under way.
        times = ShutdownTimes(close=self.grace + 2.0)
        program = StdioServer(tuple(self.command), env=ENVIRONMENT, inherit_env=True, on_stderr=say, shutdown=times)
        try:
            async with program.connect() as channel, open_service_nursery() as nursery:
                version = Version(number, channel)
                nursery.start_soon(self._read_version, version)
                if not await self._greeted(version):
                    self._failed()
                    return
                await self._take_over(version)
                taken.set()
                await version.retired.wait()
                with trio.move_on_after(self.grace):
                    await version.idle.wait()
        except LocalError as error:
            say(f"trimcp: {error}")
            self._failed()
        finally:
            taken.set()

    def _failed(self) -> None:
        if self._newest is None:
            say("trimcp: the server did not start; it starts again when a file changes")
        else:
            say("trimcp: the new version did not start; the old one goes on")
        self._begin.set()

    async def _greeted(self, version: Version) -> bool:
        """Return whether a version has answered, and tell it what the one before was told."""
        hello = self._handshake
        first = Request("", "ping") if hello is None else hello
        if not await self._ask(version, first):
            return False
        if hello is not None and version.failed:
            return False
        if self._initialized:
            await self._send(version, as_json(Notification("notifications/initialized")))
        for setting in list(self._settings.values()):
            await self._ask(version, setting)
        return not version.over.is_set()

    async def _ask(self, version: Version, request: Request) -> bool:
        """Send a version a request of our own, and return whether it has answered."""
        id = f"{_NAMED}-{version.number}-{len(version.answers)}"
        answered = version.answers[id] = trio.Event()
        await self._send(version, {**as_json(request), "id": id})
        with trio.move_on_after(_FIRST_ANSWER):
            await answered.wait()
        return answered.is_set() and not version.over.is_set()

    async def _take_over(self, version: Version) -> None:
        old, self._newest = self._newest, version
        self._begin.set()
        if version.number == 1:
            return
        say(f"trimcp: version {version.number} serves from now on")
        for id, wanted in list(self._listening.items()):
            if old is not None:
                await self._send(old, as_json(Notification("notifications/cancelled", {"requestId": id})))
            self._calls[id] = version
            self._renewed.add(id)
            await self._send(version, as_json(wanted))
        if old is not None:
            self._note_idle(old)
            old.retired.set()
        if self._initialized:
            for name in _LISTS:
                await self._tell({"jsonrpc": "2.0", "method": f"notifications/{name}/list_changed"})

    def _note_idle(self, version: Version) -> None:
        if version not in self._calls.values():
            version.idle.set()

    async def drain(self) -> None:
        """Let the newest version answer what is under way, for a while."""
        if (version := self._newest) is not None:
            self._note_idle(version)
            version.retired.set()
            with trio.move_on_after(self.grace + _LAST_ANSWERS):
                await version.over.wait()

    # What versions say

    async def _read_version(self, version: Version) -> None:
        with suppress(trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError, ConnectionLost):
            while True:
                for incoming in await version.channel.receive():
                    await self._heard(version, incoming.message)
        version.over.set()
        for answered in version.answers.values():
            answered.set()
        for id in [id for id, asked in self._calls.items() if asked is version]:
            del self._calls[id]
            self._listening.pop(id, None)
            lost = "the server was started anew while this ran; it may or may not have been carried out"
            await self._tell(_error(id, lost))
        if self._newest is version and not version.retired.is_set():
            self._newest = None
            version.retired.set()
            say("trimcp: the server has ended; it starts again when a file changes")
        version.idle.set()

    async def _heard(self, version: Version, message: Any) -> None:
        match message:
            case Response(id=id) | ErrorResponse(id=id) | Lost(id=id) if isinstance(id, str) and id in version.answers:
                version.failed |= not isinstance(message, Response)
                version.answers[id].set()
            case Response(id=id) | ErrorResponse(id=id) | Lost(id=id):
                if id is not None and self._calls.get(id) is version:
                    del self._calls[id]
                    self._listening.pop(id, None)
                elif id in self._listening:
                    return  # the next version has taken it over
                said = _error(id, message.message) if isinstance(message, Lost) else as_json(message)
                await self._tell(said)
                if version.retired.is_set():
                    self._note_idle(version)
            case Request(id=id):
                # Versions number their questions alike.
                name = f"{version.number}-{id}"
                self._questions[name] = (version, id)
                await self._tell({**as_json(message), "id": name})
            case Notification(method="notifications/cancelled", params={"requestId": id}):
                params = {**(message.params or {}), "requestId": f"{version.number}-{id}"}
                await self._tell({**as_json(message), "params": params})
            case Notification(method="notifications/subscriptions/acknowledged", params={"_meta": dict(meta)}) if (
                isinstance(id := meta.get(META_SUBSCRIPTION_ID), int | str) and id in self._renewed
            ):
                self._renewed.discard(id)  # which the client was told when it subscribed
                await self._tell_changes(id, (message.params or {}).get("notifications") or {})
            case Malformed():
                say(f"trimcp: the server wrote what is no message: {message.message}")
            case _:
                await self._tell(as_json(message))

    async def _tell_changes(self, id: RequestId, agreed: dict[str, Any]) -> None:
        """Tell a subscription that another version has taken over that all it watches may have changed."""
        meta = {"_meta": {META_SUBSCRIPTION_ID: id}}
        for name in _LISTS:
            if agreed.get(f"{name}ListChanged"):
                await self._tell(as_json(Notification(f"notifications/{name}/list_changed", meta)))
        for uri in agreed.get("resourceSubscriptions") or ():
            await self._tell(as_json(Notification("notifications/resources/updated", {**meta, "uri": uri})))

    async def _tell(self, said: Any) -> None:
        async with self._telling:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await self.client.send([outgoing_of(said)])

    # What the client says

    async def read_client(self, stop: trio.Event) -> None:
        """Forward what the client says, until it leaves."""
        await self._begin.wait()
        with suppress(trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                for incoming in await self.client.receive():
                    await self._said(incoming.message)
        stop.set()

    async def _said(self, message: Any) -> None:
        version = self._newest
        match message:
            case Request(id=id, method=method):
                if method == "initialize":
                    self._handshake = message
                elif (key := _setting_of(message)) is not None:
                    self._settings[key] = message
                if version is None:
                    await self._tell(_error(id, "the server has ended, and starts again when one of its files changes"))
                    return
                self._calls[id] = version
                if method == LISTEN:
                    self._listening[id] = message
                await self._send(version, as_json(message))
            case Notification(method="notifications/cancelled", params={"requestId": id}):
                version = self._calls.get(id, version)
                if self._listening.pop(id, None) is not None:
                    del self._calls[id]  # which nobody answers
                    self._renewed.discard(id)
                if version is not None:
                    await self._send(version, as_json(message))
            case Response(id=id) | ErrorResponse(id=id):
                asked = None if id is None else self._questions.pop(id, None)
                if asked is not None:
                    await self._send(asked[0], {**as_json(message), "id": asked[1]})
            case Malformed(is_request=True, id=id):
                await self._tell(_error(id, message.message, message.code))
            case Malformed():
                say(f"trimcp: the client wrote what is no message: {message.message}")
            case _:
                if isinstance(message, Notification) and message.method == "notifications/initialized":
                    self._initialized = True
                if version is not None:
                    await self._send(version, as_json(message))

    async def _send(self, version: Version, said: Any) -> None:
        async with version.sending:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError, ConnectionLost):
                await version.channel.send([outgoing_of(said)])


def _error(id: Any, message: str, code: int = INTERNAL_ERROR) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}


def _setting_of(request: Request) -> str | None:
    """Return the key of a request that sets something for the rest of a session, None of any other."""
    uri = (request.params or {}).get("uri")
    if request.method == "logging/setLevel":
        return request.method
    if request.method in ("resources/subscribe", "resources/unsubscribe"):
        return f"subscription to {uri}"
    return None
