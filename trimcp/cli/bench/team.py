"""`trimcp bench` with several generators: starting or awaiting them, and being one of them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

import attrs
import trio

from trimcp.bench.discovery import Target
from trimcp.bench.engine import measure
from trimcp.bench.plan import Plan
from trimcp.bench.report import Failures, Report
from trimcp.bench.team import Team, join
from trimcp.cli.conversation import Stop
from trimcp.cli.exits import NO_CONNECTION, Failure
from trimcp.cli.text import theirs
from trimcp.errors import ConnectionLost
from trimcp.support.nurseries import open_service_nursery

SECRET: Final = "TRIMCP_BENCH_SECRET"  # noqa: S105 - the name of a variable
"""The environment variable that holds the secret that all generators share."""
_LOCAL: Final = "127.0.0.1"
_LEAST: Final = 16


def shared_secret() -> bytes:
    """Return the secret from the environment. Raises Failure: there is none, or it is too short."""
    secret = os.environ.get(SECRET, "")
    if len(secret) < _LEAST:
        raise Failure(f"--listen and --join need one secret of {_LEAST} characters or more, in {SECRET}")
    return secret.encode()


def read_address(text: str, option: str) -> tuple[str, int]:
    """Return host and port. Raises Failure: the text has none."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise Failure(f"{option} takes HOST:PORT, such as 10.0.0.1:9000, not {text!r:.60}")
    return host.strip("[]"), int(port)


async def measure_together(
    command: Sequence[str], plan: Plan, size: int, listen: str | None, stop: trio.Event, say: Callable[[str], object]
) -> Report:
    """Measure with several generators, and return the sum.

    `command`: the words that name the server, for processes that are started here; with `listen` others join instead.
    `say`: told when they begin, how well their clocks agree, and who died. Raises Failure, LocalError: it cannot begin.
    """
    host, port = (_LOCAL, 0) if listen is None else read_address(listen, "--listen")
    secret = secrets.token_hex(32).encode() if listen is None else shared_secret()
    team = Team(secret, size, plan, stop, say)
    try:
        listeners = await trio.open_tcp_listeners(port, host=host)
    except OSError as error:
        raise Failure(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
    async with open_service_nursery() as nursery:
        if listen is None:
            place = f"{_LOCAL}:{listeners[0].socket.getsockname()[1]}"
            words = [sys.executable, "-m", "trimcp.cli", "bench", *command, "--quiet", "--join", place]
            for number in range(size):
                nursery.start_soon(_run_generator, words, secret, team, number + 1)
        else:
            say(f"waiting for {size} generators at {host}:{listeners[0].socket.getsockname()[1]}")
        report = await team.run(listeners)
        nursery.cancel_scope.cancel()
    if not team.lost:
        return report
    for why in team.lost:
        say(theirs(why))
    errors = {**report.errors, "a generator died": Failures(len(team.lost), theirs(team.lost[0]))}
    return attrs.evolve(report, errors=errors)


async def _run_generator(words: Sequence[str], secret: bytes, team: Team, number: int) -> None:
    """Run one process to its end; it has a session of its own, so that Ctrl-C reaches only us."""
    run = partial(trio.run_process, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    environment = {**os.environ, SECRET: secret.decode()}
    done = await run(list(words), env=environment, capture_stderr=True, start_new_session=True)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        team.fail(f"generator {number}: {theirs(last[0].removeprefix('Error: '))}")


async def be_generator(address: str, targets: Sequence[Target], pids: tuple[int, ...], stop: Stop) -> None:
    """Join whoever listens, and measure what it says. Raises Failure, McpError."""
    host, port = read_address(address, "--join")
    secret = shared_secret()
    try:
        stream = await trio.open_tcp_stream(host, port)
    except OSError as error:
        raise Failure(f"nobody listens at {host}:{port}: {error}", NO_CONNECTION) from None

    async def measured(plan: Plan, gate: Callable[[], Awaitable[None]], told: trio.Event) -> Report:
        return await measure(targets, attrs.evolve(plan, pids=pids or plan.pids), stop=told, gate=gate)

    async with stream:
        try:
            await join(stream, secret, measured, stop.came)
        except ConnectionLost as error:
            raise Failure(f"{host}:{port}: {error}", NO_CONNECTION) from None
