"""Run the official conformance suite against our server, on both its hosts, and our client, in every version.

    nox -s conformance
    nox -s conformance -- --server --version 2026-07-28 --scenario 'tools-*'

What it forgives we do not: a check that was skipped, a check with a warning, a client that fails. We judge by what it
writes of each check, and only a reason in `REASONS` forgives. To start it takes most of its time, so it goes through
all scenarios of a version in one process, with our server; with our client it tells how that ended only where it was
started for one scenario.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import trio

HERE = Path(__file__).parent
MAIN = Path("@modelcontextprotocol", "conformance", "dist", "index.js")
HOSTS = ("own", "http/2", "hypercorn", "proxy")
"""Our own listener, the same behind a proxy that speaks HTTP/2 to it, Hypercorn, and `trimcp.proxy` before our own."""

EXTENSIONS = "extensions"
"""In place of a version: authorization by extensions of the specification, skills and tasks, which stand in none."""

SKILLS, TASKS = "sep-2640-", "tasks-"

UNCHECKED = frozenset({"tasks-status-notifications"})
"""What the suite lists and skips, whatever a server does: `tests/server/test_tasks.py` looks at it."""

# How many scenarios each version has for each side. If the suite suddenly lists fewer, that is no success.
SCENARIOS = {
    "2025-03-26": {"server": 1, "client": 2},
    "2025-06-18": {"server": 27, "client": 5},
    "2025-11-25": {"server": 33, "client": 19},
    "2026-07-28": {"server": 40, "client": 33},
    EXTENSIONS: {"server": 12, "client": 10},
}

# Here the client has to refuse to go on, so it may end with an error.
MAY_FAIL = frozenset(
    f"auth/{name}"
    for name in (
        *("scope-retry-limit", "resource-mismatch", "metadata-issuer-mismatch"),
        *("iss-supported-missing", "iss-wrong-issuer", "iss-unexpected", "iss-normalized"),
    )
) | {f"{SKILLS}client-verify-{what}" for what in ("digest", "size", "frontmatter")}

# They measure time, so nothing may run beside them.
ALONE = frozenset({"sse-retry", "server-sse-polling"})

SLOWEST = 30.0
"""Seconds a scenario may take; the suite's own default."""


@attrs.frozen
class Case:
    """One scenario in one version, for our server on one of its hosts or for our client."""

    side: str
    scenario: str
    version: str
    host: str = ""

    def __str__(self) -> str:
        return f"{self.side:6} {self.host:9} {self.version} {self.scenario}"


@attrs.frozen
class Reason:
    """Why a check may be skipped or end with a warning: which one, what it says then, and why that is right.

    `host`: only there; "" for everywhere.
    """

    scenario: str
    check: str
    says: str
    why: str
    host: str = ""

    def forgives(self, case: Case, check: str, text: str) -> bool:
        """Return whether it is about this check."""
        here = self.host in ("", case.host)
        return here and (self.scenario, self.check) == (case.scenario, check) and self.says in text


REASONS = (
    Reason(
        "server-sse-polling",
        "server-sse-retry-field",
        "did not send retry field",
        "the server behind closes its stream to the proxy, which takes it up again: the client's own stays open",
        "proxy",
    ),
    Reason(
        "http-standard-headers",
        "sep-2243-client-includes-standard-headers",
        "did not send a initialize request",
        "this revision has no handshake",
    ),
    Reason(
        "http-standard-headers",
        "sep-2243-client-includes-standard-headers",
        "did not send a notifications/initialized request",
        "this revision has no handshake",
    ),
    *(
        Reason(
            f"{SKILLS}skills-manifest",
            f"sep-2640-skillmd-metadata-{what}",
            "not listed in resources/list",
            "files of skills are found by skills/list and in their folders, where they are told with this",
        )
        for what in ("name", "description")
    ),
)


@attrs.frozen
class Outcome:
    """What came of a case: how many checks passed, what is wrong, what was forgiven, and how long it took."""

    case: Case
    passed: int
    problems: Sequence[str]
    forgiven: Sequence[str]
    seconds: float


def judge(
    case: Case, checks: Sequence[dict[str, Any]], complaint: str | None, seconds: float, reasons: Sequence[Reason]
) -> Outcome:
    """Decide on a case.

    Args:
        checks: as the suite writes them: `id`, `status`, and an `errorMessage` where something is wrong.
        complaint: what is wrong with the run as a whole, or None.
        reasons: see REASONS.
    """
    passed = own = 0
    problems = [] if complaint is None else [complaint]
    forgiven = []
    for check in checks:
        name, status = check["id"], check["status"]
        if status == "SUCCESS":
            passed += 1
            own += not name.startswith("wire-schema-")  # which the suite adds to every scenario
        elif status != "INFO":
            text = check.get("errorMessage") or (check.get("details") or {}).get("message") or check["description"]
            found = [reason.why for reason in reasons if reason.forgives(case, name, text)]
            if found and status != "FAILURE":
                forgiven.append(f"{status} {name}: {found[0]}")
            else:
                problems.append(f"{status} {name}: {text}")
    if not own and not problems:
        problems.append("nothing of the scenario's own was checked")
    return Outcome(case, passed, problems, forgiven, seconds)


def read_list(text: str) -> dict[str, dict[str, list[str]]]:
    """Return the scenarios of each side in each version, from what `conformance list` prints."""
    _, *parts = re.split(r"^(\w.*) scenarios \(.*\):$", text, flags=re.MULTILINE)
    found: dict[str, dict[str, list[str]]] = {"server": {}, "client": {}}
    for side, part in zip(map(str.lower, parts[::2]), parts[1::2], strict=True):
        for name, versions in re.findall(r"^  - (\S+) \[(.*)\]", part, re.MULTILINE):
            for version in versions.split(",") if side in found else ():
                found[side].setdefault(version, []).append(name)
    return found


@attrs.define(eq=False)
class Suite:
    """The suite as installed, and where it may write.

    Attributes:
        modules: the `node_modules` folder it is in.
        results: a folder of its own for every run.
        url: a server to test in place of ours, or None.
    """

    modules: Path
    results: Path
    url: str | None = None

    async def scenarios(self) -> dict[str, dict[str, list[str]]]:
        """Return the scenarios of each side in each version."""
        done = await self._run("list")
        if done.returncode:
            raise SystemExit(f"the suite does not start (it needs Node 22):\n{done.stderr.decode(errors='replace')}")
        found = read_list(done.stdout.decode())
        for side, versions in found.items():
            extensions = [name for name in versions.pop("extension", ()) if name.startswith(("auth/", SKILLS, TASKS))]
            versions[EXTENSIONS] = [name for name in extensions if name not in UNCHECKED]
            for version, expected in SCENARIOS.items():
                names = versions.setdefault(version, [])
                if len(names) != expected[side]:
                    raise SystemExit(f"{expected[side]} {side} scenarios of {version} expected, not {names}")
        return found

    async def carry_out(self, case: Case, url: str | None) -> Outcome:
        """Run one case, against the server at `url`, or our client."""
        folder = self._folder(case)
        if case.side == "server":
            how = ["server", "--url", str(url)]
        else:
            how = ["client", "--command", shlex.join([sys.executable, str(HERE / "client.py")])]
        start = time.monotonic()
        try:
            done = await self._run(*how, "--scenario", case.scenario, *_within(case.version), "-o", str(folder))
        except trio.TooSlowError:
            return judge(case, [], "the suite hangs", time.monotonic() - start, REASONS)
        seconds = time.monotonic() - start
        checks, complaint = read_results(folder, (done.stdout + done.stderr).decode(errors="replace"))
        if complaint is not None and case.scenario in MAY_FAIL and complaint.startswith("Client exited"):
            complaint = None
        return judge(case, checks, complaint, seconds, REASONS)

    async def carry_out_version(self, cases: Sequence[Case], url: str) -> list[Outcome]:
        """Run all scenarios of a version in one process, against the server at `url`, and judge these of them."""
        folder = self._folder(cases[0], "all")
        how = ["server", "--url", url, "--suite", "all", *_within(cases[0].version), "-o", str(folder)]
        try:
            done = await self._run(*how, scenarios=SCENARIOS[cases[0].version]["server"])
        except trio.TooSlowError:
            return [judge(case, [], "the suite hangs", SLOWEST, REASONS) for case in cases]
        said = read_words((done.stdout + done.stderr).decode(errors="replace"))
        outcomes = []
        for case in cases:
            of_it, seconds = read_folder(folder, case.scenario)
            outcomes.append(judge(case, *read_results(of_it, said.get(case.scenario, "nothing")), seconds, REASONS))
        return outcomes

    def _folder(self, case: Case, what: str = "") -> Path:
        """A new folder for what the suite writes."""
        prefix = f"{case.side}-{case.version}-{(what or case.scenario).replace('/', '-')}-"
        return Path(tempfile.mkdtemp(prefix=prefix, dir=self.results))

    async def _run(self, *arguments: str, scenarios: int = 1) -> subprocess.CompletedProcess[bytes]:
        command = ["node", str(self.modules / MAIN), *arguments]
        env = {**os.environ, "NODE_COMPILE_CACHE": str(self.modules.parent / "compiled")}  # a fifth of its time
        with trio.fail_after((1 + scenarios) * SLOWEST):
            return await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False, env=env)


def _within(version: str) -> list[str]:
    return [] if version == EXTENSIONS else ["--spec-version", version]


def read_words(output: str) -> dict[str, str]:
    """Return what the suite said during each scenario of several."""
    _, *parts = re.split(r"^=== Running scenario: (\S+) ===$", output, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def read_folder(folder: Path, scenario: str) -> tuple[Path, float]:
    """Return where the suite wrote of one scenario of several, and how long that took.

    Where it wrote nothing, that is a folder which is not there.
    """
    for found in folder.glob(f"server-{scenario}-*Z"):
        began = found.name.removeprefix(f"server-{scenario}-")
        if re.fullmatch(r"[\dT-]+Z", began) and (found / "checks.json").exists():  # else another, of a longer name
            start = datetime.strptime(began, "%Y-%m-%dT%H-%M-%S-%fZ").replace(tzinfo=UTC)
            return found, (found / "checks.json").stat().st_mtime - start.timestamp()
    return folder / scenario, 0.0


def read_results(folder: Path, output: str) -> tuple[list[dict[str, Any]], str | None]:
    """Return the checks of a run, and what is wrong beside them: with the client, or with the suite itself."""
    found = list(folder.rglob("checks.json"))
    if not found:
        return [], f"the suite checked nothing: {output[-1500:]}"
    checks = json.loads(found[0].read_bytes())
    failed = re.search(r"^Client (timed out|exited with code \d+)", output, re.MULTILINE)
    if failed is None:
        return checks, None
    last_words = found[0].with_name("stderr.txt").read_text(errors="replace").strip().splitlines()[-12:]
    return checks, "\n       ".join([failed[0], *last_words])


@asynccontextmanager
async def our_server(host: str, results: Path, before: str | None = None) -> AsyncIterator[str]:
    """Start our server on a host, yield its URL, and see that it ends well; or a proxy `before` the server there."""
    if host == "proxy" and before is None:
        async with our_server("own", results) as behind, our_server(host, results, behind) as url:
            yield url
        return
    http2 = host == "http/2"
    software = "own" if http2 or before else host
    command = [sys.executable, str(HERE / "server.py"), "--transport", "http", "--host-software", software]
    command += [] if before is None else ["--before", before]
    log = results / f"server-{host.replace('/', '-')}.log"
    with log.open("wb") as stderr:
        process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, stderr=stderr)
    try:
        assert process.stdout is not None
        with trio.fail_after(SLOWEST):
            url = (await process.stdout.receive_some()).decode().strip()
        if url:
            async with AsyncExitStack() as stack:
                yield await behind_http2(url, stack) if http2 else url
            process.send_signal(signal.SIGTERM)
            with trio.move_on_after(SLOWEST):
                await process.wait()
    finally:
        if process.poll() is None:
            process.kill()
    if not url or process.returncode or "Traceback" in tail(log):
        raise SystemExit(f"the server on {host} ended with {process.returncode}\n{tail(log)}")


async def behind_http2(url: str, stack: AsyncExitStack) -> str:
    """Return the URL of a proxy that speaks HTTP/2 to the server at this URL."""
    from tests.peers.http2_relay import translated

    port = urlsplit(url).port
    assert port is not None
    return url.replace(f":{port}", f":{await stack.enter_async_context(translated(port))}")


def tail(log: Path) -> str:
    """Return the end of a server's log."""
    return log.read_text(errors="replace")[-3000:]


async def run_side(
    suite: Suite, cases: Sequence[Case], url: str | None, jobs: int, whole: bool, report: Callable[[Outcome], None]
) -> None:
    """Run cases several at a time, except those that must be alone.

    Args:
        whole: whether these are all scenarios of their versions.
    """
    slots = trio.CapacityLimiter(jobs)

    async def run_one(case: Case) -> None:
        async with slots:
            report(await suite.carry_out(case, url))

    async def run_version(version: Sequence[Case], url: str) -> None:
        async with slots:
            for outcome in await suite.carry_out_version(version, url):
                report(outcome)

    together = [case for case in cases if case.scenario not in ALONE]
    async with trio.open_nursery() as nursery:
        if whole and url is not None:
            for _, version in groupby(together, lambda case: case.version):
                nursery.start_soon(run_version, list(version), url)
            together = []
        for case in together:
            nursery.start_soon(run_one, case)
    for case in cases:
        if case.scenario in ALONE:
            await run_one(case)


async def run_all(suite: Suite, options: argparse.Namespace) -> list[Outcome]:
    """Run everything the options ask for, printing as it goes."""
    outcomes: list[Outcome] = []

    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(describe(outcome), flush=True)

    scenarios = await suite.scenarios()
    for side in options.sides:
        for host in options.hosts if side == "server" else [""]:
            cases = [
                Case(side, name, version, host)
                for version in options.versions
                for name in scenarios[side][version]
                if not options.scenarios or any(fnmatch(name, pattern) for pattern in options.scenarios)
            ]
            if side == "client" or suite.url is not None:
                await run_side(suite, cases, suite.url, options.jobs, not options.scenarios, report)
            elif cases:
                async with our_server(host, suite.results) as url:
                    await run_side(suite, cases, url, options.jobs, not options.scenarios, report)
    return outcomes


def describe(outcome: Outcome) -> str:
    """One line for an outcome, and one more for everything about it that needs words."""
    word = "FAIL" if outcome.problems else "ok"
    line = f"{word:4} {outcome.case!s:75} {outcome.passed:3} checks {outcome.seconds:5.1f} s"
    return "\n".join([line, *(f"       {text}" for text in (*outcome.problems, *outcome.forgiven))])


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    """How many scenarios passed, by side, host and version."""
    groups: dict[str, list[bool]] = {}
    for outcome in outcomes:
        case = outcome.case
        groups.setdefault(f"{case.side:6} {case.host:9} {case.version}", []).append(not outcome.problems)
    lines = [f"{group}  {sum(passed):2} of {len(passed):2} scenarios" for group, passed in sorted(groups.items())]
    checks = sum(outcome.passed for outcome in outcomes)
    forgiven = sum(len(outcome.forgiven) for outcome in outcomes)
    lines.append(f"{len(outcomes)} scenarios, {checks} checks passed, {forgiven} forgiven, {seconds:.0f} s")
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", dest="sides", action="append_const", const="server", help="only the server")
    parser.add_argument("--client", dest="sides", action="append_const", const="client", help="only the client")
    parser.add_argument("--scenario", dest="scenarios", action="append", help="only these; may have wildcards")
    parser.add_argument("--version", dest="versions", action="append", choices=[*SCENARIOS], help="only these")
    parser.add_argument("--host", dest="hosts", action="append", choices=HOSTS, help="only these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="scenarios at a time")
    parser.add_argument("--url", help="a server to test in place of ours")
    parser.add_argument("--results", type=Path, help="where to keep what the suite wrote; else it is thrown away")
    modules = os.environ.get("TRIMCP_CONFORMANCE")
    parser.add_argument("--modules", type=Path, default=modules, required=modules is None, help="node_modules folder")
    options = parser.parse_args()
    options.sides = options.sides or ["server", "client"]
    options.versions = options.versions or [*SCENARIOS]
    options.hosts = options.hosts or ([""] if options.url else [*HOSTS])
    return options


def main() -> int:
    options = parse_options()
    results = Path(options.results or tempfile.mkdtemp(prefix="conformance-"))
    results.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
        outcomes = trio.run(run_all, Suite(options.modules, results, options.url), options)
    finally:
        if options.results is None:
            shutil.rmtree(results)
    print(summary(outcomes, time.monotonic() - start))
    failed = [outcome.case for outcome in outcomes if outcome.problems]
    print(*(f"failed: {case}" for case in failed), sep="\n", end="\n" if failed else "")
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
