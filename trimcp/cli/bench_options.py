"""The words of `trimcp bench`: its options, as they are typed. It imports nothing that measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeVar

import attrs
import click

from trimcp.cli.options import BEARER_OPTION, HEADER_OPTION, REVISION_OPTION

__all__ = ["BENCH_EXIT_CODES", "BENCH_SECTIONS", "BenchOptions", "bench_options"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

BENCH_EXIT_CODES: Final = """\
\b
Exit codes:
  0    all calls were answered rightly
  1    some were not; the table lists them by kind
  2    the command line is wrong, or the file it names
  3    no connection to the server
  4    the server answered with an error before anything was measured
  130  interrupted by Ctrl-C (143: by SIGTERM); what was measured is printed
"""

BENCH_SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "What is sent": ("tool", "arguments", "expect", "method", "params", "script", "progress"),
    "How much at a time": ("sessions", "under_way", "rate", "spacing", "think"),
    "For how long": ("seconds", "count", "warm_up"),
    "What is given up": ("cancel", "cancel_after", "timeout", "timeouts"),
    "How the server is reached": ("revision", "transport", "reply", "headers", "bearer", "pids"),
    "Another server to compare with": ("compare", "rounds", "compare_headers", "compare_bearer", "compare_pids"),
    "What is shown": ("json", "save", "plot", "quiet"),
}
"""The sections of the help, and which options stand in each."""


@attrs.frozen(kw_only=True)
class BenchOptions:
    """What is to be measured and shown, as it was typed; None is what was not.

    Attributes:
        tool, arguments, expect: the tool to call, its `NAME=VALUE` and `NAME:=JSON`, and what it has to answer.
        method, params: the request to send instead, and its parameters as JSON.
        script: the file with a mix of them.
        sessions, under_way: how many, and calls under way in each.
        rate, spacing: calls that begin per second, and how they are spaced.
        seconds, count: for how long; with `compare` each round.
        warm_up: "2" or "2s" (seconds), or "100x" (calls).
        think, cancel, cancel_after, timeout, timeouts, progress, seed, revision, transport, reply: as in `Plan`.
        headers, bearer, pids: how TARGET is reached, and its processes.
        compare, compare_headers, compare_bearer, compare_pids: another server, likewise.
        rounds: how often each of the two is measured.
        json: print the figures as JSON.
        save, plot: files for the figures as JSON, and for a picture of them.
        quiet: show nothing while it runs.
    """

    tool: str | None
    arguments: tuple[str, ...]
    expect: str | None
    method: str | None
    params: str | None
    script: str | None
    sessions: int
    under_way: int | None
    rate: float | None
    spacing: Literal["constant", "poisson"]
    seconds: float | None
    count: int | None
    warm_up: str | None
    think: float
    cancel: float
    cancel_after: float | None
    timeout: float | None
    timeouts: float | None
    progress: bool
    seed: int
    revision: str | None
    transport: Literal["auto", "http", "sse"]
    reply: Literal["any", "json", "sse"]
    headers: tuple[str, ...] = attrs.field(repr=False)
    bearer: str | None = attrs.field(repr=False)
    pids: tuple[int, ...]
    compare: str | None
    compare_headers: tuple[str, ...] = attrs.field(repr=False)
    compare_bearer: str | None = attrs.field(repr=False)
    compare_pids: tuple[int, ...]
    rounds: int
    json: bool
    save: str | None
    plot: str | None
    quiet: bool


def bench_options(function: CommandT) -> CommandT:
    """Give a command the options of `trimcp bench`: the fields of `BenchOptions`."""
    for option in reversed([*_load(), *_reach(), *_show()]):
        function = option(function)
    return function


def _load() -> list[Callable[[Any], Any]]:
    positive, share = click.FloatRange(0, min_open=True), click.FloatRange(0, 1)
    return [
        click.option("--tool", metavar="NAME", help="The tool to call."),
        click.option(
            *("--arg", "arguments", "-a"),
            multiple=True,
            metavar="NAME=VALUE",
            help="An argument, read as its schema says, or NAME:=JSON; {n} is the call's number. Again for more.",
        ),
        click.option("--expect", metavar="TEXT", help="What the first text of each answer has to be; {n} as above."),
        click.option("--method", metavar="METHOD", help="Send this request instead, such as tools/list."),
        click.option("--params", metavar="JSON", help="Its parameters, an object."),
        click.option("--script", metavar="FILE", help="Mix the calls that a .json or .toml file lists."),
        click.option(
            "--sessions", metavar="N", default=1, show_default=True, type=click.IntRange(1), help="Connections."
        ),
        click.option("--under-way", metavar="N", type=click.IntRange(1), help="Calls under way in each.  [default: 1]"),
        click.option(
            "--rate",
            metavar="N",
            type=positive,
            help="Begin so many calls a second, answered or not (open loop).",
        ),
        click.option(
            "--spacing",
            default="constant",
            show_default=True,
            type=click.Choice(["constant", "poisson"]),
            help="How --rate spaces them.",
        ),
        click.option(
            "--seconds", metavar="SECONDS", type=positive, help="Measure for so long.  [default: 10; each round: 3]"
        ),
        click.option("--count", metavar="N", type=click.IntRange(1), help="Measure so many calls instead."),
        click.option(
            "--warm-up", metavar="AMOUNT", help="Seconds (2), or calls (100x), before.  [default: 1, with --count 0]"
        ),
        click.option(
            "--think",
            metavar="SECONDS",
            default=0.0,
            type=click.FloatRange(0),
            help="Time between an answer and the next.",
        ),
        click.option("--cancel", default=0.0, type=share, metavar="SHARE", help="Cancel this share, 0.1 for a tenth."),
        click.option(
            "--cancel-after", metavar="SECONDS", type=click.FloatRange(0), help="Time until then.  [default: random]"
        ),
        click.option("--timeout", metavar="SECONDS", type=positive, help="Give a call up after this time."),
        click.option("--timeouts", type=share, metavar="SHARE", help="The share that --timeout is for.  [default: 1]"),
        click.option("--progress", is_flag=True, help="Ask for progress, and count the notifications."),
        click.option("--seed", metavar="N", default=0, type=int, help="What everything random begins with."),
    ]


def _reach() -> list[Callable[[Any], Any]]:
    pid = click.IntRange(1)
    return [
        REVISION_OPTION,
        click.option(
            "--transport",
            default="auto",
            show_default=True,
            type=click.Choice(["auto", "http", "sse"]),
            help="Streamable HTTP, or the older HTTP+SSE.",
        ),
        click.option(
            "--reply",
            default="any",
            show_default=True,
            type=click.Choice(["any", "json", "sse"]),
            help="How a server has to answer a POST; anything else is an error.",
        ),
        HEADER_OPTION,
        BEARER_OPTION,
        click.option(
            *("--pid", "pids"),
            multiple=True,
            type=pid,
            metavar="PID",
            help="A server's process, to read its CPU time and memory; a child's is known. Again for more.",
        ),
        click.option("--compare", metavar="TARGET", help="Measure this one too, in turns, and compare."),
        click.option(
            "--rounds", metavar="N", default=5, show_default=True, type=click.IntRange(1), help="Turns of each."
        ),
        click.option(
            *("--compare-header", "compare_headers"), multiple=True, metavar="HEADER", help="--header for the other."
        ),
        click.option("--compare-bearer", metavar="SOURCE", help="--bearer for the other."),
        click.option(
            *("--compare-pid", "compare_pids"), multiple=True, type=pid, metavar="PID", help="--pid for the other."
        ),
    ]


def _show() -> list[Callable[[Any], Any]]:
    return [
        click.option("--json", is_flag=True, help="Print the result as JSON; the table goes to standard error."),
        click.option("--save", metavar="FILE", help="Write all figures to FILE as JSON."),
        click.option("--plot", metavar="FILE", help="Draw them, as .svg or .png (needs trimcp[plot])."),
        click.option("-q", "--quiet", is_flag=True, help="Nothing but the result."),
    ]
