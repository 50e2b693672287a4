"""Checks of the numbers in settings, and of names of headers: what is wrong is said where it is written.

A record of settings is `@attrs.frozen(field_transformer=checked(...))`; what is no record uses `check_number`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, TypeAlias

import attrs

TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
"""A pattern of what HTTP calls a token, such as the name of a header (RFC 9110, section 5.6.2)."""

_NUMBERS: Final = {"int": True, "float": False, "int | None": True, "float | None": False}
"""Annotations that are checked, and whether the number has to be whole."""

Transformer: TypeAlias = Callable[[type, list["attrs.Attribute[Any]"]], list["attrs.Attribute[Any]"]]


def is_token(text: str) -> bool:
    """Return whether this can be the name of an HTTP header."""
    return re.fullmatch(TOKEN, text) is not None


def check_number(name: str, value: object, *, whole: bool = False, zero: bool = False, optional: bool = False) -> None:
    """Check one number of a setting; infinity passes for what need not be whole.

    Args:
        name: what it is called in errors.
        value: what was given.
        whole: it counts something.
        zero: 0 makes sense.
        optional: None makes sense.

    Raises:
        TypeError: it is no number of that kind; True and False are none.
        ValueError: it is not a number (NaN), negative, or 0 where that makes no sense.
    """
    if value is None and optional:
        return
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if number and (value >= 0 if zero else value > 0):  # type: ignore[operator]  # it is a number; NaN is neither
        return
    wanted = "an integer" if whole else "a number"
    wanted += " of at least 0" if zero else " of at least 1" if whole else " greater than 0"
    text = f"{name} is {wanted}{' or None' if optional else ''}, not {value!r:.60}"
    raise ValueError(text) if number else TypeError(text)


def checked(*, zero: Collection[str] = (), unchecked: Collection[str] = ()) -> Transformer:
    """Return what lets attrs check every number of a class, and that what is True or False is no other value.

    Members annotated `int` are at least 1, those annotated `float` greater than 0; each may be `| None`. One with a
    validator of its own is left to that.

    Args:
        zero: names of those that may be 0.
        unchecked: names of those that may be anything.
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
    annotation: Any = attribute.type  # a string where the module defers its annotations, as ours do
    kind = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if kind == "bool":
        return _check_truth
    whole = _NUMBERS.get(kind)
    return None if whole is None else partial(_check, whole, zero, kind.endswith("None"))


def _check(whole: bool, zero: bool, optional: bool, instance: object, attribute: Any, value: object) -> None:
    name = f"{type(instance).__name__}.{attribute.name}"
    check_number(name, value, whole=whole, zero=zero, optional=optional)


def _check_truth(instance: object, attribute: Any, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{type(instance).__name__}.{attribute.name} is True or False, not {value!r:.60}")
