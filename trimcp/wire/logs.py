"""Log messages from a server to its client (server/utilities/logging)."""

from __future__ import annotations

from typing import Any

from trimcp.wire.common import LoggingLevel, Params
from trimcp.wire.fields import ABSENT, Absent, field, wire
from trimcp.wire.revisions import V2026_07_28

__all__ = ["LoggingLevel", "LoggingMessageParams", "SetLevelParams"]


@wire(until=V2026_07_28)
class SetLevelParams(Params):
    """The least severe level a legacy connection wants; modern requests say it in their `_meta`."""

    level: LoggingLevel


@wire
class LoggingMessageParams(Params):
    """One log message; `data` is any JSON value."""

    level: LoggingLevel
    data: Any
    logger: str | Absent = field(default=ABSENT)
