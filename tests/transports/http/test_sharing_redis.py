"""Applications that share their sessions in a Redis, as on several machines. The rest is in `test_sharing`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from tests.store.redis_server import RedisServer, redis_server, until
from tests.transports.http.face import LEGACY, Visitor
from tests.transports.http.test_sharing import ask_here_answer_there_watch_elsewhere, shared_server, steps_of
from trimcp.net import http_application
from trimcp.store.redis.connection import RedisLimits
from trimcp.store.redis.shared import RedisStore
from trimcp.transports.http.endpoint.application import HttpApplication
from trimcp.transports.http.settings import HttpSettings
from trimcp.wire.revisions import LATEST

pytestmark = pytest.mark.needs("redis-server")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class Machine:
    """One process on a machine of its own, as far as the others can tell."""

    def __init__(self, store: RedisStore, face: HttpApplication) -> None:
        self.store = store
        self.face = face

    def visit(self, visitor: Visitor) -> Visitor:
        return Visitor(self.face, visitor.revision, visitor.headers, visitor.session, last=visitor.last)


@asynccontextmanager
async def machines(
    server: RedisServer, number: int = 2, **options: Any
) -> AsyncIterator[tuple[list[Machine], Visitor]]:
    made = list[Machine]()
    async with AsyncExitStack() as stack:
        for _ in range(number):
            store = RedisStore(server.url, **options)
            application = http_application(shared_server(), HttpSettings(store=store))
            made.append(Machine(store, await stack.enter_async_context(application)))
        yield made, Visitor(made[0].face, LEGACY)


async def test_a_question_is_answered_through_one_process_and_watched_through_another(server: RedisServer) -> None:
    async with machines(server, 3) as ([_, two, three], visitor):
        await visitor.initialize({"elicitation": {}})
        await ask_here_answer_there_watch_elsewhere(visitor, two.visit(visitor), three.visit(visitor))


async def test_a_session_lives_on_with_its_events_when_its_process_is_gone(server: RedisServer) -> None:
    async with machines(server, lease=0.5) as ([one, two], visitor):
        await visitor.initialize()
        call = await visitor.call("steps", token=1, count=3)
        seen = await call.events(2)
        call.leave()
        await until(lambda: b":1" in server.say(f"EXISTS trimcp:session:{{{visitor.session}}}"))
        name = one.store.name
        server.say(f"DEL trimcp:lease:{name}")  # it stood still for too long
        rest = await (await two.visit(visitor).listen(seen[-1].id)).done()
        steps = steps_of(call, rest)
        assert steps == sorted(set(steps))
        assert rest.messages
        assert (await (await two.visit(visitor).call("echo", text="hi")).done()).json["result"]
        await until(lambda: one.store.name not in ("", name))  # it goes on under another name
        assert (await (await one.visit(visitor).call("echo", text="hi")).done()).json["result"]


async def test_a_change_is_told_by_all(server: RedisServer) -> None:
    async with machines(server, 3) as ([one, _, three], visitor):
        await visitor.initialize()
        subscribe = visitor.request("resources/subscribe", {"uri": "app://state"})
        await (await visitor.post(subscribe)).done()
        stream = await three.visit(visitor).listen()
        await stream.begun()
        await (await Visitor(one.face, LATEST).call("touch")).done()
        await until(lambda: stream.messages)
        assert [message["method"] for message in stream.messages] == ["notifications/resources/updated"]


async def test_while_redis_is_away_and_when_it_is_back(server: RedisServer) -> None:
    async with machines(server, limits=RedisLimits(patience=0.2)) as ([_, two], visitor):
        await visitor.initialize()
        server.kill()
        answer = await (await two.visit(visitor).call("echo", text="hi")).done()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        # What needs no store is served.
        assert (await (await Visitor(two.face, LATEST).call("echo", text="hi")).done()).status == 200
        assert (await (await visitor.call("echo", text="hi")).done()).status == 200
        server.start()
        await until(lambda: not two.store.failure)
        assert (await (await two.visit(visitor).call("echo", text="hi")).done()).status == 200
