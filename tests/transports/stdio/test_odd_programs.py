"""Servers as child processes that say more, or otherwise, than they should: the client connects and calls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import trimcp
from trimcp.wire.revisions import LATEST_LEGACY

PROGRAM = """
import json, os, sys
how, out, probed = sys.argv[1], sys.stdout.buffer, False

def put(*pieces):
    for piece in pieces:
        out.write(piece)
        out.flush()

def say(id, **outcome):
    data = json.dumps({"jsonrpc": "2.0", "id": id, **outcome}).encode()
    forms = {
        "CRLF": [data + b"\\r\\n"],
        "mark": [b"\\xef\\xbb\\xbf" + data + b"\\n"],
        "chunks": [*(data[n : n + 1] for n in range(len(data))), b"\\n"],
        "logs": [b"INFO handling {x}\\n", b'{"level":"info"}\\n[1]\\n42\\n', data + b"\\nGr\\xf6\\xdfe\\n"],
        "blanks": [b"\\n \\n" + data + b" \\n\\n"],
        "long line": [b"x" * 3_000_000 + b"\\n", data + b"\\n"],
        "twice": [data + b"\\n" + data + b"\\n"],
    }
    put(*forms.get(how, [data + b"\\n"]))

if how == "banner":
    put(b"Welcome\\n=======\\n\\nlistening on stdio\\n")
if how == "variable" and os.environ.get("WANTED") != "1" or how == "folder" and not os.path.exists("here.txt"):
    sys.exit("not as I want it")
for line in sys.stdin.buffer:
    message = json.loads(line)
    method, id = message["method"], message.get("id")
    if method == "server/discover":
        probed = True
        if how == "dies on the probe":
            sys.exit(1)
        say(str(id) if how == "text as id" else id, error={"code": -32601, "message": "no"})
        if how == "dies after it":
            sys.exit(1)
    elif method == "initialize" and probed and how == "initialize first":
        say(id, error={"code": -32600, "message": "initialize first"})
    elif method == "initialize":
        version, info = message["params"]["protocolVersion"], {"name": "odd", "version": "1"}
        say(id, result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
    elif method == "tools/call":
        say(id, result={"content": [{"type": "text", "text": "done"}]})
    elif id is not None:
        say(id, error={"code": -32601, "message": "no"})
"""

WAYS = ["banner", "CRLF", "mark", "chunks", "logs", "blanks", "long line", "twice", "variable", "folder", "text as id"]
WAYS += ["dies on the probe", "dies after it", "initialize first"]


@pytest.mark.parametrize("way", WAYS)
async def test_an_odd_program_is_connected_with(way: str, tmp_path: Path) -> None:
    (tmp_path / "here.txt").touch()
    (tmp_path / "server.py").write_text(PROGRAM, "utf-8")
    target = trimcp.stdio(sys.executable, "-S", "server.py", way, env={"WANTED": "1"}, cwd=tmp_path)
    async with trimcp.Client("c").connect(target) as session:
        assert session.revision is LATEST_LEGACY
        assert (await session.call_tool("x")).text == "done"
