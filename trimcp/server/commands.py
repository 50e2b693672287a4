"""External programs as tools: their options, and the tool made of them (`Server.add_command`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import attrs

from trimcp.server.handlers.calling import Validate
from trimcp.server.options import ListedOptions, check_options
from trimcp.server.tools import ToolOptions
from trimcp.wire.tools import ToolAnnotations
from trimcp.workers.commands import Command, CommandIsolation
from trimcp.workers.pool import cores


class CommandOptions(ListedOptions, total=False):
    """The options of a command, each with a default, beside those of `ListedOptions`.

    It has more than 20 fields because each is an option of one tool.

    Attributes:
        isolation: "command" (a process with little environment, and the rights of the server), or "bwrap" (Linux: in a
            sandbox of bubblewrap, without network and without files but the system's).
        stdin: what the program reads: "json" (all arguments, as JSON), "{name}" (the text of one), or None for nothing.
            By default "json" if the command has no placeholder.
        output: "text", or "json", which is parsed.
        success: the exit statuses that are no errors, by default only 0.
        env: variables to set.
        inherit_env: names of the variables it inherits of ours, by default PATH, TZ and those of the language.
        cwd: its working directory, by default an empty one of its own, removed with it.
        read: with "bwrap", absolute paths that it may read, beside the system's programs.
        write: with "bwrap", absolute paths that it may write.
        scratch: with "bwrap", bytes that fit into its own directory, by default 64 MiB. They are memory.
        timeout: seconds for one run, by default 60 (None: no limit); then it is killed and the model gets a tool error.
        max_output: bytes of output, by default 1 MiB; with more it is killed and the model gets a tool error.
        max_concurrent: calls that may run at once, by default as many as there are processors; others wait.
        memory: bytes of address space for each of its processes (RLIMIT_AS).
        cpu_time: seconds of processor time for each of its processes, rounded up (RLIMIT_CPU).
        processes: with "bwrap", how many processes and threads it may have at once (RLIMIT_NPROC). It needs Linux 5.14
            and a server that does not run as root.
        input_schema: any JSON Schema 2020-12 of an object. By default each placeholder is a required text.
        output_schema: the schema of its structured result, with `output="json"`.
        validate: a function of the arguments that refuses wrong ones, by raising `ToolError` or `ValueError`.
        annotations: hints on its behaviour, as of a function.
        confirm: True asks the user before each call; False never does, whatever `Server(confirm=)` is.
    """

    isolation: CommandIsolation
    stdin: str | None
    output: Literal["text", "json"]
    success: Collection[int]
    env: Mapping[str, str]
    inherit_env: Collection[str]
    cwd: str | os.PathLike[str] | None
    read: Sequence[str | os.PathLike[str]]
    write: Sequence[str | os.PathLike[str]]
    scratch: int
    timeout: float | None
    max_output: int
    max_concurrent: int | None
    memory: int | None
    cpu_time: float | None
    processes: int | None
    input_schema: Mapping[str, Any] | None
    output_schema: Mapping[str, Any] | None
    validate: Validate | None
    annotations: ToolAnnotations | Mapping[str, Any] | None
    confirm: bool | None


_OF_COMMAND = frozenset(field.name for field in attrs.fields(Command) if field.init) - {"command"}


def command_tool(name: str, command: Sequence[str], options: CommandOptions) -> tuple[Command, ToolOptions]:
    """Return the function of a tool that runs a program, and the tool's options. Raises as `add_command` does."""
    checked = check_options(options, CommandOptions)
    if "name" in checked:
        raise TypeError("the name of a command is the first argument")
    given: dict[str, Any] = {key: value for key, value in checked.items() if key in _OF_COMMAND}
    function = Command(command, **given)
    if checked.get("output_schema") is not None and function.output != "json":
        raise TypeError('output_schema describes JSON; add output="json"')
    schema = checked.get("input_schema")
    if schema is None:
        schema = function.schema()
    function.check_schema(schema)
    rest: Any = {key: value for key, value in checked.items() if key not in _OF_COMMAND}
    rest |= {"name": name, "input_schema": schema, "structured": False}
    if checked.get("max_concurrent") is None and checked.get("quota") is None:
        rest["max_concurrent"] = cores()
    return function, rest
