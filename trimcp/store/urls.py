"""Stores by the URL that names them. What each needs is imported when it is named."""

from __future__ import annotations

from urllib.parse import unquote

from trimcp.errors import LocalError
from trimcp.store.contexts import ContextStore


def contexts_at(url: str) -> ContextStore:
    """Return the store that a URL names: `sqlite:///path`, `redis://host` or, of a Redis here, `unix:///path`.

    Raises LocalError: it names none.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        from trimcp.store.contexts_sqlite import SqliteContexts

        return SqliteContexts(unquote(rest))
    if scheme in ("redis", "rediss", "unix"):
        from trimcp.store.redis.contexts import RedisContexts

        return RedisContexts(url)
    raise LocalError("a store is named by a URL: sqlite:///path, redis://host or unix:///path")
