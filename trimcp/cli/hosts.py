"""`trimcp install`, `uninstall` and `hosts`: the files in which desktop hosts and editors list their servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import attrs
import click

from trimcp.cli.exits import HOSTS_EXIT_CODES, Failure
from trimcp.cli.options import SERVER, Subcommand
from trimcp.cli.screen import Screen
from trimcp.cli.targets import find_target
from trimcp.cli.text import theirs
from trimcp.errors import LocalError
from trimcp.support.files import MissingFile, UnusableFile, advice, read_text, replace_file
from trimcp.transports.http.client.target import HttpServer
from trimcp.transports.stdio.child import StdioServer

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_WRONG: Final = 1  # the exit code where something configured cannot work


def _settings(*parts: str) -> Path:
    """Return a path in the folder where programs of a desktop keep their settings."""
    home = Path.home()
    if sys.platform == "darwin":
        return home.joinpath("Library", "Application Support", *parts)
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA") or home / "AppData" / "Roaming").joinpath(*parts)
    return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config").joinpath(*parts)


@attrs.frozen
class Host:
    """Where one host keeps its list of servers, and how it writes them."""

    file: Callable[[], Path]
    project: str | None = None  # the file of a project, in its folder
    member: str = "mcpServers"
    url: str | None = "url"  # the member of a server at a URL; None: the host reaches none
    typed: bool = False  # whether each server says its "type"


HOSTS: Final = {
    "claude-desktop": Host(lambda: _settings("Claude", "claude_desktop_config.json"), url=None),
    "claude-code": Host(lambda: Path.home() / ".claude.json", ".mcp.json", typed=True),
    "cursor": Host(lambda: Path.home() / ".cursor" / "mcp.json", ".cursor/mcp.json"),
    "vscode": Host(lambda: _settings("Code", "User", "mcp.json"), ".vscode/mcp.json", "servers", typed=True),
    "windsurf": Host(lambda: Path.home() / ".codeium" / "windsurf" / "mcp_config.json", url="serverUrl"),
    "gemini-cli": Host(lambda: Path.home() / ".gemini" / "settings.json", ".gemini/settings.json", url="httpUrl"),
}
"""The hosts by name; each documents its file under "MCP"."""

_host = click.option(
    "--host",
    required=True,
    type=click.Choice(list(HOSTS)),
    metavar="NAME",
    help=f"The host: {', '.join(HOSTS)}.",
)
_project = click.option("--project", is_flag=True, help="The configuration of the project in this folder, not yours.")
_yes = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


@click.command(cls=Subcommand, epilog=HOSTS_EXIT_CODES)
@click.argument("target", type=SERVER)
@_host
@click.option(
    "--name", default=None, metavar="NAME", help="The server's name there; by default that of its file or host."
)
@click.option(
    "--env",
    "-e",
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable of its environment; NAME alone has the value that it has here. May be repeated.",
)
@_project
@_yes
def install(target: str, host: str, name: str | None, env: Sequence[str], project: bool, yes: bool) -> None:
    """Write a server into the configuration of a host, which starts it, or connects to it, from then on.

    What will be written is shown first. The file is replaced as a whole, or not at all, and kept as it was beside it.

    \b
    Examples:
      trimcp install weather.py --host claude-desktop
      trimcp install weather.py --host vscode --project -e API_KEY
      trimcp install https://mcp.example/mcp --host cursor --name example
    """
    name = name or _name_of(target)
    if _NAME.fullmatch(name) is None:
        rule = "letters, digits, _, - and ., at most 64"
        raise Failure(f"{theirs(name)} is no name for a server: {rule}; give one with --name")
    kind = HOSTS[host]
    entry = _entry_of(target, host, kind, env)
    path = _file_of(host, kind, project)
    config, servers = _read(path, kind)
    replaced = servers.get(name)
    shown = {**entry, **({"env": dict.fromkeys(entry["env"], "***")} if "env" in entry else {})}
    screen = Screen()
    screen.note(f"{'In the place of the one there' if replaced else 'New'} in {theirs(path)}, under {kind.member}:")
    screen.show(json.dumps({name: shown}, indent=2))
    if replaced == entry:
        screen.note("It is there already; nothing was changed.")
        return
    _ask(yes)
    servers[name] = entry
    _write(screen, path, config)
    screen.note(f"Start {host} again to have it; trimcp hosts shows what is there.")


@click.command(cls=Subcommand, epilog=HOSTS_EXIT_CODES)
@click.argument("name")
@_host
@_project
@_yes
def uninstall(name: str, host: str, project: bool, yes: bool) -> None:
    """Take a server out of the configuration of a host. The file is kept as it was beside it.

    \b
    Examples:
      trimcp uninstall weather --host claude-desktop
    """
    kind = HOSTS[host]
    path = _file_of(host, kind, project)
    config, servers = _read(path, kind)
    if name not in servers:
        raise Failure(f"{host} has no server {theirs(name)}; it has {', '.join(map(theirs, servers)) or 'none'}")
    screen = Screen()
    screen.note(f"{theirs(name)} will be taken out of {theirs(path)}.")
    _ask(yes)
    del servers[name]
    _write(screen, path, config)


@click.command(cls=Subcommand, epilog=HOSTS_EXIT_CODES)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def hosts(as_json: bool) -> None:
    """Show which servers the hosts of this user and this folder's project have, and what is wrong with each.

    Nothing is started. Values of environment variables and headers are not shown.

    \b
    Examples:
      trimcp hosts
    """
    screen, found = Screen(), list(_configured())
    if as_json:
        screen.show(json.dumps(found, indent=2))
    else:
        for each in found:
            what = f"{each['host']}  {theirs(each['server'] or '')}  {theirs(each['reached_by'] or '')}".rstrip()
            wrong = each["problem"]
            screen.show(f"{what}: {theirs(wrong)}" if wrong else what, "red" if wrong else "")
        if not found:
            screen.show("No host has a server. Add one with: trimcp install SERVER --host NAME")
    if any(each["problem"] for each in found):
        sys.exit(_WRONG)


def _configured() -> Iterator[dict[str, Any]]:
    """Yield each server of each host, with what is wrong with it."""
    for host, kind in HOSTS.items():
        for path in (kind.file(), *([Path(kind.project)] if kind.project else [])):
            facts: dict[str, Any] = {"host": host, "file": str(path)}
            try:
                _, servers = _read(path, kind)
            except Failure as failure:
                yield {**facts, "server": None, "reached_by": None, "problem": failure.message}
                continue
            for name, entry in servers.items():
                reached, problem = _look(kind, entry)
                yield {**facts, "server": name, "reached_by": reached, "problem": problem}


def _look(kind: Host, entry: Any) -> tuple[str | None, str | None]:
    """Return how a server is reached, and what is wrong with it, if anything."""
    if not isinstance(entry, dict):
        return None, "it is no object"
    url = next((entry[key] for key in ("url", kind.url) if key in entry), None)
    command, args = entry.get("command"), entry.get("args", [])
    if url is not None:
        if not isinstance(url, str) or re.match(r"https?://[^/\s]", url) is None:
            return None, "its URL does not begin with http:// or https://"
        return url, "this host reaches no servers at a URL" if kind.url is None else None
    if not isinstance(command, str) or not command:
        return None, "it has neither a command nor a URL"
    if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
        return command, "its args are no list of texts"
    if "$" in command:  # a variable of the host's
        return command, None
    if shutil.which(command) is None:
        return command, "there is no such program, or it may not be run" if os.sep in command else (
            "there is no such program on your PATH; the host may have another PATH: write the whole path"
        )
    for each in args:
        if each.endswith((".py", ".js")) and "$" not in each and not each.startswith("-"):
            if not os.path.isabs(each):
                return command, f"{each} is found in no certain folder: write the whole path"
            if not os.path.isfile(each):
                return command, f"there is no file {each}"
    return command, None


# The entry of a server


def _name_of(target: str) -> str:
    """Return a name for a server that was given none."""
    if "://" in target:
        return re.sub(r"^(mcp|www)\.", "", re.split(r"[/:]", target.partition("://")[2])[0]) or "server"
    words = [word for word in re.split(r"[\s:]+", target) if word]
    file = next((word for word in words if word.endswith(".py")), words[0] if words else "server")
    stem = Path(file).stem
    return Path(file).resolve().parent.name if stem in ("server", "main", "__main__") else stem


def _entry_of(target: str, host: str, kind: Host, env: Sequence[str]) -> dict[str, Any]:
    """Return what a host is to have of a server. Raises Failure: it cannot reach that."""
    found = find_target(target)
    variables = {}
    for text in env:
        key, equals, value = text.partition("=")
        if not key or not (equals or key in os.environ):
            raise Failure("write a variable as --env NAME=VALUE, or --env NAME if it is set here")
        variables[key] = value if equals else os.environ[key]
    if isinstance(found, StdioServer):
        program, *args = found.command
        where = shutil.which(program)
        if where is None:
            raise Failure(f"there is no program {theirs(program)}")
        entry: dict[str, Any] = {"type": "stdio"} if kind.typed else {}
        # A host starts it in a folder and with a PATH of its own.
        entry |= {"command": os.path.abspath(where), "args": [_absolute(each) for each in args]}
        variables = {**(found.env or {}), **variables}
        return {**entry, **({"env": variables} if variables else {})}
    if not isinstance(found, HttpServer) or kind.url is None:
        others = ", ".join(name for name, each in HOSTS.items() if each.url)
        raise Failure(f"{host} starts its servers; URLs, of http and https, can be reached by {others}")
    if variables:
        raise Failure("a server at a URL has no environment of yours")
    return {**({"type": "http"} if kind.typed else {}), kind.url: found.address}


def _absolute(argument: str) -> str:
    """Return an argument that names a file here as a whole path; with `server.py:NAME` the file of it."""
    file, colon, name = argument.partition(":")
    if file and os.path.isfile(file):
        return os.path.abspath(file) + colon + name
    return argument


# The file


def _file_of(host: str, kind: Host, project: bool) -> Path:
    if not project:
        return kind.file()
    if kind.project is None:
        raise Failure(f"{host} has no configuration of a project")
    return Path(kind.project).absolute()


def _read(path: Path, kind: Host) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a host's configuration, and the servers in it. Raises Failure: it cannot be read, or is none."""
    try:
        text = read_text(path, "")
    except MissingFile:
        text = ""
    except UnusableFile as error:
        raise Failure(theirs(error, None)) from None
    try:
        config = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "it is nested too deeply"
        _refuse(path, f"no JSON ({where}; comments and commas at an end are none)")
    if not isinstance(config, dict):
        _refuse(path, "no JSON object")
    servers = config.setdefault(kind.member, {})
    if not isinstance(servers, dict):
        _refuse(path, f'no configuration: its "{kind.member}" is no object')
    return config, servers


def _refuse(path: Path, what: str) -> NoReturn:
    raise Failure(f"{theirs(path)} is {what}. Repair it first; it was not changed") from None


def _ask(yes: bool) -> None:
    """Go on if the user agrees. Raises Failure otherwise, also where nobody can be asked."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Failure("nobody can be asked here; add --yes to write it")
    if not click.confirm("Write it?", err=True):
        raise Failure("nothing was changed")


def _write(screen: Screen, path: Path, config: dict[str, Any]) -> None:
    """Replace a host's configuration, after keeping what was there beside it."""
    path = path.resolve()  # a link of the user's stays one
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
            kept = path.with_name(f"{path.name}.{now}.bak")
            shutil.copy2(path, kept)
            screen.note(f"What was there is in {theirs(kept)}.")
        replace_file(path, (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(), keep_mode=True)
    except (OSError, LocalError) as error:
        raise Failure(f"{theirs(path)} cannot be written: {advice(error)}") from None
    screen.note(f"Wrote {theirs(path)}.")
