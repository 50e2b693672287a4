"""Keeps results for as long as their server allows (2026-07-28 server/utilities/caching).

There is one cache per connection, so nothing is shared between principals. Results of the legacy era are not kept.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio

from trimcp.protocol.events import Notified
from trimcp.wire.common import Cacheable
from trimcp.wire.converter import converter_for
from trimcp.wire.jsonrpc import encode
from trimcp.wire.revisions import LATEST

_MOST: Final = 1_024
_MOST_BYTES: Final = 32 * 1024 * 1024

_STALE: Final = {
    "notifications/tools/list_changed": ("tools/list",),
    "notifications/prompts/list_changed": ("prompts/list",),
    "notifications/resources/list_changed": ("resources/list", "resources/templates/list"),
    "notifications/resources/updated": ("resources/read",),
}


@attrs.define(eq=False)
class Cache:
    """Results by method and the one parameter that selects them (a cursor, a URI), at most 1,024 and 32 MiB."""

    _kept: dict[tuple[str, str | None], tuple[float, Cacheable, int]] = attrs.field(init=False, factory=dict)
    _bytes: int = attrs.field(init=False, default=0)
    _changes: dict[str, int] = attrs.field(init=False, factory=dict)

    def get(self, method: str, key: str | None) -> Cacheable | None:
        """Return a result that is still fresh, or None."""
        found = self._kept.get((method, key))
        if found is None:
            return None
        until, result, _ = found
        if trio.current_time() < until:
            return result
        self._forget((method, key))
        return None

    def edition(self, method: str) -> int:
        """Return a number that changes whenever results of the method become stale; read it before asking."""
        return self._changes.get(method, 0)

    def put(self, method: str, key: str | None, result: Cacheable, edition: int) -> None:
        """Keep a result for its time to live, unless the server notified a change since the request."""
        if result.ttl_ms <= 0 or edition != self.edition(method):
            return
        weight = len(encode(converter_for(LATEST).dump(result)))  # approximately its memory
        if weight > _MOST_BYTES:
            return
        if (method, key) in self._kept:
            self._forget((method, key))
        while len(self._kept) >= _MOST or self._bytes + weight > _MOST_BYTES:
            self._forget(next(iter(self._kept)))
        self._kept[method, key] = (trio.current_time() + result.ttl_ms / 1000, result, weight)
        self._bytes += weight

    def drop(self, method: str) -> None:
        """Remove the results of a method."""
        self._changes[method] = self.edition(method) + 1
        for key in [key for key in self._kept if key[0] == method]:
            self._forget(key)

    def _forget(self, key: tuple[str, str | None]) -> None:
        self._bytes -= self._kept.pop(key)[2]

    def notified(self, event: Notified) -> None:
        """Remove the results that a notification makes stale."""
        for method in _STALE.get(event.method.name, ()):
            self.drop(method)
