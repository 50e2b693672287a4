from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import trimcp
from trimcp.cli.app import app
from trimcp.cli.exits import USAGE, Failure
from trimcp.cli.loading import load_program

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def same_modules_and_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Forget the modules in a test's folder. Others stay: what is imported twice has two classes of each name."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder: Path, text: str, name: str = "some.py") -> str:
    file = folder / name
    file.write_text("import trimcp\n" + text)
    return str(file)


@pytest.mark.parametrize(
    ("text", "suffix", "name"),
    [
        ("server = trimcp.Server('a')", "", "a"),
        ("a = trimcp.Server('a'); mcp = trimcp.Server('b')", "", "b"),
        ("anything = trimcp.Server('a')", "", "a"),
        ("a = b = trimcp.Server('a')", "", "a"),
        ("a = trimcp.Server('a'); b = trimcp.Server('b')", ":b", "b"),
        ("def make(): return trimcp.Server('made')", ":make", "made"),
        ("class Box: inner = trimcp.Server('in a box')", ":Box.inner", "in a box"),
        ("import neighbour; server = trimcp.Server(neighbour.NAME)", "", "from next door"),
    ],
)
def test_a_server_is_found_in_a_file(tmp_path: Path, text: str, suffix: str, name: str) -> None:
    (tmp_path / "neighbour.py").write_text("NAME = 'from next door'")
    assert load_program(write(tmp_path, text) + suffix).server.info.name == name


def test_a_server_is_found_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "server = trimcp.Server('in a module')", "module_for_loading.py")
    monkeypatch.chdir(tmp_path)
    assert load_program("module_for_loading").server.info.name == "in a module"
    assert load_program("module_for_loading:server").server.info.name == "in a module"


def test_a_file_named_like_a_loaded_module_does_not_take_its_place(tmp_path: Path) -> None:
    before = sys.modules["json"]
    assert load_program(write(tmp_path, "server = trimcp.Server('j')", "json.py")).server.info.name == "j"
    assert sys.modules["json"] is before


def test_what_a_module_prints_goes_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_program(write(tmp_path, "print('hello'); server = trimcp.Server('a')"))
    assert capsys.readouterr() == ("", "hello\n")


@pytest.mark.parametrize(
    ("text", "suffix", "told"),
    [
        ("", "", "has no trimcp.Server at its top level; name the object or function that gives one"),
        ("a = trimcp.Server('a'); b = trimcp.Server('b')", "", "several servers; say which: "),
        ("", ":nope", "has no nope"),
        ("s = trimcp.Server('s')", ":nope", "some.py has no nope; it has "),
        ("x = 5", ":x", "is no trimcp.Server but a int"),
        ("def f(city): pass", ":f", ":f needs arguments; name a trimcp.Server, or a function without arguments"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, suffix: str, told: str) -> None:
    with pytest.raises(Failure) as caught:
        load_program(write(tmp_path, text) + suffix)
    assert told in caught.value.message
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize("name", ["missing.py", "no_such_module_here", "trimcp.no_such_module:server"])
def test_what_is_not_there_is_said(name: str) -> None:
    with pytest.raises(Failure, match="there is no"):
        load_program(name)


def test_a_missing_import_of_the_module_is_the_users_own_error(tmp_path: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there_either"):
        load_program(write(tmp_path, "import not_there_either"))


_BY_ITSELF = "broken.py cannot be loaded, it fails by itself:"
_OTHERWISE = "A server written with something else can be named by its command line"
_DEEP = "def f(n):\n    g(n)\ndef g(n):\n    f(n - 1) if n else 1 / 0\nf(9)\n"


_COMMANDS = [
    ("run", "broken.py"),
    ("inspect", "broken.py"),
    ("call", "broken.py", "tool"),
    ("read", "broken.py", "notes:///a"),
    ("prompt", "broken.py", "p"),
    ("bench", "--tool", "t", "broken.py"),
    ("record", "journal", "broken.py"),
]
_BROKEN = [
    ('server = trimcp.Server("s"\n', _BY_ITSELF, "SyntaxError: '(' was never closed"),
    ("import no_such\n", _BY_ITSELF, "ModuleNotFoundError: No module named 'no_such'"),
    ("x = 1\n", "broken.py has no trimcp.Server", _OTHERWISE),
    (_DEEP, "broken.py cannot be loaded", "ZeroDivisionError: division by zero"),
]


# Each command with one broken file, and each file with one that loads it here and one that starts a process: the file
# decides what is told, before anything is known of the command.
@pytest.mark.parametrize(
    ("words", "source", "told", "last"),
    [
        pytest.param(words, *broken, id=f"{words[0]}-{broken[2].split()[0]}")
        for words in _COMMANDS
        for broken in (_BROKEN if words[0] in ("run", "inspect") else _BROKEN[1:2])
    ],
)
def test_a_file_that_cannot_be_loaded_is_a_mistake_of_the_command_line(
    words: tuple[str, ...], source: str, told: str, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, as `trimcp run` itself has, and the last line says what to repair."""
    (tmp_path / "broken.py").write_text(f"import trimcp\n{source}")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words, prog_name="trimcp")
    assert done.exit_code == 2, done.stderr
    assert done.stderr.splitlines()[-1].endswith(last), done.stderr
    assert told in done.stderr


@pytest.mark.slow
def test_a_program_of_its_own_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    command = [sys.executable, "-m", "trimcp.cli", "inspect", "broken.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(trimcp.__file__).parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].endswith("ZeroDivisionError: division by zero"), done.stderr
    assert _BY_ITSELF in done.stderr
