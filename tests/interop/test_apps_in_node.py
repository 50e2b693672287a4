"""The official package for apps, and the Inspector, read what our server says of its pages.

How the Inspector shows one was tried by hand: docs/howto/pages/app-inspector.png.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.interop.peers import HERE, NODE, inspect

DASHBOARD = Path(__file__).parents[2] / "examples" / "dashboard.py"


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """Run examples/dashboard.py on a free port; yield its URL."""
    words = [sys.executable, str(DASHBOARD), "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_official_package_finds_our_page_and_the_tool_for_it_alone(dashboard: str, era: str) -> None:
    words = [NODE, str(HERE / "node_apps.mjs"), era, dashboard]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "declared": {"io.modelcontextprotocol/ui": {}},
        "told": {"watch": [None, False], "batch": ["ui://dashboard/jobs", False], "job_progress": [None, True]},
        "page": True,
        "meta": {"ui": {"prefersBorder": True}},
        "jobs": [],
    }


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_the_inspector_finds_our_page_and_what_it_may_do(dashboard: str, era: str, tmp_path: Path) -> None:
    said = inspect(dashboard, "http", era, tmp_path, "--method", "tools/list", "--app-info")
    assert {tool["toolName"]: tool.get("resourceUri") for tool in said} == {
        "watch": None,
        "batch": "ui://dashboard/jobs",
    }
    (batch,) = [tool for tool in said if tool["hasApp"]]
    assert (batch["resourceMimeType"], batch["prefersBorder"]) == ("text/html;profile=mcp-app", True)
