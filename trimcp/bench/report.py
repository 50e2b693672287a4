"""What a measurement found: the whole at its end, and how things stand meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from trimcp.bench.histogram import Histogram
from trimcp.bench.plan import Plan

FORMAT: Final = 1
"""Which form of JSON `Report.to_json` gives; another number means that names or units have changed."""

WireName = Literal["stdio", "http", "sse", "websocket"]

_BUSY: Final = 0.8
_ENOUGH: Final = 10  # calls, one after the other: then those cut off by beginning and end hardly move the rate
_MILLI: Final = 1e3
_PLAIN: Final = (
    *("target", "transport", "revision", "reply", "seconds", "calls", "after", "per_second", "rough"),
    *("bytes_in", "bytes_out", "cancelled", "timed_out", "late", "interrupted"),
)
"""What is in the JSON under its own name."""
_MEBI: Final = 1024 * 1024


@attrs.define
class Failures:
    """How many failures of one kind there were, and what the first said: untrusted text, made safe to show."""

    count: int
    example: str


@attrs.frozen
class Cost:
    """What the server's processes took.

    Attributes:
        cpu_seconds: CPU time of all of them while calls were counted.
        rss: bytes of memory they held in the end.
        peak_rss: bytes of the most each ever held, added up.
    """

    cpu_seconds: float
    rss: int
    peak_rss: int


@attrs.frozen
class Generator:
    """What producing the load took of this process.

    Attributes:
        cpu_seconds: its CPU time while calls were counted.
        seconds: the wall clock's time meanwhile.
        answers: replies it dealt with in that time, right or wrong.
    """

    cpu_seconds: float
    seconds: float
    answers: int

    @property
    def busy(self) -> float:
        """Its share of one core."""
        return self.cpu_seconds / self.seconds if self.seconds else 0.0

    @property
    def saturated(self) -> bool:
        """Whether it may have been what limited the rate, so that the server could do more."""
        return self.busy > _BUSY

    @property
    def ceiling(self) -> float | None:
        """How many calls per second it could make of this kind, by what each took; None without any."""
        return self.answers / self.cpu_seconds if self.cpu_seconds and self.answers else None


@attrs.frozen
class Second:
    """One second of the measurement: its number from 0, right answers, failures, percentiles of the calls' times."""

    second: int
    calls: int
    errors: int
    p50: float | None
    p99: float | None


@attrs.frozen
class Snapshot:
    """How things stand, some time after the last one. What is not of `seconds` is so far, as in `Report`.

    Attributes:
        elapsed: seconds since the measurement began; negative while the server is warming up.
        share: how much of it is done, from 0 to 1.
        seconds: since the last snapshot.
        times: of calls answered rightly in `seconds`.
        reported: notifications of progress in `seconds`.
        under_way: calls that wait for their answer now.
        sessions: how many are open.
        busy: the share of one core that producing the load took in `seconds`.
    """

    elapsed: float
    share: float
    seconds: float
    calls: int
    times: Histogram = attrs.field(eq=False)
    errors: Mapping[str, int]
    cancelled: int
    timed_out: int
    late: int
    progress: int
    reported: int
    under_way: int
    sessions: int
    busy: float

    @property
    def warming_up(self) -> bool:
        """Whether nothing is counted yet."""
        return self.elapsed < 0

    @property
    def rate(self) -> float:
        """Calls answered rightly per second."""
        return self.times.count / self.seconds


@attrs.frozen
class Report:
    """What a measurement found.

    What was answered after `seconds` is checked like everything else, and a failure counts; but it is no longer one
    of the `calls`, and so in no rate. Its time is among `latency`: the slowest must not be lost at the end.

    Attributes:
        target: what was measured, as one may show it: secrets left out.
        transport: what carried the messages.
        revision: the revision spoken, by its date.
        reply: how a server over Streamable HTTP answered; "mixed" if in both ways, None elsewhere.
        server_name, server_version: what the server calls itself, or None. Untrusted text.
        plan: what was to be done.
        seconds: how long calls were counted.
        calls: how many were answered rightly in that time.
        after: how many were answered rightly after it.
        parts: all of these, each as the part of its time that lies in `seconds`.
        bytes_in, bytes_out: bytes received and sent in that time, with HTTP's heads and WebSocket's frames, without
            TLS.
        errors: failed calls by kind; a kind is a few words, such as "wrong text".
        cancelled: calls given up midway because the plan wanted it.
        timed_out: calls given up because their answer did not come in time.
        late: calls of an open loop that began more than 10 ms after they should have, or not at all.
        latency: the times of right answers.
        over_time: second by second.
        progress: notifications of progress received.
        cost: of the server's processes; None where they cannot be read.
        generator: of this process.
        interrupted: whether it was ended before its time.
    """

    target: str
    transport: WireName
    revision: str
    reply: Literal["json", "sse", "mixed"] | None
    server_name: str | None
    server_version: str | None
    plan: Plan
    seconds: float
    calls: int
    after: int
    parts: float
    bytes_in: int
    bytes_out: int
    errors: Mapping[str, Failures]
    cancelled: int
    timed_out: int
    late: int
    latency: Histogram = attrs.field(eq=False)
    over_time: tuple[Second, ...]
    progress: int
    cost: Cost | None
    generator: Generator
    interrupted: bool = False

    @property
    def rough(self) -> bool:
        """Whether fewer than ten calls, one after the other, fit in `seconds`, so that the rate is an estimate."""
        if self.plan.count is not None:
            return False  # nothing is cut off
        if self.plan.rate is not None:
            return not self.calls and self.after > 0
        return (self.latency.mean or 0.0) * _ENOUGH > self.seconds

    @property
    def counted(self) -> float:
        """The calls that `seconds` had room for: `calls`, or where it is `rough` their `parts`.

        Of few long calls it is chance how many end in time: five at once that take 1.5 s each end twice or once in
        two seconds, which is 5 or 2.5 calls a second. Their parts give the right 3.33 either way.
        """
        return self.parts if self.rough else self.calls

    @property
    def per_second(self) -> float:
        """Calls answered rightly per second."""
        return self.counted / self.seconds if self.seconds else 0.0

    @property
    def progress_per_second(self) -> float:
        """Notifications of progress per second."""
        return self.progress / self.seconds if self.seconds else 0.0

    @property
    def cpu_per_call(self) -> float | None:
        """CPU seconds of the server for each call; None where they or the calls are not known."""
        return self.cost.cpu_seconds / self.counted if self.cost is not None and self.counted else None

    @property
    def failures(self) -> int:
        """How many calls failed, of any kind."""
        return sum(each.count for each in self.errors.values())

    @property
    def right(self) -> bool:
        """Whether there were answers and all of them right. Calls given up on purpose do not count against it."""
        return not self.errors and (self.calls > 0 or self.latency.count > 0 or self.cancelled + self.timed_out > 0)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; the names say the units, and null is what is not known."""
        latency = self.latency
        return {
            "format": FORMAT,
            "server": {"name": self.server_name, "version": self.server_version},
            "plan": self.plan.to_json(),
            **{name: getattr(self, name) for name in _PLAIN},
            "errors": {kind: attrs.asdict(each) for kind, each in self.errors.items()},
            "latency_ms": {
                "min": _ms(latency.least if latency.count else None),
                "mean": _ms(latency.mean),
                **{f"p{percent:g}": _ms(latency.percentile(percent)) for percent in (50, 90, 99, 99.9)},
                "max": _ms(latency.most if latency.count else None),
            },
            "histogram": [[edge * _MILLI, count] for edge, count in latency.buckets()],
            "over_time": [
                {**attrs.asdict(each), "p50": _ms(each.p50), "p99": _ms(each.p99)} for each in self.over_time
            ],
            "progress": {"count": self.progress, "per_second": self.progress_per_second},
            "cost": self.cost
            and {
                "cpu_seconds": self.cost.cpu_seconds,
                "cpu_us_per_call": None if self.cpu_per_call is None else self.cpu_per_call * 1e6,
                "rss_mib": self.cost.rss / _MEBI,
                "peak_rss_mib": self.cost.peak_rss / _MEBI,
            },
            "generator": {
                "cpu_seconds": self.generator.cpu_seconds,
                "busy": self.generator.busy,
                "saturated": self.generator.saturated,
                "ceiling_per_second": self.generator.ceiling,
            },
        }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * _MILLI
