"""The frontmatter of a SKILL.md."""

from __future__ import annotations

import re
from typing import Any, Final

from trimcp.extensions.yaml_values import read_yaml

_MOST_BYTES: Final = 16 * 1024
_MOST_NODES: Final = 1_000
_DEEPEST: Final = 16
_FRONTMATTER: Final = re.compile(r"\A---[ \t]*\r?\n(?P<yaml>.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)


def read_frontmatter(content: bytes) -> dict[str, Any]:
    """Return the frontmatter with which a SKILL.md begins.

    Raises ValueError: there is none, it is no mapping of JSON values, or it has an alias, a tag or too much; the text
    tells which. LocalError: the library is not installed.
    """
    try:
        text = content[: _MOST_BYTES + 16].decode("utf-8", "ignore" if len(content) > _MOST_BYTES else "strict")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    found = _FRONTMATTER.match(text)
    if found is None:
        raise ValueError(f"it does not begin with frontmatter between lines of ---, at most {_MOST_BYTES} bytes")
    bounds = {"most_nodes": _MOST_NODES, "deepest": _DEEPEST}
    value = read_yaml(found["yaml"], "its frontmatter", kind="skills", first_line=2, **bounds)
    if not isinstance(value, dict):
        raise ValueError("its frontmatter is no mapping")
    return value
