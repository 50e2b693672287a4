"""`trimcp top --web` and `trimcp inspect --web` as programs: they print an address, serve the page there, and end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

PROGRAM = """
import trimcp

server = trimcp.Server("echo")

@server.tool
def echo(text: str) -> str:
    return text
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="what runs is looked at through Unix sockets"),
]


def ask(url: str, token: str, name: str) -> str:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with urlopen(Request(f"{url}do/{name}", b"{}", headers)) as reply:
        return str(reply.readline().decode())


@pytest.mark.parametrize(
    ("words", "command", "told", "number", "code"),
    [
        (["top", "--web"], "pictures", "[]\n", signal.SIGTERM, 0),
        (["top", "--web"], "pictures", "[]\n", signal.SIGINT, 0),
        (["inspect", "--web", "echo.py"], "offer", '"name":"echo"', signal.SIGTERM, 143),
        (["inspect", "--web", "echo.py"], "offer", '"name":"echo"', signal.SIGINT, 130),
    ],
)
def test_the_page_is_where_it_says_until_a_signal(
    tmp_path: Path, words: list[str], command: str, told: str, number: signal.Signals, code: int
) -> None:
    (tmp_path / "echo.py").write_text(PROGRAM, "utf-8")
    (tmp_path / "run").mkdir(mode=0o700)
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    run = [sys.executable, "-m", "trimcp.cli", *words]
    with subprocess.Popen(run, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            url, _, token = line.removeprefix("open ").strip().partition("#")
            assert url.startswith("http://127.0.0.1:")
            with urlopen(url) as reply:
                assert b'<script type="module" src="/page.js">' in reply.read()
            assert told in ask(url, token, command)
            with pytest.raises(HTTPError, match="401"):
                ask(url, "x", command)
            process.send_signal(number)
            assert process.wait(60) == code
        finally:
            process.kill()


@pytest.mark.parametrize("words", [["top"], ["inspect", "echo.py"]])
def test_a_port_that_is_taken_is_said(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "echo.py").write_text(PROGRAM, "utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = [sys.executable, "-m", "trimcp.cli", *words, "--web", "--port", port]
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode in (2, 3, 4)
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
