"""Clients on Node against our server: the official TypeScript SDK's, and the Inspector's command line.

`node_client.mjs` carries out what is tested of the first; here it is run, once for each transport, era and host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.interop.peers import HERE, NODE, Served, inspect, relay, run_scenarios

EVERYWHERE = (
    "introduction",
    "detection",
    "tools",
    "errors",
    "progress",
    "logging",
    "cancellation",
    "timeout",
    "questions",
    "questions_it_cannot_answer",
    "resources",
    "prompts",
    "changes",
    "large_result",
    "fifty_calls_at_once",
)
SCENARIOS = {
    ("http", "legacy"): (*EVERYWHERE, "polling", "lost_connection", "lost_stream", "leaving"),
    ("http", "modern"): (*EVERYWHERE, "lost_connection"),
    ("sse", "legacy"): EVERYWHERE,
    ("sse", "modern"): EVERYWHERE,
    # Without a session nothing can be asked, watched, told, cancelled or fetched later.
    ("stateless", "legacy"): (
        *("introduction", "tools", "errors", "progress", "questions_it_cannot_answer", "resources", "prompts"),
        *("large_result", "fifty_calls_at_once"),
    ),
}
HOSTS = ("own", "hypercorn")
Errors = Callable[[str, str, str], dict[str, str]]


@pytest.fixture(scope="module")
def errors(
    own: Served, hypercorn: Served, streaming: Served, stateless: Served, tmp_path_factory: pytest.TempPathFactory
) -> Errors:
    """Runs the client, unless it has been, and returns what went wrong in each scenario."""

    @cache
    def run(transport: str, era: str, host: str) -> dict[str, str]:
        served = {"own": own, "hypercorn": hypercorn, "streaming": streaming, "stateless": stateless}[host]
        wanted = SCENARIOS["stateless" if host == "stateless" else transport, era]
        log = tmp_path_factory.mktemp("client") / "stderr.log"
        with relay(served.port) as between:
            addresses = [served.base, served.through(between).base]
            outcomes = run_scenarios([NODE, HERE / "node_client.mjs", transport, era, *addresses, *wanted], log)
        assert between.cuts == sum(name.startswith("lost_") for name in wanted)
        return outcomes

    return run


@pytest.mark.parametrize(
    ("transport", "era", "host", "scenario"),
    [
        *(
            (*way, host, name)
            for way, names in SCENARIOS.items()
            if "stateless" not in way
            for host in HOSTS
            for name in names
        ),
        *(("http", era, "streaming", name) for era in ("legacy", "modern") for name in SCENARIOS["http", era]),
        *(("http", "legacy", "stateless", name) for name in SCENARIOS["stateless", "legacy"]),
    ],
)
def test_the_sdk_does_what_it_does_with_every_server(
    errors: Errors, transport: str, era: str, host: str, scenario: str
) -> None:
    assert errors(transport, era, host)[scenario] == ""


def ask(served: Served, transport: str, era: str, home: Path, *arguments: str) -> Any:
    """Return the one line of JSON that the Inspector's command line prints."""
    url = {"http": served.http, "sse": served.sse}[transport]
    (said,) = inspect(url, transport, era, home, *arguments)
    return said


on_both_hosts = pytest.mark.parametrize("host", ["own", "hypercorn"], indirect=True)
in_every_way = pytest.mark.parametrize(
    ("transport", "era"), [(transport, era) for transport in ("http", "sse") for era in ("legacy", "auto", "modern")]
)


@on_both_hosts
@in_every_way
def test_the_inspector_lists_tools_and_calls_one(host: Served, transport: str, era: str, tmp_path: Path) -> None:
    listed = ask(host, transport, era, tmp_path, "--method", "tools/list")["result"]
    assert {"echo", "add", "greet"} <= {tool["name"] for tool in listed["tools"]}
    add = ["--method", "tools/call", "--tool-name", "add", "--tool-arg", "a=2", "b=3"]
    called = ask(host, transport, era, tmp_path, *add)["result"]
    assert called["structuredContent"] == {"total": 5}
    assert not called.get("isError")


@on_both_hosts
@in_every_way
def test_the_inspector_reads_and_asks(host: Served, transport: str, era: str, tmp_path: Path) -> None:
    read = ["--method", "resources/read", "--uri", "interop://items/lamp"]
    (contents,) = ask(host, transport, era, tmp_path, *read)["result"]["contents"]
    assert contents["text"] == "item lamp"
    asked = ["--method", "prompts/get", "--prompt-name", "review", "--prompt-args", "path=setup.py"]
    (message,) = ask(host, transport, era, tmp_path, *asked)["result"]["messages"]
    assert message["content"]["text"] == "Please review setup.py."


@on_both_hosts
@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_inspector_puts_us_under_load(host: Served, era: str, tmp_path: Path) -> None:
    load = ["--load", "--load-concurrency", "20", "--load-requests", "200"]
    echo = ["--method", "tools/call", "--tool-name", "echo", "--tool-arg", "text=hi"]
    found = ask(host, "http", era, tmp_path, *echo, *load)["result"]
    assert (found["ok"], found["toolErrors"], found["errors"]) == (200, 0, 0)
