"""What anybody else said: it controls no terminal and imitates no line of ours, whichever command shows it."""

from __future__ import annotations

import ast
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import trio
from click.testing import CliRunner

from tests.pages import ROOT
from trimcp.auth import Credentials, FileStore, Registration, StoreKey, Tokens
from trimcp.cli.app import app
from trimcp.cli.text import theirs

CLI = ROOT / "trimcp" / "cli"
HERE = Path(__file__).parent
ODD = "\x1b[2J\x07\u202e\u2028\x9b\r"
FORGED = "Error: all is lost"
BAD = f"bad{ODD}\n{FORGED}"

PRINTING = {"screen.py", "exits.py"}
"""The modules that print. What they print goes through `clean`, whatever it is."""


def prints(node: ast.Call) -> bool:
    """Whether a call prints."""
    name = ast.unparse(node.func)
    return name in ("print", "click.echo", "click.secho") or bool(
        re.search(r"std(out|err).write|(out|err).print", name)
    )


def test_two_modules_print() -> None:
    """Everybody else hands them what is to be printed."""
    found = set()
    for path in sorted(CLI.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and prints(node):
                found.add((path.relative_to(CLI).as_posix(), ast.unparse(node)))
    others = [each for each in found if each[0] not in PRINTING]
    assert sorted(name for name, _ in others) == ["__init__.py", "bench/run.py"], "what is not installed, JSON"


def test_the_modules_that_print_escape_all() -> None:
    for name in PRINTING:
        for node in ast.walk(ast.parse((CLI / name).read_text("utf-8"))):
            if isinstance(node, ast.Call) and (prints(node) or ast.unparse(node.func).endswith(".print")):
                said = ast.unparse(node.args[0])
                assert "clean(" in said or said.startswith("'\\x1b[?25h"), said


def test_others_texts_are_taken_by_one_function() -> None:
    """Nobody of the command escapes by other means; exceptions are the printing itself, and whole contents."""
    for path in sorted(CLI.rglob("*.py")):
        text = path.read_text("utf-8")
        name = path.relative_to(CLI).as_posix()
        assert ("one_line" in text) is (name == "text.py"), name
        errors = re.findall(r"Failure\(\s*(?:str\(error\)|f\"[^\"]*\{error\})", text)
        assert not errors or name in OURS, (name, errors)


OURS = {
    "bench/options.py": "what the user typed, or a file of theirs",
    "bench/run.py": "a LocalError, which is ours",
    "bench/team.py": "the system's error, and a ConnectionLost, which is ours",
    "bench/verdict.py": "what the user typed, and files of theirs",
    "conversation.py": "a timeout of our own",
    "hosts.py": "a file of the user's",
    "loading.py": "the user's own program",
    "recording.py": "a journal of the user's, and the system's error",
    "schemas.py": "what the user typed",
    "serve/network.py": "our own settings",
    "targets.py": "what the user typed, and files of theirs",
    "serve/worker.py": "our own settings, and files of the user's",
    "serve/reloading.py": "a LocalError, which is ours",
    "serve/run.py": "what the user typed",
    "shell.py": "what the user typed, and a timeout of our own",
}
"""Where an error is shown as it is, and whose words it has; `Failure` escapes them all the same."""


def test_a_text_of_theirs_is_one_line_or_lines_that_are_marked() -> None:
    assert theirs(BAD) == rf"bad\x1b[2J\x07\u202e\u2028\x9b {FORGED}"
    assert theirs(BAD, None) == r"bad\x1b[2J\x07\u202e\u2028\x9b" + f"\n  | {FORGED}"
    assert theirs("x" * 10_000, 50) == "x" * 49 + "…"


@attrs.frozen
class Done:
    """How a command ended, and all that came of it; `spoken` also what programs that it started wrote themselves."""

    code: int
    stdout: str
    stderr: str
    spoken: str


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in a home of its own, and in this process, for no word depends on that."""
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Done:
        capfd.readouterr()
        found = CliRunner().invoke(app, words, input="", prog_name="trimcp")
        return Done(found.exit_code, found.stdout, found.stderr, "".join((found.output, *capfd.readouterr())))

    return run


def check(done: Done) -> None:
    """Assert that nothing odd came through, and that no line of ours was forged."""
    assert "bad" in done.stdout + done.stderr, done
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", done.spoken), ascii(done)
    assert not [line for line in done.spoken.splitlines() if line.startswith(FORGED)], done.spoken


SERVER = str(HERE / "rude_server_for_cli.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("inspect", SERVER),
        ("inspect", "--json", SERVER),
        ("inspect", "--trace", SERVER),
        ("call", SERVER, "fails"),
        ("call", SERVER, "refuses"),
        ("call", SERVER, "asks"),
        ("bench", "--tool", "fails", "--seconds", "0.2", SERVER),
        ("bench", "--tool", "refuses", "--seconds", "0.2", "--json", SERVER),
        ("inspect", f"{sys.executable} -c 'import sys; sys.exit({BAD!r})'"),
        ("record", "journal", "--", sys.executable, "-c", f"import sys; sys.exit({BAD[: BAD.index(FORGED)]!r})"),
        ("inspect", BAD),
        ("login", f"http://127.0.0.1:1/{BAD}"),
        ("logout", f"http://127.0.0.1:1/{BAD}"),
    ],
    ids=lambda words: " ".join(words[:3])[:40].replace(SERVER, "SERVER"),
)
def test_every_command_shows_it_so(words: tuple[str, ...], run: Run) -> None:
    check(run(*words))


def test_contents_are_escaped_and_otherwise_as_they_are(run: Run) -> None:
    for words in (("call", SERVER, "says"), ("read", SERVER, "notes:///bad"), ("prompt", SERVER, "asked")):
        done = run(*words)
        assert done.code == 0, done.stderr
        assert done.stdout.endswith(f"\n{FORGED}\n"), "contents have lines"
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2028]", done.stdout), ascii(done.stdout)


@pytest.mark.slow
def test_logins_are_shown_one_in_a_line(run: Run) -> None:
    import base64

    claims = base64.urlsafe_b64encode(json.dumps({"sub": BAD}).encode()).decode().rstrip("=")
    tokens = Tokens(f"e30.{claims}.x", scopes=(BAD, "files:read"), expires_at=time.time() + 600)
    kept = Credentials("https://mcp.example/mcp", f"https://as.example/{BAD}", Registration("id"), tokens)

    async def keep() -> None:
        await FileStore().save(StoreKey("https://mcp.example/mcp", BAD), kept)

    trio.run(keep)
    done = run("whoami")
    assert done.code == 0, done.stderr
    check(done)
    assert len(done.stdout.splitlines()) == 1, done.stdout
    check(run("whoami", "--json"))
