"""Draws the state diagrams of the documentation from the tables of `trimcp.protocol.states`.

`python docs/diagrams.py` writes docs/design/states.md; a test fails while the page is not what the tables say.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from trimcp.protocol.states import HANDSHAKE, INBOUND

PAGE: Final = Path(__file__).parent / "design" / "states.md"

_HEAD = """\
# State diagrams

The protocol has two small machines. Each is a table in `trimcp/protocol/states.py`, where a lookup that misses *is*
the protocol error, and these pictures are drawn from the tables by `docs/diagrams.py`.
"""

_MACHINES: Final[tuple[tuple[str, str, Mapping[Any, Mapping[Any, Any]]], ...]] = (
    (
        "The handshake of the legacy era",
        "One per connection. A connection that speaks the modern era alone stays *new*: there each request carries\n"
        "everything itself.",
        HANDSHAKE,
    ),
    (
        "A request of the peer's",
        "One per id under way here. Exactly one reply leaves (*answer*), or none once the peer cancelled it (*drop*).",
        INBOUND,
    ),
)


def draw(table: Mapping[Any, Mapping[Any, Any]]) -> str:
    """Return a table as a Mermaid state diagram; the first state is where it begins."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table)).name}"]
    lines += [f"    {state.name}: {_words(state)}" for state in table]
    for state, steps in table.items():
        lines += [f"    {state.name} --> {target.name}: {_words(step)}" for step, target in steps.items()]
        if not set(steps.values()) - {state}:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines)


def _words(member: Enum) -> str:
    return member.name.lower().replace("_", " ")


def page() -> str:
    """Return the whole page."""
    parts = [_HEAD]
    parts += [f"## {title}\n\n{text}\n\n```mermaid\n{draw(table)}\n```\n" for title, text, table in _MACHINES]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
