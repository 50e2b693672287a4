"""Exceptions as JSON, on their way between a server and its worker processes.

The protocol's own keep their class and members. Of any other only the text and the traceback travel, for the log.
"""

from __future__ import annotations

import traceback
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

__all__ = ["FailedInWorker", "pack", "unpack"]

_CODED: Final = {kind.__name__: kind for kind in (ErrorReply, RemoteError, Overloaded)}
_PLAIN: Final = {
    kind.__name__: kind for kind in (LocalError, Unencodable, InvalidReply, ConnectionLost, ResourceNotFound, ToolError)
}
_KNOWN: Final = frozenset((*_CODED.values(), *_PLAIN.values(), CannotAsk, ConversionError))
_LONGEST: Final = 64 * 1024  # characters of a traceback
_OURS: Final = str(Path(__file__).parent)


class FailedInWorker(Exception):
    """A tool raised this in its worker process. Its cause shows the traceback from there."""


class _RemoteTraceback(Exception):
    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def pack(error: BaseException) -> dict[str, Any]:
    known = next((kind.__name__ for kind in type(error).__mro__ if kind in _KNOWN), "")
    try:
        text = _sendable(str(error))
    except Exception as broken:  # anybody's `__str__`
        text = f"<no text: {type(broken).__name__}>"
    packed: dict[str, Any] = {
        "kind": known,
        "text": text if known else f"{type(error).__name__}: {text}",
        "trace": _trace(error),
    }
    if isinstance(error, ErrorReply | RemoteError):
        packed |= {"code": error.code, "message": error.message, "data": error.data}
    elif isinstance(error, CannotAsk):
        packed |= {"required": None if error.required is None else dict(error.required)}
    elif isinstance(error, ConversionError):
        packed |= {"problems": error.problems}
    try:
        encode(packed)
    except Unencodable:  # such as the `data` of an ErrorReply, which is the author's
        packed = {"kind": "Unencodable", "text": "what was raised holds what JSON cannot carry", "trace": ""}
    return packed


def unpack(packed: dict[str, Any]) -> Exception:
    """Return the exception that was `pack`ed, with its traceback there as the cause."""
    kind, text = packed["kind"], packed["text"]
    error: Exception
    if kind in _CODED:
        error = _CODED[kind](packed["code"], packed["message"], packed["data"])
    elif kind in _PLAIN:
        error = _PLAIN[kind](text)
    elif kind == CannotAsk.__name__:
        error = CannotAsk(text, packed["required"])
    elif kind == ConversionError.__name__:
        error = ConversionError(packed["problems"])
    else:
        error = FailedInWorker(text)
    if packed["trace"]:
        error.__cause__ = _RemoteTraceback(packed["trace"])
    return error


def _trace(error: BaseException) -> str:
    """Return the traceback from the first line on that is not ours, the end of it where it is long."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename.startswith(_OURS):
        step = step.tb_next
    lines = traceback.format_exception(type(error), error, step)
    return _sendable("".join(lines).rstrip()[-_LONGEST:])


def _sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()
