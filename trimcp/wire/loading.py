"""Hooks that turn JSON values into payloads, for one revision.

Null in an optional member counts as a missing member, since many implementations send it. This is checked only after a
payload did not match, so that normal messages cost nothing extra.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn, TypeAlias, Union, get_args, get_origin

import attrs

from trimcp.wire import fields
from trimcp.wire.fields import ABSENT, EXTRA
from trimcp.wire.revisions import Revision

Hook: TypeAlias = Callable[[Any], Any]
"""Returns the loaded value of a JSON value, or raises a `Problem`."""

MAX_PROBLEMS: Final = 10
"""The most problems reported for one value."""


class MemberProblems(fields.Problem):
    """Several problems of one value, each with the step to the member that has it: `.name` or `[0]`."""

    def __init__(self, found: list[tuple[str, Exception]]) -> None:
        super().__init__("some members do not fit")
        self.found = found


def _refuse(problem: str) -> NoReturn:
    raise fields.Problem(problem)


def _exactly(kind: type) -> Hook:
    wanted = fields.JSON_NAMES[kind]

    def load(value: Any) -> Any:
        return value if type(value) is kind else fields.wrong_type(wanted, value)

    return load


def _number(value: Any) -> float:
    return value if type(value) is float or type(value) is int else fields.wrong_type("a number", value)


def _integer(value: Any) -> int:
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():  # in JSON Schema, 5.0 is an integer
        return int(value)
    return fields.wrong_type("an integer", value)


def _anything(value: Any) -> Any:
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
_SHOWN: Final = 64  # characters of a peer's key that a problem quotes


class Loading:
    """The hooks of one revision: `hook(type)` loads values of that type.

    With `explain` all problems are collected with their places; otherwise loading stops at the first, which is faster.
    """

    def __init__(self, revision: Revision, *, explain: bool) -> None:
        self._revision = revision
        self._explain = explain
        self._hooks: dict[Any, Hook] = {}

    def hook(self, tp: Any) -> Hook:
        """Return the function that loads values of that type."""
        if tp not in self._hooks:
            self._hooks[tp] = self._make(tp)
        return self._hooks[tp]

    def _make(self, tp: Any) -> Hook:
        if tp is Any:
            return _anything
        if tp in _PRIMITIVES:
            return _PRIMITIVES[tp][1]
        if fields.is_payload(tp):
            return self._payload(tp)
        if fields.is_union(tp):
            return self._union(fields.members(tp))
        origin = get_origin(tp)
        if origin is Literal:
            return _literal(get_args(tp))
        if origin is list:
            return self._list(get_args(tp)[0])
        if origin is dict:
            return self._dict(get_args(tp)[1])
        raise TypeError(f"no payload class may have a member of type {tp!r}")

    def _payload(self, cls: Any) -> Hook:
        of_class: fields.WireFacts = cls.__wire__
        if not of_class.exists_at(self._revision):
            return fields.too_new(cls, self._revision)
        plan = _LoadPlan(cls)
        for attribute in fields.attributes(cls):
            facts = fields.facts_of(attribute)
            default: Any = attribute.default
            if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a class, declared a function
                plan.factories.append((attribute.name, default.factory))
            else:  # what has no default is replaced by what is given; here it keeps its place in the order
                plan.defaults[attribute.name] = ABSENT if default is attrs.NOTHING else default
            if attribute.name == EXTRA:
                plan.known = fields.known_names(cls)
            elif facts.exists_at(self._revision):
                self._add(plan, attribute, facts)
        return _explaining(plan) if self._explain else _quick(plan)

    def _add(self, plan: _LoadPlan, attribute: attrs.Attribute[Any], facts: fields.FieldFacts) -> None:
        name = fields.wire_name(attribute)
        if attribute.default is attrs.NOTHING:
            plan.mandatory.append(name)
        elif facts.required_at(self._revision):
            plan.expected.append(name)
        found = fields.member_types(attribute)
        tp = found[0] if len(found) == 1 else Union[found]  # noqa: UP007 - a tuple of members
        optional = attribute.default is not attrs.NOTHING
        hook = self._later(tp) if optional and fields.is_of_payloads(tp) else self.hook(tp)
        narrowed = facts.narrow is not None and facts.narrowed_at(self._revision)
        null_is_a_value = type(None) in found or (tp is Any and not narrowed)
        if attribute.default in (None, ABSENT) and not facts.required_at(self._revision) and not null_is_a_value:
            plan.nullable.add(name)
        if facts.narrow is not None and narrowed:
            hook = _narrowed(hook, facts.narrow, self._revision)
        plan.hooks[name] = (attribute.name, hook)

    def _later(self, tp: Any) -> Hook:
        """Return a hook that creates the real one at first use."""
        hook: Hook | None = None

        def load(value: Any) -> Any:
            nonlocal hook
            if hook is None:
                hook = self.hook(tp)
            return hook(value)

        return load

    def _list(self, member: Any) -> Hook:
        if member is Any:
            return _array
        hook = self.hook(member)

        def load(value: Any) -> list[Any]:
            if type(value) is not list:
                fields.wrong_type("an array", value)
            try:
                return [hook(item) for item in value]
            except fields.TooNew:
                pass
            except Exception:  # a hook may raise anything
                if not self._explain:
                    raise
            # Each member alone: to omit those that are too new, and to find the places of problems.
            kept: list[Any] = []
            found: list[tuple[str, Exception]] = []
            for place, item in enumerate(value):
                try:
                    kept.append(hook(item))
                except fields.TooNew:
                    pass
                except Exception as problem:  # as above; each is reported with its place
                    if not self._explain:
                        raise
                    found.append((f"[{place}]", problem))
                    if len(found) == MAX_PROBLEMS:
                        break
            if found:
                raise MemberProblems(found)
            return kept or _refuse(f"holds only kinds of content that revision {self._revision} does not have")

        return load

    def _dict(self, member: Any) -> Hook:
        if member is Any:
            return _object
        hook = self.hook(member)

        def load(value: Any) -> dict[str, Any]:
            if type(value) is not dict:
                fields.wrong_type("an object", value)
            if not self._explain:
                return {key: hook(item) for key, item in value.items()}
            loaded: dict[str, Any] = {}
            found: list[tuple[str, Exception]] = []
            for key, item in value.items():
                try:
                    loaded[key] = hook(item)
                except Exception as problem:  # as above
                    found.append((f".{key[:_SHOWN]}", problem))
                    if len(found) == MAX_PROBLEMS:
                        break
            if found:
                raise MemberProblems(found)
            return loaded

        return load

    def _union(self, found: tuple[Any, ...]) -> Hook:
        hooks: dict[type, Hook] = {}
        payloads = tuple(member for member in found if fields.is_payload(member))
        if payloads:
            hooks[dict] = self._objects(payloads)
        for member in found:
            if member in _PRIMITIVES:
                kinds, hook = _PRIMITIVES[member]
                for kind in kinds:
                    hooks.setdefault(kind, hook)
            elif get_origin(member) is list:
                hooks[list] = self.hook(member)
        if int in found and float in found:
            hooks[float] = hooks[int] = _number
        wanted = " or ".join(fields.JSON_NAMES[kind] for kind in hooks)

        def load(value: Any) -> Any:
            hook = hooks.get(type(value))
            return fields.wrong_type(wanted, value) if hook is None else hook(value)

        return load

    def _objects(self, payloads: tuple[Any, ...]) -> Hook:
        """Return a hook that finds the class of an object: by its tag, or by the function registered with `chooses`."""
        hooks = {cls: self.hook(cls) for cls in payloads}
        if len(payloads) == 1:
            return hooks[payloads[0]]
        choose = fields.CHOOSERS.get(frozenset(payloads))
        if choose is not None:
            return _chosen(choose, hooks)
        tags = {cls: tag for cls in payloads if (tag := _tag_of(cls)) is not None}
        names = {name for name, _ in tags.values()}
        if len(names) != 1 or len(tags) != len(payloads):
            raise TypeError(f"nothing tells {payloads} apart")
        return _tagged(names.pop(), {tags[cls][1]: hooks[cls] for cls in payloads})


def _tag_of(cls: type) -> tuple[str, str] | None:
    """Return the name and value of the `Literal` member that identifies this class, or None."""
    for attribute in fields.attributes(cls):
        values = get_args(attribute.type) if get_origin(attribute.type) is Literal else ()
        if len(values) == 1:
            return fields.wire_name(attribute), values[0]
    return None


def _literal(values: tuple[str, ...]) -> Hook:
    wanted = " or ".join(f'"{value}"' for value in values)

    def load(value: Any) -> Any:
        if type(value) is not str:
            fields.wrong_type(wanted, value)
        return value if value in values else _refuse(f"must be {wanted}")

    return load


def _narrowed(hook: Hook, narrow: Callable[[Any], Any], revision: Revision) -> Hook:
    def load(value: Any) -> Any:
        loaded = hook(value)
        if narrow(loaded) is not loaded:
            raise fields.Problem(f"is a value that revision {revision} does not allow here")
        return loaded

    return load


def _tagged(name: str, hooks: dict[str, Hook]) -> Hook:
    wanted = " or ".join(f'"{tag}"' for tag in hooks)

    def load(value: dict[str, Any]) -> Any:
        tag = value.get(name)
        hook = hooks.get(tag) if type(tag) is str else None
        return _refuse(f'must have "{name}": {wanted}') if hook is None else hook(value)

    return load


def _chosen(choose: Callable[[dict[str, Any]], Any], hooks: dict[Any, Hook]) -> Hook:
    wanted = ", ".join(cls.__name__ for cls in hooks)

    def load(value: dict[str, Any]) -> Any:
        cls = choose(value)
        return _refuse(f"must be one of {wanted}") if cls is None else hooks[cls](value)

    return load


class _LoadPlan:
    """How objects of one payload class are loaded."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.hooks: dict[str, tuple[str, Hook]] = {}  # for each name on the wire, the attribute and what loads it
        # `defaults`, `factories`: values of attributes that were not given, and what makes those that are mutable
        self.defaults: dict[str, Any] = {}
        self.factories: list[tuple[str, Callable[[], Any]]] = []
        # `mandatory`, `expected`: names that must be there: of attributes without a default, and others
        self.mandatory: list[str] = []
        self.expected: list[str] = []
        self.nullable: set[str] = set()  # names of members for which null means missing
        # the names of all members in any revision, if undeclared ones are kept
        self.known: frozenset[str] | None = None

    def without_nulls(self, value: dict[str, Any]) -> dict[str, Any]:
        return {name: member for name, member in value.items() if member is not None or name not in self.nullable}

    def make(self, members: dict[str, Any], value: dict[str, Any]) -> Any:
        """Return the object with these attributes, and with the undeclared members of `value` if it keeps them."""
        for attribute, factory in self.factories:
            if attribute not in members:
                members[attribute] = factory()
        if self.known is not None:
            members[EXTRA] = {name: member for name, member in value.items() if name not in self.known}
        payload = self.cls.__new__(self.cls)
        _set(payload, "__dict__", members)
        return payload


# A payload is frozen, has no slots, and its class does no more than set what it is given: so this is all of its
# `__init__`, in a third of the time.
_set: Final = object.__setattr__


def _quick(plan: _LoadPlan) -> Hook:
    """Return a hook that raises the first problem it meets."""
    hooks, defaults, make, new = plan.hooks, plan.defaults, plan.make, plan.cls.__new__
    cls, simple = plan.cls, plan.known is None and not plan.factories
    needed = (*plan.mandatory, *plan.expected)

    def build(value: dict[str, Any]) -> Any:
        members = {**defaults}
        for name in value:
            if name in hooks:
                attribute, hook = hooks[name]
                members[attribute] = hook(value[name])
        if not simple:
            return make(members, value)
        payload = new(cls)
        _set(payload, "__dict__", members)
        return payload

    def load(value: Any) -> Any:
        if type(value) is not dict:
            fields.wrong_type("an object", value)
        for name in needed:
            if name not in value:
                _refuse(f'must have "{name}"')
        try:
            try:
                return build(value)
            except fields.Problem:
                sparse = plan.without_nulls(value)
                if len(sparse) == len(value):
                    raise
            return build(sparse)
        except fields.TooNew as error:  # it is not in a list of this payload, so no outer list may omit it
            raise fields.Problem(*error.args) from None

    return load


def _explaining(plan: _LoadPlan) -> Hook:
    """Return a hook that raises all problems, in the order in which the class declares its members."""

    def load(value: Any) -> Any:
        if type(value) is not dict:
            fields.wrong_type("an object", value)
        for name in plan.expected:
            if name not in value:
                _refuse(f'must have "{name}"')
        sparse = plan.without_nulls(value)
        members = plan.defaults.copy()
        found: list[tuple[str, Exception]] = []
        for name, (attribute, hook) in plan.hooks.items():
            if name in sparse:
                try:
                    members[attribute] = hook(sparse[name])
                except Exception as problem:  # as above
                    found.append((f".{name}", problem))
            elif name in plan.mandatory:
                found.append((f".{name}", fields.Problem("is missing")))
        if found:
            raise MemberProblems(found)
        return plan.make(members, sparse)

    return load
