"""`trimcp shell`: one session that stays open, and a line for each thing to do with it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, cast, get_args

import attrs
import click

from trimcp.cli.asking import Asker
from trimcp.cli.conversation import Parts, client_of, failure_of, traced
from trimcp.cli.exits import REMOTE_ERROR, TALK_EXIT_CODES, TIMED_OUT, Failure
from trimcp.cli.inspecting import find_tool
from trimcp.cli.options import SERVER, ConnectOptions, Subcommand, with_options
from trimcp.cli.schemas import ValueProblem, describe_properties, parse_arguments
from trimcp.cli.screen import Screen
from trimcp.cli.talking import show_prompt, show_resource, show_result, values_of
from trimcp.cli.targets import TARGET_HELP, find_target, read_headers
from trimcp.cli.text import as_json, theirs, told
from trimcp.errors import ConnectionLost, InvalidReply, McpError
from trimcp.portal import blocking
from trimcp.session.outgoing.listening import ResourceUpdated
from trimcp.wire.common import LoggingLevel
from trimcp.wire.tools import Tool

_PROMPT: Final = "trimcp> "
_LONGEST_HISTORY: Final = 1_000
_LEVELS: Final[tuple[LoggingLevel, ...]] = get_args(LoggingLevel)
_ABOUT: Final = 80  # characters of a description in a list


@click.command(cls=Subcommand, epilog=TARGET_HELP + "\n" + TALK_EXIT_CODES)
@click.argument("target", type=SERVER)
@with_options(ConnectOptions)
def shell(target: str, options: ConnectOptions) -> None:
    """Connect to TARGET and do what is typed, line by line, in one session: list, call, read, watch, complete.

    Tab completes commands, names, arguments and their values; the arrows bring back earlier lines. Ctrl-C cancels what
    runs, Ctrl-D ends. Lines may come from a pipe, too. --timeout is for each line.

    \b
    Examples:
      trimcp shell weather.py
      trimcp shell https://mcp.example/mcp --bearer MY_TOKEN
      trimcp shell -- npx -y @modelcontextprotocol/server-everything
    """
    screen = Screen(options.quiet)
    server = find_target(target, screen.server_says, read_headers(options.headers, options.bearer))
    client = client_of(options, Parts(Asker(screen).answer, screen.log, lambda each: each))
    try:
        with blocking.connect(traced(server, options, screen), client=client, revision=options.revision) as session:
            screen.listening = True
            _greet(session, screen)
            with _edited(TypedLines(session, screen, options)) as lines:
                code = lines.run()
    except McpError as error:
        raise failure_of(error, server, connected=screen.listening) from None
    except TimeoutError as error:
        raise Failure(theirs(error, None), TIMED_OUT) from None
    sys.exit(code)


def _greet(session: blocking.BlockingSession, screen: Screen) -> None:
    info = session.server_info
    name = "a server" if info is None else f"{theirs(info.name)} {theirs(info.version)}"
    screen.note(f"{name} · {session.revision.name} · help shows what can be typed, Ctrl-D ends", "dim")


@attrs.define(eq=False)
class TypedLines:
    """The lines that are typed, and what each does."""

    session: blocking.BlockingSession
    screen: Screen
    options: ConnectOptions
    _found: list[str] = attrs.field(init=False, factory=list)  # what completes the word that is typed

    def run(self) -> int:
        """Do what each line says, until the input ends or the server does; return the exit code."""
        while True:
            try:
                line = input(_PROMPT if sys.stdin.isatty() else "")
            except EOFError:
                if sys.stdin.isatty():
                    self.screen.note("")
                return 0
            except KeyboardInterrupt:  # what was typed is dropped
                self.screen.note("")
                continue
            try:
                if not self.do(line):
                    return 0
            except ConnectionLost as error:
                self.screen.complain(told(error), "red")
                return REMOTE_ERROR
            except (Failure, McpError, ValueProblem) as error:
                text = error.message if isinstance(error, Failure) else theirs(told_of(error), None)
                self.screen.complain(text, "red")
            except TimeoutError:
                self.screen.complain(f"not done after {self.options.timeout:g} seconds; the server was told", "red")
            except KeyboardInterrupt:
                self.screen.complain("cancelled; the server was told", "yellow")
            finally:
                self.screen.end_progress()

    def do(self, line: str) -> bool:
        """Do what one line says; return False if it ends the shell."""
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise Failure(f"{theirs(error)}: quotes come in pairs") from None
        if not words:
            return True
        name, *rest = words
        if name in ("quit", "exit"):
            return False
        command = COMMANDS.get(name)
        if command is None:
            if not any(tool.name == name for tool in self.tools()):
                raise Failure(f"there is no command or tool {theirs(name)}; help shows what there is")
            command, rest = COMMANDS["call"], words
        if not command.least <= len(rest) <= command.most:
            raise Failure(f"write: {name} {command.usage}".rstrip())
        seconds = self.options.timeout
        with nullcontext() if seconds is None else blocking.timeout(seconds):
            command.function(self, *rest)
        return True

    def tools(self) -> Sequence[Tool]:
        try:
            return self.session.list_tools()
        except InvalidReply as error:
            if error.listed is None:
                raise
            found: Sequence[Tool] = error.listed
            return found

    # Commands

    def help(self, name: str = "") -> None:
        if name and name not in COMMANDS:
            tool = find_tool(self.tools(), name)
            self.screen.show(theirs(tool.description or tool.name, None))
            for line in describe_properties(tool.input_schema, "  "):
                self.screen.show(line)
            return
        for each, command in COMMANDS.items():
            if name in ("", each):
                self.screen.show(f"{each + ' ' + command.usage:38}{command.about}")
        if not name:
            self.screen.show(f"{'TOOL [NAME=VALUE]...':38}the same as call TOOL")
            self.screen.show(f"{'quit':38}end, as Ctrl-D does")

    def list_tools(self) -> None:
        self._list([(tool.name, tool.description) for tool in self.tools()])

    def list_resources(self) -> None:
        resources = [(each.uri, each.description or each.name) for each in self.session.list_resources()]
        templates = self.session.list_resource_templates()
        self._list(resources + [(each.uri_template, each.description or each.name) for each in templates])

    def list_prompts(self) -> None:
        self._list([(prompt.name, prompt.description) for prompt in self.session.list_prompts()])

    def _list(self, found: Sequence[tuple[str, Any]]) -> None:
        width = max((len(theirs(name, _ABOUT)) for name, _ in found), default=0)
        for name, about in found:
            first = str(about or "").partition("\n")[0]
            self.screen.show(f"{theirs(name, _ABOUT):{width}}  {theirs(first, _ABOUT)}".rstrip())
        if not found:
            self.screen.note("none", "dim")

    def call(self, name: str, *words: str) -> None:
        tool = find_tool(self.tools(), name)
        with self.session.calling(name, parse_arguments(words, tool.input_schema)) as call:
            for step in call.progress:
                self.screen.progress(step)
            result = call.result()
        self.screen.end_progress()
        show_result(self.screen, self.session.revision, self.options, result)

    def read(self, uri: str) -> None:
        show_resource(self.screen, self.session.revision, self.options, self.session.read_resource(uri))

    def watch(self, *uris: str) -> None:
        with self.session.listen(tools=not uris, prompts=not uris, resources_list=not uris, resources=uris) as changes:
            self.screen.note("watching; Ctrl-C ends it", "dim")
            with suppress(KeyboardInterrupt):
                for change in changes:
                    what = change.uri if isinstance(change, ResourceUpdated) else type(change).__name__
                    self.screen.show(f"changed: {theirs(what)}")

    def prompt(self, name: str, *words: str) -> None:
        result = self.session.get_prompt(name, values_of(words))
        show_prompt(self.screen, self.session.revision, self.options, result)

    def complete(self, name: str, argument: str, text: str = "") -> None:
        ask = self.session.complete_resource if "{" in name else self.session.complete_prompt
        for value in ask(name, argument, text).values:
            self.screen.show(theirs(value))

    def ping(self) -> None:
        self.session.ping()
        self.screen.show("it is there")

    def log(self, level: str) -> None:
        if level not in _LEVELS:
            raise Failure(f"a level is one of {', '.join(_LEVELS)}")
        self.session.set_log_level(cast(Any, level))

    # Completion

    def completions(self, typed: str) -> Iterator[str]:
        """Yield what may stand for the last word of a line."""
        *before, last = typed.split(" ") if typed else [""]
        words = [word for word in before if word]
        if not words:
            yield from (f"{name} " for name in (*COMMANDS, "quit"))
            yield from (f"{tool.name} " for tool in self.tools())
            return
        name, *given = words
        if name not in COMMANDS:
            name, given = "call", words
        if name in ("call", "help") and not given:
            yield from (f"{tool.name} " for tool in self.tools())
        elif name == "call":
            yield from _arguments(find_tool(self.tools(), given[0]), given[1:], last)
        elif name in ("read", "watch"):
            yield from (each.uri for each in self.session.list_resources())
        elif name in ("prompt", "complete") and not given:
            yield from (f"{prompt.name} " for prompt in self.session.list_prompts())
        elif name == "prompt":
            key, equals, value = last.partition("=")
            if equals:
                known = values_of(given[1:])
                found = self.session.complete_prompt(given[0], key, value, known).values
                yield from (f"{key}={each} " for each in found)
            else:
                listed = next(each for each in self.session.list_prompts() if each.name == given[0])
                yield from (f"{each.name}=" for each in listed.arguments or ())
        elif name == "log":
            yield from _LEVELS

    def complete_word(self, text: str, state: int) -> str | None:
        """Return the one of the completions with this number, as readline asks for them."""
        import readline

        if state == 0:
            typed = readline.get_line_buffer()[: readline.get_endidx()]
            self._found = []
            with suppress(McpError, Failure, TimeoutError, StopIteration), blocking.timeout(5):
                self._found = [each for each in self.completions(typed) if each.startswith(text)]
        return theirs(self._found[state]) + " " * self._found[state].endswith(" ") if state < len(self._found) else None


def told_of(error: Exception) -> str:
    """Return an error of a line, with what the server says beside it."""
    if not isinstance(error, McpError):
        return str(error)
    data = getattr(error, "data", None)
    return told(error) if data is None else f"{told(error)}\n{as_json(data)[:2_000]}"


def _arguments(tool: Tool, given: Sequence[str], last: str) -> Iterator[str]:
    """Yield the names of a tool's arguments that are not given, or the values of the one that is typed."""
    properties = tool.input_schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    key, equals, _ = last.partition("=")
    if not equals:
        there = {word.partition("=")[0] for word in given}
        yield from (f"{name}=" for name in known if name not in there)
        return
    schema = known.get(key)
    if isinstance(schema, dict):
        choices = schema.get("enum") or (["true", "false"] if schema.get("type") == "boolean" else [])
        yield from (f"{key}={each} " for each in choices if isinstance(each, str))


@contextmanager
def _edited(lines: TypedLines) -> Iterator[TypedLines]:
    """Edit lines with arrows, history and completion while the block runs, at a terminal of a system that can."""
    try:
        import readline
    except ImportError:  # Windows
        yield lines
        return
    if not sys.stdin.isatty():
        yield lines
        return
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    history = Path(state) / "trimcp" / "shell_history"
    with suppress(OSError):
        history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        history.touch(0o600)
        readline.read_history_file(history)
    readline.set_history_length(_LONGEST_HISTORY)
    readline.set_completer_delims(" ")
    readline.set_completer(lines.complete_word)
    readline.parse_and_bind("tab: complete")
    try:
        yield lines
    finally:
        readline.set_completer(None)
        with suppress(OSError):
            readline.write_history_file(history)


@attrs.frozen
class LineCommand:
    """What a line may begin with."""

    function: Callable[..., None]
    usage: str
    about: str
    least: int = 0  # words that must follow
    most: int = 0


_MANY: Final = 1_000
COMMANDS: Final = {
    "tools": LineCommand(TypedLines.list_tools, "", "list the tools"),
    "resources": LineCommand(TypedLines.list_resources, "", "list the resources and their templates"),
    "prompts": LineCommand(TypedLines.list_prompts, "", "list the prompts"),
    "call": LineCommand(TypedLines.call, "TOOL [NAME=VALUE]...", "call a tool; NAME:=JSON is JSON", 1, _MANY),
    "read": LineCommand(TypedLines.read, "URI", "show what a resource holds", 1, 1),
    "watch": LineCommand(TypedLines.watch, "[URI]...", "show changes of resources, or of the lists", 0, _MANY),
    "prompt": LineCommand(TypedLines.prompt, "NAME [NAME=VALUE]...", "show the messages of a prompt", 1, _MANY),
    "complete": LineCommand(TypedLines.complete, "PROMPT ARGUMENT [TEXT]", "ask for suggestions", 2, 3),
    "log": LineCommand(TypedLines.log, "LEVEL", "show log messages from this level on", 1, 1),
    "ping": LineCommand(TypedLines.ping, "", "ask whether the server is there"),
    "help": LineCommand(TypedLines.help, "[COMMAND | TOOL]", "show what can be typed, or what a tool takes", 0, 1),
}
