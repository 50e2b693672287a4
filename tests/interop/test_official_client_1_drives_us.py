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
ONLY_HTTP = ("polling", "lost_connection", "lost_stream", "leaving")
SCENARIOS = {"http": EVERYWHERE + ONLY_HTTP, "sse": EVERYWHERE, "ws": EVERYWHERE}


Errors = Callable[[str, str], dict[str, str]]


@pytest.fixture(scope="module")
def errors(own: Served, hypercorn: Served, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Runs the client over a transport, on a host, unless it has been, and returns what went wrong in each scenario."""

    @cache
    def run(transport: str, host: str) -> dict[str, str]:
        served = {"own": own, "hypercorn": hypercorn}[host]
        log = tmp_path_factory.mktemp("client") / "stderr.log"
        with relay(served.port) as between:
            script = [PYTHON, HERE / "official_client_1.py"]
            outcomes = run_scenarios([*script, transport, served.base, served.through(between).base], log)
            assert between.cuts == sum(name.startswith("lost_") for name in SCENARIOS[transport])
            return outcomes

    return run


@pytest.mark.parametrize("host", ["own", "hypercorn"])
@pytest.mark.parametrize(
    ("transport", "scenario"), [(transport, name) for transport, names in SCENARIOS.items() for name in names]
)
def test_it_does_what_it_does_with_every_server(errors: Errors, transport: str, host: str, scenario: str) -> None:
    assert errors(transport, host)[scenario] == ""
