"""grpcurl, and with it grpc-go's client, drives our server: reflection, health, calls, streams, refusals."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

import trimcp
from tests.agent_tools.rpc_support import serving
from tests.fuzz.effort import PATIENCE

PROGRAM = os.environ.get("TRIMCP_GRPCURL", "")

pytestmark = [
    pytest.mark.needs("go"),
    pytest.mark.skipif(not PROGRAM, reason="TRIMCP_GRPCURL is not set: nox -s interop builds grpcurl"),
]


@asynccontextmanager
async def address(**settings: object) -> AsyncIterator[str]:
    async with serving(settings=trimcp.HttpSettings(**settings)) as place:  # of every kind
        yield place.url.removeprefix("grpc://")


async def grpcurl(*words: str, fails: bool = False) -> str:
    """Run it; return what it wrote."""
    done = await trio.run_process(
        [PROGRAM, "-plaintext", "-max-time", f"{PATIENCE:g}", *words],
        capture_stdout=True,
        stderr=subprocess.STDOUT,
        check=False,
    )
    text = done.stdout.decode()
    assert (done.returncode != 0) is fails, text
    return text


async def test_it_lists_and_describes_what_there_is() -> None:
    async with address() as here:
        listed = (await grpcurl(here, "list")).split()
        assert {"grpc.health.v1.Health", "trimcp.v1.AgentTools", "trimcp.v1.Mcp"} <= set(listed)
        assert "rpc Call ( .trimcp.v1.ToolRequest )" in await grpcurl(here, "describe", "trimcp.v1.AgentTools")
        assert "rpc Watch" in await grpcurl(here, "describe", "grpc.health.v1.Health")
        assert "bytes arguments_json" in await grpcurl(here, "describe", "trimcp.v1.ToolRequest")


async def test_it_calls_and_is_told_of_progress() -> None:
    async with address() as here:
        asked = json.dumps({"tool_name": "add", "arguments": {"a": 1, "b": 2}})
        answer = json.loads(await grpcurl("-d", asked, here, "trimcp.v1.AgentTools/Call"))
        assert (answer["status"], answer["result"]) == ("success", 3)
        told = await grpcurl("-d", json.dumps({"tool_name": "steps"}), here, "trimcp.v1.AgentTools/CallStream")
        assert told.count('"progress"') >= 3
        assert '"result": "done"' in told
        assert "SERVING" in await grpcurl(here, "grpc.health.v1.Health/Check")


async def test_it_is_refused_with_statuses_and_details() -> None:
    async with address(authenticate=trimcp.bearer_tokens({"a-token": "ada"})) as here:
        token = ("-H", "authorization: Bearer a-token")
        asked = json.dumps({"tool_name": "nothing"})
        said = await grpcurl("-v", *token, "-d", asked, here, "trimcp.v1.AgentTools/Call", fails=True)
        assert "Code: NotFound" in said
        assert "trimcp-error-bin: eyJ" in said  # the error as JSON, which it shows in base64
        asked = json.dumps({"tool_name": "wait", "timeout": 0.1})
        said = await grpcurl(*token, "-d", asked, here, "trimcp.v1.AgentTools/Call", fails=True)
        assert "Code: DeadlineExceeded" in said
