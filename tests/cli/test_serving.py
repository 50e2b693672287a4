"""`trimcp run --http` in real processes: where it listens, whom it serves, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import httpx2
import pytest
import trio
from click.testing import CliRunner, Result

import trimcp
from tests.peers.processes import seconds_an_interpreter_needs
from tests.peers.tls import authority, client_context
from trimcp.cli.app import app
from trimcp.wire.revisions import LATEST_LEGACY, REVISIONS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals and Unix sockets"),
]

ROOT = Path(__file__).parents[2]
SERVER = str(Path(__file__).with_name("server_for_cli.py"))
PATIENCE = 110.0


@attrs.define
class Served:
    """The command in a process of its own, serving."""

    process: trio.Process
    said: list[str] = attrs.field(factory=list)
    changed: trio.Event = attrs.field(factory=trio.Event)
    over: bool = False

    async def read(self) -> None:
        assert self.process.stderr is not None
        rest = ""
        async for chunk in self.process.stderr:
            *lines, rest = (rest + chunk.decode()).split("\n")
            self.said += lines
            self._tell()
        self.over = True
        self._tell()

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    async def until(self, text: str) -> str:
        """Wait until a line with this text was written, and return it."""
        while True:
            for line in self.said:
                if text in line:
                    return line
            assert not self.over, "\n".join(self.said)
            await self.changed.wait()

    async def url(self, scheme: str = "http", end: str = "/mcp") -> str:
        line = await self.until(end)
        found = [line.split()[2] for line in self.said if line.startswith(f"listening on {scheme}://") and end in line]
        assert found, line
        return found[0]

    async def end(self, *signals: int) -> int:
        """Send signals, wait until the process has ended, and return its exit code."""
        for number in signals:
            self.process.send_signal(number)
        return await self.process.wait()

    @property
    def text(self) -> str:
        return "\n".join(self.said)


@asynccontextmanager
async def serving(*words: str, env: Mapping[str, str] | None = None, server: str = SERVER) -> AsyncIterator[Served]:
    """Run the command; at the end it is asked to end, if it has not, and has to do so cleanly."""
    command = [sys.executable, "-m", "trimcp.cli", "run", server, *words]
    async with running(command, env) as served:
        yield served
    if served.process.returncode == 0:
        assert "Traceback" not in served.text


@asynccontextmanager
async def running(command: list[str], env: Mapping[str, str] | None = None, **options: Any) -> AsyncIterator[Served]:
    with trio.fail_after(PATIENCE):
        process = await trio.lowlevel.open_process(
            command, stderr=subprocess.PIPE, cwd=ROOT, env={**os.environ, **(env or {})}, **options
        )
        served = Served(process)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(served.read)
                yield served
                if process.returncode is None:
                    assert await served.end(signal.SIGTERM) == 0, served.text
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


@asynccontextmanager
async def connected(url: str, **options: Any) -> AsyncIterator[trimcp.ClientSession]:
    revision = options.pop("revision", None)
    target = trimcp.websocket(url, **options) if url.startswith("ws") else trimcp.http(url, **options)
    async with trimcp.Client("tests").connect(target, revision=revision) as session:
        yield session


async def add(url: str, **options: Any) -> str:
    async with connected(url, **options) as session:
        result = await session.call_tool("add", {"a": 1})
    (block,) = result.content
    assert isinstance(block, trimcp.Text)
    return block.text


def trimcp_says(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), prog_name="trimcp")


# Where


@pytest.mark.parametrize("software", ["own", "hypercorn"])
async def test_it_says_where_it_listens_and_serves_there(software: str) -> None:
    async with serving("--http", "--port", "0", "--server", software) as served:
        url = await served.url()
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*/mcp", url)
        assert await add(url) == "1.5 small None False"
        assert await add(await served.url("ws", "/ws")) == "1.5 small None False"
        assert await add(await served.url(end="/sse"), mode="sse") == "1.5 small None False"
        async with httpx2.AsyncClient() as client:
            for path in ("/healthz", "/readyz"):
                assert (await client.get(url.replace("/mcp", path))).text == "ok\n"
    assert served.process.returncode == 0


async def test_a_unix_socket(tmp_path: Path) -> None:
    file = tmp_path / "a b.sock"
    async with serving("--http", "--uds", str(file), "--uds-mode", "660") as served:
        assert await add(await served.url("http+unix")) == "1.5 small None False"
        assert await add(await served.url("ws+unix", "/ws")) == "1.5 small None False"
        assert file.stat().st_mode & 0o777 == 0o660
    assert not file.exists()


@pytest.mark.parametrize("software", ["own", "hypercorn"])
async def test_tls(tmp_path: Path, software: str) -> None:
    issued = authority().issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(str(cert))
    issued.private_key_pem.write_to_path(str(key))
    words = ("--http", "--port", "0", "--certfile", str(cert), "--keyfile", str(key), "--server", software)
    async with serving(*words) as served, httpx2.AsyncClient(verify=client_context()) as client:
        assert await add(await served.url("https"), client=client) == "1.5 small None False"
        assert await served.url("wss", "/ws")


async def test_every_message_can_be_traced(tmp_path: Path) -> None:
    file = tmp_path / "trace.txt"
    async with serving("--http", "--port", "0", f"--trace={file}") as served:
        await add(await served.url())
    lines = file.read_text().splitlines()
    assert [line.split()[1] for line in lines if "tools/call" in line or "1.5 small" in line] == ["<--", "-->"]


async def test_grpc_beside_http() -> None:
    async with serving("--grpc", "--port", "0") as served:
        url = await served.url("grpc", "(gRPC)")
        assert url.rpartition(":")[2] == (await served.url()).rpartition(":")[2].removesuffix("/mcp")
        async with trimcp.Client("c").connect(trimcp.grpc(url)) as session:
            assert await session.list_tools()


async def test_websocket_alone() -> None:
    async with serving("--ws", "--port", "0", "--path", "/here") as served:
        url = await served.url("ws", "/here")
        assert await add(url) == "1.5 small None False"
        async with httpx2.AsyncClient() as client:
            assert (await client.post(url.replace("ws", "http", 1), json={})).status_code == 426
    assert len([line for line in served.said if line.startswith("listening on")]) == 1


async def test_only_what_is_wanted() -> None:
    async with serving("--http", "--port", "0", "--no-sse", "--no-websocket", "--path", "/a/b") as served:
        url = await served.url(end="/a/b")
        assert await add(url) == "1.5 small None False"
        async with httpx2.AsyncClient() as client:
            for path in ("/sse", "/ws", "/mcp"):
                assert (await client.get(url.replace("/a/b", path))).status_code == 404
    assert len([line for line in served.said if line.startswith("listening on")]) == 1


HANDED = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ["LISTEN_PID"], os.environ["LISTEN_FDS"] = str(os.getpid()), "1"
os.execv(sys.executable, [sys.executable, "-m", "trimcp.cli", "run", *sys.argv[2:]])
"""


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_service_manager_may_open_the_socket_and_wait(tmp_path: Path, workers: str) -> None:
    manager = trio.socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    await manager.bind(str(tmp_path / "notify"))
    with manager, socket.create_server(("127.0.0.1", 0)) as listener:
        fd = listener.fileno()
        command = [sys.executable, "-c", HANDED, str(fd), SERVER, "--http", "--workers", workers]
        async with running(command, {"NOTIFY_SOCKET": str(tmp_path / "notify")}, pass_fds=[fd]) as served:
            with trio.fail_after(PATIENCE):
                assert await manager.recv(100) == b"READY=1"
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
            assert await served.url() == url
            assert await add(url) == "1.5 small None False"


async def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with serving("--http", "--port", str(port)) as served:
            assert await served.process.wait() == 2
    assert served.text == f"Error: cannot listen on 127.0.0.1:{port}: Address already in use\n".rstrip()


# Whom


async def test_tokens_let_their_owners_in_and_stay_out_of_sight(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# who may\nada: t0ken-1\n\nbob: t0ken-2\n")
    words = ("--http", "--port", "0", "--host", "0.0.0.0", "--token-file", str(file), "--access-log", "--log-json")
    async with serving(*words) as served:
        url = (await served.url()).replace("0.0.0.0", "127.0.0.1")
        assert await add(url, headers={"Authorization": "Bearer t0ken-2"}) == "1.5 small None False"
        with pytest.raises(trimcp.ConnectionLost, match="401"):
            await add(url)
        with pytest.raises(trimcp.ConnectionLost, match="401"):
            await add(url, headers={"Authorization": "Bearer t0ken-3"})
        assert "whoever reaches" not in served.text
    lines = [json.loads(line) for line in served.said if line.startswith("{")]
    accesses = [line for line in lines if "status" in line]  # the others are security events
    assert {line["principal"] for line in accesses if line["status"] == 200} == {"bob"}
    assert 401 in {line["status"] for line in accesses}
    assert "t0ken" not in served.text


async def test_lines_of_json_name_the_request_that_they_belong_to(tmp_path: Path) -> None:
    file = tmp_path / "logs.py"
    file.write_text(
        "import logging, trimcp\n"
        "server = trimcp.Server('logs')\n"
        "@server.tool\n"
        "async def load() -> str:\n"
        "    logging.getLogger('importer').warning('no date')\n"
        "    return 'loaded'\n"
    )
    words = ("--http", "--port", "0", "--log-json")
    async with serving(*words, server=str(file)) as served, connected(await served.url()) as session:
        assert (await session.call_tool("load")).text == "loaded"
    (line,) = [line for line in served.said if "no date" in line]
    said = json.loads(line)
    assert (said["logger"], said["mcp_request"].split()[0], "mcp_session" in said) == ("importer", "tools/call", True)


async def command(*words: str, **env: str) -> tuple[int, str, str]:
    """Run the command and return its exit code, and what it wrote to standard output and standard error."""
    done = await trio.run_process(
        [sys.executable, "-m", "trimcp.cli", *words],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **env},
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


MANY = """
import json, sys
from click.testing import CliRunner
from trimcp.cli.app import app
done = [CliRunner().invoke(app, words, prog_name="trimcp", env=env) for words, env in json.loads(sys.argv[1])]
print(json.dumps([(each.exit_code, each.stdout, each.stderr) for each in done]))
"""


async def commands(*each: tuple[Sequence[str], Mapping[str, str]]) -> list[list[Any]]:
    """Run the command several times in one process, with its own environment each time; as `command` otherwise."""
    done = await trio.run_process([sys.executable, "-c", MANY, json.dumps(each)], capture_stdout=True, cwd=ROOT)
    found: list[list[Any]] = json.loads(done.stdout)
    return found


async def test_the_command_reaches_it_by_its_urls(tmp_path: Path) -> None:
    file, hosts = tmp_path / "tokens", tmp_path / "hosts.json"
    file.write_text("ada: t0ken-1\n")
    async with serving("--http", "--port", "0", "--token-file", str(file)) as served:
        http, ws = await served.url(), await served.url("ws", "/ws")
        entry = {"url": http, "headers": {"Authorization": "Bearer ${TOKEN}"}}
        hosts.write_text(json.dumps({"mcpServers": {"web": entry}}))
        calls = (
            ("call", http, "add", "a=1", "--bearer", "TOKEN"),
            ("call", ws, "add", "a=1", "-H", "Authorization: Bearer ${TOKEN}"),
            ("call", f"{hosts}:web", "add", "a=1"),
        )
        right, wrong = {"TOKEN": "t0ken-1"}, {"TOKEN": "t0ken-2"}
        assert await command(*calls[0], **right) == (0, "1.5 small None False\n", "")
        bench = ("bench", http, "--method", "ping", "--count", "1")
        *done, measured = await commands(*((words, env) for words in calls for env in (right, wrong)), (bench, {}))
        assert len(done) == 6
        for answered, refused in zip(done[::2], done[1::2], strict=True):
            assert answered == [0, "1.5 small None False\n", ""]
            code, out, err = refused
            assert (code, out) == (3, "")
            assert "401" in err
            assert "Send a token with --bearer VARIABLE or --bearer @FILE" in err
            assert "t0ken" not in err
        assert (measured[0], "--bearer VARIABLE" in measured[2]) == (3, True)


async def test_an_address_that_everybody_reaches_is_pointed_out() -> None:
    async with serving("--http", "--port", "0", "--host", "0.0.0.0") as served:
        await served.until("whoever reaches this address can use the server; --token-file asks for tokens")


async def test_other_pages_and_names_are_kept_out_unless_they_are_named() -> None:
    named = ("--allow-origin", "https://app.example", "--allowed-host", "mcp.example")
    async with serving("--http", "--port", "0", *named) as served, httpx2.AsyncClient() as client:
        url = await served.url()
        for headers, status in [
            ({}, 415),
            ({"Host": "mcp.example"}, 415),
            ({"Host": "evil.example"}, 403),
            ({"Origin": "https://app.example"}, 415),
            ({"Origin": "https://evil.example"}, 403),
        ]:
            assert (await client.post(url, headers=headers)).status_code == status, headers


# The end


async def test_calls_under_way_are_answered_before_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "log"
    async with serving("--http", "--port", "0") as served:
        async with connected(await served.url()) as session:
            async with session.calling("short", {"file": str(file), "seconds": 1.0}) as call:
                await until_written(file, "begun")
                served.process.terminate()
                result = await call.result()
            assert result.content == [trimcp.Text("finished in time")]
        assert await served.process.wait() == 0
    assert "still at work" not in served.text


@pytest.mark.parametrize("revision", [LATEST_LEGACY, REVISIONS[-1]])
@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_what_takes_too_long_is_named_and_stopped(tmp_path: Path, revision: trimcp.Revision, scheme: str) -> None:
    file = tmp_path / "log"
    async with serving("--http", "--port", "0", "--grace", "0.3") as served:
        url = await served.url(*(("ws", "/ws") if scheme == "ws" else ()))
        async with connected(url, revision=revision) as session:
            with pytest.raises(trimcp.RemoteError, match="stopped: drain"):
                async with session.calling("slow", {"file": str(file)}) as call:
                    await until_written(file, "begun")
                    served.process.send_signal(signal.SIGINT)
                    await call.result()
        assert await served.process.wait() == 0
    at = next(number for number, line in enumerate(served.said) if "still at work after 0.3 seconds" in line)
    client, request, where = served.said[at + 1 : at + 4]
    assert client == f"'tests' '0', in revision {revision.name}"
    assert re.fullmatch(r"  tools/call 'slow', request \d+, for [0-9.]+ s", request)
    assert re.fullmatch(r"    tests/cli/server_for_cli\.py:\d+ in slow: await trio\.sleep\(60\)", where)
    assert file.read_text() == "begun\nended: drain\n"


async def test_it_says_what_it_waits_for(tmp_path: Path) -> None:
    async with serving("--http", "--port", "0", "--grace", "0.2") as served, connected(await served.url()) as session:
        with suppress(trimcp.McpError):
            async with session.calling("stubborn", {"file": str(tmp_path / "log")}):
                await until_written(tmp_path / "log", "begun")
                served.process.send_signal(signal.SIGINT)
                await served.until("1 call under way has up to 0.2 s to answer; Ctrl-C again ends at once")
                await served.until("1 call under way has not stopped yet; Ctrl-C again ends at once")
                assert await served.end(signal.SIGINT) == 128 + signal.SIGINT


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    file = tmp_path / "log"
    async with serving("--http", "--port", "0", "--grace", "0") as served, connected(await served.url()) as session:
        with pytest.raises(trimcp.McpError):
            async with session.calling("stubborn", {"file": str(file)}) as call:
                await until_written(file, "begun")
                served.process.terminate()
                await until_written(file, "holding on")
                assert await served.end(signal.SIGTERM) == 128 + signal.SIGTERM
                await call.result()


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_without_work_it_is_gone_soon(workers: str) -> None:
    loud = {"PYTHONWARNINGS": "always::ResourceWarning"}
    async with (
        serving("--http", "--port", "0", "--workers", workers, env=loud) as served,
        connected(await served.url()) as session,
    ):
        await session.list_tools()
        begun = trio.current_time()
        assert await served.end(signal.SIGTERM) == 0
        took = trio.current_time() - begun
    control = await seconds_an_interpreter_needs("trimcp.cli.app, trimcp.cli.serve.network")
    assert "Warning" not in served.text
    print(f"gone {took:.2f} s after the signal, with an open connection; an idle interpreter {control:.2f} s")
    assert took < max(4 * 0.5, 10 * control)


async def until_written(file: Path, text: str) -> None:
    """Wait until the server has written a text to a file."""
    written = trio.Path(file)
    while not await written.exists() or text not in await written.read_text():  # noqa: ASYNC110  # another process
        await trio.sleep(0.01)


# Workers


@pytest.mark.parametrize("software", ["own", "hypercorn"])
async def test_any_worker_may_answer_the_next_round(software: str, tmp_path: Path) -> None:
    """The state of a question is signed by one worker and opened by another."""
    client = trimcp.Client("tests")

    @client.elicitation
    async def decline(request: trimcp.ElicitParams) -> trimcp.ElicitResult:
        return trimcp.ElicitResult(action="decline")

    words = ("--http", "--port", "0", "--workers", "3", "--server", software, "--access-log")
    async with serving(*words) as served:
        url = await served.url()
        for _ in range(10):
            async with client.connect(trimcp.http(url, headers={"Connection": "close"})) as session:
                assert (await session.call_tool("ask")).content == [trimcp.Text("decline")]
        assert await add(url, revision=LATEST_LEGACY) == "1.5 small None False"
        for _ in range(6):
            async with client.connect(
                trimcp.http(url, headers={"Connection": "close"}), revision=LATEST_LEGACY
            ) as session:
                for _ in range(3):
                    assert (await session.call_tool("ask")).content == [trimcp.Text("decline")]
        for _ in range(4):
            at = url.replace("/mcp", "/sse")
            async with client.connect(trimcp.http(at, headers={"Connection": "close"}, mode="sse")) as session:
                assert (await session.call_tool("ask")).content == [trimcp.Text("decline")]


async def test_workers_that_cannot_start_say_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import trimcp\n1 / 0\n")
    async with serving("--http", "--port", "0", "--workers", "2", server=str(broken)) as served:
        assert await served.process.wait() == 2
    assert "ZeroDivisionError" in served.text
    assert "ended with status 2 before it served anything" in served.text


# Words


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--port", "1"], "--port goes with --http or --ws"),
        (["--allow-origin", "*"], "--allow-origin goes with --http or --ws"),
        (["--no-sse"], "--sse goes with --http or --ws"),
        (["--http", "--ws"], "either --http or --ws"),
        (["--http", "--port", "1", "--uds", "x"], "either on a --port or on a Unix socket"),
        (["--http", "--port", "65536"], "65536 is not in the range"),
        (["--http", "--uds", "x", "--uds-mode", "9"], "in octal, such as 660"),
        (["--http", "--keyfile", SERVER], "--keyfile goes with --certfile"),
        (["--grpc", "--server", "hypercorn"], "--grpc needs HTTP/2, which trimcp's own server speaks"),
        (["--agent-tools", "--ws"], "--agent-tools has WebSocket beside HTTP; leave out --ws"),
        (["--http", "--certfile", "nowhere"], "does not exist"),
        (["--http", "--certfile", SERVER, "--port", "0"], "cannot use the certificate"),
        (["--http", "--certfile", SERVER, "--port", "0", "--server", "hypercorn"], "cannot use the certificate"),
        (["--http", "--path", "mcp"], "the endpoint cannot be at 'mcp'"),
        (["--http", "--path", "/sse"], "the endpoint cannot be at '/sse'"),
        (["--http", "--path", "/healthz"], "the endpoint cannot be at '/healthz'"),
        (["--http", "--allow-origin", "app.example"], "is no origin"),
        (["--http", "--allowed-host", "https://mcp.example"], "is no host"),
        (["--http", "--workers", "0"], "0 is not in the range"),
        (["--http", "--reply", "xml"], "'xml' is not one of"),
        (["--http", "--uds", "/nowhere/at/all"], "cannot listen on '/nowhere/at/all'"),
    ],
)
def test_wrong_words_end_with_two_and_advice(words: list[str], told: str) -> None:
    result = trimcp_says("run", SERVER, *words)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no tokens, so nobody could come in"),
        ("# ada: hush\n", "has no tokens"),
        ("ada: fine\nhush\n", "line 2: write NAME: TOKEN"),
        (": hush\n", "line 1: write NAME: TOKEN"),
        ("hush:\n", "line 1: write NAME: TOKEN"),
        ("ada: same\nbob: same\n", "line 2: 'ada' and 'bob' cannot have the same token"),
        ("ada: hush hush\n", "the bearer token of 'ada' must be letters"),
    ],
)
def test_a_wrong_token_file_is_explained_without_its_tokens(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    result = trimcp_says("run", SERVER, "--http", "--token-file", str(file))
    assert result.exit_code == 2
    assert told in result.stderr
    assert "hush" not in result.stderr


def test_state_keys_that_are_too_short_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMCP_STATE_KEYS", "short")
    result = trimcp_says("run", SERVER, "--http", "--port", "0")
    assert result.exit_code == 2
    assert "TRIMCP_STATE_KEYS: state keys must be at least 16 bytes" in result.stderr
