"""The official Python client keeps a site busy, and prints a line for each call: `CallHistory` as JSON.

    python tests/replicas/official_load.py URL MODE COUNT PAUSE LONG

It ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from typing import Any

import anyio
import mcp_types as t
from mcp import Client

# What it says of a session that it has no more. It loses one by itself where a message beside a call, such as an answer
# to a question, meets the end of a process.
OVER = ("Connection closed", "Session terminated")

warnings.simplefilter("ignore")
stopping = threading.Event()


def wait_for_end() -> None:
    sys.stdin.read()
    stopping.set()


def say(**said: Any) -> None:
    print(json.dumps(said), flush=True)


async def answer(context: Any, params: Any) -> t.ElicitResult:
    return t.ElicitResult(action="accept", content={"number": 7})


async def one(client: Client, tool: str, arguments: dict[str, Any], to: int, long: float) -> None:
    """Make a call, and say how it ended. Raises what has ended the session, too."""
    numbers: list[int] = []
    ends: list[str] = []
    over: Exception | None = None

    async def progress(done: float, total: float | None, message: str | None) -> None:
        numbers.append(int(done))

    began = time.monotonic()
    try:
        with anyio.fail_after(long):
            result = await client.call_tool(tool, arguments, progress_callback=progress)
        ends.append("error" if result.is_error else "result")
    except TimeoutError:
        ends.append("silent")
    except Exception as error:
        ends.append("error")
        say(why=f"{tool}: {type(error).__name__}: {error}")
        over = error if str(error) in OVER else None
    say(to=to, numbers=numbers, ends=ends, seconds=time.monotonic() - began)
    if over is not None:
        raise over


async def main(url: str, mode: str, count: int, pause: float, long: float) -> None:
    while not stopping.is_set():
        try:
            async with Client(url, mode=mode, elicitation_callback=answer) as client:
                while not stopping.is_set():
                    await one(client, "count", {"to": count, "pause": pause}, count, long)
                    await one(client, "choose", {"name": "x"}, 0, long)
        except Exception as error:
            say(why=f"connection: {type(error).__name__}: {error}")
            await anyio.sleep(0.1)


if __name__ == "__main__":
    threading.Thread(target=wait_for_end, daemon=True).start()
    url, mode, count, pause, long = sys.argv[1:]
    anyio.run(main, url, mode, int(count), float(pause), float(long))
