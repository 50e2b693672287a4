"""Programs as tools: what reaches them, what comes of their end, and that nothing of them is left."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import trimcp
from tests.workers.test_pool import lives, until
from trimcp.testing import connected
from trimcp.wire.fields import ABSENT
from trimcp.wire.tools import CallToolResult
from trimcp.workers import commands
from trimcp.workers.commands import Command

TOLD = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv[1:],
    "stdin": sys.stdin.read(),
    "environment": dict(os.environ),
    "directory": os.getcwd(),
    "files": os.listdir(),
    "session": os.getsid(0) == os.getpid(),
}))
"""
"""Says all that a program learns."""


@pytest.fixture
def told(tmp_path: Path) -> list[str]:
    script = tmp_path / "told.py"
    script.write_text(TOLD)
    return [sys.executable, str(script)]


async def call(command: list[str], arguments: Mapping[str, Any] | None = None, **options: Any) -> CallToolResult:
    server = trimcp.Server("s")
    server.add_command("tool", command, **options)
    async with connected(server) as session:
        return await session.call_tool("tool", arguments or {})


async def ask(command: list[str], arguments: Mapping[str, Any] | None = None, **options: Any) -> Any:
    result = await call(command, arguments, **options)
    assert not result.is_error, result.text
    return json.loads(result.text)


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(text)
    return [sys.executable, str(path)]


# Arguments

NASTY = "; touch owned; $(touch owned) `touch owned` | cat > owned && * ? ~ ${HOME} \\ ' \" \n %s {other} é \u202e"


async def test_what_a_shell_would_read_is_one_argument(told: list[str]) -> None:
    said = await ask([*told, "{first}", "--second={second}", "fixed"], {"first": NASTY, "second": NASTY})
    assert said["argv"] == [NASTY, f"--second={NASTY}", "fixed"]
    assert said["files"] == []


async def test_the_schema_is_one_text_to_a_placeholder(told: list[str]) -> None:
    server = trimcp.Server("s")
    server.add_command("tool", [*told, "{first}", "x{second}y{first}"], stdin="{third}", title="A tool")
    async with connected(server) as session:
        (tool,) = await session.list_tools()
        assert (tool.name, tool.title) == ("tool", "A tool")
        text = {"type": "string"}
        assert tool.input_schema["properties"] == {"first": text, "second": text, "third": text}
        assert tool.input_schema["required"] == ["first", "second", "third"]
        result = await session.call_tool("tool", {"first": "a", "second": "b"})
        assert result.is_error
        assert "third" in result.text


@pytest.mark.parametrize("value", ["-rf", "--output=/etc/passwd", "-"])
async def test_a_value_is_no_option(told: list[str], value: str) -> None:
    result = await call([*told, "-e", "{what}"], {"what": value})
    assert result.is_error
    assert result.text == "what must not begin with '-': the program would take it for an option"
    result = await call([*told, "{empty}{what}"], {"empty": "", "what": value})
    assert result.is_error


async def test_a_value_may_look_like_one_where_it_cannot_be_one(told: list[str]) -> None:
    said = await ask([*told, "-e{what}", "--", "{what}", "{what}"], {"what": "-rf"})
    assert said["argv"] == ["-e-rf", "--", "-rf", "-rf"]


async def test_two_dashes_protect_no_program_behind_them(told: list[str]) -> None:
    """As in `env -- git log {what}`."""
    result = await call([*told, "--", "git", "{what}"], {"what": "-rf"})
    assert result.is_error


async def test_numbers_truths_and_nothing(told: list[str]) -> None:
    kinds = {name: {"type": kind} for name, kind in (("n", "integer"), ("x", "number"), ("t", "boolean"))}
    schema = {"type": "object", "properties": {**kinds, "gone": {}, "null": {}}}
    command = [*told, "{n}", "{x}", "{t}", "--gone={gone}", "{null}", "--", "{n}"]
    said = await ask(command, {"n": 5.0, "x": 0.5, "t": True, "null": None}, input_schema=schema)
    assert said["argv"] == ["5", "0.5", "true", "--", "5"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\0b", "what must not contain the character U+0000"),
        ("\ud800", "what is no valid text: it holds half a surrogate pair"),
        (["a"], "what cannot be an argument of a program: it is neither text nor a number"),
        ({}, "what cannot be an argument of a program: it is neither text nor a number"),
    ],
)
async def test_what_no_argument_can_be(told: list[str], value: object, text: str) -> None:
    command = Command([*told, "{what}"])
    with pytest.raises(trimcp.ToolError) as caught:
        await command({"what": value})
    assert str(caught.value) == text


async def test_arguments_that_the_system_refuses(told: list[str]) -> None:
    result = await call([*told, "{what}"], {"what": "x" * 3_000_000})
    assert result.is_error
    assert result.text == "the arguments are too long for python" + result.text.rpartition("python")[2]


async def test_braces_that_are_no_placeholders(told: list[str]) -> None:
    said = await ask([*told, "{print $1}", "{}", "{{name}}", "{{a:{b c}}}", "x{{name}}{name}"], {"name": "n"})
    assert said["argv"] == ["{print $1}", "{}", "{name}", "{{a:{b c}}}", "x{name}n"]


async def test_a_function_may_refuse_arguments(told: list[str]) -> None:
    def validate(arguments: dict[str, Any]) -> None:
        if arguments["path"].startswith("/"):
            raise ValueError("path must be relative")

    assert (await ask([*told, "{path}"], {"path": "a"}, validate=validate))["argv"] == ["a"]
    result = await call([*told, "{path}"], {"path": "/etc"}, validate=validate)
    assert result.is_error
    assert "path must be relative" in result.text


# Input

EVERYTHING = {"type": "object"}


async def test_without_placeholders_the_arguments_are_on_standard_input(told: list[str]) -> None:
    arguments = {"text": "é\n", "list": [1, {"a": None}]}
    said = await ask(told, arguments, input_schema=EVERYTHING)
    assert json.loads(said["stdin"]) == arguments
    assert said["argv"] == []


async def test_with_placeholders_there_is_no_input(told: list[str]) -> None:
    assert (await ask([*told, "{a}"], {"a": "x"}))["stdin"] == ""
    assert json.loads((await ask([*told, "{a}"], {"a": "x"}, stdin="json"))["stdin"]) == {"a": "x"}
    assert (await ask(told, stdin=None))["stdin"] == ""


async def test_one_argument_is_the_input(told: list[str]) -> None:
    said = await ask([*told, "{a}"], {"a": "x", "text": "-line\n" * 50_000}, stdin="{text}")
    assert said["stdin"] == "-line\n" * 50_000


@pytest.mark.needs("coreutils")
async def test_a_program_need_not_read_its_input() -> None:
    assert not (await call(["true"], {"text": "x" * 1_000_000}, stdin="{text}")).is_error


# Environment and directory


def exists(path: str) -> bool:
    return os.path.lexists(path)


async def test_the_environment_does_not_leak(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"API_TOKEN": "secret", "LANG": "() { evil; }", "TZ": "UTC", "OTHER": "o", "HOME": "/h"}.items():
        monkeypatch.setenv(name, value)
    said = await ask(told)
    environment = said["environment"]
    allowed = {*commands.INHERITED, "HOME", "TMPDIR", "TRIMCP_CHILD", "LC_CTYPE"}  # the last is set by Python
    assert set(environment) <= allowed
    assert environment["TZ"] == "UTC"
    assert "LANG" not in environment
    assert environment["HOME"] == environment["TMPDIR"] == said["directory"]

    said = await ask(told, inherit_env=["OTHER"], env={"MINE": "m", "HOME": "/there"})
    assert {name: said["environment"].get(name) for name in ("OTHER", "MINE", "HOME", "TZ", "PATH")} == {
        "OTHER": "o",
        "MINE": "m",
        "HOME": "/there",
        "TZ": None,
        "PATH": None,
    }


async def test_each_call_has_a_directory_of_its_own(told: list[str]) -> None:
    first, second = [await ask(told) for _ in range(2)]
    assert first["files"] == second["files"] == []
    assert first["directory"] != second["directory"]
    assert not exists(first["directory"])
    assert first["session"]


@pytest.mark.needs("coreutils")
async def test_a_directory_is_removed_whatever_is_in_it(tmp_path: Path) -> None:
    """Files, links to what is elsewhere, and directories that it may not be looked into."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    lines = "mkdir -p a/b c; touch a/b/f; ln -s ELSEWHERE link; ln -s ELSEWHERE a/link; chmod 0 a/b a c .; pwd"
    own = (await call(["sh", "-c", lines.replace("ELSEWHERE", str(elsewhere))])).text.strip()
    assert own.startswith("/")
    assert not exists(own)
    assert (elsewhere / "kept").exists()
    assert elsewhere.stat().st_mode & 0o777 == 0o755


def test_rights_are_taken_back_before_a_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root needs no rights, so the first attempt has to fail for it, too."""
    closed = tmp_path / "own" / "closed"
    (closed / "in it").mkdir(parents=True)
    closed.chmod(0)
    remove = shutil.rmtree
    tried: list[int] = []

    def rmtree(path: str) -> None:
        tried.append(closed.stat().st_mode & 0o777)
        if len(tried) == 1:
            raise PermissionError
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    commands._remove(str(tmp_path / "own"))
    assert tried == [0, 0o700]
    assert not closed.exists()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


async def test_a_given_directory_stays(told: list[str], tmp_path: Path) -> None:
    said = await ask(told, cwd=tmp_path)
    assert said["directory"] == str(tmp_path)
    assert said["environment"]["TMPDIR"] != str(tmp_path)
    assert tmp_path.is_dir()  # noqa: ASYNC240  # nothing else runs


# Results


@pytest.mark.needs("coreutils")
async def test_text_is_a_result_as_it_is() -> None:
    result = await call(["printf", "%s", "{text}"], {"text": " a\n\n"})
    assert (result.text, result.is_error) == (" a\n\n", False)
    assert result.structured_content is ABSENT


@pytest.mark.needs("coreutils")
async def test_json_is_parsed_and_checked() -> None:
    promised = {"type": "object", "properties": {"a": {"type": "integer"}}}
    result = await call(["cat"], {"a": 5}, input_schema=EVERYTHING, output="json", output_schema=promised)
    assert result.structured_content == {"a": 5}
    result = await call(["cat"], {"a": 5}, input_schema=EVERYTHING, output="json")
    assert json.loads(result.text) == {"a": 5}
    with pytest.raises(trimcp.RemoteError, match="internal error"):
        await call(["cat"], {"a": "x"}, input_schema=EVERYTHING, output="json", output_schema=promised)
    result = await call(["echo", "no json"], output="json")
    assert result.is_error
    assert result.text.startswith("the output of echo is no JSON: ")


@pytest.mark.needs("coreutils")
async def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert (await call(["printf", r"a\377b"])).text == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.needs("coreutils")
async def test_a_failure_tells_status_and_the_end_of_standard_error() -> None:
    result = await call(["sh", "-c", r"yes wrong | head -c 100000 >&2; printf '\033[2Jlast' >&2; echo out; exit 7"])
    assert result.is_error
    assert result.text.startswith("sh failed with exit status 7: ...")
    assert result.text.endswith(r"\x1b[2Jlast")
    assert len(result.text) < 2_200


@pytest.mark.needs("coreutils")
async def test_a_failure_without_words_on_standard_error_shows_the_output() -> None:
    assert (await call(["sh", "-c", "echo 1 failed; exit 1"])).text == "sh failed with exit status 1: 1 failed"
    assert (await call(["false"])).text == "false failed with exit status 1"


@pytest.mark.needs("grep")
async def test_statuses_that_are_no_errors(tmp_path: Path) -> None:
    """As grep's, which found nothing."""
    (tmp_path / "f").touch()
    command = ["grep", "--", "{what}", str(tmp_path / "f")]
    assert (await call(command, {"what": "x"})).is_error
    result = await call(command, {"what": "x"}, success=(0, 1))
    assert (result.is_error, result.text) == (False, "")


async def test_a_signal_is_named() -> None:
    assert (await call(["sh", "-c", "kill -SEGV $$"])).text == "sh was ended by SIGSEGV"


# Bounds


@pytest.mark.needs("coreutils")
async def test_output_is_bounded() -> None:
    with trio.fail_after(30):
        result = await call(["yes"], max_output=100_000)
    assert result.text == "yes wrote more than 100000 bytes of output, and was ended"
    assert len((await call(["head", "-c", "100000", "/dev/zero"], max_output=100_000)).text) == 100_000
    assert (await call(["head", "-c", "100001", "/dev/zero"], max_output=100_000)).is_error


@pytest.mark.needs("coreutils")
async def test_errors_are_read_without_end_and_kept_in_part() -> None:
    result = await call(["sh", "-c", "head -c 50000000 /dev/zero | tr '\\0' x >&2; exit 1"])
    assert len(result.text) < 2_200


@pytest.mark.needs("prlimit")
async def test_memory_and_processor_time_are_bounded(tmp_path: Path) -> None:
    result = await call(script(tmp_path, "bytearray(2**30)"), memory=2**29)
    assert result.is_error
    assert "MemoryError" in result.text
    result = await call(script(tmp_path, "while True: pass"), cpu_time=0.5)
    assert result.text.endswith("used more than 0.5 s of processor time")


async def test_as_many_run_at_once_as_there_are_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimcp.server.commands.cores", lambda: 2)
    began = script(tmp_path, "import os, sys, time\nopen(sys.argv[1] + '/' + str(os.getpid()), 'w')\ntime.sleep(600)")
    log = tmp_path / "log"
    log.mkdir()
    server = trimcp.Server("s")
    server.add_command("tool", [*began, str(log)])
    async with connected(server) as session, trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(session.call_tool, "tool")
        await until(lambda: len(list(log.iterdir())) == 2)
        (running,) = server.runs
        assert running.pools.quotas()["tool tool"].waiting == 2
        assert len(list(log.iterdir())) == 2
        nursery.cancel_scope.cancel()


# The end

FAMILY = """
import os, sys, time
def note():
    with open(sys.argv[1], "a") as file:
        file.write("%d\\n" % os.getpid())
note()
if os.fork() == 0:  # in the group
    note()
    time.sleep(600)
if os.fork() == 0:  # in a session of its own, and its parent is gone
    os.setsid()
    if os.fork() == 0:
        note()
        time.sleep(600)
    os._exit(0)
"""
"""Notes the ids of three processes; the first goes on as the test appends."""


def ids(file: Path, count: int) -> list[int]:
    """The ids once there are so many whole lines, else none."""
    text = file.read_text() if file.exists() else ""
    return [int(line) for line in text.split()] if text.count("\n") >= count else []


async def test_cancelling_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    server = trimcp.Server("s")
    server.add_command("tool", [*script(tmp_path, FAMILY + "time.sleep(600)"), str(file)])
    async with connected(server) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.call_tool, "tool")
        await until(lambda: ids(file, 3))
        family = ids(file, 3)
        assert all(map(lives, family))
        nursery.cancel_scope.cancel()
    await until(lambda: not any(map(lives, family)))


async def test_a_timeout_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    await out_of_time([*script(tmp_path, deaf + FAMILY + "time.sleep(600)"), str(file)], lambda: ids(file, 3), file)
    assert len(ids(file, 3)) == 3
    assert not any(map(lives, ids(file, 3)))


async def out_of_time(command: list[str], began: Callable[[], object], file: Path, **options: Any) -> None:
    """Let a program run into its timeout: the shortest in which this machine, busy as it is, gets it going."""
    for seconds in (1, 4, 16, 64):
        file.unlink(missing_ok=True)  # noqa: ASYNC240  # nothing else runs
        result = await call(command, timeout=seconds, **options)
        assert result.is_error
        assert result.text.endswith(f" did not finish within {seconds} seconds")
        if began():
            return
    pytest.fail("the program did not begin")


async def test_what_a_program_leaves_behind_is_killed_and_holds_nobody_up(tmp_path: Path) -> None:
    """Both hold the pipes open."""
    file = tmp_path / "ids"
    wait = "\nwhile open(sys.argv[1]).read().count('\\n') < 3: time.sleep(0.01)\nprint('done')"
    with trio.fail_after(30):
        result = await call([*script(tmp_path, FAMILY + wait), str(file)])
    assert result.text == "done\n"
    assert len(ids(file, 3)) == 3
    assert not any(map(lives, ids(file, 3)))


BOMB = """
import os, sys, time
deep = 0
while True:
    with open(sys.argv[1], "a") as file:
        file.write("%d\\n" % os.getpid())
    while deep == 6:
        time.sleep(0.01)
    os.fork()
    deep += 1
"""
"""Doubles until there are 64."""


async def test_a_tree_that_forks_and_forks_dies(tmp_path: Path) -> None:
    file = tmp_path / "ids"
    await out_of_time([*script(tmp_path, BOMB), str(file)], lambda: len(set(ids(file, 1))) == 64, file)
    family = set(ids(file, 1))
    assert len(family) == 64
    assert not any(map(lives, family))


@pytest.mark.needs("coreutils")
async def test_cancelling_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    """At every moment of the first milliseconds."""
    before = set(os.listdir("/proc/self/fd"))
    for moment in range(25):
        command = Command(["sleep", f"600.{os.getpid()}{moment}"])
        with trio.move_on_after(moment / 2_000):
            await command({})
    assert _running(f"600.{os.getpid()}") == []
    assert set(os.listdir("/proc/self/fd")) == before


def _running(word: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if word.encode() in line and lives(int(entry.name)):
                found.append(int(entry.name))
    return found


@pytest.mark.needs("coreutils")
async def test_in_virtual_time_it_runs_in_real_time(autojump_clock: trio.testing.MockClock, told: list[str]) -> None:
    """The test's clock would jump to the timeout meanwhile."""
    began = trio.current_time()
    assert (await ask([*told, "{a}"], {"a": "x"}))["argv"] == ["x"]
    assert trio.current_time() - began < 1
    assert (await call(["sleep", "600"], timeout=0.2)).text == "sleep did not finish within 0.2 seconds"


# What is refused when it is added


@pytest.mark.needs("coreutils")
@pytest.mark.parametrize(
    ("command", "options", "kind", "text"),
    [
        ("echo {a}", {}, TypeError, "a command is a list of texts"),
        ([], {}, TypeError, "a command is a list of texts"),
        (["echo", 5], {}, TypeError, "a command is a list of texts"),
        (["{program}", "x"], {}, TypeError, "cannot be a placeholder"),
        (["echo", "a\0"], {}, ValueError, "U\\+0000"),
        (["no-such-program-here"], {}, trimcp.LocalError, "'no-such-program-here' of a command is not installed"),
        (["echo", "{a}"], {"input_schema": {"type": "object"}}, TypeError, "is no property of input_schema"),
        (
            ["echo", "{a}"],
            {"input_schema": {"type": "object", "properties": {"a": {"type": "array"}}}},
            TypeError,
            "cannot be an array",
        ),
        (["echo"], {"isolation": "process"}, TypeError, "must be 'command' or 'bwrap', not 'process'"),
        (["echo"], {"output": "xml"}, TypeError, "output must be"),
        (["echo"], {"output_schema": {"type": "object"}}, TypeError, 'add output="json"'),
        (["echo"], {"stdin": "some text"}, TypeError, "stdin is 'json'"),
        (["echo"], {"read": ["/srv"]}, TypeError, 'add isolation="bwrap"'),
        (["echo"], {"timeout": 0}, ValueError, "timeout"),
        (["echo"], {"max_output": 0}, ValueError, "max_output"),
        (["echo"], {"shell": True}, TypeError, "there is no option 'shell'"),
        (["echo"], {"name": "other"}, TypeError, "the first argument"),
    ],
)
def test_what_cannot_be_a_command(command: Any, options: dict[str, Any], kind: type[Exception], text: str) -> None:
    server = trimcp.Server("s")
    with pytest.raises(kind, match=text):
        server.add_command("tool", command, **options)
    assert len(server.tools) == 0


@pytest.mark.needs("coreutils")
def test_bounds_need_a_program_to_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **options: None if name == "prlimit" else which(name, **options))
    with pytest.raises(trimcp.LocalError, match="need the program prlimit"):
        trimcp.Server("s").add_command("tool", ["true"], cpu_time=1)


@pytest.mark.needs("coreutils")
async def test_endless_processor_time_is_no_bound() -> None:
    assert (await call(["echo", "hey"], cpu_time=float("inf"))).text == "hey\n"
