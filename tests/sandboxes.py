"""Which tests need bubblewrap, and what becomes of them without it: they fail, unless they were left out on purpose."""

from __future__ import annotations

import functools
import os
import sys

import pytest

import trimcp
from trimcp.workers.bubblewrap import Sandbox

LEFT_OUT = "TRIMCP_NO_BWRAP"
"""The environment variable that leaves these tests out, for machines where no sandbox can be made."""


def require_bwrap() -> None:
    """Fail without bubblewrap: a sandbox that nobody tried is none."""
    if sys.platform != "linux":
        pytest.skip("bubblewrap is for Linux")
    if os.environ.get(LEFT_OUT):
        pytest.skip(f"left out by {LEFT_OUT}: NOTHING HERE SAYS THAT SANDBOXES HOLD")
    why = _missing()
    if why is not None:
        pytest.fail(
            f"{why}\nInstall it (apt-get install bubblewrap), or set {LEFT_OUT}=1 to go without.", pytrace=False
        )


@functools.cache
def _missing() -> str | None:
    try:
        Sandbox.of((), (), 2**20)
    except trimcp.LocalError as error:
        return str(error)
    return None
