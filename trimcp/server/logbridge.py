"""Log records of the standard library as MCP log messages: opt-in, per logger, never those of trimcp itself.

A record logged in the task or thread of a request is sent to that request's client. Other records are sent to the
legacy clients that set a level; in later revisions every log message belongs to a request.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import trio

from trimcp.session.context import CURRENT
from trimcp.wire.common import LoggingLevel

if TYPE_CHECKING:
    from trimcp.server.server import Server

_LEVELS: Final[tuple[tuple[int, LoggingLevel], ...]] = (
    (logging.CRITICAL, "critical"),
    (logging.ERROR, "error"),
    (logging.WARNING, "warning"),
    (logging.INFO, "info"),
    (0, "debug"),
)


class LogBridge(logging.Handler):
    """Sends log records to the client whose request is being handled.

    It never waits: messages for a client that reads slowly are dropped and counted. Use it as a context manager in a
    server's lifespan: `with LogBridge(server, "myapp"): yield ...`.

    Args:
        server: the server whose clients receive the messages.
        loggers: names of the loggers, including their children.

    Raises:
        ValueError: a logger of trimcp itself was named; sending its records would log new ones.
    """

    def __init__(self, server: Server[Any], *loggers: str) -> None:
        super().__init__()
        if any(name == "trimcp" or name.startswith("trimcp.") or not name for name in loggers):
            raise ValueError("trimcp's own loggers and the root cannot be sent to clients")
        self._server = server
        self._loggers = loggers
        self._token = trio.lowlevel.current_trio_token()
        self.setFormatter(logging.Formatter("%(message)s"))

    def __enter__(self) -> LogBridge:
        for name in self._loggers:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name in self._loggers:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; other threads hand it to Trio's thread."""
        try:
            level: LoggingLevel = next(name for least, name in _LEVELS if record.levelno >= least)
            text = self.format(record)
        except Exception:  # formatting may raise anything; `logging.Handler` asks for `handleError`
            self.handleError(record)
            return
        ctx = CURRENT.get()

        def send() -> None:
            # An exception here would end the program, or the request handler that logs.
            try:
                if ctx is not None:
                    ctx.log_nowait(level, text, logger=record.name)
                    return
                for running in list(self._server.runs):
                    running.log_to_all(level, text, record.name)
            except Exception:
                self.handleError(record)

        if trio.lowlevel.in_trio_task():
            send()
        else:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(send)
