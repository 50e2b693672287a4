"""From a typed TARGET to a target that a client can connect to."""

from __future__ import annotations

import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs

from trimcp.cli.exits import USAGE, Failure
from trimcp.cli.text import theirs, told
from trimcp.client.client import URL
from trimcp.client.hosts import ServerEntry, expand_variables, name_servers, read_servers
from trimcp.errors import ConnectionLost, LocalError, McpError
from trimcp.run import target_of
from trimcp.support.files import UnusableFile, read_text
from trimcp.transports.stdio.child import StdioServer

if TYPE_CHECKING:
    from trimcp.transports.grpc.client import GrpcServer
    from trimcp.transports.http.client.target import HttpServer
    from trimcp.transports.websocket.client import WebSocketServer

TARGET_HELP = """\
\b
TARGET is one of
  "python server.py"    a command line, as one word in quotes; or write it last, after --
  server.py[:NAME]      a file with a trimcp.Server, run by this Python (also package.module:NAME)
  servers.json:NAME     an entry of an mcpServers file, as hosts and editors have them
  https://HOST/mcp      a URL: http, https, ws, wss, grpc, grpcs; http+unix://%2Frun%2Fserver.sock/mcp, ws+unix
"""

NO_HEADERS: Final = "headers are sent to a URL; a program that is started takes environment variables"

Target: TypeAlias = "StdioServer | HttpServer | WebSocketServer | GrpcServer"
"""What a command can connect to."""

_OTHER_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_RUN: Final = (sys.executable, "-m", "trimcp.cli", "run")
_LAST_WORDS: Final = re.compile(rf"exited with status {USAGE}; its last words on standard error:\n((?:  .*\n?)+)")
_UNAUTHORIZED = re.compile(r"\bthe server answered 401\b")
_MODULE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_FILE = re.compile(r"(?P<file>.+\.py)(:[A-Za-z_][\w.]*)?")
_ENTRY = re.compile(r"(?P<file>.+\.json)(:(?P<name>.+))?", re.DOTALL)


def find_target(
    text: str, on_stderr: Callable[[str], object] | None = None, headers: Mapping[str, str] | None = None
) -> Target:
    """Return the server that a TARGET names, see `TARGET_HELP`; it is neither started nor connected to yet.

    `on_stderr` takes each line that the server writes to its standard error.
    """
    try:
        target = _find(text, on_stderr)
        if not headers:
            return with_stored_login(target)
        if isinstance(target, StdioServer):
            raise Failure(NO_HEADERS)
        headers = {**target.headers, **{name.lower(): headers[name] for name in headers}}
        return with_stored_login(attrs.evolve(target, headers=headers))
    except LocalError as error:
        raise Failure(str(error)) from None


def with_stored_login(target: Target) -> Target:
    """Return the target with its stored login, if any."""
    if isinstance(target, StdioServer):
        return target
    from trimcp.auth.stores import keeps_logins

    if not keeps_logins():
        return target
    from trimcp.cli.logins import with_login

    found: Target = with_login(target)
    return found


def _find(text: str, on_stderr: Callable[[str], object] | None) -> Target:
    if URL.match(text):
        return target_of(ServerEntry("", url=text))
    if _OTHER_URL.match(text):
        raise Failure(
            f"{text.partition(':')[0]!r:.60} is no way to reach a server; http, https, ws, wss, grpc, grpcs are"
        )
    entry = _ENTRY.fullmatch(text)
    if entry is not None and os.path.isfile(entry["file"]):
        return _entry(entry["file"], entry["name"], on_stderr)
    file = _FILE.fullmatch(text)
    is_module = file is None and entry is None and _MODULE.fullmatch(text) is not None
    if is_module or (file is not None and os.path.isfile(file["file"])):
        return StdioServer((*_RUN, text), on_stderr=on_stderr)
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise Failure(f"{text!r} is no command line: {error}") from None
    if not command:
        raise Failure("name a server: a command line in quotes, a .py file, a URL, or servers.json:NAME")
    missing = (file or entry) if len(command) == 1 and not os.path.exists(command[0]) else None
    if missing is not None:
        raise Failure(f"there is no file {missing['file']}")
    return StdioServer(tuple(command), on_stderr=on_stderr)


def _entry(file: str, name: str | None, on_stderr: Callable[[str], object] | None) -> Target:
    known = name_servers(file)
    if name is None and len(known) == 1:
        name = known[0]
    if name is None or name not in known:
        names = ", ".join(f"{file}:{each}" for each in known) or "none"
        problem = f"say which server of {file}" if name is None else f"there is no server {name!r} in {file}"
        raise Failure(f"{problem}; it has {names}")
    return target_of(read_servers(file, only=[name])[name], on_stderr=on_stderr)


def read_headers(texts: Iterable[str], bearer: str | None = None) -> dict[str, str]:
    """Return the headers given on the command line, which should not contain secrets themselves.

    `bearer`: the name of an environment variable, or "@" and a file, that holds a bearer token.
    """
    found = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise Failure("write a header as 'Name: value'")
        try:
            found[name.strip()] = expand_variables(value.strip(), os.environ, f"the header {name.strip()}")
        except LocalError as error:
            raise Failure(str(error)) from None
    if bearer is not None:
        found["Authorization"] = f"Bearer {_read_token(bearer)}"
    return found


def lost_text(error: McpError, target: object) -> str:
    """Return why there is no answer, in our words and the server's, and how to give a token if it wants one.

    Raises Failure: the target is a file or module of the user's, and could not be loaded. That says what is wrong with
    it.
    """
    if not isinstance(target, StdioServer):
        return theirs(told(error), None) + token_hint(error)
    last = _LAST_WORDS.search(str(error))
    if last is not None and target.command[: len(_RUN)] == _RUN:
        words = textwrap.dedent(last[1]).strip()
        whole = words.startswith("Error: ")  # else only the end of a long traceback is known
        raise Failure(words.removeprefix("Error: ") if whole else f"{target.command[-1]} cannot be loaded:\n{words}")
    return (
        str(error) if isinstance(error, ConnectionLost) else theirs(told(error), None)
    )  # a child's last words are indented


def token_hint(error: McpError) -> str:
    """Return how to give a token if the server requires one; empty for other errors."""
    if _UNAUTHORIZED.search(str(error)) is None:
        return ""
    ways = "Send a token with --bearer VARIABLE or --bearer @FILE, or another header with --header;"
    return f"\n{ways} or log in: trimcp login URL"


def _read_token(source: str) -> str:
    if source.startswith("@"):
        try:
            token = read_text(source[1:], "the token", secret=True).strip()
        except UnusableFile as error:
            raise Failure(str(error)) from None
    else:
        token = os.environ.get(source, "").strip()
    if not token:
        # It may be the token itself, so it is not repeated.
        where = f"the file {source[1:]} is empty" if source.startswith("@") else "there is no such variable"
        raise Failure(f"--bearer names an environment variable, or @FILE, that holds the token; {where}")
    return token
