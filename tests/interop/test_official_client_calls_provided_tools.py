"""The official Python SDK's client calls tools that a provider brings, and loses them with the provider."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
from mcp import Client, MCPError

from tests.interop.peers import HERE, Served, serving

PROGRAM = HERE / "provided_server.py"
GONE = {"tools": [], "owners": 0, "streams": 0, "calls": 0, "under_way": 0}


@pytest.fixture(scope="module", params=["own", "hypercorn"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving([sys.executable, PROGRAM, request.param], log, orderly=True) as found:
        yield found
    assert "Traceback" not in log.read_text("utf-8")


@contextmanager
def provider(served: Served) -> Iterator[subprocess.Popen[bytes]]:
    """A provider in a process of its own; killed in the end, so that it says nothing of its leaving."""
    url = served.base.replace("http", "ws", 1)
    with subprocess.Popen([sys.executable, str(PROGRAM), "provide", url], stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


async def until(condition: Callable[[], Any]) -> None:
    """Ask a server until it says so."""
    with anyio.fail_after(20):
        while not await condition():  # noqa: ASYNC110  # it is another process
            await anyio.sleep(0.05)


async def names(client: Client) -> set[str]:
    return {tool.name for tool in (await client.list_tools(cache_mode="bypass")).tools} - {"left"}


async def left(client: Client) -> Any:
    return (await client.call_tool("left", {})).structured_content


@pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")
@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_a_provided_tool_is_called_and_vanishes_while_calls_are_under_way(served: Served, mode: str) -> None:
    failures: list[tuple[float, Exception]] = []

    async def call_forever(client: Client) -> None:
        try:
            await client.call_tool("provided.wait", {})
        except MCPError as error:
            failures.append((time.monotonic(), error))

    async def main() -> None:
        async with Client(served.http, mode=mode) as client:
            assert await names(client) == set()
            with provider(served) as process:

                async def there() -> bool:
                    return bool(await names(client))

                await until(there)
                assert await names(client) == {"provided.shout", "provided.wait"}
                progress: list[float] = []

                async def on_progress(value: float, total: float | None, message: str | None) -> None:
                    progress.append(value)

                result = await client.call_tool("provided.shout", {"text": "a"}, progress_callback=on_progress)
                assert result.structured_content == {"result": "A"}
                assert progress == [1]
                async with anyio.create_task_group() as group:
                    for _ in range(5):
                        group.start_soon(call_forever, client)

                    async def all_run() -> bool:
                        return bool((await left(client))["calls"] == 5)

                    await until(all_run)
                    killed = time.monotonic()
                    process.kill()
            assert len(failures) == 5
            assert max(at for at, _ in failures) - killed < 2
            assert all("provider" in str(error) for _, error in failures)

            async def nothing_left() -> bool:
                return bool(await left(client) == GONE)

            await until(nothing_left)
            assert await names(client) == set()
            with pytest.raises(MCPError, match="unknown tool"):
                await client.call_tool("provided.shout", {"text": "a"})

    anyio.run(main)
