"""`trimcp bridge`, a server of standard input and output before another one, and `trimcp gateway`, many as one."""

from __future__ import annotations

import sys
from typing import Any, Final

import attrs
import click

from trimcp.cli.exits import BRIDGE_EXIT_CODES, NO_CONNECTION, Failure
from trimcp.cli.loading import Loaded
from trimcp.cli.options import (
    RUN_SECTIONS,
    SERVER,
    ReachOptions,
    RunOptions,
    Subcommand,
    check_network,
    option,
    trace_stdio,
    with_options,
)
from trimcp.cli.targets import TARGET_HELP, find_target, read_headers, token_hint, with_stored_login
from trimcp.cli.text import theirs
from trimcp.client.client import named
from trimcp.client.hosts import ServerEntry
from trimcp.compose.gateway import gateway as make_gateway
from trimcp.compose.proxy import proxy
from trimcp.errors import LocalError, McpError
from trimcp.run import run_stdio, target_of

_FACT: Final = 1_000  # characters of what went wrong, which may be a server's text


@attrs.frozen(kw_only=True)
class BridgeOptions(ReachOptions):
    """How a server is reached by a bridge, and how the bridge is served."""

    connect_timeout: float = option(
        metavar="SECONDS", default=60.0, type=click.FloatRange(0, min_open=True), help="Time to reach the server."
    )
    grace: float = option(
        metavar="SECONDS", default=5.0, type=click.FloatRange(0), help="Time that calls get when it is told to end."
    )
    trace: str | None = option(
        metavar="[=FILE]", help="Write every message to standard error or FILE; secrets are masked."
    )


@click.command(cls=Subcommand, epilog=TARGET_HELP + "\n" + BRIDGE_EXIT_CODES)
@click.argument("target", type=SERVER)
@with_options(BridgeOptions)
def bridge(target: str, options: BridgeOptions) -> None:
    """Serve TARGET over standard input and output, for hosts that speak only that.

    Whatever TARGET offers passes through, in whichever revision. It comes with its stored login (trimcp login URL), or
    the headers that are given. It ends when the client leaves.

    \b
    Examples:
      trimcp bridge https://mcp.example/mcp
      trimcp bridge https://mcp.example/mcp --bearer MY_TOKEN
      trimcp bridge ws://127.0.0.1:8000/ws
      trimcp bridge servers.json:web
    """
    trace_stdio(options.trace)
    found: Any = find_target(target, headers=read_headers(options.headers, options.bearer))
    server = proxy(named(found), name=target, revision=options.revision, connect_timeout=options.connect_timeout)
    try:
        run_stdio(server, grace=options.grace)
    except LocalError as error:
        hint = token_hint(error.__cause__) if isinstance(error.__cause__, McpError) else ""
        raise Failure(theirs(str(error), _FACT) + hint, NO_CONNECTION) from None
    except KeyboardInterrupt:
        sys.exit(0)


@click.command(cls=Subcommand, sections=RUN_SECTIONS, epilog=BRIDGE_EXIT_CODES)
@click.argument("file", type=click.Path(dir_okay=False))
@with_options(RunOptions)
def gateway(file: str, options: RunOptions) -> None:
    """Serve the servers that FILE lists (mcpServers, as hosts have them) as one, each with its name as prefix.

    They are connected to with their own credentials: headers, variables, stored logins. When FILE changes, what is new
    is started and what is gone is ended. An entry may also have "scopes" and "principals" (who sees it), "tools"
    (patterns), "quota" and "shared".

    \b
    Examples:
      trimcp gateway servers.json
      trimcp gateway servers.json --http --port 8000 --token-file tokens.txt
    """
    if options.workers > 1 or options.reload or options.tasks is not None:
        raise Failure("a gateway is one process without tasks of its own: --workers, --reload and --tasks are for run")
    trace_stdio(options.trace)
    over_network = check_network(options)
    server = make_gateway(file, prepare=_reached)
    if over_network:
        from trimcp.cli.serve.network import serve  # not needed on standard input and output

        sys.exit(serve(lambda: Loaded(server), (), options))
    run_stdio(server, grace=options.grace, watchdog=options.watchdog)


def _reached(entry: ServerEntry) -> Any:
    """Return what is connected to, with its stored login. It may block."""
    return with_stored_login(target_of(entry))
