"""Reads the `mcpServers` JSON in which desktop hosts and editors list their servers. Starts and opens nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs

from trimcp.errors import LocalError
from trimcp.support.files import read_text
from trimcp.wire.revisions import REVISIONS

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]

_VARIABLE: Final = re.compile(r"\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_URL: Final = re.compile(r"(https?|wss?|(http|ws)\+unix)://[^/\s]", re.IGNORECASE)
_DATES: Final = [each.name for each in REVISIONS]
_MEMBERS: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "url": (lambda value: isinstance(value, str), "a string"),
    "headers": (lambda value: _has_strings(value), "an object of strings"),
    "command": (lambda value: isinstance(value, str) and value != "", "a string, without the arguments"),
    "args": (
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
        "a list of strings",
    ),
    "env": (lambda value: _has_strings(value), "an object of strings"),
    "cwd": (lambda value: value is None or isinstance(value, str), "a string"),
    "revision": (lambda value: value is None or value in _DATES, f"one of {', '.join(_DATES)}"),
}
"""The members of an entry that are read: for each, a check of its value and a description of a valid one."""


@attrs.frozen
class ServerEntry:
    """One server of a host's configuration: either a command to start or a URL to connect to.

    Attributes:
        name: its key in the file.
        command: the program and its arguments, variables expanded; empty if there is a URL.
        env: variables to add to its environment.
        cwd: its working directory, or None.
        url: its URL (http, https, ws, wss, http+unix or ws+unix), or None if there is a command.
        headers: sent with every request to the URL; they often contain secrets, so they are not in the repr.
        revision: the name of the revision to begin with where a command is started, or None.
    """

    name: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    revision: str | None = None


def name_servers(source: Source) -> list[str]:
    """Return the names of the servers in a configuration, in its order, without checking the entries.

    Raises LocalError: the file cannot be read or holds no servers.
    """
    return list(_entries(source))


def read_servers(
    source: Source, *, only: Collection[str] | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, ServerEntry]:
    """Return the servers in a configuration, in its order, without those marked `"disabled": true`.

    `${NAME}` and `${NAME:-default}` are replaced in commands, arguments, variables, directories, URLs and headers.

    Args:
        source: a JSON file, or its contents; the outer `mcpServers` or `servers` may be omitted.
        only: names of the servers to return; other entries are not checked. None for all.
        environment: the source of variables; by default this process's environment.

    Raises:
        LocalError: the file cannot be read, an entry is invalid, or a variable is not set; the text names the place.
    """
    variables = os.environ if environment is None else environment
    return {
        name: _entry(name, entry, variables) for name, entry in _entries(source).items() if only is None or name in only
    }


def server_settings(source: Source) -> dict[str, tuple[ServerEntry, Mapping[str, Any]]]:
    """Return the servers in a configuration as `read_servers` does, each with its entry as written."""
    raw = _entries(source)
    return {name: (_entry(name, entry, os.environ), entry) for name, entry in raw.items()}


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
        config = json.loads(read_text(path, "the servers"))
    except ValueError as error:
        if isinstance(error, LocalError):
            raise
        raise LocalError(f"{path} is not valid JSON: {error}") from error
    except RecursionError:
        raise LocalError(f"{path} is not valid JSON: it is nested too deeply") from None
    if not isinstance(config, dict):
        raise LocalError(f'{path} must hold an object with "mcpServers"')
    return config


def _entry(name: str, entry: Any, variables: Mapping[str, str]) -> ServerEntry:
    where = f"server {name!r}"
    if not isinstance(entry, Mapping):
        raise LocalError(f'{where} must be an object with a "command" or a "url"')
    if "url" in entry and "command" in entry:
        raise LocalError(f'{where} has a "command" and a "url"; give it one of them')
    if "url" not in entry and "command" not in entry:
        raise LocalError(f'{where} has neither a "command" nor a "url"')
    for key in ("url", "headers") if "url" in entry else ("command", "args", "env", "cwd", "revision"):
        is_valid, wanted = _MEMBERS[key]
        if key in entry and not is_valid(entry[key]):
            raise LocalError(f'{where}: "{key}" must be {wanted}')

    def expanded(text: str) -> str:
        return expand_variables(text, variables, where)

    if "url" in entry:
        url = expanded(entry["url"])
        if not _URL.match(url):
            raise LocalError(f'{where}: "url" must begin with http://, https://, ws:// or wss://')
        headers = {header: expanded(value).strip() for header, value in (entry.get("headers") or {}).items()}
        from trimcp.transports.targets import checked_headers

        try:
            checked_headers(headers)
        except LocalError as error:
            raise LocalError(f"{where}: {error}") from None
        return ServerEntry(name, url=url, headers=headers)
    command = (entry["command"], *entry.get("args", []))
    env = {key: expanded(value) for key, value in (entry.get("env") or {}).items()}
    cwd = entry.get("cwd")
    cwd = None if cwd is None else expanded(cwd)
    return ServerEntry(name, tuple(map(expanded, command)), env, cwd, revision=entry.get("revision"))


def _has_strings(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values()))


def expand_variables(text: str, variables: Mapping[str, str], where: str) -> str:
    """Return text with `${NAME}`, `${env:NAME}` and `${NAME:-default}` replaced.

    Raises LocalError: a variable is not set and has no default; the text names it and `where` it is used.
    """

    def value(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = variables.get(name, default)
        if found is None:
            raise LocalError(f"{where} wants the environment variable {name}, which is not set")
        return found

    return _VARIABLE.sub(value, text)
