"""Converts JSON values to payload classes and back, for one revision: `converter_for(revision)`.

Names become camelCase. Members that the revision lacks are omitted when dumping and ignored when loading.
Primitives are strict. Undeclared members are kept in `extra` if the class has it, else dropped.
There is one rule for a content type that the revision lacks (audio before 2025-03-26), in both directions:
*in a list it is omitted as long as something remains; elsewhere, or if nothing would remain, it is refused*. When
dumping, the refusal is `NotInRevision`. If a class declares a substitute, such as text for a link, that is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args, overload

from trimcp.errors import LocalError
from trimcp.wire.common import REJECTED, Unreadable
from trimcp.wire.dumping import Dump, Dumping
from trimcp.wire.fields import ABSENT, Problem, TooNew, Unsupported, attributes, is_payload, wire_name
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.loading import MAX_PROBLEMS, Hook, Loading, MemberProblems
from trimcp.wire.revisions import LATEST, Revision, revision_named

if TYPE_CHECKING:
    from trimcp.wire.methods import Method

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

        Raises:
            WireError: it does not match.
        """
        return self.loader(tp)(value)

    def load_readable(self, value: dict[str, Any], method: Method) -> Any:
        """Return a method's result without the members of its list that cannot be read: they are its `rejected`.

        Slower than `load`, so for what `load` refuses.

        Raises:
            WireError: something else does not match, or nothing that is of use is left. A list may be left empty.
        """
        tp = method.result
        attribute = next((each for each in attributes(tp) if each.name == method.members), None)
        if attribute is None:
            return self.load(value, tp)
        name, (kind,) = wire_name(attribute), get_args(attribute.type)
        listed = value.get(name)
        if type(listed) is not list:
            return self.load(value, tp)
        hook = self._loading.hook(kind)
        kept: list[Any] = []
        rejected: list[Unreadable] = []
        more = 0
        for place, member in enumerate(listed):
            try:
                hook(member)
            except TooNew:
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
        reason = "cannot be read"
        try:
            self._explain(member, kind)
        except WireError as error:
            reason = str(error)
        named = member if type(member) is dict else {}
        name = next((named[key] for key in _NAMING if type(named.get(key)) is str), None)
        return Unreadable(place, None if name is None else name[:_LONGEST_NAME], reason)

    def dump(self, payload: Any) -> Any:
        """Return the JSON value of a payload in this revision. Open JSON in it is not copied.

        Raises:
            NotInRevision: the revision does not have this payload, or a part of it.
            WireError: as above, or a value in it does not have its declared type.
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
            except Unsupported as error:
                raise NotInRevision([str(error)]) from None
            except Problem as error:
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
    if not is_payload(type(payload)):
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
