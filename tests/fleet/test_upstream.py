"""A supervised upstream as callers use it: its verbs, what is called twice, and servers that really go away."""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

import trimcp
from tests.client.peers import HandMade
from tests.fleet.shaky import Shaky
from tests.fleet.test_supervisor import QUICK, caught, near, supervised, work
from tests.peers.states import until
from trimcp import CancelReason, ConnectionLost, UpstreamDown
from trimcp.channel import Incoming, MessageChannel, Outgoing
from trimcp.client.session import ClientSession
from trimcp.fleet import Breaker, Health, Restarts, UpstreamState
from trimcp.fleet.upstream import Upstream
from trimcp.testing import every_revision
from trimcp.transports.wrapped import WrappedChannel
from trimcp.wire.jsonrpc import Lost, RequestId
from trimcp.wire.prompts import PromptReference

# Verbs


def methods(cls: type) -> dict[str, Callable[..., Any]]:
    return {name: value for name, value in vars(cls).items() if inspect.isfunction(value) and name[0] != "_"}


def test_its_verbs_take_what_those_of_a_session_take() -> None:
    theirs, ours = methods(ClientSession), methods(Upstream)
    same = sorted(ours.keys() & theirs.keys() - {"statistics"})
    assert same == [
        *("call_tool", "calling", "complete", "get_prompt", "list_prompts", "list_resource_templates"),
        *("list_resources", "list_tools", "listen", "read_resource"),
    ]
    for name in same:
        wanted, given = (list(inspect.signature(each[name]).parameters.values()) for each in (theirs, ours))
        assert [parameter for parameter in given if parameter.name != "idempotent"] == wanted, name


@every_revision
async def test_every_verb_goes_through(revision: trimcp.Revision, autojump_clock: Any) -> None:
    shaky = Shaky()

    @shaky.server.prompt
    async def greet(name: str) -> str:
        return f"Hello {name}"

    @shaky.server.complete("greet", "name")
    async def names(value: str) -> list[str]:
        return [f"{value}da"]

    async with supervised(shaky, revision=revision) as upstream:
        assert upstream.name == "shaky"
        assert [tool.name for tool in await upstream.list_tools(fresh=True)] == ["work", "look", "wipe", "set"]
        assert not (await upstream.call_tool("work", {"seconds": 1}, meta={"x": 1})).is_error
        async with upstream.calling("work", {"seconds": 3, "progress": True}) as call:
            assert [step.progress async for step in call.progress] == [1, 2, 3]
            assert not (await call.result()).is_error
        assert await upstream.list_resources() == []
        assert [template.name for template in await upstream.list_resource_templates()] == ["note"]
        assert (await upstream.read_resource("note://a")).contents[0].uri == "note://a"
        assert [prompt.name for prompt in await upstream.list_prompts()] == ["greet"]
        assert (await upstream.get_prompt("greet", {"name": "Ada"})).messages
        assert (await upstream.complete(PromptReference(name="greet"), "name", "A")).values == ["Ada"]
        assert await upstream.use(lambda session: session.ping()) is None
        async with upstream.session() as session:
            assert session.revision is revision


async def test_any_task_may_use_it(autojump_clock: Any) -> None:
    shaky = Shaky()
    async with supervised(shaky, restarts=QUICK) as upstream, trio.open_nursery() as nursery:
        for seconds in range(50):
            nursery.start_soon(partial(upstream.call_tool, "work", {"seconds": seconds}, idempotent=True))
        await trio.sleep(25.5)
        await shaky.die()
    assert len(shaky.handled) == 50 + 24
    assert upstream.statistics().repeated_calls == 24


# What is called twice


async def lost_under(shaky: Shaky, call: Callable[[], Any], outcomes: list[Any]) -> None:
    """Make a call, and lose the connection under it while its handler runs."""
    before = len(shaky.handled)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caught, call, outcomes)
        await until(lambda: len(shaky.handled) > before)
        await shaky.die()


@every_revision
async def test_a_tool_is_never_called_twice_by_itself(revision: trimcp.Revision, autojump_clock: Any) -> None:
    shaky = Shaky()
    outcomes: list[Any] = []
    async with supervised(shaky, revision=revision, restarts=QUICK) as upstream:
        await upstream.list_tools()
        for tool in ("work", "look", "set"):
            await lost_under(shaky, partial(upstream.call_tool, tool, {"seconds": 1}), outcomes)
            await upstream.wait_up()
    assert len(shaky.handled) == 3
    assert [type(value) for value, _ in outcomes] == [ConnectionLost] * 3
    assert upstream.statistics().repeated_calls == 0


async def test_a_tool_is_called_again_where_the_caller_says_that_this_does_no_harm(autojump_clock: Any) -> None:
    shaky = Shaky()
    outcomes: list[Any] = []
    async with supervised(shaky, restarts=QUICK, breaker=None) as upstream:
        again = partial(upstream.call_tool, "work", {"seconds": 1}, idempotent=True)
        await lost_under(shaky, again, outcomes)
        assert not outcomes.pop()[0].is_error
        assert len(shaky.handled) == 2

        async def die_twice() -> None:
            for handled in (3, 4):
                await until(lambda handled=handled: len(shaky.handled) >= handled)
                await shaky.die()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(die_twice)
            await caught(again, outcomes)
        assert type(outcomes.pop()[0]) is ConnectionLost  # once more, not for ever
        assert len(shaky.handled) == 4
        assert upstream.statistics().repeated_calls == 2


async def test_a_tool_the_server_calls_safe_is_called_again_if_the_caller_trusts_it(autojump_clock: Any) -> None:
    shaky = Shaky()
    outcomes: list[Any] = []
    async with supervised(shaky, restarts=QUICK, breaker=None, repeat_safe_tools=True) as upstream:
        await lost_under(shaky, partial(upstream.call_tool, "look", {"seconds": 1}), outcomes)
        assert type(outcomes.pop()[0]) is ConnectionLost  # nothing is known of what was never listed
        for tool, repeated in (("look", True), ("set", True), ("wipe", False), ("work", False)):
            await upstream.list_tools()
            before = len(shaky.handled)
            await lost_under(shaky, partial(upstream.call_tool, tool, {"seconds": 1}), outcomes)
            assert (type(outcomes.pop()[0]) is not ConnectionLost) is repeated
            assert len(shaky.handled) - before == 1 + repeated
            await upstream.wait_up()


async def test_what_only_reads_is_asked_once_more(autojump_clock: Any) -> None:
    shaky = Shaky()
    outcomes: list[Any] = []
    async with supervised(shaky, restarts=QUICK) as upstream:
        await lost_under(shaky, partial(upstream.read_resource, "note://a"), outcomes)
        assert outcomes.pop()[0].contents[0].uri == "note://a"
        assert shaky.handled == ["a", "a"]
        assert upstream.statistics().repeated_calls == 1
        # In a block that has one connection there is no other one.
        async with upstream.session() as session:
            await lost_under(shaky, partial(session.read_resource, "note://b"), outcomes)
        assert type(outcomes.pop()[0]) is ConnectionLost
    shaky = Shaky()
    async with supervised(shaky, when_down="fail") as upstream:
        await lost_under(shaky, partial(upstream.read_resource, "note://a"), outcomes)
        assert type(outcomes.pop()[0]) is ConnectionLost  # and not that it is down: this was sent
        assert shaky.handled == ["a"]


async def test_a_reader_whose_failure_opens_the_circuit_is_told_at_once(autojump_clock: Any) -> None:
    """Over HTTP a request can be lost while the connection stands: a channel says so by its id."""
    target = Forgetful()
    async with supervised(target, breaker=Breaker(1, 30)) as upstream:
        start = trio.current_time()
        with pytest.raises(ConnectionLost, match="this one is lost"):
            await upstream.read_resource("note://a")
        assert trio.current_time() - start == near(2)
        assert upstream.state is UpstreamState.OPEN
    async with supervised(target) as upstream:
        with pytest.raises(ConnectionLost, match="this one is lost"):
            await upstream.read_resource("note://a")
        statistics = upstream.statistics()
        assert (statistics.pings, statistics.repeated_calls, statistics.connections) == (1, 1, 1)


class Forgetful:
    """Answers everything, but loses each reading of a resource."""

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[MessageChannel]:
        async with Shaky().connect() as channel:
            yield Losing(channel)


@attrs.define(eq=False)
class Losing(WrappedChannel):
    lost: list[RequestId | None] = attrs.field(factory=list)

    async def send(self, batch: Sequence[Outgoing]) -> None:
        self.lost += [message.request_id for message in batch if b"resources/read" in message.data]
        await self.channel.send(batch)

    async def receive(self) -> Sequence[Incoming]:
        return [self._lose(incoming) for incoming in await self.channel.receive()]

    def _lose(self, incoming: Incoming) -> Incoming:
        id = getattr(incoming.message, "id", None)
        return Incoming(Lost(id, "this one is lost")) if id in self.lost else incoming


async def test_a_server_that_says_it_is_going_away_is_looked_after_at_once(autojump_clock: Any) -> None:
    server = HandMade()

    @server.tool
    async def leave(params: Any, ctx: Any) -> Any:
        raise trimcp.ErrorReply(params.arguments["code"], "shutting down")

    async with supervised(server) as upstream:
        for code, pings in ((1001, 0), (1002, 1)):
            with pytest.raises(trimcp.RemoteError, match="shutting down"):
                await upstream.call_tool("leave", {"code": code})
            await wait_all_tasks_blocked()
            assert upstream.statistics().pings == pings


# In a group


async def test_a_supervised_member_of_a_group_comes_back(autojump_clock: Any) -> None:
    shaky, steady = Shaky(), Shaky()
    async with trimcp.Group(trimcp.Client("host", "1")) as group:
        upstream = await group.supervise("shaky", shaky, restarts=Restarts(first_pause=40))
        await group.open("steady", steady)
        assert [tool.name for tool in await group.list_tools()][::4] == ["shaky__work", "steady__work"]
        assert group.upstream("shaky") is upstream
        assert upstream.name == "shaky"
        assert list(group) == ["shaky", "steady"]
        with pytest.raises(KeyError):
            group["shaky"]
        with pytest.raises(KeyError):
            group.upstream("steady")
        await shaky.die()
        await upstream.wait_state(UpstreamState.WAITING)
        assert {tool.name.partition("__")[0] for tool in await group.list_tools()} == {"steady"}
        assert not (await group.call_tool("shaky__work")).is_error  # waits
        async with group.calling("shaky__work") as call:
            assert not (await call.result()).is_error
        with pytest.raises(trimcp.LocalError, match="open already"):
            await group.supervise("shaky", shaky)
        with pytest.raises(trimcp.LocalError, match="one connection"):
            await group.supervise("wrong", trimcp.memory_channels()[0])
        assert "wrong" not in group
        await group.close("shaky")
        assert upstream.state is UpstreamState.ENDED
        with pytest.raises(trimcp.LocalError, match="the servers are steady"):
            await group.call_tool("shaky__work")
        down = await group.supervise("down", Shaky(refusals=10**9))
    assert down.state is UpstreamState.ENDED


# Servers that really go away

CHILD = """
import os
import trimcp, trio

server = trimcp.Server("child", "1")

@server.tool
async def pid() -> str:
    return str(os.getpid())

@server.tool
async def hang() -> str:
    await trio.sleep_forever()

@server.resource("pid://")
async def my_pid() -> str:
    await trio.sleep(float(os.environ.get("DELAY", 0)))
    return str(os.getpid())

trimcp.run_stdio(server)
"""


def child() -> trimcp.StdioServer:
    return trimcp.stdio(sys.executable, "-c", CHILD)


async def pid_of(upstream: Upstream) -> int:
    content = (await upstream.call_tool("pid")).content[0]
    assert isinstance(content, trimcp.Text)
    return int(content.text)


@pytest.mark.parametrize("revision", [trimcp.LATEST, trimcp.LATEST_LEGACY], ids=["modern", "legacy"])
async def test_a_killed_child_is_started_again(
    revision: trimcp.Revision, nursery: trio.Nursery, steady_clock: trio.abc.Clock
) -> None:
    outcomes: list[Any] = []
    pids = []
    with trio.fail_after(60):
        async with supervised(child(), revision=revision, restarts=QUICK) as upstream:
            async with upstream.listen(tools=True) as changes:
                for round in range(3):
                    pids.append(await pid_of(upstream))
                    for _ in range(5):
                        nursery.start_soon(caught, partial(upstream.call_tool, "hang"), outcomes)
                    async with upstream.session() as session:
                        await until(lambda session=session: session.statistics().pending == 5)
                    os.kill(pids[-1], signal.SIGKILL)
                    killed = trio.current_time()
                    assert await changes.receive() == trimcp.ToolsChanged()
                    assert len(outcomes) == 5 * (round + 1)
                    assert all("was ended by SIGKILL" in str(value) for value, _ in outcomes[-5:])
                    assert max(at for _, at in outcomes[-5:]) - killed < 1
            pids.append(await pid_of(upstream))
            assert upstream.statistics().connections == 4
            assert "was ended by SIGKILL" in str(upstream.statistics().last_reason)
    assert len(set(pids)) == 4
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_stopped_child_is_taken_for_dead_and_replaced() -> None:
    with trio.fail_after(60):
        health = Health(owing=0.2, idle=0.2, patience=0.5)
        async with supervised(child(), restarts=QUICK, health=health) as upstream:
            first = await pid_of(upstream)
            os.kill(first, signal.SIGSTOP)
            with pytest.raises(ConnectionLost, match="was silent, and did not answer a ping"):
                await upstream.call_tool("pid")
            assert await pid_of(upstream) != first
            with pytest.raises(ProcessLookupError):
                os.kill(first, 0)


async def test_a_program_that_cannot_start_says_why() -> None:
    command = trimcp.stdio(sys.executable, "-c", "import sys; print('no key', file=sys.stderr); sys.exit(3)")
    with trio.fail_after(60):
        options: dict[str, Any] = {"restarts": Restarts(most=2, first_pause=0.01), "when_down": "wait"}
        async with trimcp.supervise(trimcp.Client("host"), command, **options) as upstream:
            with pytest.raises(UpstreamDown, match=r"given up after 2 restarts .*exited with status 3.* no key"):
                await upstream.call_tool("pid")
            assert len(upstream.statistics().reasons) == 3


class Web:
    """An HTTP server that goes away and comes back at the same place."""

    def __init__(self, path: Path, nursery: trio.Nursery) -> None:
        self.shaky, self.path, self.nursery = Shaky(), path, nursery
        self.scope, self.gone = trio.CancelScope(), trio.Event()

    async def come(self) -> str:
        self.scope, self.gone = trio.CancelScope(), trio.Event()
        (url,) = await self.nursery.start(self._serve)
        return str(url)

    async def _serve(self, task_status: trio.TaskStatus[list[str]]) -> None:
        with self.scope:
            await trimcp.serve_http(self.shaky.server, uds=self.path, task_status=task_status)
        self.gone.set()

    async def go(self) -> None:
        self.scope.cancel()
        await self.gone.wait()
        self.path.unlink(missing_ok=True)


@asynccontextmanager
async def web(tmp_path: Path) -> AsyncIterator[Web]:
    async with trio.open_nursery() as nursery:
        yield Web(tmp_path / "s", nursery)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("revision", [trimcp.LATEST, trimcp.LATEST_LEGACY], ids=["modern", "legacy"])
async def test_an_http_server_goes_away_and_comes_back(revision: trimcp.Revision, tmp_path: Path) -> None:
    outcomes: list[Any] = []
    # In the legacy eras the call's stream is taken up again for as long as the server is not known to be gone.
    options: dict[str, Any] = {"revision": revision, "restarts": QUICK, "health": Health(owing=0.5, idle=600)}
    with trio.fail_after(60):
        async with web(tmp_path) as place:
            target = trimcp.http(await place.come())
            async with supervised(target, **options) as upstream, trio.open_nursery() as tasks:
                async with upstream.listen(tools=True) as changes:
                    tasks.start_soon(caught, work(upstream, 600), outcomes)
                    await until(lambda: place.shaky.handled)
                    await place.go()
                    await upstream.wait_state(UpstreamState.WAITING, UpstreamState.OPEN, UpstreamState.CONNECTING)
                    ((lost, _),) = outcomes  # cut, or told by the server's last words
                    assert isinstance(lost, ConnectionLost | trimcp.RemoteError)
                    await place.come()
                    await upstream.wait_up()
                    assert not (await upstream.call_tool("work")).is_error
                    assert await changes.receive() == trimcp.ToolsChanged()
                    assert len(place.shaky.handled) == 2
                assert upstream.statistics().losses == 1
    assert place.shaky.ended[0] is not None


async def test_a_cut_reply_over_http_ends_no_upstream_that_answers(tmp_path: Path) -> None:
    """One exchange fails alone: it is found out whether the server lives, and it does."""
    with trio.fail_after(60):
        async with web(tmp_path) as place:
            await place.come()
            async with trio.open_nursery() as nursery:
                proxy = Cutting(tmp_path / "p", place.path)
                nursery.start_soon(trio.serve_listeners, proxy.serve, [await proxy.listen()])
                async with supervised(trimcp.http("http://localhost/mcp", uds=str(proxy.path))) as upstream:
                    outcomes: list[Any] = []
                    async with trio.open_nursery() as calls:
                        calls.start_soon(caught, work(upstream, 600), outcomes)
                        await until(lambda: place.shaky.handled)
                        proxy.cut()
                    assert type(outcomes[0][0]) is ConnectionLost
                    await until(lambda: upstream.statistics().pings)
                    assert not (await upstream.call_tool("work")).is_error
                    assert upstream.statistics().connections == 1
                    assert upstream.statistics().unanswered_calls == 1
                nursery.cancel_scope.cancel()
    assert place.shaky.ended == [CancelReason.DISCONNECTED, None]


class Cutting:
    """Passes bytes between a Unix socket of its own and another one, until what is under way is cut."""

    def __init__(self, path: Path, to: Path) -> None:
        self.path, self.to = path, to
        self.scopes: set[trio.CancelScope] = set()

    async def listen(self) -> trio.SocketListener:
        listening = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
        await listening.bind(str(self.path))
        listening.listen(8)
        return trio.SocketListener(listening)

    async def serve(self, ours: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            self.scopes.add(scope)
            async with await trio.open_unix_socket(str(self.to)) as theirs, trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, ours, theirs, scope)
                nursery.start_soon(self._pump, theirs, ours, scope)
        self.scopes.discard(scope)

    async def _pump(self, source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope) -> None:
        with suppress(trio.BrokenResourceError):
            async for data in source:
                await sink.send_all(data)
        scope.cancel()

    def cut(self) -> None:
        for scope in self.scopes:
            scope.cancel()
