"""Checks of numbers in settings, and of header names. An error is raised where the wrong value is given.

A settings class is declared with `@attrs.frozen(field_transformer=checked(...))`; other code calls `check_number`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import attrs

TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
"""A regular expression for an HTTP token, such as a header name (RFC 9110, section 5.6.2)."""

_NUMBERS: Final = {"int": True, "float": False, "int | None": True, "float | None": False}
"""Annotations whose values are checked, and whether the value must be an integer."""

_BITS: Final = 63
"""JSON, clocks and the system take no larger integer."""

Transformer: TypeAlias = Callable[[type, list["attrs.Attribute[Any]"]], list["attrs.Attribute[Any]"]]


def is_token(text: str) -> bool:
    """Return whether `text` is a valid HTTP header name."""
    return re.fullmatch(TOKEN, text) is not None


def check_number(name: str, value: Any, *, whole: bool = False, zero: bool = False, optional: bool = False) -> Any:
    """Return one number of a setting: an integer if it has to be `whole`, else infinity is accepted as well.

    Raises TypeError: the value is not a number of that kind (a bool is not a number). Raises ValueError: it is NaN or
    negative, or it is 0 and `zero` is not set.
    """
    if value is None and optional:
        return None
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise ValueError(f"{name} is a number of at most {_BITS} bits, not {value!r:.60}")
    if number and value is not None and (value >= 0 if zero else value > 0):  # NaN is neither
        return value
    wanted = "an integer" if whole else "a number"
    wanted += " of at least 0" if zero else " of at least 1" if whole else " greater than 0"
    text = f"{name} is {wanted}{' or None' if optional else ''}, not {value!r:.60}"
    raise ValueError(text) if number else TypeError(text)


def check_truth(name: str, value: Any, *, optional: bool = False) -> Any:
    """Return a setting. Raises TypeError unless it is True or False, or None if it is `optional`."""
    if not isinstance(value, bool) and not (optional and value is None):
        raise TypeError(f"{name} is True or False, not {value!r:.60}")
    return value


def check_members(name: str, value: object, kind: type | tuple[type, ...], kinds: str) -> tuple[Any, ...]:
    """Return what a setting lists. Raises TypeError unless it is a list of such values; `kinds` says of which."""
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise TypeError(f"{name} is a list of {kinds}, not {value!r:.60}")
    members = tuple(value)
    for member in members:
        if not isinstance(member, kind) or isinstance(member, bool):
            raise TypeError(f"{name} is a list of {kinds}, without {member!r:.60}")
    return members


def check_instance(name: str, value: object, kind: type, written: str) -> None:
    """Raise TypeError unless a setting is None or an object of this class, which is `written` so."""
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} is a {written}(...), not {value!r:.60}")


def check_texts(name: str, value: object, example: str) -> None:
    """Raise TypeError unless a setting is a dict of texts. It is not quoted, as it may be secret."""
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for pair in value.items() for each in pair):
        raise TypeError(f"{name} are a dict of texts, {example}")


def check_callable(name: str, value: object) -> None:
    """Raise TypeError unless a setting is a function."""
    if not callable(value):
        raise TypeError(f"{name} is a function, not {value!r:.60}")


def checked(*, zero: Collection[str] = (), unchecked: Collection[str] = ()) -> Transformer:
    """Return an attrs field transformer that checks every number and every bool of a class.

    Fields annotated `int` must be at least 1, and fields annotated `float` greater than 0; each may be `| None`. A
    field that has a validator of its own is not checked again. `zero` and `unchecked` are names of fields.
    """

    def transform(cls: type, attributes: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
        unknown = {*zero, *unchecked} - {attribute.name for attribute in attributes}
        if unknown:
            raise TypeError(f"{cls.__name__} has no {', '.join(sorted(unknown))}")
        return [
            attribute
            if attribute.validator is not None or not attribute.init or attribute.name in unchecked
            else attribute.evolve(validator=_validator(attribute, attribute.name in zero))
            for attribute in attributes
        ]

    return transform


def _validator(attribute: attrs.Attribute[Any], zero: bool) -> Any:
    annotation: Any = attribute.type  # a string where the module defers its annotations, as this package does
    kind = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if kind == "bool":
        return _check_truth
    whole = _NUMBERS.get(kind)
    return None if whole is None else partial(_check, whole, zero, kind.endswith("None"))


def _check(whole: bool, zero: bool, optional: bool, instance: object, attribute: Any, value: object) -> None:
    name = f"{type(instance).__name__}.{attribute.name}"
    check_number(name, value, whole=whole, zero=zero, optional=optional)


def _check_truth(instance: object, attribute: Any, value: object) -> None:
    check_truth(f"{type(instance).__name__}.{attribute.name}", value)
