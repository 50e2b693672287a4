"""`trimcp bridge`: a server of standard input and output before another one."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

import attrs
import click

from trimcp.cli.exits import BRIDGE_EXIT_CODES, NO_CONNECTION, Failure
from trimcp.cli.options import SERVER, ReachOptions, Subcommand, option, with_options
from trimcp.cli.targets import TARGET_HELP, find_target, read_headers, token_hint
from trimcp.cli.text import theirs
from trimcp.client.client import named
from trimcp.compose.proxy import proxy
from trimcp.errors import LocalError, McpError
from trimcp.run import run_stdio

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
    if options.trace is not None:
        os.environ["TRIMCP_TRACE"] = "stderr" if options.trace == "-" else options.trace
    found: Any = find_target(target, headers=read_headers(options.headers, options.bearer))
    server = proxy(named(found), name=target, revision=options.revision, connect_timeout=options.connect_timeout)
    try:
        run_stdio(server, grace=options.grace)
    except LocalError as error:
        hint = token_hint(error.__cause__) if isinstance(error.__cause__, McpError) else ""
        raise Failure(theirs(str(error), _FACT) + hint, NO_CONNECTION) from None
    except KeyboardInterrupt:
        sys.exit(0)
