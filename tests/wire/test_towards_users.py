"""What users see of payloads: texts, signatures, comparisons."""

from __future__ import annotations

import inspect
import pydoc
import re
import subprocess
import sys
from typing import Any, get_args

import attrs
import pytest

import trimcp
import trimcp.testing
from tests.wire.payload_strategies import payload_classes
from trimcp.wire import ModelHint, ModelPreferences, Root
from trimcp.wire.converter import converter_for
from trimcp.wire.fields import ABSENT, Absent
from trimcp.wire.revisions import REVISIONS, V2025_03_26, V2025_06_18


@pytest.mark.parametrize("cls", payload_classes(), ids=lambda cls: cls.__name__)
def test_what_is_missing_is_none_and_not_sent(cls: Any) -> None:
    """Structured content alone may be null, so it alone has a value of its own for that."""
    attrs.resolve_types(cls)
    for field in attrs.fields(cls):
        if field.name != "structured_content":
            assert field.default is not ABSENT
            assert Absent not in get_args(field.type)


def test_texts_of_missing_members_are_those_of_none() -> None:
    root = converter_for(trimcp.LATEST).load({"uri": "file:///a"}, Root)
    assert f"{root.name} {root.name!r} {root}" == "None None Root(uri='file:///a')"
    assert trimcp.to_json(root) == {"uri": "file:///a"}
    assert trimcp.from_json({"uri": "file:///a", "name": None}, Root) == root


PROGRAM = """
import inspect, pydoc, trimcp, trimcp.wire
print(inspect.signature(trimcp.Tool))
print(inspect.signature(trimcp.wire.ReadResourceResult))
print(pydoc.plain(pydoc.render_doc(trimcp.wire.ModelPreferences)))
"""


def test_help_shows_the_members_of_a_class_that_was_never_used() -> None:
    shown = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout
    tool, result, *rest = shown.splitlines()
    assert tool.startswith("(name: 'str', input_schema: 'dict[str, Any]', title: 'str | None' = None")
    assert result.startswith("(contents: 'list[ResourceContents]', *, meta: 'Meta | None' = None")
    # Since Python 3.13 a long signature is shown in several lines.
    assert re.search(r"ModelPreferences\([^)]*cost_priority", "\n".join(rest))
    assert "**members" not in shown


@pytest.mark.parametrize("cls", payload_classes(), ids=lambda cls: cls.__name__)
def test_every_signature_names_the_members(cls: Any) -> None:
    assert set(inspect.signature(cls).parameters) == {field.name for field in attrs.fields(cls) if field.init}
    assert "**members" not in pydoc.render_doc(cls)


def test_preferences_for_a_model_are_public() -> None:
    preferences = ModelPreferences(hints=[ModelHint("claude"), ModelHint()], cost_priority=0.2)
    assert trimcp.to_json(preferences) == {"hints": [{"name": "claude"}, {}], "costPriority": 0.2}


def test_a_revision_compares_with_its_date() -> None:
    assert V2025_06_18 == "2025-06-18"
    assert "2025-06-18" == V2025_06_18  # noqa: SIM300 - the other way round
    assert V2025_06_18 != "2025-03-26"
    assert V2025_06_18 != "newest"
    assert V2025_03_26 < "2025-06-18" <= V2025_06_18 >= "2025-06-01" > V2025_03_26
    assert V2025_06_18 in {"2025-06-18"}
    assert dict.fromkeys(REVISIONS, 1)["2024-11-05"] == 1
    for wrong in ("newest", 2025, None):
        with pytest.raises(TypeError, match="a date such as"):
            assert wrong > V2025_06_18


@trimcp.testing.every_revision
async def test_a_session_s_revision_compares_with_its_date(revision: trimcp.Revision) -> None:
    async with trimcp.testing.connected(trimcp.Server("s"), revision=revision) as session:
        assert session.revision == revision.name
        assert (session.revision >= "2025-06-18") is (revision in REVISIONS[2:])
