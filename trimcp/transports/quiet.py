"""Keeps the header codec of HTTP/2 from logging the headers that we send and receive: tokens are among them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_quiet: ContextVar[bool] = ContextVar("_quiet", default=False)


@contextmanager
def quiet_headers() -> Iterator[None]:
    """Drop what hpack logs in this context, and in tasks started from it, while the block runs."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


class _QuietHeaders(logging.Filter):
    """Drops what is logged about our own headers; others in this process may want theirs."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not _quiet.get()


for _name in ("hpack.hpack", "hpack.table"):
    logging.getLogger(_name).addFilter(_QuietHeaders())
