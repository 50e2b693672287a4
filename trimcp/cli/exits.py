"""How the command ends: its exit codes, the errors that choose them, and lines without a screen."""

from __future__ import annotations

import sys
from typing import Final

import click

from trimcp.support.cleaning import clean

TOOL_ERROR: Final = 1
USAGE: Final = 2
NO_CONNECTION: Final = 3
REMOTE_ERROR: Final = 4
BROKEN: Final = 5
TIMED_OUT: Final = 124  # as timeout(1)
INTERRUPTED: Final = 130  # 128 + SIGINT, as in shells
TERMINATED: Final = 143  # 128 + SIGTERM


def _told(codes: str) -> str:
    return "\b\nExit codes:" + codes  # click leaves the lines of a paragraph that begins so as they are


EXIT_CODES: Final = _told("""
  0    it worked
  1    the tool itself reported an error
  2    the command line is wrong, or the file it names
  3    no connection to the server
  4    the server answered with an error, or went away
  124  the time given by --timeout is over
  130  interrupted by Ctrl-C (143: by SIGTERM)
""")

TALK_EXIT_CODES: Final = EXIT_CODES.replace("  1    the tool itself reported an error\n", "")

RUN_EXIT_CODES: Final = _told("""
  0    the client left, or it was told to end (Ctrl-C, SIGTERM)
  1    the server failed while it ran
  2    the command line is wrong, or the server cannot be loaded, or nothing can listen there
  130  a second Ctrl-C ended it at once (143: SIGTERM)
""")

BRIDGE_EXIT_CODES: Final = _told("""
  0    the client left, or it was told to end (Ctrl-C, SIGTERM)
  2    the command line is wrong, or the file it names
  3    no connection to a server
  130  a second Ctrl-C ended it at once (143: SIGTERM)
""")

WORKER_EXIT_CODES: Final = _told("""
  0    it was told to end (Ctrl-C, SIGTERM)
  1    the server failed while it ran
  2    the command line is wrong, or the server cannot be loaded, or the store cannot be used
  130  a second Ctrl-C ended it at once (143: SIGTERM)
""")

NEW_EXIT_CODES: Final = _told("""
  0    it worked
  2    the command line is wrong, or the files cannot be written
""")

TOP_EXIT_CODES: Final = _told("""
  0    it worked
  2    the command line is wrong, or there is no such server
  3    the server is gone
  130  interrupted by Ctrl-C
""")

BENCH_EXIT_CODES: Final = _told("""
  0    all calls were answered rightly
  1    some were not; the table lists them by kind
  2    the command line is wrong, or the file it names
  3    no connection to the server
  4    the server answered with an error before anything was measured
  5    what --require says was not kept, or --baseline shows a regression
  130  interrupted by Ctrl-C (143: by SIGTERM); what was measured is printed
""")

DEMO_EXIT_CODES: Final = _told("""
  0    all went well, and nothing was left
  2    the command line is wrong, or there is nothing to search
  3    no connection to the server
  4    the server answered with an error, or something was left
  130  interrupted by Ctrl-C
""")

LOGIN_EXIT_CODES: Final = _told("""
  0    it worked
  2    the command line is wrong, or there is no such login
  3    the server or its authorization server cannot be reached, or gave no token
  130  interrupted by Ctrl-C
""")

HOSTS_EXIT_CODES: Final = _told("""
  0    it worked
  1    something that is configured cannot work (hosts)
  2    the command line is wrong, or a file; nothing was changed
""")

RECORD_EXIT_CODES: Final = _told("""
  those of the program, if it ended before its client; else
  0    the client left
  2    the command line is wrong
  3    no connection to the server
""")

REPLAY_EXIT_CODES: Final = _told("""
  0    the same was said
  1    something differs
  2    the command line or the journal is wrong
  3    no connection to the server
""")


def say(line: str) -> None:
    """Print a line to standard error, where there is no `Screen`. Text from peers in it is escaped."""
    print(clean(line), file=sys.stderr, flush=True)


class Failure(click.ClickException):
    """Ends the command with a message on standard error and this exit code. Text from peers in it is escaped.

    Whatever a command needs may raise it, wherever the text can say what to do.
    """

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(clean(message))
        self.exit_code = code  # type: ignore[misc]  # click reads it from the instance
