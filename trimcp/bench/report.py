"""The results of a measurement: the report at its end, and snapshots meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final, Literal

import attrs

from trimcp.bench.plan import Plan
from trimcp.errors import LocalError

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9)
"""The percentiles that are shown of any times."""

_PER_FOLD: Final = 100  # buckets for each factor of e: one is 1 % wide
_LEAST: Final = 1e-8
_MOST: Final = 1e9
_ZERO: Final = 2_000  # makes every index positive, so that truncating rounds down: ln(_LEAST) is -18.4


@attrs.define(eq=False)
class Histogram:
    """Times in seconds. Percentiles have an error of at most 0.51 %; the four public numbers are exact, 0 if empty."""

    count: int = 0
    total: float = 0.0
    least: float = 0.0
    most: float = 0.0
    _buckets: Counter[int] = attrs.field(init=False, factory=Counter)

    def add(self, times: Sequence[float]) -> None:
        """Add times; those below 10 ns count as 10 ns."""
        if not times:
            return
        least, most = min(times), max(times)
        if least < _LEAST or most > _MOST:
            times = [min(max(each, _LEAST), _MOST) for each in times]
            least, most = min(times), max(times)
        log = math.log
        self._buckets.update([int(log(each) * _PER_FOLD + _ZERO) for each in times])
        self._extend(len(times), sum(times), least, most)

    def merge(self, other: Histogram) -> None:
        """Add all times of another histogram; nothing is lost by it."""
        if other.count:
            self._buckets.update(other._buckets)
            self._extend(other.count, other.total, other.least, other.most)

    @staticmethod
    def merged(histograms: Iterable[Histogram]) -> Histogram:
        """Return the sum of histograms."""
        whole = Histogram()
        for each in histograms:
            whole.merge(each)
        return whole

    @staticmethod
    def merged_by_label(tables: Iterable[Mapping[str, Histogram]]) -> dict[str, Histogram]:
        """Return for each label the sum of its histograms."""
        tables = list(tables)
        labels = dict.fromkeys(label for each in tables for label in each)
        return {label: Histogram.merged(each[label] for each in tables if label in each) for label in labels}

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values; bucket 2000 + n begins at exp(n / 100) seconds."""
        buckets = [[index, self._buckets[index]] for index in sorted(self._buckets)]
        return {"total": self.total, "min": self.least, "max": self.most, "buckets": buckets}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Histogram:
        """Return what `to_json` was called on."""
        made = Histogram()
        made._buckets.update({int(index): int(count) for index, count in value["buckets"]})
        if made._buckets:
            made._extend(sum(made._buckets.values()), float(value["total"]), float(value["min"]), float(value["max"]))
        return made

    def _extend(self, count: int, total: float, least: float, most: float) -> None:
        self.least = min(self.least, least) if self.count else least
        self.most = max(self.most, most)
        self.count += count
        self.total += total

    @property
    def mean(self) -> float | None:
        """The mean, or None if empty."""
        return self.total / self.count if self.count else None

    def percentile(self, percent: float) -> float | None:
        """Return the shortest time that this percentage of the times does not exceed, or None if empty.

        It is the time of rank ceil(percent / 100 * count): of 100 times the 99th percentile is the second largest.
        """
        if not self.count:
            return None
        # Rounding may make a product such as 0.999 * 1000 slightly larger than 999; ceil must not make it 1000.
        rank = max(1, math.ceil(round(percent / 100 * self.count, 6)))
        if rank >= self.count:
            return self.most
        if rank == 1:
            return self.least
        for index in sorted(self._buckets):
            rank -= self._buckets[index]
            if rank <= 0:
                return min(max(_edge(index + 0.5), self.least), self.most)
        raise AssertionError("the buckets hold all that was counted")

    @property
    def figures(self) -> dict[str, float | None]:
        """What is shown of it everywhere, by name; None if it is empty."""
        least, most = (self.least, self.most) if self.count else (None, None)
        return {"min": least, "mean": self.mean, **{f"p{p:g}": self.percentile(p) for p in PERCENTILES}, "max": most}

    @staticmethod
    def bars(histograms: Sequence[Histogram], most: int) -> tuple[list[float], list[list[float]]]:
        """Return the edges of at most `most` bars for all histograms, and for each histogram the shares in percent.

        Each bar has the same number of whole buckets; an empty bar is added at each end.
        """
        indexes = [index for each in histograms for index in each._buckets]
        if not indexes:
            return [], [[] for _ in histograms]
        width = max(1, math.ceil((max(indexes) + 1 - min(indexes)) / most))
        start = min(indexes) - width
        edges = list(range(start, max(indexes) + 1 + 2 * width, width))
        shares = []
        for each in histograms:
            shares.append([0.0] * (len(edges) - 1))
            for index, count in each._buckets.items():
                shares[-1][(index - start) // width] += 100 * count / each.count
        return [_edge(index) for index in edges], shares

    def buckets(self) -> Iterator[tuple[float, int]]:
        """Yield the upper edge and the count of each non-empty bucket, from the shortest times on."""
        for index in sorted(self._buckets):
            yield _edge(index + 1), self._buckets[index]


def _edge(index: float) -> float:
    return math.exp((index - _ZERO) / _PER_FOLD)


FORMAT: Final = 1
"""The version of the JSON of `Report.to_json`; it changes if names or units change."""

WireName = Literal["stdio", "http", "sse", "websocket", "grpc", "agents_http", "agents_websocket", "agents_grpc"]
"""What carries the messages; those of agent tools are messages of another protocol."""

_BUSY: Final = 0.8
_ENOUGH: Final = 10  # sequential calls: from here on those cut off at beginning and end hardly affect the rate
_MILLI: Final = 1e3
_ADDED: Final = ("calls", "after", "parts", "cancelled", "timed_out", "late", "uncut", "progress")
_PLAIN: Final = (
    *("target", "transport", "revision", "reply", "seconds", "calls", "after", "per_second", "rough"),
    *("bytes_in", "bytes_out", "cancelled", "timed_out", "late", "interrupted"),
)
"""The attributes that have the same name in the JSON."""
_MEBI: Final = 1024 * 1024


@attrs.define
class Failures:
    """The number of failures of one kind, and the text of the first: untrusted, made safe to show."""

    count: int
    example: str


def merged_failures(tables: Iterable[Mapping[str, Failures]]) -> dict[str, Failures]:
    """Return the sum by kind, each with the first example."""
    found: dict[str, Failures] = {}
    for kind, each in (item for table in tables for item in table.items()):
        found.setdefault(kind, Failures(0, each.example)).count += each.count
    return found


@attrs.define
class Replica:
    """What one of several servers behind a balancer answered."""

    times: Histogram = attrs.field(factory=Histogram, eq=False)  # of right answers
    errors: int = 0

    def merge(self, other: Replica) -> None:
        """Add what another measurement counted of it."""
        self.times.merge(other.times)
        self.errors += other.errors


@attrs.define(eq=False, kw_only=True)
class Counts:
    """What calls came to, while a measurement runs and in its report."""

    calls: int = 0  # calls answered rightly in its time
    after: int = 0  # calls answered rightly after it
    parts: float = 0.0  # the sum over all these calls of the share of each call's time that lies in that
    errors: dict[str, Failures] = attrs.field(factory=dict)  # by kind, a short text such as "wrong text"
    cancelled: int = 0  # calls cancelled midway as planned
    timed_out: int = 0  # calls abandoned because the response did not arrive in time
    late: int = 0  # calls of an open loop that began more than 10 ms after they should have, or not at all
    uncut: int = 0  # calls whose connection was to be cut, but that were answered before it could be
    progress: int = 0  # progress notifications received
    latency: Histogram = attrs.field(factory=Histogram, eq=False)  # the times of right answers
    requests: dict[str, Histogram] = attrs.field(factory=dict, eq=False)  # the times by request
    replicas: dict[str, Replica] = attrs.field(factory=dict)  # who answered, as `Plan.replica_by` says

    @staticmethod
    def added(some: Sequence[Counts]) -> dict[str, Any]:
        """Return by name what all of them have counted together. No time of a call is lost."""
        replicas: dict[str, Replica] = {}
        for name, replica in (item for each in some for item in each.replicas.items()):
            replicas.setdefault(name, Replica()).merge(replica)
        return {
            **{name: sum(getattr(each, name) for each in some) for name in _ADDED},
            "errors": merged_failures(each.errors for each in some),
            "latency": Histogram.merged(each.latency for each in some),
            "requests": Histogram.merged_by_label(each.requests for each in some),
            "replicas": replicas,
        }


@attrs.frozen
class Cost:
    """The resources that the server's processes used."""

    cpu_seconds: float  # CPU time of all of them while calls were counted
    rss: int  # bytes of resident memory at the end
    peak_rss: int  # the sum of their peaks of resident memory, in bytes


@attrs.frozen
class Generator:
    """The resources that this process used to produce the load."""

    cpu_seconds: float  # its CPU time while calls were counted
    seconds: float  # the wall-clock time meanwhile
    answers: int  # responses processed in that time, right or wrong
    busiest: float | None = None  # of several processes, the largest share of a core; None for one
    processes: int = 1

    @property
    def busy(self) -> float:
        """Its share of one core; of several processes the sum."""
        return self.cpu_seconds / self.seconds if self.seconds else 0.0

    @property
    def saturated(self) -> bool:
        """Whether it may have limited the rate, so that the server could be faster."""
        return (self.busy if self.busiest is None else self.busiest) > _BUSY

    @property
    def ceiling(self) -> float | None:
        """Estimated calls of this kind per second that it could make at most; None without any call."""
        return self.processes * self.answers / self.cpu_seconds if self.cpu_seconds and self.answers else None


@attrs.frozen
class Second:
    """One second of the measurement: its number from 0, right answers, failures, percentiles of the calls' times."""

    second: int
    calls: int
    errors: int
    p50: float | None
    p99: float | None


@attrs.frozen
class Slice:
    """A stretch of the measurement: what was answered in it, and what it cost.

    Slices say how much the figures vary within a measurement. At most 60 are kept: there each is two of the earlier.
    """

    start: float  # seconds from the beginning
    seconds: float
    times: dict[str, Histogram] = attrs.field(eq=False)  # of right answers, by request
    errors: Mapping[str, int]  # failures, by kind
    cpu: float | None = None  # CPU seconds of the server
    rss: int | None = None  # bytes of the server's resident memory at its end
    busy: float = 0.0  # the share of a core that the generator used
    lag: float = 0.0  # how late the generator's event loop came to its end, in seconds
    # `work_cpu`, `work`: CPU seconds and seconds that a fixed piece of work took: how fast and how free the machine was
    work_cpu: float = 0.0
    work: float = 0.0

    @property
    def whole(self) -> Histogram:
        """The times of all requests."""
        return Histogram.merged(self.times.values())

    @staticmethod
    def merged(some: Sequence[Slice], **changed: Any) -> Slice:
        """Return slices as one: the sum of what was counted, the worst lag, the rest as in the first or `changed`."""
        known = [each.cpu for each in some if each.cpu is not None]
        return attrs.evolve(
            some[0],
            times=Histogram.merged_by_label(each.times for each in some),
            errors=sum((Counter(each.errors) for each in some), Counter()),
            cpu=sum(known) if known else None,
            lag=max(each.lag for each in some),
            **changed,
        )

    def joined(self, later: Slice) -> Slice:
        """Return this slice and the next one as one."""
        seconds = self.seconds + later.seconds
        return Slice.merged(
            (self, later),
            seconds=seconds,
            rss=self.rss if later.rss is None else later.rss,
            busy=(self.busy * self.seconds + later.busy * later.seconds) / seconds if seconds else 0.0,
            work_cpu=min(self.work_cpu, later.work_cpu),
            work=(self.work + later.work) / 2,
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, with all times."""
        fields = {field.name: getattr(self, field.name) for field in attrs.fields(Slice)}
        return {**fields, "times": {label: times.to_json() for label, times in self.times.items()}}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Slice:
        """Return what `to_json` was called on."""
        times = {label: Histogram.from_json(each) for label, each in value["times"].items()}
        return Slice(**{**value, "times": times})


@attrs.frozen
class Snapshot:
    """The state during a measurement. Totals are so far, as in `Report`, unless they are about `seconds`."""

    elapsed: float  # seconds since the measurement began; negative during the warm-up
    share: float  # the part that is done, from 0 to 1
    seconds: float  # the time since the last snapshot
    calls: int
    times: Histogram = attrs.field(eq=False)  # the times of calls answered rightly in `seconds`
    errors: Mapping[str, int]
    cancelled: int
    timed_out: int
    late: int
    progress: int
    reported: int  # progress notifications in `seconds`
    under_way: int  # calls that wait for their response now
    sessions: int  # the number of open sessions
    busy: float  # the share of one core that this process used in `seconds`

    @property
    def warming_up(self) -> bool:
        """Whether counting has not begun."""
        return self.elapsed < 0

    @property
    def rate(self) -> float:
        """Calls answered rightly per second."""
        return self.times.count / self.seconds


@attrs.define(kw_only=True)
class Report(Counts):
    """The results of a measurement.

    A response after `seconds` is checked like any other, and a failure counts. A right one is not in `calls` nor in any
    rate, but its time is in `latency`, so that the slowest calls are not lost at the end.

    It has more than 20 fields because each is a figure of one measurement.
    """

    target: str  # the measured server, without secrets
    transport: WireName  # the transport of the messages
    revision: str  # the revision used, by its date; or "agent tools"
    # the kind of response over Streamable HTTP, "json" or "sse"; "mixed" for both, None elsewhere
    reply: Literal["json", "sse", "mixed"] | None
    # `server_name`, `server_version`: as the server declares them, or None. Untrusted text.
    server_name: str | None
    server_version: str | None
    plan: Plan  # the settings of the measurement
    seconds: float  # how long calls were counted
    # `bytes_in`, `bytes_out`: bytes received and sent in that time, including HTTP heads and WebSocket frames, without
    # TLS
    bytes_in: int
    bytes_out: int
    over_time: tuple[Second, ...]  # the results of each second
    cost: Cost | None  # the resources of the server's processes; None if they cannot be read
    generator: Generator  # the resources of this process
    interrupted: bool = False  # whether it was ended early
    slices: tuple[Slice, ...] = attrs.field(default=(), eq=False)  # what happened when
    environment: Mapping[str, Any] = attrs.field(factory=dict, eq=False)  # the machine of the generator, and when

    @property
    def rough(self) -> bool:
        """Whether fewer than ten sequential calls fit in `seconds`, so that the rate is an estimate."""
        if self.plan.count is not None:
            return False  # nothing is cut off
        if self.plan.paced:
            return not self.calls and self.after > 0
        return (self.latency.mean or 0.0) * _ENOUGH > self.seconds

    @property
    def counted(self) -> float:
        """The number of calls in `seconds`: `calls`, or `parts` if it is `rough`.

        How many of a few long calls end in time is chance: of five concurrent calls of 1.5 s each, 5 or 10 end in two
        seconds, which is 2.5 or 5 calls per second. With `parts` the rate is the right 3.33 in both cases.
        """
        return self.parts if self.rough else self.calls

    @property
    def per_second(self) -> float:
        """Calls answered rightly per second."""
        return self.counted / self.seconds if self.seconds else 0.0

    @property
    def progress_per_second(self) -> float:
        """Progress notifications per second."""
        return self.progress / self.seconds if self.seconds else 0.0

    @property
    def cpu_per_call(self) -> float | None:
        """CPU seconds of the server per call; None if unknown or without calls."""
        return self.cost.cpu_seconds / self.counted if self.cost is not None and self.counted else None

    @property
    def failures(self) -> int:
        """The number of failed calls of all kinds."""
        return sum(each.count for each in self.errors.values())

    @property
    def error_share(self) -> float:
        """The share of failures in all answers, from 0 to 1."""
        return self.failures / max(self.failures + self.calls, 1)

    @property
    def rss_growth(self) -> float | None:
        """Bytes of memory that the server gains per second in the second half of the measurement; None if unknown.

        It is the median slope between two moments, which single jumps do not move.
        """
        seen = [(each.start + each.seconds, each.rss) for each in self.slices if each.rss is not None]
        seen = [(at, rss) for at, rss in seen if at >= self.seconds / 2]
        slopes = [(b - a) / (till - at) for i, (at, a) in enumerate(seen) for till, b in seen[i + 1 :] if till > at]
        return median(slopes) if slopes else None

    @property
    def right(self) -> bool:
        """Whether there were answers and all were right. Calls cancelled as planned do not count."""
        return not self.errors and (self.calls > 0 or self.latency.count > 0 or self.cancelled + self.timed_out > 0)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; names include the units, and null is unknown."""
        cost, generator = self.cost, self.generator
        return {
            "format": FORMAT,
            "parts": self.parts,
            "server": {"name": self.server_name, "version": self.server_version},
            "plan": self.plan.to_json(),
            **{name: getattr(self, name) for name in _PLAIN},
            "errors": {kind: attrs.asdict(each) for kind, each in self.errors.items()},
            "latency_ms": {name: _ms(value) for name, value in self.latency.figures.items()},
            "histogram": [[edge * _MILLI, count] for edge, count in self.latency.buckets()],
            "over_time": [
                {**attrs.asdict(each), "p50": _ms(each.p50), "p99": _ms(each.p99)} for each in self.over_time
            ],
            "uncut": self.uncut,
            "progress": {"count": self.progress, "per_second": self.progress_per_second},
            "cost": cost
            and {
                "cpu_seconds": cost.cpu_seconds,
                "cpu_us_per_call": None if self.cpu_per_call is None else self.cpu_per_call * 1e6,
                "rss_mib": cost.rss / _MEBI,
                "peak_rss_mib": cost.peak_rss / _MEBI,
            },
            "generator": {
                **attrs.asdict(generator),
                "busy": generator.busy,
                "saturated": generator.saturated,
                "ceiling_per_second": generator.ceiling,
            },
            "requests": {label: times.to_json() for label, times in self.requests.items()},
            "replicas": {name: {**each.times.to_json(), "errors": each.errors} for name, each in self.replicas.items()},
            "slices": [each.to_json() for each in self.slices],
            "environment": dict(self.environment),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Report:
        """Return the report that `to_json` was called on. Raises LocalError: it is none, or of another format."""
        try:
            if value["format"] != FORMAT:
                raise LocalError(f"it has the format {value['format']!r:.20}, and this version reads {FORMAT}")
            return _report_from(value)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise LocalError(f"it does not hold the figures of a measurement: {error!r:.100}") from None


def _report_from(value: Mapping[str, Any]) -> Report:
    latency, cost, generator = value["latency_ms"], value["cost"], value["generator"]
    times = Histogram()
    for edge, count in value["histogram"]:
        times._buckets[round(math.log(edge / _MILLI) * _PER_FOLD) + _ZERO - 1] += int(count)
    if count := sum(times._buckets.values()):
        times._extend(count, latency["mean"] * count / _MILLI, latency["min"] / _MILLI, latency["max"] / _MILLI)
    seconds = [
        Second(each["second"], each["calls"], each["errors"], _seconds(each["p50"]), _seconds(each["p99"]))
        for each in value["over_time"]
    ]
    return Report(
        **{name: value[name] for name in _PLAIN if name not in ("per_second", "rough")},
        parts=float(value.get("parts", value["calls"])),
        server_name=value["server"]["name"],
        server_version=value["server"]["version"],
        plan=Plan.from_json(value["plan"]),
        errors={kind: Failures(each["count"], each["example"]) for kind, each in value["errors"].items()},
        latency=times,
        over_time=tuple(seconds),
        uncut=value.get("uncut", 0),
        progress=value["progress"]["count"],
        cost=cost and Cost(cost["cpu_seconds"], round(cost["rss_mib"] * _MEBI), round(cost["peak_rss_mib"] * _MEBI)),
        generator=Generator(**{field.name: generator[field.name] for field in attrs.fields(Generator)}),
        requests={label: Histogram.from_json(each) for label, each in value.get("requests", {}).items()},
        replicas={
            name: Replica(Histogram.from_json(each), each["errors"]) for name, each in value.get("replicas", {}).items()
        },
        slices=tuple(map(Slice.from_json, value.get("slices", ()))),
        environment=value.get("environment", {}),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / _MILLI


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * _MILLI
