"""The event stores: a model of lists that both must agree with, hostile ids, and disks that do not take it."""

from __future__ import annotations

import gc
import logging
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trimcp.store.events import OVERHEAD, EventStore, MemoryEvents, event_id, parse_event_id
from trimcp.store.events_sqlite import SqliteEvents

KINDS = ["memory", "sqlite"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(kind: str, folder: Path, **bounds: int) -> EventStore:
    return MemoryEvents(**bounds) if kind == "memory" else SqliteEvents(folder / "events", **bounds)


@pytest.fixture
def store(kind: str, tmp_path: Path) -> Iterator[EventStore]:
    store = make(kind, tmp_path)
    yield store
    store.close()


# Ids


@given(st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1))
def test_an_id_says_its_stream_and_number(stream: int, seq: int) -> None:
    assert parse_event_id(event_id(stream, seq)) == (stream, seq)


def test_an_id_reads_as_documented() -> None:
    assert event_id(3, 17) == "3-17"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "3",
        "3-",
        "-17",
        "3-17-1",
        "3--17",
        "-3-17",
        "+3-17",
        "03-17",
        "3-017",
        "00-0",
        "3-17\n",
        "3-17 ",
        " 3-17",
        "3 -17",
        "3_0-17",
        "3.0-17",
        "0x3-17",
        "1e3-17",
        "٣-17",  # a digit to str.isdigit and to int()
        "3-¹⁷",
        "3\u221217",
        "3\x0017",
        "\ud800-1",
        "1" * 19 + "-1",
        "1-" + "9" * 5_000,
        "1-1" + "1" * 10**7,
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_an_id_we_never_wrote_is_none(text: str) -> None:
    assert parse_event_id(text) is None


@given(st.text(max_size=50) | st.text("0123456789-", max_size=50))
def test_an_id_has_one_spelling(text: str) -> None:
    found = parse_event_id(text)
    assert found is None or event_id(*found) == text


# What is kept


def test_what_follows_an_event_is_that_of_its_stream_alone(store: EventStore) -> None:
    store.append("a", 1, 1, b"a11", reply=False)
    store.append("a", 2, 1, b"a21", reply=False)
    store.append("a", 1, 2, b"", reply=False)
    store.append("b", 1, 3, b"b13", reply=False)
    store.append("a", 1, 3, b"\x00\xff\n", reply=True)
    assert store.after("a", 1, 0) == [(1, b"a11"), (2, b""), (3, b"\x00\xff\n")]
    assert store.after("a", 1, 1) == [(2, b""), (3, b"\x00\xff\n")]
    assert store.after("a", 1, 3) == store.after("a", 3, 0) == store.after("c", 1, 0) == []
    assert store.after("b", 1, -1) == [(3, b"b13")]


def test_the_order_is_of_the_numbers(store: EventStore) -> None:
    for seq in (2, 9, 4):
        store.append("a", 1, seq, b"%d" % seq, reply=seq == 9)
    assert [seq for seq, _ in store.after("a", 1, 2)] == [4, 9]


def test_what_nobody_comes_back_for_is_dropped(store: EventStore) -> None:
    for session in ("a", "b"):
        for stream in (1, 2):
            store.append(session, stream, 1, b"x", reply=stream == 1)
    store.drop_stream("a", 1)
    assert store.after("a", 1, 0) == []
    assert store.after("a", 2, 0) == store.after("b", 1, 0) == [(1, b"x")]
    store.drop_session("b")
    assert store.after("b", 1, 0) == store.after("b", 2, 0) == []
    assert attrs.astuple(store.statistics()) == (1, 1 + OVERHEAD, 0)
    for gone in ("b", "c"):
        store.drop_session(gone)
        store.drop_stream(gone, 1)
    store.drop_stream("a", 7)
    assert store.statistics().events == 1


def test_a_number_is_used_once(store: EventStore) -> None:
    store.append("a", 1, 1, b"x", reply=False)
    with pytest.raises(ValueError, match="event 1 of stream 1 is there already"):
        store.append("a", 1, 1, b"y", reply=True)
    assert store.after("a", 1, 0) == [(1, b"x")]
    assert store.statistics().events == 1


def test_a_closed_store_keeps_and_finds_nothing(store: EventStore) -> None:
    store.append("a", 1, 1, b"x", reply=False)
    store.close()
    store.close()
    store.append("a", 1, 2, b"y", reply=True)
    assert store.after("a", 1, 0) == []
    assert attrs.astuple(store.statistics()) == (0, 0, 0)
    store.drop_stream("a", 1)
    store.drop_session("a")


# What goes


def test_a_flood_of_notifications_leaves_the_reply(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path, max_events=5)
    store.append("a", 1, 1, b"result", reply=True)
    for seq in range(2, 102):
        store.append("a", 1, seq, b"progress", reply=False)
    assert [seq for seq, _ in store.after("a", 1, 0)] == [1, 97, 98, 99, 100, 101]
    assert store.statistics().evicted == 95
    store.close()


def test_a_flood_of_replies_leaves_the_newest_and_the_notifications(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path, max_reply_bytes=3 * (OVERHEAD + 10))
    store.append("a", 0, 1, b"changed", reply=False)
    for stream in range(1, 11):
        store.append("a", stream, 1, b"x" * 10, reply=True)
    assert [stream for stream in range(11) if store.after("a", stream, 0)] == [0, 8, 9, 10]
    store.close()


def test_one_that_is_too_large_costs_no_other(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path, max_bytes=OVERHEAD + 10, max_reply_bytes=OVERHEAD + 20)
    store.append("a", 1, 1, b"x" * 10, reply=False)
    store.append("a", 1, 2, b"x" * 20, reply=True)
    store.append("a", 1, 3, b"x" * 11, reply=False)
    store.append("a", 1, 4, b"x" * 21, reply=True)
    assert [seq for seq, _ in store.after("a", 1, 0)] == [1, 2]
    assert store.statistics().evicted == 2
    store.close()


def test_who_holds_most_makes_room_for_all(kind: str, tmp_path: Path) -> None:
    store = make(kind, tmp_path, max_total_bytes=40 * OVERHEAD)
    store.append("small", 1, 1, b"", reply=False)
    for seq in range(100):
        store.append("large", 1, seq, b"", reply=seq < 5)
    for session in range(20):
        store.append(f"s{session}", 1, 1, b"", reply=False)
    assert store.after("small", 1, 0) == [(1, b"")]
    assert all(store.after(f"s{session}", 1, 0) for session in range(20))
    # Its replies went last.
    assert [seq for seq, _ in store.after("large", 1, -1)] == [*range(5), *range(86, 100)]
    assert store.statistics().bytes == 40 * OVERHEAD
    store.close()


def test_as_many_sessions_as_there_are_bytes_for(kind: str, tmp_path: Path) -> None:
    """Equals lose in the order in which they grew, and the work for each stays small."""
    store = make(kind, tmp_path, max_total_bytes=500 * OVERHEAD)
    for session in range(2_000):
        store.append(f"s{session}", 1, 1, b"", reply=True)
    assert [n for n in range(2_000) if store.after(f"s{n}", 1, 0)] == list(range(1_500, 2_000))
    store.close()


def test_small_events_are_not_free() -> None:
    """A million empty replies stay within their bound, in real bytes too."""
    program = (
        "import tracemalloc; from trimcp.store.events import MemoryEvents\n"
        "store = MemoryEvents(max_reply_bytes=2**20); tracemalloc.start()\n"
        "for n in range(20_000): store.append('a', n, n, b'', reply=True)\n"
        "print(tracemalloc.get_traced_memory()[1])"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, timeout=60)
    assert int(done.stdout) < 1.5 * 2**20


def test_nothing_is_left_of_what_was_dropped() -> None:
    store = MemoryEvents(max_events=10)
    for session in ("a", "b"):
        for n in range(50):
            store.append(session, n, 1, b"x", reply=bool(n % 2))
        store.drop_session(session)
    assert attrs.astuple(store.statistics()) == (0, 0, 30)
    assert not store._sessions
    assert not store._by_size


# The model


@attrs.define
class Event:
    session: str
    stream: int
    seq: int
    data: bytes
    reply: bool

    @property
    def weight(self) -> int:
        return len(self.data) + OVERHEAD


class Model:
    """A store as one would write it without a thought for speed: one list, oldest first."""

    def __init__(self, max_events: int, max_bytes: int, max_reply_bytes: int, max_total_bytes: int) -> None:
        self.bounds = (max_events, max_bytes, max_reply_bytes, max_total_bytes)
        self.events: list[Event] = []
        self.evicted = 0

    def append(self, event: Event) -> None:
        max_events, max_bytes, max_reply_bytes, max_total_bytes = self.bounds
        mine = max_reply_bytes if event.reply else max_bytes
        if event.weight > min(mine, max_total_bytes) or (max_events == 0 and not event.reply):
            self.evicted += 1
            return
        self.events.append(event)
        while self.weight(event.session, reply=True) > max_reply_bytes:
            self.evict(event.session, [True])
        while self.weight(event.session, reply=False) > max_bytes or self.others(event.session) > max_events:
            self.evict(event.session, [False])

    def weight(self, session: str, *, reply: bool) -> int:
        return sum(event.weight for event in self.events if event.session == session and event.reply is reply)

    def others(self, session: str) -> int:
        return sum(1 for event in self.events if event.session == session and not event.reply)

    def evict(self, session: str, kinds: list[bool]) -> None:
        for reply in kinds:
            found = [event for event in self.events if event.session == session and event.reply is reply]
            if found:
                self.events.remove(found[0])
                self.evicted += 1
                return


class Agreement(RuleBasedStateMachine):
    """Whatever is appended and dropped, the store holds what the model holds."""

    kind = "memory"

    @initialize(
        max_events=st.integers(0, 6),
        max_bytes=st.integers(0, 4 * OVERHEAD),
        max_reply_bytes=st.integers(0, 4 * OVERHEAD),
        # Who loses among several sessions is tested by itself below; here the whole never binds, or binds one.
        max_total_bytes=st.just(100 * OVERHEAD),
    )
    def start(self, **bounds: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = make(self.kind, Path(self.folder.name), **bounds)
        self.model = Model(**bounds)
        self.seq = 0

    @rule(
        session=st.sampled_from("ab"),
        stream=st.integers(0, 2),
        data=st.binary(max_size=OVERHEAD),
        reply=st.booleans(),
        skipped=st.integers(1, 3),
    )
    def append(self, session: str, stream: int, data: bytes, reply: bool, skipped: int) -> None:
        self.seq += skipped
        self.store.append(session, stream, self.seq, data, reply=reply)
        self.model.append(Event(session, stream, self.seq, data, reply))

    @rule(session=st.sampled_from("abc"), stream=st.integers(0, 3))
    def drop_stream(self, session: str, stream: int) -> None:
        self.store.drop_stream(session, stream)
        self.model.events = [e for e in self.model.events if (e.session, e.stream) != (session, stream)]

    @rule(session=st.sampled_from("abc"))
    def drop_session(self, session: str) -> None:
        self.store.drop_session(session)
        self.model.events = [event for event in self.model.events if event.session != session]

    @rule(session=st.sampled_from("abc"), stream=st.integers(0, 3), back=st.integers(-1, 8))
    def after(self, session: str, stream: int, back: int) -> None:
        seq = self.seq - back
        expected = [
            (e.seq, e.data) for e in self.model.events if (e.session, e.stream) == (session, stream) and e.seq > seq
        ]
        assert self.store.after(session, stream, seq) == expected

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "store"):
            return
        expected = (len(self.model.events), sum(e.weight for e in self.model.events), self.model.evicted)
        assert attrs.astuple(self.store.statistics()) == expected

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()


class AgreementOfFile(Agreement):
    kind = "sqlite"


TestMemoryAgrees = Agreement.TestCase
TestMemoryAgrees.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestFileAgrees = AgreementOfFile.TestCase
TestFileAgrees.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3 * OVERHEAD), st.booleans()), max_size=60))
def test_the_whole_is_bounded_whoever_sends(events: list[tuple[str, int, bool]]) -> None:
    """The newest survives if a larger holder is there, and no session loses while another holds twice as much."""
    bound = 12 * OVERHEAD
    store = MemoryEvents(max_total_bytes=bound)
    held: dict[str, int] = {}

    def weigh(session: str) -> int:
        return sum(len(data) + OVERHEAD for stream in (0, 1) for _, data in store.after(session, stream, -1))

    for seq, (session, size, reply) in enumerate(events):
        held = {name: weigh(name) for name in "abcdef"}
        held[session] += size + OVERHEAD
        store.append(session, int(reply), seq, b"x" * size, reply=reply)
        now = {name: weigh(name) for name in "abcdef"}
        assert sum(now.values()) == store.statistics().bytes <= bound
        for loser in (name for name in now if now[name] < held[name]):
            assert 2 * held[loser] > max(now.values())


# The file


def test_the_file_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    store = SqliteEvents(tmp_path / "events")
    store.append("secret-session", 1, 1, b"x", reply=False)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert b"secret-session" not in path.read_bytes()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_others_could_read_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.touch(0o644)
    path.chmod(0o644)
    store = SqliteEvents(str(path))  # a converter takes it
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    store.close()


def test_what_a_killed_process_left_is_cleaned(tmp_path: Path) -> None:
    program = (
        "import os, sys; from trimcp.store.events_sqlite import SqliteEvents\n"
        "store = SqliteEvents(sys.argv[1])\n"
        "for n in range(2_000): store.append('a', 1, n, b'old' * 1000, reply=True)\n"
        "os._exit(9)"
    )
    path = tmp_path / "events"
    assert subprocess.run([sys.executable, "-c", program, str(path)], timeout=60).returncode == 9
    assert path.stat().st_size + (tmp_path / "events-wal").stat().st_size > 5_000_000
    store = SqliteEvents(path)
    assert sum(found.stat().st_size for found in tmp_path.iterdir()) < 100_000
    assert store.after("a", 1, -1) == []
    store.append("a", 1, 1, b"new", reply=True)
    assert store.after("a", 1, -1) == [(1, b"new")]
    store.close()


@pytest.mark.parametrize("content", [b"precious", b"SQLite format 3\0" + b"\0" * 200], ids=["text", "sqlite"])
def test_another_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    path.chmod(0o644)
    with pytest.raises(ValueError, match="is no store of events"):
        SqliteEvents(path)
    assert path.read_bytes() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "events").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="events"):
        SqliteEvents(tmp_path / "events")


def test_two_stores_do_not_share_a_file(tmp_path: Path) -> None:
    first = SqliteEvents(tmp_path / "events")
    first.append("a", 1, 1, b"x", reply=True)
    with pytest.raises(OSError, match=r"events in .* are in use by another process"):
        SqliteEvents(tmp_path / "events")
    assert first.after("a", 1, 0) == [(1, b"x")]
    first.append("a", 1, 2, b"y", reply=True)
    first.close()
    SqliteEvents(tmp_path / "events").close()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        SqliteEvents(tmp_path / "nowhere" / "events")


def test_what_is_evicted_leaves_the_file(tmp_path: Path) -> None:
    store = SqliteEvents(tmp_path / "events", max_events=10)
    for seq in range(5_000):
        store.append("a", 1, seq, b"x" * 1000, reply=False)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 * 2**20
    assert [seq for seq, _ in store.after("a", 1, 0)] == list(range(4_990, 5_000))
    store.close()


def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_full_disk_costs_events_and_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SqliteEvents(tmp_path / "events")
    store.append("a", 1, 1, b"before", reply=True)
    run(store, "PRAGMA max_page_count = 20")
    for seq in range(2, 200):
        store.append("a", 1, seq, b"x" * 1000, reply=bool(seq % 2))
    kept = store.after("a", 1, 0)
    assert kept[0] == (1, b"before")
    assert 10 < len(kept) < 100
    statistics = store.statistics()
    assert statistics.events == len(kept)
    assert statistics.evicted == 199 - len(kept)
    (record,) = errors(caplog)
    assert record.exc_info is not None
    assert "full" in str(record.exc_info[1])
    # What frees room makes room.
    store.drop_session("a")
    for seq in range(10):
        store.append("b", 1, seq, b"x" * 1000, reply=True)
    assert len(store.after("b", 1, -1)) == 10
    store.close()


def test_what_could_not_be_deleted_is_deleted_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SqliteEvents(tmp_path / "events", max_events=5)
    for seq in range(5):
        store.append("a", 1, seq, b"x", reply=False)
    run(store, "PRAGMA query_only = ON")
    store.append("a", 1, 5, b"x", reply=False)
    store.drop_stream("a", 1)
    assert store.after("a", 1, -1) == []
    assert run(store, "SELECT count(*) FROM events") == [(5,)]
    run(store, "PRAGMA query_only = OFF")
    store.append("a", 2, 1, b"x", reply=False)
    assert run(store, "SELECT count(*) FROM events") == [(1,)]
    assert store._unwanted == []
    assert len(errors(caplog)) == 1
    store.close()


def test_what_cannot_be_read_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SqliteEvents(tmp_path / "events")
    for seq in range(3):
        store.append("a", 1, seq, b"x", reply=True)
    run(store, "DELETE FROM events WHERE row = 2")
    assert [seq for seq, _ in store.after("a", 1, -1)] == [0, 2]
    run(store, "DROP TABLE events")
    assert store.after("a", 1, -1) == []
    assert len(errors(caplog)) == 1
    store.close()


def test_a_store_that_is_closed_holds_no_descriptor(tmp_path: Path) -> None:
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        pytest.skip("no /proc to count descriptors in")
    gc.collect()
    before = len(list(folder.iterdir()))
    for _ in range(3):
        store = SqliteEvents(tmp_path / "events")
        store.append("a", 1, 1, b"x", reply=True)
        store.close()
    (tmp_path / "notes").write_text("precious")
    with pytest.raises(ValueError):
        SqliteEvents(tmp_path / "notes")
    assert len(list(folder.iterdir())) == before


def run(store: SqliteEvents, statement: str) -> list[Any]:
    connection: sqlite3.Connection = store._database.connection
    return connection.execute(statement).fetchall()
