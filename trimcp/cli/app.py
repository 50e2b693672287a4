"""The commands: their arguments, their help, and their work with a session."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final

import click

from trimcp.cli.bench_options import BENCH_SECTIONS, BenchOptions, bench_options
from trimcp.cli.conversation import Body, converse, own_version
from trimcp.cli.exits import (
    BENCH_EXIT_CODES,
    DEMO_EXIT_CODES,
    EXIT_CODES,
    INTERRUPTED,
    LOGIN_EXIT_CODES,
    RECORD_EXIT_CODES,
    REMOTE_ERROR,
    REPLAY_EXIT_CODES,
    RUN_EXIT_CODES,
    TALK_EXIT_CODES,
    TOOL_ERROR,
    TOP_EXIT_CODES,
    Failure,
    say,
)
from trimcp.cli.inspecting import describe, find_tool, list_tools, offer_json, take_stock
from trimcp.cli.loading import load_to_run
from trimcp.cli.options import (
    POSITIVE,
    RUN_SECTIONS,
    ConnectOptions,
    HeaderOptions,
    LoginOptions,
    RunOptions,
    check_network,
    web_options,
    with_options,
)
from trimcp.cli.schemas import read_json, read_words
from trimcp.cli.screen import Screen
from trimcp.cli.targets import TARGET_HELP, read_headers
from trimcp.cli.text import Line, as_json, describe_content, describe_resource, theirs
from trimcp.client.session import ClientSession
from trimcp.errors import LocalError
from trimcp.run import run_stdio
from trimcp.wire.converter import converter_for
from trimcp.wire.fields import ABSENT

_WORDS: Final = "trimcp.words"
_WAITING: Final = """\
{name} waits for a client that writes JSON-RPC to its standard input; Ctrl-C ends it.
Clients start it themselves: trimcp inspect {server}. To have it wait for them, add --http."""


class _Commands(click.Group):
    """The commands. Ctrl-C also ends one before it handles signals itself, for example while a server is imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of declaration

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Failure("interrupted", INTERRUPTED) from None


class _Subcommand(click.Command):
    """A command whose server may be given last, after `--`, and whose `--trace` and `--admin` may have a value.

    `sections`: the sections of its help: titles, and the names of the parameters under each.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {each.name: each.get_help_record(ctx) for each in self.get_params(ctx) if isinstance(each, click.Option)}
        named = {title: [left.pop(name) for name in names] for title, names in self.sections.items()}
        for title, records in {**named, "Other options" if named else "Options": list(left.values())}.items():
            with formatter.section(title):
                formatter.write_dl([record for record in records if record is not None])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
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


def _show_version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"trimcp, version {own_version()}")
        context.exit()


@click.group(cls=_Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def app() -> None:
    """Run servers of the Model Context Protocol, look into them, and call their tools.

    \b
    Examples:
      trimcp demo
      trimcp inspect "python server.py"
      trimcp call weather.py get_forecast latitude=40.7 longitude=-74
    """


def _talks(
    name: str | None = None, *, short_help: str, exit_codes: str = TALK_EXIT_CODES
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command from a function that takes a `target` and `options`, and returns the body of the conversation."""

    def decorate(function: Callable[..., Body]) -> click.Command:
        @wraps(function)
        def command(target: str, options: ConnectOptions, **arguments: Any) -> None:
            sys.exit(converse(target, options, function(target=target, options=options, **arguments)))

        whole = click.argument("target")(with_options(ConnectOptions)(command))
        return app.command(name, cls=_Subcommand, epilog=TARGET_HELP + "\n" + exit_codes, short_help=short_help)(whole)

    return decorate


def _show(screen: Screen, session: ClientSession, options: ConnectOptions, result: Any, lines: Iterable[Line]) -> None:
    """Print a result, as JSON in the form of the revision or as lines of text."""
    if options.json:
        screen.show(as_json(converter_for(session.revision).dump(result)))
    else:
        for text, style in lines:
            screen.show(text, style)


@app.command(
    cls=_Subcommand,
    sections=RUN_SECTIONS,
    epilog=RUN_EXIT_CODES,
    short_help="Serve a file or module, here or by network.",
)
@click.argument("server")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@with_options(RunOptions)
def run(server: str, arguments: tuple[str, ...], options: RunOptions) -> None:
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
      trimcp run weather.py --http --port 0 --admin
      trimcp run weather.py --grpc --port 0
      trimcp run agent_tools.py --agent-tools --port 8080
      trimcp run weather.py --http --uds /run/weather/mcp.sock --uds-mode 660 --allowed-host mcp.example
      trimcp run weather.py --http --host 0.0.0.0 --token-file tokens.txt --workers 4 --access-log
    """
    words = click.get_current_context().meta[_WORDS]
    over_network = check_network(options)
    if options.trace is not None:
        os.environ["TRIMCP_TRACE"] = "stderr" if options.trace == "-" else options.trace
    sys.argv = [server, *arguments]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the locale cannot print fails no tool
    load = partial(load_to_run, server, options)
    if over_network:
        from trimcp.cli.serving import serve  # not needed on standard input and output

        sys.exit(serve(load, words, options))
    loaded = load().server
    if sys.stdin.isatty():  # a user at a terminal, who would see no output
        say(_WAITING.format(name=theirs(loaded.info.name, 60), server=shlex.quote(server)))
    try:
        run_stdio(loaded, grace=options.grace, watchdog=options.watchdog)
    except LocalError as error:
        raise Failure(str(error)) from None


@app.command(cls=_Subcommand, epilog=LOGIN_EXIT_CODES, short_help="Log in to a server that wants an access token.")
@click.argument("url")
@with_options(LoginOptions)
def login(url: str, options: LoginOptions) -> None:
    """Log in to the server at URL with a browser, and keep the tokens for call, inspect, bench and record.

    They stand in a file that only its owner can read. `trimcp whoami` shows which there are, `trimcp logout` forgets.

    \b
    Examples:
      trimcp login https://mcp.example/mcp
      trimcp login https://mcp.example/mcp --no-browser --scopes "files:read files:write"
      trimcp login https://mcp.example/mcp --client-id 3f2a --client-secret MY_SECRET --issuer https://auth.example
    """
    from trimcp.cli.logins import log_in

    log_in(url, options)


@app.command(cls=_Subcommand, epilog=LOGIN_EXIT_CODES, short_help="Forget the login to a server.")
@click.argument("url")
@click.option("--identity", default="", metavar="NAME", help="The name of the login, where there are several.")
def logout(url: str, identity: str) -> None:
    """Forget the login to the server at URL.

    \b
    Examples:
      trimcp logout https://mcp.example/mcp
    """
    from trimcp.cli.logins import log_out

    log_out(url, identity)


@app.command(cls=_Subcommand, epilog=LOGIN_EXIT_CODES, short_help="Show which logins are kept.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def whoami(as_json: bool) -> None:
    """Show which logins are kept: for which server, as whom, by which authorization server, until when. No secrets.

    \b
    Examples:
      trimcp whoami
    """
    from trimcp.cli.logins import who_am_i

    who_am_i(as_json=as_json)


@_talks("inspect", short_help="Show what a server offers.")
@web_options
def inspect_(target: str, options: ConnectOptions, web: bool, port: int) -> Body:
    """Show what TARGET offers: capabilities, tools and their arguments, resources, prompts.

    With --web it is tried in a browser: forms, calls with progress, questions, and all that is said.

    \b
    Examples:
      trimcp inspect weather.py
      trimcp inspect --json -- npx -y @modelcontextprotocol/server-everything
      trimcp inspect ~/.config/host/servers.json:git
      trimcp inspect https://mcp.example/mcp --bearer MY_TOKEN
      trimcp inspect weather.py --web
    """
    if web:
        from trimcp.cli.web.trying import try_in_browser

        sys.exit(try_in_browser(target, options, port))

    async def body(session: ClientSession, screen: Screen) -> int:
        offer = await take_stock(session, choices=not options.json)
        if options.json:
            screen.show(as_json(offer_json(session, offer)))
        else:
            for line, style in describe(session, offer):
                screen.show(line, style)
        return REMOTE_ERROR if offer.failed else 0

    return body


@_talks(short_help="Call a tool and print the result.", exit_codes=EXIT_CODES)
@click.argument("tool")
@click.argument("arguments", nargs=-1, metavar="[NAME=VALUE | NAME:=JSON]...")
@click.option("--arguments", "text", metavar="JSON", help="All arguments as one object; - reads standard input.")
def call(target: str, tool: str, arguments: tuple[str, ...], text: str | None, options: ConnectOptions) -> Body:
    """Call TOOL of TARGET, with progress and logs as they come, and print the result.

    Values are read as the tool's schema says: numbers, true and false, lists and objects as JSON, text as it is.
    NAME:=JSON is JSON whatever it says. An argument that the tool does not have is an error.
    What the server asks is asked here. Ctrl-C cancels the call at the server; a second one ends at once.

    \b
    Examples:
      trimcp call weather.py get_forecast latitude=40.7128 longitude=-74.006
      trimcp call "python codesearch.py src" search pattern=TODO glob='*.py'
      trimcp call notes.py add text=milk tags:='["shop", "today"]'
      trimcp call servers.json:git git_log --arguments '{"repo_path": "."}' --json
      trimcp call get_alerts state=NY -- python weather.py
    """
    whole = None if text is None else read_json(text, arguments)

    async def body(session: ClientSession, screen: Screen) -> int:
        listed = find_tool(await list_tools(session), tool)
        given = whole if whole is not None else read_words(listed, arguments, target)
        async with session.calling(tool, given) as call:
            async for step in call.progress:
                screen.progress(step)
            result = await call.result()
        screen.end_progress()
        pieces = list(describe_content(result.content))
        if not pieces and result.structured_content is not ABSENT:
            pieces = [as_json(result.structured_content)]
        if result.is_error is True and not options.json:
            for piece in pieces:
                screen.complain(theirs(piece, None))
        else:
            _show(screen, session, options, result, ((piece, "") for piece in pieces))
        return TOOL_ERROR if result.is_error is True else 0

    return body


@_talks(short_help="Print what a resource holds.")
@click.argument("uri")
def read(target: str, uri: str, options: ConnectOptions) -> Body:
    """Print what the resource URI of TARGET holds.

    \b
    Examples:
      trimcp read codesearch.py code:///README.md
      trimcp read notes:///today --json -- python notes.py
    """

    async def body(session: ClientSession, screen: Screen) -> int:
        result = await session.read_resource(uri)
        _show(screen, session, options, result, ((describe_resource(each), "") for each in result.contents))
        return 0

    return body


@_talks(short_help="Print the messages of a prompt.")
@click.argument("name")
@click.argument("arguments", nargs=-1, metavar="[NAME=VALUE]...")
def prompt(target: str, name: str, arguments: tuple[str, ...], options: ConnectOptions) -> Body:
    """Print the messages of the prompt NAME of TARGET, filled in.

    \b
    Examples:
      trimcp prompt codesearch.py review path=README.md focus=style
      trimcp prompt https://mcp.example/mcp greet name=Ada --json
    """
    for word in arguments:
        if "=" not in word:
            raise Failure(f"{word!r} is no argument; write name=value")
    values = dict(word.split("=", 1) for word in arguments)

    async def body(session: ClientSession, screen: Screen) -> int:
        result = await session.get_prompt(name, values)
        lines: list[Line] = []
        for message in result.messages:
            for piece in describe_content([message.content]):
                lines += [(f"{message.role}:", "bold"), (piece, "")]
        _show(screen, session, options, result, lines)
        return 0

    return body


@app.command(
    cls=_Subcommand,
    sections=BENCH_SECTIONS,
    epilog=TARGET_HELP + "\n" + BENCH_EXIT_CODES,
    short_help="Put load on a server and measure it.",
)
@click.argument("target")
@bench_options
def bench(target: str, options: BenchOptions, **load: Any) -> None:
    """Put load on TARGET, check every answer, and tell how many there were, how long they took and what they cost.

    TARGET may be any MCP server, in any language. Calls begin when earlier ones are answered, --under-way at a time in
    each of the --sessions; or with --rate at fixed times, and then a call's time counts from when it should have begun.
    Ctrl-C ends it and shows what was measured; a second one ends at once.

    \b
    Examples:
      trimcp bench server.py --tool echo -a text='hello {n}' --expect 'hello {n}' --under-way 16
      trimcp bench https://mcp.example/mcp --bearer TOKEN --tool search -a query=tea --rate 50 --seconds 60
      trimcp bench http://127.0.0.1:8000/mcp --method tools/list --sessions 100 --pid 4242 --plot load.svg
      trimcp bench server.py --script mix.toml --under-way 8 --cancel 0.1 --save figures.json
      trimcp bench server.py --tool echo -a text=x --compare 'node build/index.js' --plot both.png
    """
    from trimcp.cli.bench_run import run_bench

    sys.exit(run_bench(target, options, load))


@app.command(epilog=RECORD_EXIT_CODES, short_help="Write down what a client and a server say.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("target", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--unmasked", is_flag=True, help="Write secrets as they are.")
@click.option("--max-size", metavar="MIB", default=64.0, show_default=True, type=POSITIVE, help="Stop at this size.")
@click.option("--agent-tools", is_flag=True, help="Stand between an agent and a service of agent tools at ws://.")
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help="Where the agent connects on this machine; by default a free port.",
)
@with_options(HeaderOptions)
def record(
    file: Path,
    target: tuple[str, ...],
    unmasked: bool,
    max_size: float,
    agent_tools: bool,
    port: int | None,
    options: HeaderOptions,
) -> None:
    """Stand between a client and a server, and write down in FILE all that they say.

    It is put in place of the server's command in the configuration of a host: it speaks with the client over standard
    input and output, and starts the server's command (after --), or connects to its URL. An existing FILE is kept, and
    the next one gets a number.

    With --agent-tools it listens on a port of this machine for one agent, which connects to that in place of the
    service's WebSocket; a token that the agent sends goes on to the service.

    \b
    Examples:
      trimcp record weather.jsonl -- python weather.py
      trimcp record weather.jsonl https://mcp.example/mcp --bearer MY_TOKEN
      trimcp record agent.jsonl --agent-tools --port 9000 ws://127.0.0.1:8000
    """
    from trimcp.cli.recording import run_proxy

    if port is not None and not agent_tools:
        raise click.UsageError("--port is for --agent-tools: a client of MCP speaks over standard input and output")
    headers = read_headers(options.headers, options.bearer)
    size = int(max_size * 1024 * 1024)
    agent_port = (port or 0) if agent_tools else None
    sys.exit(run_proxy(file, target, headers, masked=not unmasked, max_bytes=size, agent_port=agent_port))


@app.command(epilog=TOP_EXIT_CODES, short_help="List the servers of yours that can be looked at.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def ps(as_json: bool) -> None:
    """List the servers of this user that run here and were started with --admin, a line each.

    \b
    Examples:
      trimcp ps
    """
    from trimcp.cli.top import list_servers

    sys.exit(list_servers(as_json_text=as_json))


@app.command(epilog=TOP_EXIT_CODES, short_help="See what servers do: calls, progress, where each waits.")
@click.argument("server", required=False)
@click.option("--once", is_flag=True, help="Print it once, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print all there is once, as JSON.")
@web_options
def top(server: str | None, once: bool, as_json: bool, web: bool, port: int) -> None:
    """See live what servers do that run with --admin: calls with their progress and the line where each waits.

    SERVER is a process (trimcp ps has its number) or the path of its socket; without it all are shown. Keys select a
    call, open it, cancel it with a reason, close its session, and drain its server.

    \b
    Examples:
      trimcp top
      trimcp top 4242 --once
      trimcp top --json /run/weather/admin.sock
      trimcp top --web
    """
    from trimcp.cli.top import look, watch_in_browser

    if web:
        sys.exit(watch_in_browser(server, port))
    sys.exit(look(server, once=once, as_json_text=as_json))


@app.command(epilog=REPLAY_EXIT_CODES, short_help="Tell whether a server still answers as recorded.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", nargs=-1, type=click.UNPROCESSED)
@click.option("--ignore", multiple=True, metavar="POINTER", help="What may differ in any message; * is any step.")
@click.option(
    "--timeout",
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    type=POSITIVE,
    help="Time for what is expected next.",
)
@click.option(
    "--side", default="client", show_default=True, type=click.Choice(["client", "server"]), help="Which one to play."
)
@with_options(HeaderOptions)
def replay(
    file: Path, target: tuple[str, ...], ignore: tuple[str, ...], timeout: float, side: str, options: HeaderOptions
) -> None:
    """Say to TARGET what the client said in FILE, and compare the answers with what the server said then.

    What cannot be the same twice is not compared: ids, cursors, points in time, how often there was progress, and what
    --ignore names by its JSON Pointer, such as /result/structuredContent/elapsed. TARGET is what the other commands
    take; a command may be written last, after --. With --side server there is none: it plays the server over standard
    input and output, for a client that starts it in place of one. A recording of agent tools is played to the URL of a
    service's WebSocket.

    \b
    Examples:
      trimcp replay weather.jsonl weather.py
      trimcp replay agent.jsonl ws://127.0.0.1:8000
      trimcp replay weather.jsonl --ignore /result/_meta -- npx -y some-server
    """
    from trimcp.cli.recording import run_replay

    headers = read_headers(options.headers, options.bearer)
    sys.exit(run_replay(file, target, headers, ignore=ignore, patience=timeout, client=side == "client"))


@app.command(cls=_Subcommand, epilog=DEMO_EXIT_CODES, short_help="Watch a client and a server at work.")
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False))
@click.option("--trace", metavar="[=FILE]", help="Show every message, or add it to FILE; secrets are masked.")
def demo(directory: str | None, trace: str | None) -> None:
    """Watch a client and a server at work: index Python's standard library (or DIRECTORY) over a real pipe.

    The server is the example codesearch.py in a process of its own. A long search is cancelled half-way; in the end
    nothing is left of it.

    \b
    Examples:
      trimcp demo
      trimcp demo ~/project
      trimcp demo --trace=messages.txt
    """
    from trimcp.cli.demo import run_demo

    sys.exit(run_demo(directory, trace))
