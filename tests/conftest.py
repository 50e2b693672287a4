"""What every test has for itself, although it stands in one process with the others."""

from __future__ import annotations

import pytest

from trimcp import security


@pytest.fixture(autouse=True)
def _fresh_security_events() -> None:
    """What earlier tests left out of the log is told in no later one's, a minute after."""
    security._bounds.end_all()
