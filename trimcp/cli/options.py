"""What commands have in common: their options, each a field of a record, and their help. It imports nothing of HTTP."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import attrs
import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from trimcp.wire.common import LoggingLevel
from trimcp.wire.revisions import REVISIONS

if TYPE_CHECKING:
    from trimcp.transports.http.settings import ReplyForm

POSITIVE: Final = click.FloatRange(0, min_open=True)


class _ServerName(click.ParamType[str]):
    """A server as it is typed: any text; shells complete files, of which most are."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


SERVER: Final = _ServerName()

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
        if ctx.command.name in ("run", "worker"):
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


def option(*flags: str, repr: bool = True, **settings: Any) -> Any:
    """Return a field of a record that is an option of a command.

    `repr`: show the value where the record is shown; not of secrets.
    """
    return attrs.field(repr=repr, metadata={"flags": flags, "settings": settings})


def with_options(
    record: type[attrs.AttrsInstance], *more: Callable[[Any], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of a record, with which it is called as `options`, and more of click's options."""
    fields = attrs.fields(record)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**words: Any) -> Any:
            return function(options=record(**{field.name: words.pop(field.name) for field in fields}), **words)

        for each in reversed([*map(_click_option, fields), *more]):
            command = each(command)
        return command

    return decorate


def web_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a page in a browser, `web` and `port`."""
    port = click.IntRange(0, 65_535)
    command = click.option("--port", metavar="PORT", type=port, default=0, help="Where; by default a free one.")(
        command
    )
    told = "Show it in a browser: a page for this machine alone, at the address that is printed."
    return click.option("--web", is_flag=True, help=told)(command)


def _click_option(field: attrs.Attribute[Any]) -> Callable[[Any], Any]:
    flags = field.metadata["flags"] or ("--" + field.name.replace("_", "-"),)
    settings = field.metadata["settings"]
    shown = not isinstance(settings.get("default"), bool)  # the help of a flag describes its default
    return click.option(*flags, field.name, **{"show_default": shown, **settings})


# Commands that connect

_DATES: Final = [each.name for each in REVISIONS]
_LEVELS: Final = get_args(LoggingLevel)


@attrs.frozen(kw_only=True)
class HeaderOptions:
    """What is sent to a URL with every request."""

    headers: tuple[str, ...] = option(
        *("--header", "-H"),
        multiple=True,
        metavar="HEADER",
        repr=False,
        help="Send 'NAME: VALUE' to a URL; ${VARIABLE} in it is replaced. Again for more.",
    )
    bearer: str | None = option(
        metavar="SOURCE",
        repr=False,
        help="Send a bearer token to a URL: SOURCE is the environment variable that holds it, or @FILE.",
    )


@attrs.frozen(kw_only=True)
class ReachOptions(HeaderOptions):
    """How a server is reached, and with which revision."""

    revision: str | None = option(
        metavar="DATE", type=click.Choice(_DATES), help=f"Speak this revision: {', '.join(_DATES)}."
    )


@attrs.frozen(kw_only=True)
class ConnectOptions(ReachOptions):
    """What all commands that hold one conversation have in common."""

    timeout: float | None = option(
        metavar="SECONDS", type=POSITIVE, help="Time for all of it; a person's answers do not count."
    )
    trace: str | None = option(metavar="[=FILE]", help="Show every message, or add it to FILE; secrets are masked.")
    log_level: LoggingLevel | None = option(
        metavar="LEVEL", type=click.Choice(_LEVELS), help=f"Lowest log level to ask for: {', '.join(_LEVELS)}."
    )
    legacy: bool = option(
        is_flag=True, help="Begin with initialize, for old servers that break on the first message of newer clients."
    )
    quiet: bool = option("-q", "--quiet", is_flag=True, help="No progress, no logs.")
    json: bool = option(is_flag=True, help="Print the result as JSON, as the server sent it.")


@attrs.frozen(kw_only=True)
class LoginOptions:
    """How to log in."""

    client_id: str | None = option(
        metavar="ID", help="What the client is registered as; by default it registers itself."
    )
    client_secret: str | None = option(metavar="VARIABLE", help="The environment variable that holds its secret.")
    scopes: str = option(
        default="",
        show_default=False,
        metavar="SCOPES",
        help="What to ask for, with spaces; by default what is wanted.",
    )
    identity: str = option(
        default="", show_default=False, metavar="NAME", help="A name for this login, where there are several."
    )
    browser: bool = option(
        "--browser/--no-browser", default=True, help="Without one: print the page's address and ask for the end."
    )
    dpop: bool = option(is_flag=True, help="Bind tokens to a key of our own, where the server can.")
    issuer: str | None = option(metavar="URL", help="The authorization server; a secret is shown to no other.")
    no_resource: bool = option(
        is_flag=True, help="Do not say which server the token is for: it may be good for others."
    )


# trimcp run

RUN_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "How it runs": ("grace", "trace", "admin", "tasks", "reload", "gc_threshold", "watchdog"),
    "Over a network": (
        *("http", "ws", "grpc", "agent_tools", "host", "port", "uds", "uds_mode", "path", "root", "software"),
        *("certfile", "keyfile", "workers", "store"),
    ),
    "What it serves and logs there": (
        *("stateless", "reply", "sse", "websocket", "metrics", "admin_http", "access_log", "log_json"),
    ),
    "Who may come over a network": (
        *("allow_origins", "allow_headers", "allowed_hosts", "token_file", "auth_issuers", "auth_audience", "scopes"),
    ),
}
"""The sections of the help of `trimcp run`, and the options in each."""

_FILE: Final = click.Path(exists=True, dir_okay=False)


def _permissions(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise click.BadParameter("write permissions in octal, such as 660")
    return mode


@attrs.frozen(kw_only=True)
class ProcessOptions:
    """How a process works that has a server in it."""

    grace: float = option(
        metavar="SECONDS",
        default=5.0,
        type=click.FloatRange(0),
        help="Time that calls get when it is told to end.",
    )
    admin: str | None = option(
        metavar="[=FILE]", help="Let `trimcp top` look at it, at a Unix socket: this user and root alone."
    )
    gc_threshold: int | None = option(
        metavar="N",
        type=click.IntRange(1),
        help="Look for garbage after N new objects (Python: 700): 20000 saves CPU where many calls are under way.",
    )
    watchdog: float | None = option(
        metavar="SECONDS",
        type=POSITIVE,
        help="Log what everything waits for when the event loop stands still for so long, and name tools that hold it.",
    )


@attrs.frozen(kw_only=True)
class RunOptions(ProcessOptions):
    """How a server is to be served.

    It has more than 20 fields because each is an option of one command.
    """

    trace: str | None = option(
        metavar="[=FILE]", help="Write every message to standard error or FILE; secrets are masked."
    )
    reload: bool = option(
        is_flag=True, help="Start the server anew when a Python file beside it changes; needs watchfiles."
    )
    tasks: str | None = option(
        metavar="URL", help="Leave tasks to `trimcp worker`, and keep them there: sqlite:///path, redis://host."
    )
    http: bool = option(is_flag=True, help="Serve over HTTP instead of standard input and output.")
    ws: bool = option(is_flag=True, help="Serve over WebSocket alone.")
    grpc: bool = option(is_flag=True, help="Serve over HTTP, and print the URL of gRPC on the same port too.")
    agent_tools: bool = option(
        is_flag=True, help="Serve over HTTP, and its tools by the agent-tools protocol too, with contexts."
    )
    host: str = option(metavar="ADDRESS", default="127.0.0.1", help="The address to listen on.")
    port: int = option(metavar="PORT", default=8000, type=click.IntRange(0, 65_535), help="0 takes a free one.")
    uds: str | None = option(metavar="FILE", help="Listen on a Unix socket instead.")
    uds_mode: int = option(metavar="MODE", default="600", type=_permissions, help="Its permissions.")
    path: str | None = option(metavar="PATH", help="Where the endpoint is.  [default: /mcp, with --ws /ws]")
    software: Literal["own", "hypercorn"] = option(
        "--server",
        default="own",
        type=click.Choice(["own", "hypercorn"]),
        help="What speaks HTTP; hypercorn has HTTP/1.1 only.",
    )
    root: str = option(
        default="",
        metavar="PREFIX",
        help="The prefix of our paths that a proxy cuts off: /tools. HTTP+SSE tells its clients an address.",
    )
    certfile: str | None = option(metavar="FILE", type=_FILE, help="Speak TLS with this certificate (PEM).")
    keyfile: str | None = option(metavar="FILE", type=_FILE, help="Its key, where it is in a file of its own.")
    allow_origins: tuple[str, ...] = option(
        "--allow-origin",
        multiple=True,
        metavar="ORIGIN",
        help="Pages from there may call: https://app.example, or *. Again for more.",
    )
    allow_headers: tuple[str, ...] = option(
        "--allow-header",
        multiple=True,
        metavar="NAME",
        help="They may send this header, too: X-API-Key. Again for more.",
    )
    allowed_hosts: tuple[str, ...] = option(
        "--allowed-host",
        multiple=True,
        metavar="HOST",
        help="A name by which it is reached: mcp.example, *.example. Again for more; with any, only those.",
    )
    token_file: str | None = option(
        metavar="FILE",
        type=_FILE,
        help="Serve only who has a bearer token; lines of NAME: TOKEN, or NAME [SCOPES]: TOKEN.",
    )
    auth_issuers: tuple[str, ...] = option(
        "--auth-issuer",
        multiple=True,
        metavar="URL",
        help="Serve only who has an access token of this authorization server. Again for more.",
    )
    auth_audience: str | None = option(
        metavar="URL", help="Where clients reach the server, which tokens have to be for.  [default: its address here]"
    )
    scopes: str | None = option(metavar="SCOPES", help="What every token needs, with spaces in between.")
    workers: int = option(
        metavar="N",
        default=1,
        type=click.IntRange(1),
        help="Processes that share the port, and the sessions of clients.",
    )
    store: str | None = option(
        metavar="URL",
        help="Where processes share sessions: sqlite:///path, redis://host.  [default: with --workers, a file]",
    )
    stateless: bool = option(is_flag=True, help="Keep no sessions for clients of older revisions.")
    reply: ReplyForm = option(
        default="auto",
        type=click.Choice(["auto", "json", "sse"]),
        help="How calls are answered; auto streams when there is something to stream.",
    )
    sse: bool = option("--sse/--no-sse", default=True, help="HTTP+SSE at /sse, for the oldest clients.  [default: sse]")
    websocket: bool = option("--websocket/--no-websocket", default=True, help="WebSocket at /ws.  [default: websocket]")
    metrics: bool = option(is_flag=True, help="Metrics for Prometheus at /metrics, for whoever may come.")
    admin_http: bool = option(
        is_flag=True, help="Let who has a token with the scope trimcp:admin look at it and act: trimcp top URL."
    )
    access_log: bool = option(is_flag=True, help="Log a line for each response to standard error.")
    log_json: bool = option(is_flag=True, help="Log in lines of JSON.")


def trace_stdio(target: str | None) -> None:
    """Have what passes standard input and output shown or written there; None leaves that to the environment."""
    if target is not None:
        os.environ["TRIMCP_TRACE"] = "stderr" if target == "-" else target


def check_network(options: RunOptions) -> bool:
    """Return whether to serve over a network, by the options of the command that runs.

    Raises click.UsageError: an option needs another one, or excludes it.
    """
    context = click.get_current_context()
    given = [
        parameter
        for parameter in context.command.params
        if isinstance(parameter, click.Option)
        and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        and parameter.name not in RUN_SECTIONS["How it runs"]
    ]
    names = {parameter.name for parameter in given}
    if not (options.http or options.ws or options.grpc or options.agent_tools):
        if given:
            raise click.UsageError(f"{given[0].opts[0]} goes with --http or --ws", context)
        return False
    if options.http and options.ws:
        raise click.UsageError("--http has WebSocket beside it; write either --http or --ws", context)
    if options.agent_tools and options.ws:
        raise click.UsageError("--agent-tools has WebSocket beside HTTP; leave out --ws", context)
    if options.grpc and options.software != "own":
        raise click.UsageError("--grpc needs HTTP/2, which trimcp's own server speaks; leave out --server", context)
    if options.reload and options.workers > 1:
        raise click.UsageError("--reload is for one process at a time; leave out --workers", context)
    if options.metrics and options.workers > 1:
        raise click.UsageError("--metrics are of one process; leave out --workers", context)
    if options.admin not in (None, "-") and options.workers > 1:
        raise click.UsageError("each of the --workers has a socket of its own; write --admin without one", context)
    if "uds" in names and names & {"host", "port"}:
        raise click.UsageError("listen either on a --port or on a Unix socket (--uds)", context)
    if names & {"auth_audience", "scopes"} and "auth_issuers" not in names:
        raise click.UsageError("--auth-audience and --scopes go with --auth-issuer", context)
    if "keyfile" in names and "certfile" not in names:
        raise click.UsageError("--keyfile goes with --certfile", context)
    return True
