"""`trimcp bench` from its options to its exit code: the order of measurements, and what is made of their results."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import attrs
import click
import trio

from trimcp.bench.discovery import Target, list_tools
from trimcp.bench.engine import measure
from trimcp.bench.limit import LimitSearch
from trimcp.bench.plan import Plan
from trimcp.bench.regression import check_same_load
from trimcp.bench.report import Report
from trimcp.bench.requirements import Requirement
from trimcp.cli.bench import table
from trimcp.cli.bench.html import page
from trimcp.cli.bench.limit import START, find_limit, limit_json, limit_lines
from trimcp.cli.bench.options import (
    BENCH_SECTIONS,
    BenchOptions,
    bench_options,
    check_options,
    needs_tools,
    plan_of,
    with_mix,
)
from trimcp.cli.bench.plot import check_plot, draw
from trimcp.cli.bench.team import be_generator, measure_together, shared_secret
from trimcp.cli.bench.verdict import Judgement, github_lines, read_reports, read_requirements, write_junit
from trimcp.cli.conversation import Stop, signals, trace_to
from trimcp.cli.exits import BENCH_EXIT_CODES, BROKEN, NO_CONNECTION, REMOTE_ERROR, Failure
from trimcp.cli.inspecting import find_tool, name_tools
from trimcp.cli.options import SERVER, WORDS, Subcommand
from trimcp.cli.screen import Screen
from trimcp.cli.targets import TARGET_HELP, find_target, lost_text, read_headers
from trimcp.cli.text import theirs
from trimcp.errors import LocalError, McpError, RemoteError
from trimcp.transports.stdio.child import StdioServer
from trimcp.transports.targets import masked_url

_WRONG: Final = 1
_HEADERS: Final = ("-H", "--header", "--compare-header")
_PATIENCE: Final = 30.0


@click.command(
    cls=Subcommand,
    sections=BENCH_SECTIONS,
    epilog=TARGET_HELP + "\n" + BENCH_EXIT_CODES,
)
@click.argument("targets", metavar="TARGET...", type=SERVER, nargs=-1, required=True)
@bench_options
def bench(targets: tuple[str, ...], options: BenchOptions, **load: Any) -> None:
    """Put load on TARGET, check every answer, and tell how many there were, how long they took and what they cost.

    TARGET may be any MCP server, in any language. Of several, which have to be URLs, each session is with the next one,
    and what each answered is told. Calls begin when earlier ones are answered, --under-way at a time in
    each of the --sessions; or with --rate at fixed times, and then a call's time counts from when it should have begun.
    Ctrl-C ends it and shows what was measured; a second one ends at once.

    With --require and --baseline it is a test: it fails with an exit code of its own if the server does not keep to
    what it should, or became slower than in an earlier measurement. The noise of both is taken into account.

    \b
    Examples:
      trimcp bench server.py --tool echo -a text='hello {n}' --expect 'hello {n}' --under-way 16
      trimcp bench https://mcp.example/mcp --bearer TOKEN --tool search -a query=tea --rate 50 --seconds 60
      trimcp bench http://127.0.0.1:8000/mcp --method tools/list --sessions 100 --pid 4242 --plot load.svg
      trimcp bench server.py --script mix.toml --under-way 8 --cancel 0.1 --save figures.json
      trimcp bench server.py --tool echo -a text=x --compare 'node build/index.js' --plot both.png
      trimcp bench server.py --script mix.toml --require 'p99<50ms,errors<0.1%,rate>2000' --junit bench.xml
      trimcp bench server.py --script mix.toml --baseline figures.json --github --html bench.html
      trimcp bench server.py --script mix.toml --stages 0:10,30s:200,2m:200,10s:0
      trimcp bench server.py --script mix.toml --find-limit --require 'p99<50ms,errors<0.1%'
      trimcp bench http://127.0.0.1:8000/mcp --method tools/list --sessions 64 --processes 4
      trimcp bench http://10.0.0.1:8000/mcp http://10.0.0.2:8000/mcp --method tools/list --sessions 64
    """
    words = click.get_current_context().meta.get(WORDS, [])
    sys.exit(_measure(targets, options, load, shown_command(words)))


def shown_command(words: Sequence[str]) -> str:
    """Return the command as it was typed, without values of headers, and of URLs without user and query."""
    shown = ["trimcp", "bench"]
    for before, word in zip(["", *words], words, strict=False):
        if before in _HEADERS or word.startswith(tuple(f"{flag}=" for flag in _HEADERS)):
            word = f"{word.partition(':')[0]}: ..."
        elif "://" in word and " " not in word:
            word = masked_url(word, path=True)
        shown.append(word)
    return shlex.join(shown)


def _measure(targets: Sequence[str], options: BenchOptions, load: Mapping[str, Any], command: str) -> int:
    """Measure one server, or two in turns; show and save the results, and return the exit code.

    The first Ctrl-C ends the measurement and shows its results so far; the second ends the process at once. Raises
    Failure: the measurement failed; the text has the reason.
    """
    if len(targets) > 1 and not all("://" in each for each in targets):
        raise Failure("of several servers each is a URL; a command line goes in quotes, as one word, or last, after --")
    check_options(options)
    plan = plan_of(options, load)
    if plan.sessions < len(targets) and plan.stages_of == "calls" and options.join is None:
        raise Failure(f"{len(targets)} servers need at least as many --sessions; there are {plan.sessions}")
    if not needs_tools(options):  # report mistakes before a server is started
        plan = with_mix(plan, options)
    elif options.tool is not None:
        with_mix(plan, options)
    if options.plot is not None:
        check_plot(options.plot)
    for name, file in {"--save": options.save, "--junit": options.junit, "--html": options.html}.items():
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise Failure(f"{name} cannot write {file}: there is no such folder")
    requirements, baseline = read_requirements(options.require), read_reports(options.baseline, "--baseline")
    screen = Screen(options.quiet)
    servers = [_MeasuredServer.of(targets, screen, options.headers, options.bearer)]
    if options.compare is not None:
        servers.append(_MeasuredServer.of([options.compare], screen, options.compare_headers, options.compare_bearer))
    write = trace_to(options.trace, screen)
    for server in servers if write is not None else ():
        server.targets = [attrs.evolve(each, trace=write) for each in server.targets]
    if options.join is not None:
        return trio.run(_join, options.join, servers[0], options.pids, screen)
    if options.listen is not None:
        shared_secret()
    return trio.run(_Bench(screen, options, plan, servers, command, requirements, baseline).run)


async def _join(address: str, server: _MeasuredServer, pids: tuple[int, ...], screen: Screen) -> int:
    """Be a generator of another measurement."""
    with signals(screen) as stop:
        try:
            await be_generator(address, server.targets, pids, stop)
        except McpError as error:
            raise _failure(error, server.targets[0]) from None
    return stop.exit_code if stop.signal is not None else 0


@attrs.define(eq=False)
class _MeasuredServer:
    """One measured server, or several measured as one."""

    targets: Sequence[Target]
    name: str  # the typed target, a URL without user and query
    words: tuple[str, ...] = attrs.field(repr=False)  # of the command line, which name the server to a process of ours
    reports: list[Report] = attrs.field(init=False, factory=list)  # its reports, in the order of measurement

    @staticmethod
    def of(texts: Sequence[str], screen: Screen, headers: Sequence[str], bearer: str | None) -> _MeasuredServer:
        """Return what one TARGET or several name."""
        targets = [find_target(text, screen.server_says, read_headers(headers, bearer)) for text in texts]
        first = targets[0]
        name = theirs(texts[0] if isinstance(first, StdioServer) else masked_url(first.url, path=True), 60)
        name += f" and {len(texts) - 1} more" if len(texts) > 1 else ""
        words = [*texts, *(word for header in headers for word in ("--header", header))]
        return _MeasuredServer(targets, name, (*words, *(() if bearer is None else ("--bearer", bearer))))


@attrs.define(eq=False)
class _Bench:
    """One run of the command."""

    screen: Screen
    options: BenchOptions
    plan: Plan
    servers: Sequence[_MeasuredServer]
    command: str  # as it was typed, without secrets
    requirements: Sequence[Requirement] = ()
    baseline: Sequence[Report] = ()
    _current: _MeasuredServer = attrs.field(init=False)  # the one that is measured, or asked

    def __attrs_post_init__(self) -> None:
        self._current = self.servers[0]

    async def run(self) -> int:
        """Measure, show, and return the exit code."""
        failure: Failure | None = None
        search: LimitSearch | None = None
        view = table.MeasurementView(self.screen, self.plan.duration)
        with signals(self.screen) as stop:
            try:
                plan = await self._planned(stop)
                if plan is not None and self.options.find_limit:
                    at = partial(self._measure_at, plan, stop, view)
                    search = await find_limit(at, self.requirements, plan.rate or START)
                elif plan is not None:
                    await self._measure_all(plan, stop, view)
            except McpError as error:
                failure = _failure(error, self._current.targets[0])
            finally:
                view.end()
        if self.options.find_limit and failure is None:
            return self._show_limit(search, stop)
        reports = [report for server in self.servers for report in server.reports]
        measured = any(
            report.latency.count or report.failures or report.cancelled or report.timed_out for report in reports
        )
        judgement = None
        if measured or (reports and stop.signal is None):
            whole = stop.signal is None and failure is None and len(self.servers) == 1
            if whole:
                judgement = Judgement.of(reports[0], self.requirements, self.baseline, self.options.tolerance)
            show_results(self.screen, self.options, [server.reports for server in self.servers], judgement)
            if self.options.html is not None:
                checks = () if judgement is None or len(judgement.checks) == 1 else judgement.checks
                sides = table.sides_of(server.reports for server in self.servers)
                if self.baseline:
                    sides = [table.Side("now", self.servers[0].reports), table.Side("before", self.baseline)]
                table.write_result(self.options.html, page(sides, self.command, checks))
        if stop.signal is not None:
            if measured:
                return stop.exit_code
            raise Failure("interrupted before anything was measured", stop.exit_code)
        if failure is not None:
            raise failure
        if judgement is not None:
            return judgement.exit_code
        return 0 if reports and all(report.right for report in reports) else _WRONG

    async def _measure_at(self, plan: Plan, stop: Stop, view: table.MeasurementView, rate: float) -> Report:
        server = self._current
        view.begin(f"{table.what(plan)} of {server.name} at {table.three(rate)} a second")
        return await self._measure_one(server, attrs.evolve(plan, rate=rate), stop, view)

    def _show_limit(self, search: LimitSearch | None, stop: Stop) -> int:
        """Show what held, and return the exit code."""
        if search is not None and search.trials:
            for text, style in limit_lines(search, self.requirements):
                (self.screen.complain if self.options.json else self.screen.show)(text, style)
            if self.options.json or self.options.save is not None:
                _write_json(self.options, limit_json(search))
        if stop.signal is not None:
            return stop.exit_code
        return BROKEN if search is None or search.knee().rate is None else 0

    async def _measure_one(
        self, server: _MeasuredServer, plan: Plan, stop: Stop, view: table.MeasurementView
    ) -> Report:
        """Measure, in this process or in several."""
        options = self.options
        if options.processes == 1 and options.listen is None:
            return await measure(server.targets, plan, on_tick=view.tick, tick=view.tick_length, stop=stop.came)
        view.end()
        size, say = options.processes, self.screen.note
        return await measure_together(server.words, plan, size, options.listen, stop.came, say)

    async def _planned(self, stop: Stop) -> Plan | None:
        """Return the plan with its requests; None after a signal."""
        if self.plan.mix:
            return self.plan
        schema = await self._ask_for_schema(stop)
        return None if stop.signal is not None else with_mix(self.plan, self.options, schema)

    async def _measure_all(self, plan: Plan, stop: Stop, view: table.MeasurementView) -> None:
        for report in self.baseline:
            try:
                check_same_load(report.plan, plan)
            except LocalError as error:
                raise Failure(f"--baseline: {error}") from None
        turns = list(zip(self.servers, (plan, attrs.evolve(plan, pids=self.options.compare_pids)), strict=False))
        rounds = self.options.rounds if len(turns) > 1 else 1
        for number in range(rounds):
            # The order alternates, so that neither always runs right after the other.
            for server, its_plan in turns if number % 2 == 0 else reversed(turns):
                self._current = server
                title = f"{table.what(plan)} of {server.name}"
                view.begin(title if rounds == 1 else f"round {number + 1} of {rounds}: {title}")
                report = await self._measure_one(server, its_plan, stop, view)
                server.reports.append(report)
                if stop.signal is not None:
                    return

    async def _ask_for_schema(self, stop: Stop) -> Mapping[str, Any]:
        """Return the tool's input schema from the first server; meaningless after a signal."""
        schema: Mapping[str, Any] = {}
        plan = self.plan if self.options.tool is None else with_mix(self.plan, self.options)
        with stop.guarding(trio.current_time() + _PATIENCE) as asking:
            tools = await list_tools(self.servers[0].targets[0], plan)
            if self.options.tool is None:
                raise Failure(
                    "say what to send: --tool NAME, --method METHOD or --script FILE; "
                    f"the server has the tools {name_tools(tools)}"
                )
            schema = find_tool(tools, self.options.tool).input_schema
        if asking.cancelled_caught and stop.signal is None:
            raise Failure(f"the server did not list its tools within {_PATIENCE:g} seconds", NO_CONNECTION)
        return schema


def _failure(error: McpError, target: Target) -> Failure:
    if isinstance(error, LocalError):
        return Failure(str(error))
    if isinstance(error, RemoteError):
        return Failure(f"the server answered with an error: {theirs(error, None)}", REMOTE_ERROR)
    return Failure(lost_text(error, target), NO_CONNECTION)


# Results


def show_results(
    screen: Screen, options: BenchOptions, done: Sequence[Sequence[Report]], judgement: Judgement | None = None
) -> None:
    """Print the table of results, and write the requested files.

    Raises Failure: a file cannot be written; everything else was done before.
    """
    pairs: list[table.Pair] = []
    if len(done) > 1:
        whole = zip(done[0], done[1], strict=False)
        pairs = [(first, second) for first, second in whole if not (first.interrupted or second.interrupted)]
    reports = [report for rounds in done for report in rounds]
    if not (options.quiet and options.json):
        write = screen.complain if options.json else screen.show
        tables = [table.describe_comparison(pairs)] if pairs else list(map(table.describe_report, reports))
        if judgement is not None:
            tables.append(judgement.lines())
        for text, style in (line for each in tables for line in each):
            write(text, style)
    if judgement is not None and options.github:
        for text in github_lines(f"trimcp bench: {table.headline(reports[0])}", judgement):
            (screen.complain if options.json else screen.show)(text)
    try:
        if options.json or options.save is not None:
            paired = {id(report) for pair in pairs for report in pair}
            unpaired = [report for report in reports if id(report) not in paired]
            value = reports[0].to_json() if len(done) == 1 else table.comparison_json(pairs, unpaired)
            checks = {} if judgement is None else {"checks": judgement.to_json()}
            _write_json(options, {**value, **checks})
        if judgement is not None and options.junit is not None:
            write_junit(options.junit, table.headline(reports[0]), reports[0], judgement)
    finally:
        if options.plot is not None:
            _draw(options.plot, reports[0], pairs)


def _write_json(options: BenchOptions, value: Mapping[str, Any]) -> None:
    text = json.dumps(value, allow_nan=False)
    if options.json:
        click.echo(text)  # ASCII only
    if options.save is not None:
        table.write_result(options.save, text + "\n")


def _draw(file: str, first: Report, pairs: Sequence[table.Pair]) -> None:
    setting = table.setting(first)
    if not pairs:
        wrong = f", {first.failures:,} errors" if first.failures else ""
        draw(file, table.headline(first), [table.Side(f"{_answered([first])}{wrong}; {setting}", [first])])
        return
    known = table.sides_of(zip(*pairs, strict=True))
    sides = [table.Side(f"{each.name}: {_answered(each.rounds)}", each.rounds) for each in known]
    draw(file, f"{table.what(first.plan)} · two servers in {len(pairs)} rounds", sides, setting)


def _answered(rounds: Sequence[Report]) -> str:
    roughly = "roughly " if any(report.rough for report in rounds) else ""
    return f"{roughly}{table.three(median(report.per_second for report in rounds))} calls answered per second"
