from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trimcp.cli.exits import USAGE, Failure
from trimcp.cli.targets import find_target


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    file = tmp_path / "servers.json"
    entries = {"git": {"command": "mcp-git", "args": ["--repo", "."], "env": {"A": "1"}}, "web": {"command": "w"}}
    file.write_text(json.dumps({"mcpServers": entries}))
    return file


def test_a_command_line_is_taken_apart() -> None:
    assert find_target("python 'my server.py' -v").command == ("python", "my server.py", "-v")
    assert find_target("some-server").command == ("some-server",)


def test_a_file_is_run_by_this_python(tmp_path: Path) -> None:
    file = tmp_path / "my server.py"
    file.touch()
    assert find_target(str(file)).command == (sys.executable, "-m", "trimcp.cli", "run", str(file))
    assert find_target(f"{file}:app").command[-1] == f"{file}:app"
    assert find_target("package.module:server").command[-2:] == ("run", "package.module:server")


def test_an_entry_of_a_hosts_file_keeps_its_environment(hosts: Path) -> None:
    target = find_target(f"{hosts}:git")
    assert target.command == ("mcp-git", "--repo", ".")
    assert target.env == {"A": "1"}


def test_an_only_entry_needs_no_name(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text('{"mcpServers": {"only": {"command": "o"}}}')
    assert find_target(str(file)).command == ("o",)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("https://example.org/mcp", "standard input and output only; name a command"),
        ("nope.py", "there is no file nope.py"),
        ("nope.json:git", "there is no file nope.json"),
        ("unbalanced '", "cannot take"),
        (" ", "name a server"),
    ],
)
def test_what_names_no_server_is_refused_with_advice(text: str, told: str) -> None:
    with pytest.raises(Failure) as caught:
        find_target(text)
    assert told in caught.value.message
    assert caught.value.exit_code == USAGE


def test_the_entries_of_a_hosts_file_are_named(hosts: Path) -> None:
    for name, told in [("", "say which server"), (":nope", "there is no server 'nope'")]:
        with pytest.raises(Failure) as caught:
            find_target(f"{hosts}{name}")
        assert told in caught.value.message
        assert f"{hosts}:git, {hosts}:web" in caught.value.message


def test_an_entry_that_cannot_be_used_hides_no_other(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    file.write_text('{"mcpServers": {"web": {"url": "https://example.org"}, "git": {"command": "g"}}}')
    assert find_target(f"{file}:git").command == ("g",)
    with pytest.raises(Failure, match='has a "url"'):
        find_target(f"{file}:web")


def test_a_broken_hosts_file_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text("{")
    with pytest.raises(Failure, match="not valid JSON"):
        find_target(f"{file}:git")
