"""Our server on both its hosts, for other people's clients."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.interop.peers import Served, own_server, relay, serving


def kept(factory: pytest.TempPathFactory, *words: str) -> Iterator[Served]:
    """Run our server for a module of tests, and see that it ends well, having said nothing we would be ashamed of."""
    log = factory.mktemp("server") / f"{'-'.join(words)}.log"
    with serving(own_server(*words), log, orderly=True) as served:
        yield served
    said = log.read_text("utf-8")
    troubles = re.findall(r"^(?:WARNING|ERROR|CRITICAL) .*?(?=: 'crash'|$)|^Traceback", said, re.MULTILINE)
    # The tool that crashes on purpose has a traceback, and quotes its password in a line of source and in the error.
    crashes = ["ERROR trimcp.session: the handler of tools/call crashed", "Traceback"] * (said.count("swordfish") // 2)
    assert troubles == crashes, said


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Our server on our own listener."""
    yield from kept(tmp_path_factory, "own")


@pytest.fixture(scope="module")
def hypercorn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Our server on Hypercorn."""
    yield from kept(tmp_path_factory, "hypercorn")


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Our server on our own listener, answering every request with a stream of events."""
    yield from kept(tmp_path_factory, "own", "sse")


@pytest.fixture(scope="module")
def stateless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Our server on our own listener, without sessions for legacy clients."""
    yield from kept(tmp_path_factory, "own", "stateless")


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Served:
    """Our server on the host that the test is parametrized with."""
    served: Served = request.getfixturevalue(request.param)
    return served


@pytest.fixture
def lossy(host: Served) -> Iterator[Served]:
    """The same behind a relay that loses connections, and has to lose one."""
    with relay(host.port) as between:
        yield host.through(between)
        assert between.cuts == 1
