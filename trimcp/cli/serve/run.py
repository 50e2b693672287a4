"""The command `trimcp run`. It loads nothing that only a client needs: hosts wait for the servers that it starts."""

from __future__ import annotations

import shlex
import sys
from typing import Final

import click

from trimcp.cli.exits import RUN_EXIT_CODES, Failure, say
from trimcp.cli.loading import NO_TASKS, Loaded, become_program, load_to_run
from trimcp.cli.options import (
    RUN_SECTIONS,
    SERVER,
    WORDS,
    RunOptions,
    Subcommand,
    check_network,
    trace_stdio,
    with_options,
)
from trimcp.cli.text import theirs
from trimcp.run import run_stdio

_WAITING: Final = """\
{name} waits for a client that writes JSON-RPC to its standard input; Ctrl-C ends it.
Clients start it themselves: trimcp inspect {server}. To have it wait for them, add --http."""


@click.command(
    cls=Subcommand,
    sections=RUN_SECTIONS,
    epilog=RUN_EXIT_CODES,
)
@click.argument("server", type=SERVER)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@with_options(RunOptions)
def run(server: str, arguments: tuple[str, ...], options: RunOptions) -> None:
    """Serve SERVER, a FILE.py or package.module with a trimcp.Server, over standard input and output or a network.

    It ends when the client leaves; over a network it stays. On Ctrl-C or SIGTERM it takes no more calls, lets those
    under way answer, and then ends; a second one ends it at once. What follows `--` becomes the program's own
    arguments.

    \b
    Examples:
      trimcp run weather.py
      trimcp run package.module:server --grace 30
      trimcp run codesearch.py -- ~/project
      trimcp run weather.py --watchdog 30
      trimcp run weather.py --http --reload
      trimcp run weather.py --http --port 0 --admin
      trimcp run weather.py --grpc --port 0
      trimcp run long_job.py --http --tasks sqlite:///var/lib/jobs.db
      trimcp run agent_tools.py --agent-tools --port 8080
      trimcp run weather.py --http --uds /run/weather/mcp.sock --uds-mode 660 --allowed-host mcp.example
      trimcp run weather.py --http --host 0.0.0.0 --token-file tokens.txt --workers 4 --access-log
    """
    words = click.get_current_context().meta[WORDS]
    over_network = check_network(options)
    trace_stdio(options.trace)
    become_program(server, arguments)

    def load() -> Loaded:
        # The processes look at one another.
        loaded = load_to_run(server, options, group=options.admin_http and options.workers > 1)
        if options.tasks is not None and not loaded.server.move_tasks(options.tasks, workers=True):
            raise Failure(NO_TASKS.format(name=server))
        return loaded

    if over_network:
        from trimcp.cli.serve.network import serve  # not needed on standard input and output

        sys.exit(serve(load, words, options))
    if options.reload:
        from trimcp.cli.serve.reloading import run_reloading  # for those who write a server

        sys.exit(run_reloading(words, server, options.grace))
    loaded = load().server
    if sys.stdin.isatty():  # a user at a terminal, who would see no output
        say(_WAITING.format(name=theirs(loaded.info.name, 60), server=shlex.quote(server)))
    run_stdio(loaded, grace=options.grace, watchdog=options.watchdog)
