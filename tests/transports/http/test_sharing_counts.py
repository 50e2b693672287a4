"""Applications that share what they use up: quotas, rates and turns hold for all of them together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.store.memory_store import MemoryHub, MemoryStore
from tests.transports.http.face import LEGACY, Answer, Visitor
from tests.transports.http.test_sessions import by_header
from trimcp.auth import ResourceServer
from trimcp.net import http_application
from trimcp.server.server import Server
from trimcp.session.limits import Limits, Quota
from trimcp.transports.http.endpoint.application import HttpApplication
from trimcp.transports.http.peers.identity import SharedUses
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.codes import OVERLOADED
from trimcp.wire.revisions import LATEST, Revision

BOTH_ERAS = pytest.mark.parametrize("revision", [LEGACY, LATEST], ids=str)


@attrs.define(eq=False)
class Counted:
    """Several applications, and which calls run in them."""

    hub: MemoryHub
    faces: list[HttpApplication] = attrs.field(factory=list)
    servers: list[Server[Any]] = attrs.field(factory=list)
    stores: list[MemoryStore] = attrs.field(factory=list)
    running: list[str] = attrs.field(factory=list)
    begun: list[tuple[str, float]] = attrs.field(factory=list)
    go_on: dict[str, trio.Event] = attrs.field(factory=dict)

    async def visitor(self, at: int, who: str, revision: Revision = LATEST) -> Visitor:
        visitor = Visitor(self.faces[at], revision, {"authorization": who})
        if not revision.modern:
            await visitor.initialize()
        return visitor

    async def end(self, name: str) -> None:
        self.go_on[name].set()
        await trio.testing.wait_all_tasks_blocked()

    def server(self, limits: Limits, **options: Any) -> Server[Any]:
        server = Server[Any]("counted", "1", limits=limits)

        @server.tool(**options)
        async def hold(name: str) -> str:
            self.running.append(name)
            self.begun.append((name, trio.current_time()))
            try:
                await self.go_on.setdefault(name, trio.Event()).wait()
            finally:
                self.running.remove(name)
            return name

        return server


@asynccontextmanager
async def counted(limits: Limits, number: int = 2, **options: Any) -> AsyncIterator[Counted]:
    made = Counted(MemoryHub())
    async with AsyncExitStack() as stack:
        for _ in range(number):
            store, server = MemoryStore(made.hub), made.server(limits, **options)
            settings = HttpSettings(store=store, authenticate=by_header)
            made.faces.append(await stack.enter_async_context(http_application(server, settings)))
            made.stores.append(store)
            made.servers.append(server)
        yield made


def refusal_of(answer: Answer) -> Any:
    error = answer.message["error"]
    assert error["code"] == OVERLOADED
    return error


@BOTH_ERAS
async def test_a_caller_has_its_quota_once_and_not_in_each_process(revision: Revision, autojump_clock: Any) -> None:
    async with counted(Limits(principal=Quota(running=2))) as made:
        ada = [await made.visitor(at, "ada", revision) for at in (0, 1)]
        calls = []
        for n in range(4):
            calls.append(await ada[n % 2].call("hold", name=str(n)))
            await trio.testing.wait_all_tasks_blocked()
        bob = await (await made.visitor(1, "bob", revision)).call("hold", name="bob's")
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(made.running) == ["0", "1", "bob's"]
        await made.end("0")
        assert sorted(made.running) == ["1", "2", "bob's"]
        await made.end("1")
        assert sorted(made.running) == ["2", "3", "bob's"]
        for name in ("2", "3", "bob's"):
            await made.end(name)
        for answer in (*calls, bob):
            assert "result" in (await answer.done()).message


async def test_the_turn_of_another_process_comes_at_once(autojump_clock: Any) -> None:
    async with counted(Limits(), max_concurrent=1) as made:
        visitors = [await made.visitor(at, "ada") for at in (0, 1)]
        for at, name in enumerate("ab"):
            await visitors[at].call("hold", name=name)
            await trio.testing.wait_all_tasks_blocked()
        assert made.running == ["a"]
        before = trio.current_time()
        await made.end("a")
        assert made.running == ["b"]
        assert trio.current_time() == before
        await made.end("b")


async def test_clients_of_all_processes_alternate(autojump_clock: Any) -> None:
    async with counted(Limits(), max_concurrent=1) as made:
        ada, bob = await made.visitor(0, "ada"), await made.visitor(1, "bob")
        for name in ("a0", "a1", "a2", "a3"):
            await ada.call("hold", name=name)
            await trio.testing.wait_all_tasks_blocked()
        for name in ("b0", "b1"):
            await bob.call("hold", name=name)
            await trio.testing.wait_all_tasks_blocked()
        while made.running:
            await made.end(made.running[0])
        assert [name for name, _ in made.begun] == ["a0", "a1", "b0", "a2", "b1", "a3"]


async def test_a_rate_is_that_of_all_processes(autojump_clock: Any) -> None:
    async with counted(Limits(principal=Quota(per_second=2, burst=1))) as made:
        ada = [await made.visitor(at, "ada") for at in (0, 1)]
        begun = trio.current_time()
        for n in range(6):
            made.go_on[str(n)] = event = trio.Event()
            event.set()
        calls = [await ada[n % 2].call("hold", name=str(n)) for n in range(6)]
        for answer in calls:
            await answer.done()
        times = sorted(at - begun for _, at in made.begun)
        assert times == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5], abs=0.01)


async def test_what_cannot_wait_is_refused_wherever_it_arrives(autojump_clock: Any) -> None:
    async with counted(Limits(principal=Quota(running=1, waiting=1))) as made:
        ada = [await made.visitor(at, "ada") for at in (0, 1)]
        for n in range(2):
            await ada[n].call("hold", name=str(n))
            await trio.testing.wait_all_tasks_blocked()
        for visitor in ada:
            refused = await (await visitor.call("hold", name="one too many")).done()
            assert "too many calls wait" in refusal_of(refused)["message"]
            assert refusal_of(refused)["data"]["retryAfter"] > 0
        assert made.running == ["0"]
        for n in range(2):
            await made.end(str(n))


async def test_a_call_that_is_given_up_leaves_the_queue(autojump_clock: Any) -> None:
    async with counted(Limits(), max_concurrent=1) as made:
        ada, bob = await made.visitor(0, "ada"), await made.visitor(1, "bob")
        await ada.call("hold", name="a")
        await trio.testing.wait_all_tasks_blocked()
        given_up = await bob.call("hold", name="given up")
        await trio.testing.wait_all_tasks_blocked()
        await bob.call("hold", name="b")
        await trio.testing.wait_all_tasks_blocked()
        given_up.leave()
        await trio.testing.wait_all_tasks_blocked()
        await made.end("a")
        assert made.running == ["b"]
        await made.end("b")


async def test_a_long_call_keeps_its_turn_and_that_of_a_dead_process_ends(autojump_clock: Any) -> None:
    async with counted(Limits(), max_concurrent=1) as made:
        ada, bob = await made.visitor(0, "ada"), await made.visitor(1, "bob")
        await ada.call("hold", name="long")
        await trio.testing.wait_all_tasks_blocked()
        await bob.call("hold", name="next")
        await trio.sleep(60)
        assert made.running == ["long"]
        made.stores[0].broken = OSError("this one is cut off")
        await trio.sleep(made.stores[0].lease + 3)
        assert made.running == ["long", "next"]
        made.stores[0].broken = None
        for name in ("long", "next"):
            await made.end(name)


async def test_without_the_store_calls_under_a_quota_are_refused_and_others_go_on(autojump_clock: Any) -> None:
    async with counted(Limits(), max_concurrent=1) as made:
        ada = await made.visitor(0, "ada")
        made.stores[0].broken = OSError("gone")
        refused = await (await ada.call("hold", name="x")).done()
        assert "cannot be reached" in refusal_of(refused)["message"]
        assert (await (await ada.post(ada.request("tools/list"))).done()).json["result"]["tools"]
        made.stores[0].broken = None
        await ada.call("hold", name="y")
        await trio.sleep(1)
        assert made.running == ["y"]
        await made.end("y")


async def test_what_a_process_that_ends_has_used_is_free_at_once(autojump_clock: Any) -> None:
    async with counted(Limits(), max_concurrent=1) as made:
        server, store = made.server(Limits(), max_concurrent=1), MemoryStore(made.hub)
        async with http_application(server, HttpSettings(store=store, authenticate=by_header)) as third:
            await Visitor(third, LATEST, {"authorization": "eve"}).call("hold", name="cut off")
            await trio.testing.wait_all_tasks_blocked()
            bob = await made.visitor(1, "bob")
            await bob.call("hold", name="b")
            await trio.testing.wait_all_tasks_blocked()
            assert made.running == ["cut off"]
            await third.drain(0)
            await trio.testing.wait_all_tasks_blocked()
            assert made.running == ["b"]
        await made.end("b")


async def test_what_checks_tokens_shares_before_the_first_request(autojump_clock: Any) -> None:
    shared: list[Any] = []

    class Issuer(ResourceServer):
        async def share(self, uses: SharedUses) -> None:
            shared.append(uses)

    issuer = Issuer("http://localhost:8000/mcp", ["http://localhost:8001"])
    store = MemoryStore(MemoryHub())
    async with http_application(Server[Any]("s", "1"), HttpSettings(store=store, auth=issuer)):
        assert shared == [store]
