"""The command itself: which commands there are, and in which module each is."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import click

from trimcp.cli.exits import EXIT_CODES, INTERRUPTED, Failure
from trimcp.cli.text import theirs
from trimcp.errors import AuthorizationError, LocalError

COMMANDS: Final = {
    "run": ("serve.run", "Serve a file or module, here or by network."),
    "worker": ("serve.worker", "Carry out the tasks of a server."),
    "login": ("logins", "Log in to a server that wants an access token."),
    "logout": ("logins", "Forget the login to a server."),
    "whoami": ("logins", "Show which logins are kept."),
    "inspect": ("talking", "Show what a server offers."),
    "call": ("talking", "Call a tool and print the result."),
    "read": ("talking", "Print what a resource holds."),
    "prompt": ("talking", "Print the messages of a prompt."),
    "shell": ("shell", "Talk to a server, line by line."),
    "bridge": ("serve.composing", "Serve a server over standard input and output."),
    "gateway": ("serve.composing", "Serve the servers of a file as one."),
    "bench": ("bench.run", "Put load on a server and measure it."),
    "record": ("recording", "Write down what a client and a server say."),
    "new": ("new", "Begin a project: a server, its tests, its deployment."),
    "install": ("hosts", "Write a server into a host's configuration."),
    "uninstall": ("hosts", "Take a server out of one."),
    "hosts": ("hosts", "Show what hosts have, and what is wrong with it."),
    "ps": ("top.command", "List the servers of yours that can be looked at."),
    "top": ("top.command", "See what servers do: calls, progress, where each waits."),
    "replay": ("recording", "Tell whether a server still answers as recorded."),
    "demo": ("demo", "Watch a client and a server at work."),
}
"""Of each command its module in `trimcp.cli`, which is imported when it is used, and what it does."""


def find_command(name: str = "") -> click.Command | None:
    """Return the command of this name, whose module is imported now; None if there is none."""
    if name not in COMMANDS:
        return None
    found: click.Command = getattr(import_module(f"trimcp.cli.{COMMANDS[name][0]}"), name)
    return found


class _Commands(click.Group):
    """The commands. Ctrl-C also ends one before it handles signals itself, for example while a server is imported.

    What a command may raise, `Failure` apart, is made one here: its exit code is that of a wrong command line.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return find_command(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, told) for name, (_, told) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Failure("interrupted", INTERRUPTED) from None
        except (LocalError, AuthorizationError) as error:  # what was asked for, or is configured, cannot be
            raise Failure(theirs(error, None)) from None


@click.group(cls=_Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="trimcp", prog_name="trimcp")
def app() -> None:
    """Run servers of the Model Context Protocol, look into them, and call their tools.

    \b
    Examples:
      trimcp demo
      trimcp inspect "python server.py"
      trimcp call weather.py get_forecast latitude=40.7 longitude=-74
    """
