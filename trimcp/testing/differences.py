"""Where two JSON values differ, told line by line with the path of each place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import orjson

__all__ = ["Alike", "differences", "short"]

Alike: TypeAlias = Callable[[Any, Any, str], bool]
"""Says of an expected and an actual value at a path that they count as the same."""

_ANY: Final = "..."


def differences(expected: Any, actual: Any, path: str = "$", alike: Alike | None = None) -> Iterator[str]:
    """Yield a line for every place where two JSON values differ, with its path.

    Args:
        expected: where it is the string "...", anything will do.
        actual: what is compared to it.
        path: what the whole is called.
        alike: decides for places of its choice that they are the same.
    """
    if expected == _ANY or (alike is not None and alike(expected, actual, path)):
        return
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in sorted(expected.keys() | actual.keys()):
            if key not in actual:
                yield f"{path}.{key} is missing"
            elif key not in expected:
                yield f"{path}.{key} should not be there: {short(actual[key])}"
            else:
                yield from differences(expected[key], actual[key], f"{path}.{key}", alike)
    elif isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            yield f"{path} has {len(actual)} members, expected {len(expected)}"
        for index, (left, right) in enumerate(zip(expected, actual, strict=False)):
            yield from differences(left, right, f"{path}[{index}]", alike)
    elif type(expected) is not type(actual) or expected != actual:
        yield f"{path} is {short(actual)}, expected {short(expected)}"


def short(value: Any, longest: int = 120) -> str:
    """Return a JSON value as text of so many characters at the most."""
    text = orjson.dumps(value).decode()
    return text if len(text) <= longest else text[: longest - 3] + "..."
