"""Taking type hints apart: what is wrapped around a type, and which fields a record class has. Knows only Python."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

import attrs

from trimcp.schema.docstrings import parse
from trimcp.values import valued

__all__ = [
    "ABSENT_DEFAULT",
    "Field",
    "UnreadableHint",
    "alias_value",
    "belongs_to_pydantic",
    "fields_of",
    "is_field_info",
    "is_model",
    "is_record",
    "split",
    "substitute",
]

_QUALIFIERS: Final = tuple(
    getattr(module, name)
    for name in ("Required", "NotRequired", "ReadOnly", "Final")
    for module in (typing,)
    if hasattr(module, name)
)

ABSENT_DEFAULT: Final[Any] = inspect.Parameter.empty
"""Says that a parameter or field has no default that JSON could carry."""


class UnreadableHint(TypeError):
    """Nobody reads an extra of an `Annotated`, so what it says would never be checked. The text names it."""


@attrs.frozen
@valued
class Field:
    """One field of a record class, under its name in JSON.

    Attributes:
        hint: its type, with the extras of `Annotated`.
        default: the value it has if none is given, or ABSENT_DEFAULT.
        description: from the class's docstring or the field's metadata.
    """

    name: str
    hint: Any
    required: bool
    default: Any = ABSENT_DEFAULT
    description: str | None = None


def split(hint: Any) -> tuple[Any, list[Any]]:
    """(bare type, extras): without Annotated, NewType, aliases of PEP 695 and qualifiers such as Required."""
    extras: list[Any] = []
    while True:
        origin = get_origin(hint)
        if origin is typing.Annotated:
            hint, *inner = get_args(hint)
            extras = [*inner, *extras]
        elif origin in _QUALIFIERS or (origin is not None and getattr(origin, "_name", None) == "ReadOnly"):
            (hint,) = get_args(hint)
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":
            hint = alias_value(hint)
        elif isinstance(hint, TypeVar):
            hint = hint.__bound__ or (Union[hint.__constraints__] if hint.__constraints__ else Any)  # noqa: UP007 - a tuple
        else:
            return hint, extras


def alias_value(alias: Any) -> Any:
    """What a type alias stands for, with names in quotes looked up in its module."""
    holder = types.SimpleNamespace(__annotations__={"value": alias.__value__})
    namespace = vars(sys.modules.get(alias.__module__, typing))
    return typing.get_type_hints(holder, globalns=namespace, include_extras=True)["value"]


def is_record(hint: Any) -> bool:
    """Whether a bare type is an attrs class, dataclass, TypedDict or NamedTuple, parametrized or not."""
    cls = get_origin(hint) or hint
    return (
        isinstance(cls, type)
        and not is_model(cls)
        and (
            attrs.has(cls)
            or dataclasses.is_dataclass(cls)
            or typing.is_typeddict(cls)
            or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
        )
    )


# Pydantic is no dependency: its classes are recognized if the program has loaded it, and handled in `pydantic_types`.


def is_model(hint: Any) -> bool:
    """Whether a bare type is Pydantic's: a model, one of its dataclasses, or a type with rules of its own."""
    cls = get_origin(hint) or hint
    return (
        "pydantic" in sys.modules
        and isinstance(cls, type)
        and (hasattr(cls, "__get_pydantic_core_schema__") or "__is_pydantic_dataclass__" in vars(cls))
        and not attrs.has(cls)
    )


def is_field_info(value: Any) -> bool:
    """Whether a value is what Pydantic's `Field(...)` returns."""
    fields = sys.modules.get("pydantic.fields")
    return fields is not None and isinstance(value, fields.FieldInfo)


def belongs_to_pydantic(extra: Any) -> bool:
    """Whether an extra of an `Annotated` is one that Pydantic reads."""
    home = getattr(extra if isinstance(extra, type) else type(extra), "__module__", "").partition(".")[0]
    hooks = ("__get_pydantic_core_schema__", "__get_pydantic_json_schema__")
    return "pydantic" in sys.modules and (
        home in ("pydantic", "annotated_types") or any(hasattr(extra, hook) for hook in hooks)
    )


def fields_of(hint: Any) -> list[Field]:
    """Return the fields a record takes from JSON. Raises TypeError for an annotation that cannot be resolved."""
    cls = get_origin(hint) or hint
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise TypeError(f"the annotations of {cls.__name__} name {error.name!r}, which its module lacks") from None
    bound = dict(zip(getattr(cls, "__parameters__", ()), get_args(hint), strict=False))
    described = parse(cls.__doc__).parameters
    found = []
    for field in _raw_fields(cls, hints):
        field_hint = substitute(hints.get(field.name, field.hint), bound, cls)
        description = field.description or described.get(field.name)
        found.append(attrs.evolve(field, hint=field_hint, description=description))
    return found


def _raw_fields(cls: Any, hints: Mapping[str, Any]) -> list[Field]:
    if attrs.has(cls):
        return [
            Field(
                a.alias or a.name,
                hints.get(a.name, Any),
                a.default is attrs.NOTHING,
                _plain_default(a.default, isinstance(a.default, attrs.Factory)),  # type: ignore[arg-type]  # mypy takes no class as a factory
                a.metadata.get("description"),
            )
            for a in attrs.fields(cls)
            if a.init
        ]
    if dataclasses.is_dataclass(cls):
        missing = dataclasses.MISSING
        return [
            Field(
                f.name,
                hints.get(f.name, Any),
                f.default is missing and f.default_factory is missing,
                _plain_default(f.default, f.default is missing),
                f.metadata.get("description"),
            )
            for f in dataclasses.fields(cls)
            if f.init
        ]
    if typing.is_typeddict(cls):
        required = cls.__required_keys__
        return [Field(name, hint, _is_required(hint, name in required)) for name, hint in hints.items()]
    defaults = cls._field_defaults
    return [Field(n, hints.get(n, Any), n not in defaults, defaults.get(n, ABSENT_DEFAULT)) for n in cls._fields]


def _is_required(hint: Any, otherwise: bool) -> bool:
    """As `__required_keys__`, which misses the qualifiers of annotations that are still text."""
    while (origin := get_origin(hint)) in _QUALIFIERS or origin is typing.Annotated:
        if origin is typing.Required:
            return True
        if origin is typing.NotRequired:
            return False
        hint = get_args(hint)[0]
    return otherwise


def _plain_default(default: Any, hidden: bool) -> Any:
    return ABSENT_DEFAULT if hidden or default is attrs.NOTHING else default


def substitute(hint: Any, bound: Mapping[Any, Any], own: Any) -> Any:
    """`hint` with type variables replaced by what they are bound to, and Self by `own`."""
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
