"""Several generators for one measurement: processes of one machine or several, which begin and end together.

One listens, gives each that joins its share of the plan, tells all when to begin, and merges what they report. Every
message is one line of JSON with a code that only who knows the shared secret can make; nothing in it is secret.
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import attrs
import trio

from trimcp.bench.plan import Plan
from trimcp.bench.report import Cost, Counts, Generator, Histogram, Report, Second, Slice
from trimcp.errors import ConnectionLost, LocalError
from trimcp.support.nurseries import open_service_nursery
from trimcp.watch.admin import Lines

_LONGEST: Final = 64 * 1024 * 1024  # bytes of a message: a report with its slices
_SHORT: Final = 4096  # bytes of one before the other side has shown that it knows the secret
_JOINING: Final = 60.0
_PINGS: Final = 8
_LEAD: Final = 0.3  # seconds from the order to begin to the beginning
_NUMBERS: Final = 1_000_000_000  # calls of one generator; the numbers of the next begin there


@attrs.define(eq=False)
class SignedLink:
    """A connection between two generators: JSON objects, each with a code that proves the secret, and in order."""

    _stream: trio.abc.Stream
    _secret: bytes = attrs.field(repr=False)
    _lines: Lines = attrs.field(init=False)
    _key: bytes = attrs.field(init=False, default=b"", repr=False)
    _role: bytes = attrs.field(init=False, default=b"")
    _sent: int = attrs.field(init=False, default=0)
    _received: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._lines = Lines(self._stream.receive_some, _SHORT)

    async def open(self, *, listening: bool) -> None:
        """Agree on a key. Raises ConnectionLost: the other side does not know the secret, or is gone."""
        own = secrets.token_hex(16)
        self._role = b"listen" if listening else b"join"
        await self._write(own.encode())
        other = (await self._line()).decode(errors="replace")
        both = (own + other) if listening else (other + own)
        self._key = hmac.digest(self._secret, both.encode(), "sha256")
        await self.send({"hello": 1})
        await self.receive(_SHORT)

    async def send(self, value: dict[str, Any]) -> None:
        """Send an object. Raises ConnectionLost."""
        text = json.dumps(value, allow_nan=False).encode()
        code = self._code(self._role, self._sent, text)
        self._sent += 1
        await self._write(code + b" " + text)

    async def receive(self, most: int = _LONGEST) -> dict[str, Any]:
        """Return the next object. Raises ConnectionLost: there is none, or it is not from whom it should be."""
        self._lines.most = most
        code, _, text = (await self._line()).partition(b" ")
        other = b"join" if self._role == b"listen" else b"listen"
        if not hmac.compare_digest(code, self._code(other, self._received, text)):
            raise ConnectionLost("the other side does not know the secret")
        self._received += 1
        value = json.loads(text)
        return value if isinstance(value, dict) else {}

    def _code(self, role: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, b"%b %d %b" % (role, number, text), "sha256").hex().encode()

    async def _write(self, line: bytes) -> None:
        try:
            await self._stream.send_all(line + b"\n")
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionLost("the connection was lost") from None

    async def _line(self) -> bytes:
        line = None
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            line = await self._lines.next()
        if line is None:
            raise ConnectionLost("the connection was lost")
        return line


# The plan and the reports


def share(plan: Plan, number: int, size: int) -> Plan:
    """Return the part of a plan for generator `number` of `size`, from 0."""
    if not plan.paced and plan.stages is None and plan.sessions < size:
        raise LocalError(f"{size} generators need at least as many --sessions; there are {plan.sessions}")

    if "change" in plan.steps:
        raise LocalError("changes take turns in one process, so that no notice is another's: one generator, no more")

    def part(whole: int) -> int:
        return whole // size + (number < whole % size)

    if plan.count is not None and plan.count < size:
        raise LocalError(f"{size} generators need a --count of at least as many calls")
    course = plan.course
    stages = None
    if course is not None:
        before = (0.0, *(at for at, _ in course.points[1:]))
        points = zip(before, course.points[1:], strict=False)
        stages = ",".join(f"{at - earlier:.6f}:{level / size:.6f}" for earlier, (at, level) in points)
    return attrs.evolve(
        plan,
        sessions=max(part(plan.sessions), 1),
        rate=None if plan.rate is None else plan.rate / size,
        count=None if plan.count is None else part(plan.count),
        warm_up_count=part(plan.warm_up_count),
        stages=stages,
        seed=plan.seed + number,
        pids=plan.pids if number == 0 else (),
        first_number=number * _NUMBERS,
    )


def merged(reports: Sequence[Report], plan: Plan) -> Report:
    """Return the sum of what generators measured at the same time."""
    first = reports[0]
    costs = [each.cost for each in reports if each.cost is not None]
    busiest = max(each.generator.busy for each in reports)
    replies = {each.reply for each in reports}
    return attrs.evolve(
        first,
        **Counts.added(reports),
        bytes_in=sum(each.bytes_in for each in reports),
        bytes_out=sum(each.bytes_out for each in reports),
        plan=plan,
        reply=first.reply if len(replies) == 1 else "mixed",
        seconds=max(each.seconds for each in reports),
        slices=(slices := _beside([each.slices for each in reports])),
        over_time=_seconds([each.over_time for each in reports], slices),
        cost=Cost(sum(c.cpu_seconds for c in costs), sum(c.rss for c in costs), sum(c.peak_rss for c in costs))
        if costs
        else None,
        generator=Generator(
            sum(each.generator.cpu_seconds for each in reports),
            first.generator.seconds,
            sum(each.generator.answers for each in reports),
            busiest,
            len(reports),
        ),
        interrupted=any(each.interrupted for each in reports),
    )


def _beside(slices: Sequence[Sequence[Slice]]) -> tuple[Slice, ...]:
    """Return slices of the same time as one each."""
    found = []
    for some in zip(*slices, strict=False):
        known = [each.rss for each in some if each.rss is not None]
        busy = sum(each.busy for each in some)
        found.append(Slice.merged(some, rss=sum(known) if known else None, busy=busy))
    return tuple(found)


def _seconds(courses: Sequence[Sequence[Second]], slices: Sequence[Slice]) -> tuple[Second, ...]:
    """Return the sums by second; percentiles where slices are short enough to tell."""
    whole: dict[int, list[Histogram]] = {}
    for each in slices:
        if each.seconds < 1.5:
            whole.setdefault(math.floor(each.start + each.seconds / 2), []).append(each.whole)
    found = []
    for number, some in enumerate(zip(*courses, strict=False)):
        times = Histogram.merged(whole.get(number, ()))
        calls, errors = sum(each.calls for each in some), sum(each.errors for each in some)
        found.append(Second(number, calls, errors, times.percentile(50), times.percentile(99)))
    return tuple(found)


# Listening


@attrs.define(eq=False)
class Team:
    """The generators of one measurement, as the listener sees them. Raises LocalError: the plan is too small."""

    _secret: bytes = attrs.field(repr=False)
    _size: int
    _plan: Plan
    _stop: trio.Event
    _say: Callable[[str], object] = lambda text: None  # told what happens
    skew: float = attrs.field(init=False, default=0.0)  # how far apart the beginnings may be, in seconds
    lost: list[str] = attrs.field(init=False, factory=list)  # who died, and why
    joined: int = attrs.field(init=False, default=0)
    _reports: dict[int, Report] = attrs.field(init=False, factory=dict)
    _ready: int = attrs.field(init=False, default=0)
    _all_ready: trio.Event = attrs.field(init=False, factory=trio.Event)
    _begin: float = attrs.field(init=False, default=0.0)
    _over: trio.Event = attrs.field(init=False, factory=trio.Event)
    _failure: str | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        for number in range(self._size):
            share(self._plan, number, self._size)  # raises LocalError

    async def run(self, listeners: Sequence[trio.SocketListener]) -> Report:
        """Wait for all generators, let them measure, and return the sum.

        Raises LocalError: one could not begin, or did not join in time. Whoever dies later is in `lost`.
        """
        async with open_service_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(trio.serve_listeners, self._serve, [listener])
            nursery.start_soon(self._limit_joining)
            await self._over.wait()
            nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise LocalError(self._failure)
        if not self._reports:
            raise LocalError("all generators died: " + "; ".join(self.lost))
        return merged([self._reports[number] for number in sorted(self._reports)], self._plan)

    def fail(self, why: str) -> None:
        """End, if nothing was measured yet: a generator cannot begin. Later it is one that died."""
        if not self._all_ready.is_set():
            self._failure = self._failure or why
            self._over.set()

    async def _limit_joining(self) -> None:
        with trio.move_on_after(_JOINING + self._plan.opening):
            await self._all_ready.wait()
            return
        self.fail(f"only {self.joined} of {self._size} generators joined and were ready in time")

    async def _serve(self, stream: trio.SocketStream) -> None:
        link = SignedLink(stream, self._secret)
        try:
            with trio.fail_after(_JOINING):
                await link.open(listening=True)
        except (ConnectionLost, trio.TooSlowError, ValueError):
            return  # a stranger
        if self.joined >= self._size:
            await self._tell(link, {"failed": "there are generators enough"})
            return
        number, self.joined = self.joined, self.joined + 1
        try:
            await self._conduct(link, number)
        except (ConnectionLost, LocalError, ValueError, KeyError, TypeError) as error:
            why = f"generator {number + 1} died: {error}"
            self.fail(why)
            self.lost.append(why)
        if len(self._reports) + len(self.lost) == self._size:
            self._over.set()

    async def _conduct(self, link: SignedLink, number: int) -> None:
        await link.send({"plan": share(self._plan, number, self._size).to_json()})
        said = await link.receive()
        if "failed" in said:
            self.fail(f"generator {number + 1}: {said['failed']}")
            return
        offset, skew = await _clock_offset(link)
        self.skew = max(self.skew, skew)
        self._ready += 1
        if self._ready == self._size:
            self._begin = trio.current_time() + _LEAD
            self._all_ready.set()
            self._say(f"all generators begin, within {1e3 * self.skew:.2f} ms of each other")
        await self._all_ready.wait()
        await link.send({"begin": self._begin + offset})
        async with open_service_nursery() as nursery:
            nursery.start_soon(self._pass_on_stop, link)
            self._reports[number] = Report.from_json((await link.receive())["report"])
            nursery.cancel_scope.cancel()

    async def _pass_on_stop(self, link: SignedLink) -> None:
        await self._stop.wait()
        await self._tell(link, {"stop": True})

    async def _tell(self, link: SignedLink, value: dict[str, Any]) -> None:
        try:
            await link.send(value)
        except ConnectionLost:
            return  # whoever receives from it says so


async def _clock_offset(link: SignedLink) -> tuple[float, float]:
    """Return how far the other side's clock is ahead of ours, and how wrong that may be, from the quickest of pings."""
    best = (0.0, math.inf)
    for _ in range(_PINGS):
        sent = trio.current_time()
        await link.send({"ping": True})
        theirs = float((await link.receive())["clock"])
        took = trio.current_time() - sent
        best = min(best, (theirs - sent - took / 2, took / 2), key=lambda each: each[1])
    return best


# Joining


async def join(
    stream: trio.abc.Stream,
    secret: bytes,
    measure: Callable[[Plan, Callable[[], Awaitable[None]], trio.Event], Awaitable[Report]],
    stop: trio.Event | None = None,
) -> Report:
    """Be a generator: measure what the listener says, and send it the report.

    `measure`: measures a plan; awaits its second argument once all sessions are open; ends early once the event is set,
    which is `stop` if that is given, and is set here too. Raises ConnectionLost: the listener is gone, or does not know
    the secret.
    """
    link = SignedLink(stream, secret)
    await link.open(listening=False)
    said = await link.receive()
    if "plan" not in said:
        raise LocalError(f"the listener refused: {said.get('failed', 'it has no plan'):.200}")
    stop = trio.Event() if stop is None else stop
    lost = list[ConnectionLost]()
    async with open_service_nursery() as nursery:

        async def listen() -> None:
            try:
                await link.receive()  # "stop"
            except ConnectionLost as error:
                lost.append(error)
            stop.set()

        async def gate() -> None:
            try:
                await link.send({"ready": True})
                while "begin" not in (order := await link.receive()):
                    await link.send({"clock": trio.current_time()})
            except ConnectionLost as error:
                lost.append(error)
                stop.set()
                return
            nursery.start_soon(listen)
            await trio.sleep_until(float(order["begin"]))

        try:
            report = await measure(Plan.from_json(said["plan"]), gate, stop)
        except Exception as error:
            await link.send({"failed": str(error)[:2000]})
            raise
        nursery.cancel_scope.cancel()
    if lost:
        raise lost[0]
    await link.send({"report": report.to_json()})
    return report
