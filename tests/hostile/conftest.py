from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.network import Pool


@pytest.fixture(scope="session")
def servers() -> Iterator[Pool]:
    """Servers in processes of their own, shared by the tests that leave them as they were."""
    pool = Pool()
    yield pool
    pool.close()
