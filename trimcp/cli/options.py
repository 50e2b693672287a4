"""The words of `trimcp run --http`: its options, and what they exclude. It imports nothing that speaks HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import attrs
import click
from click.core import ParameterSource

from trimcp.wire.revisions import REVISIONS

if TYPE_CHECKING:
    from trimcp.transports.http.settings import ReplyForm

__all__ = [
    "BEARER_OPTION",
    "HEADER_OPTION",
    "REVISION_OPTION",
    "RUN_SECTIONS",
    "NetworkOptions",
    "network_options",
    "read_options",
]

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

RUN_SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "How it runs": ("grace", "trace", "gc_threshold", "watchdog"),
    "Over a network": (
        *("http", "ws", "host", "port", "uds", "uds_mode", "path", "software", "certfile", "keyfile"),
        *("workers", "stateless", "reply", "sse", "websocket", "access_log", "log_json"),
    ),
    "Who may come over a network": ("allow_origins", "allowed_hosts", "token_file"),
}
"""The sections of the help of `trimcp run`, and which parameters stand in each."""

_DATES: Final = [each.name for each in REVISIONS]

REVISION_OPTION: Final = click.option(
    "--revision", metavar="DATE", type=click.Choice(_DATES), help=f"Speak this revision: {', '.join(_DATES)}."
)
HEADER_OPTION: Final = click.option(
    *("--header", "headers", "-H"),
    multiple=True,
    metavar="HEADER",
    help="Send 'NAME: VALUE' to a URL; ${VARIABLE} in it is replaced. Again for more.",
)
BEARER_OPTION: Final = click.option(
    "--bearer",
    metavar="SOURCE",
    help="Send a bearer token to a URL: SOURCE is the environment variable that holds it, or @FILE.",
)


@attrs.frozen(kw_only=True)
class NetworkOptions:
    """How a server is to be served over the network, as it was typed.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        uds: the path of a Unix socket to listen on instead, with the permissions `uds_mode`.
        path: of the endpoint; None for the usual one.
        ws: whether WebSocket alone is served, at `path`.
        software: what speaks HTTP.
        certfile, keyfile: for TLS; the key may stand in the file of the certificate.
        allow_origins, allowed_hosts: which pages and names may reach it.
        token_file: who may, "name: token" on each line; None lets everybody in.
        workers: processes.
        stateless: serve clients of the legacy eras without sessions.
        reply: how POSTs are answered.
        sse, websocket: whether HTTP+SSE and WebSocket are served beside.
        access_log: whether each response is logged.
        log_json: whether the log is lines of JSON.
    """

    host: str
    port: int
    uds: str | None
    uds_mode: int
    path: str | None
    ws: bool
    software: Literal["own", "hypercorn"]
    certfile: str | None
    keyfile: str | None
    allow_origins: tuple[str, ...]
    allowed_hosts: tuple[str, ...]
    token_file: str | None
    workers: int
    stateless: bool
    reply: ReplyForm
    sse: bool
    websocket: bool
    access_log: bool
    log_json: bool


def _permissions(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise click.BadParameter("write permissions in octal, such as 660")
    return mode


def network_options(function: CommandT) -> CommandT:
    """Give a command the options of serving over the network; `read_options` takes them out of its arguments."""
    file = click.Path(exists=True, dir_okay=False)
    options = [
        click.option("--http", is_flag=True, help="Serve over HTTP instead of standard input and output."),
        click.option("--ws", is_flag=True, help="Serve over WebSocket alone."),
        click.option(
            "--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="The address to listen on."
        ),
        click.option(
            "--port",
            metavar="PORT",
            default=8000,
            show_default=True,
            type=click.IntRange(0, 65_535),
            help="0 takes a free one.",
        ),
        click.option("--uds", metavar="FILE", help="Listen on a Unix socket instead."),
        click.option(
            "--uds-mode", metavar="MODE", default="600", show_default=True, type=_permissions, help="Its permissions."
        ),
        click.option("--path", metavar="PATH", help="Where the endpoint is.  [default: /mcp, with --ws /ws]"),
        click.option(
            *("--server", "software"),
            default="own",
            show_default=True,
            type=click.Choice(["own", "hypercorn"]),
            help="What speaks HTTP; hypercorn has HTTP/2.",
        ),
        click.option("--certfile", metavar="FILE", type=file, help="Speak TLS with this certificate (PEM)."),
        click.option("--keyfile", metavar="FILE", type=file, help="Its key, where it is in a file of its own."),
        click.option(
            *("--allow-origin", "allow_origins"),
            multiple=True,
            metavar="ORIGIN",
            help="Pages from there may call: https://app.example, or *. Again for more.",
        ),
        click.option(
            *("--allowed-host", "allowed_hosts"),
            multiple=True,
            metavar="HOST",
            help="A name by which it is reached: mcp.example, *.example. Again for more; with any, only those.",
        ),
        click.option(
            "--token-file",
            metavar="FILE",
            type=file,
            help="Serve only who has a bearer token; lines of NAME: TOKEN.",
        ),
        click.option(
            "--workers",
            metavar="N",
            default=1,
            show_default=True,
            type=click.IntRange(1),
            help="Processes that share the port. More than one mean --stateless and --no-sse.",
        ),
        click.option("--stateless", is_flag=True, help="Keep no sessions for clients of older revisions."),
        click.option(
            "--reply",
            default="auto",
            show_default=True,
            type=click.Choice(["auto", "json", "sse"]),
            help="How calls are answered; auto streams when there is something to stream.",
        ),
        click.option("--sse/--no-sse", default=True, help="HTTP+SSE at /sse, for the oldest clients.  [default: sse]"),
        click.option("--websocket/--no-websocket", default=True, help="WebSocket at /ws.  [default: websocket]"),
        click.option("--access-log", is_flag=True, help="Log a line for each response to standard error."),
        click.option("--log-json", is_flag=True, help="Log in lines of JSON."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def read_options(words: dict[str, Any]) -> NetworkOptions | None:
    """Take the options of serving over the network out of a command's arguments; None if it is not to.

    Raises:
        click.UsageError: one is given that means nothing without another, or excludes it.
    """
    context = click.get_current_context()
    names = [field.name for field in attrs.fields(NetworkOptions)]
    parameters = {parameter.name: parameter for parameter in context.command.params}
    given = {name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    http = words.pop("http")
    if not http and not words["ws"]:
        if given:
            first = next(name for name in names if name in given)
            raise click.UsageError(f"{parameters[first].opts[0]} goes with --http or --ws", context)
        for name in names:
            del words[name]
        return None
    if http and words["ws"]:
        raise click.UsageError("--http has WebSocket beside it; write either --http or --ws", context)
    if "uds" in given and given & {"host", "port"}:
        raise click.UsageError("listen either on a --port or on a Unix socket (--uds)", context)
    if "keyfile" in given and "certfile" not in given:
        raise click.UsageError("--keyfile goes with --certfile", context)
    options = NetworkOptions(**{name: words.pop(name) for name in names})
    if options.workers > 1:
        options = attrs.evolve(options, stateless=True, sse=False)
    return options
