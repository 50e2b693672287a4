"""Servers that people use, inspected and called, as they are and starting slowly: real_servers.toml lists them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.interop.peers import HERE, NODE

SERVERS: list[dict[str, Any]] = tomllib.loads((HERE / "real_servers.toml").read_text("utf-8"))["servers"]
FOLDERS: dict[str, str] = json.loads(os.environ.get("TRIMCP_REAL_SERVERS", "{}"))


def trimcp(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimcp.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)


@pytest.mark.parametrize("slow", [False, True], ids=["", "slow"])
@pytest.mark.parametrize(
    "server", SERVERS, ids=lambda server: server["package"] + "-quick" * server.get("quick", False)
)
def test_a_real_server_is_inspected_and_called(server: dict[str, Any], slow: bool, tmp_path: Path) -> None:
    folder = FOLDERS.get(server["package"])
    if folder is None:
        pytest.skip(f"{server['package']} is not installed: it goes untested")
    subprocess.run(["git", "init", "-q", str(tmp_path / "git")], check=True)
    for name, content in server.get("files", {}).items():
        (tmp_path / name).write_text(content, "utf-8")
    places = {"{folder}": str(tmp_path), "{git}": str(tmp_path / "git"), "{here}": str(HERE)}

    def put(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, place)
        return text

    program = [f"{folder}/{server['program'][0]}", *map(put, server["program"][1:])]
    if server["from"] == "npm":
        program = [str(NODE), *program]
    line = shlex.join(program)
    target = shlex.join(["sh", "-c", f"sleep 5; exec {line}"]) if slow else line
    shown = trimcp("inspect", "--json", target)
    assert shown.returncode == 0, shown.stderr
    tool, arguments = server["call"]
    offer = json.loads(shown.stdout)
    assert tool in [each["name"] for each in offer["tools"]]
    assert "errors" not in offer
    called = trimcp("call", "--timeout", "60", target, tool, "--arguments", put(json.dumps(arguments)))
    said = called.stdout + called.stderr
    assert called.returncode == server.get("status", 0), said
    assert put(server["says"]) in said
