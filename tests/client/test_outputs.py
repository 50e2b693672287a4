"""Validators of listed tools: hostile schemas, changed ones."""

from __future__ import annotations

from typing import Any

import pytest

from trimcp.client.tools import Outputs
from trimcp.errors import InvalidReply
from trimcp.wire.content import TextContent
from trimcp.wire.tools import CallToolResult, Tool


def tool(schema: dict[str, Any]) -> Tool:
    return Tool("t", {"type": "object"}, output_schema=schema)


def result(value: Any) -> CallToolResult:
    return CallToolResult([TextContent("")], structured_content=value)


def test_a_schema_that_cannot_be_used_is_reported_and_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    outputs = Outputs()
    outputs.listed([tool({"$ref": "https://example.org/schema.json"})])
    outputs.check("t", result({}))
    outputs.check("t", result({}))
    assert caplog.text.count("is unusable") == 1


def test_what_a_schema_says_forges_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    outputs = Outputs()
    outputs.listed([tool({"$ref": "#/\x1b[2K2026-01-01 ERROR\nroot: forged"})])
    outputs.check("t", result({}))
    assert r"\x1b" in caplog.text
    assert "\x1b" not in caplog.text
    assert len(caplog.text.splitlines()) == len(caplog.records)


def test_a_pattern_of_the_servers_costs_nothing() -> None:
    outputs = Outputs()
    outputs.listed([tool({"type": "string", "pattern": "^(a+)+$"})])
    with pytest.raises(InvalidReply):
        outputs.check("t", result("a" * 50 + "!"))
    outputs.check("t", result("a" * 50))


def test_a_changed_schema_gets_a_new_validator() -> None:
    outputs = Outputs()
    outputs.listed([tool({"type": "string"})])
    outputs.check("t", result("x"))
    outputs.listed([tool({"type": "integer"})])
    with pytest.raises(InvalidReply):
        outputs.check("t", result("x"))
    outputs.listed([])
    outputs.check("t", result("x"))
