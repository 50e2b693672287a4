"""The session of the article, verbatim: its commands in a shell, with real curl, against the example."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import orjson
import pytest
import trio

from tests.agent_tools.world import conforms
from tests.cli.test_serving import serving
from tests.fuzz.effort import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.needs("curl")]

EXAMPLE: Final = str(Path(__file__).parents[2] / "examples" / "agent_tools.py")

REGISTER: Final = """\
curl -X POST http://localhost:8080/tools/register -H "Content-Type: application/json" -d '{"name": "get_weather", "description": "Get current weather for a city", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}'
"""  # noqa: E501  # as the article has it
CALL: Final = """\
curl -X POST http://localhost:8080/mcp -H "Authorization: Bearer demo-token" -H "Content-Type: application/json" -d '{"type": "tool_request", "tool_name": "get_weather", "arguments": {"city": "Beijing"}, "request_id": "req-001", "context_id": "ctx-001"}'
"""  # noqa: E501  # as the article has it
ANSWER: Final = """\
{"type": "tool_response", "request_id": "req-001", "status": "success", "result": {"city": "Beijing", "temperature": 5, "unit": "Celsius"}}
"""  # noqa: E501  # as the article has it
UPDATE: Final = """\
curl -X POST http://localhost:8080/mcp -H "Authorization: Bearer demo-token" -H "Content-Type: application/json" -d '{"type": "context_update", "context_id": "ctx-001", "updates": {"last_query_time": "2025-12-12T10:00:00Z", "user_verified": true}}'
"""  # noqa: E501  # as the article has it


async def shell(command: str) -> str:
    """What a shell prints for a command; fails if the command does."""
    with trio.fail_after(PATIENCE):
        done = await trio.run_process(
            ["/bin/sh", "-c", command], capture_stdout=True, capture_stderr=True, check=False, env=_environment()
        )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout.decode()


def _environment() -> dict[str, str]:
    """As it is, without a proxy and a configuration of curl's."""
    return {**{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}, "CURL_HOME": "/nonexistent"}


@asynccontextmanager
async def example(*options: str) -> AsyncIterator[str]:
    """Serve the example as the article does, but on a free port; yield that."""
    async with serving("--agent-tools", "--port", "0", *options, server=EXAMPLE) as served:
        yield (await served.url()).rpartition(":")[2].partition("/")[0]


def to(port: str, command: str, options: str = "") -> str:
    """A command for another port, with more options of curl."""
    assert command.count(":8080/") == 1
    return command.replace(":8080/", f":{port}/").replace("curl ", f"curl -sS {options} ", 1)


@pytest.mark.parametrize(
    ("software", "options"),
    [("own", ""), ("own", "--http1.0"), ("own", "--http2-prior-knowledge"), ("hypercorn", "")],
)
async def test_the_session_of_the_article(software: str, options: str) -> None:
    async with example("--server", software) as port:
        registered = conforms(orjson.loads(await shell(to(port, REGISTER, options))))
        assert [tool["name"] for tool in registered["tools"]] == ["get_weather"]
        printed = await shell(to(port, CALL, options))
        assert orjson.loads(printed) == orjson.loads(ANSWER)
        assert printed.strip() == ANSWER.strip().replace(": ", ":").replace(", ", ",")  # its members in that order
        updated = conforms(orjson.loads(await shell(to(port, UPDATE, options))))
        assert updated == {
            "type": "context_update",
            "context_id": "ctx-001",
            "updates": {"last_query_time": "2025-12-12T10:00:00Z", "user_verified": True},
            "version": 1,
        }


async def test_the_commands_as_they_are_in_one_shell() -> None:
    """Without quieting curl, and one right after the other, as whoever copies all of them has it."""
    async with example() as port:
        both = (REGISTER + CALL).replace(":8080/", f":{port}/")
        assert orjson.loads((await shell(both)).partition("}]}")[2]) == orjson.loads(ANSWER)


@pytest.mark.parametrize("options", ["", "--http2-prior-knowledge"])
async def test_progress_and_headers_as_curl_shows_them(options: str) -> None:
    async with example() as port:
        call = '{"type": "tool_request", "tool_name": "count_to", "arguments": {"number": 2}, "request_id": "r"}'
        common = f"curl -sS -i {options} -H 'Authorization: Bearer demo-token'"
        printed = await shell(
            f"{common} -N -H 'Content-Type: application/json' -H 'Accept: text/event-stream' -d '{call}' "
            f"http://localhost:{port}/tools/call"
        )
        head, _, body = printed.replace("\r\n", "\n").partition("\n\n")
        assert "content-type: text/event-stream" in head.lower()
        assert body.count("event: tool_progress") == 2
        assert body.rstrip().endswith('"result":2}')
        made = await shell(
            f"{common} -X PATCH -H 'Content-Type: application/json' -d '{{}}' localhost:{port}/contexts/c"
        )
        assert 'etag: "1"' in made.lower()
        stale = f"{common} -X PATCH -H 'If-Match: \"7\"' -H 'Content-Type: application/json' -d '{{}}' "
        assert " 409" in (await shell(f"{stale} localhost:{port}/contexts/c")).partition("\n")[0]
        assert " 401" in (await shell(f"curl -sS -i {options} localhost:{port}/tools")).partition("\n")[0]
