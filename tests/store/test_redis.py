"""The connection to Redis: many tasks at once, what it bounds, and each way in which a server can fail."""

from __future__ import annotations

import logging
import math
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import trustme
from hypothesis import given
from hypothesis import strategies as st

from tests.store.redis_server import RedisServer, redis_server, until
from trimcp.errors import ConnectionLost, LocalError, Overloaded
from trimcp.store.redis.address import redis_address
from trimcp.store.redis.connection import RedisConnection, RedisLimits, RedisScript
from trimcp.store.redis.resp import GarbledReply, RedisRefusal, RedisReplies
from trimcp.store.redis.streams import Entry, Redis

pytestmark = pytest.mark.needs("redis-server")

SET = RedisScript("redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def lasting() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@asynccontextmanager
async def connected(url: str, context: ssl.SSLContext | None = None, **limits: Any) -> AsyncIterator[RedisConnection]:
    connection = RedisConnection(redis_address(url), RedisLimits(**limits), "test", context=context)
    async with connection.opened():
        yield connection
    assert connection.waiting == 0


# Many tasks


async def test_each_of_many_tasks_gets_its_own_reply(lasting: RedisServer) -> None:
    tasks = trio.lowlevel.current_statistics().tasks_living
    async with connected(lasting.url) as redis, trio.open_nursery() as nursery:

        async def count(name: str) -> None:
            for number in range(1, 51):
                assert await redis.run("INCR", name) == number
                assert await redis.script(SET, [f"{name}-set"], f"{name}:{number}") == f"{name}:{number}".encode()

        for number in range(64):
            nursery.start_soon(count, f"key-{number}")
    assert trio.lowlevel.current_statistics().tasks_living == tasks


async def test_a_task_that_gave_up_leaves_a_hole(lasting: RedisServer) -> None:
    async with connected(lasting.url) as redis:
        await redis.run("SET", "one", "1")

        async def ask(*command: str) -> None:
            await redis.run(*command)

        for command in [["BLPOP", "nothing", "0.1"], *[["GET", "nothing"]] * 99]:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, *command)
                await trio.testing.wait_all_tasks_blocked()  # it was sent
                nursery.cancel_scope.cancel()
        with trio.move_on_after(0):
            await redis.run("SET", "one", "2")  # is not sent any more
        assert await redis.run("GET", "one") == b"1"
        assert redis.waiting == 0
        assert redis.connections == 1


async def test_what_waits_is_bounded(server: RedisServer) -> None:
    async with connected(server.url, max_waiting=100_000) as redis, trio.open_nursery() as nursery:
        refused = 0

        async def put(number: int) -> None:
            nonlocal refused
            try:
                await redis.run("SET", f"key-{number}", "x" * 1_000)
            except Overloaded:
                refused += 1

        with server.stopped():
            for number in range(200):
                nursery.start_soon(put, number)
            await trio.testing.wait_all_tasks_blocked()
            assert 95 <= refused <= 105
            assert redis.waiting <= 100_000
        await until(lambda: not redis.waiting)
        assert await redis.run("DBSIZE") == 200 - refused
        assert await redis.run("SET", "large", "x" * 1_000_000) == b"OK"  # one alone may have more
        assert await redis.run("STRLEN", "large") == 1_000_000


async def test_a_script_that_the_server_does_not_know_is_sent_to_it(lasting: RedisServer) -> None:
    async with connected(lasting.url) as redis:
        for _ in range(2):
            assert await redis.script(SET, ["key"], "a") == b"a"
            await redis.run("SCRIPT", "FLUSH")
        with pytest.raises(RedisRefusal, match="no such thing"):
            await redis.script(RedisScript("return redis.error_reply('ERR no such thing')"), [])


# Servers that fail


async def test_one_that_was_killed_is_found_again(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with connected(server.url, patience=30.0) as redis:
        await redis.run("SET", "key", "kept")
        lost: list[ConnectionLost] = []

        async def wait() -> None:
            with pytest.raises(ConnectionLost, match="may or may not have run") as raised:
                await redis.run("BLPOP", "nothing", 0)
            lost.append(raised.value)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            await until(lambda: server.say("CLIENT LIST").count(b"cmd=blpop"))  # it has read them all at once
            server.kill()
        assert len(lost) == 20
        assert not any(error.nothing_sent for error in lost)
        server.start()
        assert await redis.run("GET", "key") == b"kept"
        assert redis.connections == 2
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"the connection to {server.url} was lost: the server closed it",
        f"there is a connection to {server.url} again",
    ]


async def test_what_may_run_twice_goes_on_over_the_next_connection(server: RedisServer) -> None:
    async with connected(server.url, patience=30.0) as redis, trio.open_nursery() as nursery:
        values = []

        async def ask() -> None:
            values.append(await redis.repeat("BLPOP", "list", 0))

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        server.kill()
        server.start()
        server.say("RPUSH list a")
        await until(lambda: values)
        assert values == [[b"list", b"a"]]


async def test_one_that_is_away_is_not_waited_for_for_ever(server: RedisServer) -> None:
    async with connected(server.url, patience=0.2) as redis:
        server.kill()
        with pytest.raises(ConnectionLost, match="no connection to unix:") as raised, trio.fail_after(20):
            while True:
                try:
                    await redis.run("PING")
                except ConnectionLost as error:
                    if error.nothing_sent:
                        raise
        assert redis.failure
        assert raised.value.nothing_sent
        with pytest.raises(ConnectionLost), trio.fail_after(20):
            await redis.repeat("PING")


async def test_one_that_says_nothing_is_lost(server: RedisServer) -> None:
    async with connected(server.url, timeout=0.3, patience=30.0) as redis:
        with server.stopped(), pytest.raises(ConnectionLost, match=r"nothing came for 0\.3 s; the command may or may"):
            await redis.run("INCR", "key")
        assert await redis.run("GET", "key") in (b"1", None)


async def test_one_that_answers_some_and_then_says_nothing_is_lost() -> None:
    async with other_server(GREETING, b"+OK\r\n") as url, connected(url, timeout=0.3) as redis:
        answers: list[Any] = []

        async def ask(*command: str) -> None:
            try:
                answers.append(await redis.run(*command))
            except ConnectionLost as error:
                answers.append(str(error))

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                for key in "ab":
                    nursery.start_soon(ask, "SET", key, "1")
        assert answers[0] == b"OK"
        assert "nothing came for 0.3 s" in answers[1]


async def test_a_connection_that_is_closed_says_so(lasting: RedisServer) -> None:
    async with connected(lasting.url, patience=math.inf) as redis:
        pass
    with pytest.raises(ConnectionLost, match="it is not open"), trio.fail_after(5):
        await redis.repeat("PING")


async def test_it_serves_until_its_block_ends_though_all_is_cancelled(lasting: RedisServer) -> None:
    with trio.CancelScope() as scope:
        async with connected(lasting.url) as redis:
            try:
                scope.cancel()
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    assert await redis.run("SET", "key", "last") == b"OK"
    assert scope.cancelled_caught


async def test_a_full_memory_is_a_refusal(server: RedisServer) -> None:
    async with connected(server.url) as redis:
        await redis.script(SET, ["key"], "a")
        await redis.run("CONFIG", "SET", "maxmemory", 1)
        for attempt in (redis.run("SET", "key", "b"), redis.script(SET, ["key"], "b")):
            with pytest.raises(RedisRefusal, match="OOM") as raised:
                await attempt
            assert raised.value.code == "OOM"
        assert await redis.run("GET", "key") == b"a"
        await redis.run("CONFIG", "SET", "maxmemory", 0)
        assert await redis.script(SET, ["key"], "b") == b"b"


# Who may, and where


async def test_passwords_and_users(server: RedisServer) -> None:
    path = server.path
    server.say("ACL SETUSER ada on >s3cret ~* +@all")
    server.say("CONFIG SET requirepass other/word")
    async with connected(f"unix://ada:s3cret@{path}?db=3") as redis:
        assert await redis.run("ACL", "WHOAMI") == b"ada"
        assert b"db=3" in await redis.run("CLIENT", "INFO")
    async with connected(f"unix://:other%2Fword@{path}") as redis:
        assert await redis.run("ACL", "WHOAMI") == b"default"
    for wrong in ("", "ada:wrong@", "nobody:s3cret@"):
        with pytest.raises(OSError, match=r"WRONGPASS|NOAUTH") as raised:
            async with connected(f"unix://{wrong}{path}"):
                pass
        assert path in str(raised.value)
        assert "wrong" not in str(raised.value)


async def test_a_password_that_was_changed_is_told_and_tried_again(server: RedisServer) -> None:
    server.say("ACL SETUSER ada on >s3cret ~* +@all")
    async with connected(f"unix://ada:s3cret@{server.path}", patience=0.2) as redis:
        server.say("ACL SETUSER ada resetpass >another")
        server.say("CLIENT KILL USER ada")
        await until(lambda: "WRONGPASS" in redis.failure)
        with pytest.raises(ConnectionLost, match="WRONGPASS"):
            await redis.repeat("PING")
        server.say("ACL SETUSER ada resetpass >s3cret")
        await until(lambda: not redis.failure)
        assert await redis.run("PING") == b"PONG"


async def test_what_a_user_may_not_is_refused(server: RedisServer) -> None:
    server.say("ACL SETUSER ada on >s3cret ~mine:* +@all -@scripting")
    async with connected(f"unix://ada:s3cret@{server.path}") as redis:
        assert await redis.run("SET", "mine:a", "1") == b"OK"
        with pytest.raises(RedisRefusal, match="NOPERM"):
            await redis.run("SET", "yours:a", "1")
        with pytest.raises(RedisRefusal, match="NOPERM"):
            await redis.script(SET, ["mine:a"], "1")


async def test_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    port = await free_port()
    settings = ["--tls-port", str(port), "--tls-auth-clients", "no", "--bind", "127.0.0.1"]
    settings += ["--tls-key-file", str(tmp_path / "key.pem"), "--tls-cert-file", str(tmp_path / "cert.pem")]
    with redis_server(*settings, "--tls-ca-cert-file", str(tmp_path / "cert.pem")):
        context = ssl.create_default_context()
        authority.configure_trust(context)
        url = f"rediss://localhost:{port}"
        async with connected(url, context) as redis:
            assert await redis.run("SET", "key", "x" * 1_000_000) == b"OK"
            assert len(await redis.run("GET", "key")) == 1_000_000
        with pytest.raises(OSError, match=r"no TLS: .*CERTIFICATE_VERIFY_FAILED"):
            async with connected(url):
                pass
        with pytest.raises(OSError, match=f"cannot use redis://localhost:{port}/0"):
            async with connected(f"redis://localhost:{port}", timeout=2.0):
                pass
    with pytest.raises(OSError, match="Connection refused"):
        async with connected(url):
            pass


async def free_port() -> int:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port: int = listeners[0].socket.getsockname()[1]
    await listeners[0].aclose()
    return port


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host", "redis://host:6379/0"),
        ("redis://ada:p%40ss@host:1/7", "redis://host:1/7"),
        ("rediss://[::1]:2", "rediss://[::1]:2/0"),
        ("unix:///a/b%20c?db=4", "unix:///a/b c"),
        ("http://host", None),
        ("redis://", None),
        ("redis://host/x", None),
        ("redis://host/0?ssl=1", None),
        ("redis://host:0", None),
        ("redis://ada:pa/ss@host", None),
        ("redis://host:99999", None),
        ("unix://host/path", None),
        ("unix://", None),
    ],
)
def test_urls(url: str, shown: str | None) -> None:
    if shown is not None:
        assert str(redis_address(url)) == shown
        assert "p@ss" not in repr(redis_address(url))
        return
    with pytest.raises(LocalError, match="a URL of Redis is not valid") as raised:
        redis_address(url)
    assert "pa" not in str(raised.value).replace("password", "").replace("parts", "").replace("path", "")


# What is no Redis

GREETING = b"*6\r\n$7\r\nversion\r\n$6\r\n7.0.15\r\n$2\r\nid\r\n:5\r\n$4\r\nrole\r\n$6\r\nmaster\r\n+PONG\r\n"
OTHERS = {
    "HTTP": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no Redis"),
    "too old": (GREETING.replace(b"7.0.15", b"6.2.14"), r"version 6\.2\.14 is too old"),
    "replica": (GREETING.replace(b"$6\r\nmaster", b"$7\r\nreplica"), "it is a replica"),
    "cluster": (GREETING.replace(b"role\r\n$6\r\nmaster", b"mode\r\n$7\r\ncluster"), "Redis Cluster"),
    "loading": (GREETING.replace(b"+PONG", b"-LOADING Redis is loading"), "LOADING"),
    "no greeting": (b"+OK\r\n+PONG\r\n", "is no Redis"),
    "much": (b"*99999999\r\n", "is no Redis"),
    "quoting": (b"-ERR unknown command, with args: `AUTH` `s3cret`\r\n", r"`AUTH` `\*\*\*`"),
    "closed": (b"", "closed"),
}


@asynccontextmanager
async def other_server(*answers: bytes) -> AsyncIterator[str]:
    """A server that answers each read with the next of these, and then is silent; it closes after an empty one."""

    async def serve(stream: trio.abc.Stream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError):
                for answer in answers:
                    if not await stream.receive_some() or not answer:
                        return
                    await stream.send_all(answer)
                await trio.sleep_forever()

    with tempfile.TemporaryDirectory() as folder:
        listening = trio.socket.socket(trio.socket.AF_UNIX)
        await listening.bind(f"{folder}/s")
        listening.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, serve, [trio.SocketListener(listening)])
            yield f"unix://:s3cret@{folder}/s"
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", OTHERS)
async def test_what_is_no_redis_of_ours_is_refused(kind: str) -> None:
    answer, text = OTHERS[kind]
    async with other_server(answer) as url:
        with pytest.raises(OSError, match=text) as raised:
            async with connected(url):
                pass
        assert "s3cret" not in str(raised.value)
        assert "cannot use unix:" in str(raised.value)


async def test_one_that_never_answers_is_given_up() -> None:
    async with other_server() as url:
        with pytest.raises(OSError, match=r"no answer within 0\.2 s"):
            async with connected(url, timeout=0.2):
                pass


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"$2000000\r\n" + b"x" * 1_500_000, "more than 1,000,000 bytes"),
        (b"*9999999\r\n", "a million members"),
        (b"rubbish", "no reply of Redis"),
        (b"+a\r\n+b\r\n", "answered what was not asked"),
    ],
)
async def test_garbage_ends_a_connection(answer: bytes, why: str, caplog: pytest.LogCaptureFixture) -> None:
    async with other_server(GREETING, answer) as url, connected(url, max_reply=1_000_000) as redis:
        with suppress(ConnectionLost):
            assert await redis.run("GET", "key") == b"a"
        await until(lambda: caplog.records)
        assert why in caplog.records[0].getMessage()


def test_a_reply_of_no_form_is_garbage() -> None:
    with pytest.raises(GarbledReply, match="no form"):
        RedisReplies(1_000).feed(b"%1\r\n>1\r\n:1\r\n:1\r\n")


def test_replies_in_pieces() -> None:
    whole = b"*3\r\n$3\r\nabc\r\n:5\r\n*1\r\n$-1\r\n-ERR no\r\n"
    replies = RedisReplies(1_000)
    found = [reply for byte in whole for reply in replies.feed(bytes([byte]))]
    assert found[0] == [b"abc", 5, [None]]
    assert isinstance(found[1], RedisRefusal)
    with pytest.raises(GarbledReply, match="million"):
        for byte in b"*12345678\r\n":
            replies.feed(bytes([byte]))


PIECES = st.sampled_from(b"\r\n * $ : -ERR + % ~ > , # _ ( = ! -1 1 3\r\nabc\r\n".split(b" "))


@given(st.lists(st.one_of(PIECES, st.binary(max_size=8), st.integers(-3, 2_000_000).map(lambda n: b"%d\r\n" % n))))
def test_whatever_comes_is_replies_or_garbage(pieces: list[bytes]) -> None:
    replies = RedisReplies(1_000)
    with suppress(GarbledReply):
        for piece in pieces:
            assert isinstance(replies.feed(piece), list)


# Streams


async def test_streams_are_followed_from_an_entry_on_and_over_a_lost_connection(server: RedisServer) -> None:
    redis = Redis(server.url, "test", RedisLimits(patience=30.0))
    told: dict[str, list[list[Entry] | None]] = {"one": [], "two": []}

    async def wait(stream: str, last: bytes) -> None:
        await until(lambda: any(found and found[-1][1] == {b"n": last} for found in told[stream]))

    async with redis.opened():
        await redis.commands.run("XADD", "one", "1-1", "n", "0")
        await redis.commands.run("XADD", "one", "1-2", "n", "1")
        await redis.follow("one", "1-1", told["one"].append)
        await wait("one", b"1")
        began = trio.current_time()
        await redis.follow("two", "0-0", told["two"].append)  # while it waits for the first
        await redis.commands.run("XADD", "two", "*", "n", "2")
        await wait("two", b"2")
        assert trio.current_time() - began < 4  # not at the end of the question before
        server.kill()
        server.start()
        await redis.commands.repeat("XADD", "one", "*", "n", "3")
        await wait("one", b"3")
        assert None in told["one"]  # something may have been missed
    entries = [fields for found in told["one"] for _, fields in found or ()]
    assert entries == [{b"n": b"1"}, {b"n": b"3"}]


async def test_a_server_that_may_forget_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server("--maxmemory-policy", "allkeys-lru") as server:
        async with Redis(server.url, "test").opened():
            pass
        server.say("CONFIG SET maxmemory-policy noeviction")
        async with Redis(server.url, "test").opened():
            pass
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "allkeys-lru" in told[0]
