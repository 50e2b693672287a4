from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trimcp.cli.exits import USAGE, Failure
from trimcp.cli.targets import find_target, read_headers
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.stdio.child import StdioServer
from trimcp.transports.websocket.client import WebSocketServer


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
        ("https://", "names a host"),
        ("http+unix:///mcp", "names a host"),
        ("wss://example.org:0/", "names a host"),
        ("http://[::1/mcp", "no URL"),
        ("ftp://example.org/mcp", "'ftp' is no way to reach a server"),
        ("nope.py", "there is no file nope.py"),
        ("nope.json:git", "there is no file nope.json"),
        ("unbalanced '", "is no command line"),
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
    file.write_text('{"mcpServers": {"web": {"url": "example.org"}, "git": {"command": "g"}}}')
    assert find_target(f"{file}:git") == StdioServer(("g",), env={})
    with pytest.raises(Failure, match='"url" must begin with'):
        find_target(f"{file}:web")


def test_a_broken_hosts_file_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text("{")
    with pytest.raises(Failure, match="not valid JSON"):
        find_target(f"{file}:git")


# URLs


def test_a_url_is_connected_to() -> None:
    target = find_target("https://example.org/mcp")
    assert isinstance(target, HttpServer)
    assert target.url == "https://example.org/mcp"
    socket = find_target("http+unix://%2Frun%2Fa.sock/mcp")
    assert isinstance(socket, HttpServer)
    assert socket.socket == "/run/a.sock"
    assert isinstance(find_target("WSS://example.org/ws"), WebSocketServer)
    assert isinstance(find_target("ws+unix://%2Frun%2Fa.sock/ws"), WebSocketServer)


def test_an_entry_with_a_url_keeps_its_headers_and_takes_more(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    entries = {
        "web": {"url": "https://example.org/mcp", "headers": {"X-Key": "k", "Accept-Language": "nb"}},
        "socket": {"type": "ws", "url": "ws://example.org/ws"},
    }
    file.write_text(json.dumps({"mcpServers": entries}))
    target = find_target(f"{file}:web", headers={"x-key": "mine", "Authorization": "Bearer t"})
    assert isinstance(target, HttpServer)
    assert target.headers == {"x-key": "mine", "accept-language": "nb", "authorization": "Bearer t"}
    assert "Bearer t" not in repr(target)
    assert isinstance(find_target(f"{file}:socket", headers={"x": "y"}), WebSocketServer)


def test_a_program_takes_no_headers() -> None:
    with pytest.raises(Failure, match="takes environment variables"):
        find_target("some-server", headers={"x": "y"})


def test_headers_are_read_with_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEY", "hush")
    assert read_headers(["X-Key: ${KEY}", "X-Url:http://a:1/", "X-None:"]) == {
        "X-Key": "hush",
        "X-Url": "http://a:1/",
        "X-None": "",
    }
    assert read_headers([], "KEY") == {"Authorization": "Bearer hush"}
    (tmp_path / "token").write_text("from a file\n")
    assert read_headers([], f"@{tmp_path}/token") == {"Authorization": "Bearer from a file"}


@pytest.mark.parametrize(
    ("headers", "bearer", "told"),
    [
        (["hush"], None, "write a header as"),
        ([": hush"], None, "write a header as"),
        (["X-Key: hush ${NOT_SET_ANYWHERE}"], None, "the header X-Key wants the environment variable NOT_SET"),
        ([], "hush", "there is no such variable"),
        ([], "@/nowhere", "cannot read the token from /nowhere"),
        ([], "@/dev/null", "the file /dev/null is empty"),
    ],
)
def test_what_is_no_header_is_refused_without_being_shown(headers: list[str], bearer: str | None, told: str) -> None:
    with pytest.raises(Failure) as caught:
        read_headers(headers, bearer)
    assert told in caught.value.message
    assert "hush" not in caught.value.message
    assert caught.value.exit_code == USAGE
