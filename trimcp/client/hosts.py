"""Reads the `mcpServers` JSON in which desktop hosts and editors name their servers.

Knows the format and starts nothing: each entry is a value that says what would be started.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs

from trimcp.bounds import is_token
from trimcp.errors import LocalError

__all__ = ["ServerEntry", "expand_variables", "name_servers", "read_servers"]

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]

_VARIABLE: Final = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_URL: Final = re.compile(r"(https?|wss?|(http|ws)\+unix)://[^/\s]", re.IGNORECASE)
_HEADER_VALUE: Final = re.compile(r"[!-~](?:[ \t!-~]*[!-~])?|")


@attrs.frozen
class ServerEntry:
    """One server as a host's configuration names it: either a command to start or a URL to connect to.

    Attributes:
        name: its key in the file.
        command: the program and its arguments, variables expanded; empty where there is a URL.
        env: variables to add to its environment.
        cwd: where it runs, or None.
        url: where it is served (http, https, ws, wss, http+unix or ws+unix), or None where there is a command.
        headers: what to send with every request to the URL; they often hold secrets, so they are not in the repr.
    """

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)


def name_servers(source: Source) -> list[str]:
    """Return the names of the servers a configuration holds, in its order, without looking into them.

    Raises:
        LocalError: the file cannot be read or holds no servers.
    """
    return list(_entries(source))


def read_servers(
    source: Source, *, only: Collection[str] | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, ServerEntry]:
    """Return the servers a configuration names, in its order, without those marked `"disabled": true`.

    `${NAME}` and `${NAME:-default}` are replaced in commands, arguments, variables, directories, URLs and headers.

    Args:
        source: a JSON file, or what one holds; `mcpServers` or `servers` on top may be left out.
        only: the names that are wanted; nobody looks at what is wrong with others. None for all.
        environment: where variables come from; by default this process's environment.

    Raises:
        LocalError: the file cannot be read, an entry is wrong, or a variable is not set; the text names the place.
    """
    variables = os.environ if environment is None else environment
    return {
        name: _entry(name, entry, variables) for name, entry in _entries(source).items() if only is None or name in only
    }


def _entries(source: Source) -> dict[str, Any]:
    config = source if isinstance(source, Mapping) else _load(Path(source))
    named = next((config[key] for key in ("mcpServers", "servers") if key in config), config)
    if not isinstance(named, Mapping):
        raise LocalError('"mcpServers" must be an object of servers by name')
    return {
        name: entry
        for name, entry in named.items()
        if not (isinstance(entry, Mapping) and entry.get("disabled") is True)
    }


def _load(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise LocalError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise LocalError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise LocalError(f'{path} must hold an object with "mcpServers"')
    return config


def _entry(name: str, entry: Any, variables: Mapping[str, str]) -> ServerEntry:
    where = f"server {name!r}"
    if not isinstance(entry, Mapping):
        raise LocalError(f'{where} must be an object with a "command" or a "url"')

    def expanded(text: str) -> str:
        return expand_variables(text, variables, where)

    if "url" in entry and "command" in entry:
        raise LocalError(f'{where} has a "command" and a "url"; give it one of them')
    if "url" in entry:
        return _remote(name, entry, where, expanded)
    if "command" not in entry:
        raise LocalError(f'{where} has neither a "command" nor a "url"')
    return _local(name, entry, where, expanded)


def _remote(name: str, entry: Mapping[str, Any], where: str, expanded: Callable[[str], str]) -> ServerEntry:
    url, headers = entry["url"], entry.get("headers") or {}
    if not isinstance(url, str):
        raise LocalError(f'{where}: "url" must be a string')
    if not isinstance(headers, Mapping) or not all(isinstance(value, str) for value in headers.values()):
        raise LocalError(f'{where}: "headers" must be an object of strings')
    url = expanded(url)
    if not _URL.match(url):
        raise LocalError(f'{where}: "url" must begin with http://, https://, ws:// or wss://')
    found = {header: expanded(value).strip() for header, value in headers.items()}
    for header, value in found.items():
        if not is_token(header) or not _HEADER_VALUE.fullmatch(value):
            raise LocalError(f"{where}: the header {header!r} cannot be sent; mind line breaks and non-ASCII letters")
    return ServerEntry(name, url=url, headers=found)


def _local(name: str, entry: Mapping[str, Any], where: str, expanded: Callable[[str], str]) -> ServerEntry:
    command, args = entry["command"], entry.get("args", [])
    env, cwd = entry.get("env") or {}, entry.get("cwd")
    if not isinstance(command, str) or not command:
        raise LocalError(f'{where}: "command" must be a string, without the arguments')
    if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
        raise LocalError(f'{where}: "args" must be a list of strings')
    if not isinstance(env, Mapping) or not all(isinstance(value, str) for value in env.values()):
        raise LocalError(f'{where}: "env" must be an object of strings')
    if cwd is not None and not isinstance(cwd, str):
        raise LocalError(f'{where}: "cwd" must be a string')
    return ServerEntry(
        name,
        (expanded(command), *map(expanded, args)),
        {key: expanded(value) for key, value in env.items()},
        None if cwd is None else expanded(cwd),
    )


def expand_variables(text: str, variables: Mapping[str, str], where: str) -> str:
    """Return text with `${NAME}`, `${env:NAME}` and `${NAME:-default}` replaced.

    Raises:
        LocalError: a variable is not set and has no default; the text names it and `where` it is wanted.
    """

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = variables.get(name, default)
        if found is None:
            raise LocalError(f"{where} wants the environment variable {name}, which is not set")
        return found

    return _VARIABLE.sub(value, text)
