"""`trimcp record` writes down what goes by and changes nothing; `trimcp replay` tells what is not the same again."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
import trio
from click.testing import CliRunner

import trimcp
from tests.peers.serving import served
from tests.yardsticks import turns
from trimcp.cli.app import app
from trimcp.cli.recording import _pass
from trimcp.transports.descriptors import READ_SIZE
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, V2025_06_18, Revision

PROGRAM = """
import os, sys, time, trimcp, trio
server = trimcp.Server("recorded", version=os.environ.get("VERSION", "1"))

@server.tool
async def work(steps: int, *, ctx: trimcp.Context) -> dict:
    for step in range(steps):
        await ctx.report_progress(step + 1, steps)
    await ctx.info("worked")
    return {"steps": steps, "pid": os.getpid()}

@server.tool
async def hang(*, ctx: trimcp.Context) -> str:
    await ctx.report_progress(1)
    await trio.sleep_forever()

@server.tool
async def ask(*, ctx: trimcp.Context) -> str:
    answer = await ctx.elicit("Name?", {"type": "object", "properties": {"name": {"type": "string"}}})
    return f"hello {answer.content['name']}"

@server.tool
async def sign(token: str) -> str:
    print("signed", file=sys.stderr)
    return f"Bearer {token}"

trimcp.run_stdio(server)
"""
TRIMCP = (sys.executable, "-m", "trimcp.cli")
IGNORED = ("--ignore", "/result/structuredContent/pid", "--ignore", "/result/content/0/text")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def recorded(journal: Path, *words: str | Path, options: tuple[str, ...] = ()) -> trimcp.StdioServer:
    """A server with a recording in between."""
    rest = words if len(words) == 1 else ("--", *words)
    return trimcp.stdio(*TRIMCP, "record", *options, str(journal), *map(str, rest), env=dict(os.environ))


async def run(*words: str | Path, **env: str) -> tuple[int, str]:
    """The exit code, and what was printed: a thread of ours replays, to record takes a process with descriptors."""
    if words[0] == "replay":
        found = await trio.to_thread.run_sync(lambda: CliRunner().invoke(app, list(map(str, words)), env=env))
        return found.exit_code, found.output
    done = await trio.run_process([*TRIMCP, *map(str, words)], capture_stdout=True, capture_stderr=True, check=False)
    return done.returncode, done.stdout.decode() + done.stderr.decode()


def entries(journal: Path) -> list[Any]:
    return [json.loads(line) for line in journal.read_text().splitlines()]


def text_of(journal: Path) -> str:
    return journal.read_text()


def messages(journal: Path) -> list[Any]:
    return [entry["message"] for entry in entries(journal)[1:] if "message" in entry]


def make_client() -> trimcp.Client:
    client = trimcp.Client("recorder", "1")

    @client.elicitation
    async def ask(params: Any) -> trimcp.ElicitResult:
        return trimcp.ElicitResult(action="accept", content={"name": "Ada"})

    @client.logging
    async def log(params: Any) -> None:
        pass

    return client


async def converse(target: Any, revision: Revision) -> None:
    """Progress, a cancelled call and questions, as far as the revision has them."""
    with trio.fail_after(30):
        async with make_client().connect(target, revision=revision) as session:
            await session.list_tools()
            async with session.calling("work", {"steps": 3}) as call:
                assert [step.progress async for step in call.progress]
                await call.result()
            async with session.calling("hang", {}) as call:
                async for _ in call.progress:
                    break
            if revision >= trimcp.REVISIONS[2]:
                result = await session.call_tool("ask")
                assert result.content == [trimcp.Text("hello Ada")]
            await session.call_tool("work", {"steps": 1})


@pytest.mark.slow
@pytest.mark.parametrize("revision", [LATEST, LATEST_LEGACY], ids=str)
async def test_a_recording_is_the_same_when_it_is_replayed_and_differs_when_the_server_does(
    revision: Revision, program: Path, journal: Path
) -> None:
    await converse(recorded(journal, sys.executable, program), revision)
    head, *said = entries(journal)
    assert head["trimcp_journal"] == 1
    assert all(entry["from"] in ("client", "server") for entry in said)
    assert [entry["at"] for entry in said] == sorted(entry["at"] for entry in said)
    methods = [message.get("method") for message in messages(journal)]
    assert methods.count("tools/call") >= 3
    assert {"notifications/progress", "notifications/cancelled"} <= set(methods)
    code, told = await run("replay", journal, *IGNORED, "--", sys.executable, program)
    assert (code, told.count("\n")) == (0, 1), told
    assert told.startswith("the server says the same: ")
    code, told = await run("replay", journal, "--", sys.executable, program, VERSION="2")
    assert code == 1
    assert '"2", expected "1"' in told
    assert "structuredContent.pid is " in told
    # And so in a test.
    transcript = trimcp.testing.Transcript.load(journal)
    await trimcp.testing.replay(
        transcript, trimcp.stdio(sys.executable, str(program)), ignore=[word for word in IGNORED if "/" in word]
    )


@pytest.mark.slow
@pytest.mark.parametrize("revision", [LATEST, LATEST_LEGACY], ids=str)
async def test_the_servers_side_is_played_to_a_client(revision: Revision, program: Path, journal: Path) -> None:
    await converse(recorded(journal, sys.executable, program), revision)
    player = trimcp.stdio(*TRIMCP, "replay", str(journal), "--side", "server", env=dict(os.environ))
    lines: list[str] = []
    await converse(trimcp.StdioServer(player.command, env=player.env, on_stderr=lines.append), revision)
    assert lines[-1].startswith("the client says the same: "), lines


@pytest.mark.slow
async def test_secrets_are_numbered_and_programs_own_words_and_code_pass(program: Path, journal: Path) -> None:
    lines: list[str] = []
    target = recorded(journal, sys.executable, program)
    target = trimcp.StdioServer(target.command, env=target.env, on_stderr=lines.append)
    async with trimcp.Client("c").connect(target) as session:
        result = await session.call_tool("sign", {"token": "s3cr3t"})
        assert result.content == [trimcp.Text("Bearer s3cr3t")]
    assert "signed" in lines
    assert f"trimcp record: recording to {journal}" in lines
    text = text_of(journal)
    assert "s3cr3t" not in text
    assert '"token":"***1"' in text
    assert "Bearer ***" in text
    assert stat.S_IMODE(os.stat(journal).st_mode) == 0o600
    code, told = await run("replay", journal, "--", sys.executable, program)
    assert code == 0, told
    async with trimcp.Client("c").connect(recorded(journal, sys.executable, program, options=("--unmasked",))) as again:
        await again.call_tool("sign", {"token": "s3cr3t"})
    assert "s3cr3t" not in text_of(journal)
    assert "s3cr3t" in text_of(journal.with_name("journal-2.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["http", "websocket"])
async def test_a_url_is_recorded_as_well(how: str, journal: Path) -> None:
    server = trimcp.Server("far")

    @server.tool
    async def add(a: int, b: int, *, ctx: trimcp.Context[Any]) -> int:
        await ctx.report_progress(1)
        return a + b

    async with served(server, how) as place:
        for revision in (LATEST, LATEST_LEGACY):
            async with trimcp.Client("c").connect(recorded(journal, place.url), revision=revision) as session:
                assert (await session.call_tool("add", {"a": 1, "b": 2})).structured_content == {"result": 3}
            name = journal if revision is LATEST else journal.with_name("journal-2.jsonl")
            assert [message["method"] for message in messages(name) if "id" in message and "method" in message][-1]
            code, told = await run("replay", name, place.url)
            assert code == 0, told


BIG = orjson.Fragment(b"18446744073709551617")  # sent as it is, as another implementation would
BIG_PROGRAM = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    result = {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "s", "version": "1"}}
    if asked["method"] == "tools/call":
        result = {"content": [], "structuredContent": asked["params"]["arguments"]}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


async def test_integers_of_any_size_are_written_down_exactly_and_said_again(tmp_path: Path, journal: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(BIG_PROGRAM)
    command = (sys.executable, program)
    with trio.fail_after(30):
        async with trimcp.Client("c").connect(recorded(journal, *command), revision=V2025_06_18) as session:
            with pytest.raises(trimcp.InvalidReply, match="64 bits"):  # by us, the journal has it
                await session.call_tool("any", {"n": BIG, "few": [1, BIG]})
    numbers = {"n": 2**64 + 1, "few": [1, 2**64 + 1]}
    asked, answer = messages(journal)[-2:]
    assert asked["params"]["arguments"] == answer["result"]["structuredContent"] == numbers
    assert await run("replay", journal, "--", *command) == (0, "the server says the same: 2 messages\n")
    program.write_text(BIG_PROGRAM.replace('"content": []', '"content": [5]'))
    code, told = await run("replay", journal, "--", *command)
    assert (code, told.count("expected")) == (1, 1), told


@pytest.mark.slow
async def test_a_request_that_cannot_be_read_is_answered_when_a_url_is_recorded(journal: Path) -> None:
    server = trimcp.Server("far")

    @server.tool
    async def add(a: int, b: int) -> int:
        return a + b

    async with (
        served(server, "http") as place,
        trimcp.Client("c").connect(recorded(journal, place.url), revision=V2025_06_18) as session,
    ):
        with trio.fail_after(30):
            with pytest.raises(trimcp.RemoteError, match="does not fit in 64 bits"):
                await session.call_tool("add", {"a": BIG, "b": 2})
            assert (await session.call_tool("add", {"a": 1, "b": 2})).text == "3"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["http", "websocket"])
async def test_a_server_that_wants_a_token_gets_it_and_it_is_not_written_down(
    how: str, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "t0ken")
    server = trimcp.Server("far")
    settings = trimcp.HttpSettings(authenticate=trimcp.bearer_tokens({"t0ken": "ada"}))
    async with served(server, how, settings=settings) as place:
        for options in (("--bearer", "MY_TOKEN"), ("-H", "Authorization: Bearer ${MY_TOKEN}")):
            async with trimcp.Client("c").connect(recorded(journal, place.url, options=options)) as session:
                assert await session.list_tools() == []
        code, told = await run("replay", *options, journal, place.url)
        assert code == 0, told
        assert "t0ken" not in journal.read_text("utf-8")  # noqa: ASYNC240 - nothing else runs now
        for words in (("record", journal, place.url), ("replay", journal, place.url)) if how == "websocket" else ():
            code, told = await run(*words)
            assert (code, "the server answered 401" in told) == (3, True), told
            assert "Send a token with --bearer VARIABLE" in told
            assert "log in: trimcp login URL" in told


@pytest.mark.slow
async def test_it_stops_with_a_notice_when_the_journal_is_full(program: Path, journal: Path) -> None:
    target = recorded(journal, sys.executable, program, options=("--max-size", "0.002"))
    async with trimcp.Client("c").connect(target, revision=LATEST_LEGACY) as session:
        for _ in range(20):
            await session.call_tool("work", {"steps": 1})
    last = entries(journal)[-1]
    assert last["note"].startswith("the recording ends here: ")
    assert len(text_of(journal)) < 2500


@pytest.mark.slow
def test_what_is_no_message_passes_untouched_and_the_exit_code_is_the_programs(tmp_path: Path, journal: Path) -> None:
    echo = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()); sys.exit(7)"
    words = [*TRIMCP, "record", str(journal), "--", sys.executable, "-c", echo]
    said = b'not json\n{"id": 1}\n\xff\xfe\nno end'
    done = subprocess.run(words, input=said, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout) == (7, said)
    texts = [entry.get("text", entry.get("message")) for entry in entries(journal)[1:]]
    assert texts[:4] == ["not json", {"id": 1}, "\ufffd\ufffd", "no end"]


@pytest.mark.slow
@attrs.define(eq=False)
class Pieces(trio.abc.ReceiveStream, trio.abc.SendStream):
    """Bytes that come in pieces, and where they are passed on to."""

    data: bytes
    size: int
    taken: int = 0
    passed: int = 0

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        self.taken += self.size
        return self.data[self.taken - self.size : self.taken]

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.passed += len(data)

    async def wait_send_all_might_not_block(self) -> None: ...
    async def aclose(self) -> None: ...


@pytest.mark.parametrize("size", [1, 3, 7, 100])
async def test_lines_are_noted_whole_however_they_come(size: int) -> None:
    stream = Pieces(b"one\r\n\ntwo two\nthe end", size)
    noted: list[bytes] = []
    await _pass(stream, stream, noted.append)
    assert noted == [b"one\r", b"", b"two two", b"the end"]
    assert stream.passed == 21


async def test_a_long_line_costs_what_short_ones_of_its_length_cost() -> None:
    def stream_of(line: int) -> Pieces:
        return Pieces((b"x" * (line - 1) + b"\n") * (16 * 2**20 // line), READ_SIZE)

    # It is some 4 times, for memory; searched again with each piece, 150 times.
    for turn in turns(at_most=30):
        long, short = stream_of(16 * 2**20), stream_of(2**16)
        with turn.of_work():
            await _pass(long, long, len)
        with turn.of_yardstick():
            await _pass(short, short, len)


def test_a_signal_ends_it_with_the_program(tmp_path: Path, program: Path, journal: Path) -> None:
    words = [*TRIMCP, "record", str(journal), "--", sys.executable, str(program)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert b"recording to" in process.stderr.readline()
    hello = {"protocolVersion": LATEST_LEGACY.name, "capabilities": {}, "clientInfo": {"name": "c", "version": "1"}}
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}).encode() + b"\n"
    )
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["id"] == 1
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0  # though its input is still open
    _, errors = process.communicate()
    assert b"Traceback" not in errors
    assert len(messages(journal)) == 2


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("replay", "JOURNAL"), 2, "name the server to replay to"),
        (("replay", "JOURNAL", "--side", "server", "x"), 2, "takes no TARGET"),
        (("replay", "OTHER", "x"), 2, "this is no journal"),
        (("replay", "nowhere", "x"), 2, "does not exist"),
        (("replay", "JOURNAL", "--", "no-such-program"), 3, "cannot start the server"),
        (("record", "new", "--", "no-such-program"), 3, "cannot start the server"),
        (("record", "no/such/folder", "--", "x"), 2, "cannot write"),
        (("record", "new"), 2, "Missing argument"),
        (("record", "-H", "A: b", "new", "--", "x", "y"), 2, "headers are sent to a URL"),
        (("replay", "-H", "A: b", "JOURNAL", "--", "x"), 2, "headers are sent to a URL"),
        (("record", "--bearer", "NO_SUCH", "new", "x"), 2, "there is no such variable"),
    ],
)
def test_mistakes_have_exit_codes(
    words: tuple[str, ...], code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("JOURNAL").write_text('{"trimcp_journal":1}\n')
    Path("OTHER").write_text('{"format":1}\n')
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, told in result.output) == (code, True), result.output


@pytest.mark.parametrize("command", ["record", "replay"])
def test_each_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert "Exit codes:" in result.output
