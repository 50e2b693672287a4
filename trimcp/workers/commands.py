"""Commands: external programs as tools. How arguments reach a program, and what its end becomes.

No shell is involved. A placeholder in the command is exactly one argument of the program, or a part of one, whatever
its value is.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import math
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import orjson
import trio

from trimcp.errors import LocalError, ToolError
from trimcp.session.clock import virtual_time
from trimcp.support.bounds import check_members, checked
from trimcp.support.cleaning import clean
from trimcp.support.descendants import signal_name
from trimcp.support.nurseries import open_service_nursery
from trimcp.wire.given import given_name
from trimcp.wire.jsonrpc import Unencodable, encode
from trimcp.workers.programs import (
    INHERITED,
    Finished,
    PlainProgram,
    Start,
    bounded_by,
    environment_of,
    in_real_time,
    run_program,
    worker_loads,
)

if TYPE_CHECKING:
    from trimcp.workers.bubblewrap import Sandbox  # few servers need it

log: logging.Logger = logging.getLogger("trimcp.server")

_PLACEHOLDER: Final = re.compile(r"\{\{([A-Za-z_][\w-]*)\}\}|\{([A-Za-z_][\w-]*)\}")
_SHOWN: Final = 2_000  # characters of standard error in a tool error
_REMOVED: Final = 5.0  # seconds to remove a directory before the call is answered

CommandIsolation = Literal["command", "bwrap"]
"""How a program is kept apart: as a process with little environment, or in a sandbox of bubblewrap."""


@attrs.frozen
class _Argument:
    """One argument of the command."""

    parts: tuple[tuple[str, bool], ...]  # its texts, and the names of placeholders (True), in order
    may_be_dashed: bool  # whether a value at its beginning may begin with "-": "--" stands before it

    @property
    def names(self) -> list[str]:
        return [text for text, is_name in self.parts if is_name]

    def fill(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the argument, or None if a placeholder has no value. Raises ToolError for a value it cannot take."""
        texts = []
        for part, is_name in self.parts:
            value = arguments.get(part) if is_name else part
            if value is None:
                return None
            texts.append(_as_text(part, value))
        text, (first, is_name) = "".join(texts), self.parts[0]
        if is_name and text.startswith("-") and not self.may_be_dashed:
            raise ToolError(f"{first} must not begin with '-': the program would take it for an option")
        return text


def _parse(text: str, *, may_be_dashed: bool) -> _Argument:
    parts: list[tuple[str, bool]] = []
    at = 0
    for match in _PLACEHOLDER.finditer(text):
        literal = text[at : match.start()] + (f"{{{match[1]}}}" if match[1] else "")
        if literal:
            parts.append((literal, False))
        if match[2]:
            parts.append((match[2], True))
        at = match.end()
    if text[at:] or not parts:
        parts.append((text[at:], False))
    return _Argument(tuple(parts), may_be_dashed)


def _parse_all(command: Sequence[str]) -> tuple[_Argument, ...]:
    """Parse a command. A value may begin with "-" where only other placeholders stand between it and a "--".

    After another word, that may be a program of its own: in `env -- git log {what}` the "--" is one for `env`.
    """
    found: list[_Argument] = []
    guarded = False
    for text in command:
        argument = _parse(text, may_be_dashed=guarded)
        found.append(argument)
        guarded = text == "--" or (guarded and bool(argument.names))
    return tuple(found)


def _as_text(name: str, value: Any) -> str:
    """Return a JSON value as one argument. Raises ToolError for arrays and objects, and for what no argument holds."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if isinstance(value, list | dict):
        raise ToolError(f"{name} cannot be an argument of a program: it is neither text nor a number")
    text = value if isinstance(value, str) else json.dumps(value)
    if "\0" in text:
        raise ToolError(f"{name} must not contain the character U+0000")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ToolError(f"{name} is no valid text: it holds half a surrogate pair") from None
    return text


def _as_command(command: Any) -> tuple[str, ...]:
    whole = isinstance(command, Sequence) and not isinstance(command, str | bytes)
    if not whole or not command or not all(isinstance(each, str) for each in command):
        raise TypeError(f"a command is a list of texts, the program first; no shell reads it: {command!r:.200}")
    words: tuple[str, ...] = tuple(command)
    if _parse(words[0], may_be_dashed=False).names:
        raise TypeError(f"the program itself cannot be a placeholder: {words[0]!r}")
    if any("\0" in word for word in words):
        raise ValueError("a command cannot contain the character U+0000")
    return words


def _as_statuses(statuses: Iterable[int]) -> frozenset[int]:
    return frozenset(check_members("success", statuses, int, "exit statuses"))


def _as_variables(names: Iterable[str]) -> tuple[str, ...]:
    return check_members("inherit_env", names, str, "texts, such as ['PATH']")


def _as_bound(seconds: float | None) -> float | None:
    return None if seconds == math.inf else seconds


def _as_environment(env: Any) -> dict[str, str]:
    if not isinstance(env, Mapping) or any("\0" in given_name("env", text) for pair in env.items() for text in pair):
        raise TypeError(f"env is a dict of texts, such as {{'LANG': 'C'}}, not {env!r:.60}")
    return dict(env)


def _as_directory(path: str | os.PathLike[str] | None) -> str | None:
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"cwd is the path of a directory, not {path!r:.60}")
    return given_name("cwd", os.fspath(path))


@attrs.frozen(eq=False, field_transformer=checked())
class Command:
    """A program that runs once for each call: an async function of the arguments, for `Server.add_command`.

    What is not explained here is as of `CommandOptions`.

    Attributes:
        command: the program and its arguments. `{name}` is replaced by the argument of that name, as one argument or a
            part of one; an argument with a placeholder that has no value is left out. `{{name}}` is the text `{name}`.
            A value that begins with "-" is refused where it would be an option: unless text or "--" stands before it.
        stdin: as of `CommandOptions`, or "auto", which is "json" if the command has no placeholder, else nothing.
    """

    command: tuple[str, ...] = attrs.field(converter=_as_command)
    isolation: CommandIsolation = "command"
    stdin: str | None = "auto"
    output: Literal["text", "json"] = "text"
    success: frozenset[int] = attrs.field(default=frozenset({0}), converter=_as_statuses)
    env: Mapping[str, str] = attrs.field(factory=dict, converter=_as_environment, repr=False)
    inherit_env: Collection[str] = attrs.field(default=INHERITED, converter=_as_variables)
    cwd: str | None = attrs.field(default=None, converter=_as_directory)
    read: Sequence[str | os.PathLike[str]] = ()
    write: Sequence[str | os.PathLike[str]] = ()
    scratch: int = 64 * 2**20
    timeout: float | None = 60.0
    max_output: int = 2**20
    memory: int | None = None
    cpu_time: float | None = attrs.field(default=None, converter=_as_bound)
    processes: int | None = None
    _program: tuple[str, ...] = attrs.field(init=False, default=())
    _arguments: tuple[_Argument, ...] = attrs.field(init=False)
    _given: str | None = attrs.field(init=False, default=None)
    _sandbox: Sandbox | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        if self.isolation not in ("command", "bwrap"):
            raise TypeError(f"isolation of a command must be 'command' or 'bwrap', not {self.isolation!r}")
        if self.output not in ("text", "json"):
            raise TypeError(f"output must be 'text' or 'json', not {self.output!r}")
        if self.isolation == "command" and (self.read or self.write or self.processes is not None):
            raise TypeError('read, write and processes are for a sandbox; add isolation="bwrap"')
        set_: Any = functools.partial(object.__setattr__, self)
        set_("_arguments", _parse_all(self.command[1:]))
        stdin = ("json" if not self._placed() else None) if self.stdin == "auto" else self.stdin
        set_("stdin", stdin)
        set_("_given", self._input_name(stdin))
        if not worker_loads():
            self._prepare()

    def _prepare(self) -> None:
        """Look for the program, and for its sandbox."""
        object.__setattr__(self, "_sandbox", self._make_sandbox())
        object.__setattr__(self, "_program", self._find_program())

    def _placed(self) -> list[str]:
        return [name for argument in self._arguments for name in argument.names]

    @staticmethod
    def _input_name(stdin: Any) -> str | None:
        """Return the argument whose text is the input; None if it is another kind of input."""
        if stdin in (None, "json"):
            return None
        match = _PLACEHOLDER.fullmatch(stdin) if isinstance(stdin, str) else None
        if match is None or match[2] is None:
            raise TypeError(f"stdin is 'json', one placeholder such as '{{text}}', or None, not {stdin!r}")
        return match[2]

    def _make_sandbox(self) -> Sandbox | None:
        if self.isolation == "command":
            return None
        from trimcp.workers.bubblewrap import Sandbox, check_counted

        if self.processes is not None:
            check_counted()
        sandbox = Sandbox.of(self.read, self.write, self.scratch)
        if self.cwd is not None and not sandbox.shows(self.cwd):
            raise ValueError(f"cwd={os.fspath(self.cwd)!r} is not visible in the sandbox; add it to read= or write=")
        return sandbox

    def _find_program(self) -> tuple[str, ...]:
        """Return the beginning of the command line: the program, and before it what bounds it."""
        name = self.command[0]
        found = shutil.which(name, path=self._environment("").get("PATH"))
        if found is None:
            raise LocalError(f"the program {name!r} of a command is not installed here, or not to be executed")
        found = os.path.abspath(found)
        if self._sandbox is not None and not self._sandbox.shows(found):
            raise LocalError(f"the program {found!r} is not visible in the sandbox; add its directory to read=")
        if self.memory is None and self.cpu_time is None and self.processes is None:
            return (found,)
        prlimit = shutil.which("prlimit")
        if prlimit is None:
            raise LocalError("the bounds of a command need the program prlimit, of Linux's util-linux")
        return (*bounded_by(prlimit, self.memory, self.cpu_time, self.processes), found)

    @property
    def name(self) -> str:
        """The program's name, without its directory."""
        return os.path.basename(self.command[0])

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of its arguments if none is given: each placeholder is a text, and required."""
        names = dict.fromkeys([*self._placed(), *([self._given] if self._given is not None else [])])
        properties = {name: {"type": "string"} for name in names}
        return {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}

    def check_schema(self, schema: Mapping[str, Any]) -> None:
        """Raise TypeError if a placeholder is no property of this schema, or one that no argument can hold."""
        properties = schema.get("properties", {})
        for name in self.schema()["required"]:
            if name not in properties:
                raise TypeError(f"the placeholder {{{name}}} of the command is no property of input_schema")
            kind = properties[name].get("type") if isinstance(properties[name], Mapping) else None
            if kind in ("array", "object"):
                raise TypeError(f"the placeholder {{{name}}} cannot be an {kind}; let the program read JSON (stdin)")

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        if not self._program:
            self._prepare()
        filled = [text for each in self._arguments if (text := each.fill(arguments)) is not None]
        given = self._input(arguments)
        run = functools.partial(self._run_in_time, [*self._program, *filled], given)
        return self._result(in_real_time(run) if virtual_time() else await run())

    def _input(self, arguments: Mapping[str, Any]) -> bytes:
        if self._given is not None:
            value = arguments.get(self._given)
            return b"" if value is None else _as_text(self._given, value).encode()
        if self.stdin is None:
            return b""
        try:
            return encode(dict(arguments))
        except Unencodable as error:
            raise ToolError(f"the arguments are no JSON: {error}") from None

    async def _run_in_time(self, line: list[str], given: bytes) -> Finished:
        timeout = float("inf") if self.timeout is None else self.timeout
        with trio.move_on_after(timeout):
            return await self._run(line, given)
        raise ToolError(f"{self.name} did not finish within {timeout:g} seconds")

    async def _run(self, line: list[str], given: bytes) -> Finished:
        try:
            if self._sandbox is not None:
                return await self._run_in_sandbox(self._sandbox, line, given)
            async with _own_directory() as own:
                environment = self._environment(own)
                start: Start = functools.partial(PlainProgram.start, line, environment, self.cwd or own)
                return await run_program(start, given, self.max_output)
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise ToolError(f"the arguments are too long for {self.name}") from None
            raise

    async def _run_in_sandbox(self, sandbox: Sandbox, line: list[str], given: bytes) -> Finished:
        from trimcp.workers.bubblewrap import HOME, SandboxedProgram

        environment = self._environment(HOME)
        async with open_service_nursery() as nursery:
            start: Start = functools.partial(
                SandboxedProgram.start, nursery, sandbox, line, environment, self.cwd or HOME
            )
            return await run_program(start, given, self.max_output)

    def _environment(self, home: str) -> dict[str, str]:
        return environment_of(self.inherit_env, home, self.env)

    def _result(self, finished: Finished) -> Any:
        """Return what a call results in. Raises ToolError if the program failed."""
        if finished.overflow:
            raise ToolError(f"{self.name} wrote more than {self.max_output} bytes of output, and was ended")
        if finished.status not in self.success:
            raise ToolError(f"{self.name} {self._how(finished.status)}{_quoted(finished.errors or finished.output)}")
        if finished.errors:
            said = _quoted(finished.errors).replace("\n", "\n    | ")  # which cannot imitate a line of the log
            log.debug("%s wrote to standard error%s", self.name, said)
        if self.output == "text":
            return finished.output.decode(errors="replace")
        try:
            return orjson.loads(finished.output)
        except orjson.JSONDecodeError as error:
            raise ToolError(f"the output of {self.name} is no JSON: {error}{_quoted(finished.errors)}") from None

    def _how(self, status: int | None) -> str:
        if status is None:
            return "cannot be killed"
        if status >= 0:
            return f"failed with exit status {status}"
        if -status == signal.SIGXCPU and self.cpu_time is not None:
            return f"used more than {self.cpu_time:g} s of processor time"
        return f"was ended by {signal_name(-status)}"


def _quoted(errors: bytes) -> str:
    """Return the end of what a program wrote, to follow a message."""
    text = clean(errors.decode(errors="replace").strip())
    if not text:
        return ""
    return f": {text}" if len(text) <= _SHOWN else f": ...{text[-_SHOWN:]}"


@asynccontextmanager
async def _own_directory() -> AsyncIterator[str]:
    """Make an empty directory, and remove it with all that is in it."""
    path = tempfile.mkdtemp(prefix="trimcp-")
    try:
        yield path
    finally:
        with trio.move_on_after(_REMOVED, shield=True):
            # Much takes long: then the thread goes on, and the call is answered.
            await trio.to_thread.run_sync(_remove, path, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))


def _remove(path: str) -> None:
    try:
        try:
            shutil.rmtree(path)
        except PermissionError:  # the program took our rights to its directories
            _open_up(path)
            shutil.rmtree(path)
    except (OSError, RecursionError) as error:
        log.error("the directory %s of a command could not be removed: %s", path, type(error).__name__)


def _open_up(path: str) -> None:
    os.chmod(path, 0o700)
    for root, names, _ in os.walk(path):
        for directory in (os.path.join(root, name) for name in names):
            if not os.path.islink(directory):
                os.chmod(directory, 0o700)  # before it is walked into
