"""Shared stores by their URL, as `--store` and `store=` name them."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from trimcp.errors import LocalError
from trimcp.store.shared import SharedStore


def store_of(named: SharedStore | str) -> SharedStore:
    """Return the store that a URL names: "sqlite:///var/lib/weather/sessions.db". A store is returned as it is.

    Raises LocalError: there is no such kind of store. The error does not quote the URL, which may have a password.
    """
    if isinstance(named, SharedStore):
        return named
    try:
        url = urlsplit(named)
    except ValueError:
        url = urlsplit("")
    if url.scheme == "sqlite" and not url.netloc and len(url.path) > 1 and not url.query:
        from trimcp.store.shared_sqlite import SqliteStore

        return SqliteStore(unquote(url.path))
    raise LocalError("a store is named by a URL: sqlite:///path/of/a/file")
