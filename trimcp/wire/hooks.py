"""Hooks that turn JSON values into payloads (`Loading`) and payloads into JSON values (`Dumping`), for one revision.

Null in an optional member counts as a missing member, since many implementations send it. This is checked only after a
payload did not match, so that normal messages cost nothing extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, NoReturn, TypeAlias, Union, get_args, get_origin

import attrs
from cattrs import Converter, IterableValidationError, IterableValidationNote
from cattrs.fns import identity
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from trimcp.wire.fields import (
    ABSENT,
    CHOOSERS,
    EXTRA,
    JSON_NAMES,
    Problem,
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

Hook: TypeAlias = Callable[[Any, Any], Any]
"""A cattrs structure hook: its arguments are the value and the type, which hooks for a single type ignore."""

MAX_PROBLEMS: Final = 10
"""The most problems reported for one value."""

_EXTRA_KEY: Final = "\0extra"  # the key under which a class's undeclared members are passed to cattrs


def _refuse(problem: str) -> NoReturn:
    raise Problem(problem)


def _exactly(kind: type) -> Hook:
    wanted = JSON_NAMES[kind]

    def load(value: Any, _: Any) -> Any:
        return value if type(value) is kind else wrong_type(wanted, value)

    return load


def _number(value: Any, _: Any) -> float:
    return value if type(value) is float or type(value) is int else wrong_type("a number", value)


def _integer(value: Any, _: Any) -> int:
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():  # in JSON Schema, 5.0 is an integer
        return int(value)
    return wrong_type("an integer", value)


def _anything(value: Any, _: Any) -> Any:
    return value


_object: Final = _exactly(dict)
_array: Final = _exactly(list)
_PRIMITIVES: Final[dict[Any, tuple[tuple[type, ...], Hook]]] = {
    str: ((str,), _exactly(str)),
    bool: ((bool,), _exactly(bool)),
    int: ((int, float), _integer),
    float: ((float, int), _number),
    type(None): ((type(None),), _exactly(type(None))),
}


class Loading:
    """The hooks of one revision, registered in `converter`.

    With `explain` all problems are collected with their places; otherwise loading stops at the first, which is faster.
    """

    def __init__(self, revision: Revision, *, explain: bool) -> None:
        self._revision = revision
        self._explain = explain
        self.converter: Converter = Converter(detailed_validation=explain)
        self.converter.register_structure_hook_factory(lambda _: True, self._hook)
        for tp, (_, hook) in _PRIMITIVES.items():  # cattrs looks these up by class first, and coerces
            self.converter.register_structure_hook(tp, hook)

    def _hook(self, tp: Any) -> Hook:
        if tp is Any:
            return _anything
        if is_payload(tp):
            return self._payload(tp)
        if is_union(tp):
            return self._union(members(tp))
        origin = get_origin(tp)
        if origin is Literal:
            return _literal(get_args(tp))
        if origin is list:
            return self._list(get_args(tp)[0])
        if origin is dict:
            return self._dict(get_args(tp)[1])
        raise TypeError(f"no payload class may have a member of type {tp!r}")

    def _payload(self, cls: Any) -> Hook:
        of_class: WireFacts = cls.__wire__
        if not of_class.exists_at(self._revision):
            return too_new(cls, self._revision)
        overrides: dict[str, Any] = {}
        needed: list[str] = []
        nullable: list[str] = []
        for attribute in attributes(cls):
            facts = facts_of(attribute)
            if attribute.name == EXTRA:
                overrides[EXTRA] = override(rename=_EXTRA_KEY, struct_hook=_anything)
            elif not facts.exists_at(self._revision):
                overrides[attribute.name] = override(omit=True)
            else:
                if facts.required_at(self._revision):
                    needed.append(wire_name(attribute))
                found = members(attribute.type)
                tp = found[0] if len(found) == 1 else Union[found]  # noqa: UP007 - a tuple of members
                optional = attribute.default is not attrs.NOTHING
                hook = self._later(tp) if optional and is_payload(tp) else self.converter.get_structure_hook(tp)
                narrowed = facts.narrow is not None and facts.narrowed_at(self._revision)
                null_is_a_value = type(None) in found or (tp is Any and not narrowed)
                if attribute.default is ABSENT and not facts.required_at(self._revision) and not null_is_a_value:
                    nullable.append(wire_name(attribute))
                if facts.narrow is not None and narrowed:
                    hook = _narrowed(hook, facts.narrow, self._revision)
                overrides[attribute.name] = override(rename=wire_name(attribute), struct_hook=hook)
        build = make_dict_structure_fn(cls, self.converter, _cattrs_detailed_validation=self._explain, **overrides)
        known = known_names(cls) if EXTRA in overrides else None
        return _checked(build, tuple(needed), frozenset(nullable), known, explain=self._explain)

    def _later(self, cls: Any) -> Hook:
        """Return a hook that creates the payload's real hook at first use."""
        hook: Hook | None = None

        def load(value: Any, tp: Any) -> Any:
            nonlocal hook
            if hook is None:
                hook = self.converter.get_structure_hook(cls)
            return hook(value, tp)

        return load

    def _list(self, member: Any) -> Hook:
        if member is Any:
            return _array
        hook = self.converter.get_structure_hook(member)

        def load(value: Any, _: Any) -> list[Any]:
            if type(value) is not list:
                wrong_type("an array", value)
            try:
                return [hook(item, member) for item in value]
            except TooNew:
                pass
            except Exception:  # a hook may raise anything; check each member below, to find the place
                if not self._explain:
                    raise
            kept = [item for _, item in self._each(enumerate(value), hook, list, drop=True)]
            if not kept:
                raise Problem(f"holds only kinds of content that revision {self._revision} does not have")
            return kept

        return load

    def _dict(self, member: Any) -> Hook:
        if member is Any:
            return _object
        hook = self.converter.get_structure_hook(member)

        def load(value: Any, _: Any) -> dict[str, Any]:
            if type(value) is not dict:
                wrong_type("an object", value)
            try:
                return {key: hook(item, member) for key, item in value.items()}
            except Exception:  # as above
                if not self._explain:
                    raise
            return dict(self._each(value.items(), hook, dict, drop=False))

        return load

    def _each(self, items: Iterable[tuple[Any, Any]], hook: Hook, tp: type, *, drop: bool) -> list[tuple[Any, Any]]:
        """Return every member with its key, or raise all problems with their places."""
        loaded: list[tuple[Any, Any]] = []
        problems: list[Exception] = []
        for key, item in items:
            try:
                loaded.append((key, hook(item, tp)))
            except Exception as error:  # as above; each is reported with its place
                if drop and isinstance(error, TooNew):
                    continue
                if not self._explain:
                    raise
                error.add_note(IterableValidationNote("a member", key, tp))
                problems.append(error)
                if len(problems) == MAX_PROBLEMS:
                    break
        if problems:
            # pyright uses the `__new__` of exception groups, which has one argument less.
            raise IterableValidationError("some members do not fit", problems, tp)  # pyright: ignore[reportCallIssue]
        return loaded

    def _union(self, found: tuple[Any, ...]) -> Hook:
        hooks: dict[type, Hook] = {}
        payloads = tuple(member for member in found if is_payload(member))
        if payloads:
            hooks[dict] = self._objects(payloads)
        for member in found:
            if member in _PRIMITIVES:
                kinds, hook = _PRIMITIVES[member]
                for kind in kinds:
                    hooks.setdefault(kind, hook)
            elif get_origin(member) is list:
                hooks[list] = self.converter.get_structure_hook(member)
        if int in found and float in found:
            hooks[float] = hooks[int] = _number
        wanted = " or ".join(JSON_NAMES[kind] for kind in hooks)

        def load(value: Any, tp: Any) -> Any:
            hook = hooks.get(type(value))
            return wrong_type(wanted, value) if hook is None else hook(value, tp)

        return load

    def _objects(self, payloads: tuple[Any, ...]) -> Hook:
        """Return a hook that finds the class of an object: by its tag, or by the function registered with `chooses`."""
        hooks = {cls: self.converter.get_structure_hook(cls) for cls in payloads}
        if len(payloads) == 1:
            return hooks[payloads[0]]
        choose = CHOOSERS.get(frozenset(payloads))
        if choose is not None:
            return _chosen(choose, hooks)
        tags = {cls: tag for cls in payloads if (tag := _tag_of(cls)) is not None}
        names = {name for name, _ in tags.values()}
        if len(names) != 1 or len(tags) != len(payloads):
            raise TypeError(f"nothing tells {payloads} apart")
        return _tagged(names.pop(), {tags[cls][1]: hooks[cls] for cls in payloads})


def _tag_of(cls: type) -> tuple[str, str] | None:
    """Return the name and value of the `Literal` member that identifies this class, or None."""
    for attribute in attributes(cls):
        values = get_args(attribute.type) if get_origin(attribute.type) is Literal else ()
        if len(values) == 1:
            return wire_name(attribute), values[0]
    return None


def _literal(values: tuple[str, ...]) -> Hook:
    wanted = " or ".join(f'"{value}"' for value in values)

    def load(value: Any, _: Any) -> Any:
        if type(value) is not str:
            wrong_type(wanted, value)
        return value if value in values else _refuse(f"must be {wanted}")

    return load


def _narrowed(hook: Hook, narrow: Callable[[Any], Any], revision: Revision) -> Hook:
    def load(value: Any, tp: Any) -> Any:
        loaded = hook(value, tp)
        if narrow(loaded) is not loaded:
            raise Problem(f"is a value that revision {revision} does not allow here")
        return loaded

    return load


def _checked(
    build: Callable[..., Any],
    needed: tuple[str, ...],
    nullable: frozenset[str],
    known: frozenset[str] | None,
    *,
    explain: bool,
) -> Hook:
    """Return a hook with the checks that cattrs does not do: objects, required members, nulls, undeclared members.

    Members in `nullable` that are null are removed after building failed with them, or at once with `explain`.
    """

    def without_nulls(value: dict[str, Any]) -> dict[str, Any]:
        return {name: member for name, member in value.items() if member is not None or name not in nullable}

    def load(value: Any, tp: Any) -> Any:
        if type(value) is not dict:
            wrong_type("an object", value)
        for name in needed:
            if name not in value:
                _refuse(f'must have "{name}"')
        try:
            if explain:
                return build(without_nulls(value), tp)
            try:
                return build(value, tp)
            except Problem:
                sparse = without_nulls(value)
                if len(sparse) == len(value):
                    raise
            return build(sparse, tp)
        except TooNew as error:  # it is not in a list of this payload, so no outer list may omit it
            raise Problem(*error.args) from None

    if known is None:
        return load

    def load_open(value: Any, tp: Any) -> Any:
        if type(value) is not dict:
            wrong_type("an object", value)
        rest = {name: member for name, member in value.items() if name not in known}
        return load({**value, _EXTRA_KEY: rest}, tp)

    return load_open


def _tagged(name: str, hooks: dict[str, Hook]) -> Hook:
    wanted = " or ".join(f'"{tag}"' for tag in hooks)

    def load(value: dict[str, Any], tp: Any) -> Any:
        tag = value.get(name)
        hook = hooks.get(tag) if type(tag) is str else None
        return _refuse(f'must have "{name}": {wanted}') if hook is None else hook(value, tp)

    return load


def _chosen(choose: Callable[[dict[str, Any]], Any], hooks: dict[Any, Hook]) -> Hook:
    wanted = ", ".join(cls.__name__ for cls in hooks)

    def load(value: dict[str, Any], tp: Any) -> Any:
        cls = choose(value)
        return _refuse(f"must be one of {wanted}") if cls is None else hooks[cls](value, tp)

    return load


Dump: TypeAlias = Callable[[Any], Any]
_CONVERTER: Final = Converter()  # cattrs wants one, though every member has a hook


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
        # For each member: its name here and on the wire, its dump function, and whether None is a value of it.
        plan = [
            (
                attribute.name,
                wire_name(attribute),
                self._member(attribute),
                bool({Any, type(None)} & set(members(attribute.type))),
            )
            for attribute in there
        ]
        narrows = any(facts_of(attribute).narrowed_at(self._revision) for attribute in there)
        build = _writer(cls, {name: (wire, hook) for name, wire, hook, _ in plan})

        def dump(payload: Any) -> dict[str, Any]:
            if type(payload) is not cls:
                wrong_type(cls.__name__, payload)
            try:
                out: dict[str, Any] = build(payload)
            except Exception:  # a hook was given None, or there is a problem: the loop below tells which
                out = {"": None}
            values = out.values()
            if None not in values and not (narrows and ABSENT in values):
                return out
            out = {}
            try:
                for name, wire, hook, none_is_value in plan:
                    value = getattr(payload, name)
                    if value is not ABSENT and (value is not None or none_is_value):
                        value = value if hook is None else hook(value)
                        if value is not ABSENT:  # narrowed away
                            out[wire] = value
            except TooNew as error:  # it is not in a list of this payload, so no outer list may omit it
                raise Unsupported(*error.args) from None
            return out

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
        found = members(attribute.type)
        if len(found) != 1 or not is_payload(found[0]):
            return self.hook(attribute.type)
        hook: Dump | None = None

        def dump(value: Any) -> Any:
            nonlocal hook
            if hook is None:  # created at first use: many payloads are never used
                hook = self._payload(found[0])
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


def _writer(cls: Any, written: Mapping[str, tuple[str, Dump | None]]) -> Dump:
    """Return a function that cattrs generates for a class: it dumps these members, each to a name, with a hook.

    It omits members whose default is `ABSENT` when they are. A loop over the members takes three times as long.
    """
    overrides: dict[str, Any] = {}
    for attribute in attrs.fields(cls):
        if attribute.name in written:
            wire, hook = written[attribute.name]
            optional = attribute.default is ABSENT
            overrides[attribute.name] = override(
                rename=wire, unstruct_hook=hook or identity, omit=False, omit_if_default=optional
            )
        else:
            overrides[attribute.name] = override(omit=True)
    writer: Dump = make_dict_unstructure_fn(cls, _CONVERTER, _cattrs_use_linecache=False, **overrides)
    return writer


def _dump_open(dump: Dump, known: frozenset[str]) -> Dump:
    """Return a hook that also dumps undeclared members."""

    def dump_open(payload: Any) -> Any:
        out = dump(payload)
        for name, value in payload.extra.items():
            if name not in known:
                out[name] = value
        return out

    return dump_open
