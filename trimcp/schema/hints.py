"""Analysis of type hints: wrappers around a type, the extras of `Annotated`, and the fields of a record class.

It depends on Python's types and the keywords of JSON Schema only, not on functions or conversion.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

import attrs

from trimcp.schema.docstrings import parse
from trimcp.support.bounds import is_token
from trimcp.support.slotted import valued

_QUALIFIERS: Final = frozenset({"Required", "NotRequired", "ReadOnly", "Final"})  # of typing or typing_extensions

TIME: Final = r"^([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)?$"
"""The pattern of a time, with a zone or without: the format "time" requires one."""

ABSENT_DEFAULT: Final[Any] = inspect.Parameter.empty
"""Marks a parameter or field without a default, or with one that has no JSON form."""


class UnreadableHint(TypeError):
    """An extra of an `Annotated` is known in part, so the rest would never be checked. The text names it."""


@attrs.frozen
@valued
class Field:
    """One field of a record class, under its name in JSON."""

    name: str
    hint: Any  # its type, with the extras of `Annotated`
    required: bool
    default: Any = ABSENT_DEFAULT  # the default value, or ABSENT_DEFAULT
    description: str | None = None  # from the class's docstring or the field's metadata
    given: bool = True  # whether the class takes it
    kept: bool = True  # whether its objects have it
    attribute: str | None = None  # its name in Python, if that is another
    fill: Callable[[], Any] | None = None  # makes the default value, if the function does not


def split(hint: Any) -> tuple[Any, list[Any]]:
    """Return (bare type, extras), without Annotated, NewType, PEP 695 aliases and qualifiers such as Required."""
    extras: list[Any] = []
    while type(hint) is not type:  # a plain class has no wrapper
        origin = get_origin(hint)
        if origin is typing.Annotated:
            hint, *inner = get_args(hint)
            extras = [*inner, *extras]
        elif _qualifier(origin):
            (hint,) = get_args(hint)
        elif isinstance(hint, dataclasses.InitVar):
            hint = hint.type
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        elif is_alias(hint):
            hint = alias_value(hint)
        elif isinstance(hint, TypeVar):
            hint = _stand_in(hint)
        else:
            break
    return hint, extras


def _qualifier(origin: Any) -> str:
    """Return the name of a qualifier such as Required, or an empty text for any other form."""
    name = getattr(origin, "_name", None)
    return name if name in _QUALIFIERS else ""


def _stand_in(variable: TypeVar) -> Any:
    """Return the type that a type variable without a value stands for: its default, bound or constraints, or Any."""
    if getattr(variable, "has_default", bool)():
        return getattr(variable, "__default__", Any)
    limit = Union[variable.__constraints__] if variable.__constraints__ else variable.__bound__ or Any  # noqa: UP007 - a tuple
    return _without_names(limit, variable, f"the type variable {variable.__name__} names")


def hashes(hint: Any) -> bool:
    try:
        hash(hint)
    except TypeError:
        return False
    return True


def is_union(bare: Any) -> bool:
    return isinstance(bare, types.UnionType) or getattr(bare, "__origin__", None) is Union


def is_alias(hint: Any) -> bool:
    """Return whether a hint is a PEP 695 type alias, parametrized or not, which may be recursive."""
    named = hint if hasattr(hint, "__metadata__") else getattr(hint, "__origin__", hint)
    return type(named).__name__ == "TypeAliasType"


def alias_value(hint: Any) -> Any:
    """Return the value of a type alias, with quoted names looked up in its module. Raises as `hints_of`."""
    alias = get_origin(hint) or hint
    title = f"the alias {alias.__name__} names"
    try:
        value = alias.__value__
    except NameError as error:  # since 3.12 it is evaluated here
        raise _unknown(title, error.name, alias.__module__) from None
    bound = dict(zip(alias.__type_params__, get_args(hint), strict=False))
    return substitute(_without_names(value, alias, title), bound, alias)


def _without_names(hint: Any, owner: Any, title: str) -> Any:
    """Return a hint with quoted names looked up in the module of a type alias or type variable."""
    module = getattr(owner, "__module__", "")
    holder = types.SimpleNamespace(__annotations__={"value": hint}, __name__=owner.__name__, __module__=module)
    return hints_of(holder, title)["value"]


def hints_of(target: Any, title: str, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the annotations of a function or class, with all names in them looked up.

    A name that its module does not define is looked for in the class itself and its parents, and among the variables of
    the module's functions that run just now: a class in a function may name itself and its neighbours. Raises
    TypeError: a name is found nowhere, or an annotation cannot be evaluated. `title` begins the error about a name, as
    in "the annotations of Node name"; `known` are more names, such as those of the function's closure.
    """
    names = dict(known or {})
    module = getattr(target, "__module__", None) or "its module"
    scope = vars(sys.modules.get(module, typing)) if isinstance(target, types.SimpleNamespace) else None
    while True:
        # With local names it never takes what a reference meant in another module: typing keeps one `Optional["Node"]`
        # for all, with what it meant last.
        try:
            return typing.get_type_hints(target, globalns=scope, localns=names, include_extras=True)
        except NameError as error:
            name = error.name
            if name is None or name in names or not _find_name(target, module, name, names):
                raise _unknown(title, name, module) from None
        except RecursionError:
            raise
        except Exception as error:  # whatever the text of an annotation does when it is evaluated
            said = str(error).partition("\n")[0]
            raise TypeError(f"{title} what cannot be evaluated: {said[:200]}") from None


def _unknown(title: str, name: Any, module: str) -> TypeError:
    return TypeError(
        f"{title} {name!r}, which {module} does not define; define it before, at the module's level and outside"
        " `if TYPE_CHECKING`"
    )


def _find_name(target: Any, module: str, name: str, names: dict[str, Any]) -> bool:
    """Add the value of a name in an annotation to `names`. Returns whether there is one."""
    scopes = [{target.__name__: target}, *map(vars, target.__mro__)] if isinstance(target, type) else []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            scopes.append(frame.f_locals)
        frame = frame.f_back
    found = [scope[name] for scope in scopes if name in scope]
    names.update({name: found[0]} if found else {})
    return bool(found)


def is_record(hint: Any) -> bool:
    """Return whether a bare type is an attrs class, dataclass, TypedDict or NamedTuple, parametrized or not."""
    cls = get_origin(hint) or hint
    if not isinstance(cls, type) or is_model(cls):
        return False
    named = issubclass(cls, tuple) and hasattr(cls, "_fields")
    return named or attrs.has(cls) or dataclasses.is_dataclass(cls) or is_typed_dict(cls)


def is_typed_dict(cls: type) -> bool:
    """Return whether a class is a TypedDict, of typing or of typing_extensions."""
    return issubclass(cls, dict) and hasattr(cls, "__required_keys__")


# Pydantic is not a dependency: its classes are recognized if the program has imported it; see `pydantic_types`.


def is_model(hint: Any) -> bool:
    """Return whether a bare type belongs to Pydantic: a model, a Pydantic dataclass, or a type with its own schema."""
    if "pydantic" not in sys.modules:
        return False
    cls = get_origin(hint) or hint
    own = isinstance(cls, type) and (
        hasattr(cls, "__get_pydantic_core_schema__") or "__is_pydantic_dataclass__" in vars(cls)
    )
    return own and not attrs.has(cls)


def is_field_info(value: Any) -> bool:
    """Return whether a value is the result of Pydantic's `Field(...)`."""
    fields = sys.modules.get("pydantic.fields")
    return fields is not None and isinstance(value, fields.FieldInfo)


def field_infos(field: Field) -> list[Any]:
    """Return the `Field(...)`s of Pydantic that are the default of a field or parameter, or in its `Annotated`."""
    if "pydantic.fields" not in sys.modules:
        return []
    return [each for each in (*split(field.hint)[1], field.default) if is_field_info(each)]


def belongs_to_pydantic(extra: Any) -> bool:
    """Return whether Pydantic reads this extra of an `Annotated`."""
    home = getattr(extra if isinstance(extra, type) else type(extra), "__module__", "").partition(".")[0]
    hooks = ("__get_pydantic_core_schema__", "__get_pydantic_json_schema__")
    return "pydantic" in sys.modules and (
        home in ("pydantic", "annotated_types") or any(hasattr(extra, hook) for hook in hooks)
    )


def fields_of(hint: Any) -> list[Field]:
    """Return the fields of a record. Raises TypeError for an annotation that cannot be resolved."""
    cls = get_origin(hint) or hint
    hints = hints_of(cls, f"the annotations of {cls.__name__} name")
    bound: dict[str, Mapping[Any, Any]] = {}  # what the type variables in the annotation of each field stand for
    for owner, variables in _generations(hint) if hasattr(cls, "__orig_bases__") else ():
        for name in getattr(owner, "__annotations__", ()):
            bound[name] = bound.get(name) or variables if is_typed_dict(cls) else variables
    described = parse(cls.__doc__).parameters
    hints = {name: substitute(each, bound.get(name, {}), hint) for name, each in hints.items()}
    return [
        attrs.evolve(field, description=described[field.name])
        if field.name in described and not field.description
        else field
        for field in _raw_fields(cls, hints)
    ]


def _generations(hint: Any) -> Iterator[tuple[type, Mapping[Any, Any]]]:
    """Return a record and the classes it inherits from, the eldest first, with what their type variables stand for."""
    cls = get_origin(hint) or hint
    bound = dict(zip(getattr(cls, "__parameters__", ()), get_args(hint), strict=False))
    for parent in vars(cls).get("__orig_bases__", cls.__bases__):
        if isinstance(get_origin(parent) or parent, type):
            yield from _generations(substitute(parent, bound, hint))
    yield cls, bound


def _raw_fields(cls: Any, hints: Mapping[str, Any]) -> Iterator[Field]:
    # What a class does not take is part of its JSON if it is public.
    if attrs.has(cls):
        for a in attrs.fields(cls):
            if a.init or not a.name.startswith("_"):
                required = a.default is attrs.NOTHING
                hidden = required or isinstance(a.default, attrs.Factory)  # type: ignore[arg-type]  # mypy takes no class as a factory
                default = ABSENT_DEFAULT if hidden else a.default
                name, text = (a.init and a.alias) or a.name, a.metadata.get("description")
                yield Field(name, hints.get(a.name, Any), required, default, text, a.init, attribute=a.name)
    elif dataclasses.is_dataclass(cls):
        for f in cls.__dataclass_fields__.values():  # `dataclasses.fields` leaves out an InitVar
            kind = f._field_type  # type: ignore[attr-defined]
            if kind is not dataclasses._FIELD_CLASSVAR and (f.init or not f.name.startswith("_")):  # type: ignore[attr-defined]
                hidden = f.default is dataclasses.MISSING
                required = hidden and f.default_factory is dataclasses.MISSING
                default, text = ABSENT_DEFAULT if hidden else f.default, f.metadata.get("description")
                kept = kind is dataclasses._FIELD  # type: ignore[attr-defined]
                yield Field(f.name, hints.get(f.name, Any), required, default, text, f.init, kept)
    elif is_typed_dict(cls):
        for name, hint in hints.items():
            yield Field(name, hint, _is_required(hint, name in cls.__required_keys__))
    else:
        defaults = cls._field_defaults
        for name in cls._fields:
            yield Field(name, hints.get(name, Any), name not in defaults, defaults.get(name, ABSENT_DEFAULT))


@functools.lru_cache(maxsize=1024)
def members_of(cls: type) -> list[tuple[str, str, bool]]:
    """Return what of a record's objects is JSON, each as (name there, name in Python, whether every object has it)."""
    return [(f.name, f.attribute or f.name, f.given) for f in _raw_fields(cls, {}) if f.kept]


def _is_required(hint: Any, otherwise: bool) -> bool:
    """As `__required_keys__`, but it also reads the qualifiers of annotations that are still strings."""
    while (origin := get_origin(hint)) is typing.Annotated or _qualifier(origin):
        if "Required" in _qualifier(origin):
            return _qualifier(origin) == "Required"
        hint = get_args(hint)[0]
    return otherwise


def substitute(hint: Any, bound: Mapping[Any, Any], own: Any) -> Any:
    """Return `hint` with type variables replaced by the types in `bound`, and Self by `own`."""
    if hint is getattr(typing, "Self", None):
        return own
    if isinstance(hint, TypeVar):
        return bound.get(hint, hint)
    arguments = get_args(hint)
    if not arguments or get_origin(hint) is Literal:
        return hint
    replaced = tuple(substitute(each, bound, own) for each in arguments)
    if replaced == arguments:
        return hint
    if isinstance(hint, types.UnionType):
        return Union[replaced]  # noqa: UP007 - a tuple of members
    if get_origin(hint) is typing.Annotated:
        return typing.Annotated[(replaced[0], *hint.__metadata__)]
    return hint.copy_with(replaced) if hasattr(hint, "copy_with") else get_origin(hint)[replaced]


# --- the extras of an `Annotated` ---


@attrs.frozen
@valued
class Arg:
    """Describes and bounds an argument: `days: Annotated[int, Arg("How many days", ge=1, le=14)]`.

    All attributes are part of the JSON Schema, and bounds are checked before the function is called. Objects of
    `annotated-types`, Pydantic's `Field` and `typing.Doc` also work, and a plain string is a description. Other
    extras are ignored; one with such an attribute beside others that are unknown is an error when the function is
    registered.

    Attributes:
        description: the meaning of the argument, for the model.
        ge, gt, le, lt, multiple_of: bounds of a number.
        min_length, max_length: bounds of a text, list or dict.
        pattern: a regular expression that some part of the text must match (JSON Schema "pattern": not anchored).
        examples: example values, as JSON.
        title: a display name.
        header: mirror the argument in the HTTP header `Mcp-Param-{header}`, so that proxies can route by it
            (specification, server/tools, "x-mcp-header").
    """

    description: str | None = None
    ge: float | None = attrs.field(default=None, kw_only=True)
    gt: float | None = attrs.field(default=None, kw_only=True)
    le: float | None = attrs.field(default=None, kw_only=True)
    lt: float | None = attrs.field(default=None, kw_only=True)
    multiple_of: float | None = attrs.field(default=None, kw_only=True)
    min_length: int | None = attrs.field(default=None, kw_only=True)
    max_length: int | None = attrs.field(default=None, kw_only=True)
    pattern: str | None = attrs.field(default=None, kw_only=True)
    examples: Sequence[Any] | None = attrs.field(default=None, kw_only=True)
    title: str | None = attrs.field(default=None, kw_only=True)
    header: str | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        for name in ("description", "pattern", "title", "header"):
            if not isinstance(getattr(self, name), str | None):
                raise TypeError(f"{name} of an Arg is a text, not {getattr(self, name)!r:.60}")
        if not isinstance(self.examples, list | tuple | None):
            raise TypeError(f"examples of an Arg are a list, not {self.examples!r:.60}")


_NUMBERS: Final = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
# Attribute of an `Arg` -> the JSON types that it bounds, each with its keyword.
_BOUNDS: Final[dict[str, dict[str, str]]] = {
    **{name: dict.fromkeys(("integer", "number"), keyword) for name, keyword in _NUMBERS.items()},
    "min_length": {"array": "minItems", "object": "minProperties", "string": "minLength"},
    "max_length": {"array": "maxItems", "object": "maxProperties", "string": "maxLength"},
    "pattern": {"string": "pattern"},
}
_KNOWN: Final[dict[str, Any]] = {
    **dict.fromkeys(_BOUNDS, object),
    **dict.fromkeys(("description", "documentation", "title"), str),
    "examples": list | tuple,
}


def readable(extras: Sequence[Any]) -> tuple[list[Arg], list[Any]]:
    """Split the extras of an `Annotated` into (what trimcp reads, what only Pydantic reads).

    Groups are replaced by their members, and a Pydantic `Field` by its texts and bounds. What neither can read is left
    out (PEP 593). Raises UnreadableHint for an extra that is read in part: the rest would never be checked.
    """
    ours: list[Arg] = []
    theirs: list[Any] = []
    for extra in _single(extras):
        arg = _as_arg(extra)
        # Only Pydantic checks bounds that are not numbers, such as dates.
        if belongs_to_pydantic(extra) and (arg is None or not all(_is_number(getattr(arg, name)) for name in _NUMBERS)):
            theirs.append(extra)
        elif arg is not None:
            ours.append(arg)
        elif not isinstance(extra, type) and any(getattr(extra, name, None) is not None for name in _KNOWN):
            from trimcp.schema.problems import shorten  # only needed for errors

            shown = shorten(repr(extra), 100)
            raise UnreadableHint(
                f"{shown} in its Annotated can be read in part only; use trimcp.Arg, annotated_types,"
                " Pydantic's Field, typing.Doc or a string"
            )
    return ours, theirs


def _single(extras: Sequence[Any]) -> Iterator[Any]:
    for extra in extras:
        if extra is None:
            continue
        if is_field_info(extra):
            # `pydantic_types.resolve_field` reads its default and aliases.
            if extra.discriminator is not None or extra.json_schema_extra is not None:
                yield extra
            else:
                yield Arg(extra.description, title=extra.title, examples=extra.examples)
                yield from _single(extra.metadata)
        elif getattr(extra, "__is_annotated_types_grouped_metadata__", False) and not isinstance(extra, type):
            yield from _single(list(extra))
        else:
            yield extra


def _as_arg(extra: Any) -> Arg | None:
    """Return what an extra says, or None if that is nothing known here, or not all of it is."""
    if isinstance(extra, Arg):
        return extra
    if isinstance(extra, str | re.Pattern):
        return Arg(extra) if isinstance(extra, str) else Arg(pattern=extra.pattern)
    values = {name: getattr(extra, name, None) for name in _KNOWN}
    said = {name: each for name, each in values.items() if each is not None and isinstance(each, _KNOWN[name])}
    text = said.pop("documentation", None)
    whole = text or (_names_in(extra) <= _KNOWN.keys() and any(hasattr(extra, name) for name in _KNOWN))
    return None if isinstance(extra, type) or not whole else Arg(**{"description": text, **said})


def _names_in(extra: Any) -> set[str]:
    """Return the names of the set attributes of another package's object."""
    slots = [name for cls in type(extra).__mro__ for name in vars(cls).get("__slots__", ())]
    names = {name for name in (*slots, *getattr(extra, "__dict__", ())) if not name.startswith("_")}
    return {name for name in names if getattr(extra, name, None) is not None}


def apply_metadata(schema: dict[str, Any], said: Sequence[Arg]) -> None:
    """Add descriptions and bounds to `schema`.

    Raises TypeError for a bound that fits no alternative of the schema, such as `ge=` on a string.
    """
    for arg in said:
        for name, keywords in _BOUNDS.items():
            bound = getattr(arg, name)
            if bound is None or (name == "min_length" and bound == 0):
                continue
            if name != "pattern" and not _is_number(bound):
                raise TypeError(f"the bound {name}={bound!r} is no number")
            branches = [each for each in (schema, *schema.get("anyOf", ())) if each.get("type") in keywords]
            if not branches:
                raise TypeError(f"{name}= does not apply to this type; it needs {' or '.join(keywords)}")
            for branch in branches:
                if bound not in (math.inf, -math.inf):
                    branch[keywords[branch["type"]]] = bound.pattern if isinstance(bound, re.Pattern) else bound
        words = {"description": arg.description, "title": arg.title, "examples": arg.examples and list(arg.examples)}
        schema.update({name: text for name, text in words.items() if text is not None})
        if arg.header is not None:
            _apply_header(schema, arg.header)


def _apply_header(schema: dict[str, Any], header: str) -> None:
    if not is_token(header):
        raise TypeError(f"{header!r} is no name of an HTTP header (RFC 9110, 5.1)")
    if schema.get("type") not in ("boolean", "integer", "string"):
        raise TypeError("only a string, integer or boolean can be mirrored in a header")
    schema["x-mcp-header"] = header


def _is_number(bound: Any) -> bool:
    """Return whether a bound is a number, or none is given."""
    return bound is None or (isinstance(bound, int | float) and not isinstance(bound, bool))
