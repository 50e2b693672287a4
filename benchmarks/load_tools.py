"""The percentiles of `trimcp bench` beside those of other load generators, against one server whose delays are known.

    python benchmarks/load_tools.py [--seconds 10] [--under-way 8] [--rate 100] [--stall 2]

The server is trimcp's, over Streamable HTTP of 2026-07-28 with JSON replies. Its tool waits 2 ms and an exponential
time with a mean of 5 ms, so the percentiles of its delay are known; what comes on top is the same for all generators.
They take turns, three times, on one machine. wrk and hey come from Debian, oha from `cargo install oha`; who is not
installed is left out. With `--rate` calls begin at that rate, whether answered or not, and times count from when a call
was due; wrk has no such mode. With `--stall` the server is stopped for so many seconds in the middle of each turn.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from trimcp.bench.plan import MixEntry, prepare
from trimcp.wire.revisions import LATEST

LEAST, MEAN = 0.002, 0.005
SERVER = f"""
import random, trimcp, trio
server = trimcp.Server("reference", version="1")
chance = random.Random(1)

@server.tool
async def wait() -> str:
    await trio.sleep({LEAST} + chance.expovariate({1 / MEAN}))
    return "done"

settings = trimcp.HttpSettings(reply="json")
trimcp.run_http(server, port=0, settings=settings, ready=lambda urls: print(urls[0], flush=True))
"""
PERCENTILES = (50, 75, 90, 99)


def request() -> tuple[bytes, dict[str, str]]:
    """The body and the headers of a call, as `trimcp bench` sends them."""
    made = prepare(MixEntry.tool("wait"), LATEST, progress=False, http=True)
    lines = [line.split(": ", 1) for line in made.render_headers(1).decode().splitlines()]
    headers = {"accept": "application/json, text/event-stream", "content-type": "application/json", **dict(lines)}
    return made.render(1, 1), headers


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def of_trimcp(url: str, seconds: int, under_way: int, rate: float | None) -> dict[int, float]:
    paced = () if rate is None else ("--rate", str(rate))
    words = ("bench", url, "--tool", "wait", "--under-way", str(under_way), "--seconds", str(seconds), "-q", "--json")
    report = json.loads(run(sys.executable, "-m", "trimcp.cli", *words, *paced))
    total = sum(count for _, count in report["histogram"])
    found = {}
    for percent in PERCENTILES:
        left = math.ceil(percent / 100 * total)
        for edge, count in report["histogram"]:
            left -= count
            if left <= 0:
                found[percent] = edge
                break
    return found


def of_wrk(url: str, seconds: int, under_way: int, rate: float | None) -> dict[int, float]:
    body, headers = request()
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        lines = ['wrk.method = "POST"', f"wrk.body = [==[{body.decode()}]==]"]
        lines += [f'wrk.headers["{name}"] = "{value}"' for name, value in headers.items()]
        script.write("\n".join(lines))
        script.flush()
        told = run("wrk", "-t1", f"-c{under_way}", f"-d{seconds}s", "--latency", "-s", script.name, url)
    if "Non-2xx" in told:
        raise SystemExit(f"wrk was refused: {told}")
    units = {"us": 1e-3, "ms": 1.0, "s": 1e3}
    found = re.findall(r"^\s+(\d+)%\s+([\d.]+)(us|ms|s)$", told, re.MULTILINE)
    return {int(percent): float(value) * units[unit] for percent, value, unit in found}


def of_hey(url: str, seconds: int, under_way: int, rate: float | None) -> dict[int, float]:
    body, headers = request()
    kind = headers.pop("content-type")
    words = [word for name, value in headers.items() for word in ("-H", f"{name}: {value}")]
    paced = [] if rate is None else ["-q", str(rate / under_way)]
    load = ["-z", f"{seconds}s", "-c", str(under_way), "-m", "POST", "-T", kind, "-d", body.decode()]
    told = run("hey", *load, *words, *paced, url)
    if "[200]" not in told:
        raise SystemExit(f"hey was refused: {told}")
    found = re.findall(r"^\s+(\d+)%+ in ([\d.]+) secs$", told, re.MULTILINE)
    return {int(percent): float(value) * 1e3 for percent, value in found if int(percent) in PERCENTILES}


def of_oha(url: str, seconds: int, under_way: int, rate: float | None) -> dict[int, float]:
    body, headers = request()
    kind = headers.pop("content-type")
    words = [word for name, value in headers.items() for word in ("-H", f"{name}: {value}")]
    paced = [] if rate is None else ["-q", f"{rate:g}", "--latency-correction"]
    load = ["-z", f"{seconds}s", "-c", str(under_way), "-m", "POST", "-T", kind, "-d", body.decode()]
    told = json.loads(run("oha", "--no-tui", "--output-format", "json", *load, *words, *paced, url))
    if told["summary"]["successRate"] < 1 or list(told["statusCodeDistribution"]) != ["200"]:
        raise SystemExit(f"oha was refused: {told['statusCodeDistribution']}")
    return {percent: told["latencyPercentiles"][f"p{percent}"] * 1e3 for percent in PERCENTILES}


def known(percent: float, seconds: float, stall: float) -> float:
    """Return this percentile of the delays in milliseconds, where calls are due evenly and the server stops once."""

    def longer(delay: float) -> float:
        return math.exp(-max(delay - LEAST, 0.0) / MEAN)

    def share(delay: float) -> float:
        stopped = sum(longer(delay - stall * (step + 0.5) / 2000) for step in range(2000)) / 2000
        return (1 - stall / seconds) * longer(delay) + stall / seconds * stopped

    low, high = 0.0, stall + 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) > 1 - percent / 100 else (low, middle)
    return 1e3 * low


@contextmanager
def stopped(server: subprocess.Popen[bytes], seconds: float, stall: float) -> Iterator[None]:
    """Stop a process for a while in the middle of these seconds."""

    def stop() -> None:
        server.send_signal(signal.SIGSTOP)
        time.sleep(stall)
        server.send_signal(signal.SIGCONT)

    timer = threading.Timer(seconds / 2, stop)
    if stall:
        timer.start()
    yield
    timer.cancel()


TOOLS: dict[str, Callable[[str, int, int, float | None], dict[int, float]]] = {
    "trimcp bench": of_trimcp,
    "wrk": of_wrk,
    "hey": of_hey,
    "oha": of_oha,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--under-way", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--stall", type=float, default=0.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "server.py"
        file.write_text(SERVER)
        server = subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE)
        assert server.stdout is not None
        try:
            url = server.stdout.readline().decode().strip()
            exact = [known(percent, options.seconds, options.stall) for percent in PERCENTILES]
            print("ms".ljust(22) + "".join(f"p{percent}".rjust(9) for percent in PERCENTILES))
            print("delay of the tool".ljust(22) + "".join(f"{each:9.2f}" for each in exact))
            present = {name: of for name, of in TOOLS.items() if name == "trimcp bench" or shutil.which(name)}
            if options.rate is not None:
                present.pop("wrk", None)
            rounds: dict[str, list[dict[int, float]]] = {name: [] for name in present}
            for number in range(options.rounds):
                for name, of in list(present.items())[:: 1 if number % 2 else -1]:
                    with stopped(server, options.seconds, options.stall):
                        rounds[name].append(of(url, options.seconds, options.under_way, options.rate))
            for name, each in rounds.items():
                values = (median(found[percent] for found in each) for percent in PERCENTILES)
                print(name.ljust(22) + "".join(f"{value:9.2f}" for value in values))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
