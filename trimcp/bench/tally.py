"""The counts of a measurement: right answers with their times, failures by kind, in total and per second.

Sans-I/O: the caller passes the time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any, Final

import attrs

from trimcp.bench.report import Counts, Failures, Histogram, Replica, Second, Slice
from trimcp.support.cleaning import one_line

LATE: Final = 0.010
"""Seconds of delay after which a call of an open loop begins late."""

_KEPT: Final = 4096  # times kept before they are added to the histogram
_KINDS: Final = 40
_LONGEST: Final = 200
_STEP: Final = 0.5
_LABELS: Final = 100  # requests whose times are counted apart
_OTHERS: Final = "others"
_SLICES: Final = 60
_SLICE: Final = 0.25


@attrs.define(eq=False)
class Tally(Counts):
    """The counts of one measurement that runs.

    Right answers, cancellations and progress count from `begin` to `end`; failures always count, also in the warm-up.

    It has more than 20 fields because each is counted by itself while calls end.
    """

    # Declared again because they are set here: type checkers ask for that.
    calls: int = 0
    after: int = 0
    parts: float = 0.0
    cancelled: int = 0
    timed_out: int = 0
    progress: int = 0

    failed: int = 0  # the sum of `errors`
    answers: int = 0  # responses to calls between `begin` and `end`, right or wrong
    # `bytes_in`, `bytes_out`: bytes since `begin`
    bytes_in: int = 0
    bytes_out: int = 0
    moved: tuple[int, int] = (0, 0)  # what they were at the end
    mean: float = 0.0
    """The exponentially weighted mean of recent answer times, in seconds; 0 before the first."""
    began: float = math.inf
    ended: float = math.inf
    slice_length: float = attrs.field(init=False, default=_SLICE)  # seconds after which `cut` should be called again
    _slices: list[Slice] = attrs.field(init=False, factory=list)
    _slice: dict[str, Histogram] = attrs.field(init=False, factory=dict)
    _slice_errors: Counter[str] = attrs.field(init=False, factory=Counter)
    _cut_at: float = attrs.field(init=False, default=0.0)
    _times: defaultdict[str, list[float]] = attrs.field(init=False, factory=lambda: defaultdict(list))
    _recent: Histogram = attrs.field(init=False, factory=Histogram)
    _recently_reported: int = attrs.field(init=False, default=0)
    _second: Histogram = attrs.field(init=False, factory=Histogram)
    _second_failed: int = attrs.field(init=False, default=0)
    _seconds: list[Second] = attrs.field(init=False, factory=list)
    _next: float = attrs.field(init=False, default=math.inf)

    @property
    def counting(self) -> bool:
        """Whether the measurement has begun and not ended."""
        return self.began < math.inf and self.ended == math.inf

    def begin(self, now: float) -> None:
        """Count from now on."""
        self._recent, self._recently_reported = Histogram(), 0
        self.began = self._cut_at = now
        self.bytes_in = self.bytes_out = 0
        self._next = now + 1.0

    def end(self, now: float) -> None:
        """Stop counting; later answers only add to `after`, `parts` and `latency`."""
        self._catch_up(now)
        self._flush()
        if not self._seconds or now - self.began - len(self._seconds) >= _STEP:
            self._close_second()
        else:  # the end is slightly late; the rest is not a second of its own
            last = self._seconds[-1]
            calls, errors = last.calls + self._second.count, last.errors + self._second_failed
            self._seconds[-1] = attrs.evolve(last, calls=calls, errors=errors)
        self.ended, self.moved = now, (self.bytes_in, self.bytes_out)
        self._next = math.inf

    # Outcomes of calls

    def right(self, seconds: float, now: float, label: str = "") -> None:
        """Count a right answer to the request of this label, `seconds` after the call should have begun."""
        self.mean += (seconds - self.mean) * (0.05 if self.mean else 1.0)
        if now < self.began:
            return
        begun = now - seconds
        if self.ended < math.inf:
            self.latency.add([seconds])
            self._by_label(self.requests, label).add([seconds])
            self.after += 1
            if begun < self.ended:
                self.parts += (self.ended - max(begun, self.began)) / seconds
            return
        if now >= self._next:
            self._catch_up(now)
        self.calls += 1
        self.parts += 1.0 if begun >= self.began else (now - self.began) / seconds
        self.answers += 1
        times = self._times[label]
        times.append(seconds)
        if len(times) >= _KEPT:
            self._flush()

    def wrong(self, kind: str, example: Any, now: float) -> None:
        """Count a failure; the first example of each kind is kept, made safe to show."""
        if now >= self._next:
            self._catch_up(now)
        self.failed += 1
        if self.counting:
            self.answers += 1
            self._second_failed += 1
        kind = one_line(kind, 60)
        if kind not in self.errors and len(self.errors) >= _KINDS:
            kind = "other"
        if self.counting:
            self._slice_errors[kind] += 1
        if kind in self.errors:
            self.errors[kind].count += 1
        else:
            self.errors[kind] = Failures(1, one_line(example if isinstance(example, str) else repr(example), _LONGEST))

    def reported(self, count: int) -> None:
        """Count progress notifications."""
        if self.counting:
            self.progress += count
            self._recently_reported += count

    def observe(self, label: str, seconds: float) -> None:
        """Add a time that is no call's to the table of requests, and to nothing else."""
        if self.counting:
            self._by_label(self.requests, label).add([seconds])

    def answered_by(self, replica: str, seconds: float | None, now: float) -> None:
        """Count an answer by who gave it: a right one, `seconds` after its call was due, or with None a failure."""
        if seconds is not None and now < self.began:
            return
        replica = one_line(replica, 60)
        if replica not in self.replicas and len(self.replicas) >= _LABELS:
            replica = _OTHERS
        own = self.replicas.setdefault(replica, Replica())
        if seconds is None:
            own.errors += 1
        else:
            own.times.add([seconds])

    def given_up(self, *, timeout: bool) -> None:
        """Count an abandoned call: timed out, or cancelled as planned."""
        if not self.counting:
            return
        if timeout:
            self.timed_out += 1
        else:
            self.cancelled += 1

    def cut(self, now: float, **figures: Any) -> None:
        """End a slice, with the figures of `Slice` that others know; when there are many, make two into one each."""
        self._catch_up(now)
        self._flush()
        if now <= self._cut_at:
            return
        start, seconds = self._cut_at - self.began, now - self._cut_at
        self._slices.append(Slice(start, seconds, self._slice, dict(self._slice_errors), **figures))
        self._slice, self._slice_errors, self._cut_at = {}, Counter(), now
        if len(self._slices) >= 2 and seconds < self.slice_length / 2:  # the rest at the end is none of its own
            self._slices[-2:] = [self._slices[-2].joined(self._slices[-1])]
        if len(self._slices) >= _SLICES:
            self._slices = [one.joined(other) for one, other in zip(*[iter(self._slices)] * 2, strict=True)]
            self.slice_length *= 2

    # Reading the counts

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices that were cut."""
        return tuple(self._slices)

    def take_recent(self, now: float) -> tuple[Histogram, int]:
        """Return the times of right answers and the number of notifications since the last call of this method."""
        self._catch_up(now)
        self._flush()
        recent = self._recent, self._recently_reported
        self._recent, self._recently_reported = Histogram(), 0
        return recent

    @property
    def over_time(self) -> tuple[Second, ...]:
        """The completed seconds."""
        return tuple(self._seconds)

    def _flush(self) -> None:
        for label, times in self._times.items():
            if not times:
                continue
            fresh = Histogram()
            fresh.add(times)
            times.clear()
            own = self._by_label(self.requests, label), self._by_label(self._slice, label)
            for each in (self._second, self.latency, self._recent, *own):
                each.merge(fresh)

    def _by_label(self, table: dict[str, Histogram], label: str) -> Histogram:
        if label not in table:
            label = label if label in self.requests or len(self.requests) < _LABELS else _OTHERS
        return table.setdefault(label, Histogram())

    def _catch_up(self, now: float) -> None:
        """Complete the seconds that have ended by now."""
        while now >= self._next:
            self._flush()
            self._close_second()
            self._next += 1.0

    def _close_second(self) -> None:
        times = self._second
        p50, p99 = times.percentile(50), times.percentile(99)
        self._seconds.append(Second(len(self._seconds), times.count, self._second_failed, p50, p99))
        self._second, self._second_failed = Histogram(), 0
