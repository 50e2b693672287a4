"""Writes the fields of payload classes into the reference, when the documentation is built (an mkdocs hook).

`<!-- payloads: trimcp.wire.tools -->` in a page becomes a section for every payload class that the module names, drawn
from the same declarations that load and dump it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any, Final

import attrs

from trimcp.wire.fields import FieldFacts, WireFacts, facts_of, wire_name
from trimcp.wire.revisions import OLDEST

_MARK: Final = re.compile(r"^<!-- payloads: ([\w.]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every mark by its sections; mkdocs calls this for each page."""
    return _MARK.sub(lambda mark: "\n\n".join(sections(mark[1])), markdown)


def sections(module: str) -> Iterator[str]:
    """Yield one section for each payload class of a module, in the order of its source."""
    loaded = importlib.import_module(module)
    classes = [value for name, value in vars(loaded).items() if not name.startswith("_") and hasattr(value, "__wire__")]
    own = {cls for cls in classes if cls.__module__ == module}
    for cls in sorted(own, key=lambda cls: inspect.getsourcelines(cls)[1]):
        yield section(cls)


def section(cls: type[Any]) -> str:
    """Return the heading, the docstring and the table of fields of one class."""
    lines = [f"### {cls.__name__} {{: #{cls.__module__}.{cls.__name__} }}", "", inspect.getdoc(cls) or "", ""]
    if span := _span(cls.__wire__):
        lines += [f"In revisions {span}.", ""]
    fields = attrs.fields(cls)
    if fields:
        lines += ["| field | type | on the wire | revisions |", "| --- | --- | --- | --- |"]
    # As they are written: the fields of attrs hold types that may have been resolved by now.
    hints = {name: hint for base in reversed(cls.__mro__) for name, hint in inspect.get_annotations(base).items()}
    for field in fields:
        facts = facts_of(field)
        optional = field.default is not attrs.NOTHING
        hint = hints[field.name] if field.default is not None else hints[field.name].removesuffix(" | None")
        hint = hint.replace("|", "\\|")
        shown = f"`{field.name}`" if optional else f"**`{field.name}`**"
        lines.append(f"| {shown} | `{hint}` | `{wire_name(field)}` | {_span(facts) or 'all'} |")
    return "\n".join(lines)


def _span(facts: FieldFacts | WireFacts) -> str:
    since = "" if facts.since == OLDEST else f"from {facts.since.name}"
    until = "" if facts.until is None else f"before {facts.until.name}"
    return " ".join(filter(None, (since, until)))
