"""From the arguments of `trimcp bench` to a `Plan`: its options and its requests. Does not measure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import click

from trimcp.bench.plan import STEPS, MixEntry, NumberCheck, Plan
from trimcp.cli.exits import Failure
from trimcp.cli.options import ReachOptions, option, with_options
from trimcp.cli.schemas import ValueProblem, object_of, parse_arguments
from trimcp.errors import LocalError
from trimcp.support.files import UnusableFile, read_text

BENCH_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "What is sent": (
        *("tool", "arguments", "expect", "method", "params", "script", "progress"),
        *("step", "answer", "sampled", "resource"),
    ),
    "How much at a time": (
        *("sessions", "session_calls", "under_way", "rate", "spacing", "think", "stages", "stages_of", "find_limit"),
        *("processes", "listen", "join"),
    ),
    "For how long": ("seconds", "count", "warm_up"),
    "What is given up": ("cut", "cancel", "cancel_after", "timeout", "timeouts"),
    "How the server is reached": ("revision", "transport", "reply", "replica_by", "headers", "bearer", "pids"),
    "Another server to compare with": ("compare", "rounds", "compare_headers", "compare_bearer", "compare_pids"),
    "What it has to keep to": ("require", "baseline", "tolerance", "junit", "github"),
    "What is shown": ("json", "save", "html", "plot", "trace", "quiet"),
}
"""The sections of the help, and the options in each."""

_SECONDS_EACH_ROUND: Final = 3.0
_WARM_UP: Final = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>s|x)?")
_USUAL_WARM_UP: Final = 1.0
_PID: Final = click.IntRange(1)

_SCRIPT: Final = """\
a script is a list of calls, each with a tool or a method, in JSON

  [{"tool": "echo", "arguments": {"text": "hello {n}"}, "expect": "hello {n}", "weight": 9},
   {"method": "tools/list"}]

or in TOML, as tables called [[mix]]"""


@attrs.frozen(kw_only=True)
class BenchOptions(ReachOptions):
    """The options as typed, without those that are fields of `Plan`.

    It has more than 20 fields because each is an option of one command.
    """

    tool: str | None = option(metavar="NAME", help="The tool to call.")
    arguments: tuple[str, ...] = option(
        *("--arg", "-a"),
        multiple=True,
        metavar="NAME=VALUE",
        help="An argument, read as its schema says, or NAME:=JSON; {n} is the call's number. Again for more.",
    )
    expect: str | None = option(metavar="TEXT", help="What the first text of each answer has to be; {n} as above.")
    method: str | None = option(metavar="METHOD", help="Send this request instead, such as tools/list.")
    params: str | None = option(metavar="JSON", help="Its parameters, an object.")
    script: str | None = option(metavar="FILE", help="Mix the calls that a .json or .toml file lists.")
    step: str = option(
        type=click.Choice(STEPS),
        default="call",
        metavar="KIND",
        help="What a call is: call, or one with a question, a change that is told, a task, or agent (tools).",
    )
    answer: str | None = option(metavar="JSON", help="What forms are filled in with, an object (--step question).")
    resource: str | None = option(metavar="URI", help="What the tool changes (--step change).")
    warm_up: str | None = option(
        metavar="AMOUNT", help="Seconds (2), or calls (100x), before.  [default: 1, with --count or --stages 0]"
    )
    pids: tuple[int, ...] = option(
        "--pid",
        multiple=True,
        type=_PID,
        metavar="PID",
        help="A server's process, to read its CPU time and memory; a child's is known. Again for more.",
    )
    compare: str | None = option(metavar="TARGET", help="Measure this one too, in turns, and compare.")
    rounds: int = option(metavar="N", default=5, type=click.IntRange(1), help="Turns of each.")
    compare_headers: tuple[str, ...] = option(
        "--compare-header", multiple=True, metavar="HEADER", repr=False, help="--header for the other."
    )
    compare_bearer: str | None = option(metavar="SOURCE", repr=False, help="--bearer for the other.")
    compare_pids: tuple[int, ...] = option(
        "--compare-pid", multiple=True, type=_PID, metavar="PID", help="--pid for the other."
    )
    processes: int = option(
        metavar="N", default=1, type=click.IntRange(1, 64), help="Generate the load in so many processes together."
    )
    listen: str | None = option(
        metavar="ADDRESS", help="Let so many --processes join at HOST:PORT, and gather what they measure."
    )
    join: str | None = option(
        metavar="ADDRESS",
        help="Be one of those: whoever listens says what to send. TARGET is as seen from here.",
    )
    find_limit: bool = option(
        is_flag=True, help="Raise the rate until --require breaks, and tell the highest that held."
    )
    require: tuple[str, ...] = option(
        multiple=True,
        metavar="LIST",
        help="Fail unless these hold, such as 'p99<50ms,errors<0.1%,echo:p50<5ms'. Again for more.",
    )
    baseline: tuple[str, ...] = option(
        multiple=True, metavar="FILE", help="Fail if it is worse than what --save wrote to FILE. Again for more runs."
    )
    tolerance: float = option(
        metavar="SHARE", type=click.FloatRange(0, 10), default=0.1, help="How much worse than the baseline is well."
    )
    junit: str | None = option(metavar="FILE", help="Write what was checked to FILE as JUnit's XML.")
    github: bool = option(is_flag=True, help="Print what failed as annotations of a GitHub workflow.")
    json: bool = option(is_flag=True, help="Print the result as JSON; the table goes to standard error.")
    save: str | None = option(metavar="FILE", help="Write all figures to FILE as JSON.")
    html: str | None = option(metavar="FILE", help="Write a page to FILE: charts, figures and how they were measured.")
    plot: str | None = option(metavar="FILE", help="Draw them, as .svg or .png (needs trimcp[plot]).")
    trace: str | None = option(
        metavar="[=FILE]", help="Show what is said before anything is measured, or add it to FILE; secrets are masked."
    )
    quiet: bool = option("-q", "--quiet", is_flag=True, help="Nothing but the result.")


def bench_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command these options: it is called with `options`, and with the fields of a `Plan` that are options."""
    planned = [_planned(field) for field in attrs.fields(Plan) if field.metadata.get("help") is not None]
    return with_options(BenchOptions, *planned)(function)


def _planned(field: attrs.Attribute[Any]) -> Callable[[Any], Any]:
    """Return the option for a field of a plan; both click and the field validate it."""
    check = field.validator
    kind: click.ParamType[Any] | None = None
    if isinstance(check, NumberCheck):
        limits = None if check.most > 1 else check.most
        kind = click.IntRange(int(check.least)) if check.whole else click.FloatRange(check.least, limits, check.above)
    elif "choices" in field.metadata:
        kind = click.Choice(field.metadata["choices"])
    return click.option(
        "--" + field.name.replace("_", "-"),
        default=field.default,
        show_default=bool(field.default),
        type=kind,
        is_flag=field.default is False,
        metavar=field.metadata.get("metavar"),
        help=field.metadata["help"],
    )


def check_options(options: BenchOptions) -> None:
    """Refuse options that would be ignored or contradict each other."""
    ways = {"--tool": options.tool, "--method": options.method, "--script": options.script}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise Failure(f"{' and '.join(given)} exclude each other; a --script can mix tools and methods")
    if options.arguments and options.tool is None:
        raise Failure("--arg goes with --tool")
    if options.params and options.method is None:
        raise Failure("--params goes with --method")
    if options.expect is not None and options.script is not None:
        raise Failure("with --script each call says by itself what to expect")
    if (options.step != "call" or options.resource is not None) and options.tool is None:
        raise Failure("--step and --resource go with --tool; in a --script each call says by itself what it is")
    if options.compare is not None and (options.require or options.baseline or options.junit or options.github):
        raise Failure("--require, --baseline, --junit and --github judge one server, and --compare shows two")
    if options.listen is not None and (options.find_limit or options.compare is not None or options.join is not None):
        raise Failure("--listen gathers one measurement: leave out --find-limit, --compare and --join")
    if options.find_limit and not options.require:
        raise Failure("--find-limit needs --require to say what has to hold, such as 'p99<50ms,errors<0.1%'")
    if options.find_limit and (options.compare is not None or options.baseline or options.junit or _drawn(options)):
        raise Failure("--find-limit measures many times: leave out --compare, --baseline, --junit, --html and --plot")
    if options.compare is None and (options.compare_headers or options.compare_bearer or options.compare_pids):
        raise Failure("--compare-header, --compare-bearer and --compare-pid go with --compare")


def _drawn(options: BenchOptions) -> bool:
    return bool(options.plot or options.html)


def plan_of(options: BenchOptions, load: Mapping[str, Any]) -> Plan:
    """Return the plan without its requests. Raises Failure: the options are not valid; the text says what is."""
    counted = load["count"] is not None
    seconds = load["seconds"]
    if seconds is None and not counted and options.compare is not None:
        seconds = _SECONDS_EACH_ROUND
    if seconds is None and options.find_limit:
        seconds = _SECONDS_EACH_ROUND
    warm_up, warm_up_count = _warm_up(options.warm_up, counted or load["stages"] is not None)
    known = {"warm_up": warm_up, "warm_up_count": warm_up_count, "revision": options.revision, "pids": options.pids}
    answer = {} if options.answer is None else object_of(options.answer, "--answer", '{"seat": "window"}')
    try:
        return Plan(**{**load, **known, "seconds": seconds, "answer": answer})
    except LocalError as error:
        text = re.sub(r"^(\w+)(?= must be )", lambda found: "--" + found[1].replace("_", "-"), str(error))
        raise Failure(text) from None


def _warm_up(typed: str | None, counted: bool) -> tuple[float, int]:
    """Return how long to warm up, as seconds and as calls; one of them is 0."""
    if typed is None:
        return (0.0 if counted else _USUAL_WARM_UP), 0
    found = _WARM_UP.fullmatch(typed)
    unit = found and (found["unit"] or ("x" if counted else "s"))
    if found is None or (unit == "x" and "." in found["number"]):
        raise Failure(f"--warm-up is seconds, such as 2s, or calls, such as 100x, not {typed!r:.60}")
    return (float(found["number"]), 0) if unit == "s" else (0.0, int(found["number"]))


# Requests


def needs_tools(options: BenchOptions) -> bool:
    """Whether the requests can be made only once the server has listed its tools."""
    named = any(value is not None for value in (options.tool, options.method, options.script))
    return not named or any(not word.partition("=")[0].endswith(":") for word in options.arguments)


def _mix_of(options: BenchOptions, schema: Mapping[str, Any] | None = None) -> tuple[MixEntry, ...]:
    """Return the requests to send; `schema` is the tool's input schema, if known."""
    if options.script is not None:
        return read_script(options.script)
    if options.method is not None:
        text = "{}" if options.params is None else options.params
        params = object_of(text, "--params", '{"uri": "notes:///today"}')
        return (MixEntry(options.method, params, expect=options.expect),)
    if options.tool is not None:
        arguments = _arguments(options.arguments, schema or {})
        more = {"expect": options.expect, "step": options.step, "resource": options.resource}
        return (MixEntry.tool(options.tool, arguments, **more),)
    raise Failure("say what to send: --tool NAME, --method METHOD or --script FILE")


def with_mix(plan: Plan, options: BenchOptions, schema: Mapping[str, Any] | None = None) -> Plan:
    """Return the plan with its requests."""
    try:
        return attrs.evolve(plan, mix=_mix_of(options, schema))
    except LocalError as error:
        raise Failure(str(error)) from None


def _arguments(words: tuple[str, ...], schema: Mapping[str, Any]) -> dict[str, Any]:
    try:
        # A load may well try what a tool does not have: the table tells what came of it.
        return parse_arguments(words, schema, option="--arg ", others=True)
    except ValueProblem as problem:
        raise Failure(str(problem)) from None


def read_script(file: str) -> tuple[MixEntry, ...]:
    """Return the mix of requests that a file lists."""
    import tomllib  # only needed here

    path = Path(file)
    try:
        text = read_text(path, "")
        if path.suffix.lower() == ".toml":
            value: Any = tomllib.loads(text)
        elif path.suffix.lower() == ".json":
            value = json.loads(text)
        else:
            raise Failure(f"--script reads .json and .toml files; {file!r:.200} has another ending")
    except UnusableFile as error:
        raise Failure(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise Failure(f"{file} is no valid {path.suffix[1:].upper()}: {error}") from None
    if isinstance(value, dict) and set(value) == {"mix"}:
        value = value["mix"]
    if not isinstance(value, list) or not value:
        raise Failure(f"{file} holds no calls: {_SCRIPT}")
    mix = []
    for number, entry in enumerate(value, 1):
        try:
            mix.append(MixEntry.from_json(entry))
        except LocalError as error:
            raise Failure(f"{file}, call {number}: {error}") from None
    return tuple(mix)
