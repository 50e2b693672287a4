"""Applications that share their sessions: any of them answers any request, and what one leaves another takes over."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import orjson
import pytest
import trio
import trio.testing

from tests.store.memory_store import MemoryHub, MemoryStore
from tests.transports.http.face import LEGACY, Answer, Visitor
from tests.transports.http.test_exchange import make_server
from tests.transports.http.test_sessions import by_header
from tests.transports.http.test_sse2024 import OLDEST, say, spoken
from trimcp.framing.sse import Event
from trimcp.net import http_application
from trimcp.server.server import Server
from trimcp.session.context import Context
from trimcp.store.shared import AppendEvent, SaveSession
from trimcp.store.writing import WriteQueue
from trimcp.transports.http.endpoint import sharing
from trimcp.transports.http.endpoint.application import HttpApplication
from trimcp.transports.http.endpoint.exchange import Exchange
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.codes import CANCELLED_BY_DRAIN, INTERNAL_ERROR
from trimcp.wire.revisions import LATEST, REVISIONS, Revision

SHARED = pytest.mark.parametrize("revision", [each for each in REVISIONS[1:] if not each.modern], ids=str)


@attrs.define(eq=False)
class Replica:
    """One process, as far as the others can tell."""

    hub: MemoryHub
    server: Server[Any]
    store: MemoryStore
    face: HttpApplication

    def die(self) -> None:
        """Be gone for the others, as after a kill, or after standing still for too long."""
        del self.hub.leased[self.store.name]

    async def be_killed(self) -> None:
        """Say nothing more, and be gone for the others once the lease is over."""
        self.store.broken = OSError("it was killed")
        await trio.sleep(self.store.lease)
        self.die()

    def visit(self, visitor: Visitor) -> Visitor:
        """Return a client that goes on here with its session."""
        return Visitor(self.face, visitor.revision, visitor.headers, visitor.session, last=visitor.last)


def shared_server(journal: list[str] | None = None) -> Server[Any]:
    server = make_server(journal)

    @server.resource("app://state")
    async def state() -> str:
        return "on"

    @server.tool
    async def touch(*, ctx: Context) -> str:
        server.resource_updated("app://state")
        return "touched"

    @server.tool
    async def level(*, ctx: Context) -> str:
        await ctx.log("debug", "fine print")
        return "logged"

    return server


@asynccontextmanager
async def replicas(
    number: int = 2,
    revision: Revision = LEGACY,
    journals: list[list[str]] | None = None,
    kind: type[MemoryStore] = MemoryStore,
    **settings: Any,
) -> AsyncIterator[tuple[list[Replica], Visitor]]:
    """Serve by several applications with one store, and yield them, and a client of the first one."""
    hub, made = MemoryHub(), list[Replica]()
    async with AsyncExitStack() as stack:
        for index in range(number):
            server = shared_server(journals[index] if journals else None)
            store = kind(hub)
            face = await stack.enter_async_context(http_application(server, HttpSettings(store=store, **settings)))
            made.append(Replica(hub, server, store, face))
        yield made, Visitor(made[0].face, revision)


def data_of(events: list[Event]) -> list[bytes]:
    return [event.data for event in events if event.data]


def steps_of(*answers: Answer) -> list[int]:
    """The numbered progress in the answers, one behind the other."""
    return [
        message["params"]["progress"]
        for answer in answers
        for message in answer.messages
        if message.get("method") == "notifications/progress"
    ]


def test_without_a_store_nothing_of_it_is_loaded() -> None:
    program = """
import sys, trio, trimcp
from trimcp.net import http_application
async def main():
    async with http_application(trimcp.Server("s", "1")) as face:
        await trio.lowlevel.checkpoint()
trio.run(main)
wanted = ("trimcp.store.shared", "trimcp.store.writing", "trimcp.store.database", "sqlite3", "trimcp.server.keeping",
    "trimcp.server.handlers.shared_turns", "trimcp.store.counted_sqlite",
    "trimcp.transports.http.state.held", "trimcp.transports.http.endpoint.sharing")
print([name for name in wanted if name in sys.modules])
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n"


async def test_a_call_without_a_session_runs_next_to_nothing_of_what_processes_share(autojump_clock: Any) -> None:
    """It asks whether its answer has to wait, and that is all."""
    async with replicas(1) as ([one], _):
        visitor = Visitor(one.face, LATEST)
        first = await (await visitor.call("echo", text="first")).done()
        assert first.status == 200
        assert isinstance(first.handler, Exchange)
        head, answer = first.handler.head, Answer()
        assert head.again is not None
        begun = set[tuple[str, str]]()
        sys.setprofile(lambda frame, event, arg: begun.add((frame.f_globals.get("__name__", ""), frame.f_code.co_name)))
        try:
            handler = head.again(head)  # as nearly always: a connection's next head is like the one before
            assert handler is not None
            handler.start(
                orjson.dumps(visitor.request("tools/call", {"name": "echo", "arguments": {"text": "2"}})), answer
            )
            await answer.done()
        finally:
            sys.setprofile(None)
        assert answer.json["result"]["content"][0]["text"] == "2"
        shared = ("trimcp.store.", f"{sharing.__package__}.shar", "trimcp.transports.http.state.held")
        assert "trimcp.server.tools" in {module for module, _ in begun}
        assert {name for module, name in begun if module.startswith(shared)} == {"__init__", "_answer"}


@SHARED
async def test_any_process_answers_for_a_session(revision: Revision, autojump_clock: Any) -> None:
    async with replicas(3, revision) as ([one, two, three], visitor):
        await visitor.initialize()
        assert len(one.hub.sessions) == 1
        for replica in (one, two, three, two):
            answer = await (await replica.visit(visitor).call("echo", text="hi")).done()
            assert answer.json["result"]["content"][0]["text"] == "hi"
        stream = await (await two.visit(visitor).call("steps", token=1, count=5)).done()
        assert steps_of(stream) == [1, 2, 3, 4, 5]
        assert stream.messages[-1]["result"]
        assert len(one.face.shared.sessions) == 1
        assert len(two.face.shared.sessions) == len(three.face.shared.sessions) == 0
        gone = await two.visit(visitor).send("DELETE", "/mcp", headers={"mcp-session-id": visitor.session or ""})
        assert (await gone.done()).status == 200
        await trio.testing.wait_all_tasks_blocked()
        assert not one.hub.sessions
        assert not one.hub.events
        assert (await (await three.visit(visitor).call("echo", text="hi")).done()).status == 404


async def ask_here_answer_there_watch_elsewhere(visitor: Visitor, there: Visitor, elsewhere: Visitor) -> None:
    asked = await visitor.call("ask")
    question = (await asked.events(2))[-1]
    id = next(message["id"] for message in asked.messages if message.get("method") == "elicitation/create")
    asked.leave()
    watched = await elsewhere.listen(question.id)
    await watched.begun()
    answer = {"jsonrpc": "2.0", "id": id, "result": {"action": "accept", "content": {"name": "Ada"}}}
    assert (await (await there.post(answer)).done()).status == 202
    await watched.done()
    assert watched.messages[-1]["result"]["content"][0]["text"] == "Hello, Ada"


async def test_a_question_is_answered_through_one_process_and_watched_through_another(autojump_clock: Any) -> None:
    async with replicas(3) as ([_, two, three], visitor):
        await visitor.initialize({"elicitation": {}})
        await ask_here_answer_there_watch_elsewhere(visitor, two.visit(visitor), three.visit(visitor))


async def test_an_answer_to_what_a_dead_process_asked_answers_nothing_else(autojump_clock: Any) -> None:
    async with replicas() as ([one, two], visitor):
        await visitor.initialize({"elicitation": {}})
        first = await visitor.call("ask")
        await first.events(2)
        one.die()
        later = two.visit(visitor)
        second = await later.call("ask")
        await second.events(2)
        for name, asked in (("Eve", first), ("Ada", second)):
            id = next(message["id"] for message in asked.messages if message.get("method") == "elicitation/create")
            answer = {"jsonrpc": "2.0", "id": id, "result": {"action": "accept", "content": {"name": name}}}
            assert (await (await later.post(answer)).done()).status == 202
        await second.done()
        assert second.messages[-1]["result"]["content"][0]["text"] == "Hello, Ada"


async def test_a_session_that_ended_or_was_lost_leaves_nothing(autojump_clock: Any) -> None:
    async with replicas() as ([one, two], visitor):
        kept = list[weakref.ref[Any]]()
        for _ in range(2):
            await visitor.initialize()
            kept += [weakref.ref(session) for session in one.face.shared.sessions]
            await (await (two.visit(visitor)).call("steps", token=1, count=2)).done()
            await (await visitor.call("steps", token=1, count=2)).done()
            await (await visitor.send("DELETE", "/mcp", headers={"mcp-session-id": visitor.session or ""})).done()
            visitor.session = None
        await visitor.initialize()
        kept += [weakref.ref(session) for session in one.face.shared.sessions]
        one.die()
        await trio.sleep(20)
        for replica in (one, two):
            sharing: Any = replica.face.sharing
            assert not sharing.replies
            assert not sharing._asked
            assert not sharing._holding.events.fences
            assert not sharing.queue._waiting
            assert sharing.queue._size == 0
        gc.collect()
        assert [each() for each in kept] == [None] * 3


async def test_an_application_that_has_ended_hears_of_no_change(autojump_clock: Any) -> None:
    hub, server = MemoryHub(), shared_server()
    async with http_application(server, HttpSettings(store=MemoryStore(hub))) as face:
        ended: Any = face.sharing
        server.resource_updated("app://state")
        assert len(ended.queue._waiting) == 1
    async with http_application(server, HttpSettings(store=MemoryStore(hub))) as face:
        server.resource_updated("app://state")
        assert not ended.queue._waiting, "nobody would ever write it"
        going_on: Any = face.sharing
        assert len(going_on.queue._waiting) == 1


async def test_a_cancel_reaches_the_process_that_runs_the_call(autojump_clock: Any) -> None:
    journal: list[str] = []
    async with replicas(2, journals=[journal, []]) as ([_, two], visitor):
        await visitor.initialize()
        call = await visitor.call("wait", seconds=60)
        await call.begun()
        cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": visitor.last}}
        assert (await (await two.visit(visitor).post(cancel)).done()).status == 202
        await call.done()
        assert journal == ["cancelled by peer"]


async def test_a_stream_goes_on_at_another_process_without_loss(autojump_clock: Any) -> None:
    async with replicas() as ([_, two], visitor):
        await visitor.initialize()
        call = await visitor.call("steps", token=1, count=20)
        seen = await call.events(5)
        call.leave()
        await trio.sleep(3)
        rest = await (await two.visit(visitor).listen(seen[-1].id)).done()
        assert steps_of(call, rest) == list(range(1, 21))
        assert rest.messages[-1]["result"]


async def test_who_has_a_session_is_asked_once_and_again_when_it_has_moved(autojump_clock: Any) -> None:
    async with replicas(3) as ([one, two, three], visitor):
        await visitor.initialize()
        loads: list[str] = []
        load = two.store.load

        async def counted(session: str) -> Any:
            loads.append(session)
            return await load(session)

        two.store.load = counted  # type: ignore[method-assign]
        elsewhere = two.visit(visitor)
        for text in "abc":
            assert (await (await elsewhere.call("echo", text=text)).done()).json["result"]
        assert len(loads) == 1
        one.die()
        assert (await (await three.visit(visitor).call("echo", text="d")).done()).json["result"]
        assert len(three.face.shared.sessions) == 1
        for text in "efg":  # its letter to the first one comes back
            answer = await (await elsewhere.call("echo", text=text)).done()
            assert answer.json["result"]["content"][0]["text"] == text
        assert len(loads) == 2
        [session] = three.face.shared.sessions
        session.end("as when it ends", ending=True)
        await trio.testing.wait_all_tasks_blocked()
        for text in "hij":  # the third one says that it has it no more
            answer = await (await elsewhere.call("echo", text=text)).done()
            assert answer.json["result"]["content"][0]["text"] == text
        assert len(loads) == 3
        assert len(two.face.shared.sessions) == 1


@SHARED
async def test_the_session_of_a_process_that_died_lives_on(revision: Revision, autojump_clock: Any) -> None:
    async with replicas(2, revision) as ([one, two], visitor):
        await visitor.initialize({"roots": {}})
        one.die()
        later = two.visit(visitor)
        assert (await (await later.call("echo", text="hi")).done()).json["result"]
        assert len(two.face.shared.sessions) == 1
        kept = next(iter(two.face.shared.sessions))
        engine: Any = kept.pushed
        assert engine.session.engine.legacy.peer.name == "visitor"
        assert engine.session.engine.legacy.capabilities.roots is not None
        assert engine.session.engine.legacy.revision is revision


async def test_a_call_whose_process_died_ends_with_one_clear_error(autojump_clock: Any) -> None:
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        call = await visitor.call("steps", token=1, count=20)
        seen = await call.events(5)
        call.leave()
        await trio.testing.wait_all_tasks_blocked()
        one.die()
        rest = await (await two.visit(visitor).listen(seen[-1].id)).done()
        assert [message["error"]["message"][:32] for message in rest.messages] == ["the process that ran this call h"]
        assert rest.messages[0]["id"] == visitor.last
        again = await (await two.visit(visitor).listen(rest.now()[-1].id)).done()
        assert not again.messages


@pytest.mark.parametrize("silent", [False, True])
async def test_a_call_that_was_handed_over_ends_with_an_error_within_the_lease(
    silent: bool, autojump_clock: Any
) -> None:
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        far = two.visit(visitor)
        calls = [await far.call("wait", seconds=60), await far.call("wait", seconds=0.05)]
        await calls[0].begun()
        quiet = await far.call("wait", seconds=60)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        one.die()
        one.store.broken = OSError("it is really gone") if silent else None
        await quiet.done()
        assert trio.current_time() - began <= 10
        assert quiet.message["error"]["message"].startswith("the process that ran this call has ended")
        assert (await calls[0].done()).status == 200


@pytest.mark.parametrize("tool", ["steps", "ask"])
async def test_two_processes_killed_one_after_the_other_cost_a_call_one_lease(tool: str, autojump_clock: Any) -> None:
    """The second one took the session over, ended its calls, and told nobody but the store."""
    async with replicas(4) as ([one, two, three, four], visitor), trio.open_nursery() as nursery:
        await visitor.initialize({"elicitation": {}})
        far = two.visit(visitor)
        call = await far.call(tool, token=1, **({"count": 1_000} if tool == "steps" else {}))
        await call.events(2)
        began = trio.current_time()
        nursery.start_soon(one.be_killed)
        await trio.sleep(two.store.lease + 0.1)
        assert (await (await three.visit(visitor).call("echo", text="hi")).done()).json["result"]
        nursery.start_soon(three.be_killed)
        await call.done()
        rest = await (await four.visit(visitor).listen(call.now()[-1].id)).done()
        assert trio.current_time() - began <= 1.25 * two.store.lease + 0.1
        assert rest.messages[-1]["error"]["message"].startswith("the process that ran this call has ended")
        assert rest.messages[-1]["id"] == far.last
        steps = steps_of(call, rest)
        assert steps == list(range(1, len(steps) + 1))
        nursery.cancel_scope.cancel()


async def test_what_resumes_a_stream_waits_for_the_next_holder(autojump_clock: Any) -> None:
    async with replicas(2) as ([one, two], visitor), trio.open_nursery() as nursery:
        await visitor.initialize()
        call = await visitor.call("steps", token=1, count=1000)
        seen = await call.events(3)
        nursery.start_soon(one.be_killed)
        call.leave()
        began = trio.current_time()
        rest = await (await two.visit(visitor).listen(seen[-1].id)).done()
        assert rest.messages[-1]["error"]["message"].startswith("the process that ran this call has ended")
        assert trio.current_time() - began <= 1.25 * two.store.lease + 0.1
        assert len(two.face.shared.sessions) == 1
        nursery.cancel_scope.cancel()


async def test_who_stood_still_writes_nothing_as_holder(autojump_clock: Any) -> None:
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        call = await visitor.call("steps", token=1, count=5)
        before = len(await call.events(2))
        one.die()  # for the others: it stands still, and now goes on
        assert (await (await two.visit(visitor).call("echo", text="hi")).done()).status == 200
        await trio.sleep(20)
        assert call.aborted
        assert len(call.now()) == before
        kept = one.hub.sessions[visitor.session or ""]
        assert (kept.holder, kept.fence) == (two.store.name, 2)
        assert len(one.face.shared.sessions) == 0
        # It has a new name now, and serves as one of them.
        assert one.store.name in one.hub.leased
        assert (await (await one.visit(visitor).call("echo", text="hi")).done()).status == 200


async def test_a_process_that_ends_hands_its_sessions_over(autojump_clock: Any) -> None:
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        stream = await visitor.listen()
        await one.face.drain(5)
        await stream.done()
        assert b"retry: 1000" in bytes(stream.body)
        later = await two.visit(visitor).listen(stream.now()[-1].id)
        await later.begun()
        assert later.status == 200
        assert (await (await two.visit(visitor).call("echo", text="hi")).done()).status == 200


async def test_what_comes_to_a_process_that_has_handed_its_session_over_was_not_begun(autojump_clock: Any) -> None:
    """So its client sends it again by itself, over another connection, whatever it does."""
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        await one.face.drain(0)
        answer = await (await visitor.call("echo", text="hi")).done()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        error = answer.json["error"]
        assert (error["code"], error["data"]) == (CANCELLED_BY_DRAIN, {"reason": "drain", "started": False})
        assert (await (await two.visit(visitor).call("echo", text="hi")).done()).status == 200


async def test_a_process_that_ends_lets_others_answer_and_ends_the_streams_of_their_sessions(
    autojump_clock: Any,
) -> None:
    async with replicas() as ([_, two], visitor):
        await visitor.initialize()
        far = two.visit(visitor)
        stream = await far.listen()
        await stream.begun()
        call, late = await far.call("wait", seconds=3), await far.call("wait", seconds=30)
        await call.begun()
        await late.begun()
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.face.drain, 5)
            await stream.done()
            assert trio.current_time() == began
            assert bytes(stream.body).endswith(b"retry: 1000\n\n")
            assert (await call.done()).messages[-1]["result"]["content"][0]["text"] == "waited"
        assert trio.current_time() == began + 5
        assert late.finished  # and its client comes back for the rest
        rest = await visitor.listen(late.now()[-1].id)
        assert (await rest.done()).messages[-1]["result"]["content"][0]["text"] == "waited"


async def test_what_comes_while_the_holder_ends_is_for_the_next_one(autojump_clock: Any) -> None:
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        far = two.visit(visitor)
        call = await far.call("wait", seconds=2)
        await call.begun()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.face.drain, 5)
            await trio.sleep(1)
            later = [await far.call("echo", text="hi") for _ in range(3)]
            await trio.sleep(0.5)
            assert not any(answer.status for answer in later)
            for answer in later:
                assert (await answer.done()).json["result"]["content"][0]["text"] == "hi"
            assert call.finished
            assert call.messages[-1]["result"]["content"][0]["text"] == "waited"
        assert len(two.face.shared.sessions) == 1


async def test_what_a_process_that_ends_has_not_read_is_for_the_next_holder(autojump_clock: Any) -> None:
    """It came between the last time that the process looked and the moment from which its letters are refused."""
    hub = MemoryHub()
    async with http_application(shared_server(), HttpSettings(store=MemoryStore(hub))) as two:
        store = MemoryStore(hub)
        async with http_application(shared_server(), HttpSettings(store=store)) as one:
            visitor = Visitor(one, LEGACY)
            await visitor.initialize()
            far = Visitor(two, LEGACY, session=visitor.session)
            receive, store.receive = store.receive, trio.sleep_forever  # type: ignore[method-assign, assignment]
            assert (await (await far.call("echo", text="read")).done()).json["result"]
            call = await far.call("echo", text="unread")
            await trio.testing.wait_all_tasks_blocked()
            store.receive = receive  # type: ignore[method-assign]
        assert (await call.done()).json["result"]["content"][0]["text"] == "unread"
        assert len(two.shared.sessions) == 1


async def test_what_a_process_said_before_it_was_gone_counts(autojump_clock: Any) -> None:
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        far, receive, reading = two.visit(visitor), two.store.receive, trio.Event()

        async def receive_later() -> Any:
            await reading.wait()
            return await receive()

        two.store.receive = receive_later  # type: ignore[method-assign]
        assert (await (await far.call("echo", text="read")).done()).json["result"]
        call = await far.call("echo", text="answered, and not read")
        await trio.testing.wait_all_tasks_blocked()
        one.die()
        await trio.sleep(2 * two.store.lease)
        reading.set()
        assert (await call.done()).json["result"]["content"][0]["text"] == "answered, and not read"


async def test_what_a_process_was_not_asked_before_it_was_gone_is_for_the_next_holder(autojump_clock: Any) -> None:
    """Its letter is not written yet, and will be refused."""
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        far, commit, writing = two.visit(visitor), two.store.commit, trio.Event()
        assert (await (await far.call("echo", text="asked")).done()).json["result"]

        async def commit_later(writes: Any) -> Any:
            await writing.wait()
            return await commit(writes)

        two.store.commit = commit_later  # type: ignore[method-assign]
        call = await far.call("echo", text="not asked")
        one.die()
        sharing: Any = two.face.sharing
        sharing._lost(one.store.name)
        writing.set()
        assert (await call.done()).json["result"]["content"][0]["text"] == "not asked"


async def test_what_comes_while_a_process_has_no_lease_waits_and_is_refused_for_now(autojump_clock: Any) -> None:
    """Nobody could answer it: the name that others know is that of before."""
    async with replicas() as ([_, two], visitor):
        await visitor.initialize()
        far, opened, opening = two.visit(visitor), two.store.opened, trio.Event()
        assert (await (await far.call("echo", text="hi")).done()).json["result"]

        @asynccontextmanager
        async def opened_later() -> AsyncIterator[None]:
            await opening.wait()
            async with opened():
                yield

        two.store.opened = opened_later  # type: ignore[method-assign]
        two.die()
        await trio.sleep(two.store.lease)
        with trio.fail_after(6):
            assert (await (await far.call("echo", text="hi")).done()).status == 503
        with trio.fail_after(6):
            async with trio.open_nursery() as nursery:
                waiting = list[Answer]()

                async def ask() -> None:
                    waiting.append(await (await far.call("echo", text="hi")).done())

                nursery.start_soon(ask)
                await trio.sleep(3)
                assert not waiting, "for a while it waits"
                opening.set()
            assert waiting[0].json["result"]


async def asked_for_a_name(visitor: Visitor) -> tuple[Answer, dict[str, Any]]:
    """Call what asks for a name; return the call, and the client's answer to its question."""
    asked = await visitor.call("ask")
    await asked.events(2)
    id = next(message["id"] for message in asked.messages if message.get("method") == "elicitation/create")
    return asked, {"jsonrpc": "2.0", "id": id, "result": {"action": "accept", "content": {"name": "Ada"}}}


@pytest.mark.parametrize("known", [False, True], ids=["holder unknown", "holder known"])
@pytest.mark.parametrize("leaves", [False, True], ids=["refused", "left"])
async def test_an_answer_that_could_not_be_handed_over_reaches_its_call_all_the_same(
    known: bool, leaves: bool, autojump_clock: Any
) -> None:
    """Its client was told to try later, or has left, and says it no more: the call would wait for ever."""
    async with replicas() as ([one, two], visitor):
        await visitor.initialize({"elicitation": {}})
        far = two.visit(visitor)
        if known:
            assert (await (await far.call("echo", text="hi")).done()).json["result"]
        asked, answer = await asked_for_a_name(visitor)
        two.store.broken = OSError("out of order")
        said = await far.post(answer)
        if leaves and not said.finished:
            said.leave()
        await trio.sleep(2 * two.store.lease)
        assert said.gone or (said.status, said.headers["retry-after"]) == (503, "1")
        assert not asked.finished
        two.store.broken = None
        began = trio.current_time()
        assert (await asked.done()).messages[-1]["result"]["content"][0]["text"] == "Hello, Ada"
        assert trio.current_time() - began <= two.store.lease / 2
        sharing: Any = two.face.sharing
        await trio.testing.wait_all_tasks_blocked()
        assert not sharing._asked
        assert sharing._asking == 0
        assert one.hub.sessions[visitor.session or ""].holder == one.store.name


async def test_a_request_that_was_refused_is_not_carried_out_later(autojump_clock: Any) -> None:
    """Its client knows that it was not begun, and may have asked elsewhere."""
    journal: list[str] = []
    async with replicas(2, journals=[journal, []]) as ([_, two], visitor):
        await visitor.initialize()
        two.store.broken = OSError("out of order")
        refused = await (await two.visit(visitor).call("wait", seconds=1)).done()
        assert refused.status == 503
        two.store.broken = None
        await trio.sleep(20)
        assert journal == []


async def test_answers_that_wait_for_the_store_are_bounded(autojump_clock: Any) -> None:
    async with replicas(2, max_exchanges=3) as ([_, two], visitor):
        await visitor.initialize({"elicitation": {}})
        _, answer = await asked_for_a_name(visitor)
        two.store.broken = OSError("out of order")
        for _ in range(10):
            assert (await two.visit(visitor).post(answer)).status == 503
        sharing: Any = two.face.sharing
        assert len(sharing._asked) == 3
        two.store.broken = None
        await trio.sleep(two.store.lease)
        assert not sharing._asked


async def test_a_request_that_has_moved_twice_is_asked_once(autojump_clock: Any) -> None:
    """As when its letter was refused because the system has ended the holder, and the holder had read it."""
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        sharing: Any = two.face.sharing
        one.store.receive = trio.sleep_forever  # type: ignore[method-assign, assignment]
        far = two.visit(visitor)
        assert (await (await far.call("echo", text="read")).done()).json["result"]
        await far.call("echo", text="unread")
        [number] = sharing._asked
        for _ in range(2):
            sharing._move(one.store.name, {"n": number}, b"")
        await trio.testing.wait_all_tasks_blocked()
        assert list(sharing._asked) == [number + 1]


async def test_the_state_of_a_session_goes_with_it(autojump_clock: Any) -> None:
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        subscribe = visitor.request("resources/subscribe", {"uri": "app://state"})
        assert (await (await visitor.post(subscribe)).done()).json["result"] == {}
        debug = visitor.request("logging/setLevel", {"level": "debug"})
        assert (await (await two.visit(visitor).post(debug)).done()).json["result"] == {}
        one.die()
        later = two.visit(visitor)
        stream = await later.listen()
        logged = await (await later.call("level")).done()
        assert [message.get("method") for message in logged.messages] == ["notifications/message", None]
        # Of what changed while nobody held the session nobody has heard.
        assert [message["method"] for message in stream.messages] == ["notifications/resources/updated"]
        await (await later.call("touch")).done()
        await trio.testing.wait_all_tasks_blocked()
        assert [message["method"] for message in stream.messages] == 2 * ["notifications/resources/updated"]


async def test_a_session_that_cannot_be_kept_does_not_begin(autojump_clock: Any) -> None:
    """Its client is told to try again, within a bounded time."""
    async with replicas() as ([one, _], visitor):
        one.store.broken = OSError("full")
        params = {"protocolVersion": LEGACY.name, "capabilities": {}, "clientInfo": {"name": "v", "version": "1"}}
        answer = await (await visitor.post(visitor.request("initialize", params))).done()
        assert trio.current_time() < 6
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert answer.json["id"] == visitor.last
        assert "mcp-session-id" not in answer.headers
        assert len(one.face.shared.sessions) == 0
        one.store.broken = None
        await visitor.initialize()


async def test_what_was_handed_over_by_a_process_that_stood_still_ends(autojump_clock: Any) -> None:
    """Its answer goes to a process that is gone for the others."""
    async with replicas() as ([_, two], visitor):
        await visitor.initialize()
        call = await two.visit(visitor).call("wait", seconds=30)
        await trio.sleep(0.01)
        two.die()
        await trio.sleep(20)
        assert call.finished
        assert call.json["error"]["code"] == INTERNAL_ERROR
        assert (await (await two.visit(visitor).call("echo", text="hi")).done()).status == 200


async def test_a_change_is_passed_on_once_however_many_listen(autojump_clock: Any) -> None:
    """Many are told in several turns of the loop; what another process has told is not told to it again."""
    async with replicas() as ([one, two], _):
        wanted = {"notifications": {"resourceSubscriptions": ["app://state"]}}
        for replica in (one, two):
            modern = Visitor(replica.face, LATEST)
            for _number in range(40):
                await (await modern.post(modern.request("subscriptions/listen", wanted))).events(1)
        before = one.store.commits + two.store.commits
        for _number in range(3):
            one.server.resource_updated("app://state")
            one.server.resource_updated("app://other")
        await trio.sleep(1)
        assert 0 < one.store.commits + two.store.commits - before <= 2


async def test_who_could_not_be_reached_for_a_while_tells_that_anything_may_have_changed(autojump_clock: Any) -> None:
    """A process that stood still, whose letters the others did not send; and one whose own letter was refused."""
    async with replicas() as ([one, two], _):
        wanted = {"notifications": {"resourceSubscriptions": ["app://state"]}}
        heard = []
        for replica in (one, two):
            modern = Visitor(replica.face, LATEST)
            heard.append(await modern.post(modern.request("subscriptions/listen", wanted)))
            await heard[-1].events(1)
        one.die()
        await (await Visitor(two.face, LATEST).call("touch")).done()
        await trio.sleep(20)
        assert [len(answer.messages) for answer in heard] == [2, 2]
        two.store.broken = OSError("out of order")
        await (await Visitor(two.face, LATEST).call("touch")).done()
        await trio.sleep(5)
        assert [len(answer.messages) for answer in heard] == [2, 3]
        two.store.broken = None
        await trio.sleep(20)
        assert [len(answer.messages) for answer in heard] == [3, 3]


@pytest.mark.parametrize("revision", [LATEST, LEGACY], ids=str)
async def test_who_has_an_answer_knows_that_its_changes_reach_the_others(
    revision: Revision, autojump_clock: Any
) -> None:
    """A process that is killed right after an answer takes no change with it."""
    async with replicas(2) as ([one, two], _):
        modern = Visitor(two.face, LATEST)
        wanted = {"notifications": {"resourceSubscriptions": ["app://state"]}}
        heard = await modern.post(modern.request("subscriptions/listen", wanted))
        await heard.events(1)
        visitor = Visitor(one.face, revision)
        if not revision.modern:
            await visitor.initialize()
        await (await visitor.call("touch")).done()
        await one.be_killed()
        assert [message["method"] for message in heard.messages][1:] == ["notifications/resources/updated"]


async def test_an_answer_does_not_wait_for_a_store_that_fails(autojump_clock: Any) -> None:
    """Not while it is tried again, nor while this process has no lease."""
    async with replicas(1) as ([one], _):
        one.store.broken = OSError("out of order")
        for _second in range(3 * int(one.store.lease)):
            began = trio.current_time()
            answer = await (await Visitor(one.face, LATEST).call("touch")).done()
            assert (answer.status, trio.current_time() - began) == (200, 0)
            await trio.sleep(1)


async def test_a_change_in_one_process_is_told_by_all(autojump_clock: Any) -> None:
    async with replicas(3) as ([one, two, three], visitor):
        await visitor.initialize()
        subscribe = visitor.request("resources/subscribe", {"uri": "app://state"})
        await (await visitor.post(subscribe)).done()
        stream = await three.visit(visitor).listen()
        await stream.begun()
        modern = Visitor(two.face, LATEST)
        wanted = {"notifications": {"resourceSubscriptions": ["app://state"]}}
        listening = await modern.post(modern.request("subscriptions/listen", wanted))
        await listening.events(1)
        await (await Visitor(one.face, LATEST).call("touch")).done()
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(1)
        assert [message["method"] for message in stream.messages] == ["notifications/resources/updated"]
        assert [message["method"] for message in listening.messages][1:] == ["notifications/resources/updated"]
        listening.leave()


async def test_a_post_of_http_sse_finds_the_process_of_its_stream(autojump_clock: Any) -> None:
    async with replicas(2, OLDEST) as ([one, two], visitor):
        stream = await visitor.send("GET", "/sse", headers={"accept": "text/event-stream"})
        place = stream.now()[0].data.decode()
        far = two.visit(visitor)
        params = {"protocolVersion": OLDEST.name, "capabilities": {}, "clientInfo": {"name": "v", "version": "1"}}
        assert (await (await say(far, place, far.request("initialize", params))).done()).status == 202
        call = far.request("tools/call", {"name": "echo", "arguments": {"text": "hi"}})
        assert (await (await say(far, place, call)).done()).status == 202
        await trio.testing.wait_all_tasks_blocked()
        assert spoken(stream)[-1]["result"]["content"][0]["text"] == "hi"
        for forged in ("x.y", f"{one.store.name}.y", f"{two.store.name}.y", ".", "..", "nobody"):
            answer = await (await say(far, f"/messages?session_id={forged}", far.request("ping"))).done()
            assert answer.status in (404, 503), forged
        stream.leave()


async def test_a_stranger_finds_and_takes_nothing(autojump_clock: Any) -> None:
    async with replicas(2, authenticate=by_header) as ([one, two], visitor):
        visitor.headers["authorization"] = "ada"
        await visitor.initialize()
        eve = two.visit(visitor)
        eve.headers = {"authorization": "eve"}
        assert (await (await eve.call("echo", text="hi")).done()).status == 404
        ended = await (await visitor.call("fast", token=1, count=2)).done()
        first = ended.now()[0].id
        assert (await (await eve.listen(first)).done()).status == 404
        assert (await (await two.visit(visitor).listen(first)).done()).messages == ended.messages
        one.die()
        assert (await (await eve.call("echo", text="hi")).done()).status == 404
        assert one.hub.sessions[visitor.session or ""].fence == 1
        assert (await (await two.visit(visitor).call("echo", text="hi")).done()).status == 200


async def test_what_the_store_cannot_do_is_refused_for_now(autojump_clock: Any) -> None:
    async with replicas() as ([_, two], visitor):
        await visitor.initialize()
        two.store.broken = OSError("gone")
        answer = await two.visit(visitor).call("echo", text="hi")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert (await (await Visitor(two.face, LATEST).call("echo", text="hi")).done()).status == 200
        assert (await (await visitor.call("echo", text="hi")).done()).status == 200
        two.store.broken = None
        assert (await (await two.visit(visitor).call("echo", text="hi")).done()).status == 200


async def test_a_store_that_fails_for_a_second_loses_nothing(autojump_clock: Any) -> None:
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        call = await visitor.call("steps", token=1, count=10)
        await call.events(3)
        one.store.broken = OSError("full")
        await trio.sleep(1.5)
        before = len(call.now())
        one.store.broken = None
        await call.done()
        assert len(call.now()) > before
        assert steps_of(call) == list(range(1, 11))
        rest = await (await two.visit(visitor).listen(call.now()[3].id)).done()
        assert steps_of(rest) == list(range(4, 11))


class Repeating(MemoryStore):
    """Says of every other commit that it does not know whether it was carried out."""

    async def commit(self, writes: Any) -> Any:
        refused = await super().commit(writes)
        if self.commits % 2 == 0:
            raise OSError("the connection was lost; it may or may not have been kept")
        return refused


async def test_what_a_store_keeps_twice_is_told_once(autojump_clock: Any) -> None:
    async with replicas(kind=Repeating) as ([_, two], visitor):
        await visitor.initialize()
        call = await (await two.visit(visitor).call("steps", token=1, count=20)).done()
        assert steps_of(call) == list(range(1, 21))
        assert len(call.messages) == 21


async def test_what_waits_to_be_written_is_written_at_the_end(autojump_clock: Any) -> None:
    hub = MemoryHub()
    store = MemoryStore(hub)
    queue = WriteQueue(store, lambda write: None)
    async with store.opened():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.run)
            queue.put(SaveSession("s", 1, b"{}", 60.0, new=True))
            await trio.testing.wait_all_tasks_blocked()
            queue.put(AppendEvent("s", 1, 1, 1, b"x"))
            store.broken = OSError("just now")
            await trio.sleep(0.01)  # it is being tried again
            nursery.cancel_scope.cancel()
        store.broken = None
        await queue.flush()
        assert await store.after("s", 1, 0) == [(1, b"x")]


async def test_an_event_that_could_not_be_written_is_not_hidden_by_later_ones(autojump_clock: Any) -> None:
    """Else who resumes the stream would get the result, and never know of what came before."""
    store, refused = MemoryStore(MemoryHub()), list[Any]()
    queue = WriteQueue(store, refused.append)
    async with store.opened(), trio.open_nursery() as nursery:
        nursery.start_soon(queue.run)
        for id in ("s", "other"):
            queue.put(SaveSession(id, 1, b"{}", 60.0, new=True))
        await trio.testing.wait_all_tasks_blocked()
        queue.put(AppendEvent("s", 1, 1, 1, b"kept"))
        await trio.testing.wait_all_tasks_blocked()
        store.broken = OSError("full")
        queue.put(lost := AppendEvent("s", 1, 1, 2, b"lost"))
        await trio.sleep(1)  # it is tried again and again
        queue.put(behind := AppendEvent("s", 1, 1, 3, b"the result"))
        queue.put(ended := SaveSession("s", 1, b"no call is under way", 60.0))
        queue.put(AppendEvent("other", 1, 1, 1, b"of another session"))
        await trio.sleep(3)
        assert refused == [lost]
        store.broken = None
        await trio.sleep(10)
        assert refused == [lost, behind, ended], "whoever takes it over ends what was under way with an error"
        assert await store.after("s", 1, 0) == [(1, b"kept")]
        assert await store.after("other", 1, 0) == [(1, b"of another session")]
        assert not queue._lost
        nursery.cancel_scope.cancel()


async def test_a_store_that_fails_for_long_costs_what_was_under_way(autojump_clock: Any) -> None:
    """The process drops the session, and takes it over from itself once the store is well again."""
    async with replicas(1) as ([one], visitor):
        await visitor.initialize()
        call = await visitor.call("steps", token=1, count=60)
        await call.events(3)
        one.store.broken = OSError("full")
        await trio.sleep(8)
        assert call.aborted
        assert (await visitor.send("GET", "/readyz")).status == 503
        assert (await visitor.send("GET", "/healthz")).status == 200
        one.store.broken = None
        await trio.sleep(5)
        assert (await visitor.send("GET", "/readyz")).status == 200
        rest = await (await visitor.listen(call.now()[-1].id)).done()
        assert [message["error"]["code"] for message in rest.messages if "error" in message] == [INTERNAL_ERROR]
        assert steps_of(call, rest) == list(range(1, len(steps_of(call, rest)) + 1))
        assert (await (await visitor.call("echo", text="hi")).done()).json["result"]


async def test_a_slow_reader_at_another_process_holds_the_handler_back(autojump_clock: Any) -> None:
    journal: list[str] = []
    async with replicas(2, journals=[journal, []]) as ([_, two], visitor):
        await visitor.initialize()
        far = two.visit(visitor)
        message = far.request("tools/call", {"name": "flood", "arguments": {"count": 2_000}}, progressToken=1)
        answer = await far.post(message, answer=Answer(stalled=True))
        await trio.sleep(5)
        assert 100 < len(journal) < 1_000
        answer.read_on()
        await answer.done()
        assert steps_of(answer) == list(range(1, 2_001))


async def test_keys_that_sign_states_are_shared(autojump_clock: Any) -> None:
    async with replicas() as ([one, two], _):
        assert one.server.sealer.keys == two.server.sealer.keys
        assert one.server.sealer.keys is not None


async def test_a_letter_that_is_no_letter_harms_nothing(autojump_clock: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with replicas() as ([one, two], visitor):
        await visitor.initialize()
        for letter in (
            b"",
            b"{",
            b"[]\n",
            b'{"kind":"ask"}\n',
            b'{"kind":"change","changed":"x","list":true}\n',
            b"\xff",
        ):
            one.store.put(letter)
        one.store.put(b'{"kind":"ask","from":"nobody","n":1,"head":{}}\n')
        one.store.put(b'{"kind":"write","from":"nobody","n":1}\nx')
        await trio.testing.wait_all_tasks_blocked()
        assert (await (await two.visit(visitor).call("echo", text="hi")).done()).status == 200
