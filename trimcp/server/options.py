"""Checks what is said beside a function when it is registered: a slip of the pen should not pass in silence.

Type checkers see it too; this is for those who do not run one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["check_options"]


def check_options(options: Mapping[str, Any], known: type) -> None:
    """Check that all options are among the keys of a TypedDict.

    Raises:
        TypeError: one is not; the text names what it may have meant.
    """
    names = list(known.__annotations__)
    for name in options:
        if name not in names:
            from difflib import get_close_matches  # only where something is wrong

            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise TypeError(f"there is no option {name!r}; {hint}")
