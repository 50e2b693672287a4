"""The access log: one line for each completed request, with fields that programs can read.

Text from clients is escaped and cut. Secrets are masked: the values of the query (HTTP+SSE has its session id there),
session ids and the ids of agents' contexts, for which a digest stands.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any, Final

import attrs
import trio

from trimcp.support.cleaning import digest, harmless
from trimcp.transports.http.interfaces import Head

_LONGEST: Final = 200
_BLANK: Final = "\\x20"
_QUERY_VALUE: Final = re.compile(r"=[^&]*")


@attrs.define(eq=False)
class AccessLog:
    """Writes a record at INFO for each response, once it has ended.

    A formatter can use these attributes of the record: `peer`, `http_method`, `path`, `query`, `status`, `sent` (bytes
    of body), `duration` (seconds), and, if known, `principal`, `rpc_method`, `session`, `user_agent` and
    `protocol_version`. All texts among them are ASCII without control characters.

    Args:
        logger: the logger's name.
    """

    logger: str = "trimcp.access"
    _logger: logging.Logger = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._logger = logging.getLogger(self.logger)

    def record(self, head: Head, status: int, sent: int) -> None:
        """Log that a response has ended, with its status (0 if there was none) and the bytes of its body."""
        if not self._logger.isEnabledFor(logging.INFO):
            return
        duration = 0.0 if head.began is None else trio.current_time() - head.began
        fields = {**_fields(head), "status": status, "sent": sent, "duration": round(duration, 6)}
        query = f"?{fields['query']}" if "query" in fields else ""
        text = f'{fields["peer"]} "{fields["http_method"]} {fields["path"]}{query}" {status} {sent}'
        text += f" {1_000 * fields['duration']:.1f}ms"
        for name in ("rpc_method", "principal"):
            if name in fields:  # a value with a space could imitate the next field
                text += f" {name}={fields[name].replace(' ', _BLANK)}"
        self._logger.info("%s", text, extra=fields)


def _fields(head: Head) -> dict[str, Any]:
    headers = head.headers
    session = headers.get("mcp-session-id")
    found = {
        "peer": head.peer,
        "http_method": head.method,
        "path": head.root + head.shown_path,
        "query": _QUERY_VALUE.sub("=***", head.query[: 4 * _LONGEST]),
        "rpc_method": headers.get("mcp-method"),
        "principal": head.principal,
        "session": session and digest(session),
        "protocol_version": headers.get("mcp-protocol-version"),
        "user_agent": headers.get("user-agent"),
    }
    always = ("peer", "http_method", "path")
    return {name: harmless(text or "") for name, text in found.items() if text or name in always}


class JsonFormatter(logging.Formatter):
    """Formats any record as one line of JSON in ASCII: time, level, logger, message, and the record's extra fields.

    Attach it to a handler of your own; a traceback becomes the member `exception`.
    """

    _STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        ours: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        extra = {name: value for name, value in vars(record).items() if name not in self._STANDARD}
        if record.exc_info:
            ours["exception"] = record.exc_text or self.formatException(record.exc_info)
        if record.stack_info:
            ours["stack"] = self.formatStack(record.stack_info)
        # Our members come first, and win if the application's fields have the same names.
        return json.dumps({**ours, **extra, **ours}, default=repr, skipkeys=True)
