"""What a record of a log has beside its text while a request is handled: whose it is."""

from __future__ import annotations

import logging
import sys

from trimcp.session.context import CURRENT


class RequestIds(logging.Filter):
    """Adds to each record that is logged while a request is handled what names that request.

    Attach it to a handler: `handler.addFilter(trimcp.watch.RequestIds())`. It lets every record pass. The attributes
    are `mcp_session` (the session's `key` in a `Picture`), `mcp_request` (method and id) and, if there is a trace,
    `trace_id`: the one of OpenTelemetry's current span, or else the one that the client sent. What peers chose is one
    line of at most 100 characters. Outside of a request a record gets none of them.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes; return True."""
        ctx = CURRENT.get()
        if ctx is None:
            return True
        for name, text in ctx.internals[1].log_ids().items():
            setattr(record, name, text)
        telemetry = sys.modules.get("opentelemetry.trace")
        if telemetry is not None:
            current = telemetry.get_current_span().get_span_context()
            if current.is_valid:
                record.trace_id = f"{current.trace_id:032x}"
        return True
