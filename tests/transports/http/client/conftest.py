"""Tests of clients run over both engines: the one of our own, and httpx2."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transports.http.scripted import engine


@pytest.fixture(params=["trimcp", "httpx2"])
def on_both_engines(request: pytest.FixtureRequest) -> Iterator[str]:
    """The engine that carries the requests of `Scripted.target`."""
    token = engine.set(request.param)
    yield request.param
    engine.reset(token)
