"""What is measured, as data: each cell one kind of work that every implementation able to do it does in turn.

`plan` says what a cell costs in time, so that the whole stays within what `nox -s bench` promises.
"""

from __future__ import annotations

from typing import Literal

import attrs
from names import (
    BEFORE,
    COMPILED,
    FASTMCP,
    FLOOR,
    GO_SDK,
    HTTP1,
    HYPERCORN,
    MCP,
    MCP_1,
    OF_GRPC,
    ORDER,
    OURS,
    TYPESCRIPT,
)

__all__ = ["CELLS", "COMPARED", "SECTIONS", "WINDOWS", "Cell", "Figure", "Section", "cell"]

LEGACY = "2025-11-25"
MODERN = "2026-07-28"
UNDER_WAY = 64
WINDOWS = (1, 4, 16, 64, 256, 1024)
COMPARED = (16, 256)
REPORTS = 1000

Kind = Literal[
    "load",
    "client",
    "memory",
    "cold start",
    "sessions",
    "come and go",
    "told",
    "slow reader",
    "idle",
    "agent grpc",
    "http2 cost",
]
Road = Literal["stdio", "http", "sse", "websocket"]

# The quickest of them are known; one of a kind has nobody to stand in.
_RIVALS = dict.fromkeys(("stdio", "http", "sse"), (OURS, MCP, TYPESCRIPT, *COMPILED, FLOOR)) | {
    "websocket": (OURS, MCP_1)
}
_OTHERS_ROUNDS = 2
# A compiler that works while the program runs needs a few thousand.
_WARM = 6000
_ECHO = ("--tool", "echo", "--arg", "text=hello {n}", "--expect", "hello {n}")


@attrs.frozen
class Cell:
    """One kind of work.

    Attributes:
        name: in results and on the command line.
        title: in tables.
        section: where it is shown.
        kind: who measures it; `load` is `trimcp bench`, and `client` the client of each peer.
        road, revision, reply: how a server is reached, and what it has to answer with over Streamable HTTP.
        serve: how it is told to answer, if not so; "auto" is JSON until there is something to tell before the result.
        server: whose server all clients call, where clients are measured.
        words: what `trimcp bench` is told to do.
        under_way: at the same time, on each connection; over Streamable HTTP each has a connection of its own.
        connections: of the load, each a session.
        workers: processes that serve, by `trimcp run --workers`. They and the load share as many cores.
        beside: cells of one name here take their turns in the same rounds, since they are compared.
        collected: whether to note the share of its CPU that a server spends collecting garbage.
        payload: bytes of the text that is echoed instead, where there is one; `words` are not used then.
        least_bytes: a reply shorter than this cannot be right.
        reports: progress notifications in each call, if they are what is counted.
        environment: the servers' own.
        peers: who takes part, if it offers this.
        seconds: measured for each turn, after `warm_up` seconds not measured; or after `warm_calls`, where a server is
            started for the turn (a slow peer gets fewer), so that its start is over by then.
        rivals: whom the bars are about. The others have at most two rounds.
        rounds: how often each peer has its turn.
        quick: whether it is part of the quick form, with `quick_rounds` of `rivals`.
        overhead: seconds a turn takes beside those: starting, connecting, ending.
    """

    name: str
    title: str
    section: str
    kind: Kind = "load"
    road: Road = "stdio"
    revision: str = LEGACY
    reply: Literal["json", "sse"] | None = None
    serve: str | None = attrs.field(default=attrs.Factory(lambda cell: cell.reply, takes_self=True), kw_only=True)
    server: str = FLOOR
    words: tuple[str, ...] = _ECHO
    under_way: int = UNDER_WAY
    connections: int = 1
    workers: int = 0
    beside: str = ""
    collected: bool = False
    payload: int = 0
    least_bytes: int = 0
    reports: int = 0
    environment: dict[str, str] = attrs.field(factory=dict)
    peers: tuple[str, ...] = tuple(peer for peer in ORDER if peer != BEFORE)
    seconds: float = 0.8
    warm_up: float = 0.25
    warm_calls: int = attrs.field(
        default=attrs.Factory(lambda cell: _WARM if cell.road == "stdio" else 0, takes_self=True)
    )
    rounds: int = 5
    rivals: tuple[str, ...] = attrs.field(
        default=attrs.Factory(
            lambda cell: tuple(peer for peer in cell.peers if peer in _RIVALS[cell.road]), takes_self=True
        )
    )
    quick: bool = True
    quick_rounds: int = 1
    # Over stdio the generator starts a server twice, the first time to see what it is.
    overhead: float = attrs.field(
        default=attrs.Factory(lambda cell: 1.6 if cell.road == "stdio" else 0.8, takes_self=True)
    )

    def beside_before(self) -> Cell:
        """Return the same cell, in which an earlier trimcp takes part."""
        return attrs.evolve(self, peers=(*self.peers, BEFORE), rivals=(*self.rivals, BEFORE))

    def rounds_of(self, peer: str, rounds: int) -> int:
        """Return how many of the rounds a peer takes part in."""
        return rounds if peer in self.rivals else min(rounds, _OTHERS_ROUNDS)

    def turn(self, *, quick: bool) -> float:
        """Return how many seconds one turn is expected to take."""
        return (self.seconds + self.warm_up) * (0.4 if quick else 1.0) + self.overhead


@attrs.frozen
class Figure:
    """One thing that is counted.

    Attributes:
        name: in results.
        title: of its table.
        more: more is better.
        compared: a ratio to others means something.
    """

    name: str
    title: str
    more: bool = False
    compared: bool = True


@attrs.frozen
class Section:
    """Some cells, and the figures that are shown of them: each figure a table, some with a plot above it.

    Attributes:
        plots: by the name of the figure, the plot's and what it shows.
    """

    name: str
    title: str
    text: str
    figures: tuple[Figure, ...]
    plots: dict[str, tuple[str, str]] = attrs.field(factory=dict)


CPU = Figure("cpu", "CPU µs of the server per call")
RATE = Figure("rate", "calls per second", more=True)
P50 = Figure("p50", "latency, p50, ms")
P99 = Figure("p99", "latency, p99, ms")
P999 = Figure("p99.9", "latency, p99.9, ms")
GENERATOR = Figure("generator", "how busy the load generator was, share of its core", compared=False)
PEAK = Figure("memory", "memory of the server at its most, MiB")
COLLECTED = Figure("collected", "share of the server's CPU that went into collecting garbage", compared=False)

SECTIONS = (
    Section(
        "calls",
        "One call",
        "`tools/call` of an async function with one checked text argument, 64 under way at any time on one session.",
        (CPU, RATE, P50, P99, P999, PEAK, GENERATOR),
        {
            "cpu": ("cpu-per-call", "CPU time per call, for each transport"),
            "p50": ("latency", "Latency percentiles, for each transport"),
        },
    ),
    Section(
        "clients",
        "The client's side",
        "The same call by each implementation's own client, to one server that is the same for all of them: the minimal"
        " one, or where it says so another's. What is counted is the client's process alone.",
        (
            Figure("cpu", "CPU µs of the client per call"),
            RATE,
            P50,
            P99,
            Figure("memory", "memory of the client at its most, MiB"),
            Figure("server", "how busy the server was, share of its core", compared=False),
        ),
        {"cpu": ("client-cpu", "CPU time of the client per call")},
    ),
    Section(
        "in memory",
        "Client and server in one process",
        "The same call between an implementation's own client and server, without bytes in between where it can.",
        (Figure("rate", "calls per second of CPU, both sides", more=True),),
        {"rate": ("in-memory", "Calls per second of CPU within one process")},
    ),
    Section(
        "progress",
        "Progress",
        f"A call that reports progress {REPORTS:,} times and awaits each report; every one arrives and is counted.",
        (
            Figure("cpu", "CPU µs of the server per progress notification"),
            Figure("rate", "progress notifications per second", more=True),
        ),
        {"cpu": ("progress", "CPU time per progress notification")},
    ),
    Section(
        "grpc",
        "gRPC",
        "Agent tools through gRPC, beside the same service written on grpcio's asyncio server and on grpc-go: `Call`,"
        " and `CallStream` with its progress. Whoever calls the servers is the same client; the clients call grpcio's.",
        (Figure("cpu", "CPU µs per call, or per message of a stream"),),
    ),
    Section(
        "http2",
        "HTTP/2",
        "Our own listener over HTTP/2 beside itself over HTTP/1.1: `tools/call` with 64 under way, on one connection of"
        " HTTP/2 and on 64 of HTTP/1.1; connections that were used once; and requests whose body does not come, 50 on"
        " each connection of HTTP/2 and one on each of HTTP/1.1.",
        (Figure("cpu", "CPU µs of the server per call"), Figure("memory", "memory of each, KiB")),
    ),
    Section(
        "windows",
        "More at a time",
        "The same call with 1 to 1,024 under way. A server that is in order answers no fewer when more is asked of it.",
        (RATE, CPU, P99, COLLECTED),
        {"rate": ("windows", "Calls per second against calls under way")},
    ),
    Section(
        "workers",
        "More processes",
        "One worker on one core, which it shares with the load, and two workers on two: whoever scales has twice as"
        " many calls per second (Streamable HTTP, 2026-07-28, JSON).",
        (RATE, CPU, P99),
        {"rate": ("workers", "Calls per second with one worker and with two")},
    ),
    Section(
        "sessions",
        "Sessions",
        "Sessions that do nothing, each with an open stream: over Streamable HTTP (2025-11-25) that of its GET, over"
        " WebSocket the connection itself.",
        (
            Figure("memory", "a session with an open stream, KiB"),
            Figure("opening", "opening one, CPU ms"),
            Figure("calling", "a call in each, CPU ms"),
            Figure("closing", "closing one, CPU ms"),
            Figure("kept", "kept of each after all were closed, KiB"),
            Figure("growth", "added to the peak by each in the last round, KiB"),
        ),
        {"memory": ("sessions", "Memory of a session with an open stream")},
    ),
    Section(
        "come and go",
        "Sessions that come and go",
        "A connection, `initialize` (2025-11-25), one call, `DELETE`, and the end of the connection, 64 at a time.",
        (Figure("cpu", "CPU µs of the server per session"), Figure("rate", "sessions per second", more=True)),
    ),
    Section(
        "told",
        "Telling of a change",
        "A resource changes to which so many sessions of Streamable HTTP (2025-11-25) have subscribed, each with its"
        " stream. Once nobody calls meanwhile; once somebody else does, one call after the other, until each has been"
        " told.",
        (
            Figure("cpu", "CPU µs of the server per subscriber"),
            Figure("meanwhile", "longest call of somebody else meanwhile, ms"),
        ),
    ),
    Section(
        "lists",
        "Many tools",
        "`tools/list` again and again over Streamable HTTP (2025-11-25, JSON), 4 under way.",
        (Figure("cpu", "CPU µs of the server per `tools/list`"),),
    ),
    Section(
        "payloads",
        "Large arguments",
        "`echo` of long texts over Streamable HTTP (2025-11-25 or as told, JSON), so that each goes in and comes back."
        " Limits on the size of messages are raised for it where a server has any.",
        (CPU, RATE, PEAK),
    ),
    Section(
        "cold start",
        "Start",
        "From nothing to the first answer over stdio, with the bytecode cached.",
        (
            Figure("import", "import of what a server needs, CPU ms"),
            Figure("first-answer", "spawn to the answer to `initialize`, CPU ms"),
            Figure("first-answer-wall", "the same, wall-clock ms"),
            Figure("memory", "memory then, MiB"),
            Figure("installed", "installed with all it requires, MiB"),
            Figure("distributions", "distributions or packages installed"),
        ),
    ),
    Section(
        "cancelling",
        "Half of the calls cancelled",
        "As above with 64 under way, and every second call cancelled by the client soon after it was sent.",
        (Figure("cpu", "CPU µs of the server per call that was answered"), P99),
    ),
    Section(
        "slow reader",
        "A slow reader beside fast ones",
        "One session asks for 200,000 progress notifications and does not read them (Streamable HTTP, 2025-11-25, SSE)"
        " while another calls `echo`, 16 under way.",
        (
            Figure("p99-alone", "p99 of the others before it, ms"),
            Figure("p99", "p99 of the others beside it, ms"),
            Figure("held", "added to the server's memory, MiB"),
        ),
    ),
    Section(
        "idle",
        "Doing nothing",
        "A server over Streamable HTTP with one open session and nothing to do.",
        (Figure("cpu", "CPU ms per minute"),),
    ),
)


def _http(revision: str) -> str:
    return f"Streamable HTTP, {revision}{' session' if revision == LEGACY else ''}"


_PEERS = tuple(peer for peer in ORDER if peer not in (BEFORE, HYPERCORN, *COMPILED, FLOOR))
_COMMON = (OURS, MCP, FASTMCP, MCP_1, TYPESCRIPT)
_FEW = (OURS, MCP, TYPESCRIPT)

_CALLS = [
    Cell("stdio-2025", f"stdio, {LEGACY}", "calls"),
    Cell("stdio-2026", f"stdio, {MODERN}", "calls", revision=MODERN),
    *(
        Cell(
            f"http-{revision[:4]}-{reply}",
            f"{_http(revision)}, {reply.upper()} reply",
            "calls",
            road="http",
            revision=revision,
            reply=reply,
        )
        for revision in (LEGACY, MODERN)
        for reply in ("json", "sse")
    ),
    Cell("sse", "HTTP+SSE, 2024-11-05", "calls", road="sse", revision="2024-11-05"),
    Cell("websocket", f"WebSocket, {LEGACY}", "calls", road="websocket"),
    Cell(
        f"websocket-{UNDER_WAY}",
        f"WebSocket, {LEGACY}, {UNDER_WAY} connections",
        "calls",
        road="websocket",
        under_way=1,
        connections=UNDER_WAY,
    ),
]

_CLIENTS = [
    Cell(
        f"client-{name}-{under_way}",
        f"{title}, {under_way} under way",
        "clients",
        kind="client",
        road=road,
        revision=revision,
        reply="json" if road == "http" else None,
        server=server,
        under_way=under_way,
        peers=peers,
        warm_up=0.0,
        warm_calls=_WARM if road == "stdio" else _WARM // 4,
        overhead=1.5 if road == "stdio" else 0.4,
    )
    for name, title, road, revision, server, peers in (
        ("http-2026", _http(MODERN), "http", MODERN, FLOOR, (*_FEW, GO_SDK)),
        ("http-2025", _http(LEGACY), "http", LEGACY, FLOOR, (*_FEW, MCP_1, GO_SDK)),
        ("stdio", f"stdio, {LEGACY}", "stdio", LEGACY, FLOOR, (*_FEW, MCP_1, GO_SDK)),
        ("websocket", f"WebSocket, {LEGACY}, server of trimcp", "websocket", LEGACY, OURS, (OURS,)),
        ("http-foreign", f"{_http(MODERN)}, server of the TypeScript SDK", "http", MODERN, TYPESCRIPT, _FEW),
        ("stdio-foreign", f"stdio, {LEGACY}, server of the TypeScript SDK", "stdio", LEGACY, TYPESCRIPT, _FEW),
    )
    for under_way in ((UNDER_WAY,) if "foreign" in name else (UNDER_WAY, 1))
]

_MEMORY = [
    Cell("memory-1", "1 under way", "in memory", kind="memory", under_way=1, peers=(*_PEERS, *COMPILED), overhead=0),
    Cell("memory-64", "64 under way", "in memory", kind="memory", peers=(*_PEERS, *COMPILED), overhead=0),
]

_PROGRESS = [
    Cell(
        name,
        title,
        "progress",
        road=road,
        revision=revision,
        serve=None if road == "stdio" else "sse" if revision == LEGACY else "auto",
        words=("--tool", "stream", "--arg", f"n:={REPORTS}", "--expect", "done", "--progress"),
        under_way=1,
        reports=REPORTS,
        warm_calls=10 if road == "stdio" else 0,
        peers=(*_COMMON, *COMPILED),
    )
    for name, title, road, revision in (
        ("progress-stdio", f"stdio, {LEGACY}", "stdio", LEGACY),
        ("progress-http-2025", _http(LEGACY), "http", LEGACY),
        ("progress-http-2026", _http(MODERN), "http", MODERN),
    )
]

_WINDOWED: tuple[tuple[str, Road, str, tuple[str, ...]], ...] = (
    ("stdio", "stdio", "stdio", _FEW),
    ("http", "http", f"{_http(LEGACY)}, JSON", (*_FEW, FLOOR)),
    ("websocket", "websocket", "WebSocket, one connection", (OURS, MCP_1)),
    ("connections", "websocket", "WebSocket, a connection for each", (OURS, MCP_1)),
)
_WINDOWS = [
    Cell(
        f"window-{name}-{window}",
        f"{title}: {window:,}",
        "windows",
        road=road,
        reply="json" if road == "http" else None,
        under_way=window if name != "connections" else 1,
        connections=window if name == "connections" else 1,
        peers=peers,
        # The bars compare these two.
        beside=f"window-{name}" if window in COMPARED else "",
        collected=window in COMPARED,
        rounds=5 if window in COMPARED else 1,
        seconds=0.8 if window in COMPARED else 0.6,
        quick=window in COMPARED,
    )
    for name, road, title, peers in _WINDOWED
    for window in (COMPARED if name == "websocket" else WINDOWS)
]

_WORKERS = [
    Cell(
        f"workers-{workers}",
        f"{workers} worker{'s' * (workers > 1)}",
        "workers",
        road="http",
        revision=MODERN,
        reply="json",
        workers=workers,
        beside="workers",
        peers=(OURS,),
    )
    for workers in (1, 2)
]

_SESSIONS = [
    Cell(
        "sessions-1000",
        "1,000 sessions of Streamable HTTP",
        "sessions",
        kind="sessions",
        peers=_FEW,
        rounds=4,
        quick_rounds=2,
        overhead=7.0,
    ),
    Cell(
        "sessions-websocket-1000",
        "1,000 sessions of WebSocket",
        "sessions",
        kind="sessions",
        road="websocket",
        peers=(OURS, MCP_1),
        rounds=4,
        quick_rounds=2,
        overhead=7.0,
    ),
    Cell(
        "sessions-5000",
        "5,000 sessions of Streamable HTTP",
        "sessions",
        kind="sessions",
        peers=_FEW,
        rounds=1,
        quick=False,
        overhead=16.0,
    ),
    Cell(
        "sessions-sse-1000",
        "1,000 sessions of HTTP+SSE",
        "sessions",
        kind="sessions",
        peers=_FEW,
        rounds=1,
        quick=False,
        overhead=4.0,
    ),
]

_COME_AND_GO = [
    Cell(
        "come-and-go",
        _http(LEGACY),
        "come and go",
        kind="come and go",
        road="http",
        peers=(*_FEW, *COMPILED),
        overhead=2.0,
    )
]

_TOLD = [
    Cell(
        f"told-{subscribers}",
        f"{subscribers:,} subscribers",
        "told",
        kind="told",
        road="http",
        peers=(OURS, GO_SDK),
        quick_rounds=2,
        seconds=0.2,
        # Opening the sessions, shared by all rounds.
        overhead=subscribers / 2_000,
    )
    for subscribers in (1_000, 3_000)
]

_LISTS = [
    Cell(
        f"list-{count}",
        f"{count:,} tools",
        "lists",
        words=("--method", "tools/list"),
        # Over stdio a slow peer would register its thousand tools anew in each turn, for seconds.
        road="http",
        reply="json",
        under_way=4,
        least_bytes=count * 60,
        environment={"BENCH_TOOLS": str(count - 3)},  # beside those that are there anyway
        peers=(*_PEERS, GO_SDK) if count == 1000 else _COMMON,
        rounds=1 if count < 1000 else 5,
        seconds=1.0 if count < 1000 else 1.4,
        # A thousand tools take their time to register.
        overhead=1.0 if count < 1000 else 1.5,
        quick=count == 1000,
    )
    for count in (10, 100, 1000)
]

_PAYLOADS = [
    Cell(
        f"payload-{name}",
        title,
        "payloads",
        road="http",
        reply="json",
        payload=size,
        under_way=under_way,
        environment={"BENCH_MAX_MESSAGE": str(16 << 20)},
        peers=(*_COMMON, GO_SDK),
        rounds=1,
        seconds=2.0 if name == "5mb" else 1.0,
        quick=name != "100kb",
    )
    for name, title, size, under_way in (
        ("1kb", "1 KB", 1_000, 16),
        ("100kb", "100 KB", 100_000, 16),
        ("5mb", "5 MB", 5_000_000, 2),
    )
]

_PAYLOADS.append(
    Cell(
        "payload-256kb",
        f"256 KB, {MODERN}",
        "payloads",
        road="http",
        revision=MODERN,
        reply="json",
        payload=256_000,
        peers=(OURS, MCP, TYPESCRIPT, *COMPILED),
        under_way=16,
        seconds=1.0,
    )
)

_OF_GRPC = (OURS, *OF_GRPC)
_GRPC = [
    Cell(
        name,
        title,
        "grpc",
        kind="agent grpc",
        road="http",
        peers=(OURS, *OF_GRPC),
        rivals=(OURS, *OF_GRPC),
        overhead=8.0,
    )
    for name, title in (
        ("grpc-1", "a server, one call under way"),
        ("grpc-64", "a server, 64 calls under way"),
        ("grpc-stream", "a server, a stream of progress"),
        ("grpc-client", "a client, 64 calls under way"),
    )
]

_HTTP2 = [
    Cell(
        name,
        title,
        "http2",
        kind="http2 cost",
        road="http",
        revision=MODERN,
        peers=(OURS, HTTP1),
        rivals=(OURS, HTTP1),
        overhead=6.0,
    )
    for name, title in (
        ("http2-json", "Streamable HTTP, 2026-07-28, JSON reply"),
        ("http2-idle", "an idle connection"),
        ("http2-idle-stream", "a request whose body does not come"),
    )
]

_OTHERS = [
    Cell(
        "cold-start",
        "stdio server",
        "cold start",
        kind="cold start",
        peers=(*_PEERS, *COMPILED),
        rounds=5,
        quick_rounds=2,
        overhead=0,
    ),
    Cell(
        "cancel-stdio",
        "stdio",
        "cancelling",
        words=(*_ECHO, "--cancel", "0.5"),
        peers=_FEW,
        rounds=1,
    ),
    Cell(
        "cancel-http",
        _http(MODERN),
        "cancelling",
        road="http",
        revision=MODERN,
        words=(*_ECHO, "--cancel", "0.5"),
        peers=_FEW,
        rounds=1,
        quick=False,
    ),
    Cell(
        "slow-reader",
        "Streamable HTTP",
        "slow reader",
        kind="slow reader",
        road="http",
        reply="sse",
        under_way=16,
        peers=_COMMON,
        rounds=1,
        overhead=6.0,
    ),
    Cell("idle", "Streamable HTTP", "idle", kind="idle", road="http", peers=_COMMON, rounds=1, seconds=1.0),
]

# What bars are about comes first: where time runs short, it is the end that gets fewer rounds.
CELLS: list[Cell] = sorted(
    [
        *_CALLS,
        *_CLIENTS,
        *_MEMORY,
        *_PROGRESS,
        *_HTTP2,
        *_GRPC,
        *_WINDOWS,
        *_WORKERS,
        *_SESSIONS,
        *_COME_AND_GO,
        *_TOLD,
        *_LISTS,
        *_PAYLOADS,
        *_OTHERS,
    ],
    key=lambda cell: cell.rounds < 3,
)


def cell(name: str) -> Cell:
    """Return the cell of this name."""
    return next(one for one in CELLS if one.name == name)
