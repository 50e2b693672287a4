"""A small server over standard input and output that counts its own start: `check_spawn.py FILE bytecodes`.

From the first import until its input has ended. It writes to FILE what it counted, for `check.py`.
"""

from __future__ import annotations

import sys

from check_count import BYTECODES, CALLS, Counter

BEFORE = set(sys.modules)


def start() -> None:
    """Do what a program does that serves one tool."""
    import trimcp

    server = trimcp.Server("check", version="1.0")

    @server.tool
    async def echo(text: str) -> str:
        """Return the text."""
        return text

    run_stdio = trimcp.run_stdio
    import trio

    trio._core._run._r.seed(0)  # loaded dice
    run_stdio(server)


def main() -> None:
    """Run as a program."""
    file, what = sys.argv[1:]
    found: dict[str, object]
    if what in (BYTECODES, CALLS):
        counter = Counter(what)
        counter.start()
        start()
        counter.stop()
        found = {"functions": {what: counter.functions()}}
    else:
        import tracemalloc

        tracemalloc.start()
        start()
        found = {"peak": tracemalloc.get_traced_memory()[1]}
        tracemalloc.stop()
    modules = sorted(set(sys.modules) - BEFORE)
    import json

    with open(file, "w", encoding="utf-8") as written:
        json.dump({**found, "modules": modules}, written)


if __name__ == "__main__":
    main()
