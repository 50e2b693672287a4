"""Hooks that turn payloads into JSON values, for one revision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, Union, get_args, get_origin

import attrs

from trimcp.wire.fields import (
    ABSENT,
    EXTRA,
    TooNew,
    Unsupported,
    WireFacts,
    attributes,
    facts_of,
    is_of_payloads,
    is_payload,
    is_union,
    known_names,
    member_types,
    members,
    too_new,
    wire_name,
    wrong_type,
)
from trimcp.wire.revisions import Revision

Dump: TypeAlias = Callable[[Any], Any]


class Dumping:
    """The hooks of one revision: `hook(type)` is None for values that are dumped unchanged."""

    def __init__(self, revision: Revision) -> None:
        self._revision = revision
        self._hooks: dict[Any, Dump | None] = {}

    def hook(self, tp: Any) -> Dump | None:
        """Return the function that dumps values of that type, or None if they are dumped unchanged."""
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
            return self._list(inner[0])
        if origin is dict:
            hook = self.hook(inner[1])
            return None if hook is None else _dump_dict(hook)
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
        plan = {attribute.name: (wire_name(attribute), self._member(attribute)) for attribute in there}
        null_is_a_value = {attribute.name for attribute in there if {Any, type(None)} & set(member_types(attribute))}
        narrows = any(facts_of(attribute).narrowed_at(self._revision) for attribute in there)

        def dump(payload: Any) -> dict[str, Any]:
            if type(payload) is not cls:
                wrong_type(cls.__name__, payload)
            out: dict[str, Any] = {}
            try:
                # Payloads have no slots: what an object has is read from it at once, instead of member by member.
                for name, value in payload.__dict__.items():
                    if value is None:
                        if name not in null_is_a_value:
                            continue
                    elif value is ABSENT:
                        continue
                    if name in plan:
                        wire, hook = plan[name]
                        out[wire] = value if hook is None else hook(value)
            except TooNew as error:  # it is not in a list of this payload, so no outer list may omit it
                raise Unsupported(*error.args) from None
            return {wire: value for wire, value in out.items() if value is not ABSENT} if narrows else out

        return _dump_open(dump, known_names(cls)) if hasattr(attrs.fields(cls), EXTRA) else dump

    def _other(self, instead: Callable[[Any], Any]) -> Dump:
        """Return the hook of a payload for which an older peer gets a substitute."""

        def dump(value: Any) -> Any:
            other = instead(value)
            hook = self.hook(type(other))
            return other if hook is None else hook(other)

        return dump

    def _member(self, attribute: attrs.Attribute[Any]) -> Dump | None:
        hook = self._value(attribute)
        if not facts_of(attribute).narrowed_at(self._revision):
            return hook
        narrow = _dump_narrowed(attribute, self._revision)
        if hook is None:
            return narrow

        def dump(value: Any) -> Any:
            fitting = narrow(value)
            return ABSENT if fitting is ABSENT else hook(fitting)

        return dump

    def _value(self, attribute: attrs.Attribute[Any]) -> Dump | None:
        found = member_types(attribute)
        if len(found) != 1 or not is_of_payloads(found[0]):
            return self.hook(found[0] if len(found) == 1 else Union[found])  # noqa: UP007 - a tuple of members
        hook: Dump | None = None

        def dump(value: Any) -> Any:
            nonlocal hook
            if hook is None:  # created at first use: many payloads are never used
                hook = self.hook(found[0])
                assert hook is not None
            return hook(value)

        return dump

    def _list(self, member: Any) -> Dump | None:
        hook = self.hook(member)
        if hook is None:
            return None
        by_type: dict[type, Dump] = {}
        for kind in members(member):
            if is_payload(kind) and (of_kind := self.hook(kind)) is not None:
                by_type[kind] = of_kind
        return _dump_list(hook, by_type)

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


def _dump_list(hook: Dump, by_type: Mapping[type, Dump]) -> Dump:
    """Return a hook for lists. `by_type` are the hooks of payloads, to be looked up here instead of in a call more."""

    def dump(value: list[Any]) -> list[Any]:
        try:
            return [by_type[type(item)](item) for item in value]
        except (TooNew, KeyError):
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


def _dump_dict(hook: Dump) -> Dump:
    return lambda value: {key: hook(item) for key, item in value.items()}


def _dump_narrowed(attribute: attrs.Attribute[Any], revision: Revision) -> Dump:
    narrow = facts_of(attribute).narrow
    assert narrow is not None

    def narrowed(value: Any) -> Any:
        fitting = narrow(value)
        if fitting is ABSENT and attribute.default is attrs.NOTHING:
            raise Unsupported(f"{attribute.name} holds what revision {revision} does not allow there")
        return fitting

    return narrowed


def _dump_open(dump: Dump, known: frozenset[str]) -> Dump:
    """Return a hook that also dumps undeclared members."""

    def dump_open(payload: Any) -> Any:
        out = dump(payload)
        for name, value in payload.extra.items():
            if name not in known:
                out[name] = value
        return out

    return dump_open
