# pyright: strict
"""Tests as a user writes them, for type checkers: nothing here runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import assert_type

import pytest
import trio
from trio.testing import MockClock

import trimcp
from tests.typing.user_client import client
from tests.typing.user_server import plain, server
from trimcp.testing import (
    Fault,
    Faults,
    FaultyStream,
    LeakWatch,
    SlowChannel,
    Transcript,
    check_channel,
    connected,
    every_revision,
    faulty,
    replay,
)


@every_revision
async def test_in_every_revision(revision: trimcp.Revision, autojump_clock: MockClock) -> None:
    """A decorated test is still the function that was written."""
    async with connected(server, client, revision=revision, framed=True, force_rerun=True) as session:
        assert_type(session, trimcp.ClientSession)
        assert_type(session.peer.statistics().running, int)
        assert (await session.call_tool("add", {"a": 1})).text == "1"


async def call_it(clock: MockClock) -> None:
    """A test is still a function."""
    await test_in_every_revision(trimcp.LATEST, autojump_clock=clock)


async def test_faults() -> None:
    """Let things go wrong, and see what did."""
    faults = Faults(seed=1, delay=2)
    async with connected(plain, faults=faults) as session:
        await session.ping()
    assert_type(faults.journal[0], Fault)
    target = faulty(trimcp.in_process(plain), seed=5, cut=0.1)
    async with client.connect(target) as session:
        await session.ping()
    assert_type(target.faults, Faults)
    async with connected(plain, wrap=lambda channel: SlowChannel(channel, receive_delay=1)) as session:
        await session.ping()


async def test_a_stream(stream: trio.abc.HalfCloseableStream) -> None:
    """Spoil bytes."""
    await FaultyStream(stream, seed=1, small=3).send_all(b"")


@asynccontextmanager
async def pair() -> AsyncGenerator[tuple[trimcp.MessageChannel, trimcp.MessageChannel], None]:
    """Two connected ends."""
    yield trimcp.memory_channels()


async def test_the_contract() -> None:
    """A transport keeps its promises."""
    await check_channel(pair, clogs=False)


async def test_a_conversation() -> None:
    """A server says what it said."""
    await replay(Transcript.read("weather.txt"), server)
    await replay(Transcript.load("weather.jsonl"), trimcp.stdio("weather"), ignore=["/result/structuredContent/time"])


@pytest.mark.trimcp_leaks(allow=["thread"])
def test_leaks(trimcp_leaks: LeakWatch) -> None:
    """What a test leaves behind."""
    trimcp_leaks.allow("task:logger-*")
    assert not trimcp_leaks.found()
