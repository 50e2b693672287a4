"""The commands: their words, their help, and what each does with a session."""

from __future__ import annotations

import gc
import json
import os
import shlex
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar, get_args

import click

from trimcp.cli.bench_options import BENCH_EXIT_CODES, BenchOptions, bench_options
from trimcp.cli.conversation import Body, Options, converse, own_version
from trimcp.cli.exits import EXIT_CODES, INTERRUPTED, TOOL_ERROR, USAGE, Failure
from trimcp.cli.inspecting import describe, find_tool, offer_json, take_stock
from trimcp.cli.loading import load_server, trace_of
from trimcp.cli.options import network_options, read_options
from trimcp.cli.recording import record, replay
from trimcp.cli.screen import Screen
from trimcp.cli.targets import TARGET_HELP, read_headers
from trimcp.cli.text import as_json, describe_content, describe_resource
from trimcp.cli.values import ValueProblem, parse_arguments
from trimcp.client.facade import ClientSession
from trimcp.run import run_stdio
from trimcp.server.server import Server
from trimcp.wire.content import ResourceContents
from trimcp.wire.converter import converter_for
from trimcp.wire.fields import ABSENT
from trimcp.wire.logs import LoggingLevel
from trimcp.wire.revisions import REVISIONS
from trimcp.wire.tools import Tool

__all__ = ["app"]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_WORDS: Final = "trimcp.words"


class _Commands(click.Group):
    """The commands. Ctrl-C ends one also before it looks after that itself, such as while a server is loaded."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Failure("interrupted", INTERRUPTED) from None


class _Command(click.Command):
    """A command whose server may stand last, after `--`, and whose `--trace` may have a value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        at = args.index("--") if "--" in args else len(args)
        ours = ["--trace=-" if arg == "--trace" else arg for arg in args[:at]]
        rest = args[at:]
        if ctx.command.name == "run":
            return super().parse_args(ctx, ours + rest)
        if rest:
            ours = [shlex.join(rest[1:]), *ours]
        try:
            return super().parse_args(ctx, ours)
        except click.UsageError as error:
            if type(error) is not click.UsageError:  # its kin are about options and values; this is a word too many
                raise
            hint = "A server's command line goes in quotes, as one word, or last, after --"
            raise click.UsageError(f"{error.message}\n{hint}", error.ctx) from None


def _connects(function: CommandT) -> CommandT:
    """Give a command the options of all that connect."""
    options = [
        click.argument("target"),
        click.option("--timeout", type=click.FloatRange(0, min_open=True), help="Seconds for all of it."),
        click.option("--revision", type=click.Choice([r.name for r in REVISIONS]), help="Speak this revision."),
        click.option("--trace", metavar="[=FILE]", help="Show every message, or add it to FILE; secrets are masked."),
        click.option("--log-level", type=click.Choice(get_args(LoggingLevel)), help="Lowest log level to ask for."),
        click.option("-q", "--quiet", is_flag=True, help="No progress, no logs."),
        click.option(
            *("--header", "headers", "-H"),
            multiple=True,
            metavar="'NAME: VALUE'",
            help="Send a header to a URL; ${VARIABLE} in it is replaced.",
        ),
        click.option(
            "--bearer", metavar="VARIABLE|@FILE", help="Send the token that a variable or file holds to a URL."
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def _finish(target: str, options: dict[str, Any], body: Body) -> None:
    options["headers"] = read_headers(options["headers"], options.pop("bearer"))
    sys.exit(converse(target, Options(**options), body))


@click.group(cls=_Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(own_version(), prog_name="trimcp")
def app() -> None:
    """Run servers of the Model Context Protocol, look into them, and call their tools.

    \b
    Examples:
      trimcp demo
      trimcp inspect "python server.py"
      trimcp call weather.py get_forecast latitude=40.7 longitude=-74
    """


@app.command(cls=_Command, epilog=EXIT_CODES)
@click.argument("server")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--grace", default=5.0, show_default=True, type=click.FloatRange(0), help="Seconds calls may still take.")
@click.option("--trace", metavar="[=FILE]", help="Write every message to standard error or FILE; secrets are masked.")
@click.option(
    "--gc-threshold",
    metavar="N",
    type=click.IntRange(1),
    help="Look for garbage after N new objects (Python: 700): 20000 saves CPU where many calls are under way.",
)
@click.option(
    "--watchdog",
    metavar="SECONDS",
    type=click.FloatRange(0, min_open=True),
    help="Log what everything waits for when the event loop stands still for so long, and name tools that hold it.",
)
@network_options
def run(
    server: str,
    arguments: tuple[str, ...],
    grace: float,
    trace: str | None,
    gc_threshold: int | None,
    watchdog: float | None,
    **network: Any,
) -> None:
    """Serve SERVER, a FILE.py or package.module with a trimcp.Server, over standard input and output or a network.

    It ends when the client leaves; over a network it stays. On Ctrl-C or SIGTERM it takes no more calls, lets those
    under way answer, and then ends; a second one ends it at once. What follows `--` becomes the program's own
    arguments.

    \b
    Examples:
      trimcp run weather.py
      trimcp run package.module:server --grace 30
      trimcp run codesearch.py -- ~/project
      trimcp run weather.py --watchdog 30
      trimcp run weather.py --http --port 0
      trimcp run weather.py --http --uds /run/weather/mcp.sock --uds-mode 660 --allowed-host mcp.example
      trimcp run weather.py --http --host 0.0.0.0 --token-file tokens.txt --workers 4 --access-log
    """
    words = click.get_current_context().meta[_WORDS]
    options = read_options(network)
    if trace is not None:
        os.environ["TRIMCP_TRACE"] = "stderr" if trace == "-" else trace
    sys.argv = [server, *arguments]
    load = partial(_load, server, gc_threshold)
    if options is None:
        run_stdio(load(), grace=grace, watchdog=watchdog)
    else:
        from trimcp.cli.serving import serve  # a server on standard input and output should not pay for it

        sys.exit(serve(load, words, options, grace, watchdog))


def _load(name: str, gc_threshold: int | None) -> Server[Any]:
    try:
        server = load_server(name)
    except Failure:
        raise
    except Exception as error:  # whatever the user's module raises
        raise Failure(f"{name} cannot be loaded, it fails by itself:\n{trace_of(error)}", USAGE) from None
    if gc_threshold is not None:
        gc.collect()
        gc.freeze()  # what is loaded stays, so nobody need look through it
        gc.set_threshold(gc_threshold, 20, 100)
    return server


@app.command("inspect", cls=_Command, epilog=TARGET_HELP + "\n" + EXIT_CODES)
@_connects
@click.option("--json", "wants_json", is_flag=True, help="All of it as JSON, schemas included.")
def inspect_(target: str, wants_json: bool, **options: Any) -> None:
    """Show what TARGET offers: capabilities, tools and their arguments, resources, prompts.

    \b
    Examples:
      trimcp inspect weather.py
      trimcp inspect --json -- npx -y @modelcontextprotocol/server-everything
      trimcp inspect ~/.config/host/servers.json:git
      trimcp inspect https://mcp.example/mcp --bearer MY_TOKEN
    """

    async def body(session: ClientSession, screen: Screen) -> int:
        offer = await take_stock(session)
        if wants_json:
            screen.show(as_json(offer_json(session, offer)))
        else:
            for line, style in describe(session, offer):
                screen.show(line, style)
        return 0

    _finish(target, options, body)


@app.command(cls=_Command, epilog=TARGET_HELP + "\n" + EXIT_CODES)
@_connects
@click.argument("tool")
@click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--json", "text", metavar="JSON", help="The arguments as one JSON object; - reads standard input.")
@click.option("--raw", is_flag=True, help="The result as the server sent it, as JSON.")
def call(target: str, tool: str, arguments: tuple[str, ...], text: str | None, raw: bool, **options: Any) -> None:
    """Call TOOL of TARGET, with progress and logs as they come, and print the result.

    Values are read as the tool's schema says: numbers, true and false, lists and objects as JSON, text as it is.
    What the server asks is asked here. Ctrl-C cancels the call at the server; a second one ends at once.

    \b
    Examples:
      trimcp call weather.py get_forecast latitude=40.7128 longitude=-74.006
      trimcp call "python codesearch.py src" search pattern=TODO glob='*.py'
      trimcp call servers.json:git git_log --json '{"repo_path": "."}' --raw
      trimcp call get_alerts state=NY -- python weather.py
    """
    whole = None if text is None else _read_json(text, arguments)

    async def body(session: ClientSession, screen: Screen) -> int:
        listed = find_tool(await session.list_tools(), tool)
        given = whole if whole is not None else _read_words(listed, arguments, target)
        async with session.calling(tool, given) as call:
            async for step in call.progress:
                screen.progress(step)
            result = await call.result()
        screen.end_progress()
        if raw:
            screen.show(as_json(converter_for(session.revision).dump(result)))
        else:
            show = _show_error if result.is_error is True else screen.show
            pieces = list(describe_content(result.content))
            for piece in pieces:
                show(piece)
            if not pieces and result.structured_content is not ABSENT:
                show(as_json(result.structured_content))
        return TOOL_ERROR if result.is_error is True else 0

    _finish(target, options, body)


def _show_error(text: str) -> None:
    click.echo(text, err=True)


def _read_words(tool: Tool, words: tuple[str, ...], target: str) -> dict[str, Any]:
    try:
        return parse_arguments(words, tool.input_schema)
    except ValueProblem as problem:
        raise Failure(f"{problem}\nWhat it takes: trimcp inspect {shlex.quote(target)}", USAGE) from None


def _read_json(text: str, words: tuple[str, ...]) -> dict[str, Any]:
    if words:
        raise Failure("give the arguments either as KEY=VALUE or with --json", USAGE)
    try:
        value = json.loads(sys.stdin.read() if text == "-" else text)
    except ValueError as error:
        raise Failure(f"--json is not valid JSON: {error}", USAGE) from None
    if not isinstance(value, dict):
        raise Failure('--json must be an object, such as \'{"city": "Oslo"}\'', USAGE)
    return value


@app.command(cls=_Command, epilog=TARGET_HELP + "\n" + EXIT_CODES)
@_connects
@click.argument("uri")
@click.option("--raw", is_flag=True, help="The result as the server sent it, as JSON.")
def read(target: str, uri: str, raw: bool, **options: Any) -> None:
    """Print what the resource URI of TARGET holds.

    \b
    Examples:
      trimcp read codesearch.py code:///README.md
      trimcp read notes:///today --raw -- python notes.py
    """

    async def body(session: ClientSession, screen: Screen) -> int:
        result = await session.read_resource(uri)
        if raw:
            screen.show(as_json(converter_for(session.revision).dump(result)))
        else:
            contents: list[ResourceContents] = list(result.contents)
            for each in contents:
                screen.show(describe_resource(each))
        return 0

    _finish(target, options, body)


@app.command(cls=_Command, epilog=TARGET_HELP + "\n" + EXIT_CODES)
@_connects
@click.argument("name")
@click.argument("arguments", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--raw", is_flag=True, help="The result as the server sent it, as JSON.")
def prompt(target: str, name: str, arguments: tuple[str, ...], raw: bool, **options: Any) -> None:
    """Print the messages of the prompt NAME of TARGET, filled in.

    \b
    Example:
      trimcp prompt codesearch.py review path=README.md focus=style
    """
    for word in arguments:
        if "=" not in word:
            raise Failure(f"{word!r} is no argument; write key=value", USAGE)
    values = dict(word.split("=", 1) for word in arguments)

    async def body(session: ClientSession, screen: Screen) -> int:
        result = await session.get_prompt(name, values)
        if raw:
            screen.show(as_json(converter_for(session.revision).dump(result)))
        else:
            for message in result.messages:
                for piece in describe_content([message.content]):
                    screen.show(f"{message.role}:", "bold")
                    screen.show(piece)
        return 0

    _finish(target, options, body)


@app.command(cls=_Command, epilog=TARGET_HELP + "\n" + BENCH_EXIT_CODES)
@click.argument("target")
@bench_options
def bench(target: str, **options: Any) -> None:
    """Put load on TARGET, check every answer, and tell how many there were, how long they took and what they cost.

    TARGET may be any MCP server, in any language. Calls begin when earlier ones are answered, --under-way at a time in
    each of the --sessions; or with --rate at fixed times, and then a call's time counts from when it should have begun.
    Ctrl-C ends it and shows what was measured; a second one ends at once.

    \b
    Examples:
      trimcp bench server.py --tool echo -a text='hello {n}' --expect 'hello {n}' --under-way 16
      trimcp bench https://mcp.example/mcp --bearer TOKEN --tool search -a query=tea --rate 50 --seconds 60
      trimcp bench http://127.0.0.1:8000/mcp --method tools/list --sessions 100 --pid 4242 --plot load.svg
      trimcp bench server.py --script mix.toml --under-way 8 --cancel 0.1 --json figures.json
      trimcp bench server.py --tool echo -a text=x --compare 'node build/index.js' --plot both.png
    """
    from trimcp.cli.bench_run import run_bench

    sys.exit(run_bench(target, BenchOptions(**options)))


@app.command(cls=_Command)
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False))
@click.option("--trace", metavar="[=FILE]", help="Show every message, or add it to FILE; secrets are masked.")
def demo(directory: str | None, trace: str | None) -> None:
    """Watch a client and a server at work: index Python's standard library (or DIRECTORY) over a real pipe.

    The server is the example codesearch.py in a process of its own. A long search is cancelled half-way; in the end
    nothing is left of it.
    """
    from trimcp.cli.demo import run_demo

    sys.exit(run_demo(directory, trace))


app.add_command(record)
app.add_command(replay)
