"""The command as it is typed: in this process where only its words matter, else as a process with a real child."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click
import pytest
import trio
from click.testing import CliRunner, Result

from trimcp.cli import conversation
from trimcp.cli.app import COMMANDS as NAMES
from trimcp.cli.app import app, find_command
from trimcp.cli.inspecting import describe, take_stock
from trimcp.cli.loading import load_program
from trimcp.cli.options import Subcommand
from trimcp.client.client import Client
from trimcp.errors import ErrorReply
from trimcp.run import in_process
from trimcp.server.server import Server
from trimcp.testing import connected
from trimcp.wire.codes import INVALID_PARAMS
from trimcp.wire.revisions import LATEST, V2024_11_05, V2025_03_26

ROOT = Path(__file__).parents[2]
SERVER = str(Path(__file__).with_name("server_for_cli.py"))
TRIMCP = [sys.executable, "-m", "trimcp.cli"]
FAILS = f"{sys.executable} -c 'exit(1)'"


def trimcp(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, list(words), input=stdin, prog_name="trimcp")


@contextmanager
def started(*words: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """Start the command as a process and end it, whatever happens."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*TRIMCP, *words], text=True, cwd=ROOT, **{**pipes, **options}) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(file: Path, text: str) -> None:
    """Wait until another process has written a text to a file."""
    deadline = time.monotonic() + 60
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < deadline, f"{text!r} was never written"
        time.sleep(0.02)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the server in this process, which needs no time to start."""
    server = in_process(load_program(SERVER).server)
    monkeypatch.setattr(conversation, "find_target", lambda *words: server)


# Words


COMMANDS = {name: found for name in NAMES if (found := find_command(name)) is not None}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself_with_examples_and_exit_codes(command: str) -> None:
    result = trimcp(command, "--help")
    assert result.exit_code == 0
    assert f"    trimcp {command}" in result.stdout
    assert "Examples:" in result.stdout
    assert "Exit codes:" in result.stdout
    timed = "124  the time given by --timeout is over" in result.stdout
    assert timed is (command in ("inspect", "call", "read", "prompt", "shell"))
    assert ("the tool itself reported an error" in result.stdout) is (command == "call")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_each_example_can_be_typed(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    examples = re.findall(r"^    trimcp (.+)$", trimcp(*command.split(), "--help").stdout, re.MULTILINE)
    assert examples
    for example in examples:
        name, *words = (os.path.expanduser(word) for word in shlex.split(example))
        for word in words:
            if re.fullmatch(r"\w+\.(py|toml|txt|jsonl)", word):
                Path(word).touch()
        assert command in ("", name)
        COMMANDS[name].make_context(name, words)


def test_help_lists_all_commands_in_whole_sentences() -> None:
    result = trimcp("-h")
    assert re.findall(r"^  (\w+) +[A-Z][^.]+\.$", result.stdout, re.MULTILINE) == list(COMMANDS)
    assert trimcp("--version").stdout.startswith("trimcp, version ")


@pytest.mark.parametrize("command", COMMANDS)
def test_values_of_options_are_named_in_one_form(command: str) -> None:
    for option in COMMANDS[command].params:
        if isinstance(option, click.Option) and not option.is_flag:
            metavar = option.make_metavar(click.Context(COMMANDS[command]))
            assert re.fullmatch(r"[A-Z]+|NAME=VALUE|\[=FILE\]|\[[a-z]+(\|[a-z]+)+\]", metavar), (option.name, metavar)


def test_one_name_of_an_option_means_one_thing() -> None:
    """What says the same is the same: whether it takes a value, and of which kind."""
    kinds: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for option in command.params:
            if isinstance(option, click.Option):
                value = "" if option.is_flag else option.make_metavar(click.Context(command))
                for name in option.opts:
                    kinds.setdefault(name, set()).add(value)
    # A host is an address that a server has, and a program that uses servers: both are what the field calls them.
    known = {"--reply": kinds["--reply"], "--host": {"ADDRESS", "NAME"}}
    assert {name: kind for name, kind in kinds.items() if len(kind) > 1} == known
    assert [name for name, command in COMMANDS.items() if any("--json" in each.opts for each in command.params)] == [
        *("whoami", "inspect", "call", "read", "prompt", "shell", "bench", "hosts", "ps", "top")
    ]


@pytest.mark.parametrize("command", ["run", "bench"])
def test_many_options_stand_in_sections(command: str) -> None:
    found = COMMANDS[command]
    assert isinstance(found, Subcommand)
    named = [name for names in found.sections.values() for name in names]
    assert len(named) == len(set(named))
    assert max(map(len, found.sections.values())) < 20
    shown = trimcp(command, "--help").stdout
    assert [title for title in found.sections if f"\n{title}:\n" not in shown] == []
    rest = shown.partition("\nOther options:\n")[2].partition("\n\n")[0]
    assert len(rest.splitlines()) <= 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["call", "https://", "t"], "names a host"),
        (["call", SERVER, "t", "--header", "X-Key: 1"], "headers are sent to a URL"),
        (["call", "https://x.example/mcp", "t", "--header", "word"], "write a header as 'Name: value'"),
        (["call", "https://x.example/mcp", "t", "--header", "a b: c"], "cannot be the name of a header"),
        (["inspect", "https://x.example/mcp", "--bearer", "NOT_SET_ANYWHERE"], "there is no such variable"),
        (["inspect", "ws://x.example/ws", "--header", "Upgrade: ${NOT_SET_ANYWHERE}"], "which is not set"),
        (["call", "--timeout", "0", "x", "t"], "--timeout"),
        (["call", "--revision", "1999-01-01", "x", "t"], "--revision"),
        (["call", "x"], "Missing argument 'TOOL'"),
        (["inspect"], "Missing argument 'TARGET'"),
        (["call", SERVER, "add", "a=1", "--arguments", "{}"], "either as NAME=VALUE or with --arguments"),
        (["call", SERVER, "add", "--arguments", "[1]"], "must be an object"),
        (["call", SERVER, "add", "--arguments", "{"], "not valid JSON"),
        (["prompt", SERVER, "greet", "word"], "write name=value"),
        (["run", "no_such_file.py"], "there is no file no_such_file.py"),
        (["demo", "no-such-directory"], "does not exist"),
    ],
)
def test_a_wrong_command_line_ends_with_two_and_advice(words: list[str], told: str) -> None:
    result = trimcp(*words)
    assert result.exit_code == 2
    assert told in result.stderr


def test_words_too_many_say_how_a_command_line_is_given() -> None:
    result = trimcp("inspect", "python", "server.py")
    assert result.exit_code == 2
    assert "in quotes, as one word, or last, after --" in result.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [("import not_there_either", "ModuleNotFoundError: No module named 'not_there_either'"), ("def (", "SyntaxError")],
)
def test_a_module_that_fails_shows_its_own_traceback_only(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "failing.py"
    file.write_text(text)
    result = trimcp("run", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {file} cannot be loaded, it fails by itself:")
    assert told in result.stderr
    assert "trimcp/cli" not in result.stderr
    assert "importlib" not in result.stderr


def test_a_silent_server_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "_SILENCE", 0.2)
    result = trimcp("inspect", "--timeout", "1", f"{sys.executable} -c 'input(); input(); input()'")
    assert result.exit_code == 124
    assert "still waiting for the server's first answer; Ctrl-C gives up" in result.stderr


def test_without_click_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['click'] = None; import trimcp.cli; trimcp.cli.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert 'click, which is not installed: pip install "trimcp[cli]"' in done.stderr
    assert done.stdout == ""


LEFT_OPEN = """
import gc, sys, trimcp
file = open(sys.argv[1], "w")
file.write(f"{gc.get_freeze_count() > 10_000} {gc.isenabled()}")
server = trimcp.Server("forgetful")
"""


def test_the_end_is_quick_and_still_writes_what_a_server_left_open(tmp_path: Path) -> None:
    server, file = tmp_path / "server.py", tmp_path / "file"
    server.write_text(LEFT_OPEN)
    command = [*TRIMCP, "run", str(server), "--", str(file)]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, cwd=ROOT, check=True)
    assert file.read_text() == "True True"


def test_the_collector_can_be_told_to_look_seldom(tmp_path: Path) -> None:
    server, file = tmp_path / "server.py", tmp_path / "file"
    server.write_text(
        "import atexit, gc, sys, trimcp\n"
        "server = trimcp.Server('patient')\n"
        "atexit.register(lambda: open(sys.argv[1], 'w').write(f'{gc.get_threshold()[0]} {gc.isenabled()}'))\n"
    )
    ask = [sys.executable, "-c", "import gc; print(gc.get_threshold()[0])"]  # the tests have another one
    usual = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    for words, expected in ((("--gc-threshold", "20000"), "20000 True"), ((), f"{usual} True")):
        command = [*TRIMCP, "run", str(server), *words, "--", str(file)]
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, cwd=ROOT, check=True)
        assert file.read_text() == expected


INTERRUPTED_IMPORT = """
import sys, trimcp.cli
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
trimcp.cli.main()
"""


def test_ctrl_c_while_it_starts_ends_it_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    file = tmp_path / "slow.py"
    file.write_text("raise KeyboardInterrupt")
    done = subprocess.run([*TRIMCP, "run", str(file), "--http"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Error: interrupted\n")


# Conversations


@pytest.mark.usefixtures("near")
def test_inspect_shows_everything_made_harmless() -> None:
    result = trimcp("inspect", SERVER)
    assert result.exit_code == 0, result.stderr
    for shown in [
        "for the command 1.0",
        f"speaks {LATEST.name}; declares tools, resources (subscribe), prompts, completions, logging",
        "  Be \\x1b[31mkind\\x1b[0m.",
        "  add: Add two numbers.",
        "      a (integer, required)",
        "      b (number, default 0.5)",
        "      size (small | large, default small)",
        "      tags (list of string or null, default null)",
        "  notes:///today: What is to be done.",
        "      text/plain",
        "  greet: Greet somebody.",
        "      name (required)\n          choices: Ada, Grace\\x1b[2J",
        "      tone\n",
    ]:
        assert shown in result.stdout
    assert "\x1b" not in result.stdout


async def test_choices_of_a_prompt_are_asked_for_within_bounds(autojump_clock: object) -> None:
    server = Server("slow to choose")
    asked: list[str] = []

    @server.prompt
    def pick(quick: str, none: str, broken: str, slow: str, late: str) -> str:
        """Pick."""
        return ""

    def choices(argument: str) -> None:
        async def suggest(typed: str) -> list[str]:
            asked.append(argument)
            if argument == "broken":
                raise ErrorReply(INVALID_PARAMS, "no")
            if argument == "slow":
                await trio.sleep(60)
            return [] if argument == "none" else [f"{number}" for number in range(130)]

        server.complete(pick, argument)(suggest)

    for argument in ("quick", "none", "broken", "slow", "late"):
        choices(argument)

    async with connected(server) as session:
        offer = await take_stock(session)
        assert (offer.choices, asked) == ({}, [])
        began = trio.current_time()
        offer = await take_stock(session, choices=True)
        assert trio.current_time() - began == pytest.approx(5.0)
        assert asked == ["quick", "none", "broken", "slow"]
        assert list(offer.choices) == [("pick", "quick")]
        lines = [line for line, _ in describe(session, offer)]
        assert "          choices: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 120 more" in lines


def test_inspect_prints_json_for_programs() -> None:
    result = trimcp("inspect", "--json", "--revision", V2024_11_05.name, "--", sys.executable, SERVER)
    offer = json.loads(result.stdout)
    assert offer["protocolVersion"] == V2024_11_05.name
    assert offer["serverInfo"] == {"name": "for the command", "version": "1.0"}
    (add,) = [tool for tool in offer["tools"] if tool["name"] == "add"]
    assert add["inputSchema"]["required"] == ["a"]
    assert "outputSchema" not in add
    assert [prompt["name"] for prompt in offer["prompts"]] == ["greet"]
    assert result.stdout.isascii()


def test_call_reads_values_as_the_schema_says() -> None:
    result = trimcp("call", SERVER, "add", "a=2", "b=1e1", "size=large", "tags=5", "tags=x", "loud=true")
    assert (result.exit_code, result.stdout) == (0, "12.0 large ['5', 'x'] True\n")


@pytest.mark.usefixtures("near")
def test_call_takes_json_from_standard_input_and_gives_json() -> None:
    result = trimcp("call", SERVER, "add", "--arguments", "-", "--json", stdin='{"a": 1}')
    assert json.loads(result.stdout)["content"] == [{"type": "text", "text": "1.5 small None False"}]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["add", "a=two"], 2, "a must be a whole number, not 'two'"),
        (["ad", "a=2"], 2, "no tool 'ad'; did you mean add?"),
        (["zzz"], 2, "no tool 'zzz'; it has add, slow, stubborn"),
        (["fail"], 1, "it did \\x1b[5mnot work"),
        (["add"], 1, "lacks the required property 'a'"),
        (["add", "a:=18446744073709551617"], 2, "JSON cannot carry this value: Integer exceeds 64-bit range"),
        (["add", "--revision", V2025_03_26.name], 4, "(code -32602)"),
        (["slow", f"file={os.devnull}", "--timeout", "0.5"], 124, "the server was told to stop"),
    ],
)
@pytest.mark.usefixtures("near")
def test_what_goes_wrong_has_its_exit_code_and_is_explained(words: list[str], code: int, told: str) -> None:
    result = trimcp("call", SERVER, *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert told in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("no-such-program-anywhere", "no program of that name"),
        (f"{sys.executable} -c 'import sys; sys.exit(\"my last words\")'", "my last words"),
    ],
)
def test_no_connection_ends_with_three_and_the_reason(target: str, told: str) -> None:
    result = trimcp("inspect", target)
    assert result.exit_code == 3
    assert told in result.stderr


def test_what_a_server_says_reaches_the_terminal_harmless() -> None:
    result = trimcp("call", SERVER, "chatter")
    assert result.stdout == "[bold]plain[/bold] \\x9b31m text\n"
    assert "[warning a\\u202eb] careful \\x1b[2J" in result.stderr
    assert "server: a stray print \\x1b[31m" in result.stderr
    assert "\x1b" not in result.stderr


def test_quiet_shows_the_result_only() -> None:
    result = trimcp("call", "-q", SERVER, "chatter")
    assert (result.stdout, result.stderr) == ("[bold]plain[/bold] \\x9b31m text\n", "")


@pytest.mark.usefixtures("near")
def test_a_resource_and_a_prompt_are_printed() -> None:
    result = trimcp("read", SERVER, "notes:///today")
    assert (result.exit_code, result.stdout) == (0, "milk \\x07\nbread\n")
    result = trimcp("prompt", SERVER, "greet", "name=Ada", "tone=cool")
    assert (result.exit_code, result.stdout) == (0, "user:\nGreet Ada, cool.\n")


def test_the_trace_shows_every_message_or_keeps_it(tmp_path: Path) -> None:
    result = trimcp("read", "--trace", SERVER, "notes:///tomorrow")
    assert '--> {"jsonrpc":"2.0","id":1,"method":"server/discover"' in result.stderr
    assert '<-- {"jsonrpc":"2.0","id":2,"error"' in result.stderr
    assert result.exit_code == 4
    file = tmp_path / "trace.txt"
    result = trimcp("inspect", f"--trace={file}", FAILS)
    assert '"method":"server/discover"' in file.read_text()
    assert "exited with status 1" in result.stderr


def test_the_environment_asks_for_a_trace_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMCP_TRACE", "1")
    assert '--> {"jsonrpc":"2.0","id":1,"method":"server/discover"' in trimcp("inspect", FAILS).stderr


# Processes


NOT_YET = "the server was told to stop, and has not ended yet; Ctrl-C again ends this at once\n"


def test_ctrl_c_cancels_the_call_at_the_server(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with started("call", SERVER, "slow", f"file={file}") as process:
        assert process.stderr is not None
        shown = process.stderr.readline()  # the server may be further than what is shown of it
        wait_for(file, "begun")
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert file.read_text() == "begun\nended: cancelled by peer\n"
    assert (process.returncode, out) == (130, "")
    assert "half \\x1b]0;title\\x07 way" in shown
    assert err.endswith("Error: interrupted; the server was told to stop\n")


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with started("call", SERVER, "stubborn", f"file={file}") as process:
        wait_for(file, "begun")
        os.kill(process.pid, signal.SIGINT)
        wait_for(file, "holding on")
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    # Nothing more is said, and nobody waits for the server, which sees the end of its input.
    assert (process.returncode, out) == (130, "")
    assert err in ("", NOT_YET), "the line only if this machine was slow"


def test_a_line_says_what_is_waited_for_after_ctrl_c(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with started("call", SERVER, "stubborn", f"file={file}") as process:
        assert process.stderr is not None
        wait_for(file, "begun")
        os.kill(process.pid, signal.SIGINT)
        assert process.stderr.readline() == NOT_YET
        os.kill(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of POSIX systems")
def test_progress_is_a_bar_on_a_terminal(tmp_path: Path) -> None:
    file = tmp_path / "log"
    screen, line = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with started("call", SERVER, "slow", f"file={file}", stderr=line, env=environment) as process:
        os.close(line)
        shown = read_until(screen, "half")
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        shown += read_until(screen, "Error: interrupted")
    os.close(screen)
    assert (process.returncode, out) == (143, "")
    assert "1/10" in shown
    assert "half \\x1b]0;title\\x07 way" in shown
    assert "\x1b]0;" not in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is hidden and shown again"


def read_until(terminal: int, text: str) -> str:
    """Read from a pseudo-terminal until a text was shown."""
    shown = b""
    while text.encode() not in shown:
        shown += os.read(terminal, 65_536)
    return shown.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of POSIX systems")
def test_run_says_on_a_terminal_what_it_waits_for() -> None:
    keyboard, line = os.openpty()
    with started("run", SERVER, stdin=line) as process:
        os.close(line)
        os.write(keyboard, b"\x04")  # Ctrl-D
        out, err = process.communicate(timeout=60)
    os.close(keyboard)
    assert (process.returncode, out) == (0, "")
    assert err.splitlines() == [
        "for the command waits for a client that writes JSON-RPC to its standard input; Ctrl-C ends it.",
        f"Clients start it themselves: trimcp inspect {SERVER}. To have it wait for them, add --http.",
    ]
    done = subprocess.run([*TRIMCP, "run", SERVER], stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_question_without_a_terminal_is_declined() -> None:
    with started("call", SERVER, "ask", stdin=subprocess.DEVNULL) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "decline\n")
    assert "The server asks: Who?" in err


def test_run_lets_calls_answer_before_it_ends(tmp_path: Path) -> None:
    file = tmp_path / "log"
    messages = [
        {
            "jsonrpc": "2.0",
            "id": 0,
            "method": "initialize",
            "params": {
                "protocolVersion": V2024_11_05.name,
                "capabilities": {},
                "clientInfo": {"name": "t", "version": "1"},
            },
        },
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {"name": "short", "arguments": {"file": str(file), "seconds": 1.0}},
        },
    ]
    with started("run", f"{SERVER}:make", "--trace", "--", "argument") as process:
        assert process.stdin is not None
        process.stdin.writelines(json.dumps(message) + "\n" for message in messages)
        process.stdin.flush()
        wait_for(file, "begun")
        os.kill(process.pid, signal.SIGTERM)
        # The input stays open: a client that closes it too gives its calls only the shorter grace of that.
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
        process.wait(timeout=60)
    replies = [json.loads(line) for line in out.splitlines()]
    assert [reply["id"] for reply in replies] == [0, 1]
    assert replies[1]["result"]["content"][0]["text"] == "finished in time"
    assert process.returncode == 0
    assert "Traceback" not in err
    assert '<-- {"jsonrpc":"2.0","id":1,"method":"tools/call"' in err


def test_the_demonstration_leaves_nothing_behind(tmp_path: Path) -> None:
    # So long that each takes the server more than its progress takes the client, which then leaves before the end.
    for number in range(600):
        (tmp_path / f"module_{number:04}.py").write_text("import this\n\n" * 100)
    result = trimcp("demo", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert "600 files with 120,000 lines" in result.stdout
    assert "left at file 300 of 600" in result.stdout
    stopped = re.search(r"1 cancelled at file (\d+) of 600: cancelled by peer", result.stdout)
    assert stopped is not None, result.stdout
    assert 300 <= int(stopped[1]) < 600, "how far it came before it heard depends on the machine, but not to the end"
    assert "searches running there now: 0; files it read in the last 0.5 s: 0" in result.stdout
    assert "tasks left: 0, the server exited with 0" in result.stdout


def test_a_demonstration_on_nothing_says_so(tmp_path: Path) -> None:
    result = trimcp("demo", str(tmp_path))
    assert result.exit_code == 2
    assert "name another directory" in result.stderr


def test_a_timeout_bounds_connecting_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only what comes after it: a server that is downloaded first may need more than the client's own patience."""
    monkeypatch.setattr(conversation, "Client", partial(Client, connect_timeout=0.05))
    result = trimcp("inspect", "--timeout", "60", shlex.join([sys.executable, str(SERVER)]))
    assert result.exit_code == 0, result.output


# As those on the Python SDK 1.0 to 1.8: what comes before `initialize` ends its loop, and the next line the process.
FRAGILE = """
import json, sys
first = True
for line in sys.stdin:
    message = json.loads(line)
    if first and message["method"] != "initialize":
        sys.stdin.readline()
        sys.exit("the loop had ended")
    first = False
    info = {"name": "fragile", "version": "1"}
    if message["method"] == "initialize":
        result = {"protocolVersion": "2024-11-05", "capabilities": {}, "serverInfo": info}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


@pytest.mark.parametrize("how", ["as it is", "--legacy", "entry"])
def test_a_server_that_breaks_on_what_came_after_its_time(how: str, tmp_path: Path) -> None:
    target, words = shlex.join([sys.executable, "-c", FRAGILE]), []
    if how == "--legacy":
        words.append(how)
    elif how == "entry":
        entry = {"command": sys.executable, "args": ["-c", FRAGILE], "revision": "2025-06-18"}
        target = str(tmp_path / "servers.json")
        Path(target).write_text(json.dumps({"mcpServers": {"old": entry}}))
    result = trimcp("inspect", "--trace", *words, target)
    assert result.exit_code == 0, result.output
    assert "speaks 2024-11-05" in result.stdout
    # It is started once more only where nothing was said of it.
    assert ("server/discover" in result.stderr) is (how == "as it is")
    if how == "entry":
        assert '"protocolVersion":"2025-06-18"' in result.stderr


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without --timeout: the client's own patience ends, with a line instead of a traceback."""
    monkeypatch.setattr(conversation, "Client", partial(Client, connect_timeout=0.05))
    result = trimcp("inspect", shlex.join([sys.executable, "-c", "import sys; sys.stdin.read()"]))
    assert result.exit_code == 124
    # On a busy machine not even the first of its two questions is over by then.
    assert re.search(r"the server did not answer (server/discover|initialize) within 0\.05 seconds", result.output)


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("ins", ["plain,inspect", "plain,install"]),
        ("run --grpc", ["plain,--grpc"]),
        ("call wea", ["file,wea"]),
        ("run wea", ["file,wea"]),
        ("install weather.py --host claude", ["plain,claude-desktop", "plain,claude-code"]),
    ],
)
def test_a_shell_completes_commands_options_values_and_files(
    typed: str, completed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"trimcp {typed}"
    asked = {
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
        "_TRIMCP_COMPLETE": "bash_complete",
    }
    found = CliRunner().invoke(app, [], prog_name="trimcp", env=asked)
    assert found.output.splitlines() == completed
