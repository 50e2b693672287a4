"""curl, which nobody here wrote: what a shell prints for a command with it. Tests with it fail where it is missing."""

from __future__ import annotations

import os
import shutil

import pytest
import trio

from tests.fuzz.effort import PATIENCE

LEFT_OUT = "TRIMCP_NO_CURL"
"""The environment variable that leaves these tests out, for machines where curl cannot be installed."""


def require_curl() -> None:
    """Fail without curl: what the documentation tells everybody to type was not tried then."""
    if os.environ.get(LEFT_OUT):
        pytest.skip(f"left out by {LEFT_OUT}: NOTHING HERE SAYS THAT THE ARTICLE'S SESSION WORKS")
    if shutil.which("curl") is None:
        pytest.fail(
            f"curl is missing. Install it (apt-get install curl), or set {LEFT_OUT}=1 to go without.", pytrace=False
        )


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


__all__ = ["LEFT_OUT", "require_curl", "shell"]
