"""The other side of `dashboard.py`: subscribes to its resources and shows them as they change, for as long as you like.

Run it:       python examples/dashboard_client.py [URL]            (by default http://127.0.0.1:8000/mcp)
              python examples/dashboard_client.py --batch 500      (and give the machine something to do)

What to look at:

- It never asks "anything new?". One stream stays open, the server says what changed, and only that is read again.
- Kill the server and start it again: the connection is lost, and a new one is made after a while that doubles up to
  half a minute. Nothing else in this file is about networks.
- Everything ends with its owner: Ctrl+C cancels the nursery, and with it the call, the subscription and the connection.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import trio
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import trimcp

RESOURCES = ("metrics://now", "jobs://recent")
SHOWN = 60
BARS = "▁▂▃▄▅▆▇█"
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0


@attrs.define(eq=False)
class View:
    """What is on the screen."""

    values: dict[str, deque[float]] = attrs.field(factory=dict)
    jobs: list[dict[str, Any]] = attrs.field(factory=list)
    state: str = "connecting"
    updates: int = 0
    connections: int = 0
    batch: tuple[float, float] | None = None
    since: float = attrs.field(factory=time.monotonic)

    def take(self, uri: str, contents: Any) -> None:
        """Take in what a resource holds now."""
        self.updates += 1
        if uri == "jobs://recent":
            self.jobs = contents
            return
        for name, value in contents.items():
            if name != "at" and isinstance(value, (int, float)):
                self.values.setdefault(name, deque(maxlen=SHOWN)).append(value)

    def render(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("metric")
        table.add_column("now", justify="right")
        table.add_column("the last minute")
        for name, values in self.values.items():
            table.add_row(plain(name), f"{values[-1]:g}", sparkline(values))
        for job in self.jobs[-5:]:
            why = f" ({job['why']})" if job["why"] else ""
            table.add_row(
                plain(f"job {job['number']}"), plain(f"{job['done']}/{job['items']}"), plain(job["state"] + why)
            )
        parts: list[RenderableType] = [table]
        if self.batch is not None:
            done, total = self.batch
            parts.append(ProgressBar(total=total, completed=done, width=SHOWN))
        minutes, seconds = divmod(int(time.monotonic() - self.since), 60)
        told = f"{self.state} · {self.updates} updates · connected {self.connections} times · {minutes}:{seconds:02}"
        return Group(*parts, plain(told))


def plain(text: str) -> Text:
    """Return what a server said as text: it is no markup, and moves no cursor."""
    return Text("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))


def sparkline(values: deque[float]) -> str:
    """Return the values as little bars between the least and the largest of them."""
    least, span = min(values), max(values) - min(values)
    return "".join(BARS[round((value - least) / span * (len(BARS) - 1))] if span else BARS[0] for value in values)


async def follow(session: trimcp.ClientSession, view: View, changed: Callable[[], object]) -> None:
    """Read the resources, and again whenever the server says that they changed, until it says goodbye."""
    async with session.listen(resources=RESOURCES) as changes:
        for uri in RESOURCES:
            await read(session, uri, view)
        changed()
        async for change in changes:
            if isinstance(change, trimcp.ResourceUpdated):
                await read(session, change.uri, view)
                changed()


async def read(session: trimcp.ClientSession, uri: str, view: View) -> None:
    contents = (await session.read_resource(uri, fresh=True)).contents[0]
    if isinstance(contents, trimcp.wire.TextResourceContents):
        view.take(uri, json.loads(contents.text))


async def work(session: trimcp.ClientSession, items: int, view: View, changed: Callable[[], object]) -> None:
    """Let the server do a batch job, and show how far it is."""
    async with session.calling("batch", {"items": items}) as call:
        async for step in call.progress:
            view.batch = (step.progress, step.total or items)
            changed()
        await call.result()
    view.batch = None


async def stay_connected(target: trimcp.Target, items: int, view: View, changed: Callable[[], object]) -> None:
    """Follow the server; when it is lost, wait and connect again. The batch job is asked for once."""
    client = trimcp.Client("dashboard-client", version="1.0.0")
    pause = FIRST_PAUSE
    while True:
        try:
            async with client.connect(target) as session, trio.open_nursery() as nursery:
                view.connections += 1
                view.state = f"connected, {session.revision.name}"
                pause = FIRST_PAUSE
                if items:
                    nursery.start_soon(work, session, items, view, changed)
                    items = 0
                await follow(session, view, changed)
                nursery.cancel_scope.cancel()
            view.state = "the server has said goodbye"
        except* (trimcp.McpError, OSError) as group:
            view.state = f"not connected: {innermost(group)}"
        view.batch = None
        changed()
        await trio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def innermost(error: BaseException) -> BaseException:
    """Return the first error of a group: the follower and the batch job may have failed together."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def show(target: trimcp.Target, items: int, console: Console) -> None:
    view = View()
    with Live(view.render(), console=console, auto_refresh=False) as live:
        await stay_connected(target, items, view, lambda: live.update(view.render(), refresh=True))


def main() -> None:
    """Show the dashboard named on the command line until Ctrl+C."""
    parser = argparse.ArgumentParser(description="Show a dashboard server, live.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000/mcp")
    parser.add_argument("--batch", type=int, default=0, metavar="ITEMS", help="let the server work on so many items")
    options = parser.parse_args()
    try:
        trio.run(show, trimcp.http(options.url), options.batch, Console())
    except* KeyboardInterrupt:  # in the groups of the nurseries it came through
        pass


if __name__ == "__main__":
    main()
