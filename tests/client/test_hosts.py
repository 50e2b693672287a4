"""The configuration hosts use, read as they read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimcp.client.hosts import ServerEntry, name_servers, read_servers
from trimcp.errors import LocalError


def test_a_hosts_file(tmp_path: Path) -> None:
    config = {
        "theme": "dark",
        "mcpServers": {
            "git": {"command": "uvx", "args": ["mcp-server-git", "--repository", "${HOME}/src"]},
            "db": {
                "command": "${BIN:-/usr/bin}/db",
                "env": {"TOKEN": "${env:SECRET}", "PLAIN": "$5 {x}"},
                "cwd": "${HOME}",
                "revision": "2025-06-18",
                "type": "stdio",
            },
            "old": {"command": "x", "disabled": True},
        },
    }
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(config), "utf-8")
    servers = read_servers(path, environment={"HOME": "/home/ada", "SECRET": "s"})
    assert servers == {
        "git": ServerEntry("git", ("uvx", "mcp-server-git", "--repository", "/home/ada/src"), {}),
        "db": ServerEntry(
            "db", ("/usr/bin/db",), {"TOKEN": "s", "PLAIN": "$5 {x}"}, "/home/ada", revision="2025-06-18"
        ),
    }


def test_a_server_that_is_served_somewhere() -> None:
    entry = {
        "type": "http",
        "url": "https://${PLACE}/mcp",
        "headers": {"Authorization": "Bearer ${env:SECRET}", "X-Empty": " ${NONE:-} "},
    }
    (server,) = read_servers({"web": entry}, environment={"PLACE": "example.org", "SECRET": "hush"}).values()
    headers = {"Authorization": "Bearer hush", "X-Empty": ""}
    assert server == ServerEntry("web", url="https://example.org/mcp", headers=headers)
    assert server.command == ()
    assert "hush" not in repr(server)


def test_servers_may_stand_under_another_name_or_none() -> None:
    entry = {"a": {"command": "x"}}
    assert read_servers({"servers": entry}) == read_servers(entry) == read_servers({"mcpServers": entry})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMCP_TEST_PROGRAM", "prog")
    assert read_servers({"a": {"command": "${TRIMCP_TEST_PROGRAM}"}})["a"].command == ("prog",)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({}, 'neither a "command" nor a "url"'),
        ({"url": "https://example.org/mcp", "command": "x"}, 'a "command" and a "url"; give it one'),
        ({"url": 1}, '"url" must be a string'),
        ({"url": "example.org/mcp"}, '"url" must begin with http://'),
        ({"url": "ftp://example.org"}, '"url" must begin with http://'),
        ({"url": "https:///mcp"}, '"url" must begin with http://'),
        ({"url": "https://e.org", "headers": ["x"]}, '"headers" must be'),
        ({"url": "https://e.org", "headers": {"x": 1}}, '"headers" must be'),
        ({"url": "https://e.org", "headers": {"x y": "z"}}, "'x y' cannot be the name of a header"),
        (
            {"url": "https://e.org", "headers": {"x": "a\r\nb"}},
            "the value of the header x must be a string of printable ASCII",
        ),
        ({"url": "https://e.org", "headers": {"x\n": "a"}}, "cannot be the name of a header"),
        (
            {"url": "https://e.org", "headers": {"x": "é"}},
            "the value of the header x must be a string of printable ASCII",
        ),
        ({"url": "https://${NOT_SET_ANYWHERE}"}, "NOT_SET_ANYWHERE, which is not set"),
        ("x", "must be an object"),
        ({"command": ["x"]}, '"command" must be a string'),
        ({"command": "x", "args": "y"}, '"args" must be a list'),
        ({"command": "x", "revision": "1999"}, '"revision" must be one of 2024-11-05'),
        ({"command": "x", "env": {"N": 1}}, '"env" must be'),
        ({"command": "x", "cwd": 1}, '"cwd" must be'),
        ({"command": "x", "args": ["${NOT_SET_ANYWHERE}"]}, "NOT_SET_ANYWHERE, which is not set"),
    ],
)
def test_a_wrong_entry_is_named(entry: Any, why: str) -> None:
    with pytest.raises(LocalError, match=why):
        read_servers({"mcpServers": {"a": entry}}, environment={})


def test_nobody_looks_at_entries_that_are_not_wanted() -> None:
    config = {"mcpServers": {"a": {"url": "example.org"}, "off": {"disabled": True}, "b": {"command": "x"}}}
    assert name_servers(config) == ["a", "b"]
    assert read_servers(config, only=["b"]) == {"b": ServerEntry("b", ("x",), {})}
    with pytest.raises(LocalError, match="'a': \"url\" must begin"):
        read_servers(config)


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    missing, broken, other = tmp_path / "missing", tmp_path / "broken", tmp_path / "other"
    broken.write_text("{", "utf-8")
    other.write_text("[]", "utf-8")
    for path, why in ((missing, "cannot read"), (broken, "not valid JSON"), (other, "must hold an object")):
        with pytest.raises(LocalError, match=why):
            read_servers(path)
    with pytest.raises(LocalError, match="must be an object of servers"):
        read_servers({"mcpServers": []})


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"mcpServers": ' * 50_000, "nested too deeply"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8; save it"),
        (b"", "is not valid JSON"),
        (b'{"mcpServers": {', "is not valid JSON"),
        (b"null", "must hold an object"),
    ],
)
def test_a_file_of_any_shape_is_one_sentence(data: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    path.write_bytes(data)
    with pytest.raises(LocalError, match=told) as caught:
        name_servers(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    path.write_bytes(b'\xef\xbb\xbf{"mcpServers": {"a": {"command": "x"}}}')
    assert name_servers(path) == ["a"]
