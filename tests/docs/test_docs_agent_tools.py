"""Compares the reference of agent tools with the code: errors, messages, schemas, routes and settings."""

from __future__ import annotations

import json
import runpy
from types import SimpleNamespace
from typing import Any

import attrs
import httpx2
import pytest

import trimcp
from tests.docs.test_docs import rows
from tests.pages import ROOT
from trimcp.agent_tools import AgentTools
from trimcp.agent_tools.catalog.rules import RegistrationRules
from trimcp.agent_tools.contexts.state import SERVER_MEMBERS, ContextLimits
from trimcp.agent_tools.messages.errors import ERRORS_BY_CODE
from trimcp.agent_tools.messages.messages import MESSAGES

PAGE = "reference/agent-tools.md"


def program() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "agent_messages.py")))


def section(heading: str) -> list[list[str]]:
    """Return the table rows of one section."""
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    _, _, after = text.partition(f"\n{heading}\n")
    assert after, heading
    lines = after.partition("\n## ")[0].partition("\n### ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]


def test_what_is_written_from_the_code_is_current() -> None:
    """Else run `python docs/agent_messages.py`."""
    assert program().stale() == {}


def test_every_error_has_its_row() -> None:
    said = {row[0]: row[1:4] for row in section("## Errors")}
    for code, cls in ERRORS_BY_CODE.items():
        assert said[f"`{code}`"] == [str(cls.http_status), f"`{cls.grpc_status}`", f"`{cls.extended_status}`"]
    assert len(said) == len(ERRORS_BY_CODE) + 2  # the head


def test_the_statuses_are_those_that_messages_may_have() -> None:
    schema = json.loads((ROOT / "docs" / "reference" / "agent-tools.schema.json").read_text("utf-8"))
    allowed = schema["$defs"]["tool_response"]["properties"]["status"]["enum"]
    assert [row[0].strip("`") for row in section("## Statuses")[2:]] == allowed
    assert {cls.extended_status for cls in ERRORS_BY_CODE.values()} < set(allowed)


def test_every_message_of_an_agent_has_its_answer() -> None:
    said = " ".join(row[0] for row in section("## Messages")[2:])
    for name, cls in MESSAGES.items():
        assert (f"[`{name}`](#{name})" in said) == (cls.asks or name == "tool_cancel"), name


async def test_every_route_is_told() -> None:
    told: dict[str, set[str]] = {}
    for row in section("## HTTP")[2:]:
        told.setdefault(row[0].strip("`"), set()).add(row[1])
    assert told.pop("/mcp") == {"POST"}
    server = trimcp.Server("told", "1")
    app = trimcp.asgi_app(server, agent_tools=AgentTools(server))
    web = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost")
    async with app.lifespan(), web:
        assert (await web.get("/agent")).status_code == 426
        assert told.pop("/agent") == {"GET"}
        for path, methods in told.items():
            refused = await web.put(path)
            assert refused.status_code == 405, path
            assert set(refused.headers["allow"].split(", ")) - {"HEAD"} == methods, path


def test_the_members_that_only_the_service_writes_are_told() -> None:
    said = {row[0].strip("`") for row in section("## Contexts")[2:] if row[1].startswith("the service")}
    assert said == set(SERVER_MEMBERS)


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("### Contexts {: #context-limits }", ContextLimits),
        ("### Registration {: #registration-rules }", RegistrationRules),
    ],
)
def test_the_settings_are_told_with_their_defaults(heading: str, kind: type[Any]) -> None:
    numbers = {field.name: field.default for field in attrs.fields(kind) if type(field.default) in (int, float)}
    assert {row[0].strip("`"): row[1] for row in section(heading)[2:]} == {
        name: f"{default:,}" for name, default in numbers.items()
    }


def test_the_tables_of_the_page_have_as_many_cells_as_heads() -> None:
    text = (ROOT / "docs" / PAGE).read_text(encoding="utf-8").split("\n\n")
    for table in (part.splitlines() for part in text if part.startswith("|")):
        assert len({line.count("|") - line.count("\\|") for line in table}) == 1, table[0]
    assert rows(PAGE)
