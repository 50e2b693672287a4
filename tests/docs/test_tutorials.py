"""The tutorials that need several terminals, read top to bottom: their files, and what is printed, with real curl."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.docs.test_docs import compare
from tests.pages import ROOT, blocks_of

TUTORIALS = {"agent-tools.md": pytest.mark.needs("curl"), "deployed-server.md": ()}
KEEPS_ON = re.compile(r"trimcp run|curl -N http|python (provider|toy)\.py")
"""Commands that run on in a terminal of their own."""
BROWSER = ROOT / "tests" / "cli" / "browser_for_cli.py"

pytestmark = pytest.mark.slow


@attrs.define(eq=False)
class Terminal:
    """A command that keeps on, and what it prints."""

    command: str
    wanted: str
    process: subprocess.Popen[str]
    printed: str = attrs.field(init=False, default="")
    said: threading.Event = attrs.field(init=False, factory=threading.Event)
    lines: int = 1

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if self.printed.count("\n") >= self.lines:
                self.said.set()
        self.said.set()

    def wait(self) -> None:
        assert self.said.wait(30), self.command


@contextmanager
def opened(command: str, wanted: str, lines: int, **more: Any) -> Iterator[Terminal]:
    """Start a command and wait for its first lines; interrupt it at the end, and compare what it printed."""
    process = subprocess.Popen(shlex.split(command), stdout=subprocess.PIPE, text=True, **more)
    terminal = Terminal(command, wanted, process, lines)
    reader = threading.Thread(target=terminal.read)
    reader.start()
    with process:
        try:
            terminal.wait()
            yield terminal
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
            reader.join(30)
    compare(wanted.rstrip() + "\n", terminal.printed.rstrip() + "\n", f"$ {command}")


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in TUTORIALS.items()])
def test_a_tutorial_works_as_it_is_printed(name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / "tutorial" / name
    with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {"8080": str(free.getsockname()[1]), "8081": str(other.getsockname()[1])}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "PYTHONUNBUFFERED": "1"}
    environment |= {"XDG_DATA_HOME": str(tmp_path / "data"), "BROWSER": f"{sys.executable} {BROWSER} %s"}
    there: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    ran = []
    with ExitStack() as terminals:
        for block in blocks_of(page):
            text = re.sub("8080|8081", lambda found: ports[found[0]], block.text)
            if block.title is not None:
                (tmp_path / block.title).write_text(text, "utf-8")
            if block.language != "console":
                continue
            for step in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, wanted = step.partition("\n")
                if command.startswith("pip "):
                    continue
                ran.append(command)
                if KEEPS_ON.match(command):
                    server = command.startswith("trimcp")
                    lines = wanted.count("\n") if server else 1
                    # Where curl says how fast it is; others have nothing to say there, also when they are interrupted.
                    errors = subprocess.DEVNULL if command.startswith("curl") else subprocess.STDOUT
                    shown = f"{wanted}..." if server else wanted  # its log follows
                    terminals.enter_context(opened(command, shown, lines, **there, stderr=errors))
                else:
                    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60, **there)
                    printed = done.stdout if done.stdout.endswith("\n") else f"{done.stdout}\n"
                    if command.startswith("trimcp log") or not printed.strip():  # it says something to a person
                        printed = done.stderr + done.stdout
                    compare(wanted, printed, f"{page.name}:{block.line}: $ {command}\n{done.stderr}")
    assert len(ran) >= 10
