"""The standard library's logging on its way to clients."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from trimcp.client.client import Client
from trimcp.server.logbridge import LogBridge
from trimcp.server.server import Server
from trimcp.testing.connect import connected, every_revision
from trimcp.wire.revisions import LATEST, LATEST_LEGACY, Revision

LOG = logging.getLogger("bridged.inner")


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    logger = logging.getLogger("bridged")
    logger.setLevel(logging.DEBUG)
    yield
    logger.setLevel(logging.NOTSET)
    assert logger.handlers == [], "a bridge was left behind"


def make_server() -> Server[Any]:
    @asynccontextmanager
    async def lifespan(server: Server[Any]) -> AsyncIterator[None]:
        with LogBridge(server, "bridged"):
            LOG.warning("nobody is there yet")
            yield

    server = Server("s", lifespan=lifespan)

    @server.tool
    async def work() -> str:
        LOG.info("in %s", "a task")
        logging.getLogger("trimcp.session").warning("never sent")
        logging.getLogger("other").warning("never sent")
        return "done"

    @server.tool
    def in_thread() -> str:
        LOG.error("in a thread")
        return "done"

    @server.tool
    async def every_level() -> str:
        for level in (5, 10, 15, 20, 30, 40, 50, 60):
            LOG.log(level, str(level))
        return "done"

    return server


def listener(level: Any = "debug") -> tuple[Client, list[tuple[str, Any, str]]]:
    client = Client("c", log_level=level)
    heard: list[tuple[str, Any, str]] = []
    client.logging(lambda params: heard.append((params.level, params.data, params.logger)))
    return client, heard


@every_revision
async def test_records_go_to_whoever_is_being_served(revision: Revision) -> None:
    client, heard = listener()
    async with connected(make_server(), client, revision=revision) as session:
        await session.set_log_level("debug")
        await session.call_tool("work")
        await session.call_tool("in_thread")
    assert heard == [("info", "in a task", "bridged.inner"), ("error", "in a thread", "bridged.inner")]


@every_revision
async def test_levels_become_the_clients_and_are_filtered_by_its_wish(revision: Revision) -> None:
    client, heard = listener()
    async with connected(make_server(), client, revision=revision) as session:
        await session.set_log_level("warning")
        await session.call_tool("every_level")
        await session.set_log_level("debug")
        await session.call_tool("every_level")
    LOG.warning("after the end")
    high = [("warning", "30"), ("error", "40"), ("critical", "50"), ("critical", "60")]
    low = [("debug", "10"), ("debug", "15"), ("info", "20")]
    assert [entry[:2] for entry in heard] == [*high, *low, *high]


@pytest.mark.parametrize("revision", [LATEST_LEGACY, LATEST], ids=str)
async def test_outside_a_request_only_legacy_clients_hear(revision: Revision) -> None:
    client, heard = listener()
    async with connected(make_server(), client, revision=revision) as session:
        await session.set_log_level("info")
        LOG.info("from the loop")
        LOG.debug("too low")
        thread = threading.Thread(target=LOG.info, args=["from a thread"])
        thread.start()
        await trio.to_thread.run_sync(thread.join)
        await session.ping()
    expected = [] if revision.modern else ["from the loop", "from a thread"]
    assert [data for _, data, _ in heard] == expected


@pytest.mark.parametrize("name", ["trimcp", "trimcp.session", ""])
async def test_our_own_records_are_never_sent(name: str) -> None:
    with pytest.raises(ValueError, match="trimcp's own"):
        LogBridge(Server("s"), "fine", name)


async def test_a_record_that_cannot_be_formatted_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server()

    @server.tool
    async def wrong() -> str:
        LOG.info("%d", "no number")
        LOG.info("lone surrogate \ud800")
        return "done"

    client, heard = listener()
    with monkeypatch.context() as patch:
        patch.setattr(logging, "raiseExceptions", False)
        async with connected(server, client) as session:
            await session.set_log_level("debug")
            assert (await session.call_tool("wrong")).is_error is False
            await session.call_tool("work")
    assert heard[-1] == ("info", "in a task", "bridged.inner")
