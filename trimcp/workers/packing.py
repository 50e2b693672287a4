"""Exceptions as JSON, between a server and its worker processes.

The protocol's own exceptions keep their class and members. Of other exceptions only the text and the traceback are
sent, for the log.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trimcp.errors import (
    CannotAsk,
    ConnectionLost,
    ErrorReply,
    InvalidReply,
    LocalError,
    Overloaded,
    RemoteError,
    ResourceNotFound,
    ToolError,
)
from trimcp.schema.convert import ConversionError
from trimcp.wire.jsonrpc import Unencodable, encode

# The constructor arguments of each class, from the exception and its text.
_ARGUMENTS: Final[dict[type[BaseException], Callable[[Any, str], list[Any]]]] = {
    **dict.fromkeys((ErrorReply, RemoteError, Overloaded), lambda error, text: [error.code, error.message, error.data]),
    **dict.fromkeys(
        (LocalError, Unencodable, InvalidReply, ConnectionLost, ResourceNotFound, ToolError), lambda error, text: [text]
    ),
    CannotAsk: lambda error, text: [text, None if error.required is None else dict(error.required)],
    ConversionError: lambda error, text: [error.problems],
}
_KINDS: Final[dict[str, Callable[..., Any]]] = {kind.__name__: kind for kind in _ARGUMENTS}
_LONGEST: Final = 64 * 1024  # characters of a traceback
_OURS: Final = str(Path(__file__).parents[1] / "worker")  # with which the names of both folders begin


class FailedInWorker(Exception):
    """A tool raised this in its worker process. Its cause shows the traceback from there."""


class _RemoteTraceback(Exception):
    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack(error: BaseException) -> dict[str, Any]:
    known = next((kind for kind in type(error).__mro__ if kind in _ARGUMENTS), None)
    try:
        text = _sendable(str(error))
    except Exception as broken:  # the user's `__str__` may raise anything
        text = f"<no text: {type(broken).__name__}>"
    packed: dict[str, Any] = {
        "kind": "" if known is None else known.__name__,
        "arguments": [f"{type(error).__name__}: {text}"] if known is None else _ARGUMENTS[known](error, text),
        "trace": _trace(error),
    }
    try:
        encode(packed)
    except Unencodable:  # for example the `data` of an ErrorReply, which the user sets
        packed = {"kind": "Unencodable", "arguments": ["what was raised holds what JSON cannot carry"], "trace": ""}
    return packed


def unpack(packed: dict[str, Any]) -> Exception:
    """Return the exception that was `pack`ed; its cause shows the worker's traceback."""
    error: Exception = _KINDS.get(packed["kind"], FailedInWorker)(*packed["arguments"])
    if packed["trace"]:
        error.__cause__ = _RemoteTraceback(packed["trace"][-_LONGEST:])
    return error


def _trace(error: BaseException) -> str:
    """Return the traceback from the first line that is not ours; of a long one only the end."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename.startswith(_OURS):
        step = step.tb_next
    lines = traceback.format_exception(type(error), error, step)
    return _sendable("".join(lines).rstrip()[-_LONGEST:])


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
