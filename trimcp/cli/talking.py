"""The commands that hold one conversation with a server: inspect, call, read and prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import click

from trimcp.cli.conversation import Body, converse
from trimcp.cli.exits import EXIT_CODES, REMOTE_ERROR, TALK_EXIT_CODES, TOOL_ERROR, Failure
from trimcp.cli.inspecting import describe, find_tool, list_tools, offer_json, take_stock
from trimcp.cli.options import SERVER, ConnectOptions, Subcommand, web_options, with_options
from trimcp.cli.schemas import read_json, read_words
from trimcp.cli.screen import Screen
from trimcp.cli.targets import TARGET_HELP
from trimcp.cli.text import Line, as_json, describe_content, describe_resource, theirs
from trimcp.client.session import ClientSession
from trimcp.wire.converter import converter_for
from trimcp.wire.fields import ABSENT
from trimcp.wire.prompts import GetPromptResult
from trimcp.wire.resources import ReadResourceResult
from trimcp.wire.revisions import Revision
from trimcp.wire.tools import CallToolResult


def _talks(*, exit_codes: str = TALK_EXIT_CODES) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command from a function that takes a `target` and `options`, and returns the body of the conversation."""

    def decorate(function: Callable[..., Body]) -> click.Command:
        @wraps(function)
        def command(target: str, options: ConnectOptions, **arguments: Any) -> None:
            sys.exit(converse(target, options, function(target=target, options=options, **arguments)))

        whole = click.argument("target", type=SERVER)(with_options(ConnectOptions)(command))
        return click.command(cls=Subcommand, epilog=TARGET_HELP + "\n" + exit_codes)(whole)

    return decorate


def _show(screen: Screen, revision: Revision, options: ConnectOptions, result: Any, lines: Iterable[Line]) -> None:
    """Print a result, as JSON in the form of the revision or as lines of text."""
    if options.json:
        screen.show(as_json(converter_for(revision).dump(result)))
    else:
        for text, style in lines:
            screen.show(text, style)


def show_result(screen: Screen, revision: Revision, options: ConnectOptions, result: CallToolResult) -> None:
    """Print the result of a call; a tool's error to standard error."""
    pieces = list(describe_content(result.content))
    if not pieces and result.structured_content is not ABSENT:
        pieces = [as_json(result.structured_content)]
    if result.is_error is True and not options.json:
        for piece in pieces:
            screen.complain(theirs(piece, None))
    else:
        _show(screen, revision, options, result, ((piece, "") for piece in pieces))


def show_resource(screen: Screen, revision: Revision, options: ConnectOptions, result: ReadResourceResult) -> None:
    """Print what a resource holds."""
    _show(screen, revision, options, result, ((describe_resource(each), "") for each in result.contents))


def show_prompt(screen: Screen, revision: Revision, options: ConnectOptions, result: GetPromptResult) -> None:
    """Print the messages of a prompt."""
    lines: list[Line] = []
    for message in result.messages:
        for piece in describe_content([message.content]):
            lines += [(f"{message.role}:", "bold"), (piece, "")]
    _show(screen, revision, options, result, lines)


def values_of(words: Iterable[str]) -> dict[str, str]:
    """Return the arguments of a prompt. Raises Failure: a word is none."""
    for word in words:
        if "=" not in word:
            raise Failure(f"{word!r} is no argument; write name=value")
    return dict(word.split("=", 1) for word in words)


@_talks()
@web_options
def inspect(target: str, options: ConnectOptions, web: bool, port: int) -> Body:
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


@_talks(exit_codes=EXIT_CODES)
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
        show_result(screen, session.revision, options, result)
        return TOOL_ERROR if result.is_error is True else 0

    return body


@_talks()
@click.argument("uri")
def read(target: str, uri: str, options: ConnectOptions) -> Body:
    """Print what the resource URI of TARGET holds.

    \b
    Examples:
      trimcp read codesearch.py code:///README.md
      trimcp read notes:///today --json -- python notes.py
    """

    async def body(session: ClientSession, screen: Screen) -> int:
        show_resource(screen, session.revision, options, await session.read_resource(uri))
        return 0

    return body


@_talks()
@click.argument("name")
@click.argument("arguments", nargs=-1, metavar="[NAME=VALUE]...")
def prompt(target: str, name: str, arguments: tuple[str, ...], options: ConnectOptions) -> Body:
    """Print the messages of the prompt NAME of TARGET, filled in.

    \b
    Examples:
      trimcp prompt codesearch.py review path=README.md focus=style
      trimcp prompt https://mcp.example/mcp greet name=Ada --json
    """
    values = values_of(arguments)

    async def body(session: ClientSession, screen: Screen) -> int:
        show_prompt(screen, session.revision, options, await session.get_prompt(name, values))
        return 0

    return body
