"""`trimcp bench` from the command line to its exit code: what is measured in which order, and where it is shown."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from trimcp.bench.engine import measure
from trimcp.bench.plan import Plan
from trimcp.bench.report import Report
from trimcp.cli.bench_options import BenchOptions
from trimcp.cli.bench_plot import check_plot
from trimcp.cli.bench_results import show_results
from trimcp.cli.bench_table import what
from trimcp.cli.bench_view import View
from trimcp.cli.bench_words import check_options, needs_tools, plan_of
from trimcp.cli.conversation import Stop, own_version, signals
from trimcp.cli.exits import INTERRUPTED, NO_CONNECTION, REMOTE_ERROR, TERMINATED, USAGE, Failure
from trimcp.cli.inspecting import find_tool, name_tools
from trimcp.cli.screen import Screen
from trimcp.cli.targets import Target, find_target, read_headers, token_hint
from trimcp.cli.text import one_line
from trimcp.client.client import Client
from trimcp.errors import LocalError, McpError, RemoteError
from trimcp.transports.stdio.child import StdioServer
from trimcp.transports.targets import masked_url

__all__ = ["run_bench"]

_WRONG: Final = 1
_PATIENCE: Final = 30.0


def run_bench(target: str, options: BenchOptions) -> int:
    """Measure one server, or two in turns; show what was found, write it down, and return the exit code.

    The first Ctrl-C ends the measurement and shows what it has found; the second ends the process at once.

    Raises:
        Failure: it cannot be done; the text says why.
    """
    check_options(options)
    if options.plot is not None:
        check_plot(options.plot)
    if options.save is not None and not Path(options.save).absolute().parent.is_dir():
        raise Failure(f"--save cannot write {options.save}: there is no such folder", USAGE)
    screen = Screen(options.quiet)
    servers = [find_target(target, screen.server_says, read_headers(options.headers, options.bearer))]
    if options.compare is not None:
        headers = read_headers(options.compare_headers, options.compare_bearer)
        servers.append(find_target(options.compare, screen.server_says, headers))
    if not needs_tools(options):
        plan_of(options)  # what is wrong with it should be said before a server is started
    names = [_shown(text, server) for text, server in zip((target, options.compare or ""), servers, strict=False)]
    return trio.run(_Bench(screen, options, servers, names).run)


def _shown(text: str, server: Target) -> str:
    """Return what was typed for a server, of a URL without user and query."""
    return one_line(text if isinstance(server, StdioServer) else masked_url(server.url, path=True), 60)


@attrs.define(eq=False)
class _Bench:
    """One run of the command."""

    screen: Screen
    options: BenchOptions
    servers: Sequence[Target]
    names: Sequence[str]
    view: View = attrs.field(init=False)
    done: list[list[Report]] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.view = View(self.screen)
        self.done = [[] for _ in self.servers]

    async def run(self) -> int:
        """Measure, show, and return the exit code."""
        failure: Failure | None = None
        with signals(self.screen) as stop:
            try:
                await self._measure_all(stop)
            except McpError as error:
                failure = _failure(error)
            finally:
                self.view.end()
        reports = [report for rounds in self.done for report in rounds]
        measured = any(
            report.latency.count or report.failures or report.cancelled or report.timed_out for report in reports
        )
        if measured or (reports and stop.signal is None):
            show_results(self.screen, self.options, self.done)
        if stop.signal is not None:
            if measured:
                return _code_of(stop)
            raise Failure("interrupted before anything was measured", _code_of(stop))
        if failure is not None:
            raise failure
        return 0 if reports and all(report.right for report in reports) else _WRONG

    async def _measure_all(self, stop: Stop) -> None:
        plans = await self._plans(stop)
        if plans is None:
            return
        plan = plans[0]
        self.view.seconds = plan.duration
        rounds = self.options.rounds if len(self.servers) > 1 else 1
        for number in range(rounds):
            # First one, then the other begins, so that neither always comes after the other's heat.
            order = range(len(self.servers)) if number % 2 == 0 else reversed(range(len(self.servers)))
            for which in order:
                title = f"{what(plan)} of {self.names[which]}"
                self.view.begin(title if rounds == 1 else f"round {number + 1} of {rounds}: {title}")
                report = await measure(self.servers[which], plans[which], on_tick=self.view.tick, stop=stop.came)
                self.done[which].append(report)
                if stop.signal is not None:
                    return

    # What is to be sent

    async def _plans(self, stop: Stop) -> list[Plan] | None:
        """Return a plan for each server; None if a signal came first. The first is asked what its tool takes."""
        schema: Mapping[str, Any] | None = None
        if needs_tools(self.options):
            schema = await self._ask_for_schema(stop)
            if stop.signal is not None:
                return None
        other = attrs.evolve(self.options, pids=self.options.compare_pids)
        return [plan_of(options, schema) for options in (self.options, other)]

    async def _ask_for_schema(self, stop: Stop) -> Mapping[str, Any]:
        schema: Mapping[str, Any] = {}
        with stop.guarding(trio.current_time() + _PATIENCE) as asking:
            async with Client("trimcp", own_version()).connect(
                self._as_meant(self.servers[0]), revision=self.options.revision
            ) as session:
                tools = await session.list_tools()
                if self.options.tool is None:
                    raise Failure(
                        "say what to send: --tool NAME, --method METHOD or --script FILE; "
                        f"the server has the tools {name_tools(tools)}",
                        USAGE,
                    )
                schema = find_tool(tools, self.options.tool).input_schema
        if asking.cancelled_caught and stop.signal is None:
            raise Failure(f"the server did not list its tools within {_PATIENCE:g} seconds", NO_CONNECTION)
        return schema

    def _as_meant(self, server: Target) -> Target:
        """Return the server to be spoken to over the transport that is asked for."""
        from trimcp.transports.http.client.target import HttpServer

        modes: Mapping[str, Any] = {"http": "streamable", "sse": "sse"}
        if isinstance(server, HttpServer) and self.options.transport in modes:
            return attrs.evolve(server, mode=modes[self.options.transport])
        return server


def _code_of(stop: Stop) -> int:
    return INTERRUPTED if stop.signal == signal.SIGINT else TERMINATED


def _failure(error: McpError) -> Failure:
    if isinstance(error, LocalError):
        return Failure(str(error), USAGE)
    if isinstance(error, RemoteError):
        return Failure(f"the server answered with an error: {error}", REMOTE_ERROR)
    return Failure(f"{error}{token_hint(error)}", NO_CONNECTION)
