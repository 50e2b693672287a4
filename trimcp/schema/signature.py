"""A function's parameters and result: their JSON Schemas, and the conversion between JSON and Python.

It does not depend on tools, prompts and resources.
"""

from __future__ import annotations

import collections.abc as abc
import enum
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_args, get_origin

import attrs

from trimcp.schema.convert import Convert, to_json
from trimcp.schema.converters import converter_for, number_of
from trimcp.schema.docstrings import parse
from trimcp.schema.hints import (
    ABSENT_DEFAULT,
    Field,
    UnreadableHint,
    field_infos,
    hashes,
    hints_of,
    is_model,
    is_record,
    is_union,
    split,
)
from trimcp.schema.json_schema import SchemaBuilder
from trimcp.schema.resolved import CONTAINERS, ResolvedType
from trimcp.support.slotted import slotted

Injected = Callable[[inspect.Parameter, Any], bool]


@slotted(frozen=True)
class Signature:
    """A function's arguments and result, as JSON."""

    name: str  # the function's name
    description: str  # its docstring without the sections on parameters and results; empty if it has none
    input_schema: dict[str, Any]  # an object schema of its arguments. Do not modify it.
    parameters: Sequence[str]  # the names in JSON of the parameters in `input_schema`
    injected: tuple[tuple[inspect.Parameter, Any], ...]  # the other parameters, with their resolved types
    return_type: Any  # the resolved return annotation; `inspect.Signature.empty` if it has none
    _convert: Convert | None = attrs.field(alias="convert")
    _numbers: tuple[tuple[str, type, type], ...] = attrs.field(alias="numbers")
    _special: tuple[Field, ...] = attrs.field(alias="special")  # the parameters with a Pydantic `Field`
    converts: bool  # whether `bind` may return anything but what it is given

    def bind(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert validated JSON arguments to keyword arguments; return the same mapping if nothing is converted.

        Raises ConversionError, which names all arguments that fit the schema but cannot be converted.
        """
        for name, other, number in self._numbers:
            if type(arguments.get(name)) is other:  # in JSON Schema 3.0 is an integer and 3 a number
                arguments = {**arguments, name: number(arguments[name])}
        if self._convert is not None:
            arguments = self._convert(arguments)
        if self._special:
            arguments = dict(arguments)
            for field in self._special:
                keyword = field.attribute or field.name
                if field.name in arguments:
                    arguments[keyword] = arguments.pop(field.name)
                elif field.fill is not None:
                    arguments[keyword] = field.fill()
        return arguments


def describe(
    function: Callable[..., Any],
    *,
    injected: Injected = lambda parameter, hint: False,
    loose: bool = False,
) -> Signature:
    """Inspect a function; also a method, a partial or an object with `__call__`.

    `injected` is called with a parameter and its resolved type (with the extras of `Annotated`), and returns whether
    the caller fills it: such parameters are not in the schema. `loose`: the author wrote the schema, so arguments of
    types without a JSON form are allowed, and not converted. Raises TypeError: a parameter is positional-only or
    `*args`, or its type has no JSON form or cannot be resolved. The text names function and parameter, and says what to
    do.
    """
    plain = function.func if isinstance(function, functools.partial) else function
    name = getattr(plain, "__name__", None) or type(plain).__name__
    hints = _hints(function, name)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        raise TypeError(f"{name}() does not tell its parameters: wrap it in a function with annotations") from None
    found = inspect.getdoc(target_of(function))
    # Python has words for each `__call__` without a docstring.
    text = parse(None if found == type.__call__.__doc__ else found, parameters)
    reader = _SignatureReader(name, text.parameters, loose)
    others: list[tuple[inspect.Parameter, Any]] = []
    for parameter in parameters.values():
        hint = hints.get(parameter.name, Any)
        if injected(parameter, hint):
            others.append((parameter, hint))
        else:
            reader.read(parameter, hint)
    convert = converter_for(reader.converted)
    special = tuple(field for field, _ in reader.converted.fields if field.attribute)
    return Signature(
        name=name,
        description=text.description,
        input_schema=reader.schema(),
        parameters=tuple(reader.properties),
        injected=tuple(others),
        return_type=function if isinstance(function, type) else hints.get("return", inspect.Signature.empty),
        convert=convert,
        numbers=tuple(reader.numbers),
        special=special,
        converts=convert is not None or bool(reader.numbers or special),
    )


class _SignatureReader:
    def __init__(self, function: str, descriptions: Mapping[str, str], loose: bool) -> None:
        self.converted: ResolvedType = ResolvedType("record", dict)  # the arguments, as far as they are converted
        self.numbers: list[tuple[str, type, type]] = []
        self.properties: dict[str, Any] = {}
        self._function, self._descriptions, self._loose = function, descriptions, loose
        self._builder = SchemaBuilder()
        self._additional: Any = False
        self._headers: set[str] = set()

    def schema(self) -> dict[str, Any]:
        root: dict[str, Any] = {"type": "object", "properties": self.properties}
        if required := [field.name for field, _ in self.converted.fields if field.required]:
            root["required"] = required
        root["additionalProperties"] = self._additional
        try:
            return self._builder.finish(root)
        except TypeError as error:
            raise TypeError(f"{self._function}(): {error}") from None

    def read(self, parameter: inspect.Parameter, hint: Any) -> None:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise self._refuse(parameter, "is positional-only, and arguments come by name; remove the `/`")
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise self._refuse(parameter, "takes any number of arguments without names; use a list parameter instead")
        named = parameter.kind is not parameter.VAR_KEYWORD
        default, description = parameter.default, self._descriptions.get(parameter.name)
        field = Field(parameter.name, hint, default is ABSENT_DEFAULT, default, description)
        try:
            if field_infos(field):
                from trimcp.schema.pydantic_types import resolve_field

                field = resolve_field(field)
            kind = self._builder.resolve(field.hint)
            schema = self._builder.property(field, kind) if named else self._builder.build(kind)
            number = number_of(kind)
        except TypeError as error:
            if not self._loose:
                raise self._refuse(parameter, f"cannot be filled from JSON: {error}") from None
            kind, schema, number = ResolvedType("any", Any), {}, None
        if not named:
            self._additional = schema or True
            self.converted.members.append(kind)
            return
        if number is not None:
            self.numbers.append((field.name, float if number is int else int, number))
            kind = ResolvedType("any", Any)
        self.converted.fields.append((field, kind))
        self.properties[field.name] = schema
        if (header := schema.get("x-mcp-header")) is not None:
            if header.lower() in self._headers:
                raise self._refuse(parameter, f"names the header {header!r}, as another parameter does")
            self._headers.add(header.lower())

    def _refuse(self, parameter: inspect.Parameter, reason: str) -> TypeError:
        return TypeError(f"{self._function}(): the parameter {parameter.name!r} {reason}")


def target_of(function: Callable[..., Any]) -> Any:
    """Return the plain function behind wrappers, partials, methods and callable objects; others as they are."""
    found: Any = inspect.unwrap(function)
    while isinstance(found, functools.partial):
        found = inspect.unwrap(found.func)
    if inspect.ismethod(found):
        found = found.__func__
    if not inspect.isfunction(found) and not inspect.isclass(found) and not inspect.isbuiltin(found):
        found = inspect.unwrap(type(found).__call__)
    return found


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the resolved annotations; names are also looked up in the closure, as far as its cells are set."""
    target = target_of(function)
    names = {}
    if inspect.isfunction(target):
        for free, cell in zip(target.__code__.co_freevars, target.__closure__ or (), strict=True):
            try:
                names[free] = cell.cell_contents
            except ValueError:  # the cell is empty: decorators run before the function's name is bound
                continue
    return hints_of(target, f"{name}(): an annotation names", names)


# --- results ---


@slotted(frozen=True)
class ResultShape:
    """How a function's results become structured content.

    `schema` is an object schema, valid as `outputSchema` in every revision. Values that are not objects are `wrapped`:
    sent as `{"result": value}`. An `untyped` list says nothing of its members, which may be content blocks: then it is
    sent as these, and the schema is not promised. `by_pydantic` is their type where Pydantic
    makes JSON of them.
    """

    schema: dict[str, Any]
    wrapped: bool = False
    untyped: bool = False
    by_pydantic: Any = None

    def dump(self, value: Any) -> Any:
        """Return a result as JSON values, not validated. Raises ConversionError for a value without a JSON form."""
        plain = to_json(value, self.by_pydantic)
        return {"result": plain} if self.wrapped else plain


_UNSTRUCTURED: Final = frozenset(
    {inspect.Signature.empty, Any, object, None, type(None), str, bytes, bytearray, memoryview}
    | {typing.LiteralString, typing.NoReturn, typing.Never}
)
_AWAITED: Final = (abc.Awaitable, abc.Coroutine)  # what a sync function may return: its value is awaited


def describe_result(annotation: Any, *, is_content: Callable[[Any], bool] = lambda hint: False) -> ResultShape | None:
    """Return how results of a return type are structured, or None if they are sent as content only.

    That is without an annotation, and for Any, None, text, bytes, and classes for which `is_content` is true, alone, in
    unions or in lists. A class without a JSON form that says how it is shown (`__str__`) is sent as that text; any
    other raises TypeError.
    """
    if get_origin(annotation) in _AWAITED:
        annotation = get_args(annotation)[-1]
    if _is_unstructured(annotation, is_content):
        return None
    builder = SchemaBuilder(output=True)
    by_pydantic = None
    try:
        kind = builder.resolve(annotation)
        if builder.types.foreign:
            kind, by_pydantic = ResolvedType("model", annotation), annotation
        schema = builder.build(kind)
    except TypeError as error:
        if isinstance(error, UnreadableHint) or not shows_itself(split(annotation)[0]):
            raise
        return None
    if builder.is_object(schema):
        finished = builder.finish(schema)
        return ResultShape(finished if "type" in finished else {"type": "object", **finished}, by_pydantic=by_pydantic)
    root = {"type": "object", "properties": {"result": schema}, "required": ["result"]}
    untyped = any(map(_is_untyped, kind.alternatives()))
    return ResultShape(builder.finish(root), wrapped=True, untyped=untyped, by_pydantic=by_pydantic)


def shows_itself(cls: Any) -> bool:
    """Return whether a class of no JSON form, such as `yarl.URL`, says how its objects are shown as text."""
    if not isinstance(cls, type) or cls.__module__ in ("builtins", "typing") or is_record(cls) or is_model(cls):
        return False
    own = any(getattr(cls, name) is not getattr(object, name) for name in ("__str__", "__repr__"))
    return own and not issubclass(cls, (abc.Collection, BaseException, enum.Enum, float))


def _is_untyped(kind: ResolvedType) -> bool:
    members = [each.kind for member in kind.members for each in member.alternatives()]
    return kind.kind in ("list", "tuple") and (not members or "any" in members)


def _is_unstructured(annotation: Any, is_content: Callable[[Any], bool]) -> bool:
    bare, _ = split(annotation)
    if (hashes(bare) and bare in _UNSTRUCTURED) or _holds_content(bare, is_content):
        return True
    origin, arguments = get_origin(bare), get_args(bare)
    if is_union(bare):
        return all(_is_unstructured(member, is_content) for member in arguments if member is not type(None))
    kind, _ = CONTAINERS.get(origin, ("", None))
    return kind in ("list", "tuple") and any(_holds_content(each, is_content) for each in arguments)


def _holds_content(hint: Any, is_content: Callable[[Any], bool]) -> bool:
    bare, _ = split(hint)
    if is_union(bare):
        return any(_holds_content(member, is_content) for member in get_args(bare))
    return is_content(bare)
