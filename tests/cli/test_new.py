"""`trimcp new`: a project that passes its own tests, and whose container and unit serve what it has."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import trimcp
from trimcp.cli.app import app


def new(*words: str) -> Result:
    return CliRunner().invoke(app, ["new", *words])


@pytest.fixture
def project(tmp_path: Path) -> Path:
    made = new("city-maps", "--directory", str(tmp_path / "maps"))
    assert made.exit_code == 0, made.output
    return tmp_path / "maps"


def test_a_project_passes_its_own_tests(project: Path) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout


def test_nothing_of_the_templates_is_left(project: Path) -> None:
    files = {str(path.relative_to(project)): path.read_text() for path in project.rglob("*") if path.is_file()}
    assert {"city_maps/server.py", "deploy/city-maps.service", "Dockerfile", "pyproject.toml"} <= files.keys()
    assert not [path for path, text in files.items() if re.search(r"NAME|MODULE|VERSION", path + text)]


def test_what_its_page_says_to_install_brings_what_its_page_says_to_run(project: Path) -> None:
    """`--reload` needs a package that the command itself does without."""
    assert "--reload" in (project / "README.md").read_text()
    extras = tomllib.loads((project / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "trimcp[reload]" in extras["dev"]


def entry_of(dockerfile: str) -> list[str]:
    return [
        word for line in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)$", dockerfile, re.MULTILINE) for word in json.loads(line)
    ]


def test_the_command_of_the_container_serves_it(project: Path) -> None:
    program, *words = entry_of((project / "Dockerfile").read_text())
    assert program == "trimcp"
    words[words.index("0.0.0.0")] = "127.0.0.1"
    env = {**os.environ, "PYTHONPATH": str(project)}
    child = subprocess.Popen(
        [sys.executable, "-m", "trimcp.cli", *words, "--port", "0"],
        cwd=project,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stderr is not None
        line = next(line for line in child.stderr if "/mcp" in line)
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/mcp", line)
        target = trimcp.http(url, headers={"host": "mcp.example.com"})
        with trimcp.blocking.connect(target) as session:
            assert session.call_tool("greet", {"name": "Ada"}).text == "Hello, Ada!"
    finally:
        child.terminate()
        child.wait(10)
        if child.stderr is not None:
            child.stderr.close()


def test_the_unit_uses_options_that_there_are(project: Path) -> None:
    unit = (project / "deploy" / "city-maps.service").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, command, server, *options = shlex.split(line)
    assert (program, command, server) == ("/opt/city-maps/bin/trimcp", "run", "city_maps.server:server")
    known = subprocess.run([sys.executable, "-m", "trimcp.cli", "run", "--help"], capture_output=True, text=True).stdout
    assert all(word in known for word in options if word.startswith("--"))


@pytest.mark.parametrize(
    "name", ["", "City", "a_b", "../x", "-x", "a--b", "x" * 61, "class", "json", "trimcp", "tests"]
)
def test_names_that_would_not_work_are_refused(name: str, tmp_path: Path) -> None:
    made = new("--directory", str(tmp_path / "x"), "--", name)
    assert made.exit_code == 2, made.output
    assert "Traceback" not in made.output
    assert not (tmp_path / "x").exists()


def test_what_is_there_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    made = new("maps", "--directory", str(tmp_path))
    assert (made.exit_code, "nothing was changed" in made.output) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    file = tmp_path / "notes.txt"
    for place in (file, file / "below"):
        made = new("maps", "--directory", str(place))
        assert made.exit_code == 2, made.output
    assert file.read_text() == "mine"
