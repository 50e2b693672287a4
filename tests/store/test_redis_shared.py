"""Sessions, events and letters in Redis while it fails. What they are otherwise is in `test_shared_store`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.store.redis_server import RedisServer, redis_server, relayed, until
from tests.store.test_contexts import kept
from tests.store.test_tasks import found, task
from trimcp.errors import ConnectionLost
from trimcp.store.redis.connection import RedisLimits
from trimcp.store.redis.contexts import RedisContexts
from trimcp.store.redis.resp import RedisRefusal
from trimcp.store.redis.shared import RedisStore
from trimcp.store.redis.tasks import RedisTasks
from trimcp.store.shared import AppendEvent, DropEvents, EndSession, KeptSession, Letter, SaveSession, Write

pytestmark = pytest.mark.needs("redis-server")

LONG = 600.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


def new(session: str, data: bytes = b"{}") -> SaveSession:
    return SaveSession(session, 1, data, LONG, new=True)


async def test_a_commit_whose_answer_was_lost_is_done_once(server: RedisServer) -> None:
    async with relayed(server, b"append") as (url, drops, asked):
        one, two = RedisStore(url), RedisStore(server.url)
        async with one.opened(), two.opened():
            await one.commit([new("t"), AppendEvent("t", 1, 1, 1, b"x")])  # the server knows the script
            drops += [True, True]
            letter, refused = Letter(two.name, b"once"), Letter("nobody", b"x")
            writes: list[Write] = [new("s"), AppendEvent("s", 1, 1, 1, b"x"), letter, refused]
            assert list(await one.commit([*writes, SaveSession("s", 1, b"last", LONG, release=True)])) == [refused]
            assert not drops
            assert sum(b"append" in data for data in asked) >= 3
            assert await two.receive() == [b"once"]
            with trio.move_on_after(0.05) as scope:
                await two.receive()
            assert scope.cancelled_caught
            assert await two.after("s", 1, 0) == [(1, b"x")]


async def test_a_session_that_was_taken_is_taken_once_though_the_answer_was_lost(server: RedisServer) -> None:
    async with relayed(server, b"session:{s}") as (url, drops, _):
        one, two = RedisStore(server.url), RedisStore(url)
        async with two.opened():
            async with one.opened():
                await one.commit([new("s", b"state"), AppendEvent("s", 1, 3, 1, b"x")])
            assert await two.take("t", 1) is None  # the server knows the script
            await two.commit([new("s2")])
            assert await two.take("s2", 1) is not None
            drops.append(True)
            taken = await two.take("s", 1)
            assert not drops
            assert taken == KeptSession(two.name, 2, b"state", streams=[3])


async def test_a_receive_that_is_cancelled_while_it_reads_loses_nothing(server: RedisServer) -> None:
    one, two = RedisStore(server.url), RedisStore(server.url)
    async with one.opened(), two.opened():
        await one.commit([Letter(two.name, b"x")])
        with server.stopped():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(two.receive)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
        with trio.fail_after(10):
            assert await two.receive() == [b"x"]


async def test_one_that_was_killed_and_started_again_goes_on(server: RedisServer) -> None:
    store = RedisStore(server.url, limits=RedisLimits(patience=30.0))
    async with store.opened():
        assert not await store.commit([new("s")])
        for number in range(1, 4):
            assert not await store.commit([AppendEvent("s", 1, 1, number, b"%d" % number)])
            server.kill()
            server.start()
            assert await store.renew()
        assert await store.after("s", 1, 1) == [(2, b"2"), (3, b"3")]


@pytest.mark.slow
async def test_events_and_letters_come_once_and_in_order_while_it_is_killed(server: RedisServer) -> None:
    limits = RedisLimits(patience=30.0)
    one, two = RedisStore(server.url, lease=LONG, limits=limits), RedisStore(server.url, lease=LONG, limits=limits)
    sent, ended, got = 0, False, list[int]()

    async def write() -> None:
        nonlocal sent
        while not ended:
            n = sent + 1
            assert not await one.commit([AppendEvent("s", 1, 1, n, b"%d" % n), Letter(two.name, b"%d" % n)])
            sent = n

    async def read() -> None:
        while True:
            got.extend([int(letter) for letter in await two.receive()])

    async with one.opened(), two.opened(), trio.open_nursery() as nursery:
        await one.commit([new("s")])
        nursery.start_soon(read)
        async with trio.open_nursery() as writing:
            writing.start_soon(write)
            for _ in range(5):
                before = sent
                await until(lambda: sent > before + 40)  # noqa: B023  # within the round
                server.kill()
                server.start()
            ended = True
        await until(lambda: len(got) >= sent)
        nursery.cancel_scope.cancel()
        numbers = list(range(1, sent + 1))
        assert got == numbers
        with trio.CancelScope(shield=True):
            assert await two.after("s", 1, 0) == [(n, b"%d" % n) for n in numbers]


async def test_while_it_is_away_each_waits_a_bounded_time(server: RedisServer) -> None:
    store = RedisStore(server.url, limits=RedisLimits(patience=0.1))
    async with store.opened():
        await store.commit([new("s")])
        server.kill()
        with trio.fail_after(20):
            for attempt in (
                lambda: store.commit([AppendEvent("s", 1, 1, 1, b"x")]),
                lambda: store.load("s"),
                lambda: store.take("s", 1),
                lambda: store.after("s", 1, 0),
                lambda: store.renew(),
                lambda: store.agree("key", b"x"),
            ):
                with pytest.raises(OSError, match="connection to unix:") as raised:
                    await attempt()
                assert isinstance(raised.value, ConnectionLost)


async def test_a_full_memory_refuses_what_needs_some(server: RedisServer) -> None:
    store = RedisStore(server.url)
    async with store.opened():
        await store.commit([new("s"), new("t"), *(AppendEvent("s", 1, 1, n, b"x") for n in (1, 2))])
        server.say("CONFIG SET maxmemory 1")
        with pytest.raises(RedisRefusal, match="OOM"):
            await store.commit([DropEvents("s", 1, 1, before=2), AppendEvent("s", 1, 1, 3, b"x")])
        assert await store.after("s", 1, 0) == [(1, b"x"), (2, b"x")]  # all or nothing
        assert await store.renew()
        assert not await store.commit([DropEvents("s", 1, 1, before=2), EndSession("t", 1)])
        assert await store.load("t") is None
        assert await store.take("s", 1) is not None
        server.say("CONFIG SET maxmemory 0")
        assert not await store.commit([AppendEvent("s", 2, 1, 3, b"x")])


async def test_data_that_was_flushed_ends_the_lease(server: RedisServer) -> None:
    store = RedisStore(server.url)
    async with store.opened():
        await store.commit([new("s")])
        server.say("FLUSHALL")
        late: list[Write] = [AppendEvent("s", 1, 1, 1, b"x"), new("t")]
        assert list(await store.commit(late)) == late
        assert await store.load("s") is None
        assert not await store.renew()
        assert await store.gone(store.name)


async def test_much_is_read_in_several_replies(server: RedisServer) -> None:
    """Each of these alone would be beyond the bound of a reply with the others."""
    limits = RedisLimits(max_reply=20_000_000)
    one, two = RedisStore(server.url, limits=limits), RedisStore(server.url, limits=limits)
    async with one.opened(), two.opened():
        await one.commit([new("s")])
        data = b"x" * 1_000_000
        for first in range(1, 31, 10):
            await one.commit([AppendEvent("s", 1, 1, n, data) for n in range(first, first + 10)])
            await one.commit([Letter(two.name, data)] * 10)
        assert [(seq, len(each)) for seq, each in await two.after("s", 1, 3)] == [(n, 1_000_000) for n in range(4, 31)]
        letters = 0
        while letters < 30:
            letters += len(await two.receive())


async def test_every_key_has_an_expiry_and_the_prefix(server: RedisServer) -> None:
    one, two = [RedisStore(server.url, prefix="mine") for _ in range(2)]
    async with one.opened(), two.opened():
        await one.commit([new("s"), AppendEvent("s", 1, 1, 1, b"x"), Letter(None, b"x"), Letter(one.name, b"x")])
        await one.agree("key", b"x")
        commands = one._redis.commands
        keys = await commands.run("KEYS", "*")
        assert len(keys) >= 8
        for key in keys:
            assert key.startswith(b"mine:")
            assert await commands.run("PTTL", key) > 0, key
        assert await commands.run("PTTL", "mine:events:{s}") == pytest.approx(LONG * 1_000, abs=60_000)
    assert b"lease" not in server.say("KEYS *")


async def test_what_was_not_written_so_is_refused(server: RedisServer) -> None:
    store = RedisStore(server.url)
    async with store.opened():
        server.say("HSET trimcp:session:{s} holder x fence many data {}")
        server.say("HSET trimcp:session:{t} holder x fence 1")
        server.say("SET trimcp:session:{u} text")
        for session in "stu":
            with pytest.raises(OSError, match=r"not written so|WRONGTYPE"):
                await store.load(session)
        await store.commit([new("v"), AppendEvent("v", 1, 1, 1, b"x")])
        await store._redis.commands.run("ZADD", "trimcp:events:{v}", 0, b"\0" * 7 + b"\1" + b"\1")
        with pytest.raises(OSError, match="not written so"):
            await store.after("v", 1, 0)


SERVED = """
import trimcp
from trimcp.agent_tools import AgentTools

server = trimcp.Server("served", version="1")
agent_tools = AgentTools(server, store={contexts!r})
"""


@pytest.mark.parametrize("what", ["nobody there", "may nothing", "contexts"])
def test_the_command_ends_with_one_sentence(what: str, server: RedisServer, tmp_path: Path) -> None:
    url = server.url
    if what == "nobody there":
        server.kill()
    else:
        server.say("ACL SETUSER ada on >secret ~* +@connection")
        url = url.replace("unix://", "unix://ada:secret@")
    program = tmp_path / "program.py"
    program.write_text(SERVED.format(contexts=url if what == "contexts" else None))
    command = [sys.executable, "-m", "trimcp.cli", "run", str(program), "--http", "--port", "0"]
    command += ["--agent-tools"] if what == "contexts" else ["--store", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2, done.stderr
    *warnings, last = done.stderr.splitlines()
    assert len(warnings) <= (what != "nobody there"), done.stderr  # it may have begun to follow what changes
    assert ("cannot use unix:" if what == "nobody there" else "NOPERM") in last
    assert "secret" not in done.stderr


async def test_who_was_killed_is_told_of_no_more(server: RedisServer) -> None:
    store = RedisStore(server.url, lease=0.2)
    async with store.opened():
        server.say("SADD trimcp:processes killed")
        assert not await store.commit([Letter(None, b"x")])
        assert b"killed" not in server.say("SMEMBERS trimcp:processes")
        await until(lambda: b":0" in server.say(f"EXISTS trimcp:lease:{store.name}"))
        assert not await store.renew()


async def test_what_the_guide_gives_a_user_is_enough(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    page = (Path(__file__).parents[2] / "docs" / "howto" / "scale.md").read_text("utf-8")
    rule = next(line for line in page.splitlines() if line.startswith("ACL SETUSER trimcp"))
    assert server.say(rule) == b"+OK\r\n"
    url = server.url.replace("unix://", "unix://trimcp:password@")
    one, two, contexts, tasks = RedisStore(url), RedisStore(url), RedisContexts(url), RedisTasks(url)
    async with one.opened(), two.opened(), contexts.opened(), tasks.opened():
        assert not await one.commit([new("s"), AppendEvent("s", 1, 1, 1, b"x"), Letter(None, b"x")])
        assert await two.receive() == [b"x"]
        assert await one.renew()
        assert await one.agree("key", b"x") == b"x"
        assert await two.after("s", 1, 0) == [(1, b"x")]
        assert not await one.commit([SaveSession("s", 1, b"", LONG, release=True)])
        assert await two.take("s", 1) is not None
        assert await contexts.write([kept()], [])
        assert await contexts.load(*kept().key) is not None
        assert await contexts.expire(5e9) == [kept().key]
        assert set(await contexts.changed() or ()) == {kept().key}
        await tasks.renew("me", LONG)
        await tasks.create(task(runner="gone"))
        assert [each.id for each in await tasks.claim("me", 9)] == ["a"]
        await tasks.tell("a", {"cancelled": True})
        assert [id for id, _ in await tasks.renew("me", LONG)] == ["a"]
        assert await tasks.save(await found(tasks))
        await tasks.release(await tasks.held("me"), "me")
        assert await tasks.updated(["a"])
        await tasks.forget([], 5e9)
        assert await tasks.count("principal ada") == 0
        with pytest.raises(RedisRefusal, match="NOPERM"):
            await contexts._redis.commands.run("FLUSHALL")
    assert not caplog.records
