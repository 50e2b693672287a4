"""Journals: the messages of both sides of a connection, one JSON object per line, to be read and replayed.

The first line identifies the format. Each other line has `at` (seconds since the beginning), `from` ("client" or
"server") and `message`, or `text` for data that is not JSON. A `note` is a comment. Secrets are replaced by numbers:
"***1" is the same secret everywhere, so that a secret from the server can be sent back to it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs
import orjson

from trimcp.support.cleaning import MASK, mask_text, names_a_secret

FORMAT: Final = 1
"""The version of the format; it changes if existing members get another meaning."""

_MAX_BYTES: Final = 64 * 1024 * 1024
_SIDES: Final = {True: "client", False: "server"}


@attrs.define(eq=False)
class JournalWriter:
    """Writes a journal, each message at once."""

    path: Path = attrs.field(converter=Path)  # the file that is written
    target: str = ""  # the recorded server, as text for the reader
    masked: bool = attrs.field(default=True, kw_only=True)  # write numbers in place of secrets
    # the size in bytes after which recording ends, with a note
    max_bytes: int = attrs.field(default=_MAX_BYTES, kw_only=True)
    # called with a line of text when recording begins, and when it ends early
    tell: Callable[[str], object] = attrs.field(default=lambda line: None, kw_only=True)
    full: bool = attrs.field(init=False, default=False)  # whether recording has ended
    _file: BinaryIO = attrs.field(init=False)
    _began: float = attrs.field(init=False, factory=time.monotonic)
    _written: int = attrs.field(init=False, default=0)
    _secrets: dict[bytes, str] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._file, self.path = _create(self.path)
        target = mask_text(self.target) if self.masked else self.target
        head = {"trimcp_journal": FORMAT, "began": datetime.now(UTC).isoformat(), "target": target}
        self._write({**head, "masked": self.masked})
        self.tell(f"recording to {self.path}")

    def note(self, from_client: bool, data: bytes) -> None:
        """Write one message."""
        if self.full or not data.strip():
            return
        entry: dict[str, Any] = {"at": round(time.monotonic() - self._began, 4), "from": _SIDES[from_client]}
        try:
            message = orjson.loads(data)
        except orjson.JSONDecodeError:
            text = data.decode(errors="replace")
            entry["text"] = mask_text(text) if self.masked else text
        else:
            entry["message"] = self._mask(message) if self.masked else message
        self._write(entry)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a failed write was already reported
            self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        line = orjson.dumps(entry) + b"\n"
        if self._written + len(line) > self.max_bytes:
            self.full = True
            note = f"the recording ends here: it has come to its limit of {self.max_bytes:,} bytes"
            line = orjson.dumps({"note": note}) + b"\n"
            self.tell(note)
        self._written += len(line)
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:  # ends the recording, not the connection
            self.full = True
            self.tell(f"the recording ends here: {error}")

    def _mask(self, value: Any, key: str = "") -> Any:
        if isinstance(value, Mapping):
            return {name: self._mask(member, name) for name, member in value.items()}
        if names_a_secret(key) and value is not None and not isinstance(value, bool):
            return self._secrets.setdefault(orjson.dumps(value), f"{MASK}{len(self._secrets) + 1}")
        if isinstance(value, list):
            return [self._mask(member) for member in value]
        return mask_text(value) if isinstance(value, str) else value


def _create(path: Path) -> tuple[BinaryIO, Path]:
    number = 1
    while True:
        name = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            # Readable for this user only: results of tools are private.
            return open(name, "xb", opener=partial(os.open, mode=0o600)), name
        except FileExistsError:
            number += 1


def read_journal(text: str) -> list[tuple[bool, Any]]:
    """Return the messages of a journal, `(True, message)` for the client's. Data that was not JSON is left out.

    Raises ValueError: the text is not a journal, or has a later format.
    """
    lines = text.splitlines()
    head = _entry(lines[0] if lines else "", 1)
    if head.get("trimcp_journal") != FORMAT:
        raise ValueError(f"line 1: this is no journal of trimcp in format {FORMAT}")
    messages = []
    for number, line in enumerate(lines[1:], 2):
        if number == len(lines) and not text.endswith("\n"):
            break  # the writer was stopped in the middle of a line
        entry = _entry(line, number)
        if "message" in entry:
            if entry.get("from") not in _SIDES.values():
                raise ValueError(f'line {number}: "from" must be "client" or "server"')
            messages.append((entry["from"] == "client", entry["message"]))
    return messages


def _entry(line: str, number: int) -> dict[str, Any]:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"line {number}: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"line {number}: not an object")
    return entry
