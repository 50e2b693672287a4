"""A journal played again: what must be the same, what may differ, and how each side is told apart from its ids."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
import trio
from trio.testing import MockClock

import trimcp
from trimcp.channel import Incoming, MessageChannel, Outgoing
from trimcp.support.nurseries import open_service_nursery
from trimcp.testing import Transcript, connected, every_revision, replay
from trimcp.testing.play import outgoing_of, play
from trimcp.testing.transcript import JournalWriter, read_journal
from trimcp.transports.memory import memory_channels
from trimcp.transports.trace import as_json
from trimcp.transports.wrapped import WrappedChannel
from trimcp.wire.common import META_PROTOCOL_VERSION
from trimcp.wire.jsonrpc import parse, parse_value
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2025_06_18, Revision


@attrs.define(eq=False)
class Recorded(WrappedChannel):
    """Writes down what passes."""

    journal: JournalWriter

    async def send(self, batch: Sequence[Outgoing]) -> None:
        for message in batch:
            self.journal.note(True, message.data)
        await self.channel.send(batch)

    async def receive(self) -> Sequence[Incoming]:
        batch = await self.channel.receive()
        for incoming in batch:
            self.journal.note(False, orjson.dumps(as_json(incoming.message)))
        return batch


def make_server(version: str = "1", progress: int = 3, extra: str = "") -> trimcp.Server[Any]:
    server = trimcp.Server("s", version)

    @server.tool
    async def work(*, ctx: trimcp.Context[Any]) -> dict[str, str]:
        for step in range(progress):
            await ctx.report_progress(step + 1)
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=id(ctx) % 1000)
        return {"at": at.isoformat(), "extra": extra}

    @server.tool
    async def hang(*, ctx: trimcp.Context[Any]) -> str:
        await ctx.report_progress(1)
        await trio.sleep_forever()
        return "never"

    @server.tool
    async def ask(*, ctx: trimcp.Context[Any]) -> str:
        answer = await ctx.elicit("Name?", {"type": "object", "properties": {"name": {"type": "string"}}})
        return f"hello {answer.content['name']}"

    @server.tool
    async def sign(token: str) -> str:
        return f"{len(token)} characters"

    return server


def make_client() -> trimcp.Client:
    client = trimcp.Client("c")

    @client.elicitation
    async def ask(params: Any) -> trimcp.ElicitResult:
        return trimcp.ElicitResult(action="accept", content={"name": "Ada"})

    return client


async def converse(session: trimcp.ClientSession) -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(session.call_tool, "work")
    async with session.calling("work", {}) as call:
        assert [step.progress async for step in call.progress]
        await call.result()
    async with session.calling("hang", {}) as call:
        async for _ in call.progress:
            break
    if session.revision >= V2025_06_18:
        assert (await session.call_tool("ask")).content == [trimcp.Text("hello Ada")]
    await session.call_tool("sign", {"token": "s3cr3t"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


async def record(file: Path, revision: Revision, *, masked: bool = True) -> Transcript:
    writer = JournalWriter(file, masked=masked)
    async with connected(
        make_server(), make_client(), revision=revision, wrap=lambda channel: Recorded(channel, writer)
    ) as session:
        await converse(session)
    writer.close()
    return Transcript.load(file)


@every_revision
async def test_every_revision_says_the_same_twice(revision: Revision, file: Path, autojump_clock: MockClock) -> None:
    transcript = await record(file, revision)
    assert transcript.recorded
    methods = {message.get("method") for _, message in transcript.messages}
    assert {"tools/call", "notifications/progress", "notifications/cancelled"} <= methods
    await replay(transcript, make_server(), ignore=["/result/content/0/text"])


@every_revision
async def test_what_differs_is_told(revision: Revision, file: Path, autojump_clock: MockClock) -> None:
    transcript = await record(file, revision)
    with pytest.raises(AssertionError) as caught:
        await replay(transcript, make_server("2"), ignore=["/result/content/0/text"])
    assert 'version is "2", expected "1"' in str(caught.value)


async def test_more_or_less_progress_is_the_same_but_none_is_not(file: Path, autojump_clock: MockClock) -> None:
    transcript = await record(file, LATEST)
    for progress in (1, 9):
        await replay(transcript, make_server(progress=progress), ignore=["/result/content/0/text"])
    with pytest.raises(AssertionError, match="notifications/progress did not come"):
        await replay(transcript, make_server(progress=0), ignore=["/result/content/0/text"])


async def test_points_in_time_are_the_same_and_other_text_is_not(file: Path, autojump_clock: MockClock) -> None:
    transcript = await record(file, LATEST_LEGACY)
    pointers = ["/result/content/*/text"]
    await replay(transcript, make_server(), ignore=pointers)
    with pytest.raises(AssertionError, match=r'structuredContent.extra is "new", expected ""'):
        await replay(transcript, make_server(extra="new"), ignore=pointers)
    await replay(transcript, make_server(extra="new"), ignore=[*pointers, "/result/structuredContent/extra"])


async def test_any_target_will_do(file: Path, autojump_clock: MockClock) -> None:
    transcript = await record(file, LATEST)
    await replay(transcript, trimcp.in_process(make_server(), framed=True), ignore=["/result/content/0/text"])


@pytest.mark.parametrize("revision", [LATEST, LATEST_LEGACY], ids=str)
@pytest.mark.parametrize("changed", [False, True])
async def test_the_servers_side_is_played_as_well(
    revision: Revision, changed: bool, file: Path, autojump_clock: MockClock
) -> None:
    transcript = await record(file, revision, masked=False)
    ours, theirs = memory_channels()
    problems: list[str] = []

    async def serve() -> None:
        problems.extend(await play(transcript.messages, ours, client=False))

    async with open_service_nursery() as nursery, ours:
        nursery.start_soon(serve)
        client = make_client()
        if changed:
            client.profile.info = attrs.evolve(client.profile.info, version="7")
        async with client.connect(theirs, revision=revision) as session:
            await converse(session)
            await trio.sleep(5)
    assert bool(problems) == changed
    assert all('is "7", expected "0"' in problem for problem in problems)


async def test_what_is_missing_or_too_much_is_told(file: Path, autojump_clock: MockClock) -> None:
    transcript = await record(file, LATEST_LEGACY)
    messages = list(transcript.messages)
    last = copy.deepcopy(messages[-1])
    more = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
    with pytest.raises(AssertionError, match="notifications/tools/list_changed did not come"):
        await replay(Transcript([*messages, (False, more)], recorded=True), make_server(), ignore=["/result"])
    with pytest.raises(AssertionError, match="not in the journal: .*" + str(last[1]["id"])):
        await replay(Transcript(messages[:-1], recorded=True), make_server(), ignore=["/result"])


async def test_a_question_that_was_not_asked_then_is_refused(file: Path, autojump_clock: MockClock) -> None:
    transcript = await record(file, LATEST_LEGACY)
    asked = next(message["id"] for _, message in transcript.messages if message.get("method") == "elicitation/create")
    messages = [
        (from_client, message)
        for from_client, message in transcript.messages
        if message.get("method") != "elicitation/create" and (not from_client or message.get("result") is None)
    ]
    assert asked is not None
    with pytest.raises(AssertionError, match=r"not in the journal: .*elicitation/create"):
        await replay(Transcript(messages, recorded=True), make_server(), ignore=["/result"])


async def test_a_ping_is_answered_between_what_we_say(autojump_clock: MockClock) -> None:
    """A channel takes from one task at a time."""
    ours, theirs = memory_channels()
    heard: list[Any] = []

    async def ping() -> None:
        async with theirs:
            while len(heard) < 3:
                if heard == [{"jsonrpc": "2.0", "method": "notifications/a"}]:
                    await theirs.send([outgoing_of({"jsonrpc": "2.0", "id": "now", "method": "ping"})])
                heard.extend(as_json(incoming.message) for incoming in await theirs.receive())

    async with trio.open_nursery() as nursery, ours:
        nursery.start_soon(ping)
        messages = [(True, {"jsonrpc": "2.0", "method": f"notifications/{name}"}) for name in "ab"]
        assert await play(messages, Slowly(ours)) == []
    assert {"jsonrpc": "2.0", "id": "now", "result": {}} in heard


@attrs.define(eq=False)
class Slowly(WrappedChannel):
    """Takes its time to send."""

    busy: bool = False

    async def send(self, batch: Sequence[Outgoing]) -> None:
        if self.busy:
            raise trio.BusyResourceError
        self.busy = True
        await self.channel.send(batch)
        await trio.sleep(0.1)
        self.busy = False


# The file


def test_the_same_secret_has_the_same_number(file: Path) -> None:
    writer = JournalWriter(file, "run --token-file x?token=abc")
    for value in ("one", "two", "one"):
        writer.note(True, json.dumps({"params": {"token": value, "long": "x" * 1000}}).encode())
    writer.close()
    said = [message["params"] for _, message in read_journal(file.read_text())]
    assert [each["token"] for each in said] == ["***1", "***2", "***1"]
    assert said[0]["long"] == "x" * 1000
    assert "abc" not in file.read_text()


def test_each_message_is_in_the_file_at_once_and_its_limit_holds(file: Path) -> None:
    told: list[str] = []
    writer = JournalWriter(file, max_bytes=400, tell=told.append)
    writer.note(True, b'{"a":1}')
    assert read_journal(file.read_text()) == [(True, {"a": 1})]
    for _ in range(100):
        writer.note(False, b'{"b":2}')
    writer.close()
    assert writer.full
    assert file.stat().st_size < 600
    assert told[1:] == ["the recording ends here: it has come to its limit of 400 bytes"]
    assert json.loads(file.read_text().splitlines()[-1])["note"] == told[1]


def test_a_last_line_that_was_cut_off_is_left_out(file: Path) -> None:
    writer = JournalWriter(file)
    writer.note(True, b'{"a":1}')
    writer.close()
    assert read_journal(file.read_text() + '{"at":1,"fr') == [(True, {"a": 1})]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1"),
        ('{"trimcp_journal":2}\n', "format 1"),
        ('{"trimcp_journal":1}\n[]\n', "line 2: it is no JSON object"),
        ('{"trimcp_journal":1}\n{"from":"me","message":{}}\n', "line 2"),
        ('{"trimcp_journal":1}\n{"from":"client","message":' + "[" * 129 + "]" * 129 + "}\n", "deeper than 129 levels"),
    ],
)
def test_what_is_no_journal_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_journal(text)


async def test_the_ids_of_questions_are_those_of_this_time(file: Path, autojump_clock: MockClock) -> None:
    transcript = await record(file, LATEST_LEGACY)
    [asked] = [message["id"] for _, message in transcript.messages if message.get("method") == "elicitation/create"]
    renamed = [
        (from_client, {**message, "id": "then"} if is_about(message, from_client, asked) else message)
        for from_client, message in transcript.messages
    ]
    assert sum(message.get("id") == "then" for _, message in renamed) == 2
    await replay(Transcript(renamed, recorded=True), make_server(), ignore=["/result/content/0/text"])


def is_about(message: Any, from_client: bool, asked: object) -> bool:
    """Whether a message is the server's question of this id or the client's answer to it."""
    return message.get("id") == asked and from_client != ("method" in message)


MCP = (
    (True, {"id": 1, "method": "tools/call", "params": {"name": "x", "_meta": {"progressToken": "t"}}}),
    (False, {"method": "notifications/progress", "params": {"progressToken": "t", "progress": 1}}),
    (False, {"id": "q", "method": "elicitation/create", "params": {"subscriptionId": 1}}),
    (True, {"id": "q", "result": {"requestState": "s"}}),
    (True, {"method": "notifications/cancelled", "params": {"requestId": 1}}),
    (False, {"id": 1, "result": {"requestState": "s"}}),
    (True, {"id": 2, "method": "x", "params": {"_meta": {META_PROTOCOL_VERSION: str(LATEST)}, "name": "n"}}),
)
AGENT_TOOLS = (
    (True, {"type": "tool_request", "request_id": "r", "tool_name": "x", "arguments": {}}),
    (False, {"type": "tool_progress", "request_id": "r", "progress": 1}),
    (True, {"type": "tool_cancel", "request_id": "r"}),
    (False, {"type": "tool_response", "request_id": "r", "context_id": "c"}),
)
ODD: tuple[Any, ...] = (None, [], {}, [1], {"a": 1}, "x", 1, 1.5, True, "")


def changed_at_each_place(value: Any) -> Iterator[Any]:
    """The value with each of its members replaced by each odd value."""
    yield from ODD
    if isinstance(value, dict):
        for name, member in value.items():
            for odd in changed_at_each_place(member):
                yield {**value, name: odd}


@pytest.mark.parametrize("conversation", [MCP, AGENT_TOOLS])
@pytest.mark.parametrize("client", [True, False])
async def test_a_broken_journal_and_a_peer_that_says_anything_are_differences(
    conversation: Sequence[tuple[bool, Any]], client: bool, autojump_clock: MockClock
) -> None:
    agents = conversation is AGENT_TOOLS
    marked: list[tuple[bool, Any]] = [
        (by_client, message if agents else {"jsonrpc": "2.0", **message}) for by_client, message in conversation
    ]
    told = 0
    for at, (by_client, message) in enumerate(marked):
        for odd in changed_at_each_place(message):
            other = [*marked[:at], (by_client, odd), *marked[at + 1 :]]
            for journal, said in ((other, marked), (marked, other)):
                texts = [orjson.dumps(each) for by_client, each in said if by_client != client]
                told += bool(await play(journal, Saying(texts, agents), client=client, patience=0.1))
    assert told


async def test_of_many_messages_that_are_not_in_the_journal_some_are_told(autojump_clock: MockClock) -> None:
    said = [b'{"jsonrpc":"2.0","method":"notifications/%d"}' % n for n in range(5_000)]
    problems = await play(MCP[:1], Saying(said, agents=False))
    assert len(problems) == 101
    assert problems[-1] == "and 4900 more that are not in the journal"


@attrs.define(eq=False)
class Saying(MessageChannel):
    """Says these texts, and then leaves."""

    texts: list[bytes]
    agents: bool

    async def send(self, batch: Sequence[Outgoing]) -> None:
        await trio.lowlevel.checkpoint()

    async def receive(self) -> Sequence[Incoming]:
        await trio.lowlevel.checkpoint()
        if not self.texts:
            raise trio.EndOfChannel
        text = self.texts.pop(0)
        return [Incoming(parse_value(text) if self.agents else parse(text), len(text))]

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
