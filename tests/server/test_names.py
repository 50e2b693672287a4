"""Names of tools, prompts and resources: a lambda has none, and some are not everybody's."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest

import trimcp
import trimcp.testing


@pytest.mark.parametrize("kind", ["tool", "prompt"])
@pytest.mark.parametrize("function", [lambda: "x", functools.partial(lambda a: "x", "a")])
async def test_a_lambda_needs_a_name(kind: str, function: Any) -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    with pytest.raises(TypeError, match=f'a lambda has no name: give the {kind} one, as by name="..."'):
        getattr(server, kind)(function)
    with pytest.raises(TypeError, match="a lambda has no name"):
        getattr(server, f"add_{kind}")(function)
    getattr(server, f"add_{kind}")(function, name="named")
    async with trimcp.testing.connected(server) as session:
        listed: Any = await session.list_tools() if kind == "tool" else await session.list_prompts()
        assert [each.name for each in listed] == ["named"]
        if kind == "tool":
            assert (await session.call_tool("named")).text == "x"


async def test_a_resource_has_the_name_of_its_address() -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    server.resource("notes://all/today")(lambda: "milk")
    async with trimcp.testing.connected(server) as session:
        assert [each.name for each in await session.list_resources()] == ["today"]
        assert (await session.read_resource("notes://all/today")).text == "milk"


async def tool() -> str:
    return ""


@pytest.mark.parametrize("name", ["a", "get_user", "DATA_EXPORT-v2", "admin.tools.list", "9", "x" * 128])
def test_names_within_the_rule_are_taken_in_silence(name: str, caplog: pytest.LogCaptureFixture) -> None:
    trimcp.Server("s").add_tool(tool, name=name)
    assert caplog.records == []


@pytest.mark.parametrize("name", ["a b", "über", "a,b", "x" * 129, "name@1", "a/b", "a\n", "\x1b[2J", "a\nb" * 100])
def test_names_outside_the_rule_are_taken_with_a_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    server: trimcp.Server[None] = trimcp.Server("s")
    server.add_tool(tool, name=name)
    assert name in server.tools
    [record] = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "trimcp.server")
    assert repr(name[:200]) in record.getMessage()
    assert "\n" not in record.getMessage()
