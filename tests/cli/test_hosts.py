"""`trimcp install`, `uninstall` and `hosts`: what is written, what is kept, and what is said of what cannot work."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from trimcp.cli.app import app
from trimcp.cli.hosts import HOSTS

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command of a user who has no host yet, in a folder with a server."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    for name in ("HOME", "APPDATA", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    Path("weather.py").write_text("import trimcp\nserver = trimcp.Server('weather')\n")

    def run(*words: str) -> Result:
        found = CliRunner().invoke(app, words)
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        return found

    return run


def file_of(host: str) -> Path:
    return HOSTS[host].file()


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("host", HOSTS)
def test_a_file_is_written_as_the_host_reads_it(host: str, run: Run) -> None:
    assert run("install", "weather.py", "--host", host, "--yes").exit_code == 0
    entry = read(file_of(host))[HOSTS[host].member]["weather"]
    assert entry.pop("type", None) == ("stdio" if HOSTS[host].typed else None)
    assert entry == {"command": sys.executable, "args": ["-m", "trimcp.cli", "run", os.path.abspath("weather.py")]}
    assert stat.S_IMODE(file_of(host).stat().st_mode) == 0o600
    shown = run("hosts")
    assert (shown.exit_code, shown.output) == (0, f"{host}  weather  {sys.executable}\n")
    assert run("uninstall", "weather", "--host", host, "--yes").exit_code == 0
    assert read(file_of(host)) == {HOSTS[host].member: {}}


def test_everything_else_in_a_file_stays_and_the_file_is_kept(run: Run) -> None:
    path = file_of("claude-desktop")
    path.parent.mkdir(parents=True)
    before = '{"theme":"dark","mcpServers":{"other":{"command":"é","x":12345678901234567890}},"last":[1.5]}'
    path.write_text(before, encoding="utf-8")
    path.chmod(0o640)
    assert run("install", "weather.py:server", "--host", "claude-desktop", "--name", "w", "-y").exit_code == 0
    config = read(path)
    assert list(config) == ["theme", "mcpServers", "last"]
    assert config["mcpServers"].pop("w")["args"][-1] == os.path.abspath("weather.py") + ":server"
    assert config == json.loads(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    (kept,) = path.parent.glob("*.bak")
    assert kept.read_text(encoding="utf-8") == before


def test_a_link_stays_one(run: Run, tmp_path: Path) -> None:
    path, real = file_of("cursor"), tmp_path / "dotfiles.json"
    path.parent.mkdir()
    real.write_text("{}")
    path.symlink_to(real)
    assert run("install", "weather.py", "--host", "cursor", "-y").exit_code == 0
    assert path.is_symlink()
    assert "weather" in read(real)["mcpServers"]


def test_nothing_is_written_without_consent(run: Run) -> None:
    asked = run("install", "weather.py", "--host", "cursor")
    assert asked.exit_code == 2
    assert '"weather"' in asked.output  # shown first
    assert "add --yes" in asked.output
    assert not file_of("cursor").exists()


def test_a_url_goes_to_hosts_that_reach_it(run: Run) -> None:
    url = "https://mcp.example.com/mcp"
    for host, entry in {
        "claude-code": {"type": "http", "url": url},
        "cursor": {"url": url},
        "vscode": {"type": "http", "url": url},
        "windsurf": {"serverUrl": url},
        "gemini-cli": {"httpUrl": url},
    }.items():
        assert run("install", url, "--host", host, "-y").exit_code == 0
        assert read(file_of(host))[HOSTS[host].member] == {"example.com": entry}
    refused = run("install", url, "--host", "claude-desktop", "-y")
    assert refused.exit_code == 2
    assert "claude-desktop starts its servers" in refused.output
    assert run("install", "grpc://localhost:1", "--host", "cursor", "-y").exit_code == 2
    assert run("install", url, "--host", "cursor", "-y", "-e", "A=1").exit_code == 2


def test_secrets_are_written_and_not_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "sesame-1")
    done = run("install", "weather.py", "--host", "cursor", "-y", "-e", "TOKEN", "-e", "KEY=sesame-2")
    assert done.exit_code == 0
    assert read(file_of("cursor"))["mcpServers"]["weather"]["env"] == {"TOKEN": "sesame-1", "KEY": "sesame-2"}
    assert "sesame" not in done.output + run("hosts").output + run("hosts", "--json").output
    assert run("install", "weather.py", "--host", "cursor", "-y", "-e", "NOT_SET_HERE").exit_code == 2


def test_a_project_has_a_file_of_its_own(run: Run) -> None:
    assert run("install", "weather.py", "--host", "vscode", "--project", "-y").exit_code == 0
    assert list(read(Path(".vscode/mcp.json"))["servers"]) == ["weather"]
    assert not file_of("vscode").exists()
    assert "weather" in run("hosts").output
    assert run("install", "weather.py", "--host", "claude-desktop", "--project", "-y").exit_code == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no JSON (line 1"),
        ("{\n  // a comment\n}", "no JSON (line 2"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "no JSON object"),
        ('{"mcpServers": []}', '"mcpServers" is no object'),
        ("\xff", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_configuration_is_left_alone(text: str, why: str, run: Run) -> None:
    path = file_of("cursor")
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    for words in (("install", "weather.py"), ("uninstall", "weather")):
        refused = run(*words, "--host", "cursor", "-y")
        assert refused.exit_code == 2
        assert why in refused.output
    assert path.read_bytes() == text.encode("latin-1")
    shown = run("hosts")
    assert shown.exit_code == 1
    assert why in shown.output


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (1, "it is no object"),
        ({}, "neither a command nor a URL"),
        ({"command": "no-such-program-here"}, "no such program on your PATH"),
        ({"command": "/no/such/program"}, "there is no such program"),
        ({"command": sys.executable, "args": "x"}, "args are no list"),
        ({"command": sys.executable, "args": ["server.py"]}, "write the whole path"),
        ({"command": sys.executable, "args": ["/no/such/server.py"]}, "there is no file /no/such/server.py"),
        ({"url": "localhost:8000"}, "does not begin with http"),
        ({"command": "\x1b[31mred", "args": []}, "no such program"),
    ],
)
def test_what_cannot_work_is_said(entry: Any, why: str, run: Run) -> None:
    path = file_of("cursor")
    path.parent.mkdir()
    path.write_text(json.dumps({"mcpServers": {"it\x1b[0m": entry, "fine": {"url": "https://mcp.example/mcp"}}}))
    shown = run("hosts")
    assert shown.exit_code == 1
    assert why in shown.output
    assert "\x1b" not in shown.output
    assert "cursor  fine  https://mcp.example/mcp\n" in shown.output
    (wrong, fine) = json.loads(run("hosts", "--json").output)
    assert why in wrong["problem"]
    assert fine["problem"] is None


def test_what_is_no_server_and_who_has_none(run: Run) -> None:
    assert "No host has a server" in run("hosts").output
    gone = run("uninstall", "weather", "--host", "cursor", "-y")
    assert gone.exit_code == 2
    assert "has no server weather; it has none" in gone.output
    assert "there is no file nothing.py" in run("install", "nothing.py", "--host", "cursor", "-y").output
    assert "no program no-such-program-here" in run("install", "no-such-program-here", "--host", "cursor", "-y").output
    named = run("install", "weather.py", "--host", "cursor", "-y", "--name", "a b")
    assert "is no name for a server" in named.output


def test_a_failed_write_leaves_what_was_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("install", "weather.py", "--host", "cursor", "-y").exit_code == 0
    before = read(file_of("cursor"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    failed = run("install", "weather.py", "--host", "cursor", "-y", "--name", "second")
    assert failed.exit_code == 2
    assert "No space left on device" in failed.output
    assert read(file_of("cursor")) == before
    assert not list(file_of("cursor").parent.glob(".mcp.json.*"))
