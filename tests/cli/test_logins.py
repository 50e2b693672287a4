"""`trimcp login`, `logout` and `whoami`, and a server protected from the command line: real servers, a toy issuer."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import attrs
import pytest
from click.testing import CliRunner

from trimcp.cli.app import app

TRIMCP = [sys.executable, "-m", "trimcp.cli"]
SERVER = Path(__file__).with_name("protected_for_cli.py")
BROWSER = Path(__file__).with_name("browser_for_cli.py")
SECONDS = 60


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


@attrs.define
class Protected:
    url: str
    issuer: str
    environment: dict[str, str]

    def run(self, *words: str, stdin: str | None = None) -> tuple[int, str, str]:
        """The exit code, and what was printed: by a process where there is a browser or something is typed."""
        if words[0] not in ("login", "record"):
            found = CliRunner().invoke(app, words, env=self.environment, prog_name="trimcp")
            return found.exit_code, found.stdout, found.stderr
        done = subprocess.run(
            [*TRIMCP, *words],
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def good(self, *words: str) -> str:
        code, out, errors = self.run(*words)
        assert code == 0, errors
        return out

    def bad(self, *words: str) -> str:
        code, out, errors = self.run(*words)
        assert code not in (0, 1), out
        assert "Traceback" not in errors
        return errors


@contextmanager
def protected(home: Path, *options: str, by: str = "module") -> Iterator[Protected]:
    port, issuer = free_ports()
    environment = {
        **os.environ,
        "XDG_DATA_HOME": str(home),
        "PROTECTED_PORT": str(port),
        "ISSUER_PORT": str(issuer),
        "PROTECTED_BY": by,
        "BROWSER": f"{sys.executable} {BROWSER} %s",
    }
    options = tuple(option.format(issuer=f"http://127.0.0.1:{issuer}") for option in options)
    command = [*TRIMCP, "run", str(SERVER), "--http", "--port", str(port), *options]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            assert "listening" in server.stdout.readline()
            yield Protected(f"http://127.0.0.1:{port}/mcp", f"http://127.0.0.1:{issuer}", environment)
        finally:
            server.kill()


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Protected]:
    with protected(tmp_path) as found:
        yield found


def test_from_a_refusal_to_a_login_and_back(there: Protected) -> None:
    assert "trimcp login" in there.bad("call", there.url, "whoami")
    assert "Not logged in anywhere" in there.good("whoami")
    assert there.good("login", there.url).startswith(f"Logged in to {there.url} as ann by {there.issuer}")
    assert there.good("call", there.url, "whoami") == "ann\n"
    assert "whoami" in there.good("inspect", there.url)
    assert "write" not in there.good("inspect", there.url)
    shown = there.good("whoami") + there.good("whoami", "--json")
    [facts] = json.loads(there.good("whoami", "--json"))
    assert (facts["server"], facts["subject"], facts["renewable"]) == (there.url, "ann", True)
    kept = (Path(there.environment["XDG_DATA_HOME"]) / "trimcp" / "credentials.json").read_text()
    for secret in re.findall(r'_token\\": ?\\"([^"\\]+)', kept):
        assert secret not in shown
    assert "Logged out" in there.good("logout", there.url)
    assert "there is no login" in there.bad("logout", there.url)
    assert "trimcp login" in there.bad("call", there.url, "whoami")


def test_a_bridge_comes_with_the_stored_login(there: Protected) -> None:
    """A host starts it and speaks standard input and output; the server wants a token and speaks HTTP."""
    home = f"XDG_DATA_HOME={there.environment['XDG_DATA_HOME']}"  # which a program that is started does not inherit
    bridge = shlex.join(["env", home, *TRIMCP, "bridge", there.url])
    refused = there.bad("bridge", there.url)
    assert "cannot be reached" in refused
    assert "log in: trimcp login URL" in refused
    there.good("login", there.url)
    assert there.good("call", bridge, "whoami") == "ann\n"
    assert there.good("call", "--revision", "2025-11-25", bridge, "whoami") == "ann\n"
    assert there.good("inspect", bridge, "--json") == there.good("inspect", there.url, "--json")


def test_more_scopes_are_asked_for_by_logging_in_again(there: Protected) -> None:
    there.good("login", there.url, "--scopes", "write")
    assert there.good("call", there.url, "write") == "written\n"


def test_where_nothing_can_be_pasted_a_login_ends(there: Protected) -> None:
    for typed in ("", "nonsense\n", "no end"):
        done = subprocess.run(
            [*TRIMCP, "login", there.url, "--no-browser"],
            env=there.environment,
            input=typed,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 3
        assert "the input ended before an address was pasted" in done.stderr
        assert done.stderr.lower().count("paste the address") == 1 + bool(typed)


def test_without_a_browser_the_address_is_pasted(there: Protected) -> None:
    with subprocess.Popen(
        [*TRIMCP, "login", there.url, "--no-browser"],
        env=there.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as login:
        try:
            assert login.stderr is not None
            page = next(found[0] for line in login.stderr if (found := re.search(r"http://\S+/authorize\S+", line)))

            parts = urlsplit(page)
            with closing(HTTPConnection(parts.netloc, timeout=SECONDS)) as connection:  # it follows no redirect
                connection.request("POST", f"{parts.path}?{parts.query}", b"user=bob")
                address = connection.getresponse().headers["location"]
            out, _ = login.communicate(f"nonsense\n{address}\n", timeout=SECONDS)
            assert " as bob by " in out
        finally:
            login.kill()


def test_several_logins_for_one_server(there: Protected) -> None:
    there.good("login", there.url, "--identity", "work")
    assert f"{there.url} as work as ann" in there.good("whoami")
    assert "trimcp login" in there.bad("call", there.url, "whoami")
    there.good("logout", there.url, "--identity", "work")


def test_a_server_that_cannot_be_logged_in_to(there: Protected) -> None:
    assert "no login to" in there.bad("login", "http://127.0.0.1:1/mcp")
    assert "URL" in there.bad("login", "nonsense")
    secret = there.bad("login", there.url, "--client-id", "x", "--client-secret", "NO_SUCH_VARIABLE")
    assert "environment variable" in secret


def test_a_server_is_protected_from_the_command_line(tmp_path: Path) -> None:
    words = ("--auth-issuer", "{issuer}", "--scopes", "read")
    with protected(tmp_path, *words, by="options") as there:
        assert "401" in there.bad("call", there.url, "whoami")
        assert " for read " in there.good("login", there.url)
        assert there.good("call", there.url, "whoami") == "ann\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--http", "--scopes", "a"), "go with --auth-issuer"),
        (("--http", "--auth-issuer", "http://issuer.example"), "https"),
        (("--http", "--auth-issuer", "https://issuer.example", "--host", "0.0.0.0"), "--auth-audience"),
    ],
)
def test_options_that_would_not_protect_are_refused(words: tuple[str, ...], why: str, tmp_path: Path) -> None:
    port, issuer = free_ports()
    environment = {**os.environ, "PROTECTED_PORT": str(port), "ISSUER_PORT": str(issuer), "PROTECTED_BY": "options"}
    there = Protected("", "", environment)
    assert why in there.bad("run", str(SERVER), *words)


def test_nothing_secret_is_recorded_or_traced(there: Protected, tmp_path: Path) -> None:
    there.good("login", there.url)
    kept = (Path(there.environment["XDG_DATA_HOME"]) / "trimcp" / "credentials.json").read_text()
    secrets = re.findall(r'_token\\": ?\\"([^"\\]+)', kept)
    assert len(secrets) == 2
    recording, trace = tmp_path / "session.jsonl", tmp_path / "trace.txt"
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    messages = (
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "whoami", "arguments": {}}},
    )
    lines = "".join(json.dumps(message) + "\n" for message in messages)
    code, out, errors = there.run("record", str(recording), there.url, stdin=lines)
    assert code == 0, errors
    assert there.good("call", f"--trace={trace}", there.url, "whoami") == "ann\n"
    written = out + errors + recording.read_text() + trace.read_text()
    assert "tools/call" in written
    for secret in secrets:
        assert secret[:40] not in written
        assert secret[-40:] not in written


def test_a_secret_goes_to_the_issuer_that_is_named_with_it(there: Protected) -> None:
    there.environment["SECRET"] = "hush"
    words = ("login", there.url, "--client-id", "app", "--client-secret", "SECRET")
    refused = there.bad(*words)
    assert f"trimcp login --issuer {there.issuer}" in refused
    assert "hush" not in refused
    assert "register it with the new one" in there.bad(*words, "--issuer", "http://127.0.0.1:1")
    assert "Logged in to" in there.good(*words, "--issuer", f"{there.issuer}/")  # a slash makes no difference
    assert there.good("call", there.url, "whoami") == "ann\n"


def test_the_resource_can_be_left_out(there: Protected) -> None:
    there.good("login", there.url, "--no-resource")
    assert "log in again" in there.bad("call", there.url, "whoami")  # the toy was told of none
    kept = Path(there.environment["XDG_DATA_HOME"]) / "trimcp" / "credentials.json"
    assert '\\"names_resource\\":false' in kept.read_text()
