"""Converts JSON values to payload classes and back, for one revision: `converter_for(revision)`.

Names become camelCase. Members that the revision lacks are omitted when dumping and ignored when loading.
Primitives are strict. Undeclared members are kept in `extra` if the class has it, else dropped.
There is one rule for a content type that the revision lacks (audio before 2025-03-26), in both directions:
*in a list it is omitted as long as something remains; elsewhere, or if nothing would remain, it is refused*. When
dumping, the refusal is `NotInRevision`. If a class declares a substitute, such as text for a link, that is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, Union, get_args, get_origin, overload

import attrs

from trimcp.errors import LocalError
from trimcp.wire import fields
from trimcp.wire.common import REJECTED, Unreadable
from trimcp.wire.fields import ABSENT, EXTRA
from trimcp.wire.jsonrpc import JSON, Malformed
from trimcp.wire.loading import MAX_PROBLEMS, Hook, Loading, MemberProblems
from trimcp.wire.revisions import LATEST, Revision, revision_named

if TYPE_CHECKING:
    from trimcp.wire.methods import Method


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
        if fields.is_payload(tp):
            return self._payload(tp)
        if fields.is_union(tp):
            return self._union(fields.members(tp))
        origin, inner = get_origin(tp), get_args(tp)
        if origin is list:
            return self._list(inner[0])
        if origin is dict:
            hook = self.hook(inner[1])
            return None if hook is None else _dump_dict(hook)
        return None

    def _payload(self, cls: Any) -> Dump:
        facts: fields.WireFacts = cls.__wire__
        if not facts.exists_at(self._revision):
            return fields.too_new(cls, self._revision) if facts.instead is None else self._other(facts.instead)
        there = [
            attribute
            for attribute in fields.attributes(cls)
            if attribute.name != EXTRA and fields.facts_of(attribute).exists_at(self._revision)
        ]
        plan = {attribute.name: (fields.wire_name(attribute), self._member(attribute)) for attribute in there}
        null_is_a_value = {
            attribute.name for attribute in there if {Any, type(None)} & set(fields.member_types(attribute))
        }
        narrows = any(fields.facts_of(attribute).narrowed_at(self._revision) for attribute in there)

        def dump(payload: Any) -> dict[str, Any]:
            if type(payload) is not cls:
                fields.wrong_type(cls.__name__, payload)
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
            except fields.TooNew as error:  # it is not in a list of this payload, so no outer list may omit it
                raise fields.Unsupported(*error.args) from None
            return {wire: value for wire, value in out.items() if value is not ABSENT} if narrows else out

        return _dump_open(dump, fields.known_names(cls)) if hasattr(attrs.fields(cls), EXTRA) else dump

    def _other(self, instead: Callable[[Any], Any]) -> Dump:
        """Return the hook of a payload for which an older peer gets a substitute."""

        def dump(value: Any) -> Any:
            other = instead(value)
            hook = self.hook(type(other))
            return other if hook is None else hook(other)

        return dump

    def _member(self, attribute: attrs.Attribute[Any]) -> Dump | None:
        hook = self._value(attribute)
        if not fields.facts_of(attribute).narrowed_at(self._revision):
            return hook
        narrow = _dump_narrowed(attribute, self._revision)
        if hook is None:
            return narrow

        def dump(value: Any) -> Any:
            fitting = narrow(value)
            return ABSENT if fitting is ABSENT else hook(fitting)

        return dump

    def _value(self, attribute: attrs.Attribute[Any]) -> Dump | None:
        found = fields.member_types(attribute)
        if len(found) != 1 or not fields.is_of_payloads(found[0]):
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
        for kind in fields.members(member):
            if fields.is_payload(kind) and (of_kind := self.hook(kind)) is not None:
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
                fields.wrong_type(wanted, value)
            return value if hook is None else hook(value)

        return dump


def _dump_list(hook: Dump, by_type: Mapping[type, Dump]) -> Dump:
    """Return a hook for lists. `by_type` are the hooks of payloads, to be looked up here instead of in a call more."""

    def dump(value: list[Any]) -> list[Any]:
        try:
            return [by_type[type(item)](item) for item in value]
        except (fields.TooNew, KeyError):
            pass
        kept = []
        lacking: dict[str, None] = {}
        for item in value:
            try:
                kept.append(hook(item))
            except fields.TooNew as error:
                lacking[str(error)] = None
        if not kept:
            raise fields.Unsupported("; ".join(lacking))
        return kept

    return dump


def _dump_dict(hook: Dump) -> Dump:
    return lambda value: {key: hook(item) for key, item in value.items()}


def _dump_narrowed(attribute: attrs.Attribute[Any], revision: Revision) -> Dump:
    narrow = fields.facts_of(attribute).narrow
    assert narrow is not None

    def narrowed(value: Any) -> Any:
        fitting = narrow(value)
        if fitting is ABSENT and attribute.default is attrs.NOTHING:
            raise fields.Unsupported(f"{attribute.name} holds what revision {revision} does not allow there")
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


T = TypeVar("T")

_MOST_REJECTED: Final = 100  # members left out of one list that are described; more are counted
_LONGEST_NAME: Final = 200
_NAMING: Final = ("name", "uri", "uriTemplate")


class WireError(ValueError):
    """A value does not match what the revision allows.

    Attributes:
        problems: one line each with its place, such as `must be an integer, not a string @ $.arguments.n`.
            They name members and JSON types but no values, so they may be sent to a peer. At most ten.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class NotInRevision(LocalError, WireError):
    """A valid payload, or a part of it, does not exist in the revision in use. Nothing was sent.

    Attributes:
        problems: as of `WireError`.
    """


class WireConverter:
    """Loads and dumps every payload class for one revision. `converter_for` builds it once."""

    def __init__(self, revision: Revision) -> None:
        self.revision = revision
        self._loading = Loading(revision, explain=False)
        self._dumping = Dumping(revision)
        self._loaders: dict[Any, Callable[[Any], Any]] = {}
        self._dumpers: dict[Any, Dump] = {}

    @overload
    def load(self, value: Any, tp: type[T]) -> T: ...
    @overload
    def load(self, value: Any, tp: Any) -> Any: ...
    def load(self, value: Any, tp: Any) -> Any:
        """Return the payload in a JSON value: of class `tp`, or of a union, list or dict of classes.

        Raises WireError: it does not match.
        """
        return self.loader(tp)(value)

    def load_readable(self, value: dict[str, Any], method: Method) -> Any:
        """Return a method's result without the members of its list that cannot be read: they are its `rejected`.

        Slower than `load`, so for what `load` refuses. Raises WireError: something else does not match, or nothing that
        is of use is left. A list may be left empty.
        """
        tp = method.result
        attribute = _list_of(method)
        if attribute is None or type(value.get(fields.wire_name(attribute))) is not list:
            return self.load(value, tp)
        name, (kind,) = fields.wire_name(attribute), get_args(attribute.type)
        listed = value[name]
        hook = self._loading.hook(kind)
        kept: list[Any] = []
        rejected: list[Unreadable] = []
        more = 0
        for place, member in enumerate(listed):
            try:
                hook(member)
            except fields.TooNew:
                kept.append(member)  # the list knows what becomes of it
            except Exception:  # a hook may raise anything
                if len(rejected) < _MOST_REJECTED:
                    rejected.append(self._rejected(f"{name}[{place}]", member, kind))
                else:
                    more += 1
            else:
                kept.append(member)
        if more:
            rejected.append(Unreadable(name, None, f"{more} more members cannot be read"))
        payload = self.load({**value, name: kept}, tp)
        if not kept and not method.name.endswith("/list") and getattr(payload, "structured_content", ABSENT) is ABSENT:
            return self.load(value, tp)  # to say what is wrong
        object.__setattr__(payload, REJECTED, tuple(rejected))
        return payload

    def _rejected(self, place: str, member: Any, kind: Any) -> Unreadable:
        if type(member) is Unreadable:
            return member
        reason = "cannot be read"
        try:
            self._explain(member, kind)
        except WireError as error:
            reason = str(error)
        return _unreadable(place, member, reason)

    def dump(self, payload: Any) -> Any:
        """Return the JSON value of a payload in this revision. Open JSON in it is not copied.

        Raises WireError: a value in it does not have its declared type; NotInRevision: the revision does not have this
        payload, or a part of it.
        """
        return self.dumper(type(payload))(payload)

    def loader(self, tp: Any) -> Callable[[Any], Any]:
        """Return `load` for one type, prepared: keep it if that type is loaded often."""
        found = self._loaders.get(tp)
        if found is None:
            found = self._loaders[tp] = self._make_loader(tp)
        return found

    def dumper(self, tp: Any) -> Dump:
        """Return `dump` for one type, prepared: keep it if that type is dumped often."""
        found = self._dumpers.get(tp)
        if found is None:
            found = self._dumpers[tp] = self._make_dumper(tp)
        return found

    def _make_loader(self, tp: Any) -> Callable[[Any], Any]:
        hook: Hook | None = None

        def load(value: Any) -> Any:
            nonlocal hook
            if hook is None:  # created at first use: a program needs only a few
                hook = self._loading.hook(tp)
            try:
                return hook(value)
            except Exception:  # any error: the slower hook finds it again, with its place
                return self._explain(value, tp)

        return load

    def _explain(self, value: Any, tp: Any) -> Any:
        try:
            return _explaining(self.revision).hook(tp)(value)
        except Exception as problem:  # a hook may raise anything; `_lines` describes each
            raise WireError(list(islice(_lines(problem, "$"), MAX_PROBLEMS))) from None

    def _make_dumper(self, tp: Any) -> Dump:
        hook: Dump | None = None
        made = False

        def dump(payload: Any) -> Any:
            nonlocal hook, made
            if not made:
                hook, made = self._dumping.hook(tp), True
            try:
                return payload if hook is None else hook(payload)
            except fields.Unsupported as error:
                raise NotInRevision([str(error)]) from None
            except fields.Problem as error:
                raise WireError([str(error)]) from None

        return dump


def to_json(payload: Any, *, revision: Revision | str = LATEST) -> JSON:
    """Return the JSON value of a payload, or of a list of payloads, in a revision: input for `json.dumps`.

    Args:
        payload: such as a `CallToolResult` or a `Tool`.
        revision: the revision to write, or its name; what it lacks is omitted.

    Raises:
        LocalError: there is no such revision.
        WireError: it is not a payload, or contains something that the revision cannot express.
    """
    if isinstance(payload, list | tuple):
        return [to_json(each, revision=revision) for each in payload]
    if not fields.is_payload(type(payload)):
        raise WireError([f"{type(payload).__name__} is no payload"])
    value: JSON = converter_for(revision_named(revision)).dump(payload)
    return value


@overload
def from_json(value: JSON, tp: type[T], *, revision: Revision | str = ...) -> T: ...
@overload
def from_json(value: JSON, tp: Any, *, revision: Revision | str = ...) -> Any: ...
def from_json(value: Any, tp: Any, *, revision: Revision | str = LATEST) -> Any:
    """Return the payload in a JSON value, after checking it.

    Args:
        value: output of `json.loads`.
        tp: the payload's class, or a union, `list[...]` or `dict[str, ...]` of such.
        revision: the revision it is written in, or its name.

    Raises:
        LocalError: there is no such revision.
        WireError: it does not match. It is a ValueError, and its `problems` name the places.
    """
    return converter_for(revision_named(revision)).load(value, tp)


def without_marked(refused: Malformed, method: Method) -> dict[str, Any] | None:
    """Return a method's result whose integers could not all be read, for `load_readable`.

    In it, the members of its list that hold such an integer are `Unreadable`. None if others hold one.
    """
    marked, attribute = refused.marked, _list_of(method)
    result = None if marked is None else marked.value.get("result")
    if marked is None or attribute is None or type(result) is not dict:
        return None
    name, member = fields.wire_name(attribute), marked.marks
    listed = result.get(name)
    if type(listed) is not list or member({key: each for key, each in result.items() if key != name}):
        return None
    kept = [
        _unreadable(f"{name}[{place}]", each, refused.message) if member(each) else each
        for place, each in enumerate(listed)
    ]
    return {**result, name: kept}


def _list_of(method: Method) -> attrs.Attribute[Any] | None:
    """Return the list in a method's result from which a member that cannot be read is left out."""
    found = () if method.members is None else fields.attributes(method.result)
    return next((each for each in found if each.name == method.members), None)


def _unreadable(place: str, member: Any, reason: str) -> Unreadable:
    named = member if type(member) is dict else {}
    name = next((named[key] for key in _NAMING if type(named.get(key)) is str), None)
    return Unreadable(place, None if name is None else name[:_LONGEST_NAME], reason)


@cache
def converter_for(revision: Revision) -> WireConverter:
    """Return the converter of a revision, always the same object."""
    return WireConverter(revision)


@cache
def _explaining(revision: Revision) -> Loading:
    return Loading(revision, explain=True)


def _lines(problem: Exception, place: str) -> Iterator[str]:
    """Yield every problem with its place in the JSON value."""
    if isinstance(problem, MemberProblems):
        for step, inner in problem.found:
            yield from _lines(inner, place + step)
    else:
        yield f"{problem} @ {place}"
