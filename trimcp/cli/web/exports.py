"""A call as programs that make it again: command lines, a program in Python, and a test for pytest.

What a header or a variable holds may be a secret: the programs take it from the environment.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from trimcp.cli.targets import Target
from trimcp.framing.headers import request_headers
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.stdio.child import StdioServer
from trimcp.wire.revisions import V2024_11_05, Revision

_PROGRAM: Final = """\
{imports}

async def main() -> None:
    client = trimcp.Client("again", "1.0")
    async with client.connect({target}, revision={revision!r}) as session:
        result = await session.call_tool({tool!r}, {arguments!r})
        print(result.text)


trio.run(main)
"""
_TEST: Final = """\
{imports}

@pytest.mark.trio
async def test_{name}() -> None:
    client = trimcp.Client("again", "1.0")
    async with client.connect({target}, revision={revision!r}) as session:
        result = await session.call_tool({tool!r}, {arguments!r})
    assert result.is_error is not True
    assert result.text == {expected!r}
"""
_ENVELOPE: Final = "io.modelcontextprotocol/"
_INFO: Final = {"name": "curl", "version": "1.0"}


def exported(
    target: Target, typed: str, revision: Revision, tool: str, arguments: Mapping[str, Any], expected: str
) -> dict[str, str]:
    """Return programs that call a tool again, by kind: "trimcp", "python", "pytest", and over HTTP "curl".

    `typed` is the target as it was typed, and `expected` the text of the call's result.
    """
    place = _expression(target)
    used = [name for name in ("os", "sys") if f"{name}." in place]
    members = {"target": place, "revision": revision.name, "tool": tool, "arguments": dict(arguments)}
    name = "".join(sign if sign.isascii() and sign.isalnum() else "_" for sign in tool)
    command = ["trimcp", "call", typed, tool, "--arguments", _json(arguments), "--revision", revision.name]
    curl = {}
    if isinstance(target, HttpServer) and revision is not V2024_11_05:
        curl["curl"] = _curl(target, revision, tool, arguments)
    return {
        "trimcp": shlex.join(command) + "\n",
        **curl,
        "python": _PROGRAM.format(imports=_imports(used, "trimcp", "trio"), **members),
        "pytest": _TEST.format(imports=_imports(used, "pytest", "trimcp"), name=name, expected=expected, **members),
    }


def _imports(standard: Iterable[str], *others: str) -> str:
    first = "".join(f"import {name}\n" for name in standard)
    return first + "\n" * bool(first) + "".join(f"import {name}\n" for name in others)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _variable(name: str) -> str:
    return "".join(sign if sign.isalnum() else "_" for sign in name.upper())


def _expression(target: Target) -> str:
    """Return a target as an expression of Python."""
    if isinstance(target, StdioServer):
        words = ", ".join("sys.executable" if word == sys.executable else repr(word) for word in target.command)
        env = _from_environment(target.env or {}, str)
        cwd = "" if target.cwd is None else f", cwd={str(target.cwd)!r}"
        return f"trimcp.stdio({words}{env and f', env={env}'}{cwd})"
    headers = _from_environment(target.headers, _variable)
    if not headers and target.uds is None:
        return repr(target.url)
    kind = "websocket" if target.url.startswith("ws") else "grpc" if target.url.startswith("grpc") else "http"
    uds = "" if target.uds is None else f", uds={target.uds!r}"
    return f"trimcp.{kind}({target.url!r}{headers and f', headers={headers}'}{uds})"


def _from_environment(values: Mapping[str, str], variable: Any) -> str:
    if not values:
        return ""
    return f"{{{', '.join(f'{name!r}: os.environ[{variable(name)!r}]' for name in values)}}}"


def _curl(target: HttpServer, revision: Revision, tool: str, arguments: Mapping[str, Any]) -> str:
    """Return a script for a shell; before 2026-07-28 with the handshake that comes first."""
    where = [target.address] if target.socket is None else ["--unix-socket", target.socket, target.address]
    headers = ["Content-Type: application/json", "Accept: application/json, text/event-stream"]
    shared = shlex.join(["curl", "--silent", "--no-buffer", *where, *_with_flag(headers)])
    shared += "".join(f' -H "{name}: ${_variable(name)}"' for name in target.headers)
    params: dict[str, Any] = {"name": tool, "arguments": dict(arguments)}
    if revision.modern:
        about = {"protocolVersion": revision.name, "clientInfo": _INFO, "clientCapabilities": {}}
        params["_meta"] = {f"{_ENVELOPE}{name}": value for name, value in about.items()}
        more = [f"{name}: {value}" for name, value in request_headers(revision.name, "tools/call", tool).items()]
        return f"{shared} {shlex.join([*_with_flag(more), *_body(1, 'tools/call', params)])}\n"
    hello = {"protocolVersion": revision.name, "capabilities": {}, "clientInfo": _INFO}
    session = f'{shlex.join(_with_flag([f"MCP-Protocol-Version: {revision.name}"]))} -H "Mcp-Session-Id: $session"'
    return (
        f"session=$({shared} --dump-header - --output /dev/null {shlex.join(_body(1, 'initialize', hello))} |\n"
        "    tr -d '\\r' | sed -n 's/^[Mm][Cc][Pp]-[Ss]ession-[Ii]d: //p')\n"
        f"{shared} {session} {shlex.join(_body(None, 'notifications/initialized', {}))}\n"
        f"{shared} {session} {shlex.join(_body(2, 'tools/call', params))}\n"
    )


def _with_flag(headers: Iterable[str]) -> list[str]:
    return [word for header in headers for word in ("-H", header)]


def _body(id: int | None, method: str, params: Mapping[str, Any]) -> list[str]:
    id_member = {} if id is None else {"id": id}
    return ["--data-raw", _json({"jsonrpc": "2.0", **id_member, "method": method, "params": params})]
