"""Keeps the results of tools that only read or are idempotent, and answers equal calls with them."""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.server.handlers.calling import PreparedFunction
from trimcp.server.handlers.pools import Pools
from trimcp.session.context import Context
from trimcp.support.bounds import check_number, check_truth
from trimcp.wire.converter import from_json, to_json
from trimcp.wire.jsonrpc import Unencodable, encode
from trimcp.wire.tools import CallToolResult, Tool

_RECORD: Final = 400  # bytes that an entry takes beside its result, as estimated
_NUMBERS: Final = itertools.count()  # of functions with a cache, which several servers may share


class ResultCache:
    """Keeps results for `@server.tool(cache=...)`: a call with equal arguments is answered without the function.

    Several tools may share one. Results are kept for each principal, with the scopes of its token. Only good ones are
    kept, and the one that was used longest ago gives way.

    Args:
        seconds: for how long a result is used.
        max_bytes: the most memory that all results together take. A larger result is not kept.
        shared: True uses a result for every principal: it must not depend on who asks.

    Attributes:
        hits: calls that were answered with a kept result.
        misses: calls for which the function was called.
        held: the bytes that are kept now, as estimated.

    Raises:
        TypeError, ValueError: an argument is none of these.
    """

    def __init__(self, seconds: float, *, max_bytes: int = 4 * 1024 * 1024, shared: bool = False) -> None:
        self.seconds: float = check_number("seconds", seconds)
        self.max_bytes: int = check_number("max_bytes", max_bytes, whole=True)
        self.shared: bool = check_truth("shared", shared)
        self.hits: int = 0
        self.misses: int = 0
        self.held: int = 0
        self._kept: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()

    def clear(self) -> None:
        """Forget everything, for example after what the tools read has changed."""
        self._kept.clear()
        self.held = 0

    def find(self, key: bytes) -> CallToolResult | None:
        """Return a kept result, or None."""
        kept = self._kept.get(key)
        if kept is not None and kept[0] > trio.current_time():
            self._kept.move_to_end(key)
            self.hits += 1
            return from_json(orjson.loads(kept[1]), CallToolResult)  # a value of its own: filters may change it
        self.misses += 1
        return None

    def keep(self, key: bytes, result: CallToolResult) -> None:
        """Keep a result, unless it is an error, too large, or nothing that JSON can carry."""
        if result.is_error:
            return
        try:
            data = encode(to_json(result))
        except Unencodable:
            return
        self._forget(key)
        if len(data) + _RECORD > self.max_bytes:
            return
        self._kept[key] = trio.current_time() + self.seconds, data
        self.held += len(data) + _RECORD
        while self.held > self.max_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.held -= len(kept[1]) + _RECORD


class CachedFunction(PreparedFunction):
    """The function of a tool whose results are kept. Its value is a result."""

    __slots__ = ("_cache", "_make_result", "_number")

    def __init__(self, inner: PreparedFunction, make_result: Callable[[Any], Any], cache: ResultCache) -> None:
        fields: Any = PreparedFunction
        super().__init__(*[getattr(inner, field.name) for field in attrs.fields(fields) if field.init])
        self._make_result = make_result
        self._cache = cache
        self._number = next(_NUMBERS)

    async def run(self, pools: Pools, ctx: Context[Any], arguments: Mapping[str, Any]) -> Any:
        """As of any function, but nothing is called if there is a result."""
        cache, who = self._cache, ctx.principal
        whose: object = None
        if not cache.shared and who is not None:  # what a function returns may depend on what the token allows
            whose = str(who), None if who.scopes is None else sorted(who.scopes)
        asked = orjson.dumps([self._number, whose, arguments], option=orjson.OPT_SORT_KEYS)
        key = hashlib.sha256(asked).digest()
        found = cache.find(key)
        if found is not None:
            await trio.lowlevel.checkpoint()
            return found
        result = self._make_result(await super().run(pools, ctx, arguments))
        if isinstance(result, CallToolResult):
            cache.keep(key, result)
        return result


def cached(tool: Tool, inner: PreparedFunction, make_result: Callable[[Any], Any], cache: object) -> PreparedFunction:
    """Return the function of a tool with a cache around it. Raises TypeError: the tool must not have one.

    `make_result` makes the tool's result of what its function returns.
    """
    if not isinstance(cache, ResultCache):
        raise TypeError(f"cache is a trimcp.ResultCache(...), not {cache!r:.60}")
    hints = tool.annotations
    if hints is None or not (hints.idempotent_hint or hints.read_only_hint):
        raise TypeError(
            f"the tool {tool.name}: a cache is for tools that may be called once in place of twice; say so by"
            ' annotations={"readOnlyHint": True} or {"idempotentHint": True}'
        )
    if inner.questions:
        raise TypeError(f"the tool {tool.name} asks its user, so its results cannot be used for another call")
    return CachedFunction(inner, make_result, cache)
