"""Runs every snippet of the documentation, as `pages` reads them, and compares its tables with what the code says."""

from __future__ import annotations

import ast
import builtins
import doctest
import inspect
import os
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import attrs
import click
import pytest
import trio
from trio.testing import MockClock

import trimcp
import trimcp.testing
from tests.pages import PAGES, ROOT, Block, blocks_of
from tests.programs import PROGRAMS, require
from trimcp.cli.app import COMMANDS, find_command
from trimcp.cli.exits import EXIT_CODES
from trimcp.session.limits import Limits
from trimcp.wire.codes import ERRORS


def snippets() -> list[object]:
    pages = {page: list(blocks_of(page)) for page in PAGES}
    return [
        pytest.param(blocks, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] * starts_programs(blocks))
        for page, blocks in pages.items()
        if any(block.language == "python" for block in blocks)
    ]


def starts_programs(blocks: list[Block]) -> bool:
    return any(block.is_run for block in blocks)


def compare(wanted: str, printed: str, where: str) -> None:
    checker, example = doctest.OutputChecker(), doctest.Example(where, wanted)
    if not checker.check_output(wanted, printed, doctest.ELLIPSIS):
        pytest.fail(f"{where}\n{checker.output_difference(example, printed, doctest.ELLIPSIS)}", pytrace=False)


def execute(block: Block, program: types.ModuleType) -> None:
    """Run one block as part of a program; tracebacks point into the page."""
    source = "\n" * (block.line - 1) + block.text
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(source, str(block.page), "exec", flags=flags, dont_inherit=True)
    program.__dict__.setdefault("__builtins__", builtins)  # as `exec` would; C code that imports looks for it
    run = types.FunctionType(code, program.__dict__)
    if code.co_flags & 0x80:  # CO_COROUTINE: it awaits something
        trio.run(run, clock=MockClock(autojump_threshold=0))
    else:
        run()


def run_console(block: Block) -> None:
    """Run the commands of a console block with this interpreter's `python`, `pytest` and `trimcp` first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Of a machine that checks pytest would learn to print its summary at full length.
    inherited = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    environment = {**inherited, "PATH": path, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    # Other plugins would take a second and a half to import, and the pages need none of them.
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_trio.plugin,trimcp.testing.plugin"}
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=60)
        where = f"{block.page.name}:{block.line}: $ {command} (exit code {done.returncode})\n{done.stderr}"
        printed = done.stdout
        if block.speech != "run":
            wanted, printed = without_figures(wanted), without_figures(printed)
        compare(wanted, printed, where)


def without_figures(text: str) -> str:
    """Return a text with a # in place of each number and its unit, and one space where there are several."""
    text = re.sub(r"[\d][\d.,]*(?: (?:ns|µs|ms|s|min|[kKMG]?B/s|[KMG]i?B)\b)?", "#", text)
    return re.sub(r" +", " ", text)


def is_used(file: str, later: list[Block]) -> bool:
    words = re.compile(rf"\b(from|import) {Path(file).stem}\b|\b{re.escape(file)}\b")
    return any(words.search(block.text) for block in later if block.language in ("python", "console"))


@pytest.fixture(autouse=True)
def forget_modules(tmp_path: Path) -> Iterator[None]:
    """Another page's `weather` is not ours."""
    yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("blocks", snippets())
def test_snippets_run(
    blocks: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if any('isolation="bwrap"' in block.text for block in blocks):
        require("bwrap")
    typed = " ".join(block.text for block in blocks if block.is_run)
    require(*(name for name in PROGRAMS if f"$ {name} " in typed))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    program = types.ModuleType("snippet")
    monkeypatch.setitem(sys.modules, "snippet", program)
    printed = ""
    for index, block in enumerate(blocks):
        where = f"{block.page.name}:{block.line}"
        if block.title is not None:
            Path(block.title).write_text(block.text, encoding="utf-8")
            assert block.language != "python" or is_used(block.title, blocks[index + 1 :]), f"{where}: never runs"
        elif block.speech == "output":
            compare(block.text, printed, where)
        elif block.is_run:
            assert block.language == "console", f"{where}: only console blocks can be run"
            run_console(block)
        elif block.language == "python":
            if block.speech == "new program":
                program = types.ModuleType("snippet")
                monkeypatch.setitem(sys.modules, "snippet", program)
            execute(block, program)
            printed = capsys.readouterr().out


def rows(page: str) -> list[list[str]]:
    """Return the cells of every table row of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_the_table_of_errors_is_complete() -> None:
    said = {row[0]: row[1:5] for row in rows("reference/errors.md")}
    for kind in ERRORS.values():
        expected = [kind.name, f"`{kind.reason}`", "yes" if kind.retryable else "no", str(kind.http_status)]
        assert said.get(f"`{kind.code}`") == expected


def test_the_tables_of_limits_are_complete() -> None:
    said: dict[str, list[str]] = {}
    for row in rows("reference/limits.md"):
        said.setdefault(row[0].strip("`"), []).append(row[1])  # two records may have a number of the same name
    for kind in (Limits, trimcp.HttpLimits, trimcp.HttpSettings, trimcp.MemoryEvents):
        for field in attrs.fields(kind):
            if type(field.default) in (int, float):
                assert said[field.name].pop(0) == f"{field.default:,}", field.name


def test_the_tables_of_limits_name_nothing_that_is_gone() -> None:
    known = set(inspect.signature(trimcp.Server).parameters)
    for kind in (Limits, trimcp.Quota, trimcp.HttpLimits, trimcp.HttpSettings, trimcp.MemoryEvents):
        known |= {field.name for field in attrs.fields(kind)}
    named = [row for row in rows("reference/limits.md") if re.fullmatch(r"`[a-z_]+`", row[0])]
    said = {row[0].strip("`"): row[1] for row in named}
    assert set(said) <= known
    assert said["memory"] == f"{trimcp.Server('any').budget.bound:,}, or four times `max_message`"


def test_the_table_of_exit_codes_is_complete() -> None:
    said = [row[:2] for row in rows("reference/command.md") if row[0].isdecimal()]
    assert said == [list(found) for found in re.findall(r"^ +(\d+) +(.+)$", EXIT_CODES, re.MULTILINE)]


def test_options_of_the_command_have_the_values_that_its_help_names() -> None:
    known: set[tuple[str, str]] = set()
    for name in COMMANDS:
        command = find_command(name)
        assert command is not None
        for option in command.params:
            metavar = option.make_metavar(click.Context(command))
            known |= {(flag, metavar) for flag in option.opts}
    said = re.findall(r"`(--[a-z-]+) ([A-Z]+)`", " ".join(row[0] for row in rows("reference/command.md")))
    assert len(said) > 40
    assert [option for option in said if option not in known] == []


def test_every_public_name_is_in_the_reference() -> None:
    listed = [name for row in rows("reference/index.md") for name in re.findall(r"`([\w.]+)`", row[1])]
    public = set(trimcp.__all__) | {f"security.{name}" for name in ("SECURITY_EVENTS", "security_event")}
    packages = (trimcp.auth, trimcp.fleet, trimcp.guard, trimcp.hidden, trimcp.testing, trimcp.watch, trimcp.wire)
    for package in (trimcp.agent_tools, *packages):
        public |= {f"{package.__name__.removeprefix('trimcp.')}.{name}" for name in package.__all__}
    public |= {"blocking.connect", "blocking.timeout", "asyncio.connect"}
    public |= {f"channel.{name}" for name in ("Incoming", "Kind", "Origin", "Outgoing")}
    # Of names that stand in two places, the shorter way is told.
    public -= {name for name in public if "." in name and name.partition(".")[2] in trimcp.__all__}
    commands = {"inspect", "call", "read", "prompt", "bench", "demo", "ps", "top", "login", "logout", "whoami"}
    assert sorted(set(listed) - commands) == sorted(public)


def test_the_fields_of_payloads_are_drawn_from_their_declarations() -> None:
    program = runpy.run_path(str(ROOT / "docs" / "payload_tables.py"))
    drawn = program["on_page_markdown"]("Before\n\n<!-- payloads: trimcp.wire.tools -->\n\nAfter")
    assert drawn.startswith("Before\n\n### ToolAnnotations {: #trimcp.wire.tools.ToolAnnotations }\n\n")
    assert drawn.endswith("\n\nAfter")
    assert "| **`input_schema`** | `dict[str, Any]` | `inputSchema` | all |\n" in drawn
    assert "| `execution` | `ToolExecution` | `execution` | from 2025-11-25 before 2026-07-28 |\n" in drawn
