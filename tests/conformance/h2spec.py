"""Hold our own listener against h2spec, the conformance suite of HTTP/2 and HPACK.

    nox -s h2spec
    nox -s h2spec -- http2/6.9

It is written in Go: `nox -s h2spec` builds it. Tests that fail are told, and are errors, but for those in `REASONS`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import trio

import trimcp

TESTS = 145
"""How many there are. If the suite suddenly has fewer, that is no success."""

REASONS = {
    "Sends invalid connection preface": (
        "it wants the connection closed without a word; a client that begins with a request of HTTP/1.1 gets a 400"
    ),
}
"""What may fail, and why."""


async def serve_and_run(program: str, sections: list[str]) -> int:
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(partial(trimcp.serve_http, trimcp.Server("h2spec", version="1"), port=0))
        status = await trio.to_thread.run_sync(run, program, str(urlsplit(urls[0]).port), sections)
        nursery.cancel_scope.cancel()
    return status


def run(program: str, port: str, sections: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [program, "-h", "127.0.0.1", "-p", port, "-P", "/healthz", "--timeout", "5", "-j", str(report)]
        subprocess.run([*command, *sections], stdout=subprocess.DEVNULL, timeout=600, check=False)
        found = ElementTree.parse(report).getroot()
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    status = 0
    for suite in found.iter("testsuite"):
        for case in suite.iter("testcase"):
            what = f"{suite.get('package')}/{suite.get('id')} {case.get('classname')}"
            if case.find("skipped") is not None:
                counts["skipped"] += 1
                print(f"skipped by the suite: {what}")
            elif case.find("error") is not None or case.find("failure") is not None:
                reason = REASONS.get(case.get("classname", ""))
                counts["failed"] += 1
                print(f"{'FAILED' if reason is None else 'fails, because ' + reason}: {what}")
                status = status or int(reason is None)
            else:
                counts["passed"] += 1
    total = sum(counts.values())
    print(f"{total} tests of h2spec: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    if total < TESTS and not sections:
        print(f"there should be {TESTS}")
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(trio.run(serve_and_run, os.environ["TRIMCP_H2SPEC"], sys.argv[1:]))
