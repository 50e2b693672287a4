"""`trimcp shell`: what lines do, at a terminal and from a pipe, and that one that fails ends nothing."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner, Result

from trimcp.cli.app import app

TRIMCP = (sys.executable, "-m", "trimcp.cli")
SECONDS = 60
PROGRAM = '''
import os, sys
from typing import Literal
import trimcp, trio

server = trimcp.Server("library", version="1.0")

@server.tool
async def lend(title: str, days: int = 14, kind: Literal["book", "film"] = "book") -> str:
    """Lend a book.

    Args:
        title: what it is called.
    """
    return f"{title} for {days} days"

@server.tool
async def wait(*, ctx: trimcp.Context) -> str:
    try:
        await ctx.report_progress(1, total=2)
        await trio.sleep_forever()
    finally:
        print("waited", file=sys.stderr, flush=True)

@server.tool
async def ask(*, ctx: trimcp.Context) -> str:
    found = await ctx.elicit("How many?", {"type": "object", "properties": {"n": {"type": "integer"}}})
    return f"{found.action} {found.content}"

@server.tool
async def touch(*, ctx: trimcp.Context) -> str:
    async def again() -> None:
        while True:
            server.resource_updated("shelf://all")
            await trio.sleep(0.1)
    ctx.server.start_soon(again)
    return "touched"

@server.tool
async def leave() -> str:
    os._exit(0)

server.add_resource("shelf://all", "all of it")

@server.prompt
async def review(name: Literal["Emma", "Momo"]) -> str:
    return f"review {name}"
'''


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "library.py"
    path.write_text(PROGRAM)
    return path


def shell(program: Path, *lines: str, options: tuple[str, ...] = ()) -> Result:
    """What the shell says to lines that come from no terminal: in this process, which is what it says in its own."""
    words = ["shell", str(program), *options]
    return CliRunner().invoke(app, words, input="".join(f"{line}\n" for line in lines), prog_name="trimcp")


def test_each_line_does_one_thing_in_one_session(program: Path) -> None:
    done = shell(
        program,
        "tools  # a comment",
        "",
        "lend title='Silas Marner' days=2",
        "call lend title=Momo days:=3",
        "resources",
        "read shelf://all",
        "prompts",
        "prompt review name=Emma",
        "complete review name M",
        "help lend",
        "ping",
        "quit",
        "never",
    )
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [
        "lend   Lend a book.",
        "wait",
        "ask",
        "touch",
        "leave",
        "Silas Marner for 2 days",
        "Momo for 3 days",
        "shelf://all  all",
        "all of it",
        "review",
        "user:",
        "review Emma",
        "Momo",
        "Lend a book.",
        "  title (string, required): what it is called.",
        "  days (integer, default 14)",
        "  kind (book | film, default book)",
        "it is there",
    ]
    assert done.stderr.startswith("library 1.0 · 2026-07-28")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("nothing", "there is no command or tool nothing"),
        ("read", "write: read URI"),
        ("read shelf://all more", "write: read URI"),
        ('lend "', "quotes come in pairs"),
        ("lend color=red title=x", "color"),
        ("lend title=x kind=comic", "must be one of 'book', 'film'"),
        ("call lendd", "did you mean lend?"),
        ("prompt review Emma", "write name=value"),
        ("read nope://x", "resource not found"),
        ("log loud", "a level is one of"),
        ("help nothing", "has no tool 'nothing'"),
        ("ask", "no terminal to ask at"),
    ],
)
def test_a_line_that_fails_says_why_and_ends_nothing(line: str, why: str, program: Path) -> None:
    done = shell(program, line, "ping")
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.endswith("it is there\n")
    assert done.exit_code == 0


def test_results_as_json_and_a_time_for_each_line(program: Path) -> None:
    assert '"text": "Momo for 1 days"' in shell(program, "lend title=Momo days=1", options=("--json",)).stdout
    done = shell(program, "wait", "ping", options=("--timeout", "3"))
    assert "not done after 3 seconds" in done.stderr
    assert done.stdout == "it is there\n"


def test_a_server_that_leaves_ends_it_and_one_that_is_not_there_begins_none(program: Path) -> None:
    done = shell(program, "leave", "ping")
    assert done.exit_code == 4
    assert "Traceback" not in done.stderr
    gone = shell(program.with_name("nothing.py"))
    assert gone.exit_code == 2
    assert "there is no file" in gone.stderr


@attrs.define
class Typist:
    """A terminal with the shell at it."""

    fd: int
    seen: str = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait(self, text: str) -> None:
        """Wait until the shell has shown a text, after what was waited for before."""
        while text not in self.seen:
            assert self.read(SECONDS), f"{text!r} is not in {self.seen!r}"
        self.seen = self.seen.partition(text)[2]

    def read(self, seconds: float) -> bool:
        """Wait this long for more to be shown; return False if nothing was, or the shell has ended."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return False
        try:
            self.seen += os.read(self.fd, 4096).decode(errors="replace")
        except OSError:  # the shell has ended
            return False
        return True

    def drop_line(self) -> None:
        """Press Ctrl-C while a line is edited, until the next prompt is there.

        Once is enough, but for a moment too short for a hand: Python looks for signals only where its wait for a key is
        interrupted, and one that comes while a key is still handled is seen at the next.
        """
        for _ in range(SECONDS):
            self.type("\x03")
            while "trimcp> " not in self.seen and self.read(1):
                pass
            if "trimcp> " in self.seen:
                break
        self.wait("trimcp> ")


@contextmanager
def typing(program: Path) -> Iterator[tuple[Typist, subprocess.Popen[bytes]]]:
    terminal, line = os.openpty()
    # No colours and no bracketed paste: what is shown is what is waited for.
    (program.parent / "inputrc").write_text("set enable-bracketed-paste off\n")
    environment = {
        **os.environ,
        "TERM": "dumb",
        "HOME": str(program.parent),
        "INPUTRC": str(program.parent / "inputrc"),
    }
    environment.pop("XDG_STATE_HOME", None)
    process = subprocess.Popen(
        [*TRIMCP, "shell", str(program)],
        stdin=line,
        stdout=line,
        stderr=line,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: _control(line),
    )
    try:
        yield Typist(terminal), process
    finally:
        process.kill()
        process.wait()
        os.close(line)
        os.close(terminal)


def _control(line: int) -> None:
    """Make a terminal that of this process, so that Ctrl-C reaches it."""
    import fcntl

    fcntl.ioctl(line, termios.TIOCSCTTY, 0)


def test_ctrl_c_cancels_what_runs_and_drops_what_is_typed(program: Path) -> None:
    with typing(program) as (typist, process):
        typist.wait("trimcp> ")
        typist.type("wait\n")
        typist.wait("1/2")
        typist.type("\x03")
        typist.wait("cancelled; the server was told")
        typist.wait("trimcp> ")
        typist.type("some words")
        typist.wait("some words")  # so the line is edited by now
        typist.drop_line()
        typist.type("lend title=Momo days=5\n")
        typist.wait("Momo for 5 days")
        typist.wait("trimcp> ")
        typist.type("\x04")
        assert process.wait(SECONDS) == 0
    history = (program.parent / ".local" / "state" / "trimcp" / "shell_history").read_text()
    assert "lend title=Momo days=5" in history


def test_tab_completes_and_the_arrows_bring_back(program: Path) -> None:
    with typing(program) as (typist, process):
        typist.wait("trimcp> ")
        typist.type("le\t")  # lend and leave
        typist.type("n\ttit\t")
        typist.type("Emma ki\tfi\tda\t14\n")
        typist.wait("Emma for 14 days")
        typist.wait("trimcp> ")
        typist.type("\x1b[A")
        typist.type("\n")
        typist.wait("Emma for 14 days")
        typist.wait("trimcp> ")
        typist.type("prompt rev\tname=Mo\t\n")
        typist.wait("review Momo")
        typist.wait("trimcp> ")
        typist.type("\x04")
        assert process.wait(SECONDS) == 0


def test_a_question_is_asked_at_the_terminal(program: Path) -> None:
    with typing(program) as (typist, _):
        typist.wait("trimcp> ")
        typist.type("ask\n")
        typist.wait("Answer?")
        typist.type("y\n")
        typist.wait("n")
        typist.wait(":")
        typist.type("7\n")
        typist.wait("accept {'n': 7}")


def test_changes_are_shown_while_it_watches(program: Path) -> None:
    with typing(program) as (typist, process):
        typist.wait("trimcp> ")
        typist.type("touch\n")
        typist.wait("touched")
        typist.type("watch shelf://all\n")
        typist.wait("changed: shelf://all")
        typist.type("\x03")
        typist.wait("trimcp> ")
        typist.type("ping\n")
        typist.wait("it is there")
        typist.wait("trimcp> ")
        typist.type("\x04")
        assert process.wait(SECONDS) == 0
