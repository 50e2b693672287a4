"""From the words of `trimcp bench` to a `Plan`: tools and their arguments, other requests, and mixes of them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trimcp.bench.plan import MixEntry, Plan
from trimcp.cli.bench_options import BenchOptions
from trimcp.cli.exits import USAGE, Failure
from trimcp.cli.values import ValueProblem, parse_arguments
from trimcp.errors import LocalError

__all__ = ["check_options", "needs_tools", "plan_of", "read_script"]

_WARM_UP: Final = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>s|x)?")
_SECONDS: Final = 10.0
_SECONDS_EACH_ROUND: Final = 3.0
_USUAL_WARM_UP: Final = 1.0

_SCRIPT: Final = """\
a script is a list of calls, each with a tool or a method, in JSON

  [{"tool": "echo", "arguments": {"text": "hello {n}"}, "expect": "hello {n}", "weight": 9},
   {"method": "tools/list"}]

or in TOML, as tables called [[mix]]"""


def needs_tools(options: BenchOptions) -> bool:
    """Whether the plan can be made only with the server's own list of tools at hand."""
    named = any(value is not None for value in (options.tool, options.method, options.script))
    return not named or any(not _is_json(word) for word in options.arguments)


def plan_of(options: BenchOptions, schema: Mapping[str, Any] | None = None) -> Plan:
    """Return what is to be measured.

    Args:
        options: as they were typed.
        schema: of the tool's arguments, where it is known.

    Raises:
        Failure: it makes no sense; the text says what would.
    """
    check_options(options)
    seconds = options.seconds
    if seconds is None and options.count is None:
        seconds = _SECONDS if options.compare is None else _SECONDS_EACH_ROUND
    warm_up, warm_up_count = _warm_up(options)
    shared = ("sessions", "under_way", "rate", "spacing", "count", "think", "cancel", "cancel_after", "timeout")
    more = ("progress", "seed", "revision", "transport", "reply", "pids")
    try:
        return Plan(
            _mix(options, schema),
            seconds=seconds,
            warm_up=warm_up,
            warm_up_count=warm_up_count,
            timeouts=1.0 if options.timeouts is None else options.timeouts,
            **{name: getattr(options, name) for name in (*shared, *more)},
        )
    except LocalError as error:
        text = re.sub(r"^(\w+)(?= must be )", lambda found: "--" + found[1].replace("_", "-"), str(error))
        raise Failure(text, USAGE) from None


def check_options(options: BenchOptions) -> None:
    """Refuse what would be ignored, or means two things.

    Raises:
        Failure: there is such an option; the text says what to do.
    """
    ways = {"--tool": options.tool, "--method": options.method, "--script": options.script}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise Failure(f"{' and '.join(given)} exclude each other; a --script can mix tools and methods", USAGE)
    for name, value, other in [
        ("--arg", options.arguments, "--tool"),
        ("--params", options.params, "--method"),
    ]:
        if value and ways[other] is None:
            raise Failure(f"{name} goes with {other}", USAGE)
    if options.expect is not None and options.script is not None:
        raise Failure("with --script each call says by itself what to expect", USAGE)
    if options.seconds is not None and options.count is not None:
        raise Failure("measure either for --seconds or a --count of calls", USAGE)
    if options.timeouts is not None and options.timeout is None:
        raise Failure("--timeouts is the share of calls that have a timeout: say with --timeout which", USAGE)
    if options.cancel_after is not None and not options.cancel:
        raise Failure("--cancel-after goes with --cancel, the share of calls to cancel", USAGE)
    if options.spacing == "poisson" and options.rate is None:
        raise Failure("--spacing goes with --rate", USAGE)
    if options.compare is None and (options.compare_headers or options.compare_bearer or options.compare_pids):
        raise Failure("--compare-header, --compare-bearer and --compare-pid go with --compare", USAGE)


def _warm_up(options: BenchOptions) -> tuple[float, int]:
    """Return how long to warm up, as seconds and as calls; one of them is 0."""
    if options.warm_up is None:
        return (0.0 if options.count is not None else _USUAL_WARM_UP), 0
    found = _WARM_UP.fullmatch(options.warm_up)
    unit = found and (found["unit"] or ("s" if options.count is None else "x"))
    if found is None or (unit == "x" and "." in found["number"]):
        raise Failure(f"--warm-up is seconds, such as 2s, or calls, such as 100x, not {options.warm_up!r:.60}", USAGE)
    return (float(found["number"]), 0) if unit == "s" else (0.0, int(found["number"]))


# What is sent


def _mix(options: BenchOptions, schema: Mapping[str, Any] | None) -> tuple[MixEntry, ...]:
    if options.script is not None:
        return read_script(options.script)
    if options.method is not None:
        return (MixEntry(options.method, _params(options.params), expect=options.expect),)
    if options.tool is None:
        raise Failure("say what to send: --tool NAME, --method METHOD or --script FILE", USAGE)
    return (MixEntry.tool(options.tool, _arguments(options.arguments, schema or {}), expect=options.expect),)


def _is_json(word: str) -> bool:
    return word.partition("=")[0].endswith(":")


def _arguments(words: tuple[str, ...], schema: Mapping[str, Any]) -> dict[str, Any]:
    for word in words:
        if not word.partition("=")[0].rstrip(":") or "=" not in word:
            raise Failure(f"{word!r:.60} is no argument; write --arg NAME=VALUE or --arg NAME:=JSON", USAGE)
    try:
        arguments = parse_arguments([word for word in words if not _is_json(word)], schema)
    except ValueProblem as problem:
        raise Failure(str(problem), USAGE) from None
    for word in words:
        if _is_json(word):
            name, _, text = word.partition(":=")
            if name in arguments:
                raise Failure(f"the argument {name!r:.60} is given twice", USAGE)
            arguments[name] = _json(text, f"--arg {name}")
    return arguments


def _params(text: str | None) -> dict[str, Any]:
    params = {} if text is None else _json(text, "--params")
    if not isinstance(params, dict):
        raise Failure('--params must be an object, such as \'{"uri": "notes:///today"}\'', USAGE)
    return params


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Failure(f"{where} is not valid JSON: {error}", USAGE) from None


def read_script(file: str) -> tuple[MixEntry, ...]:
    """Return the mix of requests that a file lists.

    Raises:
        Failure: it cannot be read, or lists none; the text says which entry is wrong, and what would be right.
    """
    path = Path(file)
    try:
        text = path.read_text("utf-8")
        if path.suffix.lower() == ".toml":
            value: Any = tomllib.loads(text)
        elif path.suffix.lower() == ".json":
            value = json.loads(text)
        else:
            raise Failure(f"--script reads .json and .toml files; {file!r:.200} has another ending", USAGE)
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(f"cannot read {file}: {getattr(error, 'strerror', None) or error}", USAGE) from None
    except (ValueError, RecursionError) as error:
        raise Failure(f"{file} is no valid {path.suffix[1:].upper()}: {error}", USAGE) from None
    if isinstance(value, dict) and set(value) == {"mix"}:
        value = value["mix"]
    if not isinstance(value, list) or not value:
        raise Failure(f"{file} holds no calls: {_SCRIPT}", USAGE)
    return tuple(_entry(file, number, entry) for number, entry in enumerate(value, 1))


def _entry(file: str, number: int, entry: Any) -> MixEntry:
    try:
        return MixEntry.from_json(entry)
    except LocalError as error:
        raise Failure(f"{file}, call {number}: {error}", USAGE) from None
