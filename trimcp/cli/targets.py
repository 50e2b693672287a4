"""From what a person types for a server to something a client can connect to."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from trimcp.cli.exits import USAGE, Failure
from trimcp.client.hosts import name_servers, read_servers
from trimcp.errors import LocalError
from trimcp.transports.child import StdioServer

__all__ = ["TARGET_HELP", "find_target"]

TARGET_HELP = """\
\b
TARGET is one of
  "python server.py"    a command line, as one word in quotes; or write it last, after --
  server.py[:NAME]      a file with a trimcp.Server, run by this Python (also package.module:NAME)
  servers.json:NAME     an entry of an mcpServers file, as hosts and editors have them
"""

_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_FILE = re.compile(r"(?P<file>.+\.py)(:[A-Za-z_][\w.]*)?")
_ENTRY = re.compile(r"(?P<file>.+\.json)(:(?P<name>.+))?", re.DOTALL)


def find_target(text: str, on_stderr: Callable[[str], object] | None = None) -> StdioServer:
    """Return the server that a TARGET names; nothing is started yet.

    Args:
        text: see `TARGET_HELP`.
        on_stderr: takes each line the server writes to its standard error.

    Raises:
        Failure: it names none; the text says what to do.
    """
    if re.match(r"(https?|wss?)://", text):
        raise Failure(
            f"{text} is a URL, and this version connects over standard input and output only; name a command", USAGE
        )
    entry = _ENTRY.fullmatch(text)
    if entry is not None and Path(entry["file"]).is_file():
        return _entry(entry["file"], entry["name"], on_stderr)
    file = _FILE.fullmatch(text)
    is_module = file is None and entry is None and _MODULE.fullmatch(text) is not None
    if is_module or (file is not None and Path(file["file"]).is_file()):
        return StdioServer((sys.executable, "-m", "trimcp.cli", "run", text), on_stderr=on_stderr)
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise Failure(f"cannot take {text!r} apart: {error}", USAGE) from None
    if not command:
        raise Failure("name a server: a command line in quotes, a .py file, or servers.json:NAME", USAGE)
    missing = (file or entry) if len(command) == 1 and not Path(command[0]).exists() else None
    if missing is not None:
        raise Failure(f"there is no file {missing['file']}", USAGE)
    return StdioServer(tuple(command), on_stderr=on_stderr)


def _entry(file: str, name: str | None, on_stderr: Callable[[str], object] | None) -> StdioServer:
    try:
        known = name_servers(file)
        if name is None and len(known) == 1:
            name = known[0]
        if name is None or name not in known:
            names = ", ".join(f"{file}:{each}" for each in known) or "none"
            problem = f"say which server of {file}" if name is None else f"there is no server {name!r} in {file}"
            raise Failure(f"{problem}; it has {names}", USAGE)
        server = read_servers(file, only=[name])[name]
    except LocalError as error:
        raise Failure(str(error), USAGE) from None
    return StdioServer(server.command, env=server.env, cwd=server.cwd, on_stderr=on_stderr)
