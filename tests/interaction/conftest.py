"""The interaction tests run over every transport: same tests, same outcomes. `nox -s matrix` has every revision too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from tests.interaction.links import EVERY_PAIR, IN_MEMORY, IN_REDIS, TRANSPORTS, Links, speaks
from tests.interaction.without_trio import KINDS
from tests.store.redis_server import redis_server
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, Revision

PROXIED = "proxied"
BEFORE_A_PROXY = ("memory", "http")
"""Transports over which each test is also made through a proxy; `nox -s matrix` has all."""

BEHIND = "behind a proxy"
"""Each test is also made with a server that a proxy reaches over a transport: `EACH_ERA`; `nox -s matrix` has all."""

EACH_ERA = (("stdio", LATEST_LEGACY), ("http", LATEST))
"""One pair of a transport and a revision for each era, for what changes nothing about either."""
ABOUT_ONE_CONNECTION = (
    *("test_endings", "test_wire", "test_message_size"),
    "test_a_server_that_ends_closes_its_subscriptions_gracefully",
)
"""What is about the connection that a test itself has, which for a server behind a proxy is the one to the proxy."""

OF_THE_WIRE = ("test_a_client_that_leaves_stops_its_handlers",)
"""Tests without a client."""


def spoken(transport: str) -> list[Revision]:
    """The revisions tried over a transport: where that takes time, the ends of the legacy era and the modern one."""
    every = [revision for revision in REVISIONS if speaks(transport, revision)]
    if EVERY_PAIR or transport in IN_MEMORY:
        return every
    legacy = [revision for revision in every if not revision.modern]
    return [revision for revision in every if revision.modern or revision in (legacy[0], legacy[-1])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test every transport, and with each the revisions that have it, unless the test chose for itself."""
    chosen = {marker.args[0] for marker in metafunc.definition.iter_markers("parametrize")}
    if "transport" in metafunc.fixturenames and "transport" not in chosen:
        transports = getattr(metafunc.module, "ONLY_OVER", TRANSPORTS)
        pairs = [(name, revision) for name in transports for revision in spoken(name)]
        if not hasattr(metafunc.module, "ONLY_OVER") and metafunc.function.__name__ not in OF_THE_WIRE:
            pairs += [(f"{name}, {without}", revision) for without in KINDS for name, revision in EACH_ERA]
            pairs += [
                (f"{name}, {PROXIED}", revision)
                for name in (transports if EVERY_PAIR else BEFORE_A_PROXY)
                for revision in spoken(name)
            ]
            module = metafunc.module.__name__.rpartition(".")[2]
            if not {module, metafunc.function.__name__} & set(ABOUT_ONE_CONNECTION):
                every = [(name, revision) for name in transports for revision in spoken(name) if name not in IN_MEMORY]
                pairs += [(f"{name}, {BEHIND}", revision) for name, revision in (every if EVERY_PAIR else EACH_ERA)]
        ids = [f"{name}-{revision.name}" for name, revision in pairs]
        metafunc.parametrize(("transport", "revision"), pairs, ids=ids)


@pytest.fixture
def clock(transport: str) -> Any:
    """Virtual time where both sides live in this process and no socket between them."""
    return MockClock(autojump_threshold=0) if transport.partition(", ")[0] in IN_MEMORY else None


@pytest.fixture(scope="session")
def redis() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


@pytest.fixture
def links(
    transport: str,
    revision: Revision,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> Links:
    name, _, special = transport.partition(", ")
    proxied, behind = special == PROXIED, special == BEHIND
    without = "" if proxied or behind else special
    kept = request.getfixturevalue("redis") if name == IN_REDIS else ""
    path = tmp_path / "journal"
    return Links(name, revision, path, caplog, without=without, proxied=proxied, behind=behind, redis=kept)
