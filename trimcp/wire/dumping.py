"""The way out: functions that turn payloads into JSON values, for one revision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, get_args, get_origin

import attrs

from trimcp.wire.fields import (
    ABSENT,
    EXTRA,
    TooNew,
    Unsayable,
    WireFacts,
    attributes,
    facts_of,
    is_payload,
    is_union,
    known_names,
    members,
    must,
    too_new,
    wire_name,
)
from trimcp.wire.revisions import Revision

Dump = Callable[[Any], Any]

_Step = tuple[str, str, Dump | None, Any, Dump | None]
"""How a member is written: its attribute, its name, what to do with it, what else means "not there", and what to do
with it before all that."""


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
            return self._list(self.hook(inner[0]))
        if origin is dict:
            hook = self.hook(inner[1])
            return None if hook is None else _mapping(hook)
        return None

    def _payload(self, cls: Any) -> Dump:
        facts: WireFacts = cls.__wire__
        if not facts.exists_at(self._revision):
            return too_new(cls, self._revision) if facts.instead is None else self._other(facts.instead)
        steps = tuple(
            self._step(attribute)
            for attribute in attributes(cls)
            if attribute.name != EXTRA and facts_of(attribute).exists_at(self._revision)
        )
        known = known_names(cls) if any(attribute.name == EXTRA for attribute in attrs.fields(cls)) else None
        return _writer(cls, steps, known)

    def _other(self, instead: Callable[[Any], Any]) -> Dump:
        """The hook of a payload in whose place an older peer gets another."""

        def dump(value: Any) -> Any:
            other = instead(value)
            hook = self.hook(type(other))
            return other if hook is None else hook(other)

        return dump

    def _step(self, attribute: attrs.Attribute[Any]) -> _Step:
        narrow: Dump | None = None
        said = facts_of(attribute)
        if said.narrow is not None and said.narrowed_at(self._revision):
            narrow = _narrowed(said.narrow, attribute, self._revision)
        found = members(attribute.type)
        has_null = Any in found or type(None) in found
        if len(found) == 1 and is_payload(found[0]):
            hook: Dump | None = self._later(found[0])
        else:
            hook = self.hook(attribute.type) if attribute.type is not Any else None
        return attribute.name, wire_name(attribute), hook, ABSENT if has_null else None, narrow

    def _later(self, cls: Any) -> Dump:
        """The hook of a payload that may never come, made when it does."""
        hook: Dump | None = None

        def dump(value: Any) -> Any:
            nonlocal hook
            if hook is None:
                hook = self._payload(cls)
            return hook(value)

        return dump

    def _list(self, hook: Dump | None) -> Dump | None:
        if hook is None:
            return None

        def dump(value: list[Any]) -> list[Any]:
            try:
                return [hook(item) for item in value]
            except TooNew:
                return self._remaining(hook, value)

        return dump

    def _remaining(self, hook: Dump, value: list[Any]) -> list[Any]:
        kept = []
        lacking: dict[str, None] = {}
        for item in value:
            try:
                kept.append(hook(item))
            except TooNew as error:
                lacking[str(error)] = None
        if not kept:
            raise Unsayable("; ".join(lacking))
        return kept

    def _union(self, found: tuple[Any, ...]) -> Dump | None:
        hooks = {get_origin(member) or member: self.hook(member) for member in found}
        if all(hook is None for hook in hooks.values()):
            return None
        wanted = " or ".join(kind.__name__ for kind in hooks)

        def dump(value: Any) -> Any:
            try:
                hook = hooks[type(value)]
            except KeyError:
                must(wanted, value)
            return value if hook is None else hook(value)

        return dump


def _mapping(hook: Dump) -> Dump:
    def dump(value: dict[str, Any]) -> dict[str, Any]:
        return {key: hook(item) for key, item in value.items()}

    return dump


def _narrowed(narrow: Callable[[Any], Any], attribute: attrs.Attribute[Any], revision: Revision) -> Dump:
    def narrowed(value: Any) -> Any:
        fitting = ABSENT if value is ABSENT else narrow(value)
        if fitting is ABSENT and attribute.default is attrs.NOTHING:
            raise Unsayable(f"{attribute.name} holds what revision {revision} does not allow there")
        return fitting

    return narrowed


def _getter(attributes: Sequence[str]) -> Callable[[Any], Iterable[Any]]:
    """Return what gets the values of several attributes at once."""
    if len(attributes) > 1:
        return attrgetter(*attributes)
    return lambda payload: [getattr(payload, name) for name in attributes]


def _writer(cls: type, steps: tuple[_Step, ...], known: frozenset[str] | None) -> Dump:
    get = _getter([step[0] for step in steps])
    names = [name for _, name, _, _, _ in steps]
    hooks = [hook for _, _, hook, _, _ in steps]
    nones = [none for _, _, _, none, _ in steps]
    narrowing = [(place, step[4]) for place, step in enumerate(steps) if step[4] is not None]

    def dump(payload: Any) -> dict[str, Any]:
        if type(payload) is not cls:
            must(cls.__name__, payload)
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
            raise Unsayable(*error.args) from None
        return out

    if known is None:
        return dump

    def dump_open(payload: Any) -> dict[str, Any]:
        out = dump(payload)
        for name, value in payload.extra.items():
            if name not in known:
                out[name] = value
        return out

    return dump_open
