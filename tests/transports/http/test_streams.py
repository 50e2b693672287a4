"""The streams of a face: which are kept alive, and that those that ended are let go of."""

from __future__ import annotations

from typing import Any

import trio

from tests.transports.http.face import LEGACY, visiting
from tests.transports.http.test_exchange import make_server


async def test_streams_that_ended_are_watched_no_longer(autojump_clock: Any) -> None:
    async with visiting(make_server(), LEGACY) as visitor:
        for _ in range(3):
            visitor.session = None
            await visitor.initialize()
            stream = await visitor.listen()
            await visitor.send("DELETE", "/mcp", headers={"mcp-session-id": visitor.session or ""})
            assert stream.finished
        visitor.session = None
        await visitor.initialize()
        stream = await visitor.listen()
        await trio.sleep(visitor.face.settings.keep_alive)
        assert len(visitor.face.shared.open_streams._read) == 1
        stream.leave()
        assert visitor.face.shared.open_streams._read == {}
