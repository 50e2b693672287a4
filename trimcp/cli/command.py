"""What all commands have in common beside their options: help in sections, and a server's command given last."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

WORDS: Final = "trimcp.words"
"""Where click's context keeps the words that a command was given."""


class Subcommand(click.Command):
    """A command whose server may be given last, after `--`, and whose `--trace` and `--admin` may have a value.

    `sections`: the sections of its help: titles, and the names of the parameters under each.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections: Mapping[str, Sequence[str]] = sections or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {each.name: each.get_help_record(ctx) for each in self.get_params(ctx) if isinstance(each, click.Option)}
        named = {title: [left.pop(name) for name in names] for title, names in self.sections.items()}
        for title, records in {**named, "Other options" if named else "Options": list(left.values())}.items():
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[WORDS] = list(args)
        at = args.index("--") if "--" in args else len(args)
        ours = [f"{arg}=-" if arg in ("--trace", "--admin") else arg for arg in args[:at]]
        rest = args[at:]
        if ctx.command.name == "run":
            return super().parse_args(ctx, ours + rest)
        if rest:
            ours = [shlex.join(rest[1:]), *ours]
        try:
            return super().parse_args(ctx, ours)
        except click.UsageError as error:
            if type(error) is not click.UsageError:  # not a subclass, which is about an option
                raise
            hint = "A server's command line goes in quotes, as one word, or last, after --"
            raise click.UsageError(f"{error.message}\n{hint}", error.ctx) from None
