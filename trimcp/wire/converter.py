"""From JSON values to payload classes and back, for one revision: `converter_for(revision)`.

Names become camelCase. Members the revision lacks are left out on the way out and ignored on the way in.
Primitives are strict. Members no class declares survive in `extra` where the class has one, else are dropped.
What to do with a kind of content that the revision lacks (audio before 2025-03-26) is one rule, both ways:
*in a list it is left out as long as something remains; anywhere else, or if nothing would remain, it is refused*. The
refusal on the way out is `NotInRevision`. Where a class says what stands for it, as text does for a link, that is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any, TypeVar, overload

import attrs
from cattrs import ClassValidationError, Converter, IterableValidationError

from trimcp.errors import LocalError
from trimcp.wire.fields import Problem, Unsupported, is_payload, wire_name
from trimcp.wire.hooks import MAX_PROBLEMS, Dump, Dumping, Loading
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.revisions import LATEST, Revision

T = TypeVar("T")

_SHOWN = 64  # characters of a peer's key that a problem repeats


class WireError(ValueError):
    """A value does not fit what the revision allows.

    Attributes:
        problems: one line each with its place, such as `must be an integer, not a string @ $.arguments.n`.
            They name members and JSON types and quote no values, so they may be sent to a peer. At most ten.
    """

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class NotInRevision(LocalError, WireError):
    """A valid payload, or something in it, that the revision in use does not have. Nothing was sent.

    Attributes:
        problems: as of `WireError`.
    """


class WireConverter:
    """Loads and dumps every payload class for one revision. `converter_for` builds it once."""

    def __init__(self, revision: Revision) -> None:
        self.revision = revision
        self._loading = Loading(revision, explain=False).converter
        self._dumping = Dumping(revision)
        self._loaders: dict[Any, Callable[[Any], Any]] = {}
        self._dumpers: dict[Any, Dump] = {}

    @overload
    def load(self, value: Any, tp: type[T]) -> T: ...
    @overload
    def load(self, value: Any, tp: Any) -> Any: ...
    def load(self, value: Any, tp: Any) -> Any:
        """The payload in this JSON value: of that class, or of a union, list or dict of classes.

        Raises:
            WireError: it does not fit.
        """
        return self.loader(tp)(value)

    def dump(self, payload: Any) -> Any:
        """The JSON value of this payload, as the revision writes it. Open JSON in it is not copied.

        Raises:
            NotInRevision: the revision has no such payload, or none for something in it.
            WireError: so it is, or something in it is not of its type.
        """
        return self.dumper(type(payload))(payload)

    def loader(self, tp: Any) -> Callable[[Any], Any]:
        """`load` for one type, prepared: keep it where that type is loaded often."""
        found = self._loaders.get(tp)
        if found is None:
            found = self._loaders[tp] = self._make_loader(tp)
        return found

    def dumper(self, tp: Any) -> Dump:
        """`dump` for one type, prepared: keep it where that type is dumped often."""
        found = self._dumpers.get(tp)
        if found is None:
            found = self._dumpers[tp] = self._make_dumper(tp)
        return found

    def _make_loader(self, tp: Any) -> Callable[[Any], Any]:
        hook: Callable[[Any, Any], Any] | None = None

        def load(value: Any) -> Any:
            nonlocal hook
            if hook is None:  # made at the first use: a program meets few of the methods it could
                hook = self._loading.get_structure_hook(tp)
            try:
                return hook(value, tp)
            except Exception:  # whatever it was, the slower converter finds it again and says where
                return self._explain(value, tp)

        return load

    def _explain(self, value: Any, tp: Any) -> Any:
        try:
            return _explaining(self.revision).structure(value, tp)
        except Exception as error:  # a hook may raise any; `_problems` knows how to tell each
            raise WireError(list(islice(_problems(error, "$"), MAX_PROBLEMS))) from None

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


def to_json(payload: Any, *, revision: Revision = LATEST) -> JSON:
    """The JSON value of a payload, or of a list of payloads, as a revision writes it: what `json.dumps` takes.

    Args:
        payload: such as a `CallToolResult` or a `Tool`.
        revision: the one to write it for; what that lacks is left out.

    Raises:
        WireError: it is no payload, or holds what the revision cannot carry.
    """
    if isinstance(payload, list | tuple):
        return [to_json(each, revision=revision) for each in payload]
    if not is_payload(type(payload)):
        raise WireError([f"{type(payload).__name__} is no payload"])
    value: JSON = converter_for(revision).dump(payload)
    return value


@overload
def from_json(value: JSON, tp: type[T], *, revision: Revision = ...) -> T: ...
@overload
def from_json(value: JSON, tp: Any, *, revision: Revision = ...) -> Any: ...
def from_json(value: Any, tp: Any, *, revision: Revision = LATEST) -> Any:
    """The payload in a JSON value, which is checked.

    Args:
        value: what `json.loads` gives.
        tp: the payload's class, or a union, `list[...]` or `dict[str, ...]` of such.
        revision: the one it is written in.

    Raises:
        WireError: it does not fit. It is a ValueError, and its `problems` name the places.
    """
    return converter_for(revision).load(value, tp)


@cache
def converter_for(revision: Revision) -> WireConverter:
    """The one converter of that revision."""
    return WireConverter(revision)


@cache
def _explaining(revision: Revision) -> Converter:
    return Loading(revision, explain=True).converter


def _problems(error: BaseException, place: str) -> Iterator[str]:
    """Every problem in what cattrs raised, with its place in the JSON that came."""
    if isinstance(error, ClassValidationError):
        names = {attribute.name: wire_name(attribute) for attribute in attrs.fields(error.cl)}
        noted, bare = error.group_exceptions()
        for inner, note in noted:
            yield from _problems(inner, f"{place}.{names[note.name]}")
        for inner in bare:
            yield from _problems(inner, place)
    elif isinstance(error, IterableValidationError):
        for inner, where in error.group_exceptions()[0]:
            step = f"[{where.index}]" if isinstance(where.index, int) else f".{where.index[:_SHOWN]}"
            yield from _problems(inner, place + step)
    elif isinstance(error, KeyError):
        yield f"is missing @ {place}"
    else:
        yield f"{error} @ {place}"
