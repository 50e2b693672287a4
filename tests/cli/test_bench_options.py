"""From options to a plan: what each becomes, and what is said when they make no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from click.testing import CliRunner

from trimcp.bench.plan import MixEntry, Plan
from trimcp.cli.bench.options import (
    BenchOptions,
    bench_options,
    check_options,
    needs_tools,
    plan_of,
    read_script,
    with_mix,
)
from trimcp.cli.exits import USAGE, Failure
from trimcp.wire.revisions import V2025_06_18

SCHEMA = {"properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}


def read(*words: str) -> tuple[BenchOptions, dict[str, Any]]:
    """What the command is called with for these words."""
    found: list[tuple[BenchOptions, dict[str, Any]]] = []

    @click.command()
    @bench_options
    def bench(options: BenchOptions, **load: Any) -> None:
        found.append((options, load))

    CliRunner().invoke(bench, list(words), catch_exceptions=False, standalone_mode=False)
    return found[0]


def typed(*words: str) -> BenchOptions:
    return read(*words)[0]


def plan(*words: str, schema: dict[str, Any] | None = None) -> Plan:
    options, load = read(*words)
    check_options(options)
    return with_mix(plan_of(options, load), options, schema)


def test_with_a_tool_alone_everything_else_is_as_usual() -> None:
    assert plan("--tool", "echo") == Plan(MixEntry.tool("echo"), warm_up=1.0)


def test_every_option_reaches_the_plan() -> None:
    made = plan(
        *("--tool", "echo", "--expect", "x{n}", "--sessions", "3", "--under-way", "4", "--rate", "50"),
        *("--spacing", "poisson", "--seconds", "7", "--warm-up", "2", "--cancel", "0.1", "--cancel-after", "0.5"),
        *("--timeout", "1.5", "--timeouts", "0.25", "--progress", "--seed", "9", "--revision", V2025_06_18.name),
        *("--transport", "http", "--reply", "sse", "--pid", "11", "--pid", "12"),
    )
    assert made == Plan(
        MixEntry.tool("echo", expect="x{n}"),
        sessions=3,
        under_way=4,
        rate=50.0,
        spacing="poisson",
        seconds=7.0,
        warm_up=2.0,
        cancel=0.1,
        cancel_after=0.5,
        timeout=1.5,
        timeouts=0.25,
        progress=True,
        seed=9,
        revision=V2025_06_18.name,
        transport="http",
        reply="sse",
        pids=(11, 12),
    )
    assert plan("--tool", "echo", "--think", "0.5", "--count", "7").think == 0.5
    asks = plan("--tool", "t", "--step", "question", "--answer", '{"seat": "aisle"}', "--sampled", "Momo")
    assert asks == Plan(MixEntry.tool("t", step="question"), answer={"seat": "aisle"}, sampled="Momo", warm_up=1.0)
    (changes,) = plan("--tool", "t", "--step", "change", "--resource", "notes:///1").mix
    assert changes == MixEntry.tool("t", step="change", resource="notes:///1")


def test_every_option_is_one_of_the_words() -> None:
    options, load = read()
    not_typed = {"mix", "warm_up_count", "backlog", "reopen", "opening", "patience", "first_number"}
    assert {field.name for field in attrs.fields(Plan)} - not_typed <= {*attrs.asdict(options), *load}
    assert not {*attrs.asdict(options)} & {*load}


def test_arguments_are_read_as_the_schema_says_or_as_json() -> None:
    words = ["--tool", "t", "-a", "text=5", "-a", "count=5", "-a", 'free:={"a": [1, null]}', "-a", "other=a:=b"]
    (request,) = plan(*words, schema=SCHEMA).mix
    expected = {"text": "5", "count": 5, "free": {"a": [1, None]}, "other": "a:=b"}
    assert request.params["arguments"] == expected


def test_another_request_has_its_own_parameters() -> None:
    (request,) = plan("--method", "resources/read", "--params", '{"uri": "notes:///{n}"}').mix
    assert request == MixEntry("resources/read", {"uri": "notes:///{n}"})


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--tool", "t"], False),
        (["--tool", "t", "-a", "x:=1"], False),
        (["--tool", "t", "-a", "x:=1", "-a", "y=1"], True),
        (["--method", "ping"], False),
        (["--script", "x.json"], False),
        ([], True),
    ],
)
def test_the_server_is_asked_only_where_its_schema_matters(words: list[str], asked: bool) -> None:
    assert needs_tools(typed(*words)) is asked


@pytest.mark.parametrize(
    ("words", "seconds", "calls"),
    [
        (["--warm-up", "2"], 2.0, 0),
        (["--warm-up", "0"], 0.0, 0),
        (["--warm-up", "2.5s", "--count", "9"], 2.5, 0),
        (["--warm-up", "7", "--count", "9"], 0.0, 7),
        (["--warm-up", "7x"], 0.0, 7),
        (["--count", "9"], 0.0, 0),
    ],
)
def test_a_warm_up_is_seconds_or_calls(words: list[str], seconds: float, calls: int) -> None:
    made = plan("--tool", "t", *words)
    assert (made.warm_up, made.warm_up_count) == (seconds, calls)


def test_rounds_are_shorter_than_one_measurement_alone() -> None:
    assert plan("--tool", "t", "--compare", "x").seconds == 3.0
    assert plan("--tool", "t", "--compare", "x", "--count", "5").seconds is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tool", "t", "--method", "ping"], "--tool and --method exclude each other; a --script can mix"),
        (["--method", "ping", "-a", "x:=1"], "--arg goes with --tool"),
        (["--tool", "t", "--params", "{}"], "--params goes with --method"),
        (["--script", "x.json", "--expect", "x"], "each call says by itself what to expect"),
        (["--tool", "t", "--seconds", "1", "--count", "1"], "either for --seconds or a --count of calls"),
        (["--tool", "t", "--timeouts", "0.1"], "say with --timeout which"),
        (["--tool", "t", "--cancel-after", "1"], "--cancel-after goes with --cancel"),
        (["--tool", "t", "--spacing", "poisson"], "--spacing goes with --rate"),
        (["--tool", "t", "--compare-pid", "1"], "go with --compare"),
        (["--tool", "t", "--compare-bearer", "X"], "go with --compare"),
        (["--tool", "t", "--compare-header", "X: 1"], "go with --compare"),
        (["--tool", "t", "--warm-up", "soon"], "--warm-up is seconds, such as 2s, or calls, such as 100x"),
        (["--tool", "t", "--warm-up", "1.5x"], "--warm-up is seconds"),
        (["--tool", "t", "-a", "word"], "write --arg NAME=VALUE or --arg NAME:=JSON"),
        (["--tool", "t", "-a", "=x"], "write --arg NAME=VALUE"),
        (["--tool", "t", "-a", ":=1"], "write --arg NAME=VALUE"),
        (["--tool", "t", "-a", "x:={"], "--arg x:= is not valid JSON"),
        (["--tool", "t", "-a", "x=1", "-a", "x:=1"], "the argument 'x' is given twice"),
        (["--tool", "t", "-a", "count=many"], "count must be a whole number, not 'many'"),
        (["--method", "ping", "--params", "[]"], "--params must be an object"),
        (["--method", "ping", "--params", "{"], "--params is not valid JSON"),
        (["--method", "initialize"], "no request that can be repeated"),
        (["--tool", "t", "--rate", "5", "--think", "1"], "leave no time to think"),
        (["--tool", "t", "--under-way", "1000000"], "--under-way must be at least 1 and at most 100000"),
        (["--method", "ping", "--step", "task"], "--step and --resource go with --tool"),
        (["--tool", "t", "--step", "change"], "a change goes with a resource: the URI of what the tool changes"),
        (["--tool", "t", "--resource", "x:"], "a change goes with a resource"),
        (["--tool", "t", "--answer", "{}", "--step", "question", "--under-way", "2"], "ask for more --sessions"),
        (["--tool", "t", "--answer", '{"a": 1}'], "--answer goes with --step question"),
        (["--tool", "t", "--answer", "[]"], '--answer must be an object, such as \'{"seat": "window"}\''),
        ([], "say what to send: --tool NAME, --method METHOD or --script FILE"),
    ],
)
def test_what_makes_no_sense_is_refused_with_advice(words: list[str], told: str) -> None:
    with pytest.raises(Failure) as caught:
        plan(*words, schema=SCHEMA)
    assert told in caught.value.message
    assert caught.value.exit_code == USAGE


# Scripts


MIX = [
    {"tool": "echo", "arguments": {"text": "hello {n}"}, "expect": "hello {n}", "weight": 9},
    {"method": "tools/list"},
]
MIX_IN_TOML = """
[[mix]]
tool = "echo"
arguments = { text = "hello {n}" }
expect = "hello {n}"
weight = 9

[[mix]]
method = "tools/list"
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("m.json", json.dumps(MIX)), ("m.JSON", json.dumps({"mix": MIX})), ("m.toml", MIX_IN_TOML)],
)
def test_a_script_mixes_requests(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    expected = (
        MixEntry.tool("echo", {"text": "hello {n}"}, weight=9, expect="hello {n}"),
        MixEntry("tools/list"),
    )
    assert plan("--script", str(file)).mix == expected


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("m.json", None, "cannot read {file}: No such file or directory"),
        ("m.yaml", "", "--script reads .json and .toml files; '{file}' has another ending"),
        ("m.json", "[{]", "{file} is no valid JSON: "),
        ("m.toml", "mix = [", "{file} is no valid TOML: "),
        ("m.json", "[]", "{file} holds no calls: a script is a list of calls"),
        ("m.json", '{"tool": "echo"}', "[[mix]]"),
        ("m.json", '[{"tool": "echo"}, 5]', "{file}, call 2: an entry of the mix must be an object, not 5"),
        ("m.json", '[{"args": {}}]', "{file}, call 1: an entry of the mix names a tool or a method"),
        ("m.json", '[{"tool": "t", "wait": 1}]', "{file}, call 1: an entry of the mix cannot have 'wait'"),
        ("m.json", '[{"tool": "t", "weight": 0}]', "{file}, call 1: weight must be more than 0, not 0"),
        ("m.toml", "[[mix]]\ntool = 5\n", "{file}, call 1: an entry's tool must be a text"),
    ],
)
def test_what_is_no_script_is_refused_with_advice(tmp_path: Path, name: str, text: str | None, told: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(Failure) as caught:
        read_script(str(file))
    assert told.replace("{file}", str(file)) in caught.value.message
    assert caught.value.exit_code == USAGE
