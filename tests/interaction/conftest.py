"""Every interaction test runs over every transport and in every revision: same tests, same outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from tests.interaction.links import TRANSPORTS, Links
from trimcp.wire.revisions import REVISIONS, Revision


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=REVISIONS, ids=[revision.name for revision in REVISIONS])
def revision(request: pytest.FixtureRequest) -> Revision:
    return request.param


@pytest.fixture
def clock(transport: str) -> Any:
    """Virtual time where both sides live in this process; a child process has a clock of its own."""
    return None if transport == "stdio" else MockClock(autojump_threshold=0)


@pytest.fixture
def links(transport: str, revision: Revision, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Links:
    return Links(transport, revision, tmp_path / "journal", caplog)
