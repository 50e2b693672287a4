"""Finds the `Server` that `FILE_OR_MODULE[:server]` names. It runs the user's module and nothing else."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import attrs

from trimcp.cli.exits import Failure
from trimcp.cli.options import ProcessOptions
from trimcp.server.server import Server
from trimcp.support.files import UnusableFile

ADMIN_GROUP: Final = "TRIMCP_ADMIN_GROUP"
"""The environment variable that names the processes which serve one port together, and are looked at as one."""

RELOADED: Final = "TRIMCP_RELOADED"
"""The environment variable that tells a server that another version of it may follow (`--reload`)."""

NO_TASKS: Final = "{name} has no tool that runs as a task: @server.tool(task=...)"
"""Said where a server cannot have any."""

_USUAL = ("server", "mcp", "app")


@attrs.frozen
class Loaded:
    """What a module has to serve."""

    server: Server[Any]  # its server
    auth: Any = None  # what is called `auth` in it, if that takes tokens
    agent_tools: Any = None  # its `AgentTools` of that server, if it has any


def load_program(name: str) -> Loaded:
    """Import `FILE.py[:NAME]` or `package.module[:NAME]`; return its server, and what belongs to that.

    Without a name it is the one called `server`, `mcp` or `app`, or the only one there is. A name may be that of a
    function without arguments that makes the server. Raises Failure: there is no such file, module or server; the text
    says what to do. What the user's code raises when it is imported comes out as itself.
    """
    place, attribute = _split(name)
    # Standard output is only for protocol messages, from the first byte on.
    with redirect_stdout(sys.stderr), _children_print_to_stderr():
        module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
        auth, server = getattr(module, "auth", None), _pick(module, attribute, place)
        return Loaded(server, auth if hasattr(auth, "metadata_paths") else None, _agent_tools_of(module, server))


def _agent_tools_of(module: ModuleType, server: Server[Any]) -> Any:
    serving = sys.modules.get("trimcp.agent_tools.serving")
    if serving is None:  # a module that has some has imported it
        return None
    found = (value for value in vars(module).values() if isinstance(value, serving.AgentTools))
    return next((value for value in found if value.server is server), None)


@contextmanager
def _children_print_to_stderr() -> Iterator[None]:
    """While the block runs, let descriptor 1 be standard error: child processes inherit it."""
    if sys.__stdout__ is None or sys.__stderr__ is None:
        yield
        return
    sys.__stdout__.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def trace_of(error: Exception) -> str:
    """Return the traceback of an exception of the user's module, beginning in that module."""
    ours = Path(__file__).parents[1]
    step = error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not (file.startswith("<frozen importlib") or file == importlib.__file__ or Path(file).is_relative_to(ours)):
            break
        step = step.tb_next
    return "".join(traceback.format_exception(type(error), error, step)).rstrip()


def _split(name: str) -> tuple[str, str]:
    place, colon, attribute = name.rpartition(":")
    # A colon may also follow a drive letter.
    if not colon or "/" in attribute or "\\" in attribute:
        return name, ""
    return place, attribute


def _from_file(path: Path) -> ModuleType:
    if not os.path.isfile(path):
        raise Failure(f"there is no file {path}; name a Python file or an importable module")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for a script
    name = path.stem if path.stem not in sys.modules else f"{path.stem}__server"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def _from_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise Failure(
            f"there is no module {error.name}; name a Python file (with .py), or a module that can be imported here"
        ) from None


def _pick(module: ModuleType, attribute: str, place: str) -> Server[Any]:
    if attribute:
        return _follow(module, attribute, place)
    found = {name: value for name, value in vars(module).items() if isinstance(value, Server)}
    for name in _USUAL:
        if name in found:
            return found[name]
    several = {id(value): value for value in found.values()}
    if len(several) == 1:
        return next(iter(several.values()))
    if several:
        names = ", ".join(f"{place}:{name}" for name in found)
        raise Failure(f"{place} has several servers; say which: {names}")
    raise Failure(
        f"{place} has no trimcp.Server at its top level; name the object or function that gives one ({place}:NAME). "
        "A server written with something else can be named by its command line"
    )


def _follow(module: ModuleType, attribute: str, place: str) -> Server[Any]:
    value: Any = module
    for step in attribute.split("."):
        try:
            value = getattr(value, step)
        except AttributeError:
            raise Failure(f"{place} has no {attribute}{_others(module, place)}") from None
    if not isinstance(value, Server) and callable(value):
        if _needs_arguments(value):
            raise Failure(
                f"{place}:{attribute} needs arguments; name a trimcp.Server, or a function without arguments that "
                f"makes one{_others(module, place)}"
            )
        value = value()
    if not isinstance(value, Server):
        kind = type(value).__name__
        raise Failure(f"{place}:{attribute} is no trimcp.Server but a {kind}{_others(module, place)}")
    return value


def _needs_arguments(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:  # builtins may hide what they take
        return False
    return False


def _others(module: ModuleType, place: str) -> str:
    names = [f"{place}:{name}" for name, value in vars(module).items() if isinstance(value, Server)]
    return f"; it has {', '.join(names)}" if names else ""


def become_program(server: str, arguments: Sequence[str]) -> None:
    """Let a server find what a program of its own would: its arguments, and an output that takes any text."""
    sys.argv = [server, *arguments]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the locale cannot print fails no tool


def load_to_run(name: str, options: ProcessOptions, *, group: bool = False) -> Loaded:
    """Return what a module has to serve, made ready as the options say. Raises Failure: it cannot be loaded.

    `group`: it is looked at together with other processes.
    """
    try:
        loaded = load_program(name)
    except (Failure, UnusableFile):
        raise
    except Exception as error:  # the user's module may raise anything
        raise Failure(f"{name} cannot be loaded, it fails by itself:\n{trace_of(error)}") from None
    if options.admin is not None or group:
        from trimcp.watch.admin import serve_admin

        path, name = None if options.admin in (None, "-") else options.admin, os.environ.get(ADMIN_GROUP, "")
        loaded.server.parts.append(lambda running: serve_admin(loaded.server, path, group=name or None))
    if RELOADED in os.environ:
        loaded.server.dynamic = True  # another version may have other tools
        loaded.server.expect_tools()
    if options.gc_threshold is not None:
        gc.collect()
        gc.freeze()  # the imported modules stay, so they need no collection
        gc.set_threshold(options.gc_threshold, 20, 100)
    return loaded
