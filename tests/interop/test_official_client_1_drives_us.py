"""The official Python SDK's client of the first generation, in an environment of its own, against our server.

`official_client_1.py` carries out what is tested; here it is run, once for each transport and host.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.interop.peers import HERE, Served, relay, run_scenarios

PYTHON = Path(os.environ["TRIMCP_OFFICIAL_SDK_1"])

HOSTS = ("own", "hypercorn")
EVERYWHERE = (
    "introduction",
    "older_revisions",
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
    "five_sessions_at_once",
)
SCENARIOS = {
    "http": (*EVERYWHERE, "polling", "lost_connection", "lost_stream", "leaving"),
    "sse": EVERYWHERE,
    "ws": EVERYWHERE,
    # Without a session nothing can be asked, watched, told, cancelled or fetched later.
    "stateless": (
        *("introduction", "older_revisions", "tools", "errors", "progress", "questions_it_cannot_answer", "resources"),
        *("prompts", "large_result", "fifty_calls_at_once", "five_sessions_at_once"),
    ),
}
Errors = Callable[[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def errors(
    own: Served, hypercorn: Served, streaming: Served, stateless: Served, tmp_path_factory: pytest.TempPathFactory
) -> Errors:
    """Runs the client over a transport, on a host, unless it has been, and returns what went wrong in each scenario."""

    @cache
    def run(transport: str, host: str) -> dict[str, str]:
        served = {"own": own, "hypercorn": hypercorn, "streaming": streaming, "stateless": stateless}[host]
        wanted = SCENARIOS["stateless" if host == "stateless" else transport]
        log = tmp_path_factory.mktemp("client") / "stderr.log"
        with relay(served.port) as between:
            addresses = [served.base, served.through(between).base]
            outcomes = run_scenarios([PYTHON, HERE / "official_client_1.py", transport, *addresses, *wanted], log)
        assert between.cuts == sum(name.startswith("lost_") for name in wanted)
        return outcomes

    return run


@pytest.mark.parametrize(
    ("transport", "host", "scenario"),
    [
        *(
            (transport, host, name)
            for transport in ("http", "sse", "ws")
            for host in HOSTS
            for name in SCENARIOS[transport]
        ),
        *(("http", "streaming", name) for name in SCENARIOS["http"]),
        *(("http", "stateless", name) for name in SCENARIOS["stateless"]),
    ],
)
def test_it_does_what_it_does_with_every_server(errors: Errors, transport: str, host: str, scenario: str) -> None:
    assert errors(transport, host)[scenario] == ""
