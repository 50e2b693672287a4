"""The methods of one revision, each with its converter hooks bound in advance instead of for each message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from trimcp.protocol.profile import Role
from trimcp.support.slotted import slotted
from trimcp.wire.converter import converter_for
from trimcp.wire.methods import METHODS, Direction, Method
from trimcp.wire.revisions import Revision


def _nothing(value: Any) -> Any:
    return value


@slotted(frozen=True)
class BoundMethod:
    """One method in one revision."""

    name: str
    row: Method  # in the method table
    # `from_client`, `from_server`: who may send it, in this revision
    from_client: bool
    from_server: bool
    # `load_params`, `dump_params`: JSON object to payload and back; loading raises `WireError`
    load_params: Callable[[Any], Any]
    dump_params: Callable[[Any], Any]
    # `load_result`, `dump_result`: the same for the result; for notifications they return what they are given
    load_result: Callable[[Any], Any]
    dump_result: Callable[[Any], Any]
    by_engine: bool = False  # whether the engine itself answers it: it is about the connection


_BY_ENGINE: Final = ("ping", "server/discover", "logging/setLevel")


@cache
def foreign(name: str, *, notification: bool = False) -> BoundMethod:
    """Return a method that only an extension defines: params and results are JSON objects.

    Call it only with names from our own side: each is kept for ever.
    """
    method = Method(name, dict, None if notification else dict, Direction.BOTH)
    return BoundMethod(name, method, True, True, _nothing, dict, _nothing, dict)


@cache
def methods_of(revision: Revision) -> Mapping[str, BoundMethod]:
    """Return the methods of `revision` by name. Built at first use, then shared by all."""
    converter = converter_for(revision)
    methods = {}
    for name, method in METHODS.items():
        if method.available(revision):
            result, direction = method.result, method.direction_at(revision)
            methods[name] = BoundMethod(
                name,
                method,
                Direction.CLIENT_TO_SERVER in direction,
                Direction.SERVER_TO_CLIENT in direction,
                converter.loader(method.params),
                converter.dumper(method.params),
                _nothing if result is None else converter.loader(result),
                _nothing if result is None else converter.dumper(result),
                name in _BY_ENGINE,
            )
    return methods


@cache
def sent_by(role: Role, revision: Revision) -> Mapping[str, BoundMethod]:
    """Return the methods that one side may send in this revision, by name."""
    return {
        name: method
        for name, method in methods_of(revision).items()
        if (method.from_client if role is Role.CLIENT else method.from_server)
    }
