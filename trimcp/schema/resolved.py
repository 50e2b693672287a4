"""What an annotation means, once for all: the tree that the schema and the converter both read.

Names are looked up, type variables have their values, and each spelling of a type is one kind. What has no JSON form is
refused here, with what to write instead.
"""

from __future__ import annotations

import collections
import collections.abc as abc
import dataclasses
import enum
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import attrs

from trimcp.schema.convert import ConversionError, leaf_of, to_json
from trimcp.schema.hints import (
    Field,
    UnreadableHint,
    alias_value,
    field_infos,
    fields_of,
    hashes,
    is_alias,
    is_model,
    is_record,
    is_union,
    readable,
    split,
)
from trimcp.support.slotted import slotted
from trimcp.wire.jsonrpc import Unencodable, encode

Kind = Literal["any", "leaf", "literal", "enum", "union", "list", "set", "tuple", "mapping", "record", "alias", "model"]

CONTAINERS: Final[dict[Any, tuple[Kind, Any]]] = {
    tuple: ("tuple", tuple),
    **dict.fromkeys((list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection), ("list", list)),
    collections.deque: ("list", collections.deque),
    abc.Iterator: ("list", iter),
    abc.Generator: ("list", lambda items: (each for each in items)),
    **dict.fromkeys((set, abc.Set, abc.MutableSet), ("set", set)),
    frozenset: ("set", frozenset),
    **dict.fromkeys((dict, abc.Mapping, abc.MutableMapping), ("mapping", dict)),
    **{each: ("mapping", each) for each in (collections.OrderedDict, collections.defaultdict, collections.Counter)},
}
"""What holds other types, as authors write it: its kind, and what makes a value."""

_SAME: Final[dict[Any, Any]] = {
    None: type(None),
    typing.LiteralString: str,
    object: Any,
    **dict.fromkeys((abc.Hashable, typing.Hashable), str | int | float | bool | None),
}
_DUMPED: Final[dict[Any, Any]] = {**{each: each for each in (str, int, float)}, abc.Mapping: dict, abc.Collection: list}


@slotted
class ResolvedType:
    """One type of a tree. Records and aliases may be recursive: nodes share these lists, filled when all is read."""

    kind: Kind  # which of the attributes below count. A "model" is all Pydantic's, with the extras that only it reads.
    bare: Any  # the type without `Annotated`; of an alias, the alias
    extras: list[Any] = attrs.field(factory=list)  # what `Annotated` adds, as far as trimcp reads it
    # the alternatives of a union, the types in a tuple, the type in a list or set, key and value of a mapping, what an
    # alias stands for
    members: list[ResolvedType] = attrs.field(factory=list)
    fields: list[tuple[Field, ResolvedType]] = attrs.field(factory=list)  # the fields of a record, with their types

    @property
    def container(self) -> Any:
        """The class that is written in a container or record, without its arguments."""
        return getattr(self.bare, "__origin__", self.bare)  # by far the most are plain classes

    @property
    def maker(self) -> Any:
        """What makes a value of a container from its members; None for any other type."""
        return CONTAINERS.get(self.container, (None, None))[1]

    @property
    def variadic(self) -> bool:
        """Whether a tuple has any number of members, all of the one type in `members`, or of any type."""
        arguments = get_args(self.bare)
        return self.bare in (tuple, typing.Tuple) or arguments[1:] == (Ellipsis,)  # noqa: UP006 - what an author wrote

    def alternatives(self) -> Iterator[ResolvedType]:
        """Yield the type and, of unions and aliases, what may stand in its place, each once."""
        yield self
        if self.kind in ("union", "alias"):
            for member in self.members:
                yield from member.alternatives()


_PLAIN: Final = {kind: ResolvedType("leaf", kind) for kind in (str, int, float, bool, type(None))}


class TypeResolver:
    """Reads annotations, those of one document: a record that is met twice is read once."""

    def __init__(self, *, output: bool = False) -> None:
        self.output: bool = output  # they describe results
        self.foreign: bool = False  # what only Pydantic reads was met in an `Annotated`
        self._known: dict[Any, ResolvedType] = {}

    def resolve(self, hint: Any) -> ResolvedType:
        """Return what an annotation means.

        Raises TypeError for a type without a JSON form, or a name that is not defined; UnreadableHint as `readable`.
        """
        if type(hint) is type and hint in _PLAIN:  # most are
            return _PLAIN[hint]
        if isinstance(hint, ResolvedType):
            return hint
        if is_alias(hint):
            return self._shared("alias", hint, self._read_alias)
        bare, extras = split(hint)
        ours, theirs = readable(extras)
        if theirs or is_model(bare):
            self.foreign = self.foreign or bool(theirs)
            return ResolvedType("model", Annotated[(bare, *theirs)] if theirs else bare, ours)
        found = self._resolve_bare(bare)
        return ResolvedType(found.kind, found.bare, ours, found.members, found.fields) if ours else found

    def _shared(self, kind: Kind, bare: Any, read: Callable[[ResolvedType], None]) -> ResolvedType:
        key = bare if hashes(bare) else repr(bare)
        if key not in self._known:
            self._known[key] = ResolvedType(kind, bare)
            read(self._known[key])
        return self._known[key]

    def _read_alias(self, node: ResolvedType) -> None:
        node.members.append(self.resolve(alias_value(node.bare)))
        if any(each.members is node.members for each in node.members[0].alternatives()):
            raise TypeError(f"the alias {node.bare} stands for itself")

    def _read_record(self, node: ResolvedType) -> None:
        fields = fields_of(node.bare)
        theirs = next(filter(is_for_pydantic, fields), None)
        if theirs is not None and dataclasses.is_dataclass(node.container):
            node.kind = "model"
            return
        code = getattr(node.container.__init__, "__code__", None)
        if code is not None and not code.co_flags & inspect.CO_VARKEYWORDS:
            taken = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if other := [field.name for field in fields if field.given and field.name not in taken]:
                raise TypeError(f"the __init__ of {node.container.__name__} takes no {other[0]!r}, which is its field")
        for field in fields:
            try:
                if field is theirs:
                    raise UnreadableHint(
                        "an alias or a default in Pydantic's Field is for Pydantic's models and dataclasses"
                    )
                node.fields.append((field, self.resolve(field.hint)))
            except TypeError as error:
                raise in_field(node, field, error) from None

    def _resolve_bare(self, bare: Any) -> ResolvedType:
        if hashes(bare):
            bare = _SAME.get(bare, bare)
            if bare is Any:
                return ResolvedType("any", bare)
            if leaf_of(bare) is not None:
                return ResolvedType("leaf", bare)
        origin, arguments = get_origin(bare), get_args(bare)
        if arguments in ((), (str,)) and leaf_of(origin) is not None:  # re.Pattern[str]
            return ResolvedType("leaf", origin)
        if origin is Literal:
            return ResolvedType("literal", bare)
        if is_union(bare):
            members = [self.resolve(each) for each in arguments]
            models = [each for each in members if each.kind == "model"]
            if len(models) > 1 and all(each.kind == "model" or each.bare is type(None) for each in members):
                return ResolvedType("model", bare)  # Pydantic knows best which of its models fits a value
            return ResolvedType("union", bare, members=members)
        container = origin or bare
        if isinstance(bare, type) and issubclass(bare, enum.Enum):
            return ResolvedType("enum", bare)
        if is_record(bare):
            return self._shared("record", bare, self._read_record)
        if container in CONTAINERS:
            return self._container(bare, container, arguments)
        if self.output and isinstance(container, type):
            for base, dumped in _DUMPED.items():
                if issubclass(container, base):
                    return self._resolve_bare(dumped)
        instead = "use builtins, a dataclass, an attrs class, a TypedDict, an Enum, or give the schema by hand"
        if isinstance(bare, typing.ForwardRef):
            instead = "an alias that stands in itself is declared by `type`, or as a typing_extensions.TypeAliasType"
        raise TypeError(f"{getattr(bare, '__name__', bare)} has no JSON form; {instead}")

    def _container(self, bare: Any, container: Any, arguments: tuple[Any, ...]) -> ResolvedType:
        kind, _ = CONTAINERS[container]
        if container is collections.Counter:
            arguments = (*(arguments or (Any,)), int)
        given = arguments[:1] if kind == "list" else [each for each in arguments if each is not Ellipsis]
        members = [self.resolve(each) for each in given]
        if kind in ("set", "mapping") and members and not _can_hash(members[0]):
            shown = bare.__name__ if isinstance(bare, type) and not arguments else repr(bare)
            instead = "the members of {} cannot be hashed; use a list, or a frozen class"
            if kind == "mapping":
                instead = "the keys of {} cannot be hashed; use str, int, UUID, or an enumeration"
            raise TypeError(instead.format(shown))
        return ResolvedType(kind, bare, members=members)


def in_field(record: ResolvedType, field: Field, error: TypeError) -> TypeError:
    """Return an error of the same kind that names the record's field."""
    return type(error)(f"{record.container.__name__}.{field.name}: {error}")


def literals_of(node: ResolvedType) -> list[tuple[Any, Any]]:
    """Return the values of a Literal, or the members of an enumeration, each as (Python, JSON).

    Raises TypeError for one without a JSON form.
    """
    values = get_args(node.bare) if node.kind == "literal" else list(node.bare)
    what = "Literal" if node.kind == "literal" else f"enumeration {node.bare.__name__}"
    try:
        found = [(value, to_json(value)) for value in values]
        encode([json for _, json in found])
    except (ConversionError, Unencodable) as error:
        raise TypeError(f"the {what} has values JSON cannot carry: {error}") from None
    if not found:
        raise TypeError(f"the {what} has no values")
    return found


def is_for_pydantic(field: Field) -> bool:
    """Return whether a field has a part of a Pydantic `Field` that only Pydantic's classes know."""
    return any(
        info is field.default or info.alias or info.validation_alias or not info.is_required()
        for info in field_infos(field)
    )


def _can_hash(node: ResolvedType, above: tuple[Any, ...] = ()) -> bool:
    """Return whether every value of a type can be the key of a mapping or a member of a set."""
    made = node.maker or (split(node.bare)[0] if node.kind == "model" else node.container)
    joined = node.kind in ("union", "alias")
    own = getattr(made, "__hash__", None)
    if own is None or (made is tuple and not node.members):
        return False
    if node.kind == "model" or (own is object.__hash__ and not joined):
        return True
    inner = [*node.members, *(kind for _, kind in node.fields)]
    return node.bare in above or all(_can_hash(each, (*above, node.bare)) for each in inner)
