"""Makes functions that turn payloads into JSON values, for one revision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias, get_args, get_origin

import attrs

from trimcp.wire.fields import (
    ABSENT,
    EXTRA,
    TooNew,
    Unsupported,
    WireFacts,
    attributes,
    facts_of,
    is_payload,
    is_union,
    known_names,
    members,
    too_new,
    wire_name,
    wrong_type,
)
from trimcp.wire.revisions import Revision

Dump: TypeAlias = Callable[[Any], Any]


class Dumping:
    """The hooks of one revision: `hook(type)` is None where values go out as they are."""

    def __init__(self, revision: Revision) -> None:
        self._revision = revision
        self._hooks: dict[Any, Dump | None] = {}

    def hook(self, tp: Any) -> Dump | None:
        """How a value of that type is dumped, or None for as it is."""
        if tp not in self._hooks:
            self._hooks[tp] = self._make(tp)
        return self._hooks[tp]

    def _make(self, tp: Any) -> Dump | None:
        if is_payload(tp):
            return self._payload(tp)
        if is_union(tp):
            return self._union(members(tp))
        origin, inner = get_origin(tp), get_args(tp)
        if origin is list:
            hook = self.hook(inner[0])
            return None if hook is None else _list(hook)
        if origin is dict:
            hook = self.hook(inner[1])
            return None if hook is None else _mapping(hook)
        return None

    def _payload(self, cls: Any) -> Dump:
        facts: WireFacts = cls.__wire__
        if not facts.exists_at(self._revision):
            return too_new(cls, self._revision) if facts.instead is None else self._other(facts.instead)
        there = [
            attribute
            for attribute in attributes(cls)
            if attribute.name != EXTRA and facts_of(attribute).exists_at(self._revision)
        ]
        get = _getter([attribute.name for attribute in there])
        # What each member is called, how it is dumped, and what but ABSENT means that it is not there.
        names = [wire_name(attribute) for attribute in there]
        hooks = [self._member(attribute) for attribute in there]
        nones = [ABSENT if {Any, type(None)} & set(members(attribute.type)) else None for attribute in there]
        narrowing = [
            (place, _narrowed(attribute, self._revision))
            for place, attribute in enumerate(there)
            if facts_of(attribute).narrowed_at(self._revision)
        ]

        def dump(payload: Any) -> dict[str, Any]:
            if type(payload) is not cls:
                wrong_type(cls.__name__, payload)
            values = get(payload)
            if narrowing:
                values = list(values)
                for place, narrow in narrowing:
                    values[place] = narrow(values[place])
            out: dict[str, Any] = {}
            try:
                for name, hook, none, value in zip(names, hooks, nones, values, strict=True):
                    if value is not ABSENT and value is not none:
                        out[name] = value if hook is None else hook(value)
            except TooNew as error:  # it stood alone in this payload, so no list further out may drop it
                raise Unsupported(*error.args) from None
            return out

        return _open(dump, known_names(cls)) if hasattr(attrs.fields(cls), EXTRA) else dump

    def _other(self, instead: Callable[[Any], Any]) -> Dump:
        """The hook of a payload in whose place an older peer gets another."""

        def dump(value: Any) -> Any:
            other = instead(value)
            hook = self.hook(type(other))
            return other if hook is None else hook(other)

        return dump

    def _member(self, attribute: attrs.Attribute[Any]) -> Dump | None:
        found = members(attribute.type)
        if len(found) > 1 or not is_payload(found[0]):
            return self.hook(attribute.type)
        hook: Dump | None = None

        def dump(value: Any) -> Any:
            nonlocal hook
            if hook is None:  # made at the first use: many payloads never come
                hook = self._payload(found[0])
            return hook(value)

        return dump

    def _union(self, found: tuple[Any, ...]) -> Dump | None:
        hooks = {get_origin(member) or member: self.hook(member) for member in found}
        if all(hook is None for hook in hooks.values()):
            return None
        wanted = " or ".join(kind.__name__ for kind in hooks)

        def dump(value: Any) -> Any:
            try:
                hook = hooks[type(value)]
            except KeyError:
                wrong_type(wanted, value)
            return value if hook is None else hook(value)

        return dump


def _list(hook: Dump) -> Dump:
    def dump(value: list[Any]) -> list[Any]:
        try:
            return [hook(item) for item in value]
        except TooNew:
            pass
        kept = []
        lacking: dict[str, None] = {}
        for item in value:
            try:
                kept.append(hook(item))
            except TooNew as error:
                lacking[str(error)] = None
        if not kept:
            raise Unsupported("; ".join(lacking))
        return kept

    return dump


def _mapping(hook: Dump) -> Dump:
    return lambda value: {key: hook(item) for key, item in value.items()}


def _narrowed(attribute: attrs.Attribute[Any], revision: Revision) -> Dump:
    narrow = facts_of(attribute).narrow
    assert narrow is not None

    def narrowed(value: Any) -> Any:
        fitting = ABSENT if value is ABSENT else narrow(value)
        if fitting is ABSENT and attribute.default is attrs.NOTHING:
            raise Unsupported(f"{attribute.name} holds what revision {revision} does not allow there")
        return fitting

    return narrowed


def _getter(names: Sequence[str]) -> Callable[[Any], Iterable[Any]]:
    """Return what gets the values of several attributes at once."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda payload: [getattr(payload, name) for name in names]


def _open(dump: Dump, known: frozenset[str]) -> Dump:
    """Also write the members that nobody declared."""

    def dump_open(payload: Any) -> Any:
        out = dump(payload)
        for name, value in payload.extra.items():
            if name not in known:
                out[name] = value
        return out

    return dump_open
