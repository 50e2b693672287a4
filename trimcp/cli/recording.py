"""`trimcp record` and `trimcp replay`: a wire journal that becomes a regression test. Their words and their help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import click

__all__ = ["record", "replay"]

_MEBI: Final = 1024 * 1024
_POSITIVE: Final = click.FloatRange(0, min_open=True)
_SIDES: Final = click.Choice(["client", "server"])
_RECORD_CODES: Final = """\
\b
Exit codes:
  those of the program, if it ended before its client; else
  0    the client left
  2    the command line is wrong
  3    no connection to the server
"""
_REPLAY_CODES: Final = """\
\b
Exit codes:
  0    the same was said
  1    something differs
  2    the command line or the journal is wrong
  3    no connection to the server
"""


@click.command(epilog=_RECORD_CODES, short_help="Write down what a client and a server say.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("target", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--unmasked", is_flag=True, help="Write secrets as they are.")
@click.option("--max-size", metavar="MIB", default=64.0, show_default=True, type=_POSITIVE, help="Stop at this size.")
def record(file: Path, target: tuple[str, ...], unmasked: bool, max_size: float) -> None:
    """Stand between a client and a server, and write down in FILE all that they say.

    It is put in place of the server's command in the configuration of a host: it speaks with the client over standard
    input and output, and starts the server's command (after --), or connects to its URL. An existing FILE is kept, and
    the next one gets a number.

    \b
    Examples:
      trimcp record weather.jsonl -- python weather.py
      trimcp record weather.jsonl https://mcp.example/mcp
    """
    from trimcp.cli.recording_proxy import run_proxy

    sys.exit(run_proxy(file, target, masked=not unmasked, max_bytes=int(max_size * _MEBI)))


@click.command(epilog=_REPLAY_CODES, short_help="Tell whether a server still answers as recorded.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", nargs=-1, type=click.UNPROCESSED)
@click.option("--ignore", multiple=True, metavar="POINTER", help="What may differ in any message; * is any step.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    type=_POSITIVE,
    help="Time for what is expected next.",
)
@click.option("--side", default="client", show_default=True, type=_SIDES, help="Which one to play.")
def replay(file: Path, target: tuple[str, ...], ignore: tuple[str, ...], timeout: float, side: str) -> None:
    """Say to TARGET what the client said in FILE, and compare the answers with what the server said then.

    What cannot be the same twice is not compared: ids, cursors, points in time, how often there was progress, and what
    --ignore names by its JSON Pointer, such as /result/structuredContent/elapsed. TARGET is what the other commands
    take; a command may be written last, after --. With --side server there is none: it plays the server over standard
    input and output, for a client that starts it in place of one.

    \b
    Examples:
      trimcp replay weather.jsonl weather.py
      trimcp replay weather.jsonl --ignore /result/_meta -- npx -y some-server
    """
    from trimcp.cli.recording_replay import run_replay

    sys.exit(run_replay(file, target, ignore=ignore, patience=timeout, client=side == "client"))
