"""Stores by their URL, as `--store` and `store=` name them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from trimcp.errors import LocalError
from trimcp.store.contexts import ContextStore
from trimcp.store.shared import SharedStore

if TYPE_CHECKING:
    from trimcp.store.tasks import TaskStore

_REDIS = ("redis://", "rediss://", "unix://")


def store_of(named: SharedStore | str) -> SharedStore:
    """Return the store that a URL names, such as "sqlite:///var/lib/weather/sessions.db" or "redis://host".

    A store is returned as it is. Raises LocalError: there is no such kind of store. The error does not quote the URL,
    which may have a password.
    """
    if isinstance(named, SharedStore):
        return named
    if named.startswith(_REDIS):
        from trimcp.store.redis.shared import RedisStore

        return RedisStore(named)
    from trimcp.store.shared_sqlite import SqliteStore

    return SqliteStore(_path_of(named))


def contexts_of(named: ContextStore | str) -> ContextStore:
    """Return the store of agents' contexts that a URL names; otherwise as `store_of`."""
    if isinstance(named, ContextStore):
        return named
    if named.startswith(_REDIS):
        from trimcp.store.redis.contexts import RedisContexts

        return RedisContexts(named)
    from trimcp.store.contexts_sqlite import SqliteContexts

    return SqliteContexts(_path_of(named))


def tasks_of(named: str) -> TaskStore:
    """Return the store of tasks that a URL names; otherwise as `store_of`."""
    if named.startswith(_REDIS):
        from trimcp.store.redis.tasks import RedisTasks

        return RedisTasks(named)
    from trimcp.store.tasks_sqlite import SqliteTasks

    return SqliteTasks(Path(_path_of(named)))


def contexts_beside(named: str) -> ContextStore:
    """Return the store of contexts that belongs to a store of sessions: the same Redis, or a file beside its file."""
    return contexts_of(named if named.startswith(_REDIS) else f"{named}-contexts")


def _path_of(named: str) -> str:
    try:
        url = urlsplit(named)
    except ValueError:
        url = urlsplit("")
    if url.scheme == "sqlite" and not url.netloc and len(url.path) > 1 and not url.query:
        return unquote(url.path)
    raise LocalError("a store is named by a URL: sqlite:///path/of/a/file, redis://host or unix:///path of a Redis")
