"""Security events: attempts at something that is not allowed, apart from ordinary logs and from the audit.

Each is one WARNING of the logger "trimcp.security", with fields for programs. Normal events (a peer disconnected, a
call was refused because a tool is busy) are not security events. An attacker must not be able to fill a disk: of each
kind only a few per minute are logged, then the number of the others. Any layer may log one; nothing here knows
messages.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from trimcp.support.cleaning import harmless, mask

SECURITY_EVENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "origin_refused": "a page of another origin, or a request for a host that is not ours, was refused (403)",
        "authentication_failed": "nobody we know, or somebody who may not, was refused (401, 403, 400)",
        "not_allowed": "somebody known asked for what they may not have (403)",
        "foreign_session": "the session, the stream or the events of somebody else were asked for (404)",
        "request_state_refused": "a sealed requestState was altered, has expired or belongs to another request or user",
        "duplicate_id": "a request came with the id of one under way, which goes on untouched",
        "oversize": "a message, head or body beyond its limit was refused",
        "garbage": "what came is no message, or no HTTP at all",
        "header_mismatch": "headers and the body they repeat differ",
        "flood_refused": "requests were refused because too much is under way",
        "memory_reclaimed": "whoever held most was ended, because the memory for all peers was used up",
        "gave_way": "a session or connection was ended to make room for a new one: there may be no more",
        "peer_stalled": "a peer that took nothing for too long was dropped",
        "schema_refused": "a schema from a server is beyond the bounds, or no schema",
        "redirect_refused": "a server sent us to another origin",
        "server_garbage": "a server sent what is no message; a child may have printed into its standard output",
        "registration_refused": "an agent may not register or remove a tool, or not this one (403, 409, 422, 429)",
        "tool_registered": "an agent registered a tool, or one waits for approval",
        "tool_removed": "an agent removed a tool",
        "worker_refused": "a worker process did what its tool does not declare; it was ended, or is not used again",
        "admin_refused": "somebody may not look at a server: another user at its socket, or a token without the scope",
        "too_many_questions": "a server asked more questions than one call may",
    }
)
"""The kinds of events and what they mean. All other kinds together share one bound per minute."""

PER_MINUTE: Final = 20
"""Events of one kind logged per minute; further ones are only counted."""

_WINDOW: Final = 60.0  # seconds
_MOST_FACTS: Final = 16
_OTHER: Final = ""
# Attributes that every log record has: `Logger.makeRecord` refuses fields of these names.
_RESERVED: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "event"}

_clock = time.monotonic
_log = logging.getLogger("trimcp.security")


class _EventCounts:
    """Of each kind when its present minute began, and its events since; bounded by the number of kinds."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()
        self._at_exit = False

    def admit(self, kind: str, now: float) -> tuple[bool, list[tuple[str, int]]]:
        """Return whether an event may be logged, and the numbers left out in minutes that have passed."""
        kind = kind if kind in SECURITY_EVENTS else _OTHER
        with self._lock:
            over = self._end_minutes(now)
            since, events = self._kinds.get(kind, (now, 0))
            self._kinds[kind] = since, events + 1
            if events >= PER_MINUTE and not self._at_exit:
                self._at_exit = True
                atexit.register(tell_left_out)
            return events < PER_MINUTE, over

    def _end_minutes(self, now: float) -> list[tuple[str, int]]:
        ended = [(kind, events) for kind, (since, events) in self._kinds.items() if now - since >= _WINDOW]
        for kind, _ in ended:
            del self._kinds[kind]
        return [(kind or "other kinds", events - PER_MINUTE) for kind, events in ended if events > PER_MINUTE]

    def end_all(self) -> list[tuple[str, int]]:
        """Start new minutes and return the numbers left out in the present ones."""
        with self._lock:
            return self._end_minutes(float("inf"))


_bounds = _EventCounts()


def security_event(kind: str, **facts: object) -> None:
    """Log an attempt at something not allowed: one WARNING of the logger "trimcp.security". Never raises or blocks.

    The record has the attribute `event`, which is the kind, and one attribute for each fact. At most 20 events of a
    kind are logged per minute. The number of the others is logged in one line after that minute, at the next event or
    when the program ends.

    Args:
        kind: one of `SECURITY_EVENTS`.
        facts: what is known, by name: who, where, how much. Numbers stay numbers. Everything else becomes harmless text
            of bounded length, with secrets masked. A fact that is None is left out. Do not pass a secret: pass a
            session id's digest.
    """
    if not _log.isEnabledFor(logging.WARNING):
        return
    admitted, over = _bounds.admit(kind, _clock())
    for name, count in over:
        _say_left_out(name, count)
    if admitted:
        fields = _fields(facts)
        said = "".join(f" {name}={_quoted(value)}" for name, value in fields.items())
        _log.warning("%s%s", harmless(kind, 64), said, extra={"event": harmless(kind, 64), **fields})


def tell_left_out() -> None:
    """Log now how many events were left out, and count from 0 again. Called when the program ends."""
    for name, count in _bounds.end_all():
        _say_left_out(name, count)


def _say_left_out(name: str, count: int) -> None:
    _log.warning("%s left_out=%d", name, count, extra={"event": name, "left_out": count})


def _fields(facts: Mapping[str, object]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for (name, value), _ in zip(facts.items(), range(_MOST_FACTS), strict=False):
        if value is None:
            continue
        if not isinstance(value, bool | int | float):
            value = harmless(mask(value if isinstance(value, str) else repr(value), name))
        fields[f"{name}_" if name in _RESERVED else name] = value
    return fields


def _quoted(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text or not text else text
