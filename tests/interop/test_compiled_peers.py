"""The official Go, Rust and Java SDKs as clients of our server, and as servers for our client.

Their programs are in `go/`, `rust/` and `java/`; nox builds them and says where they are. Without a toolchain they are
left out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

import trimcp
from tests.interop.peers import HERE, Served, own_server, run_scenarios, serving
from trimcp.wire.revisions import REVISIONS

PEERS = tomllib.loads((HERE.parents[1] / "benchmarks" / "peers.toml").read_text("utf-8"))
MODERN, LEGACY = trimcp.LATEST.name, "2025-11-25"
DATES = [each.name for each in REVISIONS]
KINDS = ("go", "rust", "java-1", "java-2")
SSE = ("go", "java-1", "java-2")


def command(kind: str) -> list[str]:
    """How a peer's program is started; without it, its tests are left out."""
    found = os.environ.get(f"TRIMCP_PEER_{kind.upper().replace('-', '_')}")
    if not found:
        pytest.skip(f"no toolchain for {kind}: its SDK goes untested")
    return shlex.split(found)


# Their clients

ASKS = {"questions": "elicitation", "sampling": "sampling", "roots": "roots"}


def revisions(kind: str, transport: str) -> list[str]:
    """What a peer's client can be told to speak over a transport."""
    if transport == "sse":
        return ["2024-11-05"] if kind == "go" else [""]
    if kind == "go":
        return ["", *(DATES if transport == "stdio" else DATES[1:])]
    return ["", MODERN, LEGACY] if kind == "rust" else [""]


CLIENT_HOSTS = {"stdio": ("child",), "http2": ("own",)}
CLIENTS = [
    pytest.param(kind, transport, host, revision, id=f"{kind}-{transport}-{host}-{revision or 'found'}")
    for kind in KINDS
    for transport in ("stdio", "http", "http2", "sse")
    if (transport != "sse" or kind in SSE) and (transport != "http2" or kind == "go")
    for host in CLIENT_HOSTS.get(transport, ("own", "hypercorn"))
    for revision in revisions(kind, transport)
]


@pytest.mark.parametrize(("kind", "transport", "host", "revision"), CLIENTS)
def test_their_client_drives_our_server(
    kind: str, transport: str, host: str, revision: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    program = command(kind)
    if transport == "stdio":
        words = [str(word) for word in own_server()]
    else:
        served: Served = request.getfixturevalue(host)
        words = [served.sse if transport == "sse" else served.http]
    log = tmp_path / "client.log"
    outcomes = run_scenarios([*program, "call", transport, *words], log, env={"REVISION": revision})
    # Elicitation came with 2025-06-18; over these the Java SDK speaks only 2024-11-05.
    old = "" < revision < "2025-06-18" or (kind.startswith("java") and transport in ("stdio", "sse"))
    expected = {"questions"} if old and "did not declare" in outcomes["questions"] else set()
    if (kind, transport) == ("java-1", "stdio"):
        expected.add("many")  # it cannot send from two threads at once
    assert len(outcomes) > 8
    assert {name for name, error in outcomes.items() if error} == expected, outcomes


# Their servers

SOME = ([], [MODERN], ["2025-06-18", LEGACY], ["2024-11-05"])
SERVERS = [
    pytest.param(kind, transport, served, id=f"{kind}-{transport}-{'+'.join(served) or 'all'}")
    for kind in KINDS
    for transport in ("stdio", "http", "stateless", "sse")
    if (transport != "sse" or kind in SSE) and (transport != "stateless" or kind == "go")
    for served in (SOME if kind in ("go", "rust") and transport != "sse" else ([],))
    # With sessions the Go SDK serves 2026-07-28 over HTTP to nobody.
    if (kind, transport, served) != ("go", "http", [MODERN])
]


@contextmanager
def their_server(kind: str, transport: str, dates: list[str], log: Path) -> Iterator[Any]:
    """What to connect to."""
    program = command(kind)
    words = [*program, "serve", transport, *dates]
    with ExitStack() as stack:
        if transport == "stdio":
            yield trimcp.stdio(*words)
            return
        served = stack.enter_context(serving(words, log))
        path = "/sse" if transport == "sse" else "/mcp"
        yield trimcp.http(served.base + path, mode="sse" if transport == "sse" else "streamable")


@pytest.mark.parametrize(("kind", "transport", "dates"), SERVERS)
async def test_our_client_drives_their_server(kind: str, transport: str, dates: list[str], tmp_path: Path) -> None:
    with their_server(kind, transport, dates, tmp_path / "server.log") as target, trio.fail_after(60):
        async with trimcp.Client("interop", "1.0").connect(target) as session:
            if dates:
                assert session.revision.name == max(dates)
            assert {tool.name for tool in await session.list_tools()} >= {"add", "echo", "count", "fail"}
            result = await session.call_tool("add", {"a": 2, "b": 3})
            assert result.data == {"total": 5} or "5" in result.text
            assert (await session.call_tool("echo", {"text": "grüße\u2028"})).text == "grüße\u2028"
            async with session.calling("count", {"to": 3}) as call:
                assert [step.progress async for step in call.progress] == [1, 2, 3]
                assert (await call.result()).text == "done"
            failed = await session.call_tool("fail", {})
            assert (failed.is_error, failed.text) == (True, "no luck today")
            if kind != "rust":
                (resource,) = await session.list_resources()
                assert json.dumps((await session.read_resource(resource.uri)).contents[0].text) == '"hello"'
                (message,) = (await session.get_prompt("review", {"path": "setup.py"})).messages
                assert message.content == trimcp.Text("Please review setup.py.")
            totals: list[Any] = []

            async def ask(number: int) -> None:
                totals.append((await session.call_tool("echo", {"text": str(number)})).text)

            async with trio.open_nursery() as nursery:
                for number in range(30):
                    nursery.start_soon(ask, number)
            assert sorted(map(int, totals)) == list(range(30))
            await session.ping()


def test_their_programs_use_the_pinned_versions() -> None:
    go, rust = (HERE / "go" / "go.mod").read_text("utf-8"), (HERE / "rust" / "Cargo.toml").read_text("utf-8")
    assert re.search(r"go-sdk (v[\d.]+)", go)[1] == PEERS["go"]["go-sdk"]
    for each in ("java-1", "java-2"):
        assert re.fullmatch(r"\d\.\d+\.\d+", PEERS["maven"][each])
    assert re.search(r'rmcp = \{ version = "=([\d.]+)"', rust)[1] == PEERS["cargo"]["rmcp"]
