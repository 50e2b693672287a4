"""Every interaction test runs over every transport and in every revision: same tests, same outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from tests.interaction.links import TRANSPORTS, Links, speaks
from trimcp.wire.revisions import REVISIONS, Revision


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test every transport, and with each the revisions that have it, unless the test chose for itself."""
    chosen = {marker.args[0] for marker in metafunc.definition.iter_markers("parametrize")}
    if "transport" in metafunc.fixturenames and "transport" not in chosen:
        transports = getattr(metafunc.module, "ONLY_OVER", TRANSPORTS)
        pairs = [(name, revision) for name in transports for revision in REVISIONS if speaks(name, revision)]
        ids = [f"{name}-{revision.name}" for name, revision in pairs]
        metafunc.parametrize(("transport", "revision"), pairs, ids=ids)


@pytest.fixture
def clock(transport: str) -> Any:
    """Virtual time where both sides live in this process and no socket between them."""
    return MockClock(autojump_threshold=0) if transport in ("memory", "framed") else None


@pytest.fixture
def links(transport: str, revision: Revision, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Links:
    return Links(transport, revision, tmp_path / "journal", caplog)
