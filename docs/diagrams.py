"""Draws what the documentation shows of the code: state diagrams from the tables, and the floors from the imports.

`python docs/diagrams.py` writes docs/design/states.md and docs/design/floors.svg; a test fails while one of them is not
what the code says.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

from trimcp.protocol.states import HANDSHAKE, INBOUND

PAGE: Final = Path(__file__).parent / "design" / "states.md"
FLOORS: Final = Path(__file__).parent / "design" / "floors.svg"
PACKAGE: Final = Path(__file__).parents[1] / "trimcp"

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


# The floors

_WIDTH: Final = 860
_FLOOR: Final = 74
_BOX: Final = 34
_CHARACTER: Final = 8.4
_ROOMS_THAT_ARE_MODULES: Final = {"channel", "net", "run"}
_GROUND: Final = "used everywhere"
_ON_THE_GROUND: Final = {"budget", "support"}
_STYLE: Final = (
    "text{font:14px system-ui,sans-serif;fill:#1f2430;text-anchor:middle}"
    "rect{fill:#eef0fb;stroke:#3949ab;rx:6px}path{fill:none;stroke:#8b93b8;stroke-width:1.2}.paper{fill:#fff;stroke:none}"
)


def rooms() -> dict[str, set[str]]:
    """Return each room of the package with those that it imports, wherever the import stands.

    What lies loose in the package and is imported by rooms alone is one: the ground that all others stand on.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        importer = _room(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        if importer == "__init__":
            continue
        known = found.setdefault(importer, set())
        known.update(map(_room, _imported(ast.parse(path.read_text("utf-8")))))
    return {room: others - {room} for room, others in found.items()}


def _room(name: str) -> str:
    folder = (PACKAGE / name).is_dir() and name not in _ON_THE_GROUND
    return name if folder or name in _ROOMS_THAT_ARE_MODULES or name == "__init__" else _GROUND


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (node.module.split(".")[1:2] or [alias.name for alias in node.names]) * (
                node.module.split(".")[0] == "trimcp"
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("trimcp."))


def _height(room: str, graph: Mapping[str, set[str]]) -> int:
    return 1 + max((_height(other, graph) for other in graph[room]), default=-1)


def _direct(graph: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """The imports that do not follow from others: who imports a room stands on all that it stands on."""

    def below(room: str) -> set[str]:
        return graph[room].union(*map(below, graph[room]))

    for room, others in sorted(graph.items()):
        for other in sorted(others):
            if not any(other in below(between) for between in others - {other}):
                yield room, other


def floors() -> str:
    """Return the rooms on their floors as a picture, each with lines down to those it stands on."""
    graph = rooms()
    storeys: dict[int, list[str]] = {}
    for room in sorted(graph):
        storeys.setdefault(_height(room, graph), []).append(room)
    top = max(storeys)
    places: dict[str, tuple[float, float]] = {}
    for height, names in sorted(storeys.items()):
        # A room stands where most of what it imports stands, so that few lines cross.
        names.sort(key=lambda name: (_middle(places, graph[name]), name))
        for place, name in enumerate(names, 1):
            places[name] = (_WIDTH * place / (len(names) + 1), 24 + (top - height) * _FLOOR)
    lines = [_line(places[room], places[other]) for room, other in _direct(graph)]
    boxes = [_box(name, *places[name]) for name in sorted(places)]
    tall = 24 + top * _FLOOR + _BOX + 30
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {tall}" role="img">'
    title = "<title>The rooms of trimcp: each imports only rooms below it</title>"
    paper = f'<rect class="paper" width="{_WIDTH}" height="{tall}"/>'
    return "\n".join([head, title, f"<style>{_STYLE}</style>", paper, *lines, *boxes, "</svg>\n"])


def _middle(places: Mapping[str, tuple[float, float]], names: set[str]) -> float:
    there = [places[name][0] for name in names if name in places]
    return sum(there) / len(there) if there else 0.0


def _line(above: tuple[float, float], below: tuple[float, float]) -> str:
    (x, y), (to_x, to_y) = (above[0], above[1] + _BOX), below
    bend = (to_y - y) / 2
    return f'<path d="M{x:.0f} {y:.0f}C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"/>'


def _box(name: str, x: float, y: float) -> str:
    width = len(name) * _CHARACTER + 26
    shown = name if name == _GROUND or name in _ROOMS_THAT_ARE_MODULES else f"{name}/"
    box = f'<rect x="{x - width / 2:.0f}" y="{y:.0f}" width="{width:.0f}" height="{_BOX}"/>'
    return f'{box}<text x="{x:.0f}" y="{y + 22:.0f}">{shown}</text>'


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    FLOORS.write_text(floors(), encoding="utf-8")
