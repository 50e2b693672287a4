"""`trimcp top --web`: what servers do, in a browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import trio

from trimcp.cli.exits import Failure, say
from trimcp.cli.sources import act, connected
from trimcp.cli.web.site import Send, serving
from trimcp.errors import LocalError
from trimcp.run import signals

_PAUSE: Final = 0.5  # seconds between two pictures
_ACTS: Final = frozenset({"cancel", "close", "drain"})
_MEMBERS: Final = ("request", "session", "reason", "grace")


@attrs.frozen
class Watching:
    """The commands of the page."""

    target: str | None  # whose servers it shows; see `sockets_of`

    async def pictures(self, members: Mapping[str, Any], send: Send) -> None:
        """Send pictures of all servers, until the page leaves. One that reads slowly gets fewer of them."""
        async with connected(self.target) as sources:
            while True:
                await send(await sources.pictures())
                await trio.sleep(_PAUSE)

    async def act(self, members: Mapping[str, Any], send: Send) -> None:
        """Cancel, close or drain, as `AdminClient.ask` does."""
        do = members.get("do")
        if do not in _ACTS:
            raise ValueError("`do` is one of cancel, close and drain")
        rest = {name: members[name] for name in _MEMBERS if name in members}
        await send({"done": await act(self.target, members.get("source", ""), do, **rest)})


def watch_in_browser(target: str | None, port: int) -> int:
    """Serve the page until a signal ends it; return the exit code. Raises Failure: it cannot listen there."""

    async def run() -> None:
        watching = Watching(target)
        commands = {"pictures": watching.pictures, "act": watching.act}
        with signals() as stop:
            async with serving("top", commands, port) as url:
                say(f"open {url}")
                await stop.wait()

    try:
        trio.run(run)
    except LocalError as error:
        raise Failure(str(error)) from None
    return 0
